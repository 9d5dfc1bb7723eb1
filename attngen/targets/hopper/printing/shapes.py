"""Shapes of a warp-specialized kernel's tiles: in shared memory, in registers, and in the parts of instances."""

from __future__ import annotations

from attngen.ir import AXIS_DIM, SIDES, Module, Op, Type, only, pipe, tile
from attngen.targets.hopper.configs.barriers import stored_pipelines
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.head_dims import part_of, piece_of, pieces
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.targets.hopper.printing.exchange_views import HALF, ExchangeContext, side_of
from attngen.targets.printing.context import KernelContext


class ShapeContext(ExchangeContext):
    """Shapes of one kernel's tiles, and the variables and buffers of their pieces."""

    def __init__(self, module: Module, name: str) -> None:
        warp_specialized = next(kernel for kernel in module.warp_specialized if kernel.name == name)
        self.pipelines = {op.name: op for op in only(warp_specialized.ops(), pipe.Pipeline)}
        self.shared = stored_pipelines(warp_specialized)
        self.own, self.loop, self.reversed_group = (
            warp_specialized.program_axis,
            warp_specialized.loop_axis,
            warp_specialized.grid[0].reversed_group,
        )
        super().__init__(module, warp_specialized)
        self.portable = KernelContext(module, module.kernel(warp_specialized.stands_for))
        # With score modifiers, ptxas would move their arithmetic up past the wait for P V, if nothing stood there.
        self.modifies = any(set(op.type.dims) == SCORE_DIMS for op in only(warp_specialized.ops(), tile.Map))

    def _part(self, op: tile.OrderedAdd) -> tuple[str, str]:
        """Rows and columns of the part of a tile that one consumer instance stores; the rows may be a symbol."""
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        stored = next(o for o in only(self.kernel.ops(), pipe.ProducerStore) if o.pipeline == wait.pipeline)
        dims = self.kernel.type_of(stored.value).dims
        return self._dims(dims)[0], str(self.pipelines[wait.pipeline].columns or self._columns(dims[1]))

    def _part_of(self, pipeline: pipe.Pipeline) -> str:
        """Columns of a pipeline's buffers where they differ from the tensor's; else empty text.

        A buffer of scores has as many keys per consumer instance as the instance has rows.
        """
        if side_of(pipeline.type.dims):
            return str(self.module.head_dim_v // 2)
        return str(ROWS) if set(pipeline.type.dims) == SCORE_DIMS else part_of(pipeline)

    def _tiles_of(self, pipeline: pipe.Pipeline) -> int:
        """Buffers of a tile that the copy engine reads: one per consumer instance, or one per piece."""
        return pieces(self.module, pipeline) if pipeline.columns else self.kernel.traits.sharing_warp_group.instances

    def _times(self, pipeline: pipe.Pipeline, count: str) -> str:
        """The number of buffers that `count` tiles of a pipeline take: a tile has one buffer per piece."""
        n = pieces(self.module, pipeline)
        return f"{n} * {f'({count})' if ' ' in count else count}" if n > 1 else count

    def _shape(self, pipeline: pipe.Pipeline) -> str:
        """Shape of a buffer, which holds a tile or a piece of one."""
        rows, columns = self._dims(pipeline.type.dims, bool(pipeline.per_instance))
        return f"{rows}, {part_of(pipeline) or columns}"

    def _stages(self, pipeline: pipe.Pipeline) -> str:
        return self.scalar(pipeline.stages).replace("num_stages", "STAGES")

    def _dims(self, dims: tuple[str, ...], each: bool = True) -> list[str]:
        whole = {whole: own for own, whole in pipe.TILE_DIM.items()}
        parts = {
            pipe.SLICE_DIM["BLOCK_Q"]: str(ROWS),
            pipe.SLICE_DIM["D_QK"]: str(self._columns(pipe.SLICE_DIM["D_QK"])),
        }
        parts |= dict.fromkeys(SIDES.values(), HALF)
        return ["ROWS" if d == AXIS_DIM[self.own] and each else whole.get(d, parts.get(d, d)) for d in dims]

    def _columns(self, dim: str) -> int:
        """Columns of a tile of dQ sums, or of the part that one consumer instance has."""
        return self.module.head_dim_qk // (
            self.kernel.traits.sharing_warp_group.instances if dim == pipe.SLICE_DIM["D_QK"] else 1
        )

    def _widths(self, type_: Type) -> list[int]:
        """Columns of each piece of an accumulator in registers, cut as its tile in shared memory is; [] if uncut.

        The part of dQ that a consumer instance has is one whole piece and its share of a piece between instances.
        """
        piece, dim = piece_of(self.module.head_dim_qk), type_.dims[-1] if type_.dims else ""
        if not piece or dim not in ("D_QK", pipe.SLICE_DIM["D_QK"]):
            return []
        whole, rest = divmod(self._columns(dim), piece)
        return [piece] * whole + [rest] * bool(rest)

    def _parts(self, ref: str) -> list[str]:
        """The variables of a value in registers: one per piece."""
        var, n = self.var(ref), len(self._widths(self.kernel.type_of(ref)))
        return [f"{var}_{i}" for i in range(n)] or [var]

    def _output(self) -> str:
        """The first tensor of the element type: an output, or an input if outputs have another type."""
        return next(
            a.name for role in ("out", "in") for a in self.kernel.args if a.role == role and a.type.dtype == "T"
        )

    def _tile_vars(self, ref: str) -> list[str]:
        """The variables of a tile in shared memory: one per piece."""
        wait, var = self.kernel.traits.wait_of(ref), self.var(ref)
        n = pieces(self.module, self.pipelines[wait.pipeline]) if wait else 1
        return [f"{var}_{i}" for i in range(n)] if n > 1 else [var]

    def _tiles_at(self, ref: str, pipeline: pipe.Pipeline, at: str) -> list[tuple[str, str]]:
        """The variables of a tile's pieces, each with the number of its buffer; `at` is the tile's index in the
        pipeline."""
        first = self._times(pipeline, at)
        return [(var, f"{first} + {i}" if i else first) for i, var in enumerate(self._tile_vars(ref))]

    def _warps(self, op: Op) -> int:
        """The number of warps of the warp group that an op belongs to."""
        warp_group = self.kernel.warp_group_of(op)
        assert warp_group is not None
        return warp_group.warps
