"""Output of commands: tables, counts, progress, errors."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from attngen.report.tables import Rows

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

out = Console(highlight=False, markup=False)  # tables and texts fold to the width of a terminal
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
LABEL = 8  # columns of the label of a text
SECONDS, SHARES = 5.0, 10  # without a terminal: seconds between two lines of progress at least, and lines at most


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Rows(*headings, folds=headings[-1:])
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_labelled(label: str, text: str) -> None:
    """Print a text after its label. On a terminal it is folded at spaces, below its beginning."""
    start = f"{label:<{LABEL}} "
    folds = textwrap.TextWrapper(
        out.width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    out.print(folds.fill(text), soft_wrap=True)


class Watch:
    """The progress of one step of a command's work: how many items are done, and the present one.

    On a terminal it is a bar. Otherwise it is a line for every tenth of the items, and none for work of a few seconds.
    """

    def __init__(self, bar: Progress | None, title: str, total: int | None = None) -> None:
        self.title, self.total, self.bar = title, total, bar
        self.finished, self.item = 0, ""
        self.started = self.printed_at = time.monotonic()
        self.printed = 0
        self.lock = Lock()
        self.task: TaskID | None = bar.add_task(title, total=total, item="") if bar else None

    def show(self, item: str) -> None:
        """Name the present item."""
        self.item = item
        self._update()

    def expect(self, total: int) -> None:
        """Set the number of items, once it is known."""
        self.total = total
        self._update()

    def at(self, finished: int, total: int, item: str) -> None:
        """Set the number of items that are done, that of all items, and the present item."""
        self.finished, self.total, self.item = finished, total, item
        self._update()

    def done(self, item: str = "") -> None:
        """Count one more item as done, in any thread. item: its name, if it is not the present item."""
        with self.lock:
            self.finished, self.item = self.finished + 1, item or self.item
            self._update()
            if self.bar is None and self._is_due():
                self.note(f"{self.title}: {self.finished} of {self.total or '?'}{self._left()} {self.item}".rstrip())

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        (self.bar.console if self.bar else err).print(line)
        self.printed, self.printed_at = self.finished, time.monotonic()

    def _left(self) -> str:
        """Return the time left as text, at the pace so far; empty text at the end."""
        seconds = (time.monotonic() - self.started) / self.finished * ((self.total or 0) - self.finished)
        return f" ({timedelta(seconds=round(seconds))} left)" if seconds > 0 else ""

    def _is_due(self) -> bool:
        rest = self.finished - self.printed
        return rest * SHARES >= (self.total or 0) and time.monotonic() - self.printed_at >= SECONDS

    def _update(self) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.finished, total=self.total, item=self.item)


@contextmanager
def steps() -> Iterator[Callable[..., Watch]]:
    """Show the progress of steps on stderr. Yields a function that begins one: it takes a title, which is a verb, and
    the number of items, None if it is not known yet."""
    if not err.is_terminal:
        yield partial(Watch, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeRemainingColumn(compact=True),
        TextColumn(
            "{task.fields[item]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
    )
    with Progress(*columns, console=err, transient=True, expand=True, redirect_stdout=out.is_terminal) as bar:
        yield partial(Watch, bar)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Watch]:
    """Show the progress of work of one step on stderr while it lasts."""
    with steps() as begin:
        yield begin(title, total)


def count(n: int, noun: str) -> str:
    """Return `1 spec` or `2 specs`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def head_dim(qk: int, v: int) -> str:
    """Return the head_dim as text, or those of q and k, and of v."""
    return f"{qk}" if qk == v else f"{qk}/{v}"


def complain(message: str) -> None:
    """Print each line of an error on stderr."""
    for line in message.splitlines():
        err.print(f"error: {line}", style="red")


def fail(message: str) -> NoReturn:
    """Print an error and end with exit code 1."""
    complain(message)
    sys.exit(1)
