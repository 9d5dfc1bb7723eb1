"""The kernels that this backend divides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngen.backends.base import Division
from attngen.backends.hopper import apart, choice, gradients, latents, tangents
from attngen.backends.hopper.facts import APART, DECODE, FORWARD, FUSED, TANGENTS
from attngen.ir.graph import Module, Row


def _derived(
    kernel: str,
    obstacle: Callable[[Module], str],
    row: Callable[[Module, int | None, int | None, int | None], Row],
    declined: Callable[[Module], str],
    beside: tuple[str, ...] = (),
) -> Division:
    """That of a kernel of the backward or of forward mode: it has one row, for all calls but the smallest, and no others are measured."""
    return Division(kernel, beside, obstacle, row, lambda module: None, lambda module, row: choice.FEW, lambda module: (), declined)


def _apart(name: str) -> Division:
    """That of one of the kernels of dQ, dK and dV of wide heads."""
    return _derived(name, partial(apart.obstacle, name), partial(apart.row, name), partial(apart.declined, name), APART)


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
        kernel=DECODE,
        beside=(),
        obstacle=latents.obstacle,
        row=latents.row,
        long=lambda module: None,
        least=latents.least_rows,
        candidates=latents.candidates,
        declined=latents.declined,
    ),
    _derived(FUSED, gradients.obstacle, gradients.row, gradients.declined),
    *map(_apart, APART),
    _derived(TANGENTS, tangents.obstacle, tangents.row, tangents.declined),
)
