"""Each theorem is asserted, and the counts behind the theorems are compared with loops run iteration by iteration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources

import numpy as np
import pytest
import sympy

from attngen.cost import algorithms
from attngen.cost.algorithms import KERNELS as TEXTBOOK
from attngen.cost.algorithms import algorithm, kernels
from attngen.cost.flops import TILES, executed_flops, flops, total_tiles
from attngen.cost.io import compulsory_bytes, hbm_bytes, traffic
from attngen.cost.models import MODELS
from attngen.cost.numbers import done, flash1_tile, moved
from attngen.cost.roofline import Problem
from attngen.cost.theory import (
    B_C,
    B_R,
    BETA,
    FLASH,
    SHARE,
    D,
    M,
    N,
    Theorem,
    crossover,
    emitted,
    flash1,
    lower_bound,
    memory,
    standard,
    theorems,
    visible_share,
    work,
)
from attngen.cost.theory import moved as moved_elements
from attngen.devices import CLASSES
from attngen.ir import Module, symbol
from attngen.ir.names import DIRECTIONS
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.tiles.sizes import elements, tile_bytes
from attngen.tiles.tiles import count_tiles, runs, tile_loops
from attngen.verify import verify
from tests.cost.counts import Launch
from tests.helpers import SPECS, edit, target

# ---------------------------------------------------------------------------------------------- counts and runs

SIZES = [(48, 48, 16, 16), (40, 56, 16, 32), (33, 20, 32, 16)]  # queries, keys, rows of a tile of each
# Query heads and K/V heads of each spec.
UNMASKED = {"full_mha": (2, 2), "cross_mha": (2, 2)}
CAUSAL = {
    "causal_mha": (2, 2),
    "causal_gqa": (4, 2),
    "causal_mqa": (3, 1),
    "mla_dims": (1, 1),
    "causal_fa1": (2, 2),
}


def naive(t: dict[str, np.ndarray], group: int, scale: float, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Return attention and its gradients by their formulas."""
    k, v = (np.repeat(t[name], group, axis=1) for name in "KV")
    s = np.where(seen, scale * t["Q"] @ k.swapaxes(2, 3), -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    dp = t["dO"] @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(axis=3, keepdims=True) + (t["dLSE"][..., None] if "dLSE" in t else 0))
    dk, dv = scale * ds.swapaxes(2, 3) @ t["Q"], p.swapaxes(2, 3) @ t["dO"]
    summed = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    return {"O": p @ v, "dQ": scale * ds @ k, **dict(zip(("dK", "dV"), summed))}


class Run:
    """A launch of each kernel in order on random tensors, with the bytes and FLOPs of each launch."""

    def __init__(self, sequence, sizes: dict[str, int]) -> None:
        self.sizes = {**sizes, "scale": 0.2, "Nlse": sizes["Nq"]}
        shapes = {
            a.name: tuple(self.sizes[d] for d in a.type.dims)
            for kernel in sequence
            for a in kernel.args
            if a.role != "scalar"
        }
        random = np.random.default_rng(0)
        self.tensors = {name: random.standard_normal(shape) for name, shape in shapes.items()}
        # Wrappers fill these, too.
        for name, start in (("O_ACC", 0), ("ROW_SUM", 0), ("ROW_MAX", -np.inf), ("DQ_ACC", 0)):
            if name in shapes:
                self.tensors[name].fill(start)
        self.inputs = {name: t.copy() for name, t in self.tensors.items() if name in ("Q", "K", "V", "dO", "dLSE")}
        self.launches = {kernel.name: Launch(kernel, self.tensors, self.sizes) for kernel in sequence}

    def check(self, seen: np.ndarray) -> None:
        for name, expected in naive(self.inputs, self.sizes["group"], self.sizes["scale"], seen).items():
            found = self.tensors[name]
            found = found.sum(axis=2) if found.ndim > 4 else found  # over the splits
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=name)


def sizes_of(case, heads=(2, 2), width=8, width_v=8) -> dict[str, int]:
    n_q, n_kv, block_q, block_kv = case
    rows = {"Nq": n_q, "Nk": n_kv, "BLOCK_Q": block_q, "BLOCK_KV": block_kv, "B": 2, "D_QK": width, "D_V": width_v}
    return {**rows, "Hq": heads[0], "Hkv": heads[1], "group": heads[0] // heads[1], "splits": 2, "elem": 2}


def value(e, numbers: dict[str, int]):
    return e.subs({symbol(name): n for name, n in numbers.items()}).doit()


@pytest.mark.share(4)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook_algorithms_compute_attention_and_move_what_is_counted(name, case):
    numbers = sizes_of(case)
    run = Run([k for direction in DIRECTIONS for k in kernels(name, direction)], numbers)
    run.check(np.ones(case[:2], bool))
    for kernel in algorithm(name).kernels:
        launch = run.launches[kernel.name]
        assert launch.moved == value(traffic(kernel, elements, partial(runs, kernel)), numbers) > 0, kernel.name
        assert launch.moved_bytes == value(traffic(kernel, tile_bytes, partial(runs, kernel)), numbers)
        assert launch.flops == value(flops(kernel, partial(runs, kernel)), numbers)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", [*UNMASKED, *CAUSAL])
def test_emitted_kernels_move_what_is_counted(name):
    """Both counts agree with the launch: the generic one, and hbm_bytes, which has the number of tiles as `tiles`."""
    module, heads = target(name), {**UNMASKED, **CAUSAL}[name]
    for case in [(32, 32, 16, 16), (40, 56, 16, 32)]:
        n_q, n_kv, block_q, block_kv = case
        numbers = sizes_of(case, heads, *((24, 16) if name == "mla_dims" else (16, 16)))
        launched = [kernel for direction in DIRECTIONS for kernel in module.kernels_of(direction)]
        run = Run(launched, numbers)
        q, k = np.mgrid[:n_q, :n_kv]
        run.check((k <= q + n_kv - n_q) | (name in UNMASKED))
        for kernel in launched:
            launch = run.launches[kernel.name]
            assert launch.moved == value(traffic(kernel, elements, partial(runs, kernel)), numbers) > 0, kernel.name
            program, loop = (n_q, n_kv) if kernel.program_axis == "q" else (n_kv, n_q)
            tiles = 2 * heads[0] * count_tiles(kernel, program, loop, block_q, block_kv) if tile_loops(kernel) else 0
            assert launch.moved_bytes == value(hbm_bytes(kernel).subs(TILES, tiles), numbers), kernel.name
            assert launch.flops == value(executed_flops(kernel).subs(TILES, tiles), numbers), kernel.name


@pytest.mark.parametrize("queries", [1, 3, 5])
def test_rows_of_pack_gqa_tiles_see_what_their_queries_see(queries):
    """A tile holds all heads of a group: row r is query r % queries, under the causal mask."""
    group, n_kv = 4, 40
    numbers = {**sizes_of((group * queries, n_kv, 16, 16), (8, 2), 16, 16), "queries": queries}
    kernel = target("causal_gqa").kernel("packed")
    run = Run([kernel], numbers)
    q, k = np.mgrid[: group * queries, :n_kv]
    expected = naive({**run.inputs, "dO": run.inputs["Q"]}, 1, 0.2, k <= q % queries + n_kv - queries)
    np.testing.assert_allclose(run.tensors["O"], expected["O"], rtol=1e-9, atol=1e-9)
    launch = run.launches["packed"]
    assert launch.moved == value(traffic(kernel, elements, partial(runs, kernel)), numbers) > 0
    tiles = value(total_tiles(kernel), numbers)
    # Each sequence and K/V head has three tiles of keys for each tile of queries.
    assert tiles == 2 * 2 * 3 * -(-4 * queries // 16)
    assert launch.moved_bytes == value(hbm_bytes(kernel).subs(TILES, tiles), numbers)
    assert launch.flops == value(executed_flops(kernel).subs(TILES, tiles), numbers)
    q, kv, lse = (
        2 * heads * rows * width for heads, rows, width in ((8, queries, 16 * 2), (2, n_kv, 16 * 2), (8, queries, 4))
    )
    assert value(compulsory_bytes(kernel), numbers) == 2 * q + 2 * kv + lse


def test_standard_attention_with_one_tile_moves_scores_twice_and_other_tensors_once():
    """With tiles as large as the matrices, loops run once, and only the softmax and its gradient read scores again."""
    numbers = sizes_of((64, 64, 64, 64))
    for kernel in algorithm("standard").kernels:
        again = {"softmax": 1, "ds": 2}.get(kernel.name, 0) * 2 * 2 * 64 * 64 * 2  # B Hq N^2 of 2 bytes
        counted = value(traffic(kernel, tile_bytes, partial(runs, kernel)), numbers)
        assert counted == value(compulsory_bytes(kernel), numbers) + again, kernel.name


@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook_algorithms_pass_the_verifier(name):
    verify(algorithm(name))


# ---------------------------------------------------------------------------------------------- theorems


def limits(theorem: Theorem) -> list:
    return list(theorem.limits.values())


def by_claim(found: list[Theorem], start: str) -> Theorem:
    (theorem,) = (t for t in found if t.claim.startswith(start))
    return theorem


@pytest.mark.share(32)
@pytest.mark.parametrize("name", SPECS)
def test_the_emitted_schedule_has_the_order_for_every_variant(name):
    for theorem in (*emitted(target(name), "sm90"), *work(target(name)), *memory(target(name))):
        assert theorem.holds, (theorem.claim, theorem.limits)


@pytest.mark.share(4)
def test_every_theorem_holds():
    for found in theorems(target("causal_gqa")).values():
        for theorem in found:
            assert theorem.holds, (theorem.claim, theorem.limits)


@pytest.mark.share(16)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_emitted_schedule_has_the_order_on_every_device_class(cls):
    for theorem in emitted(target("full_mha"), cls):
        assert theorem.holds, (theorem.claim, theorem.limits)


def test_standard_attention_is_nd_plus_nn():
    """Theorem 2: the forward writes N^2 scores, reads them twice, writes and reads the weights, 5 N^2 in all, and tiles
    of beta d rows read their inputs again."""
    forward, backward = standard()
    assert forward.order == backward.order == N * D + N**2
    assert forward.count == 5 * N**2 + 2 * N * D + 2 * N**2 * D / B_R
    assert limits(forward)[0] - 5 - 2 / BETA == 0
    assert limits(backward)[0] - 9 - 4 / BETA == 0


def test_flash_attention_1_is_nndd_over_m():
    """Theorems 2 and 5: its loops move 3 N d per tile of B_c = M / 4d keys, so the constant is 12; the backward moves
    5 N d, so the constant is 20."""
    forward, backward = flash1()
    assert forward.order == backward.order == N**2 * D**2 / M
    assert forward.count == 3 * N**2 * D / B_C + 4 * N**2 / B_C + 3 * N * D + 2 * N
    assert backward.count == 5 * N**2 * D / B_C + 2 * N**2 / B_C + 5 * N * D
    assert limits(forward) == [12, 12, 12 + 3]
    assert limits(backward) == [20, 20, 20 + 5]


def test_the_emitted_schedule_has_these_constants():
    """H100, no mask: k and v are loaded once per tile of q. The tile takes 1/5 of on-chip memory with two stages of k
    and v, and 1/7 with three.

    Backward: two tensors are loaded once per tile of two others. Each tile takes 1/8 of on-chip memory, which holds
    the two and three stages of the loaded ones.
    """
    found = emitted(target("full_mha"), "sm90")
    assert {k: limits(by_claim(found, f"@{k}, whose mask"))[:2] for k in ("fwd", "dkdv", "dq")} == {
        "fwd": [2 * 5] * 2,
        "dkdv": [2 * 8] * 2,
        "dq": [2 * 8] * 2,
    }
    assert limits(by_claim(found, "@fwd, rows"))[:2] == [sympy.Rational(1, 5)] * 2
    causal = emitted(target("causal_mha"), "sm90")
    assert limits(by_claim(causal, "@fwd, whose mask"))[:2] == [7, 7]
    assert all(t.order == FLASH for t in found if "whose mask" in t.claim)
    assert by_claim(found, "@delta").order == N * D


def test_block_sparse_attention_moves_its_share_of_the_tiles():
    """Proposition 4: N d + s N^2 d^2 / M; without any tile, N d remains."""
    theorem = by_claim(emitted(target("full_mha"), "sm90"), "@fwd, block-sparse")
    assert theorem.order == N * D + SHARE * FLASH
    assert theorem.count == 2 * N * D + N + SHARE * 2 * N**2 * D / B_R
    assert limits(theorem)[0] == 10 and theorem.limits["s = 0"] == 2


@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq"])
@pytest.mark.parametrize(
    "name, share",
    [("full_mha", 1), ("causal_mha", "1/2"), ("window_gqa", 0), ("padding_mha", 1), ("causal_padding_gqa", "1/2")],
)
def test_the_share_of_tiles_that_a_mask_leaves(name, share, kernel):
    """The limit agrees with a count of tiles: 2**24 rows in tiles of 2**14."""
    found = visible_share(target(name).kernel(kernel))
    assert found == sympy.Rational(share)
    n, block = 2**24, 2**14
    counted = count_tiles(target(name).kernel(kernel), n, n, block, block) / (n // block) ** 2
    assert abs(counted - float(found)) < 3 * block / n


def test_the_lower_bound_meets_both_ends_of_its_range():
    """Proposition 3: the bound is N^2 d at M = d. At M = N d it is the size of inputs and outputs, so no algorithm is
    o of it there."""
    small, large, once, beaten = lower_bound(target("full_mha"))
    assert (small.count, large.count) == (N**2 * D, N * D)
    assert once.count == 4 * N * D and limits(once) == [4]
    assert limits(beaten) == [M / D**2] and crossover() == D**2
    assert sympy.diff(FLASH, M).is_negative  # between the ends it falls


def test_flops_are_4_8_and_10_nnd():
    counts = [theorem.count / (N**2 * D) for theorem in work(target("causal_mha"))]
    assert counts == [4, 8, 4, 10, 4, 10, 14]


def test_memory_saved_for_the_backward():
    """Standard attention saves P, FlashAttention-1 each row's maximum and sum, and ours each row's LSE."""
    counts = {theorem.claim: theorem.count for theorem in memory(target("causal_mha"))}
    assert counts == {
        "standard attention: P in `T`": N**2,
        "FlashAttention-1: SUM in fp32 and MAX in fp32": 2 * N,
        "ours: LSE in fp32": N,
    }


# ---------------------------------------------------------------------------------------------- breaking edits


def edited(module: Module, *changes: tuple[str, str]) -> Module:
    return parse_module(edit(print_module(module), *changes))


def flash1_text(*changes: tuple[str, str]) -> Module:
    source = resources.files(algorithms) / "flash1.ir"
    return parse_module(edit(source.read_text(encoding="utf-8"), *changes))


def test_loading_keys_in_the_inner_loop_breaks_the_order_of_flash_attention_1():
    load = "    %k = load %K[b, h, kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @sram\n"
    module = flash1_text((load, ""), ("  block @inner\n", f"  block @inner\n{load}"))
    forward = replace(flash1()[0], count=moved_elements([module.kernel("fwd_start"), module.kernel("fwd")]))
    assert forward.limits["M = N*d, B_r = d"] == sympy.oo and not forward.holds


LOAD_K = "    %k = load %K_head[kv, d_qk] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_QK] @sram\n"
LOAD_Q = "    %q = load %Q_head[q, d_qk] check(q) via(descriptor) : T[BLOCK_Q, D_QK] @sram\n"
OUT = "    %O = arg out : T[B, Hq, Nq, D_V] @hbm\n"
SCORES = "    %masked = mask"


def count_of(*changes: tuple[str, str]) -> Theorem:
    """The emitted forward's theorem, of an edited module."""
    return by_claim(emitted(edited(target("full_mha"), *changes), "sm90"), "@fwd, whose mask")


def test_scores_kept_in_hbm_break_the_order():
    theorem = count_of(
        (OUT, f"{OUT}    %S = arg out : T[B, Hq, Nq, Nk] @hbm\n"),
        (SCORES, f"    store %S[b, h, q, kv] %s check(q, kv)\n{SCORES}"),
    )
    assert theorem.limits["M = Theta(N*d), N by d"] == sympy.oo and not theorem.holds


def test_queries_loaded_in_the_loop_break_the_order():
    again = LOAD_Q.replace("%q = ", "%q_again = ")
    theorem = count_of((LOAD_K, LOAD_K + again))
    assert theorem.limits["M = Theta(N*d), N by d"] == sympy.oo and not theorem.holds


def test_one_more_load_of_keys_raises_the_constant():
    """The order stays. There are three loads per iteration instead of two, and a tile takes 1/7 of on-chip memory
    instead of 1/5."""
    theorem = count_of((LOAD_K, LOAD_K + LOAD_K.replace("%k = ", "%k_again = ")))
    assert theorem.holds and limits(theorem)[0] == 3 * 7


def test_a_backward_that_reads_the_scores_saves_them():
    args = "    %dQ = arg out : T[B, Hq, Nq, D_QK] @hbm\n"
    scores = "    %S = arg {} : T[B, Hq, Nq, Nk] @hbm\n"
    ours = by_claim(
        memory(edited(target("full_mha"), (OUT, OUT + scores.format("out")), (args, args + scores.format("in")))),
        "ours",
    )
    assert ours.count == N**2 + N and not ours.holds


def test_a_product_computed_twice_breaks_the_count_of_flops():
    product = "    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
    module = edited(target("full_mha"), (product, product + product.replace("%s = ", "%s_again = ")))
    assert by_claim(work(module), "forward of ours").count == 6 * N**2 * D


# ---------------------------------------------------------------------------------------------- numbers of a model


def test_numbers_of_a_model_worked_out_by_hand():
    """Llama 70B: one layer of 64 heads, 2**17 tokens, head_dim 128, 2 bytes per element, on an H100 with 232,448 bytes
    of shared memory."""
    module, n, d, heads = target("causal_gqa"), 2**17, 128, 64
    problem = Problem(1, heads, 8, n, n)
    found = {(row.schedule, row.cls): row for row in moved(module, problem)}
    assert found["standard", ""].forward == heads * (4 * n * n + 4 * n * d) * 2
    assert flash1_tile(module, "sm90") == (128, 227)  # ceil(116,224 / 512)
    iterations, all_rows = -(-n // 227), heads * n
    per_iteration = 3 * d * 2 + 4 * 4  # bytes per row: q, o read and written; l and m read and written, fp32
    once = d * 2 + 2 * 4
    keys = heads * iterations * 227 * 2 * d * 2
    assert found["FlashAttention-1", "sm90"].forward == all_rows * (iterations * per_iteration + once) + keys
    (block_q, block_kv), *_ = found["ours", "sm90"].tiles
    tiles = sum(-(-(i + 1) * block_q // block_kv) for i in range(n // block_q))
    assert found["ours", "sm90"].forward == heads * (tiles * block_kv * 2 * d * 2 + n * (2 * d * 2 + 4))
    sparse = found["ours, s = 1/8", "sm90"].forward - heads * n * (2 * d * 2 + 4)
    assert sparse * 8 == found["ours", "sm90"].forward - heads * n * (2 * d * 2 + 4)


def test_work_and_memory_of_a_model_worked_out_by_hand():
    n, d, heads = 2**17, 128, 64
    found = {row.schedule: row for row in done(target("causal_gqa"), Problem(1, heads, 8, n, n))}
    assert (found["standard"].forward, found["standard"].backward) == (4 * n * n * d * heads, 8 * n * n * d * heads)
    assert found["FlashAttention-1"].backward == 10 * n * n * d * heads
    # Half of the tiles, and the tiles of the diagonal, are visited.
    assert found["ours"].backward == pytest.approx(5 * n * n * d * heads, rel=0.01)
    assert {name: row.saved for name, row in found.items()} == {
        "standard": heads * n * n * 2,
        "FlashAttention-1": heads * n * 8,
        "ours": heads * n * 4,
        "ours, as run": heads * n * 4,
    }


def test_models_are_consistent_and_have_a_source():
    for model in MODELS.values():
        assert model.q_heads % model.kv_heads == 0 and model.source
        assert model.name == "deepseek-v3" or model.q_heads * model.head_dim_qk == model.hidden
