"""The rule `combine`: the outputs of split-KV kernels.

It checks the results that a program stores for its split of the keys, and their combination to the output of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Kernel, Module, only, tile
from attngen.ir.dtypes import ELEMENTS
from attngen.ir.expr import Expr, cdiv, exp2, finite, log2, select, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.names import LSE_PARTIALS, SUM_PARTIALS
from attngen.ir.split_kv import combined_work_items, work_item
from attngen.verify.algebra import LN2, LOG2E, equal
from attngen.verify.values import Header, Values, scale_of

ONE = sympy.Integer(1)
SPLITS = AXIS_DIM["KV_splits"]
NONE = -sympy.oo  # the LSE, or the maximum, of a row that sees no key
_PARTIALS = f"O_PARTIAL and {LSE_PARTIALS[0]}, or O_PARTIAL, {' and '.join(SUM_PARTIALS)}"


def combine(module: Module, kernel: Kernel) -> Iterator[str]:
    """A program stores partial results for its split of the keys, and these are combined to the output of all keys.

    It stores the output of the split, normalized by the sum of weights, and its LSE to base 2; splits are then weighted
    by 2 ** LSE. Or it stores the two parts of the LSE, the maximum to base 2 and the sum; splits are then weighted by
    sum * 2 ** maximum.
    """
    stored = {kernel.accessed(op)[0].name: op for op in only(kernel.ops(), tile.Store)}
    if kernel.kv_split is None or not kernel.loops:
        return
    values, last = Values(kernel), kernel.loops[-1]
    if not {"m", "l"} <= dict(last.carry).keys():
        yield f"%{last.name} carries {', '.join(dict(last.carry))}; expected m, l and sums"
        return
    if "O_PARTIAL" in stored:
        yield from _partial_results(module, kernel, values, last, stored)
    elif {"O", "LSE"} <= stored.keys():
        yield from _combine_step(kernel, values, last)
        yield from _combined_results(Header(module, kernel), values, last, stored)


def _statistics(names: Set[str]) -> tuple[str, ...] | None:
    """The tensors by which splits are weighted, if these are all of the names; None for other names."""
    return next((by for by in (LSE_PARTIALS, SUM_PARTIALS) if names == set(by)), None)


def _partial_results(
    module: Module, kernel: Kernel, values: Values, last: tile.Loop, stored: dict[str, tile.Store]
) -> Iterator[str]:
    """LSE2_PARTIAL is scale * m + log2(l), or M_PARTIAL is scale * m and L_PARTIAL is l. The output is the weighted
    sum of values over l."""
    for name, op in stored.items():
        if (index := _items(kernel, op)) != work_item():
            at, number = to_text(index), to_text(work_item())
            yield f"%{op.value} is stored in %{name} at `{at}`; expected {number}, the number of the split"
    m, l = (values.of(f"{last.name}.{field}") for field in "ml")  # noqa: E741
    steps = list(only(kernel.ops(), tile.SoftmaxStep))
    scale = values.of(steps[0].scale) if steps and steps[0].scale else ONE
    by = _statistics(stored.keys() - {"O_PARTIAL"})
    if by is None:
        yield f"it stores {', '.join(sorted(stored))}; expected {_PARTIALS}"
        return
    expected = {
        "LSE2_PARTIAL": select(l > 0, scale * m + log2(l), NONE),
        "M_PARTIAL": select(l > 0, scale * m, NONE),
        "L_PARTIAL": l,
    }
    for name in by:
        yield from equals(values, stored[name].value, expected[name])
    factor = sympy.Rational(1, 1 << ELEMENTS[module.dtypes[0]].weights)
    if module.cache and module.cache.scale == "head":
        factor *= next(
            scale_of(kernel, values, op) for op in only(kernel.ops(), tile.Load) if kernel.accessed(op)[0].name == "V"
        )
    yield from _normalised(values, last, stored["O_PARTIAL"].value, select(l > 0, 1 / l, 0), factor)
    yield from _sums(kernel, values, last, steps[0])


def _combine_step(kernel: Kernel, values: Values, loop: tile.Loop) -> Iterator[str]:
    """Each iteration takes the maximum with some splits, and adds them to the sums, which are rescaled to that."""
    last = kernel.block(loop.body).ops[-1]
    given = dict(last.values) if isinstance(last, tile.Yield) else {}
    if not dict(loop.carry).keys() == given.keys() == {"m", "l", "acc"}:
        yield f"%{loop.name} carries {', '.join(dict(loop.carry))}; expected m, l and acc"
        return
    found = list(only(kernel.block(loop.body).ops, tile.Load))
    loads = {kernel.accessed(op)[0].name: op for op in found}
    once = len(found) == len(loads) and all(_items(kernel, op) == combined_work_items() for op in found)
    all_splits = ((sympy.Integer(0), cdiv(symbol(AXIS_EXTENT["KV_splits"]), symbol(SPLITS))),)
    by = _statistics(loads.keys() - {"O_PARTIAL"})
    over_all = (loop.var, loop.ranges) == ("KV_splits", all_splits)
    if not once or by is None or "O_PARTIAL" not in loads or not over_all:
        expected = (
            f"splits {to_text(combined_work_items())} of {_PARTIALS} in each iteration, and a loop over all splits"
        )
        yield f"%{loop.name} loads {', '.join(sorted(loads))}; expected {expected}"
        return
    for name in ("O_PARTIAL", *by):
        neutral, load = NONE if name == by[0] else 0, loads[name]
        if load.other != neutral:
            other = to_text(load.other)
            yield f"%{load.name} is {other} past the last split; expected {to_text(neutral)}, which adds nothing"
    m, l, acc = map(values.of, ("m", "l", "acc"))  # noqa: E741
    partial, exponent, *sums = (values.of(loads[name].name) for name in ("O_PARTIAL", *by))

    def over_splits(how: str, of: Expr) -> Expr:
        """The value of the op that reduces this expression over the splits of an iteration."""
        made = [op for op in only(kernel.block(loop.body).ops, tile.Reduce) if (op.op, op.over) == (how, SPLITS)]
        return next((values.of(op.name) for op in made if equal(values.of(op.value), of)), symbol(f"{how}_of_splits"))

    greatest = sympy.Max(m, over_splits("max", exponent))
    base = select(greatest > NONE, greatest, 0)
    before, weight = exp2(m - base), sympy.Mul(exp2(exponent - base), *sums)
    fields = {
        "m": greatest,
        "l": l * before + over_splits("sum", weight),
        "acc": acc * before + over_splits("sum", partial * weight),
    }
    for field, e in fields.items():
        yield from equals(values, given[field], e)
    starts = {field: kernel.op(ref) for field, ref in loop.carry}
    for field, op in starts.items():
        if getattr(op, "value", None) != (NONE if field == "m" else 0):
            yield f"%{op.name} is the start of {field}; expected {'-inf' if field == 'm' else 0}"


def _combined_results(header: Header, values: Values, last: tile.Loop, stored: dict[str, tile.Store]) -> Iterator[str]:
    """The output is the sums over the sum of weights, to which a sink adds one. The LSE is that of this sum."""
    m, l = (values.of(f"{last.name}.{field}") for field in "ml")  # noqa: E741
    if header.meaning.sink is None:
        yield from _normalised(values, last, stored["O"].value, select(l > 0, 1 / l, 0))
        yield from equals(values, stored["LSE"].value, select(l > 0, LN2 * (m + log2(l)), NONE))
        return
    natural = header.here(header.meaning.sink)
    sink = finite(LOG2E * natural)
    greatest = sympy.Max(m, sink)
    shrunk = exp2(m - greatest)
    weights = l * shrunk + exp2(sink - greatest)
    yield from _normalised(values, last, stored["O"].value, shrunk / weights)
    yield from equals(
        values, stored["LSE"].value, select(m > NONE, sympy.Max(LN2 * (greatest + log2(weights)), natural), natural)
    )


def _items(kernel: Kernel, op: tile.Load | tile.Store) -> Expr:
    """The index of the splits that an op accesses, among those of all sequences."""
    tensor, index = kernel.accessed(op)
    return dict(zip(kernel.type_of(tensor.name).dims, index)).get("items", NONE)


def equals(values: Values, ref: str, expected: Expr) -> Iterator[str]:
    """A value equals an expression."""
    if not equal(values.of(ref), expected):
        yield f"%{ref} is `{to_text(values.of(ref))}`; expected `{to_text(expected)}`"


def _normalised(values: Values, last: tile.Loop, ref: str, by: Expr, factor: Expr = ONE) -> Iterator[str]:
    """A value is a sum that the loop carries, times these factors."""
    found = values.of(ref)
    sums = [
        s for s in found.free_symbols if s in values.others and len(values.kernel.type_of(values.others[s]).dims) == 2
    ]
    if len(sums) != 1 or not equal(found, sums[0] * by * factor):
        yield f"%{ref} is `{to_text(found)}`; expected the loop's sums times `{to_text(by * factor)}`"


def _sums(kernel: Kernel, values: Values, loop: tile.Loop, step: tile.SoftmaxStep) -> Iterator[str]:
    """Each iteration rescales the sums to the new maximum, and adds the weights of the tile, or their products."""
    last = kernel.block(loop.body).ops[-1]
    given = dict(last.values) if isinstance(last, tile.Yield) else {}
    alpha = values.of(f"{step.name}.alpha")
    weights = [
        op for op in only(kernel.block(loop.body).ops, tile.Reduce) if (op.op, op.value) == ("sum", f"{step.name}.p")
    ]
    if given.get("m") != f"{step.name}.m" or len(weights) != 1:
        found = given.get("m")
        yield f"%{loop.name} carries %{found} as its maximum; expected %{step.name}.m, and one sum of %{step.name}.p"
        return
    yield from equals(values, given["l"], values.of("l") * alpha + values.of(weights[0].name))
    for field in (field for field in given if field.startswith("acc")):
        made = kernel.op(given[field])
        products = list(only([made, *(kernel.op(r) for r in made.operands())], tile.Dot))
        product = values.of(products[0].name) if products else symbol(field)
        rest = values.of(made.acc) if isinstance(made, tile.Dot) and made.acc else values.of(made.name)
        rest = rest if isinstance(made, tile.Dot) else sympy.expand(rest) - sympy.expand(rest).coeff(product) * product
        if len(products) != 1 or not equal(rest, values.of(field) * alpha):
            expected = f"{field}*{step.name}.alpha, and one product of weights"
            yield f"%{given[field]} is `{to_text(rest)}` and a product; expected {expected}"
