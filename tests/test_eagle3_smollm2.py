"""A real head on its real target. Skipped where no head for SmolLM2 stands in `oasis_hf/drafters/heads/`."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import OasisCache
from oasis_hf.drafters import known

pytestmark = pytest.mark.slow

HEADS = sorted(file.parent for file in known.TABLE.parent.glob("heads/smollm2*/config.json"))


@pytest.mark.skipif(not HEADS, reason="no head for SmolLM2 is here")
def test_most_of_its_own_next_tokens_are_proposed(smollm2_float32):
    model, tokenizer = smollm2_float32
    ask = [{"role": "user", "content": "Write an essay outline about game fowl."}]
    ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"]
    want = model.generate(ids, max_new_tokens=80, do_sample=False)
    cache = OasisCache(model, drafter=HEADS[0], speculate=True, draft_tokens=2)
    seen, inner = [], cache.drafter.propose

    def propose(tokens, lengths, count):
        draft = inner(tokens, lengths, count)
        seen.append((int(lengths), int(draft.tokens[0, 0]), bool(draft.found)))
        return draft

    cache.drafter.propose = propose
    got = model.generate(ids, past_key_values=cache, max_new_tokens=80, do_sample=False)
    assert torch.equal(got, want)
    assert cache.stepper.skipped > 25 and all(found for *_, found in seen)
    # Every step is asked: those that were skipped had right drafts.
    text = want[0].tolist()
    right = sum(text[at + 1] == token for at, token, _ in seen if at + 1 < len(text))
    missed = len(seen) - right
    assert 1 - missed / 80 >= 0.6
