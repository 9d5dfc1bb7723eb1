"""What devices ask: memory spaces, a schedule for each of them, dropout from one draw."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Dropout, DropoutMask
from attngen.tiles.sizes import elem_sizes


def placed(module: Module, kernel: Kernel) -> Iterator[str]:
    """Once assign-memory-space has run, every value has a memory space."""
    spaces = {op.name: t.space for op in kernel.ops() for t in op.results().values()}
    if "?" in spaces.values() and len(set(spaces.values())) > 1:
        yield f"%{next(n for n, s in spaces.items() if s == '?')} has no memory space"


def scheduled_everywhere(module: Module, kernel: Kernel) -> Iterator[str]:
    """There is a schedule for each device class and element size, ending in one for any number of rows, or one line
    that says why there is none; some class has one."""
    if kernel.adds:
        if not module.stand_ins(kernel.name):
            yield "it adds to what others add to, and runs divided alone; expected a divided kernel to stand in for it"
        return
    rows, not_fitting = module.configs(kernel.name), [(u.device, u.elem_bytes) for u in module.not_fitting(kernel.name)]
    for size in elem_sizes(module, kernel):
        if not any(r.elem_bytes == size for r in rows):
            yield f"no device class has a schedule at {size} bytes"
    for device in CLASSES:
        for size in elem_sizes(module, kernel):
            mine = [r.max_rows for r in rows if (r.device, r.elem_bytes) == (device, size)]
            if (device, size) in not_fitting:
                if mine or not_fitting.count((device, size)) > 1:
                    yield f"there is a line `none` for {device} at {size} bytes, and another line"
                continue
            limits = [m for m in mine if m is not None]
            if not mine or mine[-1] is not None or mine.count(None) != 1 or limits != sorted(set(limits)):
                yield f"the rows for {device} at {size} bytes do not rise to rows<=inf"


def drops(module: Module, kernel: Kernel) -> Iterator[str]:
    """With dropout, whatever multiplies V or its gradient is dropped, from one draw; without it nothing is."""
    draws = [op for op in kernel.ops() if isinstance(op, DropoutMask)]
    drop = [op for op in kernel.ops() if isinstance(op, Dropout)]
    multiplied = kernel.dots and not {"V", "dO"}.isdisjoint(arg.name for arg in kernel.args)
    expected = 1 if module.dropout and multiplied else 0
    if (len(draws), len(drop)) != (expected, expected):
        says = "yes" if module.dropout else "no"
        yield f"{len(draws)} draws and {len(drop)} values dropped; expected {expected} of each (dropout {says})"
