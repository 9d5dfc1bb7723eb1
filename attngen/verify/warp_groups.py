"""The rule `warp-groups`: the warp groups that load, write and read each pipeline, and the registers and rows of a warp
group."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.devices import CLASSES
from attngen.ir import AXIS_DIM, Kernel, Module, only, pipe
from attngen.tiles.launches import groups, lane_registers


def warp_groups(module: Module, kernel: Kernel) -> Iterator[str]:
    """After @entry come one producer warp group and consumers. Their registers fit those of the launch, and the
    instances of a warp group split the rows of a tile."""
    if kernel.stands_for not in {k.name for k in module.kernels}:
        yield f"it stands in for @{kernel.stands_for}, which is no kernel of the module"
        return
    if kernel.args != module.kernel(kernel.stands_for).args:
        yield f"it has other arguments than @{kernel.stands_for}, for which it stands in"
    yield from _writers_and_readers(kernel)
    yield from _producer_and_consumers(kernel)
    found = {block.name: block.warp_group for block in kernel.blocks if block.warp_group}
    for name, warp_group in found.items():
        if not 1 <= warp_group.instances <= 3:
            yield f"@{name} has {warp_group.instances} instances; expected 1 to 3"
        if warp_group.registers % 8 > 0 or not 24 <= warp_group.registers <= 240:
            yield f"@{name} has {warp_group.registers} registers; expected a multiple of 8 from 24 to 240"
    given, axis = sum(groups(kernel)), kernel.program_axis
    for config in module.configs(kernel.name, kernel.backend):
        if config.device in CLASSES and given > (most := lane_registers(kernel, config)):
            who = f"each of {kernel.ctas_per_sm} programs on an SM" if kernel.ctas_per_sm > 1 else "a program"
            yield f"the warp groups have {given} registers for each lane of a warp; {who} has {most} at its launch"
        rows = config.rows_of(axis)
        for name, warp_group in found.items():
            if warp_group.rows and warp_group.instances * warp_group.rows != rows:
                yield (
                    f"@{name} has {warp_group.instances} instances of {warp_group.rows} rows, and {config.device} has "
                    f"{AXIS_DIM[axis]}={rows}"
                )


def _producer_and_consumers(kernel: Kernel) -> Iterator[str]:
    """One warp group has TMA load the pipelines, and others wait for these loads."""
    if kernel.blocks[0].name != "entry" or kernel.blocks[0].warp_group:
        yield "its first block is not @entry"
    loaded = {op.pipeline for op in only(kernel.ops(), pipe.ProducerLoad)}
    producers, consumers = (
        {b.name for b in kernel.warp_groups if loaded & _pipelines(kernel, b.name, kind)}
        for kind in (pipe.ProducerLoad, pipe.ConsumerWait)
    )
    has_pipelines = any(only(kernel.ops(), pipe.ProducerLoad, pipe.ConsumerWait))
    if has_pipelines and not (len(producers) == 1 and consumers and not producers & consumers):
        yield (
            f"{len(producers)} warp groups load pipelines and {len(consumers)} wait for these loads; expected one "
            f"producer, and other warp groups as consumers"
        )


def _writers_and_readers(kernel: Kernel) -> Iterator[str]:
    """A pipeline that instances write has one warp group that writes it and one that reads it.

    They are the same one, or the reader has one instance or gets the tiles in round-robin order. Through an exchange,
    two warp groups of one instance each write tiles and read those of the other.
    """
    written = {op.pipeline for op in only(kernel.ops(), pipe.ProducerStore)}
    exchanges = {op.name for op in only(kernel.ops(), pipe.Pipeline) if op.exchange}
    for pipeline in sorted(written | exchanges):
        writers, readers = (
            {
                b.name: b.warp_group.instances
                for b in kernel.warp_groups
                if b.warp_group and pipeline in _pipelines(kernel, b.name, kind)
            }
            for kind in (pipe.ProducerStore, pipe.ConsumerWait)
        )
        if pipeline in exchanges:
            if writers != readers or [*writers.values()] != [1, 1]:
                yield (
                    f"%{pipeline} is an exchange; expected two warp groups of one instance each that write tiles to it "
                    f"and read tiles from it"
                )
        else:
            one_reader = pipeline in kernel.traits.round_robin or [*readers.values()] == [1]
            if len(writers) != 1 or len(readers) != 1 or not (readers == writers or one_reader):
                who, whom = (", ".join(f"@{name}" for name in names) or "nobody" for names in (writers, readers))
                yield (
                    f"%{pipeline} is written by {who} and read by {whom}; expected one warp group each: the same one, "
                    f"or a reader of one instance or with tiles in round-robin order"
                )
            for name, instances in writers.items():
                if instances != 2 and (instances != 1 or readers == writers):
                    yield f"{instances} instances of @{name} write a tile to %{pipeline}; expected 2"
        if any(op.pipeline == pipeline for op in only(kernel.ops(), pipe.ProducerLoad)):
            yield f"%{pipeline} is filled both by TMA and by the instances of a warp group"


def _pipelines(
    kernel: Kernel, warp_group: str, kind: type[pipe.ProducerLoad | pipe.ProducerStore | pipe.ConsumerWait]
) -> set[str]:
    """The pipelines on which a warp group has ops of a kind."""
    return {op.pipeline for op in kernel.within(warp_group) if isinstance(op, kind)}
