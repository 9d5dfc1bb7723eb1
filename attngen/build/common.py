"""What the kernel builders share: adding typed ops to blocks, and how heads index K and V."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.ir.expr import Bool, floordiv, symbol
from attngen.ir.graph import Block, Kernel
from attngen.ir.interface import DROPOUT_SCALARS, SCALARS, SIGNATURES, grid, mask_tensors, tensor_args
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    Access,
    Arg,
    Checks,
    Dot,
    Dropout,
    Init,
    Keep,
    Load,
    Loop,
    Map,
    Mask,
    Op,
    Reduce,
    Seed,
    Store,
    Type,
)
from attngen.masks import is_linear
from attngen.spec import Spec

INPUT_AXES = {"B": "b", "Hq": "h", "Nq": "q", "Nk": "kv"}  # dimension of a mask input -> how it is indexed


class KernelBuilder:
    """Collects the ops of one kernel, giving each value its type."""

    def __init__(self, spec: Spec, name: str) -> None:
        self.spec, self.name = spec, name
        own = SIGNATURES[name].own
        self.loop_axis = "kv" if own == "q" else "q"
        self.ops: dict[str, list[Op]] = {"entry": []}
        self.types: dict[str, Type] = {}
        self.grid = grid(own, spec.heads.sharing)
        self.masked = mask_tensors(spec.mask.inputs(), spec.mask.derived())

    def add(self, op: Op, block: str = "entry") -> str:
        self.ops.setdefault(block, []).append(op)
        self.types.update({f"{op.name}.{f}".rstrip("."): t for f, t in op.results().items()})
        return op.name

    def tensors(self, masked: bool = True) -> None:
        """Declare what the kernel reads and writes, and, if it masks, what its mask reads."""
        for arg in tensor_args(self.name, self.masked if masked else {}, self.spec.mask.blocks() is not None, self.spec.dropout):
            self.add(arg)

    def scalar(self, name: str) -> None:
        self.add(Arg(name, "scalar", Type({**SCALARS, **DROPOUT_SCALARS}[name])))

    def sizes(self) -> None:
        """The sizes every kernel needs, and a scalar for each that indexing by head needs."""
        names = [str(a.extent) for a in self.grid[1:-1]]
        if self.spec.heads.sharing == "gqa" or (self.spec.heads.sharing == "mqa" and self.name == "dkdv"):
            names.append("group")
        for name in (*names, "Nq", "Nk"):
            self.scalar(name)

    def load(self, name: str, tensor: str, index: tuple[Any, ...], block: str = "entry", other: Any = 0) -> str:
        """Load the tile of `tensor` at `index`; rows are bounds-checked where the tile can pass the end."""
        access = _access(tensor, index)
        dims = tuple(AXIS_DIM[a] for a in access.axes())
        when = "always" if block == "entry" else "partial"
        check: Checks = tuple((a, when) for a in access.axes() if a in ("q", "kv"))
        return self.add(Load(name, access, Type(self.types[tensor].dtype, dims), check, sympy.sympify(other)), block)

    def store(self, tensor: str, index: tuple[Any, ...], value: str) -> None:
        access = _access(tensor, index)
        check: Checks = tuple((a, "always") for a in access.axes() if a in ("q", "kv"))
        self.add(Store(f"store_{sum(map(len, self.ops.values()))}", access, value, check))

    def init(self, name: str, value: Any, *dims: str) -> str:
        return self.add(Init(name, sympy.sympify(value), Type("f32", dims)))

    def carried(self, block: str, **starts: str) -> None:
        """Declare a loop body's arguments, typed as the values they start from."""
        for name, start in starts.items():
            self.add(Arg(name, "carry", self.types[start]), block)

    def loop(self, name: str, var: str, extent: Any, body: str, block: str = "entry", cls: str = "unknown", **starts: str) -> str:
        self.add(Loop(name, var, ((sympy.Integer(0), extent),), tuple(starts.items()), body, cls), block)
        self.types.update({f"{name}.{f}": self.types[s] for f, s in starts.items()})
        return name

    def dot(self, name: str, a: str, b: str, over: str, block: str, acc: str | None = None) -> str:
        dims = tuple(d for v in (a, b) for d in self.types[v].dims if d != over)
        return self.add(Dot(name, a, b, over, Type("f32", dims), acc), block)

    def map(self, name: str, expr: Any, block: str = "entry", dtype: str = "f32", score: bool = False, **uses: str) -> str:
        """Elementwise expression; the result has the dimensions of its widest operand."""
        dims = max((self.types[r].dims for r in uses.values()), key=len, default=())
        return self.add(Map(name, expr, tuple(uses.items()), Type(dtype, dims), score), block)

    def reduce_sum(self, name: str, value: str, over: str, block: str = "entry") -> str:
        dims = tuple(d for d in self.types[value].dims if d != over)
        return self.add(Reduce(name, value, "sum", over, Type("f32", dims)), block)

    def reads(self, block: str) -> dict[str, str]:
        """Loads of the mask's inputs: in the loop body where they vary along the loop, before the loop elsewhere."""
        found = {}
        for name, type_ in self.masked.items():
            index = tuple(INPUT_AXES[d] for d in type_.dims)
            found[name] = self.load(name, name.upper(), index, block if self.loop_axis in index else "entry")
        return found

    def mask(self, name: str, value: str, where: Bool, reads: dict[str, str], block: str) -> str:
        """Apply the mask; a condition that is always true leaves the value as it is."""
        if where == sympy.true:
            return value
        names = {str(s) for s in where.free_symbols}
        uses = tuple((n, r) for n, r in reads.items() if n in names)
        known = {} if is_linear(where) else {"needs": self.spec.mask.needs(), "enough": self.spec.mask.enough()}
        return self.add(Mask(name, value, where, uses, self.types[value], **known), block)

    def seed(self) -> None:
        """What dropout needs, if the spec has it: scalars, and the key of its random numbers."""
        if self.spec.dropout:
            for name in DROPOUT_SCALARS:
                self.scalar(name)
            self.add(Seed("seed", "SEED", Type("i64")))

    def draw(self, head: Any, *dims: str) -> None:
        """Draw, if the spec has dropout, which probabilities of a tile of the loop body are kept."""
        if self.spec.dropout:
            self.add(Keep("keep", "seed", "dropout_threshold", head, Type("b1", dims)), "step")

    def dropped(self, value: str) -> str:
        """A tile of probabilities of the loop body after dropout; without dropout the tile itself."""
        return self.add(Dropout("p_kept", value, "keep", self.types[value]), "step") if self.spec.dropout else value

    def kernel(self) -> Kernel:
        return Kernel(self.name, self.grid, tuple(Block(n, tuple(ops)) for n, ops in self.ops.items()))


def _access(tensor: str, index: tuple[Any, ...]) -> Access:
    return Access(tensor, tuple(symbol(i) if isinstance(i, str) else i for i in index))


def kv_head(spec: Spec) -> Any:
    """Which K/V head query head `h` reads: indexing, never expanding."""
    return {"mha": symbol("h"), "mqa": sympy.Integer(0), "gqa": floordiv(symbol("h"), symbol("group"))}[spec.heads.sharing]


def in_bounds(axis: str) -> Bool:
    return symbol(f"{axis}_idx") < symbol(AXIS_EXTENT[axis])
