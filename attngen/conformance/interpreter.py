"""Triton's interpreter, which runs kernels without a GPU: a check that it works, and patches that make it faster."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from functools import cache, wraps
from importlib.metadata import version
from typing import Any

from attngen.errors import AttngenError


def check_interpreter() -> None:
    """Raise AttngenError, with the fix, if kernels are interpreted and the interpreter does not work with the installed
    numpy."""
    from attngen.runtime.launch import interpreter_fails

    if os.environ.get("TRITON_INTERPRET") == "1" and (why := interpreter_fails(version("triton"), version("numpy"))):
        raise AttngenError(why)


def lighten() -> None:
    """Remove computations from the interpreter whose results it discards, more than half of its time. Kernels' results
    are the same to the bit.

    For each integer sum and product it computes in 64 bits whether 32 would overflow, but asserts it only in debug
    mode. For each cast it builds a table of all types. For each call of a device function it searches all names of
    Triton's language for those to replace. For each tensor it rebuilds its type and the attributes of its shape. Other
    versions of Triton, with other parts, are left unchanged. Does nothing if kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if not _is_known(interpreter) or hasattr(interpreter._patch_builtin, "__wrapped__"):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_names_once(interpreter)
    _look_up_types(interpreter)
    _make_types_once(interpreter.tl.core)


def _is_known(interpreter: Any) -> bool:
    """True if this version of Triton has the replaced parts, in the known form."""
    try:
        core, options = interpreter.tl.core, interpreter.interpreter_builder.options
        made = [[*inspect.signature(c.__init__).parameters] for c in (core.block_type, core.tensor)]
        parts = (
            interpreter._patch_builtin,
            interpreter._patch_attr,
            interpreter._get_np_dtype,
            core.is_builtin,
            core.constexpr,
        )
        plain = options.sanitize_overflow in (True, False) and vars(core.float32) is not None
    except (AttributeError, TypeError):
        return False
    return plain and all(map(callable, parts)) and made == [["self", "element_ty", "shape"], ["self", "handle", "type"]]


def _patch_names_once(interpreter: Any) -> None:
    """Search the names of each package only once."""
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    @wraps(interpreter._patch_builtin)
    def patch_builtin(package: Any, *others: Any) -> None:
        """Replace Triton's builtin functions in a package, except those that are already replaced."""
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, member) for name, member in members if interpreter.tl.core.is_builtin(member)]
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, *others)

    interpreter._patch_builtin = patch_builtin


def _look_up_types(interpreter: Any) -> None:
    """Look up NumPy's type for each of Triton's types only once."""
    numpy_type = interpreter._get_np_dtype
    of_number = cache(numpy_type)

    @wraps(numpy_type)
    def get_np_dtype(type_: Any) -> Any:
        """Return NumPy's type for the elements of a tensor of Triton's type. Types of pointers are not cached."""
        return numpy_type(type_) if type_.scalar.is_ptr() else of_number(type_.scalar)

    interpreter._get_np_dtype = get_np_dtype


def _make_types_once(core: Any) -> None:
    """Build one type per element type and shape, and per type the attributes of its tensors only once."""
    made: dict[Any, Any] = {}
    of_block, of_tensor = core.block_type.__init__, core.tensor.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = None
        if not element_ty.is_ptr():
            key = cls, element_ty, *[s.value if isinstance(s, core.constexpr) else s for s in shape]
        found = made.get(key)
        if found is None:
            found = object.__new__(cls)
            found.key = key
        return found

    @wraps(of_block)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if len(vars(self)) > 1:  # already initialised
            return
        of_block(self, element_ty, shape)
        if self.key is not None:
            made[self.key] = self

    @wraps(of_tensor)
    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        attributes = vars(type).get("of_tensors")
        if attributes is None:
            of_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(attributes, handle=handle)

    core.block_type.__new__, core.block_type.__init__, core.tensor.__init__ = new, init, init_tensor
