"""Closed forms of tiles, FLOPs, shared memory, registers and bytes, compared with brute force and with numbers worked
out by hand."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from attngen.cost.flops import executed_flops, total_tiles, useful_flops
from attngen.cost.io import CACHE, IN_FLIGHT, Traffic, dram_bytes, hbm_bytes, left_in_cache, standard_bytes
from attngen.cost.roofline import Problem, values
from attngen.devices import CLASSES
from attngen.ir import Config, symbol, to_text
from attngen.lowering.pipeline import lower
from attngen.spec import parse_spec
from attngen.targets.triton.cost import fitted, occupancy
from attngen.targets.triton.registers import registers_per_thread
from attngen.targets.triton.sram import row_formula, sram_bytes
from attngen.tiles.sizes import tile_width
from attngen.tiles.tiles import count_tiles, evaluate
from tests.helpers import target

SIZES = [
    (64, 64, 16, 16),
    (100, 100, 32, 16),
    (70, 130, 16, 32),
    (130, 70, 16, 32),
    (1, 200, 16, 16),
    (200, 1, 16, 16),
    (33, 0, 16, 16),
]
VISIBLE = {  # written by hand: whether query q sees key k
    "full_mha": lambda q, k, shift: q >= 0,
    "cross_mha": lambda q, k, shift: q >= 0,
    "causal_mha": lambda q, k, shift: k <= q + shift,
    "causal_gqa": lambda q, k, shift: k <= q + shift,
    "mla_dims": lambda q, k, shift: k <= q + shift,
    "window_gqa": lambda q, k, shift: (k <= q + shift) & (q + shift - k <= 1023),
    "causal_padding_gqa": lambda q, k, shift: k <= q + shift,  # all sequences have full length
    "padding_mha": lambda q, k, shift: q >= 0,  # the boolean mask keeps every key
}


def brute_force(name, n_q, n_kv, block_q, block_kv):
    """Return which tiles hold a visible score, as [query tiles, key tiles]."""
    rows, columns = ceil(n_q / block_q) * block_q, ceil(n_kv / block_kv) * block_kv
    q, k = np.mgrid[:rows, :columns]
    seen = VISIBLE[name](q, k, n_kv - n_q) & (q < n_q) & (k < n_kv)
    tiles = seen.reshape(rows // block_q, block_q, columns // block_kv, block_kv)
    return tiles.any(axis=(1, 3))


# ---------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("name", VISIBLE)
def test_tiles_are_counted_as_brute_force_counts_them(name):
    """Every kernel visits exactly the tiles that hold a visible score; a program that sees nothing may visit one."""
    module = target(name)
    sizes = [(n_q * 12, n_kv * 12, 64, 64) for n_q, n_kv, *_ in SIZES] if name == "window_gqa" else SIZES
    for n_q, n_kv, block_q, block_kv in sizes:
        seen = brute_force(name, n_q, n_kv, block_q, block_kv)
        for kernel in (k for d in ("forward", "backward") for k in module.kernels_of(d) if k.loops):
            program, loop, axis = (n_q, n_kv, 1) if kernel.program_axis == "q" else (n_kv, n_q, 0)
            counted = count_tiles(kernel, program, loop, block_q, block_kv)
            assert seen.sum() <= counted <= seen.sum() + (~seen.any(axis=axis)).sum(), (kernel.name, n_q, n_kv)


def test_full_and_partial_tiles_add_up():
    kernel = target("causal_mha").kernel("fwd")
    # 128 by 128 in tiles of 16: eight tiles on the diagonal, 28 below it.
    assert [count_tiles(kernel, 128, 128, 16, 16, cls) for cls in ("full", "partial", None)] == [28, 8, 36]


@pytest.mark.parametrize(("kernel", "tiles"), [("fwd", 64 * 9 - 36), ("dkdv", 64 * 9 - 36)])
def test_per_row_bounds_leave_the_tiles_within_reach(kernel, tiles):
    """Causal documents, 4096 rows in tiles of 64: a program visits the tile on the diagonal and the eight tiles of the
    500 rows before it (after it, if the program's tile is of keys)."""
    found = target("document_gqa").kernel(kernel)
    assert count_tiles(found, 4096, 4096, 64, 64, reach=500) == tiles
    assert count_tiles(found, 4096, 4096, 64, 64) == 64 * 65 // 2


def test_a_scalar_of_the_call_is_no_per_row_bound_whatever_its_name():
    text = "{name: later, head_dim: 64, mask: {expr: kv_idx >= x_least, params: {x_least: {scalar: int}}}}"
    kernel = lower(parse_spec(text)).kernel("fwd")
    assert count_tiles(kernel, 4096, 4096, 64, 64, reach=500) == 64 * 64


def test_total_tiles_is_the_sum_over_programs():
    """64 by 64 in tiles of 16: 1 + 2 + 3 + 4 tiles per head."""
    numbers = {"B": 2, "Hq": 3, "BLOCK_Q": 16, "BLOCK_KV": 16, "Nq": 64, "Nk": 64}
    tiles = total_tiles(target("causal_mha").kernel("fwd")).subs({symbol(n): v for n, v in numbers.items()})
    assert tiles.doit() == 2 * 3 * 10


# ---------------------------------------------------------------------------------------------- FLOPs


def useful(module, direction, n, heads=1):
    """Return the useful FLOPs of a square problem in tiles of 64 by 64."""
    kernel, config = module.kernel("fwd" if direction == "forward" else "dq"), Config("sm90", 2, None, 64, 64, 4, 3)
    problem = Problem(batch=1, q_heads=heads, kv_heads=1, n_q=n, n_kv=n)
    return evaluate(useful_flops(module, direction), values(module, kernel, config, problem))


@pytest.mark.parametrize("n", [128, 1024, 4096])
def test_without_a_mask_flops_are_4nnd_forward_and_10nnd_backward(n):
    assert useful(target("full_mha"), "forward", n, heads=3) == 4 * n * n * 64 * 3
    assert useful(target("full_mha"), "backward", n, heads=3) == 10 * n * n * 64 * 3


def test_executed_flops_count_every_product():
    """The forward has two products. dK/dV has four and dQ three, because both recompute the scores and dP. The fused
    backward and the JVP have five each."""
    one = {"tiles": 1, "BLOCK_Q": 1, "BLOCK_KV": 1, "D_QK": 1, "D_V": 1}
    executed = {kernel.name: executed_flops(kernel) for kernel in target("full_mha").kernels}
    assert executed.pop("delta") == executed.pop("dq_end") == 0
    assert {name: evaluate(e, one) for name, e in executed.items()} == {
        "fwd": 2 * 2,
        "dkdv": 2 * 4,
        "dq": 2 * 3,
        "bwd": 2 * 5,
        "jvp": 2 * 5,
    }


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_causal_flops_tend_to_half(direction):
    """Of n by n tiles, the mask leaves n (n + 1) / 2."""
    ratios = [
        useful(target("causal_mqa"), direction, n) / useful(target("full_mha"), direction, n)
        for n in (256, 1024, 4096, 16384)
    ]
    assert ratios == [(tiles + 1) / (2 * tiles) for tiles in (4, 16, 64, 256)]


def test_each_product_counts_its_own_head_dim():
    module = target("mla_dims")
    numbers = {"tiles": 1, "BLOCK_Q": 1, "BLOCK_KV": 1, "D_QK": 192, "D_V": 128}
    assert evaluate(useful_flops(module, "forward"), numbers) == 2 * (192 + 128)
    assert evaluate(useful_flops(module, "backward"), numbers) == 2 * (3 * 192 + 2 * 128)


# ---------------------------------------------------------------------------------------------- on chip


@pytest.mark.parametrize(
    "kernel, config, expected",
    [
        # d = 64, 16 bits. q is 64x64; the pipelines of k and v have three buffers of 32x64, read from shared memory.
        ("fwd", Config("sm90", 2, None, 64, 32, 4, 3), 64 * 64 * 2 + 3 * 2 * 32 * 64 * 2),
        # The pipelines have two buffers, ahead of registers.
        ("fwd", Config("sm80", 2, None, 64, 32, 4, 3), 64 * 64 * 2 + 2 * 2 * 32 * 64 * 2),
        # One stage is one buffer. The accumulator has more columns than rows, so the weights change layout.
        ("fwd", Config("sm80", 2, None, 32, 64, 4, 1), 32 * 64 * 2 + 2 * 64 * 64 * 2 + 32 * 64 * 2),
        # Row statistics and barriers are aligned to 1 KB. A tile that two products read has one more buffer.
        ("dkdv", Config("sm100", 2, None, 64, 64, 4, 2), 2 * 64 * 64 * 2 + 2 * 3 * 64 * 64 * 2 + 1024 + 32),
        # Row sums change layout before they are stored.
        ("delta", Config("sm90", 2, None, 64, 64, 4, 1), 4 * 64),
        # The pipeline reuses the shared memory of q, which has been copied to registers.
        ("fwd", Config("gfx942", 2, None, 128, 16, 4, 2), max(128 * 64 * 2, 2 * 16 * 64 * 2 + 128 * 16 * 2)),
        # k and v stay; q and dO are pipelined, and so are the rows of LSE2 and delta, aligned to 1 KB.
        ("dkdv", Config("sm90", 2, None, 32, 64, 4, 2), 2 * 64 * 64 * 2 + 2 * 2 * 32 * 64 * 2 + 1024),
    ],
)
def test_shared_memory_worked_out_by_hand(kernel, config, expected):
    module = target("full_mha")
    assert sram_bytes(module, module.kernel(kernel), config) == expected


def test_shared_memory_grows_with_every_size():
    module = target("causal_mha")
    kernel, config = module.kernel("fwd"), Config("sm90", 2, None, 64, 64, 4, 2)
    base = sram_bytes(module, kernel, config)
    for bigger in (
        Config("sm90", 2, None, 128, 64, 4, 2),
        Config("sm90", 2, None, 64, 128, 4, 2),
        Config("sm90", 2, None, 64, 64, 4, 3),
    ):
        assert sram_bytes(module, kernel, bigger) > base
    assert (
        to_text(row_formula(module, kernel, config))
        == "BLOCK_KV*D_QK*elem*stages + BLOCK_KV*D_V*elem*stages + BLOCK_Q*D_QK*elem"
    )


def test_registers_hold_accumulator_and_scores():
    """d = 64: at least the 64x64 accumulator, the row statistics and the 64x32 scores, in 32 bits over 128 threads."""
    module = target("full_mha")
    least = (64 * 64 + 2 * 64 + 64 * 32) // 128
    assert (
        least <= registers_per_thread(module, module.kernel("fwd"), Config("sm90", 2, None, 64, 32, 4, 3)) <= 2 * least
    )


def test_a_thread_has_no_more_registers_than_its_device_gives_one():
    """One warp with a tile of 128 rows needs more than 255 registers per thread, so 8 programs with 255 share sm90's
    65,536 registers. gfx942 has 512 per thread."""
    module = target("full_mha")
    kernel, config = module.kernel("fwd"), Config("sm90", 2, None, 128, 16, 1, 1)
    assert (
        registers_per_thread(module, kernel, config) + fitted(config).other_registers
        > CLASSES["sm90"].registers_per_thread
    )
    assert occupancy(module, kernel, config) == 65536 // (255 * 32)
    assert CLASSES["gfx942"].registers_per_thread == 512


@pytest.mark.parametrize(
    "head_dim, width", [(16, 16), (64, 64), (72, 128), (80, 128), (128, 128), (192, 256), (256, 256)]
)
def test_widths_on_chip_are_powers_of_two(head_dim, width):
    assert tile_width(head_dim) == width


# ---------------------------------------------------------------------------------------------- HBM


def test_bytes_moved_counted_by_hand():
    """One head, 128 queries and 64 keys of width 64 in 16 bits, in tiles of 64 by 32: two programs, two tiles each."""
    module = target("full_mha")
    config = Config("sm90", 2, None, 64, 32, 4, 3)
    moved = {}
    for kernel in module.kernels:
        numbers = values(module, kernel, config, Problem(batch=1, q_heads=1, kv_heads=1, n_q=128, n_kv=64))
        moved[kernel.name] = evaluate(hbm_bytes(kernel), numbers)
    q, k, row_of_q = 64 * 64 * 2, 32 * 64 * 2, 64 * 4  # a tile of q, o or dO; of k or v; of LSE or delta
    assert moved == {
        "fwd": 2 * (q + q + row_of_q) + 4 * (k + k),  # q, o, LSE; k, v
        "delta": 2 * (q + q + 3 * row_of_q),  # o, dO, LSE; delta, LSE2
        "dkdv": 2 * (4 * k) + 4 * (q + q + 2 * row_of_q),  # k, v, dK, dV; q, dO, LSE2, delta
        "dq": 2 * (4 * q + 3 * row_of_q) + 4 * (k + k),  # q, o, dO, dQ, LSE, delta, LSE2; k, v
        # k, v, dK, dV; q, dO, LSE2, delta, and dQ in fp32, read and written
        "bwd": 2 * (4 * k) + 4 * (q + q + 2 * row_of_q + 2 * 2 * q),
        "dq_end": 2 * (2 * q + row_of_q + q),  # dQ in fp32, LSE2; dQ
        # q, o, their tangents, LSE and its tangent; k, v and their tangents
        "jvp": 2 * (4 * q + 2 * row_of_q) + 4 * 4 * k,
    }


def test_grouped_heads_load_keys_once_for_dkdv():
    """With four query heads per K/V head, @dkdv has a quarter of the programs."""
    config, problem = Config("sm90", 2, None, 64, 64, 4, 2), {"batch": 1, "q_heads": 8, "n_q": 64, "n_kv": 64}
    module = target("causal_gqa")
    kernel = module.kernel("dkdv")
    four, one = (
        evaluate(hbm_bytes(kernel), values(module, kernel, config, Problem(kv_heads=kv, **problem))) for kv in (2, 8)
    )
    assert one - four == 6 * 4 * 64 * 128 * 2  # k, v, dK and dV of six programs


def test_pack_gqa_counts_a_group_as_one_head():
    """Five queries of four heads are 20 rows, two tiles of 16. Of 40 queries, the first sees a tile of keys that the
    last does not."""
    config, module = Config("sm90", 2, None, 16, 64, 4, 2), target("window_gqa")
    kernel = module.kernel("packed")
    numbers = values(module, kernel, config, Problem(batch=3, q_heads=8, kv_heads=2, n_q=5, n_kv=300))
    assert numbers["tiles"] == 3 * 2 * 2 * 5
    q, row_of_q = 16 * 128 * 2, 16 * 4
    assert evaluate(hbm_bytes(kernel), numbers) == 3 * 2 * 2 * (2 * q + row_of_q) + numbers["tiles"] * 2 * 64 * 128 * 2
    assert evaluate(dram_bytes(kernel).written, {**numbers, str(CACHE): 1e9, str(IN_FLIGHT): 1}) == 3 * 2 * 2 * (
        q + row_of_q
    )
    few, many = (values(module, kernel, config, Problem(1, 8, 2, n, 1024 + 74))["tiles"] for n in (1, 40))
    assert (few, many) == (2 * 17, 2 * 10 * 18)


def test_standard_attention_moves_the_score_matrix():
    numbers = {"Nq": 8, "Nk": 8, "D_QK": 2, "D_V": 2, "elem": 2}
    square, row = 8 * 8 * 2, 8 * 2 * 2
    assert evaluate(standard_bytes("forward"), numbers) == 4 * square + 4 * row
    assert evaluate(standard_bytes("backward"), numbers) == 7 * square + 8 * row


# ---------------------------------------------------------------------------------------------- device memory


def moved(name, kernel, cache, in_flight, n=1024, heads=4, kv_heads=4):
    """Return the bytes that a kernel with 64x64 tiles reads and writes for 2 sequences."""
    module = target(name)
    config = Config("sm90", 2, None, 64, 64, 4, 3)
    numbers = values(module, module.kernel(kernel), config, Problem(2, heads, kv_heads, n, n))
    found = dram_bytes(module.kernel(kernel))
    return tuple(evaluate(e, {**numbers, str(CACHE): cache, str(IN_FLIGHT): in_flight}) for e in found)


def test_streamed_tensors_are_moved_once_if_the_cache_holds_the_heads_in_flight():
    tensor, rows = 2 * 4 * 1024 * 64 * 2, 2 * 4 * 1024 * 4
    head = 2 * 1024 * 64 * 2  # K and V of one head
    assert moved("full_mha", "fwd", head, 16) == (3 * tensor, tensor + rows)  # 16 programs are those of one head
    assert moved("full_mha", "fwd", 2 * head, 32) == (3 * tensor, tensor + rows)
    assert moved("full_mha", "dkdv", head + 2 * 4 * 1024, 16) == (4 * tensor + 2 * rows, 2 * tensor)


def test_without_room_streamed_tensors_are_moved_once_per_wave_of_a_heads_programs():
    tensor, rows = 2 * 4 * 1024 * 64 * 2, 2 * 4 * 1024 * 4
    for in_flight, waves in ((4, 4), (8, 2), (16, 1), (64, 1)):
        assert moved("full_mha", "fwd", 1000, in_flight) == (tensor + waves * 2 * tensor, tensor + rows)
    half_the_tiles = 8 * (16 * 17 / 2)
    assert moved("causal_gqa", "fwd", 1000, 4, kv_heads=2)[0] == 2 * tensor + half_the_tiles * 2 * 64 * 128 * 2
    for heads in (4, 2):  # all 8 or 4 heads of both sequences alternate, with 4 programs each
        tensors, tiles = heads * 1024 * 128 * 2, 2 * heads * (16 * 17 / 2)
        assert (
            moved("causal_gqa", "fwd", 1000, 8 * heads, heads=heads, kv_heads=2)[0]
            == 2 * tensors + tiles / 4 * 2 * 64 * 128 * 2
        )


def test_kv_outer_moves_its_accumulators_for_every_tile_unless_the_cache_holds_them():
    tensor, rows = 2 * 4 * 1024 * 64 * 2, 2 * 4 * 1024 * 4
    tiles = 16 * 17 // 2  # of one head, causal
    stream = 64 * (2 * 64 + 4 * 64 + 8)  # bytes read per iteration: q, accumulator, maximum and sum
    rewritten = 64 * (4 * 64 + 8)
    assert moved("causal_fa1", "fwd", 1e6, 100) == (2 * tensor + 8 * tiles * stream, 8 * tiles * rewritten)
    held = 3 * tensor + 2 * rows  # of all 8 heads
    assert moved("causal_fa1", "fwd", held, 100) == (2 * tensor + held, 2 * tensor + 2 * rows)
    # One program runs at a time.
    assert moved("causal_fa1", "fwd", held / 8, 1) == (2 * tensor + held, 2 * tensor + 2 * rows)


def test_what_was_written_last_is_still_in_the_cache():
    def left(read, written, cache):
        return float(
            left_in_cache(Traffic(symbol("r"), symbol("w"))).subs(
                {symbol("r"): read, symbol("w"): written, CACHE: cache}
            )
        )

    assert left(10, 30, 100) == 30
    assert left(100, 300, 100) == 75
