"""Rules of memory spaces, of configs for all devices, and of dropout."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.devices import CLASSES
from attngen.ir import Kernel, Module, only, tile
from attngen.tiles.sizes import elem_sizes


def memory_space(module: Module, kernel: Kernel) -> Iterator[str]:
    """Either all values have a memory space, or none has one yet, before the pass assign-memory-space."""
    spaces = {op.name: t.space for op in kernel.ops() for t in op.results().values()}
    if "?" in spaces.values() and len(set(spaces.values())) > 1:
        yield f"%{next(n for n, s in spaces.items() if s == '?')} has no memory space"


def scheduled_everywhere(module: Module, kernel: Kernel) -> Iterator[str]:
    """For each device class and element size there are configs, the last one for any number of rows, or one line `none`
    with the reason. At each element size some device class has a config."""
    if kernel.traits.adds_in_order:
        if not module.stand_ins(kernel.name):
            yield "it has ordered adds, which only warp-specialized kernels run; expected one to stand in for it"
        return
    configs = module.configs(kernel.name)
    not_fitting = [(none.device, none.elem_bytes) for none in module.not_fitting(kernel.name)]
    for size in elem_sizes(module, kernel):
        if not any(r.elem_bytes == size for r in configs):
            yield f"no device class has a config at {size} bytes"
    for device in CLASSES:
        for size in elem_sizes(module, kernel):
            mine = [r.max_rows for r in configs if (r.device, r.elem_bytes) == (device, size)]
            if (device, size) in not_fitting:
                if mine or not_fitting.count((device, size)) > 1:
                    yield f"there is a line `none` for {device} at {size} bytes, and another line"
                continue
            limits = [m for m in mine if m is not None]
            if not mine or mine[-1] is not None or mine.count(None) != 1 or limits != sorted(set(limits)):
                yield f"the row limits of {device} at {size} bytes do not rise to rows<=inf"


def dropout(module: Module, kernel: Kernel) -> Iterator[str]:
    """With dropout, a kernel that multiplies weights by V or by its gradient generates one dropout mask and applies it
    once. Other kernels have no dropout."""
    masks = list(only(kernel.ops(), tile.DropoutMask))
    applied = list(only(kernel.ops(), tile.Dropout))
    multiplied = kernel.traits.dots and not {"V", "dO"}.isdisjoint(arg.name for arg in kernel.args)
    expected = 1 if module.dropout and multiplied else 0
    if (len(masks), len(applied)) != (expected, expected):
        says = "yes" if module.dropout else "no"
        yield f"{len(masks)} dropout masks and {len(applied)} dropouts; expected {expected} of each (dropout {says})"
