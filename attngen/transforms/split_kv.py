"""split-kv: compute the work of a sequence in the KV cache from the tiles that its mask leaves.

before:  kernel @decode ... split_kv(cdiv(Nk, 64))
           %keys_partial = loop kv ranges(... max(0, Nk - 1024) // BLOCK_KV .. kv_end ...)
after:   kernel @decode ... split_kv(cdiv(Nk, 64) - max(0, Nk - 1024) // 64)

before:  kernel @decode ... split_kv(cdiv(Nk, 64))
           %keys_partial = loop kv ranges(first_least // BLOCK_KV .. cdiv(Nk, BLOCK_KV)) ...
after:   kernel @decode ... split_kv(cdiv(Nk, 64) - first_least // 64) of(first_least=%FIRST[b, 0])

The bounds of each split of a range become named scalars:

before:  %keys_full = loop kv ranges(portion(kv_full_end, KV_split, num_KV_splits)
           .. portion(kv_full_end, 1 + KV_split, num_KV_splits)) ...
after:   %kv_full_from = map expr(portion(kv_full_end, KV_split, num_KV_splits))
         %kv_full_to = map expr(portion(kv_full_end, 1 + KV_split, num_KV_splits))
         %keys_full = loop kv ranges(kv_full_from .. kv_full_to) ...

Work is counted in tiles of UNIT keys, for one tile with all queries. It only steers how the keys are split: for any
value, the splits of a sequence have each of its keys once. If the visited tiles depend on data other than one number
per sequence, the work stays the number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.heuristics import UNIT
from attngen.ir import Access, Expr, Kernel, Module, Op, Type, flattened, only, symbol, tile
from attngen.tiles.tiles import visited
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SplitKV(Pass):
    name: ClassVar[str] = "split-kv"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        splitting = module.splitting_kernel
        if splitting is None or splitting.kv_split is None:
            return module
        module = module.map_kernels(lambda kernel: _with_named_bounds(kernel) if kernel is splitting else kernel)
        work, numbers = _work(splitting), _integer_args(splitting)
        named = {str(s) for s in work.free_symbols}
        reads = tuple((name, at) for name, at in _sequence_integers(splitting).items() if name in named)
        if not named <= {"Nk"} | numbers.keys() | dict(reads).keys():
            return module
        kv_split = replace(splitting.kv_split, work=work, reads=reads)
        named |= {str(s) for _, at in reads for e in at.index for s in e.free_symbols}
        needed = [arg for arg in splitting.args if arg.name in named & numbers.keys() | {at.tensor for _, at in reads}]
        return module.map_kernels(
            lambda kernel: _with_args(replace(kernel, kv_split=kv_split), needed) if kernel.kv_split else kernel
        )


def _with_named_bounds(kernel: Kernel) -> Kernel:
    """Return the kernel with the bounds of each split of a range as named scalars."""

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, tile.Loop) or op.cls == "all":
            return [op]
        bounds: list[Op] = []
        ranges = []
        for at, pair in enumerate(op.ranges, 1):
            names = [f"{op.var}_{op.cls}_{end}{f'_{at}' if at > 1 else ''}" for end in ("from", "to")]
            for name, e in zip(names, pair):
                uses = tuple(
                    (s, s)
                    for s in sorted(map(str, e.free_symbols))
                    if s in kernel.graph and not isinstance(kernel.op(s), tile.Arg)
                )
                bounds.append(tile.Map(name, e, uses, Type("i32")))
            ranges.append((symbol(names[0]), symbol(names[1])))
        return [*bounds, replace(op, ranges=tuple(ranges))]

    return kernel.rewrite(change)


def _integer_args(kernel: Kernel) -> dict[str, tile.Arg]:
    """Return the kernel's scalar i32 arguments, which are the same for all sequences."""
    return {arg.name: arg for arg in kernel.args if arg.role == "scalar" and arg.type.dtype == "i32"}


def _sequence_integers(kernel: Kernel) -> dict[str, Access]:
    """Return the kernel's i32 scalars that are loaded from tensors with one element per sequence."""
    whole = [
        op
        for op in only(kernel.block("entry").ops, tile.Gather, tile.Load)
        if (op.type.dtype, op.type.dims) == ("i32", ())
    ]
    places = {op.name: op.src for op in whole if op.src.index[0] == symbol("b")}
    known = {symbol(name) for name in ("b", *_integer_args(kernel))}
    return {name: at for name, at in places.items() if all(e.free_symbols <= known for e in at.index)}


def _work(kernel: Kernel) -> Expr:
    """Return the number of key tiles that one tile with all queries visits."""
    sizes = {"q_start": sympy.Integer(0), "BLOCK_Q": symbol("Nq"), "BLOCK_KV": sympy.Integer(UNIT)}
    return flattened(visited(kernel).xreplace({symbol(name): e for name, e in sizes.items()}))


def _with_args(kernel: Kernel, needed: list[tile.Arg]) -> Kernel:
    """Return the kernel with these tensors and numbers as arguments: tensors after its other inputs, numbers at the
    end."""
    have = {arg.name for arg in kernel.args}
    more = [arg for arg in needed if arg.name not in have]
    entry, *rest = kernel.blocks
    read = sum(arg.role == "in" for arg in kernel.args)
    tensors, numbers = ([arg for arg in more if (arg.role == "scalar") == scalar] for scalar in (False, True))
    at = len(kernel.args)
    ops = (*entry.ops[:read], *tensors, *entry.ops[read:at], *numbers, *entry.ops[at:])
    return replace(kernel, blocks=(replace(entry, ops=ops), *rest)) if more else kernel
