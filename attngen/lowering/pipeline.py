"""The order of the passes, and their execution with the verifier after each pass.

`passes` lists those of portable kernels, with the backend's own at two places: `prepare` and `legalize`. Between dce
and drop-unspecialized, each specializer in SPECIALIZERS adds its passes, which derive warp-specialized kernels.
Hopper's passes are listed in targets/hopper/passes/__init__.py. They change a forward in this order:

    warp-specialize            a producer warp and consumer warp groups, under one config or two
    hoist-bias                 ALiBi: a term per column and a term per row
    split-boundary-masks       one mask op per bound of the mask, skipped in tiles that the bound does not cut
    insert-pipelines           loads move to the producer, and reach consumers through pipelines
    async-mma                  dot becomes wgmma and wgmma_wait
    software-pipeline-softmax  the softmax of a tile overlaps P V of the previous tile
    split-softmax              the wait for that product comes between two halves of the exponentials
    defer-row-reduction        row sums are reduced across threads once, after the loop
    skip-masked-tiles          an instance skips tiles that are fully masked for its own rows
    persistent-scheduler       a loop over work tiles from a global counter
    ping-pong                  barriers around the consumers' wgmmas (FlashAttention-3)
    legalize-gluon             register layouts, pins at waits, TMA stores, base pointers

Then drop-unspecialized removes kernels that only run warp-specialized if that was not possible. limit-loads and
`legalize` change only portable kernels.

From the target module, the passes `lowering` of a specializer make the statements that are printed: for Hopper
lower-pipelines and assign-barriers. The text of a module is that of its target module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from attngen.builders import build_module
from attngen.builders.backward import unfused
from attngen.errors import SpecError, suggest
from attngen.ir import Config, Module
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

# If False, only the last module is verified. Tests that lower many modules for another purpose set it so, because
# verification takes three quarters of the time.
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


def stages(
    spec: Spec, tables: Mapping[str, Table] | None = None, verify_each: bool = True
) -> Iterator[tuple[str, Module]]:
    """Yield (name of the pass, module after it), from `build`, the logical module, to the target module.

    verify_each: verify the module after each pass; otherwise only the first and the last one.
    """
    module = verify(build_module(spec))
    yield from _run(module, passes(spec, module, tables), verify_each)


def _run(module: Module, to_run: Iterable[Pass], verify_each: bool = True) -> Iterator[tuple[str, Module]]:
    """Yield (`build`, module) for the initial module, then (name of the pass, module) after each pass. Each module is
    verified, or only the last one if `verify_each` or VERIFY_EACH is false."""
    yield "build", module
    *rest, last = to_run
    for step in rest:
        module = step.run(module)
        yield step.name, verify(module) if verify_each and VERIFY_EACH else module
    yield last.name, verify(last.run(module))


def unspecialized(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> Iterator[str]:
    """Yield one sentence per kernel that a backend could warp-specialize and does not, with the reason. A last sentence
    says why the module has no fused backward, which exists only warp-specialized.

    module: the spec's module after the pass dce.
    """
    tables = committed() if tables is None else tables
    for specializer in SPECIALIZERS.values():
        names = {kernel.name for kernel in module.kernels}
        for specialization in (s for s in specializer.specializations if names.issuperset({s.kernel, *s.requires})):
            if isinstance(why := choose(specializer, spec.schedule, tables, specialization, module), str):
                name = specialization.kernel
                yield f"On {specializer.device} the kernel @{name} has no config for {specializer.name}: {why}."
    is_fused = any(kernel.traits.adds_in_order for kernel in module.kernels)
    if spec.trains and spec.schedule.order != "kv_outer" and not is_fused:
        why = unfused(spec) or "it is not known how many programs add to a tile of dQ before each one"
        yield f"There is no fused backward: {why}."


def specialize(module: Module, kernel: str, config: Config) -> Module:
    """Return the target module of a module after the pass dce, with one kernel warp-specialized under a config of the
    config's backend."""

    def choose_one(specialization: Specialization, _: Module) -> tuple[Config, ...] | str:
        return (config,) if specialization.kernel == kernel else "another kernel is specialized"

    to_run = (
        *SPECIALIZERS[config.backend].passes(choose_one),
        DropUnspecialized(),
        LimitLoads(),
        *backend_of(module).legalize,
    )
    *_, (_, target) = _run(module, to_run)
    return target


def lower(spec: Spec, after: str | None = None, tables: Mapping[str, Table] | None = None) -> Module:
    """Return the module after a pass, or after all of them; SpecError for a pass that does not exist.

    tables: measured schedules by device class, instead of those that come with attngen.
    """
    built = verify(build_module(spec))
    lowering = [p for specializer in SPECIALIZERS.values() for p in specializer.lowering]
    names = ["build", *(p.name for p in passes(spec, built)), *(p.name for p in lowering)]
    if after is not None and after not in names:
        raise SpecError(f"`{after}` is not a pass; {suggest(after, names)}")
    for name, module in _run(built, passes(spec, built, tables)):
        if name == after:
            return module if VERIFY_EACH else verify(module)
    for step in lowering if after else ():
        module = step.run(module)
        if step.name == after:
            return verify(module)
    return module
