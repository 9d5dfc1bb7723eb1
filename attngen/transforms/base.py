"""The base class of passes: a frozen dataclass that maps a verified module to a verified module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attngen.ir import AXIS_DIM, PADDED, Checks, Module, Op, tile


@dataclass(frozen=True)
class Pass:
    """One step of the pass pipeline. `phase` is the phase of the module that it returns."""

    name: ClassVar[str]
    phase: ClassVar[str]

    def run(self, module: Module) -> Module:
        raise NotImplementedError


def padded(op: Op, names: tuple[str, ...]) -> Op:
    """Return the op with the named dimensions replaced by their padded names, and with bounds checks along them."""
    changed: Any = op
    if hasattr(op, "over") and changed.over in names:
        changed = replace(changed, over=PADDED[changed.over])
    if hasattr(op, "type") and not isinstance(op, tile.Arg) or (isinstance(op, tile.Arg) and op.role == "carry"):
        dims = tuple(PADDED[d] if d in names else d for d in changed.type.dims)
        changed = replace(changed, type=replace(changed.type, dims=dims))
    if isinstance(op, (tile.Load, tile.Store)):
        access = op.dst if isinstance(op, tile.Store) else op.src
        extra: Checks = tuple((a, "always") for a in access.axes() if AXIS_DIM[a] in names)
        changed = replace(changed, check=(*changed.check, *extra))
    return changed
