"""`eval/retrieval.py`, `eval/prompts.py`: two families with nothing in common, exact prompts, scores, rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import byte_tokenizer
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import prompts  # noqa: E402
import retrieval  # noqa: E402
import texts  # noqa: E402
from retrieval import TASKS  # noqa: E402
from retrieval_words import EVAL, FAMILIES, TRAIN  # noqa: E402
from worlds import Question, score  # noqa: E402

LENGTH = 2600


@pytest.fixture(scope="module")
def chat():
    return prompts.Chat(byte_tokenizer.tokenizer())


def test_the_families_share_nothing():
    assert not {word.lower() for word in TRAIN.words} & {word.lower() for word in EVAL.words}
    assert len(set(TRAIN.words)) == len(TRAIN.words) and len(set(EVAL.words)) == len(EVAL.words)
    separators = {one.entry for one in (*TRAIN.tables, *EVAL.tables)}
    assert not (set(TRAIN.templates) & set(EVAL.templates)) and len(separators) == 5
    assert TRAIN.seed != EVAL.seed
    assert not set(TRAIN.sources) & set(EVAL.sources) and not set(TRAIN.sources) & set(texts.SOURCES)
    mine, other = set(TRAIN.sentences()), set(EVAL.sentences())
    assert len(mine) > 500 and len(other) > 500 and not mine & other


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_has_its_length_its_answers_and_its_score(chat, task, family):
    decode = chat.tokenizer.decode
    made = [prompts.sample(chat, task, seed, LENGTH, family) for seed in range(3)]
    assert [len(one.ids) for one in made] == [LENGTH] * 3 and len({tuple(one.ids) for one in made}) == 3
    again = prompts.sample(chat, task, 1, LENGTH, family)
    assert again.ids == made[1].ids and again.expected == made[1].expected
    for one in made:
        assert one.score(one.expected) == 1 and one.score("nothing of it") == 0 == one.score("")
        assert one.new >= len(chat.encode(one.expected))
        text = decode(one.ids)
        assert text.count("<|im_start|>") == 2 and text.count("assistant\n") == 1


@pytest.mark.parametrize("task", TASKS)
def test_what_is_expected_stands_in_the_context(chat, task):
    world = retrieval.world(task, 5, "eval", 2000, chat.count)
    for question in world.questions:
        for answer in question.answers:
            values = json.loads(answer).values() if question.kind == "json" else [answer.split(": ")[-1]]
            assert all(value in world.context for value in values)
        assert score(question, question.target) == 1
    other = retrieval.world(task, 5, "train", 2000, chat.count)
    assert other.context != world.context


def test_scores_are_shares():
    found = Question("?", "", "", ("12", "amber-oak"))
    assert score(found, "It was AMBER-OAK, 12.") == 1 and score(found, "112 amber-oak") == 0.5
    order = Question("?", "", "", ("a: 1", "b: 2", "c: 3"), "order")
    assert score(order, "a: 1\nc: 3\nb: 2") == pytest.approx(1 / 3) and score(order, "\na: 1\nb: 2\n c: 3 ") == 1
    rows = Question("?", "", "", ('{"id": "X-1", "city": "7"}', '{"id": "X-2", "city": "8"}'), "json")
    assert score(rows, '{"id": "X-2", "city": "8"} and {"id": "X-1", "city": "9"}') == 0.75
    assert score(rows, '{"id": "X-1", "city": ') == 0 and score(rows, '{"id": ["X-1"]}') == 0


def test_the_most_frequent_words_are_the_most_frequent(chat):
    for task in ("common", "frequent"):
        for seed in range(4):
            world = retrieval.world(task, seed, "eval", 3000, chat.count)
            heard = world.context.split()
            counts = {word: heard.count(word) for word in set(heard) if len(word) > 4 and word[0].isalpha()}
            answers = world.questions[0].answers
            others = [n for word, n in counts.items() if word not in answers]
            assert min(counts[one] for one in answers) >= max(others, default=0)


def test_a_prompt_is_the_chat_template_s(chat):
    ids = chat.prompt("What is it?", "It is")
    turn = [{"role": "user", "content": "What is it?"}]
    text = chat.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert ids == chat.tokenizer(text + "It is", add_special_tokens=False).input_ids


def test_a_row_is_a_chat_whose_answers_are_learned(chat):
    for seed in range(6):
        row = prompts.row(chat, seed, 3000, list(TASKS))
        assert len(row.ids) == len(row.learned) <= 3000 and row.answers
        text = chat.tokenizer.decode(row.ids)
        turns = [part.split("<|im_end|>")[0].split("\n", 1) for part in text.split("<|im_start|>")[1:]]
        messages = [{"role": role, "content": content} for role, content in turns]
        assert [one["role"] for one in messages] == ["user", "assistant"] * (len(messages) // 2)
        whole = chat.tokenizer.apply_chat_template(messages, tokenize=False)
        assert whole.startswith(text) and whole[len(text) :] in ("", "\n")
        assert sum(row.learned) == sum(last - first + 1 for first, last, _ in row.answers)
        for (first, last, task), message in zip(row.answers, messages[1::2], strict=True):
            assert all(row.learned[first : last + 1]) and not row.learned[first - 1] and row.ids[last] == chat.end
            assert message["content"].endswith(chat.tokenizer.decode(row.ids[first:last])) and task in TASKS
    assert prompts.row(chat, 5, 3000, list(TASKS)) == row
    assert prompts.row(chat, 6, 3000, list(TASKS)) != row


def test_what_can_t_be_made_says_so(chat):
    with pytest.raises(ValueError, match="no task 'needle': there are needle_keys"):
        retrieval.world("needle", 0, "eval", 100, chat.count)
    with pytest.raises(ValueError, match="no family 'test'"):
        retrieval.world("pairs", 0, "test", 100, chat.count)
    with pytest.raises(ValueError, match="does not fit 120 tokens"):
        prompts.sample(chat, "sections", 0, 120)
