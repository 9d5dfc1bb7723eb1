"""attngen: a compiler from declarative attention specs to Triton forward and backward kernels.

`attngen.build` compiles a spec and imports the module; `attngen.load` imports a module that `attngen build` has written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "build", "load"]

os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")  # read when sympy is first imported; 1,000 by default, which one module exceeds

if TYPE_CHECKING:
    from attngen.api import build as build
    from attngen.api import load as load
else:

    def __getattr__(name: str) -> Any:
        """Import what the API gives when it is first asked for, so that `import attngen` stays cheap."""
        if name not in __all__:
            raise AttributeError(f"module `attngen` has no attribute `{name}`")
        import importlib

        api = importlib.import_module("attngen.api")
        globals().update(build=api.build, load=api.load)
        return globals()[name]
