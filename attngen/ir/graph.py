"""Kernels and modules: a typed facade over one networkx graph per kernel.

The graph's nodes are names of ops; its edges run from an operand to its users. Ops stand in blocks: `entry`, and one
for each loop body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import networkx as nx
import sympy

from attngen.errors import VerifyError
from attngen.heuristics import CTAS_PER_SM, PACKED, WAVES
from attngen.ir.dtypes import LATENT_GROUP
from attngen.ir.expr import Bool, Expr, floordiv, select, symbol
from attngen.ir.host import Host
from attngen.ir.names import DIRECTIONS, FLAT, LSE, OF_KEYS, OUTPUTS, SUMS, block_lists
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    MEMBER,
    OWN,
    Access,
    Arg,
    Base,
    Block,
    CacheLength,
    CountTiles,
    Deinterleave,
    Dot,
    DropoutMask,
    Fact,
    Gather,
    GridDependencyWait,
    Interleave,
    ListPosition,
    Load,
    Loop,
    Map,
    Op,
    OrderedAdd,
    Scatter,
    SoftmaxStep,
    Store,
    Type,
    WarpGroup,
)
from attngen.ir.pipe import ConsumerWait, PipelinedLoop, Rematerialize, SliceRows, WorkLoop, bodies_of

REVERSED_GROUP = "mirrored"  # what programs know it by whether their heads go the other way round (see GridAxis)
PHASES = ("logical", "scheduled", "target")
DEFAULT_BACKEND = "triton"  # of attngen/targets


@dataclass(frozen=True)
class GridAxis:
    """One axis of the launch grid. Programs are numbered along it; the first axis runs fastest. `descending` starts
    with the last tile.

    abreast: heads, counted over all sequences, are taken in groups of this many. In a group, programs run tile by tile:
    first one tile of every head, then the next tile of every head. So long tiles start early, and the last to run are
    short.
    together: as many heads as have so many rows together, one at least; with `swizzle`, of more than one, no more than
    these.
    mirrored: the last of these groups of heads, which may be all of them, goes the other way round: it starts with the
    other end's tile, and loops over tiles in their order go backwards. Programs know it by `reversed_group`, which is 1
    in that group and 0 elsewhere.
    """

    var: str
    extent: Expr
    reversed: bool = False
    swizzle: int = 1
    swizzle_rows: int = 0
    reversed_group: bool = False

    @property
    def heads(self) -> Expr:
        """How many heads are taken together."""
        most = sympy.Integer(self.swizzle)
        if not self.swizzle_rows:
            return most
        fits = floordiv(sympy.Integer(self.swizzle_rows), symbol(AXIS_EXTENT[self.var]))
        return sympy.Max(1, fits if most == 1 else sympy.Min(most, fits))


@dataclass(frozen=True)
class KVSplit:
    """How the keys of all sequences in a cache are dealt among programs: a sequence has cdiv(work, each) parts (see
    ir/split_kv.py).

    work: units of work of a sequence, in terms of `Nk`, its number of keys, of what is the same for all sequences, and
    of `reads`.
    each: units of a part, at most; 0: as many as make the parts of all sequences keep the device busy, and no more than
    `items`.
    resident: programs that a multiprocessor has at a time.
    waves: parts, at most, for each program that the device has at a time.
    ctas_per_sm_packed: `ctas_per_sm` where there are PACKED rows of queries at most; 0 where it is the same.
    reads: numbers that `work` names, and the elements that they are, each of sequence `b`.

    Programs know `parts`, the number of those of their sequence, and `first_item`, of those of all sequences before it.
    """

    work: Expr
    each: int = 0
    ctas_per_sm: int = CTAS_PER_SM
    waves: int = WAVES
    ctas_per_sm_packed: int = 0
    reads: tuple[tuple[str, Access], ...] = ()

    @property
    def programs(self) -> Expr:
        """How many programs a multiprocessor has at a time, in terms of `Gq`, the rows of queries."""
        most = sympy.Integer(self.ctas_per_sm)
        return (
            select(symbol("Gq") <= PACKED, sympy.Integer(self.ctas_per_sm_packed), most)
            if self.ctas_per_sm_packed
            else most
        )

    def ctas_per_sm_for(self, rows: int | None) -> int:
        """The same for a schedule row that is for so many rows, at most; None: for any number."""
        return (
            self.ctas_per_sm_packed
            if self.ctas_per_sm_packed and rows is not None and rows <= PACKED
            else self.ctas_per_sm
        )


SPLIT_SYMBOLS = ("parts", "first_item")  # what programs know of it


@cache
def _written_out(e: Expr, named: tuple[tuple[Expr, Expr], ...]) -> Expr:
    """An expression with named scalars replaced by what they stand for. Cached, because nested Min and Max are slow
    in sympy."""
    replacements = dict(named)
    for _ in named:  # a name may stand for an expression with other names, but never for itself
        e = e.xreplace(replacements) if replacements.keys() & e.free_symbols else e
    return e


@dataclass(frozen=True, eq=False)
class Kernel:
    """One GPU kernel: its launch grid and its ops, in blocks. The ops are also a graph.

    axis: the axis, q or kv, of whose tiles each program owns one or, walking, all.
    pack_gqa: the rows of a tile are the queries of all heads of a group, head after head. The scalar `queries` is their
    number in one head.
    about: a sentence about the kernel, printed above it.
    backend: of a divided kernel, the backend whose it is (see Module.divided).
    resident: of a divided kernel, the programs that share a multiprocessor.
    of: of a divided kernel that has a name of its own, the kernel that it stands in for.
    deal: how the keys of sequences are dealt among programs, whose grid then has the axis `part`, or among those of
    another kernel.
    launches_dependents: when its programs run, those of the next launch may start beside them, on devices that can
    (NVIDIA: programmatic dependent launch). They see what it stores once they have waited for its end (WaitForGrid).

    Its arguments say what it reads (`in`), writes (`out`) and rewrites (`inout`).
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
        """The kernel of the module that a divided one stands in for; of others, its own name."""
        return self.of or self.name

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
        """The type of a value. A field of a loop has the type of the value that it starts from."""
        op, field = self.op(ref), ref.partition(".")[2]
        if isinstance(op, (Loop, PipelinedLoop)):
            return self.type_of(dict(op.carry)[field])
        return op.results()[field]

    @cached_property
    def named(self) -> tuple[tuple[Expr, Expr], ...]:
        """The kernel's named integer scalars, each with its expression. For a position, that is the tile from which
        it was made."""
        scalars = (
            op
            for op in self.ops()
            if isinstance(op, (Map, ListPosition)) and op.type.dtype == "i32" and not op.type.dims
        )
        return tuple((symbol(op.name), op.tile if isinstance(op, ListPosition) else op.expr) for op in scalars)

    def resolve(self, e: Expr) -> Expr:
        """An expression with the named integer scalars of the kernel written out."""
        return _written_out(e, self.named)

    def accessed(self, op: Base | CountTiles | CacheLength | Load | Store) -> tuple[Op, tuple[Expr, ...]]:
        """The argument that an access reads or writes, and all indices: first those of its `base`, if it goes
        through one."""
        return self.through(op.dst if isinstance(op, Store) else op.src)

    def through(self, access: Access) -> tuple[Op, tuple[Expr, ...]]:
        """The argument at which an access is, and all indices: first those of its `base`, if it goes through one."""
        source = self.op(access.tensor)
        if isinstance(source, Base):
            return self.op(source.src.tensor), source.src.index + access.index
        return source, access.index

    def take_of(self, ref: str) -> ConsumerWait | None:
        """The op that takes a tile from a ring: of the tile, of it at another address, or of a copy's own rows; None
        for other values."""
        op = self.op(ref)
        while isinstance(op, (Rematerialize, SliceRows)):
            op = self.op(op.value)
        return op if isinstance(op, ConsumerWait) else None

    def ranked_axis(self, op: ListPosition) -> str:
        """The axis of the tile whose position an op gives."""
        row = self.op(op.src)
        return "kv" if isinstance(row, Base) and row.src.tensor in block_lists("q", True) else "q"

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of loops and of the grid, and the letters of axes: names in expressions that are not values."""
        flags = {REVERSED_GROUP for axis in self.grid if axis.reversed_group} | (
            {MEMBER} if self.takes_heads else set()
        )
        flags |= {*SPLIT_SYMBOLS} if self.kv_split else set()
        return frozenset({loop.var for loop in self.loops} | {axis.var for axis in self.grid} | flags | set(AXIS_DIM))

    def scalars_of(self, op: Op) -> set[str]:
        """The scalars that an op's expressions name though they are not operands: bounds of loops do."""
        named = op.symbols - {symbol for symbol, _ in getattr(op, "uses", ())} - self.variables
        return {name for name in named if name in self.graph}

    def only_known(self, op: Op) -> bool:
        """Whether it is a load that no op reads: then only facts of masks name it, and it is not printed."""
        return isinstance(op, (Gather, Load)) and not self.graph.out_degree(op.name)

    def around(self, block: str) -> list[Loop]:
        """The loops around a block, from the innermost out. If several loops share a body, the first of them."""
        found = []
        while loop := next((loop for loop in self.loops if loop.body == block), None):
            found.append(loop)
            block = self.graph.nodes[loop.name]["block"]
        return found

    def within(self, block: str) -> Iterator[Op]:
        """The ops of a block of a divided kernel, and of the bodies that these run."""
        for op in self.block(block).ops:
            yield op
            for body in bodies_of(op):
                yield from self.within(body)

    @cached_property
    def warp_groups(self) -> tuple[Block, ...]:
        """The roles of a divided kernel, in the order written."""
        return tuple(block for block in self.blocks if block.warp_group)

    def block_of(self, op: Op) -> Block:
        """The block that an op stands in."""
        return self.block(self.graph.nodes[op.name]["block"])

    def warp_group_of(self, op: Op) -> WarpGroup | None:
        """The role that runs an op of a divided kernel; None for what comes before the roles."""
        return next(
            (block.warp_group for block in self.warp_groups if any(o is op for o in self.within(block.name))), None
        )

    @cached_property
    def sharing_warp_group(self) -> WarpGroup:
        """The role whose copies share the rows of the program's tile."""
        return next(block.warp_group for block in self.warp_groups if block.warp_group and block.warp_group.rows)

    @cached_property
    def args(self) -> list[Arg]:
        return [op for op in self.block("entry").ops if isinstance(op, Arg)]

    @cached_property
    def loops(self) -> list[Loop]:
        return [op for op in self.ops() if isinstance(op, Loop)]

    @cached_property
    def waits(self) -> bool:
        """Whether its programs may start before the launch before has ended, for whose end they wait."""
        return any(isinstance(op, GridDependencyWait) for op in self.ops())

    @property
    def overlaps(self) -> bool:
        """Whether its programs may run beside those of the launch before, or of the next one."""
        return self.launches_dependents or self.waits

    @cached_property
    def combines_splits(self) -> bool:
        """Whether it joins what programs made of parts of a sequence's keys."""
        return any(loop.var == "joined" for loop in self.loops)

    @cached_property
    def dots(self) -> tuple[Dot, ...]:
        """Its matrix products, in the order written."""
        return tuple(op for op in self.ops() if isinstance(op, Dot))

    @cached_property
    def storing(self) -> frozenset[str]:
        """The blocks that store something, directly or in a loop inside."""
        found = {block.name for block in self.blocks if any(isinstance(op, (Scatter, Store)) for op in block.ops)}
        for loop in reversed(self.loops):
            found |= {self.graph.nodes[loop.name]["block"]} if loop.body in found else set()
        return frozenset(found)

    @cached_property
    def rewriting(self) -> frozenset[str]:
        """The blocks in which a tensor is both loaded and stored."""
        arg = {op.name: op.src.tensor if isinstance(op, Base) else op.name for op in self.ops()}
        found = set()
        for block in self.blocks:
            loaded = {arg[op.src.tensor] for op in block.ops if isinstance(op, Load)}
            found |= {block.name for op in block.ops if isinstance(op, Store) and arg[op.dst.tensor] in loaded}
        return frozenset(found)

    @cached_property
    def adds(self) -> bool:
        """Whether its programs add to what others add to: then it runs divided, by a copy engine that adds, or not
        at all."""
        return any(isinstance(op, OrderedAdd) for op in self.ops())

    @cached_property
    def shared_columns(self) -> GridAxis | None:
        """The axis of the grid along which programs share the columns of a sum; None where each has all."""
        return next((axis for axis in self.grid if axis.var in OWN), None)

    @cached_property
    def takes_heads(self) -> bool:
        """Whether its programs take query heads of a group one after another."""
        return any(isinstance(op, (Loop, PipelinedLoop)) and op.heads for op in self.ops())

    @cached_property
    def is_persistent(self) -> bool:
        """Whether its programs take one tile of the grid after another."""
        return any(isinstance(op, WorkLoop) for op in self.ops())

    @cached_property
    def round_robin(self) -> frozenset[str]:
        """The rings by whose slots turns are dealt to copies of a role."""
        return frozenset(op.round_robin for op in self.ops() if isinstance(op, PipelinedLoop) and op.round_robin)

    @cached_property
    def of_heads(self) -> Loop | None:
        """The loop over the query heads of a group that is around those over tiles; None where there is none."""
        return next((loop for loop in self.loops if loop.var == MEMBER), None)

    @cached_property
    def has_groups(self) -> bool:
        """Whether its programs own a K/V head with query heads of its group, over which a loop runs."""
        return any(MEMBER in loop.variables for loop in self.loops)

    @cached_property
    def has_dropout(self) -> bool:
        """Whether it draws what dropout keeps."""
        return any(isinstance(op, DropoutMask) for op in self.ops())

    @cached_property
    def of_entropy(self) -> bool:
        """Whether it computes entropies of queries, or gradients from these."""
        return not {"ENTROPY", "DENTROPY2"}.isdisjoint(arg.name for arg in self.args)

    @cached_property
    def normalises(self) -> bool:
        """Whether it keeps the running maximum of the softmax."""
        return any(isinstance(op, SoftmaxStep) for op in self.ops())

    @property
    def reads_cache(self) -> bool:
        """Whether its keys are in a cache, in which each sequence has a number of them of its own."""
        return any(isinstance(op, CacheLength) for op in self.ops())

    def clears(self, op: Load | Map) -> bool:
        """Whether rows of a tile that are in a cache, but past the end of the sequence, become zeros: they are summed
        up with others.

        Of a tile that is made of numbers of 8 bits and their factors, its own rows do, and not those of what it is made
        of.
        """
        if not self.reads_cache or op.type.dims[:1] != ("BLOCK_KV",):
            return False
        summed = [dot for dot in self.dots if dot.over == "BLOCK_KV"]
        if isinstance(op, Map):
            return any(op.name == dot.b for dot in summed) and any(
                isinstance(self.op(ref), Interleave) for ref in op.operands()
            )
        return (
            any(self.multiplies(dot, op) and not isinstance(self.op(dot.b), Map) for dot in summed)
            and "kv" in op.src.axes()
        )

    def multiplies(self, dot: Dot, op: Op) -> bool:
        """Whether a product has a value as an operand: itself, the numbers of its pairs, or as a factor of such
        numbers."""
        return any(op.name in self._sources(ref) for ref in (dot.a, dot.b))

    def _sources(self, ref: str) -> set[str]:
        op = self.op(ref)
        if isinstance(op, Deinterleave):
            return {op.value.split(".")[0] if self.type_of(op.value).quantised else op.name}
        if isinstance(op, Interleave):
            return self._sources(op.a)
        if isinstance(op, Map) and any(isinstance(self.op(used), Interleave) for _, used in op.uses):
            return set().union(*(self._sources(used) for _, used in op.uses))
        return {op.name}

    @cached_property
    def tile_page(self) -> int:
        """Keys of a page, where it reads something of a tile's page, so that tiles divide pages; else 0."""
        found = (
            op for op in self.ops() if isinstance(op, Gather) and op.src.tensor == "PAGE_TABLE" and not op.type.dims
        )
        return next((int(e.args[1]) for op in found for e in op.src.index if isinstance(e, floordiv)), 0)

    @cached_property
    def reads_quantised(self) -> bool:
        """Whether it reads numbers of 8 bits, two of them as one value."""
        return any(isinstance(op, Load) and op.type.quantised for op in self.ops())

    @property
    def rotates(self) -> bool:
        """Whether its q and k are of two tensors each: columns of a latent, and columns that are rotated."""
        return any(arg.name == "K_ROPE" for arg in self.args)

    @cached_property
    def reads_pairs(self) -> bool:
        """Whether its mask or modifiers read something for each score."""
        return bool(self.of_pairs)

    @cached_property
    def looks_up(self) -> bool:
        """Whether what they read for each score is all looked up in tables, at places that are computed."""
        return self.reads_pairs and all(isinstance(op, Gather) for op in self.of_pairs)

    @cached_property
    def of_pairs(self) -> list[Gather | Load]:
        """The reads of something for each score."""
        return [
            op for op in self.ops() if isinstance(op, (Gather, Load)) and set(op.type.dims) == {"BLOCK_Q", "BLOCK_KV"}
        ]

    @cached_property
    def writes(self) -> frozenset[str]:
        """The tensors that it writes, and does not read too."""
        return frozenset(arg.name for arg in self.args if arg.role == "out")

    @property
    def counts_pairs(self) -> bool:
        """Whether it evaluates a mask of data, before all others: how many pairs of a block are visible."""
        return "COUNT" in self.writes

    @cached_property
    def prepares(self) -> bool:
        """Whether it computes, of a call's integers, what other kernels read: all of its arguments are integers."""
        return all(arg.type.dtype == "i32" for arg in self.args)

    @property
    def walks(self) -> bool:
        """Whether each program walks over all tiles of its own axis. In other kernels the grid gives each program
        one tile."""
        return self.grid[0].var not in AXIS_EXTENT

    @cached_property
    def program_axis(self) -> str:
        """The axis of whose tiles a program owns one, q or kv: from `axis`, else from the grid or the loop of class
        `all`."""
        return self.axis or self.tiled_axis

    @property
    def loop_axis(self) -> str:
        """The other axis, over whose tiles its loops run."""
        return "kv" if self.program_axis == "q" else "q"

    @cached_property
    def tiled_axis(self) -> str:
        """The axis of tiles that the grid has, or that a loop of class `all` runs over; empty where there is none.
        Of two it is `own`."""
        axes = [self.grid[0].var, *(loop.var for loop in self.loops if loop.cls == "all")]
        found = [axis for axis in axes if axis in AXIS_EXTENT]
        return self.axis if self.axis in found else next(iter(found), "")

    def rewrite(self, change: Callable[[str, Op], Iterable[Op]]) -> Kernel:
        """A kernel with every op replaced by those that change(block name, op) gives; itself, if these are the same."""
        blocks = tuple(replace(b, ops=tuple(n for op in b.ops for n in change(b.name, op))) for b in self.blocks)
        return self if blocks == self.blocks else replace(self, blocks=blocks)


PROMISES = ("least", "most", "first", "rising")  # options of an input that say what its data promises


@dataclass(frozen=True)
class Input:
    """A run-time input of the generated function: its keyword, element type, shape (empty for a number) and a line of
    help.

    Options: `grad`, it gets a gradient; `broadcast`, its first dimensions may have length 1; `least=n`, numbers below n
    are refused; `size`, it is the length of a dimension that has its name, which a call gives with the tensor.

    Of a tensor of integers, options are promises of its data, which a call checks where it is asked to: `least=n` and
    `most=SIZE`, of each number; `first=n`, the first number of each row; `rising`, numbers never fall along the last
    dimension.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    help: str
    options: tuple[str, ...] = ()

    @property
    def grad(self) -> bool:
        return "grad" in self.options

    @property
    def broadcast(self) -> bool:
        return "broadcast" in self.options

    @property
    def is_size(self) -> bool:
        return "size" in self.options

    @property
    def least(self) -> int | None:
        return next((int(o.partition("=")[2]) for o in self.options if o.startswith("least=")), None)

    @property
    def promises(self) -> dict[str, str]:
        """What the data of a tensor promises, as arguments of `runtime.promised`: names, and the source of their
        values."""
        given = (option.partition("=") for option in self.options if self.shape)
        return {name: value or "True" for name, _, value in given if name in PROMISES}


@dataclass(frozen=True)
class Derived:
    """Tensors that the generated module computes before its kernels run.

    function: a Python function that a mask or modifier declares; or, as in `@documents`, a host program, whose results
    they are.
    sources: the function's arguments: inputs, sizes, numbers, the device.
    rising: names of the tensors whose numbers never fall along their last dimension.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    function: str
    sources: tuple[str, ...]
    dtype: str = "i32"
    rising: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The name of the host program that computes them; empty if a Python function does."""
        return self.function[1:] if self.function.startswith("@") else ""


def input_tensors(inputs: tuple[Input, ...], derived: tuple[Derived, ...]) -> dict[str, Type]:
    """What masks and modifiers read: input tensors, and what the wrapper derives from them."""
    given = {i.name: Type(i.dtype, i.shape) for i in inputs if i.shape}
    return given | {name: Type(d.dtype, shape) for d in derived for name, shape in zip(d.names, d.shapes)}


@dataclass(frozen=True)
class Learned:
    """How an input gets its gradient. A kernel writes parts to the tensor `parts`; the host sums them to the place
    `index`.

    Without an index, `parts` is the gradient itself: a kernel adds each element to its place (`Scatter`).
    """

    input: str
    index: tuple[str, ...]
    parts: str

    @property
    def by(self) -> str:
        """For what there is one part: `query`, `score`, `distance`, `element`, or `entry`, which is a query and a place
        in a dimension of few; or `row`, if DELTA already has what is needed.
        """
        if self.parts == "DELTA":
            return "row"
        if not self.index:
            return "element"
        if "entry" in self.index:
            return "entry"
        return "score" if "kv" in self.index else "distance" if any("distance" in e for e in self.index) else "query"

    def __str__(self) -> str:
        return f"{self.input}[{', '.join(self.index)}]" if self.index else self.input


@dataclass(frozen=True)
class Read:
    """One distinct read of a tensor parameter. In expressions, the symbol `name` stands for the element that is read.

    `index` has an integer expression for each dimension, over q_idx, kv_idx, b, h, hkv, Nq, Nk, scalars and names of
    earlier reads. A negative index counts from the end. A read that is then still outside gives 0 (false).
    """

    name: str
    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Meaning:
    """What the kernels of a module compute: expressions over b, h, hkv, q_idx, kv_idx, the sizes of a call and elements
    of tensors.

    where: the mask. A pair of a query and a key counts if it holds.
    by_key: the same mask in terms of tensors over keys, for kernels that own keys; None if it is `where`.
    known: bounds of the parts of the mask that are data (see Mask).
    score: what the softmax sees, in terms of the scaled product `s`.
    sink: one more logit in each row's softmax, or None.
    reads: elements that are not at (b, h, q_idx, kv_idx). The name of a tensor stands for its element there.
    """

    where: Bool = sympy.true
    by_key: Bool | None = None
    known: tuple[Fact, ...] = ()
    score: Expr = symbol("s")
    sink: Expr | None = None
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """The module visits only listed blocks of `size` x `size` scores. A call gives the mask of blocks, or `pattern` is
    the function for it.

    With `data`, the mask's inputs decide: the kernel `blocks` evaluates the mask, and full blocks (nothing is hidden)
    are listed apart from cut ones.
    """

    size: int
    pattern: str = ""
    params: tuple[tuple[str, int], ...] = ()
    data: bool = False

    def describe(self) -> str:
        """`64`, `64 local_global(local=2, globals=1)`, or `128 data`."""
        if self.data:
            return f"{self.size} data"
        given = ", ".join(f"{name}={value}" for name, value in self.params)
        return f"{self.size} {self.pattern}({given})" if self.pattern else str(self.size)


@dataclass(frozen=True)
class Cache:
    """The module also reads keys and values from a cache: one row of keys for each sequence; or pages, each of `page`
    rows.

    page: empty where there are no pages; a number; or `page_rows`, where a call gives it.
    dtype: what the cache holds, by its key in QUANTISED, where that is not the element type of q.
    scale: what has a factor of its own then, by which its numbers are multiplied: each `head`, each head of a `page`,
    or of a latent
        each group of LATENT_GROUP `columns` of a key. Columns that are rotated keep the element type of q.
    """

    page: str = ""
    dtype: str = ""
    scale: str = ""

    @property
    def rows(self) -> tuple[str, str, str]:
        """The dimensions of a tensor of the cache, without the last one."""
        return ("pages", "Hkv", self.page) if self.page else ("B", "Hkv", "Nc")

    @property
    def scales(self) -> tuple[str, ...]:
        """The dimensions of a tensor of factors; none where there are no factors."""
        return {"head": ("Hkv",), "page": ("pages", "Hkv"), "columns": (*self.rows, "GROUPS_V")}.get(self.scale, ())

    def describe(self) -> str:
        """`contiguous`, `paged 64` or `paged any`; and `fp8_e4m3 scale head` after it."""
        pages = f"paged {'any' if self.page == 'page_rows' else self.page}" if self.page else "contiguous"
        return f"{pages} {self.dtype} scale {self.scale}" if self.dtype else pages


@dataclass(frozen=True)
class Config:
    """One line of a kernel's schedule table: tiles and launch options for a device class, an element size and up to
    `max_rows` rows.

    A line of a backend that divides kernels is for more than `min_rows` rows. Where it is, it goes before the others.

    Rows are those of the axis that the kernel tiles, and where parts are joined those of all heads and sequences. There
    `block_kv` counts parts. The cost model chose the line, or it was `measured` as the fastest.
    """

    device: str
    elem_bytes: int
    max_rows: int | None
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    tma: bool = False  # the device's copy engine does loads marked `via(descriptor)`; threads do the others
    measured: bool = False
    backend: str = DEFAULT_BACKEND  # of attngen/targets: what compiles the kernel
    min_rows: int = 0
    columns: int = 0  # of a sum, that a program has, where several may share these; else 0

    @property
    def tile(self) -> str:
        """Its tile as tables show it: `64x32`, or `64x32/256` where programs may share columns, of which each has
        256."""
        return f"{self.block_q}x{self.block_kv}{f'/{self.columns}' * bool(self.columns)}"

    def rows_of(self, axis: str) -> int:
        """The rows of a tile of an axis, `q` or `kv`."""
        return self.block_q if axis == "q" else self.block_kv


@dataclass(frozen=True)
class DoesNotFit:
    """A line in place of a kernel's rows for a device class and element size: no tile fits there. `reason` is the
    sentence for the user."""

    device: str
    elem_bytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Module:
    """Everything from which a generated module is made. The templates see nothing else.

    rope: where the values of a cache are the first columns of its keys, the number of those that are not; else 0.
    outputs: what calls can give beside the output, of OUTPUTS and in that order.
    divided: kernels that stand in for some of `kernels`, under schedule rows that name their backend. They are divided
    into roles (ir/pipe.py). One has the name of the kernel that it stands in for. Each other, for rows of its own, has
    a name and a schedule.
    """

    name: str
    version: str
    spec_hash: str
    phase: str
    backend: str
    sharing: str
    head_dim_qk: int
    head_dim_v: int
    dtypes: tuple[str, ...]
    precision: str
    mask: str
    score: str
    order: str
    blocks: Blocks | None
    dropout: bool
    inputs: tuple[Input, ...]
    derived: tuple[Derived, ...]
    learned: tuple[Learned, ...]
    kernels: tuple[Kernel, ...]
    warp_specialized: tuple[Kernel, ...] = ()
    hosts: tuple[Host, ...] = ()
    schedules: tuple[tuple[str, tuple[Config | DoesNotFit, ...]], ...] = ()
    meaning: Meaning = Meaning()
    cache: Cache | None = None
    rope: int = 0
    outputs: tuple[str, ...] = ("lse",)

    @property
    def widths(self) -> dict[str, int]:
        """The columns of each head dimension, by its name, in tensors of a call."""
        found = {"D_QK": self.head_dim_qk, "D_V": self.head_dim_v} | ({"D_ROPE": self.rope} if self.rope else {})
        if self.cache and self.cache.dtype:
            found |= {} if self.rope else {"PAIRS_QK": self.head_dim_qk // 2}
            found |= {"PAIRS_V": self.head_dim_v // 2} | (
                {"GROUPS_V": self.head_dim_v // LATENT_GROUP} if self.rope else {}
            )
        return found

    @property
    def dealing(self) -> Kernel | None:
        """The kernel among whose programs the keys of a cache are dealt, if there is one."""
        return next((kernel for kernel in self.kernels if kernel.kv_split and kernel.dots), None)

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """The columns of a head of q and k, and of v, by what the header calls them."""
        return ("qk", self.head_dim_qk), ("v", self.head_dim_v)

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def host(self, name: str) -> Host:
        return next(h for h in self.hosts if h.name == name)

    @property
    def by_query(self) -> tuple[str, ...]:
        """Those of its outputs that the forward gives, which are numbers of each query."""
        return tuple(name for name in self.outputs if name not in OF_KEYS)

    @property
    def sums(self) -> tuple[str, ...]:
        """The tensors from which, with scores, kernels recompute weights: LSE, or SUMS where kernels have these."""
        return SUMS if {arg.name for kernel in self.kernels for arg in kernel.args}.issuperset(SUMS) else LSE

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """The row vectors that the forward returns with the output. Those without a gradient come last."""
        smooth, flat = (
            [OUTPUTS[name] for name in self.by_query if (name in FLAT) == wanted] for wanted in (False, True)
        )
        return (*smooth, *(name for name in self.sums if name not in smooth), *flat)

    @property
    def kept(self) -> tuple[str, ...]:
        """Those of the rows that the backward and forward mode read."""
        return (*self.sums, *(OUTPUTS[name] for name in self.by_query if name not in FLAT and OUTPUTS[name] not in LSE))

    @property
    def directions(self) -> tuple[str, ...]:
        """`forward`, and `backward` if it has one."""
        return tuple(d for d in DIRECTIONS if any(host.name == d for host in self.hosts))

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return "backward" in self.directions

    def kernels_of(self, direction: str) -> tuple[Kernel, ...]:
        """The kernels that most calls of a direction, `forward` or `backward`, launch."""
        names = [name for host in self.hosts if host.name == direction for name in host.common_launches()]
        return tuple(k for k in self.kernels if k.name in names)

    def configs(self, kernel: str, backend: str = "") -> tuple[Config, ...]:
        """The rows of a kernel's schedule for the module's own backend, or for another one."""
        rows = dict(self.schedules).get(kernel, ())
        return tuple(r for r in rows if isinstance(r, Config) and r.backend == (backend or self.backend))

    def stand_ins(self, kernel: str) -> list[tuple[Kernel, Config]]:
        """The divided kernels that stand in for a kernel, each with a row of its schedule; those for fewer rows come
        first."""
        pairs = [
            (k, row) for k in self.warp_specialized if k.stands_for == kernel for row in self.configs(k.name, k.backend)
        ]
        return sorted(pairs, key=lambda pair: pair[1].min_rows)

    def warp_specialized_named(self, name: str) -> bool:
        """Whether a divided kernel has this name of its own."""
        return any(kernel.name == name and kernel.of for kernel in self.warp_specialized)

    def not_fitting(self, kernel: str) -> tuple[DoesNotFit, ...]:
        return tuple(r for r in dict(self.schedules).get(kernel, ()) if isinstance(r, DoesNotFit))

    def covers(self, x: Learned) -> bool:
        """Whether kernels write all that holds parts of a gradient: of each query; of each score, if no mask and no
        list leaves any out."""
        return x.by in ("query", "entry") or (
            x.by == "score" and self.meaning.where == sympy.true and self.blocks is None
        )

    def map_kernels(self, change: Callable[[Kernel], Kernel]) -> Module:
        return replace(self, kernels=tuple(change(k) for k in self.kernels))
