"""The package of the modules that `attngen.build` and `attngen.load` import, such as
`attngen.built.causal_mqa_0123456789abcdef`.

The name of such a module consists of its own name and a digest of its code, so torch.compile and pickle can distinguish
two modules that have the same name and different code. Another process can import a module of the cache by this name,
for example to unpickle it. Modules are not searched in a folder of `__path__`, but in the cache, which checks them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from attngen.cache.loader import spec_of
from attngen.cache.store import kept

__path__ = []  # only _Finder finds modules, in the cache


class _Finder(MetaPathFinder):
    """Finds modules of the cache by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        found = kept(name) if parent == __name__ else None
        return spec_of(fullname, found.folder, found.code) if found else None


sys.meta_path.append(_Finder())
