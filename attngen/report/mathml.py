"""Expressions of the IR as MathML Core, which browsers draw without extra fonts or scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
from markupsafe import Markup
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.printer import Printer

from attngen.ir import AXIS_DIM, Bool, Expr, cdiv, floordiv
from attngen.ir.names import INTEGERS

# Symbols that every kernel has: (letter, index, meaning).
SYMBOLS: dict[str, tuple[str, str, str]] = {
    **{name: (*n.math, n.about) for name, n in INTEGERS.items() if n.math},
    "s": ("s", "", "product of a query and a key"),
    "scale": ("scale", "", "the scale of scores that the call gives"),
    "tiles": ("tiles", "", "tiles visited, of all heads and sequences"),
}
_CONSTANTS = {"LOG2E": ("log", "2", "e"), "LN2": ("ln", "", "2")}  # function, index, argument
_RELATIONS = {"<": "<", "<=": "≤", ">": ">", ">=": "≥", "==": "=", "!=": "≠"}
# Spaces between factors and after words.
_SPACE, _GAP = (Markup('<mspace width="{}em"/>').format(width) for width in (0.17, 0.5))


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """Return an element of MathML. Text among its children is escaped, Markup is not."""
    given = Markup("").join(Markup(' {}="{}"').format(name, value) for name, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), given, Markup("").join(children))


def _row(*children: str) -> Markup:
    return element("mrow", *children)


def _operator(text: str) -> Markup:
    return element("mo", text)


def _infix(text: str) -> Markup:
    """Return a binary operator, which has space around it even if it starts a line."""
    return element("mo", text, form="infix")


def _fenced(*children: str, left: str = "(", right: str = ")") -> Markup:
    return _row(_operator(left), *children, _operator(right))


def _around(left: Markup, parts: list[Markup], right: Markup) -> list[Markup]:
    """Return the parts in brackets, without line breaks between a bracket and the part next to it."""
    first, *rest = [*parts[:-1], _row(parts[-1], right)]
    return [_row(left, first), *rest]


def _indexed(letter: str, index: str) -> Markup:
    base = element("mi", letter)
    return element("msub", base, element("mn" if index.isdigit() else "mi", index)) if index else base


class MathML(Printer):
    """A printer of expressions that collects their symbols in `used`. Unknown functions become name(arguments); other
    unknown expressions become text."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def math(self, e: Any) -> Markup:
        """Return the expression as <math> elements, between which lines may break: before the terms of sums and
        conditions, after commas."""
        return Markup(" ").join(element("math", part, displaystyle="true") for part in self._pieces(e))

    def _pieces(self, e: Any) -> list[Markup]:
        """Return the expression in parts, between which lines may break."""
        if isinstance(e, sympy.Add):
            return [part for i, t in enumerate(_terms(e)) for part in self._term_pieces(t, i > 0)]
        if isinstance(e, (sympy.And, sympy.Or)):
            return [self._operand(c, e, i > 0) for i, c in enumerate(_sorted(e))]
        if isinstance(e, (sympy.Min, sympy.Max)):
            *most, last = (self._pieces(a) for a in _sorted(e))
            parts = [part for pieces in most for part in (*pieces[:-1], _row(pieces[-1], _operator(",")))]
            name = element("mi", "max" if isinstance(e, sympy.Max) else "min")
            return _around(_row(name, _operator("(")), [*parts, *last], _operator(")"))
        if isinstance(e, (floordiv, cdiv)):
            left, right = "⌊⌋" if isinstance(e, floordiv) else "⌈⌉"
            above, below = e.args
            inner = self._pieces(above)
            if precedence(above) < PRECEDENCE["Mul"]:
                inner = _around(_operator("("), inner, _operator(")"))
            end = _row(_infix("/"), self._wrapped(below, PRECEDENCE["Atom"]), _operator(right))
            return _around(_operator(left), inner, end)
        return [self._print(e)]

    def _term_pieces(self, term: Expr, follows: bool) -> list[Markup]:
        """Return the parts of a term of a sum, the first with its sign. Only minima, maxima and rounded quotients have
        several parts."""
        minus = term.could_extract_minus_sign()
        positive = -term if minus else term
        if not isinstance(positive, (sympy.Min, sympy.Max, floordiv, cdiv)):
            return [self._term(term, follows)]
        first, *rest = self._pieces(positive)
        sign = (_infix if follows else _operator)("−") if minus else _infix("+") if follows else Markup("")
        return [_row(sign, first), *rest]

    def between(self, lo: Expr, name: str, hi: Expr) -> Markup:
        """Return lo ≤ name < hi."""
        least, most = self._print(lo), self._print(hi)
        return element(
            "math", _row(least, _operator("≤"), element("mi", name), _operator("<"), most), displaystyle="true"
        )

    def sum_over_programs(self, factors: Iterable[Expr], iterations: Expr, axis: str, rows: Expr) -> Markup:
        """Return `factors` times the sum of `iterations` over the programs of a head. Its index is the first row of the
        program tile, below `rows`."""
        first, step = (self._print(sympy.Symbol(name)) for name in (f"{axis}_start", AXIS_DIM[axis]))
        end = self._print(rows)
        comma = _operator(",")
        under = _row(
            first,
            _operator("="),
            element("mn", "0"),
            comma,
            step,
            comma,
            element("mn", "2"),
            step,
            comma,
            _operator("…"),
        )
        over = _row(first, _operator("<"), end)
        sign = element("munderover", element("mo", "∑", **{"class": "large"}), under, over)
        head = [part for f in factors for part in (self._print(f), _SPACE)]
        pieces = self._pieces(iterations)
        if precedence(iterations) < PRECEDENCE["Mul"]:
            pieces = _around(_operator("("), pieces, _operator(")"))
        return Markup(" ").join(element("math", part, displaystyle="true") for part in (_row(*head, sign), *pieces))

    def _wrapped(self, e: Any, level: int) -> Markup:
        text: Markup = self._print(e)
        return _fenced(text) if precedence(e) < level else text

    def emptyPrinter(self, e: Any) -> Markup:  # noqa: N802 - sympy's name
        return element("mtext", str(e))

    def _print_Symbol(self, e: Any) -> Markup:
        name = str(e)
        if name in _CONSTANTS:
            function, index, argument = _CONSTANTS[name]
            return _fenced(_indexed(function, index), _SPACE, element("mn" if argument.isdigit() else "mi", argument))
        self.used.add(name)
        letter, index, _ = SYMBOLS.get(name, (name, "", ""))
        return _indexed(letter, index)

    def _print_Integer(self, e: Any) -> Markup:
        number = element("mn", str(abs(int(e))))
        return number if e >= 0 else _row(_operator("−"), number)

    def _print_Rational(self, e: Any) -> Markup:
        share = element("mfrac", element("mn", str(abs(e.p))), element("mn", str(e.q)))
        return share if e >= 0 else _row(_operator("−"), share)

    def _print_Float(self, e: Any) -> Markup:
        number = element("mn", repr(abs(float(e))))
        return number if e >= 0 else _row(_operator("−"), number)

    def _print_Infinity(self, e: Any) -> Markup:
        return element("mn", "∞")

    def _print_NegativeInfinity(self, e: Any) -> Markup:
        return _row(_operator("−"), element("mn", "∞"))

    def _print_Exp1(self, e: Any) -> Markup:
        return element("mi", "e")

    def _print_Add(self, e: Any) -> Markup:
        return _row(*(self._term(t, i > 0) for i, t in enumerate(_terms(e))))

    def _term(self, term: Expr, follows: bool) -> Markup:
        """Return a term of a sum with its sign; a positive first term has none."""
        if term.could_extract_minus_sign():
            return _row(_infix("−") if follows else _operator("−"), self._wrapped(-term, PRECEDENCE["Mul"]))
        text = self._wrapped(term, PRECEDENCE["Add"])
        return _row(_infix("+"), text) if follows else text

    def _print_Mul(self, e: Any) -> Markup:
        if e.args[0].is_Number and e.args[0].is_negative:
            return _row(_operator("−"), self._wrapped(-e, PRECEDENCE["Mul"]))
        above, below = (
            sympy.fraction(e) if any(f.is_Pow and f.exp.is_negative for f in e.args) else (e, sympy.Integer(1))
        )
        if below != 1:
            return element("mfrac", self._print(above), self._print(below))
        factors = [f for f in e.args if f.is_Number] + [f for f in e.as_ordered_factors() if not f.is_Number]
        parts = [part for f in factors for part in (_SPACE, self._wrapped(f, PRECEDENCE["Mul"]))]
        return _row(*parts[1:])

    def _print_Pow(self, e: Any) -> Markup:
        if e.exp.is_negative:
            return element("mfrac", element("mn", "1"), self._print(1 / e))
        if e.exp == sympy.Rational(1, 2):
            return element("msqrt", self._print(e.base))
        return element("msup", self._wrapped(e.base, PRECEDENCE["Atom"]), self._print(e.exp))

    # ------------------------------------------------------------------------------------------ functions

    def _called(self, name: str, args: Iterable[Any]) -> Markup:
        parts = [part for a in args for part in (_operator(","), self._print(a))]
        return _row(element("mi", name), _fenced(*parts[1:]))

    def _print_Function(self, e: Any) -> Markup:
        return self._called(e.func.__name__, e.args)

    def _print_Max(self, e: Any) -> Markup:
        return self._called("max", _sorted(e))

    def _print_Min(self, e: Any) -> Markup:
        return self._called("min", _sorted(e))

    def _print_floordiv(self, e: Any) -> Markup:
        return _fenced(self._ratio(e), left="⌊", right="⌋")

    def _print_floor(self, e: Any) -> Markup:
        return _fenced(self._print(e.args[0]), left="⌊", right="⌋")

    def _print_nearest(self, e: Any) -> Markup:
        return self._called("round", e.args)

    def _print_trunc(self, e: Any) -> Markup:
        return self._called("int", e.args)

    def _print_cdiv(self, e: Any) -> Markup:
        return _fenced(self._ratio(e), left="⌈", right="⌉")

    def _ratio(self, e: Any) -> Markup:
        """Return a quotient on one line, because few fonts have brackets that grow with a fraction."""
        a, b = e.args
        return _row(self._wrapped(a, PRECEDENCE["Mul"]), _infix("/"), self._wrapped(b, PRECEDENCE["Atom"]))

    def _print_mod(self, e: Any) -> Markup:
        a, b = (self._wrapped(x, PRECEDENCE["Mul"]) for x in e.args)
        return _fenced(a, _SPACE, element("mi", "mod"), _SPACE, b)

    def _print_select(self, e: Any) -> Markup:
        cases, rest = _cases(e)
        rows = [(self._print(value), _row(element("mtext", "if"), _GAP, self._print(where))) for where, value in cases]
        table = [
            element("mtr", *(element("mtd", cell) for cell in row))
            for row in (*rows, (self._print(rest), element("mtext", "else")))
        ]
        return element("mtable", *table, **{"class": "cases"})  # the style sheet has the brace

    def _print_exp2(self, e: Any) -> Markup:
        return element("msup", element("mn", "2"), self._print(e.args[0]))

    def _print_exp(self, e: Any) -> Markup:
        return element("msup", element("mi", "e"), self._print(e.args[0]))

    def _print_log2(self, e: Any) -> Markup:
        return _row(_indexed("log", "2"), _fenced(self._print(e.args[0])))

    def _print_log(self, e: Any) -> Markup:
        return self._called("ln", e.args)

    def _print_sigmoid(self, e: Any) -> Markup:
        return self._called("σ", e.args)

    def _print_Abs(self, e: Any) -> Markup:
        return _fenced(self._print(e.args[0]), left="|", right="|")

    # ------------------------------------------------------------------------------------------ conditions

    def _print_Relational(self, e: Any) -> Markup:
        e = e.reversed if e.rhs.is_Symbol and not e.lhs.is_Symbol else e
        return _row(self._print(e.lhs), _operator(_RELATIONS[e.rel_op]), self._print(e.rhs))

    def _operand(self, part: Bool, whole: Bool, follows: bool) -> Markup:
        """Return an operand of a conjunction or disjunction, with the operator before it if it `follows` another."""
        text = self._print(part)
        text = _fenced(text) if isinstance(part, (sympy.And, sympy.Or)) else text
        return _row(_infix("∧" if isinstance(whole, sympy.And) else "∨"), text) if follows else text

    def _print_And(self, e: Any) -> Markup:
        return _row(*(self._operand(part, e, i > 0) for i, part in enumerate(_sorted(e))))

    _print_Or = _print_And

    def _print_Not(self, e: Any) -> Markup:
        (inner,) = e.args
        text = self._print(inner)
        return _row(_operator("¬"), text if inner.is_Symbol else _fenced(text))

    def _print_BooleanTrue(self, e: Any) -> Markup:
        return element("mi", "true")

    def _print_BooleanFalse(self, e: Any) -> Markup:
        return element("mi", "false")


def _sorted(e: Any) -> list[Any]:
    return sorted(e.args, key=sympy.default_sort_key)


def _terms(e: Expr) -> list[Expr]:
    """Return the terms of a sum, negative ones last."""
    return sorted(e.as_ordered_terms(), key=lambda t: bool(t.could_extract_minus_sign()))


def _cases(e: Any) -> tuple[list[tuple[Bool, Expr]], Expr]:
    """Return nested `select`s as one list of (condition, value), and the value if no condition holds."""
    where, value, rest = e.args
    if type(rest) is type(e):
        cases, last = _cases(rest)
        return [(where, value), *cases], last
    if type(value) is type(e) and value.args[2] == rest:
        cases, last = _cases(value)
        return [(sympy.And(where, inner), found) for inner, found in cases], last
    return [(where, value)], rest
