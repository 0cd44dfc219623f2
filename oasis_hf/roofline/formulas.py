"""The paper's arithmetic: intensity and roofs, a step's time, its byte budget, the first token, what fits.

The paper's equations are quoted from summaries of it (arXiv 2608.08097); where one had to be found from the figures
that it gives, its docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import BLOCK, ConfigError
from .hardware import MOST, Hardware, check_count, check_number
from .shape import ModelShape

METHODS = {
    "dense": "hbm", "sparse": "hbm", "on demand": "link", "prefetch": "link", "remote prefetch": "network",
}  # fmt: skip
"""Ways to decode, and the roof over each: the full KV on the GPU and all read; on the GPU, the chosen blocks read;
the full KV in host memory, fetched before attention, or beside the step before; the same from another machine."""

SUMMARIES = 1 / 16
"""Bytes of summaries as a share of the full KV: two vectors for the 32 of a block (paper, section 4.2). Our int8 ones
of 8 tokens take 1/15.75."""


@dataclass(frozen=True)
class Load:
    """What is decoded.

    Args:
        rows: sequences of a batch.
        context: tokens of each.
        active: tokens that a KV head attends to in a step, the working set.
        fetch: share of them that a step fetches.
        summaries: bytes of summaries as a share of the full KV; 0 leaves them out.

    Raises:
        ConfigError: a value that is not allowed.
    """

    rows: int = 1
    context: int = 16384
    active: int = 2064
    fetch: float = 0.05
    summaries: float = SUMMARIES

    def __post_init__(self) -> None:
        for name in ("rows", "context", "active"):
            check_count(name, getattr(self, name))
        check_number("fetch", self.fetch, 0, 1)
        check_number("summaries", self.summaries, 0, 1, low_ok=True)

    @property
    def attended(self) -> int:
        """Tokens that a head attends to: all of a context shorter than the working set."""
        return min(self.active, self.context)


@dataclass(frozen=True)
class Step:
    """One decode step by the model.

    kv_bytes: of K, V and summaries read from GPU memory, over all rows; weight_bytes: of weights; moved_bytes: over the
    link or network; compute: seconds of `2 * weights * rows` operations; bandwidth: of its roof, in bytes a second.
    """

    method: str
    rows: int
    kv_bytes: float
    weight_bytes: float
    moved_bytes: float
    compute: float
    hbm: float
    bandwidth: float

    @property
    def base(self) -> float:
        """Seconds without what is moved: GPU memory or arithmetic, whichever is slower."""
        return max((self.kv_bytes + self.weight_bytes) / self.hbm, self.compute)

    @property
    def transfer(self) -> float:
        """Seconds on the link or network."""
        return self.moved_bytes / self.bandwidth

    @property
    def seconds(self) -> float:
        """Time per output token (TPOT): transfers wait in line on demand, and run beside the step when prefetched."""
        return self.base + self.transfer if self.method == "on demand" else max(self.base, self.transfer)

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def intensity(self) -> float:
        """Tokens for each byte of KV that goes under the step's roof (token-KV intensity, paper, Fig. 1)."""
        return self.rows / (self.kv_bytes if METHODS[self.method] == "hbm" else self.moved_bytes)

    @property
    def bound(self) -> float:
        """Tokens a second at most: intensity times bandwidth."""
        return self.intensity * self.bandwidth

    @property
    def overhead(self) -> float:
        """What fetching adds, as a share of the step without it."""
        return self.seconds / self.base - 1

    @property
    def waiting(self) -> float:
        """What fetching adds, as a share of the step with it (what the paper's Fig. 2 gives, see `on_demand`)."""
        return 1 - self.base / self.seconds


def step(shape: ModelShape, hardware: Hardware, load: Load, method: str) -> Step:
    """A decode step by one of `METHODS`. Raises `ConfigError` for another name.

    Bytes: dense reads `rows * cache(context)`; the others `rows * (attended * kv_token + summaries of the context)`
    and the sliding-window layers; those that fetch move `rows * fetch * attended * kv_token` more.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is not known: use one of {', '.join(METHODS)}.")
    devices = hardware.devices
    token, resident = shape.kv_token(devices), shape.resident(load.context, devices)
    read: float = load.context * token
    if method != "dense" and load.attended < load.context:
        read = load.attended * token + load.summaries * load.context * token
    fetches = METHODS[method] != "hbm"
    return Step(
        method, load.rows,
        kv_bytes=load.rows * (read + resident),
        weight_bytes=shape.weights_read(load.rows),
        moved_bytes=load.rows * load.fetch * load.attended * token if fetches else 0.0,
        compute=load.rows * shape.flops_token / hardware.flops,
        hbm=hardware.hbm,
        bandwidth=getattr(hardware, METHODS[method]),
    )  # fmt: skip


def on_demand(shape: ModelShape, hardware: Hardware, rows: int, active: int, fetch: float = 0.1) -> Step:
    """Retrieval before attention, as the paper's Fig. 2 estimates it: `active` tokens attended to, no summaries.

    Its "TPOT overhead" of 52-64% at 4K active tokens and 78% at 8K and 64 rows comes out as `Step.waiting` for the
    shape of Qwen3-32B on an H100 (3.35 TB/s, 64 GB/s), 4K being 16 and 32 rows. As a share of the step without it
    (`Step.overhead`) the same steps take 109-180% and 354% longer.
    """
    return step(shape, hardware, Load(rows, active, active, fetch, summaries=0.0), "on demand")


def token_budget(hardware: Hardware, seconds: float) -> float:
    """Bytes that the link can bring while a step runs: `C_token = B_link * T_decode` (paper, section 3.2)."""
    check_number("seconds", seconds, 0, float("inf"))
    return hardware.link * seconds


def budget_tokens(shape: ModelShape, hardware: Hardware, rows: int, seconds: float) -> float:
    """`C_token` as newly active tokens a row and step; a sixteenth of it is the highest fetch cap C in blocks that a
    step of `seconds` hides."""
    check_count("rows", rows)
    return token_budget(hardware, seconds) / (rows * shape.kv_token(hardware.devices))


def block_budget(shape: ModelShape, hardware: Hardware, rows: int, seconds: float) -> int:
    """`budget_tokens` as whole blocks a KV head."""
    return int(budget_tokens(shape, hardware, rows, seconds) / BLOCK)


def admission(shape: ModelShape, load: Load, devices: int = 1) -> float:
    """Bytes a row that partial fetching sends to the decoding machine before its first step: the working set and the
    summaries (paper, section 4.4), at most the full KV. One working set for all heads: a union over heads is larger."""
    token = shape.kv_token(devices)
    part = load.attended * token + load.summaries * load.context * token + shape.resident(load.context, devices)
    return min(part, shape.cache(load.context, devices))


def first_token(
    shape: ModelShape, hardware: Hardware, context: int, hit: float, moved: float, extra: float = 0.0,
    efficiency: float = 0.6,
) -> float:  # fmt: skip
    """Seconds to the first token where another machine prefills (paper, Fig. 15).

        prefill_flops of the `1 - hit` of the prompt that is new / (efficiency * flops) + moved / network + extra

    Args:
        hit: share of the prompt whose KV was there before; it is sent all the same.
        moved: bytes that cross the network first: `ModelShape.cache(context)`, or `admission`.
        extra: seconds more. Partial fetching runs one decode step on the prefilling machine and selects.
        efficiency: share of the card's operations that a prefill reaches. This default and an `extra` of 35 ms are
            fitted to the four figures that the paper gives; it says of neither what it took.
    """
    check_count("context", context)
    check_number("hit", hit, 0, 1, low_ok=True)
    check_number("efficiency", efficiency, 0, 1)
    new = max(1, round((1 - hit) * context))
    compute = shape.prefill_flops(new, context) / (efficiency * hardware.flops)
    return compute + moved / hardware.network + extra


# -- what fits ------------------------------------------------------------------------------------------------------


def row_bytes(shape: ModelShape, load: Load, method: str, devices: int = 1) -> tuple[float, float]:
    """Bytes that one row takes of GPU memory and of host memory, which for "remote prefetch" is the other machine's."""
    full = shape.cache(load.context, devices)
    if METHODS[method] == "hbm":
        return full + (load.summaries * load.context * shape.kv_token(devices) if method == "sparse" else 0), 0
    return admission(shape, load, devices), load.context * shape.kv_token(devices)


def fits(shape: ModelShape, hardware: Hardware, load: Load, method: str, reserve: float = 0.1) -> bool:
    """Whether the weights and all rows fit, `reserve` of the GPU memory being left for all else."""
    check_number("reserve", reserve, 0, 1, low_ok=True)
    gpu, host = row_bytes(shape, load, method, hardware.devices)
    room = hardware.capacity * (1 - reserve) - shape.weights
    return load.rows * gpu <= room and load.rows * host <= hardware.host


def largest_rows(shape: ModelShape, hardware: Hardware, load: Load, method: str, reserve: float = 0.1) -> int:
    """Most rows of the load's context that fit; 0 where none does."""
    return _largest(lambda rows: fits(shape, hardware, _with(load, rows=rows), method, reserve))


def largest_context(shape: ModelShape, hardware: Hardware, load: Load, method: str, reserve: float = 0.1) -> int:
    """Longest context, in tokens, at which the load's rows fit; 0 where none does. No model's own limit counts."""
    return _largest(lambda context: fits(shape, hardware, _with(load, context=context), method, reserve))


def host_rows(shape: ModelShape, hardware: Hardware, context: int) -> float:
    """Rows whose full KV the host memory holds, before anything else is in it (paper, section 3.3); not rounded."""
    return hardware.host / (context * shape.kv_token(hardware.devices))


def _with(load: Load, rows: int | None = None, context: int | None = None) -> Load:
    return Load(rows or load.rows, context or load.context, load.active, load.fetch, load.summaries)


def _largest(good: Callable[[int], bool]) -> int:
    """The largest integer up to `MOST` that is good, all smaller ones being good too."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
