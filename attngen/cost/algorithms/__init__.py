"""Attention algorithms from the literature, written in the IR. The emitted schedule is compared with them; they are
never emitted.

Both algorithms obey every rule of the logical phase.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from attngen.ir import Kernel, Module
from attngen.ir.parser import parse_module

KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "standard": {"forward": ("scores", "softmax", "output"), "backward": ("dv", "dp", "ds", "dq", "dk")},
    "flash1": {"forward": ("fwd_start", "fwd"), "backward": ("bwd_start", "bwd")},
}


@cache
def algorithm(name: str) -> Module:
    """The IR module of the algorithm `standard` or `flash1`."""
    source = resources.files(__name__) / f"{name}.ir"
    return parse_module(source.read_text(encoding="utf-8"), str(source))


def kernels(name: str, direction: str) -> tuple[Kernel, ...]:
    """The kernels of an algorithm's `forward` or `backward`, in the order in which they run."""
    return tuple(algorithm(name).kernel(kernel) for kernel in KERNELS[name][direction])
