"""Timeline of a warp-specialized kernel, drawn from the IR: lanes for its warp groups, for the stages of its pipelines,
and for wgmmas in flight.

The warp groups run op by op, in program order, with durations that are fixed here, not measured. A wgmma takes PRODUCT
steps, and the tensor cores run one at a time, in the order of issue. A TMA copy takes COPY steps, and a softmax
SOFTMAX. Any other arithmetic on a tile takes one step, and so does issuing a copy; other ops take none. So the picture
shows one of the orders that the protocol allows. It changes with the ops, their order, and the stages of pipelines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from attngen.errors import AttngenError
from attngen.interp.numeric import compiled
from attngen.ir.core import Block, Op
from attngen.ir.dims import SIDES
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Arg, Dot, Init, Load, Loop, Mask, SoftmaxStep, Store, Yield
from attngen.ir.pipe import (
    ConcatHalves,
    ConsumerRelease,
    ConsumerWait,
    ConvertLayout,
    PinBeforeWait,
    Pipeline,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    SoftmaxWeights,
    SplitHalves,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
)
from attngen.ir.pipe_control import PipelinedLoop, WorkLoop, bodies_of
from attngen.report.charts import Drawing, Shape, path, rect, text

PRODUCT, COPY, SOFTMAX = 4, 6, 6  # steps
ITERATIONS, PARTIAL = 3, 1  # iterations of a loop over tiles of keys, and the partial ones if there are full ones
TILES = 2  # program tiles of a persistent program
LEFT, STEP, LANE, BAR, TOP = 160, 8, 20, 14, 26  # sizes of the drawing
STARTED, STORED = "bar tight", "bar other"
# Classes of the page's style sheet, and their meaning.
MEANING = {
    STARTED: "issues a load",
    "track": "stage: load in flight",
    "unlisted": "stage: full",
    "full": "stage: in use",
    STORED: "stage: store in flight",
    "partial": "softmax",
    "hollow": "other arithmetic",
    "bar deep": "product of scores",
    "bar": "product of weights and V",
}
STYLE = """
  svg { background: #ffffff; font: 12px system-ui, sans-serif; }
  text { fill: #1c2128; stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }
  .faint { fill: #57606a; } .strong { font-weight: 600; }
  .axis { fill: none; stroke: #d0d7de; } .leader { fill: none; stroke: #57606a; stroke-width: .8; }
  .track { fill: #e3e6ea; } .unlisted { fill: #b9d0ea; } .full { fill: #2f6fb5; }
  .partial { fill: #e59a2c; } .hollow { fill: #ffffff; stroke: #e59a2c; stroke-width: 1; }
  .bar { fill: #2f6fb5; } .bar.deep { fill: #0f766e; } .bar.tight { fill: #c2410c; } .bar.other { fill: #8b949e; }
"""


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
    full: int
    by: str = ""  # the consumer that stored it, if a consumer did
    waits: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)


@dataclass
class _Agent:
    """An instance of a warp group, and its consumed stages, issued wgmmas and TMA stores."""

    name: str
    now: int = 0
    consumed: dict[str, int] = field(default_factory=dict)  # pipeline -> number of its uses that were consumed
    held: dict[str, tuple[str, int]] = field(default_factory=dict)  # value -> its pipeline and use
    flights: dict[str, tuple[int, str]] = field(default_factory=dict)  # wgmma -> the step of its end, its tile of keys
    stored: dict[str, int] = field(default_factory=dict)  # staging -> the step at which the TMA store has read it
    number: str = ""  # index of the tile of keys whose wgmma was awaited last


class Timeline:
    """A simulated run of a kernel's warp groups with `num_stages` stages. It records `spans`, and the instances that
    are `stuck` at the end."""

    def __init__(self, kernel: Kernel, num_stages: int) -> None:
        self.kernel = kernel
        self.spans: list[Span] = []
        pipelines = [op for op in kernel.ops() if isinstance(op, Pipeline) and not op.metadata_of]
        self.stages = {
            pipeline.name: int(compiled(pipeline.stages)({"num_stages": num_stages})) for pipeline in pipelines
        }
        self.uses: dict[str, list[_Use]] = {pipeline.name: [] for pipeline in pipelines}
        self.consumers = {
            pipeline.name: sum(
                b.warp_group.instances
                for b in kernel.warp_groups
                if b.warp_group and _consumes(kernel, b, pipeline.name)
            )
            for pipeline in pipelines
        }
        self.consumers |= {pipeline.name: 1 for pipeline in pipelines if pipeline.exchange}
        single = [b.name for b in kernel.warp_groups if b.warp_group and b.warp_group.instances == 1]
        # Pipelines from one warp group to another.
        self.stored_by_consumers = {
            op.pipeline for name in single for op in kernel.within(name) if isinstance(op, ProducerStore)
        }
        self.free = 0  # the step at which the tensor cores have finished the issued wgmmas
        classes = {cls for op in kernel.ops() for cls in _classes(op)}
        partial = PARTIAL if "full" in classes else ITERATIONS
        self.iterations = {
            "partial": partial,
            "full": ITERATIONS - partial if "partial" in classes else ITERATIONS,
        }
        self.agents = [
            _Agent(f"{b.name} {n}" if b.warp_group.instances > 1 else b.name)
            for b in kernel.warp_groups
            if b.warp_group
            for n in range(b.warp_group.instances)
        ]
        homes = [b.name for b in kernel.warp_groups if b.warp_group for _ in range(b.warp_group.instances)]
        self.stuck = self._run([self.block(agent, home, "full") for agent, home in zip(self.agents, homes)])
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
            case WorkLoop():
                yield from self.work(agent, op)
            case PipelinedLoop():
                classes = ["partial"] * (self.iterations["partial"] * bool(op.partial))
                classes += ["full"] * (self.iterations["full"] * bool(op.full))
                by_twos = dict.fromkeys(range(1, len(classes), 2), op.odd or op.pair) if op.odd or op.pair else {}
                bodies = [at for at in range(len(classes)) if not (op.pair and at + 1 in by_twos)]
                for at, each in ((at, classes[at]) for at in bodies):
                    if at in by_twos:
                        yield from self.block(agent, by_twos[at], each)
                        continue
                    yield from self.block(agent, op.step if at or not op.first else op.first, each if at else "partial")
                if op.last:
                    yield from self.block(agent, op.last, "full")
            case Loop():
                for _ in range(self.iterations.get(op.cls, ITERATIONS)):
                    yield from self.block(agent, op.body, op.cls)
            case ProducerLoad() if op.pipeline in self.uses:
                yield from self.produce(agent, op.pipeline, str(len(self.uses[op.pipeline])), COPY)
            case ProducerStore() if op.pipeline in self.stored_by_consumers:
                self.uses[op.pipeline].append(_Use(str(len(self.uses[op.pipeline])), agent.now, agent.now, agent.name))
            case ConsumerWait():
                agent.held[op.name] = op.pipeline, (yield from self.consume(agent, op.pipeline))
            case ConsumerRelease():
                pipeline, use = agent.held[op.value]
                self.uses[pipeline][use].releases.append(agent.now)
            case ProducerTail():
                yield _Ask(lambda: self.released(op.pipeline, len(self.uses[op.pipeline])))
            case Wgmma():
                self.issue(agent, op)
            case WgmmaWait():
                yield from self.landed(agent, op.value)
            case Dot():
                self.issue(agent, op)
                yield from self.landed(agent, op.name)
            case TmaStore():
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
            case TmaStoreWait():
                yield _Ask(lambda: agent.stored.get(op.staging, 0))
            case _:
                yield from self.compute(agent, op, cls)

    def compute(self, agent: _Agent, op: Op, cls: str) -> Steps:
        """Run arithmetic, and loads outside of producers."""
        steps, label, shown = 1, "", "hollow"
        if isinstance(op, (SoftmaxStep, SoftmaxWeights)):
            halved = isinstance(op, SoftmaxWeights)
            steps, label, shown = (
                SOFTMAX // 2 if halved else SOFTMAX,
                f"{'half ' * halved}softmax {agent.number}",
                "partial",
            )
        elif isinstance(op, Load) and op.type.space == "sram":
            steps, shown = COPY, "track"
        elif not self.is_arithmetic(op, cls):
            return
        end = agent.now + steps
        hint = f"%{op.value} is stored" if isinstance(op, Store) else f"%{op.name}"
        yield _Ask(lambda: end, shown, label, hint)

    def is_arithmetic(self, op: Op, cls: str) -> bool:
        """True if an op does arithmetic on a tile in an iteration of class `cls`."""
        if isinstance(op, (Arg, Init, Yield, ConvertLayout, SplitHalves, PinBeforeWait, ConcatHalves)) or (
            isinstance(op, Mask) and cls == "full" and op.when == "partial"
        ):
            return False
        types = (*op.results().values(), *map(self.kernel.type_of, op.operands()))
        return any(len(t.dims) == 2 and t.space == "reg" for t in types)

    def work(self, agent: _Agent, op: WorkLoop) -> Steps:
        """Run the work loop of a persistent program, up to the end-of-work signal."""
        for n in range(TILES + 1):
            use = -1
            if op.fetches:
                yield from self.produce(agent, op.pipeline, str(n) if n < TILES else "end", 0)
            else:
                use = yield from self.consume(agent, op.pipeline)
            if n < TILES:
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
        yield _Ask(lambda: end, STARTED, "", f"loads into %{pipeline}")

    def consume(self, agent: _Agent, pipeline: str) -> Generator[_Ask, int, int]:
        """Wait for the next stage that another warp group has filled; return the index of its use."""
        count = agent.consumed.get(pipeline, 0)
        agent.consumed[pipeline] = count + 1

        def others() -> list[int]:
            return [at for at, use in enumerate(self.uses[pipeline]) if use.by != agent.name]

        yield _Ask(lambda: self.uses[pipeline][others()[count]].full if count < len(others()) else None)
        use = others()[count]
        self.uses[pipeline][use].waits.append(agent.now)
        return use

    def issue(self, agent: _Agent, op: Wgmma | Dot) -> None:
        """Issue a wgmma, which starts when the tensor cores have finished the earlier ones. It has the number of its
        right operand's use."""
        start = max(agent.now, self.free)
        self.free = start + PRODUCT
        number = str(agent.held[op.b][1]) if op.b in agent.held else ""
        agent.flights[op.name] = self.free, number
        label = re.sub(r"(_flight|_next|_RECEIVED|_in_\w+?)+$", "", op.name)
        lane, hint = f"products of {agent.name}", f"%{op.name}"
        self.spans.append(Span(lane, agent.now, start, "leader", "", f"{hint} waits for the tensor cores"))
        self.spans.append(
            Span(
                lane,
                start,
                self.free,
                "bar" if op.acc and op.over not in SIDES.values() else "bar deep",
                f"{label} {number}".strip(),
                hint,
            )
        )

    @staticmethod
    def landed(agent: _Agent, product: str) -> Steps:
        """Wait for a wgmma."""
        end, agent.number = agent.flights[product]
        yield _Ask(lambda: end)


def _consumes(kernel: Kernel, block: Block, pipeline: str) -> bool:
    """True if a block, or a body that it runs, consumes tiles or tile indices from a pipeline."""
    for op in block.ops:
        if isinstance(op, (ConsumerWait, WorkLoop)) and op.pipeline == pipeline and not getattr(op, "fetches", False):
            return True
        if any(_consumes(kernel, kernel.block(body), pipeline) for body in bodies_of(op)):
            return True
    return False


def _classes(op: Op) -> set[str]:
    """Return the classes of tiles that a loop visits."""
    if isinstance(op, PipelinedLoop):
        return {cls for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
    return {op.cls} if isinstance(op, Loop) else set()


# ---------------------------------------------------------------------------------------------- drawing


def lanes(module: Module, kernel: Kernel) -> Drawing:
    """Draw the timeline of a warp-specialized kernel, at the number of stages of its first config."""
    config = module.configs(kernel.name, kernel.backend)[0]
    line = Timeline(kernel, config.num_stages)
    names = _order(kernel, line)
    width, bottom = LEFT + STEP * line.end + 12, TOP + LANE * len(names)
    shapes = [text(0, 12, f"@{kernel.name}, in steps", "strong")]
    for step in range(0, line.end + 1, 2 * SOFTMAX):
        shapes.append(path([(LEFT + STEP * step, TOP - 6), (LEFT + STEP * step, bottom)], "axis"))
        shapes.append(text(LEFT + STEP * step, TOP - 8, str(step), "faint", "middle"))
    for i, name in enumerate(names):
        y = TOP + LANE * i
        shapes.append(text(LEFT - 8, y + BAR - 2, _called(name), anchor="end"))
        for span in sorted(
            (s for s in line.spans if s.lane == name and s.end > s.start), key=lambda s: s.cls != "leader"
        ):
            shapes += _bar(span, y)
    seen = {span.cls for span in line.spans if span.end > span.start}
    legend, bottom = _legend([cls for cls in MEANING if cls in seen], bottom + 12, width)
    says = f"{', '.join(map(_called, names))}, over {line.end} steps"
    says += f"; {' and '.join(line.stuck)} wait for ever" if line.stuck else ""
    return Drawing(width, bottom, f"Warp groups of @{kernel.name} over time", says, shapes + legend)


def _order(kernel: Kernel, line: Timeline) -> list[str]:
    """Return the names of lanes from the top: producers, pipelines, and the other warp groups, each with its
    wgmmas."""
    producers = {
        b.name for b in kernel.warp_groups if any(isinstance(op, ProducerLoad) for op in kernel.within(b.name))
    }
    found = [agent.name for agent in line.agents if agent.name.split()[0] in producers]
    found += [f"{pipeline} {stage}" for pipeline, stages in line.stages.items() for stage in range(stages)]
    for agent in line.agents:
        found += [] if agent.name in found else [agent.name, f"products of {agent.name}"]
    drawn = {span.lane for span in line.spans}
    return [name for name in found if name in drawn or name in {agent.name for agent in line.agents}]


def _called(lane: str) -> str:
    """Return a lane's name for readers: `K_pipeline 0` is stage 0 of K."""
    pipeline, is_stage, stage = lane.partition("_pipeline ")
    return f"{pipeline}, stage {stage}" if is_stage else lane


def _bar(span: Span, y: float) -> list[Shape]:
    x, right = LEFT + STEP * span.start, LEFT + STEP * span.end
    if span.cls == "leader":
        return [path([(x, y + BAR / 2), (right, y + BAR / 2)], "leader")]
    shapes = [rect(x, y, right - x, BAR, span.cls, f"{span.hint}, steps {span.start} .. {span.end}")]
    label = text((x + right) / 2, y + BAR - 3, span.label, anchor="middle")
    return [*shapes, label._replace(attributes={**label.attributes, "font-size": "10"})] if span.label else shapes


def _legend(classes: list[str], y: float, width: float) -> tuple[list[Shape], int]:
    """Return the legend of the colours, wrapped into lines, and the y at which it ends."""
    shapes: list[Shape] = []
    x = 0.0
    for cls, words in [*((cls, MEANING[cls]) for cls in classes), ("leader", "waits, or is in flight")]:
        size = 24 + 6.6 * len(words)
        x, y = (x, y) if x + size <= width else (0.0, y + LANE)
        shapes.append(path([(x, y + 6), (x + 12, y + 6)], cls) if cls == "leader" else rect(x, y, 12, 12, cls))
        shapes.append(text(x + 17, y + 10, words))
        x += size + 10
    return shapes, int(y) + LANE


def svg(drawing: Drawing) -> str:
    """Return a drawing as the text of an SVG file."""
    size = f'viewBox="0 0 {drawing.width} {drawing.height}" width="{drawing.width}" height="{drawing.height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    lines += [
        f"<title>{escape(drawing.title)}</title>",
        f"<desc>{escape(drawing.says)}</desc>",
        f"<style>{STYLE}</style>",
    ]
    for shape in drawing.shapes:
        attributes = "".join(f' {key}="{escape(value)}"' for key, value in shape.attributes.items())
        hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
        lines.append(f"<{shape.tag}{attributes}>{hint}{escape(shape.text)}</{shape.tag}>")
    return "\n".join([*lines, "</svg>", ""])


def write_lanes(module: Module, file: Path) -> None:
    """Write the timeline of a module's warp-specialized kernel; AttngenError for another suffix, or without such a
    kernel."""
    if file.suffix != ".svg":
        raise AttngenError(f"--lanes {file}: expected a name that ends in .svg")
    if not module.warp_specialized:
        raise AttngenError(
            f"--lanes {file}: no kernel of {module.name} is warp-specialized here; `attngen dump` shows its kernels"
        )
    file.write_text(svg(lanes(module, module.warp_specialized[0])), encoding="utf-8")
