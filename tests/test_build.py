"""The real extension, built where there is no GPU: it compiles for both architectures without spills, imports, and
refuses wrong arguments by name. Skipped only where there is no compiler to build it with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from oasis_hf import pipeline
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import build, cuda, reference

try:
    build.toolchain()
except build.BuildError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def built():
    return build.build(build.BUILT_WITHOUT_A_DEVICE)


@pytest.fixture(scope="module")
def extension(built):
    import importlib.util

    spec = importlib.util.spec_from_file_location(build.NAME, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_operator_has_a_source_free_of_torch():
    names = {file.stem for file in build.sources()}
    assert names == {"summarize", "score", "select", "gather", "write", "append", "enter", "attend", "correct"}
    for file in build.sources():
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)", file.read_text()), file.name


def test_nothing_spills(built):
    log = (built.parent / "kernels" / "kernels.log").read_text()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) > 20 and set(spills) == {("0", "0")}
    for arch in build.BUILT_WITHOUT_A_DEVICE:
        assert f"sm_{arch}" in log


def test_it_is_built_once(built):
    before = built.stat().st_mtime_ns
    assert build.build(build.BUILT_WITHOUT_A_DEVICE) == built and built.stat().st_mtime_ns == before


def test_a_missing_toolchain_is_named(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"missing nvcc .*; a C\+\+ compiler"):
        build.toolchain()


def test_a_compiler_error_names_its_log(monkeypatch, tmp_path):
    broken = tmp_path / "csrc"
    broken.mkdir()
    (broken / "oasis.h").write_text("")
    (broken / "broken.cu").write_text("this is no C++\n")
    monkeypatch.setattr(build, "source_folder", lambda: broken)
    with pytest.raises(build.BuildError, match=r"could not compile .* in (.*kernels\.log)") as error:
        build.compile_kernels(tmp_path / "out", ("80",))
    log = re.search(r"in (\S*kernels\.log)", str(error.value)).group(1)
    assert "broken.cu" in Path(log).read_text()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("no folder")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(taken))
    with pytest.raises(build.BuildError, match=r"can't be kept in .*set TORCH_EXTENSIONS_DIR"):
        build.build(build.BUILT_WITHOUT_A_DEVICE)


def test_an_extension_in_the_package_serves_the_devices_it_was_built_for(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "ahead_of_time", lambda: tmp_path / f"{build.NAME}.so")
    assert build._ahead_architectures() == set()
    build.ahead_of_time().write_bytes(b"")
    assert build._ahead_architectures() == set()
    (tmp_path / f"{build.NAME}.archs").write_text("80 90a")
    assert build._ahead_architectures() == {"80", "90a"}


# -- arguments ---------------------------------------------------------------------------------------------------------

B, H, G, T, D, S, N, P, C = 2, 2, 2, 3, 64, 4, 6, 2, 2
bf16 = torch.bfloat16


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def calls():
    """Right arguments of each operator, but for the device: in the order of the bindings."""
    keys = torch.zeros(B, H, TAIL + S * BLOCK, D, dtype=bf16)
    query = torch.zeros(B, H * G, T, D, dtype=bf16)
    table, plan = ints(B, H, S), ints(B, H, C)
    scratch = torch.zeros(1 << 24, dtype=torch.uint8)
    pages = torch.zeros(0, 2, BLOCK, D, dtype=bf16)
    new = torch.zeros(B, H, D, dtype=bf16)
    summaries, scales = torch.zeros(B, H, N, P, 2, D, dtype=torch.int8), torch.zeros(B, H, N, P, 2).half()
    step = torch.tensor(1)
    return {
        "summarize": dict(
            keys=torch.zeros(2, 3, BLOCK, D, dtype=bf16), scorer="midrange", parts=P,
            out=torch.zeros(2, 3, P, 2, D, dtype=torch.int8), scales=torch.zeros(2, 3, P, 2).half(), stream=0,
        ),
        "score": dict(
            query=query, summaries=summaries, scales=scales, closed=ints(B), weights=torch.zeros(B, T),
            scorer="midrange", half_range=0.5, reduction="softmax-mean", scaling=0.1, sink_blocks=0, recent_blocks=0,
            out=torch.zeros(B, H, N), scratch=scratch, stream=0,
        ),
        "select": dict(
            scores=torch.zeros(B, H, N), table=table, last_selected=ints(B, H, S), lengths=ints(B), order=ints(S),
            step=step, fresh=torch.zeros(B, H, S, dtype=torch.bool), plan_block=plan, plan_slot=plan.clone(),
            counts=ints(3, H), wasted=ints(H), caps=ints(B, H).int(), gains=torch.zeros(B, H, C),
            means=torch.zeros(B, H, N), rate=0.5, stream=0,
        ),
        "correct": dict(
            scores=torch.zeros(B, H, N), heads=torch.zeros(B, H, dtype=torch.bool), table=table, closed=ints(B),
            above=0.1, step=step, counts=ints(2, H), fired=ints(1 + B), stream=0,
        ),
        "gather": dict(
            pages=pages, page_table=ints(B, H, 0), keys=keys, values=keys.clone(), plan_block=plan,
            plan_slot=plan.clone(), ctas=0, stream=0,
        ),
        "write": dict(
            pages=pages, page_table=ints(H, 0), keys=torch.zeros(H, 0, D, dtype=bf16),
            values=torch.zeros(H, 0, D, dtype=bf16), start=0, ctas=0, stream=0,
        ),
        "append": dict(
            keys=keys, values=keys.clone(), table=table, last_selected=ints(B, H, S), lengths=ints(B), order=ints(S),
            new_keys=new, new_values=new.clone(), step=step, fresh=None, slot=None, evicted=None, wasted=None,
            pages=None, page_table=None, summaries=summaries, scales=scales, scorer="minmax", stream=0,
        ),
        "enter": dict(
            query=query, new_keys=query[:, :H], new_values=query[:, :H].clone(),
            queries=torch.zeros(B, H * G, 4 + TAIL, D, dtype=bf16), count=1, window=4, keys=keys, values=keys.clone(),
            fresh=torch.zeros(B, H, S, dtype=torch.bool), stream=0,
        ),
        "attend": dict(
            query=query, keys=keys, values=keys.clone(), table=table, lengths=ints(B),
            tail_mask=torch.zeros(T, TAIL, dtype=torch.bool), scaling=0.1, sinks=torch.zeros(H * G),
            out=query.transpose(1, 2).contiguous(), scratch=scratch, stream=0,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", calls())
def test_the_device_is_asked_for_last(extension, op):
    with pytest.raises(ValueError, match=f"oasis_hf.{op}: `.*` must be on a CUDA device, not cpu"):
        getattr(extension, op)(*calls()[op].values())


@pytest.mark.parametrize("op", calls())
@pytest.mark.parametrize("wrong", ["dtype", "shape", "stride"])
def test_a_wrong_tensor_is_named(extension, op, wrong):
    tried = 0
    for name, value in calls()[op].items():
        if not isinstance(value, torch.Tensor) or name in ("pages", "page_table"):
            continue
        bad = calls()[op]
        if wrong == "dtype":
            bad[name] = value.to(torch.complex64)
        elif wrong == "shape":
            bad[name] = value[None].clone()
        elif value.ndim and value.numel() != 1 and value.shape[-1] > 1:
            bad[name] = torch.empty((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)[..., ::2]
        else:
            continue
        if name == "scratch" and wrong == "stride":
            bad[name] = bad[name][:64]
        with pytest.raises(ValueError, match=rf"oasis_hf\.{op}: .*`{name}`"):
            getattr(extension, op)(*bad.values())
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("op", ["summarize", "score", "append"])
def test_int8_summaries_without_scales_are_refused(extension, op):
    bad = calls()[op]
    bad["scales"] = None
    with pytest.raises(ValueError, match=f"oasis_hf.{op}: `scales` must be given"):
        getattr(extension, op)(*bad.values())


def test_heads_that_do_not_divide_are_refused(extension):
    for op in ("score", "attend"):
        bad = calls()[op]
        bad["query"] = torch.zeros(B, 3, T, D, dtype=bf16)
        with pytest.raises(ValueError, match="heads"):
            getattr(extension, op)(*bad.values())


def test_shares_without_room_are_refused(extension):
    for name, least in (("gains", C), ("means", N)):
        bad = calls()["select"]
        bad[name] = torch.zeros(B, H, least - 1)
        with pytest.raises(ValueError, match=f"oasis_hf.select: `{name}` must have room for {least} blocks"):
            extension.select(*bad.values())


@pytest.mark.parametrize("bad", [{"count": 0}, {"count": T + 1}, {"window": 0}, {"window": 4 + TAIL}], ids=str)
def test_lines_that_do_not_fit_are_refused(extension, bad):
    name = "queries" if bad.get("window") else "count" if "count" in bad else "queries"
    with pytest.raises(ValueError, match=f"oasis_hf.enter: `{name}` must"):
        extension.enter(*{**calls()["enter"], **bad}.values())


@pytest.mark.parametrize("op", ["gather", "write"])
@pytest.mark.parametrize("name", ["pages", "page_table"])
def test_pageable_host_memory_is_refused(extension, op, name):
    bad = calls()[op]
    bad[name] = torch.zeros(3, 2, BLOCK, D, dtype=bf16) if name == "pages" else ints(*bad[name].shape[:-1], N)
    with pytest.raises(ValueError, match=f"oasis_hf.{op}: `{name}` must be pinned or on the device, not pageable"):
        getattr(extension, op)(*bad.values())


@pytest.mark.parametrize("op", ["gather", "write"])
def test_pages_and_tables_of_another_shape_are_refused(extension, op):
    for name, shape in (("pages", (0, 2, BLOCK, D + 8)), ("page_table", (*calls()[op]["page_table"].shape[:-2], 9, 0))):
        bad = calls()[op]
        bad[name] = bad[name].new_zeros(shape)
        with pytest.raises(ValueError, match=f"oasis_hf.{op}: `{name}` must be"):
            getattr(extension, op)(*bad.values())


@pytest.mark.parametrize("start, tokens", [(-1, 0), (0, 1), (16, 0)])
def test_tokens_beyond_the_table_are_refused(extension, start, tokens):
    bad = calls()["write"]
    bad["keys"] = bad["values"] = torch.zeros(H, tokens, D, dtype=bf16)
    bad["start"] = start
    with pytest.raises(ValueError, match=f"oasis_hf.write: `start` {start} and {tokens} tokens don't fit the 0 blocks"):
        extension.write(*bad.values())


def test_keys_of_uneven_strides_are_refused(extension):
    bad = calls()["summarize"]
    bad["keys"] = torch.zeros(2, 3, BLOCK + 1, D, dtype=bf16)[:, :, :BLOCK]
    with pytest.raises(ValueError, match="oasis_hf.summarize: `keys` must have one stride for all tokens"):
        extension.summarize(*bad.values())


def test_too_little_scratch_is_refused(extension):
    for op in ("score", "attend"):
        bad = calls()[op]
        bad["scratch"] = torch.zeros(4, dtype=torch.uint8)
        need = getattr(extension, f"{op}_scratch")(B, H, G, T, N if op == "score" else S, P if op == "score" else D)
        if need > 4:
            with pytest.raises(ValueError, match=f"oasis_hf.{op}: `scratch` must hold {need} bytes"):
                getattr(extension, op)(*bad.values())


def test_on_a_cpu_the_reference_serves():
    scores = torch.randn(1, 1, 8)
    args = (torch.full((1, 1, 3), -1), torch.zeros(1, 1, 3, dtype=torch.int64), torch.tensor([120]), torch.arange(3))
    mine = torch.ops.oasis_hf.select(scores, *[a.clone() for a in args], 2, torch.tensor(1))
    theirs = reference.select(scores, *[a.clone() for a in args], 2, torch.tensor(1))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_layers_that_are_not_alike_are_refused(extension):
    """One launch has one shape; the lists of `gather_layers` say whose is another."""
    one = calls()["gather"]
    lists = [[one[name]] * 2 for name in ("page_table", "keys", "values", "plan_block", "plan_slot")]
    with pytest.raises(ValueError, match="oasis_hf.gather: `keys` must be on a CUDA device, not cpu"):
        extension.gather_layers(one["pages"], *lists, 0, 0)
    for at, name in enumerate(("page_table", "keys", "values", "plan_block", "plan_slot")):
        other = [list(each) for each in lists]
        other[at][1] = other[at][1].new_zeros((B, H + 1, *other[at][1].shape[2:]))
        with pytest.raises(ValueError, match=f"oasis_hf.gather: `{name}` must"):
            extension.gather_layers(one["pages"], *other, 0, 0)
        other = [list(each) for each in lists]
        other[at] = other[at] * 5
        with pytest.raises(ValueError, match="lists must name the same 1 to 8 layers"):
            extension.gather_layers(one["pages"], *other, 0, 0)
    assert extension.GATHER_LAYERS == cuda.GATHER_LAYERS >= pipeline.TOGETHER
    with pytest.raises(ValueError, match="lists must name the same 1 to 8 layers, not 0 in `keys`"):
        extension.gather_layers(one["pages"], *([] for _ in lists), 0, 0)
