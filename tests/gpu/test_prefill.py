"""A prompt whose keys and values leave beside the model: what is stored, what waits for what, and what stays."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from test_generate import generate
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from oasis_hf import OasisCache
from oasis_hf.config import BLOCK
from oasis_hf.layers import OasisLayer
from oasis_hf.ops import cuda
from oasis_hf.step import Stepper
from oasis_hf.store import HostStore
from oasis_hf.store.outbound import Outbound

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def late(monkeypatch):
    """Every write starts some milliseconds after it could."""
    beside = Outbound.beside

    @contextlib.contextmanager
    def slow(self, *args):
        with beside(self, *args):
            torch.cuda._sleep(10_000_000)
            yield

    monkeypatch.setattr(Outbound, "beside", slow)


@pytest.fixture
def by_the_host(monkeypatch):
    """What `HostStore` does where the operators can't serve: it waits for the device and moves pages itself."""

    @contextlib.contextmanager
    def swap():
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "reaches", lambda *args: False)
            yield

    return swap


def contents(cache):
    """All that a prompt leaves: keys and values, summaries of closed blocks, recent queries; by layer and row."""
    out = []
    for layer in cache.sparse_layers:
        for row, count in enumerate(cache.state.rows.tokens):
            closed = count // BLOCK
            out += [part.clone() for part in layer.store.read(layer.index, row, 0, count)]
            out += [layer.summaries.vectors[row, :, :closed].cpu(), layer.summaries.scales[row, :, :closed].cpu()]
            out.append(layer.recent[row].cpu())
    return out


@torch.no_grad()
def fed(model, inputs, sizes):  # noqa: F811
    """A cache after a prompt in pieces of these sizes, and all logits."""
    cache, logits, at = OasisCache(model, budget=112), [], 0
    for size in sizes:
        ids = inputs["input_ids"][:, at : at + size]
        mask = inputs["attention_mask"][:, : at + size] if "attention_mask" in inputs else None
        logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
        at += size
    return cache, torch.cat(logits, 1)


def equal(a, b):
    assert len(a) == len(b)
    for index, (x, y) in enumerate(zip(a, b)):
        assert torch.equal(x, y), index


CASES = {
    "one row": (lambda: {"input_ids": prompt(1, 1000)}, [1000]),
    "rows": (lambda: {"input_ids": prompt(3, 515)}, [515]),
    "padded": (lambda: left_padded([700, 1000, 333]), [1000]),
    "chunks": (lambda: {"input_ids": prompt(2, 1000)}, [137, 160, 9, 500, 194]),
    "padded chunks": (lambda: left_padded([700, 1000, 333]), [300, 300, 17, 383]),
    "whole blocks": (lambda: {"input_ids": prompt(2, 1024)}, [256, 768]),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_what_the_host_stores(model, case, late, by_the_host):  # noqa: F811
    make, sizes = CASES[case]
    inputs = on_gpu(make())
    cache, logits = fed(model, inputs, sizes)
    assert cache.state.store._outbound is not None
    with by_the_host():
        other, wanted = fed(model, inputs, sizes)
    assert other.state.store._outbound is None
    equal(contents(cache), contents(other))
    assert torch.equal(logits, wanted)


def test_equal_to_the_references_on_the_cpu(model):  # noqa: F811
    """Other sums, other roundings: close, not equal."""
    if next(model.parameters()).dtype != torch.bfloat16:
        pytest.skip("one dtype says it")
    ids = {"input_ids": prompt(2, 300)}
    cache, logits = fed(model, on_gpu(ids), [300])
    other, wanted = fed(copy.deepcopy(model).cpu(), ids, [300])
    torch.testing.assert_close(logits.cpu().float(), wanted.float(), atol=0.06, rtol=0)
    for layer, twin in zip(cache.sparse_layers, other.sparse_layers):
        for row in range(2):
            mine, theirs = (x.store.read(x.index, row, 0, 300) for x in (layer, twin))
            for a, b in zip(mine, theirs):
                torch.testing.assert_close(a.float(), b.float(), atol=0.1, rtol=0.05)


def test_what_comes_after_a_prompt_waits_for_its_writes(model, late, by_the_host):  # noqa: F811
    """Decode steps, crop, a branch, other rows, another turn, another prompt over the same pages."""

    def live():
        cache = OasisCache(model, budget=112)
        ids = prompt(2, 400).cuda()
        out = [generate(model, ids, cache, max_new_tokens=20)]
        branch = copy.deepcopy(cache)
        more = torch.cat((out[0].sequences, prompt(2, 101, 5).cuda()), 1)
        out += [generate(model, more, one, max_new_tokens=20) for one in (cache, branch)]
        cache.crop(-77)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = out[1].sequences[[1, 0], : cache.get_seq_length() + 1]
        out.append(generate(model, again, cache, max_new_tokens=20))
        cache.reset()
        out.append(generate(model, prompt(2, 600, 8).cuda(), cache, max_new_tokens=20))
        return out

    mine = live()
    with by_the_host():
        theirs = live()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.sequences, b.sequences)
        equal(a.logits, b.logits)


def test_an_interrupted_prompt_leaves_nothing_behind(model, late, monkeypatch):  # noqa: F811
    wanted = generate(model, prompt(2, 300).cuda(), OasisCache(model, budget=112))
    store_row = OasisLayer._store_row

    def fails(self, row, *args):
        store_row(self, row, *args)
        if self.index == 1:
            raise KeyboardInterrupt

    cache = OasisCache(model, budget=112)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), torch.no_grad():
        patch.setattr(OasisLayer, "_store_row", fails)
        model(prompt(2, 500, 9).cuda(), past_key_values=cache)
    assert cache.state.store._outbound._held == []
    got = generate(model, prompt(2, 300).cuda(), cache)
    assert torch.equal(got.sequences, wanted.sequences)
    equal(got.logits, wanted.logits)


def test_a_cache_may_go_before_its_writes_have_arrived(model, late):  # noqa: F811
    for _ in range(3):
        with torch.no_grad():
            model(prompt(2, 500).cuda(), past_key_values=OasisCache(model, budget=112))
        gc.collect()
    torch.cuda.synchronize()


@contextlib.contextmanager
def no_waiting(monkeypatch):
    """An error wherever the host waits for the device, but for the making of pages."""
    allowed = [False]
    synchronize, ensure = torch.cuda.synchronize, HostStore.ensure

    def checked(*args):
        assert allowed[0], "the host waited for the device"
        synchronize(*args)

    def making(self, *args):
        allowed[0] = True
        torch.cuda.set_sync_debug_mode("default")
        try:
            return ensure(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("error")
            allowed[0] = False

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", checked)
        patch.setattr(HostStore, "ensure", making)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@torch.no_grad()
def test_the_host_waits_for_nothing_in_a_first_prompt(model, padded, monkeypatch):  # noqa: F811
    """A mask is read before the forward; from there on nothing is, transformers' part included."""
    inputs = on_gpu(left_padded([500, 321, 44]) if padded else {"input_ids": prompt(3, 500)})
    model(**inputs, past_key_values=OasisCache(model, budget=112))  # libraries set themselves up
    forward, watched = Stepper._prefill, []

    def watch(self, *args):
        with no_waiting(monkeypatch):
            out = forward(self, *args)
        watched.append(1)
        return out

    cache = OasisCache(model, budget=112)
    monkeypatch.setattr(Stepper, "_prefill", watch)
    model(**inputs, past_key_values=cache)
    assert watched == [1]
    cache.reset()
    model(**inputs, past_key_values=cache)
    assert watched == [1, 1]


@torch.no_grad()
def test_a_long_prompt_holds_two_layers_not_all():
    """Peak of 12 layers of 16K tokens: a dense cache's, less nearly the size of the KV."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=256, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=32768,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)  # noqa: F811
    ids, peaks = prompt(1, 16384).cuda(), []
    for make in (lambda: DynamicCache(config=config), lambda: OasisCache(model, budget=512)):
        for _ in range(2):  # first, libraries set themselves up
            cache = make()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(ids, past_key_values=cache, logits_to_keep=1)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            stays = torch.cuda.memory_allocated() - before
            del cache
            gc.collect()
        peaks.append((peak, stays))
    (dense, _), (oasis, stays) = peaks
    kv = 12 * 2 * 4 * 128 * 16384 * 2
    assert oasis < dense - 0.7 * kv, (oasis, dense, kv)
    assert stays < 0.12 * kv, "summaries only"
