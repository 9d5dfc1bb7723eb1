"""Derivatives of random scores against PyTorch's in float64, and the exp2-softmax forms that kernels compute instead.

Our derivative is that of the expression of all modifiers of a spec. PyTorch differentiates the evaluator of Python's
syntax trees and the hand-written oracles of modifiers. Random points are not at kinks. Kinks have their own tests,
which follow PyTorch's conventions.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from attngen.builders.semantics import S, derivative, shared, whole_numbers
from attngen.errors import SpecError
from attngen.ir import FUNCTIONS, clamp, exp2, floordiv, log2, mod, parse, select, sigmoid, symbol, to_text
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, make_spec
from attngen.transforms.exp2_softmax import in_base_two
from tests.lang_strategies import Sample, piecewise_scores, scores
from tests.spec_strategies import drawn

pytestmark = pytest.mark.numerics

SIZES = Sizes(2, 4, 2, 5, 7)
SHAPE = (SIZES.batch, SIZES.q_heads, SIZES.n_q, SIZES.n_kv)
EXPRESSIONS = 200  # for each of the two strategies

# Reads that replace `slope[h]` in a random expression, and the dimensions of their tensors.
READS: dict[str, list[Any]] = {
    "slope[h]": ["H"],
    "table[q_idx - kv_idx]": [6],  # from the end where negative, 0 outside
    "column[b, kv_idx]": ["B", "Nk"],
    "row[q_idx // 2]": ["Nq"],
    "dense[b, h, q_idx, kv_idx]": ["B", "H", "Nq", "Nk"],
    "group[hkv, clamp(q_idx - kv_idx, -2, 2) + 2]": ["Hkv", 5],
}
NAMED: list[Any] = [
    {"softcap": {"cap": 2.0}},
    {"alibi": {"slopes": "given", "learnable": True}},
    "temperature",
    "dense_bias",
]
NAMED += [{"relative_bias": {"max_distance": 3}}]


# ---------------------------------------------------------------------------------------------- evaluation

_NUMPY: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *a: reduce(np.add, a),
    sympy.Mul: lambda *a: reduce(np.multiply, a),
    sympy.Pow: np.power,
    sympy.Min: lambda *a: reduce(np.minimum, a),
    sympy.Max: lambda *a: reduce(np.maximum, a),
    sympy.Abs: np.abs,
    sympy.exp: np.exp,
    sympy.tanh: np.tanh,
    FUNCTIONS["log"]: np.log,
    FUNCTIONS["sqrt"]: np.sqrt,
    FUNCTIONS["erf"]: np.vectorize(math.erf, otypes=[float]),
    FUNCTIONS["sin"]: np.sin,
    FUNCTIONS["cos"]: np.cos,
    FUNCTIONS["bitand"]: np.bitwise_and,
    FUNCTIONS["bitor"]: np.bitwise_or,
    FUNCTIONS["bitxor"]: np.bitwise_xor,
    sigmoid: lambda x: 0.5 + 0.5 * np.tanh(x / 2),
    exp2: np.exp2,
    log2: np.log2,
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


def value(e: Any, values: dict[str, Any], real: type = np.float64) -> Any:
    """Return the value of an expression on arrays. In float64 integers stay integers. Raises KeyError for a function
    that the IR does not have."""
    if e.is_Symbol:
        return values[e.name]
    if e in (sympy.true, sympy.false):
        return e == sympy.true
    if e.is_Integer:
        return int(e) if real is np.float64 else real(e)
    if e.is_Rational or e.is_Float:
        return real(float(e))
    args = [value(a, values, real) for a in e.args]
    if isinstance(e, sympy.Pow):
        args[0] = args[0] if np.asarray(args[0]).dtype.kind == "f" else real(args[0])
    return _NUMPY[e.func](*args)


@cache
def positions() -> dict[str, Any]:
    b, h, q, kv = np.meshgrid(*map(np.arange, SHAPE), indexing="ij", sparse=True)
    group = SIZES.q_heads // SIZES.kv_heads
    sizes = {"Nq": SIZES.n_q, "Nk": SIZES.n_kv, "LOG2E": math.log2(math.e), "LN2": math.log(2)}
    return {"b": b, "h": h, "hkv": h // group, "q_idx": q, "kv_idx": kv, **sizes}


def at_reads(spec: Spec, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Return the values of a spec's reads at every score, and for each read its indices and whether they are in
    bounds."""
    known = {**positions(), **values}
    places: dict[str, tuple[Any, Any]] = {}
    for read in spec.reads():
        table = values[read.tensor]
        index = [np.broadcast_to(value(e, known), SHAPE) for e in read.index]
        index = [np.where(i < 0, i + n, i) for i, n in zip(index, table.shape)]
        inside = reduce(np.logical_and, ((i >= 0) & (i < n) for i, n in zip(index, table.shape)))
        at = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, table.shape))
        places[read.name] = at, inside
        known[read.name] = np.where(inside, table[at], 0.0)
    return known, places


# ---------------------------------------------------------------------------------------------- specs


def modifier(chance: random.Random, sample: Sample, number: int) -> dict[str, Any]:
    """Return a random expression as in a spec, sometimes with other reads in place of the slope."""
    text = re.sub(r"slope\[h\]", lambda _: chance.choice(["slope[h]", *READS]), sample.text)
    params = {name: param.model_dump(mode="json") for name, param in sample.params.items()}
    params |= {key.partition("[")[0]: {"tensor": dims, "grad": True} for key, dims in READS.items() if key in text}
    for name in list(params):
        if not re.search(rf"\b{name}\b", text):
            del params[name]
        elif "tensor" in params[name]:  # modifiers share no tensor
            text = re.sub(rf"\b{name}\b", f"{name}{number}", text)
            params[f"{name}{number}"] = params.pop(name)
    return {"expr": text, "params": params}


def random_specs(number: int) -> Iterator[Spec]:
    """Yield specs with one random modifier, or with several, some of them from the library."""
    chance = random.Random(number)
    found: list[Sample] = []
    for strategy in (scores(), piecewise_scores()):
        unlike: dict[str, Sample] = {}
        for more in range(9):
            unlike |= {
                sample.text: sample
                for sample in drawn(strategy.filter(lambda x: re.search(r"\bs\b", x.text)), 100, number + more)
            }
            if len(unlike) >= EXPRESSIONS:
                break
        found += list(unlike.values())[-EXPRESSIONS:]
    for i, sample in enumerate(found):
        chain = [modifier(chance, sample, 1)]
        if i % 3 == 0:
            chain.insert(chance.randrange(2), chance.choice(NAMED))
        elif i % 7 == 0 and len(sample.text) < 60:
            chain.append(
                {
                    "expr": "s + 0.5 * tanh(s) * weight[h, kv_idx]",
                    "params": {"weight": {"tensor": ["H", "Nk"], "grad": True}},
                }
            )
        with contextlib.suppress(SpecError):  # if the simplified expression does not use the score or a parameter
            yield make_spec({"name": "drawn", "heads": {"sharing": "gqa"}, "head_dim": 64, "score": chain})


def call(spec: Spec, number: int) -> dict[str, Any]:
    """Return scores and arguments of a call, none of them at a kink."""
    chance = np.random.default_rng(number)
    values: dict[str, Any] = {"s": chance.uniform(-3, 3, SHAPE)}
    for i in spec.inputs():
        shape = [SIZES.of(d) for d in i.shape]
        if i.dtype == "i32":
            values[i.name] = int(chance.integers(max(i.least or -3, -3), 8))
        else:
            values[i.name] = (
                chance.uniform(0.5, 1.5, shape) if i.name == "temperature" else chance.uniform(-2, 2, shape)
            )
    return values


def by_torch(spec: Spec, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the score, and the gradients of its sum by `s` and by the gradient inputs."""
    leaves = {
        name: torch.tensor(x, dtype=torch.float64).requires_grad_()
        for name, x in values.items()
        if isinstance(x, np.ndarray)
    }
    inputs = {**values, **leaves}
    score = leaves["s"]
    for part in spec.score:
        score = part.reference(score, SIZES, inputs)
    learned = ["s", *(i.name for i in spec.inputs() if i.grad)]
    score = score.expand(SHAPE)
    if not score.requires_grad:
        return score.numpy(), {name: np.zeros_like(values[name]) for name in learned}
    found = torch.autograd.grad(score.sum(), [leaves[name] for name in learned], allow_unused=True)
    zeros = (np.zeros_like(values[name]) for name in learned)
    return score.detach().numpy(), {
        name: zero if x is None else x.numpy() for name, zero, x in zip(learned, zeros, found)
    }


def close(x: Any, y: Any, rtol: float, size: Any = 0.0) -> None:
    np.testing.assert_allclose(
        np.broadcast_to(x, np.shape(y)), y, rtol=rtol, atol=rtol * (1 + float(np.max(np.abs(size), initial=0.0)))
    )


@cache
def specs() -> tuple[Spec, ...]:
    return tuple(random_specs(3))


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.share(16)
def test_derivatives_are_those_of_torch() -> None:
    """Derivatives by the score itself and by every gradient input equal PyTorch's."""
    count = learned = 0
    for number, spec in enumerate(specs()):
        values = call(spec, number)
        score, gradients = by_torch(spec, values)
        known, places = at_reads(spec, values)
        expression = spec.modified()
        with np.errstate(all="ignore"):
            close(value(expression, known), score, 1e-9, score)
            slopes = np.broadcast_to(value(derivative(expression, S), known), SHAPE)
            close(slopes, gradients["s"], 1e-9, slopes)
            for tensor in gradients.keys() - {"s"}:
                sums, size = np.zeros_like(values[tensor]), np.zeros_like(values[tensor])
                for read in (r for r in spec.reads() if r.tensor == tensor):
                    at, inside = places[read.name]
                    part = np.where(
                        inside, np.broadcast_to(value(derivative(expression, symbol(read.name)), known), SHAPE), 0.0
                    )
                    np.add.at(sums, at, part)
                    np.add.at(size, at, np.abs(part))
                close(sums, gradients[tensor], 1e-9, size)
                learned += 1
        count += 1
    assert count >= 300 and learned >= 100


@pytest.mark.share(16)
def test_what_kernels_compute_has_the_same_value() -> None:
    """Expressions in base two, with common subexpressions computed once, have the same values, and can be printed and
    parsed as IR."""
    for number, spec in enumerate(specs()):
        known, _ = at_reads(spec, call(spec, number))
        plain = spec.modified()
        both = [plain, derivative(plain, S)]
        made, rest = shared(*map(whole_numbers, both))
        with np.errstate(all="ignore"):
            expected = [value(e, known) for e in both]
            for e, right in zip(both, expected):
                close(value(in_base_two(e), known), right, 1e-12, right)
            named = dict(known)
            for name, e in made:
                named[name] = value(in_base_two(e), named)
            for e, right in zip(rest, expected):
                two = in_base_two(e)
                assert not two.has(sympy.exp, sympy.tanh, sigmoid, FUNCTIONS["log"], sympy.log), two
                close(value(two, named), right, 1e-12, right)
                assert parse(to_text(two)).free_symbols == two.free_symbols


def test_the_check_can_fail() -> None:
    """A derivative with one wrong sign is found."""
    spec = make_spec({"name": "x", "head_dim": 64, "score": [{"expr": "tanh(s) + abs(s - 0.25) * 0.001"}]})
    values = call(spec, 0)
    known, _ = at_reads(spec, values)
    gradient = by_torch(spec, values)[1]["s"]
    right = derivative(spec.modified(), S)
    close(value(right, known), gradient, 1e-9)
    wrong = right.xreplace({sympy.tanh(S): -1.0001 * sympy.tanh(S)})
    assert wrong != right
    with pytest.raises(AssertionError):
        close(value(wrong, known), gradient, 1e-9)


# (score, s, derivative by s at that point)
KINKS = [
    ("abs(s)", 0.0, 0.0),
    ("abs(s - 1)", 1.0, 0.0),
    ("abs(s) + 3 * s", 0.0, 3.0),
    ("abs(abs(s) - 1)", -1.0, 0.0),
    ("min(s, 2 * s)", 0.0, 1.5),
    ("max(s, 2 * s)", 0.0, 1.5),
    ("max(s, 0)", 0.0, 0.5),
    ("max(0, s) * 3", 0.0, 1.5),
    ("min(s, 1)", 1.0, 0.5),
    ("max(s, -s)", 0.0, 0.0),
    ("max(s * s, s)", 1.0, 1.5),
    ("min(max(s, 0), 1)", 0.0, 0.5),
    ("min(max(s, 0), 1)", 1.0, 0.5),
    ("clamp(s, -1, 1)", -1.0, 1.0),
    ("clamp(s, -1, 1)", 1.0, 1.0),
    ("clamp(2 * s, -1, 1)", 0.5, 2.0),
    ("clamp(s, 1, 1)", 1.0, 1.0),
    ("clamp(s, 2, -2)", 2.0, 0.0),
    ("clamp(s, 2, -2)", 0.0, 0.0),
    ("clamp(0, s, 2)", 0.0, 0.0),
    ("where(s < 1, s, 2 * s)", 1.0, 2.0),
    ("where(s <= 1, s, 2 * s)", 1.0, 1.0),
    ("where(s == 1, 5 * s, s)", 1.0, 5.0),
    ("where(s > 0, exp(s), 1 + s * s)", 0.0, 0.0),
    ("where(kv_idx > q_idx, s, 3 * s)", 0.0, 3.0),
    ("sqrt(max(s, 0.25))", 0.25, 0.5),
    ("tanh(s) ** 2", 0.0, 0.0),
    ("(q_idx // 2) * s + (kv_idx % 3) * s", 1.0, 0.0),
]


@pytest.mark.parametrize(("text", "at", "expected"), KINKS, ids=[f"{text} at {at}" for text, at, _ in KINKS])
def test_at_a_kink_the_derivative_is_torchs(text: str, at: float, expected: float) -> None:
    """abs has 0 at 0. min and max give half to each of two equal operands. clamp passes the gradient at its bounds.
    where has the gradient of the chosen branch."""
    spec = make_spec({"name": "kink", "head_dim": 64, "score": [{"expr": text}]})
    values = {"s": np.full(SHAPE, at)}
    score, gradients = by_torch(spec, values)
    assert gradients["s"][0, 0, 0, 0] == expected
    known, _ = at_reads(spec, values)
    e = spec.modified()
    for found in (derivative(e, S), in_base_two(derivative(e, S))):
        close(value(found, known), gradients["s"], 1e-9)
    close(value(e, known), score, 1e-9)


@pytest.mark.parametrize(
    "text", ["min(s, row[q_idx])", "max(row[q_idx], s)", "abs(s - row[q_idx])", "clamp(s, row[q_idx], 9)"]
)
def test_a_tensor_at_a_kink(text: str) -> None:
    """The tensor, too, gets its half from min and max, and its gradient as a bound of clamp."""
    params = {"row": {"tensor": ["Nq"], "grad": True}}
    spec = make_spec({"name": "kink", "head_dim": 64, "score": [{"expr": text, "params": params}]})
    values = {
        "row": np.linspace(-1, 1, SIZES.n_q),
        "s": np.broadcast_to(np.linspace(-1, 1, SIZES.n_q)[:, None], SHAPE).copy(),
    }
    _, gradients = by_torch(spec, values)
    known, places = at_reads(spec, values)
    sums = np.zeros(SIZES.n_q)
    np.add.at(sums, places["row"][0], np.broadcast_to(value(derivative(spec.modified(), symbol("row")), known), SHAPE))
    close(sums, gradients["row"], 1e-9)
    close(value(derivative(spec.modified(), S), known), gradients["s"], 1e-9)


FAR = [
    "tanh(s)",
    "30 * tanh(s / 30)",
    "sigmoid(s)",
    "sigmoid(-s)",
    "s * sigmoid(s)",
    "tanh(s) ** 3",
    "tanh(abs(s)) - sigmoid(2 * s)",
]
FAR += [
    "tanh(tanh(s))",
    "1 / (1 + sigmoid(s))",
    "0.5 ** (1 + tanh(s))",
    "log(1 + sigmoid(s))",
    "sqrt(1 + tanh(s) ** 2)",
]


@pytest.mark.parametrize("text", FAR)
def test_base_two_forms_stay_finite(text: str) -> None:
    """Values and derivatives are finite in fp32 at scores of ten thousand, where exp2 is infinite or zero."""
    spec = make_spec({"name": "far", "head_dim": 64, "score": [{"expr": text}]})
    e = spec.modified()
    far = np.array([-1e4, -200.0, -1.0, 0.0, 1.0, 200.0, 1e4])
    names = {**positions(), "s": far}
    single = {name: np.float32(x) if isinstance(x, float) else x for name, x in names.items()} | {
        "s": far.astype(np.float32)
    }
    for exact in (e, derivative(e, S)):
        with np.errstate(over="ignore"):
            found = value(in_base_two(exact), single, np.float32)
            right = value(exact, names)
        assert np.asarray(found).dtype == np.float32 and np.isfinite(found).all()
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-6 * float(np.abs(right).max()))
