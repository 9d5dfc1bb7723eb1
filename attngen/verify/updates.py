"""Rules of reads and updates: of values in place, of tiles that loops rewrite, and of tensors between barriers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from attngen.ir import Kernel, Module, Op, only, tile


def rewrites(module: Module, kernel: Kernel) -> Iterator[str]:
    """A tensor of role `inout` is loaded and then stored once, at the same index, in the body of a loop over its
    tiles."""
    for arg in (a for a in kernel.args if a.role == "inout"):
        found = [op for op in only(kernel.ops(), tile.Load, tile.Store) if kernel.accessed(op)[0] is arg]
        if [type(op) for op in found] != [tile.Load, tile.Store]:
            yield f"%{arg.name} has {len(found)} loads and stores; expected one load, and then one store"
            continue
        (read, first), (write, second) = (
            (kernel.graph.nodes[op.name]["block"], kernel.accessed(op)[1]) for op in found
        )
        if (read, first) != (write, second):
            yield f"%{arg.name} is loaded at one index and stored at another; expected a tile that is rewritten"
        around = {loop.var for loop in kernel.loops_around(read)[:1] if loop.cls != "all"}
        if around.isdisjoint(map(str, first)):
            yield f"%{arg.name} is rewritten outside of a loop over its tiles"


def live(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every value is read, also those that a loop carries, except the results of ops that have an effect."""
    named = {name for op in kernel.ops() for name in kernel.traits.scalars_of(op)}
    for op in kernel.ops():
        parameter = isinstance(op, tile.Arg) and op.role != "carry"
        parameter |= isinstance(op, tile.Loop) and op.body in kernel.traits.storing
        acts = isinstance(op, (tile.Barrier, tile.Scatter, tile.Store, tile.GridDependencyWait, tile.Yield))
        if not (parameter or acts or kernel.graph.out_degree(op.name) or op.name in named):
            yield f"%{op.name} is read by nothing"


def in_place(module: Module, kernel: Kernel) -> Iterator[str]:
    """A value that is updated in place has no other reader. Carried and masked values are updated in place: each is one
    variable in the printed kernel."""
    readers: dict[str, list[str]] = {}
    for op in kernel.ops():
        for ref in op.operands():
            readers.setdefault(ref, []).append(op.name)
    for op in kernel.ops():
        updated = (
            [r for _, r in op.carry] if isinstance(op, tile.Loop) else [op.value] if isinstance(op, tile.Mask) else []
        )
        for ref in updated:
            start = kernel.op(ref)
            local = kernel.graph.nodes[start.name]["block"] == kernel.graph.nodes[op.name]["block"]
            if not local or (isinstance(op, tile.Loop) and not isinstance(start, (tile.Init, tile.Loop, tile.Arg))):
                expected = "an init, a carried value or, for a mask, a value of the same block"
                yield f"%{op.name} updates %{ref} in place; expected {expected}"
            if isinstance(start, tile.Arg) and start.role != "carry":
                yield f"%{op.name} updates %{ref} in place, which is an argument of the kernel"
            if others := [r for r in readers[ref] if r != op.name]:
                yield f"%{op.name} updates %{ref} in place, which %{others[0]} reads too"
        if isinstance(op, tile.Loop) and len(set(updated)) < len(updated):
            yield f"%{op.name} starts two carried values from one"
        if isinstance(op, tile.Yield):
            passed = [r for f, r in op.values if r != f]
            if reused := [r for r in passed if passed.count(r) > 1 or isinstance(kernel.op(r), tile.Arg)]:
                yield f"%{op.name} passes %{reused[0]} to a field of another value; expected a new value for each field"
    for body in dict.fromkeys(loop.body for loop in kernel.loops):
        with_body = [loop for loop in kernel.loops if loop.body == body]
        for before, after in zip(with_body, with_body[1:]):
            if after.carry != tuple((f, f"{before.name}.{f}") for f, _ in before.carry):
                yield f"%{after.name} runs @{body} after %{before.name} and does not start from what that one carries"


def barriers(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop that rewrites tiles comes right after a barrier, so that its loads cannot run ahead of earlier stores.

    There is also a barrier between two loops if one writes a tensor that the other one reads or writes.
    """
    yield from _unordered_accesses(kernel)
    for block in kernel.blocks:
        for before, op in zip((None, *block.ops), block.ops):
            if (
                isinstance(op, tile.Loop)
                and op.body in kernel.traits.rewriting
                and not isinstance(before, tile.Barrier)
            ):
                yield f"%{op.name} loads tiles that other threads have stored; expected a barrier right before it"


def _unordered_accesses(kernel: Kernel) -> Iterator[str]:
    """Accesses, with no barrier between them, to elements that other threads write. Such elements are in tensors of
    role `scratch`, and in outputs that two ops write."""
    writes = [
        tensor for tensor, access in _accesses(kernel, kernel.block("entry").ops) if not isinstance(access, tile.Gather)
    ]
    shared = {a.name for a in kernel.args if a.role == "scratch" or (a.role == "out" and writes.count(a.name) > 1)}
    written: dict[str, str] = {}  # tensor -> the block that wrote to it since the last barrier
    filled: set[str] = set()
    for op in kernel.block("entry").ops if shared else ():
        written = {} if isinstance(op, tile.Barrier) else written
        block = op.body if isinstance(op, tile.Loop) else "entry"
        accesses = [(tensor, access) for tensor, access in _accesses(kernel, (op,)) if tensor in shared]
        in_loop = {
            tensor for tensor, access in accesses if isinstance(op, tile.Loop) and not isinstance(access, tile.Gather)
        }
        for tensor, access in accesses:
            reads = isinstance(access, tile.Gather)
            if tensor in written and (reads or written[tensor] != block):
                by = f"@{written[tensor]} writes"
                yield f"%{access.name} in @{block} accesses %{tensor}, which {by}; expected a barrier between them"
            elif reads and tensor in in_loop:
                yield f"%{access.name} in @{block} reads %{tensor}, which other iterations of the loop write"
            if reads and tensor not in filled:
                yield f"%{access.name} reads %{tensor}, which nothing has filled"
        stored = [(tensor, access) for tensor, access in accesses if not isinstance(access, tile.Gather)]
        once = {tensor for tensor, access in stored if isinstance(access, tile.Store) or access.op == "put"}
        writes_of = Counter(tensor for tensor, _ in stored)
        yield from (
            f"@{block} writes elements of %{tensor} twice, in no fixed order"
            for tensor in sorted(once)
            if writes_of[tensor] > 1
        )
        written |= {tensor: block for tensor, _ in stored}
        filled |= {tensor for tensor, access in accesses if isinstance(access, tile.Store)}  # a store writes all tiles


def _accesses(kernel: Kernel, ops: Iterable[Op]) -> Iterator[tuple[str, tile.Gather | tile.Scatter | tile.Store]]:
    """Yield (tensor, op) for each op that writes or gathers, in these ops and in the loops among them."""
    for op in ops:
        if isinstance(op, tile.Loop):
            yield from _accesses(kernel, kernel.block(op.body).ops)
        elif isinstance(op, (tile.Gather, tile.Scatter, tile.Store)):
            source = kernel.op(op.src.tensor if isinstance(op, tile.Gather) else op.dst.tensor)
            yield (source.src.tensor if isinstance(source, tile.Base) else source.name), op
