"""hopper.py of a generated module: its text, and when the runtime uses it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from attngen.codegen.render import render
from attngen.lowering.pipeline import lower
from attngen.runtime import launch
from attngen.runtime import warp_specialized as runtime
from attngen.runtime.descriptors import descriptor, laid_out
from attngen.spec import make_spec
from attngen.targets.printing.views import Node, names_in
from tests.helpers import ROOT
from tests.hopper.common import WARP_SPECIALIZED, lowered
from tests.versions.__main__ import PAIRS


@cache
def files_of(name: str) -> dict[str, str]:
    """The files of a spec's module with a warp-specialized forward, by name."""
    return render(lowered(name))


@pytest.mark.share(16)
@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_hopper_py_passes_the_linter(name: str, tmp_path: Path) -> None:
    """Committed files are held by `make lint`; this one has those of specs that are committed with portable kernels."""
    file, text = tmp_path / "hopper.py", files_of(name)["hopper.py"]
    file.write_text(text, encoding="utf-8")
    command = ["ruff", "check", "--config", ROOT / "pyproject.toml", "--ignore", "I001", file]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert text.endswith("\n") and not text.endswith("\n\n") and "tl." not in text.replace(" in tl.range(", "")
    assert [line for line in text.splitlines() if line != line.rstrip() or len(line) > 140] == []


def test_hopper_py_has_the_functions_that_it_calls(tmp_path: Path) -> None:
    """Outputs of this width are stored in halves, and no committed module stores them so without other halves."""
    spec = make_spec({"name": "wide", "head_dim": {"qk": 200, "v": 72}, "mask": "none", "backward": False})
    text = render(lower(spec))["hopper.py"]
    assert "_left, " in text
    (tmp_path / "hopper.py").write_text(text, encoding="utf-8")
    command = ["ruff", "check", "--isolated", "--select", "F821", tmp_path / "hopper.py"]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_words_of_comments_are_no_names() -> None:
    """A variable that only a comment names would be passed to a warp group, and take a register."""
    loop = Node("loop", {"var": "at", "comment": "tiles of this warp group", "about": {"step": "its rows"}}, [])
    assert names_in([loop]) == {"at"}


def test_warp_groups_start_in_the_phases_of_empty_stages() -> None:
    """A consumer fills a stage of dQ, so it waits for the phase before the first, in which the stage is empty. The
    reducer waits for the first phase, in which it is full."""
    text = files_of("causal_gqa")["hopper.py"]
    consumer, reducer = (
        text.partition(f"def bwd_{group}(")[2].partition("@gluon.jit")[0] for group in ("consumer", "dq_reducer")
    )
    assert "dQ_stage, dQ_phase = 0, 1\n" in consumer and "dQ_stage, dQ_phase = 0, 0\n" in reducer


def names_of_tma(text: str, version: str) -> dict[str, str]:
    """The names that the head of a hopper.py gives Gluon's TMA functions under a version of Triton."""
    branch = next(node for node in ast.parse(text).body if isinstance(node, ast.If))
    names = {
        node.attr for node in ast.walk(branch) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tma"
    }
    scope: dict[str, Any] = {
        "triton": types.SimpleNamespace(__version__=version),
        "tma": types.SimpleNamespace(**{n: n for n in names}),
    }
    before = set(scope)
    exec(compile(ast.Module([branch], []), "head", "exec"), scope)
    return {name: value for name, value in scope.items() if name not in {*before, "__builtins__"}}


@pytest.mark.parametrize("version", [*PAIRS.values(), "3.10.0+git1234"])
def test_the_head_selects_the_names_of_each_triton_version(version: str) -> None:
    text = files_of("relative_bias_mha")["hopper.py"]
    old = {"_tma_load": "async_copy_global_to_shared", "_tma_store": "async_copy_shared_to_global"}
    new = {"_tma_load": "async_load", "_tma_store": "async_store"}
    assert names_of_tma(text, version) == (old if version.startswith(("3.6", "3.7")) else new)
    body = text.partition("LOG2E")[2]
    assert (
        "_tma_load(" in body
        and "_tma_store(" in body
        and not any(name in body for name in {*old.values(), *new.values()})
    )


def test_the_installed_gluon_has_the_names_that_the_head_selects() -> None:
    from triton.experimental.gluon.language.nvidia.hopper import tma

    named = names_of_tma(files_of("relative_bias_mha")["hopper.py"], triton.__version__)
    assert all(hasattr(tma, name) for name in named.values())


def test_hopper_py_follows_the_schedule() -> None:
    text = files_of("causal_gqa")["hopper.py"]
    assert (
        "        [4, 1],\n        [240, 24],\n" in text
    )  # warps and registers of the second consumer and of the producer
    assert text.index("s_flight = warpgroup_mma(") < text.index("acc_flight = warpgroup_mma(")
    assert "s = warpgroup_mma_wait(1, deps=[s_flight])" in text
    assert "acc_next, weights_operand = warpgroup_mma_wait(0, deps=[acc_flight, weights_operand])" in text


def test_loops_over_block_lists_start_at_the_second_tile() -> None:
    """The first tile is computed before the loops. A loop whose body needs no tile index reads none."""
    text = files_of("local_global_dropout_mha")["hopper.py"]
    ahead = "kv_ahead = _tile_at(KV_LIST_row, kv_full_end_at + 1, kv_end_at > kv_full_end_at + 1, BLOCK // BLOCK_KV)\n"
    assert ahead in text and "for at in range(kv_full_end_at + 1, kv_end_at):" in text
    start = "gl.where(partial_tiles > 0, 0, 1)"
    read = text.partition(ahead)[2].partition("kv_ahead = _tile_at(\n")[2]
    assert read.splitlines()[1].strip() == f"{start}," and f"for at in range({start}, kv_full_end_at):" in read
    consumer = files_of("butterfly_gqa")["hopper.py"].partition("def fwd_consumer(")[2]
    assert consumer.count("kv_ahead = _tile_at(") == 2  # only in the loop over partial tiles


def loops_over_later_tiles(name: str) -> list[str]:
    consumer = files_of(name)["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
    return re.findall(r" for (.*):\n(?:.*\n)*? *mbarrier\.wait\(K_full", consumer)


def test_full_and_partial_tiles_share_a_loop_where_they_differ_only_in_masks() -> None:
    """This halves the code to compile: only the masks, and the index of the tile, are under a condition."""
    for name in ("causal_mha", "window_gqa", "mla_dims", "document_gqa", "alibi_mha", "block_sparse_mha"):
        assert loops_over_later_tiles(name) == ["at in range(1, partial_tiles + full_tiles)"], name
    text = files_of("window_gqa")["hopper.py"]
    lines = [line.strip() for line in text.partition("if at < partial_tiles:\n")[2].splitlines()[:8]]
    assert lines[:2] == [
        "kv_tile = kv_first + at",
        "kv_tile = gl.where(kv_tile < kv_full_first, kv_tile, kv_tile + (kv_full_end - kv_full_first))",
    ]
    assert (
        lines[2:4] == ["kv_start = kv_tile * BLOCK_KV", "kv_idx = kv_start + kv_off"]
        and [line.partition(" ")[0] for line in lines[4:]] == ["if", "s"] * 2
    )


def test_the_single_partial_tile_at_the_end_of_the_keys_has_no_loop() -> None:
    assert loops_over_later_tiles("cross_mha") == ["_ in range(gl.where(partial_tiles > 0, 0, 1), kv_full_end)"]


def test_three_consumers_have_separate_loops_for_full_and_partial_tiles() -> None:
    assert len(loops_over_later_tiles("full_mha")) == 2


@pytest.mark.share(16)
@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_a_module_has_the_files_of_a_portable_module_and_hopper_py(name: str) -> None:
    assert files_of(name).keys() == {
        *("__init__.py", "kernels.py", "hopper.py", "runtime.py", "schedule.ir", "report.json"),
    }
    assert '"hopper"' in files_of(name)["kernels.py"]


@pytest.fixture()
def select(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Look up a module's warp-specialized kernels under a version of Triton and an environment, with an empty cache."""

    def lookup(version: str, environment: str = "") -> Any:
        runtime.warp_specialized.cache_clear()
        monkeypatch.setenv(runtime.CHOICE, environment)
        monkeypatch.setattr(runtime, "version", lambda _: version)
        monkeypatch.setattr(runtime.importlib, "import_module", lambda name: name)
        return runtime.warp_specialized(types.ModuleType("made.kernels"), "hopper")

    yield lookup
    runtime.warp_specialized.cache_clear()


def test_a_supported_triton_uses_them_unless_the_environment_says_otherwise(select: Any) -> None:
    assert select("3.6.0") == select("3.7.1", "hopper") == select("3.8.0") == select("3.9.0") == "made.hopper"
    assert select("3.6.0", "triton") is None
    with pytest.raises(
        ValueError, match="ATTNGEN_BACKEND is `cuda` in the environment; expected triton or hopper, or nothing"
    ):
        select("3.6.0", "cuda")


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_descriptor_has_the_layout_of_a_tile_in_shared_memory(columns: int) -> None:
    x = torch.zeros(2, 3, 100, columns, dtype=torch.bfloat16)
    made = descriptor(x, 64, gluon=True)
    assert made.base is x and vars(made) == vars(laid_out(descriptor(x, 64)))
    assert (made.block_shape, made.strides) == ([1, 1, 64, columns], [300 * columns, 100 * columns, columns, 1])
    assert (made.layout.rank, made.layout.swizzle_byte_width) == (4, min(128, 2 * columns))


def test_another_triton_uses_portable_kernels_and_warns(select: Any) -> None:
    with pytest.warns(UserWarning, match="Triton 3.10 is not one of 3.6, 3.7, 3.8, 3.9, .* portable kernels are used"):
        assert select("3.10.0") is None


def test_launches_in_a_cuda_graph_have_their_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory comes from a zeroed pool until it is empty, so no kernel of the graph sets it. Other launches of a
    stream share one counter."""
    zeros, capturing = torch.zeros, [True]
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    monkeypatch.setattr(runtime, "current_stream", lambda device: 7)
    for name, value in (("_COUNTERS", {}), ("_OF_GRAPHS", {}), ("CAPTURED", 3)):
        monkeypatch.setattr(runtime, name, value)
    first = runtime.counter_of(0)  # before any other launch
    capturing[0] = False
    shared = runtime.counter_of(0)
    assert runtime.counter_of(0) is shared and len(shared) == 4
    capturing[0] = True
    captured = [runtime.counter_of(0) for _ in range(5)]  # two more than the pool has
    addresses = [x.data_ptr() for x in (first, shared, *captured)]
    assert len(set(addresses)) == 7 and all(address % 16 == 0 for address in addresses)
    assert len({x.untyped_storage().data_ptr() for x in captured}) == 3 and not any(x.any() for x in captured)


def test_few_rows_use_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config without options gives the largest number of rows; the portable configs are limited to it."""
    kernels, hopper = types.ModuleType("made.kernels"), types.ModuleType("made.hopper")
    configs = ((256, {"BLOCK_Q": 16}), (1024, {"BLOCK_Q": 32}), (None, {"BLOCK_Q": 64}))
    vars(kernels)["SCHEDULES"] = {
        "fwd": {("sm90", 2): configs, ("sm90", 2, "hopper"): ((512, None), (None, {"BLOCK_Q": 128}))}
    }
    x = types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"), element_size=lambda: 2, is_floating_point=lambda: True
    )
    monkeypatch.setattr(launch, "device_class", lambda *_: "sm90")
    monkeypatch.setattr(launch, "warp_specialized", lambda *_: hopper)
    found = [
        (file.__name__, most, config["BLOCK_Q"]) for file, most, config in launch.launch_configs(kernels, "fwd", x)
    ]
    assert found == [
        ("made.kernels", 256, 16),
        ("made.kernels", 512, 32),
        ("made.kernels", 512, 64),
        ("made.hopper", None, 128),
    ]
    monkeypatch.setattr(launch, "warp_specialized", lambda *_: None)
    assert [most for _, most, _ in launch.launch_configs(kernels, "fwd", x)] == [256, 1024, None]
