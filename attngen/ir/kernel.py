"""Kernels: a typed facade over a networkx graph of ops.

The graph's nodes are names of ops; its edges run from an operand to its users. Ops are in blocks: `entry`, one for each
loop body, and one for each warp group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import networkx as nx

from attngen.errors import VerifyError
from attngen.ir import pipe, tile
from attngen.ir.core import Access, Type
from attngen.ir.expr import Expr
from attngen.ir.grid import GridAxis, KVSplit
from attngen.ir.op import Block, Op, WarpGroup, only
from attngen.ir.traits import Traits


@cache
def _written_out(e: Expr, named: tuple[tuple[Expr, Expr], ...]) -> Expr:
    """Replace named scalars in an expression by the expressions that they stand for. Cached, because nested Min and Max
    are slow in sympy."""
    replacements = dict(named)
    for _ in named:  # a name may stand for an expression with other names, but never for itself
        e = e.xreplace(replacements) if replacements.keys() & e.free_symbols else e
    return e


@dataclass(frozen=True, eq=False)
class Kernel:
    """One GPU kernel: its launch grid and its ops, in blocks. The roles of its arguments say which tensors it reads
    (`in`), writes (`out`) and both (`inout`).

    axis: the axis, q or kv, along which each program owns one tile or, in the FlashAttention-1 loop order, visits all
    tiles.
    pack_gqa: the rows of a tile are the queries of all heads of a group, head after head. The scalar `queries` is their
    number in one head.
    about: a sentence about the kernel, printed above it.
    backend: the backend of a warp-specialized kernel; empty for other kernels (see Module.warp_specialized).
    ctas_per_sm: resident programs per SM of a warp-specialized kernel.
    of: the portable kernel that a warp-specialized one stands in for, if their names differ.
    kv_split: how the keys of sequences are split among this kernel's programs, whose grid then has the axis `KV_split`,
    or among those of the kernel whose splits it combines.
    launches_dependents: programs of the next launch may start while this kernel's programs run, on devices that support
    it (NVIDIA: programmatic dependent launch). They see what it stores after a GridDependencyWait.
    """

    name: str
    grid: tuple[GridAxis, ...]
    blocks: tuple[Block, ...]
    axis: str = ""
    pack_gqa: bool = False
    about: str = ""
    backend: str = ""
    ctas_per_sm: int = 1
    of: str = ""
    kv_split: KVSplit | None = None
    launches_dependents: bool = False

    @property
    def stands_for(self) -> str:
        """The name of the kernel that a warp-specialized one stands in for; for other kernels their own name."""
        return self.of or self.name

    @cached_property
    def traits(self) -> Traits:
        """The facts about this kernel."""
        return Traits(self)

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """The ops by name, with edges operand -> user. Raises VerifyError for a name that is defined twice or never."""
        graph: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for block in self.blocks:
            for op in block.ops:
                if op.name in graph:
                    raise VerifyError("defined-once", f"%{op.name} is defined twice in @{self.name}", "")
                graph.add_node(op.name, op=op, block=block.name, order=len(graph))
        for block in self.blocks:
            for op in block.ops:
                for ref in op.operands():
                    source = ref.split(".")[0]
                    if source not in graph:
                        raise VerifyError(
                            "defined", f"%{op.name} in @{self.name} reads %{ref}, which nothing defines", ""
                        )
                    graph.add_edge(source, op.name)
        return graph

    def op(self, ref: str) -> Op:
        """The op that defines a value."""
        op: Op = self.graph.nodes[ref.split(".")[0]]["op"]
        return op

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def walk(self, block: str) -> list[Op]:
        """The block's ops in the order written, but each after its operands."""
        inside = self.graph.subgraph(op.name for op in self.block(block).ops)
        order = nx.lexicographical_topological_sort(inside, key=lambda n: inside.nodes[n]["order"])
        return [self.graph.nodes[name]["op"] for name in order]

    def ops(self) -> Iterable[Op]:
        return (op for block in self.blocks for op in block.ops)

    def type_of(self, ref: str) -> Type:
        """The type of a value. A field of a loop has the type of its initial value."""
        op, field = self.op(ref), ref.partition(".")[2]
        if isinstance(op, (tile.Loop, pipe.PipelinedLoop)):
            return self.type_of(dict(op.carry)[field])
        return op.results()[field]

    def resolve(self, e: Expr) -> Expr:
        """An expression with the kernel's named integer scalars written out."""
        return _written_out(e, self.traits.named)

    def accessed(self, at: Access | Op) -> tuple[Op, tuple[Expr, ...]]:
        """The argument that an access refers to, or that an op reads or writes, and all indices. With a `base`, its
        indices come first."""
        access: Access = at if isinstance(at, Access) else at.dst if isinstance(at, tile.Store) else at.src  # type: ignore[attr-defined]
        source = self.op(access.tensor)
        if isinstance(source, tile.Base):
            return self.op(source.src.tensor), source.src.index + access.index
        return source, access.index

    def loops_around(self, block: str) -> list[tile.Loop]:
        """The loops around a block, from the innermost out. If several loops share a body, the first of them."""
        found = []
        while loop := next((loop for loop in self.loops if loop.body == block), None):
            found.append(loop)
            block = self.graph.nodes[loop.name]["block"]
        return found

    def within(self, block: str) -> Iterator[Op]:
        """The ops of a block and of the bodies that they run."""
        for op in self.block(block).ops:
            yield op
            for body in pipe.bodies_of(op):
                yield from self.within(body)

    @cached_property
    def warp_groups(self) -> tuple[Block, ...]:
        """The blocks of warp groups, in the order written."""
        return tuple(block for block in self.blocks if block.warp_group)

    def block_of(self, op: Op) -> Block:
        return self.block(self.graph.nodes[op.name]["block"])

    def warp_group_of(self, op: Op) -> WarpGroup | None:
        """The warp group that runs an op; None for ops before the warp groups."""
        return next(
            (block.warp_group for block in self.warp_groups if any(o is op for o in self.within(block.name))), None
        )

    @cached_property
    def args(self) -> list[tile.Arg]:
        return list(only(self.block("entry").ops, tile.Arg))

    @cached_property
    def loops(self) -> list[tile.Loop]:
        return list(only(self.ops(), tile.Loop))

    @cached_property
    def program_axis(self) -> str:
        """The axis, q or kv, along which a program owns one tile at a time: `axis`, or else the axis of the grid or of
        the loop of class `all`."""
        return self.axis or self.traits.tiled_axis

    @property
    def loop_axis(self) -> str:
        """The other axis, over whose tiles its loops run."""
        return "kv" if self.program_axis == "q" else "q"

    def rewrite(self, change: Callable[[str, Op], Iterable[Op]]) -> Kernel:
        """A kernel with every op replaced by the ops that change(block name, op) returns; the same object if nothing
        changes."""
        blocks = tuple(replace(b, ops=tuple(n for op in b.ops for n in change(b.name, op))) for b in self.blocks)
        return self if blocks == self.blocks else replace(self, blocks=blocks)
