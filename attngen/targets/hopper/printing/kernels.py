"""hopper.py of a generated module: what its template sees."""

from __future__ import annotations

from typing import Any

from attngen.ir.graph import Module
from attngen.ir.ops import Add, Count, Reduce
from attngen.ir.pipe import CHAINS, HALVES, Chains, Clear, Halve, Hold, Near, Pipeline, Ramp, Read, Tell
from attngen.targets.hopper.configs.common import PAIR, follow_of
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import DECODE, FIRST_BARRIER, FORWARD, ROWS, TANGENTS
from attngen.targets.hopper.printing.context import DividedContext
from attngen.targets.hopper.printing.exchange_views import HALF
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import DividedView
from attngen.targets.printing.split_kv import dealing
from attngen.tiles.sizes import tile_width

TEMPLATE = "hopper/kernels.py.jinja"


def context(module: Module) -> dict[str, Any]:
    """What the template of hopper.py sees."""
    views = [DividedContext(module, kernel.name).divided() for kernel in module.divided]
    stand_in = {kernel.stands_for for kernel in module.divided}
    summing = [kernel for kernel in module.divided if kernel.stands_for in (FORWARD, DECODE, TANGENTS)]
    chained = [any(isinstance(op, Chains) for op in kernel.ops()) for kernel in summing]
    ops = [op for kernel in module.divided for op in kernel.ops()]
    adds = [(kernel, op) for kernel in module.divided for op in kernel.ops() if isinstance(op, Add)]
    kinds, held = {type(op) for op in ops}, [{*op.type.dims} for op in ops if isinstance(op, Hold)]
    constants = [("D_QK", module.head_dim_qk), ("D_V", module.head_dim_v)]
    constants += [] if is_power_of_two(module.head_dim_v) else [("D_V_PAD", tile_width(module.head_dim_v))]
    constants += [("BLOCK", module.blocks.size)] if module.blocks else []
    if latents := any(map(is_of_latents, module.divided)):
        constants = [("D_ROPE", module.rope), (HALF, module.head_dim_v // 2)]
    return {
        "module": module,
        "constants": constants,
        "rows": ROWS,
        "first_barrier": FIRST_BARRIER,
        "softmax": bool(stand_in & {FORWARD, DECODE}),
        "natural": any("LN2" in view.words for view in views),
        "of_queries": any(kernel.own_axis == "q" for kernel in module.divided),
        "of_keys": [f"`{kernel.name}`" for kernel in module.divided if kernel.own_axis == "kv" and not kernel.adds],
        "chains": any(chained),
        "sums": not all(chained),
        "tells": Tell in kinds,
        "ramps": Ramp in kinds,
        "rows_beside": Read in kinds and not latents,
        "weighs_halves": Halve in kinds,
        "adds": bool(adds),
        "releases": any(kernel.releases for kernel in module.divided),
        "looks_ahead": any(not follow_of(kernel, op) for kernel, op in adds),
        "writers": max((role.copies for kernel, op in adds if (role := kernel.role_of(op))), default=0),
        "recomputes": any(isinstance(op, Pipeline) and op.recompute for op in ops),
        "counts": Count in kinds,
        "heads_by_tile": any(isinstance(op, Pipeline) and op.by_tile for op in ops),
        "turned": any("store_sums" in view.words for view in views),
        "nears": Near in kinds,
        "relays": latents,
        "clears": Clear in kinds,
        "deals": gluon(dealing(module)) if latents else {},
        "holds_tiles": PAIR in held,
        "holds": bool([dims for dims in held if dims != PAIR]),
        "sums_beside": any(isinstance(op, Reduce) and op.over in (CHAINS, *HALVES.values()) for op in ops),
        "signs": any(is_signed(module, kernel) for kernel in module.divided),
        "floors": any(view.words & {"floor_div", "floor_mod"} for view in views),
        "casts": any(view.words & {"to_floor", "to_int", "to_round"} for view in views),
        "halves": any("halves" in view.words for view in views),
        "in_parts": any(len(tile) > 2 for view in views for tile in view.described),
        "kernels": [{**vars(view), **parts(view)} for view in views],
    }


def parts(view: DividedView) -> dict[str, Any]:
    """The groups of warps, those of the program's own first: consumers, and then the producer, as Gluon is given them."""
    roles = sorted(view.roles, key=lambda role: -role.warps)
    parts = [(role, copy) for role in roles for copy in range(role.copies)]
    workers = [role for role, _ in parts[1:]]  # the first part has the warps that the kernel is launched with
    return {
        "parts": parts,
        "warps": [role.warps for role in workers],
        "registers": [role.registers for role in workers],
        "threads": sum(32 * role.warps for role, _ in parts if role.meets),
    }
