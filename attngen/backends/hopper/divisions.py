"""The kernels that this backend divides."""

from __future__ import annotations

from attngen.backends.base import Division
from attngen.backends.hopper import choice, gradients
from attngen.backends.hopper.facts import BY_KEY, FORWARD, FUSED

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
        kernel=BY_KEY,
        obstacle=gradients.obstacle,
        row=gradients.row,
        long=lambda module: None,
        least=lambda module, row: choice.FEW,
        candidates=lambda module: (),
        declined=gradients.declined,
    ),
    Division(
        kernel=FUSED,
        obstacle=lambda module: gradients.obstacle(module, FUSED),
        row=gradients.row,
        long=lambda module: None,
        least=lambda module, row: choice.FEW,
        candidates=lambda module: (),
        declined=lambda module: gradients.declined(module, FUSED),
    ),
)
