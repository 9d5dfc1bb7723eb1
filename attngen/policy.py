"""Numbers that steer what is generated, each with its source."""

from __future__ import annotations

# Rows before and after a tile that stand for what documents and the like let it see: half a usual one (docs/perf-log.md, section 12).
REACH = 500
MANY_ROWS = 4096  # rows that stand for "any number"
FEW_QUERIES = 64  # so many fill a tile: with fewer, grouped heads that share keys are packed into one (docs/perf-log.md, section 18)
# The query heads of a group are split among programs, so that those which own few keys keep a device busy: a multiprocessor has so
# many keys of all sequences and heads at least (docs/perf-log.md, section 18).
SPLIT_KEYS = 512
STRIP = 32  # keys in one of Ts strips of a row of blocks, for which the kernel `blocks` counts what is visible
PACKED = 16  # rows of the smallest range for which tiles of packed queries are chosen (docs/perf-log.md, section 18)
WIDEST = 256  # columns of dK and dV together that one kernel holds (docs/perf-log.md, section 10)
# Heads whose longest programs start together; those of more would not all find their keys in the L2 (docs/perf-log.md, section 18).
ABREAST = 8
