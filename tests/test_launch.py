"""How wrappers launch kernels: what Triton looks at, what is remembered, and which calls go through torch's dispatcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.knobs import HookChain, runtime_knobs

from attngen.ir.interface import WRAPPER
from tests.helpers import KINDS, built, spec, target

NAME = "full_mha"


class Compiled:
    """What Triton gives for a launch: it can be started as it is, or by a grid."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.started.append(args)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.started.append((grid, *args))


class Kernel:
    """Stands in for a kernel with two flags."""

    params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "BLOCK_Q", "TMA")]

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled = compiled
        self.calls: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **config: Any) -> Compiled | None:
            self.calls.append((grid, args, config))
            return self.compiled

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module's kernels.py, in a Triton of its own with the real one's hooks, on stream 7 of device 1."""
    found = built(NAME).kernels
    active = SimpleNamespace(get_current_stream={1: 7}.__getitem__)
    knobs = SimpleNamespace(runtime=runtime_knobs())
    monkeypatch.setattr(found, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)), knobs=knobs))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return found


CONFIG = {"BLOCK_Q": 64, "TMA": False, "num_warps": 4}


def test_triton_looks_at_the_first_launch_alone(kernels: Any) -> None:
    compiled = Compiled()
    kernel = Kernel(compiled)
    launch = kernels.Launch(kernel, CONFIG, 5, (3,))
    for x in ("a", "b", "c"):
        launch(x)
    assert kernel.calls == [((5, 1, 1), ("a", 3), CONFIG)]
    assert compiled.started == [(5, 1, 1, 7, "function", "metadata", None, None, None, x, 3, 64, False) for x in ("b", "c")]


def test_triton_gets_addresses_of_tensors(kernels: Any) -> None:
    """Those before the numbers; a tensor in their place is what the first launch had there."""
    compiled, (q, k) = Compiled(), torch.zeros(2, 3)
    kernel = Kernel(compiled)
    launch = kernels.Launch(kernel, CONFIG, 5, (3,))
    launch(q, k, 0.5, q)
    launch(k, q, 0.25, q)
    assert kernel.calls == [((5, 1, 1), (q, k, 0.5, q, 3), CONFIG)]
    (started,) = compiled.started
    assert started[9:12] == (k.data_ptr(), q.data_ptr(), 0.25) and started[12] is q


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("set_by", ["chain", "assignment"])
def test_a_profiler_sees_every_launch(kernels: Any, monkeypatch: pytest.MonkeyPatch, hook: str, set_by: str) -> None:
    compiled = Compiled()
    launch = kernels.Launch(Kernel(compiled), CONFIG, 5, (3,))
    launch("a")
    chain = HookChain()
    chain.add(print)
    monkeypatch.setattr(kernels.triton.knobs.runtime, hook, chain if set_by == "chain" else print)
    launch("b")
    assert compiled.started == [((5, 1, 1), "b", 3, 64, False)]


def test_the_interpreter_compiles_nothing(kernels: Any) -> None:
    kernel = Kernel(None)
    launch = kernels.Launch(kernel, CONFIG, 5, (3,))
    launch("a")
    launch("b")
    assert [args for _, args, _ in kernel.calls] == [("a", 3), ("b", 3)]


def inputs(device: str) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 64, device=device, dtype=torch.float16) for _ in range(3)]


class Watch(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator(device: str) -> None:
    module = built(NAME)
    with Watch() as watch:
        module.attention(*inputs(device))
    assert any("_forward" in name and "attngen" in name for name in watch.names)


def test_only_alike_tensors_of_torchs_own_are_plain(device: str) -> None:
    plain, (q, k, v) = built(NAME)._plain, inputs(device)
    assert plain(q, k, v) and plain(torch.nn.Parameter(q), k, v)
    others = [k.float(), k.as_subclass(type("Mine", (torch.Tensor,), {})), k.to_sparse(), k.to("meta"), torch._neg_view(k)]
    assert not any(plain(q, other, v) for other in others)
    with Watch():
        assert not plain(q, k, v)


def test_shapes_strides_and_alignment_are_told_apart(device: str) -> None:
    """Calls of several kinds one after another give what each gives alone."""
    module = built(NAME)
    storage = torch.randn(3, 2 * 20 * 64 + 1, device=device, dtype=torch.float16)
    shifted = [x[1:].view(1, 2, 20, 64) for x in storage]  # starts at no multiple of 16 bytes
    aligned = [x.clone() for x in shifted]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in aligned]
    expected = module.attention(*aligned)
    for given in (shifted, turned, aligned, [shifted[0], aligned[1], turned[2]]):
        assert torch.equal(module.attention(*given), expected)


@pytest.mark.parametrize("name", sorted({*KINDS, "causal_padding_gqa"}))
def test_inputs_cannot_have_the_wrappers_own_names(name: str) -> None:
    module, made = built(name), spec(name)
    given = {i.name for i in made.inputs()} | {n for d in made.derived() for n in d.names}
    functions = [module.attention, module._forward, module._backward, module._Attention.forward, module._Attention.backward]
    functions += [f for f in [getattr(module, "_forward_packed", None)] if f]
    scratch = {"o_acc", "row_max", "row_sum", "dq_acc"}  # of FlashAttention-1's order, which takes no inputs
    parts = {x.parts.lower() for x in target(name).learned}
    names = {n for f in functions for n in f.__code__.co_varnames} - given - scratch
    assert names <= WRAPPER | parts | {f"d_{i.name}" for i in made.inputs()}


def test_a_tracer_sees_the_operator(device: str) -> None:
    module = built(NAME)
    traced = torch.jit.trace(lambda q, k, v: module.attention(q, k, v), inputs(device), check_trace=False)
    assert "_forward" in str(traced.graph)


def test_a_call_of_the_operator_vouches_for_no_other(device: str) -> None:
    """What the operator runs unchecked is refused by the function all the same."""
    module, (q, k, v) = built(NAME), inputs(device)
    module.FORWARD(q[:, :1], k, v, 0.1)
    with pytest.raises(ValueError, match="q has 1 heads and k 2"):
        module.attention(q[:, :1], k, v)


def test_gradients_are_the_same_whether_or_not_the_lse_is_asked_for(device: str) -> None:
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    alone, (out, lse) = module.attention(*leaves), module.attention(*leaves, return_lse=True)
    assert alone.equal(out) and lse.requires_grad
    found = [torch.autograd.grad(x.float().square().sum(), leaves, retain_graph=True) for x in (alone, out)]
    assert all(a.equal(b) for a, b in zip(*found))
    assert all(x.isfinite().all() for x in torch.autograd.grad(lse.sum(), leaves[:2]))


def test_an_operator_is_recorded_only_where_gradients_are_wanted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code calls it with gradients off. Forward-mode derivatives, which it has not, are refused even so."""
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    recorded, apply = [], module._Attention.apply
    monkeypatch.setattr(module._Attention, "apply", lambda *args: recorded.append(args) or apply(*args))
    out, lse = module.FORWARD(*leaves, 0.1)
    assert len(recorded) == 1 and out.requires_grad and lse.requires_grad
    with torch.no_grad():
        results = module.FORWARD(*leaves, 0.1)
        assert len(recorded) == 1 and not any(x.requires_grad for x in results)
        assert all(x.equal(y) for x, y in zip(results, (out, lse)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0]))
            with pytest.raises(NotImplementedError, match="jvp"):
                module.FORWARD(dual, *leaves[1:], 0.1)
