"""The list of passes, and their execution with the verifier after each pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from attngen.builders import build_module
from attngen.builders.backward import unfused
from attngen.errors import SpecError, suggest
from attngen.ir.module import Config, Module
from attngen.schedule.choice import choose
from attngen.schedule.pipeline_loads import PipelineLoads
from attngen.schedule.select_tiles import SelectTiles
from attngen.schedule.table import Table, committed
from attngen.spec import Spec
from attngen.targets.common.base import Specialization
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.transforms.assign_memory_space import AssignMemorySpace
from attngen.transforms.base import Pass
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.transforms.dce import Dce
from attngen.transforms.dependent_launch import DependentLaunch
from attngen.transforms.drop_unspecialized import DropUnspecialized
from attngen.transforms.exp2_softmax import Exp2Softmax
from attngen.transforms.hoist_scalars import HoistScalars
from attngen.transforms.inline_scores import InlineScores
from attngen.transforms.insert_cta_barriers import InsertCtaBarriers
from attngen.transforms.limit_loads import LimitLoads
from attngen.transforms.simplify import Simplify
from attngen.transforms.split_d import SplitD
from attngen.transforms.split_dkdv import SplitDkdv
from attngen.transforms.split_kv import SplitKV
from attngen.transforms.split_loops import SplitLoops
from attngen.transforms.use_block_lists import UseBlockLists
from attngen.verify import verify

# Tests that lower many modules for another purpose set it to False, because verification takes three quarters of the
# time. Then only the last module is verified.
VERIFY_EACH = True


def passes(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> tuple[Pass, ...]:
    """Return the passes for a spec's module, with the spec's schedule overrides and the module's backend.

    tables: measured schedules by device class, instead of those that come with attngen.
    """
    s, backend = spec.schedule, backend_of(module)
    tables = committed() if tables is None else tables
    return (
        SplitDkdv(),
        SplitD(),
        InlineScores(),
        Exp2Softmax(),
        HoistScalars(),
        ClassifyTiles(),
        SplitLoops(),
        SplitKV(),
        UseBlockLists(),
        InsertCtaBarriers(),
        DependentLaunch(),
        Simplify(),
        AssignMemorySpace(),
        *backend.prepare,
        SelectTiles(block_q=s.block_q, block_kv=s.block_kv, num_warps=s.warps, num_stages=s.stages, tables=tables),
        PipelineLoads(num_stages=s.stages),
        Dce(),
        *(
            p
            for specializer in SPECIALIZERS.values()
            for p in specializer.passes(partial(choose, specializer, s, tables))
        ),
        DropUnspecialized(),
        LimitLoads(),
        *backend.legalize,
    )


def stages(spec: Spec, tables: Mapping[str, Table] | None = None) -> Iterator[tuple[str, Module]]:
    """Yield (name of the step, verified module) from the logical module, `build`, to the target module."""
    module = verify(build_module(spec))
    yield from _run(module, passes(spec, module, tables))


def _run(module: Module, steps: Iterable[Pass]) -> Iterator[tuple[str, Module]]:
    """Yield (name of the step, module) for the initial module and after each step. Each is verified, or only the last
    one if VERIFY_EACH is false."""
    yield "build", module
    *rest, last = steps
    for step in rest:
        module = step.run(module)
        yield step.name, verify(module) if VERIFY_EACH else module
    yield last.name, verify(last.run(module))


def unspecialized(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> Iterator[str]:
    """Yield one sentence per kernel that a backend could warp-specialize and does not, with the reason; also one if no
    kernel computes all gradients (fused backward).

    module: the spec's module after the pass dce.
    """
    tables = committed() if tables is None else tables
    for specializer in SPECIALIZERS.values():
        names = {kernel.name for kernel in module.kernels}
        for specialization in (d for d in specializer.specializations if names.issuperset({d.kernel, *d.requires})):
            if isinstance(why := choose(specializer, spec.schedule, tables, specialization, module), str):
                name = specialization.kernel
                yield f"On {specializer.device} the kernel @{name} has no config for {specializer.name}: {why}."
    is_fused = any(kernel.adds_in_order for kernel in module.kernels)
    if spec.trains and spec.schedule.order != "kv_outer" and not is_fused:
        why = unfused(spec) or "it is not known how many tiles of keys come to each tile of queries"
        yield f"No kernel computes all gradients in one pass: {why}."


def specialize(module: Module, kernel: str, config: Config) -> Module:
    """Return the target module of a module after the pass dce, with one kernel warp-specialized under a config of the
    config's backend."""

    def choose_it(specialization: Specialization, _: Module) -> tuple[Config, ...] | str:
        return (config,) if specialization.kernel == kernel else "nobody asked"

    steps = (
        *SPECIALIZERS[config.backend].passes(choose_it),
        DropUnspecialized(),
        LimitLoads(),
        *backend_of(module).legalize,
    )
    *_, (_, made) = _run(module, steps)
    return made


def lower(spec: Spec, after: str | None = None, tables: Mapping[str, Table] | None = None) -> Module:
    """Return the module after a pass, or after all of them; SpecError for a pass that does not exist.

    tables: measured schedules by device class, instead of those that come with attngen.
    """
    built = verify(build_module(spec))
    names = ["build", *(p.name for p in passes(spec, built))]
    if after is not None and after not in names:
        raise SpecError(f"`{after}` is not a pass; {suggest(after, names)}")
    for name, module in _run(built, passes(spec, built, tables)):
        if name == after:
            return module if VERIFY_EACH else verify(module)
    return module
