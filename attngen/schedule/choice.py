"""Choice of the configs of a kernel that a backend warp-specializes, or the reason why it has none.

The spec's schedule has priority, then measurements, then the backend's expectation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attngen.heuristics import NOISE, SHORT_ROWS
from attngen.ir import Config, Module
from attngen.schedule.table import Table, schedule_of
from attngen.spec.sections import Schedule
from attngen.targets.common.base import Specialization, Specializer
from attngen.tiles.classes import ranges


def choose(
    specializer: Specializer,
    asked: Schedule,
    tables: Mapping[str, Table],
    specialization: Specialization,
    module: Module,
) -> tuple[Config, ...] | str:
    """Return one config per warp-specialized variant of a kernel, or the reason why there is none, as the end of a
    sentence.

    If the spec asks for the backend, its first kernel (the forward pass) is warp-specialized for any number of rows,
    with the spec's tiles; otherwise for more rows than the backend's minimum. Its other kernels are warp-specialized if
    they would be without the request.
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
            f"the spec's `schedule` has {' and '.join(given)}, which is for portable kernels unless it has "
            f"`backend: {specializer.name}` too"
        )
    return _automatic(specializer, specialization, table, module)


def _expected(specialization: Specialization, module: Module) -> tuple[Config, ...]:
    """Return the configs that the backend expects to be the fastest."""
    usual, long = specialization.row(module, None, None, None), specialization.long(module)
    return (replace(usual, max_rows=long.min_rows), long) if long else (usual,)


def _automatic(
    specializer: Specializer, specialization: Specialization, table: Table | None, module: Module
) -> tuple[Config, ...] | str:
    """Return the configs of a kernel whose spec leaves the choice to attngen.

    The result is the fastest config in the range of the most rows; among equally fast ones, the config that is faster
    than the portable kernel in the most ranges below. If another config is faster in lower ranges, it gets an
    additional kernel for fewer rows. Without measurements the backend's expectation is used.
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
        """Return the config with the smallest `min_rows` from which on it is faster than the portable kernel."""
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
    """Return the configs of this module that were measured to be faster than the portable kernel in a range, with their
    times.

    The fastest comes first. None if none was measured.
    """
    able = {str(schedule_of(config)): config for config in specialization.candidates(module)}
    if table is None or not able:
        return None
    kernel, elem_bytes = module.kernel(specialization.kernel), next(iter(able.values())).elem_bytes
    found = table.warp_specialized(module, kernel, elem_bytes, max_rows, specializer.name)
    usable = {config: ms for config, ms in (found or {}).items() if str(schedule_of(config)) in able}
    return usable if usable or found == {} else None
