"""What needs no GPU of how times and memory are measured there."""

from __future__ import annotations

import pytest
import torch

from attngen.bench import timing


def test_no_less_is_reserved_than_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 bytes reserved before, tensors hold 10; a function that takes 50 more takes 20 of them from the device."""
    figures = {"memory_allocated": 10, "memory_reserved": 60, "max_memory_allocated": 60, "max_memory_reserved": 80}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda figure=figure: figure)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for name in ("settle", "wait"):
        monkeypatch.setattr(timing, name, lambda: None)
    assert timing.peak_bytes(lambda: None) == (50, 70)
