"""Tables of text that fit the width of a terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from textwrap import TextWrapper
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

FOLDED = 20  # columns that a folded cell has at least
GAP = 2  # columns between cells
COMMAS = re.compile(r"(\s+|(?<=,)(?=\S))")  # where texts fold
CALLS = re.compile(r"(\s+|(?<=,)(?=\S)|(?<=\w\()(?=\S))")


class Folded:
    """The text of a cell that folds at spaces and after commas; if a part is too wide then, also after the bracket of a
    call, as in `sliding_window(left=1023, right=0)`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_widest(CALLS, self.text), _width([self.text])).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapper = TextWrapper(options.max_width, break_on_hyphens=False)
        wrapper.wordsep_simple_re = COMMAS if _widest(COMMAS, self.text) <= options.max_width else CALLS
        yield Text("\n".join(part for line in self.text.split("\n") for part in wrapper.wrap(line) or [""]))


class Rows:
    """A table without lines, as wide as it needs. Nothing is cut off.

    On a console that is too narrow, cells of some columns are folded, and columns that still do not fit come in further
    tables below the first, after the names of the rows.
    """

    def __init__(
        self, *headings: str, names: int = 1, folds: Collection[str] = (), numbers: Collection[str] = ()
    ) -> None:
        """names: how many columns, from the first on, name a row. folds: headings of columns whose cells may fold.
        numbers: headings of columns that are aligned to the right."""
        self.headings, self.rows = list(headings), list[list[str]]()
        self.names, self.folds, self.numbers = names, folds, numbers

    def add_row(self, *cells: str) -> None:
        """Add a row; cells that are left out are empty."""
        self.rows.append([*cells, *[""] * (len(self.headings) - len(cells))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(self.headings, *self.rows))
        if sum(map(_width, columns)) + GAP * (len(columns) - 1) <= options.max_width:
            yield self._table(columns, ())
            return
        named = columns[: self.names]
        first = tuple(" ".join(filter(None, cells)) for cells in zip(*named))
        folding = {*self.folds, *([first[0]] if self.names > 1 else [])}
        for i, group in enumerate(self._groups(first, columns[self.names :], options.max_width)):
            if i:
                yield Text()
            yield self._table([first, *group], folding)

    def _groups(self, first: Sequence[str], rest: Iterable[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
        """Yield the columns of each table, besides the first."""
        start = min(_width(first), width // 2) if self.names > 1 else _width(first)
        used, group = start, list[Sequence[str]]()
        for column in rest:
            need = GAP + (min(_width(column), FOLDED) if column[0] in self.folds else _width(column))
            if group and used + need > width:
                yield group
                used, group = start, []
            used += need
            group.append(column)
        yield group

    def _table(self, columns: Sequence[Sequence[str]], folding: Collection[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        folds = [bool(folding) and heading in folding for heading, *_ in columns]
        for heading, *_ in columns:
            justify: Literal["left", "right"] = "right" if heading in self.numbers else "left"
            keeps = bool(folding) and heading not in folding
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=keeps)
        for cells in zip(*(column[1:] for column in columns)):
            table.add_row(*(Folded(cell) if is_folded else cell for cell, is_folded in zip(cells, folds)))
        return table


def _width(column: Sequence[str]) -> int:
    """Return the width of the longest line of a column."""
    return max(len(line) for cell in column for line in cell.split("\n"))


def _widest(folds: re.Pattern[str], text: str) -> int:
    """Return the length of the longest part of a text that does not fold."""
    return max(map(len, folds.split(text)))
