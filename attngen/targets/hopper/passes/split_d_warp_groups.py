"""split-d-warp-groups: split the columns of the O accumulator between two consumer warp groups, @left and @right.

For MLA decode, where V is the latent, whose columns are also the first columns of K. An accumulator of 64 rows and all
512 columns would fill the registers of a warp group; half of its columns leave room for scores. Both warp groups still
compute S and P of all tiles; exchange-p changes that.

before:  warp_group @consumer instances(1) rows(64) ...
           %keys_full = loop kv ranges(...) carry(m=%m_init, l=%l_init, acc=%acc_init) body(@step) cls(full)
         block @step
           %k = load %K[0, kv, d_v] ... : T[BLOCK_KV, D_V] @sram
           %s = dot %q %k over(D_V) acc(%s_rope) : f32[BLOCK_Q, BLOCK_KV] @reg
           %acc_next = dot %soft.p %k over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @reg
after:   warp_group @left instances(1) rows(64) ...
           %keys_full_left = loop kv ranges(...) carry(m_left=%m_init_left, ...) body(@step_left) cls(full)
         warp_group @right instances(1) rows(64) ...
           (the same, with right in place of left)
         block @step_left
           %k_left = load %K[0, kv, left_v] ... : T[BLOCK_KV, LEFT_V] @sram
           %k_other_left = load %K[0, kv, right_v] ... : T[BLOCK_KV, RIGHT_V] @sram
           %s_own_left = dot %q_left %k_left over(LEFT_V) acc(%s_rope_left) : f32[BLOCK_Q, BLOCK_KV] @reg
           %s_left = dot %q_other_left %k_other_left over(RIGHT_V) acc(%s_own_left) : f32[BLOCK_Q, BLOCK_KV] @reg
           %acc_next_left = dot %soft_left.p %k_left over(BLOCK_KV) acc(%rescaled_left) : f32[BLOCK_Q, LEFT_V] @reg

The left warp group stores the row sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import SIDES, Access, Block, Kernel, Module, Op, Type, WarpGroup, only, symbol, tile
from attngen.targets.hopper.configs.families import with_mla_decode
from attngen.targets.hopper.configs.mla_decode import OTHER
from attngen.targets.hopper.configs.sm90 import LATENT_REGISTERS, ROWS
from attngen.transforms.base import Pass

WHOLE = "d_v"  # the index of all columns


@dataclass(frozen=True)
class SplitDWarpGroups(Pass):
    name: ClassVar[str] = "split-d-warp-groups"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_mla_decode(module, _split)


def _split(kernel: Kernel) -> Kernel:
    registers, of_producer = LATENT_REGISTERS
    consumer = kernel.block("consumer")
    body = kernel.block(next(only(consumer.ops, tile.Loop)).body)
    warp_groups, bodies = [], []
    for side in SIDES:
        name = side.removesuffix("_v")
        ops, step = _of_side((consumer, body), side)
        warp_groups.append(Block(name, _without_unread(ops, step), warp_group=WarpGroup(1, 4, registers, ROWS)))
        bodies.append(Block(f"{body.name}_{name}", step))
    producer = replace(kernel.block("producer"), warp_group=WarpGroup(1, 1, of_producer))
    return replace(kernel, blocks=(kernel.block("entry"), producer, *warp_groups, *bodies))


def _of_side(blocks: tuple[Block, ...], side: str) -> tuple[tuple[Op, ...], ...]:
    """The ops of blocks for one half of the columns, with names that end in `_left` or `_right`. Only the left warp
    group stores the row sums."""
    suffix, first = f"_{side.removesuffix('_v')}", next(iter(SIDES))
    stored = [
        [op for op in block.ops if side == first or not isinstance(op, tile.Store) or WHOLE in map(str, op.dst.index)]
        for block in blocks
    ]
    halves = [[half for op in ops for half in _halves(op, side)] for ops in stored]
    refs: dict[str, str] = {}
    for op in (half for ops in halves for half in ops):
        fields = (
            {field: f"{field}{suffix}" for field, _ in op.carry}
            if isinstance(op, tile.Loop)
            else {field: field for field in op.results()}
        )
        refs |= {f"{op.name}.{old}".rstrip("."): f"{op.name}{suffix}.{new}".rstrip(".") for old, new in fields.items()}
    return tuple(tuple(_named(op.with_operands(refs), suffix) for op in ops) for ops in halves)


def _named(op: Op, suffix: str) -> Op:
    """Append the suffix to the names of an op and of the values that it carries or yields."""
    op = replace(op, name=f"{op.name}{suffix}")
    if isinstance(op, tile.Loop):
        return replace(op, body=f"{op.body}{suffix}", carry=tuple((f"{field}{suffix}", ref) for field, ref in op.carry))
    return (
        replace(op, values=tuple((f"{field}{suffix}", ref) for field, ref in op.values))
        if isinstance(op, tile.Yield)
        else op
    )


def _halves(op: Op, side: str) -> Iterator[Op]:
    """The op for the columns of one side. A load of all columns, and a product over them, become two, one per side."""
    if isinstance(op, tile.Load) and WHOLE in map(str, op.src.index):
        yield replace(op, src=_at(op.src, side), type=_narrow(op.type, side))
        yield replace(op, name=f"{op.name}_other", src=_at(op.src, OTHER[side]), type=_narrow(op.type, OTHER[side]))
    elif isinstance(op, tile.Dot) and op.over == "D_V":
        yield replace(op, name=f"{op.name}_own", over=SIDES[side])
        yield replace(op, a=f"{op.a}_other", b=f"{op.b}_other", acc=f"{op.name}_own", over=SIDES[OTHER[side]])
    elif isinstance(op, tile.Store):
        yield replace(op, dst=_at(op.dst, side))
    elif hasattr(op, "type"):
        yield replace(op, type=_narrow(op.type, side))  # type: ignore[call-arg]
    else:
        yield op


def _at(access: Access, side: str) -> Access:
    return replace(access, index=tuple(symbol(side) if str(e) == WHOLE else e for e in access.index))


def _narrow(whole: Type, side: str) -> Type:
    return replace(whole, dims=tuple(SIDES[side] if dim == "D_V" else dim for dim in whole.dims))


def _without_unread(ops: tuple[Op, ...], step: tuple[Op, ...]) -> tuple[Op, ...]:
    """Drop the ops of a warp group whose results neither it nor its loop body reads."""
    while True:
        read = {ref.split(".")[0] for op in (*ops, *step) for ref in op.operands()}
        kept = tuple(op for op in ops if op.name in read or isinstance(op, (tile.Loop, tile.Store)))
        if kept == ops:
            return ops
        ops = kept
