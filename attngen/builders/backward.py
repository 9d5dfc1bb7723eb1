"""The backward kernels as logical IR: `dq`, `dkdv`, and `delta` for calls where q needs no gradient.

In FlashAttention-1's order of loops they are `delta`, `bwd` and `dq_end`. There are no atomics for q, k and v: each
tile has one owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, in_bounds, kv_head, named_by, scores
from attngen.builders.semantics import (
    S,
    derivative,
    exact_sums,
    listed_blocks,
    of_sums,
    singular,
    varies,
    without_common,
)
from attngen.builders.signature import Signature, with_sums
from attngen.errors import BuildError
from attngen.heuristics import WIDEST_FUSED
from attngen.ir.expr import cdiv, exp2, floordiv, log2, select, symbol, to_text
from attngen.ir.graph import Kernel, Learned, Read
from attngen.ir.heads import SHARINGS
from attngen.ir.ops import MEMBER, Access, Gather, Store, Type, Yield
from attngen.ir.split_axes import part
from attngen.lang.part import KV, NATURAL, Q
from attngen.spec import Spec

_HEAD = symbol("h")
# whose gradients a program sums, each for all of its queries: a register or two of each thread; of 32, registers spill
MOST_ENTRIES = 16
_ROWS = "delta = rowsum(o * do) - dlse, and the LSE in base 2 (+inf for empty rows)."
DELTA = Signature(
    "delta",
    "q",
    ("O", "dO", "LSE", "dLSE"),
    ("DELTA", "LSE2"),
    about=f"Before dK and dV, where no dQ is wanted: {_ROWS}",
)
DKDV = Signature(
    "dkdv",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    about="Backward, dK and dV: one program per key tile, over query tiles; scores are transposed.",
)
DQ = Signature(
    "dq",
    "q",
    ("Q", "K", "V", "O", "dO", "LSE", "dLSE"),
    ("dQ", "DELTA", "LSE2"),
    about="Backward, dQ: one program per query tile, over key tiles; and delta and LSE2, for dK and dV.",
)
# With keys in the outer loop.
DELTA_BY_KEY = DELTA._replace(about=f"Before the backward: {_ROWS}")
BWD = Signature(
    "bwd",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    ("DQ_ACC",),
    about="Backward: one program per head, over key tiles, and for each over query tiles, whose dQ it rewrites in HBM.",
)
# In one pass, where programs add what they have of dQ.
FUSED = Signature(
    "bwd",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    adds=("DQ_SEMAPHORE",),
    about="Backward in one pass: one program per key tile, over query tiles, to whose dQ it adds.",
)
# The same, of programs that each have some of the query heads that share a K/V head. Two of them store their sum of dK
# and dV.
PAIRED = FUSED._replace(shares="split", merges=True, adds=(*FUSED.adds, "DKDV_SEMAPHORE"))
DQ_END = Signature("dq_end", "q", ("DQ_ACC",), ("dQ",), about="After the backward: dQ in the element type.")
# Of programs that each have some of the query heads that share a K/V head.
DKDV_END = Signature(
    "dkdv_end",
    "kv",
    ("DK_PARTS", "DV_PARTS"),
    ("dK", "dV"),
    about="After the backward: dK and dV, summed over the programs among which the query heads of a group are split.",
)


def _of_entropy(spec: Spec, signature: Signature) -> Signature:
    """A signature that also takes the gradient of entropies, if the spec has these: the rows' kernels make of it
    what others read."""
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
    """Delta and LSE2 of each query. Launched if `dq` is not, or does not exist: q needs no gradient, or keys are the
    outer loop."""
    signature = with_sums(
        _of_entropy(spec, DELTA_BY_KEY if spec.schedule.order == "kv_outer" else DELTA), exact_sums(spec)
    )
    b = KernelBuilder(spec, signature._replace(reads=tuple(name for name in signature.reads if name != "M_ALL")))
    b.tensors()
    for name in ("Hq", "Nq", *_lengths(spec), *(("keep_scale",) if spec.dropout else ())):
        b.scalar(name)
    _outputs(b)
    b.load("do", "dO", ("b", "h", "q", "d_v"))
    _statistics(b)
    return b.kernel()


def _lengths(spec: Spec) -> tuple[str, ...]:
    """The rows of gradients that may have none."""
    return ("Nlse", *(["Nentropy"] if "entropy" in spec.outputs else []))


def _outputs(b: KernelBuilder) -> None:
    """Load each query's output, LSE and gradient of the LSE; of an entropy too. Gradients have a row for each query, or
    no rows.

    These loads come first, so that they are under way while the program waits for tiles.
    """
    rows = ("b", "h", "q")
    b.load("o", "O", (*rows, "d_v"))
    load_sums(b, rows)
    for length in _lengths(b.spec):
        name = length[1:]
        if name == "entropy":
            b.load(name, name.upper(), rows)
        place = Access(f"d{name.upper()}", (symbol("b"), symbol("h"), Q))
        b.add(Gather(f"d{name}", place, (), Type("f32", ("BLOCK_Q",)), sympy.Lt(Q, symbol(length))))


def _statistics(b: KernelBuilder) -> None:
    """Per query, `lse2` and `delta`, stored for the kernels that come after.

    delta = rowsum(O * dO) (FlashAttention-2, Algorithm 2, line 4), less the gradient of the query's LSE, times the
    share kept. An empty row (LSE = -inf) gets LSE2 = +inf, so that every probability recomputed from it is 2^-inf = 0,
    and its LSE has no gradient. Where weights are made of SUMS, these say the same, and there is no LSE2.

    The entropy H = -sum of P ln P has dH / dS = -P (ln P + H) (from dP / dS = P (1 - P)). With g, its gradient, delta
    takes g H more, and `dentropy2` is the factor of log2 P that is left: g ln 2.
    """
    o_do, dlse, entropy, dentropy = map(symbol, ("o_do", "dlse", "entropy", "dentropy"))
    kept = symbol("keep_scale") if b.spec.dropout else 1
    b.map("product", symbol("o") * symbol("do"), o="o", do="do")
    b.reduce_sum("o_do", "product", "D_V")
    exact = exact_sums(b.spec)
    seen = symbol("inv_l_all") > 0 if exact else symbol("lse") > -sympy.oo
    of_rows = dlse - entropy * dentropy if "entropy" in b.types else dlse
    b.compute("delta", (o_do - select(seen, of_rows, sympy.Integer(0))) / kept, "entry")
    compute_lse2(b, "entry")
    b.store("DELTA", ("b", "h", "q"), "delta")
    if not exact:
        b.store("LSE2", ("b", "h", "q"), "lse2")
    if "entropy" in b.types:
        b.compute("dentropy2", select(seen, dentropy * symbol("LN2") / kept, sympy.Integer(0)), "entry")
        b.store("DENTROPY2", ("b", "h", "q"), "dentropy2")


def learned(spec: Spec) -> tuple[Learned, ...]:
    """The gradients of learned inputs, one for each read of the input. Raises BuildError where there is none, or no
    fixed order of sums."""
    if derivative(spec.modified(), S) == 0:
        raise BuildError(
            ("score",),
            "changes with `s` in steps alone, so that nothing has a gradient; expected it to change with `s`",
        )
    grads, by_entry = {i.name: i.shape for i in spec.inputs() if i.grad}, _by_entry(spec)
    found = []
    for read in spec.reads():
        if read.tensor not in grads:
            continue
        if any(s.sink() == symbol(read.name) for s in spec.score):  # its gradient follows from delta
            found.append(Learned(read.tensor, ("h",), "DELTA"))
            continue
        index = by_entry.get(read) or _places(read, grads[read.tensor])
        if derivative(spec.modified(), symbol(read.name)) == 0:
            steps = f"has `grad: true` for `{read.tensor}`, and the score changes with it in steps alone; expected no `grad`"
            raise BuildError(spec.key_of(read.tensor), steps)
        if not _summed_in_order(index):
            if _in_order(spec):
                raise BuildError(
                    spec.key_of(read.tensor),
                    _LEARNED.format(read.tensor, ", ".join(map(to_text, read.index)), MOST_ENTRIES),
                )
            index = []
        found.append(Learned(read.tensor, tuple(e for e in index if e), _parts(read)))
    return tuple(found)


def in_fixed_order(spec: Spec) -> bool:
    """Whether the gradients of all learned inputs can be summed in a fixed order, as `backward: {deterministic:
    true}` asks."""
    grads = {i.name: i.shape for i in spec.inputs() if i.grad}
    by_entry = _by_entry(spec)
    read = (r for r in spec.reads() if r.tensor in grads and not any(s.sink() == symbol(r.name) for s in spec.score))
    return all(r in by_entry or _summed_in_order(_places(r, grads[r.tensor])) for r in read)


def _places(read: Read, dims: tuple[str, ...]) -> list[str | None]:
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
    """Whether parts of such a gradient can be summed in a fixed order: by row, by score or by distance."""
    distances = [e for e in index if e and "distance" in e]
    if distances:
        return len(distances) == 1 and [e for e in index if e not in distances] in ([], ["b"], ["h"], ["b", "h"])
    return None not in index and {"q", "kv"} & set(index) != {"kv"}


def _by_entry(spec: Spec) -> dict[Read, list[str]]:
    """The reads whose gradients are summed by query and by entry of one dimension, with their indices.

    Each score reads one of a few entries, as of a table by the distance in a graph: a program sums each of them for
    each of its queries.
    """
    grads = {i.name: i.shape for i in spec.inputs() if i.grad}
    found, entries = {}, 0
    for read in spec.reads():
        index = _places(read, grads[read.tensor]) if read.tensor in grads else []
        size = [dim for dim, e in zip(grads.get(read.tensor, ()), index) if e is None]
        natural = all(e in (None, "b", "h", "hkv", "q") or e.isdigit() for e in index)
        if len(size) == 1 and size[0].isdigit() and natural and varies(spec, read, KV):
            found[read] = [e or "entry" for e in index]
            entries += int(size[0])
    return found if entries <= MOST_ENTRIES else {}


def _parts(read: Read) -> str:
    """The tensor that holds the parts of a read's gradient."""
    return f"d{read.name.upper()}"


_LEARNED = (
    "has `grad: true` for `{}`, which is read at `{}`; sums in a fixed order need b, h, hkv, q_idx, q_idx and kv_idx, numbers, a "
    "distance q_pos - kv_idx, or one of at most {} entries; `backward: {{deterministic: false}}` adds anywhere, in no fixed order"
)


def _by_distance(e: Any) -> str | None:
    """An index as an expression in `distance`, which is kv_idx - q_idx; None if it is not one."""
    made = _expanded(e.xreplace({Q: KV - symbol("distance")}))
    names = {str(s) for s in made.free_symbols}
    return to_text(made) if "distance" in names and names <= {"distance", "Nq", "Nk"} else None


def _expanded(e: Any) -> Any:
    """An expression with sums and comparisons multiplied out, so that positions in them cancel."""
    if not e.args:
        return e
    args = [_expanded(a) for a in e.args]
    if e.is_Relational:
        return e.func(sympy.expand(args[0] - args[1]), 0)
    made = e.func(*args)
    return sympy.expand(made) if made.is_Add or made.is_Mul else made


def load_sums(b: KernelBuilder, rows: tuple[Any, ...], block: str = "entry", later: Collection[str] = ()) -> None:
    """Load what the kernel reads of queries to make weights again, but for tensors that it loads `later`.

    Queries past the end are as ones that see no key.
    """
    past = {"LSE": -sympy.oo, "LSE2": sympy.oo, "M_ALL": sympy.oo, "INV_L_ALL": sympy.Integer(0)}
    for tensor, other in past.items():
        if tensor in b.signature.reads and tensor not in later:
            b.load(tensor.lower(), tensor, rows, block, other=other)


def compute_lse2(b: KernelBuilder, block: str) -> None:
    """LSE2 of queries, from their LSE: +inf for one that sees no key, so that every weight recomputed from it is 2^-inf
    = 0.

    Where the LSE is a sink alone, it may be so low that to base 2 it is -inf.
    """
    if "LSE" not in b.signature.reads:
        return
    lse, lse2 = symbol("lse"), symbol("lse") * symbol("LOG2E")
    b.compute("lse2", select((lse2 if _has_sink(b.spec) else lse) > -sympy.oo, lse2, sympy.oo), block)


def probabilities(b: KernelBuilder, a: str, c: str, *more: Any, normalised: bool = True) -> list[Any]:
    """Recompute p = 2^(score - lse2) from the tiles a and c; their order gives S or its transpose. Returns `more`, in
    what was computed.

    A large LSE has an error of its rounding, which is a factor of p. So for `exact_sums` p is 2^(score - maximum) /
    sum, as in the forward. Where it is not `normalised`, p is 2^(score - maximum), and the kernel divides by the sum
    what it adds up of them.
    """
    b.dot("s", a, c, "D_QK", "step")
    rest = scores(b, *more)
    sums_keys = b.program_axis == "q" or b.signature.rewrites or b.signature.adds
    where = sympy.And(b.where, in_bounds("kv")) if sums_keys else b.where
    if b.program_axis == "kv" and singular(b.spec, b.score):  # hide queries past the end, too
        where = sympy.And(where, in_bounds("q"))
    masked = b.mask("masked", "score", where, "step")
    exact = exact_sums(b.spec)
    log2_p = symbol(masked) - symbol("m_all" if exact else "lse2")
    b.compute("p", exp2(log2_p) * symbol("inv_l_all") if exact and normalised else exp2(log2_p))
    if {"dentropy2", "tentropy"} & b.types.keys():
        logarithm = log2(symbol("p")) if exact else log2_p
        b.compute("log2_p", select(symbol("p") > 0, logarithm, sympy.Integer(0)))
    return rest


def _score_gradients(b: KernelBuilder, kept: str, factor: Any, learns: bool = False) -> Any:
    """dS = P * (dP - delta) (FlashAttention-2, Algorithm 2, line 14), without the factor `scale`, applied at the end.

    With dropout, dS = P * (Z * dP - delta), where Z is 1 / share for what is kept and 0 elsewhere (FlashAttention,
    Appendix B.4). Times the share, with delta that `delta` has multiplied by it: dS = kept P * dP - P * delta. The
    factor is applied at the end. Modifiers multiply it by the derivative of the score that the softmax sees, `factor`:
    dscore is the gradient of that score. In one pass P is multiplied by it first: then dS needs one number for each
    score beside dP, not two. Not so if the kernel `learns`: gradients of inputs are made of dscore, which is returned.
    With a gradient of the entropy, delta takes its part of each score, too.
    """
    less = (
        b.compute("pull", symbol("delta") + symbol("dentropy2") * symbol("log2_p"))
        if "dentropy2" in b.types
        else "delta"
    )
    p, p_kept, dp, delta = map(symbol, ("p", "p_kept", "dp", less))
    if b.signature.adds and factor != 1 and not b.spec.dropout and not learns:
        b.compute("p_steep", where_seen(b, p * factor))
        b.map(
            "ds",
            symbol("p_steep") * (dp - delta),
            "step",
            "f32",
            False,
            **{"p_steep": "p_steep", "dp": "dp", less: less},
        )
        return None
    name = "ds" if factor == 1 else "dscore"
    if b.spec.dropout:
        b.map(name, p_kept * dp - p * delta, "step", "f32", False, **{"p": "p", "p_kept": kept, "dp": "dp", less: less})
    else:
        b.map(name, p * (dp - delta), "step", "f32", False, **{"p": "p", "dp": "dp", less: less})
    if factor != 1:
        b.compute("ds", where_seen(b, symbol("dscore") * factor))
    return symbol(name)


def where_seen(b: KernelBuilder, e: Any) -> Any:
    """A gradient by score. It is zero where the weight is zero, as past the end: a derivative may be infinite there."""
    return select(symbol("p") > 0, e, sympy.Integer(0)) if singular(b.spec, b.score) else e


def _scaled(b: KernelBuilder, name: str, value: str, *factors: str, dtype: str = "T", block: str = "entry") -> None:
    """A gradient times the factors that were left to the end, cast to the stored type."""
    field = value.rpartition(".")[2]
    uses = {field: value} | {f: f for f in factors if f != "keep_scale" or b.spec.dropout}
    b.map(name, sympy.Mul(*map(symbol, uses)), block, dtype, False, **uses)


def unfused(spec: Spec) -> str:
    """Why no kernel computes dQ, dK and dV at once, as the end of a sentence; empty text if one can.

    Nobody is told that there is no backward, or that the spec has another order of loops.
    Where data lists the blocks, full ones and others have lists of their own, so that no list is in the order of turns.
    """
    blocks = listed_blocks(spec)
    if not spec.trains:
        return "there is no backward"
    if spec.schedule.order == "kv_outer":
        return "keys are the outer loop"
    if spec.head_dim.qk + spec.head_dim.v > WIDEST_FUSED:
        return (
            f"its heads have {spec.head_dim.qk} columns of k and {spec.head_dim.v} of v, and "
            f"dK and dV have room for {WIDEST_FUSED} in all"
        )
    if blocks is not None and blocks.data:
        return "data lists the blocks of the mask"
    left = [x.input for x in _summed(spec) if _of_dq(spec, x) is None]
    return f"the gradient of `{left[0]}` needs sums of its own" if left else ""


def _slopes(spec: Spec, gradients: Iterable[Learned]) -> tuple[dict[str, Read], list[Any]]:
    """The reads of inputs by the tensors of their gradients' parts, and the derivative of the score by what is read,
    for each gradient."""
    reads = {_parts(read): read for read in spec.reads()}
    return reads, [derivative(spec.modified(), symbol(reads[x.parts].name)) for x in gradients]


def _summed(spec: Spec) -> list[Learned]:
    """The gradients of inputs that are sums over scores. Those of a sink follow from delta; those by score are
    stored as they are."""
    return [x for x in learned(spec) if x.by not in ("row", "score")]


def _of_dq(spec: Spec, x: Learned) -> Any:
    """The factor e, if parts of an input's gradient are e times rowsum(q * dQ); else None.

    It is so for an input that multiplies scores, as a temperature does. The part of a query is the sum of dscore *
    slope over keys, and dS is dscore * steep. Where slope = e * steep * s, the part is e times the sum of dS * s. With
    s = scale * q k^T, that is the sum of q * dQ over columns, as dQ is the sum of scale * dS * k.
    """
    by = [symbol(read.name) for read in spec.reads() if _parts(read) == x.parts and x.by == "query"]
    _, steep = without_common(spec, derivative(spec.modified(), S))
    return of_sums(spec, derivative(spec.modified(), *by), steep) if by else None


def build_fused(spec: Spec) -> Kernel:
    """dQ, dK and dV in one pass over the scores: @dkdv, whose programs also add their part of each query tile's dQ, in
    fp32.

    Five products in place of seven, since no kernel computes the scores again (FlashAttention-2, Algorithm 2). Programs add in the order of
    their keys, from the last ones on: in any order they are slower. Where query heads share a key head, a program has some of them, and two
    programs write the sum of their dK and dV; @dkdv_end adds up these sums. If numbers of the heads differ, a program has one head, and
    @dkdv_end adds up what all programs of a group have. Gradients of inputs by score are stored as they are computed.
    """
    return build_dkdv(spec, fused=True)


def build_dkdv(spec: Spec, fused: bool = False) -> Kernel:
    """dK and dV (FlashAttention-2, Algorithm 2): one program per key tile, over the query tiles of its whole head
    group.

    If keys are few, several programs share a key tile, each for some heads of the group. The host sums what they write.

    Scores are computed transposed, so that P^T and dS^T feed dV and dK straight from registers. Queries past the end
    load LSE2 = +inf, so their weight is zero. Loads first, then the two products that need nothing else: the order that
    spills least (docs/perf-log.md).

    With keys in the outer loop it is `bwd`, FlashAttention's Algorithm 4: one program walks over the key tiles, and
    reads dQ from HBM, adds to it and writes it back for each of them. dQ starts as 0 and stays in fp32 until `dq_end`.
    """
    sharing, walks = SHARINGS[spec.heads.sharing], spec.schedule.order == "kv_outer"
    signature = _fused(spec) if fused else BWD if walks else DKDV._replace(shares="split" if sharing.is_shared else "")
    signature = with_sums(_of_entropy(spec, signature), exact_sums(spec))
    common, factor = sympy.Integer(1), derivative(spec.modified(), S)
    gradients = tuple(x for x in learned(spec) if x.by == "score") if fused else ()
    reads, slopes = _slopes(spec, gradients)
    if fused:
        common, factor = without_common(spec, factor)
    b = KernelBuilder(spec, signature, [common, factor, *slopes])
    b.tensors(gradients)
    b.scalar("scale")
    b.sizes()
    b.seed()

    apart = signature.apart
    kv, head = (sharing.read, symbol("h")) if apart else (sharing.owned, sharing.member)
    nested = sharing.is_shared and not fused
    b.scale()
    home = "tile" if walks else "entry"
    if walks:
        b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), home, cls="all")
    b.load("k", "K", ("b", kv, "kv", "d_qk"), home)
    b.load("v", "V", ("b", kv, "kv", "d_v"), home)
    b.reads()
    starts = {
        "dk": b.init("dk_init", 0, "BLOCK_KV", "D_QK", block=home),
        "dv": b.init("dv_init", 0, "BLOCK_KV", "D_V", block=home),
    }
    _loop_over_queries(b, home, starts, nested)

    b.carried("step", **({"dk_step": "dk_init", "dv_step": "dv_init"} if nested else starts))
    dk, dv = ("dk_step", "dv_step") if nested else ("dk", "dv")
    b.load("q", "Q", ("b", head, "q", "d_qk"), "step")
    b.load("do", "dO", ("b", head, "q", "d_v"), "step")
    load_sums(b, ("b", head, "q"), "step")
    b.load("delta", "DELTA", ("b", head, "q"), "step")
    if "entropy" in spec.outputs:
        b.load("dentropy2", "DENTROPY2", ("b", head, "q"), "step")
    if walks:
        b.load("dq", "DQ_ACC", ("b", head, "q", "d_qk"), "step")
    b.draw(head, "BLOCK_KV", "BLOCK_Q")
    b.dot("dp", "v", "do", "D_V", "step")
    factor, *slopes = probabilities(b, "k", "q", factor, *slopes)
    p = b.dropped("p")
    dscore = _score_gradients(b, p, factor, learns=bool(gradients))
    for x, slope in zip(gradients, slopes):
        _learn(b, x, reads[x.parts], slope, dscore, head=head)
    b.dot("dv_next", p, "do", "BLOCK_Q", "step", acc=dv)
    b.dot("dk_next", "ds", "q", "BLOCK_Q", "step", acc=dk)
    if fused:
        b.dot("dq", "ds", "k", "BLOCK_KV", "step")
        b.accumulate("DQ_ACC", ("b", head, "q", "d_qk"), "dq", "DQ_SEMAPHORE")
    if walks:
        b.dot("dq_next", "ds", "k", "BLOCK_KV", "step", acc="dq")
        b.store("DQ_ACC", ("b", head, "q", "d_qk"), "dq_next", "step")
    b.add(Yield("yield_step", ((dk, "dk_next"), (dv, "dv_next"))), "step")

    _store_key_gradients(b, head if apart else kv, home, *_left_to_the_end(b, common))
    if walks:
        b.add(Yield("yield_tile", ()), home)
    return b.kernel()


def _fused(spec: Spec) -> Signature:
    """The first program at a tile of queries writes. Where the LSE does not tell which rows see no key, sums start
    from 0 all the same."""
    signature = FUSED
    if SHARINGS[spec.heads.sharing].is_shared:
        signature = FUSED._replace(apart=True) if _differs_by_head(spec) else PAIRED
    if _has_sink(spec):
        return signature._replace(adds=("DQ_ACC", *signature.adds))
    return signature._replace(writes=("DQ_ACC", *signature.writes))


def _differs_by_head(spec: Spec) -> bool:
    """Whether query heads of a group visit other tiles, or have numbers of their own that a program keeps for all
    its tiles."""
    said = (spec.visible_by_key(), spec.modified())
    kept = (
        e
        for read in spec.reads()
        if read.name in named_by(spec, said) and not varies(spec, read, Q)
        for e in read.index
    )
    return listed_blocks(spec) is not None or any(e.has(symbol("h")) for e in (*said, *kept))


def _has_sink(spec: Spec) -> bool:
    """Whether a modifier adds a logit of its own to every row, so that no LSE is -inf."""
    return any(s.sink() is not None for s in spec.score)


def _in_order(spec: Spec) -> bool:
    """Whether gradients are summed in a fixed order."""
    return bool(spec.backward and spec.backward.deterministic)


def _loop_over_queries(b: KernelBuilder, home: str, starts: dict[str, str], nested: bool) -> None:
    """The loop over query tiles, where query heads share a key head for each of the program's; `nested` in a loop
    over these."""
    q_tiles = cdiv(symbol("Nq"), symbol("BLOCK_Q"))
    heads = sympy.Integer(0), symbol("group")
    first, end = part(*heads, b.shares) if b.shares else heads
    if not nested:
        ends = (
            [symbol(b.compute(f"{MEMBER}_{what}", e, home, "i32")) for what, e in (("first", first), ("end", end))]
            if b.shares
            else []
        )
        b.loop("total", "q", q_tiles, "step", home, heads=(tuple(ends),) if ends else (), **starts)
        return
    b.loop("total", "g", end, "group", home, cls="all", first=first, **starts)
    b.carried("group", **starts)
    b.loop("queries", "q", q_tiles, "step", "group", dk_step="dk", dv_step="dv")
    b.add(Yield("yield_group", (("dk", "queries.dk_step"), ("dv", "queries.dv_step"))), "group")


def _left_to_the_end(b: KernelBuilder, common: Any) -> list[str]:
    """The value that is a factor of dS, the same for all scores of a head, if there is one other than 1."""
    return [b.compute("ds_scale", common, "entry")] if common != 1 else []


def _store_key_gradients(b: KernelBuilder, head: Any, home: str, *of_ds: str) -> None:
    """dK and dV, with the factors left to the end, of the program's head, and of its split of the group."""
    part = [symbol(b.shares.var)] if b.shares else []
    own = ("b", head, *(floordiv(x, sympy.Integer(2)) if b.signature.merges else x for x in part), "kv")
    for name, width, factors in (("dK", "d_qk", ("scale", "keep_scale", *of_ds)), ("dV", "d_v", ("keep_scale",))):
        field = name.lower()
        _scaled(b, f"{field}_out", f"total.{field}", *factors, block=home)
        if b.signature.merges:
            b.merge(name, (*own, width), f"{field}_out", ends=name == "dV")
        else:
            b.store(name, (*own, width), f"{field}_out", home)


def build_dq_end(spec: Spec) -> Kernel:
    """dQ in the element type, from the sums of `bwd`. Where these do not start from 0, rows that see no key get zeros
    here.

    In one pass, also the gradients of inputs that follow from dQ.
    """
    fused = spec.schedule.order != "kv_outer"
    ordered = fused and not _has_sink(spec)
    common = without_common(spec, derivative(spec.modified(), S))[0] if fused else sympy.Integer(1)
    gradients = {x: _of_dq(spec, x) for x in _summed(spec)} if fused else {}
    exact = exact_sums(spec)
    seen = ("INV_L_ALL" if exact else "LSE2") if ordered else ""
    reads = ("DQ_ACC", *([seen] if seen else []), *(["Q"] if gradients else []))
    b = KernelBuilder(spec, DQ_END._replace(reads=reads), [common, *gradients.values()])
    b.tensors(gradients)
    b.scalar("scale")
    b.sizes()
    if spec.dropout:
        b.scalar("keep_scale")
    rows = ("b", "h", "q", "d_qk")
    dq = b.load("dq", "DQ_ACC", rows)
    b.reads()
    if ordered:
        number = b.load(seen.lower(), seen, rows[:3])
        there = symbol(number) > 0 if exact else symbol(number) < sympy.oo
        dq = b.map(
            "dq_seen", select(there, symbol("dq"), sympy.Integer(0)), "entry", "f32", False, dq="dq", **{number: number}
        )
    _scaled(b, "dq_out", dq, "scale", "keep_scale", *_left_to_the_end(b, common))
    b.store("dQ", rows, "dq_out")
    if gradients:
        b.load("q", "Q", rows)
        b.map("product", symbol("q") * symbol("dq"), q="q", dq=dq)
        b.reduce_sum("dq_rows", "product", "D_QK")
    for x, e in gradients.items():
        kept = symbol("keep_scale") if spec.dropout else 1
        part = b.compute(f"{x.parts.lower()}_out", e * symbol("dq_rows") * symbol("scale") * kept, "entry")
        b.store(x.parts, rows[:3], part)
    return b.kernel()


def build_dkdv_end(spec: Spec) -> Kernel:
    """dK and dV of each K/V head, from parts of the query heads that share it: sums in fp32, in the order of the
    heads."""
    sharing, home = SHARINGS[spec.heads.sharing], "part"
    b = KernelBuilder(spec, DKDV_END)
    b.tensors()
    for name in (*(("Hkv",) if sharing.axis else ()), "splits", "Nk"):
        b.scalar(name)
    columns = {"dk": "D_QK", "dv": "D_V"}
    starts = {name: b.init(f"{name}_init", 0, "BLOCK_KV", width) for name, width in columns.items()}
    b.loop("total", "split", symbol("splits"), home, cls="all", **starts)
    b.carried(home, **starts)
    for name, width in columns.items():
        part = b.load(f"{name}_part", f"{name.upper()}_PARTS", ("b", sharing.owned, "split", "kv", width.lower()), home)
        b.map(f"{name}_next", symbol(name) + symbol(part), home, "f32", False, **{name: name, part: part})
    b.add(Yield("yield_part", tuple((name, f"{name}_next") for name in columns)), home)
    for name, width in columns.items():
        _scaled(b, f"{name}_out", f"total.{name}")
        b.store(f"d{name[1:].upper()}", ("b", sharing.owned, "kv", width.lower()), f"{name}_out")
    return b.kernel()


def build_dq(spec: Spec) -> Kernel:
    """dQ (FlashAttention-2, Algorithm 2, with the loop order of the forward): one program per query tile.

    It runs before the kernels of dK and dV and stores delta and LSE2 for them. That saves a pass over O and dO.
    """
    gradients = tuple(x for x in learned(spec) if x.by != "row")
    factor, (reads, slopes) = derivative(spec.modified(), S), _slopes(spec, gradients)
    places = [e for x in gradients if x.by in ("element", "entry") for e in reads[x.parts].index]
    b = KernelBuilder(spec, with_sums(_of_entropy(spec, DQ), exact_sums(spec)), [factor, *slopes, *places])
    b.tensors(gradients)
    b.scalar("scale")
    b.sizes()
    for name in _lengths(spec):
        b.scalar(name)
    b.seed()

    rows = ("b", "h", "q")
    b.scale()
    _outputs(b)
    b.load("q", "Q", (*rows, "d_qk"))
    b.load("do", "dO", (*rows, "d_v"))
    _statistics(b)
    starts = {"dq": b.init("dq_init", 0, "BLOCK_Q", "D_QK")}
    by_row = [x for x in gradients if x.by == "query" or (x.by == "element" and not varies(spec, reads[x.parts], KV))]
    sums = {x.parts: [x.parts.lower()] for x in by_row}
    sums |= {
        x.parts: [f"{x.parts.lower()}_at_{entry}" for entry in range(_entries(spec, x))]
        for x in gradients
        if x.by == "entry"
    }
    names = [name for of_parts in sums.values() for name in of_parts]
    starts |= {f"{name}_sum": b.init(f"{name}_sum_init", 0, "BLOCK_Q") for name in names}
    b.reads()
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    factor, *slopes = probabilities(b, "q", "k", factor, *slopes)
    b.load("v", "V", ("b", kv_head(spec), "kv", "d_v"), "step")
    b.dot("dp", "do", "v", "D_V", "step")
    b.draw(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    dscore = _score_gradients(b, b.dropped("p"), factor)
    for x, slope in zip(gradients, slopes):
        _learn(b, x, reads[x.parts], slope, dscore, sums.get(x.parts, ()))
    b.dot("dq_next", "ds", "k", "BLOCK_KV", "step", acc="dq")
    b.add(Yield("yield_step", (("dq", "dq_next"), *((f"{name}_sum", f"{name}_next") for name in names))), "step")

    _scaled(b, "dq_out", "keys.dq", "scale", "keep_scale")
    b.store("dQ", (*rows, "d_qk"), "dq_out")
    for x in gradients:
        for entry, name in enumerate(sums.get(x.parts, ())):
            _scaled(b, f"{name}_out", f"keys.{name}_sum", "keep_scale", dtype="f32")
            if x.by == "element":
                b.scatter(reads[x.parts], x.parts, f"{name}_out")
            else:
                b.store(x.parts, ("b", "h", sympy.Integer(entry), "q") if x.by == "entry" else rows, f"{name}_out")
    return b.kernel()


def _entries(spec: Spec, x: Learned) -> int:
    """The entries of the dimension of an input whose gradient is summed by entry."""
    (shape,) = (i.shape for i in spec.inputs() if i.name == x.input)
    return int(shape[x.index.index("entry")])


def _learn(
    b: KernelBuilder, x: Learned, read: Read, slope: Any, dscore: Any, sums: Sequence[str] = (), head: Any = _HEAD
) -> None:
    """What a step does for the gradient of an input that is read there: store it, scatter it, or add it to carried
    `sums`."""

    def gradient(name: str, slope: Any) -> str:
        """The gradient by what is read, for each score."""
        return b.compute(name, where_seen(b, dscore * slope)) if slope != 1 else str(dscore)

    name, kept = x.parts.lower(), symbol("keep_scale") if b.spec.dropout else 1
    if x.by == "distance":
        b.add(
            Store(f"{name}_sums", Access(x.parts, (symbol("b"), symbol("h"))), gradient(name, slope), by="distance"),
            "step",
        )
    elif x.by == "entry":
        at, of_score = (
            symbol(b.place(read, x.index.index("entry"), f"{name}_at", "step")),
            symbol(gradient(name, slope)),
        )
        for entry, of_entry in enumerate(sums):
            _add_rows(b, of_entry, b.compute(of_entry, select(sympy.Eq(at, entry), of_score, sympy.Integer(0))))
    elif sums:
        _add_rows(b, name, gradient(name, slope))
    elif x.by == "element":
        b.scatter(read, x.parts, gradient(name, slope * kept), "step")
    else:  # an element for each score: it is stored as it is
        b.compute(name, where_seen(b, dscore * slope * kept), dtype=b.types[x.parts].dtype)
        b.store(x.parts, ("b", head, "q", "kv"), name, "step")


def _add_rows(b: KernelBuilder, name: str, value: str) -> None:
    """Add the sum of each row of a tile to the sum that is carried under a name."""
    sums, rows = f"{name}_sum", b.reduce_sum(f"{name}_rows", value, "BLOCK_KV", "step")
    b.map(f"{name}_next", symbol(sums) + symbol(rows), "step", "f32", False, **{sums: sums, rows: rows})
