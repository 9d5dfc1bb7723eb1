"""Triton's interpreter without what it computes and throws away; results are the same to the bit (tests/test_interpreter.py)."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache, wraps
from typing import Any


def lighten() -> None:
    """Take three costs out of the interpreter, more than half of its time.

    For each integer sum and product it computes in 64 bits whether 32 would overflow, and asserts it in debug mode alone. For each cast
    it makes a table of all types. And for each call of a function on the device it looks through all names of Triton's language for those
    to replace.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    @wraps(interpreter._patch_builtin)
    def patch_builtin(package: Any, *others: Any) -> None:
        """Replace the functions of a package that are Triton's own, those that are not replaced already."""
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, member) for name, member in members if interpreter.tl.core.is_builtin(member)]
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, *others)

    numpy_type = interpreter._get_np_dtype
    of_number = cache(numpy_type)

    @wraps(numpy_type)
    def get_np_dtype(type_: Any) -> Any:
        """NumPy's type for the elements of a tensor of Triton's type. Types of pointers cannot be looked up."""
        return numpy_type(type_) if type_.scalar.is_ptr() else of_number(type_.scalar)

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype
