"""Attention with a KV cache, as used in serving: kernels and host programs as logical IR.

- `append` stores new keys and values behind the existing ones of each sequence.
- `decode` is for few queries. The keys of all sequences are split among programs (split-KV); `combine` merges the
  splits by their LSE (Dao et al. 2023, "Flash-Decoding for long-context inference"), or for fp32 by maximum and sum.
- `prefill` is the usual forward, for more queries.

In all of them `Nk` is the number of keys of the program's own sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder
from attngen.builders.forward import build_forward, sink_of, store_results
from attngen.builders.host_builder import HostBuilder, operands, split_columns
from attngen.builders.pack_gqa import view_rows
from attngen.builders.programs import in_cache
from attngen.builders.quantised import load_scales, quantise, scale_latents
from attngen.builders.semantics import exact_partials, listed_blocks
from attngen.builders.signature import Signature, cached_type, tensor_type
from attngen.errors import BuildError
from attngen.heuristics import CTAS_PER_SM_LATENT, CTAS_PER_SM_QUANTISED, FEW_LATENT, FEW_QUERIES, UNIT, WAVES_LATENT
from attngen.ir import AXIS_DIM, Access, Cache, Host, Kernel, KVSplit, Module, Type, Uses, launch, tile
from attngen.ir.expr import cdiv, exp2, floordiv, select, symbol
from attngen.ir.heads import SHARINGS
from attngen.ir.names import LSE_PARTIALS, OF_CACHE, SCALES, SHAPES, SUM_PARTIALS
from attngen.ir.split_kv import combined_work_items, max_work_items
from attngen.spec import Spec

_OF_CACHE = ("Q", "K", "V", "CACHE_SEQLENS")
APPEND = Signature(
    "append",
    "kv",
    ("K_NEW", "V_NEW", "CACHE_SEQLENS"),
    ("K", "V"),
    about="Before decode and prefill: store new keys and values in the cache.",
)
DECODE = Signature(
    "decode",
    "q",
    _OF_CACHE,
    pack_gqa=True,
    split_axis="KV_split",
    about="Forward of few queries with a KV cache: one program per split of a sequence's keys, "
    "with the queries of a group of heads as rows.",
)
COMBINE = Signature(
    "combine",
    "q",
    ("CACHE_SEQLENS",),
    ("O", "LSE"),
    pack_gqa=True,
    about="After decode: merge the outputs of a sequence's splits, weighted by their sums of probabilities.",
)
PREFILL = Signature(
    "prefill",
    "q",
    _OF_CACHE,
    ("O", "LSE"),
    about="Forward of more queries with a KV cache: one program per query tile.",
)


def add_cache(module: Module, spec: Spec) -> Module:
    """The module with the kernels and host programs that use a KV cache, if the spec has one.

    Raises BuildError if the mask or the scores read inputs that calls with a cache do not have.
    """
    if spec.cache is None:
        return module
    cache = Cache(spec.cache.page, spec.cache.dtype or "", spec.factors)
    _check(spec)
    _check_names(spec)
    of_latent: dict[str, Any] = {"ctas_per_sm": CTAS_PER_SM_LATENT, "waves": WAVES_LATENT}
    more = of_latent if spec.rope else {"ctas_per_sm_packed": CTAS_PER_SM_QUANTISED} if cache.dtype else {}
    kv_split = KVSplit(cdiv(symbol("Nk"), sympy.Integer(UNIT)), spec.schedule.keys_per_split // UNIT, **more)
    pages, scales = ("PAGE_TABLE",) if cache.page else (), _scale_tensors(cache)

    def signature(of: Signature) -> Signature:
        return of._replace(reads=(*of.reads, *pages, *scales), cache=cache)

    kernels = (
        _append(spec, signature(APPEND)),
        build_forward(spec, signature(DECODE._replace(writes=_split_tensors(spec))), kv_split),
        _combine(spec, kv_split),
        build_forward(spec, signature(PREFILL)),
        *(kernel for _, prepared in in_cache(spec.derived()) for kernel in prepared),
    )
    hosts = (_host_append(spec, cache), _host_decode(spec, replace(module, kernels=kernels), cache, kv_split))
    return replace(module, cache=cache, kernels=(*module.kernels, *kernels), hosts=(*module.hosts, *hosts))


def _split_tensors(spec: Spec) -> tuple[str, ...]:
    """The tensors that `decode` writes per split and `combine` reads: outputs, and the statistics to merge them by."""
    return ("O_PARTIAL", *(SUM_PARTIALS if exact_partials(spec) else LSE_PARTIALS))


def _check(spec: Spec) -> None:
    """Raise BuildError for a spec that has no kernels with a KV cache."""
    cannot = (
        (spec.dropout, "drops weights (`dropout`), which serving does not"),
        (spec.schedule.order != "q_outer", "has keys in the outer loop (`schedule: {order: kv_outer}`)"),
        (listed_blocks(spec) is not None, "uses block lists, which are computed from the keys of a whole call"),
        (
            any(
                not d.program and {"Nq", "Nk"} & {*d.sources, *(n for s in d.shapes for n in s)} for d in spec.derived()
            ),
            "has `packed` documents, but with a cache `cache_seqlens` gives the ends of sequences, and document ids "
            "divide a sequence (`{document: {sorted: true}}`)",
        ),
    )
    if found := next((text for wrong, text in cannot if wrong), None):
        raise BuildError(
            ("cache",), f"is asked for, and the spec {found}; expected a spec without that, or without `cache`"
        )


def _check_names(spec: Spec) -> None:
    """Raise BuildError for an input whose name is taken in modules with a cache."""
    if taken := next((i.name for i in spec.inputs() if i.name in OF_CACHE), None):
        raise BuildError(
            spec.key_of(taken),
            f"declares `{taken}`, which is a name of modules with a cache; expected another one",
        )


def _append(spec: Spec, signature: Signature) -> Kernel:
    """The kernel that stores new keys and values, tile by tile. In this kernel `Nk` counts new keys."""
    cache = signature.cache
    assert cache is not None
    parts = {"K": "d_v", "K_ROPE": "d_rope"} if spec.rope else {"K": "d_qk", "V": "d_v"}
    b = KernelBuilder(spec, signature)
    made = {"K_SCALE": "group_v"} if cache.scale == "columns" else {}  # scales of the new keys
    for name, column in parts.items():
        b.add(tile.Arg(f"{name}_NEW", "in", Type("T", ("B", "Hkv", "Nk", AXIS_DIM[column]))))
    for name in (name for name in signature.reads[2:] if name not in made):
        b.add(tile.Arg(name, "in", tensor_type(name, signature)))
    for name, column in parts.items():
        b.add(tile.Arg(name, "out", cached_type(cache, name, AXIS_DIM[column])))
    for name in made:
        b.add(tile.Arg(name, "out", tensor_type(name, signature)))
    head = SHARINGS[spec.heads.sharing].owned
    for name in (*(str(axis.extent) for axis in b.grid if axis.var in ("h", "hkv")), "Nk", "Nc"):
        b.declare_scalar(name)
    if cache.page == "page_rows":
        b.declare_scalar("page_rows")
    b.add(tile.Load("before", Access("CACHE_SEQLENS", (symbol("b"),)), Type("i32")))
    b.add(tile.Map("rows", symbol("before") + symbol("kv_idx"), (("before", "before"),), Type("i32", ("BLOCK_KV",))))
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
        b.add(
            tile.Append(
                f"_append_{tensor}", Access(tensor, index), value, (("kv", "always"),), rows="rows", pages=pages
            )
        )
    return b.kernel()


def _combine(spec: Spec, kv_split: KVSplit) -> Kernel:
    """The kernel that merges splits: each row's output is the mean of its splits' outputs, with weights exp2(LSE2 of
    the split - the largest LSE2).

    For `exact_partials` the weights are sum * exp2(maximum of the split - the largest maximum).
    """
    sink = sink_of(spec)
    b = KernelBuilder(
        spec, COMBINE._replace(reads=(*_split_tensors(spec), *COMBINE.reads)), [] if sink is None else [sink]
    )
    b.kv_split = kv_split
    head = SHARINGS[spec.heads.sharing].owned
    b.declare_tensors()
    b.declare_sizes()
    starts = {
        "m": b.init("m_init", -sympy.oo, "BLOCK_Q"),
        "l": b.init("l_init", 0, "BLOCK_Q"),
        "acc": b.init("acc_init", 0, "BLOCK_Q", "D_V"),
    }
    b.load_inputs()
    b.loop(
        "over_KV_splits",
        "KV_splits",
        cdiv(symbol("num_KV_splits"), symbol("BLOCK_KV_splits")),
        "combine",
        cls="all",
        **starts,
    )

    m, l, acc = map(symbol, ("m", "l", "acc"))  # noqa: E741
    b.carried("combine", **starts)
    outputs, exponents, *sums = _split_tensors(spec)
    exponent = b.load(exponents.lower(), exponents, (head, combined_work_items(), "q"), "combine", other=-sympy.oo)
    of_sums = [b.load(name.lower(), name, (head, combined_work_items(), "q"), "combine") for name in sums]
    b.load("o_partial", outputs, (head, combined_work_items(), "q", "d_v"), "combine")
    b.add(tile.Reduce("greatest", exponent, "max", "BLOCK_KV_splits", Type("f32", ("BLOCK_Q",))), "combine")
    b.map("m_next", sympy.Max(m, symbol("greatest")), "combine", m="m", greatest="greatest")
    b.map("base", select(symbol("m_next") > -sympy.oo, symbol("m_next"), 0), "combine", m_next="m_next")
    b.map("alpha", exp2(m - symbol("base")), "combine", m="m", base="base")
    weights = sympy.Mul(exp2(symbol(exponent) - symbol("base")), *map(symbol, of_sums))
    b.map("weights", weights, "combine", "f32", False, **{name: name for name in (exponent, "base", *of_sums)})
    b.reduce_sum("l_sum", "weights", "BLOCK_KV_splits", "combine")
    b.map("l_next", l * symbol("alpha") + symbol("l_sum"), "combine", l="l", alpha="alpha", l_sum="l_sum")
    b.map("weighed", symbol("o_partial") * symbol("weights"), "combine", o_partial="o_partial", weights="weights")
    b.reduce_sum("o_sum", "weighed", "BLOCK_KV_splits", "combine")
    b.map("acc_next", acc * symbol("alpha") + symbol("o_sum"), "combine", acc="acc", alpha="alpha", o_sum="o_sum")
    b.add(tile.Yield("_yield_combine", (("m", "m_next"), ("l", "l_next"), ("acc", "acc_next"))), "combine")

    store_results(b, head, sink, {name: f"over_KV_splits.{name}" for name in starts})
    return b.kernel()


def _call_tensors(spec: Spec) -> dict[str, str]:
    """The tensors of keys and values in a call, with their head_dim: with a latent, one for both."""
    return {"K": "D_QK"} if spec.rope else {"K": "D_QK", "V": "D_V"}


def _cache_tensors(spec: Spec) -> dict[str, str]:
    """The tensors of keys and values in the cache, with their head_dim. An 8-bit latent is separate from the rotated
    part."""
    return {"K": "D_V", "K_ROPE": "D_ROPE"} if spec.factors == "columns" else _call_tensors(spec)


def _scale_tensors(cache: Cache) -> tuple[str, ...]:
    """The tensors of scales: with a latent, one for both keys and values."""
    return tuple(SCALES.values())[: 1 if cache.scale == "columns" else 2] if cache.dtype else ()


def _add_cache_args(spec: Spec, b: HostBuilder, cache: Cache) -> None:
    """Declare the cache arguments of a host program."""
    for name, width in _cache_tensors(spec).items():
        b.add(tile.Arg(f"{name}_CACHE", "in", replace(cached_type(cache, name, width), space="hbm")))
    scales = [tile.Arg(name, "in", Type("f32", cache.scales, "hbm")) for name in _scale_tensors(cache)]
    for arg in scales if cache.scale == "columns" else ():  # they lie in the cache
        b.add(arg)
    b.tensor("CACHE_SEQLENS")
    if cache.page:
        b.tensor("PAGE_TABLE")
    for arg in scales if cache.scale != "columns" else ():
        b.add(arg)


def _cached_operands(spec: Spec, b: HostBuilder, block: str) -> Uses:
    """The kernel arguments for keys and values in the cache."""
    if spec.rope and not spec.factors:
        return split_columns(b, block, "K_CACHE", "K")
    return tuple((name, f"{name}_CACHE") for name in _cache_tensors(spec))


def _add_capacity(b: HostBuilder, cache: Cache) -> None:
    """Compute the number of keys for which a sequence has room, if its pages determine it."""
    if cache.page:
        rows = symbol(cache.page) if cache.page == "page_rows" else sympy.Integer(int(cache.page))
        b.add(tile.Map("Nc", symbol("max_pages") * rows, (), Type("i32", (), "reg")))


def _host_append(spec: Spec, cache: Cache) -> Host:
    """The host program that stores new keys and values."""
    b = HostBuilder("append")
    for name in _call_tensors(spec):
        b.tensor(f"{name}_NEW")
    _add_cache_args(spec, b, cache)
    _add_capacity(b, cache)
    b.branch("Appended", "stores", of=("K_NEW",))
    # if each query head has its own K/V head
    heads = {"Hq": symbol("Hkv")} if SHARINGS[spec.heads.sharing].axis == "h" else {}
    new = split_columns(b, "stores", "K_NEW", "K_NEW") if spec.rope else ()
    b.launch("append", "stores", (*new, *_cached_operands(spec, b, "stores")), Nk=symbol("Nn"), **heads)
    return b.host()


def _host_decode(spec: Spec, module: Module, cache: Cache, kv_split: KVSplit) -> Host:
    """The host program that computes the output and the LSE of queries with a KV cache."""
    b = HostBuilder("decode")
    b.tensor("Q")
    _add_cache_args(spec, b, cache)
    operands(b, module, "decode")
    b.add(tile.Arg("Nn", "scalar", Type("i32", (), "reg")))
    _add_capacity(b, cache)
    b.alloc("O", like="Q")
    b.alloc("LSE")
    b.branch("Launched", "launches", of=("O",))
    b.give(O="O", LSE="LSE")
    cached = _cached_operands(spec, b, "launches")
    for program, _ in in_cache(spec.derived()):
        for op in program.block("entry").ops:
            if not isinstance(op, (tile.Arg, tile.Yield)):
                b.add(op, "launches")
        cached += tuple((name, ref) for name, ref in program.results.items() if name != ref)
    # most rows of queries for @decode; programs that read the same keys
    few, programs = FEW_QUERIES, symbol("Hkv")
    if spec.rope:
        few, programs = FEW_LATENT, programs * floordiv(symbol("Gq") + FEW_QUERIES - 1, sympy.Integer(FEW_QUERIES))
    b.branch("By_rows", "few_queries", "launches", where=sympy.Le(symbol("Gq"), few), orelse="many_queries")
    busy = sympy.Max(1, floordiv(kv_split.programs * symbol("num_SMs"), sympy.Max(1, programs)))
    least = max_work_items(kv_split.each)
    room = sympy.Max(1, least) if kv_split.each else sympy.Max(kv_split.waves * busy, least)
    b.add(tile.Map("items", room, (), Type("i32", (), "reg")), "few_queries")
    for name in _split_tensors(spec):
        b.alloc(name, "few_queries", Type("f32", ("Hkv", "items", "Gq", *SHAPES[name][3:]), "hbm"))
    view_rows(b, "few_queries")
    queries = split_columns(b, "few_queries", "Q_rows", "Q") if spec.rope else (("Q", "Q_rows"),)
    b.launch("decode", "few_queries", (*queries, *cached), Nq=symbol("Gq"), queries=symbol("Nq"))
    b.launch("combine", "few_queries", (("O", "O_rows"), ("LSE", "LSE_rows")), Nq=symbol("Gq"), queries=symbol("Nq"))
    b.add(launch.Copy("_copy_0", "O_rows", "O"), "few_queries")
    of_all = split_columns(b, "many_queries", "Q", "Q", "Q_all") if spec.rope else ()
    b.launch("prefill", "many_queries", (*of_all, *cached))
    return b.host()
