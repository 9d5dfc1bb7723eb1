"""split-boundary-masks, which tests each bound of a mask only in tiles that it cuts: the pass, IR that is refused,
results, and generated code."""

from __future__ import annotations

import ast
import itertools
from typing import Any

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir import Module, only, parse, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.passes.split_boundary_masks import SplitBoundaryMasks
from attngen.tiles.boundary import is_full_unless, unswitch_condition
from attngen.tiles.tiles import evaluate
from attngen.verify import verify
from tests.helpers import target
from tests.hopper.common import after_passes, edited_module, forward_kernel, lines, lowered
from tests.hopper.test_numerics import compare_with_naive
from tests.hopper.texts import texts_of
from tests.transforms.equality import Unequal

WINDOW, STREAMING, DOCUMENTS = "window_gqa", "streaming_gqa", "document_gqa"
WINDOW_TEXTS = texts_of(WINDOW, "fwd")
LEFT_40 = {"sliding_window": {"left": 40}}
INTS = {name: {"scalar": "int"} for name in ("first", "second", "third")}
BOTH_ENDS, LENGTHS = {"sliding_window": {"left": 1023, "right": 0}}, {"key_padding": {"lengths": True}}
LEFT_CONDITION, RIGHT_CONDITION = (
    "BLOCK_Q + Nk - Nq + q_start - 1024 > kv_start",
    "BLOCK_KV + kv_start > Nk - Nq + q_start + 1",
)
LEFT = f"mask %s where(kv_idx >= Nk - Nq + q_idx - 1023) unswitch({LEFT_CONDITION})"
RIGHT = f"where(kv_idx <= Nk - Nq + q_idx) unswitch({RIGHT_CONDITION})"


def spec_with(mask: Any, dim: int = 128) -> Spec:
    return make_spec(
        {"name": "made", "mask": mask, "head_dim": dim, "heads": {"sharing": "gqa"}, "schedule": {"backend": "hopper"}}
    )


def lowered_with(mask: Any, dim: int = 128) -> Module:
    return lower(spec_with(mask, dim))


def masks(module: Module) -> list[tile.Mask]:
    """The masks of all tiles except the first."""
    warp_specialized = module.warp_specialized[0]
    return [op for op in only(warp_specialized.ops(), tile.Mask) if not op.name.endswith("_in_first")]


# ---------------------------------------------------------------------------------------------- the pass


def test_each_bound_of_a_window_becomes_a_mask_with_an_unswitch_condition() -> None:
    made = WINDOW_TEXTS.module("split-boundary-masks")
    before, now = (lines(name, "step", WINDOW) for name in ("warp-specialize", "split-boundary-masks"))
    at = next(i for i, line in enumerate(before) if line.startswith("%masked = "))
    assert now == [
        *before[:at],
        f"%masked_1 = {LEFT} : f32[BLOCK_Q, BLOCK_KV] @reg",
        f"%masked = mask %masked_1 {RIGHT} : f32[BLOCK_Q, BLOCK_KV] @reg",
        *before[at + 1 :],
    ]
    assert print_module(parse_module(print_module(made))) == print_module(made)
    assert SplitBoundaryMasks().run(WINDOW_TEXTS.module("warp-specialize")).kernels == made.kernels


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "unswitched"),
    [
        ("causal", [False]),  # it cuts all partial tiles
        ({"prefix_lm": {"length": 1024}}, [False]),  # its other bound is the end of the keys
        ({"all_of": [BOTH_ENDS, LENGTHS]}, [True, True]),  # one comparison covers the end and the diagonal
        (
            {"all_of": ["causal", {"document": {"sorted": True}}]},
            [False],
        ),  # each row has its own bounds, which are data
        ({"all_of": ["causal", "document"]}, [True, False]),
        ({"dilated": {"step": 4, "reach": 2048}}, [False]),  # full tiles are masked as well
    ],
)
def test_masks_are_split_where_only_some_parts_cut_a_tile(mask: Any, unswitched: list[bool]) -> None:
    assert [op.unswitch is not None for op in masks(lowered_with(mask))] == unswitched


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "dim"),
    [
        ({"all_of": [BOTH_ENDS, {"block_sparse": {"block": 128}}]}, 128),  # tiles are listed
        ({"all_of": ["causal", "document"]}, 256),  # data, and a wide head
        (
            {"all_of": ["causal", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
            256,
        ),  # three comparisons, and a wide head
        ({"all_of": [BOTH_ENDS, "key_padding"]}, 64),  # two comparisons in addition to data
        (
            {"all_of": ["causal", "key_padding", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
            64,
        ),  # three comparisons in addition to data
    ],
)
def test_masks_that_would_spill_in_parts_stay_whole(mask: Any, dim: int) -> None:
    (op,) = masks(lowered_with(mask, dim))
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
def test_a_comparison_that_is_equal_in_all_tiles_has_no_unswitch_condition(text: str) -> None:
    """The condition would be `true` or `false`."""
    assert unswitch_condition(parse(text, "a test"), frozenset()) is None


FLOATS = ({"scalar": "float"}, {"tensor": ["B"], "dtype": "fp32"})


@pytest.mark.share(16)
@pytest.mark.parametrize("x", FLOATS)
def test_comparisons_with_floats_have_no_unswitch_condition(x: Any) -> None:
    """Their bounds are proven over integers."""
    name = "x" if "scalar" in x else "x[b]"
    module = lowered_with(
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
    assert [None if op.unswitch is None else str(op.unswitch) for op in masks(module)] == [RIGHT_CONDITION, None]


@pytest.mark.parametrize("text", CONDITIONS)
def test_where_an_unswitch_condition_is_false_the_mask_holds_for_all_pairs(text: str) -> None:
    """All pairs of each tile are enumerated. In most tiles in which the mask holds it is skipped."""
    where, rows, keys = parse(text, "a test"), 4, 4
    condition = unswitch_condition(where, frozenset())
    if condition is None:
        assert text.startswith("abs")  # two bounds in one
        return
    assert is_full_unless(condition, where, frozenset())
    found = []
    for q_start, kv_start in itertools.product(range(0, 48, rows), range(0, 48, keys)):
        pairs = itertools.product(range(q_start, q_start + rows), range(kv_start, kv_start + keys))
        whole = all(evaluate(where, {"q_idx": q, "kv_idx": kv}) for q, kv in pairs)
        skipped = not evaluate(condition, {"q_start": q_start, "kv_start": kv_start, "BLOCK_Q": rows, "BLOCK_KV": keys})
        assert whole or not skipped
        found.append((whole, skipped))
    assert sum(skipped for _, skipped in found) > 0.6 * sum(whole for whole, _ in found)


# ---------------------------------------------------------------------------------------------- IR that is refused

REFUSED = {
    "a row too few": ("q_start - 1024 > kv_start", "q_start - 1025 > kv_start"),
    "a key too few": (RIGHT_CONDITION, "BLOCK_KV + kv_start > Nk - Nq + q_start + 2"),
    "the other way round": (RIGHT_CONDITION, "BLOCK_KV + kv_start < Nk - Nq + q_start + 1"),
    "the condition of the other bound": (RIGHT_CONDITION, LEFT_CONDITION),
    "no comparison": (LEFT_CONDITION, "false"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_an_unswitch_condition_that_skips_a_hidden_pair_is_refused(mistake: str) -> None:
    with pytest.raises(
        VerifyError,
        match="rule `unswitch`: .* is skipped in tiles in which .* is not proven to hold; expected a weaker",
    ):
        verify(edited_module(WINDOW_TEXTS.module("split-boundary-masks"), REFUSED[mistake]))


@pytest.mark.parametrize("name", ["kv_idx", "q_idx", "h", "nothing"])
def test_an_unswitch_condition_depends_only_on_tile_positions_and_scalars(name: str) -> None:
    made = edited_module(
        WINDOW_TEXTS.module("split-boundary-masks"), (RIGHT_CONDITION, f"{RIGHT_CONDITION} or {name} > 3")
    )
    with pytest.raises(
        VerifyError, match=f"rule `unswitch`: .* has an unswitch condition on `{name}`; expected BLOCK_KV, "
    ):
        verify(made)


def test_a_weaker_unswitch_condition_is_kept() -> None:
    made = edited_module(
        WINDOW_TEXTS.module("split-boundary-masks"), ("q_start - 1024 > kv_start", "q_start - 1000 > kv_start")
    )
    assert "unswitch(BLOCK_Q + Nk - Nq + q_start - 1000 > kv_start)" in print_module(verify(made))


def test_a_mask_of_data_has_no_unswitch_condition() -> None:
    made = after_passes(DOCUMENTS)["split-boundary-masks"]
    text = "where(document_q == document_kv)"
    with pytest.raises(VerifyError, match="rule `unswitch`: .*; expected no `unswitch`"):
        verify(edited_module(made, (text, f"{text} unswitch(kv_start > q_start)")))


def test_portable_kernels_have_no_unswitch_conditions() -> None:
    module = target(WINDOW)
    text = print_module(module)
    at = text.index("%masked = mask")
    end = text.index(" : f32", at)
    with pytest.raises(VerifyError, match="rule `unswitch`: .* expected none in a portable kernel"):
        verify(parse_module(f"{text[:end]} unswitch(kv_start > q_start){text[end:]}"))


# ---------------------------------------------------------------------------------------------- results and code


COMPUTED = {
    "window": {"sliding_window": {"left": 40, "right": 20}},
    "padded window": {"all_of": [LEFT_40, "causal", LENGTHS]},
    "streaming": {"all_of": ["causal", {"any_of": [LEFT_40, {"sink_tokens": {"count": 4}}]}]},
    "chunks": {"all_of": ["causal", {"expr": "q_idx // 24 == kv_idx // 24"}]},
}


@pytest.mark.share(16)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_those_of_naive_attention(name: str, dim: int) -> None:
    spec, module = spec_with(COMPUTED[name], dim), lowered_with(COMPUTED[name], dim)
    assert any(op.unswitch is not None for op in masks(module)) != (dim == 256 and name in ("streaming", "chunks"))
    for seed in range(6):
        compare_with_naive(module, name, seed, (65, 97) if seed == 5 else None, spec)


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


@pytest.mark.share(16)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", PRINTED)
def test_masks_of_many_parts_are_printed_as_python(mask: Any, dim: int) -> None:
    ast.parse(render(lowered_with(mask, dim))["hopper.py"])


@pytest.mark.share(4)
@pytest.mark.parametrize(("part", "wrong"), [("BLOCK_Q + Nk", "Nk"), ("BLOCK_KV + kv_start > Nk", "kv_start > Nk")])
def test_an_unswitch_condition_that_skips_a_hidden_pair_shows(part: str, wrong: str) -> None:
    """The mistake shows in results, not only in the rule."""
    module = lowered_with(COMPUTED["window"], 128)
    with pytest.raises(Unequal):
        for seed in range(20):
            compare_with_naive(
                edited_module(module, (part, wrong)), "window", seed, (65, 97), spec_with(COMPUTED["window"], 128)
            )


def test_the_printed_kernel_tests_each_bound_only_in_tiles_that_it_cuts() -> None:
    text = render(lowered(STREAMING))["hopper.py"]
    tests = ("if kv_start + BLOCK_KV > 1 + Nk + q_start - Nq:", "if Nk + q_start + ROWS - 1024 - Nq > kv_start:")
    assert all(text.count(f"{' ' * n}{test}\n{' ' * n}    s = gl.where(") == 1 for test in tests for n in (12, 20))
    assert not any(op.unswitch is not None for op in only(forward_kernel("causal_gqa").ops(), tile.Mask))
