"""The views of a warp-specialized kernel as a whole: its pipelines, its warp groups and its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.targets.printing.views import Node, names_in


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
    warp_groups: list[WarpGroupView]
    words: set[str]  # every word in its source
    instances: int  # of the consumer
    ctas_per_sm: int
    persistent: bool  # programs fetch the numbers of their tiles from COUNTER, up to TILES
    # Tensors that TMA reads or writes: position among the parameters, rows per copy, and columns if not all.
    described: list[tuple[str, ...]]
