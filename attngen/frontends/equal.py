"""Uses a mask's equalities to replace reads at the key by equal reads at the query.

    document[q_idx] == document[kv_idx] and q_idx - starts[document[q_idx]] >= kv_idx - starts[document[kv_idx]]

Where the first condition holds, both starts are the same number, so the second condition is `q_idx >= kv_idx`. Where
the first does not hold, the second does not matter. This saves work because a program reads the numbers of its queries
once, and those of keys in every tile.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import Any

from attngen.frontends.tracer import joined

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_FUNCTIONS = ("abs", "clamp", "max", "min")


def substitute_equal_reads(mask: ast.expr, integers: Set[str]) -> ast.expr:
    """Return a condition equivalent to `mask` with fewer reads at keys.

    `integers` names the tensors of integers. Reads of real numbers are not replaced, because 0.0 and -0.0 are equal.
    """
    parts = mask.values if isinstance(mask, ast.BoolOp) and isinstance(mask.op, ast.And) else [mask]
    for place in range(len(parts)):
        if (pair := _pair(parts[place], integers)) is not None:
            swap = _Swap(*pair, integers)
            parts = [each if at == place else swap.within(each) for at, each in enumerate(parts)]
    return joined(ast.And, *parts)


def _pair(part: ast.expr, integers: Set[str]) -> tuple[ast.expr, ast.expr] | None:
    """Return the read at the query and the read at the key of an equality of two integer reads; None for any other
    condition."""
    match part:
        case ast.Compare(left=ast.Subscript() as a, ops=[ast.Eq()], comparators=[ast.Subscript() as b]):
            a, b = (b, a) if _has_key(a) else (a, b)
            if _has_key(b) and not _has_key(a) and _is_integer(a, integers) and _is_integer(b, integers):
                return a, b
    return None


def _has_key(e: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "kv_idx" for node in ast.walk(e))


def _is_integer(e: ast.expr, integers: Set[str]) -> bool:
    """True if an expression is computed only from integers; positions and reduction indices are integers."""
    match e:
        case ast.Constant():
            return type(e.value) is int
        case ast.Name():
            return e.id not in ("true", "false")
        case ast.Subscript(value=ast.Name(id=name)):
            return name in integers
        case ast.UnaryOp(op=ast.USub()):
            return _is_integer(e.operand, integers)
        case ast.BinOp():
            return isinstance(e.op, _OPERATORS) and _is_integer(e.left, integers) and _is_integer(e.right, integers)
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS and all(_is_integer(x, integers) for x in e.args)
    return False


class _Swap:
    """Replaces the read at the key by the read at the query, and cancels terms that are then on both sides of a
    comparison.

    A shared subexpression is still one object in the result, unless terms next to it were cancelled.
    """

    def __init__(self, of_query: ast.expr, of_key: ast.expr, integers: Set[str]) -> None:
        self.of_query, self.of_key, self.integers = of_query, ast.unparse(of_key), integers
        self.known: dict[int, tuple[Any, Any]] = {}  # by id: a node, kept alive by this entry, and its replacement

    def within(self, e: Any) -> Any:
        if isinstance(e, list):
            made = [self.within(x) for x in e]
            return e if all(x is y for x, y in zip(made, e)) else made
        if not isinstance(e, ast.expr):
            return e
        if id(e) not in self.known:
            self.known[id(e)] = e, self._made(e)
        return self.known[id(e)][1]

    def _made(self, e: ast.expr) -> ast.expr:
        if isinstance(e, ast.Subscript) and ast.unparse(e) == self.of_key:
            return self.of_query
        fields = {name: self.within(value) for name, value in ast.iter_fields(e)}
        if all(fields[name] is value for name, value in ast.iter_fields(e)):
            return e
        match made := type(e)(**fields):
            case ast.Compare(left=left, ops=[op], comparators=[right]) if all(
                _is_integer(x, self.integers) for x in (left, right)
            ):
                return _without_common(left, op, right)
            case ast.BinOp(op=ast.Add() | ast.Sub()) if _is_integer(made, self.integers):
                kept = _cancelled(terms := _terms(made, True))
                return _sum(kept) if len(kept) < len(terms) else made
        return made


Term = tuple[bool, str]  # True if the term is added, False if subtracted; and its text


def _without_common(left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
    """Return a comparison of two sums without the terms that both have."""
    sides = [_cancelled(_terms(left, True)), _cancelled(_terms(right, True))]
    for term in tuple(sides[0]):
        if term in sides[1]:
            sides[0].remove(term)
            sides[1].remove(term)
    return ast.Compare(_sum(sides[0]), [op], [_sum(sides[1])])


def _cancelled(terms: list[Term]) -> list[Term]:
    """Return the terms without pairs that are both added and subtracted."""
    left: list[Term] = []
    for added, text in terms:
        if (not added, text) in left:
            left.remove((not added, text))
        else:
            left.append((added, text))
    return left


def _terms(e: ast.expr, added: bool) -> list[Term]:
    """Return the terms of a sum."""
    match e:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return [*_terms(e.left, added), *_terms(e.right, added == isinstance(e.op, ast.Add))]
        case ast.UnaryOp(op=ast.USub()):
            return _terms(e.operand, not added)
    return [(added, ast.unparse(e))]


def _sum(terms: list[Term]) -> ast.expr:
    """Return the sum of terms; added terms come first."""
    made: ast.expr | None = None
    for added, text in sorted(terms, key=lambda term: not term[0]):
        term = ast.parse(text, mode="eval").body
        if made is None:
            made = term if added else ast.UnaryOp(ast.USub(), term)
        else:
            made = ast.BinOp(made, ast.Add() if added else ast.Sub(), term)
    return made or ast.Constant(0)
