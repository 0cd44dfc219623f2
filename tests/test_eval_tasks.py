"""`eval/tasks`: the paper's tasks as lm-eval finds them, over local files of the hub's fields, offline."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from letters import letter_tokenizer
from tiny import tiny

lm_eval = pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from oasis_hf.lm_eval import OasisLM  # noqa: E402

TASKS = Path(__file__).resolve().parent.parent / "eval" / "tasks"


def module(name):
    spec = importlib.util.spec_from_file_location(f"eval_tasks_{name}", TASKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


scoring, longbench2 = module("scoring"), module("longbench2")

DOCS = {
    "aime24_avg8": [
        {"Problem": "What is 7 times 6?", "Answer": 42, "ID": "2024-I-1"},
        {"Problem": "What is 3 + 4?", "Answer": 7, "ID": "2024-I-2"},
    ],
    "aime25_avg8": [{"problem": "What is 5 times 14?", "answer": "70", "id": "0"}],
    "gpqa_diamond_avg4": [
        {
            "Question": f"Which is {i}?", "Correct Answer": f"right {i} ", "Incorrect Answer 1": "wrong 1",
            "Incorrect Answer 2": "wrong 2", "Incorrect Answer 3": "wrong 3",
        }
        for i in range(3)
    ],
    "longbench2_generative": [
        {
            "_id": str(i), "domain": "d", "sub_domain": "s", "difficulty": "easy" if i else "hard", "length": "short",
            "question": "Which letter is first?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d",
            "answer": "A", "context": "abc " * 60,
        }
        for i in range(2)
    ],
}  # fmt: skip
"""With the fields of the data sets on the hub."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of tasks that include the project's and read local files; what `--include_path` then takes."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, docs in DOCS.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, docs)))
        local = {"task": f"{name}_here", "include": str(TASKS / f"{name}.yaml")}
        if name.startswith("longbench2"):
            local |= {"dataset_kwargs": {"data_files": str(file)}}
        else:
            split = "test" if name.startswith("aime25") else "train"
            local |= {
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(file)}},
            }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(local))
    return tmp_path


class Says(LM):
    """A model whose answers are given: `answers(prompt)` is asked once a sample, in turn."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.asked = answers, []

    def generate_until(self, requests, disable_tqdm=False):
        self.asked += [one.args for one in requests]
        return [self.answers(one.args[0], at) for at, one in enumerate(requests)]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise AssertionError("answers are generated")

    loglikelihood_rolling = loglikelihood


def run(lm, folder, name, metadata=None):
    own = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    result = simple_evaluate(model=lm, tasks=[f"{name}_here"], task_manager=own, bootstrap_iters=0)
    return result["results"][f"{name}_here"], result["samples"][f"{name}_here"]


def test_they_are_found_beside_the_harness_s_own():
    found = TaskManager(include_path=str(TASKS), include_defaults=False)
    samples = [f"aime{year}_avg{k}" for year in (24, 25) for k in (8, 32)]
    assert set(found.all_tasks) == {*samples, "gpqa_diamond_avg4", "longbench2_generative", "reasoning_avg",
                                    "ruler_offline"}  # fmt: skip
    ruler = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    whole = TaskManager(include_path=[str(TASKS), str(ruler)], include_defaults=False)
    for group in ("reasoning_avg", "ruler_offline"):
        members = yaml.safe_load((TASKS / f"{group}.yaml").read_text())["task"]
        assert len(members) == len(set(members)) and set(members) <= set(whole.all_tasks)
    for line in (TASKS / "README.md").read_text().split("--tasks ")[1:]:
        assert set(line.split()[0].split(",")) <= set(whole.all_tasks)


def test_repeats_and_kept_samples_are_the_same_number():
    for file in TASKS.glob("*_avg[0-9]*.yaml"):
        told = yaml.safe_load(file.read_text())
        (kept,) = [step["k"] for one in told["filter_list"] for step in one["filter"]]
        assert file.stem == told["task"] and told["repeats"] == kept == int(told["task"].split("avg")[1])


def test_aime_over_eight_samples(here):
    wrong, right = "so it is \\boxed{41}", "it is $\\boxed{\\text{0}42}$, or rather \\boxed{042}."
    lm = Says(lambda prompt, at: [right, wrong, "no idea", wrong][at % 4] if "7 times 6" in prompt else "\\boxed{8}")
    result, samples = run(lm, here, "aime24_avg8")
    assert result["avg_at_k,samples"] == pytest.approx((2 / 8 + 0) / 2)
    assert result["pass_at_k,samples"] == 0.5 and result["answered,samples"] == pytest.approx((6 / 8 + 1) / 2)
    assert len(lm.asked) == 16 and all(kwargs["do_sample"] and kwargs["temperature"] == 0.6 for _, kwargs in lm.asked)
    assert lm.asked[0][0] == (
        "What is 7 times 6?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert len(samples[0]["resps"][0]) == 8
    result, _ = run(Says(lambda prompt, at: "\\boxed{70}"), here, "aime25_avg8")
    assert result["avg_at_k,samples"] == result["pass_at_k,samples"] == 1


def test_gpqa_over_four_samples(here):
    def answers(prompt, at):
        lines = prompt.splitlines()
        letter = next(line[0] for line in lines if line[1:].startswith(") right"))
        other = "ABCD"[("ABCD".index(letter) + 1) % 4]
        if "Which is 0?" in prompt:
            return f"Answer: {letter}"
        return [f"I'd say Answer: {other}. But no:\n\n**Answer:** {letter}", f"Answer: {other}"][at % 2]

    lm = Says(answers)
    result, samples = run(lm, here, "gpqa_diamond_avg4")
    assert result["avg_at_k,samples"] == pytest.approx((1 + 0.5 + 0.5) / 3) and result["pass_at_k,samples"] == 1
    letters = {sample["doc"]["letter"] for sample in samples}
    assert len(letters) > 1  # the right one does not always stand at the same place
    again, _ = run(lm, here, "gpqa_diamond_avg4")
    assert again == result


def test_longbench_generates_its_answers(here):
    lm = Says(lambda prompt, at: ["The correct answer is **(A)**, I think.", "The answer is A."][at])
    result, samples = run(lm, here, "longbench2_generative")
    assert result["acc,none"] == result["acc_short,none"] == 0.5
    assert result["acc_hard,none"] == 1 and result["acc_easy,none"] == 0 and result["answered,none"] == 0.5
    assert "acc_long,none" not in result
    asked = lm.asked[0][0]
    assert asked.startswith("Please read the following text and answer the question below.\n\n<text>\nabc abc")
    assert asked.endswith('(D) d\n\nFormat your response as follows: "The correct answer is (insert answer here)".')


def test_longbench_cuts_the_middle_of_what_is_too_long(here, tmp_path):
    letter_tokenizer().save_pretrained(tmp_path / "tokenizer")
    lm = Says(lambda prompt, at: "The correct answer is A")
    metadata = {"tokenizer": str(tmp_path / "tokenizer"), "max_length": 392}
    run(lm, here, "longbench2_generative", metadata)
    asked = lm.asked[0][0].replace("\n", "")
    assert len(asked) <= 392 - longbench2.ROOM
    assert asked.startswith("Please read the following") and asked.endswith('(insert answer here)".')


@pytest.mark.parametrize(
    ("text", "found"),
    [("\\boxed{7}", "7"), ("\\boxed{\\frac{1}{2}} then \\boxed {a{b}c}", "a{b}c"), ("\\boxed{7", None), ("7", None),
     ("\\boxed{1} and \\boxed{2", "1")],
)  # fmt: skip
def test_the_last_closed_box(text, found):
    assert scoring.boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("042", "42"), ("$1{,}000$", None), ("12\\,3", "123"), ("90^\\circ", "90"), ("7.", "7"), ("-3", None), ("x", None),
     ("0", "0"), (None, None)],
)  # fmt: skip
def test_integers_of_aime(text, found):
    assert scoring.integer(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("Answer: B", "B"), ("**Answer: (C)**", "C"), ("answer: $D$", "D"), ("Answer: $\\boxed{A}$", "A"),
     ("Answer: A\nAnswer: B", "B"), ("Answer: Because", None), ("The answer is B", None)],
)  # fmt: skip
def test_letters_of_gpqa(text, found):
    assert scoring.letter(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("The correct answer is (B).", "B"), ("*The correct answer is* C", "C"), ("The answer is (B)", None), ("", None)],
)
def test_letters_of_longbench(text, found):
    assert longbench2.answer(text) == found


def test_our_model_answers_them(here):
    """Samples of one question differ, and all of it runs over the working set."""
    lm = OasisLM(tiny("llama"), tokenizer=letter_tokenizer(), budget=64, batch_size=4, max_length=1024)
    own = TaskManager(include_path=str(here), include_defaults=False)
    made = {"max_gen_toks": 12, "eos_token_id": 2}
    result = simple_evaluate(
        model=lm, tasks=["aime25_avg8_here", "longbench2_generative_here"], task_manager=own, bootstrap_iters=0,
        gen_kwargs=made,
    )  # fmt: skip
    (sample,) = result["samples"]["aime25_avg8_here"]
    assert len(set(sample["resps"][0])) > 1 and result["results"]["aime25_avg8_here"]["avg_at_k,samples"] == 0
    assert lm.oasis.stats()["fetched"].sum() > 0
