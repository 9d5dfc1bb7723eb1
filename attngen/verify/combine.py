"""The rule of outputs in parts: what a program stores of its part of the keys, and how parts become the output of
all keys."""

from __future__ import annotations

from collections.abc import Iterator, Set

import sympy

from attngen.ir.dtypes import ELEMENTS
from attngen.ir.expr import Expr, cdiv, exp2, finite, log2, select, symbol, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.names import LSE_OF_PARTS, SUMS_OF_PARTS
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Dot, Load, Loop, Reduce, SoftmaxStep, Store, Yield
from attngen.ir.split_kv import item, joined_items
from attngen.verify.algebra import equal
from attngen.verify.meaning import LOG2E, Header, Values, scale_of

LN2 = symbol("LN2")
ONE = sympy.Integer(1)
PARTS = AXIS_DIM["joined"]
NONE = -sympy.oo  # the LSE, or the maximum, of a row that sees no key
_ALL_OF_PARTS = f"O_PARTS and {LSE_OF_PARTS[0]}, or O_PARTS, {' and '.join(SUMS_OF_PARTS)}"


def joins(module: Module, kernel: Kernel) -> Iterator[str]:
    """What a program stores of its part of the keys makes, with that of other parts, the output of all.

    It stores the part's output, divided by its sum of weights, and its LSE to base 2: parts are weighed by 2 ** LSE. Or
    it stores what the LSE is made of, the maximum to base 2 and the sum: parts are weighed by sum * 2 ** maximum.
    """
    stored = {kernel.accessed(op)[0].name: op for op in kernel.ops() if isinstance(op, Store)}
    if kernel.kv_split is None or not kernel.loops:
        return
    values, last = Values(kernel), kernel.loops[-1]
    if not {"m", "l"} <= dict(last.carry).keys():
        yield f"%{last.name} carries {', '.join(dict(last.carry))}; expected m, l and sums"
        return
    if "O_PARTS" in stored:
        yield from _part(module, kernel, values, last, stored)
    elif {"O", "LSE"} <= stored.keys():
        yield from _turn(kernel, values, last)
        yield from _whole(Header(module, kernel), values, last, stored)


def _joined_by(names: Set[str]) -> tuple[str, ...] | None:
    """By which tensors parts are joined, if these names are of such."""
    return next((by for by in (LSE_OF_PARTS, SUMS_OF_PARTS) if names == set(by)), None)


def _part(module: Module, kernel: Kernel, values: Values, last: Loop, stored: dict[str, Store]) -> Iterator[str]:
    """LSE2_PARTS is scale * m + log2(l), or MAX_PARTS is scale * m and SUM_PARTS is l. The output is the sums of
    weighed values over l."""
    for name, op in stored.items():
        if (place := _items(kernel, op)) != item():
            yield f"%{op.value} is stored in %{name} at `{to_text(place)}`; expected {to_text(item())}, the part's number"
    m, l = (values.of(f"{last.name}.{field}") for field in "ml")  # noqa: E741
    steps = [op for op in kernel.ops() if isinstance(op, SoftmaxStep)]
    scale = values.of(steps[0].scale) if steps and steps[0].scale else ONE
    by = _joined_by(stored.keys() - {"O_PARTS"})
    if by is None:
        yield f"it stores {', '.join(sorted(stored))}; expected {_ALL_OF_PARTS}"
        return
    expected = {
        "LSE2_PARTS": select(l > 0, scale * m + log2(l), NONE),
        "MAX_PARTS": select(l > 0, scale * m, NONE),
        "SUM_PARTS": l,
    }
    for name in by:
        yield from is_(values, stored[name].value, expected[name])
    more = sympy.Rational(1, 1 << ELEMENTS[module.dtypes[0]].weights)
    if module.cache and module.cache.scale == "head":
        more *= next(
            scale_of(kernel, values, op)
            for op in kernel.ops()
            if isinstance(op, Load) and kernel.accessed(op)[0].name == "V"
        )
    yield from _divided(values, last, stored["O_PARTS"].value, select(l > 0, 1 / l, 0), more)
    yield from _sums(kernel, values, last, steps[0])


def _turn(kernel: Kernel, values: Values, loop: Loop) -> Iterator[str]:
    """In each turn the maximum, and sums that are rescaled to it, take some parts more."""
    last = kernel.block(loop.body).ops[-1]
    given = dict(last.values) if isinstance(last, Yield) else {}
    if not dict(loop.carry).keys() == given.keys() == {"m", "l", "acc"}:
        yield f"%{loop.name} carries {', '.join(dict(loop.carry))}; expected m, l and acc"
        return
    found = [op for op in kernel.block(loop.body).ops if isinstance(op, Load)]
    loads = {kernel.accessed(op)[0].name: op for op in found}
    wrong = len(found) != len(loads) or any(_items(kernel, op) != joined_items() for op in found)
    all_parts = ((sympy.Integer(0), cdiv(symbol(AXIS_EXTENT["joined"]), symbol(PARTS))),)
    by = _joined_by(loads.keys() - {"O_PARTS"})
    if wrong or by is None or "O_PARTS" not in loads or (loop.var, loop.ranges) != ("joined", all_parts):
        wanted = f"parts {to_text(joined_items())} of {_ALL_OF_PARTS} in each turn, and turns for all parts"
        yield f"%{loop.name} loads {', '.join(sorted(loads))}; expected {wanted}"
        return
    for name in ("O_PARTS", *by):
        nothing = NONE if name == by[0] else 0
        if loads[name].other != nothing:
            yield f"%{loads[name].name} is {to_text(loads[name].other)} past the last part; expected {to_text(nothing)}, which adds nothing"
    m, l, acc = map(values.of, ("m", "l", "acc"))  # noqa: E741
    part, exponent, *sums = (values.of(loads[name].name) for name in ("O_PARTS", *by))

    def over_parts(how: str, of: Expr) -> Expr:
        """What a turn has of its parts: the value of the one reduction of this expression over them."""
        made = [op for op in kernel.block(loop.body).ops if isinstance(op, Reduce) and (op.op, op.over) == (how, PARTS)]
        return next((values.of(op.name) for op in made if equal(values.of(op.value), of)), symbol(f"{how}_of_parts"))

    greatest = sympy.Max(m, over_parts("max", exponent))
    base = select(greatest > NONE, greatest, 0)
    before, weight = exp2(m - base), sympy.Mul(exp2(exponent - base), *sums)
    expected = {
        "m": greatest,
        "l": l * before + over_parts("sum", weight),
        "acc": acc * before + over_parts("sum", part * weight),
    }
    for field, e in expected.items():
        yield from is_(values, given[field], e)
    starts = {field: kernel.op(ref) for field, ref in loop.carry}
    for field, op in starts.items():
        if getattr(op, "value", None) != (NONE if field == "m" else 0):
            yield f"%{op.name} is where {field} starts; expected {'-inf' if field == 'm' else 0}"


def _whole(header: Header, values: Values, last: Loop, stored: dict[str, Store]) -> Iterator[str]:
    """The sums over their weights, to which a sink adds one, and the LSE."""
    m, l = (values.of(f"{last.name}.{field}") for field in "ml")  # noqa: E741
    if header.meaning.sink is None:
        yield from _divided(values, last, stored["O"].value, select(l > 0, 1 / l, 0))
        yield from is_(values, stored["LSE"].value, select(l > 0, LN2 * (m + log2(l)), NONE))
        return
    natural = header.here(header.meaning.sink)
    sink = finite(LOG2E * natural)
    greatest = sympy.Max(m, sink)
    shrunk = exp2(m - greatest)
    weights = l * shrunk + exp2(sink - greatest)
    yield from _divided(values, last, stored["O"].value, shrunk / weights)
    yield from is_(
        values, stored["LSE"].value, select(m > NONE, sympy.Max(LN2 * (greatest + log2(weights)), natural), natural)
    )


def _items(kernel: Kernel, op: Load | Store) -> Expr:
    """Which parts of all sequences an op accesses."""
    tensor, index = kernel.accessed(op)
    return dict(zip(kernel.type_of(tensor.name).dims, index)).get("items", NONE)


def is_(values: Values, ref: str, expected: Expr) -> Iterator[str]:
    """A value is equal to an expression."""
    if not equal(values.of(ref), expected):
        yield f"%{ref} is `{to_text(values.of(ref))}`; expected `{to_text(expected)}`"


def _divided(values: Values, last: Loop, ref: str, by: Expr, more: Expr = ONE) -> Iterator[str]:
    """A value is what the loop summed, times these factors."""
    found = values.of(ref)
    sums = [
        s for s in found.free_symbols if s in values.others and len(values.kernel.type_of(values.others[s]).dims) == 2
    ]
    if len(sums) != 1 or not equal(found, sums[0] * by * more):
        yield f"%{ref} is `{to_text(found)}`; expected the loop's sums times `{to_text(by * more)}`"


def _sums(kernel: Kernel, values: Values, loop: Loop, step: SoftmaxStep) -> Iterator[str]:
    """In each turn sums are rescaled to the new maximum, and take the weights of the tile, or products of these."""
    last = kernel.block(loop.body).ops[-1]
    given = dict(last.values) if isinstance(last, Yield) else {}
    alpha = values.of(f"{step.name}.alpha")
    weights = [
        op
        for op in kernel.block(loop.body).ops
        if isinstance(op, Reduce) and (op.op, op.value) == ("sum", f"{step.name}.p")
    ]
    if given.get("m") != f"{step.name}.m" or len(weights) != 1:
        yield f"%{loop.name} carries %{given.get('m')} as its maximum; expected %{step.name}.m, and one sum of %{step.name}.p"
        return
    yield from is_(values, given["l"], values.of("l") * alpha + values.of(weights[0].name))
    for field in (field for field in given if field.startswith("acc")):
        made = kernel.op(given[field])
        products = [op for op in [made, *(kernel.op(r) for r in made.operands())] if isinstance(op, Dot)]
        product = values.of(products[0].name) if products else symbol(field)
        rest = values.of(made.acc) if isinstance(made, Dot) and made.acc else values.of(made.name)
        rest = rest if isinstance(made, Dot) else sympy.expand(rest) - sympy.expand(rest).coeff(product) * product
        if len(products) != 1 or not equal(rest, values.of(field) * alpha):
            yield f"%{given[field]} is `{to_text(rest)}` and a product; expected {field}*{step.name}.alpha, and one product of weights"
