"""Print, as JSON, which private interfaces of torch and Triton the runtime uses in this environment: `python -m
tests.versions.probe`."""

from __future__ import annotations

import inspect
import json
from typing import Any

import triton
from triton.compiler import CompiledKernel

from attngen.runtime import private
from tests.test_private import PRIVATE

PARTS = ("run", "function", "packed_metadata")  # of a compiled kernel; only a GPU can show that they launch it


def is_used(home: Any, name: str) -> bool:
    """Return whether the runtime keeps the private interface or an object made from it, or reads it at each call."""
    found = getattr(home, name, None)
    if name == "TensorGuards":
        return private.guard_of is not None
    return found is not None and (name == "_current_level" or any(value is found for value in vars(private).values()))


def main() -> None:
    """Print true or false for the name of each interface."""
    used = {name: is_used(home, name) for home, name in PRIVATE}
    source = inspect.getsource(CompiledKernel)
    used["knobs.runtime.launch_enter_hook.calls"] = hasattr(triton.knobs.runtime.launch_enter_hook, "calls")
    used["CompiledKernel: " + ", ".join(PARTS)] = all(
        f"self.{part}" in source or f"def {part}" in source for part in PARTS
    )
    print(json.dumps(used))


if __name__ == "__main__":
    main()
