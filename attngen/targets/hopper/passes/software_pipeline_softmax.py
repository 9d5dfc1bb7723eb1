"""software-pipeline-softmax: overlap the softmax of a tile with the product P V of the previous tile.

The loops over partial and full tiles become one `pipelined_loop` whose @step issues both products before it waits for
S. @first is the prologue: the first tile up to its softmax. @last is the epilogue: P V of the last tile.

before:  block @step                               after:  block @step
           wait for K; issue S; wait for S                   wait for K; issue S
           softmax of S                                      wait for V; issue O += P V of the previous tile
           wait for V; issue O += P V; wait for O            wait for S; softmax of S
                                                             wait for O; rescale O

So S of a tile and P V of the previous tile are in flight together, and P V runs on during the softmax
(FlashAttention-3, Algorithm 2).

Ops that do not depend on S, such as generating dropout bits and loading biases, are placed between issue and wait.
Partial tiles come first, and @first always masks its tile. If only one tile is partial, as under a causal mask with
Nq = Nk and BLOCK_Q = BLOCK_KV, @step then has no tile to mask. (If BLOCK_Q > BLOCK_KV, see skip-masked-tiles.)

In the separate kernel of dV, which has no softmax, the weights of a tile are computed while dV of the previous tile
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir import Block, Kernel, Module, Op, Type, only, pipe, tile
from attngen.targets.hopper.configs.common import overlaps_softmax
from attngen.targets.hopper.configs.families import with_forward, with_separate_backward
from attngen.targets.hopper.configs.separate_backward import is_pipelined_as_forward
from attngen.tiles.intervals import mentions
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineSoftmax(Pass):
    name: ClassVar[str] = "software-pipeline-softmax"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        module = with_forward(module, lambda kernel: _overlap(kernel) if overlaps_softmax(kernel) else kernel)
        return with_separate_backward(
            module, lambda kernel: _overlap(kernel) if is_pipelined_as_forward(kernel) else kernel
        )


@dataclass(frozen=True)
class _Parts:
    """The ops of a body. The second product, with the ops that only it needs, moves to the next iteration."""

    args: dict[str, tile.Arg]
    loaded: list[Op]  # the wait for the first product's tile, and its issue
    early: list[Op]  # ops that depend on no product
    middle: list[Op]  # the wait for the first product, and ops that depend on it
    rescaling: list[Op]  # ops that depend on the accumulator
    second: dict[type[Op], Op]  # consumer_wait, wgmma, wgmma_wait and consumer_release of the second product
    yielded: tile.Yield

    @property
    def issue(self) -> pipe.Wgmma:
        found = self.second[pipe.Wgmma]
        assert isinstance(found, pipe.Wgmma)
        return found

    @property
    def acc(self) -> str:
        """The carried accumulator, to which the second product adds."""
        return next(field for field, ref in self.yielded.values if ref == self.second[pipe.WgmmaWait].name)

    @property
    def weights(self) -> str:
        """The second product's operand in registers, which an iteration computes for the next one."""
        return self.issue.a


def _overlap(kernel: Kernel) -> Kernel:
    loops = list(only(kernel.block("consumer").ops, tile.Loop))
    step = kernel.block(loops[0].body)
    parts = _parts(kernel, step.ops)
    ranges = {loop.cls: loop.ranges for loop in loops}
    indices = f"{loops[0].var.upper()}_TILES_pipeline"  # of listed tiles
    keys_pipeline = _pipeline_with_indices(kernel, loops, step.ops)
    merged = pipe.PipelinedLoop(
        loops[0].name.rpartition("_")[0],
        loops[0].var,
        ranges.get("partial", ()),
        ranges.get("full", ()),
        loops[0].carry,
        first="first",
        step=step.name,
        last="last",
        listed=loops[0].listed,
        tile_indices=indices if keys_pipeline else None,
    )
    results = {f"{loop.name}.{field}": f"{merged.name}.{field}" for loop in loops for field, _ in loop.carry}
    # The producer's two loops stay separate and swap places, so that the one over partial tiles comes first.
    copying = list(only(kernel.block("producer").ops, tile.Loop))
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
            kept = [op if op not in loops else merged for i, op in enumerate(block.ops) if op not in loops or i == at]
            blocks.append(replace(block, ops=tuple(op.with_operands(results) for op in kept)))
        elif keys_pipeline and block.name == "entry":
            keys = next(op for op in only(block.ops, pipe.Pipeline) if op.name == keys_pipeline)
            blocks.append(
                replace(
                    block,
                    ops=(
                        *block.ops,
                        pipe.Pipeline(indices, Type("i32", (), "sram"), keys.stages, metadata_of=keys_pipeline),
                    ),
                )
            )
        elif keys_pipeline and block.name == copying[0].body:
            at = next(
                i
                for i, op in enumerate(block.ops)
                if isinstance(op, pipe.ProducerLoad) and op.pipeline == keys_pipeline
            )
            blocks.append(
                replace(block, ops=(*block.ops[:at], pipe.WriteTileIndex("_write_index", indices), *block.ops[at:]))
            )
        else:
            blocks.append(replace(block, ops=tuple(reordered.get(op.name, op) for op in block.ops)))
    return replace(kernel, blocks=tuple(blocks))


def _pipeline_with_indices(kernel: Kernel, loops: Sequence[tile.Loop], ops: Sequence[Op]) -> str:
    """Return the name of K's pipeline if the producer passes the indices of listed tiles along with K, else empty text.

    It does if the only ops that need a tile's position are masks of partial tiles, and nothing is loaded for a tile
    except row vectors. The index lies in K's stage, so a consumer has to read it before it releases K. Therefore K has
    to be released after the last of these masks; it is, if the mask also reads a row vector in K's stage.
    """
    reads = list(only(ops, pipe.ReadMetadata))
    of_positions = [op for op in ops if any(mentions(e, pipe.PLACE) for e in op.expressions)]
    loads = any(only(ops, tile.Gather, tile.Load))
    if (
        not (loops[0].listed and reads and of_positions)
        or loads
        or not all(isinstance(op, tile.Mask) and op.when == "partial" for op in of_positions)
    ):
        return ""
    wait, releases = (
        kernel.op(reads[0].tile),
        [op for op in only(ops, pipe.ConsumerRelease) if op.value == reads[0].tile],
    )
    is_kept = bool(releases) and ops.index(releases[0]) > max(map(ops.index, of_positions))
    return (
        wait.pipeline
        if is_kept
        and isinstance(wait, pipe.ConsumerWait)
        and all(len(loop.ranges) == 1 for loop in loops)
        and len(loops) == 2
        else ""
    )


def _parts(kernel: Kernel, ops: Sequence[Op]) -> _Parts:
    second = next(op for op in only(reversed(ops), pipe.Wgmma) if op.acc)
    awaited = next(op for op in only(ops, pipe.WgmmaWait) if op.value == second.name)
    of_second: dict[type[Op], Op] = {pipe.Wgmma: second, pipe.WgmmaWait: awaited}
    of_second |= {
        type(op): op
        for op in ops
        if (isinstance(op, pipe.ConsumerWait) and op.name == second.b)
        or (isinstance(op, pipe.ConsumerRelease) and op.value == second.b)
    }
    first = next(op for op in only(ops, pipe.Wgmma) if not op.acc)
    s = next(op for op in only(ops, pipe.WgmmaWait) if op.value == first.name)
    yielded = next(only(ops, tile.Yield))
    acc = next(field for field, ref in yielded.values if ref == awaited.name)
    graph = kernel.graph
    of_s, of_acc = nx.descendants(graph, s.name) | {s.name}, nx.descendants(graph, acc)
    releases = {op.name for op in only(ops, pipe.ConsumerRelease) if op.value == first.b}
    reads = {op.name for op in only(ops, pipe.ReadMetadata) if set(graph.successors(op.name)) <= of_s}
    rest = [op for op in ops if not isinstance(op, (tile.Arg, tile.Yield)) and op not in of_second.values()]
    loaded = [op for op in rest if op is first or op.name == first.b]
    return _Parts(
        {op.name: op for op in only(ops, tile.Arg)},
        loaded,
        early=[op for op in rest if op not in loaded and op.name not in of_s | of_acc | releases | reads],
        middle=[op for op in rest if op.name in of_s | releases | reads and op.name not in of_acc],
        rescaling=[op for op in rest if op.name in of_acc],
        second=of_second,
        yielded=yielded,
    )


def _carried(parts: _Parts) -> tuple[tuple[str, str], ...]:
    """The values that an iteration yields: the accumulator without the product that is left to the next iteration, and
    that product's operand."""
    values = [(field, str(parts.issue.acc) if field == parts.acc else ref) for field, ref in parts.yielded.values]
    return (*values, ("weights", parts.weights))


def _step(parts: _Parts) -> Iterable[Op]:
    """The body of the loop. `weights` are those of the previous tile; the accumulator is rescaled after their
    product."""
    wait, issue, product_wait, release = (
        parts.second[kind] for kind in (pipe.ConsumerWait, pipe.Wgmma, pipe.WgmmaWait, pipe.ConsumerRelease)
    )
    previous = {parts.weights: "weights", str(parts.issue.acc): parts.acc}  # the previous tile's weights, and its sum
    added = {parts.acc: product_wait.name}
    args = [*parts.args.values(), _weights_arg(parts, "weights")]
    rescaling = [op.with_operands(added) for op in parts.rescaling]
    second = [issue.with_operands(previous), product_wait.with_operands(previous)]
    yield from (*args, *parts.loaded, wait, second[0], *parts.early, *parts.middle, second[1], release, *rescaling)
    yield replace(parts.yielded, values=_carried(parts)).with_operands(added)


def _first(parts: _Parts) -> Iterable[Op]:
    """The prologue: the first tile, without the second product."""
    ops = [*parts.args.values(), *parts.loaded, *parts.early, *parts.middle, *parts.rescaling]
    yield from _renamed([*ops, replace(parts.yielded, values=_carried(parts))], "first")


def _last(parts: _Parts) -> Iterable[Op]:
    """The epilogue: the second product of the last tile."""
    wait, issue, product_wait, release = (
        parts.second[kind] for kind in (pipe.ConsumerWait, pipe.Wgmma, pipe.WgmmaWait, pipe.ConsumerRelease)
    )
    previous = {parts.weights: "weights", str(parts.issue.acc): parts.acc}
    ops = [
        *parts.args.values(),
        _weights_arg(parts, "weights"),
        wait,
        issue.with_operands(previous),
        product_wait.with_operands(previous),
        release,
    ]
    values = tuple((field, ref if field == parts.acc else field) for field, ref in parts.yielded.values)
    yield from _renamed([*ops, replace(parts.yielded, values=values)], "last")


def _weights_arg(parts: _Parts, name: str) -> tile.Arg:
    cast = next(op for op in (*parts.middle, *parts.early) if op.name == parts.weights)
    return tile.Arg(name, "carry", cast.results()[""])


def _renamed(ops: Sequence[Op], body: str) -> Iterable[Op]:
    """Rename the ops, and the values that they define, after a body."""
    names = {op.name: f"{op.name}_in_{body}" for op in ops}
    refs = {
        f"{op.name}.{field}".rstrip("."): f"{names[op.name]}.{field}".rstrip(".")
        for op in ops
        for field in op.results()
    }
    for op in ops:
        moved = op.with_operands(refs)
        yield replace(moved, name=names[op.name])
