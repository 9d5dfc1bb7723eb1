"""The dtype of outputs, if the table of element types gives them another one than q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.ir import Host, Kernel, Module, Op, launch, only, tile
from attngen.ir.dtypes import result_type

_OUTPUTS = ("O", "tO")  # the output and its tangent


def with_results(module: Module) -> Module:
    """The module with the output dtype: for the tensor O, its views, and the values that kernels store to it.

    A module whose outputs have the type of q, k and v stays as it is.
    """
    dtype = result_type(module.dtypes)
    if dtype == "T":
        return module

    def of_kernel(kernel: Kernel) -> Kernel:
        stored = {op.value for op in only(kernel.ops(), tile.Store) if op.dst.tensor in _OUTPUTS}
        change = _typed({*_OUTPUTS} | stored, dtype)
        return kernel.rewrite(lambda _, op: change(op))

    def of_host(host: Host) -> Host:
        views = {op.name for op in only(host.ops(), launch.View) if op.src in _OUTPUTS}
        return host.rewrite(_typed({*_OUTPUTS} | views, dtype))

    return replace(module.map_kernels(of_kernel), hosts=tuple(map(of_host, module.hosts)))


def _typed(names: set[str], dtype: str) -> Callable[[Op], list[Op]]:
    """Casts the named outputs to the output dtype."""

    def change(op: Op) -> list[Op]:
        if isinstance(op, (launch.Alloc, tile.Arg, tile.Map, launch.View)) and op.name in names:
            return [replace(op, type=replace(op.type, dtype=dtype))]
        return [op]

    return change
