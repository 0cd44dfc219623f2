"""`eval/engines.py`: every way reads the right bytes, and what is made of its times."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from pools import has_nixl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import engine_ways  # noqa: E402
import engines  # noqa: E402
import report_engines as report  # noqa: E402
from engine_ways import BARE, NIXL, SOCKETS, TCP, Way  # noqa: E402


def row(way, transports="", kib=64, count=1000, ms=10.0, server=0.01):
    return {
        "way": way, "transports": transports, "kib": kib, "count": count, "bytes": kib * 1024 * count, "rounds": 9,
        "best_s": ms / 1e3, "median_s": ms / 1e3, "client_cpu_s_a_gb": 0.2, "server_cpu_s_a_gb": server,
    }  # fmt: skip


@pytest.mark.slow
def test_the_script_over_loopback(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "TRANSPORTS", ("tcp,cma",))
    monkeypatch.setattr(sys, "argv", ["engines.py", "--quick", "--out", str(tmp_path)])
    engines.main()
    result = json.loads((tmp_path / "engines.json").read_text())
    ways = {(one["way"], one["transports"]) for one in result["rows"]}
    nixl = {(what, transports) for what in (BARE, NIXL) for transports in engines.TRANSPORTS} if has_nixl() else set()
    assert ways == {(SOCKETS, ""), (TCP, "")} | nixl
    assert len(result["rows"]) == 2 * len(ways) and {one["kib"] for one in result["rows"]} == {4, 64}
    for one in result["rows"]:
        assert 0 < one["best_s"] <= one["median_s"] and one["client_cpu_s_a_gb"] > 0 and one["rounds"] == 2
        assert one["server_cpu_s_a_gb"] > 0 or "cma" in one["transports"]
    assert (tmp_path / "engines.md").read_text() == report.markdown(result)
    assert str(tmp_path) not in (tmp_path / "engines.json").read_text()


class Reader:
    def __init__(self, right):
        self.right, self.asked = right, []

    def send(self, asked):
        self.asked.append(asked)

    def poll(self, seconds):
        return True

    def recv(self):
        return {"s": 0.1 * len(self.asked), "client_cpu_s": 0.01, "server_cpu_s": 0.02, "right": self.right}


def test_a_wrong_byte_ends_the_run_and_the_first_read_does_not_count():
    with pytest.raises(RuntimeError, match="ours: tcp: bytes of 100 blocks of 4 KiB are not those of the pool"):
        engines.cell({Way(TCP): Reader(False)}, 4, 100, 3, 0)
    some = {Way(SOCKETS): Reader(True), Way(TCP): Reader(True)}
    told = engines.cell(some, 4, 100, 3, 7)
    assert [one.asked for one in some.values()] == [[(4096, 100, 7 + turn) for turn in range(4)]] * 2
    for one in told:  # the reads that count took 0.2, 0.3 and 0.4 s
        assert one["rounds"] == 3 and one["best_s"] == pytest.approx(0.2) and one["median_s"] == pytest.approx(0.3)
        assert one["server_cpu_s_a_gb"] == pytest.approx(0.02 / 409_600 * 1e9)


def test_readers_notice_what_is_not_the_pool_s(monkeypatch):
    """The comparison itself: a reader that brings other blocks."""
    import multiprocessing

    import numpy as np

    pool = np.arange(4 * 8192 // 8).view(np.uint8)
    monkeypatch.setattr(engine_ways.Pool, "mapped", lambda self: pool)

    def reader(of):
        def made(memory, where, settings):
            def read(wanted, block):
                memory[: len(wanted) * block] = pool.reshape(-1, block)[of(wanted)].reshape(-1)

            return read

        return made

    def stopped(code):
        raise SystemExit

    monkeypatch.setattr(engine_ways.os, "_exit", stopped)
    for of, right in ((lambda wanted: wanted, True), (lambda wanted: wanted[::-1], False)):
        monkeypatch.setitem(engine_ways._READERS, TCP, reader(of))
        here, there = multiprocessing.Pipe()
        here.send((4096, 8, 1))
        here.send(None)
        with pytest.raises(SystemExit):
            engine_ways.read_blocks(
                there, Way(TCP), engine_ways.Pool(0, 0, 0), None, engine_ways.os.getpid(), "", 1 << 16
            )
        assert here.recv()["right"] is right


def test_bars_over_loopback():
    earlier = report.EARLIER["tcp,cma"][64, 1000]
    took = 65536 * 1000 / (earlier * 1e6) * 1e3  # ms at exactly the earlier figure
    rows = [row(SOCKETS, ms=took * 1.5), row(BARE, "tcp,cma", ms=took), row(NIXL, "tcp,cma", ms=took * 1.2)]
    rows.append(row(NIXL, "tcp,cma", 4, 77, ms=9.0))  # a cell that nothing stands beside
    found = {bar["what"]: bar for bar in report.bars({"mbit": 0, "rows": rows})}
    assert [bar["met"] for bar in found.values()] == [True] * 4
    assert found["NIXL tcp,cma, least share of the earlier figure, best reads: 64 KiB x 1,000"]["measured"] == (
        pytest.approx(1 / 1.2)
    )
    assert found["NIXL tcp,cma against sockets, median: 64 KiB x 1,000"]["measured"] == pytest.approx(1.25)
    rows[2] = row(NIXL, "tcp,cma", ms=took * 1.6, server=0.03)
    assert [bar["met"] for bar in report.bars({"mbit": 0, "rows": rows})] == [False] * 4


def test_bars_over_a_link():
    nominal = 65536 * 1000 / 125e6 * 1e3
    rows = [row(SOCKETS, ms=nominal), row(NIXL, "tcp", ms=nominal / 0.96), row(TCP, ms=nominal / 0.9)]
    result = {"mbit": 1000, "pool_mib": 512, "rows": rows}
    result["bars"] = report.bars(result)
    assert [bar["measured"] for bar in result["bars"]] == [pytest.approx(share) for share in (0.96, 0.96, 0.9, 0.9)]
    assert [bar["met"] for bar in result["bars"]] == [True, True, False, False]
    assert "| ours: nixl tcp | 546.13 |" in report.markdown(result) and "MISSED" in report.markdown(result)


def test_rates_and_cells():
    assert engines.rate("1gbit") == 1000 and engines.rate("400mbit") == 400
    with pytest.raises(argparse.ArgumentTypeError, match="'1 Gbit' is not allowed: use a rate such as 1gbit"):
        engines.rate("1 Gbit")
    assert set(engines.cells(False)) == set(report.EARLIER["tcp"]) == set(report.EARLIER["tcp,cma"])
    assert all("cma" not in way.transports for way in engines.ways(True))
