"""Compute delta and LSE2 of each query, which the kernels of dK and dV read."""

from __future__ import annotations

import sympy

from attngen.builders.common import KernelBuilder
from attngen.builders.recompute import compute_lse2, load_stats
from attngen.builders.semantics import exact_sums
from attngen.builders.signature import Signature, with_stats
from attngen.ir import Access, Kernel, Type, select, symbol, tile
from attngen.lang.part import Q
from attngen.spec import Spec

_ABOUT = "delta = rowsum(o * do) - dlse, and the LSE in base 2 (+inf for empty rows)."


DELTA = Signature(
    "delta",
    "q",
    ("O", "dO", "LSE", "dLSE"),
    ("DELTA", "LSE2"),
    about=f"Before dK and dV, if dQ is not requested: {_ABOUT}",
)


# For kernels with keys in the outer loop.
DELTA_BY_KEY = DELTA._replace(about=f"Before the backward: {_ABOUT}")


def with_entropy_gradient(spec: Spec, signature: Signature) -> Signature:
    """The signature with the gradient of the entropy, if the spec has the entropy as an output.

    The kernel of the row statistics converts this gradient to DENTROPY2, which the other kernels read.
    """
    if "entropy" not in spec.outputs:
        return signature
    if "dLSE" not in signature.reads:
        return signature._replace(reads=(*signature.reads, "DENTROPY2"))
    about = signature.about.replace("- dlse", "- dlse + entropy * dentropy").replace(
        "delta and LSE2,", "delta, LSE2 and DENTROPY2,"
    )
    return signature._replace(
        reads=(*signature.reads, "ENTROPY", "dENTROPY"), writes=(*signature.writes, "DENTROPY2"), about=about
    )


def build_delta(spec: Spec) -> Kernel:
    """Compute delta and LSE2 of each query. Launched if `dq` does not run: q needs no gradient, or keys are the outer
    loop."""
    signature = with_stats(
        with_entropy_gradient(spec, DELTA_BY_KEY if spec.schedule.order == "kv_outer" else DELTA), exact_sums(spec)
    )
    b = KernelBuilder(spec, signature._replace(reads=tuple(name for name in signature.reads if name != "M_ALL")))
    b.declare_tensors()
    for name in ("Hq", "Nq", *gradient_lengths(spec), *(("keep_scale",) if spec.dropout else ())):
        b.declare_scalar(name)
    load_outputs(b)
    b.load("do", "dO", ("b", "h", "q", "d_v"))
    store_statistics(b)
    return b.kernel()


def gradient_lengths(spec: Spec) -> tuple[str, ...]:
    """Names of the scalars with the numbers of rows of dLSE and, if the spec returns the entropy, of dENTROPY. A scalar
    is 0 if its gradient is absent."""
    return ("Nlse", *(["Nentropy"] if "entropy" in spec.outputs else []))


def load_outputs(b: KernelBuilder) -> None:
    """Load each query's output, LSE and gradient of the LSE; also the entropy and its gradient, if the spec has it.

    A gradient has a row per query, or no rows. The loads come first, so that they are in flight while the program waits
    for tiles.
    """
    rows = ("b", "h", "q")
    b.load("o", "O", (*rows, "d_v"))
    load_stats(b, rows)
    for length in gradient_lengths(b.spec):
        name = length[1:]
        if name == "entropy":
            b.load(name, name.upper(), rows)
        row = Q - symbol("q_start") + symbol(b.row("q"))
        place = Access(f"d{name.upper()}", (symbol("b"), symbol("h"), row))
        b.add(tile.Gather(f"d{name}", place, (), Type("f32", ("BLOCK_Q",)), sympy.Lt(row, symbol(length))))


def store_statistics(b: KernelBuilder) -> None:
    """Compute `lse2` and `delta` per query and store them for the kernels that follow.

    delta = rowsum(O * dO) (FlashAttention-2, Algorithm 2, line 4), minus the gradient of the query's LSE, times the
    share of weights that dropout keeps. An empty row (LSE = -inf) gets LSE2 = +inf, so that every probability
    recomputed from it is 2^-inf = 0, and its LSE has no gradient. Where weights are recomputed from ROW_STATS, these
    have the same effect, and there is no LSE2.

    The entropy H = -sum of P ln P has dH / dS = -P (ln P + H) (from dP / dS = P (1 - P)). With g, the gradient of H,
    delta gains the term g H, and the remaining factor of log2 P is `dentropy2` = g ln 2.
    """
    o_do, dlse, entropy, dentropy = map(symbol, ("o_do", "dlse", "entropy", "dentropy"))
    kept = symbol("keep_scale") if b.spec.dropout else 1
    b.map("product", symbol("o") * symbol("do"), o="o", do="do")
    b.reduce_sum("o_do", "product", "D_V")
    exact = exact_sums(b.spec)
    seen = symbol("inv_l_all") > 0 if exact else symbol("lse") > -sympy.oo
    of_row = dlse - entropy * dentropy if "entropy" in b.types else dlse
    b.compute("delta", (o_do - select(seen, of_row, sympy.Integer(0))) / kept, "entry")
    compute_lse2(b, "entry")
    b.store("DELTA", ("b", "h", "q"), "delta")
    if not exact:
        b.store("LSE2", ("b", "h", "q"), "lse2")
    if "entropy" in b.types:
        b.compute("dentropy2", select(seen, dentropy * symbol("LN2") / kept, sympy.Integer(0)), "entry")
        b.store("DENTROPY2", ("b", "h", "q"), "dentropy2")
