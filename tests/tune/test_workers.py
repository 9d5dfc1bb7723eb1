"""Worker processes that hang or crash lose only their request."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attngen.tune import workers
from attngen.tune.workers import Lost, Worker, share


def double(connection, greeting):
    """Answer with twice the number; crash for 0 and hang for -1."""
    connection.send(greeting)
    while True:
        number = connection.recv()
        if number == 0:
            os._exit(3)
        if number == -1:
            time.sleep(60)
        connection.send(2 * number)


def write(folder, tasks):
    for task in tasks:
        if task == "hang":
            time.sleep(60)
        (Path(folder) / task).touch()


def crash(connection):
    os._exit(4)


@pytest.mark.share(8)
def test_a_process_that_crashes_or_hangs_is_replaced():
    worker = Worker(double, "here")
    try:
        assert worker.start() == "here"
        first = worker.process.pid
        assert worker.ask(3, 10) == 6 and worker.process.pid == first
        with pytest.raises(Lost, match=r"^ended without an answer \(exit code 3\)$"):
            worker.ask(0, 10)
        assert worker.ask(4, 10) == 8 and worker.process.pid != first
        with pytest.raises(Lost, match="^gave no answer within 0 s$"):
            worker.ask(-1, 0.2)
        assert worker.ask(5, 10) == 10
    finally:
        worker.stop()
    assert worker.process is None


def test_a_process_that_never_starts_is_lost():
    with pytest.raises(Lost, match="exit code 4"):
        Worker(crash).ask(1, 10)


@pytest.mark.share(8)
def test_tasks_are_shared_and_a_hanging_one_is_given_up(tmp_path, monkeypatch):
    assert share(write, ["a", "b", "c", "d"], [str(tmp_path)], 3, 30) < 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "d"]
    assert share(write, [], [str(tmp_path)], 2, 3) < 1
    # A clock as if `share` had waited for the hanging task: at the start, for each process, at the end
    clock = iter([0.0, 0.0, 29.9, 30.0])
    monkeypatch.setattr(workers.time, "perf_counter", lambda: next(clock))
    started = time.monotonic()
    assert share(write, ["e", "hang", "f"], [str(tmp_path)], 2, 30) == 30
    assert {p.name for p in tmp_path.iterdir()} == set("abcdef") and time.monotonic() - started < 30
