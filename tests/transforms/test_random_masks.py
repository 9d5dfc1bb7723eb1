"""Bounds of tiles of random masks against the masks themselves, score by score.

Expressions come from the grammar of tests/lang_strategies.py, some with reads of tensors in them, and are joined by
any_of, all_of and not with named masks. Kernels are built as for any spec, so whose tiles are bounded, and by what, is
theirs to say; what is visible is what the evaluator of Python's trees, or a mask's hand-written oracle, says. Nothing
here asks sympy what is true.

    python -m tests.transforms.test_random_masks --checks 1000000 --seed 1
    python -m tests.transforms.test_random_masks --exact
"""

from __future__ import annotations

import argparse
import json
import random
import re
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
from attngen.ir.expr import clamp, floordiv, mod, select
from attngen.ir.graph import Kernel, Read
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower
from attngen.masks.document import SORTED_SPANS
from attngen.spec import Spec, make_spec
from attngen.tiles.ranges import tile_ranges
from attngen.tiles.tiles import evaluate
from tests import lang_strategies
from tests.spec_strategies import drawn

BATCH, HEADS, KV_HEADS = 2, 4, 2
CI_CHECKS, CI_SEED = 20_000, 7
BLOCKS = (1, 4, 8, 16, 16, 32)
Mask = Any  # as a spec writes it


# ---------------------------------------------------------------------------------------------- masks

# Integers and conditions that read tensors, with the tensors that they declare; `@` is a number, so that no two masks
# share one.
INTEGER_READS = {
    "limit@[b, q_idx]": ("limit@", ["B", "Nq"], "int32"),
    "until@[b, kv_idx]": ("until@", ["B", "Nk"], "int32"),
    "pair@[q_idx, kv_idx]": ("pair@", ["Nq", "Nk"], "int32"),
    "length@[b]": ("length@", ["B"], "int32"),
    "cut@[h]": ("cut@", ["H"], "int32"),
    "per@[hkv, q_idx]": ("per@", ["Hkv", "Nq"], "int32"),
    "own@[h, kv_idx]": ("own@", ["H", "Nk"], "int32"),
    "coarse@[q_idx // 3]": ("coarse@", ["Nq"], "int32"),
    "far@[q_idx - kv_idx]": ("far@", [9], "int32"),
    "back@[kv_idx - 5]": ("back@", ["Nk"], "int32"),
    "hop@[b, hop@[b, q_idx]]": ("hop@", ["B", "Nk"], "int32"),
    "jump@[max(q_idx, 3)]": ("jump@", ["Nq"], "int32"),
}
CONDITION_READS = {
    "seen@[b, kv_idx]": ("seen@", ["B", "Nk"], "bool"),
    "open@[b, q_idx]": ("open@", ["B", "Nq"], "bool"),
    "doc@[b, q_idx] == doc@[b, kv_idx]": ("doc@", ["B", "Nk"], "int32"),
    "low@[q_idx] <= kv_idx and kv_idx < low@[q_idx] + 20": ("low@", ["Nq"], "int32"),
    "kv_idx <= limit@[b, q_idx]": ("limit@", ["B", "Nq"], "int32"),
    "abs(q_idx - kv_idx) <= near@[b, kv_idx]": ("near@", ["B", "Nk"], "int32"),
    "(q_idx - kv_idx) // 4 < reach@[h]": ("reach@", ["H"], "int32"),
    "weight@[h] * (q_idx - kv_idx) < 2.5": ("weight@", ["H"], "fp32"),
    "kv_idx <= 0.75 * q_idx": None,
    "q_idx * kv_idx < 400": None,
}


def written(chance: random.Random, sample: lang_strategies.Sample, number: int) -> Mask:
    """A drawn expression as a spec writes it, at times with reads in place of scalars and lengths, or beside a
    condition that reads."""
    text, params = sample.text, {name: param.model_dump(mode="json") for name, param in sample.params.items()}
    taken = []

    def read(name: re.Match[str]) -> str:
        if chance.random() < 0.5 or len(taken) == 2:
            return name[0]
        taken.append(chance.choice(list(INTEGER_READS)))
        return f"({taken[-1]})"

    if chance.random() < 0.4:
        text = re.sub(r"\b(window|q_len|kv_len|h|b)\b", read, text)
    tables = {**INTEGER_READS, **CONDITION_READS}
    if chance.random() < 0.3:
        taken.append(chance.choice(list(CONDITION_READS)))
        text = f"({text}) {chance.choice(['and', 'or'])} ({'not ' * (chance.random() < 0.2)}({taken[-1]}))"
    for key in taken:
        if tables[key]:
            name, dims, dtype = tables[key]
            params[name.replace("@", str(number))] = {"tensor": dims, "dtype": dtype}
    used = {name: param for name, param in params.items() if re.search(rf"\b{name}\b", text.replace("@", str(number)))}
    return {"expr": text.replace("@", str(number)), **({"params": used} if used else {})}


def named(chance: random.Random) -> Mask:
    """A named mask, its parameters small enough to cut through small tiles."""
    align = chance.choice(["bottom_right", "bottom_right", "top_left"])
    left, right = chance.choice([(19, 0), (5, 3), (0, 0), (33, None), (None, 4), (7, 40)])
    window = {key: x for key, x in (("left", left), ("right", right)) if x is not None}
    prefix: list[dict[str, Any]] = [{"length": chance.randint(0, 40)}, {}, {"per": "batch"}]
    return chance.choice([
        {"causal": {"align": align}},
        {"sliding_window": {**window, "align": align}},
        {"sink_tokens": {"count": chance.choice([1, 4, 9])}},
        {"prefix_lm": {**chance.choice(prefix), "align": align}},
        {"chunked": {"size": chance.choice([1, 5, 16, 40]), "align": align}},
        {"dilated": {"step": chance.choice([2, 3, 8]), **chance.choice([{}, {"reach": 25}]), "align": align}},
        {"key_padding": {"lengths": chance.random() < 0.5}},
        {"document": chance.choice([{}, {}, {"packed": True}, {"packed": True, "causal": True}])},
    ])  # fmt: skip


def random_mask(chance: random.Random, samples: Iterator[lang_strategies.Sample], depth: int = 2) -> Mask:
    """An expression, a named mask, or several of these."""
    kind = chance.choice(["expr", "named", "expr", "any_of", "all_of", "not"][: 6 if depth else 3])
    if kind == "expr":
        return written(chance, next(samples), chance.randrange(10**6))
    if kind == "named":
        return named(chance)
    if kind == "not":
        return {"not": random_mask(chance, samples, depth - 1)}
    return {kind: [random_mask(chance, samples, depth - 1) for _ in range(chance.randint(1, 3))]}


# ---------------------------------------------------------------------------------------------- what kernels bound


@dataclass(frozen=True)
class View:
    """The bounds that a kernel has for its loop over tiles: four for each run."""

    own: str
    kernel: Kernel = field(repr=False)
    tiles: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Masked:
    """A spec with a mask, seen by a kernel that owns queries and by one that owns keys."""

    mask: Mask
    spec: Spec
    views: tuple[View, ...]

    @classmethod
    def of(cls, mask: Mask) -> Masked:
        spec = make_spec({"name": "drawn", "heads": {"sharing": "gqa"}, "head_dim": 64, "mask": mask})
        kernels = build_forward(spec), build_dkdv(spec)
        return cls(mask, spec, tuple(View(k.program_axis, k, tile_ranges(k, "step")) for k in kernels))


@dataclass(frozen=True)
class Call:
    """Sizes, arguments, the program's head and sequence, and the sizes of tiles."""

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
        inputs = arguments(chance, spec, sizes(n))
        return cls(n, block, chance.randrange(BATCH), chance.randrange(HEADS), inputs)


def sizes(n: dict[str, int]) -> Sizes:
    return Sizes(BATCH, HEADS, KV_HEADS, n["q"], n["kv"])


def arguments(chance: random.Random, spec: Spec, of: Sizes) -> dict[str, Any]:
    """Values of what a call takes: ids sorted, unsorted, all alike or all different; padding on any side; numbers
    around positions."""
    found: dict[str, Any] = {}
    for i in spec.inputs():
        if i.name.startswith("cu_seqlens"):
            cuts = sorted(
                chance.randint(0, of.n_q if i.name.endswith("_q") else of.n_kv) for _ in range(chance.choice([0, 1, 3]))
            )
            ends = of.n_q if i.name.endswith("_q") else of.n_kv
            known = next((len(x) for name, x in found.items() if name.startswith("cu_seqlens")), None)
            cuts = cuts if known is None else sorted(chance.randint(0, ends) for _ in range(known - 2))
            found[i.name] = torch.tensor([0, *cuts, ends], dtype=torch.int32)
            continue
        shape = [of.of(d) for d in i.shape]
        count = int(np.prod(shape))
        if not i.shape:
            least = -3 if i.least is None else i.least
            found[i.name] = chance.randint(least, max(least, chance.choice([12, 12, of.n_kv + 5])))
            continue
        if i.dtype == "b1":
            place = np.arange(count) % (shape[-1] or 1)
            first, last = sorted((chance.randint(0, shape[-1]), chance.randint(0, shape[-1])))
            bits = chance.choice(
                [
                    place >= 0,
                    place < 0,
                    (place >= first) & (place < last),
                    (place < first) | (place >= last),
                    place % 7 > 0,
                ]
            )
            values = torch.tensor(
                bits ^ (np.array([chance.random() for _ in range(count)]) < chance.choice([0, 0, 0.05])),
                dtype=torch.bool,
            )
        elif i.dtype == "i32":
            low, high = chance.choice([(-3, 9), (0, 3), (0, max(of.n_q, of.n_kv) + 3), (5, 5), (-9, 2 * of.n_kv + 3)])
            low = 0 if i.name == "prefix_length" else low  # of fewer than none, its oracle counts from the end
            values = torch.tensor([chance.randint(low, max(low, high)) for _ in range(count)], dtype=torch.int32)
        else:
            values = torch.tensor([chance.randint(-16, 16) / 8 for _ in range(count)], dtype=torch.float32)
        values = values.reshape(shape)
        rises = i.dtype == "i32" and chance.random() < 0.4
        rises |= any(d.function == SORTED_SPANS and i.name in d.sources for d in spec.derived())  # as the spec promises
        found[i.name] = values.sort(-1).values if rises else values
    return found


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
    """The value of an index expression in numpy."""
    if e.is_Symbol:
        return values[e.name]
    return int(e) if e.is_Integer else _NUMPY[e.func](*(on_rows(a, values) for a in e.args))


def read_values(reads: tuple[Read, ...], tensors: dict[str, Any], values: dict[str, Any], rows: str) -> dict[str, Any]:
    """The reads that programs make before their loop, for every row of their axis or as one number; a negative index
    is from the end."""
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


def bounds(masked: Masked, view: View, call: Call) -> np.ndarray:
    """The bounds as numbers: [programs, runs, 4]."""
    own, n = view.own, call.n
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
    tensors = {**call.inputs, **derive(masked.spec, sizes(n), call.inputs, "cpu")}
    rows = read_values(masked.spec.reads(), tensors, {**values, f"{own}_idx": np.arange(n[own])}, own)
    whole = sympy.Tuple(*view.tiles)
    found = []
    for start in range(0, n[own], call.block[own]):
        mine = {**values, f"{own}_start": start}
        for name, x in rows.items():
            if x.ndim == 0:
                mine[name] = int(x)
                continue
            part = x[start : start + call.block[own]]
            mine |= {f"{name}_least": int(part.min()), f"{name}_greatest": int(part.max())}
        found.append(evaluate(whole, mine))
    return np.array(found, dtype=int).reshape(len(found), len(view.tiles) // 4, 4)


# ---------------------------------------------------------------------------------------------- the check


@dataclass
class Tally:
    """How much was checked, and how exact the bounds were."""

    masks: int = 0
    refused: int = 0
    checks: int = 0
    empty: int = 0  # tiles with nothing visible,
    empty_visited: int = 0
    full: int = 0  # tiles with nothing hidden,
    full_masked: int = 0

    def __str__(self) -> str:
        shares = (100 * a / max(1, b) for a, b in ((self.empty_visited, self.empty), (self.full_masked, self.full)))
        words = "{:.2f} % of empty tiles visited, {:.2f} % of full ones masked".format(*shares)
        return f"{self.checks:,} tiles of {self.masks:,} masks ({self.refused:,} not in the language): {words}"


class Unsound(AssertionError):
    """Bounds that skip something visible, take something hidden for full, or are out of order."""


def tiles_of(visible: np.ndarray, own: int, loop: int) -> tuple[np.ndarray, np.ndarray]:
    """Of [own rows, loop rows]: in which tiles anything is visible, and in which everything is; past the loop's end
    nothing is."""
    n_own, n_loop = visible.shape
    rows, columns = -n_own % own, -n_loop % loop
    seen, whole = (
        np.pad(np.pad(visible, ((0, 0), (0, columns))), ((0, rows), (0, 0)), constant_values=past)
        .reshape((n_own + rows) // own, own, (n_loop + columns) // loop, loop)
        for past in (False, True)
    )  # fmt: skip
    return seen.any(axis=(1, 3)), whole.all(axis=(1, 3))


def check(found: np.ndarray, visible: np.ndarray, own: int, loop: int) -> Tally:
    """Raise Unsound if the bounds are wrong for what is visible, over [own rows, loop rows]."""
    seen, whole = tiles_of(visible, own, loop)
    count = seen.shape[1]
    flat = found.reshape(len(found), found.shape[1] * 4)
    rising = np.concatenate([np.zeros_like(flat[:, :1]), flat, np.full_like(flat[:, :1], count)], 1)
    if (np.diff(rising, axis=1) < 0).any():
        raise Unsound(f"bounds out of order, of {count} tiles: {flat.tolist()}")
    at = np.arange(count)
    visited = ((found[:, :, :1] <= at) & (at < found[:, :, 3:])).any(1)
    full = ((found[:, :, 1:2] <= at) & (at < found[:, :, 2:3])).any(1)
    for wrong, what in (
        (seen & ~visited, "skips a tile that holds something visible"),
        (full & ~whole, "takes a tile that is not full as full"),
    ):
        if wrong.any():
            program, tile = np.argwhere(wrong)[0].tolist()
            raise Unsound(f"program {program} {what}, tile {tile} of {count}: {found[program].tolist()}")
    return Tally(
        0, 0, seen.size, int((~seen).sum()), int((visited & ~seen).sum()), int(whole.sum()), int((whole & ~full).sum())
    )


def check_call(masked: Masked, call: Call, tally: Tally) -> None:
    """Both kernels at one call."""
    reference = masked.spec.mask.reference(sizes(call.n), torch.device("cpu"), call.inputs)
    shape = (BATCH, HEADS, call.n["q"], call.n["kv"])
    visible = reference.expand(shape)[call.b, call.h].numpy()
    for view in masked.views:
        loop = "kv" if view.own == "q" else "q"
        mine = visible if view.own == "q" else visible.T
        try:
            one = check(bounds(masked, view, call), mine, call.block[view.own], call.block[loop])
        except Exception as error:
            inputs = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in call.inputs.items()}
            where = f"{json.dumps(masked.mask)} owned by {view.own}: {call} {inputs}"
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
    """Check random masks at random calls until so many tiles have been; failures are raised, or told to `report`."""
    chance, tally = random.Random(number), Tally()
    masks = masks or random_masks(number)
    while tally.checks < checks:
        mask = next(masks)
        try:
            masked = Masked.of(mask)
        except SpecError as error:
            tally.refused += not pointless(error)
            continue
        except Exception as error:
            if report is None:
                raise Unsound(f"{error!r}; {json.dumps(mask)}") from error
            report(f"{error!r}; {json.dumps(mask)}")
            continue
        names = [name for d in masked.spec.derived() for name in d.names]
        if len(set(names)) < len(names):  # packed documents twice, causal once: the same names for other values
            tally.refused += 1
            continue
        tally.masks += 1
        try:
            for _ in range(calls):
                check_call(masked, Call.random(chance, masked.spec), tally)
        except Unsound as error:
            if report is None:
                raise
            report(str(error))
    return tally


def pointless(error: SpecError) -> bool:
    """Whether a mask is refused for what it comes to, once simplified: nothing, or something without one of its
    parameters."""
    return any(words in str(error) for words in ("hides every key", "once simplified"))


def random_masks(number: int, batch: int = 150) -> Iterator[Mask]:
    """Masks without end."""
    chance = random.Random(number)

    def samples() -> Iterator[lang_strategies.Sample]:
        for more in range(10**6):
            yield from drawn(lang_strategies.masks(2 + more % 2), batch, number * 1000 + more)

    source = samples()
    while True:
        yield random_mask(chance, source)


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
    """How exact the bounds of one mask are: over lengths and tiles of all kinds, as many rows as keys, documents in
    a row."""
    chance, tally, masked = random.Random(number), Tally(masks=1), Masked.of(mask)
    for _ in range(calls):
        n = chance.randint(60, 160)
        block = {x: chance.choice([4, 8, 16]) for x in ("q", "kv")}
        inputs = arguments(chance, masked.spec, sizes({"q": n, "kv": n}))
        for name, x in inputs.items():
            if name == "document_ids":
                inputs[name] = x.remainder(5).sort(-1).values
            elif name == "key_padding":
                inputs[name] = torch.arange(n) < torch.tensor([[chance.randint(0, n)] for _ in range(BATCH)])
        check_call(masked, Call({"q": n, "kv": n}, block, 0, 0, inputs), tally)
    return tally


def test_bounds_of_random_masks_are_sound() -> None:
    tally = drive(CI_SEED, CI_CHECKS, calls=3)
    assert tally.checks >= CI_CHECKS and tally.masks >= 30
    assert tally.refused <= tally.masks // 20
    assert tally.empty_visited < tally.empty and tally.full_masked < tally.full


@settings(max_examples=15, deadline=None, report_multiple_bugs=False)
@given(lang_strategies.masks(2), SIZES)
def test_bounds_of_a_drawn_mask_are_sound(sample: lang_strategies.Sample, of: tuple[int, int, int, int]) -> None:
    """The same, of one expression, which hypothesis makes smaller where it fails."""
    try:
        masked = Masked.of(
            {
                "expr": sample.text,
                "params": {name: param.model_dump(mode="json") for name, param in sample.params.items()},
            }
        )
    except SpecError as error:
        assert pointless(error)
        reject()
    n_q, n_kv, block_q, block_kv = of
    for h in (0, HEADS - 1):
        check_call(
            masked,
            Call({"q": n_q, "kv": n_kv}, {"q": block_q, "kv": block_kv}, h % BATCH, h, dict(sample.scalars)),
            Tally(),
        )


@pytest.mark.parametrize("name", NAMED)
def test_bounds_of_named_masks_are_sound(name: str) -> None:
    tally = exactness(NAMED[name], 12, 1)
    empty, full = EXACT.get(name, (100, 100))
    assert 100 * tally.empty_visited <= empty * tally.empty and 100 * tally.full_masked <= full * tally.full, str(tally)


@pytest.mark.parametrize("bound", range(4))
@pytest.mark.parametrize("own", ["q", "kv"])
def test_the_check_can_fail(own: str, bound: int) -> None:
    """A bound that is a tile off is found, of the first run of tiles and of the last."""
    masked = Masked.of(
        {"any_of": [{"sliding_window": {"left": 9, "right": 9}}, {"expr": "30 <= kv_idx - q_idx <= 50"}]}
    )
    view = next(v for v in masked.views if v.own == own)
    call = Call({"q": 120, "kv": 120}, {"q": 4, "kv": 4}, 0, 0, {})
    visible = masked.spec.mask.reference(sizes(call.n), torch.device("cpu"), {})[0, 0].numpy()
    right, mine = bounds(masked, view, call), visible if own == "q" else visible.T
    check(right, mine, 4, 4)
    for run in (0, right.shape[1] - 1):
        wrong = right.copy()
        program = next(i for i, found in enumerate(right) if len(set(found[run].tolist())) == 4)
        wrong[program, run, bound] += 1 if bound in (0, 2) else -1
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


# Masks whose bounds were too much for the verifier, or took minutes, once.
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


@pytest.mark.parametrize("mask", HARD, ids=range(len(HARD)))
def test_masks_in_several_parts_are_lowered(mask: Mask) -> None:
    lower(make_spec({"name": "hard", "heads": {"sharing": "gqa"}, "head_dim": 64, "dtype": "fp16", "mask": mask}))


def main() -> None:
    parser = argparse.ArgumentParser(description="checks bounds of tiles of random masks")
    parser.add_argument("--checks", type=int, default=1_000_000, help="tiles to check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=25, help="calls of each mask")
    parser.add_argument("--exact", action="store_true", help="how exact the bounds of named masks are, instead")
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
