"""The kernels that this backend divides."""

from __future__ import annotations

from attngen.backends.base import Division
from attngen.backends.hopper import choice
from attngen.backends.hopper.facts import FORWARD

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
)
