"""Programs that split a loop: each index of a range is in one part, and rules and counts cover the whole range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.cost.io import l2_bytes
from attngen.ir import Expr, GridAxis, Kernel, Module, Type, parse, symbol, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.ir.split_axes import part, whole
from attngen.tiles.tiles import evaluate, runs, tile_loops, unbounded, visited
from attngen.transforms.split_loops import SplitLoops
from attngen.verify import rules
from tests.helpers import edit, lowered, target

SPLIT = GridAxis("split", symbol("splits"))
RULES = rules("triton")["target"]
PROGRAMS = (1, 2, 3, 5, 8)
# At these sizes, windows of 1024 keys leave some tiles out, also with a few first keys.
SIZES = {
    "Nq": 700,
    "Nk": 3000,
    "BLOCK_Q": 64,
    "BLOCK_KV": 64,
    "B": 2,
    "Hq": 4,
    "Hkv": 2,
    "group": 2,
    "D_QK": 128,
    "D_V": 128,
    "elem": 2,
}


def split_keys(made: Module, split=part) -> Module:
    """Return the module with the keys of @fwd split over the programs along the axis `split`."""

    def change(_, op):
        if isinstance(op, tile.Loop) and op.var == "kv":
            op = replace(op, ranges=tuple(split(lo, hi, SPLIT) for lo, hi in op.ranges))
        return [op, tile.Arg("splits", "scalar", Type("i32", (), "reg"))] if op.name == "scale" else [op]

    kernel = made.kernel("fwd").rewrite(change)
    kernel = replace(kernel, grid=(kernel.grid[0], SPLIT, *kernel.grid[1:]))
    return replace(made, kernels=(kernel, *(k for k in made.kernels if k.name != "fwd")))


def symbols(*names: str) -> list[Expr]:
    return [symbol(name) for name in names]


def reasons(made: Module, *names: str) -> list[str]:
    """Return the reasons for which the named rules refuse @fwd."""
    return [reason for name in names for reason in RULES[name](made, made.kernel("fwd"))]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 64])
@pytest.mark.parametrize("programs", PROGRAMS)
def test_each_index_is_in_one_part(length, programs):
    bounds = part(symbol("kv_start"), symbol("kv_start") + length, SPLIT)
    parts = [
        range(*(int(evaluate(e, {"kv_start": 3, "split": x, "splits": programs})) for e in bounds))
        for x in range(programs)
    ]
    assert [i for one in parts for i in one] == [*range(3, 3 + length)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


RANGES = [
    "0 .. group",
    "0 .. cdiv(Nk, BLOCK_KV)",
    "Nq // BLOCK_Q .. Nk // BLOCK_KV",
    "max(0, Nq - 5) .. 2*Nk + max(0, Nq - 5)",
]


@pytest.mark.parametrize("text", RANGES)
def test_the_whole_range_is_recovered_from_a_part(text):
    lo, hi = (parse(e, "") for e in text.split(" .. "))
    assert whole(*part(lo, hi, SPLIT), SPLIT) == (lo, hi)


@pytest.mark.parametrize(
    "text",
    [
        "0 .. group",  # the whole range in each program
        "0 .. (group*split + group) // splits",  # overlaps
        "(group*split) // splits .. (group*split + group - 1) // splits",  # leaves gaps
        "(group*split + 1) // splits .. (group*split + group + 1) // splits",
        "(group*split) // Hq .. (group*split + group) // Hq",  # for another number of programs
        "(group*h) // splits .. (group*h + group) // splits",  # along another axis
        "split*cdiv(group, splits) .. split*cdiv(group, splits) + cdiv(group, splits)",  # ends too late
    ],
)
def test_a_range_that_is_no_part_has_no_whole_range(text):
    assert whole(*(parse(e, "") for e in text.split(" .. ")), SPLIT) is None


# full_mha: all; causal: up to the diagonal; window: two partial ranges; streaming: two runs of tiles.
@pytest.mark.share(16)
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("name", ["full_mha", "causal_gqa", "window_gqa", "streaming_gqa"])
def test_split_loops_are_proved_and_counted(name, programs):
    """Together the programs visit each tile that one program would, once, and each of them loads the queries."""
    one, made = target(name), parse_module(print_module(split_keys(target(name))))
    assert reasons(made, "loops", "split-axis", "covers", "full-is-proven") == []
    # Each program has partial sums, which a kernel that splits loops would store separately.
    over = "that the other programs along split write, too"
    assert [reason.partition("rows of ")[2] for reason in reasons(made, "indexing")] == [
        f"%{x} {over}" for x in ("O", "LSE")
    ]
    before, after = (m.kernel("fwd") for m in (one, made))
    sizes = {**unbounded(after), **SIZES, "splits": programs, "tiles": 0}
    total = 0
    for start in range(0, SIZES["Nq"], SIZES["BLOCK_Q"]):
        for loop, unsplit in zip(tile_loops(after), tile_loops(before)):
            of_one = visited_by(before, unsplit, {**sizes, "q_start": start})
            found = [
                j for x in range(programs) for j in visited_by(after, loop, {**sizes, "q_start": start, "split": x})
            ]
            assert sorted(found) == of_one and len(of_one) == evaluate(
                visited(after, loop.cls), {**sizes, "q_start": start}
            )
            total += len(found)
    assert evaluate(runs(after, "step").doit(), sizes) == total * SIZES["B"] * SIZES["Hq"]
    assert evaluate(runs(after, "entry"), sizes) == programs * evaluate(runs(before, "entry"), sizes)
    assert evaluate(l2_bytes(after).total, sizes) == programs * evaluate(l2_bytes(before).total, sizes)


def visited_by(kernel: Kernel, loop: tile.Loop, values: dict[str, int]) -> list[int]:
    """Return the tiles that a program's loop visits."""
    bounds = [[int(evaluate(kernel.resolve(e), values)) for e in pair] for pair in loop.ranges]
    return [j for lo, hi in bounds for j in range(lo, hi)]


WRONG = {
    "all in each program": (lambda lo, hi, axis: (lo, hi), "split-axis"),
    "overlap": (lambda lo, hi, axis: (lo, part(lo, hi, axis)[1]), "covers"),
    "a gap": (lambda lo, hi, axis: tuple(e - i for i, e in enumerate(part(lo, hi, axis))), "covers"),
    "another size": (lambda lo, hi, axis: part(lo, hi, replace(axis, extent=symbol("Hq"))), "covers"),
    "another axis": (lambda lo, hi, axis: part(lo, hi, replace(axis, var="h")), "covers"),
    "a part of the part": (lambda lo, hi, axis: part(*part(lo, hi, axis), axis), "covers"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_loops_that_are_split_wrongly_are_refused(mistake):
    split, rule = WRONG[mistake]
    made = split_keys(target("causal_gqa"), split)
    assert reasons(made, rule)
    assert reasons(made, "split-axis") == [
        "programs along split in splits split loops over no body; expected all ranges over one body"
    ]


def test_a_loop_with_only_one_split_range_is_refused():
    made = split_keys(
        target("window_gqa"), lambda lo, hi, axis: part(lo, hi, axis) if str(hi) == "kv_full_end" else (lo, hi)
    )
    assert reasons(made, "split-axis") == [
        "programs along split in splits split loops over @step; expected all ranges over one body"
    ]


def test_a_split_partial_loop_may_not_be_relabelled_full():
    text = print_module(split_keys(target("causal_gqa")))
    assert reasons(parse_module(edit(text, ("cls(partial)", "cls(full)"))), "full-is-proven")


def test_the_pass_split_loops_keeps_the_split_ranges():
    made = SplitLoops().run(split_keys(lowered("window_gqa")["classify-tiles"]))
    assert reasons(made, "loops", "split-axis", "covers", "full-is-proven") == []
    full, partial = tile_loops(made.kernel("fwd"))
    assert full.ranges == (part(*symbols("kv_full_first", "kv_full_end"), SPLIT),)
    assert partial.ranges == tuple(
        part(*symbols(*names), SPLIT) for names in (("kv_first", "kv_full_first"), ("kv_full_end", "kv_end"))
    )
