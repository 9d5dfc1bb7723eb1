"""The keys that each query of a plane sees, as runs of consecutive keys, from the mask's formula.

The mask is a union of conjunctions (attngen/tiles/intervals.py). Each bound of a conjunction is solved for the key and
evaluated for all queries at once, so a conjunction gives one run [first, end) of keys for each query. Two results
enclose the mask: the runs outside of which nothing is visible, and runs inside of which everything is visible. They are
equal wherever the mask is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import sympy

from attngen.interp.numeric import value
from attngen.ir import Bool, Module
from attngen.tiles.intervals import MaskContext, Term, mentions, terms

Run = tuple[np.ndarray, np.ndarray]  # the first visible key of each query and the end, both [seq_len]; empty if equal


def runs_of(module: Module, values: Mapping[str, Any], others: frozenset[str]) -> tuple[list[Run], list[Run]]:
    """Return the runs that enclose the visible keys of each query, and the runs of keys that are visible for sure.

    The runs of a query are disjoint and in rising order.
    values: numbers, and arrays [seq_len], of the names that do not depend on the key.
    others: names that depend on the key or are no integers.
    """
    rows = frozenset(name for name, x in values.items() if np.ndim(x) and name != "q_idx") - others
    context = MaskContext("q", "kv", rows, others, module.meaning.known)
    mask = module.meaning.where
    outer, inner = (_disjoint(_runs(mask, context, values, outer)) for outer in (True, False))
    return outer, inner


def _runs(condition: Bool, context: MaskContext, values: Mapping[str, Any], outer: bool) -> list[Run]:
    """Return runs whose union encloses the keys where a condition holds (outer), or is enclosed by them."""
    return [run for term in terms(condition, context) for run in _runs_of_term(term, context, values, outer)]


def _runs_of_term(term: Term, context: MaskContext, values: Mapping[str, Any], outer: bool) -> list[Run]:
    n = values["Nq"]
    first, end, seen = np.zeros(n, np.int64), np.full(n, values["Nk"], np.int64), np.ones(n, bool)
    factors: list[list[Run]] = []
    for side, rest in term.solved:
        bound = value(rest, values)
        if side > 0:
            end = np.minimum(end, 1 - bound)
        elif side < 0:
            first = np.maximum(first, bound)
        else:
            seen &= bound <= 0
    without = replace(context, facts=())
    for literal in term.unsolved:
        fact = next((f for f in context.facts if f.literal == literal), None)
        if not mentions(literal, frozenset({"kv_idx"}) | (context.others - values.keys())):
            seen &= np.asarray(value(literal, values), bool)
        elif fact is not None:
            factors.append(_runs(fact.needs if outer else fact.enough, without, values, outer))
        elif not outer:
            return []
    found = [(first, np.where(seen, np.maximum(first, end), first))]
    for factor in factors:
        found = [_common(a, b) for a in found for b in factor]
    return found


def _common(a: Run, b: Run) -> Run:
    first = np.maximum(a[0], b[0])
    return first, np.maximum(first, np.minimum(a[1], b[1]))


def _disjoint(runs: list[Run]) -> list[Run]:
    """Return runs with the same union that do not overlap, in rising order in each row."""
    if len(runs) < 2:
        return runs
    firsts, ends = np.stack([first for first, _ in runs]), np.stack([end for _, end in runs])
    order = np.argsort(firsts, axis=0, kind="stable")
    firsts, ends = np.take_along_axis(firsts, order, 0), np.take_along_axis(ends, order, 0)
    # An empty run may start anywhere, and covers nothing.
    covered = np.maximum.accumulate(np.where(ends > firsts, ends, 0), axis=0)
    found = [(firsts[0], ends[0])]
    for i in range(1, len(runs)):
        first = np.maximum(firsts[i], covered[i - 1])
        found.append((first, np.maximum(first, ends[i])))
    return found


def lengths(runs: list[Run], n: int) -> np.ndarray:
    """Return the number of keys in the runs of each query, [n]."""
    return sum((end - first for first, end in runs), np.zeros(n, np.int64))


def holds(module: Module, values: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return where the mask holds, for values of all its names, as a bool array of the shape."""
    where = module.meaning.where
    if where in (sympy.true, sympy.false):
        return np.full(shape, where == sympy.true)
    with np.errstate(all="ignore"):  # errors at pairs that other conditions hide
        return np.broadcast_to(np.asarray(value(where, values), bool), shape)
