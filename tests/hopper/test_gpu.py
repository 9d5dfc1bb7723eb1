"""Warp-specialized kernels on a Hopper GPU: results and gradients compared with naive attention, repeatable bits,
CUDA graphs, and other head_dims."""

from __future__ import annotations

import fcntl
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, cli_cases, heads_for, make_inputs, torch_dtype
from attngen.conformance.harness import load_module, run_case
from attngen.conformance.kv_cache import CacheCase, make_call, run_cache_case
from attngen.conformance.sweep import repeats
from attngen.lowering.pipeline import lower
from attngen.spec import Spec
from attngen.targets.hopper.configs.sm90 import JVP
from tests.helpers import built, target
from tests.helpers import spec as spec_of
from tests.hopper.common import WARP_SPECIALIZED, hopper_spec, lowered, spec_with_head_dims

pytestmark = pytest.mark.gpu
LAYOUTS = ("bnhd", "packed", "expanded", "island")


@pytest.fixture()
def module(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    """The module of a spec with its warp-specialized forward; skips on GPUs that cannot run it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    name = request.node.callspec.params["name"]
    write_module(render(lowered(name)), tmp_path / name)
    return load_module(tmp_path / name)


def launched(module: ModuleType, kernel: str = "fwd") -> set[str]:
    """The files from which the forward, or another kernel, was launched."""
    found = [launch for launches in module.runtime.LAUNCHES.values() for launch in launches if launch.name == kernel]
    return {launch.file.__name__.rpartition(".")[2] for launch in found}


def fault(module: ModuleType, spec: Spec, case: Case, dtype: str) -> str:
    """The fault in the results of a case; an empty string if there is none.

    Cases with many scores run one at a time, also across test processes, because naive attention in fp64 takes about
    10 GiB for each.
    """
    with open(Path(tempfile.gettempdir()) / "attngen_large_case", "w") as file:
        if case.n_q * case.n_kv >= 2**22:
            fcntl.flock(file, fcntl.LOCK_EX)
        result = run_case(module, spec, case, dtype, "cuda")
        torch.cuda.empty_cache()
    return "" if result.ok else str(result)


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_results_and_gradients_are_right_and_repeat(name: str, module: ModuleType) -> None:
    spec = hopper_spec(name)
    cases = [case for case, dtype in cli_cases(spec, True) if dtype == spec.dtype[0]]
    cases += [Case(2, *heads_for(spec), n_q, n_kv) for n_q, n_kv in ((17, 1000), (1000, 17), (0, 5), (5, 0), (65, 129))]
    cases += [Case(2, *heads_for(spec), 127, 127, layout) for layout in LAYOUTS]
    for dtype in spec.dtype:
        assert [wrong for case in cases if (wrong := fault(module, spec, case, dtype))] == []
        assert all(repeats(module, spec, case, dtype, "cuda", seed=3) for case in cases[:6])
    assert launched(module) == {"hopper"}


@pytest.mark.parametrize("name", [name for name in WARP_SPECIALIZED if target(name).stand_ins(JVP)])
def test_tangents_are_right_and_repeat(name: str, module: ModuleType) -> None:
    spec = hopper_spec(name)
    for dtype in spec.dtype:
        for n_q, n_kv in ((1000, 1000), (65, 129), (1000, 70), (70, 1000), (2048, 2048)):
            case = Case(2, *heads_for(spec), n_q, n_kv)
            result = run_case(module, spec, case, dtype, "cuda", tangents=True)
            assert result.ok, str(result)
        q, k, v, inputs = make_inputs(spec, case, torch_dtype(dtype), "cuda", 3)
        attention = partial(module.attention, **inputs)
        first, *others = (torch.func.jvp(attention, (q, k, v), (q, k, v))[1] for _ in range(4))
        assert all(torch.equal(first, other) for other in others)
    assert launched(module, JVP) == {"hopper"}


@pytest.mark.parametrize("head_dims", [(96, 96), (80, 80), (192, 192), (160, 128), (48, 40), (240, 136), (64, 96)])
def test_other_head_dims(head_dims: tuple[int, int], tmp_path: Path) -> None:
    """Tiles lie in column pieces, the last of which may be zero-padded; tiles of V are padded with zero columns, or
    with whole swizzle rows of zeros."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    spec = spec_with_head_dims(*head_dims)
    write_module(render(lower(spec)), tmp_path / "wide")
    module = load_module(tmp_path / "wide")
    for n_q, n_kv in ((1000, 1000), (65, 129), (17, 1000), (1000, 17), (0, 5)):
        case = Case(2, *heads_for(spec), n_q, n_kv)
        assert all(run_case(module, spec, case, dtype, "cuda").ok for dtype in spec.dtype)
    assert launched(module) == {"hopper"}


@pytest.mark.parametrize("name", ["causal_gqa"])
def test_graphs_and_two_streams(name: str, module: ModuleType) -> None:
    spec, case = hopper_spec(name), Case(2, *heads_for(hopper_spec(name)), 1000, 1000)
    q, k, v, inputs = make_inputs(spec, case, torch_dtype(spec.dtype[0]), "cuda", 1)
    expected = module.attention(q, k, v, **inputs)
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(module.attention(q, k, v, **inputs))
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(20):
        for out in captured:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in captured)
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(module.attention(q, k, v, **inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in results)


@pytest.mark.parametrize("name", ["causal_mqa", "causal_d256"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(name: str, dynamic: bool, module: ModuleType) -> None:
    """Under torch.compile, with one graph for all lengths or one per length, the warp-specialized kernels give the same
    bits, forward and backward."""
    spec = hopper_spec(name)
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, dynamic=dynamic)
    for n in (640, 1000, 4000) if dynamic else (1000,):
        q, k, v, inputs = make_inputs(spec, Case(1, *heads_for(spec), n, n), torch_dtype(spec.dtype[0]), "cuda", 1)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        results = [f(q, k, v, **inputs) for f in (module.attention, compiled)]
        found = [(out, *torch.autograd.grad(out, leaves, torch.ones_like(out))) for out in results]
        assert all(torch.equal(a, b) for a, b in zip(*found))
    assert launched(module) == {"hopper"}


@pytest.mark.parametrize("name", ["full_mha"])
def test_the_environment_may_select_portable_kernels(
    name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_BACKEND", "triton")
    case = Case(1, *heads_for(hopper_spec(name)), 300, 300)
    assert run_case(module, hopper_spec(name), case, hopper_spec(name).dtype[0], "cuda").ok
    assert launched(module) == {"kernels"}


# Heads, queries, lengths of sequences before the call, new keys.
DECODE_CALLS = [
    (128, 1, (8191, 5000, 64, 63, 0), 1),
    (128, 2, (130, 64, 1, 700), 2),
    (72, 1, (65, 127, 2000), 0),
    (100, 5, (3000, 1, 0), 5),
    (128, 1, tuple((37 * i) % 500 for i in range(140)), 1),
    (128, 1, (60000,), 0),
    (16, 1, (8191, 65, 1, 0), 1),
    (8, 4, (5000, 3, 64), 4),
    (1, 1, (129, 40000), 1),
]


@pytest.mark.parametrize(("heads", "n_q", "lengths", "new"), DECODE_CALLS)
def test_mla_decode(heads: int, n_q: int, lengths: tuple[int, ...], new: int) -> None:
    """Two warp groups split the columns of outputs. Unused rows of pages hold NaN, and repeated calls give the same
    bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    spec, module = spec_of("decode_mla"), built("decode_mla")
    module.runtime.LAUNCHES.clear()
    module.runtime.LAST.clear()
    room = -(-(max(lengths) + new) // 64) * 64
    case = CacheCase(heads, 1, n_q, lengths, new, room, 64)
    for dtype in spec.dtype:
        result = run_cache_case(module, spec, case, dtype, "cuda")
        assert result.ok, str(result)
        call = make_call(spec, case, torch_dtype(dtype), "cuda")
        arguments = {key: x for key, x in call.arguments.items() if key != "k"}
        outputs = [module.attention.with_kvcache(call.q, *call.caches, **arguments) for _ in range(20)]
        assert all(torch.equal(x, outputs[0]) for x in outputs)
    launches = [
        launch
        for found in module.runtime.LAUNCHES.values()
        for launch in found
        if launch.name == "decode" and launch.parts
    ]
    assert {launch.file.__name__.rpartition(".")[2] for launch in launches} == {"hopper"}
