"""Kernels and modules: a typed facade over one networkx graph per kernel.

Nodes are op names, edges run from operand to user. Ops live in blocks: `entry`, and one block per loop body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import networkx as nx
import sympy

from attngen.errors import VerifyError
from attngen.ir.expr import Bool, Expr, symbol
from attngen.ir.host import Host
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    Arg,
    Base,
    Block,
    Dot,
    Fact,
    Gather,
    Keep,
    Load,
    Loop,
    Map,
    Op,
    Position,
    Scatter,
    SoftmaxStep,
    Store,
    Type,
)

PHASES = ("logical", "scheduled", "target")
DEFAULT_BACKEND = "triton"  # of attngen/backends


@dataclass(frozen=True)
class GridAxis:
    """One loop over program ids; the first axis runs fastest. `descending` starts with the last (longest) tiles.

    So many heads `abreast`, those of all sequences one after another, take turns: the tiles of one number, then those of the next.
    """

    var: str
    extent: Expr
    descending: bool = False
    abreast: int = 1


@cache
def _written_out(e: Expr, named: tuple[tuple[Expr, Expr], ...]) -> Expr:
    """Cached across kernels, because sympy takes its time over nested Min and Max."""
    replacements = dict(named)
    for _ in named:  # one may stand for others, but the verifier lets none stand for itself
        e = e.xreplace(replacements) if replacements.keys() & e.free_symbols else e
    return e


@dataclass(frozen=True, eq=False)
class Kernel:
    """One GPU kernel: launch grid, and ops in blocks held as a graph.

    Its programs `own` tiles of an axis, q or kv. One that `packs` has as rows the queries of all heads of a group, head after head: so many
    `queries` of each. What it reads, writes and rewrites stands on its arguments. `about` is a sentence for readers of what is printed.
    """

    name: str
    grid: tuple[GridAxis, ...]
    blocks: tuple[Block, ...]
    own: str = ""
    packs: bool = False
    about: str = ""

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Ops by name, with edges operand -> user; raises VerifyError on a name defined twice or never."""
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
                        raise VerifyError("defined", f"%{op.name} in @{self.name} reads %{ref}, which nothing defines", "")
                    graph.add_edge(source, op.name)
        return graph

    def op(self, ref: str) -> Op:
        """The op that defines a value."""
        op: Op = self.graph.nodes[ref.split(".")[0]]["op"]
        return op

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def walk(self, block: str) -> list[Op]:
        """The block's ops, operands first, otherwise in the order written."""
        inside = self.graph.subgraph(op.name for op in self.block(block).ops)
        order = nx.lexicographical_topological_sort(inside, key=lambda n: inside.nodes[n]["order"])
        return [self.graph.nodes[name]["op"] for name in order]

    def ops(self) -> Iterable[Op]:
        return (op for block in self.blocks for op in block.ops)

    def type_of(self, ref: str) -> Type:
        """The type of a value; a loop's fields have the types of the values they start from."""
        op, field = self.op(ref), ref.partition(".")[2]
        if isinstance(op, Loop):
            return self.type_of(dict(op.carry)[field])
        return op.results()[field]

    @cached_property
    def named(self) -> tuple[tuple[Expr, Expr], ...]:
        """Symbols of the kernel's named integer scalars, with what they stand for: a position for the tile it was made from."""
        scalars = (op for op in self.ops() if isinstance(op, (Map, Position)) and op.type.dtype == "i32" and not op.type.dims)
        return tuple((symbol(op.name), op.tile if isinstance(op, Position) else op.expr) for op in scalars)

    def resolve(self, e: Expr) -> Expr:
        """An expression with the named integer scalars of the kernel written out."""
        return _written_out(e, self.named)

    def accessed(self, op: Base | Load | Store) -> tuple[Op, tuple[Expr, ...]]:
        """The op that declares the tensor an access leads to, and all of its indices: those of the base first, if it has one."""
        access = op.dst if isinstance(op, Store) else op.src
        source = self.op(access.tensor)
        if isinstance(source, Base):
            return self.op(source.src.tensor), source.src.index + access.index
        return source, access.index

    @cached_property
    def variables(self) -> frozenset[str]:
        """Loop and grid variables, and the letters of axes: names in expressions that are no values."""
        return frozenset({loop.var for loop in self.loops} | {axis.var for axis in self.grid} | set(AXIS_DIM))

    def scalars_of(self, op: Op) -> set[str]:
        """The values that an op's expressions name without their being operands, as bounds of loops name scalars."""
        named = {str(s) for e in op.expressions() for s in e.free_symbols}
        return (named & self.graph.nodes.keys()) - {symbol for symbol, _ in getattr(op, "uses", ())} - self.variables

    def around(self, block: str) -> list[Loop]:
        """The loops that run a block, from the innermost out; of several with one body, the first."""
        found = []
        while loop := next((loop for loop in self.loops if loop.body == block), None):
            found.append(loop)
            block = self.graph.nodes[loop.name]["block"]
        return found

    @cached_property
    def args(self) -> list[Arg]:
        return [op for op in self.block("entry").ops if isinstance(op, Arg)]

    @cached_property
    def loops(self) -> list[Loop]:
        return [op for op in self.ops() if isinstance(op, Loop)]

    @cached_property
    def dots(self) -> tuple[Dot, ...]:
        """Its matrix products, in the order written."""
        return tuple(op for op in self.ops() if isinstance(op, Dot))

    @cached_property
    def storing(self) -> frozenset[str]:
        """The blocks in which something is stored, there or in a loop inside."""
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
    def draws(self) -> bool:
        """Whether it draws what dropout keeps."""
        return any(isinstance(op, Keep) for op in self.ops())

    @cached_property
    def normalises(self) -> bool:
        """Whether it keeps the running maximum of the softmax."""
        return any(isinstance(op, SoftmaxStep) for op in self.ops())

    @cached_property
    def reads_pairs(self) -> bool:
        """Whether its mask or modifiers read something for each score."""
        return any(isinstance(op, (Gather, Load)) and set(op.type.dims) == {"BLOCK_Q", "BLOCK_KV"} for op in self.ops())

    @cached_property
    def writes(self) -> frozenset[str]:
        """The tensors that it writes, and does not read too."""
        return frozenset(arg.name for arg in self.args if arg.role == "out")

    @property
    def counts_pairs(self) -> bool:
        """Whether it evaluates a mask of data, before all others: how many pairs of a block are visible."""
        return "COUNT" in self.writes

    @property
    def walks(self) -> bool:
        """Whether its programs walk over the tiles of an axis, each in turn their own, rather than have one each by the grid."""
        return self.grid[0].var not in AXIS_EXTENT

    @property
    def is_split(self) -> bool:
        """Whether programs share its tiles, each for some of the query heads of a group."""
        return any(axis.var == "split" for axis in self.grid)

    @cached_property
    def own_axis(self) -> str:
        """The axis of which a program owns a tile, q or kv: what `own` says, or else the grid, or the loop of class `all`."""
        if self.own:
            return self.own
        axes = [self.grid[0].var, *(loop.var for loop in self.loops if loop.cls == "all")]
        return next((axis for axis in axes if axis in AXIS_EXTENT), "")

    def rewrite(self, change: Callable[[str, Op], Iterable[Op]]) -> Kernel:
        """A kernel with every op replaced by those that change(block name, op) gives."""
        blocks = (replace(b, ops=tuple(n for op in b.ops for n in change(b.name, op))) for b in self.blocks)
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True)
class Input:
    """A run-time input of the generated function: keyword, element type, symbolic shape (none: a number), one line of help.

    Options: `grad`, it gets a gradient; `broadcast`, its first dimensions may be 1; `least=n`, numbers below n are refused.
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
    def least(self) -> int | None:
        return next((int(o.partition("=")[2]) for o in self.options if o.startswith("least=")), None)


@dataclass(frozen=True)
class Derived:
    """Tensors that the wrapper computes from inputs, sizes, numbers and the device, by a function that a mask or modifier declares."""

    names: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    function: str
    sources: tuple[str, ...]
    dtype: str = "i32"
    rising: tuple[str, ...] = ()  # names whose numbers never fall along their last dimension


@dataclass(frozen=True)
class Learned:
    """A gradient of an input: parts that a kernel writes to the tensor `parts`, summed to where the input is read, at `index`.

    Without an index the parts are the gradient: a kernel adds each element to its place (`Scatter`).
    """

    input: str
    index: tuple[str, ...]
    parts: str

    @property
    def by(self) -> str:
        """What the parts are of: `row` (what the backward has of each row already), `query`, `score`, `distance` or `element`."""
        if self.parts == "DELTA":
            return "row"
        if not self.index:
            return "element"
        return "score" if "kv" in self.index else "distance" if any("distance" in e for e in self.index) else "query"

    def __str__(self) -> str:
        return f"{self.input}[{', '.join(self.index)}]" if self.index else self.input


@dataclass(frozen=True)
class Read:
    """One distinct access of a tensor parameter: `name` is its symbol's, `index` has an integer expression per dimension.

    The expressions are over q_idx, kv_idx, b, h, hkv, Nq, Nk, scalars and the names of earlier reads. A negative index counts from
    the end; what is outside even so reads 0 (false).
    """

    name: str
    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Meaning:
    """What the kernels of a module compute, in b, h, hkv, q_idx, kv_idx, the sizes of a call and the names of what is read.

    A pair of a query and a key counts where `where` holds; `by_key` says the same by tensors of keys, where a mask has such; `known`
    bounds the parts that are data (see Mask). The softmax is of `score`, an expression in the scaled product `s`, and of `sink`, one
    more logit of each row, if there is one. A name of a tensor stands for its element at (b, h, q_idx, kv_idx), but for `reads`.
    """

    where: Bool = sympy.true
    by_key: Bool | None = None
    known: tuple[Fact, ...] = ()
    score: Expr = symbol("s")
    sink: Expr | None = None
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """Which square blocks of scores are visited: their rows, and the function that gives the mask of blocks if the spec has a pattern.

    With `data`, what the mask reads says which: the kernel `blocks` evaluates it, and blocks in which nothing is hidden are told
    from those that the mask cuts.
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
class Row:
    """One line of a kernel's schedule table: for a device class, element size and number of rows on the tiled axis.

    The cost model chose it, or it was `measured` to be the fastest (attngen/schedules).
    """

    device: str
    elem_bytes: int
    max_rows: int | None
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    tma: bool = False  # loads marked `via(descriptor)` are copied by the device's engine, the others by threads
    measured: bool = False
    backend: str = DEFAULT_BACKEND  # of attngen/backends: what compiles the kernel


@dataclass(frozen=True)
class Unfit:
    """In place of a kernel's rows for a device class and element size: no tile fits there, and the sentence that says so."""

    device: str
    elem_bytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Module:
    """All that a generated module is made from. Nothing else reaches the templates."""

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
    hosts: tuple[Host, ...] = ()
    schedules: tuple[tuple[str, tuple[Row | Unfit, ...]], ...] = ()
    meaning: Meaning = Meaning()

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def host(self, name: str) -> Host:
        return next(h for h in self.hosts if h.name == name)

    def kernels_of(self, direction: str) -> tuple[Kernel, ...]:
        """The kernels that a call launches, `forward` or `backward`, where tensors have elements and queries are not few."""
        names = [name for host in self.hosts if host.name == direction for name in host.common_launches()]
        return tuple(k for k in self.kernels if k.name in names)

    def rows(self, kernel: str) -> tuple[Row, ...]:
        return tuple(r for r in dict(self.schedules).get(kernel, ()) if isinstance(r, Row))

    def unfit(self, kernel: str) -> tuple[Unfit, ...]:
        return tuple(r for r in dict(self.schedules).get(kernel, ()) if isinstance(r, Unfit))

    def map_kernels(self, change: Callable[[Kernel], Kernel]) -> Module:
        return replace(self, kernels=tuple(change(k) for k in self.kernels))
