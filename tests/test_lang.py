"""The expression language: values computed by hand, random expressions, names of reads, and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attngen.ir import FUNCTIONS, parse, symbol, to_text
from attngen.ir.names import CALLED
from attngen.lang.evaluate import evaluate
from attngen.lang.expression import Expression, parse_mask, parse_score
from attngen.lang.grammar import LangError
from attngen.lang.names import TAKEN, name_problem
from attngen.lang.params import Param
from tests.lang_strategies import Sample, masks, piecewise_scores, scores
from tests.lang_table import INT, ROWS, SEEN, SIZES, TABLE, Row, environment, number

SHAPE = (SIZES["batch"], SIZES["q_heads"], SIZES["n_q"], SIZES["n_kv"])


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_values_equal_those_by_hand(row: Row) -> None:
    """The evaluator and the sympy expression both give the value computed by hand."""
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
    """Compare the evaluator with the sympy expression at some positions."""
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


@pytest.mark.share(16)
@settings(max_examples=150, deadline=None)
@given(masks(), PLACES)
def test_random_masks(sample: Sample, places: list[tuple[int, int, int, int]]) -> None:
    compare(sample, parse_mask(sample.text, sample.params), places, 0)


@pytest.mark.share(4)
@settings(max_examples=150, deadline=None)
@given(scores() | piecewise_scores(), PLACES, st.integers(0, 9))
def test_random_scores(sample: Sample, places: list[tuple[int, int, int, int]], seed: int) -> None:
    compare(sample, parse_score(sample.text, sample.params), places, seed)


@settings(max_examples=60, deadline=None)
@given(masks(2) | scores(2))
def test_printed_expressions_parse_back(sample: Sample) -> None:
    """Expressions are printed in the IR's grammar and parsed back, and parsing a text twice gives the same
    expression."""
    try:
        expression = parse_mask(sample.text, sample.params)
    except LangError:
        expression = parse_score(sample.text, sample.params)
        assert parse_score(sample.text, sample.params) == expression
    assert parse(to_text(expression.expr)) == expression.expr


def test_shapes_and_gradients() -> None:
    """The evaluator keeps dimensions of size 1 where nothing varies, and is differentiable in s and in tensors."""
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
    """Ties have PyTorch's gradients."""
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


# ---------------------------------------------------------------------------------------------- parsed expressions


def test_a_parsed_expression_has_text_parameters_and_reads() -> None:
    text = "kv_idx <= q_idx and (q_idx - kv_idx <= window or kv_idx < sinks)"
    params = {"window": INT, "sinks": Param(value=4)}
    expression = parse_mask(text, params)
    assert to_text(expression.expr) == "kv_idx <= q_idx and (-kv_idx + q_idx <= window or kv_idx < 4)"
    assert expression.params == tuple(params.items()) and expression.reads == () and expression.text == text
    assert expression == parse_mask(text, params) and hash(expression) == hash(parse_mask(text, params))


def names(text: str, **params: Param) -> list[tuple[str, str, str]]:
    reads = parse_mask(text, params).reads
    return [(r.name, r.tensor, ", ".join(to_text(i) for i in r.index)) for r in reads]


def test_each_read_has_a_unique_name() -> None:
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
    used = {"t_1": INT, "t_q": INT}
    assert names("t[h] < t[b] + t_1 < t[q_idx] + t_q", t=long, **used) == [
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


def test_parameters_have_kinds_and_canonical_forms() -> None:
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
        ({"value": 1, "dtype": "fp32"}, (), "has `dtype` with `value`; expected it only with `tensor`"),
        ({"tensor": ["H"], "min": 1}, (), "has `min` with `tensor`; expected it only with `scalar`"),
        (
            {"scalar": "float", "min": 1},
            (),
            "has `min` with the scalar `float`; expected it only with `scalar: int`",
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
            (
                "has the dimension `Hq`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of "
                "blocks as in Nq/32"
            ),
        ),
        (
            {"tensor": [True]},
            ("tensor",),
            (
                "has the dimension `True`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of "
                "blocks as in Nq/32"
            ),
        ),
        (
            {"tensor": ["H/2"]},
            ("tensor",),
            (
                "has the dimension `H/2`; expected one of B, H, Hkv, Nq, Nk, a whole number, `any`, or a number of "
                "blocks as in Nq/32"
            ),
        ),
        ({"tensor": [0]}, ("tensor",), "has the dimension 0; expected a whole number from 1 to 16777216"),
        ({"scalar": "int", "min": 1.0}, ("min",), "is `1.0`; expected a whole number from -1073741823 to 1073741823"),
        (
            {"value": 2**30},
            ("value",),
            "is 1073741824; expected a whole number from -1073741823 to 1073741823: kernels add it in 32 bits",
        ),
        ({"value": float("nan")}, ("value",), "is nan; expected a finite number in the range of fp32"),
        ({"value": 1e39}, ("value",), "is 1e+39; expected a finite number in the range of fp32"),
        ({"value": "3"}, ("value",), "is `3`; expected a number, `true` or `false`"),
        ({"tensor": ["H"], "dtype": "fp16"}, ("dtype",), None),
        ({"tensor": ["H"], "grad": 1}, ("grad",), None),
        ({"scalar": "integer"}, ("scalar",), None),
    ],
)
def test_wrong_parameters_are_one_sentence(data: Any, place: tuple[str, ...], text: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        Param.model_validate(data)
    (error,) = caught.value.errors()
    assert error["loc"] == place
    assert text is None or str(error["ctx"]["error"]) == text


def test_names_of_parameters_are_checked() -> None:
    for name in ("window", "w", "slope_2", "a" * 32):
        assert name_problem(name) is None
    for name in ("Q", "_x", "2x", "x-y", "", "a" * 33, "é", "ｗ", 3, None, "x\n"):
        assert (
            name_problem(name) == "is not a name; expected small letters, digits and _, 32 at most, the first a letter"
        )
    for name in ("q_idx", "hkv", "q_len", "s", "min", "where", "true"):
        assert name_problem(name) == "is a word of the language; expected another name"
    assert name_problem("lambda") == "is a word of Python; expected another name"
    for names, owner in (
        (("q", "scale", "splits", "group", "plan"), "an argument or a variable of generated functions"),
        (("exp2", "tl", "at", "gl"), "a function or a module that kernels use"),
        (("inf", "q_tile", "pid"), "a variable of kernels"),
        (("g", "q_start"), "a size or a position of kernels"),
        (("p", "dlse", "o_do", "t12", "acc_next"), "a value of kernels"),
    ):
        for name in names:
            assert name_problem(name) == f"is reserved: {owner} has that name; expected another name, as in `my_{name}`"
    # The compiler has other names for these, such as `_broadcast` and `num_KV_splits`.
    for name in ("stage", "order", "broadcast", "num_splits", "k_smem", "to_int", "load_weights", "release_k"):
        assert name_problem(name) is None
    with pytest.raises(LangError, match="^the parameter `q_len` is a word of the language; expected another name$"):
        parse_mask("q_len < 3", {"q_len": INT})
    with pytest.raises(LangError, match="^does not use the parameter `window`; expected each declared one to be used$"):
        parse_mask("kv_idx <= q_idx", {"window": INT})
