"""What a measured schedule is good for: kernels that differ in nothing that decides which tiles are fast share it."""

from __future__ import annotations

from typing import NamedTuple

from attngen.heuristics import RANGES, REACH, SPLIT_KEYS_OF, SPLIT_RANGES
from attngen.ir.graph import Kernel, Module
from attngen.ir.heads import SHARINGS
from attngen.ir.names import STATISTICS
from attngen.ir.ops import Gather, Load, Op
from attngen.tiles.sizes import mode, tile_width
from attngen.tiles.tiles import count_tiles, tile_loops

TILE = 64  # rows of the square tiles that classes are counted in
SHORT = 1536  # keys (of kernels that own keys: queries) that programs of short loops visit on average, at most


class Key(NamedTuple):
    """Whose schedule an entry of the table is, on one device class."""

    kernel: str
    head_dim: str  # of q and k / of v, as wide as on chip
    elements: str  # `16-bit`, `tf32` or `ieee`
    heads: str  # `mha`, or `grouped`: several query heads share a K/V head
    mask: str  # see mask_class
    max_rows: int | None  # of the kernel's ranges


def ranges(kernel: Kernel) -> tuple[tuple[int | None, int], ...]:
    """The ranges that get measured schedules of their own, the one of fewest rows first: rows at most (None: any),
    and those measured."""
    return SPLIT_RANGES if kernel.kv_split else RANGES


def key(module: Module, kernel: Kernel, elem_bytes: int, max_rows: int | None) -> Key:
    """The key of a kernel for elements of so many bytes and a range of rows; `packed` has that of `fwd`, whose loop it
    has.

    Where keys are dealt among programs, the mask's class is that of as many rows as there are keys.
    """
    head_dim = f"{tile_width(module.head_dim_qk)}/{tile_width(module.head_dim_v)}"
    heads = "grouped" if SHARINGS[module.sharing].is_shared else "mha"
    mask = mask_class(module, kernel, SPLIT_KEYS_OF if kernel.kv_split else dict(RANGES)[max_rows])
    name = "fwd" if kernel.pack_gqa and not kernel.kv_split else kernel.name
    return Key(name, head_dim, mode(module, elem_bytes), heads, mask, max_rows)


def mask_class(module: Module, kernel: Kernel, rows: int) -> str:
    """How the mask shapes a kernel's loops over as many queries as keys, and what else takes its registers, as in
    `causal+rows`.

    The shape, by counting tiles:
        none     the kernel has no loop
        masked   more than half of the tiles visited are partial: dilated masks, windows of a few tiles
        full     more than three quarters of all tiles are visited
        short    fewer than a third are, SHORT rows on average at most: windows, documents; another program on the SM hides the waits
        causal   anything between: programs are long, and differ in length
    Where data lists blocks, the shape is not known, and `listed`; in FlashAttention-1's order, `rewritten` says all. So
    a window of 1024 is `causal` where there are 1024 rows.

    What else, in this order: `blocks` are listed; `pages` of a cache are too short for tiles, or of any length; `rows`
    of numbers are read beside the tiles (of padding, documents, pages); a number is read for each score (`pairs`), or
    all such are looked up in tables (`lookups`); the `score` is modified; `dropout`; keys are `quantised`.
    """
    if not tile_loops(kernel):
        return "none"
    if kernel.walks:
        return "rewritten"
    listed = module.blocks is not None
    features = {
        "blocks": listed,
        "pages": any(isinstance(op, Load) and op.pages and not op.via for op in kernel.ops()),
        "rows": any(_reads_row(kernel, op) for op in kernel.ops()),
        "pairs": kernel.reads_pairs and not kernel.looks_up,
        "lookups": kernel.looks_up,
        "score": module.score != "none",
        "dropout": kernel.has_dropout,
        "quantised": kernel.reads_quantised,
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
    """Whether it reads a number of the mask's or a modifier's for each row of a tile."""
    if not isinstance(op, (Gather, Load)) or len(op.type.dims) != 1:
        return False
    return (op.src.tensor if isinstance(op, Gather) else kernel.accessed(op)[0].name) not in STATISTICS
