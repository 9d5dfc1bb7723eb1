"""attngen: a compiler from declarative attention specs to Triton forward and backward kernels.

`attngen.build` compiles a spec and imports the module; `attngen.load` imports a module that `attngen build` has
written. `attngen.flex_attention` is FlexAttention's call; `attngen.spec_from_mods` writes the spec of FlexAttention's
functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "build", "flex_attention", "load", "spec_from_mods"]
_HOMES = {
    "build": "attngen.api",
    "load": "attngen.api",
    "flex_attention": "attngen.frontends.flex",
    "spec_from_mods": "attngen.frontends.specs",
}

# Sympy reads this when it is first imported. The default is 1,000, which one module exceeds.
os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")

if TYPE_CHECKING:
    from attngen.api import build as build
    from attngen.api import load as load
    from attngen.frontends.flex import flex_attention as flex_attention
    from attngen.frontends.specs import spec_from_mods as spec_from_mods
else:

    def __getattr__(name: str) -> Any:
        """Import a function of the API on first access, so that `import attngen` is cheap."""
        if name not in _HOMES:
            raise AttributeError(f"module `attngen` has no attribute `{name}`")
        import importlib

        from attngen.cache.collector import paused

        with paused():
            globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return globals()[name]
