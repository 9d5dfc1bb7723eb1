"""Values of a traced function as expressions of the language: each has a kind, a shape, and an expression per element.

Nearly all values inside FlexAttention's functions are numbers. A few are small tensors, such as a row of a table, which
a reduction or an index makes a number again. The expression of an element is made on demand, from its indices,
which may be the names of reduction indices.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attngen.lang.limits import MAX_UNROLLED

if TYPE_CHECKING:
    from attngen.lang.params import Kind

Index = tuple[ast.expr, ...]
Fresh = Callable[[int], str]  # takes a reduction's length and returns a new name for its index
# Called for each element that is read: with its expression, one of its indices, and the length of that dimension.
Note = Callable[[ast.expr, ast.expr, int], None]
Number = bool | int | float


# The end of error sentences: what to write instead.
OUTSIDE = "compute more of it outside of the function, and read the result from a captured tensor"


class NotExpressible(Exception):
    """The language cannot express an operation. The message is the reason, as the end of a sentence."""


@dataclass(frozen=True)
class Value:
    """A value of a traced function.

    at(index): the expression of an element.
    number: the value, if it is a number that the function was written with.
    visible: the condition under which a score is not -inf; None if it never is.
    """

    kind: Kind
    shape: tuple[int, ...]
    at: Callable[[Index], ast.expr]
    number: Number | None = None
    visible: ast.expr | None = None

    @property
    def text(self) -> ast.expr:
        """Expression of a value without dimensions."""
        if self.shape:
            raise NotExpressible(f"gives a tensor of shape {list(self.shape)}; expected one number")
        return self.at(())


def scalar(kind: Kind, e: ast.expr, visible: ast.expr | None = None) -> Value:
    """Return a value without dimensions."""
    return Value(kind, (), lambda _: e, None, visible)


def constant(value: Number) -> Value:
    """Return the value of a number that the function was written with."""
    kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "real"
    return Value(kind, (), lambda _: literal(value), value)


_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt}
_OPPOSITE |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def literal(value: Number) -> ast.expr:
    if isinstance(value, bool):
        return ast.Name("true" if value else "false", ast.Load())
    if math.isnan(value) or math.isinf(value):
        raise NotExpressible(
            f"uses {value}, which expressions do not have; -inf may be a side of the last `torch.where` of a score"
        )
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def joined(op: type[ast.boolop], *parts: ast.expr) -> ast.expr:
    """Return the flat `and` or `or` of conditions, without neutral operands."""
    neutral, decisive = ("true", "false") if op is ast.And else ("false", "true")
    found: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Name) and part.id == decisive:
            return part
        if not (isinstance(part, ast.Name) and part.id == neutral):
            found += part.values if isinstance(part, ast.BoolOp) and isinstance(part.op, op) else [part]
    if not found:
        return ast.Name(neutral, ast.Load())
    return found[0] if len(found) == 1 else ast.BoolOp(op(), found)


def negated(e: ast.expr) -> ast.expr:
    if isinstance(e, ast.Compare) and len(e.ops) == 1:
        return ast.Compare(e.left, [_OPPOSITE[type(e.ops[0])]()], e.comparators)
    return e.operand if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not) else ast.UnaryOp(ast.Not(), e)


def as_number(x: Value) -> Value:
    """Return a condition as 1 or 0; a number as it is."""
    if x.kind != "bool":
        return x
    return constant(int(x.number)) if x.number is not None else Value("int", x.shape, lambda i: call("int", x.at(i)))


def as_real(x: Value) -> Value:
    if x.kind == "real":
        return x
    if x.number is not None:
        return constant(float(x.number))
    return Value("real", x.shape, lambda i: call("float", x.at(i)))


def finite(*values: Value) -> None:
    """Raise NotExpressible if one of the values may be -inf."""
    if any(x.visible is not None for x in values):
        raise NotExpressible("computes with -inf; expected -inf as a side of `torch.where`, and only sums after that")


def as_condition(x: Value) -> Value:
    """Return a number as the condition that it is not 0; a condition as it is."""
    if x.kind == "bool":
        return x
    finite(x)
    if x.number is not None:
        return constant(bool(x.number))
    return Value("bool", x.shape, lambda i: ast.Compare(x.at(i), [ast.NotEq()], [ast.Constant(0)]))


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape to which PyTorch broadcasts these shapes."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded))


def element(x: Value, index: Index) -> ast.expr:
    """Return the expression of a broadcast value's element, at an index of the common shape."""
    trailing = index[len(index) - len(x.shape) :] if x.shape else ()
    return x.at(tuple(ast.Constant(0) if n == 1 else i for n, i in zip(x.shape, trailing)))


def mapped(kind: Kind, make: Callable[..., ast.expr], *values: Value, visible: ast.expr | None = None) -> Value:
    """Return the elementwise result of `make` on the broadcast values."""
    shape = broadcast(*(x.shape for x in values))
    if not shape:
        return scalar(kind, make(*(x.text for x in values)), visible)
    return Value(kind, shape, lambda index: make(*(element(x, index) for x in values)), None, visible)


def indexed(note: Note, x: Value, indices: list[Value | None]) -> Value:
    """Return x[indices]; None keeps a dimension.

    Indices broadcast. As in PyTorch, their dimensions come first in the result if a kept dimension lies between two of
    them.
    """
    at = [i for i, index in enumerate(indices) if index is not None]
    given = [as_number(index) for index in indices if index is not None]
    kept = [i for i in range(len(x.shape)) if i not in at]
    shape = broadcast(*(index.shape for index in given))
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0  # where the indices' dimensions are in the result
    before = [i for i in kept if i < first]
    after = [i for i in kept if i not in before]
    whole = (*(x.shape[i] for i in before), *shape, *(x.shape[i] for i in after))

    def of(index: Index) -> ast.expr:
        places: dict[int, ast.expr] = dict(zip(before, index))
        of_indices = index[len(before) : len(before) + len(shape)]
        places |= dict(zip(after, index[len(before) + len(shape) :]))
        read = {i: element(value, of_indices) for i, value in zip(at, given)}
        places |= read
        made = x.at(tuple(places[i] for i in range(len(x.shape))))
        for i, e in read.items():
            note(made, e, x.shape[i])
        return made

    return scalar(x.kind, of(()), x.visible) if not whole else Value(x.kind, whole, of, None, x.visible)


def moved(x: Value, shape: tuple[int, ...], places: Callable[[Index], Index]) -> Value:
    """Return a view of x whose element at `index` is x's element at `places(index)`."""
    made = Value(x.kind, shape, lambda index: x.at(places(index)), x.number, x.visible)
    return scalar(x.kind, made.at(()), x.visible) if not shape and x.number is None else made


def reduced(x: Value, dims: tuple[int, ...], keep: bool, name: str, kind: Kind, fresh: Fresh) -> Value:
    """Return `any`, `all` or `sum` of x over dimensions, with new names for their indices."""
    rank = len(x.shape)
    over = sorted({d % rank for d in dims}) if rank else []
    if large := next((x.shape[d] for d in over if x.shape[d] > MAX_UNROLLED), 0):
        raise NotExpressible(
            f"reduces {large} elements; expected at most {MAX_UNROLLED}, which are written out: {OUTSIDE}"
        )
    left = tuple(1 if d in over else n for d, n in enumerate(x.shape) if keep or d not in over)

    def of(index: Index) -> ast.expr:
        outer = iter(index)
        places: list[ast.expr] = []
        inner: list[tuple[str, int]] = []  # the reduction's own indices and their lengths
        for d, n in enumerate(x.shape):
            if d in over:
                if keep:
                    next(outer)
                inner += [(fresh(n), n)] if n != 1 else []
                places.append(ast.Name(inner[-1][0], ast.Load()) if n != 1 else ast.Constant(0))
            else:
                places.append(next(outer))
        e = x.at(tuple(places))
        for i, n in reversed(inner):
            e = call(name, ast.Name(i, ast.Load()), ast.Constant(n), e)
        return e

    return scalar(kind, of(())) if not left else Value(kind, left, of)


def never_negative(e: ast.expr) -> bool:
    """True if an integer expression is certainly >= 0, because it combines positions and constants without a
    subtraction."""
    match e:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(op=ast.Add() | ast.Mult() | ast.FloorDiv()):
            return never_negative(e.left) and never_negative(e.right)
        case ast.BinOp(op=ast.Mod(), right=ast.Constant()):
            return True
        case ast.Call(func=ast.Name(id="abs")):
            return True
    return False


def from_start(at: ast.expr, n: int) -> ast.expr:
    """Return an index into n elements as its offset from the first; negative indices count from the last, as in
    Python."""
    return at if never_negative(at) or not n else ast.BinOp(at, ast.Mod(), ast.Constant(n))


def in_place(old: Value, new: Value) -> Value:
    """Return a tensor's value after an in-place operator computed `new`: `new` in the type and shape of `old`."""
    ranks = ("bool", "int", "real")
    if ranks.index(new.kind) > ranks.index(old.kind) or new.shape != old.shape:
        raise NotExpressible(
            "changes the type or the shape of a tensor, in place; expected a new one, as in `x = x + 0.5`"
        )
    if new.kind == old.kind:
        return new
    return as_real(as_number(new)) if old.kind == "real" else as_number(new)


def size_of(e: ast.AST) -> int:
    """Number of distinct nodes of an expression; a shared node counts once."""
    seen: set[int] = set()

    def count(node: Any) -> int:
        if id(node) in seen:
            return 0
        seen.add(id(node))
        return 1 + sum(count(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    return count(e)
