"""Builds the views of pipelines and of the ops that load, wait for, read, store and release their stages."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Access, Op, only, pipe, symbol, tile
from attngen.ir.behaviour import handles
from attngen.targets.hopper.configs.barriers import (
    instances_of,
    is_consumed_in_loop,
    is_reused,
    named_barriers_per_stage,
    release_arrivals,
)
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.head_dims import pieces
from attngen.targets.hopper.configs.sm90 import FIRST_BARRIER, FORWARD, ROWS, SWIZZLED_COLUMNS, THREADS
from attngen.targets.hopper.configs.work_tiles import tile_metadata
from attngen.targets.hopper.printing.exchange_views import rematerializes_address, side_of
from attngen.targets.hopper.printing.shapes import ShapeContext
from attngen.targets.hopper.printing.views import PipelineView
from attngen.targets.printing.memory_views import applies

NUMBERS = {"i32": "gl.int32", "f32": "gl.float32"}


class PipelineContext(ShapeContext):
    """Builds the views of pipelines and of ops on their stages."""

    @handles(pipe.Pipeline)
    def _pipeline(self, op: pipe.Pipeline) -> PipelineView:
        instances = instances_of(self.kernel, op)
        stages = self._stages(op)
        buffers = stages if instances == 1 else str(instances) if stages == "1" else f"{instances} * {stages}"
        if not op.type.dims and not op.metadata_of:
            numbers = f"{len(tile_metadata(self.kernel))} * {stages}, 1"  # integers per stage
            return PipelineView(
                self._short(op.name),
                stages,
                "",
                "",
                buffers,
                buffers,
                True,
                numbers,
                mbarrier_release=release_arrivals(self.kernel, op.name),
            )
        if op.name in self.shared:
            return self._shared_pipeline(op, stages)
        if op.exchange:
            return PipelineView(self._short(op.name), stages, self._shape(op), "", buffers, buffers, False, of="dtype")
        if op.metadata_of:
            numbers = ", ".join([stages, *(op.type.dims or ("1",))])
            return PipelineView(
                self._short(op.name), stages, "", "", buffers, buffers, False, numbers, NUMBERS[op.type.dtype]
            )
        moves = [o for o in only(self.kernel.ops(), pipe.ProducerLoad, pipe.TmaStore) if op.name in o.operands()]
        tensor = next(only(moves, pipe.ProducerLoad), moves[0])
        descriptor = (tensor.src if isinstance(tensor, pipe.ProducerLoad) else tensor.dst).tensor
        all_pieces = self._times(op, buffers)
        shape, filled, arrivals = (
            self._shape(op),
            isinstance(tensor, pipe.ProducerLoad),
            release_arrivals(self.kernel, op.name),
        )
        return PipelineView(
            self._short(op.name), stages, shape, descriptor, all_pieces, buffers, filled, mbarrier_release=arrivals
        )

    def _shared_pipeline(self, op: pipe.Pipeline, stages: str) -> PipelineView:
        """A tile that consumer instances store together.

        It is one buffer if they read it themselves, and one buffer per part if the copy engine stores it from there.
        """
        if self._is_of_rows(op.name):
            numbers = f"{stages}, {op.type.dims[0]}"
            return PipelineView(
                self._short(op.name),
                stages,
                "",
                "",
                stages,
                stages,
                False,
                numbers,
                NUMBERS[op.type.dtype],
                emptied=True,
            )
        add = next(only(self.kernel.ops(), tile.OrderedAdd), None)
        if not self.shared[op.name] or add is None:
            rows, columns = self._dims(op.type.dims, False)
            return PipelineView(
                self._short(op.name), stages, f"{rows}, {columns}", "", stages, stages, False, of="dtype"
            )
        parts = self._tiles_of(op)
        buffers = str(parts) if stages == "1" else f"{parts} * {stages}"
        shape = ", ".join(self._part(add))
        return PipelineView(self._short(op.name), stages, shape, add.dst.tensor, buffers, stages, False, emptied=True)

    def _in_phase_with(self, name: str) -> str:
        """A pipeline with one stage that each iteration releases before it stores a tile of this pipeline, which has
        one stage, too.

        Both then always have the same phase, so one variable serves both. Empty text if there is none.
        """
        for step in (self.kernel.block(op.step).ops for op in only(self.kernel.ops(), pipe.PipelinedLoop)):
            at = next((i for i, op in enumerate(step) if isinstance(op, pipe.ProducerStore) and op.pipeline == name), 0)
            pipelines = {op.name: op.pipeline for op in only(step, pipe.ConsumerWait)}
            released = [pipelines[op.value] for op in only(step[:at], pipe.ConsumerRelease)]
            one_stage = [
                pipeline
                for pipeline in released
                if self.pipelines[pipeline].stages == 1 == self.pipelines[name].stages and pipeline not in self.shared
            ]
            if one_stage:
                return one_stage[-1]
        return ""

    def _free(self, pipeline: str) -> str:
        """The number of the named barrier of a pipeline's first stage."""
        earlier = list(self.pipelines.items())[: list(self.pipelines).index(pipeline)]
        before = [(self._stages(op), n) for name, op in earlier if (n := named_barriers_per_stage(self.kernel, name))]
        first = FIRST_BARRIER + sum(n * int(stages) for stages, n in before if stages.isdigit())
        return " + ".join(
            [str(first), *(f"{n} * {stages}" if n > 1 else stages for stages, n in before if not stages.isdigit())]
        )

    @handles(pipe.ProducerLoad)
    def _producer_load(self, op: pipe.ProducerLoad, cls: str) -> dict[str, Any]:
        pipeline = self.pipelines[op.pipeline]
        if pipeline.metadata_of:
            return self._load_row_vector(op, pipeline.metadata_of, cls)
        instances, n, stage = (
            instances_of(self.kernel, pipeline),
            pieces(self.module, pipeline),
            self._stage(op.pipeline, "copy"),
        )
        return {
            "pipeline": self._short(op.pipeline),
            "tensor": op.src.tensor,
            "place": self._cache_place(op)
            if self.of_latents
            else self._place(
                op.src,
                f" + copy * {ROWS}" if pipeline.per_instance else "",
                f"piece * {pipeline.columns}" if n > 1 else "0",
            ),
            "bytes": " * ".join([*([str(n)] if n > 1 else []), *self._shape(pipeline).split(", "), "2"]),
            "pieces": n if n > 1 else 0,
            "buffer": self._times(pipeline, stage["index"]) + (" + piece" if n > 1 else ""),
            "instances": instances if pipeline.per_instance else 0,
            "row": {},
            "waits": bool(stage["free"]) and not self._metadata_of(pipeline.name, cls),
            **stage,
        }

    def _metadata_of(self, tiles: str, cls: str) -> list[str]:
        """The pipelines of metadata that a loop of class `cls` fills for each of these tiles."""
        idle = {op.pipeline for op in only(self.kernel.ops(), pipe.WriteTileStart) if self._idle(op, cls)}
        return [name for name, pipeline in self.pipelines.items() if pipeline.metadata_of == tiles and name not in idle]

    def _idle(self, op: Op, cls: str) -> bool:
        if isinstance(op, pipe.LoadTileStart):
            return not any(applies(o.when, cls) for o in only(self.kernel.ops(), pipe.WriteTileStart))
        if isinstance(op, pipe.WriteTileStart):
            return not applies(op.when, cls) and not pipe.masked_full_tiles(self.kernel.ops())
        if isinstance(op, pipe.ProducerLoad) and op.early:
            return True  # the kernel's entry issues it
        return super()._idle(op, cls)

    def _load_row_vector(self, op: pipe.ProducerLoad, tiles: str, cls: str) -> dict[str, Any]:
        """A vector of row values that accompanies a tile: its start and length. The first such load of a stage waits
        until the stage is free."""
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, tile.Arg)
        first = self._metadata_of(tiles, cls)[0]
        start = self._start(Access(op.src.tensor, op.src.index[:-1]), tensor)
        at, extent = self.kernel.traits.first_row(op.src, -1, self.loop), AXIS_EXTENT[self.loop]
        left = self.kernel.traits.extent(self.loop) if at == self.row(self.loop) else extent
        row = {"start": f"{start} + {at}", "left": f"{left} - {at}", "into": self._short(op.pipeline)}
        return {"pipeline": self._short(tiles), "row": row, "waits": first == op.pipeline, **self._stage(tiles)}

    @handles(pipe.WriteTileIndex)
    def _write_tile_index(self, op: pipe.WriteTileIndex, cls: str) -> dict[str, Any]:
        tiles = str(self.pipelines[op.pipeline].metadata_of)
        return {
            "pipeline": self._short(op.pipeline),
            "number": f"{self.loop}_tile",
            "index": self._stage(tiles)["index"],
        }

    @handles(pipe.ReadMetadata)
    def _read_metadata(self, op: pipe.ReadMetadata, cls: str) -> dict[str, Any]:
        wait = self.kernel.op(op.tile)
        assert isinstance(wait, pipe.ConsumerWait)
        text = {"var": self.var(op.name), "pipeline": self._short(op.pipeline), "axis": int(self._read_of_rows(op))}
        return {
            **text,
            "index": "0"
            if self.pipelines[wait.pipeline].exchange
            else self._stage(wait.pipeline, "_WARP_GROUP")["index"],
        }

    def _stage(self, name: str, copy: str = "") -> dict[str, Any]:
        """The index of a pipeline's next buffer, its number of stages, and the named barrier of its next free stage.

        There is no barrier if no stage is loaded twice. In a consumer, a pipeline of which it takes one stage per work
        tile shares the counter of the tile scheduler's pipeline (`advances` is False then).
        """
        pipeline, short = self.pipelines[name], self._short(name)
        if not is_reused(self.kernel, name):
            return {
                "index": copy if pipeline.per_instance else "0",
                "stages": "1",
                "free": "",
                "counted": False,
                "threads": "THREADS",
            }
        stages, counter = self._stages(pipeline), self._counter(name) if copy == "_WARP_GROUP" else short
        stage = "" if stages == "1" else f"{counter}_stage"
        index = stage or "0"
        if pipeline.per_instance:
            index = f"{instances_of(self.kernel, pipeline)} * {stage} + {copy}" if stage else copy
        free = " + ".join([self._free(name), *([stage] if stage else [])])
        text = {"index": index, "stages": stages, "free": free, "counter": counter, "advances": counter == short}
        return {**text, "counted": pipeline.mbarrier_release, "threads": self._threads(name)}

    def _counter(self, name: str) -> str:
        """The name of the stage counter by which a consumer reads a pipeline."""
        scheduler = next(
            (pipeline for pipeline in self.pipelines.values() if not pipeline.type.dims and not pipeline.metadata_of),
            None,
        )
        once = (
            scheduler is not None
            and self.pipelines[name].per_instance
            and self.pipelines[name].stages == scheduler.stages
        )
        return self._short(
            scheduler.name if scheduler and (once or self._alternates(name)) else self.leaders.get(name, name)
        )

    def _alternates(self, name: str) -> bool:
        """True if this one-stage buffer flips its phase exactly once per work tile, so that it can reuse the
        scheduler's stage, 0 or 1, as its phase."""
        return (
            self.pipelines[name].mbarrier_release
            and bool(self.pipelines[name].type.dims)
            and not is_consumed_in_loop(self.kernel, name)
        )

    @property
    def leaders(self) -> dict[str, str]:
        """Pipeline -> the pipeline whose counter it shares, because each iteration uses the same stage of both."""
        return self._leaders_by_twos() if self.of_latents else self._leaders_of_backward

    @cached_property
    def _leaders_of_backward(self) -> dict[str, str]:
        """`leaders` of the backward's loop.

        An iteration uses one stage of each pipeline, and only that of dS after it has released the last loaded tile.
        """
        found: dict[str, str] = {}
        for step in (
            self.kernel.block(op.step).ops for op in only(self.kernel.ops(), pipe.PipelinedLoop) if not op.first
        ):
            pipelines = {op.name: op.pipeline for op in only(step, pipe.ConsumerWait)}
            released = [
                pipelines[op.value]
                for op in only(step, pipe.ConsumerRelease)
                if not self.pipelines[pipelines[op.value]].per_instance
            ]
            loaded = [pipeline for pipeline in released if pipeline not in self.shared]
            if len(loaded) > 1 and self.kernel.stands_for != FORWARD:
                same_depth = (
                    pipeline
                    for pipeline in released
                    if self.pipelines[pipeline].stages == self.pipelines[loaded[-1]].stages
                )
                found |= {pipeline: loaded[-1] for pipeline in same_depth if pipeline != loaded[-1]}
        return found

    def _place(self, access: Access, moved: str = "", column: str = "0") -> str:
        """The coordinates of a tile's first element; `moved` is added to its row, for a part of the tile."""
        moving = self.own if set(access.axes()) == {self.own, self.loop} else access.axes()[0]
        starts = {
            axis: f"{self.kernel.traits.first_row(access, at, axis)}{moved if axis == moving else ''}"
            for at, axis in enumerate(map(str, access.index))
            if axis in (self.own, self.loop)
        }
        batch, *heads, rows, columns = access.index
        # Two indices are a head and one of its splits.
        head = heads[0] if len(heads) == 1 else heads[0] * symbol(self.kernel.type_of(access.tensor).dims[2]) + heads[1]
        return ", ".join(
            starts.get(str(i), column if str(i) in AXIS_DIM else self.scalar(i)) for i in (batch, head, rows, columns)
        )

    @handles(pipe.ProducerStore)
    def _producer_store(self, op: pipe.ProducerStore, cls: str) -> dict[str, Any]:
        """The place where a consumer instance writes its part, the barrier at which it waits first, and the one at
        which it arrives then."""
        if self.pipelines[op.pipeline].exchange:
            return self._store_exchanged(op)
        if self._is_of_rows(op.pipeline):
            return self._store_rows(op)
        text, value = self._shared_stage(op.pipeline), self.kernel.type_of(op.value)
        one, other = text["stage"] or "0", self._in_phase_with(op.pipeline)
        text |= {
            "phase": f"{self._counter(other) if other else self._short(op.pipeline)}_phase",
            "in_phase": self._short(other),
        }
        if self.shared[op.pipeline] and self.pipelines[op.pipeline].columns:
            return {**text, "stored": self._stored_pieces(op), "index": one, "waits": True}
        if self.shared[op.pipeline]:
            place = (
                f"_WARP_GROUP + {self.kernel.traits.sharing_warp_group.instances} * {one}"
                if text["stage"]
                else "_WARP_GROUP"
            )
            shape = ", ".join(self._dims(value.dims))
            tile = f"{text['pipeline']}_smem.index({place}).reshape([{shape}])"
            wide = self._columns(value.dims[1]) >= SWIZZLED_COLUMNS
            stored = (
                f"_store_acc({tile}, {self.var(op.value)}, PARTS)" if wide else f"{tile}.store({self.var(op.value)})"
            )
            return {**text, "stored": [stored], "index": one, "waits": True}
        tile = f"{text['pipeline']}_smem.index({one}).slice(_WARP_GROUP * ROWS, ROWS, 0)"
        return {**text, "stored": [f"{tile}.store(_unpack({self.var(op.value)}, dtype))"], "index": one, "waits": False}

    def _stored_pieces(self, op: pipe.ProducerStore) -> list[str]:
        """Stores of a consumer instance's part of dQ: both halves of its own piece, and its half of the piece between
        the two instances."""
        (whole, rest), pipeline = self._parts(op.value), f"{self._short(op.pipeline)}_smem"
        shape = f"[{self._dims(self.kernel.type_of(op.value).dims)[0]}, {self.pipelines[op.pipeline].columns}]"
        sums = [("4 * _WARP_GROUP", f"gl.convert_layout({whole}_left, REST, assert_trivial=True)")]
        sums += [
            ("4 * _WARP_GROUP + 1", f"gl.convert_layout({whole}_right, REST, assert_trivial=True)"),
            ("2 + _WARP_GROUP", rest),
        ]
        stores = [f"_store_acc({pipeline}.index({at}).reshape({shape}), {value}, REST)" for at, value in sums]
        return [f"{whole}_left, {whole}_right = _split_halves({whole})", *stores]

    def _shared_stage(self, name: str) -> dict[str, Any]:
        """The stage of a tile that instances store together, the named barrier of its first part, and how many threads
        meet there."""
        short, stages, instances = (
            self._short(name),
            self._stages(self.pipelines[name]),
            self.kernel.traits.sharing_warp_group.instances,
        )
        stage, each = (
            "" if stages == "1" else f"{self._counter(name)}_stage",
            named_barriers_per_stage(self.kernel, name),
        )
        barrier = " + ".join([self._free(name), *([f"{each} * {stage}" if each > 1 else stage] if stage else [])])
        text = {
            "pipeline": short,
            "stage": stage,
            "stages": stages,
            "barrier": barrier,
            "threads": instances * THREADS,
            "exchange": False,
        }
        return {
            **text,
            "handed_over": self.shared[name],
            "advances": bool(stage) and name not in self.leaders,
            "round_robin": name in self.kernel.traits.round_robin,
        }

    @handles(pipe.Rematerialize)
    def _rematerialize(self, op: pipe.Rematerialize, cls: str) -> dict[str, Any]:
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        pipeline = self.pipelines[wait.pipeline]
        index = self._stage(wait.pipeline, "_WARP_GROUP")["index"]
        return {
            "tiles": self._tiles_at(op.name, pipeline, self._recomputed(index)),
            "pipeline": self._short(wait.pipeline),
            "shape": self._shape(pipeline),
        }

    @staticmethod
    def _recomputed(index: str) -> str:
        """An index of a stage, from which the compiler computes addresses where it stands, not before the loop."""
        return "_opaque_zero()" if index == "0" else f"{index} + _opaque_zero()"

    @handles(pipe.LocalLoad)
    def _local_load(self, op: pipe.LocalLoad, cls: str) -> dict[str, Any]:
        wait = self.kernel.traits.wait_of(op.value)
        if wait and self._is_of_rows(wait.pipeline):
            return {
                "var": self.var(op.name),
                "tile": f"{self._short(wait.pipeline)}_smem.index(0)",
                "layout": "gl.SliceLayout(1, SCORES)",
            }
        transposed = self.kernel.type_of(op.value).dims != op.type.dims
        layout = "SCORES" if set(op.type.dims) == SCORE_DIMS else "ACC"
        tile = self.var(op.value) + ".permute((1, 0))" * transposed
        return {"var": self.var(op.name), "tile": tile, "layout": layout}

    def _row_of_tile(self, axis: str, tile: tuple[str, ...]) -> str:
        """The variable of a tile's rows. A tile as wide as the output accumulator has the accumulator's layout."""
        return f"{axis}_rows" if tile[1:] == ("D_V",) or side_of(tile) else super()._row_of_tile(axis, tile)

    def _row_of_tensor(self, axis: str, tile: tuple[str, ...]) -> str:
        wide = tile[1:] == ("D_V",) or side_of(tile)
        return f"{axis}_start + {axis}_rows" if wide else super()._row_of_tensor(axis, tile)

    @handles(pipe.SliceRows)
    def _slice_rows(self, op: pipe.SliceRows, cls: str) -> dict[str, Any]:
        return {"pairs": list(zip(self._tile_vars(op.name), self._tile_vars(op.value)))}

    @handles(pipe.ConsumerWait)
    def _consumer_wait(self, op: pipe.ConsumerWait, cls: str) -> dict[str, Any]:
        if self.pipelines[op.pipeline].exchange:
            return self._wait_exchanged(op)
        if op.pipeline in self.shared:
            return {**self._shared_stage(op.pipeline), "var": self.var(op.name), "shared": True}
        short, pipeline = self._short(op.pipeline), self.pipelines[op.pipeline]
        stage, in_phase = self._stage(op.pipeline, "_WARP_GROUP"), self._alternates(op.pipeline)
        phase = (
            f"{self._counter(op.pipeline)}_{'stage' if in_phase else 'phase'}"
            if is_reused(self.kernel, op.pipeline)
            else "0"
        )
        read = any(
            not isinstance(self.kernel.op(reader), (pipe.ConsumerRelease, pipe.Rematerialize))
            for reader in self.kernel.graph.successors(op.name)
        )
        at = "_opaque_zero()" if self.of_latents and rematerializes_address(pipeline) else stage["index"]
        tiles = self._tiles_at(op.name, pipeline, at) if read else []
        return {
            "tiles": tiles,
            "pipeline": short,
            "phase": phase,
            "in_phase": in_phase,
            "shape": self._shape(pipeline),
            "shared": False,
            **stage,
        }

    @handles(pipe.ConsumerRelease)
    def _consumer_release(self, op: pipe.ConsumerRelease, cls: str) -> dict[str, Any]:
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        if wait.pipeline in self.shared:
            return {**self._shared_stage(wait.pipeline), "shared": True}
        readers = (self.kernel.op(name) for name in self.kernel.graph.successors(wait.name))
        product = any(
            reader.b == wait.name and not (reader.acc and self.modifies) for reader in only(readers, pipe.Wgmma)
        )
        return {
            "pipeline": self._short(wait.pipeline),
            "early": product,
            "shared": False,
            **self._stage(wait.pipeline, "_WARP_GROUP"),
        }

    @handles(pipe.ProducerTail)
    def _producer_tail(self, op: pipe.ProducerTail, cls: str) -> dict[str, Any]:
        instances = instances_of(self.kernel, self.pipelines[op.pipeline])
        return {"pipeline": self._short(op.pipeline), "instances": instances, **self._stage(op.pipeline, "copy")}
