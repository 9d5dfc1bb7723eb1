"""The executor runs small kernels written as text; each result is worked out by hand or by plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
import torch

from attngen.conformance.oracle import dropout_keep, naive_attention
from attngen.errors import AttngenError
from attngen.interp.host import execute
from attngen.interp.numeric import value
from attngen.interp.philox import keep_scores, philox
from attngen.interp.tile import execute_kernel, run_together
from attngen.interp.values import DOUBLE, SINGLE, OutsideTensor, spread
from attngen.ir import Module, parse, symbol
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.targets.triton.legalize import LegalizeTriton
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.transforms.insert_cta_barriers import InsertCtaBarriers
from attngen.transforms.simplify import Simplify
from attngen.transforms.split_loops import SplitLoops
from attngen.transforms.use_block_lists import UseBlockLists
from tests.helpers import KV_OUTER, ROOT, SMALL, built, edit, unverified
from tests.test_dropout import ANSWERS

RANDOM = np.random.default_rng(0)
TILES = {"BLOCK_Q": 4, "BLOCK_KV": 8}


def run(
    module: Module,
    tensors: dict[str, np.ndarray],
    scalars: dict[str, float] | None = None,
    tiles: dict[str, int] = TILES,
) -> None:
    execute_kernel(module, module.kernel("fwd"), tensors, scalars or {}, tiles, DOUBLE)


def lowered(text: str, *passes: object, head_dim: int = 16) -> Module:
    module = unverified(text, head_dim=head_dim)
    for step in passes:
        module = step.run(module)  # type: ignore[attr-defined]
    return module


# ---------------------------------------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x // 4", -2),
        ("x % 4", 1),
        ("cdiv(x, 4)", -1),
        ("clamp(x, -3, 5)", -3),
        ("abs(x) + min(x, 2, 3) - max(x, 2)", 7 - 7 - 2),
        ("select(x < 0 and not y > 0, 1, 2)", 2),
        ("select(x < 0 or y > 9, 1, 2)", 1),
        ("1/y", 2.0),
        ("y**2 + y**-2", 4.25),
        ("divisor(12, 5) + divisor(7, 6)", 4 + 1),
        ("exp2(y) + log2(y)", math.sqrt(2) - 1),
        ("exp(y) - tanh(y) + sqrt(y)", math.exp(0.5) - math.tanh(0.5) + 0.5**0.5),
        ("sigmoid(y) + log(y)", 1 / (1 + math.exp(-0.5)) + math.log(0.5)),
        ("inf", math.inf),
        ("0.25*x", -1.75),
    ],
)
def test_expressions_have_their_values(text: str, expected: float) -> None:
    e, names = parse(text), {"x": -7, "y": 0.5}
    assert value(e, names) == pytest.approx(expected, rel=1e-15)
    arrays = value(e, {name: np.array([x, x]) for name, x in names.items()})
    np.testing.assert_allclose(np.broadcast_to(arrays, 2), [expected] * 2, rtol=1e-15)


def test_the_error_names_a_function_that_the_ir_lacks() -> None:
    with pytest.raises(AttngenError, match="`cosh` is no function of the IR"):
        value(sympy.cosh(symbol("x")), {"x": 1.0})


def test_values_are_broadcast_by_the_names_of_their_dimensions() -> None:
    row, tile = np.arange(3), np.arange(6).reshape(3, 2)
    assert spread(row, ("BLOCK_Q",), ("BLOCK_Q", "BLOCK_KV")).shape == (3, 1)
    assert spread(row, ("BLOCK_Q",), ("BLOCK_KV", "BLOCK_Q")).shape == (1, 3)
    assert (spread(tile, ("BLOCK_Q", "BLOCK_KV"), ("BLOCK_KV", "BLOCK_Q")) == tile.T).all()
    assert spread(5, (), ("BLOCK_Q",)) == 5


# ---------------------------------------------------------------------------------------------- kernels

HIDDEN_IS_ZERO = (
    "%next = dot %masked",
    (
        "%zeros = map expr(select(masked > -inf, masked, 0)) uses(masked=%masked) : f32[BLOCK_Q, BLOCK_KV] @?\n"
        "    %next = dot %zeros"
    ),
)
TO_CLASSES = (ClassifyTiles(), SplitLoops())


@pytest.mark.parametrize(
    "passes", [(), TO_CLASSES, (*TO_CLASSES, Simplify()), (*TO_CLASSES, LegalizeTriton())], ids=len
)
@pytest.mark.parametrize(("n_q", "n_kv", "width"), [(10, 19, 16), (4, 8, 16), (1, 1, 24), (3, 0, 16), (0, 5, 16)])
def test_a_kernel_gives_the_same_in_every_phase(passes: tuple[object, ...], n_q: int, n_kv: int, width: int) -> None:
    """SMALL sums scores. Sizes have tiles cut by the ends, a padded head_dim, no keys and no queries."""
    q, k = RANDOM.standard_normal((n_q, width)), RANDOM.standard_normal((n_kv, width))
    out = np.full((n_q, width), np.nan)
    run(
        lowered(edit(SMALL, HIDDEN_IS_ZERO), *passes, head_dim=width),
        {"Q": q, "K": k, "O": out},
        {"Nq": n_q, "Nk": n_kv},
    )
    np.testing.assert_allclose(out, q @ k.T @ k, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "passes", [(), (*TO_CLASSES, InsertCtaBarriers()), (*TO_CLASSES, InsertCtaBarriers(), LegalizeTriton())], ids=len
)
def test_a_kv_outer_program_accumulates_in_memory(passes: tuple[object, ...]) -> None:
    q, k, sums = RANDOM.standard_normal((2, 10, 16)), RANDOM.standard_normal((2, 19, 16)), np.zeros((2, 10, 16))
    run(
        lowered(edit(KV_OUTER, HIDDEN_IS_ZERO), *passes), {"Q": q, "K": k, "O_ACC": sums}, {"Hq": 2, "Nq": 10, "Nk": 19}
    )
    np.testing.assert_allclose(sums, q @ k.swapaxes(1, 2) @ k, rtol=1e-12, atol=1e-12)


def kernel(body: str) -> Module:
    """Return a module with one kernel over tiles of queries, whose entry block has these lines."""
    args = ["%X = arg in : f32[Nq] @?", "%O = arg out : f32[Nq] @?", "%Nq = arg scalar : i32[] @?"]
    return lowered("\n".join(["kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))", "  block @entry", *args, body]))


X = np.arange(10.0)


def row_results(body: str, x: np.ndarray = X) -> np.ndarray:
    out = np.full(10, np.nan)
    run(kernel(body), {"X": x, "O": out}, {"Nq": 10})
    return out


def test_elements_past_a_checked_end_are_other() -> None:
    out = np.full(3, np.nan)
    body = (
        "%x = load %X[q] check(q) other(7) : f32[BLOCK_Q] @?\n%sum = reduce sum %x over(BLOCK_Q) : f32[] @?\n"
        "store %O[q_start // 4] %sum"
    )
    run(kernel(body), {"X": X, "O": out}, {"Nq": 10})
    assert out.tolist() == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 7 + 7]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%x = load %X[q] : f32[BLOCK_Q] @?", "load %x goes to 8 .. 12 along dimension 0 of %X; expected 0 .. 10"),
        (
            "%x = gather %X[q_idx - 1] where(q_idx < Nq) : f32[BLOCK_Q] @?",
            "gather %x goes to -1 .. 3 along dimension 0 of %X",
        ),
        (
            "%n = load %X[q_start + 3] : f32[] @?\n%x = map expr(n + q_idx) uses(n=%n) : f32[BLOCK_Q] @?",
            "load %n goes to 11 .. 12",
        ),
    ],
)
def test_a_read_outside_a_tensor_is_an_error(line: str, message: str) -> None:
    with pytest.raises(OutsideTensor, match=message.replace("[", r"\[").replace("+", r"\+")):
        row_results(f"{line}\nstore %O[q] %x check(q)")


def test_a_write_outside_a_tensor_is_an_error_and_checked_rows_stay() -> None:
    body = "%x = load %X[q] check(q) : f32[BLOCK_Q] @?\nstore %O[q] %x"
    assert row_results(f"{body} check(q)").tolist() == X.tolist()
    with pytest.raises(OutsideTensor, match="store .* goes to 8 .. 12 along dimension 0 of %O"):
        row_results(body)


def test_a_gather_reads_where_its_condition_holds() -> None:
    out = row_results(
        "%x = gather %X[9 - q_idx] where(q_idx < Nq and q_idx % 2 < 1) : f32[BLOCK_Q] @?\nstore %O[q] %x check(q)"
    )
    assert out.tolist() == [9, 0, 7, 0, 5, 0, 3, 0, 1, 0]


def test_a_scatter_adds_every_element() -> None:
    body = "%x = load %X[q] check(q) : f32[BLOCK_Q] @?\nscatter %O[q_idx // 5] %x where(q_idx < Nq)"
    out = np.zeros(2)
    run(kernel(body), {"X": X, "O": out}, {"Nq": 10})
    assert out.tolist() == [0 + 1 + 2 + 3 + 4, 5 + 6 + 7 + 8 + 9]


INTEGERS = np.array([5, 3, 8, 8, 1, 9, 0, 2, 7, 4])


def integer_results(body: str, out: np.ndarray, **scratch: np.ndarray) -> list[int]:
    """Return what a kernel of integers writes to `out`; its programs loop over X, four numbers at a time."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    arguments = "".join(f"    %{name} = arg scratch : i32[Nk] @?\n" for name in scratch)
    text = f"""
kernel @fwd program_axis(kv) grid(b in B)
  block @entry
    %X = arg in : i32[Nk] @?
    %O = arg out : i32[Nk] @?
{arguments}    %Nk = arg scalar : i32[] @?
    %none = init 0 : i32[] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(before=%none) body(@step) cls(all)
  block @step
    about loop over the numbers
    %before = arg carry : i32[] @?
    %x = load %X[kv] check(kv) : i32[BLOCK_KV] @?
{lines}
"""
    module = unverified(text)
    assert print_module(parse_module(print_module(module))) == print_module(module)
    run(module, {"X": INTEGERS, "O": out, **scratch}, {"B": 1, "Nk": 10}, {"BLOCK_Q": 4, "BLOCK_KV": 4})
    return [int(x) for x in out]


def test_a_scan_and_a_carried_value_give_running_maxima() -> None:
    body = """\
%here = scan max %x over(BLOCK_KV) : i32[BLOCK_KV] @?
%running = map expr(max(here, before)) uses(here=%here, before=%before) : i32[BLOCK_KV] @?
store %O[kv] %running check(kv)
%last = reduce max %running over(BLOCK_KV) : i32[] @?
yield values(before=%last)"""
    assert integer_results(body, np.full(10, -1)) == np.maximum.accumulate(INTEGERS).tolist()


def test_a_scatter_replaces_or_keeps_the_minimum() -> None:
    put = "scatter %O[Nk - 1 - kv_idx] %x where(kv_idx < Nk) op(put)\nyield values(before=%before)"
    assert integer_results(put, np.full(10, -1)) == INTEGERS[::-1].tolist()
    table = np.full(10, 99)
    least = (
        "scatter %TABLE[kv_idx // 5] %x where(kv_idx < Nk) op(min)\nstore %O[kv] %x check(kv)\n"
        "yield values(before=%before)"
    )
    integer_results(least, np.full(10, -1), TABLE=table)
    assert table.tolist() == [min(INTEGERS[:5]), min(INTEGERS[5:]), *[99] * 8]


def test_values_are_rounded_to_their_types() -> None:
    body = (
        "%x = load %X[q] check(q) : f32[BLOCK_Q] @?\n%y = map expr(x/3) uses(x=%x) : f32[BLOCK_Q] @?\n"
        "store %O[q] %y check(q)"
    )
    for dtypes, real in ((SINGLE, np.float32), (DOUBLE, np.float64)):
        out = np.full(10, np.nan)
        execute_kernel(
            kernel(body), kernel(body).kernel("fwd"), {"X": X.astype(real), "O": out}, {"Nq": 10}, TILES, dtypes
        )
        assert (out == X.astype(real) * real(1 / 3)).all()


STEP = """
%x = load %X[q] check(q) other(-inf) : f32[BLOCK_Q] @?
%s = map expr(x) uses(x=%x) : f32[BLOCK_Q, BLOCK_KV] @?
%m = init -inf : f32[BLOCK_Q] @?
%two = map expr(2) : f32[] @?
%soft = softmax_step %s m(%m) scale(%two) guard(always) : f32[BLOCK_Q, BLOCK_KV] @?
%p = reduce sum %soft.p over(BLOCK_KV) : f32[BLOCK_Q] @?
%y = map expr(p + alpha + m) uses(p=%p, alpha=%soft.alpha, m=%soft.m) : f32[BLOCK_Q] @?
store %O[q] %y check(q)
"""


def step(x: np.ndarray, guard: str) -> np.ndarray:
    out = np.full(10, np.nan)
    run(kernel(edit(STEP, ("guard(always)", f"guard({guard})"))), {"X": x, "O": out}, {"Nq": 10})
    return out


def test_a_softmax_step() -> None:
    """Eight equal scores exceed the running maximum, -inf: their weights are 1, and earlier sums are scaled by 0."""
    np.testing.assert_allclose(step(X, "partial"), 8 + 0 + X)
    empty = np.where(X > 4, X, -np.inf)
    np.testing.assert_allclose(step(empty, "always")[5:], 8 + X[5:])
    assert (step(empty, "always")[:5] == -np.inf).all(), (
        "a guarded row that has seen nothing stays at zero, with the maximum -inf"
    )
    assert np.isnan(step(empty, "partial")[:5]).all(), "outside a partial loop nothing guards it"


def test_programs_alternate_at_barriers() -> None:
    done: list[str] = []

    def program(name: str, phases: int):
        for phase in range(phases):
            done.append(f"{name}{phase}")
            yield
        return {}

    run_together([program("a", 2), program("b", 3)])
    assert done == ["a0", "b0", "a1", "b1", "b2"]


def test_a_range_that_runs_backwards_is_an_error() -> None:
    with pytest.raises(AttngenError, match="a range of %keys ends at 1, before its start 3"):
        text = edit(SMALL, ("ranges(0 .. cdiv(Nk, BLOCK_KV))", "ranges(3 .. 1)"))
        run(lowered(text), {"Q": np.zeros((4, 16)), "K": np.zeros((8, 16)), "O": np.zeros((4, 16))}, {"Nq": 4, "Nk": 8})


# ---------------------------------------------------------------------------------------------- lists of blocks

VISITS = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
  block @entry
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %KV_RANK = arg in : i32[B, Hq, Tq, Tk1] @?
    %KV_LIST = arg in : i32[B, Hq, Tq, Tk] @?
    %O = arg out : f32[Nq, Nk] @?
    %B = arg scalar : i32[] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %tiles = loop kv ranges(1 .. cdiv(Nk, BLOCK_KV)) body(@step) cls(partial)
  block @step
    %one = map expr(1.0) : f32[BLOCK_Q, BLOCK_KV] @?
    store %O[q, kv] %one check(q, kv)
    yield
"""


@pytest.mark.parametrize("passes", [(), (UseBlockLists(),)], ids=["ranks", "lists"])
def test_tiles_of_kept_blocks_are_visited(passes: tuple[object, ...]) -> None:
    """Loops with and without lists visit the tiles of blocks 0 and 2, of 16 keys each, from the second tile on."""
    text = print_module(unverified(VISITS, head_dim=16)).replace("blocks no", "blocks 16")
    module = parse_module(text)
    for one in passes:
        module = one.run(module)  # type: ignore[attr-defined]
    out = np.zeros((10, 40))
    tensors = {"KV_RANK": np.array([[[[0, 1, 1, 2]]]]), "KV_LIST": np.array([[[[0, 2, 1]]]])}
    run(
        module,
        {"Q": np.zeros((1, 1, 10, 16)), "O": out, **tensors},
        {"B": 1, "Hq": 1, "Nq": 10, "Nk": 40},
        {"BLOCK_Q": 8, "BLOCK_KV": 4},
    )
    expected = np.zeros((10, 40))
    expected[:, 4:16] = expected[:, 32:40] = 1
    assert (out == expected).all()


# ---------------------------------------------------------------------------------------------- sums by distance

DISTANCES = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))
  block @entry
    %X = arg in : f32[Nq, Nk] @?
    %O = arg out : f32[Td, Nd] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %tiles = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) body(@step)
  block @step
    %x = load %X[q, kv] check(q, kv) : f32[BLOCK_Q, BLOCK_KV] @?
    store %O[] %x by(distance)
    yield
"""


@pytest.mark.parametrize(("block_q", "block_kv"), [(4, 8), (8, 4), (16, 2), (4, 4), (1, 8)])
def test_scores_are_summed_by_distance(block_q: int, block_kv: int) -> None:
    x = RANDOM.standard_normal((10, 13))
    lines = -(-10 // block_q) * ((block_q + block_kv - 2) // block_kv + 1)
    parts = np.zeros((lines, 23))
    module = lowered(DISTANCES)
    run(module, {"X": x, "O": parts}, {"Nq": 10, "Nk": 13}, {"BLOCK_Q": block_q, "BLOCK_KV": block_kv})
    expected = [np.trace(x, offset) for offset in range(-10, 13)]
    np.testing.assert_allclose(parts.sum(0), expected, atol=1e-12)


# ---------------------------------------------------------------------------------------------- a whole module


def test_the_text_of_a_committed_module_computes_attention() -> None:
    """Results in fp32 equal those of naive attention in float64, to fp32 rounding."""
    module = parse_module((ROOT / "generated" / "causal_mqa" / "schedule.ir").read_text(encoding="utf-8"))
    q, k, v, grad = (
        torch.randn(2, heads, n, 64, dtype=torch.float64) for heads, n in ((3, 13), (1, 21), (1, 21), (3, 13))
    )
    inputs = {"q": q, "k": k, "v": v, "grad_out": grad, "grad_lse": torch.zeros(2, 3, 0)}
    arrays = {name: x.numpy() for name, x in inputs.items()}
    found = execute(module, {**arrays, "scale": 0.125, "splits": 2}, {"BLOCK_Q": 8, "BLOCK_KV": 4}, SINGLE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = naive_attention(q, k, v, torch.ones(13, 21, dtype=torch.bool).tril(8), 0.125)
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *torch.autograd.grad(out, leaves, grad))))
    for name, right in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], right.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize(("counter", "key", "result"), ANSWERS)
def test_philox_has_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox(tuple(np.array(c, np.uint64) for c in counter), key)) == result


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 0x0123_4567_89AB_CDEF])
def test_the_oracle_keeps_the_same_scores(p: float, seed: int) -> None:
    q, kv = np.arange(40)[:, None], np.arange(50)
    found = np.array([[keep_scores(seed, b, h, q, kv, round(p * 65536)) for h in range(3)] for b in range(2)])
    assert (found == dropout_keep((2, 3, 40, 50), p, seed).numpy()).all()


def test_generated_kernels_keep_the_same_scores(device: str) -> None:
    found = keep_scores(1234, 1, 2, np.arange(70)[:, None], np.arange(40), round(0.3 * 65536))
    kept = built("causal_dropout_mqa").attention.dropout_mask((2, 3, 70, 40), 0.3, 1234, device).cpu().numpy()
    assert (found == kept[1, 2]).all()


def test_one_over_zero_is_infinite() -> None:
    """This holds for numbers and arrays: another condition may hide such an element."""
    with np.errstate(divide="ignore"):
        assert value(parse("1/x**2"), {"x": 0}) == np.inf
        assert list(value(parse("1/x"), {"x": np.array([0, 2])})) == [np.inf, 0.5]
