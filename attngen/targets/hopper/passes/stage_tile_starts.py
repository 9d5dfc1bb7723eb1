"""stage-tile-starts: pass the positions of tiles to consumers along with the tiles, if calls have chunks of a sequence.

Without it, each consumer looks up where a masked tile lies, and the products of the tile wait for the lookup. The
producer runs ahead: it loads the number before it waits for the tile's stage to be free.

before:  block @copy                                   after:  block @entry
           producer_load %K_pipeline %K[b, h, kv, d_qk]          %KV_START_pipeline = pipeline stages(num_stages)
                                                                   metadata_of(%K_pipeline) : i32[] @sram
                                                               block @copy
                                                                 %_kv_tile_start = load_tile_start : i32[] @reg
                                                                 write_tile_start %KV_START_pipeline %_kv_tile_start
                                                                   when(partial)
                                                                 producer_load %K_pipeline %K[b, h, kv, d_qk]
         block @step                                           block @step
           %k = consumer_wait %K_pipeline                        %k = consumer_wait %K_pipeline
           ...                                                   read_tile_start %KV_START_pipeline tile(%k)
           %masked = mask %s where(kv_idx <= q_idx)              ...
                                                                 %masked = mask %s where(kv_idx <= q_idx)

`when(partial)` says that only masks of partial tiles need positions. The producer then writes none for full tiles, but
for one that @first of a pipelined loop masks, because it comes first.

A block that does not wait for the tile that an iteration loads first, such as that of the dQ reduction warps, looks
positions up, as before. So do kernels that visit listed tiles or load numbers for a tile's rows before they wait for
the tile, and those whose tiles start inside a unit of the tables (see `unit_of`): the producer would have to add the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import AXIS_DIM, Block, Kernel, Module, Op, Type, only, pipe, tile
from attngen.targets.hopper.configs.families import with_chunks
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class StageTileStarts(Pass):
    name: ClassVar[str] = "stage-tile-starts"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_chunks(module, lambda kernel: _staged(kernel) if _looks_up(module, kernel) else kernel)


def _looks_up(module: Module, kernel: Kernel) -> bool:
    """True if a lookup of this kernel's tiles in the tables of positions is one load, of a number for each tile."""
    axis = AXIS_DIM[kernel.loop_axis].lower()
    whole = all(getattr(config, axis) % module.unit == 0 for config in module.configs(kernel.name, kernel.backend))
    loops = list(only(kernel.ops(), pipe.PipelinedLoop))
    by_twos = any(op.odd or op.pair for op in loops)
    return whole and not by_twos and not any(op.listed for op in kernel.loops + loops)


def _staged(kernel: Kernel) -> Kernel:
    copy = kernel.block("copy")
    loads = [op.pipeline for op in only(copy.ops, pipe.ProducerLoad)]
    pipelines = [op for op in only(kernel.ops(), pipe.Pipeline) if op.name in loads and not op.metadata_of]
    tiles = min(pipelines, key=lambda pipeline: loads.index(pipeline.name))
    waits = {
        block.name: wait
        for block in kernel.blocks
        for wait in only(block.ops, pipe.ConsumerWait)
        if wait.pipeline == tiles.name and any(pipe.needs_position(op, kernel.loop_axis) for op in block.ops)
    }
    orders = [(list(kernel.block(name).ops), wait) for name, wait in waits.items()]
    early = [op for ops, wait in orders for op in ops[: ops.index(wait)] if pipe.needs_position(op, kernel.loop_axis)]
    if not waits or early:
        return kernel
    needing = [op for ops, _ in orders for op in ops if pipe.needs_position(op, kernel.loop_axis)]
    when = "partial" if all(isinstance(op, tile.Mask) and op.when == "partial" for op in needing) else "always"
    start = pipe.Pipeline(
        f"{kernel.loop_axis.upper()}_START_pipeline", Type("i32", (), "sram"), tiles.stages, metadata_of=tiles.name
    )
    load = pipe.LoadTileStart(f"_{kernel.loop_axis}_tile_start", Type("i32", (), "reg"))

    def changed(block: Block) -> Iterator[Op]:
        if block is copy:
            yield load
        for op in block.ops:
            if block is copy and isinstance(op, pipe.ProducerLoad) and op.pipeline == tiles.name:
                yield pipe.WriteTileStart("_write_start", start.name, load.name, when)
            yield op
            if op is waits.get(block.name):
                yield pipe.ReadTileStart(f"_read_start_of_{op.name}", start.name, op.name, when)
        if block.name == "entry":
            yield start

    return replace(kernel, blocks=tuple(replace(block, ops=tuple(changed(block))) for block in kernel.blocks))
