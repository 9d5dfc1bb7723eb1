"""Child processes that may hang or crash without stopping the rest of the work."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

START_S = 180.0  # limit for a process's first answer


class Lost(Exception):
    """A request whose process ended, or did not answer in time."""


class Worker:
    """One process that answers requests: `serve(connection, *args)` sends a first answer, then one to each request.

    A process that hangs or ends is replaced at the next request.
    """

    def __init__(self, serve: Callable[..., None], *args: object) -> None:
        self.serve, self.args = serve, args
        self.process: Any = None
        self.connection: Any = None

    def ask(self, request: object, limit_s: float) -> Any:
        """Return the answer; raise Lost, with the reason, if there is none within the limit."""
        self.start()
        return self._answer(request, limit_s)

    def start(self) -> Any:
        """Start the process and return its first answer; return None if it already runs."""
        if self.process is not None and self.process.is_alive():
            return None
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs, *self.args), daemon=True)
        self.process.start()
        theirs.close()
        return self._answer(None, START_S)

    def _answer(self, request: object, limit_s: float) -> Any:
        try:
            if request is not None:
                self.connection.send(request)
            if self.connection.poll(limit_s):
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.stop()
            raise Lost(f"ended without an answer (exit code {code})") from None
        self.stop()
        raise Lost(f"gave no answer within {limit_s:.0f} s")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.process = None


def share(
    work: Callable[..., None], tasks: Sequence[object], args: Sequence[object], jobs: int, limit_s: float
) -> float:
    """Split tasks among processes, each of which calls `work(*args, its tasks)`; return the seconds taken. Tasks that
    are not done within the limit are abandoned."""
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(*args, tasks[i::jobs]), daemon=True) for i in range(min(jobs, len(tasks)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, limit_s - (time.perf_counter() - started)))
        if process.is_alive():
            process.kill()
            process.join()
    return time.perf_counter() - started
