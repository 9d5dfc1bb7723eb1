"""Any text is parsed or refused by the expression language within seconds, and none of it is executed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attngen.ir import to_text
from attngen.lang.expression import parse_mask, parse_score
from attngen.lang.grammar import LangError
from attngen.lang.limits import MAX_TEXT
from tests.lang_params import declared
from tests.lang_strategies import masks, scores
from tests.lang_table import ROWS

ROOT = Path(__file__).parents[1]
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
    """Check that the text is parsed or refused within a few seconds."""
    start = time.perf_counter()
    for read in (parse_mask, parse_score):
        try:
            assert to_text(read(text, declared(text) if isinstance(text, str) else {}).expr)
        except LangError as error:
            assert error.reason and "\n" not in str(error) and len(str(error)) < 400
            assert error.column is None or 1 <= error.column <= len(text)
    assert time.perf_counter() - start < 5


@pytest.mark.share(16)
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


@pytest.mark.share(4)
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_expressions(data: st.DataObject) -> None:
    """Valid expressions with a piece removed, repeated or inserted are parsed or refused."""
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


@pytest.mark.share(16)
@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY)
def test_heavy_expressions_end(text: str) -> None:
    """Expressions near the limits, of the kinds that are slowest in sympy, end in time."""
    attempt(text)


def test_nothing_is_executed(tmp_path: Any) -> None:
    """Text that would create a file if Python ran it does not, and neither sympify nor eval is called."""
    texts = [
        f"open({str(tmp_path / 'x')!r}, 'w').write('x') == 1",
        "__import__('os').mkdir('x')",
        "s + min(s, 1)",
        "open",
        "E + I",
    ]
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
for text in {texts!r}:
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
