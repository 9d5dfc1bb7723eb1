"""The package of the modules that `attngen.build` and `attngen.load` import, as
`attngen.built.causal_mqa_0123456789abcdef`.

Such a name has the module's own name and a digest of its code: two modules that share a name and differ are two
modules, and torch.compile and pickle find both. Another process finds those that are in the cache by name alone, as
when it unpickles one. They are found in no folder of a path, but by the cache, which checks them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from attngen.cache.loader import spec_of
from attngen.cache.store import kept

__path__ = []  # modules are found in the cache alone, by _Finder


class _Finder(MetaPathFinder):
    """Finds modules of the cache by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        found = kept(name) if parent == __name__ else None
        return spec_of(fullname, found.folder, found.code) if found else None


sys.meta_path.append(_Finder())
