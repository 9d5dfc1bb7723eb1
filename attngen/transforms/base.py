"""What a pass is: a frozen dataclass that turns a verified module into a verified module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attngen.ir.graph import Module
from attngen.ir.ops import AXIS_DIM, PADDED, Arg, Checks, Load, Op, Store


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline. `phase` is the phase of what it returns."""

    name: ClassVar[str]
    phase: ClassVar[str]

    def run(self, module: Module) -> Module:
        raise NotImplementedError


def padded(op: Op, names: tuple[str, ...]) -> Op:
    """Tiles get the padded names of their dimensions, and accesses check these."""
    changed: Any = op
    if hasattr(op, "over") and changed.over in names:
        changed = replace(changed, over=PADDED[changed.over])
    if hasattr(op, "type") and not isinstance(op, Arg) or (isinstance(op, Arg) and op.role == "carry"):
        dims = tuple(PADDED[d] if d in names else d for d in changed.type.dims)
        changed = replace(changed, type=replace(changed.type, dims=dims))
    if isinstance(op, (Load, Store)):
        access = op.dst if isinstance(op, Store) else op.src
        extra: Checks = tuple((a, "always") for a in access.axes() if AXIS_DIM[a] in names)
        changed = replace(changed, check=(*changed.check, *extra))
    return changed
