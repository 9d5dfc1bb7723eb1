"""The rule of what calls give beside the output: kernels that store it compute what its name says."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir.expr import Expr, exp2, finite, log2, select, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.names import SUMS
from attngen.ir.ops import AXIS_DIM, Init, Loop, Reduce, SoftmaxStep, Store, Yield
from attngen.verify.algebra import equal
from attngen.verify.combine import LN2, ONE, is_
from attngen.verify.meaning import LOG2E, Header, Values, softmaxes

KEPT = {
    "entropy": ("m", "l", "e"),
    "max_score": ("m",),
    **dict.fromkeys(SUMS, ("m", "l")),
}  # what a loop over keys carries of each row for it


def outputs(module: Module, kernel: Kernel) -> Iterator[str]:
    """A forward stores all outputs of the module, made of what its loop over keys carries.

    It stores SUMS, if kernels make weights again of these: the maximum and one over the sum of weights, with the sink.
    The largest score of a query is the maximum that the softmax keeps, without a sink. The entropy, with its sink, is
    made of `l`, the sum of weights, and `e`, that of weights times their logarithms to base 2: log2(l) - e / l, in
    nats. What all queries give a key is the sum of their weights.
    """
    stored = {kernel.accessed(op)[0].name: op.value for op in kernel.ops() if isinstance(op, Store)}
    if "KEY_MASS" in stored:
        yield from _sum_of_weights(kernel, stored["KEY_MASS"])
    steps = [op for op in kernel.ops() if isinstance(op, SoftmaxStep)]
    if not steps or "LSE" not in stored:
        return
    cached = any(
        arg.name == "CACHE_SEQLENS" for arg in kernel.args
    )  # nobody makes weights again of what such a call gives
    if missing := [name for name in module.row_tensors if name not in stored and not (cached and name in SUMS)]:
        yield f"it stores no {' and no '.join(missing)}; expected it to, as the header says `outputs`"
        return
    values, last = Values(kernel), kernel.loops[-1]
    given = _yielded(kernel, last)
    needed = [field for name in (*module.outputs, *stored) for field in KEPT.get(name, ())]
    if lacking := [field for field in needed if field not in given]:
        yield f"%{last.name} carries no {' and no '.join(lacking)}; expected {', '.join(dict.fromkeys(needed))} of each row"
        return
    if needed and given["m"] != f"{steps[0].name}.m":
        yield f"%{last.name} carries %{given['m']} as its maximum; expected %{steps[0].name}.m"
        return
    scale = values.of(steps[0].scale) if steps[0].scale else ONE
    ends = {field: values.of(f"{last.name}.{field}") for field in needed}
    if "max_score" in module.outputs:
        yield from is_(values, stored["MAX_SCORE"], LN2 * scale * ends["m"])
    if "M_ALL" in stored:
        greatest, total = _sums(Header(module, kernel), scale * ends["m"], ends["l"])
        yield from is_(values, stored["M_ALL"], select(total > 0, greatest, sympy.oo))
        yield from is_(values, stored["INV_L_ALL"], select(total > 0, 1 / total, 0))
    if "entropy" in module.outputs:
        yield from is_(values, given["e"], _next(kernel, values, last, steps[0], scale))
        yield from is_(
            values, stored["ENTROPY"], _entropy(Header(module, kernel), scale * ends["m"], ends["l"], ends["e"])
        )


def _sum_of_weights(kernel: Kernel, ref: str) -> Iterator[str]:
    """The loops sum the weights of each turn over its queries, from 0 on."""
    values, last = Values(kernel), kernel.loops[-1]
    weights = {op.name for op, _, _ in softmaxes(kernel, values)}
    sums = [
        op
        for op in kernel.ops()
        if isinstance(op, Reduce) and (op.op, op.over) == ("sum", AXIS_DIM["q"]) and op.value in weights
    ]
    field = ref.partition(".")[2]
    start = kernel.op(dict(kernel.loops[0].carry).get(field, ref))
    if ref != f"{last.name}.{field}" or len(sums) != 1 or not isinstance(start, Init) or start.value != 0:
        yield f"%{ref} is stored in KEY_MASS; expected what the loop over queries sums of their weights, from 0 on"
        return
    yield from is_(values, _yielded(kernel, last)[field], values.of(field) + values.of(sums[0].name))


def _yielded(kernel: Kernel, loop: Loop) -> dict[str, str]:
    last = kernel.block(loop.body).ops[-1]
    return dict(last.values) if isinstance(last, Yield) else {}


def _next(kernel: Kernel, values: Values, loop: Loop, step: SoftmaxStep, scale: Expr) -> Expr:
    """The sum of weights times their logarithms, moved to the new maximum, and that of the tile."""
    p, alpha, greatest = (values.of(f"{step.name}.{field}") for field in ("p", "alpha", "m"))
    term = p * select(p > 0, scale * (values.of(step.s) - greatest), 0)
    sums = [
        op
        for op in kernel.block(loop.body).ops
        if isinstance(op, Reduce) and (op.op, op.over) == ("sum", AXIS_DIM["kv"])
    ]
    tile = next((values.of(op.name) for op in sums if equal(values.of(op.value), term)), symbol("sum_of_terms"))
    grown = select(alpha > 0, scale * (greatest - values.of("m")), 0)
    return alpha * (values.of("e") - grown * values.of("l")) + tile


def _sums(header: Header, m: Expr, l: Expr) -> tuple[Expr, Expr]:  # noqa: E741
    """The maximum of each row, and the sum of its weights at that, with a sink if there is one."""
    if header.meaning.sink is None:
        return m, l
    sink = finite(LOG2E * header.here(header.meaning.sink))
    greatest = sympy.Max(m, sink)
    return greatest, l * exp2(m - greatest) + exp2(sink - greatest)


def _entropy(header: Header, m: Expr, l: Expr, e: Expr) -> Expr:  # noqa: E741
    """Of sums at the maximum m, to which a sink adds a weight."""
    if header.meaning.sink is not None:
        sink = finite(LOG2E * header.here(header.meaning.sink))
        most = sympy.Max(m, sink)
        shrunk, of_sink = exp2(m - most), sink - most
        e = shrunk * (e - select(shrunk > 0, most - m, 0) * l) + select(of_sink > -sympy.oo, exp2(of_sink) * of_sink, 0)
        l = l * shrunk + exp2(of_sink)  # noqa: E741
    return select(l > 0, LN2 * (log2(l) - e / l), 0)
