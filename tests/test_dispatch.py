"""Calls and torch's dispatcher: which calls run the operator, which tensors a guard admits, and which backward passes
are replayed from memory."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.codegen.host import variable
from attngen.ir import launch, only
from attngen.ir.names import OF_OUTPUTS, WRAPPER
from tests.helpers import KINDS, built, spec, target

pytestmark = pytest.mark.numerics
NAME = "full_mha"


def inputs(device: str) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 64, device=device, dtype=torch.float16) for _ in range(3)]


class Watch(TorchDispatchMode):
    """Records the operators that are called."""

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


def test_only_tensors_of_torchs_own_are_plain(device: str) -> None:
    plain, (q, k, v) = built(NAME).runtime.is_plain, inputs(device)
    assert plain(q, k, v) and plain(torch.nn.Parameter(q), k, v)
    mine = k.as_subclass(type("Mine", (torch.Tensor,), {}))
    assert not any(plain(*three) for three in ((mine, k, v), (q, mine, v), (q, k, mine)))
    with Watch():
        assert not plain(q, k, v)


def test_a_guard_knows_the_kind_of_the_last_calls_tensors_and_no_other(device: str) -> None:
    module, (q, k, v) = built(NAME), inputs(device)
    rules = module.runtime.Rules("mha", 64, 64, (torch.float16, torch.float32), module.INTERPRETED)
    assert rules.admit(q, k, v)[3] and len(rules.guards) == 1
    knows, _ = rules.last
    assert knows(v, q, k) and knows(*(x[:, :1, :7].transpose(1, 2) for x in (q, k, v)))
    leaf, mine = k.clone().requires_grad_(), k.as_subclass(type("Mine", (torch.Tensor,), {}))
    others = (
        k.float(),
        mine,
        k.to_sparse(),
        k.to("meta"),
        torch._neg_view(k),
        k[0],
        torch.nn.Parameter(k),
        leaf,
        [k],
        None,
    )
    assert not any(knows(q, other, v) for other in others)
    with Watch():
        assert not knows(q, k, v)
    with torch.autocast(device, torch.float16):
        assert not knows(q, k, v)
    for _ in range(2):  # alternating calls of two kinds: each has its guard
        assert rules.admit(q, leaf, v)[3] and rules.last[0] is not knows
        assert rules.admit(q, k, v)[3] and rules.last[0] is knows
    assert len(rules.guards) == 2
    with pytest.raises(TypeError, match="k is torch.float32 and q torch.float16"):
        rules.admit(q, k.float(), v)
    for name, odd in (
        ("q", None),
        ("k", torch.nested.nested_tensor([k[0]])),
    ):  # a guard would make torch abort on these
        with pytest.raises(TypeError, match=f"{name} is a .*; expected a dense tensor"):
            rules.admit(**{"q": q, "k": k, "v": v, name: odd})


def test_no_call_spoils_the_guards_of_others(device: str) -> None:
    """A guard made for a Parameter is replaced by one for tensors. A call with one tensor twice replaces no guard in
    use."""
    module, (q, k, v) = built(NAME), inputs(device)
    rules = module.runtime.Rules("mha", 64, 64, (torch.float16,), module.INTERPRETED)
    with pytest.raises(ValueError, match="q has shape"):
        rules.admit(q[0], k[0], v[0])
    assert rules.admit(torch.nn.Parameter(q, requires_grad=False), k, v)[3] and not rules.last[0](q, k, v)
    assert rules.admit(q, k, v)[3] and rules.last[0](q, k, v)
    assert rules.admit(q, k, k)[3] and rules.last[0](q, k, v)
    assert len(rules.guards) == 1


def test_shapes_strides_and_alignment_are_distinguished(device: str) -> None:
    """Calls of several kinds, one after another, give the same results."""
    module = built(NAME)
    storage = torch.randn(3, 2 * 20 * 64 + 1, device=device, dtype=torch.float16)
    shifted = [x[1:].view(1, 2, 20, 64) for x in storage]  # not aligned to 16 bytes
    aligned = [x.clone() for x in shifted]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in aligned]
    expected = module.attention(*aligned)
    for given in (shifted, turned, aligned, [shifted[0], aligned[1], turned[2]]):
        assert torch.equal(module.attention(*given), expected)


@pytest.mark.parametrize("name", sorted({*KINDS, "causal_padding_gqa"}))
def test_inputs_cannot_have_the_wrappers_own_names(name: str) -> None:
    module, made = built(name), spec(name)
    given = {i.name for i in made.inputs()} | {n for d in made.derived() for n in d.names}
    names = ("attention", "make_plan", "_forward", "_backward", "_count")
    functions = [inspect.unwrap(getattr(module, name)) for name in names if hasattr(module, name)]
    values = {
        ref
        for host in target(name).hosts
        for op in host.ops()
        for ref in (op.name, *(f"{op.name}.{f}" for f in op.results()))
    }
    values |= {
        f"{op.name}.{f}" for host in target(name).hosts for op in only(host.ops(), launch.If) for f in host.fields(op)
    }
    found = {n for f in functions for n in f.__code__.co_varnames if n.islower() and not n.endswith("_strides")} - given
    found -= OF_OUTPUTS if len(made.outputs) > 1 else set()  # reserved only in such specs
    assert found <= WRAPPER | {
        variable(ref) for ref in values
    }  # an input with the name of such a value breaks the rule `host-arguments`


def test_a_tracer_sees_the_operator(device: str) -> None:
    module = built(NAME)
    traced = torch.jit.trace(lambda q, k, v: module.attention(q, k, v), inputs(device), check_trace=False)
    assert "_forward" in str(traced.graph)


def test_a_call_of_the_operator_vouches_for_no_other(device: str) -> None:
    """The operator runs a call without checks, and the function still refuses the same call."""
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


class Backward:
    """The backward of a module that has not been called yet, with a count of the runs of its host program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = NAME) -> None:
        self.module, self.runs = built(name), 0
        self.runtime, launch = self.module.runtime, self.module.runtime.Kernel.__call__
        monkeypatch.setattr(self.runtime, "STEPS", {})

        def launched(kernel: Any, *args: Any) -> None:
            self.runs += kernel.name == "dkdv"
            launch(kernel, *args)

        monkeypatch.setattr(self.runtime.Kernel, "__call__", launched)

    def __call__(self, *leaves: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients of distinct leaves, of an unevenly weighted output."""
        out = self.module.attention(*leaves, **options)
        return torch.autograd.grad(out.square().sum(), list(dict.fromkeys(leaves)))


def alike(found: Any, expected: Any) -> bool:
    return all(a.equal(b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def test_a_backward_of_a_known_form_is_done_again_from_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors may have other addresses. Other strides, lengths and scales need their own run of the host program."""
    backward, leaves = Backward(monkeypatch), [x.requires_grad_() for x in inputs(device)]
    moved = [x.detach().clone().requires_grad_() for x in leaves]
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    expected = backward(*leaves)
    again = backward(*moved)
    assert (
        alike(again, expected)
        and backward.runs == 1
        and not {x.data_ptr() for x in again} & {x.data_ptr() for x in expected}
    )
    assert (
        all(a.equal(b) and a.stride() == x.stride() for a, b, x in zip(backward(*turned), expected, turned))
        and backward.runs == 2
    )
    short = backward(*(x[:, :, :10] for x in leaves))
    assert backward.runs == 3 and alike(backward(*(x[:, :, :10] for x in moved)), short) and backward.runs == 3
    scaled = backward(*leaves, scale=0.5)
    assert (
        backward.runs == 4
        and not any(a.equal(b) for a, b in zip(scaled[:2], expected))
        and alike(backward(*moved), expected)
    )
    backward.runtime.forget_launches()
    assert alike(backward(*leaves), expected) and backward.runs == 5
    assert backward.runtime.NOTES.launches == backward.runtime.NOTES.zeros == []  # no tensor is held after a call


def test_a_backward_is_not_remembered_of_a_tensor_twice_or_of_an_odd_address(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds in either order: for calls in which q, k and v are one tensor or not aligned to 16 bytes, and later
    calls of the same form."""
    x, leaves = inputs(device)[0].requires_grad_(), [x.requires_grad_() for x in inputs(device)]
    odd = [torch.cat([y.new_zeros(1), y.detach().flatten()])[1:].view_as(y).requires_grad_() for y in leaves]
    forward, backward = Backward(monkeypatch), Backward(monkeypatch)
    calls = (x, x, x), odd, leaves
    expected = [forward(*call) for call in calls]
    assert forward.runs == 3 and len(forward.runtime.STEPS) == 1
    backward.runtime.STEPS.clear()
    for call, found in list(zip(calls, expected))[::-1]:
        assert alike(backward(*call), found)


def test_what_is_remembered_of_dropout_is_without_a_seed_or_for_any(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Backward(monkeypatch, "causal_dropout_mqa")
    q, k, v = (x.requires_grad_() for x in inputs(device))
    leaves = q, k[:, :1], v[:, :1]
    options: list[dict[str, Any]] = [
        {},
        {"dropout_p": 0.5, "seed": 1},
        {"dropout_p": 0.5, "seed": 2},
        {"dropout_p": 0.25, "seed": 2},
    ]
    first = [backward(*leaves, **given) for given in options]
    assert backward.runs == 3 and alike([*map(torch.Tensor.sum, first[0])], [x.sum() for x in backward(*leaves)])
    assert all(alike(backward(*leaves, **given), found) for given, found in zip(options, first)) and backward.runs == 3
    assert not first[1][0].equal(first[2][0]) and not first[2][0].equal(first[3][0])


def test_ten_thousand_forms_take_no_more_memory_than_a_thousand(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = built(NAME).runtime
    monkeypatch.setattr(runtime, "STEPS", {})
    program = runtime.remembered(1)(lambda x, number: (x,))
    x = torch.zeros(1, device=device)
    for n in range(10_000):
        assert program(x, n)[0] is program(x, n)[0] is x
    assert 0 < len(runtime.STEPS) <= 1024


@pytest.mark.parametrize(
    "change", [lambda x: x.mT.contiguous().mT, lambda x: torch._neg_view(-x)], ids=["strides", "sign"]
)
def test_what_was_saved_may_come_back_in_another_form(change: Any, device: str) -> None:
    """Hooks for saved tensors return the same values in a form that kernels cannot read."""
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    expected = torch.autograd.grad(module.attention(*leaves).sum(), leaves)
    places = [x.data_ptr() for x in leaves]
    every = change(torch.ones(1, 1)).is_neg()  # also for out and lse
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: change(x) if every or x.data_ptr() in places else x
    ):
        found = torch.autograd.grad(module.attention(*leaves).sum(), leaves)
    assert all(a.equal(b) for a, b in zip(found, expected))


def test_an_operator_is_recorded_only_where_gradients_are_wanted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code calls it with gradients off. Forward mode is recorded nevertheless."""
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    recorded, apply = [], module.OPERATORS.recorded.apply
    monkeypatch.setattr(module.OPERATORS.recorded, "apply", lambda *args: recorded.append(args) or apply(*args))
    out, lse = module.FORWARD(*leaves, 0.1)
    assert len(recorded) == 1 and out.requires_grad and lse.requires_grad
    with torch.no_grad():
        results = module.FORWARD(*leaves, 0.1)
        assert len(recorded) == 1 and not any(x.requires_grad for x in results)
        assert all(x.equal(y) for x, y in zip(results, (out, lse)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0]))
            results = module.FORWARD(dual, *leaves[1:], 0.1)
            assert len(recorded) == 2 and all(
                torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in results
            )
