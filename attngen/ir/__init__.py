"""The tile-schedule IR: ops by dialect (`tile`, `pipe`, `launch`), kernels and modules, expressions, text.

`from attngen.ir import Kernel, tile` imports a name of FILES, or a dialect. Other names are imported from their files.
Names are looked up when they are first used, so that element types and names of tensors, which the command line needs,
come without sympy and networkx.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

FILES = (
    "core",
    "dims",
    "expr",
    "expr_text",
    "fields",
    "grid",
    "op",
    "kernel",
    "module",
    "launch",
)  # as in __init__.pyi
DIALECTS = ("tile", "pipe", "gl", "launch")


def __getattr__(name: str) -> Any:
    if name not in DIALECTS and not name.startswith("_"):
        for file in FILES:
            found = vars(import_module(f"{__name__}.{file}")).get(name)
            if found is not None and not isinstance(found, ModuleType):
                globals()[name] = found
                return found
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
