"""Which query heads a program has that owns keys."""

from __future__ import annotations

import sympy

from attngen.ir.expr import Expr, floordiv, symbol


def query_heads(is_split: bool) -> tuple[Expr, Expr]:
    """First and end of the query heads, by number in their group, of a program that owns a tile of keys: all, or those of its split."""
    group, split, splits = map(symbol, ("group", "split", "splits"))
    return (floordiv(group * split, splits), floordiv(group * split + group, splits)) if is_split else (sympy.Integer(0), group)
