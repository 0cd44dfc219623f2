"""The demo: a real long document, a working set of a quarter of it, the right answer from deep inside."""

import contextlib
import io

import pytest
import torch

from oasis_hf import cli, demo
from oasis_hf.models import ModelError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(smollm2):
    """What `oasis-hf demo` (the README's command too) finds, and what it prints."""
    found, out, ask = [], io.StringIO(), demo.ask
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "200")
        patch.setattr("oasis_hf.models.load", lambda *args, **kwargs: smollm2)
        patch.setattr(demo, "ask", lambda *args, **kwargs: found.append(ask(*args, **kwargs)) or found[0])
        assert cli.main(["demo"]) == 0
    return found[0], out.getvalue()


@pytest.fixture(scope="module")
def result(ran):
    return ran[0]


def test_the_command_prints_both_answers(ran):
    assert ran[1].count(demo.EXPECTED) == 2


def test_both_answer_right_from_a_quarter(result):
    assert result.context >= 6000 and 4 * result.budget <= result.context
    assert demo.EXPECTED in result.dense.answer
    assert demo.EXPECTED in result.oasis.answer


def test_answer_is_deep_in_the_document_and_in_no_question(smollm2):
    _, tokenizer = smollm2
    text = demo.handbook()
    assert demo.EXPECTED not in demo.QUESTION
    tokens = len(tokenizer(text)["input_ids"])
    for at in (text.index(demo.EXPECTED), text.rindex(demo.EXPECTED)):
        assert 0.4 < len(tokenizer(text[:at])["input_ids"]) / tokens < 0.75


def test_numbers_are_those_of_the_caches(result):
    dense, oasis, cache = result.dense, result.oasis, result.cache
    layers, heads, dim = 30, 3, 64
    token = layers * heads * dim * 2 * 2
    assert dense.device_bytes == token * (result.context + dense.tokens - 1)
    blocks = -(-(result.context + oasis.tokens - 1) // 16)
    assert oasis.host_bytes == blocks * 16 * token
    working_set = layers * heads * 2 * 2 * dim * (8 + 16 * cache.state.slots)  # the tail stands in front
    assert working_set < oasis.device_bytes < dense.device_bytes / 3
    steps, cap = oasis.tokens - 1, cache.state.cap
    assert 0 < oasis.moved_bytes <= steps * layers * heads * cap * cache.state.block_bytes
    assert 0.5 < oasis.hit_rate < 1


def test_summaries_are_a_sixteenth(result):
    memory = result.cache.memory()
    assert memory["summaries"] < 1.25 * memory["dense"] / 16


def test_table_shows_both(result):
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(demo.table(result))
    text = console.file.getvalue()
    for part in ("dense cache", "OasisCache", result.dense.answer, result.oasis.answer, "MiB", "%"):
        assert part in text


def test_table_shows_an_answer_as_it_is():
    from rich.console import Console

    answer = "[/INST] [red]no[/] :smile:"
    console = Console(width=200, file=io.StringIO())
    run = demo.Run(answer, tokens=5, prefill=1.0, decode=1.0, device_bytes=100)
    console.print(demo.table(demo.Result(context=100, budget=64, dense=run, oasis=run, cache=None)))
    assert console.file.getvalue().count(answer) == 2


def test_plain_tokenizer_and_small_document(smollm2, monkeypatch):
    model, tokenizer = smollm2
    monkeypatch.setattr(tokenizer, "chat_template", None)
    result = demo.ask(model, tokenizer, "The harbour is closed on Mondays.", "When?", budget=64, max_new_tokens=4)
    assert result.oasis.answer == result.dense.answer
    assert result.oasis.hit_rate is None  # dense: nothing was predicted


def test_document_beyond_the_context(smollm2, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(smollm2[0], "generate", fail)
    with pytest.raises(ModelError, match="context of 8,192"):
        demo.ask(*smollm2, demo.handbook() * 2, demo.QUESTION)


def test_the_model_is_left_as_it_was(smollm2, result):
    assert smollm2[0].config._attn_implementation == "sdpa"
    assert next(smollm2[0].parameters()).dtype == torch.bfloat16
