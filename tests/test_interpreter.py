"""Triton's interpreter: the configs that modules give it, calls from threads, and results that do not change by what
attngen/conformance/interpreter.py leaves out."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.cases import make_inputs
from attngen.conformance.harness import load_module
from attngen.conformance.kv_cache import CacheCase, run_cache_case
from attngen.conformance.result import KEYS
from attngen.ir import Module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from tests.conftest import CUDA
from tests.helpers import SPECS, built, module_of, spec, target
from tests.test_numerics import problem, run, small

CACHED = {"name": "cached", "head_dim": 32, "mask": "causal"}
CACHES: list[Any] = [
    "contiguous",
    {"paged": {"page_size": 16}},
    {"dtype": "fp8_e4m3"},
    {"paged": {"page_size": "any"}, "dtype": "fp8_e4m3"},
]


def _only_devices(module: Module, *devices: str) -> Module:
    """The module with the configs of some device classes only."""
    return replace(
        module,
        schedules=tuple((name, tuple(r for r in rows if r.device in devices)) for name, rows in module.schedules),
    )


def _interpreted_configs(kernels: Any) -> list[dict[str, Any]]:
    """The configs that the interpreter takes from a module's tables."""
    tables = [table for table in kernels["SCHEDULES"].values() if any(len(key) == 2 for key in table)]
    assert tables and all(any(key[0] == kernels["INTERPRETED_AS"] for key in table) for table in tables)
    return [
        config
        for table in tables
        for key, rows in table.items()
        if key[0] == kernels["INTERPRETED_AS"]
        for _, config in rows
    ]


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
def test_its_configs_ask_for_no_features_of_devices(name: str) -> None:
    """Flags of configs ask for loads by descriptors, conversion instructions, or dependent launches."""
    assert not any(
        value is True for config in _interpreted_configs(vars(built(name).kernels)) for value in config.values()
    )


@pytest.mark.parametrize("name", ["causal_mha", "decode_paged_fp8_gqa"])
def test_its_configs_have_the_tiles_of_a_device_class(name: str) -> None:
    module = _only_devices(target(name), "sm90", "sm100")
    kernels: dict[str, Any] = {}
    text = render(module)["kernels.py"]
    exec(text[text.index("\nSCHEDULES = ") : text.index("\nINTERPRETED_BYTES")], kernels)
    assert kernels["INTERPRETED_AS"] == "interpreter" and not any(
        value is True for config in _interpreted_configs(kernels) for value in config.values()
    )
    for table in kernels["SCHEDULES"].values():
        if ("interpreter", 2) in table:
            tiles = [
                [{k: v for k, v in c.items() if "BLOCK" in k} for _, c in table[name, 2]]
                for name in ("interpreter", "sm90")
            ]
            assert tiles[0] == tiles[1]


@pytest.mark.share(16)
@pytest.mark.parametrize("backward", [{}, {"backward": {"deterministic": False}}, {"backward": False}], ids=str)
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_calls_with_a_cache_run_with_any_backward(
    cache: Any, backward: dict[str, Any], tmp_path: Path, device: str
) -> None:
    made = make_spec({**CACHED, "cache": cache, **backward})
    module = module_of(made, tmp_path)
    case = CacheCase(2, 2, 1, (0, 3, 17), 1, 48, 16 if "paged" in cache else 0)
    for dtype in ("bf16", "fp16"):
        result = run_cache_case(module, made, case, dtype, device)
        assert result.ok, str(result)


@pytest.mark.share(16)
@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
@pytest.mark.parametrize("cache", CACHES[::3], ids=str)
@pytest.mark.parametrize("others", ["sm90", "sm80"])
def test_it_runs_the_tiles_of_a_device_class(cache: Any, others: str, tmp_path: Path, device: str) -> None:
    """Also if no device class has configs of all kernels."""
    made = make_spec({**CACHED, "cache": cache, "backward": False})
    lowered = lower(made)
    decode, rest = dict(_only_devices(lowered, "sm90").schedules)["decode"], _only_devices(lowered, others).schedules
    mixed = replace(lowered, schedules=tuple((name, decode if name == "decode" else rows) for name, rows in rest))
    write_module(render(mixed), tmp_path / "cached")
    module = load_module(tmp_path / "cached")
    assert module.kernels.INTERPRETED_AS == "interpreter"
    result = run_cache_case(
        module, made, CacheCase(2, 2, 1, (0, 3, 17), 1, 48, 16 if "paged" in cache else 0), "fp16", device
    )
    assert result.ok, str(result)


@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
def test_threads_call_modules_concurrently() -> None:
    """Each of eight threads gets the results of a single thread. Both modules have a copy of the runtime, and one
    computes a dropout mask."""
    names = ["causal_gqa", "causal_dropout_mqa"]
    problems = [
        make_inputs(spec(names[i % 2]), small(names[i % 2], 9 + i, 9, batch=1), torch.float16, "cpu", seed=i)
        for i in range(8)
    ]
    start = Barrier(8)

    def call(i: int, wait: bool) -> list[torch.Tensor]:
        attend, (q, k, v, _) = built(names[i % 2]).attention, problems[i]
        if wait:
            start.wait()
        if i % 2:
            return [attend(q, k, v, dropout_p=0.2, seed=i), attend.dropout_mask((1, 1, 9, 9), 0.2, i, device="cpu")]
        return [attend(q, k, v)]

    sequential = [call(i, wait=False) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        concurrent = list(threads.map(lambda i: call(i, wait=True), range(8)))
    for one, other in zip(sequential, concurrent):
        assert all(map(torch.equal, one, other))


@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
def test_numpy_does_not_warn_of_rows_without_keys_or_of_large_scores() -> None:
    module = built("causal_gqa")
    q, k = (torch.full((1, h, n, 128), 200.0, dtype=torch.float16, requires_grad=True) for h, n in ((2, 40), (1, 20)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = module.attention(q, k, k)
        out.sum().backward()
    assert (out[:, :, :20] == 0).all()


@pytest.mark.share(8)
@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
@pytest.mark.parametrize("name", ["causal_dropout_mqa", "padding_mha"])
def test_results_are_the_same_to_the_bit(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    leaves, inputs, grads = problem(name, small(name, 40, 70), device)
    options: dict[str, Any] = {"dropout_p": 0.2, "seed": 7} if "dropout" in name else {}
    patched = run(name, leaves, inputs, grads, **options)
    builder = interpreter.interpreter_builder
    assert not builder.options.sanitize_overflow and not builder.options.debug, (
        "debug alone asserts what sanitize_overflow computes"
    )
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())
    monkeypatch.setattr(interpreter, "_get_np_dtype", interpreter._get_np_dtype.__wrapped__)
    monkeypatch.setattr(interpreter, "_patch_builtin", interpreter._patch_builtin.__wrapped__)
    core = interpreter.tl.core
    for made in (core.block_type, core.tensor):
        monkeypatch.setattr(made, "__init__", made.__init__.__wrapped__)
    monkeypatch.setattr(core.block_type, "__new__", lambda cls, *_: object.__new__(cls))
    assert builder.options.sanitize_overflow
    original = run(name, leaves, inputs, grads, **options)
    assert all(patched[key].equal(original[key]) for key in KEYS)


@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
def test_a_type_is_made_once() -> None:
    from triton.runtime import interpreter

    core = interpreter.tl.core
    for shape in ([16], [16, 32], [core.constexpr(64), 16]):
        one, other = (core.block_type(core.float32, shape) for _ in range(2))
        assert (
            one is other
            and one.shape == tuple(getattr(n, "value", n) for n in shape)
            and one is not core.block_type(core.float16, shape)
        )
        a, b = core.tensor("a", one), core.tensor("b", one)
        assert (
            (a.handle, b.handle) == ("a", "b") and a.shape is b.shape and [n.value for n in a.shape] == list(one.shape)
        )
    pointer = core.pointer_type(core.float32)
    assert core.block_type(pointer, [16]) is not core.block_type(pointer, [16])
