"""Keys and values in a latent (MLA): requirements of the spec, and the IR of its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from attngen.errors import SpecError, VerifyError
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.spec import make_spec
from attngen.verify import verify
from attngen.verify.host import reasons
from tests.helpers import edit, lowered, target

pytestmark = pytest.mark.numerics

MLA: dict[str, Any] = {
    "name": "with_cache",
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
        ({"cache": None}, "`kv` is for keys in a cache, but there is none; expected `cache` as well"),
        ({"backward": None}, "`kv` is for serving, but the spec has a backward; expected `backward: false` as well"),
        ({"heads": {"sharing": "gqa"}}, "`heads` has `gqa`, but all heads share one latent; expected `mqa`"),
        (
            {"head_dim": 32},
            "`head_dim` is 32 for q and k; expected 48: 32 of the latent and 16 of the rotated part",
        ),
        ({"kv": {"latent": {"rope": 8}}}, "expected a whole number from 16 to 128 that is a multiple of 16"),
        (
            {"kv": None, "head_dim": {"qk": 576, "v": 512}},
            "`head_dim` is 576; expected at most 512, or `kv: {latent: ...}` as well",
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
            "`latent rope=32`; expected a cache, a multiple of 16 up to 128, and head_dim qk 544",
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
    """Scores without the RoPE columns, or with wrong ones, are refused."""
    with pytest.raises(VerifyError) as error:
        verify(_read((old, new)))
    assert reason in str(error.value)


def _of_kernel(name: str, change: Callable[[str], str]) -> Module:
    """Return the module with one kernel's text changed."""
    text = print_module(target("decode_mla"))
    at = text.index(f"kernel @{name} ")
    end = text.find("\nkernel ", at + 1)
    return parse_module(text[:at] + change(text[at:end]) + text[end:])


def test_all_columns_are_multiplied() -> None:
    """A kernel without the RoPE columns computes other scores, and is refused."""

    def change(kernel: str) -> str:
        kept = [
            line for line in kernel.splitlines() if not re.match(r"\s*%(Q_ROPE|K_ROPE|q_rope|k_rope|s_rope)\w* =", line)
        ]
        return "\n".join(kept).replace(" acc(%s_rope)", "")

    with pytest.raises(VerifyError, match="rule `latents`: kernel @prefill: it reads neither Q_ROPE nor K_ROPE"):
        verify(_of_kernel("prefill", change))


def test_values_are_those_that_are_given() -> None:
    """Without a cache, values come from V. The latent's columns have the same width but are not the values."""

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
    """In a cache the latent's columns are both K and V, and no kernel loads V again."""
    for kernel in lowered("decode_mla")["build"].kernels:
        names = {arg.name for arg in kernel.args}
        assert ("V" in names) == (kernel.name == "fwd")
        assert not any("D_QK" in t.dims for op in kernel.ops() for t in op.results().values())
