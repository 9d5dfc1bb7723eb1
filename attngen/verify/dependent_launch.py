"""The rules of launches that overlap: programs that start before the launch before has ended, and wait for its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product, takewhile

from attngen.ir.graph import Kernel, Module
from attngen.ir.host import Alloc, Host, If, Launch, View
from attngen.ir.ops import TENSORS, Arg, Base, GridDependencyWait, Loop, Map, Op, Scatter, Store, Yield


def waits(module: Module, kernel: Kernel) -> Iterator[str]:
    """A kernel waits once, outside of loops and before it stores. It lets no others start early then, as these would
    wait for it alone.

    One lets others start early only where some kernel waits.
    """
    found = [op for op in kernel.ops() if isinstance(op, GridDependencyWait)]
    if kernel.launches_dependents and not any(k.waits for k in module.kernels):
        yield "it lets the next launch start early, and no kernel waits for the launch before; expected `grid_dependency_wait` in one"
    if not found:
        return
    if len(found) > 1 or found[0] not in kernel.block("entry").ops:
        yield f"it waits for the launch before {len(found)} times, or in a loop; expected once, in @entry"
    for op in _before_wait(kernel):
        if isinstance(op, (Loop, Scatter, Store)):
            yield f"%{op.name} may run before the launch before has ended; expected loops and stores after `grid_dependency_wait`"
    if kernel.launches_dependents:
        yield "it both waits for the launch before and lets the next one start early; expected one of the two"


def overlaps(module: Module, host: Host) -> Iterator[str]:
    """Programs that wait are launched after those of a kernel that lets them start, with no other work between them,
    but for views. Before they wait, they read nothing that it stores.

    All launches before that one have ended then, as it waits for none itself.
    """
    kernels = {kernel.name: kernel for kernel in module.kernels}
    for block in host.blocks:
        before: Launch | None = None
        for op in block.ops:
            if isinstance(op, Launch) and op.kernel in kernels and (kernel := kernels[op.kernel]).waits:
                if before is None or not kernels[before.kernel].launches_dependents:
                    what = f"it follows @{before.kernel}" if before else "no launch is right before it"
                    yield f"launch @{op.kernel}: its programs start early, and {what}; expected a kernel that releases"
                else:
                    stored = [a.name for a in kernels[before.kernel].args if a.role in TENSORS[1:]]
                    for name, made in product(_read_early(kernel), stored):
                        if _roots(host, _given(op, name)) & _roots(host, _given(before, made)):
                            yield f"launch @{op.kernel}: it reads %{name} before it waits for @{before.kernel}, which stores it as %{made}"
            if isinstance(op, Launch):
                before = op if op.kernel in kernels else None
            elif not isinstance(op, (Arg, Map, View)) and not (isinstance(op, Alloc) and op.fill is None):
                before = None


def _before_wait(kernel: Kernel) -> list[Op]:
    """The ops of a kernel that waits which its programs may run before the launch before has ended."""
    return list(takewhile(lambda op: not isinstance(op, GridDependencyWait), kernel.block("entry").ops))


def _read_early(kernel: Kernel) -> list[str]:
    """The tensors that a kernel reads before it waits: in its ops, and to find the parts of its keys."""
    found = ["CACHE_SEQLENS", *(at.tensor for _, at in kernel.kv_split.reads)] if kernel.kv_split else []
    for source in (kernel.op(ref) for op in _before_wait(kernel) if not isinstance(op, Base) for ref in op.operands()):
        tensor = kernel.op(source.src.tensor) if isinstance(source, Base) else source
        found += [tensor.name] if isinstance(tensor, Arg) and tensor.role in TENSORS else []
    return found


def _given(op: Launch, name: str) -> str:
    """The host's value for an argument of a launch."""
    return dict(op.args).get(name, name)


def _roots(host: Host, ref: str) -> set[str]:
    """The tensors of which a value may be a view: of a result of an `if`, those of both branches."""
    name, _, field = ref.partition(".")
    op = host.by_name.get(name)
    if isinstance(op, View):
        return _roots(host, op.src)
    if not isinstance(op, If):
        return {ref}
    given = [
        dict(last.values).get(field)
        for b in (op.then, op.orelse)
        if b
        for last in host.block(b).ops[-1:]
        if isinstance(last, Yield)
    ]
    return {root for made in given if made for root in _roots(host, made)}
