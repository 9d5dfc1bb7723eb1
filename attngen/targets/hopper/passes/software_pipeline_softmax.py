"""software-pipeline-softmax: the softmax of a tile runs while the product of the tile before runs.

before:  block @step                        after:  block @step
           take K; issue S; await S                   take K; issue S
           softmax of S                               take V; issue O with P of the tile before
           take V; issue O with P; await O            await S; softmax of S
                                                      await O; rescale O

The loops over full and partial tiles become one `pipeline`. Its @first does the first tile's part before O, its @last
the last tile's O. Partial tiles come first: @first masks its tile, so that where one tile is partial, as under a causal
mask, no loop masks any.

What does not depend on S, such as what dropout draws and loads of biases, stands between issue and await.

The kernel of dV alone, which has no softmax, has the weights of a tile so, while dV of the tile before runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Block, Gather, Load, Loop, Mask, Op, Type, Yield
from attngen.ir.pipe import (
    PLACE,
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ReadMetadata,
    Wgmma,
    WgmmaWait,
    WriteTileIndex,
)
from attngen.targets.hopper.configs.common import overlaps
from attngen.targets.hopper.configs.families import with_apart, with_forwards
from attngen.targets.hopper.configs.separate_backward import runs_ahead
from attngen.tiles.intervals import mentions
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineSoftmax(Pass):
    name: ClassVar[str] = "software-pipeline-softmax"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        module = with_forwards(module, lambda kernel: _overlapped(kernel) if overlaps(kernel) else kernel)
        return with_apart(module, lambda kernel: _overlapped(kernel) if runs_ahead(kernel) else kernel)


@dataclass(frozen=True)
class _Parts:
    """The ops of a body. The second product, with what only it needs, is done a turn later."""

    args: dict[str, Arg]
    loaded: list[Op]  # the first product's tile, and its issue
    early: list[Op]  # what depends on no product
    middle: list[Op]  # what depends on the first product, from its await on
    late: list[Op]  # what depends on the carried sums
    second: dict[type[Op], Op]  # take, issue, await and give of the second product
    yielded: Yield

    @property
    def issue(self) -> Wgmma:
        found = self.second[Wgmma]
        assert isinstance(found, Wgmma)
        return found

    @property
    def sums(self) -> str:
        """The carried field that the second product adds to."""
        return next(field for field, ref in self.yielded.values if ref == self.second[WgmmaWait].name)

    @property
    def weights(self) -> str:
        """The value that a turn computes for the next one's product: its operand in registers."""
        return self.issue.a


def _overlapped(kernel: Kernel) -> Kernel:
    loops = [op for op in kernel.block("consumer").ops if isinstance(op, Loop)]
    step = kernel.block(loops[0].body)
    parts = _parts(kernel, step.ops)
    ranges = {loop.cls: loop.ranges for loop in loops}
    places = f"{loops[0].var.upper()}_TILES_pipeline"  # numbers of listed tiles, beside the tiles
    whole = PipelinedLoop(
        loops[0].name.rpartition("_")[0],
        loops[0].var,
        ranges.get("partial", ()),
        ranges.get("full", ()),
        loops[0].carry,
        first="first",
        step=step.name,
        last="last",
        listed=loops[0].listed,
        tile_indices=places if (told := _comes_with_tiles(kernel, loops, step.ops)) else None,
    )
    results = {f"{loop.name}.{field}": f"{whole.name}.{field}" for loop in loops for field, _ in loop.carry}
    copying = [op for op in kernel.block("producer").ops if isinstance(op, Loop)]
    reordered = {a.name: b for a, b in zip(copying, sorted(copying, key=lambda loop: loop.cls != "partial"))}
    bodies = {"first": _first(parts), step.name: _step(parts), "last": _last(parts)}
    abouts = {
        "first": "the first tile: its softmax",
        step.name: "the softmax of this tile, while the product of the tile before runs",
        "last": "the product of the last tile",
    }
    blocks = []
    for block in kernel.blocks:
        if block.name == step.name:
            blocks += [Block(name, tuple(ops), abouts[name]) for name, ops in bodies.items()]
        elif block.name == "consumer":
            at = block.ops.index(loops[0])
            kept = [op if op not in loops else whole for i, op in enumerate(block.ops) if op not in loops or i == at]
            blocks.append(replace(block, ops=tuple(op.with_operands(results) for op in kept)))
        elif told and block.name == "entry":
            keys = next(op for op in block.ops if isinstance(op, Pipeline) and op.name == told)
            blocks.append(
                replace(block, ops=(*block.ops, Pipeline(places, Type("i32", (), "sram"), keys.stages, beside=told)))
            )
        elif told and block.name == copying[0].body:
            at = next(i for i, op in enumerate(block.ops) if isinstance(op, ProducerLoad) and op.pipeline == told)
            blocks.append(replace(block, ops=(*block.ops[:at], WriteTileIndex("tell_place", places), *block.ops[at:])))
        else:
            blocks.append(replace(block, ops=tuple(reordered.get(op.name, op) for op in block.ops)))
    return replace(kernel, blocks=tuple(blocks))


def _comes_with_tiles(kernel: Kernel, loops: Sequence[Loop], ops: Sequence[Op]) -> str:
    """The ring of keys, if numbers of listed tiles come with the tiles: so they do where only masks of partial tiles
    need them.

    The tile has to be given back after these masks, which is so where the last of them reads what lies beside it.
    """
    reads = [op for op in ops if isinstance(op, ReadMetadata)]
    placed = [op for op in ops if any(mentions(e, PLACE) for e in op.expressions)]
    loads = any(isinstance(op, (Gather, Load)) for op in ops)
    if (
        not (loops[0].listed and reads and placed)
        or loads
        or not all(isinstance(op, Mask) and op.when == "partial" for op in placed)
    ):
        return ""
    take, given = (
        kernel.op(reads[0].beside),
        [op for op in ops if isinstance(op, ConsumerRelease) and op.value == reads[0].beside],
    )
    kept = [ops.index(op) for op in given] > [max(map(ops.index, placed))]
    return (
        take.pipeline
        if kept and isinstance(take, ConsumerWait) and all(len(loop.ranges) == 1 for loop in loops) and len(loops) == 2
        else ""
    )


def _parts(kernel: Kernel, ops: Sequence[Op]) -> _Parts:
    second = next(op for op in reversed(ops) if isinstance(op, Wgmma) and op.acc)
    awaited = next(op for op in ops if isinstance(op, WgmmaWait) and op.value == second.name)
    of_second: dict[type[Op], Op] = {Wgmma: second, WgmmaWait: awaited}
    of_second |= {
        type(op): op
        for op in ops
        if (isinstance(op, ConsumerWait) and op.name == second.b)
        or (isinstance(op, ConsumerRelease) and op.value == second.b)
    }
    first = next(op for op in ops if isinstance(op, Wgmma) and not op.acc)
    s = next(op for op in ops if isinstance(op, WgmmaWait) and op.value == first.name)
    yielded = next(op for op in ops if isinstance(op, Yield))
    sums = next(field for field, ref in yielded.values if ref == awaited.name)
    graph = kernel.graph
    of_s, of_sums = nx.descendants(graph, s.name) | {s.name}, nx.descendants(graph, sums)
    given = {op.name for op in ops if isinstance(op, ConsumerRelease) and op.value == first.b}
    late = {op.name for op in ops if isinstance(op, ReadMetadata) and set(graph.successors(op.name)) <= of_s}
    rest = [op for op in ops if not isinstance(op, (Arg, Yield)) and op not in of_second.values()]
    loaded = [op for op in rest if op is first or op.name == first.b]
    return _Parts(
        {op.name: op for op in ops if isinstance(op, Arg)},
        loaded,
        early=[op for op in rest if op not in loaded and op.name not in of_s | of_sums | given | late],
        middle=[op for op in rest if op.name in of_s | given | late and op.name not in of_sums],
        late=[op for op in rest if op.name in of_sums],
        second=of_second,
        yielded=yielded,
    )


def _carried(parts: _Parts) -> tuple[tuple[str, str], ...]:
    """What a turn yields: the sums as they are before the product that is left to the next turn, and that product's
    operand."""
    values = [(field, str(parts.issue.acc) if field == parts.sums else ref) for field, ref in parts.yielded.values]
    return (*values, ("weights", parts.weights))


def _step(parts: _Parts) -> Iterable[Op]:
    """The field `weights` is the weights of the tile before; the sums are rescaled once the product of these is
    there."""
    take, issue, awaited, give = (parts.second[kind] for kind in (ConsumerWait, Wgmma, WgmmaWait, ConsumerRelease))
    weights = {parts.weights: "weights", str(parts.issue.acc): parts.sums}
    summed = {parts.sums: awaited.name}
    args = [*parts.args.values(), _weights_arg(parts, "weights")]
    late = [op.with_operands(summed) for op in parts.late]
    second = [issue.with_operands(weights), awaited.with_operands(weights)]
    yield from (*args, *parts.loaded, take, second[0], *parts.early, *parts.middle, second[1], give, *late)
    yield replace(parts.yielded, values=_carried(parts)).with_operands(summed)


def _first(parts: _Parts) -> Iterable[Op]:
    ops = [*parts.args.values(), *parts.loaded, *parts.early, *parts.middle, *parts.late]
    yield from _renamed([*ops, replace(parts.yielded, values=_carried(parts))], "first")


def _last(parts: _Parts) -> Iterable[Op]:
    take, issue, awaited, give = (parts.second[kind] for kind in (ConsumerWait, Wgmma, WgmmaWait, ConsumerRelease))
    weights = {parts.weights: "weights", str(parts.issue.acc): parts.sums}
    ops = [
        *parts.args.values(),
        _weights_arg(parts, "weights"),
        take,
        issue.with_operands(weights),
        awaited.with_operands(weights),
        give,
    ]
    values = tuple((field, ref if field == parts.sums else field) for field, ref in parts.yielded.values)
    yield from _renamed([*ops, replace(parts.yielded, values=values)], "last")


def _weights_arg(parts: _Parts, name: str) -> Arg:
    cast = next(op for op in (*parts.middle, *parts.early) if op.name == parts.weights)
    return Arg(name, "carry", cast.results()[""])


def _renamed(ops: Sequence[Op], body: str) -> Iterable[Op]:
    """The ops, and what they define, under names of their own."""
    names = {op.name: f"{op.name}_in_{body}" for op in ops}
    refs = {
        f"{op.name}.{field}".rstrip("."): f"{names[op.name]}.{field}".rstrip(".")
        for op in ops
        for field in op.results()
    }
    for op in ops:
        moved = op.with_operands(refs)
        yield replace(moved, name=names[op.name])
