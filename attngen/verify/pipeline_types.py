"""Types of pipelines and of the ops that load, write, read and release their stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.ir import AXIS_DIM, Kernel, Op, Type, only, pipe, tile
from attngen.ir.behaviour import Table
from attngen.tiles.intervals import mentions

PIPE_TYPES = Table()  # what the types of an op of a warp-specialized kernel must be
_OWN_DIM = {
    whole: own for own, whole in pipe.TILE_DIM.items()
}  # dimension of all instances' rows -> that of one's own rows


def _text(t: Type) -> str:
    return f"{t.dtype}[{', '.join(t.dims)}]"


@PIPE_TYPES.of(pipe.Pipeline)
def _pipeline_errors(kernel: Kernel, op: pipe.Pipeline) -> Iterator[str]:
    if op.metadata_of:
        yield from _metadata_errors(kernel, op)
    elif op.type.space != "sram" or (
        len(op.type.dims) != 2 and not _has_work_tiles(op) and not _has_row_vectors(kernel, op)
    ):
        yield "is of tiles, of row vectors that a warp group writes, or of work tiles i32[], in sram"
    plain = (1, "", 0, False, None)
    if op.exchange and (op.stages, op.per_instance, op.columns, op.mbarrier_release, op.metadata_of) != plain:
        yield "is an exchange; expected one stage, which all warp groups use"
    if op.per_instance and op.per_instance not in {warp_group.name for warp_group in kernel.warp_groups}:
        yield f"is for each instance of @{op.per_instance}, which is no warp group"
    if op.stages.is_Integer and op.stages < 1:
        yield f"has {op.stages} stages; expected 1 or more"


def _metadata_errors(kernel: Kernel, op: pipe.Pipeline) -> Iterator[str]:
    """A pipeline of tile metadata has as many stages as the pipeline of the tiles. Its elements are a vector of a
    tile's rows, or one index."""
    tiles = kernel.op(op.metadata_of or "")
    of_rows = isinstance(tiles, pipe.Pipeline) and op.type.dims == tiles.type.dims[:1]
    fits = (
        isinstance(tiles, pipe.Pipeline)
        and (tiles.stages, tiles.per_instance, tiles.metadata_of, op.per_instance) == (op.stages, "", None, "")
        and (op.type.dtype in ("i32", "f32") if of_rows else (op.type.dtype, op.type.dims) == ("i32", ()))
    )
    if not fits or op.type.space != "sram":
        yield (
            f"has metadata of the tiles of %{op.metadata_of}; expected as many stages, and 32 bits for each row of a "
            f"tile, or one i32[], in sram"
        )


def _has_work_tiles(op: Op) -> bool:
    """True if an op is a pipeline that passes the number of a work tile to all warp groups."""
    work_tile = ("i32", (), "", None)
    return isinstance(op, pipe.Pipeline) and (op.type.dtype, op.type.dims, op.per_instance, op.metadata_of) == work_tile


def _has_row_vectors(kernel: Kernel, op: pipe.Pipeline) -> bool:
    """True if a pipeline passes one number per row from one warp group to another."""
    written = any(
        user.pipeline == op.name for user in only(map(kernel.op, kernel.graph.successors(op.name)), pipe.ProducerStore)
    )
    return written and (op.type.dtype, op.type.dims, op.per_instance) == ("f32", (AXIS_DIM[kernel.program_axis],), "")


@PIPE_TYPES.of(pipe.WorkLoop)
def _work_loop_errors(kernel: Kernel, op: pipe.WorkLoop) -> Iterator[str]:
    loops = list(only(kernel.ops(), pipe.WorkLoop))
    if not _has_work_tiles(kernel.op(op.pipeline)):
        yield f"gets work tiles through %{op.pipeline}, which is no pipeline of i32[]"
    if len({(other.pipeline, other.of) for other in loops}) > 1 or sum(other.fetches for other in loops) != 1:
        yield (
            "is one of several work loops; expected one of them to fetch work tiles, and all to use one pipeline and "
            "one block `of`"
        )
    homes = [kernel.graph.nodes[other.name]["block"] for other in loops]
    if sorted(homes) != sorted(warp_group.name for warp_group in kernel.warp_groups):
        yield f"{len(loops)} ops run over the program's work tiles; expected one in each warp group"


@PIPE_TYPES.of(pipe.ReloadTile)
def _reload_tile_errors(kernel: Kernel, op: pipe.ReloadTile) -> Iterator[str]:
    loops = [other for other in only(kernel.ops(), pipe.WorkLoop) if not other.fetches]
    if (op.pipeline, kernel.graph.nodes[op.name]["block"]) not in {(other.pipeline, other.body) for other in loops}:
        yield f"reads a work tile from %{op.pipeline} where this warp group has none"


@PIPE_TYPES.of(pipe.PrefetchTile)
def _prefetch_tile_errors(kernel: Kernel, op: pipe.PrefetchTile) -> Iterator[str]:
    loops = [other for other in only(kernel.ops(), pipe.WorkLoop) if other.fetches]
    if (op.pipeline, kernel.graph.nodes[op.name]["block"]) not in {(other.pipeline, other.body) for other in loops}:
        yield f"fetches a work tile for %{op.pipeline}; expected this in the body of the work_loop that fetches"
    if sum(isinstance(other, pipe.PrefetchTile) for other in kernel.ops()) > 1:
        yield "is one of several that fetch the next work tile; expected one"
    if kernel.traits.adds_in_order or kernel.kv_split:
        yield "fetches the next work tile before this one ends; programs of this kernel fetch a tile when they start it"


@PIPE_TYPES.of(pipe.ProducerLoad)
def _producer_load_errors(kernel: Kernel, op: pipe.ProducerLoad) -> Iterator[str]:
    source, pipeline = kernel.op(op.src.tensor), kernel.op(op.pipeline)
    loaded = tuple(AXIS_DIM[axis] for axis in op.src.axes())
    fits = isinstance(source, tile.Arg) and source.role == "in" and isinstance(pipeline, pipe.Pipeline)
    if isinstance(source, tile.Arg) and isinstance(pipeline, pipe.Pipeline):
        dims = tuple(_OWN_DIM.get(d, d) for d in pipeline.type.unpadded)
        fits &= (loaded, source.type.dtype) == (dims, pipeline.type.dtype)
    if not fits:
        yield "loads a tile of another type than the pipeline has"
    if op.early:
        yield from _early_errors(kernel, op)
    if isinstance(pipeline, pipe.Pipeline):
        yield from _load_order_errors(kernel, op, pipeline)


def _early_errors(kernel: Kernel, op: pipe.ProducerLoad) -> Iterator[str]:
    block, pipeline = kernel.block_of(op), kernel.op(op.pipeline)
    before = block.ops[: list(block.ops).index(op)]
    if kernel.traits.is_persistent or (isinstance(pipeline, pipe.Pipeline) and pipeline.metadata_of):
        yield "is issued early; expected a tile, and a program of one tile"
    if block.warp_group is None or any(not (isinstance(o, pipe.ProducerLoad) and o.early) for o in before):
        yield "is issued early; expected one of the first ops of a warp group"
    if known := sorted(
        kernel.traits.scalars_of(op) & {o.name for o in kernel.block("entry").ops if not isinstance(o, tile.Arg)}
    ):
        yield f"is issued before %{known[0]} is computed, which it needs"
    tiles = {o.name for o in only(kernel.ops(), pipe.ConsumerWait) if o.pipeline == op.pipeline}
    if any(o.value in tiles for o in only(kernel.ops(), pipe.ConsumerRelease)):
        yield f"is issued early, and a stage of %{op.pipeline} is released for another load; expected one load for it"


@PIPE_TYPES.of(pipe.PipelinedLoop)
def _tile_indices_errors(kernel: Kernel, op: pipe.PipelinedLoop) -> Iterator[str]:
    """Indices of listed tiles come with the tiles and are read before these are released."""
    written = {o.pipeline for o in only(kernel.ops(), pipe.WriteTileIndex)}
    if written - {op.tile_indices} and op.listed and op.first:
        yield f"does not take its tile indices from %{min(written)}, to which a warp group writes them"
    if not op.tile_indices:
        return
    pipeline = kernel.op(op.tile_indices)
    if not isinstance(pipeline, pipe.Pipeline) or op.tile_indices not in written or not op.listed:
        yield (
            f"has its tile indices from %{op.tile_indices}; expected listed tiles, and a pipeline to which a warp "
            f"group writes their indices"
        )
        return
    for body in op.bodies:
        ops = list(kernel.block(body).ops)
        reads = [at for at, o in enumerate(ops) if any(mentions(e, pipe.PLACE) for e in o.expressions)]
        tiles = [o.name for o in only(ops, pipe.ConsumerWait) if o.pipeline == pipeline.metadata_of]
        releases = [at for at, o in enumerate(ops) if isinstance(o, pipe.ConsumerRelease) and o.value in tiles]
        if reads and (not releases or max(reads) > min(releases)):
            yield f"runs @{body}, which needs the index of a tile after it has released the tile, with which it comes"


@PIPE_TYPES.of(pipe.WriteTileIndex)
def _write_tile_index_errors(kernel: Kernel, op: pipe.WriteTileIndex) -> Iterator[str]:
    pipeline = kernel.op(op.pipeline)
    if not isinstance(pipeline, pipe.Pipeline) or not pipeline.metadata_of or pipeline.type.dims:
        yield f"writes a tile index to %{op.pipeline}; expected a pipeline of i32[] with metadata of tiles"
    else:
        yield from _load_order_errors(kernel, op, pipeline)


@PIPE_TYPES.of(pipe.LoadTileStart)
def _load_tile_start_errors(kernel: Kernel, op: pipe.LoadTileStart) -> Iterator[str]:
    if not kernel.traits.places:
        yield "loads where a tile lies in the whole sequence, of which a call has all rows"
    if op.type != Type("i32", (), "reg"):
        yield "has another type than one integer"


@PIPE_TYPES.of(pipe.WriteTileStart)
def _write_tile_start_errors(kernel: Kernel, op: pipe.WriteTileStart) -> Iterator[str]:
    pipeline = kernel.op(op.pipeline)
    if op.when not in ("always", "partial"):
        yield f"is for `{op.when}` tiles; expected always or partial"
    if not isinstance(start := kernel.op(op.value), pipe.LoadTileStart) or start not in kernel.block_of(op).ops:
        yield f"writes %{op.value}; expected a result of load_tile_start in this block"
    if not isinstance(pipeline, pipe.Pipeline) or not pipeline.metadata_of or pipeline.type.dims:
        yield f"writes to %{op.pipeline}; expected a pipeline of metadata with one number for each tile"
        return
    yield from _load_order_errors(kernel, op, pipeline)


@PIPE_TYPES.of(pipe.ReadTileStart)
def _read_tile_start_errors(kernel: Kernel, op: pipe.ReadTileStart) -> Iterator[str]:
    """The position of a tile is read while the tile is in its stage, and before the block's first op that needs it."""
    wait = kernel.op(op.tile)
    written = {o.pipeline: o.when for o in only(kernel.ops(), pipe.WriteTileStart)}
    pipeline = kernel.op(op.pipeline)
    if (
        op.pipeline not in written
        or not isinstance(pipeline, pipe.Pipeline)
        or not isinstance(wait, pipe.ConsumerWait)
        or pipeline.metadata_of != wait.pipeline
    ):
        yield f"reads %{op.pipeline} for %{op.tile}; expected a pipeline to which the starts of these tiles are written"
        return
    yield from _metadata_read_errors(kernel, op)
    if written[op.pipeline] != op.when:
        yield f"reads %{op.pipeline} {op.when}; expected {written[op.pipeline]}, as write_tile_start writes it"
    ops = list(kernel.block_of(op).ops)
    needing = [o for o in ops if pipe.needs_position(o, kernel.loop_axis)]
    if needing and ops.index(needing[0]) < ops.index(op):
        yield f"reads the position of %{op.tile} after %{needing[0].name}, which needs it"
    for o in needing if op.when == "partial" else ():
        if not (isinstance(o, tile.Mask) and o.when == "partial"):
            yield f"reads the position of %{op.tile} in partial tiles; %{o.name} needs it in all"


def _metadata_read_errors(kernel: Kernel, op: pipe.ReadMetadata | pipe.ReadTileStart) -> Iterator[str]:
    """Metadata of a tile is read between the tile's consumer_wait and its release."""
    names = [o.value if isinstance(o, pipe.ConsumerRelease) else o.name for o in kernel.block_of(op).ops]
    if op.tile not in names or op.tile in names[names.index(op.tile) + 1 : names.index(op.name)]:
        yield f"reads metadata of %{op.tile} where this block has not waited for it, or has released it"


def _load_order_errors(
    kernel: Kernel, op: pipe.WriteTileStart | pipe.ProducerLoad | pipe.WriteTileIndex, pipeline: pipe.Pipeline
) -> Iterator[str]:
    """The metadata of a tile is written right before the load of the tile."""
    ops = list(kernel.block_of(op).ops)
    at, tiles = ops.index(op), pipeline.metadata_of or pipeline.name
    metadata = [o.name for o in only(kernel.ops(), pipe.Pipeline) if o.metadata_of == tiles]
    start = at - metadata.index(pipeline.name) if pipeline.name in metadata else at - len(metadata)
    writes = ops[max(0, start) :][: len(metadata) + 1]
    names = [
        o.pipeline if isinstance(o, (pipe.WriteTileStart, pipe.ProducerLoad, pipe.WriteTileIndex)) else ""
        for o in writes
    ]
    if names != [*metadata, tiles]:
        yield (
            f"is not among the loads of %{tiles} and of its metadata; expected these one after another, that of "
            f"%{tiles} last"
        )


@PIPE_TYPES.of(pipe.ReadMetadata)
def _read_metadata_errors(kernel: Kernel, op: pipe.ReadMetadata) -> Iterator[str]:
    pipeline, tile = kernel.op(op.pipeline), kernel.op(op.tile)
    if (
        not isinstance(pipeline, pipe.Pipeline)
        or not isinstance(tile, pipe.ConsumerWait)
        or pipeline.metadata_of != tile.pipeline
    ):
        yield f"reads %{op.pipeline} as metadata of %{op.tile}; expected a tile of the pipeline whose metadata it has"
        return
    if replace(pipeline.type, space="reg") != op.type:
        yield f"has another type than %{op.pipeline}"
    yield from _metadata_read_errors(kernel, op)


@PIPE_TYPES.of(pipe.ConsumerWait)
def _consumer_wait_errors(kernel: Kernel, op: pipe.ConsumerWait) -> Iterator[str]:
    if not isinstance(kernel.op(op.pipeline), pipe.Pipeline) or kernel.type_of(op.pipeline) != op.type:
        yield f"waits for a tile of another type than %{op.pipeline} has"


@PIPE_TYPES.of(pipe.LocalLoad)
def _local_load_errors(kernel: Kernel, op: pipe.LocalLoad) -> Iterator[str]:
    tile = kernel.type_of(op.value)
    in_stage = isinstance(kernel.op(op.value), pipe.ConsumerWait) and tile.space == "sram"
    same = op.type.space == "reg" and op.type.dtype == tile.dtype and sorted(op.type.dims) == sorted(tile.dims)
    if not in_stage or not same:
        yield f"loads %{op.value} as {_text(op.type)}; expected a tile of a stage or its transpose, in registers"
    home = kernel.block_of(op).ops
    if any(o.value == op.value for o in only(home[: home.index(op)], pipe.ConsumerRelease)):
        yield f"loads %{op.value}, which has been released before"


@PIPE_TYPES.of(pipe.ZeroOutOfBounds)
def _zero_out_of_bounds_errors(kernel: Kernel, op: pipe.ZeroOutOfBounds) -> Iterator[str]:
    tile, rows = kernel.op(op.value), AXIS_DIM[kernel.loop_axis]
    of_rows = isinstance(tile, pipe.ConsumerWait) and tile.type.dims[:1] == (rows,)
    if not of_rows or tile not in kernel.block_of(op).ops or not kernel.traits.reads_cache:
        yield f"zeroes rows of %{op.value}; expected a tile of rows of a cache for which this block has waited"


@PIPE_TYPES.of(pipe.ConsumerRelease)
def _consumer_release_errors(kernel: Kernel, op: pipe.ConsumerRelease) -> Iterator[str]:
    tile, blocks = kernel.op(op.value), kernel.graph.nodes
    if not isinstance(tile, pipe.ConsumerWait) or blocks[tile.name]["block"] != blocks[op.name]["block"]:
        yield "releases what this block has not waited for"


@PIPE_TYPES.of(pipe.SliceRows)
def _slice_rows_errors(kernel: Kernel, op: pipe.SliceRows) -> Iterator[str]:
    whole, own = kernel.type_of(op.value), AXIS_DIM[kernel.program_axis]
    all_rows = replace(op.type, dims=tuple(pipe.TILE_DIM[own] if d == own else d for d in op.type.dims))
    of_tile = isinstance(kernel.op(op.value), (pipe.Rematerialize, pipe.ConsumerWait))
    if not of_tile or op.type.dims[:1] != (own,) or all_rows != whole:
        yield f"is no slice of the instance's rows, {own}, of a tile of {pipe.TILE_DIM[own]}"


@PIPE_TYPES.of(pipe.Rematerialize)
def _rematerialize_errors(kernel: Kernel, op: pipe.Rematerialize) -> Iterator[str]:
    if not isinstance(kernel.op(op.value), pipe.ConsumerWait) or kernel.type_of(op.value) != op.type:
        yield f"has another type than %{op.value}, or that is no tile of a stage"


@PIPE_TYPES.of(pipe.ProducerStore)
def _producer_store_errors(kernel: Kernel, op: pipe.ProducerStore) -> Iterator[str]:
    pipeline, value, warp_group = kernel.type_of(op.pipeline), kernel.type_of(op.value), kernel.warp_group_of(op)
    whole_of = {part: whole for whole, part in pipe.SLICE_DIM.items()} | pipe.TILE_DIM
    differing = [(part, whole) for part, whole in zip(value.dims, pipeline.dims) if part != whole]
    fits = (
        len(value.dims) == len(pipeline.dims)
        and len(differing) == 1
        and whole_of.get(differing[0][0]) == differing[0][1]
    )
    fits |= warp_group is not None and warp_group.instances == 1 and value.dims == pipeline.dims
    metadata = {
        o.name: replace(o.type, space="reg") for o in only(kernel.ops(), pipe.Pipeline) if o.metadata_of == op.pipeline
    }
    if {name: kernel.type_of(ref) for name, ref in op.metadata} != metadata:
        found, expected = (", ".join(names) or "nothing" for names in ([name for name, _ in op.metadata], metadata))
        yield f"writes metadata of its tile to {found}; expected {expected}, which have it for %{op.pipeline}"
    same = value.dtype == pipeline.dtype and value.space == "reg"
    if not isinstance(kernel.op(op.pipeline), pipe.Pipeline) or not fits or not same:
        tile = _text(pipeline)
        yield f"writes {_text(value)} to %{op.pipeline}, of {tile}; expected an instance's part of one dimension"


@PIPE_TYPES.of(pipe.TmaStore)
def _tma_store_errors(kernel: Kernel, op: pipe.TmaStore) -> Iterator[str]:
    target, pipeline, value = kernel.op(op.dst.tensor), kernel.op(op.staging), kernel.type_of(op.value)
    scores = isinstance(pipeline, pipe.Pipeline) and op.is_of_scores(kernel)
    dims = kernel.type_of(op.staging).dims if scores else value.unpadded
    if not isinstance(target, tile.Arg) or target.role != "out" or tuple(AXIS_DIM[a] for a in op.dst.axes()) != dims:
        yield "writes a tile to a tensor that is no output of its dimensions"
    if not isinstance(pipeline, pipe.Pipeline) or not pipeline.per_instance or pipeline.type.dtype != value.dtype:
        yield "has another staging than a pipeline per instance, of the same element type"
    elif scores:
        yield from _staged_scores_errors(kernel, op)
    elif pipeline.type.dims[:1] != value.dims[:1]:
        yield "has a staging of other rows"


def _staged_scores_errors(kernel: Kernel, op: pipe.TmaStore) -> Iterator[str]:
    """A tile of scores is stored through the stage of a tile that has been loaded to registers, and TMA has read it
    before the stage is released."""
    ops = list(kernel.block_of(op).ops)
    before, after = ops[: ops.index(op)], ops[ops.index(op) :]
    tiles = {o.name for o in only(before, pipe.ConsumerWait) if o.pipeline == op.staging}
    loaded = [{o.value for o in only(some, pipe.LocalLoad) if o.value in tiles} for some in (before, after)]
    if not tiles or loaded != [tiles, set()]:
        yield f"overwrites a tile of %{op.staging} that has not been loaded to registers, or is loaded later"
    ends = [
        type(o)
        for o in after
        if (isinstance(o, pipe.TmaStoreWait) and o.staging == op.staging)
        or (isinstance(o, pipe.ConsumerRelease) and o.value in tiles)
    ]
    if ends != [pipe.TmaStoreWait, pipe.ConsumerRelease]:
        yield f"has no tma_store_wait before the tile of %{op.staging} is released"
