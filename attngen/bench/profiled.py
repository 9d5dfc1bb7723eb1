"""The process that `attngen profile` runs under ncu: `python -m attngen.bench.profiled PLAN`, with calls of generated
modules and of naive attention.

PLAN is a JSON file: the spec's path, the device, batch and heads, and the calls. The kernel `call_starts` marks the
start of each call, and a printed line says which call it is, or what went wrong with it. A failed call does not affect
the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from attngen.conformance.cases import torch_dtype
from attngen.conformance.harness import load_module
from attngen.conformance.oracle import reference_mask, reference_scores
from attngen.spec import Spec, load_spec

STARTED, FAILED = "started", "failed"  # first words of the printed lines


@triton.jit
def call_starts(x):  # type: ignore[no-untyped-def]
    tl.store(x, 1)


def main(plan_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    spec = load_spec(plan["spec"])
    mark = torch.zeros(1, dtype=torch.int32, device=plan["device"])
    call_starts[(1,)](mark)
    profiler: Any = torch.cuda.profiler
    for i, call in enumerate(plan["calls"]):
        run = None  # frees the tensors of the previous call
        try:
            run = _prepared(spec, plan, call)
            run()  # compiles
            torch.cuda.synchronize()
            print(STARTED, i, call["name"], flush=True)
            profiler.start()
            call_starts[(1,)](mark)
            run()
            torch.cuda.synchronize()
            profiler.stop()
        except Exception as error:  # of any kind: continue with the other calls
            profiler.stop()
            print(
                FAILED,
                i,
                call["name"],
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                flush=True,
            )
        torch.cuda.empty_cache()


def _prepared(spec: Spec, plan: dict[str, Any], call: dict[str, Any]) -> Callable[[], object]:
    """Return the call with its inputs."""
    generator = torch.Generator(plan["device"]).manual_seed(0)

    def normal(heads: int, width: int) -> torch.Tensor:
        shape = (plan["batch"], heads, call["n"], width)
        return torch.randn(shape, generator=generator, device=plan["device"]).to(torch_dtype(spec.dtype[0]))

    q, k, v = (
        normal(plan["heads"], spec.head_dim.qk),
        normal(plan["kv_heads"], spec.head_dim.qk),
        normal(plan["kv_heads"], spec.head_dim.v),
    )
    attention = load_module(Path(call["module"])).attention if call["module"] else _naive(spec, q, k)
    if call["direction"] == "forward":
        return torch.no_grad()(lambda: attention(q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    grad = normal(plan["heads"], spec.head_dim.v)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _naive(spec: Spec, q: torch.Tensor, k: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return attention as separate operations of eager PyTorch, in the element type."""
    hidden = None if spec.mask.name == "none" else ~reference_mask(spec.mask, q, k, {})
    modify, _ = reference_scores(spec.score, q, k, {})
    group = q.shape[1] // k.shape[1]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        s = torch.matmul(q * q.shape[3] ** -0.5, k.transpose(2, 3))
        s = modify(s) if modify else s
        s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
        return torch.matmul(torch.softmax(s, -1), v)

    return attention


if __name__ == "__main__":
    main(sys.argv[1])
