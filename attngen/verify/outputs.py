"""The rule `outputs`: kernels compute the optional outputs of a module as defined."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir import AXIS_DIM, Expr, Kernel, Module, exp2, finite, log2, only, select, symbol, tile
from attngen.ir.names import ROW_STATS
from attngen.verify.algebra import LN2, LOG2E, equal
from attngen.verify.combine import ONE, equals
from attngen.verify.scores import softmaxes
from attngen.verify.values import Header, Values

# Output or tensor -> the fields of each row that a loop over keys carries for it.
CARRIED = {"entropy": ("m", "l", "e"), "max_score": ("m",), **dict.fromkeys(ROW_STATS, ("m", "l"))}


def outputs(module: Module, kernel: Kernel) -> Iterator[str]:
    """A forward stores all outputs of the module, computed from the fields that its loop over keys carries.

    - The tensors ROW_STATS, from which other kernels recompute weights: the maximum of each row and one over its sum
      of weights, both with the sink.
    - max_score, the largest score of a query: the maximum of the softmax, without the sink.
    - entropy, with the sink and in nats: log2(l) - e / l, from the sum `l` of weights and the sum `e` of weights times
      their log2.
    - key_mass: the sum of the weights that all queries give a key.
    """
    stored = {kernel.accessed(op)[0].name: op.value for op in only(kernel.ops(), tile.Store)}
    if "KEY_MASS" in stored:
        yield from _sum_of_weights(kernel, stored["KEY_MASS"])
    steps = list(only(kernel.ops(), tile.SoftmaxStep))
    if not steps or "LSE" not in stored:
        return
    # No kernel recomputes weights from the outputs of a call with a KV cache.
    cached = any(arg.name == "CACHE_SEQLENS" for arg in kernel.args)
    if missing := [name for name in module.row_tensors if name not in stored and not (cached and name in ROW_STATS)]:
        yield f"it stores no {' and no '.join(missing)}; expected it to, by `outputs` of the header"
        return
    values, last = Values(kernel), kernel.loops[-1]
    given = _yielded(kernel, last)
    needed = [field for name in (*module.outputs, *stored) for field in CARRIED.get(name, ())]
    if lacking := [field for field in needed if field not in given]:
        expected = ", ".join(dict.fromkeys(needed))
        yield f"%{last.name} carries no {' and no '.join(lacking)}; expected {expected} of each row"
        return
    if needed and given["m"] != f"{steps[0].name}.m":
        yield f"%{last.name} carries %{given['m']} as its maximum; expected %{steps[0].name}.m"
        return
    scale = values.of(steps[0].scale) if steps[0].scale else ONE
    ends = {field: values.of(f"{last.name}.{field}") for field in needed}
    if "max_score" in module.outputs:
        yield from equals(values, stored["MAX_SCORE"], LN2 * scale * ends["m"])
    if "M_ALL" in stored:
        greatest, total = _sums(Header(module, kernel), scale * ends["m"], ends["l"])
        yield from equals(values, stored["M_ALL"], select(total > 0, greatest, sympy.oo))
        yield from equals(values, stored["INV_L_ALL"], select(total > 0, 1 / total, 0))
    if "entropy" in module.outputs:
        yield from equals(values, given["e"], _next(kernel, values, last, steps[0], scale))
        yield from equals(
            values, stored["ENTROPY"], _entropy(Header(module, kernel), scale * ends["m"], ends["l"], ends["e"])
        )


def _sum_of_weights(kernel: Kernel, ref: str) -> Iterator[str]:
    """The loops sum the weights of each iteration over its queries, starting from 0."""
    values, last = Values(kernel), kernel.loops[-1]
    weights = {op.name for op, _, _ in softmaxes(kernel, values)}
    sums = [
        op
        for op in only(kernel.ops(), tile.Reduce)
        if (op.op, op.over) == ("sum", AXIS_DIM["q"]) and op.value in weights
    ]
    field = ref.partition(".")[2]
    start = kernel.op(dict(kernel.loops[0].carry).get(field, ref))
    if ref != f"{last.name}.{field}" or len(sums) != 1 or not isinstance(start, tile.Init) or start.value != 0:
        yield f"%{ref} is stored in KEY_MASS; expected the sum of weights of the loop over queries, starting from 0"
        return
    yield from equals(values, _yielded(kernel, last)[field], values.of(field) + values.of(sums[0].name))


def _yielded(kernel: Kernel, loop: tile.Loop) -> dict[str, str]:
    last = kernel.block(loop.body).ops[-1]
    return dict(last.values) if isinstance(last, tile.Yield) else {}


def _next(kernel: Kernel, values: Values, loop: tile.Loop, step: tile.SoftmaxStep, scale: Expr) -> Expr:
    """The next value of `e`: the sum of weights times their log2, rescaled to the new maximum, plus the tile's."""
    p, alpha, greatest = (values.of(f"{step.name}.{field}") for field in ("p", "alpha", "m"))
    term = p * select(p > 0, scale * (values.of(step.s) - greatest), 0)
    sums = [op for op in only(kernel.block(loop.body).ops, tile.Reduce) if (op.op, op.over) == ("sum", AXIS_DIM["kv"])]
    term_sum = next((values.of(op.name) for op in sums if equal(values.of(op.value), term)), symbol("sum_of_terms"))
    grown = select(alpha > 0, scale * (greatest - values.of("m")), 0)
    return alpha * (values.of("e") - grown * values.of("l")) + term_sum


def _sums(header: Header, m: Expr, l: Expr) -> tuple[Expr, Expr]:  # noqa: E741
    """The maximum of each row and the sum of its weights relative to that, both with the sink if there is one."""
    if header.meaning.sink is None:
        return m, l
    sink = finite(LOG2E * header.here(header.meaning.sink))
    greatest = sympy.Max(m, sink)
    return greatest, l * exp2(m - greatest) + exp2(sink - greatest)


def _entropy(header: Header, m: Expr, l: Expr, e: Expr) -> Expr:  # noqa: E741
    """The entropy from the sums relative to the maximum m, to which a sink adds one weight."""
    if header.meaning.sink is not None:
        sink = finite(LOG2E * header.here(header.meaning.sink))
        most = sympy.Max(m, sink)
        shrunk, of_sink = exp2(m - most), sink - most
        e = shrunk * (e - select(shrunk > 0, most - m, 0) * l) + select(of_sink > -sympy.oo, exp2(of_sink) * of_sink, 0)
        l = l * shrunk + exp2(of_sink)  # noqa: E741
    return select(l > 0, LN2 * (log2(l) - e / l), 0)
