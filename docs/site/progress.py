"""Progress of long work on the site: a bar for each step, with its count, the present item and the time left; without a
terminal a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

SECONDS = 10  # between lines


class Progress:
    """Steps of some work. Their counts are shown from `start` to `stop`, or in a `with` block."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bars = Bars(*columns, TextColumn("{task.fields[item]}"), console=self.console, transient=True)
        self.started = self.said = time.monotonic()

    def start(self) -> None:
        """Show the steps from now on."""
        self.started = self.said = time.monotonic()
        if self.console.is_terminal:
            self.bars.start()

    def stop(self) -> None:
        """Show them no more."""
        if self.console.is_terminal:
            self.bars.stop()

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Time since `start`."""
        return time.monotonic() - self.started

    def step(self, name: str, total: int) -> TaskID:
        """Begin a step of so many items."""
        return self.bars.add_task(name, total=total, item="")

    def advance(self, step: TaskID, item: str) -> None:
        """Count one item of a step as done."""
        self.bars.update(step, advance=1, item=item)
        now, task = time.monotonic(), self.bars.tasks[step]
        if not self.console.is_terminal and (now - self.said >= SECONDS or task.finished):
            self.said = now
            left = "" if task.finished or task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            self.console.print(f"{task.description}: {task.completed:.0f} of {task.total:.0f}{left} ({item})")
