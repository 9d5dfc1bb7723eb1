"""What a copy of a role, which has a part of a tile's rows, sees of the tiles of keys that its program runs over."""

from __future__ import annotations

from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Kernel
from attngen.ir.pipe import Ranges

ROWS_START = symbol("q_start")


def instance_bounds(
    kernel: Kernel, partial: Ranges, full: Ranges, listed: str | None = None
) -> tuple[Expr, Expr] | None:
    """Where the tiles that are partial for a copy's own rows start and end, of those that a loop runs over.

    The bounds of a loop are formulas in `q_start`, where a tile of queries starts, and BLOCK_Q, its rows. They hold for
    any rows that follow one another, and so for those of a copy: the same formulas, read in the copy, where these names
    stand for its own rows.

    None where that is of no use: tiles are listed, a class has several ranges or none, the full ones do not end where
    the partial ones start, or the end does not depend on the rows.
    """
    if listed or len(partial) != 1 or len(full) != 1:
        return None
    (first, end), (_, full_end) = partial[0], full[0]
    if first != full_end or ROWS_START not in kernel.resolve(end).free_symbols or kernel.resolve(end) == end:
        return None
    return kernel.resolve(first), kernel.resolve(end)
