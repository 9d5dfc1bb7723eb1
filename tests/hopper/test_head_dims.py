"""head_dims that are no powers of two: tiles in column pieces, tiles of V padded with zero columns, and outputs that
are stored in halves."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.errors import VerifyError
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Module, pipe
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower, stages
from attngen.runtime.descriptors import descriptor
from attngen.targets.hopper.configs.forward import config
from attngen.targets.hopper.configs.forward_schedule import persistent_q_stages
from attngen.targets.hopper.configs.head_dims import piece_of, pieces, width_of
from attngen.targets.hopper.toolchain.resources import pipelines, sram_bytes
from attngen.verify import verify
from tests.helpers import edit
from tests.hopper.common import after_passes, edited, lowered, spec_with_head_dims
from tests.hopper.test_numerics import compare_with_naive
from tests.transforms.equality import Unequal

NO_POWERS_OF_TWO = [width for width in range(16, 257, 8) if width & (width - 1)]


@cache
def lowered_with(qk: int, v: int) -> Module:
    return lower(spec_with_head_dims(qk, v))


def pipeline_lines(module: Module) -> list[str]:
    """The pipelines of a warp-specialized kernel, as text."""
    return [line.strip() for line in print_kernel(module.warp_specialized[0]).splitlines() if " = pipeline " in line]


# ---------------------------------------------------------------------------------------------- passes


def test_insert_pipelines_lays_tiles_of_q_and_k_out_in_column_pieces() -> None:
    assert pipeline_lines(after_passes("mla_dims")["warp-specialize"]) == []
    assert pipeline_lines(after_passes("mla_dims")["insert-pipelines"]) == [
        "%Q_pipeline = pipeline stages(1) per_instance(consumer) columns(64) : T[BLOCK_Q, D_QK] @sram",
        "%K_pipeline = pipeline stages(num_stages) columns(64) : T[BLOCK_KV, D_QK] @sram",
        "%V_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_V] @sram",
    ]


def test_legalize_gluon_stores_outputs_in_halves_where_a_whole_tile_does_not_fit() -> None:
    assert (
        pipeline_lines(after_passes("mla_dims")["legalize-gluon"])[-1]
        == "%O_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_Q, 64] @sram"
    )
    assert (
        pipeline_lines(after_passes("causal_gqa")["legalize-gluon"])[-1]
        == "%O_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_Q, D_V] @sram"
    )
    assert (
        pipeline_lines(lowered_with(96, 96))[-1]
        == "%O_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_Q, D_V_PAD] @sram"
    )


def test_warp_specialize_pads_v_and_the_accumulator_of_outputs() -> None:
    steps = {
        name: print_kernel(module.warp_specialized[0])
        for name, module in stages(spec_with_head_dims(96, 96))
        if module.warp_specialized
    }
    text = steps["warp-specialize"]
    assert "%v = load %V[b, h, kv, d_v] check(kv if partial, d_v) via(descriptor) : T[BLOCK_KV, D_V_PAD] @sram" in text
    assert "%acc_next = dot %soft.p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V_PAD] @reg" in text
    assert "%O = arg out : T[B, Hq, Nq, D_V] @hbm" in text and "D_QK_PAD" not in text
    assert "%V_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_V_PAD] @sram" in steps["insert-pipelines"]
    assert "tma_store %O[b, h, q, d_v] %o staging(%O_pipeline)" in steps["legalize-gluon"]
    assert "D_V_PAD" not in print_kernel(after_passes("mla_dims")["warp-specialize"].warp_specialized[0])


def test_column_pieces_leave_the_fewest_zero_columns() -> None:
    assert [piece_of(width) for width in (16, 32, 64, 128, 256)] == [0] * 5
    assert {width: piece_of(width) for width in (24, 48, 80, 96, 112, 160, 192, 224, 240)} == {
        **dict.fromkeys((24, 80, 96, 160, 224), 32),
        **dict.fromkeys((48, 112, 192, 240), 64),
    }
    for width in NO_POWERS_OF_TWO:
        laid = -(-width // piece_of(width)) * piece_of(width)
        assert width <= laid < width + 32 or (width, laid) == (40, 64), (width, laid)


@pytest.mark.share(64)
@pytest.mark.parametrize("width", NO_POWERS_OF_TWO)
def test_any_head_dim_can_be_warp_specialized(width: int) -> None:
    for qk, v in ((width, 128), (128, width), (width, width)):
        module = lowered_with(qk, v)
        (schedule,) = module.configs("fwd", "hopper")
        assert sram_bytes(module, module.warp_specialized[0], schedule) <= CLASSES["sm90"].smem_per_block
        assert persistent_q_stages(module, schedule) > 0
        text = print_module(module)
        assert print_module(verify(parse_module(text))) == text


def test_head_dims_192_and_128_have_the_tiles_of_128() -> None:
    module = lowered("mla_dims")
    found = config(module)
    assert (found.block_q, found.block_kv, found.num_stages, persistent_q_stages(module, found)) == (128, 128, 2, 1)
    layouts = {
        op.name: (pieces(module, op), width_of(module, op))
        for op in pipelines(module.warp_specialized[0])
        if op.type.dims
    }
    assert layouts == {"Q_pipeline": (3, 192), "K_pipeline": (3, 192), "V_pipeline": (1, 128), "O_pipeline": (1, 64)}
    assert sram_bytes(module, module.warp_specialized[0], found) == 229_768


# ---------------------------------------------------------------------------------------------- the verifier

K = "%K_pipeline = pipeline stages(num_stages) columns(64) : T[BLOCK_KV, D_QK] @sram"
V = "%V_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_V] @sram"
O = "%O_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_Q, 64] @sram"
REFUSED = {
    "whole tiles": (
        K,
        K.replace(" columns(64)", ""),
        "`types`: .* lie in pieces of 64 and all columns; expected pieces of one width, over D_QK",
    ),
    "other pieces": (
        K,
        K.replace("(64)", "(32)"),
        "`types`: .* lie in pieces of 64 and 32 columns; expected pieces of one width",
    ),
    "pieces of V": (
        V,
        V.replace(" :", " columns(64) :"),
        "`types`: .* lie in pieces of all and 64 columns; .* over BLOCK_KV",
    ),
    "a quarter of an output": (
        O,
        O.replace("64", "32"),
        "`fits`: .* %O_pipeline has tiles of 32 columns; expected 64, half of an output",
    ),
    "other rows": (O, O.replace("BLOCK_Q", "BLOCK_KV"), "`types`: .* has a staging of other rows"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_widths_are_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("mla_dims", (old, new)))


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ("", "has whole tiles of 192 columns; expected columns\\(64\\)"),
        (" columns(48)", "has pieces of 48 columns; expected a power of two from 16 to 256"),
        (" columns(8)", "has pieces of 8 columns; expected a power of two from 16 to 256"),
    ],
)
def test_the_width_of_a_column_piece_is_a_power_of_two(piece: str, reason: str) -> None:
    text = print_module(lowered("mla_dims")).replace(" columns(64)", piece)
    with pytest.raises(VerifyError, match=f"rule `fits`: .*{reason}"):
        verify(parse_module(text))


@pytest.mark.parametrize(("columns", "stages"), [(32, 2), (16, 2), (128, 1)])
def test_column_pieces_edited_by_hand_give_that_kernel(columns: int, stages: int) -> None:
    """The second piece of 128 columns ends with 64 zero columns, which take memory, so K and V have one stage."""
    head, at, backward = print_module(lowered("mla_dims")).partition("kernel @bwd backend(hopper)")
    text = head.replace(" columns(64)", f" columns({columns})") + at + backward
    module = verify(parse_module(text.replace("num_stages=2 TMA=1 backend", f"num_stages={stages} TMA=1 backend", 1)))
    assert f"{columns} * piece]" in render(module)["hopper.py"]


def test_the_accumulator_of_outputs_is_padded_where_v_is() -> None:
    text = print_module(lowered_with(96, 96))
    before, at, rest = text.partition("kernel @fwd backend(hopper)")
    with pytest.raises(VerifyError, match="rule `fits`: .* is of D_V; expected D_QK, and D_V padded"):
        verify(parse_module(before + at + rest.replace("D_V_PAD", "D_V").replace(" d_v)", ")")))
    padded = edit(print_module(lowered("mla_dims")), (V, V.replace("D_V", "D_V_PAD")))
    with pytest.raises(VerifyError, match="rule `types`"):
        verify(parse_module(padded))


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.share(16)
@pytest.mark.parametrize("head_dims", [(96, 96), (80, 48), (24, 40), (192, 192), (64, 96), (160, 128), (240, 240)])
def test_results_of_other_head_dims_are_those_of_naive_attention(head_dims: tuple[int, int]) -> None:
    for seed in range(4):
        compare_with_naive(lowered_with(*head_dims), "wide", seed, of=spec_with_head_dims(*head_dims))
    for lengths in ((1, 1), (17, 33), (0, 5)):
        compare_with_naive(lowered_with(*head_dims), "wide", 1, lengths, of=spec_with_head_dims(*head_dims))


def test_halves_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half that is written before the TMA store has read the other one replaces it in the staging buffer."""
    monkeypatch.setattr(WarpSpecializedLaunch, "_tma_store_wait", lambda *_: iter(()))
    with pytest.raises(Unequal):
        for seed in range(10):
            compare_with_naive(lowered("mla_dims"), "mla_dims", seed, (20, 20))


# ---------------------------------------------------------------------------------------------- generated code


def test_the_kernel_loads_and_multiplies_column_pieces() -> None:
    text = render(lowered("mla_dims"))["hopper.py"]
    assert '"fwd": ((0, 64, 64), (1, "BLOCK_KV", 64), (2, "BLOCK_KV"), (3, 64, 64)),' in text
    assert "K_smem = gl.allocate_shared_memory(K.dtype, [3 * STAGES, 1, 1, BLOCK_KV, 64], K.layout)" in text
    assert "K_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())" in text
    assert "mbarrier.expect(K_full.index(K_stage), 384 * BLOCK_KV)" in text  # one barrier for all pieces of a stage
    assert "k_2 = K_smem.index(2 + 3 * K_stage).reshape([BLOCK_KV, 64])" in text
    assert "s_flight = warpgroup_mma(q_2, k_2.permute((1, 0)), s_flight, is_async=True)" in text
    assert text.count("s = warpgroup_mma_wait(1, deps=[s_flight])") == 1  # in the loop over both classes of tiles
    assert (
        "o_left, o_right = _split_halves(o)" in text
        and "_tma_store(O, [b, h, q_start, 64], O_smem.index(_WARP_GROUP))" in text
    )


def test_a_head_dim_that_fits_one_piece_is_printed_like_a_whole_tile() -> None:
    text = render(lowered_with(48, 48))["hopper.py"]
    assert "D_V_PAD = gl.constexpr(64)" in text and "ACC: gl.constexpr = _layout_of(D_V_PAD)" in text
    assert "_tma_load(K, [b, h, kv_start, 0], K_full.index(K_stage), K_smem.index(K_stage))" in text
    assert "for piece in" not in text and '"fwd": ((0, 64, 64), (1, "BLOCK_KV", 64), (2, "BLOCK_KV"), (3, 64)),' in text


def test_a_wait_leaves_the_pieces_of_later_products_in_flight() -> None:
    """A wait for a product after which others were issued leaves as many in flight as those have pieces."""
    module = edited(
        "mla_dims",
        (
            "    %s_flight = wgmma %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight\n    %v "
            "= consumer_wait %V_pipeline : T[BLOCK_KV, D_V] @sram\n"
            "    %weights_operand = convert_layout %weights to(operand) : T[BLOCK_Q, BLOCK_KV] @reg\n"
            "    %acc_flight = wgmma %weights_operand %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight\n"
            "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
            "    %v = consumer_wait %V_pipeline : T[BLOCK_KV, D_V] @sram\n"
            "    %weights_operand = convert_layout %weights to(operand) : T[BLOCK_Q, BLOCK_KV] @reg\n"
            "    %acc_flight = wgmma %weights_operand %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight\n"
            "    %s_flight = wgmma %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight\n"
            "    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n"
            "    consumer_release %v\n"
            "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
        ),
        (
            "    %l_next_left_held = pin_before_wait %l_next_left : f32[BLOCK_Q, _PARTIALS] @reg\n"
            "    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n"
            "    consumer_release %v\n",
            "    %l_next_left_held = pin_before_wait %l_next_left : f32[BLOCK_Q, _PARTIALS] @reg\n",
        ),
    )
    text = render(verify(module))["hopper.py"]
    assert "acc_next, weights_operand = warpgroup_mma_wait(3, deps=[acc_flight, weights_operand])" in text


@pytest.mark.parametrize(
    ("width", "columns", "lies"), [(192, 64, 64), (96, 32, 32), (48, 64, 64), (96, 0, 128), (128, 64, 64)]
)
def test_a_descriptor_has_the_columns_of_a_piece(width: int, columns: int, lies: int) -> None:
    x = torch.zeros(2, 3, 100, width, dtype=torch.bfloat16)
    found = descriptor(x, 64, columns, gluon=True)
    assert found.base is x and (found.block_shape, found.shape) == ([1, 1, 64, lies], [2, 3, 100, width])
    assert found.layout.swizzle_byte_width == min(128, 2 * lies)


@pytest.mark.share(4)
def test_kernels_have_the_same_ops_for_all_head_dims() -> None:
    kinds = [
        [type(op) for op in lowered_with(*head_dims).warp_specialized[0].ops()]
        for head_dims in ((128, 128), (96, 96), (192, 128))
    ]
    assert kinds[0] == kinds[1] == kinds[2] and {pipe.Pipeline, pipe.TmaStore} <= set(kinds[0])
