"""Run a kernel of the IR in NumPy, iteration by iteration, and count the elements and bytes that its loads and stores
move and the FLOPs of its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Access, Expr, Kernel, Op, Type, tile

FUNCTIONS = {
    "floordiv": lambda a, b: a // b,
    "cdiv": lambda a, b: -(-a // b),
    "mod": lambda a, b: a % b,
    "select": np.where,
    "exp2": np.exp2,
    "log2": np.log2,
}
Values = dict[str, Any]


@cache
def compiled(e: Expr) -> tuple[list[str], Callable[..., Any]]:
    symbols = sorted(e.free_symbols, key=str)
    return [str(s) for s in symbols], sympy.lambdify(symbols, e, modules=[FUNCTIONS, "numpy"])


class Launch:
    """One launch of a kernel. `tensors` are read and written in place; `sizes` has every scalar of the kernel and
    every tile size by name."""

    def __init__(self, kernel: Kernel, tensors: dict[str, np.ndarray], sizes: Values) -> None:
        self.kernel, self.tensors = kernel, tensors
        self.moved = self.moved_bytes = self.flops = 0
        constants = {"LOG2E": np.log2(np.e), "LN2": np.log(2)}
        start = {**constants, **sizes}
        with np.errstate(all="ignore"):
            for ids in product(*(range(int(self.number(axis.extent, start))) for axis in kernel.grid)):
                at = dict(start)
                for axis, i in zip(kernel.grid, ids):
                    self.place(at, axis.var, i)
                self.run("entry", {}, at)

    @staticmethod
    def place(at: Values, axis: str, i: int) -> None:
        at[f"{axis}_start" if axis in AXIS_DIM else axis] = i * at[AXIS_DIM[axis]] if axis in AXIS_DIM else i

    def number(self, e: Expr, at: Values) -> Any:
        names, function = compiled(e)
        return function(*(at[name] for name in names))

    def tile_of(self, e: Expr, at: Values, t: Type, uses: Values) -> Any:
        """Return the value of an expression over a tile. Operands and positions are broadcast by dimension names."""
        dims = [d.removesuffix("_PAD") for d in t.dims]
        shape = tuple(at[d] for d in dims)

        def spread(value: np.ndarray, of: list[str]) -> np.ndarray:
            return np.broadcast_to(value.reshape([at[d] if d in of else 1 for d in dims]), shape)

        named = dict(at)
        for axis in ("q", "kv"):
            if AXIS_DIM[axis] in dims and f"{axis}_start" in at:
                named[f"{axis}_idx"] = spread(at[f"{axis}_start"] + np.arange(at[AXIS_DIM[axis]]), [AXIS_DIM[axis]])
        for name, (value, of) in uses.items():
            named[name] = spread(value, of) if of else value
        return np.broadcast_to(self.number(e, named), shape).astype(float)

    def access(self, access: Access, at: Values) -> tuple[np.ndarray, list[Any]]:
        """Return the tensor, and for each of its dimensions an index or the rows of a tile."""
        source = self.kernel.op(access.tensor)
        name, index = (
            (source.src.tensor, source.src.index + access.index)
            if isinstance(source, tile.Base)
            else (source.name, access.index)
        )
        found: list[Any] = []
        for i in index:
            axis = str(i)
            if axis in AXIS_DIM:
                rows = at.get(f"{axis}_start", 0) + np.arange(at[AXIS_DIM[axis]])
                found.append(rows[rows < at[AXIS_EXTENT[axis]]])
            else:
                found.append(int(self.number(i, at)))
        return self.tensors[name], found

    def count(self, t: Type, at: Values) -> None:
        size = int(np.prod([at[d.removesuffix("_PAD")] for d in t.dims]))
        self.moved += size
        self.moved_bytes += size * (at["elem"] if t.dtype == "T" else 4)

    def run(self, block: str, env: Values, at: Values) -> Values:
        """Run a block and return the values that it yields. `env` has the tiles by name, `at` the numbers."""
        env, at = dict(env), dict(at)
        for op in self.kernel.block(block).ops:
            match op:
                case tile.Loop():
                    carried = {field: env[ref] for field, ref in op.carry}
                    for lo, hi in op.ranges:
                        for i in range(int(self.number(lo, at)), int(self.number(hi, at))):
                            inside = dict(at)
                            self.place(inside, op.var, i)
                            carried = self.run(op.body, {**env, **carried}, inside)
                    env |= {f"{op.name}.{field}": value for field, value in carried.items()}
                case tile.Yield():
                    return {field: env[ref] for field, ref in op.values}
                case _:
                    self.execute(op, env, at)
        return {}

    def execute(self, op: Op, env: Values, at: Values) -> None:
        """Execute an op other than a loop or a yield, and add its results to `env` or `at`."""
        of = self.kernel.type_of
        uses = {k: (env[r] if of(r).dims else at[r], list(of(r).dims)) for k, r in getattr(op, "uses", ())}
        uses = {k: (v, [d.removesuffix("_PAD") for d in dims]) for k, (v, dims) in uses.items()}
        match op:
            case tile.Init():
                env[op.name] = self.tile_of(op.value, at, op.type, {})
            case tile.Load() if op.type.dims:
                self.load(op, env, at)
            case tile.Load():
                tensor, where = self.access(op.src, at)
                at[op.name] = tensor[tuple(where)]
            case tile.Gather():
                tensor, inside = self.tensors[op.src.tensor], self.tile_of(op.where, at, op.type, uses) > 0
                places = tuple(
                    np.where(inside, self.tile_of(e, at, op.type, uses), 0).astype(int) for e in op.src.index
                )
                env[op.name] = np.where(inside, tensor[places], 0)
            case tile.Store():
                tensor, where = self.access(op.dst, at)
                rows = [i for i in where if not isinstance(i, int)]
                part = tensor[tuple(i for i in where if isinstance(i, int))]
                part[np.ix_(*rows)] = env[op.value][tuple(slice(len(r)) for r in rows)]
                self.count(of(op.value), at)
            case tile.Map() if op.type.dims:
                env[op.name] = self.tile_of(op.expr, at, op.type, uses)
            case tile.Map():
                at[op.name] = self.number(op.expr, {**at, **{k: v for k, (v, _) in uses.items()}})
            case tile.Mask():
                seen = self.tile_of(op.where, at, op.type, uses)
                env[op.name] = np.where(seen > 0, env[op.value], -np.inf)
            case tile.Dot():
                self.dot(op, env, at)
            case tile.SoftmaxStep():
                scale = at[op.scale] if op.scale else 1.0
                m = np.maximum(env[op.m], env[op.s].max(axis=1))
                seen = np.where(m == -np.inf, 0, m)
                env[f"{op.name}.p"] = np.exp2(scale * (env[op.s] - seen[:, None]))
                env[f"{op.name}.alpha"] = np.exp2(scale * (env[op.m] - seen))
                env[f"{op.name}.m"] = m
            case tile.Reduce():
                env[op.name] = getattr(env[op.value], op.op)(axis=of(op.value).dims.index(op.over))

    def load(self, op: tile.Load, env: Values, at: Values) -> None:
        """Load a tile; rows past the end of the tensor are `other`."""
        tensor, where = self.access(op.src, at)
        result = np.full([at[d.removesuffix("_PAD")] for d in op.type.dims], float(op.other))
        part = tensor[tuple(i for i in where if isinstance(i, int))]
        rows = [i for i in where if not isinstance(i, int)]
        result[tuple(slice(len(r)) for r in rows)] = part[np.ix_(*rows)]
        env[op.name] = result
        self.count(op.type, at)

    def dot(self, op: tile.Dot, env: Values, at: Values) -> None:
        a, b = self.kernel.type_of(op.a).dims, self.kernel.type_of(op.b).dims
        letters = {d: chr(97 + i) for i, d in enumerate(dict.fromkeys((*a, *b)))}
        term = ["".join(letters[d] for d in dims) for dims in (a, b, op.type.dims)]
        env[op.name] = np.einsum(f"{term[0]},{term[1]}->{term[2]}", env[op.a], env[op.b])
        self.flops += 2 * env[op.name].size * at[op.over.removesuffix("_PAD")]
        if op.acc:
            env[op.name] = env[op.name] + env[op.acc]
