"""Attention over a cache of keys and values, as serving does it: kernels and host programs as logical IR.

- `append` stores new keys and values behind those that sequences have.
- `decode` is for few queries. The keys of all sequences are dealt among programs, each of which has a part; `combine`
  joins the parts by their LSE (Dao et al. 2023, "Flash-Decoding for long-context inference"), or for fp32 by what the
  LSE is made of.
- `prefill` is the usual forward, for more queries.

In all of them `Nk` is the number of keys of the program's own sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder
from attngen.builders.forward import build_forward, sink_of, store_results
from attngen.builders.host import HostBuilder, operands, split_columns
from attngen.builders.pack_gqa import view_rows
from attngen.builders.programs import in_cache
from attngen.builders.quantised import load_scales, quantise, scale_latents
from attngen.builders.semantics import exact_parts, listed_blocks
from attngen.builders.signature import Signature, cached_type, tensor_type
from attngen.errors import BuildError
from attngen.heuristics import CTAS_PER_SM_LATENT, CTAS_PER_SM_QUANTISED, FEW_LATENT, FEW_QUERIES, UNIT, WAVES_LATENT
from attngen.ir.expr import cdiv, exp2, floordiv, select, symbol
from attngen.ir.graph import Cache, Kernel, KVSplit, Module
from attngen.ir.heads import SHARINGS
from attngen.ir.host import Copy, Host
from attngen.ir.names import LSE_OF_PARTS, OF_CACHE, SCALES, SHAPES, SUMS_OF_PARTS
from attngen.ir.ops import AXIS_DIM, Access, Append, Arg, Load, Map, Reduce, Type, Uses, Yield
from attngen.ir.split_kv import joined_items, least_items
from attngen.spec import Spec

_OF_CACHE = ("Q", "K", "V", "CACHE_SEQLENS")
APPEND = Signature(
    "append",
    "kv",
    ("K_NEW", "V_NEW", "CACHE_SEQLENS"),
    ("K", "V"),
    about="Before all: store new keys and values in the cache.",
)
DECODE = Signature(
    "decode",
    "q",
    _OF_CACHE,
    pack_gqa=True,
    shares="part",
    about="Forward of few queries over a cache: one program per part of a sequence's keys, with the queries of a group of heads as rows.",
)
COMBINE = Signature(
    "combine",
    "q",
    ("CACHE_SEQLENS",),
    ("O", "LSE"),
    pack_gqa=True,
    about="After decode: the outputs of a sequence's parts, weighed by the sums of their weights.",
)
PREFILL = Signature(
    "prefill", "q", _OF_CACHE, ("O", "LSE"), about="Forward of more queries over a cache: one program per query tile."
)


def add_cache(module: Module, spec: Spec) -> Module:
    """The module with the kernels and host programs that read keys from a cache, if the spec has one.

    Raises BuildError where the mask or the scores read what calls over a cache do not have.
    """
    if spec.cache is None:
        return module
    cache = Cache(spec.cache.page, spec.cache.dtype or "", spec.factors)
    _check(spec)
    _check_names(spec)
    of_latent: dict[str, Any] = {"ctas_per_sm": CTAS_PER_SM_LATENT, "waves": WAVES_LATENT}
    more = of_latent if spec.rope else {"ctas_per_sm_packed": CTAS_PER_SM_QUANTISED} if cache.dtype else {}
    kv_split = KVSplit(cdiv(symbol("Nk"), sympy.Integer(UNIT)), spec.schedule.keys_of_part // UNIT, **more)
    pages, scales = ("PAGE_TABLE",) if cache.page else (), _scales(cache)

    def signature(of: Signature) -> Signature:
        return of._replace(reads=(*of.reads, *pages, *scales), cache=cache)

    kernels = (
        _append(spec, signature(APPEND)),
        build_forward(spec, signature(DECODE._replace(writes=_parts(spec))), kv_split),
        _combine(spec, kv_split),
        build_forward(spec, signature(PREFILL)),
        *(kernel for _, prepared in in_cache(spec.derived()) for kernel in prepared),
    )
    hosts = (_host_append(spec, cache), _host_decode(spec, replace(module, kernels=kernels), cache, kv_split))
    return replace(module, cache=cache, kernels=(*module.kernels, *kernels), hosts=(*module.hosts, *hosts))


def _parts(spec: Spec) -> tuple[str, ...]:
    """The tensors with what `decode` finds of each part, and `combine` reads: outputs, and by what they are joined."""
    return ("O_PARTS", *(SUMS_OF_PARTS if exact_parts(spec) else LSE_OF_PARTS))


def _check(spec: Spec) -> None:
    """Raise BuildError for what has no kernels over a cache."""
    cannot = (
        (spec.dropout, "drops weights (`dropout`), which serving does not"),
        (spec.schedule.order != "q_outer", "walks over keys (`schedule: {order: kv_outer}`)"),
        (listed_blocks(spec) is not None, "visits lists of blocks, which are made of the keys of a whole call"),
        (
            any(
                not d.program and {"Nq", "Nk"} & {*d.sources, *(n for s in d.shapes for n in s)} for d in spec.derived()
            ),
            "has `packed` documents, where a cache has `cache_seqlens` to say where sequences end, and ids of documents within one "
            "(`{document: {sorted: true}}`)",
        ),
    )
    if found := next((what for wrong, what in cannot if wrong), None):
        raise BuildError(
            ("cache",), f"is asked for, and the spec {found}; expected a spec without that, or without `cache`"
        )


def _check_names(spec: Spec) -> None:
    """Raise BuildError for an input that has a name which modules with a cache need themselves."""
    if taken := next((i.name for i in spec.inputs() if i.name in OF_CACHE), None):
        raise BuildError(
            spec.key_of(taken),
            f"declares `{taken}`, a name that modules with a cache have themselves; expected another one",
        )


def _append(spec: Spec, signature: Signature) -> Kernel:
    """New keys and values, tile by tile. In this kernel `Nk` counts new keys."""
    cache = signature.cache
    assert cache is not None
    parts = {"K": "d_v", "K_ROPE": "d_rope"} if spec.rope else {"K": "d_qk", "V": "d_v"}
    b = KernelBuilder(spec, signature)
    made = {"K_SCALE": "group_v"} if cache.scale == "columns" else {}  # of the new keys
    for name, column in parts.items():
        b.add(Arg(f"{name}_NEW", "in", Type("T", ("B", "Hkv", "Nk", AXIS_DIM[column]))))
    for name in (name for name in signature.reads[2:] if name not in made):
        b.add(Arg(name, "in", tensor_type(name, signature)))
    for name, column in parts.items():
        b.add(Arg(name, "out", cached_type(cache, name, AXIS_DIM[column])))
    for name in made:
        b.add(Arg(name, "out", tensor_type(name, signature)))
    head = SHARINGS[spec.heads.sharing].owned
    for name in (*(str(axis.extent) for axis in b.grid if axis.var in ("h", "hkv")), "Nk", "Nc"):
        b.scalar(name)
    if cache.page == "page_rows":
        b.scalar("page_rows")
    b.add(Load("before", Access("CACHE_SEQLENS", (symbol("b"),)), Type("i32")))
    b.add(Map("rows", symbol("before") + symbol("kv_idx"), (("before", "before"),), Type("i32", ("BLOCK_KV",))))
    pages = None
    if cache.page:
        b.pages("page", symbol("rows"), "entry")
        pages = "page"
    if cache.dtype and not made:
        load_scales(b, head, "entry")
    for tensor, column in (parts | made).items():
        value = tensor.lower()
        if tensor in parts:
            b.load(value, f"{tensor}_NEW", ("b", head, "kv", column))
        if SCALES.get(tensor) in made:
            scale_latents(b)
        if cache.dtype and tensor in SCALES:
            column = column.replace("d_", "pair_")
            value = quantise(b, value, SCALES[tensor].lower(), AXIS_DIM[column])
        index = (*(() if pages else (symbol("b"),)), head, symbol("kv"), symbol(column))
        b.add(Append(f"append_{tensor}", Access(tensor, index), value, (("kv", "always"),), rows="rows", pages=pages))
    return b.kernel()


def _combine(spec: Spec, kv_split: KVSplit) -> Kernel:
    """Each row's output is a mean of its parts', by weights exp2(LSE2 of the part - the greatest of them).

    For `exact_parts` the weights are sum * exp2(maximum of the part - the greatest of them).
    """
    sink = sink_of(spec)
    b = KernelBuilder(spec, COMBINE._replace(reads=(*_parts(spec), *COMBINE.reads)), [] if sink is None else [sink])
    b.kv_split = kv_split
    own = SHARINGS[spec.heads.sharing].owned
    b.tensors()
    b.sizes()
    starts = {
        "m": b.init("m_init", -sympy.oo, "BLOCK_Q"),
        "l": b.init("l_init", 0, "BLOCK_Q"),
        "acc": b.init("acc_init", 0, "BLOCK_Q", "D_V"),
    }
    b.reads()
    b.loop("parts_of_keys", "joined", cdiv(symbol("parts"), symbol("BLOCK_PARTS")), "join", cls="all", **starts)

    m, l, acc = map(symbol, ("m", "l", "acc"))  # noqa: E741
    b.carried("join", **starts)
    outputs, exponents, *sums = _parts(spec)
    exponent = b.load(exponents.lower(), exponents, (own, joined_items(), "q"), "join", other=-sympy.oo)
    of_sums = [b.load(name.lower(), name, (own, joined_items(), "q"), "join") for name in sums]
    b.load("o_parts", outputs, (own, joined_items(), "q", "d_v"), "join")
    b.add(Reduce("greatest", exponent, "max", "BLOCK_PARTS", Type("f32", ("BLOCK_Q",))), "join")
    b.map("m_next", sympy.Max(m, symbol("greatest")), "join", m="m", greatest="greatest")
    b.map("base", select(symbol("m_next") > -sympy.oo, symbol("m_next"), 0), "join", m_next="m_next")
    b.map("alpha", exp2(m - symbol("base")), "join", m="m", base="base")
    weights = sympy.Mul(exp2(symbol(exponent) - symbol("base")), *map(symbol, of_sums))
    b.map("weights", weights, "join", "f32", False, **{name: name for name in (exponent, "base", *of_sums)})
    b.reduce_sum("l_parts", "weights", "BLOCK_PARTS", "join")
    b.map("l_next", l * symbol("alpha") + symbol("l_parts"), "join", l="l", alpha="alpha", l_parts="l_parts")
    b.map("weighed", symbol("o_parts") * symbol("weights"), "join", o_parts="o_parts", weights="weights")
    b.reduce_sum("o_sum", "weighed", "BLOCK_PARTS", "join")
    b.map("acc_next", acc * symbol("alpha") + symbol("o_sum"), "join", acc="acc", alpha="alpha", o_sum="o_sum")
    b.add(Yield("yield_join", (("m", "m_next"), ("l", "l_next"), ("acc", "acc_next"))), "join")

    store_results(b, own, sink, {name: f"parts_of_keys.{name}" for name in starts})
    return b.kernel()


def _tensors(spec: Spec) -> dict[str, str]:
    """The tensors of keys and values in a call, with their columns: of a latent, one for both."""
    return {"K": "D_QK"} if spec.rope else {"K": "D_QK", "V": "D_V"}


def _stored(spec: Spec) -> dict[str, str]:
    """The tensors of keys and values in the cache, with their columns. A latent of 8 bits is apart from the columns
    that are rotated."""
    return {"K": "D_V", "K_ROPE": "D_ROPE"} if spec.factors == "columns" else _tensors(spec)


def _scales(cache: Cache) -> tuple[str, ...]:
    """The tensors of factors: of a latent, one for both keys and values."""
    return tuple(SCALES.values())[: 1 if cache.scale == "columns" else 2] if cache.dtype else ()


def _caches(spec: Spec, b: HostBuilder, cache: Cache) -> None:
    """The arguments of host programs that are of the cache."""
    for name, width in _stored(spec).items():
        b.add(Arg(f"{name}_CACHE", "in", replace(cached_type(cache, name, width), space="hbm")))
    scales = [Arg(name, "in", Type("f32", cache.scales, "hbm")) for name in _scales(cache)]
    for arg in scales if cache.scale == "columns" else ():  # they lie in the cache
        b.add(arg)
    b.tensor("CACHE_SEQLENS")
    if cache.page:
        b.tensor("PAGE_TABLE")
    for arg in scales if cache.scale != "columns" else ():
        b.add(arg)


def _in_cache(spec: Spec, b: HostBuilder, block: str) -> Uses:
    """What kernels are given as keys and values in the cache."""
    if spec.rope and not spec.factors:
        return split_columns(b, block, "K_CACHE", "K")
    return tuple((name, f"{name}_CACHE") for name in _stored(spec))


def _room(b: HostBuilder, cache: Cache) -> None:
    """For how many keys a sequence has room, where its pages say so."""
    if cache.page:
        rows = symbol(cache.page) if cache.page == "page_rows" else sympy.Integer(int(cache.page))
        b.add(Map("Nc", symbol("max_pages") * rows, (), Type("i32", (), "reg")))


def _host_append(spec: Spec, cache: Cache) -> Host:
    """Store new keys and values."""
    b = HostBuilder("append")
    for name in _tensors(spec):
        b.tensor(f"{name}_NEW")
    _caches(spec, b, cache)
    _room(b, cache)
    b.branch("Appended", "stores", of=("K_NEW",))
    heads = (
        {"Hq": symbol("Hkv")} if SHARINGS[spec.heads.sharing].axis == "h" else {}
    )  # each query head has a K/V head of its own
    new = split_columns(b, "stores", "K_NEW", "K_NEW") if spec.rope else ()
    b.launch("append", "stores", (*new, *_in_cache(spec, b, "stores")), Nk=symbol("Nn"), **heads)
    return b.host()


def _host_decode(spec: Spec, module: Module, cache: Cache, kv_split: KVSplit) -> Host:
    """The output and the LSE of queries over a cache."""
    b = HostBuilder("decode")
    b.tensor("Q")
    _caches(spec, b, cache)
    operands(b, module, "decode")
    b.add(Arg("Nn", "scalar", Type("i32", (), "reg")))
    _room(b, cache)
    b.alloc("O", like="Q")
    b.alloc("LSE")
    b.branch("Launched", "launches", of=("O",))
    b.give(O="O", LSE="LSE")
    cached = _in_cache(spec, b, "launches")
    for program, _ in in_cache(spec.derived()):
        for op in program.block("entry").ops:
            if not isinstance(op, (Arg, Yield)):
                b.add(op, "launches")
        cached += tuple((name, ref) for name, ref in program.results.items() if name != ref)
    few, of_part = FEW_QUERIES, symbol("Hkv")  # rows of queries; programs with the same keys
    if spec.rope:
        few, of_part = FEW_LATENT, of_part * floordiv(symbol("Gq") + FEW_QUERIES - 1, sympy.Integer(FEW_QUERIES))
    b.branch("By_rows", "few_queries", "launches", where=sympy.Le(symbol("Gq"), few), orelse="many_queries")
    busy = sympy.Max(1, floordiv(kv_split.programs * symbol("processors"), sympy.Max(1, of_part)))
    least = least_items(kv_split.each)
    room = sympy.Max(1, least) if kv_split.each else sympy.Max(kv_split.waves * busy, least)
    b.add(Map("items", room, (), Type("i32", (), "reg")), "few_queries")
    for name in _parts(spec):
        b.alloc(name, "few_queries", Type("f32", ("Hkv", "items", "Gq", *SHAPES[name][3:]), "hbm"))
    view_rows(b, "few_queries")
    queries = split_columns(b, "few_queries", "Q_rows", "Q") if spec.rope else (("Q", "Q_rows"),)
    b.launch("decode", "few_queries", (*queries, *cached), Nq=symbol("Gq"), queries=symbol("Nq"))
    b.launch("combine", "few_queries", (("O", "O_rows"), ("LSE", "LSE_rows")), Nq=symbol("Gq"), queries=symbol("Nq"))
    b.add(Copy("copy_0", "O_rows", "O"), "few_queries")
    of_all = split_columns(b, "many_queries", "Q", "Q", "Q_all") if spec.rope else ()
    b.launch("prefill", "many_queries", (*of_all, *cached))
    return b.host()
