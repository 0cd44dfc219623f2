"""The command `oasis-hf roofline`, its figure, and hardware of one's own."""

import json

import pytest
import torch
from tiny import FAMILIES
from transformers import AutoConfig

from oasis_hf import ConfigError, bench, cli, roofline
from oasis_hf.roofline import METHODS, PRESETS, Hardware, Load, ModelShape, report


@pytest.fixture(scope="module")
def qwen3_8b():
    sizes = dict(bench.SHAPES["qwen3-8b"])
    return ModelShape.of(AutoConfig.for_model(sizes.pop("model_type"), **sizes))


# -- hardware -------------------------------------------------------------------------------------------------------


def test_presets_say_where_they_are_from():
    for name, one in PRESETS.items():
        assert one.name == name and one.source and one.hbm > one.link


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"base": "h100", "host": 2e12, "network": 12.5e9}))
    mine = roofline.hardware(file)
    assert (mine.name, mine.hbm, mine.host, mine.network) == ("mine", 3.35e12, 2e12, 12.5e9)
    file.write_text(json.dumps({"hbm": 1e12, "capacity": 2e10, "link": 1e10, "flops": 1e14}))
    assert roofline.hardware(str(file)) == Hardware("mine", 1e12, 2e10, 1e10, 1e14)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Can't read the hardware file"), ("[1]", "holds a list"),
        ('{"base": []}', "base=\\[\\] in .* is not known"),
        ('{"base": "h9"}', "base='h9' in .* is not known"), ('{"hbm": 1e12}', "lacks capacity, link, flops"),
        ('{"speed": 1}', "has the field 'speed': allowed are base, name"),
        ('{"base": "h100", "link": -1}', "Hardware.link=-1 is not allowed: use a number above 0."),
        ('{"base": "h100", "host": "much"}', "Hardware.host='much' is not allowed"),
        ('{"base": "h100", "devices": 0}', "Hardware.devices=0 is not allowed: use an integer from 1 to"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(tmp_path, text, told):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        roofline.hardware(tmp_path / "mine.json")
    assert "\n" not in str(error.value)


# -- the command ----------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    status = cli.main(["roofline", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys, "qwen3-8b", "--hardware", "h100", "--rows", "64")
    assert status == 0
    for part in (*METHODS, "qwen3-8b on h100: 64 rows of 16,384 tokens", "147,456 bytes a token", "(no room)", "90%"):
        assert part in out
    assert sum(line.startswith(("KV:", "Budget:", "On demand,", "First token")) for line in out.splitlines()) == 4


def test_command_prints_json(capsys, qwen3_8b):
    status, out, _ = run(capsys, "qwen3-8b", "--json", "--devices", "2", "--context", "32768", "--extra-ms", "10")
    told = json.loads(out)
    assert status == 0 and told["model"] == "qwen3-8b" and told["hardware"]["devices"] == 2
    machine = PRESETS["h200"].times(2)
    assert told == {"model": "qwen3-8b"} | json.loads(
        json.dumps(report.plan(qwen3_8b, machine, Load(16, 32768), 0.9, 0.01))
    )
    assert set(told["steps"]) == set(METHODS)


def test_command_reads_a_folder(capsys, tmp_path):
    config = FAMILIES["gemma3"]().config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    told = json.loads(run(capsys, str(tmp_path), "--json", "--context", "100")[1])
    assert told["kv_token"] == 2 * 2 * 2 * 16 * 2 and told["shape"]["windows"] == [24, 24]


def test_command_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roofs.svg"
    assert run(capsys, "qwen3-8b", "--plot", str(file))[0] == 0
    assert "<svg" in file.read_text()


def test_the_figure_has_three_roofs_and_all_points(qwen3_8b):
    pytest.importorskip("matplotlib")
    (axes,) = report.figure(qwen3_8b, PRESETS["h200"], Load(44, 16384), "qwen3-8b").axes
    labels = {line.get_label(): line for line in axes.lines}
    for name in ("GPU memory, 4,800 GB/s", "link to the host, 64 GB/s", "network, 50 GB/s"):
        x, y = labels[name].get_data()
        assert [b / a for a, b in zip(x, y)] == pytest.approx(
            [float(name.split(", ", 1)[1][:-5].replace(",", "")) * 1e9] * 2
        )
    drawn = [labels[label] for label in labels if label.startswith("measured")]
    assert sum(len(line.get_xdata()) for line in drawn) == len(report.measured())
    assert [text.get_text() for text in axes.texts] == list(METHODS)
    (working_set,) = (line for label, line in labels.items() if label.startswith("ceiling, working set, 242 rows"))
    (dense,) = (line for label, line in labels.items() if label.startswith("ceiling, dense, 45 rows"))
    best = report.plan(qwen3_8b, PRESETS["h200"], Load(44, 16384))["steps"]
    assert set(dense.get_ydata()) == {best["dense"]["tokens_per_second_at_largest_rows"]}
    assert min(working_set.get_ydata()) > 2 * best["prefetch"]["tokens_per_second_at_largest_rows"]  # without a link


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["qwen3-8b", "--hardware", "h9"], "hardware='h9' is not known: use one of h200,"),
        (["qwen3-8b", "--hardware", "none.json"], "Can't read the hardware file none.json"),
        (["qwen3-8b", "--context", "1" + "0" * 400], "context=1000"),
        (["qwen3-8b", "--rows", "0"], "rows=0"), (["qwen3-8b", "--fetch", "2"], "fetch=2.0"),
        (["qwen3-8b", "--hit", "-1"], "hit=-1.0"), (["qwen3-8b", "--devices", "3"], "devices=3"),
        (["qwen3-8b", "--devices", "0"], "devices=0"), (["qwen3-8b", "--extra-ms", "-1"], "extra-ms=-1.0"),
        (["qwen3-8b", "--weight-bits", "0"], "weight_bits=0.0"),
        (["no/such-model-here"], "Can't load no/such-model-here"), ([""], "path can't be empty"),
        (["qwen3-8b", "--plot", "no/such/folder/a.png"], "Can't write the figure no/such/folder/a.png"),
        (["qwen3-8b", "--plot", "a.nonsense"], "Can't write the figure a.nonsense"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, told, capsys):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and told in err and out == ""
    assert err.startswith("oasis-hf: ") and err.count("\n") == 1


def test_without_matplotlib_it_says_so(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _, err = run(capsys, "qwen3-8b", "--plot", "a.png")
    assert status == 2 and "pip install 'oasis-hf[plot]'" in err and err.count("\n") == 1


def test_shapes_of_bench_are_taken(capsys):
    for name in bench.SHAPES:
        assert run(capsys, name, "--json")[0] == 0
