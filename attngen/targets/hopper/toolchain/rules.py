"""What Hopper asks of a divided kernel."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.graph import Kernel, Module, Row
from attngen.ir.ops import AXIS_DIM
from attngen.ir.pipe import Ring, Take, Work
from attngen.targets.hopper.configs.common import (
    PLACE_SLOTS,
    barriers_of,
    clearing,
    handed_over,
    is_taken_in_turns,
    room_of,
    takes_from,
    turns,
)
from attngen.targets.hopper.configs.head_dims import is_power_of_two, piece_of
from attngen.targets.hopper.configs.sm90 import DEVICE, FIRST_BARRIER, NAMED_BARRIERS
from attngen.targets.hopper.toolchain.resources import ring_bytes, rings, slots_of
from attngen.tiles.sizes import tile_width


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Its rings fit the device's shared memory, their slots and its turns the named barriers; tiles, or pieces, are of powers of two."""
    yield from _widths(module, kernel)
    for row in module.rows(kernel.name, kernel.backend):
        if row.device != DEVICE or row.elem_bytes != 2:
            yield f"a row is for {row.device} at {row.elem_bytes} bytes; expected {DEVICE} at 2"
            continue
        yield from _counted_wrongly(kernel, row)
        need, has = ring_bytes(module, kernel, row), room_of(kernel.resident)
        if need > has:
            given = f"{AXIS_DIM[kernel.loop_axis]}={row.rows_of(kernel.loop_axis)} and num_stages={row.num_stages}"
            yield f"with {given} it needs {need:,} bytes of shared memory; {_who(kernel)} has {has:,}"
        for op in rings(kernel):
            if barriers_of(kernel, op.name) and (who := _meets_nowhere(kernel, op.name)):
                yield f"@{who} takes from %{op.name}, and meets at no named barrier; expected counted(yes)"
        slots = sum(slots_of(op, row) * barriers_of(kernel, op.name) for op in rings(kernel))
        most = NAMED_BARRIERS - FIRST_BARRIER - turns(kernel) - len(clearing(kernel))
        if slots > most:
            others = ", as copies that take turns have the others" if turns(kernel) else ""
            yield f"the slots of its rings take {slots} named barriers; expected {most} at most{others}"
        if not is_power_of_two(visited := row.rows_of(kernel.loop_axis)) or not 16 <= visited <= 256:
            yield f"{AXIS_DIM[kernel.loop_axis]}={visited}; expected a power of two from 16 to 256"


def _meets_nowhere(kernel: Kernel, ring: str) -> str:
    """A role that takes from a ring, and has no part of the program's rows: consumers and the producer alone meet at named barriers."""
    return next((b.name for b in kernel.roles if b.role and not b.role.rows and takes_from(kernel, b, ring)), "")


def _counted_wrongly(kernel: Kernel, row: Row) -> Iterator[str]:
    """A counted ring that each copy has of its own, and takes from in each turn, has a phase of its own.

    Others have that of the tile of the grid: places two slots, and each ring that is taken once for a tile one.
    """
    bodies = {op.body for op in kernel.ops() if isinstance(op, Work)}
    for ring in (op for op in rings(kernel) if op.counted and not (op.each and is_taken_in_turns(kernel, op.name))):
        homes = {kernel.graph.nodes[op.name]["block"] for op in kernel.ops() if isinstance(op, Take) and op.ring == ring.name}
        if homes - bodies:
            yield f"%{ring.name} is counted, and is taken in @{min(homes - bodies)}; expected it once for each tile of the grid"
        elif (slots := slots_of(ring, row)) != (most := 1 if ring.type.dims else PLACE_SLOTS):
            yield f"%{ring.name} has {slots} slots and is counted; expected {most}"


def _who(kernel: Kernel) -> str:
    """What has a program's shared memory, as the start of a sentence's end."""
    return f"each of {kernel.resident} programs on a multiprocessor of {DEVICE}" if kernel.resident > 1 else DEVICE


def _widths(module: Module, kernel: Kernel) -> Iterator[str]:
    """What is wrong with the columns of tiles: buffers in shared memory, and values in registers, have powers of two of them."""
    padded, (qk, v) = not is_power_of_two(module.head_dim_v), (module.head_dim_qk, tile_width(module.head_dim_v))
    wrong = {"D_V" if padded else "D_V_PAD", "D_QK_PAD"}
    for op in kernel.ops():
        for t in op.results().values():
            if t.space != "hbm" and wrong.intersection(t.dims):
                yield f"%{op.name} is of {min(wrong.intersection(t.dims))}; expected D_QK, and D_V {'padded' if padded else 'as it is'}"
    for op in rings(kernel):
        if kernel.adds and op.columns != (wanted := _pieces_of_sums(module, kernel, op)):
            found = f"pieces of {op.columns}" if op.columns else f"whole tiles of {qk}"
            yield f"%{op.name} has {found} columns; expected {f'columns({wanted})' if wanted else 'whole tiles'}"
        elif op.columns and not (is_power_of_two(op.columns) and 16 <= op.columns <= 256):
            yield f"%{op.name} has pieces of {op.columns} columns; expected a power of two from 16 to 256"
        elif "D_QK" in op.type.dims and not (op.columns or is_power_of_two(qk)):
            yield f"%{op.name} has whole tiles of {qk} columns; expected columns({piece_of(qk)})"
        if op.type.dims and op.type.dims[-1].isdigit() and 2 * int(op.type.dims[-1]) != v:
            yield f"%{op.name} has tiles of {op.type.dims[-1]} columns; expected {v // 2}, half of an output"


def _pieces_of_sums(module: Module, kernel: Kernel, ring: Ring) -> int:
    """The columns of a ring's pieces in a kernel whose sums lie in pieces as Q and K do, and those of dQ in parts of them; 0 for none."""
    piece = piece_of(module.head_dim_qk) if "D_QK" in ring.type.dims else 0
    return piece // kernel.sharing_role.copies if ring.name in handed_over(kernel) else piece
