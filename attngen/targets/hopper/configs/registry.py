"""The kernels that this backend divides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngen.ir.graph import Config, Module
from attngen.targets.common.base import Specialization
from attngen.targets.hopper.configs import common, fused_backward, jvp, mla_decode, separate_backward
from attngen.targets.hopper.configs.sm90 import APART, DECODE, FORWARD, FUSED, TANGENTS


def _derived(
    kernel: str,
    infeasible: Callable[[Module], str],
    row: Callable[[Module, int | None, int | None, int | None], Config],
    not_preferred: Callable[[Module], str],
    beside: tuple[str, ...] = (),
) -> Specialization:
    """That of a kernel of the backward or of forward mode: it has one row, for all calls but the smallest, and no
    others are measured."""
    return Specialization(
        kernel,
        beside,
        infeasible,
        row,
        lambda module: None,
        lambda module, row: common.FEW,
        lambda module: (),
        not_preferred,
    )


def _apart(name: str) -> Specialization:
    """That of one of the kernels of dQ, dK and dV of wide heads."""
    return _derived(
        name,
        partial(separate_backward.infeasible, name),
        partial(separate_backward.config, name),
        partial(separate_backward.not_preferred, name),
        APART,
    )


SPECIALIZATIONS = (
    Specialization(
        kernel=FORWARD,
        beside=(),
        infeasible=lambda module: common.infeasible(module, module.kernel(FORWARD)),
        row=common.config,
        long=common.long_row,
        least=common.least_rows,
        candidates=common.candidates,
        not_preferred=common.not_preferred,
    ),
    Specialization(
        kernel=DECODE,
        beside=(),
        infeasible=mla_decode.infeasible,
        row=mla_decode.config,
        long=lambda module: None,
        least=mla_decode.least_rows,
        candidates=mla_decode.candidates,
        not_preferred=mla_decode.not_preferred,
    ),
    _derived(FUSED, fused_backward.infeasible, fused_backward.config, fused_backward.not_preferred),
    *map(_apart, APART),
    _derived(TANGENTS, jvp.infeasible, jvp.config, jvp.not_preferred),
)
