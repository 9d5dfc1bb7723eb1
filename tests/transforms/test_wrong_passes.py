"""Wrong passes and wrong host programs are caught: by the comparison of results, or by a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import sympy

from attngen.builders import build_module
from attngen.errors import AttngenError
from attngen.ir import Module, Op, launch, symbol, tile
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.transforms.base import Pass
from attngen.verify.host import reasons
from tests.transforms.equality import Call, Unequal, check_steps, is_same
from tests.transforms.random_specs import BLOCK_SPARSE


def range_too_short(op: Op) -> Op:
    """Leave out the last tile of the last range."""
    return (
        replace(op, ranges=(*op.ranges[:-1], (op.ranges[-1][0], op.ranges[-1][1] - 1)))
        if isinstance(op, tile.Loop) and op.var != "g"
        else op
    )


def mask_dropped(op: Op) -> Op:
    return replace(op, where=sympy.true, uses=()) if isinstance(op, tile.Mask) else op


def scale_applied_twice(op: Op) -> Op:
    """Apply the scale twice to a gradient, or to the exponents of the LSE."""
    scale = {symbol(name): symbol(name) ** 2 for name in ("scale", "qk_scale")}
    return (
        replace(op, expr=op.expr.xreplace(scale))
        if isinstance(op, tile.Map) and op.name in ("lse", "dq_out", "dk_out")
        else op
    )


def carry_exchanged(op: Op) -> Op:
    """Exchange the values of the first two fields; a single field keeps its old value."""
    if not isinstance(op, tile.Yield) or op.name.endswith("group"):
        return op
    (first, x), *others = op.values
    if not others:
        return replace(op, values=((first, first),))
    (second, y), *rest = others
    return replace(op, values=((first, y), (second, x), *rest))


def check_removed(op: Op) -> Op:
    return replace(op, check=()) if isinstance(op, (tile.Load, tile.Store)) else op


def list_position_off(op: Op) -> Op:
    return replace(op, tile=op.tile - 1) if isinstance(op, tile.ListPosition) else op


def guard_removed(op: Op) -> Op:
    return replace(op, guard="never") if isinstance(op, tile.SoftmaxStep) else op


IN_ALL = (range_too_short, mask_dropped, scale_applied_twice, carry_exchanged, check_removed)


WRONG = [
    *((wrong, kernel) for wrong in IN_ALL for kernel in ("fwd", "dq", "dkdv", "bwd")),
    *((list_position_off, kernel) for kernel in ("fwd", "dq", "dkdv")),
    *((guard_removed, kernel) for kernel in ("fwd", "packed")),
]


WINDOW = make_spec(
    {"name": "window", "head_dim": 16, "heads": {"sharing": "gqa"}, "mask": {"sliding_window": {"left": 5, "right": 0}}}
)


LISTED = make_spec(
    {"name": "listed", "head_dim": 16, "mask": {"all_of": ["causal", {"block_sparse": BLOCK_SPARSE[1]}]}}
)


@dataclass(frozen=True)
class WrongPass(Pass):
    """A pass that changes the ops of one kernel."""

    name: ClassVar[str] = "wrong"
    phase: ClassVar[str] = "target"
    change: Callable[[Op], Op]
    kernel: str

    def run(self, module: Module) -> Module:
        return module.map_kernels(lambda k: k.rewrite(lambda _, op: [self.change(op)]) if k.name == self.kernel else k)


lowered = cache(lower)


@pytest.mark.parametrize(("wrong", "kernel"), WRONG, ids=[f"{wrong.__name__} in {kernel}" for wrong, kernel in WRONG])
def test_a_wrong_pass_is_caught(wrong: Callable[[Op], Op], kernel: str) -> None:
    """Each of three calls finds it. The calls run @dq and @dkdv, or @bwd in their place if @bwd is the wrong kernel."""
    spec = LISTED if wrong is list_position_off else WINDOW
    module = lowered(spec)
    step = WrongPass(wrong, kernel)
    assert not is_same(step.run(module), module)
    for number in range(3):
        call = Call.random(random.Random(number), spec, module, (37, 33) if module.blocks else (21, 17))
        call = replace(call, seed=call.seed // 2 * 2 + (kernel == "bwd"))
        with pytest.raises((Unequal, AttngenError)):
            check_steps(spec, module, call, (step,))


# ---------------------------------------------------------------------------------------------- wrong host programs

HostChange = Callable[[Op], list[Op]]


def sum_of_splits_left_out(op: Op) -> list[Op]:
    return [] if isinstance(op, launch.Launch) and op.kernel == "dkdv_end" else [op]


def copy_left_out(op: Op) -> list[Op]:
    return [] if isinstance(op, launch.Copy) else [op]


def delta_not_launched(op: Op) -> list[Op]:
    return [] if isinstance(op, launch.Launch) and op.kernel == "delta" else [op]


def maximum_from_zero(op: Op) -> list[Op]:
    return [replace(op, fill=sympy.Integer(0)) if isinstance(op, launch.Alloc) and op.name == "ROW_MAX" else op]


def buffers_not_filled(op: Op) -> list[Op]:
    return [replace(op, fill=None) if isinstance(op, launch.Alloc) else op]


def heads_in_wrong_order(op: Op) -> list[Op]:
    """View query heads as if those of one K/V head were `Hkv` heads from each other."""
    if not isinstance(op, launch.View) or op.by != "heads":
        return [op]
    batch, kv_heads, group, *rest = op.type.dims
    return [replace(op, type=replace(op.type, dims=(batch, group, kv_heads, *rest)))]


def heads_taken_for_one(op: Op) -> list[Op]:
    """Launch @packed as if its rows were the queries of one head."""
    packed = isinstance(op, launch.Launch) and op.kernel == "packed"
    return [replace(op, sizes=tuple((name, symbol("Gq")) for name, _ in op.sizes)) if packed else op]


def distances_off(op: Op) -> list[Op]:
    return [
        replace(op, at=tuple(f"{e} + 1" if "distance" in e else e for e in op.at))
        if isinstance(op, launch.SumDistances)
        else op
    ]


def placed_elsewhere(op: Op) -> list[Op]:
    return [replace(op, at=tuple("0" if e.isdigit() else e for e in op.at)) if isinstance(op, launch.Place) else op]


def partial_blocks_as_full(op: Op) -> list[Op]:
    """List every block with a visible pair as a full one."""
    return [replace(op, full=op.src) if isinstance(op, launch.ListBlocks) and op.full else op]


def lists_of_the_other_axis(op: Op) -> list[Op]:
    return [replace(op, own={"q": "kv", "kv": "q"}[op.own]) if isinstance(op, launch.ListBlocks) else op]


KV_OUTER = make_spec({"name": "kv_outer", "head_dim": 16, "mask": "causal", "schedule": {"order": "kv_outer"}})


PARAMS = {
    "bias": {"tensor": [17], "grad": True},
    "gain": {"tensor": ["Hkv"], "grad": True},
    "shift": {"tensor": ["H", 3], "grad": True},
}


TEXT = "s * (1 + 0.1 * gain[hkv] + 0.1 * shift[h, 2]) + bias[clamp(kv_idx - q_pos + 8, 0, 16)]"


TABLES = make_spec(
    {
        "name": "tables",
        "head_dim": 16,
        "heads": {"sharing": "gqa"},
        "mask": "causal",
        "score": {"expr": TEXT, "params": PARAMS},
    }
)


BLOCKS = make_spec({"name": "blocks", "head_dim": 16, "mask": {"block_sparse": {"block": 16}}})


PAIRS = {"expr": "pairs[q_idx, kv_idx]", "params": {"pairs": {"tensor": ["Nq", "Nk"], "dtype": "bool"}}}


FROM_DATA = make_spec({"name": "by_data", "head_dim": 16, "mask": PAIRS})


# (change, spec, rule that refuses it); without a rule, only the executor finds the change.
WRONG_HOSTS: list[tuple[HostChange, Spec, str]] = [
    (sum_of_splits_left_out, WINDOW, "host-written"),
    (copy_left_out, WINDOW, "host-written"),
    (delta_not_launched, WINDOW, "host-written"),
    (heads_in_wrong_order, TABLES, "host-types"),
    (heads_taken_for_one, WINDOW, ""),
    (maximum_from_zero, KV_OUTER, ""),
    (buffers_not_filled, TABLES, "host-written"),
    (distances_off, TABLES, ""),
    (placed_elsewhere, TABLES, ""),
    (lists_of_the_other_axis, BLOCKS, ""),
    (partial_blocks_as_full, FROM_DATA, ""),
]


@dataclass(frozen=True)
class WrongHostPass(Pass):
    """A pass that changes the ops of host programs."""

    name: ClassVar[str] = "wrong"
    phase: ClassVar[str] = "target"
    change: HostChange

    def run(self, module: Module) -> Module:
        return replace(module, hosts=tuple(host.rewrite(self.change) for host in module.hosts))


def call_with_low_scores(module: Module, spec: Spec) -> Call:
    """Return a call with grouped heads in two splits and results in the layout [B, N, H, D]. For KV_OUTER, its scores
    are so far below zero that their exponentials are 0."""
    number, lengths = 0, (137, 133) if spec is FROM_DATA else (37, 33) if module.blocks else (21, 17)
    while True:
        call = Call.random(random.Random(number), spec, module, lengths)
        group = call.sizes.q_heads // call.sizes.kv_heads
        enough = spec.heads.sharing == "mha" or (call.sizes.kv_heads == 2 and group == 2)
        if enough and call.sizes.batch * call.sizes.q_heads > 1 and (spec is FROM_DATA or call.tiles["BLOCK_Q"] < 16):
            inputs = (
                call.inputs | {"q": call.inputs["q"].abs() * 60, "k": -call.inputs["k"].abs() * 60}
                if spec is KV_OUTER
                else call.inputs
            )
            return replace(call, splits=group, bshd=True, second="dk dv", inputs=inputs)
        number += 1


@pytest.mark.parametrize(("change", "spec", "rule"), WRONG_HOSTS, ids=[change.__name__ for change, *_ in WRONG_HOSTS])
def test_a_wrong_host_program_is_caught(change: HostChange, spec: Spec, rule: str) -> None:
    """Its results are wrong, also if a rule refuses it."""
    module = (
        lower(spec) if spec is FROM_DATA else build_module(spec)
    )  # only after lowering there are loops over full blocks
    step = WrongHostPass(change)
    wrong = step.run(module)
    assert not is_same(wrong, module)
    broken = [name for name, _ in reasons(wrong)]
    assert rule in broken if rule else not broken
    call = call_with_low_scores(module, spec)
    assert check_steps(spec, module, call, ()) == 1
    with pytest.raises((Unequal, AttngenError)):
        check_steps(spec, module, call, (step,))
