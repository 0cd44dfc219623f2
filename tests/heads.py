"""Synthetic EAGLE-3 heads in each public layout, and what they mean, computed in a straight line from the published
forward: no code of the package. At the end a cache with such a head, and what its drafter is asked."""

from __future__ import annotations

import functools
import json

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_hf import OasisCache

H, INNER, HEADS, KV, DIM, V, VD, LAYERS = 64, 96, 4, 2, 32, 300, 100, 8
KEPT = 16  # latest states of a row: a crop by fewer tokens loses nothing
TAPS = (2, 4, 5)  # 2, L // 2, L - 3


@functools.cache
def target(hidden: int = H, vocab: int = V) -> torch.nn.Module:
    """A tiny target with sharp random weights, shared by all tests."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, initializer_range=0.15, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def weights(
    hidden=H, vocab=V, draft=VD, taps=3, wide=None, qk_norm=False, biases=(), norm_before_fc=False,
    fc_norm=False, embeddings=False, lm_head=True, seed=3,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A head's tensors under the plain layout's names; none of them is what an initialisation would give."""
    generator = torch.Generator().manual_seed(seed)
    wide = wide or hidden

    def random(*shape, around=0.0, scale=0.15):
        return around + scale * torch.randn(shape, generator=generator)

    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    made = {"fc.weight": random(hidden, taps * wide)}
    sizes = {
        attention + "q_proj": (HEADS * DIM, 2 * hidden), attention + "k_proj": (KV * DIM, 2 * hidden),
        attention + "v_proj": (KV * DIM, 2 * hidden), attention + "o_proj": (hidden, HEADS * DIM),
        mlp + "gate_proj": (INNER, hidden), mlp + "up_proj": (INNER, hidden), mlp + "down_proj": (hidden, INNER),
    }  # fmt: skip
    made.update({f"{name}.weight": random(*size) for name, size in sizes.items()})
    norms = {"norm": hidden, **{f"midlayer.{n}": hidden for n in ("hidden_norm", "input_layernorm")}}
    norms["midlayer.post_attention_layernorm"] = hidden
    if qk_norm:
        norms.update({attention + "q_norm": DIM, attention + "k_norm": DIM})
    if norm_before_fc:
        norms["input_norm"] = taps * wide
    if fc_norm:
        norms.update({f"fc_norm.{i}": wide for i in range(taps)})
    made.update({f"{name}.weight": random(size, around=1.0, scale=0.3) for name, size in norms.items()})
    for name in biases:
        made[f"{name}.bias"] = random(made[f"{name}.weight"].shape[0])
    if lm_head:
        made["lm_head.weight"] = random(draft, hidden)
    if embeddings:
        made["embed_tokens.weight"] = random(vocab, hidden, scale=0.5)
    if draft != vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft].sort().values
        made["d2t"] = ids - torch.arange(draft)
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return made


LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "vocab_size": V, "max_position_embeddings": 2048,
}  # fmt: skip


def plain_config(architecture="LlamaForCausalLMEagle3", **more):
    return {**LAYER, "architectures": [architecture], "draft_vocab_size": VD, "rope_theta": 1e4, **more}


def speculators_config(layer=None, **more):
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": VD,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": {**LAYER, "rope_theta": 1e4, **(layer or {})},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/target"}}, **more,
    }  # fmt: skip


def write(folder, config, tensors, how="safetensors", rename=lambda name: name):
    """A head's files. how: `safetensors`, `sharded`, `bin` or `sharded bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {rename(name): value.clone() for name, value in tensors.items()}
    end = "bin" if "bin" in how else "safetensors"
    stem, save = ("pytorch_model", torch.save) if end == "bin" else ("model", save_file)
    if not how.startswith("sharded"):
        save(tensors, folder / f"{stem}.{end}")
        return folder
    names = sorted(tensors)
    where = {name: f"{stem}-0000{1 + (i % 2)}-of-00002.{end}" for i, name in enumerate(names)}
    for file in set(where.values()):
        save({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def speculators_name(name):
    return name.replace("midlayer.", "layers.0.")


# -- what a head means ------------------------------------------------------------------------------------------------


def rms(v, w, eps=1e-5):
    return w * v / torch.sqrt(v.pow(2).mean() + eps)


class Straight:
    """One row at a time, one position after the other, everything from the beginning.

    Args:
        w: tensors under plain names. embeddings: used where the head ships none. theta: RoPE's base.
    """

    def __init__(
        self, w, embeddings, lm_head=None, theta=1e4, before_residual=False, norm_output=False, window=10**9,
        frequencies=None, eps=1e-5,
    ):  # fmt: skip
        self.w, self.embeddings = w, w.get("embed_tokens.weight", embeddings)
        self.lm_head = w.get("lm_head.weight", lm_head)
        self.before_residual, self.norm_output, self.window, self.eps = before_residual, norm_output, window, eps
        self.kv = w["midlayer.self_attn.k_proj.weight"].shape[0] // DIM
        self.frequencies = theta ** (-torch.arange(0, DIM, 2) / DIM) if frequencies is None else frequencies

    def linear(self, name, x):
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def rope(self, x, position):
        half, out = DIM // 2, x.clone()
        for i in range(half):
            angle = position * self.frequencies[i]
            cos, sin = torch.cos(angle), torch.sin(angle)
            out[:, i] = x[:, i] * cos - x[:, i + half] * sin
            out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
        return out

    def fused(self, taps):
        """taps: the states of one position, each `[Ht]`."""
        if "fc_norm.0.weight" in self.w:
            taps = [rms(tap, self.w[f"fc_norm.{i}.weight"], self.eps) for i, tap in enumerate(taps)]
        joined = torch.cat(list(taps))
        if "input_norm.weight" in self.w:
            joined = rms(joined, self.w["input_norm.weight"], self.eps)
        return self.linear("fc", joined)

    def row(self, token, u, position):
        """q, k, v `[heads, D]` and the residual."""
        normed = rms(u, self.w["midlayer.hidden_norm.weight"], self.eps)
        embedding = rms(self.embeddings[token], self.w["midlayer.input_layernorm.weight"], self.eps)
        z = torch.cat((embedding, normed))
        q, k, v = (self.linear(f"midlayer.self_attn.{n}_proj", z).view(-1, DIM) for n in "qkv")
        if "midlayer.self_attn.q_norm.weight" in self.w:
            q = torch.stack([rms(head, self.w["midlayer.self_attn.q_norm.weight"], self.eps) for head in q])
            k = torch.stack([rms(head, self.w["midlayer.self_attn.k_norm.weight"], self.eps) for head in k])
        return self.rope(q, position), self.rope(k, position), v, normed if self.before_residual else u

    def output(self, q, keys, values, residual):
        heads = []
        for h, query in enumerate(q):
            group = h // (len(q) // self.kv)
            scores = torch.stack([key[group] @ query for key in keys]) / DIM**0.5
            heads.append(sum(p * value[group] for p, value in zip(scores.softmax(0), values)))
        a = residual + self.linear("midlayer.self_attn.o_proj", torch.cat(heads))
        x = rms(a, self.w["midlayer.post_attention_layernorm.weight"], self.eps)
        gate = self.linear("midlayer.mlp.gate_proj", x)
        return a + self.linear(
            "midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * self.linear("midlayer.mlp.up_proj", x)
        )

    @torch.no_grad()
    def drafts(self, tokens, taps, count, missing=()):
        """tokens: x[0..m]. taps: `[taps, m, Ht]`. missing: positions whose row is not there. Returns `count` tokens and
        their logits."""
        last = len(tokens) - 2
        rows = [self.row(tokens[t + 1], self.fused(taps[:, t]), t) for t in range(last + 1)]
        seen = [(t, k, v) for t, (_, k, v, _) in enumerate(rows) if t not in missing]
        q, _, _, residual = rows[-1]
        chosen, logits = [], []
        for step in range(count):
            at = last + step
            inside = [(k, v) for t, k, v in seen if t > at - self.window]
            y = self.output(q, [k for k, _ in inside], [v for _, v in inside], residual)
            normed = rms(y, self.w["norm.weight"], self.eps)
            logits.append(self.lm_head @ normed)
            i = int(logits[-1].argmax())
            chosen.append(i + int(self.w["d2t"][i]) if "d2t" in self.w else i)
            q, k, v, residual = self.row(chosen[-1], normed if self.norm_output else y, at + 1)
            seen.append((at + 1, k, v))
        return chosen, torch.stack(logits)


@torch.no_grad()
def states(model, tokens, taps):
    """`[taps, n, Ht]`: the inputs of those layers, of one row by itself and without a cache."""
    kept = {}
    places = [*model.model.layers, model.model.norm]
    handles = [
        places[i].register_forward_pre_hook(lambda module, args, i=i: kept.__setitem__(i, args[0][0].clone()))
        for i in taps
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([kept[i] for i in taps])


# -- a cache with the plain head --------------------------------------------------------------------------------------

TENSORS = weights()


def straight(window=10**9, tensors=TENSORS, **kwargs):
    return Straight(tensors, target().get_input_embeddings().weight, window=window, **kwargs)


def ids(rows, length, seed=0):
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def wanted(tokens, count, window=10**9, missing=()):
    return straight(window).drafts(tokens, states(target(), tokens[:-1], TAPS), count, missing)[0]


def agree(cache, texts, count=3, new=7, found=None, missing=()):
    """What the drafter proposes behind each row's text (python lists) and a new token."""
    drafter, tokens = cache.drafter, torch.tensor([new + row for row in range(len(texts))])
    lengths = cache.state.rows.lengths(cache.device)
    assert lengths.tolist() == [len(text) for text in texts]
    draft = drafter.propose(tokens, lengths, count)
    found = [True] * len(texts) if found is None else found
    assert draft.found.tolist() == found and draft.tokens.shape == (len(texts), count)
    assert ((draft.tokens >= 0) & (draft.tokens < V)).all(), "always valid ids"
    for row, text in enumerate(texts):
        if found[row]:
            want = wanted([*text, int(tokens[row])], count, drafter.window, missing)
            assert draft.tokens[row].tolist() == want, f"row {row}"


@torch.no_grad()
def run(cache, tokens, **kwargs):
    """tokens: `[B, n]` to the cache in one forward."""
    return cache.model(tokens, past_key_values=cache, **kwargs)


@torch.no_grad()
def step(cache, tokens):
    """One decode step after the other."""
    for at in range(tokens.shape[1]):
        position = torch.full((len(tokens), 1), cache.get_seq_length())
        run(cache, tokens[:, at : at + 1], position_ids=position)


def opened(folder, prompt, **knobs):
    cache = OasisCache(target(), drafter=folder, **{"graphs": False, **knobs})
    if prompt is not None:
        run(cache, prompt)
    return cache


def noted(drafter):
    """What it is asked and proposes, as (lengths, tokens, drafts) of all rows."""
    seen, inner = [], drafter.propose

    def propose(tokens, lengths, count):
        draft = inner(tokens, lengths, count)
        assert draft.found.all()
        seen.append((lengths.tolist(), tokens.tolist(), draft.tokens.tolist()))
        return draft

    drafter.propose = propose
    return seen
