"""The kernels that have a warp-specialized form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngen.ir import Config, Module
from attngen.targets.common.base import Specialization
from attngen.targets.hopper.configs import common, forward, fused_backward, jvp, mla_decode, separate_backward
from attngen.targets.hopper.configs.sm90 import DECODE, FORWARD, FUSED, JVP, SEPARATE_BACKWARD


def _derivative(
    kernel: str,
    infeasible: Callable[[Module], str],
    config: Callable[[Module, int | None, int | None, int | None], Config],
    not_preferred: Callable[[Module], str],
    requires: tuple[str, ...] = (),
) -> Specialization:
    """Return the specialization of a backward or forward-mode kernel. It has one config, for all calls except the
    smallest; no other configs are measured.

    requires: other kernels that a module must have, too; without them, no reason is given why it has no such kernel.
    """
    return Specialization(
        kernel,
        requires,
        infeasible,
        config,
        lambda module: None,
        lambda module, config: common.FEW_ROWS,
        lambda module: (),
        not_preferred,
    )


def _separate_backward(name: str) -> Specialization:
    return _derivative(
        name,
        partial(separate_backward.infeasible, name),
        partial(separate_backward.config, name),
        partial(separate_backward.not_preferred, name),
        SEPARATE_BACKWARD,
    )


SPECIALIZATIONS = (
    Specialization(
        kernel=FORWARD,
        requires=(),
        infeasible=lambda module: forward.infeasible(module, module.kernel(FORWARD)),
        row=forward.config,
        long=forward.long_config,
        least=forward.least_rows,
        candidates=forward.candidates,
        not_preferred=forward.not_preferred,
    ),
    Specialization(
        kernel=DECODE,
        requires=(),
        infeasible=mla_decode.infeasible,
        row=mla_decode.config,
        long=lambda module: None,
        least=mla_decode.least_rows,
        candidates=mla_decode.candidates,
        not_preferred=mla_decode.not_preferred,
    ),
    _derivative(FUSED, fused_backward.infeasible, fused_backward.config, fused_backward.not_preferred),
    *map(_separate_backward, SEPARATE_BACKWARD),
    _derivative(JVP, jvp.infeasible, jvp.config, jvp.not_preferred),
)
