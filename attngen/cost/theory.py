"""Theorems on attention's traffic, work and memory. Counts come from the loops, loads and stores of the IR, orders from
limits that sympy computes.

A count is for one head with N queries and N keys. Both head dimensions are d (they differ by a constant factor at
most). Ceilings are relaxed to quotients, as if N were a multiple of tile sizes. M is the on-chip memory of a program,
in elements. A count is Theta(order) if the limit of count / order is finite and positive in every regime that the
theorem names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import sympy

from attngen.cost.algorithms import kernels
from attngen.cost.flops import TILES, executed_flops, flops, useful_flops
from attngen.cost.io import traffic
from attngen.cost.roofline import config_of
from attngen.ir import WHOLE, Expr, Kernel, Module, cdiv, floordiv, select, symbol, tile, to_text
from attngen.ir.names import CALL_ROWS, DIRECTIONS, SHARES, of_sequence
from attngen.targets.registry import backend_of
from attngen.tiles.sizes import elem_sizes, elements
from attngen.tiles.tiles import NO_BOUND, evaluate, repeats, runs, tile_loops, unbounded, visited

N, D, M = sympy.symbols("N d M", positive=True)  # rows, head dimension, elements on chip
SHARE = sympy.Symbol("s", positive=True)  # share of the tiles that are visited
BETA = sympy.Symbol("beta", positive=True)  # any constant
B_R, B_C = sympy.symbols("B_r B_c", positive=True)  # the papers' names for BLOCK_Q and BLOCK_KV
ONE_HEAD = {
    **{symbol(name): sympy.Integer(1) for name in ("B", "Hq", "Hkv", "group", "queries", *SHARES.values())},
    **{symbol(name): N for name in ("Nq", "Nk", *CALL_ROWS.values())},
    **{symbol(name): D for name in ("D_QK", "D_V", *WHOLE)},  # one program has all columns
    **{symbol(name): D / 2 for name in ("PAIRS_QK", "PAIRS_V")},
    symbol("BLOCK_Q"): B_R,
    symbol("BLOCK_KV"): B_C,
}
TILE = {"q": B_R, "kv": B_C}
FLASH = N**2 * D**2 / M
PAPER, PAPER_2 = "FlashAttention", "FlashAttention-2"  # Dao et al. 2022, with its appendix B; Dao 2023


@dataclass(frozen=True)
class Regime:
    """A path to infinity: first the pairs in `where` replace symbols, one after another; then the symbols in `grow` go
    to infinity, one after another."""

    name: str
    where: tuple[tuple[Expr, Expr], ...] = ()
    grow: tuple[Expr, ...] = (N, D)

    def limit(self, ratio: Expr) -> Expr:
        for old, new in self.where:
            ratio = ratio.subs(old, new)
        return _limit(ratio, self.grow)


@cache
def _limit(ratio: Expr, grow: tuple[Expr, ...]) -> Expr:
    """The limit of a ratio of polynomials as symbols grow, one after another. Cached, because modules share most
    ratios."""
    for variable in grow:
        ratio = sympy.limit(sympy.factor(ratio), variable, sympy.oo)
    found = sympy.simplify(ratio)
    return min(sympy.expand(found), found, key=sympy.count_ops)


@dataclass(frozen=True, eq=False)
class Theorem:
    """The statement that `count`, derived from the IR, is Theta(order) in each of the regimes.

    given: the tile sizes for which this is stated.
    says: text to print instead of Theta(order).
    """

    claim: str
    source: str
    count: Expr
    order: Expr
    regimes: tuple[Regime, ...]
    given: str = ""
    says: str = ""

    @cached_property
    def limits(self) -> dict[str, Expr]:
        """The limit of count over order, by the regime's name: the constant that Theta hides."""
        return {regime.name: regime.limit(self.count / self.order) for regime in self.regimes}

    @property
    def holds(self) -> bool:
        return all(limit.is_finite and limit.is_positive for limit in self.limits.values())


# ---------------------------------------------------------------------------------------------- counts


def one_head(e: Expr) -> Expr:
    """An expression of the IR for one head of N rows and head_dim d, with ceilings and floors relaxed to quotients."""
    relaxed = e.replace(lambda x: isinstance(x, (cdiv, floordiv)), lambda x: x.args[0] / x.args[1])
    return sympy.expand(relaxed.subs(ONE_HEAD))


def moved(some: Iterable[Kernel]) -> Expr:
    """Elements that kernels load and store, counted from their loops."""
    return one_head(sympy.Add(*(traffic(kernel, elements, partial(runs, kernel)) for kernel in some)))


def moved_at_share(kernel: Kernel, share: Expr) -> Expr:
    """Elements that a generated kernel loads and stores if its loops visit a share of the tiles."""
    visits = share * N**2 / (B_R * B_C)
    return sympy.expand(one_head(traffic(kernel, elements, partial(_or_tiles, kernel))).subs(TILES, visits))


def _or_tiles(kernel: Kernel, block: str) -> Expr:
    """The number of times that a block runs: the symbol `tiles` for the body of the loops over tiles, `runs` for any
    other block."""
    return TILES * repeats(kernel) if block in {loop.body for loop in tile_loops(kernel)} else runs(kernel, block)


def visible_share(kernel: Kernel) -> Expr:
    """The limit, as N grows, of the share of tiles that a generated kernel visits. Run-time lengths are assumed to hide
    nothing.

    Rounding to tiles adds less than one tile at each end of a range. This vanishes in the limit, so tiles of one row
    are counted. A program at row x*N visits height(x)*N of them. The share is the integral of height(x) from 0 to 1.
    """
    place, own = sympy.Symbol("x", positive=True), symbol(f"{kernel.program_axis}_start")
    lengths = {symbol(name): sympy.oo if value == NO_BOUND else value for name, value in unbounded(kernel).items()}
    sizes = {symbol("Nq"): N, symbol("Nk"): N, symbol("BLOCK_Q"): 1, symbol("BLOCK_KV"): 1, own: place * N}
    if visited(kernel).subs(sizes).has(floordiv, select):
        return _sampled_share(kernel)
    height = _height(visited(kernel).subs({**lengths, **sizes}))
    return sympy.integrate(height.rewrite(sympy.Piecewise), (place, 0, 1))


def _sampled_share(kernel: Kernel) -> Expr:
    """`visible_share` to three digits, from programs spread evenly over many rows, for masks whose bounds have floor
    divisions or selections."""
    rows, programs = 2**28, 1024
    sizes = {**unbounded(kernel), "BLOCK_Q": 1, "BLOCK_KV": 1, **dict.fromkeys(("Nq", "Nk", *CALL_ROWS.values()), rows)}
    starts = range(rows // programs // 2, rows, rows // programs)
    seen = sum(int(evaluate(visited(kernel), {**sizes, f"{kernel.program_axis}_start": start})) for start in starts)
    return sympy.Rational(round(1000 * seen / programs / rows), 1000)


def _height(e: Expr) -> Expr:
    """The limit of e / N as N grows, taken inside minima, maxima and sums, which are continuous."""
    factor, rest = e.as_independent(N, as_Add=False)
    if isinstance(rest, (sympy.Min, sympy.Max, sympy.Add)):
        return factor * rest.func(*map(_height, rest.args))
    return sympy.limit(e / N, N, sympy.oo)


def saved_tensors(forward: Iterable[Kernel], backward: Iterable[Kernel]) -> list[tile.Arg]:
    """Tensors kept for the backward only: those that the forward writes and the backward reads, except the output."""
    written = {arg.name for kernel in forward for arg in kernel.args if arg.role in ("out", "inout")}
    read = {arg.name: arg for kernel in backward for arg in kernel.args if arg.role in ("in", "inout")}
    return [arg for name, arg in read.items() if name in written - {"O"}]


def on_chip(module: Module, kernel: Kernel, cls: str) -> Expr:
    """Elements of shared memory that a program needs on a device class, by the module's SRAM formula and number of
    pipeline stages."""
    elem, config = elem_sizes(module)[0], config_of(module, kernel, cls, NO_BOUND)
    assert config is not None, f"no tile fits {cls}"
    formula = (
        backend_of(config)
        .resources.formula(module, kernel, config)
        .subs({symbol("elem"): elem, symbol("stages"): config.num_stages})
    )
    return sympy.expand(one_head(formula) / elem)


# ---------------------------------------------------------------------------------------------- theorems

EXACT = Regime("every N and d")  # the count is a constant times the order, or the limit is not finite


def theorems(module: Module, cls: str = "sm90") -> dict[str, list[Theorem]]:
    """All theorems by subject. `module`, in the target phase, is the generated schedule, with the tile sizes of a
    device class."""
    return {
        "Traffic of standard attention": standard(),
        "Traffic of FlashAttention-1": flash1(),
        "Traffic of the schedule that we emit": emitted(module, cls),
        "Lower bound, for d <= M <= N*d": lower_bound(module),
        "FLOPs, if no tile is skipped": work(module),
        "Memory saved for the backward": memory(module),
    }


def standard() -> list[Theorem]:
    tiles = ((B_R, BETA * D), (B_C, BETA * D))
    regimes = (Regime("d fixed", tiles), Regime("N = d", (*tiles, (N, D)), (D,)))
    given = "tiles of beta*d by beta*d, which need M = Omega(d**2)"
    return [
        Theorem(
            direction, f"{PAPER}, theorem {number}", moved(kernels("standard", direction)), N * D + N**2, regimes, given
        )
        for direction, number in (("forward", 2), ("backward", 5))
    ]


def flash1() -> list[Theorem]:
    columns = (B_C, M / (4 * D))
    regimes = (
        Regime("M = beta*d, B_r = B_c", (columns, (B_R, M / (4 * D)), (M, BETA * D))),
        Regime("M = beta*d**2, B_r = d", (columns, (B_R, D), (M, BETA * D**2))),
        Regime("M = N*d, B_r = d", (columns, (B_R, D), (M, N * D))),
    )
    given = "B_c = M/(4*d), B_r = min(B_c, d)"
    return [
        Theorem(direction, f"{PAPER}, theorem {number}", moved(kernels("flash1", direction)), FLASH, regimes, given)
        for direction, number in (("forward", 2), ("backward", 5))
    ]


def emitted(module: Module, cls: str) -> list[Theorem]:
    """Theorems on each kernel. Kernels without a loop over tiles get one, on their traffic. Others get up to three: a
    program's tile has Theta(M / d) rows; the traffic at the share of tiles that the mask leaves, unless it tends to 0;
    the traffic at any share s.

    A kernel with ordered adds has none: its backend fixes its tile sizes, which do not grow with M.
    """
    found = []
    for kernel in (k for k in module.kernels if not k.traits.adds_in_order):
        if not tile_loops(kernel):
            found.append(
                Theorem(
                    f"@{kernel.name}", "", moved([kernel]), N if kernel.traits.prepares else N * D, (Regime("any M"),)
                )
            )
            continue
        biased = any({"Nq", "Nk"} <= set(of_sequence(i.shape)) for i in module.inputs)
        dense = N**2 if biased else sympy.Integer(0)  # an input of the size of the scores
        room, share = on_chip(module, kernel, cls), visible_share(kernel)
        regimes, rows = _regimes(kernel, room), TILE[kernel.program_axis]
        given = f"tiles that fill M = {to_text(room)}, the SRAM of {cls}"
        found.append(Theorem(f"@{kernel.name}, rows of a program", f"{PAPER}, theorem 2", rows, M / D, regimes, given))
        if share.is_positive:
            claim = f"@{kernel.name}, whose mask leaves {'at most ' if module.inputs else ''}{_share_text(share)}"
            found.append(
                Theorem(claim, f"{PAPER}, theorems 2 and 5", moved_at_share(kernel, share), FLASH + dense, regimes)
            )
        claim, none = (
            f"@{kernel.name}, block-sparse, a share s of the tiles",
            Regime("s = 0", ((SHARE, sympy.Integer(0)),)),
        )
        claim += "" if share.is_positive else ", which tends to 0 under its mask"
        count, order = moved_at_share(kernel, SHARE), N * D + SHARE * (FLASH + dense)
        found.append(Theorem(claim, f"{PAPER}, proposition 4", count, order, (*regimes, none)))
    return found


def _share_text(share: Expr) -> str:
    return "all tiles" if share == 1 else f"{to_text(share)} of the tiles"


def _regimes(kernel: Kernel, room: Expr) -> tuple[Regime, ...]:
    """Regimes from the smallest on-chip memory to one that holds all rows. Tiles fill it. They are square up to order d
    rows; then the side along the loop stays at d, and that along the program axis grows."""
    own, other = (TILE[axis] for axis in (("q", "kv") if kernel.program_axis == "q" else ("kv", "q")))

    def regime(name: str, rows: Expr, columns: Expr) -> Regime:
        tiles = ((own, rows), (other, columns))
        return Regime(name, ((M, _at_large(room.subs(tiles))), *tiles))

    return (
        regime("M = Theta(d), tiles beta by beta", BETA, BETA),
        regime("M = Theta(d**2), beta*d by beta*d", BETA * D, BETA * D),
        regime("M = Theta(d**2), beta*d by d", BETA * D, D),
        regime("M = Theta(N*d), N by d", N, D),
    )


def _at_large(e: Expr) -> Expr:
    """The expression with each maximum replaced by its largest argument for N >> d >> beta = 1, because sympy takes no
    limits of maxima."""
    sizes = {N: 2**60, D: 2**20, BETA: 1}
    return e.replace(sympy.Max, lambda *parts: max(parts, key=lambda part: part.subs(sizes)))


def lower_bound(module: Module) -> list[Theorem]:
    """The bound N**2 d**2 / M at both ends, M = d and M = N*d; the elements that any algorithm must move at M = N*d;
    and the traffic of standard attention, with the M above which it exceeds the bound."""
    tensors = [arg for arg in module.kernel("fwd").args if set(arg.type.dims) & {"D_QK", "D_V"}]
    once = one_head(sympy.Add(*(elements(arg.type) for arg in tensors)))
    source, flash = f"{PAPER}, proposition 3", to_text(FLASH)
    return [
        Theorem(f"{flash} at M = d", source, FLASH.subs(M, D), N**2 * D, (EXACT,)),
        Theorem(f"{flash} at M = N*d", source, FLASH.subs(M, N * D), N * D, (EXACT,)),
        Theorem("q, k, v and o moved once, at M = N*d", source, once, FLASH, (Regime("M = N*d", ((M, N * D),)),)),
        Theorem("standard attention", source, N * D + N**2, FLASH, (Regime("d and M fixed", grow=(N,)),),
                says=f"more than {flash} where M > {to_text(crossover())}"),
    ]  # fmt: skip


def crossover() -> Expr:
    """The M, in elements, above which N**2 d**2 / M is below N**2, the leading term of standard attention."""
    (root,) = sympy.solve(sympy.Eq(FLASH, N**2), M)
    return root


def work(module: Module) -> list[Theorem]:
    """Theorems on the FLOPs of products, counted from the dots in the IR."""

    def textbook(name: str, direction: str) -> Expr:
        return sympy.Add(*(flops(kernel, partial(runs, kernel)) for kernel in kernels(name, direction)))

    run = sympy.Add(*(executed_flops(kernel) for kernel in module.kernels_of("backward")))  # 0 where there is none
    counts = (
        ("forward of standard attention", f"{PAPER}, algorithm 0", textbook("standard", "forward")),
        ("backward of standard attention", f"{PAPER}, algorithm 3", textbook("standard", "backward")),
        ("forward of FlashAttention-1", f"{PAPER}, theorem 1", textbook("flash1", "forward")),
        ("backward of FlashAttention-1", f"{PAPER}, algorithm 4", textbook("flash1", "backward")),
        ("forward of ours", f"{PAPER_2}, section 3.1", useful_flops(module, "forward")),
        ("backward of ours, each product once", f"{PAPER_2}, section 3.1", useful_flops(module, "backward")),
        ("backward of ours as run: each kernel computes the scores and dP that it needs", "", run),
    )
    all_tiles = {TILES: N**2 / (B_R * B_C)}
    return [
        Theorem(claim, source, one_head(count).subs(all_tiles), N**2 * D, (EXACT,))
        for claim, source, count in counts
        if count != 0
    ]


def memory(module: Module) -> list[Theorem]:
    """Theorems on the elements that the forward writes and the backward reads, without the output."""
    own = [module.kernels_of(direction) for direction in DIRECTIONS]
    standard, flash1 = ([kernels(name, direction) for direction in DIRECTIONS] for name in ("standard", "flash1"))
    found = []
    for name, source, order, (forward, backward) in (
        ("standard attention", f"{PAPER}, algorithm 3", N**2, standard),
        ("FlashAttention-1", f"{PAPER}, theorem 1", N, flash1),
        *([("ours", f"{PAPER_2}, section 3.1", N, own)] if module.trains else []),
    ):
        kept = saved_tensors(forward, backward)
        names = " and ".join(f"{arg.name} in {'fp32' if arg.type.dtype == 'f32' else '`T`'}" for arg in kept)
        count = one_head(sympy.Add(*(elements(arg.type) for arg in kept)))
        found.append(Theorem(f"{name}: {names}", source, count, order, (EXACT,)))
    return found
