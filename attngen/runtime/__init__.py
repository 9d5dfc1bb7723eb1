"""The part of a call that is the same in every generated module, as plain Python.

`bundle` concatenates the files of this folder. Each generated folder contains the result as runtime.py, so that it
needs only torch and triton.
"""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from pathlib import Path

# The files of the bundle in order: each imports only earlier ones.
FILES = (
    "private",
    "shards",
    "memory",
    "checks",
    "cache",
    "warp_specialized",
    "descriptors",
    "launch",
    "remembered",
    "blocks",
    "promises",
    "dropout",
    "gradients",
    "outputs",
    "refusals",
    "signature",
    "operators",
    "serving",
    "unknown",
    "complete",
    "module",
)


@cache
def bundle() -> str:
    """Concatenate the source files: all imports once, at the top, then the rest of each file unchanged."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    bodies = []
    for name in FILES:
        source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        title, end = "", 0
        for node in ast.parse(source).body:
            if isinstance(node, ast.Expr) and not end:
                title = str(ast.get_docstring(ast.parse(source))).splitlines()[0]
            elif isinstance(node, ast.Import):
                plain |= {f"import {alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                if not (node.module or "").startswith("attngen."):
                    names.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
            else:
                break
            end = node.end_lineno or 0
        heading = textwrap.fill(f"# {'-' * 20} {title}", 120, subsequent_indent="# ")
        bodies.append(f"{heading}\n\n{''.join(source.splitlines(keepends=True)[end:]).strip()}\n")
    first = "from __future__ import annotations"
    names.pop("__future__")
    found = [f"from {module} import {', '.join(sorted(names[module], key=str.lower))}" for module in names]
    third = {"import torch", "import triton"}
    standard = [*sorted(plain - third), *sorted(found)]
    head = (
        '"""The runtime: checks, allocation, launches and autograd, the same in every module that attngen generates."""'
    )
    return "\n\n".join([head, first, "\n".join(standard), "\n".join(sorted(third))]) + "\n\n" + "\n\n".join(bodies)
