"""Which schedule row a kernel has that a backend divides into roles, or why it has none: the spec's word, then the backend's own choice."""

from __future__ import annotations

from dataclasses import replace

from attngen.backends.base import Divider
from attngen.ir.graph import Module, Row
from attngen.policy import SHORT_ROWS
from attngen.spec.model import Schedule


def choose(divider: Divider, asked: Schedule, module: Module) -> Row | str:
    """The row of a module's divided kernel; or why the kernel has none, as the end of a sentence.

    A spec that asks for the backend has its kernel divided for any number of rows, others for more than SHORT_ROWS.
    """
    if asked.backend == divider.name:
        return divider.row(module, asked.block_q, asked.block_kv, asked.stages)
    if asked.backend != "auto":
        return f"the spec says `schedule: {{backend: {asked.backend}}}`"
    if given := sorted(asked.model_dump(exclude_defaults=True)):
        return f"the spec's `schedule` has {' and '.join(given)}, which is for portable kernels unless it has `backend: {divider.name}` too"
    return divider.declined(module) or replace(divider.row(module, None, None, None), min_rows=SHORT_ROWS)
