"""exp2-softmax writes exponentials and logarithms in base two, as the hardware has them, in forms that do not overflow
into NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy

from attngen.errors import VerifyError
from attngen.ir import exp2, log2, parse, symbol, to_text
from attngen.transforms.exp2_softmax import Exp2Softmax, in_base_two
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module, unverified

SCORE = "    %score = map expr({}) uses(s=%s, c=%c) : f32[BLOCK_Q, BLOCK_KV] @?\n    %masked = mask %score"
FORMS = {
    "exp(c*s)": "exp2(LOG2E*c*s)",
    "log(s)": "LN2*log2(s)",
    "tanh(s)": "1 - 2/(exp2(2*LOG2E*s) + 1)",
    "sigmoid(s)": "1/(exp2(-LOG2E*s) + 1)",
    "c*tanh(exp(s))": "c*(1 - 2/(exp2(2*LOG2E*exp2(LOG2E*s)) + 1))",
}


def with_score(expr: str) -> str:
    text = edit(
        SMALL,
        ("    %masked = mask %s", SCORE.format(expr)),
        ("    %Nq = arg", "    %c = arg scalar : f32[] @?\n    %Nq = arg"),
    )
    return text if "c" in expr.replace("c(", "") else text.replace(", c=%c", "")


@pytest.mark.parametrize("before, after", FORMS.items(), ids=FORMS)
def test_a_function_is_written_in_base_two(before: str, after: str) -> None:
    uses = "uses(s=%s, c=%c)" if "c*" in before else "uses(s=%s)"
    assert changes(Exp2Softmax(), module(with_score(before).replace("uses(s=%s, c=%c)", uses))) == [
        f"- %score = map expr({before}) {uses} : f32[BLOCK_Q, BLOCK_KV] @?",
        f"+ %score = map expr({after}) {uses} : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_a_kernel_without_such_functions_stays_as_it_is() -> None:
    assert changes(Exp2Softmax(), module(SMALL)) == []


def test_an_undefined_name_is_refused() -> None:
    before = unverified(with_score("c*tanh(width)"))
    with pytest.raises(VerifyError, match="rule `names`: .*has `width`, which is no operand, scalar or position"):
        verify(Exp2Softmax().run(before))


@pytest.mark.parametrize("text", FORMS)
def test_the_forms_have_the_functions_values_and_limits(text: str) -> None:
    """Over the range of fp32, the forms have the functions' values and are finite where the functions are."""
    e = in_base_two(parse(text)).subs(
        {symbol("LOG2E"): math.log2(math.e), symbol("LN2"): math.log(2), symbol("c"): 0.5}
    )
    names = [str(s) for s in e.free_symbols]
    numeric = sympy.lambdify(
        names, e.replace(exp2, lambda x: 2**x).replace(log2, lambda x: sympy.log(x, 2)), modules="numpy"
    )
    x = np.float32([1e-3, 0.5, 1, 3, 20, 88]) if "log" in text else np.float32([-88, -20, -1, -1e-3, 0, 0.5, 3, 4])
    exact = {
        "exp(c*s)": lambda v: np.exp(0.5 * v),
        "log(s)": np.log,
        "tanh(s)": np.tanh,
        "sigmoid(s)": lambda v: 1 / (1 + np.exp(-v)),
        "c*tanh(exp(s))": lambda v: 0.5 * np.tanh(np.exp(v)),
    }[text]
    assert np.allclose(numeric(x), exact(x.astype(float)), rtol=1e-4, atol=1e-6)
    if text in ("tanh(s)", "sigmoid(s)"):
        with np.errstate(over="ignore"):
            assert np.isfinite(numeric(np.float32([-1e30, -1e4, 1e4, 1e30]))).all()
    assert parse(to_text(in_base_two(parse(text)))) == in_base_two(parse(text))
