"""Python's garbage collector, kept from running while the compiler is at work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no cycles meanwhile. With torch in memory a collection looks at a million objects, and a compilation
    makes little garbage."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
