"""Warp groups as automata: the synchronization steps that each takes, and the graph of these steps.

`attngen.verify.protocol` builds the steps of a kernel's warp groups, `nodes_of` the automaton of each, and
`attngen.verify.machine` searches the product of the automata.
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
    name: str  # the pipeline or the product; for a scheduler barrier its `do` (see ir/pipe_control.py)
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
class WarpGroupSteps:
    """The steps of a warp group: before its loop over tiles, in the loop, and after it. Each instance runs them.

    persistent: the warp group runs all that once per work tile, between `start` and `end`.
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
    """The steps of all warp groups of a kernel, for one number of stages of each pipeline.

    stages: number of stages of each pipeline.
    per_instance: for each pipeline the warp group whose instances have one each, or "" if all share it.
    round_robin: pipelines whose stage i belongs to consumer instance i, which skips the tiles in the other stages.
    exchanges: pipelines through which two warp groups exchange tiles: each reads what the other one has stored.
    """

    warp_groups: tuple[WarpGroupSteps, ...]
    stages: tuple[tuple[str, int], ...]
    per_instance: tuple[tuple[str, str], ...]
    round_robin: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()


class Node(NamedTuple):
    """A node of an automaton: a step, after which `then` follows; or a branch, which has no step.

    A branch decides whether there is another iteration, or another work tile: `then` follows if there is, `otherwise`
    if not. The n-th branch has one outcome for all instances: the first instance that reaches it decides. A `local`
    branch (whether to skip another tile) is decided by each instance for itself, each time it reaches it.
    """

    step: Step | None
    then: int
    otherwise: int = -1
    local: bool = False


def nodes_of(warp_group: WarpGroupSteps) -> list[Node]:
    """The automaton of a warp group. Node 0 is the start; the number after the last node is the end."""
    nodes: list[Node] = []
    _append(nodes, warp_group.start)
    another_tile = _append_branch(nodes) if warp_group.persistent else len(nodes)
    _append(nodes, warp_group.before)
    loop = warp_group.loop
    if loop.odd or loop.pair:
        _append_paired_loop(nodes, loop)
    elif warp_group.persistent or loop.first or loop.later or loop.last:
        # A persistent warp group without a loop gets an empty one, to have as many branches as the other warp groups.
        _append_loop(nodes, loop)
    _append(nodes, warp_group.after)
    if warp_group.persistent:
        # A work tile ends at the branch, instead of at the steps of `end`. These follow if there is no other work tile.
        end = len(nodes)
        nodes[another_tile:] = [_redirected(node, {end: another_tile}) for node in nodes[another_tile:]]
        nodes[another_tile] = Node(None, another_tile + 1, end)
    _append(nodes, warp_group.end)
    return nodes


def _redirected(node: Node, to: dict[int, int]) -> Node:
    """A node with other targets in place of some."""
    return node._replace(then=to.get(node.then, node.then), otherwise=to.get(node.otherwise, node.otherwise))


def _append(nodes: list[Node], steps: tuple[Step, ...]) -> None:
    """Append steps that follow one another."""
    nodes.extend([Node(step, len(nodes) + 1 + i) for i, step in enumerate(steps)])


def _append_branch(nodes: list[Node]) -> int:
    """Append a branch, whose target `otherwise` is set later. Return its number."""
    nodes.append(Node(None, len(nodes) + 1))
    return len(nodes) - 1


def _append_loop(nodes: list[Node], loop: TileLoop) -> None:
    """Append a loop: a branch whether there is any tile; skipped tiles, each with a branch whether there is another
    tile; the first iteration; a branch whether there is another one; later iterations; the steps after the last one.

    A warp group without steps in later iterations still has their branch, whose outcome "yes" leads back to it: all
    warp groups have one branch per iteration.
    """
    any_tile = _append_branch(nodes)
    if loop.skip:
        skips = _append_branch(nodes)
        _append(nodes, loop.skip)
        nodes[-1] = nodes[-1]._replace(then=any_tile)
        nodes[skips] = Node(None, skips + 1, len(nodes), local=True)
    _append(nodes, loop.first)
    more = _append_branch(nodes)
    _append(nodes, loop.later)
    if loop.later:
        nodes[-1] = nodes[-1]._replace(then=more)
    nodes[more] = Node(None, more + 1 if loop.later else more, len(nodes))
    _append(nodes, loop.last)
    nodes[any_tile] = nodes[any_tile]._replace(otherwise=len(nodes))


def _append_paired_loop(nodes: list[Node], loop: TileLoop) -> None:
    """Append a loop whose even and odd iterations differ, with one branch per iteration, as all other loops over the
    same tiles have."""
    top = _append_branch(nodes)
    _append(nodes, loop.later if loop.odd else ())
    more = _append_branch(nodes)
    _append(nodes, loop.odd or loop.pair)
    nodes[-1] = nodes[-1]._replace(then=top)
    nodes[more] = nodes[more]._replace(otherwise=len(nodes))
    _append(nodes, loop.later if loop.pair else ())  # a last iteration without a partner
    nodes[top] = nodes[top]._replace(otherwise=len(nodes))


def of_instance(warp_group: WarpGroupSteps, instance: int) -> WarpGroupSteps:
    """The steps of one instance: `init` of a scheduler barrier is an arrival by the last instance, and `tail` a sync of
    the first one. For other instances these are no-ops."""
    own = {"init": "arrive" if instance == warp_group.instances - 1 else "", "tail": "sync" if instance == 0 else ""}

    def steps(of: tuple[Step, ...]) -> tuple[Step, ...]:
        done = (s if s.kind != "scheduler_barrier" else Step("scheduler_barrier", own.get(s.name, s.name)) for s in of)
        return tuple(s for s in done if s != Step("scheduler_barrier", ""))

    loop = warp_group.loop
    return replace(
        warp_group,
        before=steps(warp_group.before),
        loop=TileLoop(*map(steps, (loop.first, loop.later, loop.last, loop.skip, loop.odd, loop.pair))),
        after=steps(warp_group.after),
        start=steps(warp_group.start),
        end=steps(warp_group.end),
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
