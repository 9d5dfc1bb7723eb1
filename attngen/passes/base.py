"""What a pass is: a frozen dataclass that turns a verified module into a verified module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.ir.graph import Module


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline. `phase` is the phase of what it returns."""

    name: ClassVar[str]
    phase: ClassVar[str]

    def run(self, module: Module) -> Module:
        raise NotImplementedError
