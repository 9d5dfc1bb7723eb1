"""The IR of modules whose calls have chunks of a sequence: its text, the loops that split-loops makes, the order of
accumulation, and launches. tests/ir/broken_rules/positions.py has the edits that the rule `positions` refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.errors import IRError, VerifyError
from attngen.ir import Module, only, tile, to_text
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.transforms.split_loops import SplitLoops
from attngen.verify import verify
from tests.chunks import CASES, lowered, spec_of
from tests.helpers import changes, edit, stages_of

# ---------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("name", ["causal", "packed", "relative bias", "data"])
def test_the_text_prints_as_it_parses(name: str) -> None:
    for module in (lowered(name), stages_of(spec_of(name))["build"]):
        text = print_module(module)
        assert "\n  chunk 384\n" in text
        parsed = parse_module(text)
        assert print_module(parsed) == text and parsed.chunk == 384 and parsed.unit == 64


@pytest.mark.parametrize("chunk", ["0", "-384", "384 rows", ""])
def test_a_chunk_that_is_no_number_of_rows_is_refused(chunk: str) -> None:
    text = edit(print_module(lowered("causal")), ("  chunk 384", f"  chunk {chunk}"))
    with pytest.raises(IRError, match="expected a number of rows, as in `chunk 384`"):
        parse_module(text)


def test_a_module_without_positions_says_nothing_of_chunks() -> None:
    text = print_module(list(stages_of(spec_of("causal", 0)).values())[-1])
    assert not re.search("chunk |_STARTS|_q_row|_kv_row|Rq|Rk|q_len", text.partition("\n")[2])


@pytest.mark.parametrize(("chunk", "unit"), [(384, 64), (64, 64), (192, 64), (4096, 64), (96, 32)])
def test_a_unit_is_the_largest_power_of_two_up_to_64_that_divides_a_chunk(chunk: int, unit: int) -> None:
    assert replace(lowered("causal"), chunk=chunk).unit == unit


# ---------------------------------------------------------------------------------------------- split-loops

SMALL = """\
module @small
  ir 2
  version 0
  spec sha256:0
  phase logical
  backend triton
  heads mha
  head_dim qk=64 v=64
  dtype bf16
  precision ieee
  mask causal where(kv_idx <= q_idx)
  blocks no
  dropout no
  chunk 384

kernel @fwd grid(q in cdiv(Rq, BLOCK_Q))
  block @entry
    %Q = arg in : T[Rq, D_QK] @?
    %K = arg in : T[Rk, D_QK] @?
    %Q_STARTS = arg in : i32[Uq] @?
    %KV_STARTS = arg in : i32[Uk] @?
    %KV_START_RANK = arg in : i32[Wk1] @?
    %O = arg out : T[Rq, D_QK] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %Rq = arg scalar : i32[] @?
    %Rk = arg scalar : i32[] @?
    %q = load %Q[q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %zero = init 0 : f32[BLOCK_Q, D_QK] @?
    %keys = loop kv ranges(0 .. cdiv(Rk, BLOCK_KV)) carry(sum=%zero) body(@step) tiles(TILES)
    %o = map expr(x) uses(x=%keys.sum) : T[BLOCK_Q, D_QK] @?
    store %O[q, d_qk] %o check(q)
  block @step
    %sum = arg carry : f32[BLOCK_Q, D_QK] @?
    %k = load %K[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(WHERE) : f32[BLOCK_Q, BLOCK_KV] @?
    %next = dot %masked %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @?
    yield values(sum=%next)
"""


def small(where: str, *tiles: str) -> Module:
    """A kernel that sums scores, with the bounds of its tiles in the whole sequence."""
    text = SMALL.replace("WHERE", where).replace("TILES", "; ".join(tiles))
    return verify(parse_module(edit(text, ("causal where(kv_idx <= q_idx)", f"small where({where})"))))


def added(module: Module) -> list[str]:
    return [
        line for line in changes(SplitLoops(), module) if line[0] == "+" and ("list_position" in line or "loop" in line)
    ]


def test_ranges_are_positions_among_the_tiles_of_the_call() -> None:
    assert added(small("kv_idx < Nk", "0", "0", "Nk // BLOCK_KV", "cdiv(Nk, BLOCK_KV)")) == [
        "+ %kv_full_end_at = list_position %KV_START_RANK tile(kv_full_end) : i32[] @?",
        "+ %kv_end_at = list_position %KV_START_RANK tile(kv_end) : i32[] @?",
        "+ %keys_full = loop kv ranges(0 .. kv_full_end_at) carry(sum=%zero) body(@step) cls(full)",
        (
            "+ %keys_partial = loop kv ranges(kv_full_end_at .. kv_end_at) carry(sum=%keys_full.sum) body(@step) "
            "cls(partial)"
        ),
    ]


def test_every_bound_but_0_has_a_position() -> None:
    start, full = "min(cdiv(Nk, BLOCK_KV), (100 // BLOCK_KV))", "min(cdiv(100, BLOCK_KV), cdiv(Nk, BLOCK_KV))"
    where = "kv_idx < Nk and kv_idx >= 100"
    found = added(small(where, start, full, f"max((Nk // BLOCK_KV), {full})", "cdiv(Nk, BLOCK_KV)"))
    assert [line.partition(" = ")[0] for line in found] == [
        *(f"+ %kv_{word}_at" for word in ("first", "full_first", "full_end", "end")),
        "+ %keys_full",
        "+ %keys_partial",
    ]
    assert "ranges(kv_full_first_at .. kv_full_end_at)" in found[4]
    assert "ranges(kv_first_at .. kv_full_first_at, kv_full_end_at .. kv_end_at)" in found[5]


def test_the_loop_over_all_rows_has_those_of_the_call() -> None:
    """Before split-loops, a loop has the tiles of the call in its ranges and those of the whole sequence in `tiles`."""
    kernel = stages_of(spec_of("causal"))["classify-tiles"].kernel("fwd")
    (loop,) = kernel.loops
    assert [tuple(map(to_text, pair)) for pair in loop.ranges] == [("0", "cdiv(Rk, BLOCK_KV)")]
    assert to_text(loop.tiles[2]) == "max(0, min(Nk, Nk - Nq + q_start + 1)) // BLOCK_KV"


# ---------------------------------------------------------------------------------------------- order of accumulation

VISITS = "min((max(0, BLOCK_Q + Nk - Nq + q_start - 1) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV))"
ORDERS = {
    "full": ("kv_visits - (_kv_row // BLOCK_KV) - 1", {"kv_visits": "cdiv(Nk, BLOCK_KV)"}),
    "causal": (
        "select(reversed_L2_group > 0, (_kv_row // BLOCK_KV), kv_visits - (_kv_row // BLOCK_KV) - 1)",
        {"kv_visits": VISITS},
    ),
    "window": (
        ("select(reversed_L2_group > 0, -kv_gone + (_kv_row // BLOCK_KV), kv_visits - (_kv_row // BLOCK_KV) - 1)"),
        {"kv_visits": VISITS, "kv_gone": "max(0, Nk - Nq + q_start - 40) // BLOCK_KV"},
    ),
    "streaming": (
        "kv_visits - (_kv_row // BLOCK_KV) - max(0, -kv_since_0 + kv_until_0) - 1",
        {
            "kv_visits": VISITS,
            "kv_until_0": f"{VISITS[:-1]}, (max(0, Nk - Nq + q_start - 9) // BLOCK_KV))",
            "kv_since_0": ("min(cdiv(Nk, BLOCK_KV), max((kv_start // BLOCK_KV) + 1, (min(3, Nk) // BLOCK_KV) + 1))"),
        },
    ),
    "packed": (
        "kv_visits - (_kv_row // BLOCK_KV) - 1",
        {"kv_visits": "min(document_q_first_count, cdiv(Nk, BLOCK_KV))"},
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_counts_tiles_of_the_call(name: str) -> None:
    """The number of tiles that visit is solved in the whole sequence; its position is the number of those that the call
    has."""
    expected, positions = ORDERS[name]
    kernel = lowered(name).kernel("bwd")
    (add,) = only(kernel.ops(), tile.OrderedAdd)
    assert add.order is not None and to_text(add.order) == expected
    assert add.semaphore is not None and to_text(add.semaphore.index[-1]) == "_q_row"
    step = kernel.block("step").ops
    found = {op.name: (op.src, to_text(op.tile)) for op in only(step, tile.ListPosition)}
    assert found == {at: ("KV_START_RANK", number) for at, number in positions.items()}


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("(_kv_row // BLOCK_KV), kv_visits", "(kv_start // BLOCK_KV), kv_visits", "semaphore-order"),
        ("kv_visits - (_kv_row // BLOCK_KV) - 1", "cdiv(Nk, BLOCK_KV) - (_kv_row // BLOCK_KV) - 1", "semaphore-order"),
        ("%kv_visits = list_position %KV_START_RANK", "%kv_visits = list_position %Q_START_RANK", "semaphore-order"),
        ("g + group*hkv, _q_row]) order", "g + group*hkv, q_start]) order", "semaphore-order"),
        ("split // 2, _kv_row]", "split // 2, kv_start]", "ordered-accumulate"),
        ("list_position %Q_START_RANK tile(q_end)", "list_position %KV_START_RANK tile(q_end)", "positions"),
    ],
)
def test_orders_and_ranges_that_take_tiles_of_the_call_for_others_are_refused(old: str, new: str, rule: str) -> None:
    head, at, kernels = print_module(lowered("causal")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError) as error:
        verify(parse_module(head + at + edit(kernels, (old, new))))
    assert error.value.rule == rule, error.value


# ---------------------------------------------------------------------------------------------- launches

SIZES = "launch @fwd sizes(Nq=q_len, Nk=kv_len, Rq=Nq, Rk=Nk)"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("Nq=Nq, Nk=kv_len, Rq=Nq, Rk=Nk", "Nq is `Nq`; expected `q_len`, as calls have chunks of a sequence"),
        ("Nq=q_len, Nk=Nk, Rq=Nq, Rk=Nk", "Nk is `Nk`; expected `kv_len`, as calls have chunks of a sequence"),
        ("Nq=q_len, Nk=kv_len, Rq=q_len, Rk=Nk", "%Q is T[B, Hq, Nq, D_QK]; expected T[B, Hq, q_len, D_QK]"),
    ],
)
def test_a_launch_without_the_lengths_of_the_whole_sequence_is_refused(new: str, reason: str) -> None:
    text = edit(print_module(lowered("causal")), (SIZES, f"launch @fwd sizes({new})"))
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text))
    assert error.value.rule == "host-launches" and reason in error.value.reason


@pytest.mark.parametrize("filled", ["", " fill(1)", " fill(0) fill_where(Nk > kv_len)"])
def test_sums_of_dq_that_a_part_of_the_keys_leaves_unwritten_are_refused(filled: str) -> None:
    made = "%DQ_ACC = alloc"
    text = edit(print_module(lowered("causal")), (f"{made} fill(0) fill_where(Nk < kv_len)", made + filled))
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text))
    assert error.value.rule == "host-launches", error.value
    assert "%DQ_ACC is not 0 in rows that see no key of the call" in error.value.reason


@pytest.mark.share(8)
@pytest.mark.parametrize("name", CASES)
def test_kernels_that_evaluate_the_mask_get_positions(name: str) -> None:
    """Others, such as @delta and @dq_end, have rows of the call as Nq and Nk."""
    for kernel in lowered(name).kernels:
        assert kernel.traits.places == (bool(kernel.traits.dots) or kernel.traits.counts_pairs), kernel.name
        assert kernel.traits.places or not {"Rq", "Rk"} & {d for arg in kernel.args for d in arg.type.dims}
