"""split-boundary-masks: give each bound of a mask a mask op of its own, which runs only in tiles that the bound cuts.

A tile is partial if any part of the mask cuts it, but most partial tiles are cut by one bound only: under a window, the
oldest key that a row sees cuts the first tiles, and the newest the last. A comparison and a select per score take a
quarter of the instructions of a tile's softmax. The test whether a bound cuts a tile (`unswitch`) is one comparison per
tile and instance, with the instance's own rows (BLOCK_Q and q_start are these).

before:  %masked = mask %s where(kv_idx >= q_idx - 1023 and kv_idx <= q_idx)
after:   %masked_1 = mask %s where(kv_idx >= q_idx - 1023) unswitch(BLOCK_Q + q_start - 1024 > kv_start)
         %masked = mask %masked_1 where(kv_idx <= q_idx) unswitch(BLOCK_KV + kv_start > q_start + 1)

Positions do not tell which tiles are cut by some conjuncts of the condition, such as comparisons of data. These form
one mask without `unswitch`, the last. Some masks stay whole, because their parts would need more registers than there
are (`forward_schedule.splits_mask`).

In the backward, a mask that applies in all tiles, such as every fourth key of a window, becomes two: first the
conjuncts that may cut any tile, then, under one `unswitch`, those that cut few tiles. A mask that applies only in
partial tiles gets a mask per bound if there are two, as for a window, and one for the ends of the tensors; otherwise it
stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import Bool, Kernel, Module, Op, symbol_names, tile
from attngen.targets.hopper.configs.families import with_forward, with_fused_backward
from attngen.targets.hopper.configs.forward_schedule import splits_mask
from attngen.tiles.boundary import data_of, unswitch_condition
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SplitBoundaryMasks(Pass):
    name: ClassVar[str] = "split-boundary-masks"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_fused_backward(with_forward(module, lambda kernel: _split(module, kernel)), _split_backward)


def _split(module: Module, kernel: Kernel) -> Kernel:
    def change(_: str, op: Op) -> list[Op]:
        return [*_parts(module, kernel, op)] if isinstance(op, tile.Mask) else [op]

    return kernel.rewrite(change)


def _parts(module: Module, kernel: Kernel, op: tile.Mask) -> list[tile.Mask]:
    """Split a mask into several in sequence: one for each conjunct that has an unswitch condition, then one for the
    others."""
    data = data_of(kernel, op)
    # `x < min(a, b)` is one comparison, and so one part.
    parts = sorted(sympy.And.make_args(op.where), key=sympy.default_sort_key)
    bounds = {part: condition for part in parts if (condition := unswitch_condition(part, data)) is not None}
    others = [part for part in parts if part not in bounds]
    inseparable = not bounds or (not others and len(set(bounds.values())) == 1)  # no part can be skipped by itself
    if (
        inseparable
        or sum(_differs_by_row(kernel, op, part) for part in parts) < 2
        or not splits_mask(module, kernel, op, [*bounds], others)
    ):
        return [op]
    return _in_pieces(op, [*bounds.items(), *([(sympy.And(*others), None)] if others else [])])


def _in_pieces(op: tile.Mask, pieces: Sequence[tuple[Bool, Bool | None]]) -> list[tile.Mask]:
    """Make a mask for each piece of the condition, in sequence. pieces: pairs (condition, unswitch condition or None).
    The piece without one reads data, so it keeps the mask's `known`."""
    made: list[tile.Mask] = []
    for number, (where, condition) in enumerate(pieces, 1):
        name, value = op.name if number == len(pieces) else f"{op.name}_{number}", made[-1].name if made else op.value
        uses = tuple((n, ref) for n, ref in op.uses if n in symbol_names(where))
        made.append(
            replace(
                op,
                name=name,
                value=value,
                where=where,
                uses=uses,
                known=() if condition is not None else op.known,
                unswitch=condition,
            )
        )
    return made


def _split_backward(kernel: Kernel) -> Kernel:
    """Replace the backward's mask by several in sequence, if some parts of its condition are known to cut few tiles."""

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, tile.Mask):
            return [op]
        data = data_of(kernel, op)
        parts = sorted(sympy.And.make_args(op.where), key=sympy.default_sort_key)
        few = [part for part in parts if unswitch_condition(part, data) is not None]
        others = [part for part in parts if part not in few]
        bounds = [part for part in few if {"q_idx", "kv_idx"} <= {*symbol_names(part)}]
        ends = [part for part in few if part not in bounds]
        if op.when == "partial":
            groups = [*([bound] for bound in bounds), ends] if not others and len(bounds) > 1 else []
        else:
            groups = [others, few]
        wheres = [sympy.And(*group) for group in groups]
        return (
            [*_in_pieces(op, [(where, unswitch_condition(where, data)) for where in wheres])]
            if len(groups) > 1 and all(groups)
            else [op]
        )

    return kernel.rewrite(change)


def _differs_by_row(kernel: Kernel, op: tile.Mask, part: Bool) -> bool:
    """True if a part of the mask compares keys with rows. Other parts cut few tiles: those where a tensor or a sequence
    ends."""
    by_row = {"q_idx", *(name for name, ref in op.uses if "BLOCK_Q" in kernel.type_of(ref).dims)}
    return not by_row.isdisjoint(symbol_names(part))
