"""The cost of a decode step with a KV cache: bytes in closed form, roofline time, and the number of KV splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from attngen.cost.roofline import Problem, RooflineTimes, config_for, counts, peak
from attngen.devices import Device
from attngen.heuristics import UNIT
from attngen.interp.numeric import compiled
from attngen.ir import Config, Expr, Module, Type, symbol
from attngen.ir.names import CACHED, SCALES
from attngen.ir.split_kv import kv_split, units_of
from attngen.tiles.sizes import elem_sizes, tile_bytes
from attngen.tiles.tiles import unbounded


@dataclass(frozen=True)
class Decoding(RooflineTimes):
    """A call of a few queries with a KV cache on one device.

    splits_to_fill: the number of splits of each sequence that fills the device; more are of no use.
    splits: the number of splits that a sequence has.
    programs: the number of programs that the device runs at the same time.
    read: bytes of K and V that are read.
    partials: bytes of partial results that one kernel writes and the next one reads.
    moved: all bytes moved.
    """

    config: Config
    splits_to_fill: int
    splits: int
    programs: int
    read: float
    partials: float
    moved: float
    flops: float
    compute_s: float
    memory_s: float


def units(module: Module) -> Expr:
    """The number of UNIT-key tiles that a sequence's queries read, as a formula in `Nk` and numbers of the call."""
    kernel = module.splitting_kernel
    assert kernel is not None and kernel.kv_split is not None
    return units_of(kernel.kv_split.work)


def key_bytes(module: Module) -> Expr:
    """Bytes of K and V that are read for each key and head; with latents, those of K only."""
    kernel = module.splitting_kernel
    assert kernel is not None
    scales = [arg for arg in kernel.args if arg.name in SCALES.values() and len(arg.type.dims) == 4]  # scales per key
    rows = (
        Type(arg.type.dtype, arg.type.dims[-1:]) for arg in (*(a for a in kernel.args if a.name in CACHED), *scales)
    )
    return sympy.Add(*map(tile_bytes, rows))


def read_bytes(module: Module) -> Expr:
    """Bytes of K and V that a call reads for one sequence."""
    return symbol("Hkv") * key_bytes(module) * UNIT * units(module)


def partial_result_bytes() -> Expr:
    """Bytes of the partial results of one sequence: outputs and LSEs in fp32, written once and read once."""
    return 8 * symbol("num_KV_splits") * symbol("Hkv") * symbol("Gq") * (symbol("D_V") + 1)


def call_flops(module: Module) -> Expr:
    """FLOPs of the two products of a call for one sequence. With latents, values are the first columns of the keys."""
    of_scores = symbol("D_V") + symbol("D_ROPE") if module.rope else symbol("D_QK")
    return 2 * symbol("Hkv") * symbol("Gq") * (of_scores + symbol("D_V")) * UNIT * units(module)


def decoding(module: Module, device: Device, problem: Problem, queries: int = 1) -> Decoding | None:
    """The cost of a call with `queries` queries per head, few enough for split-KV; None if no tile fits the device."""
    kernel = module.splitting_kernel
    assert kernel is not None and kernel.kv_split is not None
    group = problem.q_heads // problem.kv_heads
    rows = group * queries
    config = config_for(module, kernel, device, rows)
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
    mask_sizes = {str(s) for s in units(module).free_symbols} - known.keys()
    known |= {name: unbounded(kernel).get(name, problem.n_kv) for name in mask_sizes}  # masks hide nothing
    numbers = known | counts(module, known | {"Nq": queries}, device)
    work = int(compiled(units(module))(numbers))
    splits = kv_split([work] * problem.batch, numbers["items"], kernel.kv_split.each, kernel.kv_split.waves)[0]
    programs_per_split = problem.kv_heads * -(-rows // config.block_q)
    programs = kernel.kv_split.ctas_per_sm_for(rows) * device.sms
    numbers |= {"num_KV_splits": splits}
    read, partials = (problem.batch * float(compiled(e)(numbers)) for e in (read_bytes(module), partial_result_bytes()))
    own = numbers["elem"] * problem.batch * problem.q_heads * queries * (module.head_dim_qk + module.head_dim_v)
    flops = problem.batch * float(compiled(call_flops(module))(numbers))
    rate = peak(module, config, device)
    splits_to_fill = max(1, min(work, programs // max(1, programs_per_split * problem.batch)))
    moved = read + partials + own
    return Decoding(
        config,
        splits_to_fill,
        splits,
        programs,
        read,
        partials,
        moved,
        flops,
        flops / rate,
        moved / device.hbm_bytes_per_s,
    )
