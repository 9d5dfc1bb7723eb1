"""What Hopper asks of a divided kernel."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.backends.hopper.choice import is_reused, turns
from attngen.backends.hopper.facts import DEVICE, FIRST_BARRIER, NAMED_BARRIERS
from attngen.backends.hopper.sram import ring_bytes, rings, slots_of
from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Its rings fit the device's shared memory, their slots and its turns the named barriers; its tiles are of powers of two."""
    for row in module.rows(kernel.name, kernel.backend):
        if row.device != DEVICE or row.elem_bytes != 2:
            yield f"a row is for {row.device} at {row.elem_bytes} bytes; expected {DEVICE} at 2"
            continue
        need, has = ring_bytes(module, kernel, row), CLASSES[DEVICE].smem_per_block
        if need > has:
            given = f"BLOCK_KV={row.block_kv} and num_stages={row.num_stages}"
            yield f"with {given} it needs {need:,} bytes of shared memory; {DEVICE} has {has:,}"
        slots = sum(slots_of(op, row) for op in rings(kernel) if is_reused(kernel, op.name))
        most = NAMED_BARRIERS - FIRST_BARRIER - turns(kernel)
        if slots > most:
            others = ", as copies that take turns have the others" if turns(kernel) else ""
            yield f"its rings have {slots} slots; expected {most} at most, of which each takes a named barrier{others}"
        if row.block_kv & (row.block_kv - 1) or not 16 <= row.block_kv <= 256:
            yield f"BLOCK_KV={row.block_kv}; expected a power of two from 16 to 256"
