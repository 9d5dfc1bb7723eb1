"""The kernels that this backend divides."""

from __future__ import annotations

from attngen.backends.base import Division
from attngen.backends.hopper import apart, choice, gradients
from attngen.backends.hopper.facts import APART, FORWARD, FUSED


def _apart(name: str) -> Division:
    """That of one of the kernels of dQ, dK and dV of wide heads."""
    return Division(
        kernel=name,
        beside=APART,
        obstacle=lambda module: apart.obstacle(module, name),
        row=lambda module, block_q, block_kv, slots: apart.row(module, name, block_q, block_kv, slots),
        long=lambda module: None,
        least=lambda module, row: choice.FEW,
        candidates=lambda module: (),
        declined=lambda module: apart.declined(module, name),
    )


DIVISIONS = (
    Division(
        kernel=FORWARD,
        beside=(),
        obstacle=lambda module: choice.obstacle(module, module.kernel(FORWARD)),
        row=choice.row,
        long=choice.long_row,
        least=choice.least_rows,
        candidates=choice.candidates,
        declined=choice.declined,
    ),
    Division(
        kernel=FUSED,
        beside=(),
        obstacle=gradients.obstacle,
        row=gradients.row,
        long=lambda module: None,
        least=lambda module, row: choice.FEW,
        candidates=lambda module: (),
        declined=gradients.declined,
    ),
    *map(_apart, APART),
)
