"""Expressions that the language refuses, each with its column and the exact sentence."""

from __future__ import annotations

import pytest

from attngen.lang.expression import parse_mask, parse_score
from attngen.lang.grammar import LangError
from tests.lang_params import declared

NOT = "which expressions do not have"
CALLS = (
    "known: abs, all, any, clamp, cos, erf, exp, float, floor, gelu, int, log, max, "
    "min, relu, round, sigmoid, sin, sqrt, sum, tanh, where"
)
NAMES = "b, false, h, hkv, kv_idx, kv_len, q_idx, q_len, q_pos, true"
NO_NAME = "which is no name of the language and not declared in `params`"
NO_VALUE = "has no real value: it divides by zero, or leaves the domain of a function"
LARGE = (
    "has a number that is too large; expected whole numbers from -1073741823 to 1073741823, and others in the range "
    "of fp32"
)
POWER = "expected a whole constant from -8 to 8, 0.5, or a positive constant before it"
POSITIVE = "which may be zero or negative; expected a whole constant, or an int scalar declared with `min: 1`"
ALIKE = (
    "a comparison takes numbers, but `q_idx < 1` is a condition; write `a`, `not a`, or (a and b) or (not a and not b)"
)
BETWEEN = "between two comparisons, where it binds more tightly"
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
    # Python's functions and attributes
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
    # iterations
    ("any(i, 3, i)", 11, "`any` takes conditions, but `i` is an integer; compare it with something"),
    ("sum(i, 3, i < h) < 1", 11, "`sum` takes numbers, but `i < h` is a condition; write where(condition, 1, 0)"),
    (
        "any(3, i < h)",
        1,
        (
            "`any` takes 3 arguments: a name, how many iterations, and a condition in which the name is 0, 1, ...; "
            "here are 2"
        ),
    ),
    ("any(1, 3, h < 1)", 5, "`any` names its index `1`; expected a name, as in any(i, 4, ...)"),
    ("any(w, 3, w < 1)", 5, "`any` names its index `w`, which is a name already; expected another one"),
    ("any(i, 3, all(i, 3, i < h))", 15, "`all` names its index `i`, which is a name already; expected another one"),
    ("any(h, 3, h < 1)", 5, "`any` names its index `h`, which is a word of the language; expected another name"),
    ("any(i, w, i < h)", 8, "`any` has `w` iterations; expected a whole constant, 1 at least"),
    ("any(i, 0, i < h)", 8, "`any` has `0` iterations; expected a whole constant, 1 at least"),
    ("any(i, 129, i < h)", 8, "`any` writes its last argument out 129 times; expected 128 at most"),
    ("any(i, 12, all(j, 11, i < h + j))", 19, "`all` writes its last argument out 132 times; expected 128 at most"),
    ("any(i, 3, i < h) and i < 3", 22, f"uses `i`, {NO_NAME}; known: {NAMES}"),
    # sizes
    (
        "q_idx * 1e-39 < 1",
        1,
        "`q_idx * 1e-39` has a number that is too small; expected 0, or at least 1.2e-38, as in fp32",
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
        "`any` names its index `u`, which is a name already; expected another one",
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


@pytest.mark.parametrize(("text", "column", "reason"), REFUSED, ids=[repr(r[0][:40]) for r in REFUSED])
def test_refused_masks(text: str, column: int | None, reason: str) -> None:
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
def test_refused_scores(text: str, column: int, reason: str) -> None:
    with pytest.raises(LangError) as caught:
        parse_score(text, declared(text))
    assert (caught.value.column, caught.value.reason) == (column, reason)
