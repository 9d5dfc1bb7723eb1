"""The kernels that this backend divides."""

from __future__ import annotations

from attngen.backends.base import Division
from attngen.backends.hopper import choice, gradients
from attngen.backends.hopper.facts import FORWARD, FUSED

DIVISIONS = (
    Division(
        kernel=FORWARD,
        obstacle=lambda module: choice.obstacle(module, module.kernel(FORWARD)),
        row=choice.row,
        long=choice.long_row,
        least=choice.least_rows,
        candidates=choice.candidates,
        declined=choice.declined,
    ),
    Division(
        kernel=FUSED,
        obstacle=gradients.obstacle,
        row=gradients.row,
        long=lambda module: None,
        least=lambda module, row: choice.FEW,
        candidates=lambda module: (),
        declined=gradients.declined,
    ),
)
