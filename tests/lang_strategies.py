"""Hypothesis strategies for well-typed masks and scores, with the arguments of a call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from attngen.lang.params import Param

# All parameters that a generated expression may read; a sample declares those that it reads.
PARAMS: dict[str, Param] = {
    "window": Param(scalar="int"),
    "step": Param(scalar="int", min=1),
    "sinks": Param(value=3),
    "cap": Param(value=4.0),
    "slope": Param(tensor=("H",), dtype="fp32", grad=True),
}
SCALARS = {"window": st.integers(-3, 12), "step": st.integers(1, 7)}
# Exact in binary, so that both sides of a comparison are exact.
CONSTANTS = st.sampled_from(["0.25", "0.5", "1.5", "2.0", "3"])


@dataclass(frozen=True)
class Sample:
    """An expression, its declared parameters, and the scalars of a call."""

    text: str
    params: dict[str, Param]
    scalars: dict[str, int] = field(default_factory=dict)

    def values(self, batch: int, q_heads: int, kv_heads: int, n_q: int, n_kv: int, seed: int = 0) -> dict[str, Any]:
        """The arguments of a call: the scalars, and fp32 tensors of multiples of 1/8 from -2 to 2."""
        sizes = {"B": batch, "Hq": q_heads, "Hkv": kv_heads, "Nq": n_q, "Nk": n_kv}
        random = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randint(-16, 17, [sizes.get(d) or int(d) for d in param.dims], generator=random).float() / 8
            for name, param in self.params.items()
            if param.tensor is not None
        }
        return {**self.scalars, **tensors}


@st.composite
def _sample(draw: st.DrawFn, text: str) -> Sample:
    params = {name: param for name, param in PARAMS.items() if re.search(rf"\b{name}\b", text)}
    return Sample(text, params, {name: draw(SCALARS[name]) for name in params if name in SCALARS})


@st.composite
def integers(draw: st.DrawFn, depth: int) -> str:
    """An integer of positions, lengths and int scalars: below 2**30 if positions and lengths are below 2**16."""
    if not depth or draw(st.integers(0, 3)) == 0:
        names = ["q_idx", "kv_idx", "q_idx", "kv_idx", "q_len", "kv_len", "window", "sinks", "h", "b"]
        return draw(st.sampled_from(names) | st.integers(0, 9).map(str))
    part = integers(depth - 1)
    match draw(st.sampled_from(["+", "-", "*", "//", "%", "neg", "call", "clamp", "where", "bits", "shift", "sum"])):
        case "+" | "-" as sign:
            return f"{draw(part)} {sign} ({draw(part)})"
        case "*":
            return f"({draw(part)}) * {draw(st.sampled_from(['2', '3', '-1', '-2', '(-3)']))}"
        case "//" | "%" as sign:
            return f"({draw(part)}) {sign} {draw(st.sampled_from(['1', '2', '5', '16', '-1', '-4', 'sinks', 'step']))}"
        case "neg":
            return f"-({draw(part)})"
        case "bits":
            return (
                f"(({draw(part)} + q_idx) "
                f"{draw(st.sampled_from(['& 1431655765', '& 7', '| 12', '^ 3']) | part.map('& ({})'.format))})"
            )
        case "shift":
            return f"(({draw(part)}) {draw(st.sampled_from(['>> 1', '>> 4', '<< 1']))})"
        case "sum":
            return f"sum(i{depth}, {draw(st.integers(1, 3))}, {draw(part)} - i{depth})"
        case "call":
            name = draw(st.sampled_from(["min", "max", "abs"]))
            count = 1 if name == "abs" else draw(st.integers(2, 3))
            return f"{name}({', '.join(draw(part) for _ in range(count))})"
        case "clamp":
            return f"clamp({draw(part)}, {draw(st.integers(-9, 3))}, {draw(st.sampled_from(['4', '12', 'window']))})"
    return f"where({draw(conditions(depth - 1))}, {draw(part)}, {draw(part)})"


@st.composite
def conditions(draw: st.DrawFn, depth: int) -> str:
    """A condition on positions, lengths and int scalars."""
    compared = st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "<=", ">="])
    if not depth or draw(st.integers(0, 2)) == 0:
        first = f"{draw(integers(depth))} {draw(compared)} {draw(integers(depth))}"
        return first if draw(st.integers(0, 5)) else f"{first} {draw(compared)} {draw(integers(depth))}"
    part = conditions(depth - 1)
    match draw(st.sampled_from(["and", "or", "not", "where", "any"])):
        case "any":
            return (
                f"{draw(st.sampled_from(['any', 'all']))}(j{depth}, {draw(st.integers(1, 3))}, {draw(integers(1))} < "
                f"5 * j{depth})"
            )
        case "and" | "or" as word:
            return f"({draw(part)}) {word} ({draw(part)})"
        case "not":
            return f"not ({draw(part)})"
    return f"where({draw(part)}, {draw(part)}, {draw(part)})"


@st.composite
def polynomials(draw: st.DrawFn, depth: int) -> str:
    """A real expression of sums, products and branches: exact in fp64 for scores and tensors of multiples of 1/8."""
    if not depth or draw(st.integers(0, 3)) == 0:
        return draw(
            st.sampled_from(["s", "s", "slope[h]", "0.5 * s", "(q_idx - kv_idx) / 16", "cap", "kv_idx / 8"]) | CONSTANTS
        )
    part = polynomials(depth - 1)
    match draw(st.sampled_from(["+", "-", "*", "min", "max", "abs", "clamp", "where"])):
        case "+" | "-" as sign:
            return f"{draw(part)} {sign} ({draw(part)})"
        case "*":
            return f"({draw(part)}) * {draw(CONSTANTS | st.sampled_from(['slope[h]', 'abs(q_idx - kv_idx) / 32']))}"
        case "min" | "max" as name:
            return f"{name}({draw(part)}, {draw(part)})"
        case "abs":
            return f"abs({draw(part)})"
        case "clamp":
            return f"clamp({draw(part)}, -cap, {draw(CONSTANTS)})"
    condition = draw(conditions(1) | st.just(f"{draw(part)} < {draw(part)}"))
    return f"where({condition}, {draw(part)}, {draw(part)})"


@st.composite
def reals(draw: st.DrawFn, depth: int) -> str:
    """A real expression with smooth functions of polynomials: finite for scores up to a few hundred."""
    if not depth or draw(st.integers(0, 2)) == 0:
        return draw(polynomials(depth))
    part = reals(depth - 1)
    match draw(
        st.sampled_from(
            ["+", "-", "*", "softcap", "exp", "log", "sqrt", "sigmoid", "wave", "power", "base", "where", "/"]
        )
    ):
        case "+" | "-" as sign:
            return f"{draw(part)} {sign} ({draw(part)})"
        case "*":
            return f"({draw(part)}) * {draw(CONSTANTS)}"
        case "softcap":
            return f"cap * tanh(({draw(part)}) / cap)"
        case "exp":
            return f"exp(clamp({draw(part)}, -4, 2))"
        case "log":
            return f"log(1 + abs({draw(part)}))"
        case "sqrt":
            return draw(st.sampled_from(["sqrt(0.5 + abs({}))", "(0.5 + abs({})) ** 0.5"])).format(draw(part))
        case "sigmoid" | "wave" as kind:
            functions = ["sigmoid"] if kind == "sigmoid" else ["erf", "sin", "cos", "gelu", "relu"]
            return f"{draw(st.sampled_from(functions))}({draw(part)})"
        case "power":
            return f"tanh({draw(part)}) ** {draw(st.integers(0, 3))}"
        case "base":
            return f"2 ** clamp({draw(part)}, -3, 3)"
        case "where":
            return f"where({draw(conditions(1))}, {draw(part)}, {draw(part)})"
    return f"({draw(part)}) / (1 + ({draw(part)}) ** 2)"


def masks(depth: int = 3) -> st.SearchStrategy[Sample]:
    """Masks of q_idx, kv_idx, q_len, kv_len, b, h and int scalars."""
    return conditions(depth).flatmap(_sample)


def scores(depth: int = 3) -> st.SearchStrategy[Sample]:
    """Scores of s, positions and a tensor with one element per head: smooth and piecewise functions."""
    return reals(depth).flatmap(_sample)


def piecewise_scores(depth: int = 3) -> st.SearchStrategy[Sample]:
    """Scores made only of sums, products, min, max, abs, clamp and where."""
    return polynomials(depth).flatmap(_sample)
