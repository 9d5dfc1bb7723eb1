"""Registers that live tiles take, in closed form, from the values that are live in a kernel's IR."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import sympy

from attngen.devices import CLASSES
from attngen.ir import Config, Expr, Kernel, Module, only, tile
from attngen.targets.triton.matrix_units import SCORES, from_shared, in_sram
from attngen.targets.triton.sram import in_loop, is_rewritten, pair_bytes
from attngen.tiles.sizes import ELEM, sizes, tile_bytes
from attngen.tiles.tiles import evaluate


@cache
def register_formula(kernel: Kernel, from_shared: bool) -> Expr:
    """Bytes of the tiles live in registers at the widest point of the loop body: carried and rewritten tiles, and the
    scores in flight.

    Tiles loaded once count, too, unless products read them from shared memory.
    """
    carried: Expr = sympy.Integer(0)
    for op in kernel.ops():
        stationary = in_sram(op) and not from_shared and not in_loop(kernel, op)
        if isinstance(op, tile.Load) and is_rewritten(kernel, op):  # as it is loaded, summed and stored
            carried += 3 * tile_bytes(op.type)
        if isinstance(op, tile.Init) or stationary:
            carried += tile_bytes(kernel.type_of(op.name))
    bodies = sorted({loop.body for loop in kernel.loops if loop.cls != "all"})
    return carried + sympy.Add(*(_widest(kernel, body, from_shared) for body in bodies))


def _widest(kernel: Kernel, body: str, from_shared: bool) -> Expr:
    """The most bytes of score-shaped values live at once; an operand of a product is live together with its cast to
    `T`.

    Operands computed from 8-bit values and their factors count, too, unless products read them from shared memory.
    """
    ops = kernel.walk(body)
    rows = {f"{op.name}.{f}" for op in only(ops, tile.SoftmaxStep) for f in ("alpha", "m")}
    last_use = {ref.split(".")[0]: i for i, op in enumerate(ops) for ref in op.operands() if ref not in rows}
    live: dict[str, Expr] = {}
    peaks: list[Expr] = [sympy.Integer(0)]
    for i, op in enumerate(ops):
        if isinstance(op, tile.Dot):
            casts = [kernel.type_of(ref) for ref in (op.a, op.b) if kernel.type_of(ref).dtype == "f32"]
            peaks.append(sympy.Add(*live.values(), *(tile_bytes(replace(t, dtype="T")) for t in casts)))
        if isinstance(op, tile.Deinterleave):
            live[op.name] = pair_bytes(op)
        live = {n: b for n, b in live.items() if last_use[n] > i}
        if (
            isinstance(op, tile.Dropout) and op.value.split(".")[0] in live
        ):  # one bit a score more: it is the other value, or zero
            continue
        if (
            isinstance(op, (tile.Dot, tile.Dropout, tile.Gather, tile.Load, tile.Map, tile.Mask, tile.SoftmaxStep))
            and set(op.type.dims) == SCORES
            and op.name in last_use
        ):
            live[op.name] = tile_bytes(op.type)
        if (
            isinstance(op, tile.Map)
            and not from_shared
            and any(isinstance(kernel.op(ref), tile.Interleave) for ref in op.operands())
        ):
            live[op.name] = tile_bytes(op.type)
        peaks.append(sympy.Add(*live.values()))
    return max(peaks, key=lambda p: p.subs(dict.fromkeys(p.free_symbols - {ELEM}, 64)).subs(ELEM, 2))


@lru_cache(maxsize=256)
def registers_per_thread(module: Module, kernel: Kernel, config: Config) -> int:
    """32-bit registers of each thread that live tiles take."""
    device = CLASSES[config.device]
    live = register_formula(kernel, from_shared(module, kernel, config))
    if not device.converts:  # 8-bit values that are converted to 16 bits by arithmetic take a register each
        live += sympy.Add(*(pair_bytes(op) for op in only(kernel.ops(), tile.Deinterleave) if in_loop(kernel, op)))
    return int(evaluate(live, sizes(module, config))) // 4 // (config.num_warps * device.threads_per_warp)
