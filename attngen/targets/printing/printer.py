"""Prints expressions as Triton source, with explicit broadcasts; terms of one axis are added before they are broadcast.

Integers become fp32 while they are rows or columns, before they are broadcast: positions up to 2**24 are exact there.
Integer divisions round down, as in Python: `_floor_div` and `_floor_mod` are functions of the generated module.
Integers have 32 bits if a call's positions and parameters cannot exceed them, and 64 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy

from attngen.errors import AttngenError
from attngen.ir.expr import (
    BITS,
    REAL,
    TO_INTEGER,
    cdiv,
    clamp,
    cos,
    erf,
    exp2,
    floor,
    floordiv,
    log2,
    mod,
    most_of_bits,
    nearest,
    portion,
    select,
    sin,
    span,
    sqrt,
    symbol,
    trunc,
)
from attngen.ir.expr_text import to_text
from attngen.ir.names import INTEGERS

# (source text, dimensions, binding strength: 3 atom, 2 product, 1 sum, 0 comparison)
Piece = tuple[str, tuple[str, ...], int]
Lookup = Callable[[str], tuple[str, tuple[str, ...]]]

LARGEST = {name: n.most for name, n in INTEGERS.items() if n.most is not None}  # of symbols other than parameters
CALLS: dict[Any, str] = {
    select: "tl.where",
    exp2: "tl.exp2",
    log2: "tl.log2",
    cdiv: "tl.cdiv",
    portion: "_portion",
    sympy.Min: "tl.minimum",
    sympy.Max: "tl.maximum",
    sympy.Abs: "tl.abs",
    sqrt: "tl.sqrt",
    erf: "tl.erf",
    sin: "tl.sin",
    cos: "tl.cos",
}
CONSTANTS = {symbol("LOG2E"): sympy.Float(1.4426950408889634), symbol("LN2"): sympy.Float(0.6931471805599453)}
PARAMETERS = (-(2**30), 2**30 - 1)  # calls check that scalars are in this range, and document it for tensors


def to_triton(e: Any, lookup: Lookup, dims: tuple[str, ...] = (), small: bool = False) -> str:
    """Source text of an expression whose value has `dims`; `lookup(symbol)` gives a symbol's text and dimensions.

    small: integers in it have 32 bits, and those that are divided are not negative.
    """
    return _Printer(lookup, dims, small).print(_numbers(e, lookup, not dims))[0]


def _numbers(e: Any, lookup: Lookup, outermost: bool) -> Any:
    """The expression with LOG2E and LN2 as literals where they multiply a scalar inside it, or have a divisor.

    In the interpreter such a product would not be a tensor, as function arguments have to be. The value of a whole
    statement becomes one.
    """
    if e in CONSTANTS:
        return e if outermost else CONSTANTS[e]
    if not e.args or not e.has(*CONSTANTS):
        return e
    if e.is_Mul and any(f in CONSTANTS for f in e.args):
        rest = [f for f in e.args if f not in CONSTANTS]
        before = [f for f in rest if not (f.is_Pow and f.exp == -1)]
        if outermost or any(lookup(str(s))[1] for f in before for s in f.free_symbols):
            return e.func(*(f if f in CONSTANTS else _numbers(f, lookup, False) for f in e.args), evaluate=False)
    args = [_numbers(a, lookup, outermost and (e.is_Add or e.is_Mul)) for a in e.args]
    return e if all(a is b for a, b in zip(args, e.args)) else e.func(*args)


@cache
def _range(e: Any) -> tuple[int, int]:
    """Bounds, lower and upper, that hold for an integer expression and for any sum of some of its terms."""
    if e.is_Integer:
        return int(e), int(e)
    if e.is_Symbol:
        return (0, LARGEST[str(e)]) if str(e) in LARGEST else PARAMETERS
    if isinstance(e, TO_INTEGER):
        return PARAMETERS
    parts = [_range(a) for a in (e.args[1:] if isinstance(e, select) else e.args)]
    lows, highs = [low for low, _ in parts], [high for _, high in parts]
    if (ends_of := _between(e)) is not None:
        return min(low for low, _ in map(_range, ends_of)), max(high for _, high in map(_range, ends_of))
    if e.is_Add:
        return sum(min(0, low) for low in lows), sum(max(0, high) for high in highs)
    if isinstance(e, mod):
        return 0, max(abs(x) for x in parts[1])
    if isinstance(e, portion):
        return min(0, lows[0]), max(0, highs[0])
    if isinstance(e, clamp):
        return min(lows[1:]), max(highs[1:])
    if isinstance(e, BITS):
        most = most_of_bits(e, lows, highs)
        largest = 2 ** max(abs(x) for part in parts for x in part).bit_length()
        return (-largest, largest - 1) if most is None else (0, most)
    if e.is_Mul or e.is_Pow:
        ends = [1]
        for part in parts if e.is_Mul else parts[:1] * int(e.exp):
            products = [x * y for x in ends for y in part]
            ends = [min(products), max(products)]
        return ends[0], ends[-1]
    if isinstance(e, (floordiv, cdiv, sympy.Abs)):
        largest = max(abs(x) for x in parts[0])
        by = 1 if isinstance(e, sympy.Abs) else max(1, min(parts[1]))
        largest = -(-largest // by)
        return -largest, largest
    return min(lows), max(highs)


def _between(e: Any) -> tuple[Any, Any] | None:
    """The ends lo and hi of an expression `lo + portion(hi - lo, ..)`, which lies between them; None for others."""
    shares = [term for term in e.args if isinstance(term, portion)] if e.is_Add else []
    lo = e - shares[0] if len(shares) == 1 else None
    return (lo, lo + shares[0].args[0]) if lo is not None and -lo in sympy.Add.make_args(shares[0].args[0]) else None


def _is_wide(e: Any) -> bool:
    """True if an integer may exceed 32 bits."""
    low, high = _range(e)
    return not -(2**31) <= low <= high < 2**31


def _literal(e: Any) -> Piece:
    """The piece of a number, or of a constant condition."""
    if e in (sympy.true, sympy.false):
        return str(bool(e)), (), 3
    if e in (sympy.oo, -sympy.oo):
        return f'float("{"" if e > 0 else "-"}inf")', (), 3
    return (str(int(e)) if e.is_Integer else repr(float(e))), (), 3 if e >= 0 else 1


class _Printer:
    def __init__(self, lookup: Lookup, dims: tuple[str, ...], small: bool) -> None:
        self.lookup, self.dims, self.small = lookup, dims, small
        self.wide = False  # whether symbols are cast to 64 bits

    def print(self, e: Any, real: bool = False) -> Piece:
        """Print an expression.

        real: the value is needed in fp32, so an integer tile is made of fp32 rows and columns.
        """
        if e.is_Symbol:
            text, dims = self.lookup(str(e))
            if self.wide and e.is_integer:
                text = f"{text}.to(tl.int64)" if dims else f"tl.cast({text}, tl.int64)"
            return text, dims, 3
        if not e.args:
            return _literal(e)
        if e.is_integer and not self.wide and not self.small and _is_wide(e):
            self.wide = True
            piece = self.print(e, real)
            self.wide = False
            return piece
        real = real or not e.is_integer
        if e.is_Add:
            return self._sum(e, real)
        if e.is_Pow:
            return self._power(e)
        if e.is_Mul:
            return self._product(e, real)
        if e.is_Relational:
            real = not (e.lhs.is_integer and e.rhs.is_integer) and any(
                x.is_integer is False or x.has(sympy.Float) for x in e.args
            )
            e = e.reversed if e.lhs.is_number and not isinstance(e, (sympy.Eq, sympy.Ne)) else e  # the variable first
            text, dims, strength = self._join(f" {e.rel_op} ", [self.print(e.lhs, real), self.print(e.rhs, real)], 0)
            if not dims and not (e.lhs.is_integer and e.rhs.is_integer):
                # In the interpreter, `a < b` of scalar reals is itself a real.
                text = f"tl.where({text}, 1, 0) == 1"
            return text, dims, strength
        if isinstance(e, (sympy.And, sympy.Or)):
            pieces = [self.print(a) for a in sorted(e.args, key=sympy.default_sort_key)]
            return self._join(" & " if isinstance(e, sympy.And) else " | ", pieces, 0)
        if isinstance(e, sympy.Not):
            text, dims, strength = self.print(e.args[0])
            return f"~{self._wrap((text, dims, strength), 3)}", dims, 2
        return self._function(e, real)

    def _function(self, e: Any, real: bool) -> Piece:
        """A call of a function, or an operator that replaces one."""
        for kind, name in CALLS.items():
            if isinstance(e, kind):
                return self._call(name, e, real)
        if isinstance(e, TO_INTEGER):
            return self._whole(e)
        if isinstance(e, BITS):
            return self._atom(self._join(f" {e.sign} ", [self.print(a) for a in e.args], 0))
        if isinstance(e, clamp):
            x, low, high = e.args
            return self.print(sympy.Min(sympy.Max(x, low, evaluate=False), high, evaluate=False), real)
        if isinstance(e, (floordiv, mod)):
            if self.small or span(e.args[0])[0] >= 0 or e.args[0].is_nonnegative:
                left, right = (self.print(a) for a in e.args)
                return self._join(" // " if isinstance(e, floordiv) else " % ", [left, self._atom(right)], 2)
            return self._call("_floor_div" if isinstance(e, floordiv) else "_floor_mod", e, False)
        raise AttngenError(f"`{to_text(e)}` has no Triton form")

    def _power(self, e: Any) -> Piece:
        """An integer power as a product, and a negative power as 1 over the positive one."""
        if e.exp.is_number and e.exp < 0:
            if e.exp == -1:
                return self._product(e, True)
            return self._product(sympy.Pow(sympy.Pow(e.base, -e.exp, evaluate=False), -1, evaluate=False), True)
        if e.exp.is_Integer:
            return self._join(" * ", [self._atom(self.print(e.base, not e.base.is_integer))] * int(e.exp), 2)
        raise AttngenError(f"`{to_text(e)}` has no Triton form")

    def _call(self, name: str, e: Any, real: bool) -> Piece:
        symmetric = isinstance(e, (sympy.Min, sympy.Max))
        pieces = [self.print(a, real) for a in (sorted(e.args, key=self._order) if symmetric else e.args)]
        if isinstance(e, REAL) and e.args[0].is_integer:
            pieces = [(f"tl.cast({pieces[0][0]}, tl.float32)", pieces[0][1], 3)]
        dims = self._union(pieces)
        texts = [self._broadcast(p, dims)[0] for p in pieces]
        while len(texts) > 2 and symmetric:  # two operands at a time
            texts = [f"{name}({texts[0]}, {texts[1]})", *texts[2:]]
        return f"{name}({', '.join(texts)})", dims, 3

    def _order(self, e: Any) -> Any:
        """The key by which arguments of Min and Max are sorted: names before sums and numbers, if they are small."""
        return (self.small and (e.is_Add or e.is_number)), sympy.default_sort_key(e)

    def _whole(self, e: Any) -> Piece:
        """A real number as an integer, of 64 bits if `wide`."""
        before, self.wide = self.wide, False
        text, dims, _ = self._call({floor: "_to_floor", nearest: "_to_round", trunc: "_to_int"}[e.func], e, True)
        self.wide = before
        return (f"{text}.to(tl.int64)" if dims else f"tl.cast({text}, tl.int64)") if self.wide else text, dims, 3

    def _sum(self, e: Any, real: bool) -> Piece:
        """A sum with positive terms first, and tiles before rows before scalars; a real sum adds its integers first."""
        if real and not e.is_integer:
            integers = [a for a in e.args if a.is_integer and not a.is_number]
            if len(integers) > 1 and len(self.print(sympy.Add(*integers))[1]) > 1:
                others = (a for a in e.args if a not in integers)
                return self._sums([*others, sympy.Add(*integers, evaluate=False)], True)
        return self._sums(e.args, real)

    def _sums(self, args: Any, real: bool) -> Piece:
        terms = []
        for term in args:
            negative = term.could_extract_minus_sign() and not term.is_Add
            terms.append((negative, self.print(-term if negative else term, real)))
        converts = real and all(a.is_integer for a in args) and len({p[1] for _, p in terms if p[1]}) > 1
        groups: dict[tuple[str, ...], list[tuple[bool, Piece]]] = {}
        for negative, piece in sorted(terms, key=lambda t: (-len(t[1][1]), t[0])):
            dims = piece[1] or next(iter(groups), ())  # a scalar is added to the first group
            if not piece[1] and groups:
                dims = min(groups, key=len)
            groups.setdefault(dims, []).append((negative, piece))
        for group in groups.values():
            group.sort(key=lambda term: term[0])
        sums = [(group[0][0], self._signed_sum(dims, group)) for dims, group in groups.items()]
        if converts:  # integer rows and columns become fp32
            sums = [(n, (f"{self._wrap(p, 3)}.to(tl.float32)", p[1], 3) if len(p[1]) == 1 else p) for n, p in sums]
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
        """The sum of a group's terms, a positive one first; if there is none, the negated sum."""
        flip = group[0][0]
        text = ""
        for negative, piece in group:
            minus = negative != flip
            body = self._wrap(piece, 2 if text and minus else 1)
            text += (" - " if minus else " + ") + body if text else body
        return text, dims, 1 if len(group) > 1 else group[0][1][2]

    def _negated(self, piece: Piece) -> Piece:
        return f"-{self._wrap(piece, 2)}", piece[1], 1

    def _product(self, e: Any, real: bool) -> Piece:
        factors = e.args if e.is_Mul else (e,)
        over = [1 / f for f in factors if f.is_Pow and f.exp == -1]
        before, self.wide = (
            self.wide,
            self.wide or (real and not self.small and _is_wide(sympy.Mul(*(f for f in factors if f.is_integer)))),
        )
        pieces = [self._factor(f, real) for f in factors if not (f.is_Pow and f.exp == -1)]
        self.wide = before
        if e.is_Mul and factors[0] == -1:
            return self._negated(self.print(-e, real))
        pieces.sort(key=lambda p: -len(p[1]))  # tiles before scalars
        joined = self._join(" * ", pieces, 2) if pieces else ("1.0", (), 3)
        for divisor in over:
            joined = self._join(" / ", [joined, self._atom(self.print(divisor, True))], 2)
        return joined

    def _factor(self, e: Any, real: bool) -> Piece:
        """A factor of a product, with brackets around a floor division or remainder."""
        piece = self.print(e, real)
        return self._atom(piece) if isinstance(e, (floordiv, mod)) else piece

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
