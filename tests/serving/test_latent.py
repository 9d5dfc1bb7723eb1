"""Keys and values of a latent (MLA): what the spec asks for, and the IR of its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from attngen.errors import SpecError, VerifyError
from attngen.ir.graph import Module
from attngen.ir.text import parse_module, print_module
from attngen.spec import make_spec
from attngen.verify import verify
from attngen.verify.host import reasons
from tests.helpers import edit, lowered, target

MLA: dict[str, Any] = {
    "name": "served",
    "heads": {"sharing": "mqa"},
    "head_dim": {"qk": 48, "v": 32},
    "mask": "causal",
    "backward": False,
    "cache": "contiguous",
    "kv": {"latent": {"rope": 16}},
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache": None}, "`kv` is for keys in a cache, and there is none; expected `cache` beside it"),
        ({"backward": None}, "`kv` is for serving, and the spec has a backward; expected `backward: false` beside it"),
        ({"heads": {"sharing": "gqa"}}, "`heads` has `gqa`, and a latent is one for all heads; expected `mqa`"),
        (
            {"head_dim": 32},
            "`head_dim` has 32 columns of q and k; expected 48: 32 of the latent and 16 that are rotated",
        ),
        ({"kv": {"latent": {"rope": 8}}}, "expected a whole number from 16 to 128 that is a multiple of 16"),
        (
            {"kv": None, "head_dim": {"qk": 576, "v": 512}},
            "`head_dim` has 576 columns; expected at most 512, or `kv: {latent: ...}` beside it",
        ),
    ],
)
def test_what_a_latent_needs(change: dict[str, Any], reason: str) -> None:
    given = {key: value for key, value in {**MLA, **change}.items() if value is not None}
    with pytest.raises(SpecError, match="expected") as error:
        make_spec(given)
    assert reason in str(error.value)


def _read(*edits: tuple[str, str]) -> Module:
    return parse_module(edit(print_module(target("decode_mla")), *edits))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "latent rope=64",
            "latent rope=32",
            "`latent rope=32`; expected a cache, 16 to 128 columns by 16, and 544 of q and k",
        ),
        ("dot %q %k over(D_V) acc(%s_rope)", "dot %q %k over(D_V)", "kernel @fwd: %s_rope is read by nothing"),
        (
            "dot %q_rope %k_rope over(D_ROPE)",
            "dot %k_rope %q_rope over(D_ROPE)",
            "the product is f32[BLOCK_KV, BLOCK_Q]",
        ),
        ("base %K_ROPE[b, 0]", "base %K[b, 0]", "%k_rope indexes D_V of %K by `d_rope`"),
    ],
)
def test_rules(old: str, new: str, reason: str) -> None:
    """Scores without the columns that are rotated, or with others, are refused."""
    with pytest.raises(VerifyError) as error:
        verify(_read((old, new)))
    assert reason in str(error.value)


def _of_kernel(name: str, change: Callable[[str], str]) -> Module:
    """The module with one kernel's text changed."""
    text = print_module(target("decode_mla"))
    at = text.index(f"kernel @{name} ")
    end = text.find("\nkernel ", at + 1)
    return parse_module(text[:at] + change(text[at:end]) + text[end:])


def test_all_columns_are_multiplied() -> None:
    """A kernel that knows nothing of the columns that are rotated computes other scores."""

    def change(kernel: str) -> str:
        kept = [
            line for line in kernel.splitlines() if not re.match(r"\s*%(Q_ROPE|K_ROPE|q_rope|k_rope|s_rope)\w* =", line)
        ]
        return "\n".join(kept).replace(" acc(%s_rope)", "")

    with pytest.raises(VerifyError, match="rule `latents`: kernel @prefill: it reads no columns that are rotated"):
        verify(_of_kernel("prefill", change))


def test_values_are_those_that_are_given() -> None:
    """Without a cache, values are V's: the columns of the latent are as wide, and something else."""

    def change(kernel: str) -> str:
        kept = [line for line in kernel.splitlines() if not re.match(r"\s*%(V|v|V_head) =", line)]
        return "\n".join(kept).replace("dot %p_cast %v ", "dot %p_cast %k ")

    with pytest.raises(
        VerifyError, match="rule `latents`: kernel @fwd: %acc_next multiplies weights by %k; expected a tile of %V"
    ):
        verify(_of_kernel("fwd", change))


def test_views_of_columns_have_the_dimensions_of_their_part() -> None:
    text = print_module(target("decode_mla"))
    line = "%k_rope = view %K_CACHE by(last_columns)"
    at = next(found for found in text.splitlines() if "by(last_columns) : T[pages" in found)
    broken = parse_module(text.replace(at, at.replace("D_ROPE", "D_V")))
    assert any("expected [pages, Hkv, 64, D_ROPE]" in reason for _, reason in reasons(broken)), line


def test_values_are_loaded_once() -> None:
    """In a cache the columns of the latent are K and V, and nothing is as wide as 1,024."""
    for kernel in lowered("decode_mla")["build"].kernels:
        names = {arg.name for arg in kernel.args}
        assert ("V" in names) == (kernel.name == "fwd")
        assert not any("D_QK" in t.dims for op in kernel.ops() for t in op.results().values())
