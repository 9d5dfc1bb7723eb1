"""The rules `defined` and `live` of warp-specialized kernels: values are defined before their use, and all are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import networkx as nx

from attngen.ir import Kernel, Module, Op, only, pipe, tile


def defined_in_scope(module: Module, kernel: Kernel) -> Iterator[str]:
    """A value is defined before its use: in the same block, in a block around it, in the block that computes the
    scalars of a work tile for all warp groups (`of` of a work_loop), or in @entry.

    Each body is run by ops of one block.
    """
    if not nx.is_directed_acyclic_graph(kernel.graph):
        yield f"%{nx.find_cycle(kernel.graph)[0][0]} depends on itself"
    blocks = {block.name for block in kernel.blocks if not block.warp_group and block.name != "entry"}
    per_tile = {op.of for op in only(kernel.ops(), pipe.WorkLoop)}
    around: dict[str, Op] = {}  # body -> the op that runs it
    homes: dict[str, set[str]] = {}  # body -> the blocks whose ops run it
    for op in kernel.ops():
        for body in (*pipe.bodies_of(op), *([op.of] if isinstance(op, pipe.WorkLoop) else [])):
            if body not in blocks:
                yield f"%{op.name} runs @{body}, which is no body"
                return
        for body in pipe.bodies_of(op):
            around[body] = op
            homes.setdefault(body, set()).add(kernel.graph.nodes[op.name]["block"])
    for name in sorted(blocks - per_tile):
        if len(homes.get(name, ())) != 1:
            yield f"@{name} is run by the ops of {len(homes.get(name, ()))} blocks; expected one"
            return
    if per_tile & homes.keys():
        yield f"@{min(per_tile & homes.keys())} is run before each work tile, and is also the body of an op"
        return
    for name, data in kernel.graph.nodes.items():
        for ref in (*data["op"].operands(), *sorted(kernel.traits.scalars_of(data["op"]))):
            if not _is_defined(kernel, around, ref, data):
                yield f"%{name} reads %{ref} where it is not defined"


def _is_defined(kernel: Kernel, around: dict[str, Op], ref: str, place: dict[str, Any]) -> bool:
    """True if a value is defined before a place, which is a node of the kernel's graph."""
    source = kernel.graph.nodes[ref.split(".")[0]]
    seen = {"entry"}
    while place["block"] != source["block"] and place["block"] in around:
        op = around[place["block"]]
        seen |= {op.of} if isinstance(op, pipe.WorkLoop) else set()
        place = kernel.graph.nodes[op.name]
    if place["block"] == source["block"]:
        return bool(source["order"] < place["order"])
    return source["block"] in seen


_EFFECTS = (
    pipe.ConsumerRelease,
    pipe.PrefetchTile,
    pipe.ProducerLoad,
    pipe.ProducerStore,
    pipe.ProducerTail,
    pipe.ReadTileStart,
    pipe.ReloadTile,
    pipe.SchedulerBarrier,
    pipe.SemaphoreAcquire,
    pipe.SemaphoreRelease,
    tile.Store,
    pipe.TmaStore,
    pipe.TmaStoreWait,
    pipe.WorkLoop,
    pipe.WriteTileIndex,
    pipe.WriteTileStart,
    tile.Yield,
    pipe.ZeroOutOfBounds,
)


def all_used(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every value is read, except the results of ops that have an effect."""
    named = {name for op in kernel.ops() for name in kernel.traits.scalars_of(op)}
    for op in kernel.ops():
        acts = isinstance(op, _EFFECTS)
        acts |= isinstance(op, tile.Arg) and op.role != "carry"
        acts |= isinstance(op, tile.Arg) and op.role == "carry" and _is_read_in_other_body(kernel, op)
        acts |= any(
            isinstance(o, (tile.OrderedAdd, pipe.ProducerLoad))
            for body in pipe.bodies_of(op)
            for o in kernel.block(body).ops
        )
        if not (acts or kernel.graph.out_degree(op.name) or op.name in named):
            yield f"%{op.name} is read by nothing"


def _is_read_in_other_body(kernel: Kernel, arg: tile.Arg) -> bool:
    """True if another body of a carried value's loop reads the value. A loop has several bodies if even and odd
    iterations differ."""
    home = kernel.block_of(arg).name
    loop = next(
        (op for op in only(kernel.ops(), pipe.PipelinedLoop) if (op.odd or op.pair) and home in op.bodies),
        None,
    )
    names = {f"{loop.field_of(arg.name, home)}_in_{body}" for body in loop.bodies} if loop else set()
    return any(kernel.graph.out_degree(name) for name in names & set(kernel.graph))
