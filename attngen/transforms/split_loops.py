"""split-loops: split a loop over all tiles into a loop over full tiles and a loop over partial tiles.

before:  %keys = loop kv ranges(0 .. n) body(@step) tiles(a; b; c; d)
after:   %kv_end = map expr(d) : i32[]        (likewise %kv_first, %kv_full_first, %kv_full_end unless constant)
         %keys_full = loop kv ranges(kv_full_first .. kv_full_end) body(@step) cls(full)
         %keys_partial = loop kv ranges(kv_first .. kv_full_first, kv_full_end .. kv_end) body(@step) cls(partial)

Empty tiles are in neither loop. With several runs of tiles, each loop has one range per run. Ranges that are provably
empty are left out, and so are loops without ranges. If programs split the loop among them, they split each new range.
Both loops run the same body; ops marked `if partial` apply only in the second. The order of tiles does not matter to
online softmax or to gradient sums.

Programs that accumulate into one tile in a fixed order (`ordered_add`) get their position in it from the ranges: the
number of programs that add to the tile earlier. A kernel for which this number is unknown is dropped. If a rising
tensor says where loops start, the program counts its elements:

         %document_q_first_count = count_tiles %DOCUMENT_Q_FIRST[b, kv] most(BLOCK_Q + q_start - 1) : i32[]
         ordered_add %DQ_ACC[b, h, q, d_qk] %dq semaphore(%dQ_SEMAPHORE[...])
           order(min(document_q_first_count, cdiv(Nk, BLOCK_KV)) - ...)

If calls have chunks of a sequence, bounds are tiles of the whole sequence, and ranges are positions among the tiles
of the call:

after:   %kv_end = map expr(d) : i32[]
         %kv_end_at = list_position %KV_START_RANK tile(kv_end) : i32[]
         %keys_partial = loop kv ranges(kv_full_end_at .. kv_end_at) ...

With block lists, the position counts listed tiles, up to the last tile whose program visits this one:

before:  %kv_end_at = list_position %KV_RANK_row tile(cdiv(Nk, BLOCK_KV)) : i32[]
after:   %kv_end_at = list_position %KV_RANK_row tile(min(..., cdiv(Nk, BLOCK_KV))) : i32[]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Expr, Kernel, Module, Op, Type, only, symbol, tile
from attngen.ir.split_axes import part, shared
from attngen.tiles.order import ends_jump, last_first_order, order_ops, position_of
from attngen.transforms.base import Pass
from attngen.transforms.drop_unspecialized import without


@dataclass(frozen=True)
class SplitLoops(Pass):
    name: ClassVar[str] = "split-loops"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        made = module.map_kernels(lambda kernel: _with_order(module, _split(kernel)))
        return without(
            replace(made, phase=self.phase), {kernel.name for kernel in made.kernels if _lacks_order(kernel)}
        )


def _with_order(module: Module, kernel: Kernel) -> Kernel:
    """Return the kernel with the order of its programs' accumulation, derived from the ranges of its loops."""
    add = next(only(kernel.ops(), tile.OrderedAdd), None)
    if add is None:
        return kernel
    order, before, by_tile = last_first_order(module, kernel), order_ops(kernel, add), ends_jump(module, kernel)
    expr, makers = order or (None, ())

    def change(_: str, op: Op) -> list[Op]:
        if op is add:
            return [*makers, replace(add, order=expr)]
        return [] if op in before else [replace(op, by_tile=by_tile) if isinstance(op, tile.Loop) and op.heads else op]

    return kernel.rewrite(change)


def _lacks_order(kernel: Kernel) -> bool:
    return any(op.order is None for op in only(kernel.ops(), tile.OrderedAdd))


def _split(kernel: Kernel) -> Kernel:
    renamed: dict[str, str] = {}

    def change(_: str, op: Op) -> Iterable[Op]:
        op = op.with_operands(renamed)
        if not isinstance(op, tile.Loop) or not op.tiles:
            return [op]
        bounds, ends = _name_bounds(kernel, op)
        loops: list[Op] = [*bounds]
        if kernel.traits.places:
            of_call = {e: position_of(f"{op.var}_{e}_at" if e.is_Integer else f"{e}_at", op.var, e) for e in ends}
            loops += (made for _, *ops in of_call.values() for made in ops)
            ends = [of_call[e][0] for e in ends]
        count = len(loops)
        carry = op.carry
        runs = [ends[i : i + 4] for i in range(0, len(ends), 4)]
        shared_by = shared(kernel, op)[0][0]
        full = [(b, c) for _, b, c, _ in runs]
        partial = [pair for a, b, c, d in runs for pair in (((a, b), (c, d)) if b != c else ((a, d),))]
        for cls, pairs in (("full", full), ("partial", partial)):
            ranges = tuple((lo, hi) for lo, hi in pairs if lo != hi)
            if ranges or (cls == "partial" and len(loops) == count):  # a body needs a loop, even an empty one
                ranges = ranges or tuple(partial[:1])
                ranges = tuple(part(lo, hi, shared_by) for lo, hi in ranges) if shared_by else ranges
                loop = replace(op, name=f"{op.name}_{cls}", ranges=ranges, carry=carry, cls=cls, tiles=())
                loops.append(loop)
                carry = tuple((f, f"{loop.name}.{f}") for f, _ in carry)
        renamed.update({f"{op.name}.{f}": r for f, r in carry})
        return loops

    return kernel.rewrite(change)


def _name_bounds(kernel: Kernel, loop: tile.Loop) -> tuple[list[tile.Map], list[Expr]]:
    """Return the bounds as named scalars, each in terms of earlier ones, and their names (or constants) in the loop's
    order."""
    names: dict[Expr, Expr] = {}
    bounds: list[tile.Map] = []
    for i in range(0, len(loop.tiles), 4):
        start, full_start, full_end, end = loop.tiles[i : i + 4]
        for e, word in ((end, "end"), (start, "first"), (full_start, "full_first"), (full_end, "full_end")):
            if e in names or e.is_Integer:
                continue
            short = e.xreplace(names)
            uses = tuple(
                (str(s), str(s)) for s in sorted(short.free_symbols, key=str) if _is_value(kernel, str(s), bounds)
            )
            bounds.append(tile.Map(f"{loop.var}_{word}{f'_{i // 4 + 1}' if i else ''}", short, uses, Type("i32")))
            names[e] = symbol(bounds[-1].name)
    return bounds, [names.get(e, e) for e in loop.tiles]


def _is_value(kernel: Kernel, name: str, bounds: list[tile.Map]) -> bool:
    """True if a symbol is an op's result and not a size, a tile size or a position."""
    return name in {b.name for b in bounds} or (name in kernel.graph and not isinstance(kernel.op(name), tile.Arg))
