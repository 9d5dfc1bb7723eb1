"""What a call launches: for each device class and call size, the kernel, portable or warp-specialized, and its
config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from attngen.cost.calls import ranges
from attngen.cost.roofline import Problem, rows_of_call
from attngen.devices import Device
from attngen.ir import Bool, Config, Host, Kernel, Module, launch, only, select, symbol, tile, to_text
from attngen.tiles.tiles import evaluate

PORTABLE = "portable, Triton"
GROUP_ROWS = "Nq·Hq/Hkv"  # queries of all heads that share a K/V head, which host programs call Gq
GROUPS = {"dq_reducer": "dQ reduction"}  # names of warp groups for readers, where they differ from those in the IR


@dataclass(frozen=True)
class Launched:
    """A kernel that calls launch on a device class, for numbers of rows above `above` and up to `most` (None: any).

    where: the condition of the host program under which it is launched, in words; empty if there is none.
    holds: the same as an expression of a call's sizes.
    """

    host: str
    where: str
    holds: Bool
    kernel: Kernel
    config: Config
    above: int
    most: int | None

    def covers(self, problem: Problem, device: Device) -> bool:
        """True if a call of these sizes launches it."""
        rows = rows_of_call(self.kernel, problem)
        if not self.above < rows <= (self.most or rows):
            return False
        group = problem.q_heads // problem.kv_heads
        known = {
            "B": problem.batch,
            "Hq": problem.q_heads,
            "Hkv": problem.kv_heads,
            "Nq": problem.n_q,
            "Nk": problem.n_kv,
            "Gq": group * problem.n_q,
            "num_SMs": device.sms,
        }
        return bool(evaluate(self.holds, known))

    @property
    def purpose(self) -> str:
        """The part of a call that the kernel computes, such as `Forward of few queries`."""
        return self.kernel.about.partition(":")[0]

    @property
    def implementation(self) -> str:
        """`portable, Triton`, or `warp-specialized` and the backend."""
        return f"warp-specialized, {self.config.backend.title()}" if self.kernel.backend else PORTABLE

    @property
    def size(self) -> str:
        """The numbers of rows by which it is chosen, as a formula."""
        rows = rows_named(self.kernel)
        if self.most is None:
            return f"{rows} > {self.above}" if self.above else "any"
        return f"{f'{self.above} < ' * bool(self.above)}{rows} ≤ {self.most}"

    @property
    def warps(self) -> str:
        """Number of warps of a program; in a warp-specialized kernel those of each warp group."""
        groups = [b for b in self.kernel.warp_groups if b.warp_group]
        if not groups:
            return str(self.config.num_warps)
        each = ((b.name, b.warp_group) for b in groups)
        return " + ".join(
            f"{f'{g.instances} × ' * (g.instances > 1)}{g.warps} {GROUPS.get(name, name)}" for name, g in each if g
        )


def rows_named(kernel: Kernel) -> str:
    """The name of the number of rows by which a call chooses the config of a kernel (see `rows_of_call`)."""
    if kernel.traits.combines_splits:
        return "B·Hq·Nq"
    if kernel.pack_gqa:
        return GROUP_ROWS
    return "Nq" if kernel.program_axis == "q" else "Nk"


def launches(module: Module, cls: str) -> list[Launched]:
    """Return what calls launch on a device class, in the order of the host programs. Kernels without matrix products
    are left out."""
    found = []
    for host in module.hosts:
        for where, holds, name in dict.fromkeys(_launched(module, host, "entry", ("", sympy.true), cls)):
            kernel = module.kernel(name)
            for made in ranges(module, kernel, cls) if kernel.traits.dots else ():
                found.append(Launched(host.name, where, holds, made.kernel, made.config, made.least, made.most))
    return found


def _launched(
    module: Module, host: Host, block: str, where: tuple[str, Bool], cls: str
) -> Iterator[tuple[str, Bool, str]]:
    """Yield (condition in words, condition, kernel) for the launches of a block and of the branches that a device class
    can take. A branch whose kernels have no config there is never taken, so the other one has no condition."""
    for op in host.block(block).ops:
        if isinstance(op, launch.Launch):
            yield *where, op.kernel
        elif isinstance(op, launch.If):
            taken = _runs(module, host, op.then, cls)
            holds = _condition(host, op.where)
            if taken:
                yield from _launched(module, host, op.then, _both(where, _text(holds), holds), cls)
            if op.orelse:
                other = _both(where, "otherwise", sympy.Not(holds)) if taken and holds != sympy.true else where
                yield from _launched(module, host, op.orelse, other, cls)


def _both(one: tuple[str, Bool], words: str, holds: Bool) -> tuple[str, Bool]:
    return ", ".join(filter(None, (one[0], words))), sympy.And(one[1], holds)


def _runs(module: Module, host: Host, block: str, cls: str) -> bool:
    """True if every kernel that a block launches has a config on a device class."""
    launched = [module.kernel(op.kernel) for op in only(host.block(block).ops, launch.Launch)]
    return all(ranges(module, kernel, cls) for kernel in launched if kernel.traits.dots)


def _condition(host: Host, where: Bool) -> Bool:
    """Return a condition in terms of a call's sizes. Gradients are taken to be needed, and the kernels to exist."""
    known = {symbol(op.name): op.expr for op in only(host.ops(), tile.Map) if not op.type.dims}
    flags = {symbol(op.name): sympy.true for op in only(host.ops(), tile.Arg) if op.role == "flag"}
    while (plain := where.xreplace(known)) != where:
        where = plain
    where = where.xreplace(flags).subs(symbol("fused"), 1)
    return where.replace(lambda e: isinstance(e, sympy.Gt) and isinstance(e.lhs, select), _chosen)


def _text(holds: Bool) -> str:
    """Return a condition for readers; empty if it is always true."""
    text = "" if holds == sympy.true else to_text(holds)
    return text.replace(">=", "≥").replace("<=", "≤").replace("*", "·").replace("Gq", GROUP_ROWS)


def _chosen(above: sympy.Gt) -> Bool:
    """Return the condition under which `select(condition, number, other)` is above a third number."""
    condition, number, other = above.lhs.args
    return condition if number > above.rhs and other <= above.rhs else above
