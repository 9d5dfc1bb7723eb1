"""Numbers that steer what is generated, each with its source, by what they steer."""

from __future__ import annotations

# ---------------------------------------------------------------- which kernels there are, and what a program of them owns

# so many fill a tile: with fewer, grouped heads that share keys are packed into one (docs/perf-log.md, section 18)
FEW_QUERIES = 64
# The query heads of a group are split among programs, so that those which own few keys keep a device busy: a
# multiprocessor has so many keys of all sequences and heads at least (docs/perf-log.md, section 18).
SPLIT_KEYS = 512
# Where one kernel computes dQ, dK and dV, each multiprocessor has so many keys of all sequences and heads at least, as
# of few most programs would wait for their first turns; and a sequence has so many queries, and keys (docs/perf-log.md,
# section 31).
FUSED_KEYS = 480
FUSED_ROWS = 1024
# Or so many queries and keys, and so many keys of a multiprocessor: with fewer the host takes longer than the device.
FUSED_SHORT = (512, 1536)
# Query heads of a group, at most, that one of its programs has one after another: each K/V tile is loaded, and
# gradients of keys are stored, once for these. One, if the longest program visits more than UNEVEN times as many tiles
# as they do on average.
FUSED_HEADS = 2
UNEVEN = 3
# keys, at most, where the mask lists blocks: with more and few blocks in a row, programs wait too long for each other
FUSED_LISTED = 8192
# numbers of 16 bits in the 16 bytes at whose multiples rows start that a copy engine reads (CUDA,
# cuTensorMapEncodeTiled)
ALIGNED_KEYS = 8
WIDEST = 256  # columns of dK and dV together that one kernel holds (docs/perf-log.md, section 10)
WIDEST_SUM = 256  # columns of a sum that a program holds on every device; programs may share those of more
LEAST_SHARED = (
    128  # columns that a program has of these, at least: with fewer, scores are computed more often than they are used
)
# of the kernel that also adds to dQ: with 64 keys these sums are 160 registers of a consumer of a divided kernel
WIDEST_FUSED = 320
# Heads whose longest programs start together; those of more would not all find their keys in the L2 (docs/perf-log.md,
# section 18).
SWIZZLE = 8
# Bytes of what programs stream that add to dQ in turns, of the heads that run together: each program starts when the
# one before it has a lead, and finds its tiles in the L2 (docs/perf-log.md, section 31).
SWIZZLE_ROWS = 16 * 2**20
# So many where the mask lists blocks. Programs then meet the same tile of queries after few tiles of their own, and so
# each needs a longer lead (the same section).
SWIZZLE_ROWS_LISTED = 32 * 2**20
# Where a program has several query heads of more than so many columns, so many of these heads run together at most (the
# same section).
FEW_SWIZZLE, OF_COLUMNS = 4, 64

# Rows of a tile of kernels without scores: usually, and where they add up tiles of several heads, of which a program
# has each in turn (docs/perf-log.md, section 31).
PLAIN, SUMMED = 64, 32
ROUNDED = 16  # the same where rows of a latent are rounded to 8 bits, in fp32

# ---------------------------------------------------------------- keys of a cache that are dealt among programs

UNIT = 64  # keys of a unit of work, which tiles divide or are made of
# So many parts, at most, for each program that the device holds at once, so that all end together where sequences
# differ; fewer where parts would have less than so many units. Parts are of a length with which all programs have one
# as often (docs/perf-log.md, section 33).
WAVES, LEAST_UNITS = 16, 64
CTAS_PER_SM = 2  # programs of a part that share a multiprocessor
# Of keys in 8 bits, with the smallest tile of queries: half as many bytes arrive while a program waits for its warps
# (the same section).
CTAS_PER_SM_QUANTISED = 3
# Of a latent, a program's tile takes all shared memory, and its output is four times as long: fewer parts, of which
# each has more keys.
CTAS_PER_SM_LATENT, WAVES_LATENT = 1, 4
FEW_LATENT = (
    512  # rows of queries of all heads, of which keys of a latent are dealt among programs: 4 of each of 128 heads
)
# (rows of a whole call, times warps of a row, at most; None: any number; parts of a row that a turn joins). Loads of a
# turn do not wait for each other, but with more of them a program takes more registers, and leaves room for fewer
# others (the same section).
JOINED: tuple[tuple[int | None, int], ...] = ((512, 16), (None, 8))
JOINED_EACH = 4  # columns of a row that each thread has, where several warps share a row

# ---------------------------------------------------------------- lists of blocks that data gives

LISTED = 128  # rows and columns of a block: the largest tile, since tiles divide blocks
# A mask without data is listed too, if lists cost less than this share of what its bounds leave, in a sample: of so
# many rows of blocks, of so many positions. A tile that is masked costs more than a full one, by this share
# (docs/perf-log.md, section 34).
WORTH_LISTING = 0.75
SAMPLED_ROWS, SAMPLED_LENGTHS = 8, (8192, 16384, 32768)
MASKED_TILE = 0.2
STRIP = 32  # keys in one of Ts strips of a row of blocks, for which the kernel `blocks` counts what is visible

# ---------------------------------------------------------------- for how many rows a schedule is chosen

PACKED = 16  # rows of the smallest range for which tiles of packed queries are chosen (docs/perf-log.md, section 18)
MANY_ROWS = 4096  # rows that stand for "any number"
# Rows before and after a tile that stand for what documents and the like let it see: half a usual one
# (docs/perf-log.md, section 12).
REACH = 500
# Up to so many rows, tiles are not fetched by descriptors: these cost the host of so short a call more than they save
# the device (docs/perf-log.md, section 18).
SHORT_ROWS = 512
# Ranges that get measured schedules of their own: rows of the tiled axis, at most (None: any), and how many rows are
# measured.
RANGES: tuple[tuple[int | None, int], ...] = ((SHORT_ROWS, 512), (2048, 1024), (8192, 4096), (None, 16384))
# The same of a kernel among whose programs the keys of a cache are dealt: rows of all queries that share a K/V head,
# one or more tiles.
SPLIT_RANGES: tuple[tuple[int | None, int], ...] = ((PACKED, 4), (None, 64))
SPLIT_KEYS_OF = 16384  # of a sequence in the cache, where these are measured
NOISE = 0.02  # of a measured time: what is faster by less is not faster
MODELLED = (64, SHORT_ROWS)  # ranges for which the cost model chooses, besides "any number"

# ---------------------------------------------------------------- kernels that prepare what others read

# Positions that a program takes at a time, for sequences of up to so many (the last: of any number), and how many of
# them each thread has. What a position takes hardly depends on this; these spill under no supported Triton
# (docs/perf-log.md, section 22).
WALKED, WALKED_EACH = (64, 256, 1024), 4
COMPARED, COMPARED_EACH = (
    (16, 256),
    32,
)  # queries and keys of a tile whose pairs a program compares, and pairs that each thread has
MOST_THREADS = 1024  # of a program, on all devices

# ---------------------------------------------------------------- what loops recompute

WIDE = 128  # columns of an accumulator from which on its loop has no registers to spare (docs/perf-log.md, section 10)
