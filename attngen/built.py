"""The package of the modules that `attngen.build` and `attngen.load` import, as `attngen.built.causal_mqa_0123456789abcdef`.

Such a name has the module's own name and a digest of its code: two modules that share a name and differ are two modules, and torch.compile
and pickle find both. Another process finds those that are in the cache by name alone, as when it unpickles one.
"""

from __future__ import annotations

from attngen.store import root

__path__ = [str(root())]
