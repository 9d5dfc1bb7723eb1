"""The verifier's rule `fits`: Hopper's requirements for a warp-specialized kernel."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir import AXIS_DIM, Config, Kernel, Module, only, pipe
from attngen.targets.hopper.configs.barriers import (
    consumes,
    is_consumed_in_loop,
    named_barriers_per_stage,
    ping_pong_barriers,
    stored_pipelines,
    zeroing_warp_groups,
)
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.head_dims import is_power_of_two, piece_of
from attngen.targets.hopper.configs.sm90 import DEVICE, FIRST_BARRIER, NAMED_BARRIERS
from attngen.targets.hopper.configs.work_tiles import WORK_STAGES
from attngen.targets.hopper.toolchain.resources import pipeline_bytes, pipelines, stages_of
from attngen.tiles.sizes import tile_width


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Check that pipelines fit the device's shared memory, that their stages and the ping-pong order fit the named
    barriers, and that tiles or their pieces have a power of two of columns."""
    yield from _widths(module, kernel)
    for config in module.configs(kernel.name, kernel.backend):
        if config.device != DEVICE or config.elem_bytes != 2:
            yield f"a config is for {config.device} at {config.elem_bytes} bytes; expected {DEVICE} at 2"
            continue
        yield from _wrong_mbarrier_release(kernel, config)
        need, limit = pipeline_bytes(module, kernel, config), smem_limit(kernel.ctas_per_sm)
        if need > limit:
            given = (
                f"{AXIS_DIM[kernel.loop_axis]}={config.rows_of(kernel.loop_axis)} and num_stages={config.num_stages}"
            )
            yield f"with {given} it needs {need:,} bytes of shared memory; {_who(kernel)} has {limit:,}"
        for op in pipelines(kernel):
            if named_barriers_per_stage(kernel, op.name) and (who := _waits_at_no_named_barrier(kernel, op.name)):
                yield f"@{who} consumes from %{op.name}, and waits at no named barrier; expected mbarrier_release(yes)"
        stages = sum(stages_of(op, config) * named_barriers_per_stage(kernel, op.name) for op in pipelines(kernel))
        most = NAMED_BARRIERS - FIRST_BARRIER - ping_pong_barriers(kernel) - len(zeroing_warp_groups(kernel))
        if stages > most:
            others = ", because warp groups in ping-pong order have the others" if ping_pong_barriers(kernel) else ""
            yield f"the stages of its pipelines take {stages} named barriers; expected {most} at most{others}"
        if not is_power_of_two(visited := config.rows_of(kernel.loop_axis)) or not 16 <= visited <= 256:
            yield f"{AXIS_DIM[kernel.loop_axis]}={visited}; expected a power of two from 16 to 256"


def _waits_at_no_named_barrier(kernel: Kernel, pipeline: str) -> str:
    """Return a warp group that consumes from a pipeline without having rows of the program tile, or empty text: only
    consumers and the producer wait at named barriers."""
    return next(
        (
            b.name
            for b in kernel.warp_groups
            if b.warp_group and not b.warp_group.rows and consumes(kernel, b, pipeline)
        ),
        "",
    )


def _wrong_mbarrier_release(kernel: Kernel, config: Config) -> Iterator[str]:
    """Check pipelines with `mbarrier_release`, which share the phase of the work tile.

    The pipeline of work tiles has two stages; another one has one stage, and is consumed once per work tile. The
    exception is a pipeline that each instance consumes in a loop: it has a phase of its own.
    """
    bodies = {op.body for op in only(kernel.ops(), pipe.WorkLoop)}
    for pipeline in (
        op
        for op in pipelines(kernel)
        if op.mbarrier_release and not (op.per_instance and is_consumed_in_loop(kernel, op.name))
    ):
        homes = {
            kernel.graph.nodes[op.name]["block"]
            for op in only(kernel.ops(), pipe.ConsumerWait)
            if op.pipeline == pipeline.name
        }
        if homes - bodies:
            yield (
                f"%{pipeline.name} has mbarrier_release, and is consumed in @{min(homes - bodies)}; "
                "expected it once per work tile"
            )
        elif (stages := stages_of(pipeline, config)) != (most := 1 if pipeline.type.dims else WORK_STAGES):
            yield f"%{pipeline.name} has mbarrier_release and {stages} stages; expected {most}"


def _who(kernel: Kernel) -> str:
    """The owner of the shared memory, as the subject of a sentence."""
    return f"each of {kernel.ctas_per_sm} programs on an SM of {DEVICE}" if kernel.ctas_per_sm > 1 else DEVICE


def _widths(module: Module, kernel: Kernel) -> Iterator[str]:
    """Check the columns of tiles: buffers in shared memory, and values in registers, have a power of two of them."""
    padded, (qk, v) = not is_power_of_two(module.head_dim_v), (module.head_dim_qk, tile_width(module.head_dim_v))
    wrong = {"D_V" if padded else "D_V_PAD", "D_QK_PAD"}
    for op in kernel.ops():
        for t in op.results().values():
            if t.space != "hbm" and wrong.intersection(t.dims):
                yield (
                    f"%{op.name} is of {min(wrong.intersection(t.dims))}; expected D_QK, and D_V "
                    f"{'padded' if padded else 'as it is'}"
                )
    for op in pipelines(kernel):
        if kernel.traits.adds_in_order and op.columns != (expected := _columns_of_pieces(module, kernel, op)):
            found = f"pieces of {op.columns}" if op.columns else f"whole tiles of {qk}"
            yield f"%{op.name} has {found} columns; expected {f'columns({expected})' if expected else 'whole tiles'}"
        elif op.columns and not (is_power_of_two(op.columns) and 16 <= op.columns <= 256):
            yield f"%{op.name} has pieces of {op.columns} columns; expected a power of two from 16 to 256"
        elif "D_QK" in op.type.dims and not (op.columns or is_power_of_two(qk)):
            yield f"%{op.name} has whole tiles of {qk} columns; expected columns({piece_of(qk)})"
        if op.type.dims and op.type.dims[-1].isdigit() and 2 * int(op.type.dims[-1]) != v:
            yield f"%{op.name} has tiles of {op.type.dims[-1]} columns; expected {v // 2}, half of an output"


def _columns_of_pieces(module: Module, kernel: Kernel, pipeline: pipe.Pipeline) -> int:
    """Columns of a pipeline's pieces in the fused backward, which stores accumulators in pieces as it does Q and K, and
    dQ in an instance's share of a piece; 0 for whole tiles."""
    piece = piece_of(module.head_dim_qk) if "D_QK" in pipeline.type.dims else 0
    return piece // kernel.traits.sharing_warp_group.instances if pipeline.name in stored_pipelines(kernel) else piece
