"""The rule `scores`: weights are computed from the header's score, and the sink is the header's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from attngen.ir import LARGEST, Expr, Kernel, Module, Op, exp2, finite, log2, only, select, tile, to_text
from attngen.verify.algebra import LOG2E, equal, normal, same
from attngen.verify.values import PRODUCT, SCALE, Header, Values

# The log of each row's sum of weights, natural and to base 2, and the maximum of each row's scores.
ROW_SUMS = ("LSE", "LSE2", "M_ALL")


def softmaxes(kernel: Kernel, values: Values) -> Iterator[tuple[Op, Expr, list[Expr]]]:
    """The ops that turn scores into weights, as (op, its exponent of 2, terms that may be subtracted from the score).

    The online softmax subtracts its running maximum itself. A kernel that recomputes weights subtracts the log2 of the
    row's sum: an element of LSE2, or the expression in LSE from which LSE2 is made. Or it subtracts an element of
    M_ALL, and multiplies the weights, or its sums of them, by the same element of INV_L_ALL (see `_normalised`).
    """
    for op in kernel.ops():
        if isinstance(op, tile.SoftmaxStep):
            shift = values.of(op.shift) if op.shift else sympy.Integer(0)
            yield (
                op,
                (values.of(op.scale) if op.scale else sympy.Integer(1)) * values.of(op.s) + shift,
                [sympy.Integer(0)],
            )
        elif isinstance(op, tile.Map) and (power := power_of(op)) is not None:
            exponent = values.expression(power, op).args[0]
            sums = {x: values.elements[x] for x in sorted(exponent.free_symbols, key=str) if x in values.elements}
            rows = [e for x, tensor in sums.items() if tensor in ROW_SUMS for e in _subtracted(x, tensor)]
            if rows:
                yield op, exponent, rows


def power_of(op: tile.Map) -> Expr | None:
    """The power of 2 in a map that computes one, or one times a number per row; None for other maps."""
    e = op.expr
    if e.is_Mul and len(e.args) == 2 and any(x.is_Symbol for x in e.args):
        e = next((x for x in e.args if not x.is_Symbol), e)
    return e if isinstance(e, exp2) else None


def _subtracted(x: Expr, tensor: str) -> list[Expr]:
    """Expressions for the log2 of a row's sum of weights, in an element `x` of a tensor. From LSE, it is +inf where
    LSE, or LSE to base 2, is -inf."""
    if tensor != "LSE":
        return [x]
    return [select(e > -sympy.oo, LOG2E * x, sympy.oo) for e in (x, LOG2E * x)]


def _normalised(op: tile.Map, values: Values) -> bool:
    """True if weights that a map recomputes with the row's maximum are normalized by the row's sum.

    The map does that itself. Or each value that a loop carries is normalized where it is read, after the loops, which
    then store nothing and take no logarithms of the weights.
    """
    factor = op.expr / power_of(op) if power_of(op) is not None else op.expr
    elements = {x: values.elements[x] for x in values.of(op.name).free_symbols if x in values.elements}
    maxima = [str(x) for x, tensor in elements.items() if tensor == "M_ALL"]
    if len(maxima) != 1:
        return not maxima and factor == 1
    inverse = maxima[0].replace("M_ALL", "INV_L_ALL", 1)
    if factor != 1:
        found = values.expression(factor, op)
        return values.elements.get(found) == "INV_L_ALL" and str(found) == inverse
    kernel = values.kernel
    results = [f"{loop.name}.{field}" for loop in kernel.loops for field, _ in loop.carry]
    in_loops = [other for loop in kernel.loops for other in kernel.block(loop.body).ops]
    readers = [
        (other, ref)
        for other in kernel.ops()
        if not isinstance(other, tile.Loop)
        for ref in other.operands()
        if ref in results
    ]
    normalised = [
        isinstance(other, tile.Map) and str(values.of(other.name) / values.of(ref)) == inverse for other, ref in readers
    ]
    linear = not any(
        isinstance(other, (tile.Scatter, tile.Store)) or is_logarithm(kernel, values, other) for other in in_loops
    )
    return linear and all(normalised)


def scores(module: Module, kernel: Kernel) -> Iterator[str]:
    """Weights are computed from the header's score, nothing else but their logarithms reads masked scores, and the sink
    is the header's."""
    if not {"Q", "K"} <= {arg.name for arg in kernel.args}:
        yield from _sinks(kernel, Header(module, kernel), Values(kernel))
        return
    header, values = Header(module, kernel), Values(kernel)
    made_by = list(softmaxes(kernel, values))
    weights = {op.name for op, _, _ in made_by}
    scored = any(values.of(op.name) == PRODUCT for op in kernel.traits.dots)
    if scored and not weights and any(arg.name in ROW_SUMS for arg in kernel.args):
        yield "computes no weights of its scores; expected a softmax_step, or exp2 of scores less LSE2 or M_ALL"
    for op in kernel.ops():
        readers = {n for n in kernel.graph.successors(op.name) if not isinstance(kernel.op(n), tile.Mask)} - weights
        readers = {n for n in readers if not is_logarithm(kernel, values, kernel.op(n))}
        if isinstance(op, tile.Mask) and weights and readers:
            yield f"%{min(readers)} reads the masked scores %{op.name}, and computes no weights from them"
    for op, exponent, subtracted in made_by:
        masked = {
            s: values.others[s]
            for s in exponent.free_symbols
            if s in values.others and isinstance(kernel.op(values.others[s]), tile.Mask)
        }
        factor = sympy.expand(exponent).coeff(next(iter(masked))) if masked else sympy.Integer(1)
        number, rest = factor.as_coeff_Mul()
        score = header.here(module.meaning.score)
        made = _unlimited(exponent.xreplace({s: values.conditions(ref)[1] for s, ref in masked.items()}), score)
        right = LOG2E * score
        rising = len(masked) < 2 and number > 0 and rest in (sympy.Integer(1), SCALE, LOG2E, LOG2E * SCALE)
        if isinstance(op, tile.Map) and not _normalised(op, values):
            expected = "the weights of M_ALL, or all sums of them, times INV_L_ALL of the row; other weights unscaled"
            yield f"%{op.name} is `{to_text(values.of(op.name))}`; expected {expected}"
        if not (rising and any(equal(made, right - x) for x in subtracted)):
            expected = to_text(right - subtracted[0])
            found = to_text(made)
            yield f"%{op.name} computes weights by exp2({found}); expected exp2({expected}), by the header's score"
    yield from _sinks(kernel, header, values)


def _unlimited(e: Expr, score: Expr) -> Expr:
    """An expression without clamps to the range of fp32: LOG2E * x in place of
    min(LARGEST, max(LOG2E * x, -LARGEST if x > -inf else -inf)).

    The lower limit is -LARGEST where the score is never -inf, such as a square.
    """

    def limited(x: Any) -> Expr | None:
        top = x.args if isinstance(x, sympy.Min) and len(x.args) == 2 and LARGEST in x.args else ()
        inner = next((y.args for y in top if isinstance(y, sympy.Max) and len(y.args) == 2), None)
        if inner is None:
            return None
        if -LARGEST in inner:
            (value,) = (y for y in inner if y != -LARGEST)
            return value if (score > -sympy.oo) == sympy.true else None
        for value, lowest in (inner, inner[::-1]):
            if isinstance(lowest, select) and lowest.args[0].is_Relational:
                natural = lowest.args[0].args[0]
                holds = lowest.args == (natural > -sympy.oo, -LARGEST, -sympy.oo) and same(
                    normal(value), normal(LOG2E * natural)
                )
                return value if holds else None
        return None

    return e.replace(lambda x: limited(x) is not None, limited)


def is_logarithm(kernel: Kernel, values: Values, op: Op) -> bool:
    """True if an op is log2 of a weight where that is positive, and 0 elsewhere, so that 0 is never multiplied by an
    infinity."""
    if not isinstance(op, tile.Map) or not isinstance(op.expr, select):
        return False
    positive, logarithm, otherwise = op.expr.args
    compared = dict(op.uses).get(str(positive.args[0]), "") if positive.is_Relational else ""
    weight = kernel.op(compared) if compared else None
    if isinstance(weight, tile.SoftmaxStep):
        scale = values.of(weight.scale) if weight.scale else sympy.Integer(1)
        expected = scale * (values.of(weight.s) - values.of(f"{weight.name}.m"))
    elif isinstance(weight, tile.Map) and isinstance(weight.expr, exp2):
        expected = values.of(weight.name).args[0]
    elif isinstance(weight, tile.Map) and power_of(weight) is not None:
        return positive == (positive.args[0] > 0) and otherwise == 0 and logarithm == log2(positive.args[0])
    else:
        return False
    return positive == (positive.args[0] > 0) and otherwise == 0 and equal(values.expression(logarithm, op), expected)


def _sinks(kernel: Kernel, header: Header, values: Values) -> Iterator[str]:
    """Kernels that store LSE take the maximum of each row's maximum and the header's sink, if it has one."""
    steps = list(only(kernel.ops(), tile.SoftmaxStep))
    names = {arg.name for arg in kernel.args}
    if not (steps or kernel.traits.combines_splits) or "LSE" not in names:
        return
    sink = header.meaning.sink
    scale = values.of(steps[0].scale) if steps and steps[0].scale else sympy.Integer(1)
    maxima = [
        op
        for op in only(kernel.block("entry").ops, tile.Map)
        if isinstance(op.expr, sympy.Max) and len(op.type.dims) == 1
    ]
    if len(maxima) != (sink is not None):
        expected = "one, as the header has a sink" if sink is not None else "none"
        yield f"{len(maxima)} sinks are added to a row's softmax; expected {expected}"
    for op in maxima if sink is not None else ():
        carried = [values.of(ref) for _, ref in op.uses if isinstance(kernel.op(ref), tile.Loop)]
        right = (sympy.Max(scale * m, finite(LOG2E * header.here(sink))) for m in carried)
        if not any(equal(values.of(op.name), x) for x in right):
            found = to_text(values.of(op.name))
            yield f"%{op.name} is `{found}`; expected the row's maximum and the header's sink, `{to_text(sink)}`"
