"""The runtime without private interfaces of torch and Triton: its public replacements give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.conformance.harness import load_module
from tests.helpers import ROOT, built
from tests.test_numerics import problem, small

pytestmark = pytest.mark.numerics

NAME = "causal_dropout_mqa"
# Interfaces that a version may lack: (module or object, name)
PRIVATE = [
    (torch._C._dynamo.guards, "_empty_strided_cpu"),
    (torch._C._dynamo.guards, "_empty_strided_cuda"),
    (torch._C._dynamo.guards, "TensorGuards"),
    (torch._C, "_cuda_getDevice"),
    (torch._C, "_cuda_getCurrentRawStream"),
    (torch._C, "_is_any_autocast_enabled"),
    (torch._C, "_is_tracing"),
    (torch._C, "_are_functorch_transforms_active"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_AutoDispatchBelowAutograd"),
    (torch.autograd.forward_ad, "_current_level"),
]


def alone(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> Any:
    """Import the module where one private interface is missing. Torch itself may need it, so it is restored
    afterwards."""
    with monkeypatch.context() as patches:
        if hasattr(home, name):
            patches.delattr(home, name)
        return load_module(ROOT / "generated" / NAME)


@pytest.mark.parametrize(("home", "name"), PRIVATE, ids=[name for _, name in PRIVATE])
def test_without_one_the_results_are_the_same(
    home: Any, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, inputs, grads = problem(NAME, small(NAME, 33, 40), device)
    results = [call(module, leaves, grads) for module in (built(NAME), alone(monkeypatch, home, name))]
    assert all(a.equal(b) for a, b in zip(*results))


def call(module: Any, leaves: list[torch.Tensor], grads: Any) -> list[torch.Tensor]:
    """Return results and gradients of a call with its LSE and of one without."""
    found: list[torch.Tensor] = []
    for lse in (True, False):
        out = module.attention(*leaves, dropout_p=0.25, seed=7, return_lse=lse)
        outs, given = (out, grads) if lse else ((out,), grads[:1])
        found += [*outs, *torch.autograd.grad(outs, leaves, given)]
    return found


@pytest.mark.parametrize("name", ["_AutoDispatchBelowAutograd", "_len_torch_dispatch_stack"])
def test_without_one_second_derivatives_are_refused_and_compilers_trace(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = alone(monkeypatch, torch._C, name)
    leaves, _, grads = problem(NAME, small(NAME, 20, 20), device)
    (first, *_) = torch.autograd.grad(module.attention(*leaves), leaves, grads[0], create_graph=True)
    with pytest.raises(RuntimeError, match="its gradients cannot be differentiated again"):
        first.sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: module.attention(q, k, v), backend="aot_eager", fullgraph=True)
    assert compiled(*leaves).equal(module.attention(*leaves))


def test_nothing_else_in_the_runtime_names_a_private_interface() -> None:
    for path in sorted((ROOT / "attngen" / "runtime").glob("*.py")):
        text = path.read_text()
        private = [
            word for word in ("torch._", "triton._", "forward_ad._", ".knobs", "packed_metadata") if word in text
        ]
        assert not private or path.name == "private.py", (path.name, private)


def test_a_generated_runtime_is_the_source_word_for_word() -> None:
    """Every generated runtime.py has each function and class of the sources unchanged."""
    bundled = (ROOT / "generated" / NAME / "runtime.py").read_text()
    for path in sorted((ROOT / "attngen" / "runtime").glob("*.py")):
        if path.name == "__init__.py":
            continue
        body = path.read_text().split("\n\n\n", 1)[-1] if "\n\n\n" in path.read_text() else path.read_text()
        assert body.strip() in bundled, path.name
    assert {p.read_text() for p in Path(ROOT / "generated").glob("*/runtime.py")} == {bundled}
