"""Ours: the generated module of the spec, its calls with a KV cache, and `attngen.flex_attention` of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from attngen.bench.peers.base import Call, Forward

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


def ours(problem: Problem) -> Call:
    """Return the generated module's call, with the mask's inputs planned in advance."""
    import torch

    from attngen.bench.cases.functions import FunctionProblem
    from attngen.bench.cases.functions import ours as of_function
    from attngen.conformance.harness import load_module

    if isinstance(problem, FunctionProblem):
        return Call(of_function(problem))
    attention = load_module(problem.folder).attention
    if problem.cell.cached:
        return Call(cache_forward(attention.with_kvcache, problem), torch.no_grad)
    learned = [i.name for i in problem.cell.spec.learned()]
    p = problem.cell.asked("dropout_p")
    dropout = {"dropout_p": p} if p else {}

    def forward(given: Mapping[str, Any]) -> Forward:
        fixed = {name: x for name, x in given.items() if not getattr(x, "requires_grad", False)} | dropout
        return lambda x: attention(x.q, x.k, x.v, **fixed, **dict(zip(learned, x.learned)))

    make = _planner(attention, problem)
    if make is None:
        return Call(forward(problem.given))
    planned = dict(problem.given)
    if "block_mask" in planned:
        planned["block_mask"] = make()
    else:
        defaults = inspect.signature(attention).parameters
        # The plan has the optional arguments.
        planned = {name: x for name, x in planned.items() if defaults[name].default is inspect.Parameter.empty}
        planned["plan"] = make()
    return Call(forward(planned), masks={"mask_ms": make}, whole=lambda: forward(problem.given))


def cache_forward(with_kvcache: Any, problem: Problem) -> Forward:
    """Return a forward that reads the cache and appends nothing; with a latent there is no v_cache."""
    stored = 1 if problem.cell.spec.rope else 2

    def forward(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = with_kvcache(x.q, *(y.transpose(1, 2) for y in (x.k, x.v)[:stored]), **problem.given)
        return out

    return forward


def _planner(attention: Any, problem: Problem) -> Callable[[], object] | None:
    """Return a function that makes the plan of a problem; None if nothing can be planned."""
    if not hasattr(attention, "plan"):
        return None
    parameters = inspect.signature(attention.plan).parameters
    if "block_mask" in parameters:
        return partial(attention.plan, problem.given["block_mask"]) if "block_mask" in problem.given else None
    one = problem.make_inputs(0)
    have = {**problem.given, "q": one.q, "k": one.k, "n_q": problem.cell.n_q, "n_kv": problem.cell.n_kv}
    return partial(attention.plan, **{name: have[name] for name in parameters if name in have})
