"""The rules of programmatic dependent launch: programs that start before the previous launch has ended, and wait for
its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product, takewhile

from attngen.ir import TENSORS, Host, Kernel, Module, Op, launch, only, tile


def dependent_launch(module: Module, kernel: Kernel) -> Iterator[str]:
    """A kernel waits at most once, outside of loops and before it stores. A kernel that waits launches no dependents
    itself, because they would wait for this kernel only.

    A kernel launches dependents early only if some kernel waits.
    """
    found = list(only(kernel.ops(), tile.GridDependencyWait))
    if kernel.launches_dependents and not any(k.traits.waits for k in module.kernels):
        yield "it launches dependents, and no kernel waits for that; expected `grid_dependency_wait` in one"
    if not found:
        return
    if len(found) > 1 or found[0] not in kernel.block("entry").ops:
        yield f"it waits for the previous launch {len(found)} times, or in a loop; expected once, in @entry"
    for op in _before_wait(kernel):
        if isinstance(op, (tile.Loop, tile.Scatter, tile.Store)):
            yield f"%{op.name} may run before the previous launch has ended; expected it after `grid_dependency_wait`"
    if kernel.launches_dependents:
        yield "it both waits for the previous launch and launches dependents; expected one of the two"


def host_dependent_launch(module: Module, host: Host) -> Iterator[str]:
    """A kernel that waits is launched after one that launches dependents, with nothing but views, allocations and
    scalars between. Before it waits, it reads nothing that the previous kernel stores.

    All earlier launches have ended then, because the previous kernel does not wait itself.
    """
    kernels = {kernel.name: kernel for kernel in module.kernels}
    for block in host.blocks:
        before: launch.Launch | None = None
        for op in block.ops:
            if isinstance(op, launch.Launch) and op.kernel in kernels and (kernel := kernels[op.kernel]).traits.waits:
                if before is None or not kernels[before.kernel].launches_dependents:
                    what = f"it follows @{before.kernel}" if before else "no launch is right before it"
                    expected = "a kernel that launches dependents"
                    yield f"launch @{op.kernel}: its programs start early, and {what}; expected {expected}"
                else:
                    stored = [a.name for a in kernels[before.kernel].args if a.role in TENSORS[1:]]
                    for name, made in product(_read_early(kernel), stored):
                        if _roots(host, _given(op, name)) & _roots(host, _given(before, made)):
                            reads = f"it reads %{name} before it waits for @{before.kernel}"
                            yield f"launch @{op.kernel}: {reads}, which stores it as %{made}"
            if isinstance(op, launch.Launch):
                before = op if op.kernel in kernels else None
            elif not isinstance(op, (tile.Arg, tile.Map, launch.View)) and not (
                isinstance(op, launch.Alloc) and op.fill is None
            ):
                before = None


def _before_wait(kernel: Kernel) -> list[Op]:
    """The ops that programs of a waiting kernel may run before the previous launch has ended."""
    return list(takewhile(lambda op: not isinstance(op, tile.GridDependencyWait), kernel.block("entry").ops))


def _read_early(kernel: Kernel) -> list[str]:
    """The tensors that a kernel reads before it waits: in its ops, and to find its splits of the keys."""
    found = ["CACHE_SEQLENS", *(at.tensor for _, at in kernel.kv_split.reads)] if kernel.kv_split else []
    for source in (
        kernel.op(ref) for op in _before_wait(kernel) if not isinstance(op, tile.Base) for ref in op.operands()
    ):
        tensor = kernel.op(source.src.tensor) if isinstance(source, tile.Base) else source
        found += [tensor.name] if isinstance(tensor, tile.Arg) and tensor.role in TENSORS else []
    return found


def _given(op: launch.Launch, name: str) -> str:
    """The host's value for an argument of a launch."""
    return dict(op.args).get(name, name)


def _roots(host: Host, ref: str) -> set[str]:
    """The tensors of which a value may be a view; for a result of an `if`, those of both branches."""
    name, _, field = ref.partition(".")
    op = host.by_name.get(name)
    if isinstance(op, launch.View):
        return _roots(host, op.src)
    if not isinstance(op, launch.If):
        return {ref}
    given = [
        dict(last.values).get(field)
        for b in (op.then, op.orelse)
        if b
        for last in only(host.block(b).ops[-1:], tile.Yield)
    ]
    return {root for made in given if made for root in _roots(host, made)}
