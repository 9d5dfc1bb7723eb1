"""Imports generated modules from source in memory, under names that callers choose, so that the checked bytes are the
ones that run.

Python's own import would read the files a second time, and might use bytecode from `__pycache__` without reading their
text.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
import weakref
from collections.abc import Mapping, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Source(ExecutionLoader):
    """Loads a package whose Python files are in memory, by name."""

    def __init__(self, package: str, folder: Path, files: Mapping[str, bytes]) -> None:
        self.package, self.folder = package, folder
        self.files = {name: importlib.util.decode_source(data) for name, data in files.items()}

    def file_of(self, fullname: str) -> str:
        """Return the name of the file of the package itself, or of a module in it."""
        return "__init__.py" if fullname == self.package else f"{fullname.removeprefix(self.package + '.')}.py"

    def is_package(self, fullname: str) -> bool:
        return fullname == self.package

    def get_filename(self, fullname: str) -> str:
        return str(self.folder / self.file_of(fullname))

    def get_source(self, fullname: str) -> str:
        return self.files[self.file_of(fullname)]

    def exec_module(self, module: ModuleType) -> None:
        """Run a module. Triton, which compiles the text of functions, and tracebacks see the same text, even if the
        file has changed."""
        path, text = self.get_filename(module.__name__), self.get_source(module.__name__)
        entry = len(text), None, text.splitlines(keepends=True), path  # None: not compared with the file
        linecache.cache[path] = entry
        weakref.finalize(module, _forget_text, module.__name__, path, entry).atexit = False
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of packages that `import_source` has imported. No other finder does, because the paths of these
    packages are empty."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        loader = getattr(parent, "__loader__", None)
        if isinstance(loader, _Source) and loader.file_of(fullname) in loader.files:
            return importlib.util.spec_from_loader(fullname, loader)
        return None


sys.meta_path.append(_Finder())


def read_source(folder: Path) -> dict[str, bytes]:
    """Return the Python files of a generated module, by name. Raise OSError if they cannot be read, or if `__init__.py`
    is missing."""
    others = sorted(path for path in folder.glob("*.py") if path.is_file())
    return {path.name: path.read_bytes() for path in dict.fromkeys((folder / "__init__.py", *others))}


def spec_of(name: str, folder: Path, files: Mapping[str, bytes]) -> ModuleSpec:
    """Return the import spec of a package with the text of its files; `folder` is the path that they show."""
    spec = importlib.util.spec_from_loader(name, _Source(name, folder, files))
    assert spec is not None
    spec.submodule_search_locations = []
    return spec


def import_source(name: str, folder: Path, files: Mapping[str, bytes]) -> ModuleType:
    """Import a generated module from the text of its files under an absolute name, in place of an earlier one. On
    failure nothing of it remains in sys.modules."""
    forget(name)
    spec = spec_of(name, folder, files)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        forget(name)
        raise
    return module


def import_folder(folder: Path, name: str) -> ModuleType:
    """Import a generated module from its folder, as `import_source` does."""
    return import_source(name, folder, read_source(folder))


def forget(name: str) -> None:
    """Remove a package and its modules from sys.modules."""
    for stale in [m for m in list(sys.modules) if m == name or m.startswith(f"{name}.")]:
        del sys.modules[stale]


def _forget_text(name: str, path: str, entry: Any) -> None:
    """Remove the text of a freed module from linecache, and its kernels from the registries of this version of
    Triton."""
    if linecache.cache.get(path) is entry:  # not the entry of a newer copy
        del linecache.cache[path]
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for key in [key for key in list(registry) if key.startswith(f"{name}:")]:
        registry.pop(key, None)
    interpreted = getattr(sys.modules.get("triton.runtime.interpreter"), "InterpretedFunction", None)
    rewritten = getattr(interpreted, "rewritten_fn", {})
    for function in [function for function in list(rewritten) if function.__module__ == name]:
        rewritten.pop(function, None)
