"""The rule `mask`: a kernel hides the same pairs as the header's mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import sympy

from attngen.ir import Bool, Kernel, Module, Op, conjuncts, only, tile, to_text
from attngen.tiles.intervals import implies
from attngen.verify.algebra import alike, normal, same
from attngen.verify.scores import softmaxes
from attngen.verify.values import Header, Values, pair_exists


def masks(module: Module, kernel: Kernel) -> Iterator[str]:
    """A kernel hides the same (query, key) pairs as the header's mask, among the pairs that exist."""
    header, values = Header(module, kernel), Values(kernel)
    expected = conjuncts(header.where)
    used = [(op, ref) for op, exponent, _ in softmaxes(kernel, values) for ref in _scores_of(kernel, op)]
    last = used or [(op, op.name) for op in only(kernel.ops(), tile.Mask) if not _masked_again(kernel, op)]
    for op, ref in last:
        applied, _ = values.conditions(ref)
        for c in _unproven(applied, [*expected, *pair_exists()], kernel.program_axis):
            mask = to_text(header.where)
            yield f"%{op.name} hides more than the header's mask: `{to_text(c)}` does not follow from `{mask}`"
        for c in _unproven(expected, [*applied, *pair_exists()], kernel.program_axis):
            yield f"%{op.name} hides less than the header's mask: `{to_text(c)}` does not follow from its conditions"
    for op in kernel.ops():
        if isinstance(op, tile.Mask):
            yield from _facts(op, header, values)


def _scores_of(kernel: Kernel, op: Op) -> list[str]:
    """The scores that a softmax step, or a map that computes weights, reads: the masked ones, if there are any."""
    if isinstance(op, tile.SoftmaxStep):
        return [op.s]
    masked = [ref for ref in op.operands() if isinstance(kernel.op(ref), tile.Mask)]
    return masked or [next(iter(op.operands()))]


def _masked_again(kernel: Kernel, op: tile.Mask) -> bool:
    return any(isinstance(kernel.op(n), tile.Mask) for n in kernel.graph.successors(op.name))


def _unproven(conclusions: Iterable[Bool], premises: Iterable[Bool], axis: str) -> list[Bool]:
    """The conclusions that are not among the premises and follow from none of them, for rows that exist.

    A condition may become constant in its normal form, for example if it never holds. Such conditions are compared as
    they stand.
    """
    premises, loop = tuple(premises), "kv" if axis == "q" else "q"
    known = dict.fromkeys(normal(p) for p in premises)
    left = []
    for c in conclusions:
        form = normal(c)
        if form in known:
            continue
        if form == sympy.true or any(
            alike(p, form) or (_of_integers(p, form) and implies(p, form, axis, loop)) for p in known
        ):
            continue
        if not any(alike(p, c) for p in premises):
            left.append(c)
    return left


@cache
def _of_integers(*conditions: Bool) -> bool:
    return all(s.is_integer for c in conditions for s in c.free_symbols)


def _facts(op: tile.Mask, header: Header, values: Values) -> Iterator[str]:
    """A mask assumes only facts about data that the header states."""
    stated = [tuple(normal(header.here(e)) for e in fact) for fact in header.meaning.known]
    for fact in op.known:
        literal, needs, enough = (normal(values.expression(e, op)) for e in fact)
        known = [f for f in stated if same(f[0], literal)]
        needed = {c for f in known for c in conjuncts(f[1])}
        sufficient = {c for f in known for c in sympy.Or.make_args(f[2])}
        if set(conjuncts(needs)) - needed or (enough != sympy.false and set(sympy.Or.make_args(enough)) - sufficient):
            yield f"%{op.name} assumes more about `{to_text(fact.literal)}` than the header states"
