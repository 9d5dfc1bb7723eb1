"""The views of a warp-specialized kernel as a whole: its pipelines, its warp groups and its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.targets.printing.views import Node, names_in


@dataclass
class PipelineView:
    """A pipeline: buffers in shared memory, and one mbarrier per stage that says when it is full.

    A named barrier, or an mbarrier that counts arrivals, says when a stage is free.
    """

    name: str
    stages: str
    shape: str  # of a buffer, which holds a tile or a piece of one
    descriptor: str
    buffers: str  # number of buffers, of all instances
    barriers: str  # number of mbarriers of each kind
    filled: bool  # TMA loads into it; False if it is only a staging buffer for stores
    numbers: str = ""  # shape of a buffer of scalars: tile coordinates, or one value per row
    of: str = "gl.int32"  # element type of these scalars
    emptied: bool = False  # instances store to it together, and its reader frees a stage by an mbarrier
    mbarrier_release: int = 0  # arrivals that free a stage; 0 if a named barrier does


@dataclass
class TileFunctionView:
    """A function that returns the place of a work tile and its scalars, in a kernel whose producer prefetches them.

    The first result is -1 if no tile has the number.
    """

    name: str
    params: list[str]  # after the tile's number
    tiles: list[str]  # constants that are among the parameters, after TILES
    nodes: list[Node]
    results: list[str]


@dataclass
class WarpGroupView:
    """A warp group, which is printed as a function of its own."""

    name: str
    instances: int
    warps: int
    registers: int
    params: list[str]
    tiles: list[str]
    prologue: list[str]
    nodes: list[Node]
    meets: bool  # its threads take part in the named barriers of reused stages
    constants: list[str]  # THREADS; and _WARP_GROUP, the number of the instance, if instances differ
    of_tile: TileFunctionView | None

    @property
    def words(self) -> set[str]:
        """Every word in its ops and in those of its function of a tile."""
        return names_in(self.nodes + (self.of_tile.nodes if self.of_tile else []))


@dataclass
class WarpSpecializedView:
    """A warp-specialized kernel as its template prints it."""

    name: str
    summary: str
    params: list[str]
    not_specialized: list[str]
    dropout: bool
    sums_input_gradients: bool
    prologue: list[str]
    nodes: list[Node]
    early: list[Node]  # loads that are issued before these nodes
    pipelines: list[PipelineView]
    warp_groups: list[WarpGroupView]
    words: set[str]  # every word in its source
    instances: int  # of the consumer
    dtype: str  # the Python expression for the tensors' element type
    ctas_per_sm: int
    persistent: bool  # programs fetch the numbers of their tiles from COUNTER, up to TILES
    # Tensors that TMA reads or writes: position among the parameters, rows per copy, and columns if not all.
    described: list[tuple[str, ...]]
