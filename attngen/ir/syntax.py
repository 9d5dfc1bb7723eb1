"""Tables of the textual IR that its printer and its parser share."""

from __future__ import annotations

HEADER = "// attngen textual IR. `attngen emit FILE --out DIR` renders the module from this file only."

# Kind of op -> the fields whose values follow the kind without a name.
POSITIONAL = {
    "arg": ("role",),
    "base": ("src",),
    "load": ("src",),
    "cache_length": ("src",),
    "gather": ("src",),
    "list_position": ("src",),
    "count_tiles": ("src",),
    "init": ("value",),
    "loop": ("var",),
    "dot": ("a", "b"),
    "mask": ("value",),
    "softmax_step": ("s",),
    "seed": ("src",),
    "dropout_mask": ("seed",),
    "dropout": ("value",),
    "reduce": ("op", "value"),
    "scan": ("op", "value"),
    "store": ("dst", "value"),
    "scatter": ("dst", "value"),
    "ordered_add": ("dst", "value"),
    "ordered_accumulate": ("dst", "value"),
    "append": ("dst", "value"),
    "view": ("src",),
    "copy": ("src",),
    "launch": ("kernel",),
    "sum": ("value",),
    "place": ("value",),
    "sum_distances": ("value",),
    "classify_blocks": ("src",),
    "list_blocks": ("src",),
    "producer_load": ("pipeline", "src"),
    "write_tile_index": ("pipeline",),
    "consumer_wait": ("pipeline",),
    "read_metadata": ("pipeline",),
    "consumer_release": ("value",),
    "zero_out_of_bounds": ("value",),
    "slice_rows": ("value",),
    "rematerialize": ("value",),
    "local_load": ("value",),
    "producer_store": ("pipeline", "value"),
    "producer_tail": ("pipeline",),
    "wgmma": ("a", "b"),
    "wgmma_wait": ("value",),
    "pack": ("value",),
    "convert_layout": ("value",),
    "pin_before_wait": ("value",),
    "pin_after_wait": ("value",),
    "softmax_stats": ("s",),
    "softmax_weights": ("s",),
    "partial_reduce": ("value",),
    "scaled_iota": ("value",),
    "split_halves": ("value",),
    "deinterleave": ("value",),
    "interleave": ("a", "b"),
    "concat_halves": ("a", "b"),
    "scheduler_barrier": ("do",),
    "semaphore_acquire": ("semaphore",),
    "semaphore_release": ("semaphore",),
    "tma_store": ("dst", "value"),
    "tma_store_wait": ("staging",),
    "work_loop": ("pipeline",),
    "reload_tile": ("pipeline",),
    "pipelined_loop": ("var",),
}


IR_VERSION = 2  # of the text: 1 had other names of ops and fields


HEADER_KEYS = (
    "ir",
    "version",
    "spec",
    "phase",
    "backend",
    "heads",
    "head_dim",
    "dtype",
    "precision",
    "mask",
    "blocks",
    "dropout",
)


WARP_GROUP_WORDS = ("instances", "rows", "warps", "registers")


# Ops without a result, as in `store %O[...] %o`. The parser names them by their position, for the graph.
UNNAMED = (
    "yield",
    "store",
    "scatter",
    "ordered_add",
    "ordered_accumulate",
    "append",
    "barrier",
    "grid_dependency_wait",
    "launch",
    "copy",
    "producer_load",
    "consumer_release",
    "zero_out_of_bounds",
    "producer_store",
    "producer_tail",
    "tma_store",
    "tma_store_wait",
    "write_tile_index",
    "reload_tile",
    "scheduler_barrier",
    "semaphore_acquire",
    "semaphore_release",
)
