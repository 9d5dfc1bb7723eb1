"""classify-tiles and simplify are compared with brute force over every (query, key) pair of random masks and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.ir import parse, symbol
from attngen.masks.causal import Causal
from attngen.masks.key_padding import KeyPadding
from attngen.masks.sliding_window import SlidingWindow
from attngen.tiles.intervals import MaskContext
from attngen.tiles.ranges import classify
from attngen.tiles.tiles import evaluate
from attngen.transforms.simplify import simplify_condition

TILE = {"q": "BLOCK_Q", "kv": "BLOCK_KV"}
EXTENT = {"q": "Nq", "kv": "Nk"}


@dataclass(frozen=True)
class Condition:
    """One condition of a mask: its expression, the same condition written by hand in NumPy, values of the call, and
    facts about a condition that is not linear."""

    where: Any
    visible: Callable[..., Any]  # of q, kv, Nq, Nk
    values: Callable[..., dict[str, Any]] = lambda nk: {}
    facts: tuple[Any, ...] = ()
    text: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return self.text or str(self.where)


@st.composite
def causal(draw):
    align = draw(st.sampled_from(["bottom_right", "top_left"]))
    shift = int(align == "bottom_right")
    return Condition(Causal(align=align).expression(), lambda q, kv, nq, nk: kv <= q + shift * (nk - nq))


@st.composite
def window(draw):
    left, right = draw(st.tuples(*[st.none() | st.integers(0, 40)] * 2).filter(any))
    align = draw(st.sampled_from(["bottom_right", "top_left"]))
    shift = int(align == "bottom_right")

    def visible(q, kv, nq, nk):
        behind = q + shift * (nk - nq) - kv
        return (behind <= (np.inf if left is None else left)) & (-behind <= (np.inf if right is None else right))

    return Condition(SlidingWindow(left=left, right=right, align=align).expression(), visible)


@st.composite
def lengths(draw):
    n = draw(st.integers(0, 90))
    mask = KeyPadding(lengths=True)
    return Condition(
        mask.expression(), lambda q, kv, nq, nk: kv < n, lambda nk: {"kv_lengths": n}, text=f"kv_idx < {n}"
    )


@st.composite
def padding(draw):
    """A boolean tensor; classify-tiles knows only the span of its true elements."""
    bits = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=12)))
    keep = np.repeat(bits, draw(st.integers(1, 20)))
    mask = KeyPadding()

    def visible(q, kv, nq, nk):
        return np.pad(keep, (0, 200))[kv] & (kv < nk)

    def values(nk):
        seen = np.flatnonzero(np.pad(keep, (0, 200))[:nk])
        first = seen[0] if len(seen) else nk
        run = next((i for i in range(first, nk) if i not in seen), nk)
        return {"key_padding_first": first, "key_padding_run": run, "key_padding_end": seen[-1] + 1 if len(seen) else 0}

    return Condition(mask.expression(), visible, values, mask.facts(), f"key_padding {keep.astype(int)}")


@st.composite
def linear(draw):
    a, c = draw(st.tuples(*[st.integers(-3, 3)] * 2))
    e = draw(st.integers(-100, 100))
    less = draw(st.sampled_from(["<=", "<"]))
    where = parse(f"{a}*q_idx + {c}*kv_idx {less} {e}")
    return Condition(where, lambda q, kv, nq, nk: a * q + c * kv <= e - (less == "<"))


@st.composite
def union(draw):
    """A union of a condition on keys and one on queries."""
    n, m = draw(st.tuples(*[st.integers(0, 60)] * 2))
    return Condition(parse(f"kv_idx < {n} or q_idx < {m}"), lambda q, kv, nq, nk: (kv < n) | (q < m))


MASKS = st.lists(causal() | window() | lengths() | linear(), max_size=3, unique_by=lambda part: part.where)
OPAQUE = st.lists(causal() | window() | linear(), max_size=1).flatmap(
    lambda parts: (padding() | union()).map(lambda p: [*parts, p])
)
BLOCKS = st.sampled_from([1, 4, 8, 16])
SIZES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80), BLOCKS, BLOCKS), min_size=6, max_size=6)


@dataclass
class Problem:
    """A mask at one size, as seen by programs whose tiles are along one axis."""

    parts: list[Condition]
    program: str
    n: dict[str, int]
    block: dict[str, int]

    def __post_init__(self) -> None:
        self.loop = "kv" if self.program == "q" else "q"
        self.tiles = {x: -(-self.n[x] // self.block[x]) for x in ("q", "kv")}
        self.values = {f"BLOCK_{x.upper()}": self.block[x] for x in ("q", "kv")} | {
            EXTENT[x]: self.n[x] for x in ("q", "kv")
        }
        for part in self.parts:
            self.values |= part.values(self.n["kv"])

    @property
    def where(self) -> Any:
        """The mask of the kernel: kernels over queries mask keys past the end, kernels over keys load zeros there."""
        bounds = [symbol("kv_idx") < symbol("Nk")] if self.program == "q" else []
        return sympy.And(*(p.where for p in self.parts), *bounds)

    def visible(self, program: Any, loop: Any) -> Any:
        """Return the visible pairs in bounds by the hand-written conditions, as [program rows, loop rows]."""
        program, loop = program[:, None], loop[None, :]
        q, kv = (program, loop) if self.program == "q" else (loop, program)
        seen = (program < self.n[self.program]) & (loop < self.n[self.loop])
        for part in self.parts:
            seen = seen & part.visible(q, kv, self.n["q"], self.n["kv"])
        return seen

    def bounds(self) -> Any:
        """Return the bounds that classify-tiles gives, as [four per run of tiles, program tiles]."""
        starts = range(0, self.n[self.program], self.block[self.program])
        facts = tuple(fact for p in self.parts for fact in p.facts)
        opaque = frozenset(str(fact.literal) for fact in facts)
        exprs = classify(self.where, MaskContext(self.program, self.loop, others=opaque, facts=facts))
        return np.array(
            [[evaluate(e, {**self.values, f"{self.program}_start": x}) for x in starts] for e in exprs], dtype=int
        )

    def pairs(self, i: int) -> Any:
        """Return the pairs that program i sees, as [tiles along the loop, valid program rows, rows of a tile]."""
        first = i * self.block[self.program]
        rows = np.arange(first, min(first + self.block[self.program], self.n[self.program]))
        block, tiles = self.block[self.loop], self.tiles[self.loop]
        return self.visible(rows, np.arange(tiles * block)).reshape(len(rows), tiles, block).swapaxes(0, 1)


def problems(parts, sizes):
    """Yield the mask at each size, for programs along each axis."""
    for program in ("q", "kv"):
        for n_q, n_kv, block_q, block_kv in sizes:
            yield Problem(parts, program, {"q": n_q, "kv": n_kv}, {"q": block_q, "kv": block_kv})


def check_sound(problem):
    """Check that the visible range has every visible pair, and the full one no hidden or out-of-bounds pair."""
    for i, bounds in enumerate(problem.bounds().T):
        pairs = problem.pairs(i)
        seen = pairs.any(axis=(1, 2))
        done = 0
        for a, b, c, d in bounds.reshape(-1, 4):
            assert done <= a <= b <= c <= d <= problem.tiles[problem.loop]
            assert not seen[done:a].any(), f"program {i} skips a tile that holds something visible"
            assert pairs[b:c].all(), f"program {i} takes a tile that holds something hidden as full"
            done = d
        assert not seen[done:].any(), f"program {i} skips a tile that holds something visible"


@settings(max_examples=60, deadline=None)
@given(MASKS, SIZES)
def test_bounds_of_linear_masks_are_sound(parts, sizes):
    for problem in problems(parts, sizes):
        check_sound(problem)


@pytest.mark.share(16)
@settings(max_examples=60, deadline=None)
@given(OPAQUE, SIZES)
def test_bounds_of_opaque_masks_are_sound(parts, sizes):
    for problem in problems(parts, sizes):
        check_sound(problem)


@pytest.mark.share(16)
@settings(max_examples=60, deadline=None)
@given(causal() | window(), SIZES)
def test_bounds_of_one_causal_or_window_are_exact(part, sizes):
    """The first and the last visible tile are those of brute force, and every full tile is classified as full."""
    for problem in problems([part], sizes):
        for i, (a, b, c, d) in enumerate(problem.bounds().T):
            pairs = problem.pairs(i)
            seen, full = np.flatnonzero(pairs.any(axis=(1, 2))), pairs.all(axis=(1, 2))
            if len(seen):
                assert (a, d) == (seen[0], seen[-1] + 1)
            else:
                assert d - a <= 1  # one tile may be visited although it is empty
            assert full.sum() == c - b


def on_grid(e, values):
    """Evaluate a condition for arrays of indices."""
    names = sorted(str(s) for s in e.free_symbols)
    return sympy.lambdify([symbol(n) for n in names], e, modules="numpy")(*(values[n] for n in names))


@settings(max_examples=60, deadline=None)
@given(MASKS | OPAQUE, SIZES)
def test_a_simplified_condition_is_the_same_where_it_is_tested(parts, sizes):
    """The condition is tested on valid program rows and on every row of the loop's tiles; elsewhere it may differ."""
    for problem in problems(parts, sizes):
        simple = simplify_condition(problem.where, problem.program, problem.loop)
        program, loop = np.mgrid[
            : problem.n[problem.program], : problem.tiles[problem.loop] * problem.block[problem.loop]
        ]
        grid = {f"{problem.program}_idx": program, f"{problem.loop}_idx": loop, "key_padding": loop % 3 > 0}
        before, after = (on_grid(e, {**problem.values, **grid}) for e in (problem.where, simple))
        assert np.all(before == after)


@pytest.mark.parametrize("program", ["q", "kv"])
def test_the_check_finds_a_wrong_bound(program):
    """Brute force finds a bound that is one tile off."""
    part = Condition(Causal().expression(), lambda q, kv, nq, nk: kv <= q + nk - nq)
    problem = Problem([part], program, {"q": 40, "kv": 50}, {"q": 8, "kv": 4})
    right = problem.bounds()
    check_sound(problem)
    for bound, offset in ((0, 1), (1, -1), (2, 1), (3, -1)):
        wrong = right.copy()
        wrong[bound] += offset
        problem.bounds = lambda wrong=wrong: wrong
        with pytest.raises(AssertionError):
            check_sound(problem)
