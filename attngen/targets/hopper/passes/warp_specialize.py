"""warp-specialize: split a kernel into warp groups, and choose its config.

The producer, one warp, loads tiles. The consumer computes: it has one instance of four warps per 64 rows of the program
tile (M of one wgmma). Scalars and loop bounds are computed in @entry, before the warp groups start, because every warp
group reads them. The producer is still empty: insert-pipelines gives it the loads.

In the blocks of the consumer, BLOCK_Q is from here on the 64 rows of one instance, not the 128 of the config (see
ir/pipe.py).

before:  kernel @fwd program_axis(q) grid(...)
         block @entry
           (all ops)
after:   kernel @fwd program_axis(q) grid(...)
           (unchanged: the portable kernel)
         kernel @fwd backend(hopper) program_axis(q) grid(...)
         block @entry
           (arguments, bounds of loops)
         warp_group @producer instances(1) warps(1) registers(24)
         warp_group @consumer instances(2) rows(64) warps(4) registers(240)
           (all other ops)
         schedule @fwd
           sm90 bytes=2 rows>512 : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=3 TMA=1 backend=hopper

The last line is the config: on sm90, calls with 16-bit tensors and more than 512 rows of the program axis, here
queries, run this kernel with these tiles. Other calls run the portable kernel.

The fused backward has a third warp group, @dq_reducer, a warp that adds tiles of dQ to device memory. A second config,
for long sequences, has a kernel of its own, @fwd_long, that also stands in for @fwd.

A loop over the query heads of a group is merged into the loops over tiles that it surrounds. The bounds of these are
the same for all heads of the group:

before:  %total = loop g ranges(0 .. group) carry(dk=%dk_init) body(@group) cls(all)
         block @group
           %q_end = map expr(cdiv(Nq, BLOCK_Q))
           %queries_full = loop q ranges(0 .. q_end) carry(dk_step=%dk) body(@step) cls(full)
           yield values(dk=%queries_full.dk_step)
after:   %q_end = map expr(cdiv(Nq, BLOCK_Q))
         %queries_full = loop q ranges(0 .. q_end) carry(dk_step=%dk_init) body(@step) cls(full) heads(0 .. group)

Tiles of V and O whose width is not a power of two are padded to the next one, as D_V_PAD, because values in registers
have shapes of powers of two in Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from attngen.errors import BuildError
from attngen.ir import Block, Config, Kernel, Module, WarpGroup, only, tile
from attngen.targets.common.base import Choose, Specialization
from attngen.targets.hopper.configs.common import is_shared
from attngen.targets.hopper.configs.forward_schedule import ctas_per_sm
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.registry import SPECIALIZATIONS
from attngen.targets.hopper.configs.sm90 import DQ_REDUCER_REGISTERS, FORWARD, NAME, REGISTERS, ROWS, SHARED_REGISTERS
from attngen.transforms.base import Pass, padded


@dataclass(frozen=True)
class WarpSpecialize(Pass):
    name: ClassVar[str] = "warp-specialize"
    phase: ClassVar[str] = "scheduled"
    choose: Choose = field(default=lambda specialization, module: (specialization.row(module, None, None, None),))

    def run(self, module: Module) -> Module:
        for specialization in SPECIALIZATIONS:
            chosen = self.choose(specialization, module)
            module = module if isinstance(chosen, str) else _specialize(module, specialization, chosen)
        return module


def _specialize(module: Module, specialization: Specialization, chosen: tuple[Config, ...]) -> Module:
    """Add the warp-specialized form of a kernel to a module, once per config."""
    name = specialization.kernel
    if why := specialization.infeasible(module):
        raise BuildError(
            ("schedule", "backend"), f"is hopper, and the kernel @{name} cannot be warp-specialized: {why}"
        )
    kernel = _merge_head_loop(_padded(module, module.kernel(name)))
    warp_specialized = [
        _warp_specialized(
            kernel,
            _consumer_instances(module, config, kernel.program_axis),
            ctas_per_sm(module, config) if name == FORWARD else 1,
        )
        for config in chosen
    ]
    longer = [
        replace(k, name=f"{name}_long", of=name, about=f"{k.about} For long sequences.") for k in warp_specialized[1:]
    ]
    schedules = [
        (scheduled, (*configs, chosen[0]) if scheduled == name else configs) for scheduled, configs in module.schedules
    ]
    schedules += [(k.name, (config,)) for k, config in zip(longer, chosen[1:], strict=True)]
    return replace(
        module, warp_specialized=(*module.warp_specialized, warp_specialized[0], *longer), schedules=tuple(schedules)
    )


def _consumer_instances(module: Module, config: Config, program_axis: str) -> int:
    """Number of instances of the consumer under a config: one per 64 rows of the program tile."""
    instances, rest = divmod(config.rows_of(program_axis), ROWS)
    if rest or instances not in REGISTERS:
        expected = " or ".join(str(ROWS * n) for n in REGISTERS)
        listed = ", the size of the blocks that the mask lists" if module.blocks else ""
        raise BuildError(
            ("schedule", "block_q"), f"is {config.block_q}{listed}; expected {expected} on the backend hopper"
        )
    return instances


def _padded(module: Module, kernel: Kernel) -> Kernel:
    """Pad the columns of V with zeros to the next power of two."""
    wide = () if is_power_of_two(module.head_dim_v) else ("D_V",)
    return kernel.rewrite(lambda _, op: [padded(op, wide)])


def _merge_head_loop(kernel: Kernel) -> Kernel:
    """Merge a loop over heads into the loops over tiles that it surrounds."""
    if (loop := kernel.traits.of_heads) is None:
        return kernel
    group = kernel.block(loop.body).ops
    starts = dict(loop.carry)
    results = {f"{loop.name}.{field}": ref for op in only(group, tile.Yield) for field, ref in op.values}
    inside = [op.with_operands(starts) for op in group if not isinstance(op, (tile.Arg, tile.Yield))]
    inside = [replace(op, heads=loop.ranges) if isinstance(op, tile.Loop) else op for op in inside]
    blocks = tuple(block for block in kernel.blocks if block.name != loop.body)
    whole = replace(kernel, blocks=blocks)
    return whole.rewrite(lambda _, op: inside if op is loop else [op.with_operands(results)])


def _warp_specialized(kernel: Kernel, instances: int, ctas: int) -> Kernel:
    """Split a kernel into warp groups; ctas: CTAs per SM."""
    entry = kernel.block("entry").ops
    rest = tuple(op for op in entry if not is_shared(op))
    consumer, producer = SHARED_REGISTERS if ctas > 1 else REGISTERS[instances]
    warp_groups: tuple[Block, ...] = (
        Block("producer", (), warp_group=WarpGroup(1, 1, producer)),
        Block("consumer", rest, warp_group=WarpGroup(instances, 4, consumer, ROWS)),
    )
    if kernel.traits.adds_in_order:
        warp_groups += (Block("dq_reducer", (), warp_group=WarpGroup(1, 1, DQ_REDUCER_REGISTERS)),)
    shared = Block("entry", tuple(op for op in entry if is_shared(op)))
    bodies = (block for block in kernel.blocks if block.name != "entry")
    return replace(kernel, backend=NAME, ctas_per_sm=ctas, blocks=(shared, *warp_groups, *bodies))
