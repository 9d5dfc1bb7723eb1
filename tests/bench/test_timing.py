"""Measurement of times and memory, as far as it needs no GPU."""

from __future__ import annotations

import pytest
import torch

from attngen.bench import timing


def test_reserved_memory_is_at_least_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 bytes are reserved before, of which tensors use 10. A function that allocates 50 more reserves 20 more."""
    figures = {"memory_allocated": 10, "memory_reserved": 60, "max_memory_allocated": 60, "max_memory_reserved": 80}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda figure=figure: figure)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for name in ("settle", "wait"):
        monkeypatch.setattr(timing, name, lambda: None)
    assert timing.peak_bytes(lambda: None) == (50, 70)
