"""The operators of a prompt and of a decode step, as `torch.ops.oasis_hf.*`.

Registered once with `torch.library`: the compiled operators on CUDA, the pure-torch reference on every other device,
and fake implementations that let `torch.compile` trace past them.
"""

from __future__ import annotations

import torch

from . import cuda, reference

_SCHEMAS = {
    "summarize": "(Tensor keys, str scorer, int parts, bool int8) -> (Tensor, Tensor)",
    "score": (
        "(Tensor query, Tensor summaries, Tensor scales, Tensor closed, Tensor weights, str scorer, "
        "float half_range, str reduction, float scaling, int sink_blocks, int recent_blocks) -> Tensor"
    ),
    "select": (
        "(Tensor scores, Tensor(a!) table, Tensor(b!) last_selected, Tensor lengths, Tensor order, int cap, "
        "Tensor step, Tensor? caps=None, Tensor(c!)? gains=None, Tensor(d!)? means=None, float rate=1.0) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "correct": (
        "(Tensor(a!) scores, Tensor? heads, Tensor table, Tensor closed, float above, Tensor step, Tensor(b!) counts, "
        "Tensor(c!) fired) -> ()"
    ),
    "enter": (
        "(Tensor query, Tensor new_keys, Tensor new_values, Tensor(a!) queries, int count, int window, "
        "Tensor(b!) keys, Tensor(c!) values, Tensor(d!) fresh) -> ()"
    ),
    "gather": (
        "(Tensor pages, Tensor page_table, Tensor(a!) keys, Tensor(b!) values, Tensor plan_block, "
        "Tensor plan_slot) -> ()"
    ),
    "write": "(Tensor(a!) pages, Tensor page_table, Tensor keys, Tensor values, int start) -> ()",
    "append": (
        "(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) table, Tensor(d!) last_selected, Tensor lengths, "
        "Tensor order, Tensor new_keys, Tensor new_values, Tensor step, bool may_open=True) -> (Tensor, Tensor)"
    ),
    "attend": (
        "(Tensor query, Tensor keys, Tensor values, Tensor table, Tensor lengths, Tensor tail_mask, "
        "float scaling, Tensor? sinks) -> Tensor"
    ),
}

_library = torch.library.Library("oasis_hf", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
    _library.impl(_name, getattr(cuda, _name), "CUDA")


def _fake_summarize(keys, scorer, parts, int8):
    shape = (*keys.shape[:-2], parts, 2, keys.shape[-1])
    scales = keys.new_empty(shape[:-1] if int8 else (0,), dtype=torch.float16)
    return keys.new_empty(shape, dtype=torch.int8 if int8 else keys.dtype), scales


def _fake_score(query, summaries, *rest):
    return query.new_empty(summaries.shape[:3], dtype=torch.float32)


def _fake_select(scores, table, last_selected, lengths, order, cap, step, *sharing):
    plan = table.new_empty((*table.shape[:2], min(cap, table.shape[2])))
    return plan, torch.empty_like(plan), table.new_empty((3, table.shape[1]))


def _fake_append(keys, values, table, last_selected, lengths, order, new_keys, new_values, step, may_open=True):
    return table.new_empty(table.shape[:2]), table.new_empty(table.shape[:2], dtype=torch.bool)


torch.library.register_fake("oasis_hf::summarize", _fake_summarize)
torch.library.register_fake("oasis_hf::score", _fake_score)
torch.library.register_fake("oasis_hf::select", _fake_select)
torch.library.register_fake("oasis_hf::correct", lambda *args: None)
torch.library.register_fake("oasis_hf::enter", lambda *args: None)
torch.library.register_fake("oasis_hf::gather", lambda *args: None)
torch.library.register_fake("oasis_hf::write", lambda *args: None)
torch.library.register_fake("oasis_hf::append", _fake_append)
torch.library.register_fake("oasis_hf::attend", lambda query, *rest: query.new_empty(query.shape))

summarize = torch.ops.oasis_hf.summarize
score = torch.ops.oasis_hf.score
select = torch.ops.oasis_hf.select
correct = torch.ops.oasis_hf.correct
enter = torch.ops.oasis_hf.enter
gather = torch.ops.oasis_hf.gather
write = torch.ops.oasis_hf.write
append = torch.ops.oasis_hf.append
attend = torch.ops.oasis_hf.attend

__all__ = ["append", "attend", "correct", "enter", "gather", "reference", "score", "select", "summarize", "write"]
