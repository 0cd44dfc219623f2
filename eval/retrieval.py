"""Long-context tasks made on the spot: facts in or as a long text, questions about them, and what an answer is worth.

A task makes a world from a seed: a context of about so many tokens and several questions about it. Evaluations ask one
question a context; training asks several, one after the other. Words, templates and background texts are a family's
(`retrieval_words.py`), and its two families share none.
"""

from __future__ import annotations

import json
import random

import retrieval_words as words
from retrieval_words import FAMILIES, Family
from worlds import (
    KEYS,
    VALUES,
    Count,
    Make,
    Question,
    Task,
    World,
    after,
    asked_of,
    distinct,
    fitting,
    listed,
    scattered,
)


def world(task: str, seed: int, family: str, room: int, count: Count) -> World:
    """The world of a seed.

    Args:
        room: tokens that the context may take, about. count: tokens of a text.

    Raises:
        ValueError: there is no such task or family.
    """
    for what, name, known in (("task", task, TASKS), ("family", family, FAMILIES)):
        if name not in known:
            raise ValueError(f"There is no {what} {name!r}: there are {', '.join(known)}.")
    found = FAMILIES[family]
    return TASKS[task](random.Random(f"{found.seed} {task} {seed}"), found, room, count)


# -- needles in a text ------------------------------------------------------------------------------------------------


def _needles(
    rng: random.Random, family: Family, room: int, each: int
) -> tuple[words.Needle, list[str], list[list[str]]]:
    """A template, keys, and `each` values a key; about one needle for every 100 tokens."""
    template, make = rng.choice(family.needles), rng.choice(VALUES)
    number = max(2, room // (rng.choice((60, 100, 160)) * each))
    keys = distinct(rng, family, rng.choice(KEYS), number)
    return template, keys, [distinct(rng, family, make, each) for _ in keys]


def _told(rng: random.Random, template: words.Needle, keys: list[str], values: list[list[str]]) -> list[str]:
    facts = [template.tell.format(key=key, value=value) for key, own in zip(keys, values) for value in own]
    rng.shuffle(facts)
    return facts


def needle_keys(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Many needles of one kind; one is asked for."""
    template, keys, values = _needles(rng, family, room, 1)
    context = scattered(rng, family, _told(rng, template, keys, values), room, count)
    questions = []
    for i in asked_of(rng, len(keys)):
        lead = template.lead.format(key=keys[i]) if rng.random() < 0.7 else ""
        value = values[i][0]
        questions.append(Question(template.one.format(key=keys[i]), lead, after(lead, f"{value}."), (value,)))
    return World(context, tuple(questions))


def needle_values(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Every key has several values; all are asked for. They are told in the text's order."""
    template, keys, values = _needles(rng, family, room, rng.choice((2, 3, 4)))
    facts = _told(rng, template, keys, values)
    place = {fact: at for at, fact in enumerate(facts)}
    context = scattered(rng, family, facts, room, count)
    questions = []
    for i in asked_of(rng, len(keys)):
        own = sorted(values[i], key=lambda value: place[template.tell.format(key=keys[i], value=value)])
        lead = template.leads.format(keys=keys[i]) if rng.random() < 0.7 else ""
        target = after(lead, f"{listed(own)}.")
        questions.append(Question(template.many.format(keys=keys[i]), lead, target, tuple(own)))
    return World(context, tuple(questions))


def needle_queries(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Several keys are asked for at once."""
    template, keys, values = _needles(rng, family, room, 1)
    context = scattered(rng, family, _told(rng, template, keys, values), room, count)
    questions = []
    for _ in range(24):
        chosen = asked_of(rng, len(keys), rng.choice((3, 4, 5)))
        names = listed([keys[i] for i in chosen])
        lead = template.leads.format(keys=names) if rng.random() < 0.5 else ""
        target = "; ".join(f"{keys[i]}: {values[i][0]}" for i in chosen)
        answers = tuple(values[i][0] for i in chosen)
        questions.append(Question(template.many.format(keys=names), lead, after(lead, target), answers))
    return World(context, tuple(questions))


def variables(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Chains of assignments; all names of one value are asked for."""
    template = rng.choice(family.chains)
    chains, length = rng.choice((1, 2, 3, 5)), rng.choice((3, 4, 5))
    names = distinct(rng, family, words.letters, chains * length)
    values = distinct(rng, family, words.number, chains)
    owned = [names[i * length : (i + 1) * length] for i in range(chains)]
    queues = [
        [template.first.format(a=own[0], v=value)] + [template.then.format(a=a, b=b) for a, b in zip(own, own[1:])]
        for own, value in zip(owned, values)
    ]
    facts = []
    while any(queues):
        facts.append(rng.choice([queue for queue in queues if queue]).pop(0))
    text = scattered(rng, family, facts, room, count)
    questions = []
    for own, value in zip(owned, values):
        lead = template.lead.format(v=value) if rng.random() < 0.7 else ""
        target = after(lead, " ".join(own) if rng.random() < 0.5 else ", ".join(own))
        questions.append(Question(template.ask.format(v=value), lead, target, tuple(own)))
    rng.shuffle(questions)
    return World(f"{template.head}\n\n{text}" if template.head else text, tuple(questions))


# -- lists, tables, code ----------------------------------------------------------------------------------------------


def _register(
    rng: random.Random, family: Family, room: int, count: Count, more: tuple[Make, ...] = ()
) -> tuple[words.Listing, list[str], list[str], str]:
    """A template, keys, values, and the list as text. more: what keys and values may be besides the usual."""
    template = rng.choice(family.pairs)
    key, value = rng.choice((*KEYS, *more)), rng.choice((*VALUES, *more))
    number = fitting(lambda: template.entry.format(key=key(rng, family), value=value(rng, family)), room, count)
    keys = distinct(rng, family, key, number)
    values = [value(rng, family) for _ in keys]
    lines = [template.entry.format(key=k, value=v) for k, v in zip(keys, values)]
    return template, keys, values, "\n".join([template.head, *lines] if template.head else lines)


def pairs(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """A list of keys and values; one is looked up."""
    template, keys, values, text = _register(rng, family, room, count, (words.identifier,))
    questions = []
    for i in asked_of(rng, len(keys)):
        lead = template.lead.format(key=keys[i]) if rng.random() < 0.7 else ""
        questions.append(Question(template.ask.format(key=keys[i]), lead, after(lead, values[i]), (values[i],)))
    return World(text, tuple(questions))


def lookups(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """The same list; several are looked up and told as lines."""
    template, keys, values, text = _register(rng, family, room, count)
    questions = []
    for _ in range(24):
        chosen = asked_of(rng, len(keys), rng.choice((3, 4, 6)))
        lines = tuple(f"{keys[i]}: {values[i]}" for i in chosen)
        ask = template.many.format(keys=listed([keys[i] for i in chosen]))
        questions.append(Question(ask, "", "\n".join(lines), lines, "order"))
    return World(text, tuple(questions))


def common(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """A numbered list in which a few words come far more often than the others."""
    template, n = rng.choice(family.common), rng.choice((3, 5, 10))
    make = rng.choice((words.noun, words.coined, words.compound))
    entries = fitting(lambda: template.entry.format(i=rng.randrange(10, 1000), word=make(rng, family)), room, count, 30)
    rare = rng.choice((1, 2, 3))
    often = min(max(3 * rare, rng.choice((6, 12, 20, 30))), max(2, entries // (2 * n)))
    need = n + max(4, (entries - n * often) // rare)
    pool = distinct(rng, family, make if need < len(family.nouns) // 2 else words.compound, need)
    top = pool[:n]
    heard = top * often + pool[n:] * rare
    rng.shuffle(heard)
    text = " ".join(template.entry.format(i=i + 1, word=word) for i, word in enumerate(heard))
    return _most(template, text, top, n, rng)


def frequent(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Made-up words whose frequencies fall as 1 / rank^2; the first ones are asked for."""
    template, n = rng.choice(family.frequent), 3
    entries = fitting(lambda: template.entry.format(word=words.coined(rng, family)), room, count, 30)
    pool = distinct(rng, family, words.coined, max(20, entries // 12))
    weights = [1 / (rank + 1) ** rng.choice((1.5, 2.0)) for rank in range(len(pool))]
    heard = [word for word, w in zip(pool, weights) for _ in range(max(1, round(entries * w / sum(weights))))]
    shares = {word: heard.count(word) for word in pool[: 3 * n]}
    top = sorted(shares, key=lambda word: -shares[word])[:n]
    rng.shuffle(heard)
    return _most(template, " ".join(template.entry.format(word=word) for word in heard), top, n, rng)


def _most(template: words.Listing, text: str, top: list[str], n: int, rng: random.Random) -> World:
    lead = template.lead if rng.random() < 0.7 else ""
    question = Question(template.ask.format(n=n), lead, after(lead, ", ".join(top)), tuple(top))
    return World(f"{template.head}\n{text}", (question,))


def table(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Rows of a table; some are to be written as JSON."""
    template = rng.choice(family.tables)
    columns = ["id", *rng.sample(family.columns, rng.choice((3, 4, 5)))]
    makes = [words.code, *(rng.choice((words.number, words.noun, words.coined, words.code)) for _ in columns[1:])]
    separator = template.entry
    entries = fitting(lambda: separator.join(make(rng, family) for make in makes), room, count)
    ids = distinct(rng, family, words.code, entries)
    rows = [[one, *(make(rng, family) for make in makes[1:])] for one in ids]
    lines = [separator.join(row) for row in [columns, *rows]]
    questions = []
    for _ in range(16):
        chosen = asked_of(rng, len(rows), rng.choice((1, 2)))
        objects = tuple(json.dumps(dict(zip(columns, rows[i]))) for i in chosen)
        ask = template.ask.format(ids=listed([ids[i] for i in chosen]))
        questions.append(Question(ask, "", "\n".join(objects), objects, "json"))
    return World("\n".join([template.head, *lines] if template.head else lines), tuple(questions))


def code(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """A file of small functions; what one of them returns is asked for."""
    template = rng.choice(family.code)

    def name(rng: random.Random, family: Family) -> str:
        return f"{words.noun(rng, family)}_{words.coined(rng, family)}"

    entries = fitting(
        lambda: template.entry.format(name=name(rng, family), value=words.number(rng, family)), room, count
    )
    names = distinct(rng, family, name, entries)
    values = [words.number(rng, family) for _ in names]
    lines = [template.entry.format(name=n, value=v) for n, v in zip(names, values)]
    questions = []
    for i in asked_of(rng, len(names)):
        lead = template.lead.format(name=names[i]) if rng.random() < 0.7 else ""
        questions.append(Question(template.ask.format(name=names[i]), lead, after(lead, f"{values[i]}."), (values[i],)))
    return World("\n".join([template.head, *lines]), tuple(questions))


def sections(rng: random.Random, family: Family, room: int, count: Count) -> World:
    """Headed lists; one of them is to be said again in full."""
    template, make = rng.choice(family.sections), rng.choice((words.compound, words.person, words.coined))
    size = rng.choice((4, 6, 8))

    def section(key: str) -> tuple[str, list[str]]:
        items = distinct(rng, family, make, size)
        return template.entry.format(key=key, items="\n".join(items)) + "\n", items

    entries = fitting(lambda: section(words.compound(rng, family))[0], room, count, 2)
    keys = distinct(rng, family, words.compound, entries)
    parts = [section(key) for key in keys]
    questions = []
    for i in asked_of(rng, len(keys), 16):
        lead = template.lead.format(key=keys[i])
        target = ("\n" if lead else "") + "\n".join(parts[i][1])
        questions.append(Question(template.ask.format(key=keys[i]), lead, target, tuple(parts[i][1]), "order"))
    return World("\n".join([template.head, *(text for text, _ in parts)]), tuple(questions))


TASKS: dict[str, Task] = {
    f.__name__: f
    for f in (needle_keys, needle_values, needle_queries, variables, pairs, lookups, common, frequent, table, code,
              sections)
}  # fmt: skip
