"""The CUDA `select`, integers throughout: bit for bit the reference, and lower blocks first among equal scores."""

from __future__ import annotations

import math

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK
from oasis_hf.ops import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
INF = math.inf
NO_SHARING = (None, None, None, 1.0)
STATE = ("table", "last_selected", "fresh", "counts", "wasted")


def ranked(scores):
    """Scores without ties that say what the operator promises for these: equal ones by block, NaN like -inf."""
    scores = scores.nan_to_num(-INF, INF, -INF)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(-1, order, torch.arange(scores.shape[-1]).expand_as(order))
    return torch.where(scores > -INF, -place.double(), -INF)


def make_scores(kind, shape, random):
    scores = torch.randn(shape, generator=random)
    some = torch.rand(shape, generator=random)
    if kind == "softmax":
        return (3 * scores).softmax(-1)
    if kind == "ties":
        return scores.mul(2).round()  # both zeros among them
    if kind == "near":
        return 1 + torch.randint(300, shape, generator=random) * 2.0**-23
    if kind == "equal":
        return torch.ones(shape)
    if kind == "infinite":  # more certain blocks than slots
        return torch.where(some < 0.5, INF, scores)
    if kind == "extreme":
        big = torch.finfo(torch.float32).max
        return torch.where(some < 0.1, -INF, torch.where(some < 0.5, -big, big * scores.sign()))
    if kind == "nan":
        return torch.where(some < 0.3, math.nan, torch.where(some < 0.5, -math.nan, scores))
    if kind == "empty":
        return torch.full(shape, -INF)
    assert kind == "normal"
    return scores


class Case:
    """A working set on the CPU. resident: the share of slots that hold a block; steady: these are mostly the best."""

    def __init__(self, rows, heads, blocks, slots, kind="normal", resident=1.0, steady=True, age=9, seed=0):
        self.random = random = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.kind, self.blocks = rows, heads, kind, blocks
        closed = torch.randint(blocks // 2, blocks + 1, (rows,), generator=random)
        closed[0] = blocks
        if rows > 1:
            closed[-1] = 0
        into = torch.randint(BLOCK, (rows,), generator=random)
        self.lengths = closed * BLOCK + into
        self.scores = self.new_scores()
        self.table = torch.full((rows, heads, slots), -1)
        keep = math.ceil(resident * slots)
        for b in range(rows):
            for h in range(heads):
                score = ranked(self.scores[b, h]) if steady else torch.rand(blocks, generator=random)
                score = score + torch.randn(blocks, generator=random) * blocks / 20
                held = score[: closed[b]].topk(min(keep, int(closed[b]))).indices
                if into[b] and keep:
                    held = torch.cat((closed[b : b + 1], held))[:keep]
                self.table[b, h, torch.randperm(slots, generator=random)[: len(held)]] = held
        self.last_selected = torch.randint(-1, age, self.table.shape, generator=random)
        self.order = torch.randperm(slots, generator=random)
        self.fresh = (torch.rand(self.table.shape, generator=random) < 0.3) & (self.table >= 0)
        self.counts = torch.randint(9, (3, heads), generator=random)
        self.wasted = torch.randint(9, (heads,), generator=random)
        self.step = torch.tensor(age + 1)

    def new_scores(self):
        scores = make_scores(self.kind, (self.rows, self.heads, self.blocks), self.random)
        exists = torch.arange(self.blocks) < (self.lengths // BLOCK).unsqueeze(-1)
        return scores.masked_fill(~exists.unsqueeze(1), -INF)

    def select(self, cap, sharing=NO_SHARING):
        """The reference, on this state; averages have no ties, so that no rank has to stand for a score."""
        scores = self.scores if sharing[2] is not None else ranked(self.scores)
        args = scores, self.table, self.last_selected, self.lengths, self.order, cap, self.step, *sharing
        plan_block, plan_slot, counts = reference.select(*args)
        admitted = plan_block >= 0
        old = self.fresh.gather(2, plan_slot)
        self.fresh.scatter_(2, plan_slot, old | admitted)
        self.counts += counts
        self.wasted += (old & admitted).sum((0, 2))
        return plan_block, plan_slot


class OnGpu:
    """The same state on the device, and the operator with all that it can do."""

    def __init__(self, case):
        for name in (*STATE, "lengths", "order", "step"):
            setattr(self, name, getattr(case, name).to(DEVICE))
        self.scores = case.scores.to(DEVICE)

    def select(self, cap, plan=None, sharing=NO_SHARING):
        from oasis_hf.ops import cuda  # builds the operators: not at collection

        shape = (*self.table.shape[:2], min(cap, self.table.shape[2]))
        plan_block, plan_slot = plan or (torch.full(shape, -99, device=DEVICE) for _ in range(2))
        cuda.extension().select(
            self.scores, self.table, self.last_selected, self.lengths, self.order, self.step, self.fresh, plan_block,
            plan_slot, self.counts, self.wasted, *sharing, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return plan_block, plan_slot

    def check(self, case, want, got):
        plan_block, plan_slot = (t.cpu() for t in got)
        assert torch.equal(plan_block, want[0])
        admitted = plan_block >= 0
        assert torch.equal(plan_slot[admitted], want[1][admitted])
        ascending = plan_slot.sort(-1).values
        assert ((ascending >= 0) & (ascending < case.table.shape[2])).all()
        assert (ascending.diff() > 0).all(), "gather needs different slots"
        for name in STATE:
            assert torch.equal(getattr(self, name).cpu(), getattr(case, name)), name


def check_steps(case, cap, steps=3):
    gpu = OnGpu(case)
    for _ in range(steps):
        gpu.check(case, case.select(cap), gpu.select(cap))
        case.scores = case.new_scores()
        case.step += 1
        gpu.scores = case.scores.to(DEVICE)
        gpu.step += 1


@pytest.mark.parametrize("kind", ["normal", "softmax", "ties", "near", "equal", "infinite", "extreme", "nan", "empty"])
@pytest.mark.parametrize("cap", [6, 129])
def test_kinds_of_scores(kind, cap):
    check_steps(Case(3, 3, 1000, 129, kind, seed=cap), cap)


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("cap", [1, 6, 65])
def test_residents_from_none_to_all(resident, steady, cap):
    check_steps(Case(4, 2, 500, 65, "softmax", resident, steady, age=3, seed=cap), cap)


@pytest.mark.parametrize(
    "rows, heads, blocks, slots, cap, kind",
    [
        (64, 8, 1024, 129, 6, "softmax"),  # production
        (64, 8, 1024, 129, 129, "softmax"),  # its first selection
        (2, 1, 1, 1, 1, "normal"),
        (2, 3, 1, 8, 8, "normal"),
        (3, 7, 7, 5, 9, "ties"),
        (2, 1, 33, 32, 32, "normal"),
        (2, 2, 257, 256, 200, "ties"),
        (2, 2, 2000, 513, 70, "softmax"),
        (2, 1, 5000, 2048, 2048, "normal"),
        (2, 1, 9000, 4096, 205, "softmax"),
        (2, 2, 16384, 129, 6, "softmax"),
        (2, 2, 16385, 129, 6, "softmax"),  # read again from L2
        (2, 1, 40001, 1025, 1025, "ties"),
        (1, 1, 1 << 18, 4096, 4096, "near"),
    ],
)
def test_sizes(rows, heads, blocks, slots, cap, kind):
    check_steps(Case(rows, heads, blocks, slots, kind, steady=slots < 1000, seed=blocks), cap, 2)


@pytest.mark.parametrize(
    "rows, heads, blocks, slots, cap",
    [(44, 8, 1024, 129, 26), (3, 3, 1000, 129, 6), (2, 2, 300, 65, 65), (4, 1, 33, 17, 3), (1, 2, 16385, 129, 13)],
)
def test_shares_of_a_budget(rows, heads, blocks, slots, cap):
    """Own caps, averages and promises, all to the bit; `means` and `gains` are wider than what is looked at."""
    case = Case(rows, heads, blocks, slots, "softmax", seed=blocks)
    caps = torch.randint(cap + 1, (rows, heads), generator=case.random).int()
    gains = torch.rand((rows, heads, cap + 3), generator=case.random)
    means = torch.rand((rows, heads, blocks + 5), generator=case.random) - 0.3
    gpu, on = OnGpu(case), [one.to(DEVICE) for one in (caps, gains, means)]
    for _ in range(3):
        want = case.select(cap, (caps, gains, means, 0.3))
        gpu.check(case, want, gpu.select(cap, None, (*on, 0.3)))
        assert all(torch.equal(one.cpu(), its) for one, its in zip(on, (caps, gains, means), strict=True))
        case.scores = case.new_scores()
        case.scores[..., 0].masked_fill_(case.scores[..., 0] > -INF, INF)  # what is always kept
        case.step += 1
        gpu.scores = case.scores.to(DEVICE)
        gpu.step += 1


def test_a_cap_for_all_is_no_cap_of_their_own():
    case = Case(3, 2, 500, 65, "softmax")
    gpu, other = OnGpu(case), OnGpu(case)
    every = torch.full((3, 2), 5, dtype=torch.int32, device=DEVICE)
    one, same = gpu.select(5), other.select(5, None, (every, None, None, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True)) and torch.equal(gpu.table, other.table)


def test_random_cases():
    random = torch.Generator().manual_seed(1)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    kinds = ["normal", "softmax", "ties", "infinite", "extreme"]
    for seed in range(150):
        slots, kind = draw(1, 300), kinds[draw(0, 4)]
        case = Case(
            draw(1, 3), draw(1, 3), draw(1, 700), slots, kind, draw(0, 4) / 4, draw(0, 1) == 1, draw(1, 99), seed
        )
        check_steps(case, draw(1, slots + 2), 2)


def test_exactly_as_many_blocks_as_are_predicted_or_admitted_and_the_lowest_scores():
    lowest = torch.finfo(torch.float32).min
    for slots, cap in ((6, 5), (9, 5), (5, 5), (6, 6), (129, 5)):
        case = Case(1, 1, 10, slots, resident=0.0)
        case.scores = torch.tensor([[[-INF, lowest, lowest, -1e38, -INF, lowest, -2e38, -INF, -INF, -INF]]])
        gpu = OnGpu(case)
        gpu.check(case, case.select(cap), gpu.select(cap))


def test_the_registered_operator_and_the_same_bits_twice():
    case = Case(5, 8, 1024, 129, "ties", steady=False)
    runs = []
    for _ in range(3):
        table, last, order = (t.to(DEVICE) for t in (case.table, case.last_selected, case.order))
        scores, lengths, step = (t.to(DEVICE) for t in (case.scores, case.lengths, case.step))
        plan_block, plan_slot, counts = ops.select(scores, table, last, lengths, order, 200, step)
        assert plan_block.shape == plan_slot.shape == (5, 8, 129)
        runs.append((plan_block, plan_slot, counts, table, last))
    before = case.counts.clone()
    want_block, _ = case.select(200)
    assert torch.equal(runs[0][0].cpu(), want_block)
    assert torch.equal(runs[0][2].cpu(), case.counts - before)
    assert torch.equal(runs[0][3].cpu(), case.table) and torch.equal(runs[0][4].cpu(), case.last_selected)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_nothing_is_written_beyond_the_arguments_and_null_arguments_are_left_alone():
    from oasis_hf.ops import cuda

    case = Case(3, 2, 77, 33, "softmax", steady=False)
    gpu = OnGpu(case)
    want_block, want_slot = case.select(7)

    def framed(tensor):  # a piece of a larger buffer
        whole = torch.full((tensor.numel() + 64,), -5, dtype=tensor.dtype, device=DEVICE)
        inner = whole[32:-32].view(tensor.shape)
        return whole, inner.copy_(tensor)

    state = [gpu.table, gpu.last_selected, torch.full_like(want_block, -99), torch.full_like(want_block, -99)]
    wholes, (table, last, plan_block, plan_slot) = zip(*(framed(t) for t in state), strict=True)
    counts = torch.zeros_like(gpu.counts)
    cuda.extension().select(
        gpu.scores, table, last, gpu.lengths, gpu.order, gpu.step, None, plan_block, plan_slot, counts, None,
        *NO_SHARING, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    assert torch.equal(plan_block.cpu(), want_block) and torch.equal(table.cpu(), case.table)
    assert torch.equal(plan_slot.cpu()[want_block >= 0], want_slot[want_block >= 0])
    assert torch.equal(last.cpu(), case.last_selected)
    for whole in wholes:
        assert (whole[:32] == -5).all() and (whole[-32:] == -5).all()


def test_replayed_in_a_graph_with_the_step_on_the_device():
    case = Case(4, 8, 600, 65, "softmax", steady=False)
    gpu = OnGpu(case)
    plan = tuple(torch.full((4, 8, 3), -99, device=DEVICE) for _ in range(2))
    spare = OnGpu(case)  # warm-up, on a copy of the state
    spare.select(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.select(3, plan)
    for _ in range(5):
        want = case.select(3)
        graph.replay()
        gpu.check(case, want, plan)
        case.scores = case.new_scores()
        case.step += 1
        gpu.scores.copy_(case.scores)
        gpu.step += 1
