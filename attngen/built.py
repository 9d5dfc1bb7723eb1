"""The package of the modules that `attngen.build` and `attngen.load` import, as `attngen.built.causal_mqa_0123456789abcdef`.

Such a name has the module's own name and a digest of its code: two modules that share a name and differ are two modules, and torch.compile
and pickle find both. Another process finds those that are in the cache by name alone, as when it unpickles one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from attngen.store import root

__path__ = [str(root())]


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
