"""Results of the fused backward in random orders, and the host program that calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from attngen.builders import build_module
from attngen.codegen.render import render
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import Deadlock, WarpSpecializedLaunch
from attngen.ir.printer import print_kernel, print_module
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower
from tests.helpers import spec, use_fused
from tests.hopper.fused_backward import (
    CASES,
    LISTED_CASES,
    PAIR_ACQUIRE,
    backward,
    edited,
    lowered,
    spec_for,
)
from tests.transforms.equality import Call, must_be_equal, naive


def run(
    name: str, seed: int, lengths: Any = None, changes: tuple[tuple[str, str], ...] = ()
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Results of the warp-specialized kernels, in a random order and with random tiles, and of naive attention."""
    module, chance = edited(name, *changes) if changes else lowered(name), Random(seed)
    replacements = {kernel.stands_for: kernel for kernel in module.warp_specialized if kernel.stands_for != "fwd"}
    module = replace(module, kernels=tuple(replacements.get(kernel.name, kernel) for kernel in module.kernels))
    call = Call.random(chance, spec_for(name), build_module(spec_for(name)), lengths)
    if name == "sorted":
        call.inputs["document_ids"] = call.inputs["document_ids"].sort(1).values
    if name == "multiplied":
        call.inputs["t"][0] = 0.0  # all scores of a head are 0, and so is dQ
    sides = (32, 64, 128) if name in LISTED_CASES else (8, 16)
    call = replace(call, tiles={"BLOCK_Q": chance.choice(sides), "BLOCK_KV": chance.choice(sides)})
    if "block_mask" in call.inputs:  # hide all blocks of some queries and keys
        call.inputs["block_mask"][:, :, 1:2], call.inputs["block_mask"][..., 2:3] = False, False
    if chance.random() < 0.5:  # groups of one head: the last one may be the reversed group
        grids = {
            "bwd": tuple(replace(axis, swizzle_rows=min(1, axis.swizzle_rows)) for axis in module.kernel("bwd").grid)
        }
        module = replace(module, kernels=tuple(replace(k, grid=grids.get(k.name, k.grid)) for k in module.kernels))
    WarpSpecializedLaunch.chance = chance
    return execute(use_fused(module), call.of_module(spec_for(name)) | {"fused": 1}, call.tiles, DOUBLE), naive(
        spec_for(name), call
    )


@pytest.mark.share(64)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_naive_attention(name: str) -> None:
    few = [None, (1, 17), (17, 1), (33, 65), (65, 33), (0, 5), (40, 40)]
    for seed, lengths in enumerate([(129, 390), (390, 129), (0, 200), (384, 384)] if name in LISTED_CASES else few):
        must_be_equal(*run(name, seed, lengths), f"{name} {seed}")


@pytest.mark.share(4)
def test_the_interpreter_stops_where_programs_wait_for_ever() -> None:
    """No program is first in this order of adds, which the verifier refuses. The interpreter does not verify it, and
    stops."""
    order = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV)"
    with pytest.raises(Deadlock, match="@bwd: programs wait for semaphores for ever"):
        run("wide", 0, (40, 40), ((f"{order} - 1)", f"{order})"),))


@pytest.mark.share(4)
def test_a_pair_of_programs_that_both_come_second_waits_for_ever() -> None:
    with pytest.raises(Deadlock, match="@bwd: programs wait for semaphores for ever"):
        run("shared", 0, (40, 40), ((PAIR_ACQUIRE, PAIR_ACQUIRE.replace("split % 2", "1 + split % 2")),))


def host_lines(name: str, *words: str) -> list[str]:
    """The lines of the host program @backward that contain one of these words."""
    host = print_module(lowered(name)).partition("host @backward")[2].partition("kernel @")[0]
    return [line.strip() for line in host.splitlines() if any(word in line for word in words)]


def test_programs_split_the_query_heads_of_a_group() -> None:
    """A program has some heads, one after another. A pair of programs stores its sum; @dkdv_end adds up all pairs."""
    assert host_lines("shared", "_heads", "@dkdv_end", "dKdV_SEMAPHORE", "%split_pairs") == [
        "%split_pairs = map expr((splits + 1) // 2) : i32[] @reg",
        "%dKdV_SEMAPHORE = alloc fill(0) : i32[B, Hkv, split_pairs, Nk] @hbm",
        "%dK_heads = alloc where(split_pairs > 1) otherwise(%dK) : T[B, Hkv, split_pairs, Nk, D_QK] @hbm",
        "%dV_heads = alloc where(split_pairs > 1) otherwise(%dV) : T[B, Hkv, split_pairs, Nk, D_V] @hbm",
        "launch @bwd args(dK=%dK_heads, dV=%dV_heads)",
        "%Summed_heads = if then(@sum_heads) where(split_pairs > 1)",
        "block @sum_heads",
        "launch @dkdv_end args(DK_PARTIAL=%dK_heads, DV_PARTIAL=%dV_heads) sizes(splits=split_pairs)",
        "launch @dkdv_end args(DK_PARTIAL=%dK_partial, DV_PARTIAL=%dV_partial)",
    ]
    assert "select(_use_fused > 0, 2, group)" in host_lines("shared", "%splits = ")[0]
    text = print_kernel(backward(lowered("shared")))
    assert text.splitlines()[0].endswith("reversed_group, split in splits, hkv in Hkv, b in B)")
    assert text.count(" heads(g_first .. g_end)") == 3 and "%g_first = map expr((group*split) // splits) " in text
    assert (
        "producer_load %Q_pipeline %Q[b, g + group*hkv, q, d_qk]" in text
        and "tma_store %dK[b, hkv, split // 2, kv, d_qk]" in text
    )


def test_a_program_has_one_query_head_where_inputs_differ_by_head() -> None:
    """@dkdv_end adds up the results of the programs of a group."""
    text = print_module(lowered("separate"))
    assert host_lines("separate", "_HEADS", "_partial", "@dkdv_end") == [
        "%DK_HEADS = alloc : T[B, Hq, Nk, D_QK] @hbm",
        "%DV_HEADS = alloc : T[B, Hq, Nk, D_V] @hbm",
        "launch @bwd args(dK=%DK_HEADS, dV=%DV_HEADS)",
        "%DK_PARTIAL = view %DK_HEADS by(heads) : T[B, Hkv, group, Nk, D_QK] @hbm",
        "%DV_PARTIAL = view %DV_HEADS by(heads) : T[B, Hkv, group, Nk, D_V] @hbm",
        "launch @dkdv_end sizes(splits=group)",
        "%dK_partial = alloc where(splits > 1) otherwise(%dK) : T[B, Hkv, splits, Nk, D_QK] @hbm",
        "%dV_partial = alloc where(splits > 1) otherwise(%dV) : T[B, Hkv, splits, Nk, D_V] @hbm",
        "launch @dkdv args(dK=%dK_partial, dV=%dV_partial)",
        "%Summed_partial = if then(@sum_partial) where(splits > 1)",
        "block @sum_partial",
        "launch @dkdv_end args(DK_PARTIAL=%dK_partial, DV_PARTIAL=%dV_partial)",
    ]
    assert "kernel @dkdv_end program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV), hkv in Hkv, b in B)\n" in text
    assert "    %dK = arg out : T[B, Hq, Nk, D_QK] @hbm\n" in text


def test_names_of_gradients_in_the_host_program_are_reserved() -> None:
    for name in re.findall(r"^ +(d[kv]_\w+) = ", render(lowered("shared"))["__init__.py"], re.MULTILINE):
        assert name_problem(name), name


@pytest.mark.share(16)
def test_the_sizes_of_a_call_select_the_fused_or_the_separate_kernels() -> None:
    text = print_module(lowered("wide"))
    enough = "Nk >= 1024 and Nq >= 1024 and B*Hq*Nk >= 480*num_SMs"
    short = "(Nk >= 512 and Nq >= 512 and B*Hq*Nk >= 1536*num_SMs)"
    assert (
        f"if then(@fused) where(need_kv and need_q and ({short} or ({enough})) and fused > 0) orelse(@separate)" in text
    )
    assert f"{enough} and Nk <= 8192 and fused > 0) orelse(@separate)" in print_module(lowered("blocks"))
    printed = render(lower(spec("full_mha")))["__init__.py"]
    assert 'fused = runtime.is_scheduled(kernels, "bwd", q, k.shape[2])' in printed
