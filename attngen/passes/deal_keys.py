"""deal-keys: say how much work a sequence in a cache is, by the tiles that its mask leaves.

before:  kernel @decode ... deals(cdiv(Nk, 64))        %keys_partial = loop kv ranges(... max(0, Nk - 1024) // BLOCK_KV .. kv_end ...)
after:   kernel @decode ... deals(cdiv(Nk, 64) - max(0, Nk - 1024) // 64)

before:  %keys_full = loop kv ranges(portion(kv_full_end, part, parts) .. portion(kv_full_end, 1 + part, parts)) ...
after:   %kv_full_from = map expr(portion(kv_full_end, part, parts)) ; %kv_full_to = map expr(portion(kv_full_end, 1 + part, parts))
         %keys_full = loop kv ranges(kv_full_from .. kv_full_to) ...

Work is counted in tiles of UNIT keys, of a tile of queries that has all of them. It steers how keys are dealt, and no more: whatever it
is, the parts of a sequence have each of its keys once. Where tiles depend on data of a sequence, work stays the number of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.bounds.tiles import visited
from attngen.ir.expr import Expr, flattened, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Loop, Map, Op, Type
from attngen.passes.base import Pass
from attngen.policy import UNIT


@dataclass(frozen=True)
class DealKeys(Pass):
    name: ClassVar[str] = "deal-keys"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        dealing = module.dealing
        if dealing is None or dealing.deal is None:
            return module
        module = module.map_kernels(lambda kernel: _named(kernel) if kernel is dealing else kernel)
        work, numbers = _work(dealing), _numbers(dealing)
        if work is None:
            return module
        deal = replace(dealing.deal, work=work)
        needed = [numbers[name] for name in sorted({str(s) for s in work.free_symbols} & numbers.keys())]
        return module.map_kernels(lambda kernel: _with_numbers(replace(kernel, deal=deal), needed) if kernel.deal else kernel)


def _named(kernel: Kernel) -> Kernel:
    """The kernel with the bounds of each part of a range as named scalars."""

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, Loop) or op.cls == "all":
            return [op]
        bounds: list[Op] = []
        ranges = []
        for at, pair in enumerate(op.ranges, 1):
            names = [f"{op.var}_{op.cls}_{end}{f'_{at}' if at > 1 else ''}" for end in ("from", "to")]
            for name, e in zip(names, pair):
                uses = tuple((s, s) for s in sorted(map(str, e.free_symbols)) if s in kernel.graph and not isinstance(kernel.op(s), Arg))
                bounds.append(Map(name, e, uses, Type("i32")))
            ranges.append((symbol(names[0]), symbol(names[1])))
        return [*bounds, replace(op, ranges=tuple(ranges))]

    return kernel.rewrite(change)


def _numbers(kernel: Kernel) -> dict[str, Arg]:
    """Its whole numbers that are the same for all sequences."""
    return {arg.name: arg for arg in kernel.args if arg.role == "scalar" and arg.type.dtype == "i32"}


def _work(kernel: Kernel) -> Expr | None:
    """Tiles that a tile with all queries visits; None if they depend on data of a sequence."""
    sizes = {"q_start": sympy.Integer(0), "BLOCK_Q": symbol("Nq"), "BLOCK_KV": sympy.Integer(UNIT)}
    work = flattened(visited(kernel).xreplace({symbol(name): e for name, e in sizes.items()}))
    known = {"Nk"} | _numbers(kernel).keys()
    return work if {str(s) for s in work.free_symbols} <= known else None


def _with_numbers(kernel: Kernel, needed: list[Arg]) -> Kernel:
    """The kernel with these numbers among its arguments."""
    have = {arg.name for arg in kernel.args}
    more = tuple(arg for arg in needed if arg.name not in have)
    entry, *rest = kernel.blocks
    at = len(kernel.args)
    return replace(kernel, blocks=(replace(entry, ops=(*entry.ops[:at], *more, *entry.ops[at:])), *rest)) if more else kernel
