"""The expression language: values by hand, refusals word by word, and random text."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attngen.ir.expr import FUNCTIONS, parse, symbol, to_text
from attngen.ir.names import CALLED
from attngen.lang.evaluate import evaluate
from attngen.lang.expression import Expression, parse_mask, parse_score
from attngen.lang.grammar import LangError
from attngen.lang.limits import MAX_TEXT
from attngen.lang.names import TAKEN, name_problem
from attngen.lang.params import Param
from tests.lang_strategies import Sample, masks, piecewise_scores, scores
from tests.lang_table import DOC, INT, ROWS, SEEN, SIZES, TABLE, Row, environment, number

ROOT = Path(__file__).parents[1]
SHAPE = (SIZES["batch"], SIZES["q_heads"], SIZES["n_q"], SIZES["n_kv"])


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_value(row: Row) -> None:
    """The evaluator and the sympy expression both give what was worked out by hand."""
    condition = isinstance(row.expected, bool)
    expression = (parse_mask if condition else parse_score)(row.text, row.params, row.let)
    call = {name: row.at[name] for name, param in row.params.items() if param.value is None}
    values = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in call.items()}
    result = evaluate(expression, **SIZES, s=torch.full(SHAPE, float(row.at.get("s", 0))), values=values)
    assert result.dtype == (torch.bool if condition else torch.float64)
    place = tuple(row.at.get(axis, 0) for axis in ("b", "h", "q_idx", "kv_idx"))
    assert result.expand(SHAPE)[place].item() == pytest.approx(row.expected, rel=1e-14, abs=1e-14)
    symbolic = number(expression.expr, environment(expression, row.at))
    assert (bool(symbolic) if condition else symbolic) == pytest.approx(row.expected, rel=1e-14, abs=1e-14)


def compare(sample: Sample, expression: Expression, places: list[tuple[int, int, int, int]], seed: int) -> None:
    """The evaluator against the sympy expression at some places."""
    s = torch.randint(-24, 25, SHAPE, generator=torch.Generator().manual_seed(seed)).double() / 8
    values = sample.values(**SIZES, seed=seed)
    result = evaluate(expression, **SIZES, s=s, values=values).expand(SHAPE)
    lists = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    for place in places:
        at = {**dict(zip(("b", "h", "q_idx", "kv_idx"), place)), "s": s[place].item(), **lists}
        assert result[place].item() == pytest.approx(
            number(expression.expr, environment(expression, at)), rel=1e-9, abs=1e-9
        ), place


PLACES = st.lists(st.tuples(*(st.integers(0, n - 1) for n in SHAPE)), min_size=4, max_size=4)


@settings(max_examples=150, deadline=None)
@given(masks(), PLACES)
def test_random_masks(sample: Sample, places: list[tuple[int, int, int, int]]) -> None:
    compare(sample, parse_mask(sample.text, sample.params), places, 0)


@settings(max_examples=150, deadline=None)
@given(scores() | piecewise_scores(), PLACES, st.integers(0, 9))
def test_random_scores(sample: Sample, places: list[tuple[int, int, int, int]], seed: int) -> None:
    compare(sample, parse_score(sample.text, sample.params), places, seed)


@settings(max_examples=60, deadline=None)
@given(masks(2) | scores(2))
def test_printed_expressions_parse_back(sample: Sample) -> None:
    """What the language gives has a text in the IR's grammar, and parsing the same text twice gives the same."""
    try:
        expression = parse_mask(sample.text, sample.params)
    except LangError:
        expression = parse_score(sample.text, sample.params)
        assert parse_score(sample.text, sample.params) == expression
    assert parse(to_text(expression.expr)) == expression.expr


def test_shapes_and_gradients() -> None:
    """The evaluator keeps sizes of 1 where nothing varies, and is differentiable in s and in tensors."""
    expression = parse_score(
        "s - slope[h] * abs(q_idx - kv_idx) + table[q_idx - kv_idx]", {"slope": Param(tensor=("H",)), "table": TABLE}
    )
    s = torch.zeros(SHAPE, dtype=torch.float64, requires_grad=True)
    slope, table = (torch.ones(n, requires_grad=True) for n in (SIZES["q_heads"], 5))
    result = evaluate(expression, **SIZES, s=s, values={"slope": slope, "table": table})
    assert result.shape == SHAPE
    result.sum().backward()
    q, kv = torch.arange(SHAPE[2])[:, None], torch.arange(SHAPE[3])
    assert torch.equal(s.grad, torch.ones(SHAPE, dtype=torch.float64))
    assert torch.equal(slope.grad, torch.full((4,), -2.0 * (q - kv).abs().sum()))
    reads = [sum(((q - kv) == i).sum() + ((q - kv) == i - 5).sum() for _ in range(8)) for i in range(5)]
    assert table.grad.tolist() == [float(n) for n in reads]
    assert evaluate(parse_mask("kv_idx <= q_idx", {}), **SIZES, values={}).shape == (8, 10)
    assert evaluate(parse_mask("true", {}), **SIZES, values={}).dtype == torch.bool
    assert evaluate(parse_score("0.1", {}), **SIZES, values={}).item() == 0.1
    assert (
        evaluate(parse_score("s * 2", {}), **SIZES, s=s.float(), values={}, dtype=torch.float32).dtype == torch.float32
    )


def test_maximum_of_equals_halves_the_gradient() -> None:
    """Ties as PyTorch has them."""
    s = torch.zeros(SHAPE, dtype=torch.float64, requires_grad=True)
    for text, expected in (
        ("max(s, 0)", 0.5),
        ("clamp(s, 0, 1)", 1.0),
        ("abs(s)", 0.0),
        ("where(s > 0, s, 0)", 0.0),
        ("relu(s)", 0.0),
    ):
        (grad,) = torch.autograd.grad(evaluate(parse_score(text, {}), **SIZES, s=s, values={}).sum(), s)
        assert grad.unique().tolist() == [expected], text


def test_empty_tensors_read_zero() -> None:
    expression = parse_mask("seen[kv_idx + q_idx]", {"seen": SEEN})
    result = evaluate(
        expression, batch=1, q_heads=1, kv_heads=1, n_q=3, n_kv=0, values={"seen": torch.zeros(0, dtype=torch.bool)}
    )
    assert result.shape == (3, 0)


# ---------------------------------------------------------------------------------------------- what is parsed


def test_the_forms_of_an_expression() -> None:
    text = "kv_idx <= q_idx and (q_idx - kv_idx <= window or kv_idx < sinks)"
    params = {"window": INT, "sinks": Param(value=4)}
    expression = parse_mask(text, params)
    assert to_text(expression.expr) == "kv_idx <= q_idx and (-kv_idx + q_idx <= window or kv_idx < 4)"
    assert expression.params == tuple(params.items()) and expression.reads == () and expression.text == text
    assert expression == parse_mask(text, params) and hash(expression) == hash(parse_mask(text, params))


def names(text: str, **params: Param) -> list[tuple[str, str, str]]:
    reads = parse_mask(text, params).reads
    return [(r.name, r.tensor, ", ".join(to_text(i) for i in r.index)) for r in reads]


def test_names_of_reads() -> None:
    two, long = Param(tensor=("B", "Nq"), dtype="int32"), Param(tensor=(9,), dtype="int32")
    assert names("doc[b, q_idx] == 0 or doc[b, q_idx] == 1", doc=two) == [("doc", "doc", "b, q_idx")]
    assert names("doc[b, 1 + q_idx] == doc[b, q_idx + 1]", doc=two) == [("doc", "doc", "b, q_idx + 1")]
    assert names("doc[b, q_idx] == doc[b, kv_idx]", doc=two) == [
        ("doc_q", "doc", "b, q_idx"),
        ("doc_kv", "doc", "b, kv_idx"),
    ]
    assert names("doc[b, q_idx] == doc[h, q_idx]", doc=two) == [
        ("doc_q", "doc", "b, q_idx"),
        ("doc_1", "doc", "h, q_idx"),
    ]
    assert names("doc[b, q_idx] == doc[kv_idx, q_idx]", doc=two) == [
        ("doc_q", "doc", "b, q_idx"),
        ("doc_kv_q", "doc", "kv_idx, q_idx"),
    ]
    assert names("t[q_idx + 1] < t[h] < t[q_idx]", t=long) == [
        ("t_1", "t", "q_idx + 1"),
        ("t_2", "t", "h"),
        ("t_q", "t", "q_idx"),
    ]
    taken = {"t_1": INT, "t_q": INT}
    assert names("t[h] < t[b] + t_1 < t[q_idx] + t_q", t=long, **taken) == [
        ("t_2", "t", "h"),
        ("t_3", "t", "b"),
        ("t_4", "t", "q_idx"),
    ]
    nested = [
        ("doc_q", "doc", "b, q_idx"),
        ("t_1", "t", "doc_q"),
        ("doc_kv", "doc", "b, kv_idx"),
        ("t_2", "t", "doc_kv + t_1"),
    ]
    assert names("t[doc[b, q_idx]] < t[doc[b, kv_idx] + t[doc[b, q_idx]]]", t=long, doc=two) == nested
    edge = Param(tensor=("Nq",), dtype="int32")
    assert names("tile[q_idx] == tile[kv_idx]", tile=edge) == [
        ("tile_q", "tile", "q_idx"),
        ("tile_kv", "tile", "kv_idx"),
    ]
    for name, _, _ in names("doc[b, q_idx] == doc[b, kv_idx]", doc=two):
        assert symbol(name).is_integer is None and name not in TAKEN


def test_functions_of_the_ir_are_reserved_names() -> None:
    assert set(CALLED) == set(FUNCTIONS) and len(set(CALLED)) == len(CALLED) and set(CALLED) <= TAKEN


def test_numbers_stay_exact_or_floats() -> None:
    for text, printed in (
        ("s / 3", "s/3"),
        ("s * 0.5", "0.5*s"),
        ("s + exp(1)", "s + 2.718281828459045"),
        ("s * whole", "3*s"),
        ("s * share", "0.25*s"),
        ("2 ** s", "exp(0.6931471805599453*s)"),
        ("min(s, max(1, 2))", "min(2, s)"),
        ("q_idx // 1 + s", "q_idx + s"),
    ):
        params = {n: p for n, p in (("whole", Param(value=3)), ("share", Param(value=0.25))) if n in text}
        assert to_text(parse_score(text, params).expr) == printed


def test_newlines_are_spaces() -> None:
    assert parse_mask("\n kv_idx <=\n\tq_idx\n", {}).expr == parse_mask("kv_idx <= q_idx", {}).expr


# ---------------------------------------------------------------------------------------------- parameters


def test_parameters() -> None:
    param = Param.model_validate({"tensor": ["B", "H", "Hkv", 7], "dtype": "int32"})
    assert (param.dims, param.kind) == (("B", "Hq", "Hkv", "7"), "int")
    assert param.model_dump(mode="json") == {"tensor": ["B", "H", "Hkv", 7], "dtype": "int32", "grad": False}
    assert Param(scalar="int", min=1).model_dump() == {"scalar": "int", "min": 1}
    assert Param(scalar="float").model_dump() == {"scalar": "float"} and Param(scalar="float").kind == "real"
    for value, kind in ((True, "bool"), (2, "int"), (2.0, "real")):
        param = Param(value=value)
        assert (param.kind, param.model_dump(), param.dims) == (kind, {"value": value}, ())
        assert type(param.value) is type(value) and Param.model_validate(param.model_dump()) == param


FORMS = "{tensor: [dimensions]}, {scalar: int}, {scalar: float} or {value: number}"


@pytest.mark.parametrize(
    ("data", "place", "text"),
    [
        ({}, (), f"has no form; expected one of {FORMS}"),
        (3, (), f"is `3`; expected {FORMS}"),
        ({"tensor": None}, (), f"has an empty `tensor`; expected one of {FORMS}"),
        ({"value": 1, "scalar": "int"}, (), f"has `scalar` and `value`; expected one of {FORMS}"),
        ({"valu": 1}, (), "has the key `valu`, which is not known; did you mean `value`?"),
        ({"value": 1, "dtype": "fp32"}, (), "has `dtype` beside `value`; expected it only beside `tensor`"),
        ({"tensor": ["H"], "min": 1}, (), "has `min` beside `tensor`; expected it only beside `scalar`"),
        (
            {"scalar": "float", "min": 1},
            (),
            "has `min` beside the scalar `float`; expected it only beside `scalar: int`",
        ),
        (
            {"tensor": ["H"], "dtype": "int32", "grad": True},
            (),
            "has `grad: true` and the dtype `int32`; only fp32 tensors get a gradient",
        ),
        ({"tensor": []}, ("tensor",), "is `[]`; expected a list of 1 to 4 dimensions, as in [B, Nk]"),
        ({"tensor": "H"}, ("tensor",), "is `H`; expected a list of 1 to 4 dimensions, as in [B, Nk]"),
        (
            {"tensor": ["H"] * 5},
            ("tensor",),
            "is `['H', 'H', 'H', 'H', 'H']`; expected a list of 1 to 4 dimensions, as in [B, Nk]",
        ),
        (
            {"tensor": ["Hq"]},
            ("tensor",),
            "has the dimension `Hq`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of blocks as in Nq/32",
        ),
        (
            {"tensor": [True]},
            ("tensor",),
            "has the dimension `True`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of blocks as in Nq/32",
        ),
        (
            {"tensor": ["H/2"]},
            ("tensor",),
            "has the dimension `H/2`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of blocks as in Nq/32",
        ),
        ({"tensor": [0]}, ("tensor",), "has the dimension 0; expected a whole number from 1 to 16777216"),
        ({"scalar": "int", "min": 1.0}, ("min",), "is `1.0`; expected a whole number from -1073741823 to 1073741823"),
        (
            {"value": 2**30},
            ("value",),
            "is 1073741824; expected a whole number from -1073741823 to 1073741823: kernels add it in 32 bits",
        ),
        ({"value": float("nan")}, ("value",), "is nan; expected a finite number that fp32 has"),
        ({"value": 1e39}, ("value",), "is 1e+39; expected a finite number that fp32 has"),
        ({"value": "3"}, ("value",), "is `3`; expected a number, `true` or `false`"),
        ({"tensor": ["H"], "dtype": "fp16"}, ("dtype",), None),
        ({"tensor": ["H"], "grad": 1}, ("grad",), None),
        ({"scalar": "integer"}, ("scalar",), None),
    ],
)
def test_bad_parameters(data: Any, place: tuple[str, ...], text: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        Param.model_validate(data)
    (error,) = caught.value.errors()
    assert error["loc"] == place
    assert text is None or str(error["ctx"]["error"]) == text


def test_names_of_parameters() -> None:
    for name in ("window", "w", "slope_2", "a" * 32):
        assert name_problem(name) is None
    for name in ("Q", "_x", "2x", "x-y", "", "a" * 33, "é", "ｗ", 3, None, "x\n"):
        assert (
            name_problem(name) == "is not a name; expected small letters, digits and _, 32 at most, the first a letter"
        )
    for name in ("q_idx", "hkv", "q_len", "s", "min", "where", "true"):
        assert name_problem(name) == "is a word of the language; expected another name"
    assert name_problem("lambda") == "is a word of Python; expected another name"
    for names, what in (
        (("q", "scale", "splits", "group", "plan"), "an argument or a variable of generated functions"),
        (("exp2", "tl", "at", "to_int"), "a function or a module that kernels use"),
        (("inf", "q_tile", "pid"), "a variable of kernels"),
        (("g", "q_start"), "a size or a position of kernels"),
        (("p", "dlse", "o_do", "t12", "acc_next"), "a value of kernels"),
    ):
        for name in names:
            assert name_problem(name) == f"is reserved: {what} has that name; expected another name, as in `my_{name}`"
    with pytest.raises(LangError, match="^the parameter `q_len` is a word of the language; expected another name$"):
        parse_mask("q_len < 3", {"q_len": INT})
    with pytest.raises(LangError, match="^does not use the parameter `window`; expected each declared one to be used$"):
        parse_mask("kv_idx <= q_idx", {"window": INT})


# ---------------------------------------------------------------------------------------------- refusals

PARAMS = {
    "x": Param(scalar="float"),
    "w": INT,
    "step": Param(scalar="int", min=1),
    "slope": Param(tensor=("H",)),
    "doc": DOC,
    "seen": SEEN,
    "zero": Param(value=0),
    "half": Param(value=0.5),
}
NOT = "which expressions do not have"
CALLS = (
    "known: abs, all, any, clamp, cos, erf, exp, float, floor, gelu, int, log, max, "
    "min, relu, round, sigmoid, sin, sqrt, sum, tanh, where"
)
NAMES = "b, false, h, hkv, kv_idx, kv_len, q_idx, q_len, q_pos, true"
NO_NAME = "which is no name of the language and not declared in `params`"
NO_VALUE = "has no real value: it divides by zero, or leaves what a function is defined for"
LARGE = (
    "has a number that is too large; expected whole numbers from -1073741823 to 1073741823, and others that fp32 has"
)
POWER = "expected a whole constant from -8 to 8, 0.5, or a positive constant before it"
POSITIVE = "which may be zero or negative; expected a whole constant, or an int scalar declared with `min: 1`"
ALIKE = (
    "a comparison takes numbers, but `q_idx < 1` is a condition; write `a`, `not a`, or (a and b) or (not a and not b)"
)
BETWEEN = "between two comparisons, where it binds stronger"
HERE = "is not an expression from here on; expected one as in `kv_idx <= q_idx`"
DEEP = "is nested more than 64 deep; expected less"

MANY = f"max({', '.join(['h'] * 20)})"
REFUSED: list[tuple[str, int | None, str]] = [
    # names
    ("kv_idx <= open(3)", 11, f"calls `open`, {NOT}; {CALLS}"),
    ("kv_idx <= mim(q_idx, 3)", 11, f"calls `mim`, {NOT}; did you mean `min`?"),
    ("kv_idx <= select(b < 1, 1, 2)", 11, f"calls `select`, {NOT}; did you mean `where`?"),
    ("kv_idx <= kv_ix", 11, f"uses `kv_ix`, {NO_NAME}; did you mean `kv_idx`?"),
    ("kv_idx <= foo", 11, f"uses `foo`, {NO_NAME}; known: {NAMES}"),
    ("kv_idx <= Nk", 11, f"uses `Nk`, {NO_NAME}; did you mean `kv_len`?"),
    ("kv_idx <= nan", 11, f"uses `nan`, {NO_NAME}; known: {NAMES}"),
    ("kv_idx <= inf", 11, f"uses `inf`, {NO_NAME}; known: {NAMES}"),
    ("step + stp < 1", 8, f"uses `stp`, {NO_NAME}; did you mean `step`?"),
    ("b < 1 and s < 1", 11, "uses the score `s`, which masks do not have"),
    ("min < 3", 1, "uses the function `min` without arguments; it takes 2 to 32 numbers"),
    ("q_idx(3) < 1", 1, "calls `q_idx`, which is not a function"),
    ("min(1, 2)(3) < 1", 1, "calls `min(1, 2)`, which is not a function"),
    ("\n q_idx <\n  prnt(1)", 13, f"calls `prnt`, {NOT}; {CALLS}"),
    # nothing of Python is reached
    ("__import__('os')", 1, f"calls `__import__`, {NOT}; {CALLS}"),
    ("__import__('os').system('true')", 1, f"uses the attribute `.system`, {NOT}"),
    ("open('x').read() == 1", 1, f"uses the attribute `.read`, {NOT}"),
    ("eval('1') < 2", 1, f"calls `eval`, {NOT}; {CALLS}"),
    ("globals()['x'] < 1", 1, "indexes `globals()`, which is not a tensor parameter"),
    ("().__class__.__base__.__subclasses__()", 1, f"uses the attribute `.__subclasses__`, {NOT}"),
    ("q_idx.real < 1", 1, f"uses the attribute `.real`, {NOT}"),
    ("doc[b].x < 1", 1, f"uses the attribute `.x`, {NOT}"),
    ("max(q_idx.x, 1) < 1", 5, f"uses the attribute `.x`, {NOT}"),
    # Python's grammar
    ("'q_idx < 1'", 1, f"uses text in quotes, {NOT}"),
    ('b"q" < 1', 1, f"uses text in quotes, {NOT}"),
    ("q_idx < 'a", 9, f"uses text in quotes, {NOT}"),
    ('f"{q_idx}" < 1', 1, f"uses an f-string, {NOT}"),
    ("q_idx < 1j", 9, f"uses the imaginary number `1j`, {NOT}"),
    ("q_idx < None", 9, f"uses `None`, {NOT}"),
    ("q_idx < ...", 9, f"uses `...`, {NOT}"),
    ("lambda: q_idx < 1", 1, f"uses a `lambda`, {NOT}"),
    ("(n := q_idx) < 1", 2, f"uses `:=`, {NOT}"),
    ("n := 3", 3, f"uses `:=`, {NOT}"),
    ("q_idx = 3", 7, f"uses `=`, {NOT}; did you mean `==`?"),
    ("q_idx < 1 if b else true", 1, f"uses `if ... else`, {NOT}; write where(condition, a, b)"),
    ("if b: true", 1, f"uses `if`, {NOT}; write where(condition, a, b)"),
    ("import os", 1, f"uses `import`, {NOT}"),
    ("[q_idx] < [1]", 1, f"uses a list, {NOT}"),
    ("(q_idx, 1) < (1, 1)", 1, f"uses a tuple, {NOT}"),
    ("b < 1 and {q_idx}", 11, f"uses a set, {NOT}"),
    ("{q_idx: 1}", 1, f"uses a dictionary, {NOT}"),
    ("[i for i in h]", 1, f"uses a comprehension, {NOT}"),
    ("max(i for i in h) < 1", 4, f"uses a comprehension, {NOT}"),
    ("max(*h) < 1", 5, f"uses `*` before an argument, {NOT}"),
    ("max(q_idx, key=1) < 1", 12, f"gives `max` an argument by name, {NOT}"),
    ("max(q_idx, **h) < 1", 12, f"gives `max` an argument by name, {NOT}"),
    ("await q_idx < 1", 1, f"uses `await`, {NOT}"),
    ("(yield q_idx)", 2, f"uses `yield`, {NOT}"),
    ("~(q_idx < 1)", 1, f"uses `~`, {NOT}; did you mean `not`?"),
    ("q_idx @ 2 < 1", 7, f"uses `@`, {NOT}"),
    ("q_idx is 3", 7, f"uses `is`, {NOT}; did you mean `==`?"),
    ("1 < q_idx not  in h", 11, f"uses `not in`, {NOT}"),
    ("q_idx && b", 7, f"uses `&&`, {NOT}; did you mean `and`?"),
    ("q_idx < 1 || b < 1", 11, f"uses `||`, {NOT}; did you mean `or`?"),
    ("!(q_idx < 1)", 1, f"uses `!`, {NOT}; did you mean `not`?"),
    ("q_idx < 1; b < 1", 10, f"has the character `;`, {NOT}"),
    ("q_idx < 1 # a comment", 11, f"has the character `#`, {NOT}"),
    ("q_idx < \\\n1", 9, f"has the character `\\`, {NOT}"),
    ("q_idx ? 1 : 2", 7, f"has the character `?`, {NOT}"),
    ("q_idx ≤ 3", 7, f"has the character `≤`, {NOT}"),
    ("ｍin(q_idx, 1) < 3", 1, f"has the character `ｍ`, {NOT}"),
    ("q_idx <\x00 1", 8, f"has the character `\\x00`, {NOT}"),
    ("q_idx < \ud800", 9, f"has the character `\\ud800`, {NOT}"),
    ("q_idx < 1)", 10, "closes a `)` that was not opened"),
    ("(q_idx < 1]", 11, "closes a `]` that was not opened"),
    ("max(q_idx, 1 < 3", 4, "opens a `(` that is never closed"),
    (" q_idx <", 8, "ends in `<`; expected a name or a number after it"),
    ("q_idx < 1 and", 11, "ends in `and`; expected a name or a number after it"),
    ("q_idx kv_idx", 7, HERE),
    ("", None, "is empty; expected an expression, as in `kv_idx <= q_idx`"),
    (" \n", None, "is empty; expected an expression, as in `kv_idx <= q_idx`"),
    # tensors
    ("doc == 1", 1, "uses the tensor `doc` without an index; write doc[b, kv_idx]"),
    ("slope(h) < 1", 1, "calls `slope`, which is not a function; write slope[...]"),
    ("w[0] < 1", 1, "indexes `w`, which is not a tensor parameter"),
    ("q_idx[0] < 1", 1, "indexes `q_idx`, which is not a tensor parameter"),
    ("doc[b, 0] == docs[b, 1]", 14, f"uses `docs`, {NO_NAME}; did you mean `doc`?"),
    ("doc[b, :] < 1", 8, f"uses a slice, {NOT}"),
    ("doc[b] == 1", 1, "indexes `doc` by 1, but it has 2 dimensions; expected as in doc[b, kv_idx]"),
    ("doc[b, q_idx, h] == 1", 1, "indexes `doc` by 3, but it has 2 dimensions; expected as in doc[b, kv_idx]"),
    ("doc[b, q_idx / 2] == 1", 8, "the index `q_idx / 2` of `doc` is a real number; expected an integer"),
    ("doc[b, x] == 1", 8, "the index `x` of `doc` is a real number; expected an integer"),
    ("doc[b, q_idx < 1] == 1", 8, "the index `q_idx < 1` of `doc` is a condition; expected an integer"),
    # types
    ("q_idx - kv_idx", 1, "is an integer; expected a condition: compare it with something"),
    ("(q_idx < 1) + 1 < 2", 2, "`+` takes numbers, but `q_idx < 1` is a condition; write where(condition, 1, 0)"),
    ("-(q_idx < 1) < 1", 3, "`-` takes numbers, but `q_idx < 1` is a condition; write where(condition, 1, 0)"),
    ("max(q_idx < 1, 2) < 1", 5, "`max` takes numbers, but `q_idx < 1` is a condition; write where(condition, 1, 0)"),
    ("(q_idx < 1) == (b < 1)", 2, ALIKE),
    ("0 < 1 < (q_idx < 1)", 10, ALIKE),
    ("seen[kv_idx] == true", 1, ALIKE.replace("q_idx < 1", "seen[kv_idx]")),
    ("not q_idx", 5, "`not` takes conditions, but `q_idx` is an integer; compare it with something"),
    ("q_idx and b < 1", 1, "`and` takes conditions, but `q_idx` is an integer; compare it with something"),
    ("q_idx < 1 or 1.5", 14, "`or` takes conditions, but `1.5` is a real number; compare it with something"),
    (
        "where(q_idx, 1, 2) < 1",
        7,
        "the first argument of `where` takes conditions, but `q_idx` is an integer; compare it with something",
    ),
    (
        "where(b < 1, b < 1, 2) < 1",
        1,
        "`where` takes two numbers or two conditions after the first argument; here is one of each",
    ),
    ("min(q_idx) < 1", 1, "`min` takes 2 to 32 numbers; here are 1"),
    ("abs(q_idx, 1) < 1", 1, "`abs` takes 1 number; here are 2"),
    ("clamp(q_idx, 1) < 1", 1, "`clamp` takes 3 numbers: x, the least, the most; here are 2"),
    # division and powers
    ("q_idx // 0 < 1", 10, "`q_idx // 0` divides by zero"),
    ("q_idx % zero < 1", 9, "`q_idx % zero` divides by zero"),
    ("q_idx / 0.0 < 1", 9, "`q_idx / 0.0` divides by zero"),
    ("q_idx / (h - h) < 1", 10, "`q_idx / (h - h)` divides by zero"),
    (
        "q_idx // w < 1",
        10,
        "`//` by `w`, which may be zero or negative; expected a whole constant, or its declaration with `min: 1`",
    ),
    ("q_idx // kv_idx < 1", 10, f"`//` by `kv_idx`, {POSITIVE}"),
    ("q_idx % (step + 1) < 1", 10, f"`%` by `step + 1`, {POSITIVE}"),
    ("q_idx // 2.0 < 1", 10, "`//` takes integers, but `2.0` is a real number; `/` divides reals"),
    ("q_idx % half < 1", 9, "`%` takes integers, but `half` is a real number; `/` divides reals"),
    ("x // 2 < 1", 1, "`//` takes integers, but `x` is a real number; `/` divides reals"),
    ("x ** 9 < 1", 6, f"`**` by `9`; {POWER}"),
    ("x ** 1.5 < 1", 6, f"`**` by `1.5`; {POWER}"),
    ("x ** q_idx < 1", 6, f"`**` by `q_idx`; {POWER}"),
    ("(-2) ** q_idx < 1", 9, f"`**` by `q_idx`; {POWER}"),
    ("(x ** 8) ** 8 < 1", 1, "`(x ** 8) ** 8` comes to the power 64; expected a whole one up to 9"),
    ("q_idx < 1 + 0 ** -1", 13, f"`0 ** -1` {NO_VALUE}"),
    ("(-2) ** 0.5 < 1", 1, f"`(-2) ** 0.5` {NO_VALUE}"),
    ("sqrt(-1) < 1", 1, f"`sqrt(-1)` {NO_VALUE}"),
    ("log(0) < 1", 1, f"`log(0)` {NO_VALUE}"),
    # bits
    ("q_idx < 1 | b < 1", 9, f"has `|` {BETWEEN}; did you mean `or`?"),
    ("kv_idx <= q_idx & kv_idx >= 2", 11, f"has `&` {BETWEEN}; did you mean `and`?"),
    ("1 < q_idx ^ 3 < h", 5, f"has `^` {BETWEEN}; write two comparisons"),
    ("(q_idx < 1) & (b < 1)", 2, "`&` takes integers, but `q_idx < 1` is a condition; did you mean `and`?"),
    ("h < (h | (b < 1))", 11, "`|` takes integers, but `b < 1` is a condition; did you mean `or`?"),
    ("x ^ 2 < 1", 1, "`^` takes integers, but `x` is a real number; did you mean `**`?"),
    ("q_idx & 1.5 < 1", 9, "`&` takes integers, but `1.5` is a real number; int() and floor() make integers"),
    ("q_idx << 1.5 < 1", 10, "`<<` takes integers, but `1.5` is a real number; int() and floor() make integers"),
    ("q_idx >> -1 < 1", 10, "`>>` by `-1`; expected a whole number from 0 to 30"),
    ("q_idx >> 31 < 1", 10, "`>>` by `31`; expected a whole number from 0 to 30"),
    ("q_idx & 2147483648 < 1", 9, f"`2147483648` {LARGE}"),
    ("(q_idx & 2147483646) + 2147483646 < 1", 24, f"`2147483646` {LARGE}"),
    # turns
    ("any(i, 3, i)", 11, "`any` takes conditions, but `i` is an integer; compare it with something"),
    ("sum(i, 3, i < h) < 1", 11, "`sum` takes numbers, but `i < h` is a condition; write where(condition, 1, 0)"),
    (
        "any(3, i < h)",
        1,
        "`any` takes 3 arguments: a name, how many turns, and a condition in which the name is 0, 1, ...; here are 2",
    ),
    ("any(1, 3, h < 1)", 5, "`any` names its turns `1`; expected a name, as in any(i, 4, ...)"),
    ("any(w, 3, w < 1)", 5, "`any` names its turns `w`, which is a name already; expected another one"),
    ("any(i, 3, all(i, 3, i < h))", 15, "`all` names its turns `i`, which is a name already; expected another one"),
    ("any(h, 3, h < 1)", 5, "`any` names its turns `h`, which is a word of the language; expected another name"),
    ("any(i, w, i < h)", 8, "`any` has `w` turns; expected a whole constant, 1 at least"),
    ("any(i, 0, i < h)", 8, "`any` has `0` turns; expected a whole constant, 1 at least"),
    ("any(i, 129, i < h)", 8, "`any` writes its last argument out 129 times; expected 128 at most"),
    ("any(i, 12, all(j, 11, i < h + j))", 19, "`all` writes its last argument out 132 times; expected 128 at most"),
    ("any(i, 3, i < h) and i < 3", 22, f"uses `i`, {NO_NAME}; known: {NAMES}"),
    # sizes
    (
        "q_idx * 1e-39 < 1",
        1,
        "`q_idx * 1e-39` has a number that is too small; expected 0, or at least 1.2e-38 as fp32 has",
    ),
    ("q_idx < 1073741824", 9, f"`1073741824` {LARGE}"),
    ("q_idx < 2 ** 31", 9, f"`2 ** 31` {LARGE}"),
    ("q_idx < 10 ** 1000", 9, f"`10 ** 1000` {LARGE}"),
    ("q_idx * 1000000 * 1000000 < 1", 1, f"`q_idx * 1000000 * 1000000` {LARGE}"),
    ("q_idx < 1e39", 9, f"`1e39` {LARGE}"),
    ("q_idx < 1e999", 9, f"`1e999` {LARGE}"),
    ("exp(1000) < 1", 1, f"`exp(1000)` {LARGE}"),
    ("q_idx * 1e30 * 1e30 < 1", 1, f"`q_idx * 1e30 * 1e30` {LARGE}"),
    ("q_idx " + "+ 1" * 1400, None, "has 4206 characters; expected 4000 at most"),
    ("q_idx < " + " + ".join(["1"] * 70), None, DEEP),
    ("-" * 100 + "q_idx < 1", None, DEEP),
    ("(" * 900 + "q_idx < 1" + ")" * 900, None, DEEP),
    (" and ".join(["h<1"] * 400), None, "has more than 1000 names, numbers and operations; expected fewer"),
    (
        f"1 < max({', '.join(['h'] * 20)}) < max({', '.join(['h'] * 20)})",
        71,
        "`min` and `max` have more than 32 arguments together; expected fewer",
    ),
]
REFUSED_PARTS: list[tuple[str, dict[str, str], int | None, str, str]] = [
    ("u < 1", {"u": "q_idx +"}, 7, "ends in `+`; expected a name or a number after it", "u"),
    (
        "y < 1",
        {"u": "q_idx", "y": "u < 2 and b"},
        11,
        "`and` takes conditions, but `b` is an integer; compare it with something",
        "y",
    ),
    ("y < 1", {"y": "u + 1", "u": "q_idx"}, 1, f"uses `u`, {NO_NAME}; known: {NAMES}", "y"),
    ("u + foo < 1", {"u": "q_idx"}, 5, f"uses `foo`, {NO_NAME}; known: {NAMES}, u", ""),
    ("u(1) < 1", {"u": "q_idx"}, 1, f"calls `u`, {NOT}; {CALLS}", ""),
    ("q_idx < 1", {"u": "q_idx"}, None, "does not use the part `u`; expected each named one to be used", ""),
    (
        "any(u, 2, u < h)",
        {"u": "q_idx"},
        5,
        "`any` names its turns `u`, which is a name already; expected another one",
        "",
    ),
    ("w < 1", {"w": "q_idx"}, None, "the part `w` is a parameter too; expected another name", ""),
    ("h < 1", {"h": "q_idx"}, None, "the part `h` is a word of the language; expected another name", ""),
]
REFUSED_SCORES = [
    ("q_idx < 1", 1, "is a condition; expected a number: write where(condition, a, b)"),
    ("true", 1, "is a condition; expected a number: write where(condition, a, b)"),
    ("s + (s < 1)", 6, "`+` takes numbers, but `s < 1` is a condition; write where(condition, 1, 0)"),
    ("score * 2", 1, f"uses `score`, {NO_NAME}; did you mean `s`?"),
]


def declared(text: str) -> dict[str, Param]:
    return {name: param for name, param in PARAMS.items() if re.search(rf"\b{name}\b", text)}


@pytest.mark.parametrize(("text", "column", "reason"), REFUSED, ids=[repr(r[0][:40]) for r in REFUSED])
def test_refused(text: str, column: int | None, reason: str) -> None:
    with pytest.raises(LangError) as caught:
        parse_mask(text, declared(text))
    assert (caught.value.column, caught.value.reason) == (column, reason)
    assert str(caught.value) == (f"column {column}: {reason}" if column else reason)


@pytest.mark.parametrize(("text", "let", "column", "reason", "part"), REFUSED_PARTS)
def test_refused_parts(text: str, let: dict[str, str], column: int | None, reason: str, part: str) -> None:
    with pytest.raises(LangError) as caught:
        parse_mask(text, declared(text), let)
    assert (caught.value.column, caught.value.reason, caught.value.part) == (column, reason, part)


@pytest.mark.parametrize(("text", "column", "reason"), REFUSED_SCORES)
def test_refused_as_a_score(text: str, column: int, reason: str) -> None:
    with pytest.raises(LangError) as caught:
        parse_score(text, declared(text))
    assert (caught.value.column, caught.value.reason) == (column, reason)


# ---------------------------------------------------------------------------------------------- any text

WORDS = [
    *"()[]{},.:;+-*/%<>=!&|^~@ '\"\\#\n\x00é0123456789",
    "//",
    "**",
    "<=",
    "==",
    "!=",
    ":=",
    " and ",
    " or ",
    " not ",
]
WORDS += [
    "q_idx",
    "kv_idx",
    "h",
    "s",
    "x",
    "step",
    "doc[",
    "slope[h]",
    "seen[kv_idx]",
    "min(",
    "max(",
    "abs(",
    "clamp(",
    "where(",
    "exp(",
]
WORDS += [
    "lambda ",
    "await ",
    "yield ",
    "in ",
    "is ",
    "for ",
    "import ",
    "print(",
    "__class__",
    "1e999",
    "0x",
    "1j",
    "...",
    "f'{",
    "None",
]
WORDS += [" if ", " else "]


LATIN = st.binary(max_size=30).map(lambda b: b.decode("latin1"))


def attempt(text: Any) -> None:
    """The text parses, or is refused, within a few seconds."""
    start = time.perf_counter()
    for read in (parse_mask, parse_score):
        try:
            assert to_text(read(text, declared(text) if isinstance(text, str) else {}).expr)
        except LangError as error:
            assert error.reason and "\n" not in str(error) and len(str(error)) < 400
            assert error.column is None or 1 <= error.column <= len(text)
    assert time.perf_counter() - start < 5


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.lists(st.sampled_from(WORDS), max_size=14).map("".join) | LATIN)
@example("9" * MAX_TEXT)
@example("(" * MAX_TEXT)
@example("-" * MAX_TEXT)
@example("not " * 499 + "b")
@example("[" * 100 + "]" * 100)
@example("1" + "**9" * 60)
@example("((3*s)**8)" + "**8" * 60)
@example("exp(" * 60 + "s" + ")" * 60)
@example("abs(log(" * 30 + "s" + "))" * 30)
@example("s" + "[0]" * 190)
@example("s" + "()" * 190)
@example("s" + ".a" * 190)
@example("f'" + "{" * 100)
@example("lambda:" * 60 + "s")
@example("0x" + "f" * 1900)
@example("1_" * 900 + "1")
@example("\ud800")
@example(None)
@example(b"s")
def test_any_text(text: Any) -> None:
    attempt(text)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_expressions(data: st.DataObject) -> None:
    """A good expression with a piece cut out, repeated, or put in."""
    text = data.draw(
        st.sampled_from([row.text for row in ROWS]) | masks(2).map(lambda m: m.text) | scores(2).map(lambda m: m.text)
    )
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        piece = data.draw(st.sampled_from(["", text[start:end] * 2, *WORDS]))
        text = (text[:start] + piece + text[end:])[:MAX_TEXT]
    attempt(text)


HEAVY = {
    "max of squares": "max(" + ", ".join(f"(s - {i}*x)**2" for i in range(20)) + ")",
    "max of absolutes": "max(" + ", ".join(f"abs(s - {i}*x)" for i in range(24)) + ")",
    "flat minimum": "min(" + ", ".join(f"s*{i} - x" for i in range(32)) + ")",
    "where in where": "where(" * 20 + "b < 1" + "".join(f", q_idx < {i}, kv_idx > {i})" for i in range(20)),
    "equalities": "where(" + " or ".join(f"q_idx == {i}" for i in range(49)) + ", s, x)",
    "absolutes": "abs(" * 25 + "s" + " - x) * w" * 25,
    "squares": "(" * 28 + "s" + " + 1) ** 8" * 28,
    "quotients": "x / (s + " * 30 + "1" + ")" * 30,
}


@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY)
def test_heavy_expressions_end(text: str) -> None:
    """Expressions near the limits, of the kinds that sympy is slowest with."""
    attempt(text)


def test_nothing_is_executed(tmp_path: Any) -> None:
    """Text that would leave a file behind if Python ran it does not, and neither sympify nor eval is called."""
    code = f"""
import builtins, sympy
from attngen.lang.expression import parse_mask, parse_score
from attngen.lang.grammar import LangError
def trap(*args, **kwargs):
    raise SystemExit("reached")
sympy.sympify.__globals__["parse_expr"] = trap
import sympy.parsing.sympy_parser
sympy.parsing.sympy_parser.parse_expr = trap
builtins.eval = builtins.open = trap
for text in {[f"open({str(tmp_path / 'x')!r}, 'w').write('x') == 1", "__import__('os').mkdir('x')", "s + min(s, 1)", "open", "E + I"]!r}:
    for read in (parse_mask, parse_score):
        try:
            read(text, {{}})
        except LangError:
            pass
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "done\n", result.stderr
    assert not list(tmp_path.iterdir())
