"""skip-masked-tiles: a copy of the consumer passes over tiles of keys that its own rows do not see.

before:  warp_group @consumer instances(2) rows(64)
           %keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end)
             first(@first) step(@step) last(@last)
         warp_group @producer
           loop kv ranges(kv_full_end .. kv_end) ...
           loop kv ranges(0 .. kv_full_end) ...
after:   warp_group @consumer instances(2) rows(64)
           %keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end)
             first(@first) step(@step) last(@last) reversed(yes) skip(@skip)
             instance_partial(... // BLOCK_KV .. cdiv(..., BLOCK_KV))
         warp_group @producer
           pipelined_loop kv partial(...) full(...) step(@copy) reversed(yes)

A program's tiles of keys are those that any of its rows sees. Under a causal mask the last of them may be hidden from
its upper rows, if tiles of keys are shorter than the program's tile of queries. Its first copy then does nothing with
them but to take them and to give them back. And it masks fewer tiles: those that are partial for its own rows.

Partial tiles come backwards, so that the hidden ones come first. The producer copies them in the same order. So it is
in forward mode, too, where all tiles came in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Loop, Op
from attngen.ir.pipe import ConsumerRelease, ConsumerWait, PipelinedLoop
from attngen.targets.hopper.configs.common import may_hide
from attngen.targets.hopper.configs.families import with_forwards, with_tangents
from attngen.tiles.warp_groups import instance_bounds
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SkipMaskedTiles(Pass):
    name: ClassVar[str] = "skip-masked-tiles"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def chosen(kernel: Kernel) -> bool:
            return all(may_hide(module, row) for row in module.configs(kernel.name, kernel.backend))

        def changed(kernel: Kernel) -> Kernel:
            return _hiding(kernel) if chosen(kernel) else kernel

        return with_tangents(with_forwards(module, changed), changed)


def _hiding(kernel: Kernel) -> Kernel:
    loops = {
        warp_group.name: [op for op in warp_group.ops if isinstance(op, (Loop, PipelinedLoop))]
        for warp_group in kernel.warp_groups
    }
    whole = {name: as_pipelined_loop(found) for name, found in loops.items()}
    keys = whole["consumer"]
    bounds = instance_bounds(kernel, keys.partial, keys.full, keys.listed)
    assert bounds is not None  # as may_hide says
    step = kernel.block(keys.step)
    hiding = {
        "producer": replace(whole["producer"], reversed=True),
        "consumer": replace(keys, reversed=True, skip="skip", instance_partial=(bounds,)),
    }
    results = {
        f"{op.name}.{field}": f"{hiding['consumer'].name}.{field}" for op in loops["consumer"] for field, _ in op.carry
    }
    blocks = []
    for block in kernel.blocks:
        if block.name in loops:
            first, *others = loops[block.name]
            ops = (
                hiding[block.name] if op is first else op.with_operands(results) for op in block.ops if op not in others
            )
            block = replace(block, ops=tuple(ops))
        blocks.append(block)
        if block is step:
            blocks.append(
                Block("skip", tuple(_skipped(step.ops)), about="tiles that hide all keys from the copy's rows")
            )
    return replace(kernel, blocks=tuple(blocks))


def as_pipelined_loop(loops: Sequence[Loop | PipelinedLoop]) -> PipelinedLoop:
    """The loops over both classes of tiles as one."""
    first = loops[0]
    if isinstance(first, PipelinedLoop):
        return replace(first, in_order=False)
    ranges = {loop.cls: loop.ranges for loop in loops if isinstance(loop, Loop)}
    name = first.name.rpartition("_")[0]
    tiles = ranges.get("partial", ()), ranges.get("full", ())
    made = PipelinedLoop(name, first.var, *tiles, first.carry, step=first.body, listed=first.listed)
    return replace(made, heads=first.heads, by_tile=first.by_tile)


def _skipped(ops: Sequence[Op]) -> Iterator[Op]:
    """What a turn takes, given back at once."""
    for op in ops:
        if isinstance(op, ConsumerWait):
            yield replace(op, name=f"{op.name}_in_skip")
            yield ConsumerRelease(f"give_{op.name}_in_skip", f"{op.name}_in_skip")
