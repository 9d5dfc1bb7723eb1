"""The list of passes, and how they run: the verifier runs after each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from attngen.builders import build_module
from attngen.builders.backward import unfused
from attngen.errors import SpecError, suggest
from attngen.ir.graph import Module, Row
from attngen.schedule.choice import choose
from attngen.schedule.pipeline_loads import PipelineLoads
from attngen.schedule.select_tiles import SelectTiles
from attngen.schedule.table import Table, committed
from attngen.spec import Spec
from attngen.targets.common.base import Division
from attngen.targets.registry import DIVIDERS, backend_of
from attngen.transforms.assign_memory_space import PlaceMemory
from attngen.transforms.base import Pass
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.transforms.dce import Dce
from attngen.transforms.dependent_launch import OverlapLaunches
from attngen.transforms.drop_unspecialized import DropUndivided
from attngen.transforms.exp2_softmax import BaseTwo
from attngen.transforms.hoist_scalars import HoistScalars
from attngen.transforms.inline_scores import InlineScores
from attngen.transforms.insert_cta_barriers import PlaceBarriers
from attngen.transforms.limit_loads import LimitLoads
from attngen.transforms.simplify import Simplify
from attngen.transforms.split_d import ShareColumns
from attngen.transforms.split_dkdv import SplitGradients
from attngen.transforms.split_kv import DealKeys
from attngen.transforms.split_loops import SplitLoops
from attngen.transforms.use_block_lists import ListTiles
from attngen.verify import verify


def passes(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> tuple[Pass, ...]:
    """The passes for a spec's module, with the spec's schedule overrides, and those of the backend that the module names.

    `tables`: measured schedules by device class, in place of those that come with attngen.
    """
    s, backend = spec.schedule, backend_of(module)
    tables = committed() if tables is None else tables
    return (
        SplitGradients(),
        ShareColumns(),
        InlineScores(),
        BaseTwo(),
        HoistScalars(),
        ClassifyTiles(),
        SplitLoops(),
        DealKeys(),
        ListTiles(),
        PlaceBarriers(),
        OverlapLaunches(),
        Simplify(),
        PlaceMemory(),
        *backend.prepare,
        SelectTiles(block_q=s.block_q, block_kv=s.block_kv, num_warps=s.warps, num_stages=s.stages, tables=tables),
        PipelineLoads(num_stages=s.stages),
        Dce(),
        *(p for divider in DIVIDERS.values() for p in divider.passes(partial(choose, divider, s, tables))),
        DropUndivided(),
        LimitLoads(),
        *backend.legalize,
    )


def stages(spec: Spec, tables: Mapping[str, Table] | None = None) -> Iterator[tuple[str, Module]]:
    """(name of the step, verified module) from the logical module, `build`, to the target one."""
    module = verify(build_module(spec))
    yield from _run(module, passes(spec, module, tables))


def _run(module: Module, steps: Iterable[Pass]) -> Iterator[tuple[str, Module]]:
    yield "build", module
    for step in steps:
        module = verify(step.run(module))
        yield step.name, module


def undivided(spec: Spec, module: Module, tables: Mapping[str, Table] | None = None) -> Iterator[str]:
    """A sentence for each kernel that a backend could divide and does not, on why; one where no kernel computes all gradients in one pass.

    `module` is the spec's, as after the pass dce.
    """
    tables = committed() if tables is None else tables
    for divider in DIVIDERS.values():
        names = {kernel.name for kernel in module.kernels}
        for division in (d for d in divider.divisions if names.issuperset({d.kernel, *d.beside})):
            if isinstance(why := choose(divider, spec.schedule, tables, division, module), str):
                yield f"On {divider.device} the kernel @{division.kernel} has no row for {divider.name}: {why}."
    one_pass = any(kernel.adds for kernel in module.kernels)
    if spec.trains and spec.schedule.order != "kv_outer" and not one_pass:
        why = unfused(spec) or "it is not known how many tiles of keys come to each tile of queries"
        yield f"No kernel computes all gradients in one pass: {why}."


def divide(module: Module, kernel: str, row: Row) -> Module:
    """The target module of one that is as after the pass dce, with one kernel divided, under a row of the row's backend."""

    def choose_it(division: Division, _: Module) -> tuple[Row, ...] | str:
        return (row,) if division.kernel == kernel else "nobody asked"

    steps = (*DIVIDERS[row.backend].passes(choose_it), DropUndivided(), LimitLoads(), *backend_of(module).legalize)
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
            return module
    return module
