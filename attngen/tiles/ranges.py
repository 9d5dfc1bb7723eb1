"""Ranges of tiles in closed form: the tiles along a loop that may have visible pairs, and those without hidden pairs.

The mask is a union of conjunctions of literals (see `intervals`). A literal says that an expression is at most 0. The
expression is bounded over all pairs of a row of the program tile and a row of tile j of the loop. Tile j may have
visible pairs if the least value is at most 0, and it has no hidden pair if the greatest value is. A union, such as a
window or the first tokens, gives several runs of tiles with four bounds each. Runs are in rising order, and no tile is
in two of them. A run that contains all tiles of another run for some programs and none for the others is merged with
it: for example, the program of the first keys visits all later queries, and other programs those of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations

import sympy

from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT
from attngen.ir.expr import Bool, Expr, cdiv, conjuncts, flattened, floordiv, mod, select, size, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.kernel import Kernel
from attngen.ir.names import INTEGERS
from attngen.ir.ops import Arg, Dot, Gather, Mask
from attngen.ir.prove import entails, is_given_up, prove_le
from attngen.tiles.intervals import Scene, Term, exceeds_limits, extremes, last_row, mentions, terms, with_rows

Run = tuple[Expr, Expr, Expr, Expr]  # visible start, full start, full end, visible end
MOST_RUNS = 3
# Number of runs times the nodes of all their bounds, as all pairs are compared; with more, all tiles are partial.
MOST_TO_ORDER = 8000
MOST_IN_BOUNDS = 4000  # nodes in the bounds of ordered runs; with more, all tiles are partial
MOST_NODES = 300  # nodes in the bounds of two runs whose order is known only at run time


def scene_of(kernel: Kernel, body: str) -> Scene:
    """Return the Scene of a loop body: the meaning of the symbols in its masks."""
    masks = [op for op in kernel.block(body).ops if isinstance(op, Mask)]
    own = kernel.program_axis
    rows, others = set(), set()
    values = {k: r for m in masks for k, r in m.uses}
    names = {
        str(s) for m in masks for e in (m.where, *(e for fact in m.known for e in fact[1:])) for s in e.free_symbols
    } | values.keys()
    for name in names:
        ref = values.get(name, name)
        if ref.split(".")[0] not in kernel.graph:
            continue
        type_ = kernel.type_of(ref)
        if type_.dtype != "i32" or set(type_.dims) - {AXIS_DIM[own]}:
            others.add(name)
        elif type_.dims:
            rows.add(name)
    facts = tuple(fact for m in masks for fact in m.known)
    whole = any(op.over == AXIS_DIM[own] for op in kernel.block(body).ops if isinstance(op, Dot))
    return Scene(own, "kv" if own == "q" else "q", frozenset(rows), frozenset(others), facts, whole)


@cache
def rows_of(kernel: Kernel) -> frozenset[str]:
    """Return the names of values with one number per row of the program tile that the kernel's masks and facts use."""
    return frozenset(
        name for body in dict.fromkeys(loop.body for loop in kernel.loops) for name in scene_of(kernel, body).rows
    )


def gathers_per_query(op: Gather) -> bool:
    """Whether a gather gives each row of a pack-GQA tile the element of its query."""
    of_head, rows = mod(symbol("q_idx"), symbol("queries")), symbol("q_idx") < symbol("Nq")
    *others, last = op.src.index
    only_last = all(not e.has(symbol("q_idx")) for e in others)
    return last == of_head and only_last and set(conjuncts(op.where)) <= {rows, of_head < symbol("queries")}


def mask_of(kernel: Kernel, body: str) -> Bool:
    """Return the conjunction of the masks in a loop body."""
    return sympy.And(*(op.where for op in kernel.block(body).ops if isinstance(op, Mask)))


def tile_ranges(kernel: Kernel, body: str) -> tuple[Expr, ...]:
    """Return visible start, full start, full end and visible end of each run of the loops over `body`, as tile numbers
    derived from its masks."""
    return classify(mask_of(kernel, body), scene_of(kernel, body))


def needed_rows(kernel: Kernel, body: str) -> tuple[Expr, Expr] | None:
    """Return the first row and the end of the rows along the loop that data allows in visible pairs of the program
    tile.

    None if the rows outside only belong to pairs of other programs, or are known from sizes.
    """
    where, scene = mask_of(kernel, body), scene_of(kernel, body)
    extent = symbol(AXIS_EXTENT[scene.loop])
    firsts, ends = [], []
    for term in terms(where, scene):
        lows: list[Expr] = []
        highs: list[Expr] = []
        for side, rest in (*term.solved, *_known(term, scene)[0].solved):
            seen = extremes(rest, replace(scene, whole=False))
            if side and seen and _is_of_data(kernel, seen[0]) and _excludes(side, seen[0], scene):
                (highs if side > 0 else lows).append(1 - seen[0] if side > 0 else seen[0])
        firsts.append(sympy.Max(*lows) if lows else sympy.Integer(0))
        ends.append(sympy.Min(extent, *highs))
    first = sympy.Integer(0) if 0 in firsts else flattened(sympy.Min(*firsts))
    end = extent if extent in ends else flattened(sympy.Max(*ends))
    return (first, end) if firsts and (first, end) != (0, extent) else None


def _is_of_data(kernel: Kernel, e: Expr) -> bool:
    """Whether an expression depends on data: all its names are in the kernel, and some are not sizes, which shapes
    give."""
    named = {str(s) for s in e.free_symbols} - {f"{axis}_start" for axis in AXIS_EXTENT} - {*AXIS_DIM.values()}
    ops = [kernel.op(name) for name in named if name in kernel.graph]
    return len(ops) == len(named - INTEGERS.keys() | named & kernel.graph.nodes.keys()) and any(
        not isinstance(op, Arg) or op.name not in INTEGERS for op in ops
    )


def _excludes(side: int, rest: Expr, scene: Scene) -> bool:
    """Whether an upper bound may exclude a row for the last program tile, or a lower bound for the first one. Rows that
    it excludes only for other program tiles are in pairs of these."""
    own, extent = symbol(f"{scene.own}_start"), symbol(AXIS_EXTENT[scene.own])
    if side > 0:
        last = rest.xreplace({last_row(scene.own): extent - 1, own: extent - 1})
        return not prove_le(symbol(AXIS_EXTENT[scene.loop]), sympy.expand(1 - last))
    return not prove_le(rest.xreplace({own: sympy.Integer(0)}), sympy.Integer(0))


def shows_nothing(where: Bool) -> bool:
    """Whether a mask hides every pair inside the tensors for any data and any arguments."""
    inside = {scene: sympy.And(where, scene.loop_idx < symbol(AXIS_EXTENT[scene.loop])) for scene in _scenes(where)}
    return any(all(_is_empty(term, scene) for term in terms(e, scene)) for scene, e in inside.items())


def _is_empty(term: Term, scene: Scene) -> bool:
    """Whether no position of any program satisfies one literal of the term: only positions below the first would, or
    none."""
    return any(
        x.side >= 0 and prove_le(sympy.Integer(1), with_rows(x.rest, scene.own, scene.rows)) for x in term.solved
    )


def is_too_long(where: Bool, numbers: frozenset[str] = frozenset()) -> bool:
    """Whether a mask exceeds the limits of the interval solver, or its tile bounds are too long or not proven.

    numbers: names of integer arguments.
    """
    return any(exceeds_limits(where, scene) or _in_bounds(where, scene) is None for scene in _scenes(where, numbers))


def _scenes(where: Bool, numbers: frozenset[str] = frozenset()) -> tuple[Scene, Scene]:
    """Return the scenes of kernels with program tiles of queries and of keys. Symbols other than positions, lengths and
    `numbers` are unknown."""
    others = frozenset({str(s) for s in where.free_symbols} - INTEGERS.keys() - numbers)
    return Scene("q", "kv", others=others), Scene("kv", "q", others=others)


def inexact(kernel: Kernel, body: str, listed: bool = False) -> Iterator[str]:
    """Yield one sentence for each part of the masks in a loop body that is not solved for the loop's index, with the
    reason and the cost.

    listed: whether a kernel evaluates the mask and lists blocks.
    """
    where, scene = mask_of(kernel, body), scene_of(kernel, body)
    for literal in dict.fromkeys(x for term in terms(where, scene) for x in term.unsolved):
        fact = next((f for f in scene.facts if f.literal == literal), None)
        why = "is data" if mentions(literal, scene.others) else f"is not solved for {scene.loop}_idx"
        cost = (
            f"visited where {to_text(fact.needs)}, taken as full where {to_text(fact.enough)}"
            if fact
            else "visited in blocks that @blocks finds to hold something visible, and masked in those that hold "
            "something hidden"
            if listed
            else "all visited that the rest of the mask leaves, and masked"
        )
        yield f"`{to_text(literal)}` {why}: tiles are {cost}"


def classify(where: Bool, scene: Scene) -> tuple[Expr, ...]:
    """Return bounds of tiles along the loop's axis for the program tile at {own}_start: four tile numbers per run.

    The bounds are sound. Every tile with a visible pair inside the tensors is in [visible start, visible end) of one
    run. A tile in [full start, full end) has no hidden or out-of-bounds pair in the relevant rows: the valid rows, or
    all rows if matrix products sum over them. In each run visible start <= full start <= full end <= visible end. Each
    run ends before the next one starts.
    """
    zero = sympy.Integer(0)
    # One run of all tiles, all partial. It needs no proof.
    everything = (zero, zero, zero, cdiv(symbol(AXIS_EXTENT[scene.loop]), symbol(AXIS_DIM[scene.loop])))
    return _in_bounds(where, scene) or everything


@cache
def _in_bounds(where: Bool, scene: Scene) -> tuple[Expr, ...] | None:
    """Return the bounds of runs of tiles; None if they are too long, or if the proof that they rise takes too many
    steps."""
    runs = _merged([_run(term, scene) for term in terms(where, scene)] or [(sympy.Integer(0),) * 4])
    if len(runs) * sum(size(e) for run in runs for e in run) > MOST_TO_ORDER:
        return None
    bounds = [e for run in _in_order(runs, scene) for e in run]
    for i, (before, after) in enumerate(zip(bounds, bounds[1:])):
        # The bounds rise; if this is not provable, a maximum makes it so.
        if not prove_le(with_rows(before, scene.own, scene.rows), with_rows(after, scene.own, scene.rows)):
            bounds[i + 1] = sympy.Max(before, after)
    ends = [sympy.Integer(0), *(flattened(e) for e in bounds)]
    known = [with_rows(e, scene.own, scene.rows) for e in ends]
    pairs = ((first, e) for at, e in enumerate(known) for first in (known[0], known[max(0, at - 1)]))
    if sum(map(size, ends)) > MOST_IN_BOUNDS or any(is_given_up(*pair) for pair in pairs):
        return None
    return tuple(ends[1:])


def _run(term: Term, scene: Scene) -> Run:
    """Return the run of tiles of one conjunction."""
    block, extent = symbol(AXIS_DIM[scene.loop]), symbol(AXIS_EXTENT[scene.loop])
    lows: list[Expr] = [sympy.Integer(0)]
    highs: list[Expr] = [extent]
    full_lows: list[Expr] = [sympy.Integer(0)]
    full_highs: list[Expr] = [extent]
    shown: list[Bool] = []  # conditions on the program tile; if one is false, no tile is visible
    full: list[Bool] = []  # conditions on the program tile; if one is false, no tile is full

    def bound(side: int, rest: Expr, lows: list[Expr], highs: list[Expr], conditions: list[Bool]) -> None:
        """Add side * x + rest <= 0 for positions x: as a lower bound, an exclusive upper bound, or a condition if
        `side` is 0."""
        if side > 0:
            highs.append(1 - rest)
        elif side < 0:
            lows.append(rest)
        elif not prove_le(with_rows(rest, scene.own, scene.rows), sympy.Integer(0)):  # a program tile is not empty
            conditions.append(_condition(rest))

    needs, enough = _known(term, scene)
    for of, (visible, everywhere) in ((term, (True, True)), (needs, (True, False)), (enough, (False, True))):
        for side, rest in of.solved:
            seen, found = extremes(rest, replace(scene, whole=False)), extremes(rest, scene)
            if visible and seen:
                bound(side, seen[0], lows, highs, shown)
            if of is needs and side and seen:  # if nothing is visible, `enough` may start past the visible end
                bound(side, seen[0], full_lows, full_highs, full)
            if everywhere and found:
                bound(side, found[1], full_lows, full_highs, full)
            elif everywhere:
                full_highs.append(sympy.Integer(0))
    full_highs += [sympy.Integer(0)] * len(enough.unsolved)

    def at_most(e: Expr, end: Expr) -> Expr:
        """Return e, clamped to `end` unless it is proven never to pass it. Bounds from facts about data are data too,
        and nothing relates them."""
        return (
            e
            if prove_le(with_rows(e, scene.own, scene.rows), with_rows(end, scene.own, scene.rows))
            else sympy.Min(e, end)
        )

    last = cdiv(sympy.Max(0, sympy.Min(*highs)), block)
    end = _where(shown, last)
    start = _where(shown, sympy.Min(floordiv(sympy.Max(*lows), block), last))
    # At least `start`, because each bound is at least the visible one.
    full_start = _where(shown, at_most(cdiv(sympy.Max(*full_lows), block), last))
    full_end = sympy.Max(full_start, _where(full, floordiv(sympy.Max(0, sympy.Min(*full_highs)), block)))
    return start, full_start, at_most(full_end, end), end


def _known(term: Term, scene: Scene) -> tuple[Term, Term]:
    """Return two conditions on the unsolved literals of a term, each as a single term: one that they imply, and one
    that implies all of them."""
    facts = [next((f for f in scene.facts if f.literal == literal), None) for literal in term.unsolved]
    needs = _single(sympy.And(*(fact.needs for fact in facts if fact)), scene)
    enough = _single(sympy.And(*(fact.enough for fact in facts if fact)), scene)
    unknown = tuple(literal for fact, literal in zip(facts, term.unsolved) if fact is None)
    return needs, enough._replace(unsolved=(*enough.unsolved, *unknown))


def _single(e: Bool, scene: Scene) -> Term:
    """Return the condition as one term; unsolved if it is not one conjunction."""
    found = terms(e, replace(scene, facts=()))
    return found[0] if len(found) == 1 else Term((), (e,))


def _where(conditions: list[Bool], tile: Expr) -> Expr:
    """Return `tile` if all conditions hold, else 0. Conditions that another implies are left out."""
    for i, condition in enumerate(conditions):
        others = ((j, c) for j, c in enumerate(conditions) if j != i and entails(c, condition))
        if any(j < i or not entails(condition, c) for j, c in others):
            continue
        tile = select(condition, tile, sympy.Integer(0))
    return tile


def _condition(rest: Expr) -> Bool:
    """Return rest <= 0 over integers, with every term on the side where it is positive."""
    parts = sympy.Add.make_args(sympy.expand(rest))
    right = sympy.Add(*(-t for t in parts if t.could_extract_minus_sign()))
    left = sympy.expand(rest + right)
    return left - 1 < right if left.as_coeff_Add()[0] >= 1 else left <= right


def _merged(runs: list[Run]) -> list[Run]:
    """Merge runs with the same visible start and full start, and runs with the same full end and visible end."""
    kept: list[Run] = []
    for run in dict.fromkeys(runs):
        for i, other in enumerate(kept):
            if run[:2] == other[:2]:
                kept[i] = (*run[:2], sympy.Max(run[2], other[2]), sympy.Max(run[3], other[3]))
                break
            if run[2:] == other[2:]:
                kept[i] = (sympy.Min(run[0], other[0]), sympy.Min(run[1], other[1]), *run[2:])
                break
        else:
            kept.append(run)
    return kept


def _to_merge(runs: list[Run], rises: Callable[[Expr, Expr], bool]) -> tuple[int, int] | None:
    """Return the indices of two runs to merge, or None. The merged run has the full tiles of the first one.

    Runs are merged if there are more than MOST_RUNS, or if too much of their order is known only at run time.
    """
    pairs = [(i, j) for j in range(len(runs)) for i in range(j)]
    unknown = [(i, j) for i, j in pairs if not rises(runs[i][0], runs[j][0]) and not rises(runs[j][0], runs[i][0])]
    large = any(
        sum(1 for e in (*runs[i], *runs[j]) for _ in sympy.preorder_traversal(e)) > MOST_NODES for i, j in unknown
    )
    if len(unknown) > 1 or large:
        return unknown[-1]
    return (len(runs) - 2, len(runs) - 1) if len(runs) > MOST_RUNS else None


def _merged_if_conditional(wide: Run, run: Run, rises: Callable[[Expr, Expr], bool]) -> Run | None:
    """Return one run for two if `wide` contains all tiles of `run` where a condition on the program tile holds, and no
    tile elsewhere; else None."""
    if not isinstance(wide[3], select) or wide[3].args[2] != 0:
        return None
    condition = wide[3].args[0]
    start, full_start, full_end, end = (_where_true(condition, e) for e in wide)
    if not (rises(run[3], end) and rises(sympy.Min(start, run[3]), run[0])):
        return None
    last = select(condition, end, run[3])

    def either(x: Expr, y: Expr) -> Expr:
        """Return x if the condition holds, else y. If these differ only in the runs' ends, use one expression with the
        selected end."""
        return y.xreplace({run[3]: last}) if x == y.xreplace({run[3]: end}) else select(condition, x, y)

    return either(start, run[0]), either(full_start, run[1]), either(full_end, run[2]), last


def _where_true(condition: Bool, e: Expr) -> Expr:
    """Return the expression simplified under the assumption that a condition holds."""
    return e.replace(lambda x: isinstance(x, select) and x.args[0] == condition, lambda x: x.args[1])


def _in_order(runs: list[Run], scene: Scene) -> list[Run]:
    """Return the runs in rising order, each clamped to start where the one before it ends."""

    def rises(a: Expr, b: Expr) -> bool:
        return prove_le(with_rows(a, scene.own, scene.rows), with_rows(b, scene.own, scene.rows))

    # Merge a run into one that contains it and has no full tiles: the result has the full tiles of the inner run.
    for inner, outer in permutations(runs, 2):
        if (
            inner in runs
            and outer in runs
            and outer[1] == outer[2]
            and rises(outer[0], inner[0])
            and rises(inner[3], outer[3])
        ):
            runs = [(outer[0], *inner[1:3], outer[3]) if run == outer else run for run in runs if run != inner]
    for wide, inner in permutations(runs, 2):
        if wide in runs and inner in runs and (one := _merged_if_conditional(wide, inner, rises)) is not None:
            runs = [one if run == inner else run for run in runs if run != wide]
    while found := _to_merge(runs, rises):
        i, j = found
        (a, b, c, d), (e, _, _, f) = runs[i], runs[j]
        runs = [*runs[:i], (sympy.Min(a, e), b, c, sympy.Max(d, f)), *runs[i + 1 : j], *runs[j + 1 :]]
    for end in range(len(runs) - 1, 0, -1):  # sort by start; which run starts first may be known only at run time
        for i in range(end):
            first, second = runs[i], runs[i + 1]
            if rises(first[0], second[0]):
                continue
            if rises(second[0], first[0]):
                runs[i], runs[i + 1] = second, first
                continue
            ahead = first[0] <= second[0]
            runs[i] = tuple(select(ahead, x, y) for x, y in zip(first, second))  # type: ignore[assignment]
            runs[i + 1] = tuple(select(ahead, y, x) for x, y in zip(first, second))  # type: ignore[assignment]
    ordered = runs[:1]
    for run in runs[1:]:
        done = ordered[-1][3]
        if rises(run[3], done):  # earlier runs have all its tiles
            continue
        cut = (e if rises(done, e) else sympy.Max(e, done) for e in run)
        ordered.append(tuple(cut))
    return ordered
