"""Tile bounds of random masks are compared with the masks themselves, score by score.

Masks come from tests/transforms/random_masks.py. Kernels are built as for any spec, and their loops give the bounds.
Visible scores are those of the evaluator of Python's syntax trees, or of a mask's hand-written oracle, so the check
does not depend on sympy's proofs.

    python -m tests.transforms.test_random_masks --checks 1000000 --seed 1
    python -m tests.transforms.test_random_masks --exact
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from attngen.builders.backward import build_dkdv
from attngen.builders.forward import build_forward
from attngen.conformance.derive import derive
from attngen.errors import SpecError
from attngen.ir import Kernel, Read, clamp, floordiv, mod, select
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.tiles.ranges import tile_ranges
from attngen.tiles.tiles import evaluate
from tests import lang_strategies
from tests.transforms.random_masks import Mask, arguments, random_masks

BATCH, HEADS, KV_HEADS = 2, 4, 2
CI_CHECKS, CI_SEED = 20_000, 7
BLOCKS = (1, 4, 8, 16, 16, 32)


# ---------------------------------------------------------------------------------------------- bounds of kernels


@dataclass(frozen=True)
class KernelBounds:
    """The bounds of a kernel's loop over tiles: four for each run. Programs have tiles along `program`."""

    program: str
    kernel: Kernel = field(repr=False)
    tiles: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class MaskCase:
    """A mask, its spec, and the bounds of a kernel over queries and of one over keys."""

    mask: Mask
    spec: Spec
    kernels: tuple[KernelBounds, ...]

    @classmethod
    def of(cls, mask: Mask) -> MaskCase:
        spec = make_spec({"name": "random_mask", "heads": {"sharing": "gqa"}, "head_dim": 64, "mask": mask})
        kernels = build_forward(spec), build_dkdv(spec)
        return cls(mask, spec, tuple(KernelBounds(k.program_axis, k, tile_ranges(k, "step")) for k in kernels))


@dataclass(frozen=True)
class Call:
    """Sizes, arguments, the program's head and sequence, and tile sizes."""

    n: dict[str, int]
    block: dict[str, int]
    b: int
    h: int
    inputs: dict[str, Any] = field(repr=False)

    @classmethod
    def random(cls, chance: random.Random, spec: Spec, **fixed: int) -> Call:
        n = {
            x: chance.choice([chance.randint(0, 20), chance.randint(20, 96), chance.randint(40, 96)])
            for x in ("q", "kv")
        }
        if chance.random() < 0.3:
            n["kv"] = n["q"]
        block = {x: chance.choice(BLOCKS[1:] if n["q"] * n["kv"] > 3000 else BLOCKS) for x in ("q", "kv")}
        inputs = arguments(chance, spec, sizes_of(n))
        return cls(n, block, chance.randrange(BATCH), chance.randrange(HEADS), inputs)


def sizes_of(n: dict[str, int]) -> Sizes:
    return Sizes(BATCH, HEADS, KV_HEADS, n["q"], n["kv"])


_NUMPY: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *a: reduce(np.add, a),
    sympy.Mul: lambda *a: reduce(np.multiply, a),
    sympy.Min: lambda *a: reduce(np.minimum, a),
    sympy.Max: lambda *a: reduce(np.maximum, a),
    sympy.Abs: np.abs,
    floordiv: np.floor_divide,
    mod: np.mod,
    clamp: lambda x, low, high: np.minimum(np.maximum(x, low), high),
    select: np.where,
    sympy.And: lambda *a: reduce(np.logical_and, a),
    sympy.Or: lambda *a: reduce(np.logical_or, a),
    sympy.Not: np.logical_not,
    sympy.Lt: np.less,
    sympy.Le: np.less_equal,
    sympy.Gt: np.greater,
    sympy.Ge: np.greater_equal,
    sympy.Eq: np.equal,
    sympy.Ne: np.not_equal,
}


def on_rows(e: Any, values: dict[str, Any]) -> Any:
    """Return the value of an index expression in NumPy."""
    if e.is_Symbol:
        return values[e.name]
    return int(e) if e.is_Integer else _NUMPY[e.func](*(on_rows(a, values) for a in e.args))


def read_values(reads: tuple[Read, ...], tensors: dict[str, Any], values: dict[str, Any], rows: str) -> dict[str, Any]:
    """Return the elements that programs read before their loop, one per row of their axis or a single number. Negative
    indices count from the end."""
    known = dict(values)
    found: dict[str, Any] = {}
    for read in reads:
        names = {str(s) for e in read.index for s in e.free_symbols}
        if not names <= known.keys():
            continue
        table = np.asarray(tensors[read.tensor])
        index = np.broadcast_arrays(*(np.asarray(on_rows(e, known)) for e in read.index))
        index = [np.where(i < 0, i + n, i) for i, n in zip(index, table.shape)]
        inside = reduce(np.logical_and, ((i >= 0) & (i < n) for i, n in zip(index, table.shape)))
        some = table.size > 0
        at = tuple(np.clip(i, 0, max(n - 1, 0)) for i, n in zip(index, table.shape))
        element = np.where(inside, table[at], 0) if some else np.zeros(inside.shape, int)
        known[read.name] = element
        if table.dtype.kind == "i":
            found[read.name] = element
    return found


def bounds(case: MaskCase, kernel: KernelBounds, call: Call) -> np.ndarray:
    """Return the bounds as numbers, [programs, runs, 4]."""
    program, n = kernel.program, call.n
    group = HEADS // KV_HEADS
    values: dict[str, Any] = {
        "Nq": n["q"],
        "Nk": n["kv"],
        "BLOCK_Q": call.block["q"],
        "BLOCK_KV": call.block["kv"],
        "group": group,
    }
    values |= {"b": call.b, "h": call.h, "hkv": call.h // group, "g": call.h % group}
    values |= {name: x for name, x in call.inputs.items() if not isinstance(x, torch.Tensor)}
    tensors = {**call.inputs, **derive(case.spec, sizes_of(n), call.inputs, "cpu")}
    rows = read_values(case.spec.reads(), tensors, {**values, f"{program}_idx": np.arange(n[program])}, program)
    whole = sympy.Tuple(*kernel.tiles)
    found = []
    for start in range(0, n[program], call.block[program]):
        mine = {**values, f"{program}_start": start}
        for name, x in rows.items():
            if x.ndim == 0:
                mine[name] = int(x)
                continue
            part = x[start : start + call.block[program]]
            mine |= {f"{name}_least": int(part.min()), f"{name}_greatest": int(part.max())}
        found.append(evaluate(whole, mine))
    return np.array(found, dtype=int).reshape(len(found), len(kernel.tiles) // 4, 4)


# ---------------------------------------------------------------------------------------------- the check


@dataclass
class Tally:
    """How much was checked, and how exact the bounds were."""

    masks: int = 0
    refused: int = 0
    checks: int = 0
    empty: int = 0  # tiles with nothing visible
    empty_visited: int = 0
    full: int = 0  # tiles with nothing hidden
    full_masked: int = 0

    def __str__(self) -> str:
        shares = (100 * a / max(1, b) for a, b in ((self.empty_visited, self.empty), (self.full_masked, self.full)))
        words = "{:.2f} % of empty tiles visited, {:.2f} % of full ones masked".format(*shares)
        return f"{self.checks:,} tiles of {self.masks:,} masks ({self.refused:,} not in the language): {words}"


class Unsound(AssertionError):
    """Bounds that skip something visible, treat a tile with something hidden as full, or are out of order."""


def tiles_of(visible: np.ndarray, program: int, loop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tiles have anything visible and which everything, from visible pairs as [program rows, loop rows].
    Nothing past the loop's end is visible."""
    n_program, n_loop = visible.shape
    rows, columns = -n_program % program, -n_loop % loop
    seen, whole = (
        np.pad(np.pad(visible, ((0, 0), (0, columns))), ((0, rows), (0, 0)), constant_values=past)
        .reshape((n_program + rows) // program, program, (n_loop + columns) // loop, loop)
        for past in (False, True)
    )  # fmt: skip
    return seen.any(axis=(1, 3)), whole.all(axis=(1, 3))


def check(found: np.ndarray, visible: np.ndarray, program: int, loop: int) -> Tally:
    """Raise Unsound if the bounds are wrong for the visible pairs, given as [program rows, loop rows]."""
    seen, whole = tiles_of(visible, program, loop)
    count = seen.shape[1]
    flat = found.reshape(len(found), found.shape[1] * 4)
    rising = np.concatenate([np.zeros_like(flat[:, :1]), flat, np.full_like(flat[:, :1], count)], 1)
    if (np.diff(rising, axis=1) < 0).any():
        raise Unsound(f"bounds out of order, of {count} tiles: {flat.tolist()}")
    at = np.arange(count)
    visited = ((found[:, :, :1] <= at) & (at < found[:, :, 3:])).any(1)
    full = ((found[:, :, 1:2] <= at) & (at < found[:, :, 2:3])).any(1)
    for wrong, mistake in (
        (seen & ~visited, "skips a tile that holds something visible"),
        (full & ~whole, "treats a tile as full that is not"),
    ):
        if wrong.any():
            i, tile = np.argwhere(wrong)[0].tolist()
            raise Unsound(f"program {i} {mistake}, tile {tile} of {count}: {found[i].tolist()}")
    return Tally(
        0, 0, seen.size, int((~seen).sum()), int((visited & ~seen).sum()), int(whole.sum()), int((whole & ~full).sum())
    )


def check_call(case: MaskCase, call: Call, tally: Tally) -> None:
    """Check both kernels at one call."""
    reference = case.spec.mask.reference(sizes_of(call.n), torch.device("cpu"), call.inputs)
    shape = (BATCH, HEADS, call.n["q"], call.n["kv"])
    visible = reference.expand(shape)[call.b, call.h].numpy()
    for kernel in case.kernels:
        loop = "kv" if kernel.program == "q" else "q"
        mine = visible if kernel.program == "q" else visible.T
        try:
            one = check(bounds(case, kernel, call), mine, call.block[kernel.program], call.block[loop])
        except Exception as error:
            inputs = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in call.inputs.items()}
            where = f"{json.dumps(case.mask)} with programs over {kernel.program}: {call} {inputs}"
            raise Unsound(f"{error if isinstance(error, Unsound) else repr(error)}; {where}") from error
        for name, value in vars(one).items():
            setattr(tally, name, getattr(tally, name) + value)


def drive(
    number: int,
    checks: int,
    masks: Iterator[Mask] | None = None,
    calls: int = 8,
    report: Callable[[str], None] | None = None,
) -> Tally:
    """Check random masks at random calls until at least `checks` tiles were checked. Failures are raised, or passed to
    `report`."""
    chance, tally = random.Random(number), Tally()
    masks = masks or random_masks(number)
    while tally.checks < checks:
        mask = next(masks)
        try:
            case = MaskCase.of(mask)
        except SpecError as error:
            tally.refused += not is_degenerate(error)
            continue
        except Exception as error:
            if report is None:
                raise Unsound(f"{error!r}; {json.dumps(mask)}") from error
            report(f"{error!r}; {json.dumps(mask)}")
            continue
        names = [name for d in case.spec.derived() for name in d.names]
        if len(set(names)) < len(names):  # packed documents, causal and not: equal names for different values
            tally.refused += 1
            continue
        tally.masks += 1
        try:
            for _ in range(calls):
                check_call(case, Call.random(chance, case.spec), tally)
        except Unsound as error:
            if report is None:
                raise
            report(str(error))
    return tally


def is_degenerate(error: SpecError) -> bool:
    """Return whether a mask is refused because it simplifies to one that hides every key or lacks a parameter."""
    return any(words in str(error) for words in ("hides every key", "once simplified"))


# ---------------------------------------------------------------------------------------------- tests

SIZES = st.tuples(
    st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 4, 8, 16]), st.sampled_from([1, 4, 8, 16])
)
STREAMING: Mask = {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 19}}, {"sink_tokens": {"count": 4}}]}]}
NAMED: dict[str, Mask] = {
    "causal": "causal",
    "window": {"sliding_window": {"left": 19, "right": 0}},
    "streaming": STREAMING,
    "prefix_lm": {"prefix_lm": {"length": 30}},
    "prefix_lm per batch": {"prefix_lm": {"per": "batch"}},
    "chunked": {"chunked": {"size": 24}},
    "dilated": {"dilated": {"step": 3, "reach": 40}},
    "document": "document",
    "document, causal": {"all_of": ["causal", "document"]},
    "packed": {"document": {"packed": True}},
    "packed, causal": {"document": {"packed": True, "causal": True}},
    "key_padding": "key_padding",
    "global keys or window": {
        "any_of": [
            {"expr": "far[b, kv_idx]", "params": {"far": {"tensor": ["B", "Nk"], "dtype": "bool"}}},
            {"sliding_window": {"left": 19, "right": 19}},
        ]
    },
}
# The largest shares of empty tiles visited and of full tiles masked, in percent, where bounds are exact or nearly so.
EXACT = {
    "causal": (0, 0),
    "window": (0, 0),
    "streaming": (0, 10),
    "prefix_lm": (0, 10),
    "chunked": (0, 0),
    "dilated": (0, 0),
    "document": (0, 0),
    "document, causal": (0, 0),
    "packed": (2, 0),
    "packed, causal": (3, 0),
    "key_padding": (0, 0),
}


def exactness(mask: Mask, calls: int = 150, number: int = 0) -> Tally:
    """Measure how exact the bounds of one mask are, with as many queries as keys, many lengths and tile sizes, and
    sorted documents."""
    chance, tally, case = random.Random(number), Tally(masks=1), MaskCase.of(mask)
    for _ in range(calls):
        n = chance.randint(60, 160)
        block = {x: chance.choice([4, 8, 16]) for x in ("q", "kv")}
        inputs = arguments(chance, case.spec, sizes_of({"q": n, "kv": n}))
        for name, x in inputs.items():
            if name == "document_ids":
                inputs[name] = x.remainder(5).sort(-1).values
            elif name == "key_padding":
                inputs[name] = torch.arange(n) < torch.tensor([[chance.randint(0, n)] for _ in range(BATCH)])
        check_call(case, Call({"q": n, "kv": n}, block, 0, 0, inputs), tally)
    return tally


def test_bounds_of_random_masks_are_sound() -> None:
    tally = drive(CI_SEED, CI_CHECKS, calls=3)
    assert tally.checks >= CI_CHECKS and tally.masks >= 30
    assert tally.refused <= tally.masks // 20
    assert tally.empty_visited < tally.empty and tally.full_masked < tally.full


@pytest.mark.share(4)
@settings(max_examples=15, deadline=None, report_multiple_bugs=False)
@given(lang_strategies.masks(2), SIZES)
def test_bounds_of_a_random_expression_are_sound(
    sample: lang_strategies.Sample, size: tuple[int, int, int, int]
) -> None:
    """Hypothesis shrinks an expression whose bounds are unsound."""
    try:
        case = MaskCase.of(
            {
                "expr": sample.text,
                "params": {name: param.model_dump(mode="json") for name, param in sample.params.items()},
            }
        )
    except SpecError as error:
        assert is_degenerate(error)
        reject()
    n_q, n_kv, block_q, block_kv = size
    for h in (0, HEADS - 1):
        check_call(
            case,
            Call({"q": n_q, "kv": n_kv}, {"q": block_q, "kv": block_kv}, h % BATCH, h, dict(sample.scalars)),
            Tally(),
        )


@pytest.mark.share(16)
@pytest.mark.parametrize("name", NAMED)
def test_bounds_of_named_masks_are_sound(name: str) -> None:
    tally = exactness(NAMED[name], 12, 1)
    empty, full = EXACT.get(name, (100, 100))
    assert 100 * tally.empty_visited <= empty * tally.empty and 100 * tally.full_masked <= full * tally.full, str(tally)


@pytest.mark.parametrize("bound", range(4))
@pytest.mark.parametrize("program", ["q", "kv"])
def test_the_check_finds_a_wrong_bound(program: str, bound: int) -> None:
    """The check finds a bound that is one tile off, in the first run of tiles and in the last."""
    case = MaskCase.of(
        {"any_of": [{"sliding_window": {"left": 9, "right": 9}}, {"expr": "30 <= kv_idx - q_idx <= 50"}]}
    )
    kernel = next(k for k in case.kernels if k.program == program)
    call = Call({"q": 120, "kv": 120}, {"q": 4, "kv": 4}, 0, 0, {})
    visible = case.spec.mask.reference(sizes_of(call.n), torch.device("cpu"), {})[0, 0].numpy()
    right, mine = bounds(case, kernel, call), visible if program == "q" else visible.T
    check(right, mine, 4, 4)
    for run in (0, right.shape[1] - 1):
        wrong = right.copy()
        i = next(i for i, found in enumerate(right) if len(set(found[run].tolist())) == 4)
        wrong[i, run, bound] += 1 if bound in (0, 2) else -1
        with pytest.raises(Unsound):
            check(wrong, mine, 4, 4)


def test_bounds_out_of_order_are_found() -> None:
    visible = np.zeros((8, 8), bool)
    check(np.array([[[0, 0, 0, 0], [0, 1, 1, 2]]]), visible, 8, 4)
    for wrong in (
        [[0, 0, 0, 1], [0, 1, 1, 2]],
        [[0, 1, 0, 2], [2, 2, 2, 2]],
        [[0, 0, 0, 3], [3, 3, 3, 3]],
        [[-1, 0, 0, 0], [0, 0, 0, 0]],
    ):
        with pytest.raises(Unsound, match="out of order"):
            check(np.array([wrong]), visible, 8, 4)


# Masks whose bounds the verifier once could not prove, or took minutes to prove.
HARD: list[Mask] = [
    {"expr": "kv_idx * 3 // 2 <= q_idx"},
    {"any_of": [{"prefix_lm": {"per": "batch"}}, {"sliding_window": {"left": 101}}]},
    {"any_of": [{"sliding_window": {"left": 127, "right": 0}}, {"expr": "kv_idx < 4 and kv_idx <= q_idx"}]},
    {"not": {"chunked": {"size": 16, "align": "top_left"}}},
    {"expr": "kv_idx != where(7 < q_len, 4, 9) and (kv_idx <= q_idx or kv_idx > q_idx + 40 or kv_idx != q_len // 2)"},
    {"all_of": [{"expr": "q_len != kv_idx"}, {"not": {"sliding_window": {"left": 5, "right": 3}}}]},
    {"expr": "kv_len // -1 <= q_idx - kv_idx or q_idx >= q_idx + kv_len"},
    {"expr": "h * -2 >= h and h <= 2"},
    {"not": {"expr": "1 <= q_len and q_idx >= kv_idx"}},
]


@pytest.mark.share(16)
@pytest.mark.parametrize("mask", HARD, ids=range(len(HARD)))
def test_masks_in_several_parts_are_lowered(mask: Mask) -> None:
    lower(make_spec({"name": "hard", "heads": {"sharing": "gqa"}, "head_dim": 64, "dtype": "fp16", "mask": mask}))


def main() -> None:
    parser = argparse.ArgumentParser(description="checks bounds of tiles of random masks")
    parser.add_argument("--checks", type=int, default=1_000_000, help="tiles to check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=25, help="calls of each mask")
    parser.add_argument(
        "--exact", action="store_true", help="print how exact the bounds of named masks are, and check nothing else"
    )
    given = parser.parse_args()
    if given.exact:
        for name, mask in NAMED.items():
            print(f"{name:22} {exactness(mask)}")
        return
    failures: list[str] = []

    def failed(reason: str) -> None:
        failures.append(reason)
        print(reason)

    start = time.time()
    tally = drive(given.seed, given.checks, calls=given.calls, report=failed)
    print(f"{tally}; {len(failures)} failures; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
