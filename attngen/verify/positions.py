"""The rule `positions`: kernels of calls that have chunks of a sequence tell rows of the call from positions in the
whole sequence."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir import TENSORS, Expr, Host, Kernel, Module, launch, symbol, tile, to_text
from attngen.ir.names import CALL_ROWS, SHAPES, START_RANKS, STARTS, WHOLE_LENGTHS
from attngen.tiles.tiles import tile_loops

_ARGUMENTS = {name: dims for names in (STARTS, START_RANKS) for name, dims in names.values()}


def positions(module: Module, kernel: Kernel) -> Iterator[str]:
    """Kernels that evaluate the mask get the starts of chunks, if and only if calls have chunks.

    Tensors with a row for each query or key of the call have the call's rows, inputs of masks and modifiers those of
    the whole sequence. Loops over classified tiles run between positions among the tiles of the call. Tiles divide
    chunks, so that all rows of a tile lie side by side in the whole sequence.
    """
    evaluates = bool(kernel.traits.dots) or kernel.traits.counts_pairs
    if kernel.traits.places != (bool(module.chunk) and evaluates):
        found = "the starts of chunks" if kernel.traits.places else "no starts of chunks"
        yield f"it has {found}; expected them in kernels that evaluate the mask, in modules with `chunk`"
        return
    if not kernel.traits.places:
        return
    for arg in (arg for arg in kernel.args if arg.role in TENSORS):
        if (expected := _ARGUMENTS.get(arg.name)) and (arg.type.dtype, arg.type.dims) != ("i32", expected):
            yield f"%{arg.name} is {arg.type.dtype}[{', '.join(arg.type.dims)}]; expected i32[{', '.join(expected)}]"
        if arg.name in SHAPES and (wrong := set(arg.type.dims) & {*CALL_ROWS}):
            yield f"%{arg.name} has {', '.join(sorted(wrong))} rows; expected those of the call, Rq or Rk"
        if arg.name.lower() in module.tensors_of_kernels and (wrong := set(arg.type.dims) & {*CALL_ROWS.values()}):
            yield f"%{arg.name} has {', '.join(sorted(wrong))} rows; expected those of the whole sequence"
    for loop in tile_loops(kernel) if module.phase != "logical" else []:
        for e in (e for pair in loop.ranges for e in pair):
            if not _is_position(kernel, e, loop.var):
                whole = f"`{to_text(e)}`, a tile of the whole sequence"
                yield f"%{loop.name} runs to or from {whole}; expected 0 or a position in %{START_RANKS[loop.var][0]}"
    for config in module.configs(kernel.name, kernel.backend or ""):
        if module.chunk % config.block_q or module.chunk % config.block_kv:
            yield f"{config.device}: tiles of {config.tile} do not divide chunks of {module.chunk} rows"


def _is_position(kernel: Kernel, e: Expr, axis: str) -> bool:
    """True if a bound is 0 or a position in the ranks of chunks, or a position of such a bound in a list of blocks."""
    if e == 0:
        return True
    op = kernel.op(str(e)) if str(e) in kernel.graph else None
    if not isinstance(op, tile.ListPosition):
        return False
    if isinstance(kernel.op(op.src), tile.Arg):
        return op.src == START_RANKS[axis][0]
    return _is_position(kernel, op.tile, axis)


def lengths(op: launch.Launch, kernel: Kernel) -> Iterator[str]:
    """A launch of a kernel that computes positions passes it the lengths of the whole sequence, and the call's rows."""
    expected = {size: symbol(name) for size, name in WHOLE_LENGTHS.items()}
    expected |= {rows: symbol(size) for size, rows in CALL_ROWS.items()}
    given = {name: symbol(name) for name in expected} | dict(op.sizes)
    for name, e in expected.items() if kernel.traits.places else ():
        if given[name] != e:
            yield f"{name} is `{to_text(given[name])}`; expected `{to_text(e)}`, as calls have chunks of a sequence"


def sums_of_part(host: Host, op: launch.Launch, kernel: Kernel) -> Iterator[str]:
    """A fused backward that writes dQ first and adds to it later gets dQ filled with 0 where the call has a part of the
    keys: no program writes rows that see none of them, whose LSE may be finite."""
    if not (kernel.traits.places and kernel.traits.adds_in_order):
        return
    is_part = sympy.Lt(symbol("Nk"), symbol(WHOLE_LENGTHS["Nk"]))
    for name in (arg.name for arg in kernel.args if arg.name == "DQ_ACC" and arg.role == "out"):
        made = host.by_name[dict(op.args).get(name, name)]
        if not isinstance(made, launch.Alloc) or made.fill != 0 or made.fill_where not in (sympy.true, is_part):
            condition = f"fill(0) fill_where({to_text(is_part)})"
            yield f"%{name} is not 0 in rows that see no key of the call; expected `{condition}`"
