"""Order of accumulation: the number of programs that add to a tile before this one (see ops.OrderedAdd)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sympy

from attngen.ir import Access, Blocks, Kernel, Module, Op, Type, only, tile
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, first_row
from attngen.ir.expr import INEQUALITIES, Bool, Expr, cdiv, floordiv, select, symbol, symbol_names
from attngen.ir.grid import REVERSED_GROUP
from attngen.ir.names import BLOCK_LISTS, START_RANKS
from attngen.ir.prove import prove_le
from attngen.tiles.intervals import last_row, with_rows

_ENDS = ("until", "since")  # names of the positions between which loops have ended


class Order(NamedTuple):
    """The position of a program in the order, and the ops in the accumulating loop's body that define its operands."""

    expr: Expr
    ops: tuple[Op, ...] = ()


def order_of(own: str, tiles: Expr, blocks: Blocks | None, counts: Sequence[Op] = (), places: bool = False) -> Order:
    """Return the order of a program, last program tile first, if the first `tiles` program tiles visit the loop's tile.

    With block lists, only the programs whose tiles are in the list of the loop's tile visit it. The lists of both axes
    are from one mask: a tile is in another tile's list if and only if that tile is in its own list. So the order is the
    number of listed program tiles after this program's tile.

    places: the kernel's tiles are numbered in the whole sequence, of which the call has some chunks. Only their tiles
    have programs.
    """
    number = floordiv(symbol(first_row(own, places)), symbol(AXIS_DIM[own]))
    if places:
        tiles, *of_call = position_of(f"{own}_visits", own, tiles)
        counts = (*counts, *of_call)
    if blocks is None:
        return Order(tiles - 1 - number, tuple(counts))
    loop = "kv" if own == "q" else "q"
    ranks, _ = BLOCK_LISTS[loop]
    block = floordiv(symbol(first_row(loop, places)), sympy.Integer(blocks.size))
    row = tile.Base(f"{ranks}_row", Access(ranks, (symbol("b"), symbol("h"), block)), Type("ptr"))
    end, following = (
        tile.ListPosition(f"{own}_{word}_at", row.name, e, Type("i32"))
        for word, e in (("end", tiles), ("next", number + 1))
    )
    return Order(symbol(end.name) - symbol(following.name), (*counts, row, end, following))


def position_of(name: str, axis: str, number: Expr) -> tuple[Expr, tile.ListPosition] | tuple[Expr]:
    """Return the number of tiles of a call's chunks before a tile of the whole sequence, and the op that computes it
    under this name, if it is not 0."""
    if number == 0:
        return (number,)
    return symbol(name), tile.ListPosition(name, START_RANKS[axis][0], number, Type("i32"))


def order_ops(kernel: Kernel, add: tile.OrderedAdd) -> tuple[Op, ...]:
    """Return the ops of the loop's body on which the order of an accumulation there depends."""
    home = kernel.graph.nodes[add.name]["block"]
    found, left = set[str](), kernel.traits.scalars_of(add)
    while left:
        name = left.pop()
        if kernel.graph.nodes[name]["block"] == home and name not in found:
            found.add(name)
            left |= {*kernel.op(name).operands(), *kernel.traits.scalars_of(kernel.op(name))}
    return tuple(op for op in kernel.block(home).ops if op.name in found)


def last_first_order(module: Module, kernel: Kernel) -> Order | None:
    """Return a program's order if the last program tile adds first: the number of later tiles that visit the loop's
    tile.

    Loops of later program tiles do not start earlier or end earlier; from some program tile on, loops may be empty. So
    the program tiles that visit one tile are consecutive, and the last one is the last whose loop has started there.

    Loops of the first program tiles may have a different end, such as those of keys that all queries see. At a tile
    that one of these visits, loops of some later program tiles may have ended; they are subtracted.

    Return None if the order is unknown: loops run over several ranges, loops are bounded by loaded numbers that are not
    declared to rise, loops may start or end earlier for a later program tile, or the formula of their start is not
    solved here.
    """
    visited = visited_range(kernel)
    if visited is None:
        return None
    own = _ProgramTiles(kernel, _rising(module))
    (first, if_first), (end, if_end) = map(_unconditional, visited)
    if not (if_first <= if_end and own.knows(first, end, *if_end)):
        return None
    bounds = [own.started(first, end), *(own.nonempty(condition) for condition in sorted(if_end, key=str))]
    known = [bound for bound in bounds if bound is not None]
    ended = own.ended(end)
    if len(known) < len(bounds) or ended is None or (ended and module.blocks):
        return None
    tiles = sympy.Min(own.whole, *(tiles for bound in known for tiles in bound))
    order = order_of(kernel.program_axis, tiles, module.blocks, own.counts, kernel.traits.places)
    following = 1 + floordiv(own.start, own.rows)
    spans = [(sympy.Min(until, tiles), sympy.Max(since, following)) for since, until in ended]
    if kernel.traits.places:  # ranks end with the sequence
        spans = [(until, sympy.Min(since, own.whole)) for until, since in spans]
        of_ends = [
            [position_of(f"{kernel.program_axis}_{word}_{at}", kernel.program_axis, e) for word, e in zip(_ENDS, span)]
            for at, span in enumerate(spans)
        ]
        spans = [(until[0], since[0]) for until, since in of_ends]
        order = order._replace(ops=(*order.ops, *(op for span in of_ends for _, *ops in span for op in ops)))
    less = [sympy.Max(0, until - since) for until, since in spans]
    return order._replace(expr=order.expr - sympy.Add(*less))


def first_first_order(module: Module, kernel: Kernel) -> Order | None:
    """Return a program's order if the first program tile adds first: the number of earlier tiles that visit the loop's
    tile.

    Loops of earlier program tiles start earlier and do not end later. So the order is the index of the program tile,
    minus the number of first tiles whose loops have ended or are empty. Return None if that is unknown, with block
    lists, if `last_first_order` is None, and if all loops start at the same tile, because then nothing is gained.
    """
    visited = visited_range(kernel)
    if module.blocks or visited is None or not differs(kernel, visited[0]) or last_first_order(module, kernel) is None:
        return None
    own = _ProgramTiles(kernel, _rising(module))
    end, conditions = _unconditional(visited[1])
    gone = [own.passed(end), *(own.empty(condition) for condition in sorted(conditions, key=str))]
    known = [tiles for tiles in gone if tiles is not None]
    if len(known) < len(gone):
        return None
    axis, before = kernel.program_axis, sympy.Max(*known)
    ops: list[Op] = []
    if kernel.traits.places:
        before, *ops = position_of(f"{axis}_gone", axis, before)
    number = floordiv(symbol(first_row(axis, kernel.traits.places)), own.rows)
    return Order(number - before, tuple(ops))


def order_by_direction(reversed_group: Expr | None, order: Expr) -> Expr:
    """Return the order of a program: `reversed_group` for heads with reversed tiles if the grid has them, else
    `order`."""
    return order if reversed_group is None else select(symbol(REVERSED_GROUP) > 0, reversed_group, order)


def ends_jump(module: Module, kernel: Kernel) -> bool:
    """True if loops may end at places, such as ends of documents, that are neither at a fixed distance from the program
    tile nor the same for all program tiles.

    Then some program tiles visit more tiles than the one before. If programs of several heads visited all tiles of one
    head before those of the next, programs with few tiles would reach their second head early, and wait there for
    programs with more tiles.
    """
    visited = visited_range(kernel)
    own = _ProgramTiles(kernel, _rising(module))
    ends = own.ends(_unconditional(visited[1])[0]) if visited else None
    return any(own.depends(e - last_row(kernel.program_axis)) for e in ends or ())


def visited_range(kernel: Kernel) -> tuple[Expr, Expr] | None:
    """Return the first tile of a kernel's loops over tiles and their end; None unless their ranges are contiguous."""
    found = whole_range([pair for loop in kernel.loops if loop.cls != "all" for pair in loop.ranges])
    return found and (kernel.resolve(found[0]), kernel.resolve(found[1]))


def whole_range(ranges: Sequence[tuple[Expr, Expr]]) -> tuple[Expr, Expr] | None:
    """Return the start and the end of contiguous ranges, given in any order; None if they are not contiguous."""
    lows, highs = {lo for lo, _ in ranges}, {hi for _, hi in ranges}
    first, end = lows - highs, highs - lows
    if len(first) != 1 or len(end) != 1 or len(lows) != len(ranges) or len(highs) != len(ranges):
        return None
    return *first, *end


def differs(kernel: Kernel, e: Expr) -> bool:
    """True if an expression depends on the program tile: on its start, or on values loaded there."""
    start = f"{kernel.program_axis}_start"
    names = {*symbol_names(kernel.resolve(e))}
    loads = (op for op in only(kernel.ops(), tile.Load) if op.name in names)
    return start in names or any(start in symbol_names(index) for op in loads for index in op.src.index)


def _rising(module: Module) -> set[str]:
    """Return the tensors whose numbers never fall along their last dimension."""
    return {name.upper() for d in module.derived for name in d.rising}


def _unconditional(e: Expr) -> tuple[Expr, set[Bool]]:
    """Return the bound of a loop without its conditions, and the conditions without which the bound is 0."""
    conditions = set()
    while isinstance(e, select) and e.args[2] == 0:
        conditions.add(e.args[0])
        e = e.args[1]
    return e, conditions


def _later(condition: Bool, e: Expr) -> Expr:
    """Return the value of a select on `condition` where the condition is false; any other expression unchanged."""
    return e.args[2] if isinstance(e, select) and e.args[0] == condition else e


class _ProgramTiles:
    """Facts about the program tiles that visit the loop's current tile. A bound is an upper limit of the number of
    leading program tiles that visit it.

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
        self.counts: list[tile.CountTiles] = []  # the ops that define symbols of the bounds
        loads = {symbol(op.name): op for op in only(kernel.block("entry").ops, tile.Load) if not op.type.dims}
        self.uniform = {s for s, op in loads.items() if not any(self.start in i.free_symbols for i in op.src.index)}
        # Loads at the first or last row of the program tile from a rising tensor: their values rise with the tile.
        ends = {s: op for s, op in loads.items() if s not in self.uniform and kernel.accessed(op)[0].name in rising}
        self.of_rows = {s: op for s, op in ends.items() if op.src.index[-1] in (self.start, last_row(own))}

    def knows(self, *bounds: Expr) -> bool:
        """True if bounds depend only on the start of the program tile, on values that are the same for all programs,
        and on loaded numbers that rise with the program tile."""
        given = {symbol(arg.name) for arg in self.kernel.args if arg.role == "scalar"} | {
            symbol(dim) for dim in AXIS_DIM.values()
        }
        return all(e.free_symbols <= given | {self.start, *self.uniform, *self.of_rows} for e in bounds)

    def depends(self, e: Expr) -> bool:
        """True if an expression depends on the program tile: on its start, or on numbers loaded at its rows."""
        return bool(e.free_symbols & {self.start, *self.of_rows})

    def rises(self, e: Expr) -> bool:
        """True if an expression is known never to fall from one program tile to the next."""
        if e == self.start or e in self.of_rows or not self.depends(e):
            return True
        if isinstance(e, (floordiv, cdiv)):  # the divisor is the rows of a tile or a constant, so it is positive
            return not self.depends(e.args[1]) and self.rises(e.args[0])
        if e.is_Mul:
            factor, rest = e.as_coeff_Mul()
            return bool(factor > 0) and self.rises(rest) and not rest.is_Mul
        return (e.is_Add or isinstance(e, (sympy.Max, sympy.Min))) and all(map(self.rises, e.args))

    def nonempty(self, condition: Bool) -> list[Expr] | None:
        """Return bounds from a condition without which a loop is empty: no bound if it stays true for later program
        tiles. None if that is unknown."""
        if not isinstance(condition, INEQUALITIES):
            return None
        if not self.depends(condition.lts) and self.rises(condition.gts):
            return []
        until = self._until(condition)
        return None if until is None else [until]

    def _until(self, condition: Bool) -> Expr | None:
        """Return the number of program tiles that satisfy a condition `start < limit` or `start <= limit` with a
        uniform limit, which may be any integer. None for other conditions."""
        if condition.lts != self.start or self.depends(condition.gts):
            return None
        end = sympy.Min(self.extent, condition.gts)
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return cdiv(end, self.rows) if strict else 1 + floordiv(end, self.rows)

    def started(self, first: Expr, end: Expr) -> list[Expr] | None:
        """Return bounds from the start of loops: program tiles whose loop starts at the current tile or before. None if
        it is not solved."""
        if not self.depends(first):
            return []
        if isinstance(first, select):  # the loops of the first program tiles start at tile 0
            leading, rest = self._until(first.args[0]), self.started(first.args[2], _later(first.args[0], end))
            return (
                [sympy.Max(leading, sympy.Min(*rest))] if first.args[1] == 0 and leading is not None and rest else None
            )
        if isinstance(first, sympy.Min):  # the loop's end is after the current tile
            others = [x for x in first.args if x != end]
            return self.started(others[0], end) if len(others) == 1 else None
        loop = self.kernel.loop_axis
        at, rows = symbol(f"{loop}_start"), symbol(AXIS_DIM[loop])  # the current tile has index at / rows
        if not isinstance(first, (floordiv, cdiv)) or first.args[1] != rows:
            return None
        most = at + rows - 1 if isinstance(first, floordiv) else at
        parts = [x for x in (first.args[0].args if isinstance(first.args[0], sympy.Max) else first.args[:1]) if x != 0]
        bounds = [self._at_most(x, most) for x in parts]
        known = [bound for bound in bounds if bound is not None]
        return known if len(known) == len(bounds) else None

    def ended(self, end: Expr) -> list[tuple[Expr, Expr]] | None:
        """Return the ranges of program tiles whose loops may have ended at a tile that an earlier one visits: none if
        ends rise.

        Ends may also rise only after the first program tiles, which have a different end. None if that is unknown.
        """
        if self.rises(end):
            return []
        if not isinstance(end, select):
            return None
        condition, of_first, of_later = end.args
        since, until = self._until(condition), self._passed(of_later)
        return [(since, until)] if since is not None and until is not None and self.rises(of_first) else None

    def _passed(self, end: Expr) -> Expr | None:
        """Return the same as `passed`, also valid where the loops of all these program tiles have ended; None if it is
        not solved.

        It is solved if the end is a fixed number of rows after the end of the program tile, and the last program tile
        does not have this end.
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
        """Return the number of leading program tiles whose loop has ended at the current tile, if some program's loop
        has not; None if it is not solved, or if ends do not rise.
        """
        ends = self.ends(end) if self.rises(end) else None
        if ends is None:
            return None
        found = [self._ended_by(e, symbol(f"{self.kernel.loop_axis}_start")) for e in ends]
        known = [tiles for tiles in found if tiles is not None]
        return sympy.Max(0, *known) if len(known) == len(found) else None

    def ends(self, end: Expr) -> list[Expr] | None:
        """Return the rows whose minimum is the loop's end, only those that depend on the program tile; None for ends of
        another form."""
        rows, tile = end.args if isinstance(end, cdiv) else (end, None)
        if not self.depends(end):
            return []
        if tile != symbol(AXIS_DIM[self.kernel.loop_axis]):
            return None
        if isinstance(rows, sympy.Max) and 0 in rows.args and len(rows.args) == 2:
            (rows,) = (e for e in rows.args if e != 0)
        return [e for e in (rows.args if isinstance(rows, sympy.Min) else (rows,)) if self.depends(e)]

    def empty(self, condition: Bool) -> Expr | None:
        """Return the number of leading program tiles for which a condition is false, if it is true for some other; None
        if it is not solved."""
        if not isinstance(condition, INEQUALITIES):
            return None
        if not self.depends(condition.gts) and self.rises(condition.lts):
            return sympy.Integer(0)  # it is true for the first program tiles
        if self.depends(condition.lts) or not self.rises(condition.gts):
            return None
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return self._ended_by(condition.gts, condition.lts - (0 if strict else 1))

    def _ended_by(self, e: Expr, at: Expr) -> Expr | None:
        """Return the number of leading program tiles for which an expression, which rises with the tile's last row, is
        at most `at`."""
        last = last_row(self.kernel.program_axis)
        rest = e - last
        if not self.depends(rest):
            return floordiv(sympy.Max(0, at - rest + 1), self.rows)
        steps = [f for f in e.atoms(floordiv) if self.depends(f)]
        if len(steps) == 1 and not self.depends(steps[0].args[1]):
            (step,) = steps
            factor, (inner, of) = e.coeff(step), step.args
            rest = e - factor * step
            is_after = (inner - last).is_nonnegative  # then a bound below 0 means no tile
            if factor == of and not self.depends(rest) and of.is_positive and is_after:
                return self._ended_by(inner, of * floordiv(sympy.Max(0, at - rest + of), of) - 1)
        return None

    def _at_most(self, e: Expr, most: Expr) -> Expr | None:
        """Return the bound from the condition that an expression is at most `most`, which is not negative."""
        if e in self.of_rows and self.of_rows[e].src.index[-1] == self.start:
            read = self.of_rows[e]
            index = (*read.src.index[:-1], symbol(self.kernel.program_axis))
            name = f"{str(e).removesuffix('_least')}_count"
            self.counts.append(
                tile.CountTiles(name, Access(read.src.tensor, index), most, Type("i32", (), read.type.space))
            )
            return symbol(name)
        left = e - self.start
        return None if self.depends(left) else 1 + floordiv(sympy.Max(0, most - left), self.rows)
