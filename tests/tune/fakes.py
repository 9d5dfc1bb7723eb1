"""A fake GPU, for tests of tuning."""

from __future__ import annotations

from attngen.ir import Config
from attngen.schedule.table import schedule_of, shown
from attngen.targets.registry import SPECIALIZERS
from attngen.tune.workers import Lost

BY = {"gpu": "a GPU", "torch": "2", "triton": "3"}


def tile(config: Config) -> str:
    """Return the name that results give a config."""
    return shown(schedule_of(config)) + f" {config.backend}" * (config.backend in SPECIALIZERS)


class Gpu:
    """Answers requests as a real worker does: with milliseconds by tile, for all rounds or for each, or with a failure.
    Each round is slower by `drift`."""

    def __init__(
        self,
        times: dict[str, float | tuple[float, ...] | str | Lost],
        default: float | str = 1.0,
        drift: float = 0.0,
        faults: dict[tuple[str, Config], str] | None = None,
    ) -> None:
        self.times, self.default, self.drift, self.without = times, default, drift, faults or {}
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, request, limit_s):
        _, configs, rounds = request
        self.asked.append(tuple(map(tile, configs)))
        answers = [self.times.get(tile(config), self.default) for config in configs]
        for answer in answers:
            if isinstance(answer, Lost):
                raise answer
        return [a if isinstance(a, str) else tuple(self._round(a, i) for i in range(rounds)) for a in answers]

    def _round(self, time, i):
        return (time[i % len(time)] if isinstance(time, tuple) else time) * (1 + self.drift * i)

    def start(self):
        return BY

    def ask(self, request, limit_s):
        return self(request, limit_s)

    def faults(self, plans):
        return self.without

    def compile_ahead(self, tasks):
        self.compiled = list(tasks)
        return 1.0
