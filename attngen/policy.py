"""Numbers that steer what is generated, each with its source."""

from __future__ import annotations

REACH = 500  # rows before and after a tile that stand for what documents and the like let it see (docs/perf-log.md, section 12)
MANY_ROWS = 4096  # rows that stand for "any number"
FEW_QUERIES = 64  # so many fill a tile: with fewer, grouped heads that share keys are packed into one (docs/perf-log.md, section 18)
# The query heads of a group are split among programs, so that those which own few keys keep a device busy: a multiprocessor has so
# many keys of all sequences and heads at least (docs/perf-log.md, section 18).
SPLIT_KEYS = 512
STRIP = 32  # keys in one of Ts strips of a row of blocks, for which the kernel `blocks` counts what is visible
