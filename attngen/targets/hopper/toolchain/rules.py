"""What Hopper asks of a divided kernel."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import AXIS_DIM
from attngen.ir.pipe import ConsumerWait, Pipeline, WorkLoop
from attngen.targets.hopper.configs.common import (
    PLACE_STAGES,
    barriers_of,
    clearing,
    handed_over,
    is_taken_in_turns,
    room_of,
    takes_from,
    turns,
)
from attngen.targets.hopper.configs.head_dims import is_power_of_two, piece_of
from attngen.targets.hopper.configs.sm90 import DEVICE, FIRST_BARRIER, NAMED_BARRIERS
from attngen.targets.hopper.toolchain.resources import pipeline_bytes, pipelines, stages_of
from attngen.tiles.sizes import tile_width


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Its rings fit the device's shared memory, their slots and its turns the named barriers; tiles, or pieces, are
    of powers of two."""
    yield from _widths(module, kernel)
    for config in module.configs(kernel.name, kernel.backend):
        if config.device != DEVICE or config.elem_bytes != 2:
            yield f"a row is for {config.device} at {config.elem_bytes} bytes; expected {DEVICE} at 2"
            continue
        yield from _counted_wrongly(kernel, config)
        need, has = pipeline_bytes(module, kernel, config), room_of(kernel.ctas_per_sm)
        if need > has:
            given = (
                f"{AXIS_DIM[kernel.loop_axis]}={config.rows_of(kernel.loop_axis)} and num_stages={config.num_stages}"
            )
            yield f"with {given} it needs {need:,} bytes of shared memory; {_who(kernel)} has {has:,}"
        for op in pipelines(kernel):
            if barriers_of(kernel, op.name) and (who := _meets_nowhere(kernel, op.name)):
                yield f"@{who} takes from %{op.name}, and meets at no named barrier; expected mbarrier_release(yes)"
        stages = sum(stages_of(op, config) * barriers_of(kernel, op.name) for op in pipelines(kernel))
        most = NAMED_BARRIERS - FIRST_BARRIER - turns(kernel) - len(clearing(kernel))
        if stages > most:
            others = ", as copies that take turns have the others" if turns(kernel) else ""
            yield f"the slots of its rings take {stages} named barriers; expected {most} at most{others}"
        if not is_power_of_two(visited := config.rows_of(kernel.loop_axis)) or not 16 <= visited <= 256:
            yield f"{AXIS_DIM[kernel.loop_axis]}={visited}; expected a power of two from 16 to 256"


def _meets_nowhere(kernel: Kernel, pipeline: str) -> str:
    """A role that takes from a ring, and has no part of the program's rows: consumers and the producer alone meet at
    named barriers."""
    return next(
        (
            b.name
            for b in kernel.warp_groups
            if b.warp_group and not b.warp_group.rows and takes_from(kernel, b, pipeline)
        ),
        "",
    )


def _counted_wrongly(kernel: Kernel, config: Config) -> Iterator[str]:
    """A counted ring that each copy has of its own, and takes from in each turn, has a phase of its own.

    Others have that of the tile of the grid: places two slots, and each ring that is taken once for a tile one.
    """
    bodies = {op.body for op in kernel.ops() if isinstance(op, WorkLoop)}
    for pipeline in (
        op
        for op in pipelines(kernel)
        if op.mbarrier_release and not (op.per_instance and is_taken_in_turns(kernel, op.name))
    ):
        homes = {
            kernel.graph.nodes[op.name]["block"]
            for op in kernel.ops()
            if isinstance(op, ConsumerWait) and op.pipeline == pipeline.name
        }
        if homes - bodies:
            yield f"%{pipeline.name} is counted, and is taken in @{min(homes - bodies)}; expected it once for each tile of the grid"
        elif (stages := stages_of(pipeline, config)) != (most := 1 if pipeline.type.dims else PLACE_STAGES):
            yield f"%{pipeline.name} has {stages} slots and is counted; expected {most}"


def _who(kernel: Kernel) -> str:
    """What has a program's shared memory, as the start of a sentence's end."""
    return (
        f"each of {kernel.ctas_per_sm} programs on a multiprocessor of {DEVICE}" if kernel.ctas_per_sm > 1 else DEVICE
    )


def _widths(module: Module, kernel: Kernel) -> Iterator[str]:
    """What is wrong with the columns of tiles: buffers in shared memory, and values in registers, have powers of two
    of them."""
    padded, (qk, v) = not is_power_of_two(module.head_dim_v), (module.head_dim_qk, tile_width(module.head_dim_v))
    wrong = {"D_V" if padded else "D_V_PAD", "D_QK_PAD"}
    for op in kernel.ops():
        for t in op.results().values():
            if t.space != "hbm" and wrong.intersection(t.dims):
                yield f"%{op.name} is of {min(wrong.intersection(t.dims))}; expected D_QK, and D_V {'padded' if padded else 'as it is'}"
    for op in pipelines(kernel):
        if kernel.adds and op.columns != (wanted := _pieces_of_sums(module, kernel, op)):
            found = f"pieces of {op.columns}" if op.columns else f"whole tiles of {qk}"
            yield f"%{op.name} has {found} columns; expected {f'columns({wanted})' if wanted else 'whole tiles'}"
        elif op.columns and not (is_power_of_two(op.columns) and 16 <= op.columns <= 256):
            yield f"%{op.name} has pieces of {op.columns} columns; expected a power of two from 16 to 256"
        elif "D_QK" in op.type.dims and not (op.columns or is_power_of_two(qk)):
            yield f"%{op.name} has whole tiles of {qk} columns; expected columns({piece_of(qk)})"
        if op.type.dims and op.type.dims[-1].isdigit() and 2 * int(op.type.dims[-1]) != v:
            yield f"%{op.name} has tiles of {op.type.dims[-1]} columns; expected {v // 2}, half of an output"


def _pieces_of_sums(module: Module, kernel: Kernel, pipeline: Pipeline) -> int:
    """The columns of a ring's pieces in a kernel whose sums lie in pieces as Q and K do, and those of dQ in parts of
    them; 0 for none."""
    piece = piece_of(module.head_dim_qk) if "D_QK" in pipeline.type.dims else 0
    return piece // kernel.sharing_warp_group.instances if pipeline.name in handed_over(kernel) else piece
