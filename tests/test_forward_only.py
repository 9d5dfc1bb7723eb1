"""Modules with `backward: false`: the same forward, no gradients, and one sentence where a call needs gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import naive_attention, reference_mask
from attngen.conformance.sweep import repeats
from attngen.cost.numbers import done, moved
from attngen.cost.roofline import Problem
from attngen.cost.theory import theorems
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import stages
from attngen.report.page import page
from attngen.spec import Spec, make_spec
from attngen.verify import verify
from attngen.verify.inputs import verify_interface
from tests.conftest import CUDA
from tests.helpers import module_of

pytestmark = pytest.mark.numerics

SENTENCE = (
    r"attention: this module has no backward \(its spec says `backward: false`\); call it under torch.no_grad\(\)"
)
BASE = {"name": "forward_only", "head_dim": 16, "dtype": "fp16", "backward": False}
SPECS: dict[str, dict[str, Any]] = {
    "causal": {"heads": {"sharing": "gqa"}, "mask": "causal"},
    "learned": {"mask": "causal", "score": ["temperature", "sink"]},
    "kv_outer": {"schedule": {"order": "kv_outer"}, "mask": "causal"},
    "wide": {"head_dim": {"qk": 200, "v": 72}},
    "dropout": {"dropout": True},
    "blocks": {"mask": {"block_sparse": {"block": 64}}},
    "data": {
        "mask": {
            "expr": "allowed[b, q_idx, kv_idx]",
            "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}},
        }
    },
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "steps": {
        "score": {"expr": "round(s) + t[h]", "params": {"t": {"tensor": ["H"], "grad": True}}}
    },  # `round` has no derivative
}


def spec(name: str) -> Spec:
    return make_spec(BASE | SPECS[name])


@cache
def built(name: str, folder: Path) -> ModuleType:
    return module_of(spec(name), folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forward_only")


def lowered(name: str) -> Any:
    return list(stages(spec(name)))[-1][1]


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_naive_attention(name: str, folder: Path, device: str) -> None:
    """The only results are outputs and LSE; a second run gives the same bits."""
    for n_q, n_kv in ((70, 90), (5, 70)) if name == "causal" else ((70, 90),):
        case = Case(1, *heads_for(spec(name)), n_q, n_kv)
        found = run_case(built(name, folder), spec(name), case, "fp16", device)
        assert set(found.ours) == {"out", "out row", "lse", "lse row"} and found.ok, found
    if name != "dropout":  # which takes a new seed at each call
        assert repeats(built(name, folder), spec(name), case, "fp16", device, 0)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["causal", "learned", "kv_outer", "data"])
def test_it_is_the_forward_of_a_module_that_has_one(name: str) -> None:
    """It has the same kernels except those of gradients, and its text gives the same files."""
    made, whole = (
        lowered(name),
        list(stages(make_spec({k: v for k, v in (BASE | SPECS[name]).items() if k != "backward"})))[-1][1],
    )
    assert made.directions == ("forward",) and whole.directions == ("forward", "backward") and not made.input_gradients
    assert made.spec_hash != whole.spec_hash
    mine, theirs = (dict(_by_kernel(print_module(m))) for m in (made, whole))
    assert mine == {kernel: text for kernel, text in theirs.items() if kernel in mine} and len(theirs) > len(mine)
    assert {a for kernel in made.kernels for a in kernel.traits.writes} <= {"O", "LSE", "COUNT"}
    text = render(made)["__init__.py"]
    assert "_backward" not in text and "BACKWARD" not in text and "differentiable" not in text
    assert render(parse_module(print_module(made), "text")) == render(made)


def _by_kernel(text: str) -> list[tuple[str, str]]:
    """The text of each kernel and of its schedules, by name."""
    parts = text.replace("\nschedule @", "\nkernel @").split("\nkernel @")[1:]
    names = [part.split()[0] for part in parts]
    return [(f"{name} {names[:at].count(name)}", part.strip()) for at, (name, part) in enumerate(zip(names, parts))]


@pytest.mark.parametrize("name", ["learned", "data"])
def test_a_gradient_that_is_wanted_gets_one_sentence(
    name: str, folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before any launch, and only where autograd records."""
    module = built(name, folder)
    q, k, v, inputs = make_inputs(spec(name), Case(1, 2, 2, 20, 30), torch.float16, device)
    out = module.attention(q, k, v, **inputs)
    names = ["q", "k", "v", *(i.name for i in spec(name).inputs() if i.grad)]
    assert not out.requires_grad and (len(names) == 5) == (name == "learned")
    for wanted in names:
        given = {"q": q, "k": k, "v": v, **inputs}
        given[wanted] = given[wanted].detach().requires_grad_()
        with torch.no_grad():
            assert module.attention(**given).equal(out)
            assert torch.compile(module.attention, backend="aot_eager", fullgraph=True)(**given).equal(out)
        with torch.inference_mode():
            assert module.attention(**given).equal(out)
        with monkeypatch.context() as patch:
            patch.setattr(module.runtime.Kernel, "__call__", _launched)
            with pytest.raises(NotImplementedError, match=SENTENCE):
                module.attention(**given)
    if name == "learned":
        for at in range(5):  # calls of the operator itself
            args = [q, k, v, inputs["temperature"], inputs["sink"], 0.25]
            args[at] = args[at].detach().requires_grad_()
            with pytest.raises(NotImplementedError, match=SENTENCE):
                module.FORWARD(*args)
            with torch.no_grad():
                assert module.FORWARD(*args)[0].equal(out)


def _launched(*args: Any) -> None:
    raise AssertionError("launched")


@pytest.mark.share(16)
def test_torch_traces_it(folder: Path, device: str) -> None:
    """opcheck accepts the operator; torch.compile makes one graph of a call; torch.export takes it."""
    module = built("causal", folder)
    q, k, v, _ = make_inputs(spec("causal"), Case(1, 4, 2, 70, 70, "bnhd"), torch.float16, device)
    out, lse = module.attention(q, k, v, return_lse=True)
    torch.library.opcheck(module.FORWARD, (q, k, v, 0.25))
    torch._dynamo.reset()
    compiled = torch.compile(
        module.attention, backend="inductor" if CUDA else "aot_eager", fullgraph=True, dynamic=True
    )
    assert all(x.equal(y) for x, y in zip(compiled(q, k, v, return_lse=True), (out, lse)))

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = module.attention(q, k, v)
            return found

    assert torch.export.export(Model(), (q, k, v)).module()(q, k, v).equal(out)
    with pytest.raises(Exception, match="has no backward"):
        compiled(q.requires_grad_(), k, v)


def test_the_executor_runs_the_forward_alone() -> None:
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, heads, 20, 16)) for heads in (4, 2, 2))
    wanted = [torch.from_numpy(x) for x in (q, k, v)]
    mask = reference_mask(spec("causal").mask, *wanted[:2], {})
    for _, module in stages(spec("causal")):
        found = execute(module, {"q": q, "k": k, "v": v, "scale": 0.25}, {"BLOCK_Q": 16, "BLOCK_KV": 16}, DOUBLE)
        assert set(found) == {"out", "lse"}
        for x, y in zip(found.values(), naive_attention(*wanted, mask, 0.25)):
            assert np.allclose(x, y.numpy(), rtol=0, atol=1e-12)


@pytest.mark.share(16)
def test_analysis_and_page_are_of_the_forward() -> None:
    made = lowered("causal")
    assert list(_report(made)["flops"]) == ["forward"]
    assert all(row.backward == 0 < row.forward for row in (*moved(made, Problem()), *done(made, Problem())))
    found = [t for subject in theorems(made).values() for t in subject]
    assert all(t.holds for t in found) and not any("backward of ours" in t.claim for t in found)
    steps = list(stages(spec("causal")))
    html = page(spec("causal"), "name: forward_only\n", steps, render(made), Problem())
    assert "forward, FLOPs" in html and "backward, FLOPs" not in html and "@dq" not in html


def _report(module: Any) -> dict[str, Any]:
    from attngen.cost.report import report

    found: dict[str, Any] = report(module)
    return found


@pytest.mark.share(4)
def test_text_without_a_backward_has_no_kernel_or_learned_input_of_one() -> None:
    """Text that has only part of a backward is refused in one sentence."""
    made = list(stages(make_spec({k: v for k, v in (BASE | SPECS["learned"]).items() if k != "backward"})))[-1][1]
    text = print_module(made)
    start, end = text.index("host @backward"), text.index("kernel @fwd")
    without = parse_module(text[:start] + text[end:], "edited")
    with pytest.raises(Exception, match="no host program launches @dq"):
        verify(without)
    with pytest.raises(
        Exception, match=r"`gradient .*`, and there is no host program backward; expected it, or no `gradient`"
    ):
        verify_interface(without)
