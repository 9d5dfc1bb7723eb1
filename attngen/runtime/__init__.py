"""What every generated module does alike at a call, as plain Python.

`bundle` gives it as one file, which stands in each generated folder as runtime.py, so that a folder needs torch and triton alone.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

FILES = ("private", "memory", "checks", "launch", "blocks", "dropout", "gradients", "operators", "module")  # each imports those before it


@cache
def bundle() -> str:
    """The source files in one: their imports once at the top, and then the rest of each, word for word."""
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
        bodies.append(f"# {'-' * 20} {title}\n\n{''.join(source.splitlines(keepends=True)[end:]).strip()}\n")
    first = "from __future__ import annotations"
    names.pop("__future__")
    found = [f"from {module} import {', '.join(sorted(names[module], key=str.lower))}" for module in names]
    third = {"import torch", "import triton"}
    standard = [*sorted(plain - third), *sorted(found)]
    head = '"""What this module does at a call beside its kernels. Every module that attngen generates has the same file."""'
    return "\n\n".join([head, first, "\n".join(standard), "\n".join(sorted(third))]) + "\n\n" + "\n\n".join(bodies)
