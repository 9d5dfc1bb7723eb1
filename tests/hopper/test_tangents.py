"""The divided kernel of forward mode: what the passes make of it, what is refused, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from attngen.backends.hopper.choice import room_of
from attngen.backends.hopper.facts import TANGENTS
from attngen.backends.hopper.sram import sram_bytes
from attngen.errors import VerifyError
from attngen.ir.execute import DOUBLE
from attngen.ir.execute_host import execute
from attngen.ir.execute_roles import DividedLaunch
from attngen.ir.graph import Kernel, Module
from attngen.logical import build_module
from attngen.passes.pipeline import stages, undivided
from attngen.spec import Spec, make_spec
from attngen.verify import verify
from attngen.verify.machine import broken
from attngen.verify.protocol import protocol_of
from tests.hopper.common import edited_module, gone_and_come
from tests.hopper.test_gradients import lines_of
from tests.passes.test_equality import Call, must_be_equal, naive

MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "wide": {"mask": "causal", "head_dim": 128},
    "shared": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 3}}, "heads": {"sharing": "mqa"}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "padding": {"mask": "key_padding"},
    "alibi": {"mask": "causal", "score": "alibi"},
    "capped": {"score": [{"softcap": 5.0}]},
    "blocks": {"mask": {"all_of": ["causal", {"block_sparse": {"block": 128}}]}},
}


@cache
def asked(name: str) -> Spec:
    return make_spec({"name": "tangents", "head_dim": 64, **MADE[name]})


@cache
def steps(name: str) -> dict[str, Module]:
    """The verified module after every pass."""
    return dict(stages(asked(name)))


def whole(name: str) -> Module:
    return list(steps(name).values())[-1]


def divided(module: Module) -> Kernel:
    return next(k for k in module.divided if k.name == TANGENTS)


def lines(name: str, after: str, block: str) -> list[str]:
    """The ops of a block of the divided kernel after a pass, as text."""
    return lines_of(divided(steps(name)[after]), block)


def run(name: str, seed: int, lengths: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the divided kernel computes, in a random order and under random tiles, and what naive attention does."""
    module, chance = whole(name), Random(seed)
    module = replace(module, kernels=tuple(divided(module) if k.name == TANGENTS else k for k in module.kernels))
    call = Call.random(chance, asked(name), build_module(asked(name)), lengths)
    sides = (32, 64, 128) if module.blocks else (8, 16)
    call = replace(call, tiles={"BLOCK_Q": chance.choice(sides), "BLOCK_KV": chance.choice(sides)})
    DividedLaunch.chance = chance
    return execute(module, call.of_module(asked(name)), call.tiles, DOUBLE), naive(asked(name), call)


@pytest.mark.parametrize("name", MADE)
def test_it_computes_what_naive_attention_does(name: str) -> None:
    few = [None, (1, 17), (17, 1), (33, 65), (65, 33), (0, 5), (40, 40)]
    for seed, lengths in enumerate([(129, 390), (390, 129), (0, 200)] if whole(name).blocks else few):
        found, expected = run(name, seed, lengths)
        assert {"tangent_out", "tangent_lse"} <= {*found} & {*expected}
        must_be_equal(found, expected, f"{name} {seed}")
