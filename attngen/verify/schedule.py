"""What devices ask: memory spaces, descriptors, schedules that fit, tiles that Triton takes."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.analysis.sram import elem_sizes, misfit
from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, PADDED, Arg, Dropout, Keep, Load


def placed(module: Module, kernel: Kernel) -> Iterator[str]:
    """Once place-memory has run, every value has a memory space."""
    spaces = {op.name: t.space for op in kernel.ops() for t in op.results().values()}
    if "?" in spaces.values() and len(set(spaces.values())) > 1:
        yield f"%{next(n for n, s in spaces.items() if s == '?')} has no memory space"


def described(module: Module, kernel: Kernel) -> Iterator[str]:
    """Loads by descriptor are of tiles of rows of one head, zeros where out of bounds, for shared memory; rows that take them are for
    devices that can."""
    by_descriptor = [op for op in kernel.ops() if isinstance(op, Load) and op.via]
    for op in by_descriptor:
        tensor, index = kernel.accessed(op)
        rows = [str(i) for i in index if str(i) in AXIS_DIM]
        whole = isinstance(tensor, Arg) and tensor.role == "in" and len(index) == 4 and [str(i) for i in index[2:]] == rows
        if op.via != "descriptor" or op.type.dtype != "T" or op.type.space not in ("sram", "?") or not whole or op.other != 0:
            yield f"%{op.name} is read via({op.via}); expected `descriptor`, of a tile %T[b, h, rows, columns] in sram whose outside is 0"
    for row in module.rows(kernel.name):
        if row.tma and not (by_descriptor and row.device in CLASSES and CLASSES[row.device].tma):
            why = f"{row.device} has no engine that reads them" if by_descriptor else f"no load of @{kernel.name} is via(descriptor)"
            yield f"{row.device}: TMA=1, but {why}"


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every row of the schedule table fits the device class it is for."""
    for row in module.rows(kernel.name):
        if row.device not in CLASSES:
            yield f"`{row.device}` is not a device class; expected one of {', '.join(CLASSES)}"
            continue
        reason = misfit(module, kernel, row)
        if reason:
            yield reason
    for unfit in module.unfit(kernel.name):
        if unfit.device not in CLASSES:
            yield f"`{unfit.device}` is not a device class; expected one of {', '.join(CLASSES)}"


def scheduled_everywhere(module: Module, kernel: Kernel) -> Iterator[str]:
    """There is a schedule for each device class and element size, ending in one for any number of rows, or one line that says
    why there is none; some class has one."""
    rows, unfit = module.rows(kernel.name), [(u.device, u.elem_bytes) for u in module.unfit(kernel.name)]
    for size in elem_sizes(module):
        if not any(r.elem_bytes == size for r in rows):
            yield f"no device class has a schedule at {size} bytes"
    for device in CLASSES:
        for size in elem_sizes(module):
            mine = [r.max_rows for r in rows if (r.device, r.elem_bytes) == (device, size)]
            if (device, size) in unfit:
                if mine or unfit.count((device, size)) > 1:
                    yield f"there is a line `none` for {device} at {size} bytes, and another line"
                continue
            limits = [m for m in mine if m is not None]
            if not mine or mine[-1] is not None or mine.count(None) != 1 or limits != sorted(set(limits)):
                yield f"the rows for {device} at {size} bytes do not rise to rows<=inf"


def powers_of_two(module: Module, kernel: Kernel) -> Iterator[str]:
    """Triton's tiles: powers of two, 16 at least, head dimensions padded to one; warps a power of two, as many as a program may have."""
    widths = {"D_QK": module.head_dim_qk, "D_V": module.head_dim_v}
    for op in kernel.ops():
        for t in op.results().values():
            for name, width in widths.items() if not (isinstance(op, Arg) and op.role in ("in", "out", "inout")) else ():
                wrong = name if width & (width - 1) else PADDED[name]
                if wrong in t.dims:
                    yield f"%{op.name} is of {wrong}; a head dimension of {width} is {'padded' if wrong == name else 'not padded'} on chip"
    for row in module.rows(kernel.name):
        for what, value, least in (("BLOCK_Q", row.block_q, 16), ("BLOCK_KV", row.block_kv, 16), ("num_warps", row.num_warps, 1)):
            if value < least or value & (value - 1):
                yield f"{row.device}: {what}={value}; Triton needs a power of two, {least} at least"
        most = 1024 // CLASSES[row.device].threads_per_warp
        if row.num_warps > most:
            yield f"{row.device}: num_warps={row.num_warps}; expected at most {most}, which are 1024 threads"
        if not 1 <= row.num_stages <= 8:
            yield f"{row.device}: num_stages={row.num_stages}; expected 1 to 8"
        if row.max_rows is not None and row.max_rows < 1:
            yield f"{row.device}: rows<={row.max_rows}; expected 1 or more"


def drops(module: Module, kernel: Kernel) -> Iterator[str]:
    """With dropout, whatever multiplies V or its gradient is dropped, from one draw; without it nothing is."""
    draws = [op for op in kernel.ops() if isinstance(op, Keep)]
    drop = [op for op in kernel.ops() if isinstance(op, Dropout)]
    expected = 1 if module.dropout and kernel.dots else 0
    if (len(draws), len(drop)) != (expected, expected):
        says = "yes" if module.dropout else "no"
        yield f"{len(draws)} draws and {len(drop)} values dropped; expected {expected} of each (dropout {says})"
