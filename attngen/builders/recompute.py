"""Recompute the softmax weights from the row statistics of the forward, as the backward, forward mode and `key_mass`
do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, in_bounds, scores
from attngen.builders.semantics import exact_sums, singular
from attngen.ir import exp2, log2, select, symbol
from attngen.spec import Spec


def load_stats(b: KernelBuilder, rows: tuple[Any, ...], block: str = "entry", later: Collection[str] = ()) -> None:
    """Load the row statistics of queries that the kernel reads, except the tensors in `later`.

    Rows past the end get the statistics of a query that sees no key.
    """
    past = {"LSE": -sympy.oo, "LSE2": sympy.oo, "M_ALL": sympy.oo, "INV_L_ALL": sympy.Integer(0)}
    for tensor, other in past.items():
        if tensor in b.signature.reads and tensor not in later:
            b.load(tensor.lower(), tensor, rows, block, other=other)


def compute_lse2(b: KernelBuilder, block: str) -> None:
    """Compute LSE2 from the LSE: +inf for a query that sees no key, so that every recomputed weight is 2^-inf = 0.

    With a sink the LSE may equal the sink, which may be so low that it is -inf to base 2.
    """
    if "LSE" not in b.signature.reads:
        return
    lse, lse2 = symbol("lse"), symbol("lse") * symbol("LOG2E")
    b.compute("lse2", select((lse2 if has_sink(b.spec) else lse) > -sympy.oo, lse2, sympy.oo), block)


def probabilities(b: KernelBuilder, a: str, c: str, *more: Any, normalised: bool = True) -> list[Any]:
    """Recompute p = 2^(score - lse2) from the tiles a and c; their order gives S or its transpose.

    Returns the expressions `more`, in terms of computed values.

    The rounding error of a large LSE becomes a factor of p. So for `exact_sums` p is 2^(score - maximum) / sum, as in
    the forward. If not `normalised`, p is 2^(score - maximum), and the kernel divides the values that it accumulates
    from p by the sum.
    """
    b.dot("s", a, c, "D_QK", "step")
    rest = scores(b, *more)
    sums_keys = b.program_axis == "q" or b.signature.rewrites or b.signature.adds
    where = sympy.And(b.where, in_bounds("kv")) if sums_keys else b.where
    if b.program_axis == "kv" and singular(b.spec, b.score):  # also hide queries past the end
        where = sympy.And(where, in_bounds("q"))
    masked = b.mask("masked", "score", where, "step")
    exact = exact_sums(b.spec)
    log2_p = symbol(masked) - symbol("m_all" if exact else "lse2")
    b.compute("p", exp2(log2_p) * symbol("inv_l_all") if exact and normalised else exp2(log2_p))
    if {"dentropy2", "tentropy"} & b.types.keys():
        logarithm = log2(symbol("p")) if exact else log2_p
        b.compute("log2_p", select(symbol("p") > 0, logarithm, sympy.Integer(0)))
    return rest


def where_seen(b: KernelBuilder, e: Any) -> Any:
    """A gradient of a score, set to zero where the weight is zero, such as past the end: a derivative may be infinite
    there."""
    return select(symbol("p") > 0, e, sympy.Integer(0)) if singular(b.spec, b.score) else e


def has_sink(spec: Spec) -> bool:
    """True if a modifier adds a sink logit to every row, so that no LSE is -inf."""
    return any(s.sink() is not None for s in spec.score)
