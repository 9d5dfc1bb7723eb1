"""What a token costs over a cache: bytes in closed form, the roof, and how many parts of the keys pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from attngen.cost.roofline import Problem, Roofs, counts, peak, row_for
from attngen.devices import Device
from attngen.heuristics import UNIT
from attngen.interp.numeric import compiled
from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Config, Module
from attngen.ir.names import CACHED, SCALES
from attngen.ir.ops import Type
from attngen.ir.split_kv import kv_split, units_of
from attngen.tiles.sizes import elem_sizes, tile_bytes
from attngen.tiles.tiles import unbounded


@dataclass(frozen=True)
class Decoding(Roofs):
    """A call of a few queries over a cache on one device.

    programs: those that the device holds at once, of all sequences and heads; filling: parts of each sequence, at most,
    with which no more are needed; parts: those that it has.
    read: bytes of K and V; joined: bytes of parts that one kernel writes and the next one reads; moved: all.
    """

    config: Config
    filling: int
    parts: int
    programs: int
    read: float
    joined: float
    moved: float
    flops: float
    compute_s: float
    memory_s: float


def units(module: Module) -> Expr:
    """Tiles of UNIT keys that a sequence's queries read, in terms of `Nk` and of numbers of the call."""
    kernel = module.dealing
    assert kernel is not None and kernel.kv_split is not None
    return units_of(kernel.kv_split.work)


def key_bytes(module: Module) -> Expr:
    """Bytes of K and V that are read for each key and head: of a latent those of the keys alone."""
    kernel = module.dealing
    assert kernel is not None
    scales = [arg for arg in kernel.args if arg.name in SCALES.values() and len(arg.type.dims) == 4]  # of each key
    rows = (
        Type(arg.type.dtype, arg.type.dims[-1:]) for arg in (*(a for a in kernel.args if a.name in CACHED), *scales)
    )
    return sympy.Add(*map(tile_bytes, rows))


def read_bytes(module: Module) -> Expr:
    """Bytes of K and V that a call reads for one sequence."""
    return symbol("Hkv") * key_bytes(module) * UNIT * units(module)


def joined_bytes() -> Expr:
    """Bytes of the parts of one sequence: outputs and LSEs in fp32, written once and read once."""
    return 8 * symbol("parts") * symbol("Hkv") * symbol("Gq") * (symbol("D_V") + 1)


def call_flops(module: Module) -> Expr:
    """FLOPs of the two products of a call, for one sequence; of a latent, the product with values has its first
    columns."""
    of_scores = symbol("D_V") + symbol("D_ROPE") if module.rope else symbol("D_QK")
    return 2 * symbol("Hkv") * symbol("Gq") * (of_scores + symbol("D_V")) * UNIT * units(module)


def decoding(module: Module, device: Device, problem: Problem, queries: int = 1) -> Decoding | None:
    """A call of so many queries of each head, few enough for keys to be dealt; None where no tile fits the device."""
    kernel = module.dealing
    assert kernel is not None and kernel.kv_split is not None
    group = problem.q_heads // problem.kv_heads
    rows = group * queries
    config = row_for(module, kernel, device, rows)
    if config is None:
        return None
    known: dict[str, Any] = {
        "B": problem.batch,
        "Hq": problem.q_heads,
        "Hkv": problem.kv_heads,
        "group": group,
        "Nk": problem.n_kv,
    }
    known |= {"queries": queries, "Nq": rows, "Gq": rows, "elem": elem_sizes(module)[0], **module.widths}
    of_masks = {str(s) for s in units(module).free_symbols} - known.keys()
    known |= {name: unbounded(kernel).get(name, problem.n_kv) for name in of_masks}  # they hide nothing
    numbers = known | counts(module, known | {"Nq": queries}, device)
    work = int(compiled(units(module))(numbers))
    parts = kv_split([work] * problem.batch, numbers["items"], kernel.kv_split.each, kernel.kv_split.waves)[0]
    of_part = problem.kv_heads * -(-rows // config.block_q)
    held = kernel.kv_split.ctas_per_sm_for(rows) * device.sms
    numbers |= {"parts": parts}
    read, joined = (problem.batch * float(compiled(e)(numbers)) for e in (read_bytes(module), joined_bytes()))
    own = numbers["elem"] * problem.batch * problem.q_heads * queries * (module.head_dim_qk + module.head_dim_v)
    flops = problem.batch * float(compiled(call_flops(module))(numbers))
    rate = peak(module, config, device)
    filling = max(1, min(work, held // max(1, of_part * problem.batch)))
    moved = read + joined + own
    return Decoding(
        config, filling, parts, held, read, joined, moved, flops, flops / rate, moved / device.hbm_bytes_per_s
    )
