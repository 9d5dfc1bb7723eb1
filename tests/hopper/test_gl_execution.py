"""Kernels after lower-pipelines and assign-barriers, executed statement by statement, compute what naive attention
does: in random orders of warp groups and copies, with the tiles and stages of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from attngen.builders import build_module
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Module
from attngen.spec import Spec
from attngen.targets.hopper.lowering.assign_barriers import assign_barriers
from attngen.targets.hopper.lowering.lower_pipelines import lower_pipelines
from tests.helpers import spec, use_fused
from tests.hopper.common import hopper_spec, lowered
from tests.transforms.equality import Call, must_be_equal, naive

SPECS = (
    "causal_gqa",
    "causal_mqa",
    "alibi_mha",
    "document_gqa",
    "streaming_gqa",
    "block_sparse_mha",
    "causal_dropout_mqa",
    "dense_bias_dropout_mha",
    "mla_dims",
    "full_mha",
)
LENGTHS = (None, (1, 17), (200, 300), (0, 5))


def spec_for(name: str) -> Spec:
    return spec(name) if name == "decode_mla" else hopper_spec(name)


@cache
def statements(name: str) -> Module:
    """The module of a spec with lowered kernels in place of the portable ones."""
    module = lowered(name)
    made = {k.stands_for: assign_barriers(lower_pipelines(module, k)) for k in reversed(module.warp_specialized)}
    module = replace(module, kernels=tuple(made.get(kernel.name, kernel) for kernel in module.kernels))
    return use_fused(module) if any(kernel.name == "bwd" for kernel in module.kernels) else module


def run(module: Module, name: str, seed: int, lengths: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Results of the lowered kernels, and of naive attention."""
    chance = Random(seed)
    call = Call.random(chance, spec_for(name), build_module(spec_for(name)), lengths)
    WarpSpecializedLaunch.chance = chance
    tiles = {"BLOCK_Q": 128, "BLOCK_KV": 128}  # of the other kernels
    return execute(module, call.of_module(spec_for(name)) | {"fused": 1}, tiles, DOUBLE), naive(spec_for(name), call)


@pytest.mark.share(8)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_naive_attention(name: str, lengths: Any) -> None:
    must_be_equal(*run(statements(name), name, len(str(lengths)), lengths), f"{name} {lengths}")
