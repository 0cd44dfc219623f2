"""`eval/namespaces.py`: two ends, a link between them, its rate and its counter."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import namespaces  # noqa: E402


def allowed():
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"oasis-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not allowed(), reason="network namespaces can't be made here")


def sends(pipe, end, size):
    with socket.create_server((end.address, 0)) as listener:
        pipe.send(listener.getsockname())
        sock, _ = listener.accept()
    while pipe.recv():
        sock.sendall(bytes(size))


def takes(pipe, end, address, size):
    sock = socket.create_connection(tuple(address))
    while pipe.recv():
        before, start = namespaces.received(end.device), time.monotonic()
        pipe.send("ready")
        left = size
        while left:
            left -= len(sock.recv(min(left, 1 << 16)))
        pipe.send((namespaces.received(end.device) - before, time.monotonic() - start))


@needs_namespaces
def test_a_link_counts_and_is_held_to_its_rate():
    size = 4_000_000
    with namespaces.joined() as (node, reader):
        there, one = namespaces.start(node, sends, node, size)
        here, other = namespaces.start(reader, takes, reader, namespaces.heard(there, 120), size)
        try:
            for mbit in (0, 100):
                if mbit:
                    namespaces.hold_to(node, mbit)
                here.send(True)
                namespaces.heard(here, 120)
                there.send(True)
                received, seconds = namespaces.heard(here, 120)
                assert size <= received < size * 1.1
                assert not mbit or seconds > 0.8 * size * 8 / (mbit * 1e6)
        finally:
            namespaces.stop(one)
            namespaces.stop(other)
    assert node.namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def ends(pipe):
    pipe.close()


def test_a_process_that_ends_is_told_of():
    pipe, process = namespaces.start(namespaces.LOOPBACK, ends)
    with pytest.raises(SystemExit, match="A process of the measurement ended; its messages say why"):
        namespaces.heard(pipe, 120)
    namespaces.stop(process)


def test_where_namespaces_are_not_allowed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"`ip` \(iproute2\) is not here"), namespaces.joined():
        pass
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "ip").chmod(0o755)
    with pytest.raises(SystemExit, match=r"ip netns add oasis-node-\d+: Operation not permitted. .* need root"), (
        namespaces.joined()
    ):  # fmt: skip
        pass
