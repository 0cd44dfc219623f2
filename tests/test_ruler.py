"""`eval/ruler.py`: lm-eval's own RULER samples, as few as are wanted, kept, and scored with its own metric."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import prompts  # noqa: E402
import recording  # noqa: E402
import ruler  # noqa: E402


@pytest.fixture(scope="module")
def chat():
    return prompts.Chat(recording.load_tokenizer())


@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_are_lm_eval_s(chat, task, tmp_path, monkeypatch):
    before = random.getstate()
    documents = ruler.documents(chat.tokenizer, task, 1024, 3, keep=tmp_path)
    assert random.getstate() == before and len(documents) == 3 and len({one["input"] for one in documents}) == 3
    assert all(one["max_length"] == 1024 and answer in one["input"] for one in documents for answer in one["outputs"])
    monkeypatch.setattr(ruler, "_made", None)  # from now on they come from the disk
    made = ruler.samples(chat, task, 1024, 3, keep=tmp_path)
    for one, document in zip(made, documents):
        assert 400 < len(one.ids) < 1024 + 60
        text = chat.tokenizer.decode(one.ids)
        assert text.endswith(f"assistant\n{document['gen_prefix']}") and document["input"] in text
        assert one.score(" ".join(document["outputs"]).upper()) == 1 and one.score("no") == 0
    half = documents[0]["outputs"][: len(documents[0]["outputs"]) // 2]
    assert made[0].score(" ".join(half)) == pytest.approx(len(half) / len(documents[0]["outputs"]))
    for said in ("", " ".join(half), f"x{documents[0]['outputs'][0]}y", "\x07\n" + documents[0]["outputs"][-1].lower()):
        assert ruler.matched(documents[0], said) == pytest.approx(ruler.score(documents[0], said))
    name = {"niah_single_1": "niah_single_1", "ruler_vt": "vt", "ruler_cwe": "cwe", "ruler_fwe": "fwe"}.get(task)
    folder = Path(sys.modules["lm_eval.tasks.ruler"].__path__[0])
    config = (folder / f"{name or 'niah_single_1'}.yaml").read_text()
    assert int(re.search(r"max_gen_toks: (\d+)", config)[1]) == made[0].new


def test_a_seed_and_a_number_of_samples_have_files_of_their_own(chat, tmp_path):
    one, two, more = (
        ruler.documents(chat.tokenizer, "ruler_cwe", 1024, count, seed, tmp_path)
        for count, seed in ((2, 0), (2, 1), (3, 0))
    )
    assert len(list(tmp_path.iterdir())) == 3 and one != two and more[:2] == one


def test_samples_of_other_versions_are_made_anew_but_serve_where_lm_eval_is_missing(chat, tmp_path, monkeypatch):
    one = ruler.documents(chat.tokenizer, "ruler_fwe", 1024, 1, keep=tmp_path)
    made = []
    monkeypatch.setattr(ruler, "_made", lambda *args: made.append(args) or one)
    monkeypatch.setattr(ruler, "versions", lambda: None)
    assert ruler.documents(chat.tokenizer, "ruler_fwe", 1024, 1, keep=tmp_path) == one and not made
    assert ruler.samples(chat, "ruler_fwe", 1024, 1, keep=tmp_path)[0].score(one[0]["outputs"][0]) == pytest.approx(
        1 / 3
    )
    monkeypatch.setattr(ruler, "versions", lambda: {"lm_eval": "9", "wonderwords": "9"})
    assert ruler.documents(chat.tokenizer, "ruler_fwe", 1024, 1, keep=tmp_path) == one and len(made) == 1


def test_wrong_calls_say_what_is_allowed(chat, tmp_path):
    for arguments, told in (
        (("niah_single_2", 4096, 1), "no RULER task 'niah_single_2' that needs no download: there are niah_single_1"),
        (("ruler_vt", 512, 1), "length=512 is not allowed"),
        (("ruler_vt", 4096, 0), "count=0 is not allowed"),
    ):
        with pytest.raises(ValueError, match=told):
            ruler.documents(chat.tokenizer, *arguments, keep=tmp_path)
