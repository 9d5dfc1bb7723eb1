"""What the templates see of a divided kernel as a whole: its rings, its roles, and what it is called with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.targets.printing.views import Node


@dataclass
class PipelineView:
    """A ring: buffers, and barriers of full slots. Slots are free by named barriers, or by barriers that count
    arrivals."""

    name: str
    stages: str
    shape: str  # of a buffer: a tile, or a piece of one
    descriptor: str
    buffers: str  # of all copies
    barriers: str
    filled: bool  # or only stored from
    numbers: str = ""  # how many, of a ring of places or of numbers of keys
    of: str = "gl.int32"  # their type
    emptied: bool = False  # copies share what is in it, and who takes it says by a barrier when a slot is free
    mbarrier_release: int = 0  # arrivals that free a slot, where its barriers count them


@dataclass
class WarpGroupView:
    """A role as a function of its own."""

    name: str
    instances: int
    warps: int
    registers: int
    params: list[str]
    tiles: list[str]
    prologue: list[str]
    nodes: list[Node]
    meets: bool  # at the barriers of slots that are filled again
    constants: list[str]  # THREADS, and the number of the copy where it has rows of its own


@dataclass
class WarpSpecializedView:
    """A divided kernel as its template prints it."""

    name: str
    summary: str
    params: list[str]
    not_specialized: list[str]
    dropout: bool
    learns: bool
    prologue: list[str]
    nodes: list[Node]
    pipelines: list[PipelineView]
    warp_groups: list[WarpGroupView]
    words: set[str]  # that occur in it
    instances: int  # of the role whose rows are the program's
    dtype: str  # the Python expression for the tensors' element type
    ctas_per_sm: int  # programs that share a multiprocessor
    stays: bool  # programs take tile after tile, whose numbers they draw from COUNTER, up to TILES
    # of the tensors that the copy engine reads and writes: position, rows, and of parts columns too, of what it copies
    # at once
    described: list[tuple[str, ...]]
