"""hopper.py of a generated module: its text, and when the runtime takes it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from attngen.codegen.render import render
from attngen.runtime import launch
from attngen.runtime import warp_specialized as runtime
from attngen.runtime.descriptors import descriptor, laid_out
from tests.helpers import ROOT
from tests.hopper.common import WARP_SPECIALIZED, whole
from tests.versions.__main__ import PAIRS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the generated modules of all specs that can be divided."""
    made = tmp_path_factory.mktemp("generated")
    for name in WARP_SPECIALIZED:
        (made / name).mkdir()
        for file, text in render(whole(name)).items():
            (made / name / file).write_text(text, encoding="utf-8")
    return made


def test_it_is_clean_for_the_linter(folder: Path) -> None:
    files = [folder / name / "hopper.py" for name in WARP_SPECIALIZED]
    asked = ["ruff", "check", "--config", ROOT / "pyproject.toml", "--ignore", "I001", *files]
    result = subprocess.run([sys.executable, "-m", *asked], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    for file in files:
        text = file.read_text()
        assert text.endswith("\n") and not text.endswith("\n\n") and "tl." not in text.replace(" in tl.range(", "")
        assert [line for line in text.splitlines() if line != line.rstrip() or len(line) > 140] == []


def generation(text: str, version: str) -> dict[str, str]:
    """What the head of a hopper.py makes of Gluon's copies under a version of Triton: their names there."""
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
def test_its_head_has_the_names_of_each_version(version: str, folder: Path) -> None:
    text = (folder / "relative_bias_mha" / "hopper.py").read_text()
    old = {"tma_load": "async_copy_global_to_shared", "tma_store": "async_copy_shared_to_global"}
    new = {"tma_load": "async_load", "tma_store": "async_store"}
    assert generation(text, version) == (old if version.startswith(("3.6", "3.7")) else new)
    body = text.partition("LOG2E")[2]
    assert (
        "tma_load(" in body
        and "tma_store(" in body
        and not any(name in body for name in {*old.values(), *new.values()})
    )


def test_gluon_has_the_names_of_the_version_that_is_installed(folder: Path) -> None:
    from triton.experimental.gluon.language.nvidia.hopper import tma

    named = generation((folder / "relative_bias_mha" / "hopper.py").read_text(), triton.__version__)
    assert all(hasattr(tma, name) for name in named.values())


def test_it_has_what_the_schedule_says(folder: Path) -> None:
    text = (folder / "causal_gqa" / "hopper.py").read_text()
    assert "        [4, 1],\n        [240, 24],\n" in text  # the second consumer and the producer: warps, registers
    assert text.index("s_flight = warpgroup_mma(") < text.index("acc_flight = warpgroup_mma(")
    assert "s = warpgroup_mma_wait(1, deps=[s_flight])" in text
    assert "acc_next, weights_operand = warpgroup_mma_wait(0, deps=[acc_flight, weights_operand])" in text


def test_listed_tiles_are_read_from_the_one_after_the_first_on(folder: Path) -> None:
    """The first tile is done before the loops; those of a body that needs no tile's number read none."""
    text = (folder / "local_global_dropout_mha" / "hopper.py").read_text()
    ahead = "kv_ahead = tile_at(KV_LIST_row, kv_full_end_at + 1, kv_end_at > kv_full_end_at + 1, BLOCK // BLOCK_KV)\n"
    assert ahead in text and "for at in range(kv_full_end_at + 1, kv_end_at):" in text
    start = "gl.where(partial_tiles > 0, 0, 1)"
    read = text.partition(ahead)[2].partition("kv_ahead = tile_at(\n")[2]
    assert read.splitlines()[1].strip() == f"{start}," and f"for at in range({start}, kv_full_end_at):" in read
    consumer = (folder / "butterfly_gqa" / "hopper.py").read_text().partition("def fwd_consumer(")[2]
    assert consumer.count("kv_ahead = tile_at(") == 2  # of the partial loop alone


def loops_over_later_tiles(folder: Path, name: str) -> list[str]:
    consumer = (folder / name / "hopper.py").read_text().partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
    return re.findall(r" for (.*):\n(?:.*\n)*? *mbarrier\.wait\(k_full", consumer)


def test_classes_of_tiles_share_a_loop_where_they_differ_in_masks(folder: Path) -> None:
    """Half the code to compile: the masks alone are under a condition, and the tile's place is computed there."""
    for name in ("causal_mha", "window_gqa", "mla_dims", "document_gqa", "alibi_mha", "block_sparse_mha"):
        assert loops_over_later_tiles(folder, name) == ["at in range(1, partial_tiles + full_tiles)"], name
    text = (folder / "window_gqa" / "hopper.py").read_text()
    lines = [line.strip() for line in text.partition("if at < partial_tiles:\n")[2].splitlines()[:8]]
    assert lines[:2] == [
        "kv_tile = kv_first + at",
        "kv_tile = gl.where(kv_tile < kv_full_first, kv_tile, kv_tile + (kv_full_end - kv_full_first))",
    ]
    assert (
        lines[2:4] == ["kv_start = kv_tile * BLOCK_KV", "kv_idx = kv_start + kv_off"]
        and [line.partition(" ")[0] for line in lines[4:]] == ["if", "s"] * 2
    )


def test_no_loop_is_for_the_one_tile_that_the_end_of_a_tensor_cuts(folder: Path) -> None:
    assert loops_over_later_tiles(folder, "cross_mha") == ["_ in range(gl.where(partial_tiles > 0, 0, 1), kv_full_end)"]


def test_three_consumers_have_a_loop_for_each_class_of_tiles(folder: Path) -> None:
    assert len(loops_over_later_tiles(folder, "full_mha")) == 2


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_the_other_files_are_those_of_a_portable_module(name: str, folder: Path) -> None:
    assert {path.name for path in (folder / name).iterdir()} == {
        *("__init__.py", "kernels.py", "hopper.py", "runtime.py", "schedule.ir", "report.json"),
    }
    assert '"hopper"' in (folder / name / "kernels.py").read_text()


@pytest.fixture()
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks anew for a module's divided kernels, under a Triton of a version and an environment."""

    def ask(version: str, environment: str = "") -> Any:
        runtime.divided.cache_clear()
        monkeypatch.setenv(runtime.CHOICE, environment)
        monkeypatch.setattr(runtime, "version", lambda _: version)
        monkeypatch.setattr(runtime.importlib, "import_module", lambda name: name)
        return runtime.divided(types.ModuleType("made.kernels"), "hopper")

    yield ask
    runtime.divided.cache_clear()


def test_a_trusted_triton_takes_them_unless_the_environment_says_otherwise(asked: Any) -> None:
    assert asked("3.6.0") == asked("3.7.1", "hopper") == asked("3.8.0") == asked("3.9.0") == "made.hopper"
    assert asked("3.6.0", "triton") is None
    with pytest.raises(
        ValueError, match="ATTNGEN_BACKEND is `cuda` in the environment; expected triton or hopper, or nothing"
    ):
        asked("3.6.0", "cuda")


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_descriptor_says_how_a_tile_lies_in_shared_memory(columns: int) -> None:
    x = torch.zeros(2, 3, 100, columns, dtype=torch.bfloat16)
    made = descriptor(x, 64, gluon=True)
    assert made.base is x and vars(made) == vars(laid_out(descriptor(x, 64)))
    assert (made.block_shape, made.strides) == ([1, 1, 64, columns], [300 * columns, 100 * columns, columns, 1])
    assert (made.layout.rank, made.layout.swizzle_byte_width) == (4, min(128, 2 * columns))


def test_another_triton_takes_portable_kernels_with_one_sentence(asked: Any) -> None:
    with pytest.warns(UserWarning, match="Triton 3.10 is not one of 3.6, 3.7, 3.8, 3.9, .* portable kernels are used"):
        assert asked("3.10.0") is None


def test_launches_that_a_graph_captures_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is 0 already, while there is some: no kernel of the graph sets it. Other launches of a stream
    share theirs."""
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
    captured = [runtime.counter_of(0) for _ in range(5)]  # two more than there is memory for
    places = [x.data_ptr() for x in (first, shared, *captured)]
    assert len(set(places)) == 7 and all(place % 16 == 0 for place in places)
    assert len({x.untyped_storage().data_ptr() for x in captured}) == 3 and not any(x.any() for x in captured)


def test_few_rows_take_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without options says up to how many; the module's own rows are cut there."""
    kernels, hopper = types.ModuleType("made.kernels"), types.ModuleType("made.hopper")
    rows = ((256, {"BLOCK_Q": 16}), (1024, {"BLOCK_Q": 32}), (None, {"BLOCK_Q": 64}))
    vars(kernels)["SCHEDULES"] = {
        "fwd": {("sm90", 2): rows, ("sm90", 2, "hopper"): ((512, None), (None, {"BLOCK_Q": 128}))}
    }
    x = types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"), element_size=lambda: 2, is_floating_point=lambda: True
    )
    monkeypatch.setattr(launch, "device_class", lambda *_: "sm90")
    monkeypatch.setattr(launch, "divided", lambda *_: hopper)
    found = [(file.__name__, most, config["BLOCK_Q"]) for file, most, config in launch.homes(kernels, "fwd", x)]
    assert found == [
        ("made.kernels", 256, 16),
        ("made.kernels", 512, 32),
        ("made.kernels", 512, 64),
        ("made.hopper", None, 128),
    ]
    monkeypatch.setattr(launch, "divided", lambda *_: None)
    assert [most for _, most, _ in launch.homes(kernels, "fwd", x)] == [256, 1024, None]
