"""Facts about a kernel, such as which tensors it stores to, and whether it is persistent."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attngen.ir import pipe, tile
from attngen.ir.core import Access
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, MEMBER, SPLIT_DIM, first_row
from attngen.ir.expr import Expr, floordiv, symbol
from attngen.ir.grid import REVERSED_GROUP, SPLIT_SYMBOLS, GridAxis
from attngen.ir.names import CALL_ROWS, START_RANKS, STARTS, block_lists
from attngen.ir.op import Op, WarpGroup, only

if TYPE_CHECKING:
    from attngen.ir.kernel import Kernel


class Traits:
    """The facts about one kernel. Each is computed once, when it is first asked for: `kernel.traits.is_persistent`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @cached_property
    def named(self) -> tuple[tuple[Expr, Expr], ...]:
        """The kernel's named integer scalars, each with its expression; for a position in a block list, the tile at
        that position."""
        scalars = (
            op
            for op in only(self.kernel.ops(), tile.Map, tile.ListPosition)
            if op.type.dtype == "i32" and not op.type.dims
        )
        return tuple((symbol(op.name), op.tile if isinstance(op, tile.ListPosition) else op.expr) for op in scalars)

    def wait_of(self, ref: str) -> pipe.ConsumerWait | None:
        """The consumer_wait of a tile in a pipeline, also through rematerialize and slice_rows; else None."""
        op = self.kernel.op(ref)
        while isinstance(op, (pipe.Rematerialize, pipe.SliceRows)):
            op = self.kernel.op(op.value)
        return op if isinstance(op, pipe.ConsumerWait) else None

    def ranked_axis(self, op: tile.ListPosition) -> str:
        """The axis of the tile whose position in a block list an op computes."""
        row = self.kernel.op(op.src)
        if isinstance(row, tile.Arg):
            return next(axis for axis, (name, _) in START_RANKS.items() if name == row.name)
        return "kv" if isinstance(row, tile.Base) and row.src.tensor in block_lists("q", True) else "q"

    @cached_property
    def places(self) -> bool:
        """True if calls say where their rows lie, and the kernel computes with positions in the whole sequence."""
        return any(arg.name in (name for name, _ in STARTS.values()) for arg in self.kernel.args)

    def extent(self, axis: str) -> str:
        """The name of the number of rows along an axis that a call has."""
        return CALL_ROWS[AXIS_EXTENT[axis]] if self.places and axis in STARTS else AXIS_EXTENT[axis]

    def has_call_rows(self, access: Access, at: int) -> bool:
        """True if a dimension of an access counts the rows of a call that has chunks of a sequence."""
        tensor, index = self.kernel.accessed(access)
        assert isinstance(tensor, tile.Arg)
        return tensor.type.dims[len(index) - len(access.index) + at] in CALL_ROWS.values()

    def first_row(self, access: Access, at: int, axis: str) -> str:
        """The name of the first row of the current tile of an axis, in a dimension of an access."""
        return first_row(axis, self.has_call_rows(access, at))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names in expressions that are not values: variables of loops and of the grid, and letters of axes."""
        flags = {REVERSED_GROUP for axis in self.kernel.grid if axis.reversed_group} | (
            {MEMBER} if self.takes_heads else set()
        )
        flags |= {*SPLIT_SYMBOLS} if self.kernel.kv_split else set()
        return frozenset(
            {loop.var for loop in self.kernel.loops} | {axis.var for axis in self.kernel.grid} | flags | set(AXIS_DIM)
        )

    def scalars_of(self, op: Op) -> set[str]:
        """The scalars in an op's expressions that are not among its operands, such as bounds of loops."""
        named = op.symbols - {symbol for symbol, _ in getattr(op, "uses", ())} - self.variables
        return {name for name in named if name in self.kernel.graph}

    def only_known(self, op: Op) -> bool:
        """True if the op is a load that no op reads. Only facts of masks name it, and it is not printed."""
        return isinstance(op, (tile.Gather, tile.Load)) and not self.kernel.graph.out_degree(op.name)

    @cached_property
    def sharing_warp_group(self) -> WarpGroup:
        """The warp group whose instances share the rows of the program's tile."""
        return next(block.warp_group for block in self.kernel.warp_groups if block.warp_group and block.warp_group.rows)

    @cached_property
    def waits(self) -> bool:
        """True if programs may start before the previous launch has ended, and wait for that end."""
        return any(only(self.kernel.ops(), tile.GridDependencyWait))

    @property
    def overlaps(self) -> bool:
        """True if programs may run concurrently with those of the previous or of the next launch."""
        return self.kernel.launches_dependents or self.waits

    @cached_property
    def combines_splits(self) -> bool:
        return any(loop.var == "KV_splits" for loop in self.kernel.loops)

    @cached_property
    def dots(self) -> tuple[tile.Dot, ...]:
        """Its matrix products, in the order written."""
        return tuple(only(self.kernel.ops(), tile.Dot))

    @cached_property
    def storing(self) -> frozenset[str]:
        """The blocks that store something, directly or in a loop inside."""
        found = {block.name for block in self.kernel.blocks if any(only(block.ops, tile.Scatter, tile.Store))}
        for loop in reversed(self.kernel.loops):
            found |= {self.kernel.graph.nodes[loop.name]["block"]} if loop.body in found else set()
        return frozenset(found)

    @cached_property
    def stored(self) -> frozenset[str]:
        """The tensors that the kernel stores to."""
        return frozenset(self.kernel.accessed(op)[0].name for op in only(self.kernel.ops(), tile.Store))

    @cached_property
    def rewriting(self) -> frozenset[str]:
        """The blocks in which a tensor is both loaded and stored."""
        arg = {op.name: op.src.tensor if isinstance(op, tile.Base) else op.name for op in self.kernel.ops()}
        found = set()
        for block in self.kernel.blocks:
            loaded = {arg[op.src.tensor] for op in only(block.ops, tile.Load)}
            found |= {block.name for op in only(block.ops, tile.Store) if arg[op.dst.tensor] in loaded}
        return frozenset(found)

    @cached_property
    def adds_in_order(self) -> bool:
        """True if programs add to a tensor in order. Such a kernel runs only warp-specialized, because TMA does the
        additions."""
        return any(op.kind in ("ordered_add", "wait_semaphore") for op in self.kernel.ops())

    @cached_property
    def split_d_axis(self) -> GridAxis | None:
        """The axis of the grid along which programs split the head_dim of a sum; None if each program has all of it."""
        return next((axis for axis in self.kernel.grid if axis.var in SPLIT_DIM), None)

    @cached_property
    def takes_heads(self) -> bool:
        """True if programs process several query heads of a group one after another."""
        return any(op.heads for op in only(self.kernel.ops(), tile.Loop, pipe.PipelinedLoop))

    @cached_property
    def is_lowered(self) -> bool:
        """True if lower-pipelines has replaced the kernel's pipelines by buffers and barriers."""
        return any(op.kind == "alloc_shared" for op in self.kernel.ops())

    @cached_property
    def is_persistent(self) -> bool:
        return any(only(self.kernel.ops(), pipe.WorkLoop))

    @cached_property
    def round_robin(self) -> frozenset[str]:
        """The pipelines by whose stages instances of a warp group split the iterations of a loop."""
        return frozenset(op.round_robin for op in only(self.kernel.ops(), pipe.PipelinedLoop) if op.round_robin)

    @cached_property
    def of_heads(self) -> tile.Loop | None:
        """The loop over the query heads of a group around the loops over tiles, or None."""
        return next((loop for loop in self.kernel.loops if loop.var == MEMBER), None)

    @cached_property
    def has_groups(self) -> bool:
        """True if programs have a K/V head and loop over query heads of its group."""
        return any(MEMBER in loop.variables for loop in self.kernel.loops)

    @cached_property
    def has_dropout(self) -> bool:
        return any(only(self.kernel.ops(), tile.DropoutMask))

    @cached_property
    def of_entropy(self) -> bool:
        """True if the kernel computes entropies of queries, or gradients from these."""
        return not {"ENTROPY", "DENTROPY2"}.isdisjoint(arg.name for arg in self.kernel.args)

    @cached_property
    def normalises(self) -> bool:
        """True if the kernel keeps the running maximum of the softmax."""
        return any(only(self.kernel.ops(), tile.SoftmaxStep))

    @property
    def reads_cache(self) -> bool:
        """True if the keys are in a cache, in which each sequence has its own number of keys."""
        return any(only(self.kernel.ops(), tile.CacheLength))

    def zeroes_past_end(self, op: tile.Load | tile.Map) -> bool:
        """True if the rows of a tile past the end of the sequence in a cache are set to zero, because they are summed
        with others. If a tile is dequantised from 8-bit numbers and scales, its own rows are set to zero, not those of
        its operands."""
        if not self.reads_cache or op.type.dims[:1] != ("BLOCK_KV",):
            return False
        summed = [dot for dot in self.dots if dot.over == "BLOCK_KV"]
        if isinstance(op, tile.Map):
            return any(op.name == dot.b for dot in summed) and any(
                isinstance(self.kernel.op(ref), tile.Interleave) for ref in op.operands()
            )
        return (
            any(self.multiplies(dot, op) and not isinstance(self.kernel.op(dot.b), tile.Map) for dot in summed)
            and "kv" in op.src.axes()
        )

    def multiplies(self, dot: tile.Dot, op: Op) -> bool:
        """True if a product has a value as an operand: directly, through the numbers of its 8-bit pairs, or as a scale
        of these."""
        return any(op.name in self._sources(ref) for ref in (dot.a, dot.b))

    def _sources(self, ref: str) -> set[str]:
        op = self.kernel.op(ref)
        if isinstance(op, tile.Deinterleave):
            return {op.value.split(".")[0] if self.kernel.type_of(op.value).quantised else op.name}
        if isinstance(op, tile.Interleave):
            return self._sources(op.a)
        if isinstance(op, tile.Map) and any(isinstance(self.kernel.op(used), tile.Interleave) for _, used in op.uses):
            return set().union(*(self._sources(used) for _, used in op.uses))
        return {op.name}

    @cached_property
    def tile_page(self) -> int:
        """The keys of a page, if it reads one page number per tile, so that tiles must divide pages; else 0."""
        found = (
            op for op in only(self.kernel.ops(), tile.Gather) if op.src.tensor == "PAGE_TABLE" and not op.type.dims
        )
        return next((int(e.args[1]) for op in found for e in op.src.index if isinstance(e, floordiv)), 0)

    @cached_property
    def reads_quantised(self) -> bool:
        return any(op.type.quantised for op in only(self.kernel.ops(), tile.Load))

    @property
    def rotates(self) -> bool:
        """True if q and k have two tensors each: columns of the latent, and rotated columns."""
        return any(arg.name == "K_ROPE" for arg in self.kernel.args)

    @cached_property
    def reads_pairs(self) -> bool:
        """True if the mask or a modifier reads an element for each score."""
        return bool(self.of_pairs)

    @cached_property
    def looks_up(self) -> bool:
        """True if all elements that are read for each score are gathered from tables at computed indices."""
        return self.reads_pairs and all(isinstance(op, tile.Gather) for op in self.of_pairs)

    @cached_property
    def of_pairs(self) -> list[tile.Gather | tile.Load]:
        """The loads and gathers of one element for each score."""
        return [
            op for op in only(self.kernel.ops(), tile.Gather, tile.Load) if set(op.type.dims) == {"BLOCK_Q", "BLOCK_KV"}
        ]

    @cached_property
    def writes(self) -> frozenset[str]:
        """The tensors that it only writes."""
        return frozenset(arg.name for arg in self.kernel.args if arg.role == "out")

    @property
    def counts_pairs(self) -> bool:
        """True if the kernel evaluates a data-dependent mask ahead of the other kernels, and counts the visible pairs
        of each block."""
        return "COUNT" in self.writes

    @cached_property
    def prepares(self) -> bool:
        """True if the kernel computes tensors for other kernels from a call's integers: all of its arguments are
        integers."""
        return all(arg.type.dtype == "i32" for arg in self.kernel.args)

    @property
    def visits_all_tiles(self) -> bool:
        """True if each program visits all tiles of the program axis (the FlashAttention-1 loop order). In other kernels
        the grid gives each program one tile."""
        return self.kernel.grid[0].var not in AXIS_EXTENT

    @cached_property
    def tiled_axis(self) -> str:
        """The axis along which the grid, or a loop of class `all`, has tiles; empty if there is none. If there are two
        such axes, it is `axis`."""
        axes = [self.kernel.grid[0].var, *(loop.var for loop in self.kernel.loops if loop.cls == "all")]
        found = [axis for axis in axes if axis in AXIS_EXTENT]
        return self.kernel.axis if self.kernel.axis in found else next(iter(found), "")
