"""Pipelines in shared memory, and the loads and stores that go through them, on NumPy.

Stages are arrays. A load completes at a random later time, and its stage holds NaN until then, and again after all
consumers have released the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.numeric import compiled
from attngen.interp.tile import Launch
from attngen.interp.values import Values, applies
from attngen.ir import AXIS_DIM, AXIS_EXTENT, SIDES, Access, Op, only, pipe
from attngen.ir.behaviour import handles

POISON = 2**30 + 1  # in stages of numbers that are not loaded


@dataclass
class Buffers:
    """The buffers of a pipeline: the tile in each stage, and how often it was loaded and released.

    consumers: the number of releases that empty a stage.
    started: loads started, of all stages.
    storing: whether a TMA store has yet to read from it.
    written: how often each instance has written its part of a stage.
    vectors: the stages of its pipelines of metadata (row vectors, tile indices and starts), by name.
    exchanged: how many tiles each warp group has written to an exchange pipeline.
    """

    consumers: int
    tiles: list[Any]
    loads: list[int]
    released: list[int]
    started: int = 0
    storing: bool = False
    written: list[int] = field(default_factory=list)
    vectors: dict[str, Any] = field(default_factory=dict)
    exchanged: dict[str, int] = field(default_factory=dict)

    def poison(self, stage: int) -> None:
        self.tiles[stage][...] = np.nan
        for vectors in self.vectors.values():
            vectors[stage] = POISON


class PipelineOps(Launch):
    """Ops on pipelines, and TMA loads and stores."""

    def share(self, instance: int, instances: int, values: Values) -> Values:
        """The tile size, start and positions of one instance's rows of the program's tile: of all rows if `instances`
        is 1."""
        axis = self.kernel.program_axis
        rows = values[AXIS_DIM[axis]] // instances
        moved = instance % instances * rows
        first, row = values[f"{axis}_start"] + moved, values[f"_{axis}_row"] + moved
        places = {f"_{axis}_row": row, f"{axis}_start": first, f"{axis}_idx": first + np.arange(rows)}
        return {AXIS_DIM[axis]: rows, **places}

    @handles(pipe.Pipeline)
    def _pipeline(self, op: pipe.Pipeline, values: Values) -> Any:
        if op.metadata_of:
            buffers = values[op.metadata_of][0]
            shape = (len(buffers.tiles), *self.shape(op.type.dims, values))
            buffers.vectors[op.name] = np.full(shape, POISON, self.dtypes[op.type.dtype])
            return
        owner = next((b.warp_group for b in self.kernel.warp_groups if b.name == op.per_instance), None)
        instances = owner.instances if owner else 1
        rows = AXIS_DIM[self.kernel.program_axis]
        sizes = {**values, rows: values[rows] // instances}
        consumers = sum(
            b.warp_group.instances for b in self.kernel.warp_groups if b.warp_group and self.consumes(b.name, op.name)
        )
        consumers = 1 if op.exchange or op.name in self.kernel.traits.round_robin else consumers
        stages = int(compiled(op.stages)(values))
        writing = (
            b.warp_group
            for b in self.kernel.warp_groups
            if any(self.produces(o, op.name) for o in self.kernel.within(b.name))
        )
        writers = sum(warp_group.instances for warp_group in writing if warp_group)
        found = []
        for _ in range(instances):
            tiles = [np.full(self.stage_shape(op, sizes), np.nan, self.dtypes["T"]) for _ in range(stages)]
            found.append(
                Buffers(1 if op.per_instance else consumers, tiles, [0] * stages, [0] * stages, written=[0] * writers)
            )
        values[op.name] = found
        yield from ()

    @staticmethod
    def produces(op: Op, pipeline: str) -> bool:
        return isinstance(op, pipe.ProducerStore) and op.pipeline == pipeline

    @handles(pipe.ProducerStore)
    def _producer_store(self, op: pipe.ProducerStore, values: Values) -> Any:
        """Write the instance's part of the next stage, along the first dimension in which the part is smaller."""
        (buffers,), instance = values[op.pipeline], values["instance"]
        for pipeline, ref in op.metadata:
            buffers.vectors[pipeline][0] = values[ref]
        if self.pipeline(op.pipeline).exchange:
            buffers.tiles[0][...] = values[op.value]
            buffers.exchanged[values["warp_group"]] = buffers.exchanged.get(values["warp_group"], 0) + 1
            yield False
            return
        use, n = buffers.written[instance], len(buffers.tiles)
        stage = use % n
        while op.pipeline not in values["own pipelines"] and buffers.released[stage] < buffers.consumers * (use // n):
            yield True
        tile, part = buffers.tiles[stage], values[op.value]
        place = [slice(None)] * tile.ndim
        for axis, (whole, mine) in enumerate(zip(tile.shape, part.shape)):
            if whole != mine:
                place[axis] = slice(instance * mine, (instance + 1) * mine)
                break
        tile[tuple(place)] = part
        buffers.written[instance] += 1
        if min(buffers.written) > use:
            buffers.loads[stage] += 1
        yield False

    @handles(pipe.SliceRows)
    def _slice_rows(self, op: pipe.SliceRows, values: Values) -> Any:
        rows = len(values[op.value]) // values["parts"]
        values[op.name] = values[op.value][values["instance"] * rows : (values["instance"] + 1) * rows]
        yield from ()

    @handles(pipe.Rematerialize)
    def _rematerialize(self, op: pipe.Rematerialize, values: Values) -> Any:
        values[op.name] = values[op.value]
        yield from ()

    def stage_shape(self, pipeline: pipe.Pipeline, values: Values) -> tuple[int, ...]:
        """The shape of a pipeline's tile in its stage, where pieces of columns are padded."""
        shape = self.shape(pipeline.type.dims, values)
        return (*shape[:-1], -(-shape[-1] // pipeline.columns) * pipeline.columns) if pipeline.columns else shape

    def consumes(self, block: str, pipeline: str) -> bool:
        """True if a warp group's block, or a body that it runs, takes tiles from the pipeline."""
        for op in self.kernel.block(block).ops:
            receives_tiles = isinstance(op, pipe.WorkLoop) and op.pipeline == pipeline and not op.fetches
            if (
                receives_tiles
                or (isinstance(op, pipe.ConsumerWait) and op.pipeline == pipeline)
                or any(self.consumes(body, pipeline) for body in pipe.bodies_of(op))
            ):
                return True
        return False

    @handles(pipe.ProducerLoad)
    def _producer_load(self, op: pipe.ProducerLoad, values: Values) -> Any:
        if op.pipeline not in values:
            return  # a pipeline of metadata: the load of the tile comes next
        instances = len(values[op.pipeline])
        vectors = {
            o.pipeline: self.metadata(o, values)
            for o in only(self.kernel.ops(), pipe.WriteTileStart, pipe.ProducerLoad, pipe.WriteTileIndex)
            if o.pipeline in values[op.pipeline][0].vectors
        }
        yield from self._start(
            op.pipeline,
            values,
            lambda _, instance: self.read(op, values | self.share(instance, instances, values)),
            vectors,
        )

    def _start(
        self, pipeline: str, values: Values, tile: Callable[[Buffers, int], Any], vectors: Values | None = None
    ) -> Any:
        """Start a load of the next stage of every instance's buffers, once all are empty, along with the metadata
        `vectors`."""
        for buffers in values[pipeline]:
            while buffers.released[buffers.started % len(buffers.tiles)] < buffers.consumers * (
                buffers.started // len(buffers.tiles)
            ):
                yield True
        for instance, buffers in enumerate(values[pipeline]):
            values["pending"].append(
                self.arrival(buffers, buffers.started % len(buffers.tiles), tile(buffers, instance), vectors or {})
            )
            buffers.started += 1
            yield False

    @staticmethod
    def arrival(buffers: Buffers, stage: int, tile: Any, vectors: Values) -> Callable[[], None]:
        def arrive() -> None:
            buffers.tiles[stage][...] = tile
            for name, x in vectors.items():
                buffers.vectors[name][stage] = x
            buffers.loads[stage] += 1

        return arrive

    def pipeline(self, name: str) -> pipe.Pipeline:
        found = self.kernel.op(name)
        assert isinstance(found, pipe.Pipeline)
        return found

    def read(self, op: pipe.ProducerLoad, values: Values) -> Any:
        """A tile as TMA reads it: 0 out of bounds."""
        pipeline = self.pipeline(op.pipeline)
        tile = np.zeros(self.stage_shape(pipeline, values), self.dtypes[pipeline.type.dtype])
        if self.kernel.traits.reads_cache:  # its rows past the end of the sequence are read too
            values = {**values, "Nk": values["Nc"]}
        places, part = self.inside(op.src, values)
        if op.page:
            head, rows, columns = places
            first = rows.start % values[op.src.tensor].shape[2]
            places = (values[op.page], head, slice(first, first + rows.stop - rows.start), columns)
        tile[part] = values[op.src.tensor][places]
        return tile

    def inside(self, access: Access, values: Values, first: int = 0, columns: int | None = None) -> tuple[Any, Any]:
        """Return two indices: that of a tile, or of some of its columns, in the tensor, and that of the tile's part in
        bounds."""
        places: list[Any] = []
        part = []
        for at, e in enumerate(access.index):
            axis = str(e)
            if axis not in AXIS_DIM:
                places.append(int(self.expression(e, values)))
                continue
            start, size = values.get(self.kernel.traits.first_row(access, at, axis), first), values[AXIS_DIM[axis]]
            size = columns if columns and axis.startswith("d_") else size
            left = values["D_V" if axis in SIDES else AXIS_EXTENT[axis]] - values.get(f"{axis}_start", first)
            end = max(start, start + min(size, left))
            places.append(slice(start, end))
            part.append(slice(0, end - start))
        return tuple(places), tuple(part)

    def buffers(self, pipeline: str, values: Values) -> Buffers:
        of: list[Buffers] = values[pipeline]
        return of[values["instance"] if len(of) > 1 else 0]

    def metadata(self, op: pipe.WriteTileStart | pipe.ProducerLoad | pipe.WriteTileIndex, values: Values) -> Any:
        """What an op writes to a pipeline of metadata for the tile at which a loop is."""
        if isinstance(op, pipe.ProducerLoad):
            return self.read(op, values)
        if isinstance(op, pipe.WriteTileIndex):
            return self.tile_index(values)
        full = (
            self.expression(number, values)
            for tiles in pipe.masked_full_tiles(self.kernel.ops())
            if not any(self.expression(end - first, values) for first, end in tiles.before)
            for number in tiles.numbers
        )
        needed = applies(op.when, values["cls"]) or self.tile_index(values) in full
        return values[op.value] if needed else POISON

    def tile_index(self, values: Values) -> Any:
        """The number of the tile at which a loop is."""
        axis = self.kernel.loop_axis
        return values[f"_{axis}_row"] // values[AXIS_DIM[axis]]

    @handles(pipe.ConsumerWait)
    def _consumer_wait(self, op: pipe.ConsumerWait, values: Values) -> Any:
        buffers, stage = yield from self._next(op.pipeline, values)
        values[op.name] = buffers.tiles[stage]
        written = [
            buffers.vectors[o.pipeline][stage]
            for o in only(self.kernel.ops(), pipe.WriteTileIndex)
            if o.pipeline in buffers.vectors
        ]
        if written and written != [tile := self.tile_index(values)]:
            raise AttngenError(f"@{self.kernel.name}: the tile index {written[0]} is written for tile {tile}")
        yield False

    def _next(self, pipeline: str, values: Values) -> Any:
        """Wait for the stage of a pipeline that this warp group takes next, and return the buffers and the stage."""
        buffers, taken = self.buffers(pipeline, values), values["taken"]
        use = taken.get(pipeline, 0)
        stage = use % len(buffers.tiles)
        exchange = self.pipeline(pipeline).exchange
        while (
            (self.written_by_other(buffers, values) <= use)
            if exchange
            else (buffers.loads[stage] <= use // len(buffers.tiles))
        ):
            yield True
        taken[pipeline] = use + 1
        return buffers, stage

    @staticmethod
    def written_by_other(buffers: Buffers, values: Values) -> int:
        """The number of tiles that the other warp group has written to an exchange pipeline."""
        return sum(count for warp_group, count in buffers.exchanged.items() if warp_group != values["warp_group"])

    @handles(pipe.ReadMetadata)
    def _read_metadata(self, op: pipe.ReadMetadata, values: Values) -> Any:
        buffers, stage = self.held(op.tile, values)
        values[op.name] = buffers.vectors[op.pipeline][stage].copy()
        yield from ()

    @handles(pipe.ReadTileStart)
    def _read_tile_start(self, op: pipe.ReadTileStart, values: Values) -> Any:
        if not applies(op.when, values["cls"]):
            return
        buffers, stage = self.held(op.tile, values)
        axis, start = self.kernel.loop_axis, int(buffers.vectors[op.pipeline][stage])
        values[f"{axis}_start"], values[f"{axis}_idx"] = start, start + np.arange(values[AXIS_DIM[axis]])
        yield from ()

    @handles(pipe.LocalLoad)
    def _local_load(self, op: pipe.LocalLoad, values: Values) -> Any:
        tile = values[op.value]
        values[op.name] = (tile if self.kernel.type_of(op.value).dims == op.type.dims else tile.T).copy()
        yield from ()

    @handles(pipe.LoadTileStart)
    def _load_tile_start(self, op: pipe.LoadTileStart, values: Values) -> Any:
        values[op.name] = values[f"{self.kernel.loop_axis}_start"]
        yield from ()

    @handles(pipe.WriteTileIndex, pipe.WriteTileStart)
    def _write_tile_index(self, op: pipe.WriteTileStart | pipe.WriteTileIndex, values: Values) -> Any:
        yield from ()  # the load of the tile comes next

    @handles(pipe.ZeroOutOfBounds)
    def _zero_out_of_bounds(self, op: pipe.ZeroOutOfBounds, values: Values) -> Any:
        if values["cls"] == "partial":
            axis = self.kernel.loop_axis
            values[op.value][values[f"{axis}_idx"] >= values[AXIS_EXTENT[axis]]] = 0
        yield False

    @handles(pipe.ConsumerRelease)
    def _consumer_release(self, op: pipe.ConsumerRelease, values: Values) -> Any:
        self._release(*self.held(op.value, values))
        yield False

    def held(self, ref: str, values: Values) -> tuple[Buffers, int]:
        """The buffers and the stage of a tile that has been waited for."""
        wait = self.kernel.op(ref)
        assert isinstance(wait, pipe.ConsumerWait)
        buffers = self.buffers(wait.pipeline, values)
        return buffers, next(i for i, tile in enumerate(buffers.tiles) if tile is values[ref])

    @staticmethod
    def _release(buffers: Buffers, stage: int) -> None:
        buffers.released[stage] += 1
        if buffers.released[stage] % buffers.consumers == 0:
            buffers.poison(stage)

    @handles(pipe.ProducerTail)
    def _producer_tail(self, op: pipe.ProducerTail, values: Values) -> Any:
        for buffers in values[op.pipeline]:
            for stage in range(len(buffers.tiles)):
                while buffers.released[stage] < buffers.consumers * len(
                    range(stage, buffers.started, len(buffers.tiles))
                ):
                    yield True
        yield False

    @handles(pipe.TmaStore)
    def _tma_store(self, op: pipe.TmaStore, values: Values) -> Any:
        """Store through the instance's own stage, from which all rows inside the tensor are stored later, as many
        columns at a time as fit in it."""
        if op.is_of_scores(self.kernel):
            yield from self._store_scores(op, values)
            return
        tile = self.buffers(op.staging, values).tiles[0]
        width = values[op.value].shape[1]
        columns = min(width, tile.shape[1])
        for first in range(0, width, columns):
            yield from self._tma_store_wait(op, values)
            part = values[op.value][:, first : first + columns]
            tile[:, : part.shape[1]] = part
            self.stored(op, values, tile, first, part.shape[1])
            yield False

    def _store_scores(self, op: pipe.TmaStore, values: Values) -> Any:
        """Store transposed, through the stage that the instance has waited for."""
        yield from self._tma_store_wait(op, values)
        tiles = self.buffers(op.staging, values).tiles
        tile = tiles[(values["taken"][op.staging] - 1) % len(tiles)]
        tile[...] = values[op.value].T
        self.stored(op, values, tile, 0, tile.shape[1])
        yield False

    def stored(self, op: pipe.TmaStore, values: Values, tile: Any, first: int, columns: int) -> None:
        """At a later time, store the tile in a stage as the columns of an output from `first` on."""
        places, part = self.inside(op.dst, values, first, columns)
        buffers = self.buffers(op.staging, values)

        adds = op.order is not None and int(self.expression(op.order, values)) > 0

        def store() -> None:
            target = values[op.dst.tensor]
            target[places] = target[places] + tile[part] if adds else tile[part]
            buffers.storing = False

        buffers.storing = True
        values["pending"].append(store)

    @handles(pipe.TmaStoreWait)
    def _tma_store_wait(self, op: pipe.TmaStoreWait | pipe.TmaStore, values: Values) -> Any:
        """Wait until the previous TMA store has read its stage."""
        while self.buffers(op.staging, values).storing:
            yield True
