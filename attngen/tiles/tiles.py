"""The number of tiles that the mask leaves: exact counts from the loop ranges in the IR, and their symbolic sum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import sympy
from sympy.core.relational import Relational

from attngen.ir import AXIS_DIM, AXIS_EXTENT, BITS, Expr, Kernel, cdiv, floordiv, mod, symbol, tile
from attngen.ir.split_axes import head_range, ranges, shared
from attngen.tiles.intervals import greatest, least
from attngen.tiles.ranges import rows_of

NO_BOUND = 2**30
POSITION = sympy.Symbol("i", integer=True, nonnegative=True)  # index of the program tile


def tile_loops(kernel: Kernel) -> list[tile.Loop]:
    """Return the loops over tiles. All of them run the same body."""
    return [loop for loop in kernel.loops if loop.cls != "all"]


@cache
def visited(kernel: Kernel, cls: str | None = None) -> Expr:
    """Return the number of tiles that the program at {own}_start visits, in loops of class `cls`, or in all loops over
    tiles if it is None. Programs that split a loop count together."""
    return _iterations(kernel, [loop for loop in tile_loops(kernel) if cls in (None, loop.cls)])


def _iterations(kernel: Kernel, loops: list[tile.Loop]) -> Expr:
    """Return the number of iterations of loops with one body, in all programs that split them. Loops with equal ranges
    count once: each visits its own list of blocks made from data, and no block is in both lists."""
    return sympy.Add(*(hi - lo for lo, hi in dict.fromkeys(pair for loop in loops for pair in ranges(kernel, loop))))


def tile_sum(kernel: Kernel) -> Expr:
    """Return the number of tiles visited for one head, as a symbolic sum over the program tiles."""
    return _over_grid(kernel, visited(kernel))


def _over_grid(kernel: Kernel, iterations: Expr) -> Expr:
    """Return the sum of an expression in {own}_start over the program tiles of one head."""
    start = symbol(f"{kernel.program_axis}_start")
    return sympy.Sum(
        iterations.subs(start, POSITION * symbol(AXIS_DIM[kernel.program_axis])),
        (POSITION, 0, program_tiles(kernel) - 1),
    )


def runs(kernel: Kernel, block: str) -> Expr:
    """Return how often a block runs in one launch: the number of programs times the iterations of the loops around it.

    The kernel may have any grid and any loops. Iterations that programs split among them are counted once for all of
    these programs. Iterations that depend on the program tile are summed over the grid; at most one loop around a block
    may have such iterations.
    """
    if block == "entry":
        return sympy.Mul(*(axis.extent for axis in kernel.grid))
    loops = [loop for loop in kernel.loops if loop.body == block]
    iterations = _iterations(kernel, loops)
    outer = runs(kernel, kernel.graph.nodes[loops[0].name]["block"])
    axis, (first, end) = head_range(kernel, loops[0])
    axes = {axis, *(axis for loop in loops for axis, _ in shared(kernel, loop))}
    outer *= (end - first) / sympy.Mul(
        *(axis.extent for axis in axes if axis)
    )  # these iterations are of all programs together
    if symbol(f"{kernel.program_axis}_start") in iterations.free_symbols:
        return outer / program_tiles(kernel) * _over_grid(kernel, iterations)
    return outer * iterations


def heads(kernel: Kernel) -> Expr:
    """Return the number of heads with separate tiles, over all sequences: query heads, or key heads with pack-GQA; the
    number of sequences for a kernel that prepares."""
    found = symbol("B") * (1 if kernel.traits.prepares else symbol("Hq"))
    return found / symbol("group") if kernel.pack_gqa else found


def repeats(kernel: Kernel) -> Expr:
    """Return the number of programs that visit the same tiles, each for its slice of head_dim (split-D)."""
    return kernel.traits.split_d_axis.extent if kernel.traits.split_d_axis else sympy.Integer(1)


def extent(kernel: Kernel, axis: str) -> Expr:
    """Return the number of rows of a head along an axis, as a formula in the sizes of a call."""
    return symbol("group") * symbol("queries") if kernel.pack_gqa and axis == "q" else symbol(AXIS_EXTENT[axis])


def program_tiles(kernel: Kernel) -> Expr:
    """Return the number of program tiles of one head."""
    return cdiv(extent(kernel, kernel.program_axis), symbol(AXIS_DIM[kernel.program_axis]))


@cache
def _compiled(e: Expr) -> tuple[list[str], Any]:
    """Return the names of the expression's symbols and a Python function of them. sympy prints its source from an
    expression that we built."""
    functions = {
        "floordiv": lambda a, b: a // b,
        "cdiv": lambda a, b: -(-a // b),
        "mod": lambda a, b: a % b,
        "portion": lambda n, i, parts: i * (n // parts) + min(i, n % parts),
        "clamp": lambda x, a, b: min(max(x, a), b),
        "select": lambda c, a, b: a if c else b,
        **{kind.__name__: kind.of for kind in BITS},
    }
    names = sorted(str(s) for s in e.free_symbols)
    return names, sympy.lambdify([symbol(n) for n in names], e, modules=[functions, "math"])


def evaluate(e: Expr, values: Mapping[str, Any]) -> Any:
    """Return the value of an IR expression for these values of its symbols."""
    names, function = _compiled(e)
    return function(*map(values.__getitem__, names))


@cache
def unbounded(kernel: Kernel) -> dict[str, int]:
    """Return values of the mask's run-time scalars, such as lengths, with which they hide nothing."""
    found = dict.fromkeys(("b", "h", "hkv", "g"), 0) | {"group": 1}
    for op in kernel.ops():
        conditions = (op.where, *(e for fact in op.known for e in fact)) if isinstance(op, tile.Mask) else ()
        for s in (s for c in conditions for s in c.free_symbols):
            found.setdefault(str(s), 0)
        for part in (
            part for c in conditions for part in c.atoms(Relational) if not isinstance(part, (sympy.Eq, sympy.Ne))
        ):
            difference = part.lts - part.gts
            for s in difference.free_symbols - {symbol(name) for name in ("b", "h", "hkv", "g", "group")}:
                value = 0 if difference.coeff(s).is_nonnegative and difference.coeff(s) != 0 else NO_BOUND
                found |= dict.fromkeys((str(s), str(least(str(s))), str(greatest(str(s)))), value)
        for part in (part for c in conditions for part in c.atoms(sympy.Eq, sympy.Ne)):
            for name in (str(which(str(s))) for s in part.free_symbols for which in (least, greatest)):
                found.setdefault(name, 0)
        for division in (d for c in conditions for d in c.atoms(floordiv, mod)):
            found |= {str(s): 1 for s in division.args[1].free_symbols}
    return found


@cache
def count_tiles(
    kernel: Kernel,
    n_own: int,
    n_loop: int,
    block_q: int,
    block_kv: int,
    cls: str | None = None,
    reach: int = NO_BOUND,
    queries: int = 1,
) -> int:
    """Return the number of tiles visited for one head with `n_own` rows on the program axis and `n_loop` on the loop's.
    Lengths hide nothing.

    reach: bounds that data gives for each row, such as those of documents, leave this many rows of the loop's axis
    before and after the program tile. The axes are aligned at their last rows.
    queries: rows of each head with pack-GQA.
    """
    own, loop = kernel.program_axis, "kv" if kernel.program_axis == "q" else "q"
    block = {"q": block_q, "kv": block_kv}
    values = {
        **unbounded(kernel),
        "BLOCK_Q": block_q,
        "BLOCK_KV": block_kv,
        AXIS_EXTENT[own]: n_own,
        AXIS_EXTENT[loop]: n_loop,
    }
    values["queries"] = queries
    tiles = visited(kernel, cls)
    extremes = (str(which(name)) for name in rows_of(kernel) for which in (least, greatest))
    by_row = {name: values[name] for name in extremes if name in values}

    def at(start: int) -> dict[str, int]:
        level = start + n_loop - n_own
        near = {0: max(0, level - reach), NO_BOUND: min(NO_BOUND, level + block[own] + reach)}
        return {**values, **{name: near.get(value, value) for name, value in by_row.items()}, f"{own}_start": start}

    return sum(int(evaluate(tiles, at(start))) for start in range(0, n_own, block[own]))
