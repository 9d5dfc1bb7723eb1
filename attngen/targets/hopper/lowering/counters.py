"""Which counters a warp group has for the stages of pipelines: the next stage, and its phase or a number of loads.

A consumer of several pipelines of which each iteration uses the same stage keeps one counter for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import sympy

from attngen.ir import Block, Expr, Kernel, Op, only, pipe, symbol
from attngen.ir import gl as g
from attngen.targets.hopper.configs.barriers import (
    instances_of,
    is_consumed_in_loop,
    is_reused,
    stored_pipelines,
)
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import FORWARD

INSTANCE, COPY = symbol("_WARP_GROUP"), symbol("copy")
ZERO = sympy.Integer(0)


class Slot(NamedTuple):
    """The place of a pipeline's next stage, as a warp group knows it.

    index: of the stage's buffer and of its barriers, among those of all instances.
    stage: of the stage alone.
    counter: the name of the variables that count; empty if the stages are used once.
    own: the pipeline advances these variables; others share them.
    """

    index: Expr
    stage: Expr
    stages: Expr
    counter: str
    own: bool

    @property
    def phase(self) -> Expr:
        return symbol(f"{self.counter}_phase")

    def phase_of(self, in_stage: bool) -> Expr:
        """The phase of the stage's barrier; `in_stage`: it is that of the counter's own stage, 0 or 1."""
        return symbol(f"{self.counter}_stage") if in_stage else self.phase

    @property
    def loads(self) -> Expr:
        return symbol(f"{self.counter}_loads")

    @property
    def stage_var(self) -> str:
        """The variable of the stage; empty if there is only one."""
        return "" if self.stages == 1 else f"{self.counter}_stage"

    def next_stage(self, name: str) -> g.NextStage:
        """The op that goes on to the next stage, with its phase."""
        return g.NextStage(name, f"{self.counter}_phase", self.stages, self.stage_var)


def short(pipeline: str) -> str:
    """`K` for %K_pipeline, as in `K_smem`."""
    return pipeline.removesuffix("_pipeline")


class Counting:
    """The counters of a kernel's pipelines."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.pipelines = {op.name: op for op in only(kernel.ops(), pipe.Pipeline)}
        self.stored = stored_pipelines(kernel)
        self.of_latents = is_mla_decode(kernel)

    def stages(self, name: str) -> Expr:
        return self.pipelines[name].stages.xreplace({symbol("num_stages"): symbol("STAGES")})

    def producer_slot(self, name: str, copy: Expr = COPY) -> Slot:
        """The place of the stage that a producer fills next."""
        return self._slot(name, copy, short(name))

    def consumer_slot(self, name: str, block: Block) -> Slot:
        """The place of the stage that an instance of a consumer takes next; `block`: of its warp group."""
        return self._slot(name, INSTANCE, self.counter(name, block))

    def _slot(self, name: str, copy: Expr, counter: str) -> Slot:
        pipeline, stages = self.pipelines[name], self.stages(name)
        if not is_reused(self.kernel, name):
            return Slot(copy if pipeline.per_instance else ZERO, ZERO, sympy.Integer(1), "", False)
        stage = ZERO if stages == 1 else symbol(f"{counter}_stage")
        index = instances_of(self.kernel, pipeline) * stage + copy if pipeline.per_instance else stage
        return Slot(index, stage, stages, counter, counter == short(name))

    def stored_slot(self, name: str, block: Block) -> Slot:
        """The place of the next stage of a tile that instances store together."""
        stages = self.stages(name)
        counter = short(name) if stages == 1 else self.counter(name, block)
        stage = ZERO if stages == 1 else symbol(f"{counter}_stage")
        return Slot(stage, stage, stages, counter, stages != 1 and name not in self.leaders(block))

    @cached_property
    def _scheduler(self) -> pipe.Pipeline | None:
        """The pipeline of work tiles."""
        found = (p for p in self.pipelines.values() if not p.type.dims and not p.metadata_of)
        return next(found, None)

    def counter(self, name: str, block: Block) -> str:
        """The name of the counter by which a consumer reads a pipeline. A pipeline of which it takes one stage per work
        tile shares that of the pipeline of work tiles."""
        scheduler, pipeline = self._scheduler, self.pipelines[name]
        once = scheduler is not None and pipeline.per_instance and pipeline.stages == scheduler.stages
        if scheduler and (once or self.alternates(name)):
            return short(scheduler.name)
        return short(self.leaders(block).get(name, name))

    def alternates(self, name: str) -> bool:
        """True if this one-stage buffer flips its phase exactly once per work tile, so that it can reuse the stage of
        the pipeline of work tiles, 0 or 1, as its phase."""
        pipeline = self.pipelines[name]
        return pipeline.mbarrier_release and bool(pipeline.type.dims) and not is_consumed_in_loop(self.kernel, name)

    def leaders(self, block: Block) -> dict[str, str]:
        """Pipeline -> the pipeline whose counter it shares, because each iteration uses the same stage of both."""
        return self._leaders_by_twos(block) if self.of_latents else self._leaders_of_backward

    @cached_property
    def _leaders_of_backward(self) -> dict[str, str]:
        """An iteration uses one stage of each pipeline, and only that of dS after it has released the last loaded
        tile."""
        found: dict[str, str] = {}
        steps = (op.step for op in only(self.kernel.ops(), pipe.PipelinedLoop) if not op.first)
        for ops in (self.kernel.block(step).ops for step in steps):
            taken = {op.name: op.pipeline for op in only(ops, pipe.ConsumerWait)}
            released = [taken[op.value] for op in only(ops, pipe.ConsumerRelease)]
            released = [name for name in released if not self.pipelines[name].per_instance]
            loaded = [name for name in released if name not in self.stored]
            if len(loaded) > 1 and self.kernel.stands_for != FORWARD:
                last = loaded[-1]
                same = (n for n in released if self.pipelines[n].stages == self.pipelines[last].stages)
                found |= {name: last for name in same if name != last}
        return found

    def _leaders_by_twos(self, block: Block) -> dict[str, str]:
        """Of the pipelines that are read in the same bodies, the one released last leads."""
        homes: dict[str, list[str]] = {}
        last: dict[str, int] = {}
        loops = only(self.kernel.within(block.name), pipe.PipelinedLoop)
        for body in dict.fromkeys(body for loop in loops for body in loop.bodies):
            ops = self.kernel.block(body).ops
            waits = (op for op in only(ops, pipe.ConsumerWait) if not self.pipelines[op.pipeline].exchange)
            taken = {op.name: op.pipeline for op in waits}
            for at, op in enumerate(ops):
                if isinstance(op, pipe.ConsumerRelease) and op.value in taken:
                    homes.setdefault(taken[op.value], []).append(body)
                    last[taken[op.value]] = at
        found = {name: max((r for r in homes if homes[r] == of), key=lambda r: last[r]) for name, of in homes.items()}
        return {name: leader for name, leader in found.items() if name != leader}

    def in_phase_with(self, name: str) -> str:
        """A pipeline with one stage that each iteration releases before it stores a tile of this pipeline, which has
        one stage, too. Both then always have the same phase, so one variable serves both. Empty if there is none."""
        for ops in (self.kernel.block(op.step).ops for op in only(self.kernel.ops(), pipe.PipelinedLoop)):
            at = next((i for i, op in enumerate(ops) if isinstance(op, pipe.ProducerStore) and op.pipeline == name), 0)
            taken = {op.name: op.pipeline for op in only(ops, pipe.ConsumerWait)}
            released = [taken[op.value] for op in only(ops[:at], pipe.ConsumerRelease)]
            ones = [
                other
                for other in released
                if self.pipelines[other].stages == 1 == self.pipelines[name].stages and other not in self.stored
            ]
            if ones:
                return ones[-1]
        return ""

    def starts(self, block: Block) -> Iterator[g.Counters]:
        """The ops that start the counters of a warp group."""
        ops = list(self.kernel.within(block.name))
        used = {ref for op in ops for ref in op.operands()}
        used |= {self.kernel.op(op.value).pipeline for op in only(ops, pipe.ConsumerRelease)}  # type: ignore[attr-defined]
        consumes = not any(only(ops, pipe.ProducerLoad))
        for name, pipeline in self.pipelines.items():
            if name not in used or pipeline.exchange:
                continue
            stage = "" if self.stages(name) == 1 else f"{short(name)}_stage"
            if name in self.stored:
                if name not in self.leaders(block):
                    yield from self._start_of_stored(name, block, ops, stage)
            elif is_reused(self.kernel, name) and not (consumes and self.counter(name, block) != short(name)):
                counts = "phase" if consumes or pipeline.mbarrier_release else "loads"
                first = int(pipeline.mbarrier_release and not consumes)  # all stages are free at first
                yield g.Counters(f"_start_{short(name)}_{block.name}", stage, f"{short(name)}_{counts}", first)

    def _start_of_stored(self, name: str, block: Block, ops: list[Op], stage: str) -> Iterator[g.Counters]:
        """The first stages are free, as if they had been released once: their writers start in phase 1. There is a
        phase only for a warp group that waits at an mbarrier."""
        writes = bool(block.warp_group and block.warp_group.rows)
        if self.of_latents:
            writes = any(op.pipeline == name for op in only(ops, pipe.ProducerStore))
        has_phase = self.stored[name] and not (writes and self.in_phase_with(name))
        if stage or has_phase:
            phase = f"{short(name)}_phase" if has_phase else ""
            yield g.Counters(f"_start_{short(name)}_{block.name}", stage, phase, int(writes))
