"""Importing a generated module from its folder, under a name that the caller chooses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_folder(folder: Path, name: str) -> ModuleType:
    """Import a generated module from its folder, wherever that is, under an absolute name, anew. Nothing of it stays if that fails."""
    _forget(name)
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        _forget(name)
        raise
    return module


def _forget(name: str) -> None:
    """Remove a package and what is below it from the imported modules."""
    for stale in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[stale]
