"""schedule-work: programs that stay, and take one tile of the grid after another.

before:  block @entry                                after:  block @entry
           (arguments, rings)                                  (arguments, rings)
           %kv_end = map expr(...)                             %Work_ring = ring slots(2) : i32[] @sram
         role @producer ...                                  role @producer ...
           fill %Q_ring %Q[b, h, q, d_qk]                      %drawn = work %Work_ring of(@tile) body(@produce) draws(yes)
           %copy_keys = loop kv ...                            drain %Q_ring; drain %K_ring; drain %V_ring; drain %Work_ring
           drain %K_ring; drain %V_ring                      role @consumer ...
         role @consumer ...                                    %work = work %Work_ring of(@tile) body(@consume)
           %q = take %Q_ring                                 block @tile
           %keys = pipeline kv ...                             %kv_end = map expr(...)
           store %O[b, h, q, d_v] ...                        block @produce
                                                               fill %Q_ring %Q[b, h, q, d_qk]
                                                               %copy_keys = loop kv ...
                                                             block @consume
                                                               %q = take %Q_ring
                                                               %keys = pipeline kv ...
                                                               give %q
                                                               recall %Work_ring
                                                               store %O[b, h, q, d_v] ...

The producer runs ahead: it fills the rings for a program's next tile while consumers end the one before, so the ring of queries gets more
slots. It is worth most where tiles are short. Where rings leave no room for that, each tile keeps a program of its own.

In the backward, three roles take the place of a tile: the writer does, too. K and V are taken once for each tile, and what frees their
slots is counted, as named barriers would be too few. V is given back at the end: dK and dV leave through its slot. Programs that have
several heads take one tile each: they end half as often, and gain 0 to 2% by staying.

Over a cache of latents, a tile of queries has parts of the keys of a sequence. How many parts there are, programs find out on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Block, Loop, Op, Type
from attngen.ir.pipe import Drain, Fill, Give, Pipeline, Recall, Ring, Take, Work
from attngen.targets.hopper.configs import jvp
from attngen.targets.hopper.configs.common import PLACE_SLOTS, staying
from attngen.targets.hopper.configs.families import with_backward, with_forwards, with_latents, with_tangents
from attngen.targets.hopper.configs.fused_backward import may_stay
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.transforms.base import Pass

PLACES = "Work_ring"
BODIES = {  # role -> the name of its `work`, that of its body, and what the body does
    "producer": ("drawn", "produce", "copy what consumers of this tile take"),
    "consumer": ("work", "consume", "what each copy does for its rows of this tile"),
    "left": ("work_left", "consume_left", "the left columns of outputs"),
    "right": ("work_right", "consume_right", "the right columns of outputs"),
    "writer": ("written", "deliver", "add what consumers have of this tile to dQ"),
}


@dataclass(frozen=True)
class ScheduleWork(Pass):
    name: ClassVar[str] = "schedule-work"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def changed(kernel: Kernel) -> Kernel:
            slots = min(staying(module, row) for row in module.rows(kernel.name, kernel.backend))
            return _staying(kernel, lambda ring: replace(ring, slots=sympy.Integer(slots))) if slots else kernel

        module = with_forwards(module, changed)
        module = with_latents(module, lambda kernel: _staying(kernel, _counted))
        module = with_tangents(module, lambda kernel: _staying(kernel, _counted) if jvp.may_stay(module) else kernel)
        return with_backward(module, lambda kernel: _staying(kernel, _counted) if may_stay(module, kernel) else kernel)


def _counted(ring: Ring) -> Ring:
    return replace(ring, counted=True)


def _staying(kernel: Kernel, change: Callable[[Ring], Ring]) -> Kernel:
    """The kernel whose programs stay; change: what becomes of the rings from which consumers take once for each tile."""
    entry = kernel.block("entry")
    filled = {op.ring for op in kernel.ops() if isinstance(op, Fill)}
    of_roles = {
        role.name: {op.ring: op.name for op in role.ops if isinstance(op, Take) and op.ring in filled}
        for role in kernel.roles
        if role.role and role.role.rows
    }
    once = {ring: name for taken in of_roles.values() for ring, name in taken.items()}
    kept = [change(op) if isinstance(op, Ring) and op.name in once else op for op in entry.ops if isinstance(op, (Arg, Ring))]
    by_count = kernel.adds or is_of_latents(kernel)  # as there are too few named barriers
    places = Ring(PLACES, Type("i32", (), "sram"), sympy.Integer(PLACE_SLOTS), counted=by_count)
    drains = [op for role in kernel.roles for op in role.ops if isinstance(op, Drain)]
    at_end = [*(Drain(f"drain_{name}", ring) for ring, name in once.items()), *drains, Drain("drain_work", PLACES)]
    roles, bodies = [], []
    for role in kernel.roles:
        name, body, about = BODIES[role.name]
        taken = of_roles.get(role.name, {})
        ops = tuple(_giving_back(kernel, role, taken) if taken else (op for op in role.ops if op not in drains))
        draws = role.name == "producer"
        roles.append(replace(role, ops=(Work(name, PLACES, "tile", body, draws), *(at_end if draws else ()))))
        bodies.append(Block(body, ops, about=about))
    known = Block("tile", tuple(op for op in entry.ops if not isinstance(op, (Arg, Ring))), about="what all roles know of a tile")
    others = [block for block in kernel.blocks if not block.role and block is not entry]
    return replace(kernel, blocks=(replace(entry, ops=(*kept, places)), *roles, known, *bodies, *others))


def _giving_back(kernel: Kernel, role: Block, once: dict[str, str]) -> Iterator[Op]:
    """A consumer's ops for a tile, with what it takes once given back: after its loops; or at the end, if outputs leave through it."""
    *_, last = (op for op in role.ops if isinstance(op, (Loop, Pipeline)))
    through = [name for ring, name in once.items() if kernel.adds and isinstance(op := kernel.op(ring), Ring) and op.each]
    for op in role.ops:
        yield op
        if op is last:
            yield from (Give(f"give_{name}", name) for name in once.values() if name not in through)
            yield Recall(f"recall_{role.name}", PLACES)
    yield from (Give(f"give_{name}", name) for name in through)
