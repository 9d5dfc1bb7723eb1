"""The element type of outputs, where the table of element types names one for them apart from that of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.ir.dtypes import result_type
from attngen.ir.graph import Kernel, Module
from attngen.ir.host import Alloc, Host, View
from attngen.ir.ops import Arg, Map, Op, Store

_OUTPUTS = ("O", "tO")  # and its tangent


def with_results(module: Module) -> Module:
    """The module with the type of its outputs: of the tensor O, of its views, and of the values that kernels store to
    it.

    A module whose outputs have the type of q, k and v stays as it is.
    """
    dtype = result_type(module.dtypes)
    if dtype == "T":
        return module

    def of_kernel(kernel: Kernel) -> Kernel:
        stored = {op.value for op in kernel.ops() if isinstance(op, Store) and op.dst.tensor in _OUTPUTS}
        change = _typed({*_OUTPUTS} | stored, dtype)
        return kernel.rewrite(lambda _, op: change(op))

    def of_host(host: Host) -> Host:
        views = {op.name for op in host.ops() if isinstance(op, View) and op.src in _OUTPUTS}
        return host.rewrite(_typed({*_OUTPUTS} | views, dtype))

    return replace(module.map_kernels(of_kernel), hosts=tuple(map(of_host, module.hosts)))


def _typed(names: set[str], dtype: str) -> Callable[[Op], list[Op]]:
    """What gives the values of these names the element type."""

    def change(op: Op) -> list[Op]:
        if isinstance(op, (Alloc, Arg, Map, View)) and op.name in names:
            return [replace(op, type=replace(op.type, dtype=dtype))]
        return [op]

    return change
