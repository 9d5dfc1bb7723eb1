"""Shapes of a warp-specialized kernel's tiles: in shared memory, in registers, and in the parts of instances."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from attngen.ir import AXIS_DIM, SIDES, Expr, Kernel, Module, Type, only, pipe, symbol, tile
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.head_dims import part_of, piece_of, pieces
from attngen.targets.hopper.configs.sm90 import ROWS

HALF = "HALF_V"  # name of the generated constant for half of the latent's columns


def sized(dim: str) -> Expr:
    """The size of a dimension, which is a name or a number."""
    return sympy.Integer(dim) if dim.isdigit() else symbol(dim)


def side_of(dims: tuple[str, ...]) -> str:
    """The index letter of the half of V's columns that a tile has; empty text if it has all."""
    return next((side for side, dim in SIDES.items() if dim in dims), "")


def rematerializes_address(pipeline: pipe.Pipeline) -> bool:
    """True if each wait recomputes the tile's address. The tile is half of the latent's columns, or the rotated columns
    that go with them."""
    return bool({*pipeline.type.dims} & {*SIDES.values(), "D_ROPE"})


class Shapes:
    """The shapes of one kernel's tiles."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.pipelines = {op.name: op for op in only(kernel.ops(), pipe.Pipeline)}

    def dims(self, dims: Iterable[str], each: bool = True) -> tuple[Expr, ...]:
        """The sizes of dimensions; `each`: the program's rows are those of an instance."""
        own = AXIS_DIM[self.kernel.program_axis]
        names = {whole: part for part, whole in pipe.TILE_DIM.items()} | dict.fromkeys(SIDES.values(), HALF)
        names |= {
            pipe.SLICE_DIM["BLOCK_Q"]: str(ROWS),
            pipe.SLICE_DIM["D_QK"]: str(self.columns(pipe.SLICE_DIM["D_QK"])),
        }
        return tuple(sized("ROWS" if d == own and each else names.get(d, d)) for d in dims)

    def shape(self, pipeline: pipe.Pipeline) -> tuple[Expr, Expr]:
        """Shape of a buffer, which holds a tile or a piece of one."""
        rows, columns = self.dims(pipeline.type.dims, bool(pipeline.per_instance))
        part = part_of(pipeline)
        return rows, sized(part) if part else columns

    def columns(self, dim: str) -> int:
        """Columns of a tile of dQ sums, or of the part that one consumer instance has."""
        shared = dim == pipe.SLICE_DIM["D_QK"]
        return self.module.head_dim_qk // (self.kernel.traits.sharing_warp_group.instances if shared else 1)

    def widths(self, type_: Type) -> list[int]:
        """Columns of each piece of an accumulator in registers, cut as its tile in shared memory is; [] if uncut.

        The part of dQ that a consumer instance has is one whole piece and its share of a piece between instances.
        """
        piece, dim = piece_of(self.module.head_dim_qk), type_.dims[-1] if type_.dims else ""
        if not piece or dim not in ("D_QK", pipe.SLICE_DIM["D_QK"]):
            return []
        whole, rest = divmod(self.columns(dim), piece)
        return [piece] * whole + [rest] * bool(rest)

    def part(self, add: tile.OrderedAdd) -> tuple[Expr, Expr]:
        """Rows and columns of the part of a tile that one consumer instance stores."""
        wait = self.kernel.op(add.value)
        assert isinstance(wait, pipe.ConsumerWait)
        stored = next(o for o in only(self.kernel.ops(), pipe.ProducerStore) if o.pipeline == wait.pipeline)
        dims = self.kernel.type_of(stored.value).dims
        return self.dims(dims)[0], sympy.Integer(self.pipelines[wait.pipeline].columns or self.columns(dims[1]))

    def part_of(self, pipeline: pipe.Pipeline) -> str:
        """Columns of a pipeline's buffers where they differ from the tensor's; else empty text.

        A buffer of scores has as many keys per consumer instance as the instance has rows.
        """
        if side_of(pipeline.type.dims):
            return str(self.module.head_dim_v // 2)
        return str(ROWS) if set(pipeline.type.dims) == SCORE_DIMS else part_of(pipeline)

    def tiles_of(self, pipeline: pipe.Pipeline) -> int:
        """Buffers of a tile that TMA reads: one per consumer instance, or one per piece."""
        return pieces(self.module, pipeline) if pipeline.columns else self.kernel.traits.sharing_warp_group.instances

    def is_of_rows(self, pipeline: str) -> bool:
        """True if a pipeline passes one number per row from one warp group to another."""
        return len(self.pipelines[pipeline].type.dims) == 1 and not self.pipelines[pipeline].metadata_of
