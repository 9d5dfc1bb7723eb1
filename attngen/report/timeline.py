"""Timeline of a warp-specialized kernel, simulated from the IR: its warp groups, the stages of its pipelines, and
wgmmas in flight. lanes.py draws it.

The warp groups run op by op, in program order, with durations that are fixed here, not measured. A wgmma takes PRODUCT
steps, and the tensor cores run one at a time, in the order of issue. A TMA copy takes COPY steps, and a softmax
SOFTMAX. Any other arithmetic on a tile takes one step, and so does issuing a copy; other ops take none. So the picture
shows one of the orders that the protocol allows. It changes with the ops, their order, and the stages of pipelines.
Products have the names of FlashAttention's steps (see products.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attngen.interp.numeric import compiled
from attngen.ir import Block, Kernel, Op, WarpGroup, exp2, only, pipe, tile
from attngen.report.products import Products

PRODUCT, COPY, SOFTMAX = 4, 6, 6  # steps
ITERATIONS, PARTIAL = 3, 1  # iterations of a loop over tiles of keys, and the partial ones if there are full ones
TILES = 2  # program tiles of a persistent program
STARTED, STORED, ENDING, TURN = "bar tight", "bar other", "bar ending", "turn"  # classes of the page's style sheet
SCORES, RESULTS = "bar deep", "bar"  # classes of products


class Span(NamedTuple):
    """A bar in a lane, from step `start` to step `end`. The class `leader` is a thin line for a warp group that waits
    or a wgmma in flight."""

    lane: str
    start: int
    end: int
    cls: str
    label: str = ""
    hint: str = ""


class _Ask(NamedTuple):
    """The next wait of a warp group: it continues at the step that `when` returns, or waits while that is None."""

    when: Callable[[], int | None]
    cls: str = "leader"
    label: str = ""
    hint: str = "waits"


Steps = Generator[_Ask, int, Any]  # a warp group's run, which is sent the steps at which it continues


@dataclass
class _Use:
    """One use of a pipeline stage: the steps at which the load starts, the tile is full, and consumers wait for and
    release it."""

    label: str
    start: int
    full: int  # meaningful once all instances that store the tile have done so
    by: str = ""  # the consumer that stored it, if a consumer did
    stores: int = 1  # number of instances that have stored their part
    waits: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)


@dataclass
class _Agent:
    """An instance of a warp group, and its consumed stages, issued wgmmas and TMA stores."""

    name: str
    now: int = 0
    consumed: dict[str, int] = field(default_factory=dict)  # pipeline -> number of its uses that were consumed
    filled: dict[str, int] = field(default_factory=dict)  # pipeline -> number of tiles of which it has stored its part
    held: dict[str, tuple[str, int]] = field(default_factory=dict)  # value -> its pipeline and use
    flights: dict[str, tuple[int, str]] = field(default_factory=dict)  # wgmma -> the step of its end, its tile of keys
    stored: dict[str, int] = field(default_factory=dict)  # staging -> the step at which the TMA store has read it
    number: str = ""  # index of the tile of keys whose wgmma was awaited last
    home: str = ""  # the warp group
    turns: list[int] = field(default_factory=list)  # steps at which the instance before it has arrived at its barrier
    taken: int = 0  # the number of these for which it has waited
    seen: int = 0  # number of tiles that the instances of the warp group have split among themselves so far
    ending: bool = False  # the loop over tiles has ended


class Timeline:
    """A simulated run of a kernel's warp groups with `num_stages` stages. It records `spans`, and the instances that
    are `stuck` at the end."""

    def __init__(self, kernel: Kernel, num_stages: int) -> None:
        self.kernel, self.products = kernel, Products(kernel)
        self.spans: list[Span] = []
        pipelines = [op for op in only(kernel.ops(), pipe.Pipeline) if not op.metadata_of]
        self.stages = {
            pipeline.name: int(compiled(pipeline.stages)({"num_stages": num_stages})) for pipeline in pipelines
        }
        self.uses: dict[str, list[_Use]] = {pipeline.name: [] for pipeline in pipelines}
        groups = {b.name: b.warp_group.instances for b in kernel.warp_groups if b.warp_group}
        self.consumers = {
            pipeline.name: sum(
                1 if _splits(kernel, b, pipeline.name) else groups[b.name]
                for b in kernel.warp_groups
                if b.warp_group and _consumes(kernel, b, pipeline.name)
            )
            for pipeline in pipelines
        }
        self.consumers |= {pipeline.name: 1 for pipeline in pipelines if pipeline.exchange}
        # Pipelines that consumers fill, and the number of instances that each store a part of a tile.
        self.stored_by_consumers = {
            op.pipeline: count
            for name, count in groups.items()
            for op in only(kernel.within(name), pipe.ProducerStore)
            if op.pipeline in self.uses
        }
        self.free = 0  # the step at which the tensor cores have finished the issued wgmmas
        classes = {cls for op in kernel.ops() for cls in _classes(op)}
        partial = PARTIAL if "full" in classes else ITERATIONS
        self.iterations = {
            "partial": partial,
            "full": ITERATIONS - partial if "partial" in classes else ITERATIONS,
        }
        self.agents = [
            _Agent(f"{b.name} {n}" if b.warp_group.instances > 1 else b.name, home=b.name)
            for b in kernel.warp_groups
            if b.warp_group
            for n in range(b.warp_group.instances)
        ]
        self.stuck = self._run([self.block(agent, agent.home, "full") for agent in self.agents])
        self.end = max([agent.now for agent in self.agents] + [span.end for span in self.spans])
        for pipeline in self.uses:
            self._show(pipeline)

    def _run(self, warp_groups: list[Steps]) -> list[str]:
        """Repeatedly run the warp group that can continue first; return the names of those that wait for ever."""
        asks = {i: ask for i, warp_group in enumerate(warp_groups) if (ask := next(warp_group, None))}
        while asks:
            ready = [(max(self.agents[i].now, step), i) for i, ask in asks.items() if (step := ask.when()) is not None]
            if not ready:
                return [self.agents[i].name for i in asks]
            step, i = min(ready)
            agent, ask = self.agents[i], asks.pop(i)
            self.spans.append(Span(agent.name, agent.now, step, *ask[1:]))
            agent.now = step
            with suppress(StopIteration):
                asks[i] = warp_groups[i].send(step)
        return []

    def _show(self, pipeline: str) -> None:
        """Add the spans of a pipeline's stages."""
        for n, use in enumerate(self.uses[pipeline]):
            lane, tile = f"{pipeline} {n % self.stages[pipeline]}", f"tile {use.label}"
            end = max(use.releases) if len(use.releases) == self.consumers[pipeline] else self.end
            consumed = min([*use.waits, end])
            self.spans.append(Span(lane, use.start, use.full, "track", "", f"{tile} is in flight"))
            self.spans.append(Span(lane, use.full, consumed, "unlisted", "", f"{tile} is full"))
            self.spans.append(Span(lane, consumed, end, "full", use.label, f"{tile} is in use"))

    # ------------------------------------------------------------------ ops

    def block(self, agent: _Agent, name: str, cls: str) -> Steps:
        for op in self.kernel.block(name).ops:
            yield from self.op(agent, op, cls)

    def op(self, agent: _Agent, op: Op, cls: str) -> Steps:
        match op:
            case pipe.WorkLoop():
                yield from self.work(agent, op)
            case pipe.PipelinedLoop():
                yield from self.loop(agent, op)
            case tile.Loop():
                for _ in range(self.iterations.get(op.cls, ITERATIONS)):
                    yield from self.block(agent, op.body, op.cls)
            case pipe.SchedulerBarrier():
                yield from self.turn(agent, op.do)
            case pipe.ProducerLoad() if op.pipeline in self.uses:
                yield from self.produce(agent, op.pipeline, str(len(self.uses[op.pipeline])), COPY)
            case pipe.ProducerStore() if op.pipeline in self.stored_by_consumers:
                yield from self.store(agent, op.pipeline)
            case tile.OrderedAdd():
                end = agent.now + COPY
                yield _Ask(lambda: end, STORED, agent.number, f"%{op.value} is added to its sum by TMA")
            case pipe.ConsumerWait():
                agent.held[op.name] = op.pipeline, (yield from self.consume(agent, op.pipeline))
                if self.group_of(agent).warps == 1:
                    agent.number = self.uses[op.pipeline][agent.held[op.name][1]].label
            case pipe.ConsumerRelease():
                pipeline, use = agent.held[op.value]
                self.uses[pipeline][use].releases.append(agent.now)
            case pipe.ProducerTail():
                yield _Ask(lambda: self.released(op.pipeline, len(self.uses[op.pipeline])))
            case pipe.Wgmma():
                self.issue(agent, op)
            case pipe.WgmmaWait():
                yield from self.landed(agent, op.value)
            case tile.Dot():
                self.issue(agent, op)
                yield from self.landed(agent, op.name)
            case pipe.TmaStore():
                yield _Ask(lambda: agent.stored.get(op.staging, 0))
                agent.stored[op.staging] = agent.now + COPY
                self.spans.append(
                    Span(
                        f"{op.staging} 0",
                        agent.now,
                        agent.now + COPY,
                        STORED,
                        "",
                        f"%{op.value} of {agent.name} is stored",
                    )
                )
            case pipe.TmaStoreWait():
                yield _Ask(lambda: agent.stored.get(op.staging, 0))
            case _:
                yield from self.compute(agent, op, cls)

    def loop(self, agent: _Agent, op: pipe.PipelinedLoop) -> Steps:
        """Run a loop over tiles."""
        classes = ["partial"] * (self.iterations["partial"] * bool(op.partial))
        classes += ["full"] * (self.iterations["full"] * bool(op.full))
        by_twos = dict.fromkeys(range(1, len(classes), 2), op.odd or op.pair) if op.odd or op.pair else {}
        bodies = [at for at in range(len(classes)) if not (op.pair and at + 1 in by_twos)]
        for at, each in ((at, classes[at]) for at in bodies):
            if op.round_robin and not self.is_its_turn(agent, op.round_robin):
                continue
            if at in by_twos:
                yield from self.block(agent, by_twos[at], each)
                continue
            yield from self.block(agent, op.step if at or not op.first else op.first, each if at else "partial")
        if op.last:
            yield from self.block(agent, op.last, "full")
        agent.ending = True

    def compute(self, agent: _Agent, op: Op, cls: str) -> Steps:
        """Run arithmetic, and loads outside of producers."""
        steps, label, shown = 1, "", "hollow"
        if isinstance(op, (tile.SoftmaxStep, pipe.SoftmaxWeights)):
            halved = isinstance(op, pipe.SoftmaxWeights)
            steps, label, shown = (
                SOFTMAX // 2 if halved else SOFTMAX,
                "exp(S)" if halved else f"softmax {agent.number}",
                "partial",
            )
        elif isinstance(op, tile.Load) and op.type.space == "sram":
            steps, shown = COPY, "track"
        elif not self.is_arithmetic(op, cls):
            return
        elif agent.ending:
            shown = ENDING
        elif isinstance(op, tile.Map) and op.expr.has(exp2):  # P, recomputed from the LSE
            shown, label = "partial", "P"
        end = agent.now + steps
        hint = f"%{op.value} is stored" if isinstance(op, tile.Store) else f"%{op.name}"
        yield _Ask(lambda: end, shown, label, hint)

    def is_arithmetic(self, op: Op, cls: str) -> bool:
        """True if an op does arithmetic on a tile in an iteration of class `cls`."""
        if isinstance(
            op,
            (
                tile.Arg,
                tile.Init,
                tile.Yield,
                pipe.ConvertLayout,
                pipe.SplitHalves,
                pipe.PinBeforeWait,
                pipe.ConcatHalves,
            ),
        ) or (isinstance(op, tile.Mask) and cls == "full" and op.when == "partial"):
            return False
        types = (*op.results().values(), *map(self.kernel.type_of, op.operands()))
        return any(len(t.dims) == 2 and t.space == "reg" for t in types)

    def work(self, agent: _Agent, op: pipe.WorkLoop) -> Steps:
        """Run the work loop of a persistent program, up to the end-of-work signal."""
        for n in range(TILES + 1):
            use = -1
            if op.fetches:
                yield from self.produce(agent, op.pipeline, str(n) if n < TILES else "end", 0)
            else:
                use = yield from self.consume(agent, op.pipeline)
            if n < TILES:
                agent.ending = False
                yield from self.block(agent, op.body, "full")
            if not op.fetches:
                self.uses[op.pipeline][use].releases.append(agent.now)

    # ------------------------------------------------------------------ pipelines and wgmmas

    def released(self, pipeline: str, count: int) -> int | None:
        """Return the step at which all consumers have released the first `count` uses of a pipeline; None if they have
        not."""
        uses = self.uses[pipeline][:count]
        if any(len(use.releases) < self.consumers[pipeline] for use in uses):
            return None
        return max([0, *(step for use in uses for step in use.releases)])

    def produce(self, agent: _Agent, pipeline: str, label: str, steps: int) -> Steps:
        """Acquire the pipeline's next stage and issue a load into it, which runs while the warp group continues."""
        yield _Ask(
            lambda: (
                self.released(pipeline, len(self.uses[pipeline]) - self.stages[pipeline] + 1)
                if len(self.uses[pipeline]) >= self.stages[pipeline]
                else 0
            )
        )
        self.uses[pipeline].append(_Use(label, agent.now, agent.now + steps))
        end = agent.now + bool(steps)
        yield _Ask(lambda: end, STARTED, "", f"loads {label} into %{pipeline}")

    def store(self, agent: _Agent, pipeline: str) -> Steps:
        """Store the instance's part of a tile in the next stage. If another warp group consumes it, wait until that is
        empty."""
        instances = self.stored_by_consumers[pipeline]
        if instances == 1:
            self.uses[pipeline].append(_Use(str(len(self.uses[pipeline])), agent.now, agent.now, agent.name))
            return
        use = agent.filled.get(pipeline, 0)
        agent.filled[pipeline] = use + 1
        if not _consumes(self.kernel, self.kernel.block(agent.home), pipeline):
            yield _Ask(lambda: self.released(pipeline, max(0, use + 1 - self.stages[pipeline])))
        if use == len(self.uses[pipeline]):
            self.uses[pipeline].append(_Use(str(use), agent.now, agent.now, stores=0))
        found = self.uses[pipeline][use]
        found.stores, found.full = found.stores + 1, max(found.full, agent.now)

    def full(self, pipeline: str, use: int) -> int | None:
        """Return the step at which a stage is full; None if some instance has not stored its part."""
        found = self.uses[pipeline][use]
        return found.full if found.by or found.stores >= self.stored_by_consumers.get(pipeline, 1) else None

    def is_its_turn(self, agent: _Agent, pipeline: str) -> bool:
        """True if the next tile is the instance's, where the instances of a warp group split the tiles of a
        pipeline."""
        group = [other for other in self.agents if other.home == agent.home]
        agent.consumed[pipeline] = agent.seen
        agent.seen += 1
        return agent.consumed[pipeline] % len(group) == group.index(agent)

    def group_of(self, agent: _Agent) -> WarpGroup:
        """Return the warp group of an instance."""
        group = self.kernel.block(agent.home).warp_group
        assert group is not None
        return group

    def consume(self, agent: _Agent, pipeline: str) -> Generator[_Ask, int, int]:
        """Wait for the next stage that another warp group has filled; return the index of its use."""
        count = agent.consumed.get(pipeline, 0)
        agent.consumed[pipeline] = count + 1

        def others() -> list[int]:
            return [at for at, use in enumerate(self.uses[pipeline]) if use.by != agent.name]

        yield _Ask(lambda: self.full(pipeline, others()[count]) if count < len(others()) else None)
        use = others()[count]
        self.uses[pipeline][use].waits.append(agent.now)
        return use

    def turn(self, agent: _Agent, do: str) -> Steps:
        """Run a step of the ping-pong protocol."""
        group = [other for other in self.agents if other.home == agent.home]
        at = group.index(agent)
        if do == "arrive" or (do == "init" and agent is group[-1]):
            group[(at + 1) % len(group)].turns.append(agent.now)
        if do == "sync" or (do == "tail" and agent is group[0]):
            yield _Ask(
                lambda: agent.turns[agent.taken] if len(agent.turns) > agent.taken else None,
                hint="waits at the ping-pong barrier",
            )
            agent.taken += 1
        if do == "sync":
            self.spans.append(Span(agent.name, agent.now, agent.now + 1, TURN, "", "its turn"))

    def issue(self, agent: _Agent, op: pipe.Wgmma | tile.Dot) -> None:
        """Issue a wgmma, which starts when the tensor cores have finished the earlier ones. It has the number of its
        right operand's use."""
        start = max(agent.now, self.free)
        self.free = start + PRODUCT
        number = str(agent.held[op.b][1]) if op.b in agent.held else ""
        agent.flights[op.name] = self.free, number
        product = self.products.of(op)
        lane = f"products of {agent.name}"
        self.spans.append(Span(lane, agent.now, start, "leader", "", f"{product.name} waits for the tensor cores"))
        shown = SCORES if product.gives_scores else RESULTS
        label = f"{product.product} {number}".strip()
        self.spans.append(Span(lane, start, self.free, shown, label, f"{product.name}, %{op.name}"))

    @staticmethod
    def landed(agent: _Agent, product: str) -> Steps:
        """Wait for a wgmma."""
        end, agent.number = agent.flights[product]
        yield _Ask(lambda: end)


def _consumes(kernel: Kernel, block: Block, pipeline: str) -> bool:
    """True if a block, or a body that it runs, consumes tiles or tile indices from a pipeline."""
    for op in block.ops:
        if (
            isinstance(op, (pipe.ConsumerWait, pipe.WorkLoop))
            and op.pipeline == pipeline
            and not getattr(op, "fetches", False)
        ):
            return True
        if any(_consumes(kernel, kernel.block(body), pipeline) for body in pipe.bodies_of(op)):
            return True
    return False


def _splits(kernel: Kernel, block: Block, pipeline: str) -> bool:
    """True if the instances of a warp group split the tiles of a pipeline among themselves."""
    return any(op.round_robin == pipeline for op in only(kernel.within(block.name), pipe.PipelinedLoop))


def _classes(op: Op) -> set[str]:
    """Return the classes of tiles that a loop visits."""
    if isinstance(op, pipe.PipelinedLoop):
        return {cls for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
    return {op.cls} if isinstance(op, tile.Loop) else set()
