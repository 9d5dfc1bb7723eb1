"""Gradients of inputs: which reads get one, and how partial gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from attngen.builders.semantics import (
    S,
    derivative,
    sum_ratio,
    varies,
    without_common,
)
from attngen.errors import BuildError
from attngen.ir import InputGradient, Read, symbol, to_text
from attngen.lang.part import KV, NATURAL, Q
from attngen.spec import Spec

# Most entries of a table whose gradients a program sums per query. Each takes a register or two of a thread; 32 spill.
MOST_ENTRIES = 16


def input_gradients(spec: Spec) -> tuple[InputGradient, ...]:
    """The gradients of learned inputs, one per read of the input.

    Raises BuildError if there is no gradient, or if its partial sums cannot be added in a fixed order although the spec
    asks for one.
    """
    if derivative(spec.modified(), S) == 0:
        raise BuildError(
            ("score",),
            "changes with `s` only in steps, so that nothing has a gradient; expected it to change with `s`",
        )
    grads, by_entry = {i.name: i.shape for i in spec.inputs() if i.grad}, _by_entry(spec)
    found = []
    for read in spec.reads():
        if read.tensor not in grads:
            continue
        if any(s.sink() == symbol(read.name) for s in spec.score):  # its gradient follows from delta
            found.append(InputGradient(read.tensor, ("h",), "DELTA"))
            continue
        index = by_entry.get(read) or _index_kinds(read, grads[read.tensor])
        if derivative(spec.modified(), symbol(read.name)) == 0:
            steps = (
                f"has `grad: true` for `{read.tensor}`, but the score changes with it only in steps; expected no `grad`"
            )
            raise BuildError(spec.key_of(read.tensor), steps)
        if not _summed_in_order(index):
            if _wants_fixed_order(spec):
                raise BuildError(
                    spec.key_of(read.tensor),
                    _NO_FIXED_ORDER.format(read.tensor, ", ".join(map(to_text, read.index)), MOST_ENTRIES),
                )
            index = []
        found.append(InputGradient(read.tensor, tuple(e for e in index if e), partials_of(read)))
    return tuple(found)


def in_fixed_order(spec: Spec) -> bool:
    """True if the gradients of all learned inputs can be summed in a fixed order, as `backward: {deterministic: true}`
    requires."""
    grads = {i.name: i.shape for i in spec.inputs() if i.grad}
    by_entry = _by_entry(spec)
    read = (r for r in spec.reads() if r.tensor in grads and not any(s.sink() == symbol(r.name) for s in spec.score))
    return all(r in by_entry or _summed_in_order(_index_kinds(r, grads[r.tensor])) for r in read)


def _index_kinds(read: Read, dims: tuple[str, ...]) -> list[str | None]:
    """Each index of a read as a letter, a number, or an expression in `distance`; None if it is none of these."""
    letters = {natural: {"q_idx": "q", "kv_idx": "kv"}.get(str(natural), str(natural)) for natural in NATURAL.values()}
    found: list[str | None] = []
    for dim, e in zip(dims, read.index):
        if dim.isdigit() and e.is_Integer:
            found.append(str(e % int(dim)))
        else:
            found.append(letters.get(e, str(e)) if e == NATURAL.get(dim) else _by_distance(e))
    return found


def _summed_in_order(index: Sequence[str | None]) -> bool:
    """True if partial gradients with this index can be summed in a fixed order: per query, score or distance."""
    distances = [e for e in index if e and "distance" in e]
    if distances:
        return len(distances) == 1 and [e for e in index if e not in distances] in ([], ["b"], ["h"], ["b", "h"])
    return None not in index and {"q", "kv"} & set(index) != {"kv"}


def _by_entry(spec: Spec) -> dict[Read, list[str]]:
    """The reads whose gradients are summed per query and per entry of one dimension, with their indices.

    Each score reads one of a few entries, such as those of a table indexed by the distance in a graph. A program sums
    the gradient of each entry for each of its queries.
    """
    grads = {i.name: i.shape for i in spec.inputs() if i.grad}
    found, entries = {}, 0
    for read in spec.reads():
        index = _index_kinds(read, grads[read.tensor]) if read.tensor in grads else []
        size = [dim for dim, e in zip(grads.get(read.tensor, ()), index) if e is None]
        natural = all(e in (None, "b", "h", "hkv", "q") or e.isdigit() for e in index)
        if len(size) == 1 and size[0].isdigit() and natural and varies(spec, read, KV):
            found[read] = [e or "entry" for e in index]
            entries += int(size[0])
    return found if entries <= MOST_ENTRIES else {}


def partials_of(read: Read) -> str:
    """The tensor of a read's partial gradients."""
    return f"d{read.name.upper()}"


_NO_FIXED_ORDER = (
    "has `grad: true` for `{}`, which is read at `{}`; sums in a fixed order need b, h, hkv, q_idx, q_idx and "
    "kv_idx, numbers, a distance q_pos - kv_idx, or one of at most {} entries; "
    "`backward: {{deterministic: false}}` adds anywhere, in no fixed order"
)


def _by_distance(e: Any) -> str | None:
    """An index as an expression in `distance`, which is kv_idx - q_idx; None if it is not one."""
    made = _expanded(e.xreplace({Q: KV - symbol("distance")}))
    names = {str(s) for s in made.free_symbols}
    return to_text(made) if "distance" in names and names <= {"distance", "Nq", "Nk"} else None


def _expanded(e: Any) -> Any:
    """An expression with its sums and comparisons multiplied out, so that positions in them cancel."""
    if not e.args:
        return e
    args = [_expanded(a) for a in e.args]
    if e.is_Relational:
        return e.func(sympy.expand(args[0] - args[1]), 0)
    made = e.func(*args)
    return sympy.expand(made) if made.is_Add or made.is_Mul else made


def gradient_slopes(spec: Spec, gradients: Iterable[InputGradient]) -> tuple[dict[str, Read], list[Any]]:
    """The reads of inputs, by the tensors of their partial gradients; and for each gradient the derivative of the
    score with respect to the read value."""
    reads = {partials_of(read): read for read in spec.reads()}
    return reads, [derivative(spec.modified(), symbol(reads[x.partials].name)) for x in gradients]


def summed_gradients(spec: Spec) -> list[InputGradient]:
    """The gradients of inputs that are sums over scores.

    The gradient of a sink follows from delta, and gradients per score are stored as they are.
    """
    return [x for x in input_gradients(spec) if x.reduction not in ("delta", "score")]


def dq_factor(spec: Spec, x: InputGradient) -> Any:
    """The factor e such that the partial gradients of an input are e * rowsum(q * dQ), or None if there is none.

    There is one for an input that multiplies scores, such as a temperature. The partial gradient of a query is the sum
    of dscore * slope over keys, and dS is dscore * by_s. If slope = e * by_s * s, it is e times the sum of dS * s. With
    s = scale * q k^T, that is the sum of q * dQ over head_dim, because dQ is the sum of scale * dS * k.
    """
    if spec.chunk and not x.by_row:  # its partial gradients lie where the queries are in the whole sequence
        return None
    by = [symbol(read.name) for read in spec.reads() if partials_of(read) == x.partials and x.reduction == "query"]
    _, by_s = without_common(spec, derivative(spec.modified(), S))
    return sum_ratio(spec, derivative(spec.modified(), *by), by_s) if by else None


def _wants_fixed_order(spec: Spec) -> bool:
    return bool(spec.backward and spec.backward.deterministic)
