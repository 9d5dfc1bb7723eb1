"""Which schedule rows a kernel has that a backend divides into roles, or why it has none.

The spec's word comes first, then what was measured, then what the backend expects to be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attngen.heuristics import NOISE, SHORT_ROWS
from attngen.ir.graph import Config, Module
from attngen.schedule.table import Table, schedule_of
from attngen.spec.model import Schedule
from attngen.targets.common.base import Specialization, Specializer
from attngen.tiles.classes import ranges


def choose(
    specializer: Specializer,
    asked: Schedule,
    tables: Mapping[str, Table],
    specialization: Specialization,
    module: Module,
) -> tuple[Config, ...] | str:
    """The rows of the divided kernels of one kernel, one for each; or why there are none, as the end of a sentence.

    A spec that asks for the backend has the kernel divided for any number of rows, others for more than the backend
    says at least. Its tiles are those of the first kernel that the backend divides, the forward. Others are divided
    where they would be without a word.
    """
    if all(kernel.name != specialization.kernel for kernel in module.kernels):
        return "there is no such kernel of this spec"
    table = tables.get(specializer.device)
    if asked.backend == specializer.name and specialization is not specializer.specializations[0]:
        return specialization.not_preferred(module) or _expected(specialization, module)
    if asked.backend == specializer.name:
        tiles = asked.block_q, asked.block_kv, asked.stages
        if any(tiles):
            return (specialization.row(module, *tiles),)
        measured = _faster(specializer, specialization, table, module, None)
        return (next(iter(measured)),) if measured else _expected(specialization, module)
    if asked.backend != "auto":
        return f"the spec says `schedule: {{backend: {asked.backend}}}`"
    if given := sorted(asked.model_dump(exclude_defaults=True)):
        return (
            f"the spec's `schedule` has {' and '.join(given)}, which is for portable kernels unless it has `backend: {specializer.name}` "
            f"too"
        )
    return _automatic(specializer, specialization, table, module)


def _expected(specialization: Specialization, module: Module) -> tuple[Config, ...]:
    """The rows that the backend expects to be the fastest."""
    usual, long = specialization.row(module, None, None, None), specialization.long(module)
    return (replace(usual, max_rows=long.min_rows), long) if long else (usual,)


def _automatic(
    specializer: Specializer, specialization: Specialization, table: Table | None, module: Module
) -> tuple[Config, ...] | str:
    """The rows of kernels of a spec that leaves the choice to attngen.

    It is the row that is the fastest in the range of the most rows; of several that are as fast, the one that is faster
    than the portable kernel in the most ranges below. Where it is not and another one is, that has a kernel for fewer
    rows. Where nothing was measured, the backend's own expectation stands.
    """
    not_preferred = specialization.not_preferred(module)
    best = _faster(specializer, specialization, table, module, None)
    if best == {}:
        return f"the portable kernel was measured to be as fast (attngen/schedule, {table.device if table else ''})"
    if best is None and not_preferred:
        return not_preferred
    kernel = module.kernel(specialization.kernel)
    measured = (most for most, _ in reversed(ranges(kernel)) if most and (kernel.kv_split or most > SHORT_ROWS))
    below = {most: _faster(specializer, specialization, table, module, most) for most in measured}

    def bounded(config: Config) -> Config:
        """It, for the rows from which on it is faster than the portable kernel."""
        for most in (most for most in below if config.max_rows is None or most < config.max_rows):
            faster = below[most]
            if not_preferred if faster is None else schedule_of(config) not in map(schedule_of, faster):
                return replace(config, min_rows=most)
        return replace(config, min_rows=specialization.least(module, config))

    if best is None:
        usual, *long = _expected(specialization, module)
        return (bounded(usual), *long)
    alike = [config for config, ms in best.items() if (1 - NOISE) * ms <= min(best.values())]
    chosen = min(map(bounded, alike), key=lambda config: config.min_rows)
    others = below.get(chosen.min_rows)
    return (bounded(replace(next(iter(others)), max_rows=chosen.min_rows)), chosen) if others else (chosen,)


def _faster(
    specializer: Specializer, specialization: Specialization, table: Table | None, module: Module, max_rows: int | None
) -> dict[Config, float] | None:
    """Rows that this module can have, and that were measured to be faster than the portable kernel in a range, with
    their times.

    They are in order, the fastest first. None if none was measured.
    """
    able = {str(schedule_of(row)): row for row in specialization.candidates(module)}
    if table is None or not able:
        return None
    kernel, elem_bytes = module.kernel(specialization.kernel), next(iter(able.values())).elem_bytes
    found = table.warp_specialized(module, kernel, elem_bytes, max_rows, specializer.name)
    usable = {row: ms for row, ms in (found or {}).items() if str(schedule_of(row)) in able}
    return usable if usable or found == {} else None
