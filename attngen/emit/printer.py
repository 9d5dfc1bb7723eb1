"""Expressions as Triton source: broadcasts made explicit, terms of one axis gathered before they are broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from attngen.errors import AttngenError
from attngen.ir.expr import cdiv, exp2, floordiv, log2, select, to_text

# (source text, dimensions, binding strength: 3 atom, 2 product, 1 sum, 0 comparison)
Piece = tuple[str, tuple[str, ...], int]
Lookup = Callable[[str], tuple[str, tuple[str, ...]]]


def to_triton(e: Any, lookup: Lookup, dims: tuple[str, ...] = ()) -> str:
    """Source text of an expression whose value has `dims`; `lookup(symbol)` gives a symbol's text and dimensions."""
    return _Printer(lookup, dims).print(e)[0]


class _Printer:
    def __init__(self, lookup: Lookup, dims: tuple[str, ...]) -> None:
        self.lookup, self.dims = lookup, dims

    def print(self, e: Any) -> Piece:
        if e.is_Symbol:
            text, dims = self.lookup(str(e))
            return text, dims, 3
        if e in (sympy.oo, -sympy.oo):
            return f'float("{"" if e > 0 else "-"}inf")', (), 3
        if e.is_Integer or e.is_Float:
            return (str(int(e)) if e.is_Integer else repr(float(e))), (), 3 if e >= 0 else 1
        if e.is_Add:
            return self._sum(e)
        if e.is_Mul or (e.is_Pow and e.exp == -1):
            return self._product(e)
        if e.is_Relational:
            return self._join(f" {e.rel_op} ", [self.print(e.lhs), self.print(e.rhs)], 0)
        if isinstance(e, (sympy.And, sympy.Or)):
            pieces = [self.print(a) for a in sorted(e.args, key=sympy.default_sort_key)]
            return self._join(" & " if isinstance(e, sympy.And) else " | ", pieces, 0)
        calls: dict[Any, str] = {
            select: "tl.where",
            exp2: "tl.exp2",
            log2: "tl.log2",
            cdiv: "tl.cdiv",
            sympy.Min: "tl.minimum",
            sympy.Max: "tl.maximum",
        }
        for kind, name in calls.items():
            if isinstance(e, kind):
                return self._call(name, e)
        if isinstance(e, floordiv):
            if not e.args[0].is_nonnegative:
                raise AttngenError(f"`{to_text(e)}` divides a number that may be negative, which Triton rounds towards zero")
            return self._join(" // ", [self.print(a) for a in e.args], 2)
        raise AttngenError(f"`{to_text(e)}` has no Triton form")

    def _call(self, name: str, e: Any) -> Piece:
        symmetric = isinstance(e, (sympy.Min, sympy.Max))
        pieces = [self.print(a) for a in (sorted(e.args, key=sympy.default_sort_key) if symmetric else e.args)]
        dims = self._union(pieces)
        texts = [self._broadcast(p, dims)[0] for p in pieces]
        while len(texts) > 2 and symmetric:  # two operands at a time
            texts = [f"{name}({texts[0]}, {texts[1]})", *texts[2:]]
        return f"{name}({', '.join(texts)})", dims, 3

    def _sum(self, e: Any) -> Piece:
        """Positive terms first, tiles before rows before scalars."""
        terms = []
        for term in e.args:
            negative = term.could_extract_minus_sign()
            terms.append((negative, self.print(-term if negative else term)))
        groups: dict[tuple[str, ...], list[tuple[bool, Piece]]] = {}
        for negative, piece in sorted(terms, key=lambda t: (-len(t[1][1]), t[0])):
            dims = piece[1] or next(iter(groups), ())  # a scalar joins the first group
            if not piece[1] and groups:
                dims = min(groups, key=len)
            groups.setdefault(dims, []).append((negative, piece))
        sums = [(group[0][0], self._signed_sum(dims, group)) for dims, group in groups.items()]
        if len(sums) == 1:
            return sums[0][1] if not sums[0][0] else self._negated(sums[0][1])
        union = self._union([p for _, p in sums])
        sums.sort(key=lambda s: s[0])
        text = ""
        for negative, piece in sums:
            body = self._wrap(self._broadcast(piece, union), 2 if text and negative else 1)
            text += (" - " if negative else " + ") + body if text else ("-" if negative else "") + body
        return text, union, 1

    def _signed_sum(self, dims: tuple[str, ...], group: list[tuple[bool, Piece]]) -> Piece:
        """The group's terms; when its first is negative, the negated sum."""
        flip = group[0][0]
        text = ""
        for negative, piece in group:
            minus = negative != flip
            body = self._wrap(piece, 2 if text and minus else 1)
            text += (" - " if minus else " + ") + body if text else body
        return text, dims, 1 if len(group) > 1 else group[0][1][2]

    def _negated(self, piece: Piece) -> Piece:
        return f"-{self._wrap(piece, 2)}", piece[1], 1

    def _product(self, e: Any) -> Piece:
        factors = e.args if e.is_Mul else (e,)
        over = [1 / f for f in factors if f.is_Pow and f.exp == -1]
        pieces = [self.print(f) for f in factors if not (f.is_Pow and f.exp == -1)]
        if e.is_Mul and factors[0] == -1:
            return self._negated(self.print(-e))
        pieces.sort(key=lambda p: -len(p[1]))  # tiles before scalars
        joined = self._join(" * ", pieces, 2) if pieces else ("1.0", (), 3)
        for divisor in over:
            joined = self._join(" / ", [joined, self._atom(self.print(divisor))], 2)
        return joined

    def _atom(self, piece: Piece) -> Piece:
        return (piece[0], piece[1], 3) if piece[2] == 3 else (f"({piece[0]})", piece[1], 3)

    def _join(self, operator: str, pieces: list[Piece], strength: int) -> Piece:
        union = self._union(pieces)
        least = 2 if strength == 2 else 1  # comparisons are bracketed inside `&`, sums inside `*`
        texts = [self._wrap(self._broadcast(p, union), least) for p in pieces]
        return operator.join(texts), union, strength

    def _wrap(self, piece: Piece, least: int) -> str:
        return piece[0] if piece[2] >= least else f"({piece[0]})"

    def _union(self, pieces: list[Piece]) -> tuple[str, ...]:
        present = {d for p in pieces for d in p[1]}
        return tuple(d for d in self.dims if d in present)

    def _broadcast(self, piece: Piece, dims: tuple[str, ...]) -> Piece:
        if not piece[1] or piece[1] == dims:
            return piece
        index = ", ".join(":" if d in piece[1] else "None" for d in dims)
        return f"{self._wrap(piece, 3)}[{index}]", dims, 3
