"""skip-masked-tiles: let each instance of the consumer skip tiles of keys that its own rows do not see.

A program visits the tiles of keys that any of its rows sees. Under a causal mask, if a tile of keys is shorter than the
program tile of queries, the last tiles may be fully masked for its upper rows. The instance with these rows only waits
for such tiles and releases them (@skip). It also masks fewer tiles: only those that are partial for its own rows
(`instance_partial`).

before:  warp_group @consumer instances(2) rows(64)
           %keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end)
             first(@first) step(@step) last(@last)
         warp_group @producer
           loop kv ranges(kv_full_end .. kv_end) ...
           loop kv ranges(0 .. kv_full_end) ...
after:   warp_group @consumer instances(2) rows(64)
           %keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end)
             first(@first) step(@step) last(@last) reversed(yes) skip(@skip)
             instance_partial((q_start + 1) // BLOCK_KV .. cdiv(q_start + BLOCK_Q, BLOCK_KV))
         warp_group @producer
           pipelined_loop kv partial(...) full(...) step(@copy) reversed(yes)

These bounds are those of a causal mask with Nq = Nk, without the clamping at the ends. They are the bounds of the loop,
kv_full_end .. kv_end, with q_start and BLOCK_Q as the start and number of the instance's rows, not the program's.

Partial tiles come in reverse, so that the skipped ones come first, and the producer loads them in the same order. In
the JVP kernel (forward-mode differentiation), whose tiles otherwise run in rising order (`in_order`), this order
replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Block, Kernel, Module, Op, only, pipe, tile
from attngen.targets.hopper.configs.families import with_forward, with_jvp
from attngen.targets.hopper.configs.forward_schedule import can_skip_masked_tiles
from attngen.tiles.warp_groups import instance_bounds
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SkipMaskedTiles(Pass):
    name: ClassVar[str] = "skip-masked-tiles"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def change(kernel: Kernel) -> Kernel:
            configs = module.configs(kernel.name, kernel.backend)
            return _skip(kernel) if all(can_skip_masked_tiles(module, config) for config in configs) else kernel

        return with_jvp(with_forward(module, change), change)


def _skip(kernel: Kernel) -> Kernel:
    loops = {
        warp_group.name: list(only(warp_group.ops, tile.Loop, pipe.PipelinedLoop)) for warp_group in kernel.warp_groups
    }
    merged = {name: as_pipelined_loop(found) for name, found in loops.items()}
    keys = merged["consumer"]
    bounds = instance_bounds(kernel, keys.partial, keys.full, keys.listed)
    assert bounds is not None  # as can_skip_masked_tiles says
    step = kernel.block(keys.step)
    skipping = {
        "producer": replace(merged["producer"], reversed=True),
        "consumer": replace(keys, reversed=True, skip="skip", instance_partial=(bounds,)),
    }
    results = {
        f"{op.name}.{field}": f"{skipping['consumer'].name}.{field}"
        for op in loops["consumer"]
        for field, _ in op.carry
    }
    blocks = []
    for block in kernel.blocks:
        if block.name in loops:
            first, *others = loops[block.name]
            ops = (
                skipping[block.name] if op is first else op.with_operands(results)
                for op in block.ops
                if op not in others
            )
            block = replace(block, ops=tuple(ops))
        blocks.append(block)
        if block is step:
            blocks.append(
                Block(
                    "skip",
                    tuple(_skipped(step.ops)),
                    about="tiles whose keys are all hidden from this warp group's rows",
                )
            )
    return replace(kernel, blocks=tuple(blocks))


def as_pipelined_loop(loops: Sequence[tile.Loop | pipe.PipelinedLoop]) -> pipe.PipelinedLoop:
    """Merge the loops over partial and full tiles into one."""
    first = loops[0]
    if isinstance(first, pipe.PipelinedLoop):
        return replace(first, in_order=False)
    ranges = {loop.cls: loop.ranges for loop in only(loops, tile.Loop)}
    name = first.name.rpartition("_")[0]
    tiles = ranges.get("partial", ()), ranges.get("full", ())
    made = pipe.PipelinedLoop(name, first.var, *tiles, first.carry, step=first.body, listed=first.listed)
    return replace(made, heads=first.heads, by_tile=first.by_tile)


def _skipped(ops: Sequence[Op]) -> Iterator[Op]:
    """Wait for the tiles of an iteration, and release them at once."""
    for op in ops:
        if isinstance(op, pipe.ConsumerWait):
            yield replace(op, name=f"{op.name}_in_skip")
            yield pipe.ConsumerRelease(f"_release_{op.name}_in_skip", f"{op.name}_in_skip")
