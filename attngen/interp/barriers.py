"""Barriers of a CTA: mbarriers in shared memory, and named barriers."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.errors import AttngenError


@dataclass
class Mbarrier:
    """An mbarrier: the arrivals and bytes for which its phase still waits, and the parity of the phase."""

    arrivals: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self) -> None:
        if self.left == 0:
            raise AttngenError("an mbarrier has more arrivals in a phase than it was initialised with")
        self.left -= 1
        self.complete(0)

    def complete(self, count: int) -> None:
        """Take `count` bytes as copied, and end the phase if nothing is left to wait for."""
        self.bytes -= count
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.arrivals, self.phase ^ 1


@dataclass
class NamedBarrier:
    """A named barrier: the threads that have arrived, and how often all have."""

    arrived: int = 0
    rounds: int = 0

    def arrive(self, threads: int, of: int) -> None:
        self.arrived += threads
        if self.arrived > of:
            raise AttngenError(f"{self.arrived} threads arrive at a named barrier of {of}")
        if self.arrived == of:
            self.arrived, self.rounds = 0, self.rounds + 1
