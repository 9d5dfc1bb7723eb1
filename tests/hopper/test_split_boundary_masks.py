"""Masks whose bounds are looked at only in tiles that they cut: the pass, what is refused, what is computed, and
what is printed."""

from __future__ import annotations

import ast
import itertools
from typing import Any

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir.expr import parse
from attngen.ir.graph import Module
from attngen.ir.ops import Mask
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.tiles.boundary import cut_by, is_whole_without
from attngen.tiles.tiles import evaluate
from attngen.verify import verify
from tests.helpers import target
from tests.hopper.common import after, edited_module, kernel, whole
from tests.hopper.test_numerics import hold
from tests.hopper.test_passes import lines
from tests.transforms.test_equality import Unequal

WINDOW, STREAMING, DOCUMENTS = "window_gqa", "streaming_gqa", "document_gqa"
LEFT_40 = {"sliding_window": {"left": 40}}
INTS = {name: {"scalar": "int"} for name in ("first", "second", "third")}
BOTH_ENDS, LENGTHS = {"sliding_window": {"left": 1023, "right": 0}}, {"key_padding": {"lengths": True}}
CUT_LEFT, CUT_RIGHT = "BLOCK_Q + Nk - Nq + q_start - 1024 > kv_start", "BLOCK_KV + kv_start > Nk - Nq + q_start + 1"
LEFT = f"mask %s where(kv_idx >= Nk - Nq + q_idx - 1023) unswitch({CUT_LEFT})"
RIGHT = f"where(kv_idx <= Nk - Nq + q_idx) unswitch({CUT_RIGHT})"


def asked_for(mask: Any, dim: int = 128) -> Spec:
    return make_spec(
        {"name": "made", "mask": mask, "head_dim": dim, "heads": {"sharing": "gqa"}, "schedule": {"backend": "hopper"}}
    )


def asked(mask: Any, dim: int = 128) -> Module:
    return lower(asked_for(mask, dim))


def masks(module: Module) -> list[Mask]:
    """Those of later tiles."""
    warp_specialized = module.warp_specialized[0]
    return [op for op in warp_specialized.ops() if isinstance(op, Mask) and not op.name.endswith("_in_first")]


# ---------------------------------------------------------------------------------------------- the pass


def test_each_bound_of_a_window_becomes_a_mask_with_a_cut() -> None:
    made = after(WINDOW)["split-boundary-masks"]
    before, now = (lines(name, "step", WINDOW) for name in ("hoist-bias", "split-boundary-masks"))
    at = next(i for i, line in enumerate(before) if line.startswith("%masked = "))
    assert now == [
        *before[:at],
        f"%masked_1 = {LEFT} : f32[BLOCK_Q, BLOCK_KV] @reg",
        f"%masked = mask %masked_1 {RIGHT} : f32[BLOCK_Q, BLOCK_KV] @reg",
        *before[at + 1 :],
    ]
    assert made.kernels == after(WINDOW)["hoist-bias"].kernels and print_module(
        parse_module(print_module(made))
    ) == print_module(made)


@pytest.mark.parametrize(
    ("mask", "cuts"),
    [
        ("causal", [False]),  # all partial tiles are cut by it
        ({"prefix_lm": {"length": 1024}}, [False]),  # the other part is the end of the keys
        ({"all_of": [BOTH_ENDS, LENGTHS]}, [True, True]),  # one comparison has the end and the diagonal
        (
            {"all_of": ["causal", {"document": {"sorted": True}}]},
            [False],
        ),  # each row has bounds of its own, which are data
        ({"all_of": ["causal", "document"]}, [True, False]),
        ({"dilated": {"step": 4, "reach": 2048}}, [False]),  # full tiles are masked, too
    ],
)
def test_masks_are_split_where_tiles_are_cut_by_some_parts_alone(mask: Any, cuts: list[bool]) -> None:
    assert [op.unswitch is not None for op in masks(asked(mask))] == cuts


@pytest.mark.parametrize(
    ("mask", "dim"),
    [
        ({"all_of": [BOTH_ENDS, {"block_sparse": {"block": 128}}]}, 128),  # tiles are listed
        ({"all_of": ["causal", "document"]}, 256),  # data, and a wide head
        (
            {"all_of": ["causal", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
            256,
        ),  # three comparisons, and a wide head
        ({"all_of": [BOTH_ENDS, "key_padding"]}, 64),  # two comparisons beside data
        (
            {"all_of": ["causal", "key_padding", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
            64,
        ),  # three of bounds, beside data
    ],
)
def test_masks_that_would_spill_in_parts_stay_whole(mask: Any, dim: int) -> None:
    (op,) = masks(asked(mask, dim))
    assert op.unswitch is None


CONDITIONS = (
    "kv_idx <= q_idx + 5",
    "kv_idx > q_idx - 9",
    "2*kv_idx >= q_idx - 3",
    "kv_idx < 20",
    "kv_idx >= q_idx - 9 or kv_idx < 4",
    "kv_idx < q_idx - 9 or kv_idx > q_idx + 9",
    "kv_idx < min(30, q_idx + 2)",
    "kv_idx >= max(3, q_idx - 12)",
    "kv_idx // 8 >= q_idx // 8",
    "abs(q_idx - kv_idx) <= 30",
    "kv_idx <= (q_idx // 3) * 3 + 8",
)


@pytest.mark.parametrize("text", ["2*kv_idx < q_idx % 5 - 6", "2*kv_idx > q_idx % 5 - 6"])
def test_what_is_the_same_for_all_tiles_is_no_cut(text: str) -> None:
    """Its cut would be `true` or `false`."""
    assert cut_by(parse(text, "a test"), frozenset()) is None


FLOATS = ({"scalar": "float"}, {"tensor": ["B"], "dtype": "fp32"})


@pytest.mark.parametrize("x", FLOATS)
def test_comparisons_with_numbers_that_are_no_integers_have_no_cut(x: Any) -> None:
    """Their bounds are proven over integers."""
    name = "x" if "scalar" in x else "x[b]"
    module = asked(
        {
            "all_of": [
                "causal",
                {
                    "any_of": [
                        {"expr": f"3*kv_idx >= q_idx - {name}", "params": {"x": x}},
                        {"sink_tokens": {"count": 4}},
                    ]
                },
            ]
        }
    )
    assert [None if op.unswitch is None else str(op.unswitch) for op in masks(module)] == [CUT_RIGHT, None]


@pytest.mark.parametrize("text", CONDITIONS)
def test_where_a_cut_is_false_the_condition_holds_for_all_pairs(text: str) -> None:
    """By counting; and most tiles in which it holds are not cut."""
    where, rows, keys = parse(text, "a test"), 4, 4
    cut = cut_by(where, frozenset())
    if cut is None:
        assert text.startswith("abs")  # two bounds in one
        return
    assert is_whole_without(cut, where, frozenset())
    found = []
    for q_start, kv_start in itertools.product(range(0, 48, rows), range(0, 48, keys)):
        pairs = itertools.product(range(q_start, q_start + rows), range(kv_start, kv_start + keys))
        whole = all(evaluate(where, {"q_idx": q, "kv_idx": kv}) for q, kv in pairs)
        passed = not evaluate(cut, {"q_start": q_start, "kv_start": kv_start, "BLOCK_Q": rows, "BLOCK_KV": keys})
        assert whole or not passed
        found.append((whole, passed))
    assert sum(passed for _, passed in found) > 0.6 * sum(whole for whole, _ in found)


# ---------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "a row too few": ("q_start - 1024 > kv_start", "q_start - 1025 > kv_start"),
    "a key too few": (CUT_RIGHT, "BLOCK_KV + kv_start > Nk - Nq + q_start + 2"),
    "the other way round": (CUT_RIGHT, "BLOCK_KV + kv_start < Nk - Nq + q_start + 1"),
    "the other bound's": (CUT_RIGHT, CUT_LEFT),
    "no comparison": (CUT_LEFT, "false"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_cut_that_passes_over_a_hidden_pair_is_refused(what: str) -> None:
    with pytest.raises(
        VerifyError, match="rule `cuts`: .* is passed over in tiles that .* is not proven for; expected a weaker"
    ):
        verify(edited_module(after(WINDOW)["split-boundary-masks"], REFUSED[what]))


@pytest.mark.parametrize("name", ["kv_idx", "q_idx", "h", "nothing"])
def test_a_cut_names_places_and_numbers_alone(name: str) -> None:
    made = edited_module(after(WINDOW)["split-boundary-masks"], (CUT_RIGHT, f"{CUT_RIGHT} or {name} > 3"))
    with pytest.raises(
        VerifyError, match=f"rule `cuts`: .* asks for `{name}` to know whether it cuts a tile; expected BLOCK_KV, "
    ):
        verify(made)


def test_a_weaker_cut_is_what_the_text_says() -> None:
    made = edited_module(
        after(WINDOW)["split-boundary-masks"], ("q_start - 1024 > kv_start", "q_start - 1000 > kv_start")
    )
    assert "unswitch(BLOCK_Q + Nk - Nq + q_start - 1000 > kv_start)" in print_module(verify(made))


def test_data_has_no_cut() -> None:
    made = after(DOCUMENTS)["split-boundary-masks"]
    text = "where(document_q == document_kv)"
    with pytest.raises(VerifyError, match="rule `cuts`: .*; expected no `cut`"):
        verify(edited_module(made, (text, f"{text} unswitch(kv_start > q_start)")))


def test_portable_kernels_have_no_cuts() -> None:
    module = target(WINDOW)
    text = print_module(module)
    at = text.index("%masked = mask")
    end = text.index(" : f32", at)
    with pytest.raises(VerifyError, match="rule `cuts`: .* expected that of copies of a role"):
        verify(parse_module(f"{text[:end]} unswitch(kv_start > q_start){text[end:]}"))


# ---------------------------------------------------------------------------------------------- what is computed and printed


COMPUTED = {
    "window": {"sliding_window": {"left": 40, "right": 20}},
    "padded window": {"all_of": [LEFT_40, "causal", LENGTHS]},
    "streaming": {"all_of": ["causal", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
    "chunks": {"all_of": ["causal", {"expr": "q_idx // 24 == kv_idx // 24"}]},
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("what", COMPUTED)
def test_split_boundary_masks_compute_what_naive_attention_does(what: str, dim: int) -> None:
    spec, module = asked_for(COMPUTED[what], dim), asked(COMPUTED[what], dim)
    assert any(op.unswitch is not None for op in masks(module)) != (dim == 256 and what in ("streaming", "chunks"))
    for seed in range(6):
        hold(module, what, seed, (65, 97) if seed == 5 else None, spec)


PRINTED = (
    {
        "all_of": [
            {"chunked": {"size": 16}},
            "causal",
            {"expr": "kv_idx >= q_idx // 2 - 1"},
            LENGTHS,
            {"expr": "kv_idx < q_idx + 8"},
        ]
    },
    {"all_of": ["document", {"chunked": {"size": 512}}, BOTH_ENDS, LENGTHS]},
    {"all_of": ["causal", {"expr": "kv_idx + 4 >= q_idx % 5"}]},
    {"all_of": ["causal", {"expr": "kv_idx >= q_idx % 128 - 127 or kv_idx < 4"}]},
    {
        "all_of": [
            LEFT_40,
            {"expr": "kv_idx < min(q_idx + first, q_idx * 2 + second, q_idx // 3 + third)", "params": INTS},
        ]
    },
)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", PRINTED)
def test_masks_of_many_parts_are_printed_as_python(mask: Any, dim: int) -> None:
    ast.parse(render(asked(mask, dim))["hopper.py"])


@pytest.mark.parametrize(("which", "wrong"), [("BLOCK_Q + Nk", "Nk"), ("BLOCK_KV + kv_start > Nk", "kv_start > Nk")])
def test_a_cut_that_passes_over_a_hidden_pair_shows(which: str, wrong: str) -> None:
    """The numbers tell, too, not only the rule."""
    module = asked(COMPUTED["window"], 128)
    with pytest.raises(Unequal):
        for seed in range(20):
            hold(edited_module(module, (which, wrong)), "window", seed, (65, 97), asked_for(COMPUTED["window"], 128))


def test_the_printed_kernel_looks_at_each_bound_where_it_cuts() -> None:
    text = render(whole(STREAMING))["hopper.py"]
    tests = ("if kv_start + BLOCK_KV > 1 + Nk + q_start - Nq:", "if Nk + q_start + ROWS - 1024 - Nq > kv_start:")
    assert all(text.count(f"{' ' * n}{test}\n{' ' * n}    s = gl.where(") == 1 for test in tests for n in (12, 20))
    assert not any(op.unswitch is not None for op in kernel("causal_gqa").ops() if isinstance(op, Mask))
