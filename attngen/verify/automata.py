"""Warp groups as automata: the steps that each takes on its pipelines, and the graph of these steps.

`attngen.verify.protocol` builds the automata of a kernel, `attngen.verify.machine` runs them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a warp group. `kind` is the kind of the IR op.

    On a pipeline: producer_load, producer_store, producer_tail, consumer_wait, consumer_release, zero_out_of_bounds,
    tma_store and tma_store_wait. On a product: wgmma and wgmma_wait. Between instances: scheduler_barrier.
    """

    kind: str
    name: str  # the pipeline or the product; for a scheduler barrier what it does (see ir.pipe.SchedulerBarrier)
    tiles: tuple[str, ...] = ()  # pipelines whose tiles a wgmma reads


SYNC, ARRIVE = Step("scheduler_barrier", "sync"), Step("scheduler_barrier", "arrive")


@dataclass(frozen=True)
class TileLoop:
    """The steps of a warp group's loop over tiles: of the first iteration, of each later one, and after the last one
    if there was any.

    skip: steps for a tile that an instance skips. It may skip any number of tiles before its first iteration, even all.
    odd: steps of every other iteration, from the second one on.
    pair: steps of two iterations together; `later` are then those of a last iteration without a partner.
    """

    first: tuple[Step, ...]
    later: tuple[Step, ...]
    last: tuple[Step, ...] = ()
    skip: tuple[Step, ...] = ()
    odd: tuple[Step, ...] = ()
    pair: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """A warp group: steps before its loop, the loop, and steps after it.

    A persistent one runs all that for each work tile, after `start` and before `end`.
    """

    name: str
    before: tuple[Step, ...]
    loop: TileLoop
    after: tuple[Step, ...]
    instances: int
    persistent: bool = False
    start: tuple[Step, ...] = ()
    end: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        loop = self.loop
        in_loop = (*loop.skip, *loop.first, *loop.later, *loop.odd, *loop.pair, *loop.last)
        return (*self.start, *self.before, *in_loop, *self.after, *self.end)


@dataclass(frozen=True)
class Protocol:
    """All that a kernel's warp groups do with its pipelines, for one number of stages of each pipeline.

    stages: number of stages of each pipeline.
    per_instance: for each pipeline the warp group whose instances have one each, or "" if all share it.
    round_robin: pipelines whose stage i belongs to consumer instance i, which skips the tiles in the other stages.
    exchanges: pipelines through which two warp groups exchange tiles: each reads what the other one has stored.
    """

    programs: tuple[Program, ...]
    stages: tuple[tuple[str, int], ...]
    per_instance: tuple[tuple[str, str], ...]
    round_robin: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()


class Node(NamedTuple):
    """A node of an automaton: a step and the node after it, or a question without a step.

    A question asks whether the loop has another iteration: `then` follows if it has, `otherwise` if not. With `local`,
    the instance decides that by itself, and again each time; other questions have one answer for all instances.
    """

    step: Step | None
    then: int
    otherwise: int = -1
    local: bool = False


def nodes_of(program: Program) -> list[Node]:
    """The automaton of a program. Node 0 is the start; the number after the last node is the end."""
    nodes: list[Node] = []
    _append(nodes, program.start)
    top = _question(nodes) if program.persistent else len(nodes)
    _append(nodes, program.before)
    loop = program.loop
    if loop.odd or loop.pair:
        _append_paired_loop(nodes, loop)
    elif program.persistent or loop.first or loop.later or loop.last:
        _append_loop(nodes, loop)
    _append(nodes, program.after)
    if program.persistent:
        past = len(nodes)  # from here the program goes back to the question whether there is another work tile
        to = {past: top}
        nodes[top:] = [
            n._replace(then=to.get(n.then, n.then), otherwise=to.get(n.otherwise, n.otherwise)) for n in nodes[top:]
        ]
        nodes[top] = Node(None, top + 1, past)
    _append(nodes, program.end)
    return nodes


def _append(nodes: list[Node], steps: tuple[Step, ...]) -> None:
    """Append steps that follow one another."""
    nodes.extend([Node(step, len(nodes) + 1 + i) for i, step in enumerate(steps)])


def _question(nodes: list[Node]) -> int:
    """Append a question, whose target for the answer no is set later. Return its number."""
    nodes.append(Node(None, len(nodes) + 1))
    return len(nodes) - 1


def _append_loop(nodes: list[Node], loop: TileLoop) -> None:
    """Append a loop: is there any tile? skipped tiles; the first iteration; is there another one? later iterations."""
    any_tile = _question(nodes)
    if loop.skip:
        skips = _question(nodes)
        _append(nodes, loop.skip)
        nodes[-1] = nodes[-1]._replace(then=any_tile)
        nodes[skips] = Node(None, skips + 1, len(nodes), local=True)
    _append(nodes, loop.first)
    more = _question(nodes)
    _append(nodes, loop.later)
    if loop.later:
        nodes[-1] = nodes[-1]._replace(then=more)
    nodes[more] = Node(None, more + 1 if loop.later else more, len(nodes))
    _append(nodes, loop.last)
    nodes[any_tile] = nodes[any_tile]._replace(otherwise=len(nodes))


def _append_paired_loop(nodes: list[Node], loop: TileLoop) -> None:
    """Append a loop whose even and odd iterations differ.

    It asks a question per iteration, as all other loops over the same tiles do.
    """
    top = _question(nodes)
    _append(nodes, loop.later if loop.odd else ())
    more = _question(nodes)
    _append(nodes, loop.odd or loop.pair)
    nodes[-1] = nodes[-1]._replace(then=top)
    nodes[more] = nodes[more]._replace(otherwise=len(nodes))
    _append(nodes, loop.later if loop.pair else ())  # a last iteration without a partner
    nodes[top] = nodes[top]._replace(otherwise=len(nodes))


def of_instance(program: Program, instance: int) -> Program:
    """The program of one instance: `init` of a scheduler barrier is an arrival by the last instance, and `tail` a sync
    of the first one. For the other instances both are no step."""
    own = {"init": "arrive" if instance == program.instances - 1 else "", "tail": "sync" if instance == 0 else ""}

    def steps(of: tuple[Step, ...]) -> tuple[Step, ...]:
        done = (s if s.kind != "scheduler_barrier" else Step("scheduler_barrier", own.get(s.name, s.name)) for s in of)
        return tuple(s for s in done if s != Step("scheduler_barrier", ""))

    loop = program.loop
    return replace(
        program,
        before=steps(program.before),
        loop=TileLoop(*map(steps, (loop.first, loop.later, loop.last, loop.skip, loop.odd, loop.pair))),
        after=steps(program.after),
        start=steps(program.start),
        end=steps(program.end),
    )


def nodes_before_arrive(nodes: list[Node]) -> frozenset[int]:
    """The nodes from which an instance may arrive at a scheduler barrier without a sync before."""
    found: set[int] = set()
    while True:
        more = {
            at
            for at, node in enumerate(nodes)
            if node.step != SYNC and (node.step == ARRIVE or {node.then, node.otherwise} & found)
        }
        if more == found:
            return frozenset(found)
        found = more
