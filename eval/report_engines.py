"""Tables and bars of `engines.py`."""

from __future__ import annotations

from engine_ways import BARE, NIXL, SOCKETS, TCP
from report_tables import Row, bar
from report_tables import markdown as tables

EARLIER = {
    "tcp": {(4, 100): 412, (4, 1000): 723, (4, 10000): 748, (16, 100): 1645, (16, 1000): 1137, (16, 10000): 769,
            (64, 100): 2436, (64, 1000): 1196, (64, 8192): 1178},
    "tcp,cma": {(4, 100): 1034, (4, 1000): 1193, (4, 10000): 971, (16, 100): 2241, (16, 1000): 2245,
                (16, 10000): 2232, (64, 100): 3558, (64, 1000): 4249, (64, 8192): 4155},
}  # fmt: skip
"""MB/s, best of up to three rounds, by (KiB, blocks): bare NIXL, measured for issue E on 2026-11-29, before this
package had an engine. Two contended cores, 512 MiB region, random distinct blocks, loopback, UCX's TCP segments at 64k,
as here. Another machine is another figure: compare with bare NIXL in the same run too."""

SHARE = 0.8
"""Least share of a figure."""

FILLED = {64: 0.95, 4: 0.88}
"""Least share of a link by KiB a block."""

SERVER_CPU = 0.02
"""Most processor seconds a GB of a server whose bytes the kernel copies."""


def name(row: Row) -> str:
    return f"{row['way']} {row['transports']}".strip()


def speed(row: Row, what: str = "best_s") -> float:
    """MB/s."""
    return row["bytes"] / row[what] / 1e6


def line(row: Row) -> str:
    return (
        f"{row['kib']:3d} KiB x {row['count']:<6d}{name(row):22s} {row['best_s'] * 1e3:8.2f} / "
        f"{row['median_s'] * 1e3:8.2f} ms {speed(row):7.0f} / {speed(row, 'median_s'):6.0f} MB/s  CPU s/GB "
        f"{row['client_cpu_s_a_gb']:.2f} + {row['server_cpu_s_a_gb']:.3f}"
    )


def beside(result: Row, row: Row, way: str) -> Row | None:
    """Another way's row of the same cell: of the same transports, where it has any."""
    for other in result["rows"]:
        if (other["way"], other["kib"], other["count"]) == (way, row["kib"], row["count"]) and (
            not other["transports"] or other["transports"] == row["transports"]
        ):
            return other
    return None


def shares(result: Row, row: Row) -> dict[str, float | None]:
    """How fast a row is against the earlier figure, bare NIXL and sockets in the same run (best and median), and the
    link."""
    figure = EARLIER.get(row["transports"], {}).get((row["kib"], row["count"])) if not result["mbit"] else None
    out: dict[str, float | None] = {"earlier": speed(row) / figure if figure and row["way"] == NIXL else None}
    for what, way in (("bare", BARE), ("sockets", SOCKETS)):
        other = beside(result, row, way) if row["way"] in (NIXL, TCP) else None
        for of in ("best", "median"):
            out[f"{what}_{of}"] = None if other is None else other[f"{of}_s"] / row[f"{of}_s"]
    out["link"] = speed(row, "median_s") / (result["mbit"] / 8) if result["mbit"] else None
    return out


def bars(result: Row) -> list[Row]:
    return _link_bars(result) if result["mbit"] else _loopback_bars(result)


def _loopback_bars(result: Row) -> list[Row]:
    out = []
    told = [(row, shares(result, row)) for row in result["rows"] if row["way"] == NIXL]
    for transports in dict.fromkeys(row["transports"] for row, _ in told):
        for what, of in (("earlier", "the earlier figure, best reads"), ("bare_median", "bare NIXL, median reads")):
            own = [(share[what], row) for row, share in told if row["transports"] == transports and share[what]]
            if own:
                least, row = min(own, key=lambda one: one[0])
                out.append(bar(f"NIXL {transports}, least share of {of}: {_cell(row)}", least, SHARE))
    for row, share in told:
        if row["transports"] == "tcp,cma" and row["kib"] == 64 and row["count"] >= 1000:
            out.append(bar(f"NIXL tcp,cma against sockets, median: {_cell(row)}", share["sockets_median"] or 0, 1))
            server = row["server_cpu_s_a_gb"]
            out.append(bar(f"its server's CPU s/GB: {_cell(row)}", server, SERVER_CPU, at_most=True))
    return out


def _link_bars(result: Row) -> list[Row]:
    out = []
    for row in result["rows"]:
        if row["way"] in (NIXL, TCP) and row["kib"] in FILLED:
            share = shares(result, row)
            for what, of in (("sockets_median", "what plain sockets reach"), ("link", "the link's rate")):
                out.append(bar(f"{name(row)}, share of {of}: {_cell(row)}", share[what] or 0, FILLED[row["kib"]]))
    return out


def _cell(row: Row) -> str:
    return f"{row['kib']} KiB x {row['count']:,}"


def markdown(result: Row) -> str:
    where = f"a link of {result['mbit']:,} Mbit/s" if result["mbit"] else "one host"
    head = ["block x count", "way", "best ms", "median ms", "best MB/s", "median MB/s", "client CPU s/GB",
            "server CPU s/GB"]  # fmt: skip
    of = ["link"] if result["mbit"] else ["earlier"]
    of += ["bare_best", "bare_median", "sockets_median"]
    titles = {"link": "of the link", "earlier": "of the earlier figure", "bare_best": "of bare NIXL, best",
              "bare_median": "median", "sockets_median": "of sockets, median"}  # fmt: skip
    rows = []
    for row in result["rows"]:
        share = shares(result, row)
        rows.append([
            _cell(row), name(row), f"{row['best_s'] * 1e3:.2f}", f"{row['median_s'] * 1e3:.2f}", f"{speed(row):,.0f}",
            f"{speed(row, 'median_s'):,.0f}", f"{row['client_cpu_s_a_gb']:.2f}", f"{row['server_cpu_s_a_gb']:.3f}",
            *("" if (told := share[one]) is None else f"{told:.2f}" for one in of),
        ])  # fmt: skip
    verdicts = [
        [one["what"], f"{one['measured']:.3f}", f"{one['bar']:g}", "met" if one["met"] else "MISSED"]
        for one in result["bars"]
    ]
    about = (
        f"Random distinct blocks of a pool of {result['pool_mib']} MiB, over {where}; the ways read in turn, and every "
        "byte is compared. CPU: mean of the reads, of a process and all its threads."
    )
    if not result["mbit"]:
        about += " The earlier figures are of bare NIXL, best of three reads on another day (`report_engines.EARLIER`)."
    parts = [f"# Engines over {where}", about, *tables([("", [*head, *(titles[one] for one in of)], rows)])]
    parts += tables([("Bars", ["bar", "measured", "", ""], verdicts)] if verdicts else [])
    return "\n\n".join(parts) + "\n"
