"""split-boundary-masks: each bound of a mask is looked at only in tiles that it cuts.

before:  %masked = mask %s where(kv_idx >= q_idx - 1023 and kv_idx <= q_idx)
after:   %masked_1 = mask %s where(kv_idx >= q_idx - 1023) unswitch(BLOCK_Q + q_start - 1024 > kv_start)
         %masked = mask %masked_1 where(kv_idx <= q_idx) unswitch(BLOCK_KV + kv_start > q_start + 1)

A tile is partial if any part of the mask cuts it. Most partial tiles are cut by one bound alone: under a window, the
first by the oldest key that a row sees, and the last by the newest. A comparison and a choice for each score take a
quarter of the instructions of a tile's softmax, so the other parts are passed over. Whether a bound cuts a tile is one
comparison for the tile, with the copy's own rows.

Parts whose tiles are not known by their place, such as those that compare data, are one mask, the last. Some masks stay
whole, as their parts would need more registers than there are (`choice.splits_mask`).

In the backward, of a mask that applies in all tiles, such as every fourth key of a window, what is known to cut few of
them comes last, under one question. One that applies in partial tiles alone has a question for each bound if there are
two, as of a window, and one for the ends of the tensors; else it stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import Bool, symbol_names
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Mask, Op
from attngen.targets.hopper.configs.common import splits_mask
from attngen.targets.hopper.configs.families import with_backward, with_forwards
from attngen.tiles.boundary import cut_by, data_of
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SplitBoundaryMasks(Pass):
    name: ClassVar[str] = "split-boundary-masks"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_backward(with_forwards(module, lambda kernel: _split(module, kernel)), _apart)


def _split(module: Module, kernel: Kernel) -> Kernel:
    def change(_: str, op: Op) -> list[Op]:
        return [*_parts(module, kernel, op)] if isinstance(op, Mask) else [op]

    return kernel.rewrite(change)


def _parts(module: Module, kernel: Kernel, op: Mask) -> list[Mask]:
    """The mask as one after the other: each part that cuts known tiles, then the others together."""
    data = data_of(kernel, op)
    parts = sorted(
        sympy.And.make_args(op.where), key=sympy.default_sort_key
    )  # below the least of two numbers is one comparison
    bounds = {part: cut for part in parts if (cut := cut_by(part, data)) is not None}
    others = [part for part in parts if part not in bounds]
    alike = not bounds or (not others and len(set(bounds.values())) == 1)  # no part is ever passed over alone
    if (
        alike
        or sum(_differs_by_row(kernel, op, part) for part in parts) < 2
        or not splits_mask(module, kernel, op, [*bounds], others)
    ):
        return [op]
    return _in_pieces(op, [*bounds.items(), *([(sympy.And(*others), None)] if others else [])])


def _in_pieces(op: Mask, pieces: Sequence[tuple[Bool, Bool | None]]) -> list[Mask]:
    """A mask for each piece of the condition, one after the other, with its cut. What is known of data goes with the
    piece without one."""
    made: list[Mask] = []
    for turn, (where, cut) in enumerate(pieces, 1):
        name, value = op.name if turn == len(pieces) else f"{op.name}_{turn}", made[-1].name if made else op.value
        uses = tuple((n, ref) for n, ref in op.uses if n in symbol_names(where))
        made.append(
            replace(
                op,
                name=name,
                value=value,
                where=where,
                uses=uses,
                known=() if cut is not None else op.known,
                unswitch=cut,
            )
        )
    return made


def _apart(kernel: Kernel) -> Kernel:
    """The backward with several masks, one after the other, in place of one of which parts are known to cut few
    tiles."""

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, Mask):
            return [op]
        data = data_of(kernel, op)
        parts = sorted(sympy.And.make_args(op.where), key=sympy.default_sort_key)
        few = [part for part in parts if cut_by(part, data) is not None]
        others = [part for part in parts if part not in few]
        bounds = [part for part in few if {"q_idx", "kv_idx"} <= {*symbol_names(part)}]
        ends = [part for part in few if part not in bounds]
        if op.when == "partial":
            groups = [*([bound] for bound in bounds), ends] if not others and len(bounds) > 1 else []
        else:
            groups = [others, few]
        wheres = [sympy.And(*group) for group in groups]
        return (
            [*_in_pieces(op, [(where, cut_by(where, data)) for where in wheres])]
            if len(groups) > 1 and all(groups)
            else [op]
        )

    return kernel.rewrite(change)


def _differs_by_row(kernel: Kernel, op: Mask, part: Bool) -> bool:
    """Whether a part of the mask compares keys with rows. One that does not cuts few tiles: those where a tensor or
    a sequence ends."""
    by_row = {"q_idx", *(name for name, ref in op.uses if "BLOCK_Q" in kernel.type_of(ref).dims)}
    return not by_row.isdisjoint(symbol_names(part))
