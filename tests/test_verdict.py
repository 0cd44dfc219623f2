"""`oasis-hf doctor MODEL`: the verdict on a configuration, wherever it stands."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch
from families import REFUSED, refused, served
from tiny import FAMILIES
from vision import vision

from oasis_hf import OasisCache, cli, verdict
from oasis_hf.config import ConfigError
from oasis_hf.models import load_config


def findings(folder, *args):
    return {what: (value, ok) for what, value, ok in verdict.check_model(str(folder), *args)}


@pytest.fixture
def saved(tmp_path):
    def save(model, **changes):
        model.config.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return tmp_path

    return save


def test_all_that_is_told_of_a_hybrid(saved):
    seen = findings(saved(FAMILIES["gemma3"](), dtype="bfloat16"), 1000, 3)
    assert seen["family"][0] == "gemma3_text" and seen["class"][0] == "Gemma3ForCausalLM"
    assert seen["layers"][0] == "2 sliding_attention, 2 full_attention (a window of 24 tokens)"
    assert seen["supported"] == ("yes", True)
    assert seen["KV heads x head_dim"][0] == "2 x 16, bfloat16" and seen["group"][0].startswith("3 query heads")
    assert seen["one block of one KV head"][0] == "1,024 bytes"  # 2 x 16 tokens x 16 x 2 bytes
    assert seen["full KV"][0].startswith("256 bytes a token")  # 2 layers x 2 heads x 2 x 16 x 2
    assert seen["host memory for 3 x 1,000 tokens"][0] == "0.7 MiB"
    assert "no: the compiled operators serve a head_dim of 64" in seen["captured steps on a GPU"][0]
    assert seen["known EAGLE-3 head"][0].startswith("none")


def test_gpu_bytes_are_those_of_a_cache(saved):
    """What a cache has after a prompt of that many tokens."""
    model = FAMILIES["llama"]().eval()
    cache = OasisCache(model, drafter="previous")
    with torch.no_grad():
        model(torch.randint(3, 90, (2, 159)), past_key_values=cache)
        model(torch.randint(3, 90, (2, 1)), past_key_values=cache)
    told = next(v for w, (v, _) in findings(saved(model, dtype="float32"), 160, 2).items() if "the default" in w)
    working_set, summaries = (float(re.search(rf"([\d.]+) MiB {part}", told)[1]) for part in ("working set", "summ"))
    held = cache.memory()
    assert working_set == pytest.approx(held["working_set"] / 2**20, abs=0.06)
    assert summaries == pytest.approx(held["summaries"] / 2**20, abs=0.06)


def test_every_place_of_a_configuration(saved, tmp_path):
    folder = saved(FAMILIES["llama"](), dtype="bfloat16")
    assert findings(folder) == findings(folder / "config.json")
    # A GGUF file: its header names the sizes, and there are no weights.
    values = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 512,
        "llama.embedding_length": 96, "llama.feed_forward_length": 96, "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 16, "llama.vocab_size": 96,
    }  # fmt: skip
    pytest.importorskip("gguf")
    (tmp_path / "tiny.gguf").write_bytes(gguf(values))
    seen = findings(tmp_path / "tiny.gguf")
    assert seen["class"][0] == "LlamaForCausalLM" and seen["KV heads x head_dim"][0].startswith("2 x 16")


def gguf(values):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for name, value in values.items():
        kind, packed = (8, text(value)) if isinstance(value, str) else (4, struct.pack("<I", value)) if isinstance(
            value, int) else (6, struct.pack("<f", value))  # fmt: skip
        out += text(name) + struct.pack("<I", kind) + packed
    return out + b"\0" * (-len(out) % 32)


@pytest.mark.parametrize("family", ["DeepSeek-V3, R1, Kimi K2", "Qwen3-Next", "T5, FLAN-T5", "DiffLlama"])
def test_a_refusal_is_the_caches_own_and_the_command_exits_with_1(family, saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = saved(refused(family))
    seen = [value for what, value, ok in verdict.check_model(str(folder)) if what == "supported" and ok is False]
    assert seen and REFUSED[family][1] in seen[0] and all("use DynamicCache" in one for one in seen)
    assert cli.main(["doctor", str(folder)]) == 1
    assert "use DynamicCache" in " ".join(capsys.readouterr().out.split())


def test_models_that_take_images(saved):
    seen = findings(saved(vision("Qwen2.5-VL")))
    assert seen["supported"][1] and "ConditionalGeneration" in seen["class"][0]
    seen = findings(saved(vision("PaliGemma")))
    assert seen["supported"] == ("no: its attention is not causal; use DynamicCache for it.", False)


def test_head_sizes_that_differ_by_layer(saved):
    assert findings(saved(served("Gemma 4 (head sizes differ)")))["KV heads x head_dim"][0].startswith("1 x 32")


def test_quantized_weights_are_named_and_change_nothing(saved):
    seen = findings(saved(FAMILIES["qwen3"](), quantization_config={"quant_method": "gptq", "bits": 4}))
    assert seen["weights"][0].startswith("quantized (gptq)") and seen["supported"][1]


def test_a_known_head_is_found_by_name(tmp_path):
    folder = tmp_path / "SmolLM2-135M-Instruct"
    FAMILIES["llama"]().config.save_pretrained(folder)
    assert findings(folder)["known EAGLE-3 head"][0] == "in this package, smollm2-135m-eagle3"


def test_dynamic_rope_and_float32_are_not_captured(saved):
    seen = findings(saved(served("Llama with dynamic RoPE"), head_dim=64, dtype="bfloat16"))
    assert seen["captured steps on a GPU"][0].startswith("no: its RoPE scales by the furthest position")
    seen = findings(saved(FAMILIES["llama"](), head_dim=64, dtype="bfloat16"))
    assert seen["captured steps on a GPU"][0] == "yes"
    seen = findings(saved(FAMILIES["llama"](), head_dim=64, dtype="float32"))
    assert "not float32" in seen["captured steps on a GPU"][0]


def test_a_context_beyond_the_models_positions(saved):
    seen = findings(saved(FAMILIES["llama"](), dtype="bfloat16"), 4096)
    assert seen["host memory for 1 x 4,096 tokens"][0].endswith("; its positions end at 2,048")


@pytest.mark.parametrize("option", [("--context", "0"), ("--rows", "-1")], ids=" ".join)
def test_a_wrong_option_exits_with_2(option, saved, capsys):
    assert cli.main(["doctor", str(saved(FAMILIES["llama"]())), *option]) == 2
    assert f"{' '.join(option)} is not allowed: use an integer >= 1." in capsys.readouterr().err
    with pytest.raises(ConfigError):
        list(verdict.check_model("x", 0))


@pytest.mark.parametrize("what", ["broken.json", "broken.gguf"])
def test_a_file_that_is_no_configuration_exits_with_2(what, tmp_path, capsys):
    (tmp_path / what).write_bytes(b"{")
    assert cli.main(["doctor", str(tmp_path / what)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("oasis-hf: Can't load ") and error.count("\n") == 1


def test_no_weights_are_read(saved, monkeypatch):
    folder = saved(FAMILIES["llama"]())
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("weights were read")
    )
    assert findings(folder)["supported"][1] and load_config(str(folder)) is not None
