"""Head sharing: which K/V head a query head reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from attngen.ir.expr import Expr, floordiv, symbol

_h, _hkv, _g, _group = map(symbol, ("h", "hkv", "g", "group"))


@dataclass(frozen=True)
class Sharing:
    """How query heads share K/V heads. K and V are indexed by head, never expanded.

    about: the rule in words.
    heads: the number of K/V heads, as signatures and docstrings write it.
    read: the K/V head that query head `h` reads.
    owned: the K/V head of a program whose program axis is kv.
    axis: the axis of such a program's grid that counts K/V heads; empty if there is one head.
    member: the query head with number `g` among those that read `owned`.
    kv_heads: (number of query heads, number of query heads in a group) -> number of K/V heads.
    """

    name: str
    about: str
    heads: str
    read: Expr
    owned: Expr
    axis: str
    member: Expr
    kv_heads: Callable[[int, int], int]

    @property
    def is_shared(self) -> bool:
        """True if several query heads may read one K/V head."""
        return self.name != "mha"

    @property
    def known(self) -> dict[Expr, Expr]:
        """The expression of the K/V head where it is the same in all kernels: `h`, or 0. With several heads in a group
        it differs between kernels, and the result is empty."""
        return {} if self.counts_group else {_hkv: self.read}

    @property
    def counts_group(self) -> bool:
        """True if the K/V head of a query head depends on the size of a group."""
        return self.read.has(_group)


SHARINGS = {
    sharing.name: sharing
    for sharing in (
        Sharing("mha", "one K/V head per query head (mha)", "Hq", _h, _h, "h", _h, lambda heads, group: heads),
        Sharing(
            "mqa",
            "one K/V head for all query heads (mqa)",
            "1",
            sympy.Integer(0),
            sympy.Integer(0),
            "",
            _g,
            lambda heads, group: 1,
        ),
        Sharing(
            "gqa",
            "one K/V head per group of query heads (gqa)",
            "Hkv",
            floordiv(_h, _group),
            _hkv,
            "hkv",
            _hkv * _group + _g,
            lambda heads, group: max(1, heads // group),
        ),
    )
}
