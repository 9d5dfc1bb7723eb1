"""Bounds of the partial key tiles for one instance of a warp group, which has some of the program tile's rows."""

from __future__ import annotations

from attngen.ir import Expr, Kernel, Ranges, symbol

ROWS_START = symbol("q_start")


def instance_bounds(
    kernel: Kernel, partial: Ranges, full: Ranges, listed: str | None = None
) -> tuple[Expr, Expr] | None:
    """Return the start and end of the loop's tiles that are partial for the rows of one instance.

    The bounds of a loop are formulas in `q_start`, the first row of a tile of queries, and BLOCK_Q, its number of rows.
    They hold for any consecutive rows, so also for the rows of an instance: it evaluates the same formulas, with these
    names bound to its own rows.

    Return None if that is useless: tiles are listed, a class has several ranges or none, the full tiles do not end
    where the partial ones start, or the end does not depend on the rows.
    """
    if listed or len(partial) != 1 or len(full) != 1:
        return None
    (first, end), (_, full_end) = partial[0], full[0]
    if first != full_end or ROWS_START not in kernel.resolve(end).free_symbols or kernel.resolve(end) == end:
        return None
    return kernel.resolve(first), kernel.resolve(end)
