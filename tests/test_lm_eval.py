"""`oasis_hf.lm_eval`: the harness's answers over an `OasisCache`, and what it says of a mistake."""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch
from letters import letter_tokenizer
from tiny import FAMILIES, tiny

from oasis_hf import ConfigError, DrafterError, OasisCache, mode_config, models

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from oasis_hf.lm_eval import OasisLM, __main__, arguments, scoring  # noqa: E402
from oasis_hf.lm_eval.model import Said  # noqa: E402

TASKS = ("choice", "endings", "answer", "perplexity")


@pytest.fixture(scope="module")
def letters():
    return letter_tokenizer()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Four tasks over one file of documents, of the kinds that the harness has: choices of one letter, as GPQA and
    LongBench v2 have them, and of several; answers that are generated; perplexity."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(3)
    docs = [
        {"text": "".join(draw.choices("abcdefgh ", k=length)), "right": draw.randrange(3)} for length in (120, 30, 70)
    ]
    file = folder / "docs.json"
    file.write_text("\n".join(map(json.dumps, docs)))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder)},
        "test_split": "test", "doc_to_text": "{{text}} is", "doc_to_target": "right",
    }  # fmt: skip
    choice = {**common, "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    answer = {"output_type": "generate_until", "doc_to_target": "text", "metric_list": [{"metric": "exact_match"}]}
    # An end id, which the models of `tiny` lack: without one generate lets an ended row go on until the others end.
    until = {"generation_kwargs": {"until": ["zz"], "max_gen_toks": 20, "eos_token_id": 2}}
    whole = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    return [
        {**choice, "task": "choice", "doc_to_choice": ["A", "B", "C"]},
        {**choice, "task": "endings", "doc_to_choice": ["a bad", "the cab fed", "here"]},
        {**common, **answer, **until, "task": "answer"},
        {**common, **whole, "task": "perplexity", "metric_list": [{"metric": "byte_perplexity"}]},
    ]


def run(lm, tasks, documents=None):
    """What each request was answered: numbers, booleans and text, by task; of the first documents only, if said so."""
    own = TaskManager(include_defaults=False)
    results = simple_evaluate(model=lm, tasks=tasks, task_manager=own, limit=documents, bootstrap_iters=0)
    assert set(results["results"]) == {task["task"] for task in tasks}
    return {
        name: [answer for sample in samples for responses in sample["resps"] for answer in responses]
        for name, samples in results["samples"].items()
    }


@pytest.fixture(scope="module")
def stock(letters, tasks):
    """What the harness's own adapter answers, by family."""
    return functools.cache(lambda family: run(HFLM(pretrained=tiny(family), tokenizer=letters, batch_size=2), tasks))


def numbers(answers):
    return torch.tensor([one[0] if isinstance(one, tuple) else one for one in answers], dtype=torch.float64)


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    for name in wanted:
        if name == "answer":
            assert got[name] == wanted[name]
            continue
        torch.testing.assert_close(numbers(got[name]), numbers(wanted[name]), rtol=0, atol=1e-3)
        if name != "perplexity":
            assert [one[1] for one in got[name]] == [one[1] for one in wanted[name]]


@pytest.mark.parametrize(
    "family, batch, knobs",
    [
        ("llama", 1, {}),
        ("llama", 3, {"speculate": True, "draft_tokens": 2}),
        ("qwen3", 4, {"budget_bytes": 1 << 24}),
        ("gemma3", 2, {}),
    ],
)
def test_within_the_budget_it_is_the_stock_adapter(family, batch, knobs, letters, tasks, stock):
    got = run(OasisLM(tiny(family), tokenizer=letters, batch_size=batch, **knobs), tasks)
    assert {name: len(answers) for name, answers in got.items()} == dict(zip(TASKS, (9, 9, 3, 3)))
    assert_same(got, stock(family))


def test_a_small_working_set_is_measured_everywhere(letters, tasks, stock):
    """A choice of one letter too, whose only scored logits the stock adapter and a prefilled context would give."""
    dense = stock("llama")
    sparse = run(OasisLM(tiny("llama"), tokenizer=letters, budget=32), tasks)
    for name in ("choice", "endings", "perplexity"):
        assert (numbers(sparse[name]) - numbers(dense[name])).abs().max() > 0.05, name
    assert sparse["answer"] != dense["answer"]
    switched = run(OasisLM(tiny("llama"), tokenizer=letters, budget=32, sparse_loglikelihood="False"), tasks)
    assert_same({**switched, "answer": dense["answer"]}, dense)
    assert switched["answer"] == sparse["answer"]


def requests(seed=0):
    """Contexts of several lengths, one of a token alone; some shared, some with the same tokens to feed."""
    draw = random.Random(seed)
    contexts = [[draw.randrange(3, 96) for _ in range(length)] for length in (90, 1, 150, 60)]
    ends = [[7], [8], [9, 10, 11, 12, 13, 14], [9, 10, 11, 12, 13, 15], [20, 21]]
    return [(context, end) for context in contexts for end in ends[: 5 if len(context) > 60 else 3]]


def by_hand(context, continuation, budget):
    """The same by the plainest loop: a cache for each request, its tokens one by one."""
    model, total = tiny("llama"), 0.0
    cache = OasisCache(model, budget=budget)
    tokens = [*context, *continuation]
    with torch.no_grad():
        if len(context) > 1:
            model(torch.tensor([context[:-1]]), past_key_values=cache)
        for place in range(len(context) - 1, len(tokens) - 1):
            out = model(torch.tensor([[tokens[place]]]), past_key_values=cache)
            total += float(out.logits[0, -1].log_softmax(-1)[tokens[place + 1]])
    return total


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("knobs", [{"budget": 48}, {"budget_bytes": 8 * 3 * 2 * 3 * 4096}])
def test_batches_and_branches_score_what_a_single_row_does(rows, knobs, monkeypatch):
    read = []
    prefill = scoring._prefill
    monkeypatch.setattr(scoring, "_prefill", lambda cache, prompts: read.extend(prompts) or prefill(cache, prompts))
    cache = OasisCache(tiny("llama"), **knobs)
    pairs = requests()
    got = {one.request: one.total for one in scoring.loglikelihoods(cache, pairs, rows, 2048)}
    assert sorted(got) == list(range(len(pairs)))
    assert len(read) == len(set(read)) == 3  # what is shared is read once, and nothing for a token alone
    if "budget" in knobs:
        wanted = [by_hand(*pair, **knobs) for pair in pairs]
        torch.testing.assert_close(torch.tensor([got[i] for i in range(len(pairs))]), torch.tensor(wanted))
        dense = [by_hand(*pair, budget=2064) for pair in pairs]
        assert (torch.tensor(wanted) - torch.tensor(dense)).abs().max() > 0.1


def test_too_long_requests_lose_their_first_tokens_as_in_the_harness(letters):
    pairs = [(("", ""), context, end) for context, end in requests()]
    stock = HFLM(pretrained=tiny("llama"), tokenizer=letters, max_length=40)
    ours = OasisLM(tiny("llama"), tokenizer=letters, max_length=40, batch_size=4)
    wanted = stock._loglikelihood_tokens(pairs, disable_tqdm=True)
    got = ours._loglikelihood_tokens(pairs, disable_tqdm=True)
    torch.testing.assert_close(numbers(got), numbers(wanted), rtol=0, atol=1e-3)
    longest = [(("", ""), [5], list(range(3, 43)))]
    got = ours._loglikelihood_tokens(longest, disable_tqdm=True)
    torch.testing.assert_close(numbers(got), numbers(stock._loglikelihood_tokens(longest, True)), rtol=0, atol=1e-3)


def test_generation_speculates_by_our_own_loop(letters, tasks):
    answers = [task for task in tasks if task["task"] == "answer"]
    lm = OasisLM(tiny("llama"), tokenizer=letters, batch_size=3, speculate=True)
    run(lm, answers)
    assert lm.oasis.stepper.passes > 0 and lm.oasis.batch_size == 3


def test_a_row_ends_by_itself_at_its_stop_string(letters):
    said = Said(["ab", "", "q"], letters, start=2)
    rows = ["ab..", "..ab", "...q", ".ab."]
    got = said(torch.tensor([letters.encode(row) for row in rows]), None)
    assert got.tolist() == [False, True, True, False]
    assert not Said([], letters, 0)(torch.tensor([[5, 6]]), None).any()


# -- arguments ------------------------------------------------------------------------------------------------------


def test_the_harness_knows_it():
    assert get_model("oasis") is OasisLM


def test_arguments_of_the_command_line(letters, tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path / "model")
    letters.save_pretrained(tmp_path / "tokenizer")
    text = f"pretrained={tmp_path / 'model'},tokenizer={tmp_path / 'tokenizer'},dtype=float32,budget=64,lookahead=none"
    lm = OasisLM.create_from_arg_string(text + ",speculate=True,fetch_ratio=1,drafter=previous", {"device": "cuda:0"})
    config = lm.oasis.state.config
    assert (config.budget, config.lookahead, config.speculate, config.fetch_ratio) == (64, "none", True, 1)
    assert lm.pretrained == str(tmp_path / "model") and lm.tokenizer.decode([68, 69]) == "ab"
    info = lm.get_model_info()["oasis"]
    assert info["budget"] == 64 and info["drafter"] == "PreviousDrafter" and info["sparse_loglikelihood"] is True
    with pytest.raises(models.ModelError, match="Can't load the tokenizer of ") as error:
        OasisLM(str(tmp_path / "model"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [OasisLM.create_from_arg_string, OasisLM.create_from_arg_obj])
def test_model_args_go_before_the_options_of_the_command(make, monkeypatch):
    seen = {}
    monkeypatch.setattr(OasisLM, "__init__", lambda self, **given: seen.update(given))
    text, options = "device=cpu,batch_size=3,budget=64", {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    make(text if make == OasisLM.create_from_arg_string else {"device": "cpu", "batch_size": 3, "budget": 64}, options)
    assert seen == {"device": "cpu", "batch_size": 3, "budget": 64}
    make("" if make == OasisLM.create_from_arg_string else {}, options)
    assert seen["device"] == "cuda:0" and seen["batch_size"] == 1


def test_a_mode_of_the_command_line(letters):
    lm = OasisLM(tiny("llama"), tokenizer=letters, mode="quest", budget="64", seed=3)
    assert lm.oasis.state.config == mode_config("quest", 64, seed=3)
    assert lm.get_model_info()["oasis"]["mode"] == "quest"
    assert OasisLM(tiny("llama"), tokenizer=letters).get_model_info()["oasis"]["mode"] is None


def test_knobs_may_be_text():
    config, harness = arguments.split(
        {"budget": "96", "lookahead": '{"draft": 0.5, "previous": 0.5}', "graphs": "false", "scorer": "minmax",
         "max_length": 64}
    )  # fmt: skip
    assert config.budget == 96 and config.lookahead == {"draft": 0.5, "previous": 0.5} and config.graphs is False
    assert config.scorer == "minmax" and harness == {"max_length": 64}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"bugdet": 64}, "no argument 'bugdet': it takes pretrained, .*knobs block_size, budget, .*harness tokenizer"),
        ({"budget": "many"}, "budget='many' is not allowed: use an integer >= 32"),
        ({"lookahead": "{draft"}, "lookahead='{draft' is not allowed: use one of 'auto'"),
        ({"batch_size": "auto"}, "batch_size='auto' is not allowed: use an integer >= 1"),
        ({"batch_size": 0}, "batch_size=0 is not allowed"),
        ({"max_length": -1.0}, r"max_length=-1.0 is not allowed: use an integer >= 1"),
        ({"max_length": "long"}, "max_length='long' is not allowed: use an integer >= 1"),
        ({"sparse_loglikelihood": "half"}, "sparse_loglikelihood='half' is not allowed: use True or False"),
        ({"dtype": "int4"}, "dtype='int4' is not allowed: use one of 'auto', 'float32'"),
        ({"mode": "fast"}, "mode='fast' is not allowed: use one of 'dense', 'quest', 'on_demand', 'previous', 'oasis'"),
        ({"mode": "quest", "lookahead": "draft"}, "mode='quest' sets lookahead='on_demand': leave lookahead='draft'"),
        ({"device": "tpu9"}, "device='tpu9' is not allowed: use 'cpu'"),
        ({"drafter": "nowhere/at-all"}, "nowhere/at-all"),
    ],
)
def test_mistakes_are_told_in_a_sentence(given, said, letters):
    with pytest.raises((ConfigError, DrafterError), match=said) as error:
        OasisLM(tiny("llama"), tokenizer=letters, **given)
    assert "\n" not in str(error.value)


def test_a_model_of_ones_own_needs_a_tokenizer():
    with pytest.raises(models.ModelError, match="LlamaForCausalLM .* give tokenizer= too"):
        OasisLM(tiny("llama"))


def test_a_model_that_is_too_large(letters, tmp_path, monkeypatch):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    letters.save_pretrained(tmp_path)

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 90 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", no_room)
    with pytest.raises(models.ModelError, match="is too large for the memory here, on its way to cpu: ") as error:
        OasisLM(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error, said",
    [
        (ConfigError("budget is wrong."), "oasis_hf.lm_eval: budget is wrong.\n"),
        (ValueError("Tasks not found: x"), "Tasks not found: x; `python -m oasis_hf.lm_eval ls tasks` lists"),
    ],
)
def test_the_command_prints_a_sentence(error, said, monkeypatch, capsys):
    def fails():
        import sys

        assert sys.argv[1:] == ["run", "--tasks", "x"]
        raise error

    monkeypatch.setattr(__main__, "cli_evaluate", fails)
    assert __main__.main(["run", "--tasks", "x"]) == 2
    assert said in capsys.readouterr().err


def test_other_errors_of_the_command_are_not_hidden(monkeypatch):
    def fails():
        raise ValueError("something else")

    monkeypatch.setattr(__main__, "cli_evaluate", fails)
    with pytest.raises(ValueError, match="something else"):
        __main__.main(["run"])


@pytest.mark.slow
def test_smollm2_within_the_budget_is_the_stock_adapter(tasks, smollm2_float32):
    model, tokenizer = smollm2_float32
    tasks = [
        {**task, "generation_kwargs": {**task["generation_kwargs"], "eos_token_id": tokenizer.eos_token_id}}
        if task["task"] == "answer"
        else task
        for task in tasks
    ]
    wanted = run(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2), tasks, 2)
    got = run(OasisLM(model, tokenizer=tokenizer, batch_size=2), tasks, 2)
    assert_same(got, wanted)
