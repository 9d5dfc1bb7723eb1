"""Constants that control the generated code, each with its source, grouped by topic."""

from __future__ import annotations

# ---------------------------------------------------------------- which kernels there are, and the tile of a program

# Minimum number of queries for a tile of one head: with fewer, pack-GQA packs the heads of a group into a tile
# (docs/perf-log.md, section 18).
FEW_QUERIES = 64
# The query heads of a group are split among programs so that a call with few keys keeps the device busy: each SM gets
# at least this many keys of all sequences and heads (docs/perf-log.md, section 18).
SPLIT_KEYS = 512
# The fused backward (one kernel for dQ, dK and dV) needs at least FUSED_KEYS keys per SM, over all sequences and heads:
# with fewer, most programs would wait for the semaphore. It also needs at least FUSED_ROWS queries, and as many keys,
# in a sequence (docs/perf-log.md, section 31).
FUSED_KEYS = 480
FUSED_ROWS = 1024
# Or it needs these numbers: of queries, and as many keys, in a sequence; and of keys per SM. With fewer, the host takes
# longer than the device.
FUSED_SHORT = (512, 1536)
# Maximum number of a group's query heads that a program of the fused backward processes one after another. It loads K/V
# tiles, and stores gradients of keys, once for these heads. It is 1 if the longest program visits more than UNEVEN
# times as many tiles as the average program.
FUSED_HEADS = 2
UNEVEN = 3
# Maximum number of keys for the fused backward of a mask with block lists: with more keys and few blocks per row,
# programs wait too long for each other.
FUSED_LISTED = 8192
# 16-bit numbers in 16 bytes: rows that TMA reads start at multiples of 16 bytes (CUDA, cuTensorMapEncodeTiled).
ALIGNED_KEYS = 8
WIDEST = 256  # columns of dK and dV together that one kernel holds (docs/perf-log.md, section 10)
WIDEST_ACC = 256  # columns of the widest accumulator that a program holds on every device; wider ones may be split
LEAST_SHARED = 128  # narrowest part of a split accumulator: with fewer columns scores are recomputed too often
# The same as WIDEST for the fused backward: with 64 keys these accumulators take 160 registers of a consumer.
WIDEST_FUSED = 320
# Number of heads in a group of the grid's L2 swizzle, whose programs run together: the keys of more heads would not all
# fit in the L2 (docs/perf-log.md, section 18).
SWIZZLE = 8
# Bytes that the programs of the fused backward stream for all heads of a swizzle group together. From these the number
# of rows in `swizzle_rows(...)` follows. They fit in the L2, so a program that starts when the one before it in the
# semaphore order has a lead finds its tiles there (docs/perf-log.md, section 31).
SWIZZLE_GROUP_BYTES = 16 * 2**20
# The same for masks with block lists. Programs then reach the same query tile after few tiles, so each needs a longer
# lead (the same section).
SWIZZLE_GROUP_BYTES_LISTED = 32 * 2**20
# Maximum number of heads in a swizzle group of programs that each have several query heads, if head_dim is above
# MULTI_HEAD_DIM (the same section).
MULTI_HEAD_SWIZZLE, MULTI_HEAD_DIM = 4, 64

# Rows of a tile of kernels that compute no scores: elementwise kernels such as `delta`, kernels that sum tiles of
# several heads such as `dkdv_end` (docs/perf-log.md, section 31), and kernels that round rows of a latent to 8 bits, in
# fp32.
ELEMENTWISE_ROWS, SUM_ROWS, QUANTISE_ROWS = 64, 32, 16

# ---------------------------------------------------------------- split-KV: keys of a cache split among programs

UNIT = 64  # keys of a unit of work; tiles divide it or are multiples of it
# Maximum number of splits for each program that the device holds at once, so that all programs end together if
# sequences differ in length; and minimum number of units of a split. Splits have a length with which all programs get
# equally many (docs/perf-log.md, section 33).
WAVES, LEAST_UNITS = 16, 64
CTAS_PER_SM = 2  # programs of a split-KV kernel per SM
# For 8-bit keys and the smallest tile of queries: half as many bytes arrive while a program waits for its warps (the
# same section).
CTAS_PER_SM_QUANTISED = 3
# For latents: a program's tile takes all shared memory, and its output is four times as long, so there are fewer splits
# with more keys each.
CTAS_PER_SM_LATENT, WAVES_LATENT = 1, 4
FEW_LATENT = 512  # maximum number of query rows, over all heads, for split-KV of latents: 128 heads with 4 rows
# Configs of combine kernels: (maximum number of rows of a call times warps per row, None: any; splits of a row that a
# program combines per iteration). Loads of an iteration do not wait for each other, but more of them take more
# registers, so that fewer programs fit on an SM (the same section).
COMBINE_SPLITS: tuple[tuple[int | None, int], ...] = ((512, 16), (None, 8))
COMBINE_COLUMNS_PER_THREAD = 4  # columns of a row per thread, if several warps share a row

# ---------------------------------------------------------------- block lists made from data

LISTED = 128  # block size: the largest tile, because tiles divide blocks
# A mask without data gets block lists too, if listed tiles cost less than this share of the cost of all tiles within
# its bounds. The costs are sampled in SAMPLED_ROWS rows of blocks, at one of SAMPLED_LENGTHS. A masked tile costs more
# than a full one by the share MASKED_TILE (docs/perf-log.md, section 34).
WORTH_LISTING = 0.75
SAMPLED_ROWS, SAMPLED_LENGTHS = 8, (8192, 16384, 32768)
MASKED_TILE = 0.2
STRIP = 32  # keys of a strip, for which the kernel `blocks` counts visible pairs; a row of blocks has Ts strips

# ---------------------------------------------------------------- for how many rows a schedule is chosen

PACKED = 16  # rows of the smallest range for which tiles of packed queries are chosen (docs/perf-log.md, section 18)
MANY_ROWS = 4096  # rows that represent "any number"
# Rows before and after a tile that masks such as `document` are assumed to show: half a usual document
# (docs/perf-log.md, section 12).
REACH = 500
# Up to this many rows, tiles are not loaded by descriptors: for so short a call they cost the host more than they save
# on the device (docs/perf-log.md, section 18).
SHORT_ROWS = 512
# Ranges that get separate measured schedules: (maximum rows of the tiled axis, None: any; rows that are measured).
RANGES: tuple[tuple[int | None, int], ...] = ((SHORT_ROWS, 512), (2048, 1024), (8192, 4096), (None, 16384))
# The same for split-KV kernels: rows of all queries that share a K/V head, one or more tiles.
SPLIT_RANGES: tuple[tuple[int | None, int], ...] = ((PACKED, 4), (None, 64))
CACHED_KEYS = 16384  # keys of a sequence in the cache when split-KV kernels are measured
NOISE = 0.02  # share of a measured time: smaller differences do not count as faster
MODELLED = (64, SHORT_ROWS)  # ranges for which the cost model chooses, besides "any number"

# ---------------------------------------------------------------- kernels that prepare tensors for others

# Kernels that scan a sequence, such as `document_spans`: positions that the program processes per iteration, for
# sequences of up to as many (the last: any length), and positions per thread. The time per position hardly depends on
# this; these spill under no supported Triton (docs/perf-log.md, section 22).
SCAN_POSITIONS, SCAN_POSITIONS_PER_THREAD = (64, 256, 1024), 4
# Kernels that compare all queries with all keys: (queries, keys) of a tile, and pairs per thread.
COMPARE_TILE, COMPARE_PAIRS_PER_THREAD = (16, 256), 32
MOST_THREADS = 1024  # maximum threads of a program, on all devices

# ---------------------------------------------------------------- rematerialization in loops

WIDE = 128  # width from which an accumulator's loop has no registers to spare (docs/perf-log.md, section 10)

# ---------------------------------------------------------------- predictions of context parallelism

# Of a launch: the share of the peak that its products reach; FLOPs that take as long as all else that is done for a
# score, the exponential above all; seconds of an SM for a tile of one head's queries (forward) or keys (backward),
# besides the products; and the share by which products of a backward take longer if its queries are not in the L2.
# Fitted to 22 measurements on one H200, causal, windows and documents, head_dim 64 and 128, 8k to 128k rows, and the
# work of single ranks of 2 and 8, which they give within 10% (docs/perf-log.md, section 41).
REACHED = {"forward": 0.9, "backward": 0.585}
SCORE_FLOPS = {"forward": 170, "backward": 32}
TILE_SECONDS = {"forward": 2.9e-6, "backward": 8.5e-6}
STREAMED = 0.14
# Share of a link's bytes/s that transfers reach. NVLink: measured on two H200, 246 GB/s in an all-gather, 273 GB/s in
# sends both ways, of 450. Between nodes: assumed, not measured.
REACHED_GATHER, REACHED_SEND, REACHED_NETWORK = 246 / 450, 273 / 450, 0.9
LINK_LATENCY, NETWORK_LATENCY = 15e-6, 30e-6  # seconds of a transfer without bytes; assumed, not measured
LAUNCH_SECONDS = 5e-6  # seconds of a launch without work; assumed, not measured
# Share of the longest program's time for which the device is not full at the end of a launch, which starts with its
# longest programs: fitted in the same way.
LAST_PROGRAMS = 0.2
PLANNED_TILE = 128  # rows and keys of a tile, by which partial tiles at edges of the mask are counted
MOST_CHUNKS = 2048  # of a sequence for which `attngen explain --gpus` counts scores
