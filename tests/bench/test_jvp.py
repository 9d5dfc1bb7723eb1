"""The benchmark of forward-mode AD, with a fake clock for the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from attngen.bench import jvp
from tests.bench import fakes
from tests.helpers import spec as spec_of


@pytest.mark.share(8)
@pytest.mark.parametrize("name", ["full_mha", "softcap_window_gqa"])
def test_each_peer_with_a_jvp_has_a_line(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only SDPA's math backend has a jvp, and no backend of SDPA has one with score modifiers."""
    monkeypatch.setattr(jvp, "TOKENS", 48), monkeypatch.setattr(jvp, "HIDDEN", 256)
    clock = SimpleNamespace(
        peak_bytes=fakes.peak_bytes, device_times=lambda calls: fakes.device_times(calls, 3, lambda name: None)
    )
    found = list(jvp.rows(spec_of(name), 48, tmp_path / name, clock, device))
    peers = ["ours", "naive", *(["sdpa math"] if name == "full_mha" else [])]
    assert [line[:3] for line in found] == [(name, "48", peer) for peer in peers]
    assert all(len(line) == len(jvp.HEADINGS) and line[3:6] == ("1.510", "2.510", "1.66") for line in found)
