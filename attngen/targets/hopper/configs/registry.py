"""The kernels that this backend divides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngen.ir.graph import Module, Row
from attngen.targets.common.base import Division
from attngen.targets.hopper.configs import common, fused_backward, jvp, mla_decode, separate_backward
from attngen.targets.hopper.configs.sm90 import APART, DECODE, FORWARD, FUSED, TANGENTS


def _derived(
    kernel: str,
    obstacle: Callable[[Module], str],
    row: Callable[[Module, int | None, int | None, int | None], Row],
    declined: Callable[[Module], str],
    beside: tuple[str, ...] = (),
) -> Division:
    """That of a kernel of the backward or of forward mode: it has one row, for all calls but the smallest, and no others are measured."""
    return Division(kernel, beside, obstacle, row, lambda module: None, lambda module, row: common.FEW, lambda module: (), declined)


def _apart(name: str) -> Division:
    """That of one of the kernels of dQ, dK and dV of wide heads."""
    return _derived(
        name,
        partial(separate_backward.obstacle, name),
        partial(separate_backward.row, name),
        partial(separate_backward.declined, name),
        APART,
    )


DIVISIONS = (
    Division(
        kernel=FORWARD,
        beside=(),
        obstacle=lambda module: common.obstacle(module, module.kernel(FORWARD)),
        row=common.row,
        long=common.long_row,
        least=common.least_rows,
        candidates=common.candidates,
        declined=common.declined,
    ),
    Division(
        kernel=DECODE,
        beside=(),
        obstacle=mla_decode.obstacle,
        row=mla_decode.row,
        long=lambda module: None,
        least=mla_decode.least_rows,
        candidates=mla_decode.candidates,
        declined=mla_decode.declined,
    ),
    _derived(FUSED, fused_backward.obstacle, fused_backward.row, fused_backward.declined),
    *map(_apart, APART),
    _derived(TANGENTS, jvp.obstacle, jvp.row, jvp.declined),
)
