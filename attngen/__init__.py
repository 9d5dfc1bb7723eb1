"""attngen: a compiler from declarative attention specs to Triton forward and backward kernels."""

import os

__version__ = "0.1.0"

os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")  # read when sympy is first imported; 1,000 by default, which one module exceeds
