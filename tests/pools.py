"""Staging pools, servers and readers of tests."""

import os
import shutil
import signal
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
import torch

from oasis_hf.disagg import Lease, Memory, StagingPool, Terms, Tls
from oasis_hf.disagg.nixl import VERSION

SECRET = b"an unguessable secret of the tests"
TERMS = Terms("0.1.0", "tiny", {"page_bytes": 4096, "dtype": "float32"})
DIM = 32
PAGE = 4096
FOREVER = 1e9


def has_nixl():
    try:
        return version("nixl-cu13") == VERSION
    except PackageNotFoundError:
        return False


needs_nixl = pytest.mark.skipif(not has_nixl(), reason=f"nixl-cu13=={VERSION} is not installed")


def staging(capacity=64, **kwargs):
    pool = StagingPool(capacity, DIM, torch.float32, **kwargs)
    assert pool.page_bytes == PAGE
    return pool


def filled(pool, request="r", pages=None, handle=b"handle", seed=0):
    """A published request of random bytes. Gives its page numbers, its generation and the bytes `[pages, PAGE]`."""
    at, generation = pool.reserve(request, pool.free if pages is None else pages)
    content = np.random.default_rng(seed).integers(0, 256, (len(at), PAGE), np.uint8)
    pool.pool.pages.view(torch.uint8).view(pool.capacity, PAGE)[at] = torch.from_numpy(content)
    pool.publish(request, handle)
    return at.numpy(), generation, content


def memory(pages):
    return Memory(torch.full((pages * PAGE,), 7, dtype=torch.uint8))


def lease(generation, request="r"):
    return Lease(request, generation, FOREVER, FOREVER, time.monotonic() + FOREVER)


LONG = 60.0
"""Seconds that a test may wait for what takes a moment: the machine may be slow and busy."""


def until(condition, seconds=LONG):
    """Waits for a condition; fails where it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


class Clock:
    """A pool's: the real one, and as far ahead as a test sets it."""

    ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


def stop(pid):
    """Stops a process, all threads of it: the signal alone returns before they stand."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(") T " in stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")))


def certificates(folder, name="node"):
    """A self-signed certificate that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    return Tls(cert, key, cert)
