"""The rule `types` of warp-specialized kernels: types of ops that compute, order or wait. Types of ops on pipelines are
in `pipeline_types`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.ir import Kernel, Module, only, pipe, tile
from attngen.verify.pipeline_types import PIPE_TYPES
from attngen.verify.types import semaphore_errors, types

_ROWS: set[tuple[str, tuple[str, ...]]] = {("f32", ("BLOCK_Q",))}
_PINNED = {
    pipe.PinAfterWait: _ROWS,
    pipe.PinBeforeWait: _ROWS | {("f32", ("BLOCK_Q", pipe.PARTIALS)), ("f32", ("BLOCK_KV", "BLOCK_Q"))},
}
LAYOUTS = ("scores", "acc", "partials", "operand")
BARRIER_STEPS = ("init", "sync", "arrive", "tail")


@PIPE_TYPES.of(pipe.ScaledIota)
def _scaled_iota_errors(kernel: Kernel, op: pipe.ScaledIota) -> Iterator[str]:
    step, made = kernel.type_of(op.value), (op.type.dtype, op.type.dims, op.type.space)
    if (step.dtype, step.dims) != ("f32", ()) or made != ("f32", ("BLOCK_KV",), "reg"):
        yield "multiplies positions in a tile of keys by one number: f32[] makes f32[BLOCK_KV] @reg"


@PIPE_TYPES.of(pipe.Wgmma)
def _wgmma_errors(kernel: Kernel, op: pipe.Wgmma) -> Iterator[str]:
    a, b = kernel.type_of(op.a), kernel.type_of(op.b)
    dims = tuple(d for t in (a, b) for d in t.dims if d != op.over)
    parts = [
        tuple(pipe.SLICE_DIM[d] if d == whole else d for d in dims)
        for whole in pipe.SLICE_DIM
        if whole in dims and op.over in pipe.TILE_DIM.values()
    ]
    fits = op.over in a.dims and op.over in b.dims and op.type.dims in (dims, *parts)
    if not fits or (op.type.dtype, op.type.space) != ("f32", "flight"):
        yield f"the product is f32[{', '.join(dims)}] @flight"
    if {a.dtype, b.dtype} != {"T"} or b.space != "sram":
        yield "multiplies values of the tensors' element type, the second in sram"
    before = kernel.type_of(op.acc) if op.acc else None
    if before and ((before.dtype, before.dims) != ("f32", dims) or before.space not in ("reg", "flight")):
        yield f"the accumulator is not f32[{', '.join(dims)}], in registers or in flight"
    yield from _pieces_errors(kernel, op)


def _pieces_errors(kernel: Kernel, op: pipe.Wgmma) -> Iterator[str]:
    """Operands that lie in column pieces do so along the dimension that is summed, in pieces of one width.

    The second operand may also lie in pieces of the product's columns, D_QK, where the product is accumulated.
    """
    a, b = kernel.type_of(op.a), kernel.type_of(op.b)
    pieces = [_piece_width(kernel, ref) for ref in (op.a, op.b)]
    summed = [width if op.over == t.dims[-1] else 0 for width, t in zip(pieces, (a, b))]
    sums = bool(op.acc) or op.type.dims == ("BLOCK_Q", pipe.SLICE_DIM["D_QK"])
    by_columns = sums and pieces[1] and op.over in b.dims[:1] and b.dims[-1] == "D_QK"
    if len(set(summed)) > 1 or pieces != (summed if not by_columns else [summed[0], pieces[1]]):
        found = " and ".join(str(width or "all") for width in pieces)
        yield f"its operands lie in pieces of {found} columns; expected pieces of one width, over {op.over}"


def _piece_width(kernel: Kernel, ref: str) -> int:
    """The number of columns of the pieces in which a tile lies; 0 for a tile in one piece, or a value in registers."""
    wait = kernel.traits.wait_of(ref)
    pipeline = kernel.op(wait.pipeline) if wait else None
    return pipeline.columns if isinstance(pipeline, pipe.Pipeline) else 0


@PIPE_TYPES.of(pipe.WgmmaWait)
def _wgmma_wait_errors(kernel: Kernel, op: pipe.WgmmaWait) -> Iterator[str]:
    product = kernel.type_of(op.value)
    same = (product.dtype, product.dims, "reg") == (op.type.dtype, op.type.dims, op.type.space)
    if product.space != "flight" or not same:
        yield f"waits for %{op.value}, which is not in flight, or has another type"


@PIPE_TYPES.of(pipe.Pack)
def _pack_errors(kernel: Kernel, op: pipe.Pack) -> Iterator[str]:
    value = kernel.type_of(op.value)
    if (value.dtype, value.dims, value.space) != ("f32", op.type.dims, op.type.space) or op.type.dtype != "T":
        yield "packs another type than f32 to the tensors' element type"


@PIPE_TYPES.of(pipe.ConvertLayout)
def _convert_layout_errors(kernel: Kernel, op: pipe.ConvertLayout) -> Iterator[str]:
    if kernel.type_of(op.value) != op.type:
        yield "changes the type of a value"
    if op.to not in LAYOUTS:
        yield f"converts to({op.to}); expected {', '.join(LAYOUTS)}"


@PIPE_TYPES.of(pipe.PinAfterWait, pipe.PinBeforeWait)
def _pin_errors(kernel: Kernel, op: pipe.PinAfterWait | pipe.PinBeforeWait) -> Iterator[str]:
    if kernel.type_of(op.value) != op.type:
        yield "changes the type of a value"
    if (op.type.dtype, op.type.dims) not in _PINNED[type(op)]:
        yield f"pins {op.type.dtype}[{', '.join(op.type.dims)}]; expected a row vector of f32"
    home = kernel.block_of(op).ops
    if isinstance(op, pipe.PinAfterWait) and not any(only(home[: home.index(op)], pipe.WgmmaWait)):
        yield "is pinned after a wgmma_wait, and none comes before it"


@PIPE_TYPES.of(pipe.SoftmaxStats)
def _softmax_stats_errors(kernel: Kernel, op: pipe.SoftmaxStats) -> Iterator[str]:
    s, m = kernel.type_of(op.s), kernel.type_of(op.m)
    if (
        s.dtype != "f32"
        or m != op.type
        or s.dims[:1] != op.type.dims
        or len(s.dims) != 2
        or (op.scale and kernel.type_of(op.scale).dims)
    ):
        yield "needs scores in f32, m of their rows and of its own type, and one number as scale"
    if op.guard not in ("always", "partial"):
        yield f"guards `{op.guard}`; expected always or partial"


@PIPE_TYPES.of(pipe.SoftmaxWeights)
def _softmax_weights_errors(kernel: Kernel, op: pipe.SoftmaxWeights) -> Iterator[str]:
    base = kernel.type_of(op.base)
    rows = (base.dtype, base.dims) == ("f32", op.type.dims[:1])
    if (
        kernel.type_of(op.s) != op.type
        or op.type.dtype != "f32"
        or not rows
        or (op.scale and kernel.type_of(op.scale).dims)
    ):
        yield "needs scores of its own type, f32, a base for each row, and one number as scale"


@PIPE_TYPES.of(pipe.PartialReduce)
def _partial_reduce_errors(kernel: Kernel, op: pipe.PartialReduce) -> Iterator[str]:
    value = kernel.type_of(op.value)
    if (
        value.dims != ("BLOCK_Q", op.over)
        or op.type != replace(value, dims=("BLOCK_Q", pipe.PARTIALS))
        or value.dtype != "f32"
    ):
        found = f"{value.dtype}[{', '.join(value.dims)}]"
        yield f"sums {found} over {op.over}; expected columns of f32, and sums f32[BLOCK_Q, {pipe.PARTIALS}]"


@PIPE_TYPES.of(pipe.SplitHalves, pipe.ConcatHalves)
def _split_halves_errors(kernel: Kernel, op: pipe.SplitHalves | pipe.ConcatHalves) -> Iterator[str]:
    """The halves have the value's type, with half of one dimension. Concatenation is checked as the inverse."""
    whole, half = (
        (kernel.type_of(op.value), op.type) if isinstance(op, pipe.SplitHalves) else (op.type, kernel.type_of(op.a))
    )
    if isinstance(op, pipe.ConcatHalves) and kernel.type_of(op.b) != half:
        yield f"concatenates %{op.a} and %{op.b}, whose types differ"
    dims = tuple(pipe.HALF_DIM[d] if d == op.over else d for d in whole.dims) if op.over in pipe.HALF_DIM else ()
    if op.over not in whole.dims or (half.dtype, half.dims, half.space) != (whole.dtype, dims, whole.space):
        found, expected = (f"{dtype}[{', '.join(of)}]" for dtype, of in ((half.dtype, half.dims), (whole.dtype, dims)))
        yield f"has halves of {found} over {op.over}; expected {expected}"


@PIPE_TYPES.of(tile.OrderedAdd)
def _ordered_add_errors(kernel: Kernel, op: tile.OrderedAdd) -> Iterator[str]:
    """An add of a tile in a stage is a TMA reduction: one warp issues it, then releases the semaphore and the tile."""
    ops = kernel.block_of(op).ops
    later = ops[ops.index(op) :]
    if not isinstance(kernel.op(op.value), pipe.ConsumerWait):
        return
    if op.semaphore is not None:
        tensor = op.semaphore.tensor
        releases = [o for o in only(kernel.ops(), pipe.SemaphoreRelease) if o.semaphore.tensor == tensor]
        if [o.semaphore for o in releases if o in later] != [op.semaphore] or len(releases) > 1:
            yield "has a semaphore, which is not released once after it, in the same block"
    if [o in later for o in only(kernel.ops(), pipe.ConsumerRelease) if o.value == op.value] != [True]:
        yield f"adds %{op.value}, which is not released once after that"
    warp_group = kernel.warp_group_of(op)
    if warp_group is None or warp_group.warps != 1:
        yield "is a TMA reduction of several warps, or of no warp group; expected a warp group of one warp"


@PIPE_TYPES.of(pipe.SchedulerBarrier)
def _scheduler_barrier_errors(kernel: Kernel, op: pipe.SchedulerBarrier) -> Iterator[str]:
    if op.do not in BARRIER_STEPS:
        yield f"does `{op.do}`; expected {', '.join(BARRIER_STEPS)}"
    warp_group = kernel.warp_group_of(op)
    if warp_group is None or warp_group.instances == 1 or not warp_group.rows:
        yield "is in a warp group of one instance; expected several, which split the rows of a tile"


@PIPE_TYPES.of(pipe.SemaphoreAcquire)
def _semaphore_acquire_errors(kernel: Kernel, op: pipe.SemaphoreAcquire) -> Iterator[str]:
    yield from semaphore_errors(kernel, op.semaphore, op.order)
    adds, acquires = (
        [o for o in kernel.ops() if isinstance(o, k) and o.semaphore and o.semaphore.tensor == op.semaphore.tensor]
        for k in (tile.OrderedAdd, pipe.SemaphoreAcquire)
    )
    later = kernel.block_of(op).ops
    after = [(o.semaphore, o.order) for o in adds if o in later[later.index(op) :]]
    if adds and (len(acquires) > 1 or after != [(op.semaphore, op.order)]):
        yield "is not the only acquire of the semaphore of an add after it, in the same block"


def warp_group_types(module: Module, kernel: Kernel) -> Iterator[str]:
    """Types agree as in all kernels. Ops on pipelines agree with the pipeline, and products in flight are only waited
    for or accumulated to."""
    yield from types(module, kernel)
    for op in kernel.ops():
        errors = PIPE_TYPES.functions.get(type(op))
        yield from (f"%{op.name}: {reason}" for reason in errors(kernel, op)) if errors else ()
        if any(t.space == "flight" for t in op.results().values()) and not isinstance(op, pipe.Wgmma):
            yield f"%{op.name}: is in flight, which only a wgmma is"
        if isinstance(op, (tile.Map, tile.Load)) and any(
            kernel.type_of(ref).space == "flight" for ref in op.operands()
        ):
            yield f"%{op.name}: computes with a product in flight; expected its wgmma_wait before"


PIPE_TYPES.complete(pipe.PIPE.own.values(), (pipe.ProducerTail, pipe.SemaphoreRelease, pipe.TmaStoreWait))
