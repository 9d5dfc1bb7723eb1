"""Bytes of device memory that a call needs in addition to its arguments and results, from the allocations in its host
programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import sympy

from attngen.ir import Bool, Expr, Module, launch, only, tile
from attngen.tiles.sizes import tile_bytes


class Scratch(NamedTuple):
    """Tensors that a block of a host program allocates under a condition, and their size in bytes as a formula."""

    host: str
    block: str
    bytes: Expr
    tensors: tuple[str, ...]
    where: Bool


def scratch(module: Module) -> Iterator[Scratch]:
    """Yield the allocations of each block of each host program that are no results, grouped by their condition."""
    for host in module.hosts:
        results = {ref for op in only(host.block("entry").ops, tile.Yield) for _, ref in op.values}
        for block in host.blocks:
            made = [op for op in only(block.ops, launch.Alloc) if op.name not in results]
            for where in dict.fromkeys(op.where for op in made):
                ops = [op for op in made if op.where == where]
                size = sympy.Add(*(tile_bytes(op.type) for op in ops))
                yield Scratch(host.name, block.name, size, tuple(op.name for op in ops), where)
