"""The rule `wgmma-wait`: the waits for asynchronous products, and the registers that stay alive until then."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir import Kernel, Module, Op, only, pipe


def wgmma_waits(module: Module, kernel: Kernel) -> Iterator[str]:
    """A wgmma in flight is read by one wgmma_wait in its block, or by one wgmma that accumulates to it.

    The wait keeps alive all register operands of the products that it waits for.
    """
    for op in kernel.ops():
        if not isinstance(op, pipe.Wgmma):
            continue
        users = [kernel.op(name) for name in kernel.graph.successors(op.name)]
        home = kernel.graph.nodes[op.name]["block"]
        if _is_accumulated_to(kernel, op, users):
            continue
        if [type(user) for user in users] != [pipe.WgmmaWait] or kernel.graph.nodes[users[0].name]["block"] != home:
            yield f"%{op.name} is in flight; expected one wgmma_wait in @{home} to read it"
            continue
        operands, wait = tuple(_register_operands(kernel, op)), users[0]
        if isinstance(wait, pipe.WgmmaWait) and wait.keep_alive != operands:
            kept, read = (
                " and ".join(f"%{name}" for name in names) or "nothing" for names in (wait.keep_alive, operands)
            )
            yield f"%{wait.name} keeps {kept} alive; expected {read}, which the product reads from registers"


def _is_accumulated_to(kernel: Kernel, op: pipe.Wgmma, users: list[Op]) -> bool:
    """True if another wgmma of the block is the only user, and accumulates to this one."""
    after = [user for user in only(users, pipe.Wgmma) if user.acc == op.name]
    return len(users) == 1 and [kernel.block_of(user) for user in after] == [kernel.block_of(op)]


def _register_operands(kernel: Kernel, op: pipe.Wgmma) -> Iterator[str]:
    """The register operands of a wgmma and of those to which it accumulates, in the order in which they are issued."""
    before = kernel.op(op.acc) if op.acc else None
    if isinstance(before, pipe.Wgmma):
        yield from _register_operands(kernel, before)
    if kernel.type_of(op.a).space == "reg":
        yield op.a
