"""Host programs for block lists: `count` counts the visible pairs in blocks, `lists` makes the lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from attngen.builders.host_builder import HostBuilder, known_type
from attngen.builders.positions import of_whole_type
from attngen.ir import Blocks, Host, Kernel, Module, Type, launch, symbol, tile
from attngen.ir.names import WHOLE_LENGTHS, block_lists


def build_count(module: Module, blocks: Blocks) -> Host:
    """Build `count`: the number of visible pairs in each strip of a block.

    If the mask is the same for all sequences, or all heads, pairs are counted once.
    """
    kernel = module.kernel("blocks")
    b = HostBuilder("count")
    for name in ("Q", "K"):
        b.tensor(name)
    for arg in kernel.args:
        if arg.role == "in":
            type_ = of_whole_type(arg.type) if module.chunk else arg.type
            b.add(tile.Arg(arg.name, "in", replace(type_, space="hbm")))
    for i in module.inputs:
        if not i.shape and (any(a.name == i.name for a in kernel.args) or i.name in WHOLE_LENGTHS.values()):
            b.add(tile.Arg(i.name, "scalar", Type(i.dtype, (), "reg")))
    one = {size: sympy.Integer(1) for size, letter in (("B", "b"), ("Hq", "h")) if not _depends(kernel, letter)}
    dims = tuple("1" if d in one else d for d in known_type("COUNT").dims)
    b.alloc("COUNT", type_=Type("f32", dims, "hbm"), fill=sympy.Integer(0))
    b.branch("Launched", "launches", of=("COUNT",))
    b.launch("blocks", "launches", **one)
    b.give(COUNT="COUNT")
    return b.host()


def _depends(kernel: Kernel, letter: str) -> bool:
    """True if the mask that the kernel evaluates depends on `letter`: the sequence (`b`) or the head (`h`)."""
    written = {a.name for a in kernel.args if a.role == "out"}
    for op in kernel.ops():
        if isinstance(op, (tile.Base, tile.Load)) and op.src.tensor not in written:
            expressions: tuple[Any, ...] = op.src.index
        elif isinstance(op, tile.Gather):
            expressions = (*op.src.index, op.where)
        elif isinstance(op, tile.Mask):
            expressions = (op.where,)
        else:
            expressions = (op.expr,) if isinstance(op, tile.Map) else ()
        if any(symbol(letter) in e.free_symbols for e in expressions):
            return True
    return False


def build_lists(blocks: Blocks, data: bool) -> Host:
    """Build `lists`: the lists of blocks, made from the result of @count or from a block mask."""
    b = HostBuilder("lists")
    mask, full = "BLOCK_MASK", None
    if data:
        for name in ("Q", "K"):
            b.tensor(name)
        b.add(tile.Arg("COUNT", "in", Type("f32", ("*", "*", "Tq", "Ts"), "hbm")))
        b.add(launch.ClassifyBlocks("blocks", "COUNT", Type("b1", ("*", "*", "Tq", "Tk"), "hbm")))
        mask, full = "blocks.seen", "blocks.full"
    else:
        b.add(tile.Arg(mask, "in", Type("b1", ("*", "*", "Tq", "Tk"), "hbm")))
    results: dict[str, str] = {}
    for axis, (rows, columns) in (("q", ("Tq", "Tk")), ("kv", ("Tk", "Tq"))):
        b.add(launch.ListBlocks(f"of_{axis}", mask, axis, Type("i32", ("*", "*", rows, columns), "hbm"), full))
        fields = ("full_rank", "rank", "list") if data else ("rank", "list")
        results |= {name: f"of_{axis}.{f}" for name, f in zip(block_lists(axis, blocks.data), fields)}
    b.give(**results)
    return b.host()
