"""Ranges of tiles in closed form: the tiles along a loop that may have visible pairs, and those without hidden pairs.

The mask is a union of conjunctions of literals (see `intervals`). A literal says that an expression is at most 0. The
expression is bounded over all pairs of a program tile and tile j of the loop. Tile j may have visible pairs if the
least value is at most 0. It has no hidden pair if the greatest value is at most 0.

A conjunction gives one run of consecutive tiles, with four bounds: visible start, full start, full end and visible end.
A union, such as a window or the first tokens, gives several runs. They are in rising order, and no tile is in two of
them. Some runs are merged (see `_in_order`). For example, under a window or the first tokens, the program of the first
keys visits all later queries, and each other program only those of its window: this is one run, whose end depends on
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations

import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Kernel, only, tile
from attngen.ir.expr import Bool, Expr, cdiv, conjuncts, flattened, floordiv, mod, select, size, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.names import INTEGERS
from attngen.ir.prove import entails, is_given_up, prove_le
from attngen.tiles.intervals import MaskContext, Term, exceeds_limits, extremes, last_row, mentions, terms, with_rows

Run = tuple[Expr, Expr, Expr, Expr]  # visible start, full start, full end, visible end
MOST_RUNS = 3  # with more, the last two are merged
# Limit on the work of ordering runs, which compares all pairs of them: the number of runs times the number of
# expression nodes in all their bounds. Beyond it, all tiles are partial.
MOST_ORDERING_NODES = 8000
MOST_BOUND_NODES = 4000  # expression nodes in the bounds of the ordered runs; with more, all tiles are partial
# Expression nodes in the bounds of two runs whose order is known only at run time; with more, the two are merged.
MOST_NODES_IN_ANY_ORDER = 300


def mask_context(kernel: Kernel, body: str) -> MaskContext:
    """Return the context of the masks in a loop body: the meaning of their symbols."""
    masks = list(only(kernel.block(body).ops, tile.Mask))
    axis = kernel.program_axis
    rows, others = set(), set()
    bound_values = {name: value for m in masks for name, value in m.uses}
    names = {
        str(s) for m in masks for e in (m.where, *(e for fact in m.known for e in fact[1:])) for s in e.free_symbols
    } | bound_values.keys()
    for name in names:
        ref = bound_values.get(name, name)
        if ref.split(".")[0] not in kernel.graph:
            continue
        type_ = kernel.type_of(ref)
        if type_.dtype != "i32" or set(type_.dims) - {AXIS_DIM[axis]}:
            others.add(name)
        elif type_.dims:
            rows.add(name)
    facts = tuple(fact for m in masks for fact in m.known)
    whole = any(op.over == AXIS_DIM[axis] for op in only(kernel.block(body).ops, tile.Dot))
    return MaskContext(axis, "kv" if axis == "q" else "q", frozenset(rows), frozenset(others), facts, whole)


@cache
def rows_of(kernel: Kernel) -> frozenset[str]:
    """Return the names of values with one number per row of the program tile that the kernel's masks and facts use."""
    return frozenset(
        name for body in dict.fromkeys(loop.body for loop in kernel.loops) for name in mask_context(kernel, body).rows
    )


def gathers_per_query(op: tile.Gather) -> bool:
    """True if a gather gives each row of a pack-GQA tile the element of its query."""
    of_head, rows = mod(symbol("q_idx"), symbol("queries")), symbol("q_idx") < symbol("Nq")
    *others, last = op.src.index
    only_last = all(not e.has(symbol("q_idx")) for e in others)
    return last == of_head and only_last and set(conjuncts(op.where)) <= {rows, of_head < symbol("queries")}


def mask_of(kernel: Kernel, body: str) -> Bool:
    """Return the conjunction of the masks in a loop body."""
    return sympy.And(*(op.where for op in only(kernel.block(body).ops, tile.Mask)))


def tile_ranges(kernel: Kernel, body: str) -> tuple[Expr, ...]:
    """Return visible start, full start, full end and visible end of each run of the loops over `body`, as tile numbers
    derived from its masks."""
    return classify(mask_of(kernel, body), mask_context(kernel, body))


def needed_rows(kernel: Kernel, body: str) -> tuple[Expr, Expr] | None:
    """Return the first row and the end of the rows along the loop that the program tile may see, by bounds on data such
    as `kv_lengths`.

    A bound counts only if it may exclude a row for all programs: no query sees such a row, so it may hold NaN. Bounds
    that follow from sizes do not count. Return None if no bound counts.
    """
    where, context = mask_of(kernel, body), mask_context(kernel, body)
    extent = symbol(AXIS_EXTENT[context.loop])
    firsts, ends = [], []
    for term in terms(where, context):
        lows: list[Expr] = []
        highs: list[Expr] = []
        for side, rest in (*term.solved, *_known(term, context)[0].solved):
            extreme = extremes(rest, replace(context, whole=False))
            if side and extreme and _is_of_data(kernel, extreme[0]) and _may_exclude(side, extreme[0], context):
                (highs if side > 0 else lows).append(1 - extreme[0] if side > 0 else extreme[0])
        firsts.append(sympy.Max(*lows) if lows else sympy.Integer(0))
        ends.append(sympy.Min(extent, *highs))
    first = sympy.Integer(0) if 0 in firsts else flattened(sympy.Min(*firsts))
    end = extent if extent in ends else flattened(sympy.Max(*ends))
    return (first, end) if firsts and (first, end) != (0, extent) else None


def _is_of_data(kernel: Kernel, e: Expr) -> bool:
    """True if an expression depends on data, and the kernel has a value for each of its names."""
    names = {str(s) for s in e.free_symbols} - {f"{axis}_start" for axis in AXIS_EXTENT} - {*AXIS_DIM.values()}
    ops = [kernel.op(name) for name in names if name in kernel.graph]
    # A name that is neither in the graph nor a size is not known in the kernel.
    return len(ops) == len(names - INTEGERS.keys() | names & kernel.graph.nodes.keys()) and any(
        not isinstance(op, tile.Arg) or op.name not in INTEGERS for op in ops
    )


def _may_exclude(side: int, rest: Expr, context: MaskContext) -> bool:
    """True if a bound may exclude a row of the loop for all programs.

    An upper bound may, unless it is proven to leave every row for the program of the last row. A lower bound may,
    unless it is proven to leave every row for the first program. Otherwise each row that the bound excludes for one
    program is left for another one.
    """
    start, extent = symbol(f"{context.axis}_start"), symbol(AXIS_EXTENT[context.axis])
    if side > 0:
        last = rest.xreplace({last_row(context.axis): extent - 1, start: extent - 1})
        return not prove_le(symbol(AXIS_EXTENT[context.loop]), sympy.expand(1 - last))
    return not prove_le(rest.xreplace({start: sympy.Integer(0)}), sympy.Integer(0))


def shows_nothing(where: Bool) -> bool:
    """True if a mask hides every pair inside the tensors for any data and any arguments."""
    inside = {
        context: sympy.And(where, context.loop_idx < symbol(AXIS_EXTENT[context.loop])) for context in _contexts(where)
    }
    return any(all(_is_empty(term, context) for term in terms(e, context)) for context, e in inside.items())


def _is_empty(term: Term, context: MaskContext) -> bool:
    """True if a literal of the term holds at no position of any program: it needs a negative position (side 1), or is
    false at all positions (side 0)."""
    return any(
        x.side >= 0 and prove_le(sympy.Integer(1), with_rows(x.rest, context.axis, context.rows)) for x in term.solved
    )


def is_too_complex(where: Bool, numbers: frozenset[str] = frozenset()) -> bool:
    """True if a mask exceeds the limits of the interval solver, or its tile bounds exceed those of `classify`.

    numbers: names of integer arguments.
    """
    return any(
        exceeds_limits(where, context) or _bounds_within_limits(where, context) is None
        for context in _contexts(where, numbers)
    )


def _contexts(where: Bool, numbers: frozenset[str] = frozenset()) -> tuple[MaskContext, MaskContext]:
    """Return two contexts, for kernels that own query tiles and for kernels that own key tiles. Symbols other than
    positions, lengths and `numbers` are unknown."""
    others = frozenset({str(s) for s in where.free_symbols} - INTEGERS.keys() - numbers)
    return MaskContext("q", "kv", others=others), MaskContext("kv", "q", others=others)


def inexact(kernel: Kernel, body: str, listed: bool = False) -> Iterator[str]:
    """Yield one sentence for each part of the masks in a loop body that is not solved for the loop's index, with the
    reason and the cost.

    listed: whether a kernel evaluates the mask and lists blocks.
    """
    where, context = mask_of(kernel, body), mask_context(kernel, body)
    for literal in dict.fromkeys(x for term in terms(where, context) for x in term.unsolved):
        fact = next((f for f in context.facts if f.literal == literal), None)
        why = "is data" if mentions(literal, context.others) else f"is not solved for {context.loop}_idx"
        cost = (
            f"visited where {to_text(fact.needs)}, taken as full where {to_text(fact.enough)}"
            if fact
            else "visited in blocks that @blocks finds to hold something visible, and masked in those that hold "
            "something hidden"
            if listed
            else "all visited that the rest of the mask leaves, and masked"
        )
        yield f"`{to_text(literal)}` {why}: tiles are {cost}"


def classify(where: Bool, context: MaskContext) -> tuple[Expr, ...]:
    """Return bounds of tiles along the loop's axis for the program tile at {own}_start: four tile numbers per run.

    The bounds are sound. Every tile with a visible pair inside the tensors is in [visible start, visible end) of one
    run. A tile in [full start, full end) has no hidden or out-of-bounds pair in the relevant rows: the valid rows, or
    all rows if matrix products sum over them. In each run visible start <= full start <= full end <= visible end. Each
    run ends before the next one starts.
    """
    zero = sympy.Integer(0)
    # One run of all tiles, all partial. It needs no proof.
    all_tiles = (zero, zero, zero, cdiv(symbol(AXIS_EXTENT[context.loop]), symbol(AXIS_DIM[context.loop])))
    return _bounds_within_limits(where, context) or all_tiles


@cache
def _bounds_within_limits(where: Bool, context: MaskContext) -> tuple[Expr, ...] | None:
    """Return the bounds of all runs of tiles, in rising order; None if they have too many nodes, or if a proof of their
    order takes too many steps."""
    runs = _merged([_run(term, context) for term in terms(where, context)] or [(sympy.Integer(0),) * 4])
    if len(runs) * sum(size(e) for run in runs for e in run) > MOST_ORDERING_NODES:
        return None
    bounds = [e for run in _in_order(runs, context) for e in run]
    for i, (before, after) in enumerate(zip(bounds, bounds[1:])):
        # The bounds rise; if this is not provable, a maximum makes it so.
        if not prove_le(with_rows(before, context.axis, context.rows), with_rows(after, context.axis, context.rows)):
            bounds[i + 1] = sympy.Max(before, after)
    ends = [sympy.Integer(0), *(flattened(e) for e in bounds)]
    known = [with_rows(e, context.axis, context.rows) for e in ends]
    # Each bound is at least 0 and at least the one before it; both proofs have to end within the limit of steps.
    pairs = ((lower, e) for i, e in enumerate(known) for lower in (known[0], known[max(0, i - 1)]))
    if sum(map(size, ends)) > MOST_BOUND_NODES or any(is_given_up(*pair) for pair in pairs):
        return None
    return tuple(ends[1:])


def _run(term: Term, context: MaskContext) -> Run:
    """Return the run of tiles of one conjunction."""
    block, extent = symbol(AXIS_DIM[context.loop]), symbol(AXIS_EXTENT[context.loop])
    lows: list[Expr] = [sympy.Integer(0)]
    highs: list[Expr] = [extent]
    full_lows: list[Expr] = [sympy.Integer(0)]
    full_highs: list[Expr] = [extent]
    visible_if: list[Bool] = []  # conditions on the program tile; if one is false, no tile is visible
    full_if: list[Bool] = []  # conditions on the program tile; if one is false, no tile is full

    def bound(side: int, rest: Expr, lows: list[Expr], highs: list[Expr], conditions: list[Bool]) -> None:
        """Add side * x + rest <= 0 for positions x: as a lower bound, an exclusive upper bound, or a condition if
        `side` is 0."""
        if side > 0:
            highs.append(1 - rest)
        elif side < 0:
            lows.append(rest)
        elif not prove_le(with_rows(rest, context.axis, context.rows), sympy.Integer(0)):
            conditions.append(_condition(rest))  # not proven for every program tile that has a row

    needs, enough = _known(term, context)
    for part, (bounds_visible, bounds_full) in ((term, (True, True)), (needs, (True, False)), (enough, (False, True))):
        for side, rest in part.solved:
            of_valid_rows, of_rows = extremes(rest, replace(context, whole=False)), extremes(rest, context)
            if bounds_visible and of_valid_rows:
                bound(side, of_valid_rows[0], lows, highs, visible_if)
            # Full tiles are visible. `enough` alone does not ensure that: if no tile is visible, its lower bound may be
            # past the visible end.
            if part is needs and side and of_valid_rows:
                bound(side, of_valid_rows[0], full_lows, full_highs, full_if)
            if bounds_full and of_rows:
                bound(side, of_rows[1], full_lows, full_highs, full_if)
            elif bounds_full:
                full_highs.append(sympy.Integer(0))
    full_highs += [sympy.Integer(0)] * len(enough.unsolved)

    def at_most(e: Expr, end: Expr) -> Expr:
        """Return e, clamped to `end` unless e <= end is proven. It is not proven for bounds on data, because nothing
        relates these to each other."""
        return (
            e
            if prove_le(with_rows(e, context.axis, context.rows), with_rows(end, context.axis, context.rows))
            else sympy.Min(e, end)
        )

    last = cdiv(sympy.Max(0, sympy.Min(*highs)), block)
    end = _if_all(visible_if, last)
    start = _if_all(visible_if, sympy.Min(floordiv(sympy.Max(*lows), block), last))
    # full_start >= start, because each lower bound of full tiles is at least that of visible tiles.
    full_start = _if_all(visible_if, at_most(cdiv(sympy.Max(*full_lows), block), last))
    full_end = sympy.Max(full_start, _if_all(full_if, floordiv(sympy.Max(0, sympy.Min(*full_highs)), block)))
    return start, full_start, at_most(full_end, end), end


def _known(term: Term, context: MaskContext) -> tuple[Term, Term]:
    """Return two conditions on the unsolved literals of a term, from facts about them, each as a single term: one that
    they imply (necessary), and one that implies all of them (sufficient)."""
    facts = [next((f for f in context.facts if f.literal == literal), None) for literal in term.unsolved]
    needs = _single(sympy.And(*(fact.needs for fact in facts if fact)), context)
    enough = _single(sympy.And(*(fact.enough for fact in facts if fact)), context)
    unknown = tuple(literal for fact, literal in zip(facts, term.unsolved) if fact is None)
    return needs, enough._replace(unsolved=(*enough.unsolved, *unknown))


def _single(e: Bool, context: MaskContext) -> Term:
    """Return the condition as one term; unsolved if it is not one conjunction."""
    found = terms(e, replace(context, facts=()))
    return found[0] if len(found) == 1 else Term((), (e,))


def _if_all(conditions: list[Bool], tile: Expr) -> Expr:
    """Return an expression for `tile` if all conditions hold, else 0. Conditions that another one implies are left
    out."""
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

    Two runs are merged if the order of more than one pair is known only at run time, if such a pair has more than
    MOST_NODES_IN_ANY_ORDER nodes, or if there are more than MOST_RUNS.
    """
    pairs = [(i, j) for j in range(len(runs)) for i in range(j)]
    unknown = [(i, j) for i, j in pairs if not rises(runs[i][0], runs[j][0]) and not rises(runs[j][0], runs[i][0])]
    large = any(
        sum(1 for e in (*runs[i], *runs[j]) for _ in sympy.preorder_traversal(e)) > MOST_NODES_IN_ANY_ORDER
        for i, j in unknown
    )
    if len(unknown) > 1 or large:
        return unknown[-1]
    return (len(runs) - 2, len(runs) - 1) if len(runs) > MOST_RUNS else None


def _merged_if_conditional(wide: Run, run: Run, rises: Callable[[Expr, Expr], bool]) -> Run | None:
    """Return one run for two, or None. They become one if a condition on the program tile decides: where it holds,
    `wide` contains all tiles of `run`; elsewhere `wide` is empty."""
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


def _in_order(runs: list[Run], context: MaskContext) -> list[Run]:
    """Return the runs in rising order, each clamped to start where the one before it ends or later.

    Runs are merged in three cases: one contains the other and has no full tiles; one contains the other in some
    programs and is empty in all others (`_merged_if_conditional`); there are too many runs, or too little of their
    order is known (`_to_merge`).
    """

    def rises(a: Expr, b: Expr) -> bool:
        return prove_le(with_rows(a, context.axis, context.rows), with_rows(b, context.axis, context.rows))

    # An outer run without full tiles takes over the full tiles of a run inside it.
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
