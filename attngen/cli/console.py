"""Output of commands: tables, counts, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from rich.console import Console
from rich.table import Table

out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def new_table(*headings: str, folds: str = "") -> Table:
    """Return a table without lines whose cells are never truncated; only the column `folds` may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading != folds)
    return table


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = new_table(*headings)
    for row in rows:
        table.add_row(*row)
    out.print(table)


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
