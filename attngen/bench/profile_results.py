"""Results of `attngen profile`: the bytes of each kernel of each call, predicted and measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from attngen.bench.counters import Bytes

ORDERS = {"q_outer": "FlashAttention-2", "kv_outer": "FlashAttention-1"}
NAIVE = "naive"


@dataclass(frozen=True)
class Line:
    """A kernel of a call, with predicted and measured bytes of all its launches. Naive attention is one line."""

    order: str
    tile: int | None
    n: int
    direction: str
    kernel: str
    tiles: str  # queries x keys
    predicted: Bytes | None
    measured: Bytes


@dataclass(frozen=True)
class Found:
    """All lines, their sizes and device, and sentences on calls that could not be profiled."""

    device: str
    spec: str
    batch: int
    heads: int
    kv_heads: int
    lines: tuple[Line, ...]
    failed: tuple[str, ...]


def rows(found: Found) -> list[dict[str, object]]:
    """Return the lines as flat data, for CSV: bytes, and measured over predicted."""
    made = []
    for line in found.lines:
        flat = {k: v for k, v in asdict(line).items() if k not in ("predicted", "measured")}
        for kind, moved in (("predicted", line.predicted), ("measured", line.measured)):
            flat |= {
                f"{kind}_{name}": None if moved is None else round(getattr(moved, name))
                for name in Bytes.__dataclass_fields__
            }
        made.append({**flat, "dram_ratio": ratio(line, "dram"), "l2_ratio": ratio(line, "l2")})
    return made


def read(text: str) -> Found:
    """Return what a profile.json holds."""
    data = json.loads(text)
    lines = []
    for flat in data.pop("lines"):
        predicted, measured = (
            {name: flat[f"{kind}_{name}"] for name in Bytes.__dataclass_fields__} for kind in ("predicted", "measured")
        )
        known = None if None in predicted.values() else Bytes(**predicted)
        keys = {name: flat[name] for name in Line.__dataclass_fields__ if name in flat}
        lines.append(Line(**keys, predicted=known, measured=Bytes(**measured)))
    return Found(**{**data, "lines": tuple(lines), "failed": tuple(data["failed"])})


def ratio(line: Line, level: str) -> float | None:
    """Return measured over predicted bytes of `dram` or `l2`; None without a prediction."""
    if line.predicted is None or not getattr(line.predicted, level):
        return None
    return round(getattr(line.measured, level) / getattr(line.predicted, level), 4)
