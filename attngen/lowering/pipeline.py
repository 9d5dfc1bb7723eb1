"""The list of passes, and how they run: the verifier runs after each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from attngen.builders import build_module
from attngen.builders.backward import unfused
from attngen.errors import SpecError, suggest
from attngen.ir.graph import Config, Module
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

# The test suite sets it to False where it lowers many modules to look at something else: verification takes three quarters
# of the time. Only the last module is verified then.
VERIFY_EACH = True


def passes(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> tuple[Pass, ...]:
    """The passes for a spec's module, with the spec's schedule overrides, and those of the backend that the module
    names.

    `tables`: measured schedules by device class, in place of those that come with attngen.
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
    """(name of the step, verified module) from the logical module, `build`, to the target one."""
    module = verify(build_module(spec))
    yield from _run(module, passes(spec, module, tables))


def _run(module: Module, steps: Iterable[Pass]) -> Iterator[tuple[str, Module]]:
    """(name of the step, module) for the module as it is, then after each step; verified each, or the last one alone
    where VERIFY_EACH is false."""
    yield "build", module
    *rest, last = steps
    for step in rest:
        module = step.run(module)
        yield step.name, verify(module) if VERIFY_EACH else module
    yield last.name, verify(last.run(module))


def unspecialized(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> Iterator[str]:
    """A sentence for each kernel that a backend could divide and does not, on why; one where no kernel computes all
    gradients in one pass.

    `module` is the spec's, as after the pass dce.
    """
    tables = committed() if tables is None else tables
    for specializer in SPECIALIZERS.values():
        names = {kernel.name for kernel in module.kernels}
        for specialization in (d for d in specializer.specializations if names.issuperset({d.kernel, *d.beside})):
            if isinstance(why := choose(specializer, spec.schedule, tables, specialization, module), str):
                yield f"On {specializer.device} the kernel @{specialization.kernel} has no row for {specializer.name}: {why}."
    one_pass = any(kernel.adds for kernel in module.kernels)
    if spec.trains and spec.schedule.order != "kv_outer" and not one_pass:
        why = unfused(spec) or "it is not known how many tiles of keys come to each tile of queries"
        yield f"No kernel computes all gradients in one pass: {why}."


def specialize(module: Module, kernel: str, config: Config) -> Module:
    """The target module of one that is as after the pass dce, with one kernel divided, under a row of the row's
    backend."""

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
    """The module after a pass, or after all of them; SpecError for a pass that does not exist.

    `tables`: measured schedules by device class, in place of those that come with attngen.
    """
    built = verify(build_module(spec))
    names = ["build", *(p.name for p in passes(spec, built))]
    if after is not None and after not in names:
        raise SpecError(f"`{after}` is not a pass; {suggest(after, names)}")
    for name, module in _run(built, passes(spec, built, tables)):
        if name == after:
            return module if VERIFY_EACH else verify(module)
    return module
