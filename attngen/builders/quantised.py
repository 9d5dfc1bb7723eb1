"""Read and store keys and values that a cache holds in 8 bits.

A load takes two adjacent columns as one value of 16 bits. Products are then computed separately for even and odd
columns, in fp16, which represents all 8-bit numbers. Queries are first normalised by the largest of their row, so that
fp16 can represent them too.

With a latent, each key has a scale per group of LATENT_GROUP columns. Numbers are multiplied by it when they are read,
which gives the element type: scores and outputs need no scales then.
"""

from __future__ import annotations

from typing import Any

import sympy

from attngen.builders.common import KernelBuilder
from attngen.heuristics import UNIT
from attngen.interp.e4m3 import LARGEST
from attngen.ir import Access, Type, only, select, symbol, tile
from attngen.ir.dtypes import QUANTISED
from attngen.ir.names import SCALES

SMALLEST = sympy.Float(2.0**-126)  # smallest scale, because it is a divisor


def _by_head(b: KernelBuilder) -> bool:
    """True if all keys of a head have the same scale."""
    return b.signature.cache is not None and b.signature.cache.scale == "head"


def _by_tile(b: KernelBuilder, block: str) -> bool:
    """True if all keys of a loop's tile have the same scale, because pages hold whole tiles (see Kernel.tile_page)."""
    cache = b.signature.cache
    tile = b.spec.schedule.block_kv or UNIT
    return block != "entry" and cache is not None and cache.page.isdigit() and int(cache.page) % tile == 0


def load_scales(b: KernelBuilder, head: Any, block: str) -> None:
    """Load the scales of keys and values: one for the program's head; or, in the block that looks up pages, one for the
    tile's page, or one per row."""
    if _by_head(b):
        for tensor in SCALES.values():
            b.add(tile.Load(tensor.lower(), Access(tensor, (head,)), Type("f32")))
        return
    dims: tuple[str, ...] = ("BLOCK_KV",)
    page = next(op for op in only(b.ops[block], tile.Gather) if op.name == "page")
    if _by_tile(b, block):
        first = {symbol("kv_idx"): symbol("kv_start")}
        at, where = Access("PAGE_TABLE", tuple(e.xreplace(first) for e in page.src.index)), page.where.xreplace(first)
        page, dims = tile.Gather("first_page", at, b.uses((*at.index, where)), Type("i32"), where), ()
        b.add(page, block)
    for tensor in SCALES.values():
        at = Access(tensor, (symbol(page.name), head))
        b.add(tile.Gather(tensor.lower(), at, b.uses((*at.index, page.where)), Type("f32", dims), page.where), block)


def split_queries(b: KernelBuilder, head: Any) -> None:
    """Compute queries in fp16, as `q_columns`, each over the largest number of its row, `q_size`; and load scales of a
    whole head."""
    q, q_size = symbol("q"), symbol("q_size")
    b.map("q_abs", sympy.Max(q, -q), q="q")
    b.add(tile.Reduce("q_size", "q_abs", "max", "D_QK", Type("f32", ("BLOCK_Q",))))
    b.map("q_unit", select(q_size > 0, q / q_size, q), dtype="fp16", q="q", q_size="q_size")
    b.deinterleave("q_columns", "q_unit", "PAIRS_QK")
    if _by_head(b):
        load_scales(b, head, "entry")
        b.map("s_scale", q_size * symbol("k_scale"), q_size="q_size", k_scale="k_scale")


def multiply_keys(b: KernelBuilder, head: Any) -> None:
    """Compute `s`, the product of a query tile and a tile of 8-bit keys, as if the keys had the element type."""
    b.load_keys("k_pairs", "K", head, "pair_qk", "step")
    if not _by_head(b):
        load_scales(b, head, "step")  # before the products, so that they arrive meanwhile
    b.deinterleave("k", "k_pairs", "PAIRS_QK", "step")
    even = b.dot("s_even", "q_columns.even", "k.even", "PAIRS_QK", "step")
    b.dot("s_unit", "q_columns.odd", "k.odd", "PAIRS_QK", "step", acc=even)
    s_unit, q_size, k_scale = map(symbol, ("s_unit", "q_size", "k_scale"))
    if not (_by_head(b) or _by_tile(b, "step")):
        b.map("s", s_unit * q_size * k_scale, "step", s_unit="s_unit", q_size="q_size", k_scale="k_scale")
        return
    if not _by_head(b):
        b.map("s_scale", q_size * k_scale, "step", q_size="q_size", k_scale="k_scale")
    b.map("s", s_unit * symbol("s_scale"), "step", s_unit="s_unit", s_scale="s_scale")


def multiply_values(b: KernelBuilder, head: Any, p: str) -> dict[str, str]:
    """The sums of weights `p` times values after a tile, for even and odd columns.

    Scales of a tile multiply its product. If they differ from key to key, weights are multiplied by them first,
    relative to the largest of the tile, because fp16 has no small numbers: scales below 2**-12 of the largest lose
    digits.
    """
    b.load_keys("v_pairs", "V", head, "pair_v", "step")
    b.deinterleave("v", "v_pairs", "PAIRS_V", "step")
    if _by_head(b):
        return {
            f"acc_{half}": b.dot(f"acc_{half}_next", p, f"v.{half}", "BLOCK_KV", "step", acc=f"rescaled_{half}")
            for half in tile.HALVES
        }
    factor = "v_scale"
    if not _by_tile(b, "step"):
        v_scale, factor, v_size = symbol("v_scale"), "v_size", symbol("v_size")
        b.add(tile.Reduce("v_size", "v_scale", "max", "BLOCK_KV", Type("f32")), "step")
        b.map("v_unit", select(v_size > 0, v_scale / v_size, 0), "step", v_scale="v_scale", v_size="v_size")
        p = b.map("p_scaled", symbol("p") * symbol("v_unit"), "step", p=p, v_unit="v_unit")
    found = {}
    for half in tile.HALVES:
        part, rescaled = b.dot(f"part_{half}", p, f"v.{half}", "BLOCK_KV", "step"), f"rescaled_{half}"
        total = symbol("rescaled") + symbol("summed") * symbol(factor)
        uses = (("rescaled", rescaled), ("summed", part), (factor, factor))
        found[f"acc_{half}"] = b.add(tile.Map(f"acc_{half}_next", total, uses, b.types[part]), "step")
    return found


def interleave_values(b: KernelBuilder, loop: str) -> str:
    """The sums of weights times values after a loop, with even and odd columns interleaved."""
    acc = b.interleave("acc", f"{loop}.acc_", Type("f32", ("BLOCK_Q", "D_V")))
    return b.map("acc_scaled", symbol(acc) * symbol("v_scale"), acc=acc, v_scale="v_scale") if _by_head(b) else acc


def load_latents(b: KernelBuilder, head: Any) -> None:
    """Compute `k`, a tile of latents in the element type: each 8-bit number times the scale of its group of columns."""
    b.load_keys("k_pairs", "K", head, "pair_v", "step")
    b.load_keys("k_scale", "K_SCALE", head, "group_v", "step")
    columns = b.deinterleave("k_columns", "k_pairs", "PAIRS_V", "step")
    b.interleave("k_unit", f"{columns}.", Type("fp16", ("BLOCK_KV", "D_V")), "step")
    b.map("k", symbol("k_unit") * symbol("k_scale"), "step", dtype="T", k_unit="k_unit", k_scale="k_scale")


def scale_latents(b: KernelBuilder) -> None:
    """Compute `k_scale`, the scales of a tile of new latents. A scale maps the largest number of its group to the
    largest 8-bit number."""
    b.map("k_abs", sympy.Max(symbol("k"), -symbol("k")), k="k")
    b.add(tile.Reduce("k_size", "k_abs", "max", "D_V", Type("f32", ("BLOCK_KV", "GROUPS_V"))))
    b.map("k_scale", sympy.Max(symbol("k_size") / LARGEST, SMALLEST), k_size="k_size")


def quantise(b: KernelBuilder, value: str, scale: str, pairs: str) -> str:
    """Convert a tile of new keys or values to the cache's form: divide it by its scales, and round."""
    cache = b.signature.cache
    assert cache is not None
    uses = ((value, value), (scale, scale))
    made = b.add(tile.Map(f"{value}_unit", symbol(value) / symbol(scale), uses, Type("f32", b.types[value].dims)))
    columns = b.deinterleave(f"{value}_columns", made, pairs)
    return b.interleave(f"{value}_pairs", f"{columns}.", Type(QUANTISED[cache.dtype], (*b.types[made].dims[:1], pairs)))
