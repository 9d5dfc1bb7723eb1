"""Classes of kernels that share a measured schedule: they agree in everything that decides which tiles are fast."""

from __future__ import annotations

from typing import NamedTuple

from attngen.heuristics import CACHED_KEYS, RANGES, REACH, SPLIT_RANGES
from attngen.ir import Kernel, Module, Op, only, tile
from attngen.ir.heads import SHARINGS
from attngen.ir.names import STATISTICS
from attngen.tiles.sizes import mode, tile_width
from attngen.tiles.tiles import count_tiles, tile_loops

TILE = 64  # rows of the square tiles that classes are counted in
SHORT = 1536  # most keys (queries, if the program tile is one of keys) that programs of short loops visit on average


class Key(NamedTuple):
    """The kernels to which an entry of the schedule table applies, on one device class."""

    kernel: str
    head_dim: str  # of q and k / of v, padded as on chip
    elements: str  # `16-bit`, `tf32` or `ieee`
    heads: str  # `mha`, or `grouped`: several query heads share a K/V head
    mask: str  # see mask_class
    max_rows: int | None  # of the kernel's ranges


def ranges(kernel: Kernel) -> tuple[tuple[int | None, int], ...]:
    """Return the ranges of rows with separate measured schedules, in rising order: (most rows or None, measured
    rows)."""
    return SPLIT_RANGES if kernel.kv_split else RANGES


def key(module: Module, kernel: Kernel, elem_bytes: int, max_rows: int | None) -> Key:
    """Return the key of a kernel for an element size and a range of rows.

    A pack-GQA kernel without split-KV has the key of `fwd`, because it runs the same loop. With split-KV the mask class
    is that of as many rows as keys.
    """
    head_dim = f"{tile_width(module.head_dim_qk)}/{tile_width(module.head_dim_v)}"
    heads = "grouped" if SHARINGS[module.sharing].is_shared else "mha"
    mask = mask_class(module, kernel, CACHED_KEYS if kernel.kv_split else dict(RANGES)[max_rows])
    name = "fwd" if kernel.pack_gqa and not kernel.kv_split else kernel.name
    return Key(name, head_dim, mode(module, elem_bytes), heads, mask, max_rows)


def mask_class(module: Module, kernel: Kernel, rows: int) -> str:
    """Return the loop shape that the mask gives for as many queries as keys, and features that take registers, such as
    `causal+rows`.

    The shape, by counting tiles:
        none     the kernel has no loop
        masked   more than half of the visited tiles are partial: dilated masks, windows of a few tiles
        full     more than three quarters of all tiles are visited
        short    fewer than a third are visited, on average at most SHORT rows: windows, documents; another program on
                 the SM hides the waits
        causal   anything between: programs are long and differ in length
    If blocks are listed from data, the shape is unknown and is called `listed`. FlashAttention-1's loop order has the
    single class `rewritten`. A window of 1024 is `causal` for 1024 rows.

    The features, in this order:
        blocks     the mask's blocks are listed
        pages      pages of the KV cache are too short for tiles, or have any length
        rows       row vectors are read in addition to the tiles (padding, documents, pages)
        pairs      a number is read per score
        lookups    all such numbers are looked up in tables
        score      the score is modified
        dropout    dropout is applied
        quantised  keys are quantised
    """
    if not tile_loops(kernel):
        return "none"
    if kernel.traits.visits_all_tiles:
        return "rewritten"
    listed = module.blocks is not None
    features = {
        "blocks": listed,
        "pages": any(op.pages and not op.via for op in only(kernel.ops(), tile.Load)),
        "rows": any(_reads_row(kernel, op) for op in kernel.ops()),
        "pairs": kernel.traits.reads_pairs and not kernel.traits.looks_up,
        "lookups": kernel.traits.looks_up,
        "score": module.score != "none",
        "dropout": kernel.traits.has_dropout,
        "quantised": kernel.traits.reads_quantised,
    }
    shape = "listed" if module.blocks is not None and module.blocks.data else _shape(kernel, rows)
    return "+".join([shape, *(name for name, has in features.items() if has)])


def _shape(kernel: Kernel, rows: int) -> str:
    programs = -(-rows // TILE)
    visited, partial = (count_tiles(kernel, rows, rows, TILE, TILE, cls, REACH) for cls in (None, "partial"))
    if 2 * partial > visited:
        return "masked"
    if 4 * visited > 3 * programs**2:
        return "full"
    return "short" if 3 * visited < programs**2 and visited * TILE <= SHORT * programs else "causal"


def _reads_row(kernel: Kernel, op: Op) -> bool:
    """True if an op reads one number per row of a tile for the mask or a modifier."""
    if not isinstance(op, (tile.Gather, tile.Load)) or len(op.type.dims) != 1:
        return False
    return (op.src.tensor if isinstance(op, tile.Gather) else kernel.accessed(op)[0].name) not in STATISTICS
