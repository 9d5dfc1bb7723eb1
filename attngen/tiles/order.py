"""Which programs come to a tile that several add to, counted: turns of programs that add in a fixed order (see
ops.Add)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sympy

from attngen.ir.expr import INEQUALITIES, Bool, Expr, cdiv, floordiv, select, symbol, symbol_names
from attngen.ir.graph import REVERSED_GROUP, Blocks, Kernel, Module
from attngen.ir.names import BLOCK_LISTS
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Access, Base, CountTiles, ListPosition, Load, Op, OrderedAdd, Type
from attngen.ir.prove import prove_le
from attngen.tiles.intervals import last_row, with_rows


class Turn(NamedTuple):
    """The turn of a program, and the ops that make what it names, in the body of the loop that adds."""

    expr: Expr
    makers: tuple[Op, ...] = ()


def turn_of(own: str, tiles: Expr, blocks: Blocks | None, counts: Sequence[CountTiles] = ()) -> Turn:
    """The turn of a program where those of so many tiles, from the first on, may come to the tile that its loop is at.

    With lists of blocks, those of them come that the loop's tile lists. Both sides have their lists of one mask: a tile
    is in the list of another one if that is in its own. So the turn is how many listed tiles there are from the next
    one on.
    """
    number = floordiv(symbol(f"{own}_start"), symbol(AXIS_DIM[own]))
    if blocks is None:
        return Turn(tiles - 1 - number, tuple(counts))
    loop = "kv" if own == "q" else "q"
    ranks, _ = BLOCK_LISTS[loop]
    block = floordiv(symbol(f"{loop}_start"), sympy.Integer(blocks.size))
    row = Base(f"{ranks}_row", Access(ranks, (symbol("b"), symbol("h"), block)), Type("ptr"))
    end, following = (
        ListPosition(f"{own}_{what}_at", row.name, e, Type("i32")) for what, e in (("end", tiles), ("next", number + 1))
    )
    return Turn(symbol(end.name) - symbol(following.name), (*counts, row, end, following))


def makers_of(kernel: Kernel, add: OrderedAdd) -> tuple[Op, ...]:
    """The ops of a loop's body that make what the turn of an op there names."""
    home = kernel.graph.nodes[add.name]["block"]
    found, left = set[str](), kernel.scalars_of(add)
    while left:
        name = left.pop()
        if kernel.graph.nodes[name]["block"] == home and name not in found:
            found.add(name)
            left |= {*kernel.op(name).operands(), *kernel.scalars_of(kernel.op(name))}
    return tuple(op for op in kernel.block(home).ops if op.name in found)


def last_first(module: Module, kernel: Kernel) -> Turn | None:
    """The turn of a program where those of the last tiles come first: how many of later tiles come to the tile that its
    loop is at.

    Loops of later own tiles start later or alike, and end later or alike; from some own tile on, they may have no turn.
    So programs that come to a tile own tiles that follow one another: the last of them is the last whose loop has
    started there.

    Loops of the first own tiles may have another end, as those of keys that all queries see. Where one of these comes,
    loops of some tiles behind them may have ended, which do not count.

    None where that is not known. That is where loops run over several ranges; where they are bounded by numbers that
    programs read and that nobody says to rise; where they may start or end earlier for a later own tile; where their
    start is no formula that is solved here.
    """
    visited = visited_range(kernel)
    if visited is None:
        return None
    own = _Own(kernel, _rising(module))
    (first, if_first), (end, if_end) = map(_unconditional, visited)
    if not (if_first <= if_end and own.knows(first, end, *if_end)):
        return None
    bounds = [own.started(first, end), *(own.held(condition) for condition in sorted(if_end, key=str))]
    known = [bound for bound in bounds if bound is not None]
    ended = own.ended(end)
    if len(known) < len(bounds) or ended is None or (ended and module.blocks):
        return None
    tiles = sympy.Min(own.whole, *(tiles for bound in known for tiles in bound))
    turn = turn_of(kernel.program_axis, tiles, module.blocks, own.mbarrier_release)
    following = 1 + floordiv(own.start, own.rows)
    less = [sympy.Max(0, sympy.Min(until, tiles) - sympy.Max(since, following)) for since, until in ended]
    return turn._replace(expr=turn.expr - sympy.Add(*less))


def first_first(module: Module, kernel: Kernel) -> Expr | None:
    """The turn of a program where those of the first tiles come first: how many of earlier tiles come to the tile that
    its loop is at.

    Loops of earlier own tiles start earlier, and end earlier or alike. So it is the number of the own tile, less those
    of the first ones that have ended, or have no turn. None where that is not known, with lists of blocks, and where
    `last_first` is None; and where all loops start alike: then nothing is gained.
    """
    visited = visited_range(kernel)
    if module.blocks or visited is None or not differs(kernel, visited[0]) or last_first(module, kernel) is None:
        return None
    own = _Own(kernel, _rising(module))
    end, conditions = _unconditional(visited[1])
    gone = [own.passed(end), *(own.lacking(condition) for condition in sorted(conditions, key=str))]
    known = [tiles for tiles in gone if tiles is not None]
    return floordiv(own.start, own.rows) - sympy.Max(*known) if len(known) == len(gone) else None


def either_way(reversed_group: Expr | None, turn: Expr) -> Expr:
    """The turn of a program, which is `reversed_group` in mirrored heads if the grid has such."""
    return turn if reversed_group is None else select(symbol(REVERSED_GROUP) > 0, reversed_group, turn)


def leaps(module: Module, kernel: Kernel) -> bool:
    """Whether loops may end at other than a number of rows behind their own tile, or all at one place: where documents
    end, say.

    Then some own tiles visit more tiles than the one before. If programs of several heads came to all tiles for one
    head after another, those that visit few would come to their second head early, and wait there for programs of more.
    """
    visited = visited_range(kernel)
    own = _Own(kernel, _rising(module))
    ends = own.ends(_unconditional(visited[1])[0]) if visited else None
    return any(own.depends(e - last_row(kernel.program_axis)) for e in ends or ())


def visited_range(kernel: Kernel) -> tuple[Expr, Expr] | None:
    """The first tile of a kernel's loops over tiles, and their end; None where their ranges do not follow one
    another."""
    found = whole_range([pair for loop in kernel.loops if loop.cls != "all" for pair in loop.ranges])
    return found and (kernel.resolve(found[0]), kernel.resolve(found[1]))


def whole_range(ranges: Sequence[tuple[Expr, Expr]]) -> tuple[Expr, Expr] | None:
    """The start of ranges that follow one another, in any order, and their end; None for other ones."""
    lows, highs = {lo for lo, _ in ranges}, {hi for _, hi in ranges}
    first, end = lows - highs, highs - lows
    if len(first) != 1 or len(end) != 1 or len(lows) != len(ranges) or len(highs) != len(ranges):
        return None
    return *first, *end


def differs(kernel: Kernel, e: Expr) -> bool:
    """Whether an expression is another one for another tile of the program's own: by where that starts, or by what
    is read there."""
    start = f"{kernel.program_axis}_start"
    names = {*symbol_names(kernel.resolve(e))}
    loads = (op for op in kernel.ops() if isinstance(op, Load) and op.name in names)
    return start in names or any(start in symbol_names(index) for op in loads for index in op.src.index)


def _rising(module: Module) -> set[str]:
    """The tensors whose numbers never fall along their last dimension."""
    return {name.upper() for d in module.derived for name in d.rising}


def _unconditional(e: Expr) -> tuple[Expr, set[Bool]]:
    """The bound of a loop, and the conditions without which it is 0."""
    conditions = set()
    while isinstance(e, select) and e.args[2] == 0:
        conditions.add(e.args[0])
        e = e.args[1]
    return e, conditions


def _later(condition: Bool, e: Expr) -> Expr:
    """What a choice gives where a condition does not hold; any other expression as it is."""
    return e.args[2] if isinstance(e, select) and e.args[0] == condition else e


class _Own:
    """What is known of a kernel's own tiles. Bounds say how many of them, from the first on, come to the tile that a
    loop is at, at most.

    rising: the tensors whose numbers never fall along their last dimension.
    """

    def __init__(self, kernel: Kernel, rising: set[str]) -> None:
        own = kernel.program_axis
        self.kernel, self.start, self.rows, self.extent = (
            kernel,
            symbol(f"{own}_start"),
            symbol(AXIS_DIM[own]),
            symbol(AXIS_EXTENT[own]),
        )
        self.whole = cdiv(self.extent, self.rows)
        self.mbarrier_release: list[CountTiles] = []  # the ops that bounds name
        loads = {symbol(op.name): op for op in kernel.block("entry").ops if isinstance(op, Load) and not op.type.dims}
        self.alike = {s for s, op in loads.items() if not any(self.start in i.free_symbols for i in op.src.index)}
        # Of the first or last row of the own tile, in a tensor whose numbers rise: they rise with the tile.
        ends = {s: op for s, op in loads.items() if s not in self.alike and kernel.accessed(op)[0].name in rising}
        self.of_rows = {s: op for s, op in ends.items() if op.src.index[-1] in (self.start, last_row(own))}

    def knows(self, *bounds: Expr) -> bool:
        """Whether bounds depend on the start of the own tile, on what all programs have, and on numbers that rise
        with it, alone."""
        given = {symbol(arg.name) for arg in self.kernel.args if arg.role == "scalar"} | {
            symbol(dim) for dim in AXIS_DIM.values()
        }
        return all(e.free_symbols <= given | {self.start, *self.alike, *self.of_rows} for e in bounds)

    def depends(self, e: Expr) -> bool:
        """Whether an expression differs by own tile: by where that starts, or by numbers of its rows."""
        return bool(e.free_symbols & {self.start, *self.of_rows})

    def rises(self, e: Expr) -> bool:
        """Whether an expression is seen never to fall from one own tile to the next."""
        if e == self.start or e in self.of_rows or not self.depends(e):
            return True
        if isinstance(e, (floordiv, cdiv)):
            return not self.depends(e.args[1]) and self.rises(
                e.args[0]
            )  # divided by the rows of a tile, or a number: more than 0
        if e.is_Mul:
            factor, rest = e.as_coeff_Mul()
            return bool(factor > 0) and self.rises(rest) and not rest.is_Mul
        return (e.is_Add or isinstance(e, (sympy.Max, sympy.Min))) and all(map(self.rises, e.args))

    def held(self, condition: Bool) -> list[Expr] | None:
        """Bounds by a condition without which a loop has no turn: none if it stays true for later own tiles. None if
        that is not known."""
        if not isinstance(condition, INEQUALITIES):
            return None
        if not self.depends(condition.lts) and self.rises(condition.gts):
            return []
        until = self._until(condition)
        return None if until is None else [until]

    def _until(self, condition: Bool) -> Expr | None:
        """How many own tiles start before, or at, a number that all programs know; None for other conditions. It may
        be any integer."""
        if condition.lts != self.start or self.depends(condition.gts):
            return None
        end = sympy.Min(self.extent, condition.gts)
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return cdiv(end, self.rows) if strict else 1 + floordiv(end, self.rows)

    def started(self, first: Expr, end: Expr) -> list[Expr] | None:
        """Bounds by where loops start: own tiles of which that is at the loop's tile, or before. None if it is not
        solved."""
        if not self.depends(first):
            return []
        if isinstance(first, select):  # the first own tiles start at once
            at_once, rest = self._until(first.args[0]), self.started(first.args[2], _later(first.args[0], end))
            return (
                [sympy.Max(at_once, sympy.Min(*rest))] if first.args[1] == 0 and at_once is not None and rest else None
            )
        if isinstance(first, sympy.Min):  # the end is behind the tile
            others = [x for x in first.args if x != end]
            return self.started(others[0], end) if len(others) == 1 else None
        loop = self.kernel.loop_axis
        at, rows = symbol(f"{loop}_start"), symbol(AXIS_DIM[loop])  # the tile is number at / rows
        if not isinstance(first, (floordiv, cdiv)) or first.args[1] != rows:
            return None
        most = at + rows - 1 if isinstance(first, floordiv) else at
        parts = [x for x in (first.args[0].args if isinstance(first.args[0], sympy.Max) else first.args[:1]) if x != 0]
        bounds = [self._at_most(x, most) for x in parts]
        known = [bound for bound in bounds if bound is not None]
        return known if len(known) == len(bounds) else None

    def ended(self, end: Expr) -> list[tuple[Expr, Expr]] | None:
        """Own tiles whose loops may have ended where that of an earlier tile is at, as their first one and their end:
        none if ends rise.

        Ends may also rise behind the first own tiles alone, which have another end. None if that is not known.
        """
        if self.rises(end):
            return []
        if not isinstance(end, select):
            return None
        condition, of_first, of_later = end.args
        since, until = self._until(condition), self._passed(of_later)
        return [(since, until)] if since is not None and until is not None and self.rises(of_first) else None

    def _passed(self, end: Expr) -> Expr | None:
        """The same as `passed`, and where all of these own tiles have ended, too; None if it is not solved.

        It is solved where a number of rows is added to the end of the own tile, and where the last own tile has no such
        end.
        """
        ends = self.ends(end) or []
        most = (
            symbol(f"{self.kernel.loop_axis}_start") - (ends[0] - last_row(self.kernel.program_axis)) + 1
            if len(ends) == 1
            else None
        )
        if (
            most is None
            or self.depends(most)
            or not prove_le(with_rows(most + 1, self.kernel.loop_axis, frozenset()), self.extent)
        ):
            return None
        return self.passed(end)

    def passed(self, end: Expr) -> Expr | None:
        """How many own tiles, from the first on, have an end at the loop's tile or before, where some other own tile
        has not; None if it is not solved, or if ends do not rise.
        """
        ends = self.ends(end) if self.rises(end) else None
        if ends is None:
            return None
        found = [self._ended_by(e, symbol(f"{self.kernel.loop_axis}_start")) for e in ends]
        known = [tiles for tiles in found if tiles is not None]
        return sympy.Max(0, *known) if len(known) == len(found) else None

    def ends(self, end: Expr) -> list[Expr] | None:
        """Where loops end in rows, the least of these, as far as own tiles differ in them; None for ends of another
        form."""
        rows, tile = end.args if isinstance(end, cdiv) else (end, None)
        if not self.depends(end):
            return []
        if tile != symbol(AXIS_DIM[self.kernel.loop_axis]):
            return None
        if isinstance(rows, sympy.Max) and 0 in rows.args and len(rows.args) == 2:
            (rows,) = (e for e in rows.args if e != 0)
        return [e for e in (rows.args if isinstance(rows, sympy.Min) else (rows,)) if self.depends(e)]

    def lacking(self, condition: Bool) -> Expr | None:
        """For how many own tiles, from the first on, a condition does not hold, where it holds for some other; None
        if it is not solved."""
        if not isinstance(condition, INEQUALITIES):
            return None
        if not self.depends(condition.gts) and self.rises(condition.lts):
            return sympy.Integer(0)  # it holds for the first ones
        if self.depends(condition.lts) or not self.rises(condition.gts):
            return None
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return self._ended_by(condition.gts, condition.lts - (0 if strict else 1))

    def _ended_by(self, e: Expr, at: Expr) -> Expr | None:
        """How many own tiles, from the first on, have an expression of at most `at`. It rises with the last row of a
        tile."""
        last = last_row(self.kernel.program_axis)
        rest = e - last
        if not self.depends(rest):
            return floordiv(sympy.Max(0, at - rest + 1), self.rows)
        steps = [f for f in e.atoms(floordiv) if self.depends(f)]
        if len(steps) == 1 and not self.depends(steps[0].args[1]):
            (step,) = steps
            factor, (inner, of) = e.coeff(step), step.args
            rest = e - factor * step
            counts = (inner - last).is_nonnegative  # then a bound below 0 means no tile
            if factor == of and not self.depends(rest) and of.is_positive and counts:
                return self._ended_by(inner, of * floordiv(sympy.Max(0, at - rest + of), of) - 1)
        return None

    def _at_most(self, e: Expr, most: Expr) -> Expr | None:
        """The bound that an expression is at most `most`, which is not negative."""
        if e in self.of_rows and self.of_rows[e].src.index[-1] == self.start:
            read = self.of_rows[e]
            index = (*read.src.index[:-1], symbol(self.kernel.program_axis))
            name = f"{str(e).removesuffix('_least')}_count"
            self.mbarrier_release.append(
                CountTiles(name, Access(read.src.tensor, index), most, Type("i32", (), read.type.space))
            )
            return symbol(name)
        left = e - self.start
        return None if self.depends(left) else 1 + floordiv(sympy.Max(0, most - left), self.rows)
