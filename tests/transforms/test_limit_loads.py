"""limit-loads limits loads of partial tiles to the rows that data bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen.errors import VerifyError
from attngen.ir import Module, only, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.transforms.limit_loads import LimitLoads
from attngen.verify import verify
from tests.helpers import SPECS, changes, edit, target

SHIFTED = {"expr": "kv_idx <= q_idx + far", "params": {"far": {"scalar": "int"}}}


def before(mask: Any, **more: Any) -> Module:
    """Return a small module as it is before the pass."""
    return lower(make_spec({"name": "small", "head_dim": 16, "mask": mask, **more}), "drop-unspecialized")


def limits(module: Module) -> dict[str, set[str]]:
    """Return the names of the limited loads of each kernel, by the kernel's name."""
    found = {k.name: {op.name for op in only(k.ops(), tile.Load) if op.needed} for k in module.kernels}
    return {name: loads for name, loads in found.items() if loads}


def lines(mask: Any, **more: Any) -> list[str]:
    """Return the lines that the pass changes in a small module."""
    return changes(LimitLoads(), before(mask, **more))


def test_keys_past_a_length_are_not_loaded() -> None:
    assert lines({"key_padding": {"lengths": True}}, backward=False) == [
        "+ %kv_needed_end = map expr(min(Nk, kv_lengths)) uses(kv_lengths=%kv_lengths) : i32[] @reg",
        "- %k = load %K[b, h, kv, d_qk] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_QK] @sram",
        (
            "+ %k = load %K[b, h, kv, d_qk] check(kv if partial) via(descriptor) needed(0 .. kv_needed_end) : "
            "T[BLOCK_KV, D_QK] @sram"
        ),
        "- %v = load %V[b, h, kv, d_v] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_V] @sram",
        (
            "+ %v = load %V[b, h, kv, d_v] check(kv if partial) via(descriptor) needed(0 .. kv_needed_end) : "
            "T[BLOCK_KV, D_V] @sram"
        ),
    ]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "more", "found"),
    [
        ("causal", {}, {}),
        ({"sliding_window": {"left": 30}}, {}, {}),
        ("prefix_lm", {}, {}),
        ({"any_of": ["causal", {"key_padding": {"lengths": True}}]}, {}, {}),
        (
            {"all_of": ["causal", {"key_padding": {"lengths": True}}]},
            {},
            {"fwd": ["k", "v"], "dq": ["k", "v"], "jvp": ["k", "v", "tk", "tv"]},
        ),
        (
            {"document": {"packed": True}},
            {},
            {
                "fwd": ["k", "v"],
                "dq": ["k", "v"],
                "dkdv": ["q", "do", "lse2", "delta"],
                "bwd": ["q", "do", "lse2", "delta"],
                "jvp": ["k", "v", "tk", "tv"],
            },
        ),
        (
            SHIFTED,
            {"schedule": {"order": "kv_outer"}},
            {"fwd": ["q"], "bwd": ["q", "do", "lse2", "delta"], "jvp": ["k", "v", "tk", "tv"]},
        ),
        ("causal", {"cache": "contiguous", "backward": False}, {}),
        (
            {"sliding_window": {"left": 30, "right": 0}},
            {"cache": "contiguous", "backward": False},
            {"decode": ["k", "v"], "prefill": ["k", "v"]},
        ),
    ],
    ids=str,
)
def test_which_loads_are_limited(mask: Any, more: dict[str, Any], found: dict[str, list[str]]) -> None:
    """Loads are limited where data bounds the rows, as lengths in a cache do; a window leaves earlier keys out."""
    assert limits(LimitLoads().run(before(mask, **more))) == {kernel: set(names) for kernel, names in found.items()}


@pytest.mark.parametrize("name", SPECS)
def test_warp_specialized_kernels_have_no_limits(name: str) -> None:
    assert not limits(replace(target(name), kernels=target(name).warp_specialized))


@pytest.mark.share(4)
def test_an_accumulator_in_hbm_is_not_limited() -> None:
    """Its rows outside the range would be loaded as zeros, and stored."""
    module = LimitLoads().run(before(SHIFTED, schedule={"order": "kv_outer"}))
    text = print_module(module)
    load = next(line for line in text.splitlines() if "%acc = load" in line and "check(q if partial)" in line)
    limited = load.replace("check(q if partial)", "check(q if partial) needed(q_needed_first .. Nq)")
    reason = "%acc is limited to rows of O_ACC, which the kernel also stores; expected all of its rows"
    with pytest.raises(VerifyError, match=reason):
        verify(parse_module(edit(text, (load, limited))))


def test_the_limits_print_and_parse() -> None:
    text = print_module(target("packed_document_gqa"))
    assert "needed(document_first_least .. kv_needed_end)" in text
    assert print_module(parse_module(text, "again.ir")) == text
