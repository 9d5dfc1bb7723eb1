"""Numbers that steer what is generated, each with its source."""

from __future__ import annotations

REACH = 500  # rows before and after a tile that stand for what documents and the like let it see (docs/perf-log.md, section 12)
MANY_ROWS = 4096  # rows that stand for "any number"
