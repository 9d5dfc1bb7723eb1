"""Translates Python's tree to sympy: names, numbers, operators and comparisons, from the leaves up."""

from __future__ import annotations

import ast
import math
from typing import Any

import sympy

from attngen.errors import shown
from attngen.ir import BITS, FUNCTIONS, Expr, clamp, exp2, floordiv, mod, nearest, select
from attngen.lang.checks import Part
from attngen.lang.functions import OTHERS
from attngen.lang.grammar import LangError
from attngen.lang.limits import MAX_BITMASK, MAX_INT, MAX_REAL
from attngen.lang.params import SAID, Kind
from attngen.lang.reads import Reads

_COMPARE: dict[type, Any] = {
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}
_OPERATORS: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_INSTEAD = {"&": "and", "|": "or", "is": "==", "is not": "!="}
_BITS = {kind.sign: kind for kind in BITS}
_SHIFTS = ("<<", ">>")
MAX_SHIFT = 30


def _shifted(sign: str, a: Expr, by: Expr) -> Expr:
    """An integer shifted by a value of the call, as PyTorch shifts 32 bits: shifts by less than 0 or more than 31 lose
    all bits.

    Powers of two up to 2**30 are exact in fp32; the last bit is shifted in a separate step.
    """
    up_to_30 = clamp(by, sympy.Integer(0), sympy.Integer(30))
    power, last = sympy.Max(sympy.Integer(1), nearest(exp2(up_to_30))), by > 30
    if sign == "<<":
        found, gone = a * power * select(last, sympy.Integer(2), sympy.Integer(1)), sympy.Integer(0)
    else:
        gone = select(a < 0, sympy.Integer(-1), sympy.Integer(0))
        found = select(last, gone, floordiv(a, power))
    return select(sympy.And(by >= 0, by <= 31), found, gone)


class Builder(Reads):
    """Checks and translates a tree."""

    def build(self, node: ast.expr) -> Part:
        match node:
            case ast.Constant():
                return self._literal(node)
            case ast.Name():
                return self._name(node)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BoolOp():
                combine, word = (sympy.And, "`and`") if isinstance(node.op, ast.And) else (sympy.Or, "`or`")
                parts = [self.condition(value, word) for value in node.values]
                return self.made(
                    node, "bool", lambda: combine(*(p.expr for p in parts)), all(p.constant for p in parts)
                )
            case ast.Compare():
                return self._compare(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                return self._read(node)
            case ast.IfExp():
                raise self.error(
                    node, "uses `if ... else`, which expressions do not have; write where(condition, a, b)"
                )
            case ast.Attribute():
                raise self.error(node, f"uses the attribute `.{shown(node.attr)}`, which expressions do not have")
        raise self.error(node, f"uses {OTHERS.get(type(node), type(node).__name__)}, which expressions do not have")

    def _literal(self, node: ast.Constant) -> Part:
        match node.value:
            case bool():
                return Part("bool", sympy.true if node.value else sympy.false, True)
            case int():
                if node.value > MAX_INT:
                    raise self.large(node)
                return Part("int", sympy.Integer(node.value), True)
            case float():
                if not node.value <= MAX_REAL:
                    raise self.large(node)
                return Part("real", sympy.Float(node.value), True)
            case complex():
                raise self.error(
                    node, f"uses the imaginary number `{self.written(node)}`, which expressions do not have"
                )
            case str() | bytes():
                raise self.error(node, "uses text in quotes, which expressions do not have")
        raise self.error(node, f"uses `{self.written(node)}`, which expressions do not have")

    def _unary(self, node: ast.UnaryOp) -> Part:
        if isinstance(node.op, ast.Not):
            part = self.condition(node.operand, "`not`")
            return self.made(node, "bool", lambda: sympy.Not(part.expr), part.constant)
        if isinstance(node.op, ast.Invert):
            raise self.error(node, "uses `~`, which expressions do not have; did you mean `not`?")
        part = self.number(node.operand, f"`{'-' if isinstance(node.op, ast.USub) else '+'}`")
        return self.made(
            node, part.kind, lambda: -part.expr if isinstance(node.op, ast.USub) else part.expr, part.constant
        )

    def _no_operator(self, node: ast.expr, op: ast.AST) -> LangError:
        """Refuse an operator. `node` is the part before it."""
        sign = _OPERATORS[type(op)]
        hint = f"; did you mean `{_INSTEAD[sign]}`?" if sign in _INSTEAD else ""
        column = self.text.find(sign.split()[0], (node.end_col_offset or 0) + self.lead) + 1
        return LangError(column or None, f"uses `{sign}`, which expressions do not have{hint}")

    def _binary(self, node: ast.BinOp) -> Part:
        sign = _OPERATORS[type(node.op)]
        if sign in _BITS or sign in _SHIFTS:
            return self._bits(node, sign)
        if sign not in ("+", "-", "*", "/", "//", "%", "**"):
            raise self._no_operator(node.left, node.op)
        a, b = self.number(node.left, f"`{sign}`"), self.number(node.right, f"`{sign}`")
        constant = a.constant and b.constant
        kind: Kind = "int" if a.kind == b.kind == "int" else "real"
        match sign:
            case "+":
                return self.made(node, kind, lambda: a.expr + b.expr, constant)
            case "-":
                return self.made(node, kind, lambda: a.expr - b.expr, constant)
            case "*":
                return self.made(node, kind, lambda: a.expr * b.expr, constant)
            case "/":
                if b.expr.is_zero:
                    raise self.error(node.right, f"`{self.written(node)}` divides by zero")
                return self.made(node, "real", lambda: a.expr / b.expr, constant)
            case "**":
                return self._power(node, a, b)
        return self._floor(node, sign, a, b)

    def _bits(self, node: ast.BinOp, sign: str) -> Part:
        """`&`, `|`, `^`, `<<` and `>>` of integers."""
        sides = (node.left, node.right)
        parts = [self._bitmask(side) or self.build(side) for side in sides]
        for side, part in zip(sides, parts):
            if part.kind == "bool":
                hint = f"; did you mean `{_INSTEAD[sign]}`?" if sign in _INSTEAD else ""
                raise self.error(side, f"`{sign}` takes integers, but `{self.written(side)}` is a condition{hint}")
            if part.kind != "int":
                hint = "; did you mean `**`?" if sign == "^" else "; int() and floor() make integers"
                raise self.error(
                    side, f"`{sign}` takes integers, but `{self.written(side)}` is {SAID[part.kind]}{hint}"
                )
        a, b = parts
        if sign in _BITS:
            return self.made(node, "int", lambda: _BITS[sign](a.expr, b.expr), a.constant and b.constant)
        if not b.constant:
            return self.made(node, "int", lambda: _shifted(sign, a.expr, b.expr), False)
        if not 0 <= b.expr <= MAX_SHIFT:
            raise self.error(
                node.right, f"`{sign}` by `{self.written(node.right)}`; expected a whole number from 0 to {MAX_SHIFT}"
            )
        by = sympy.Integer(2 ** int(b.expr))
        return self.made(node, "int", lambda: a.expr * by if sign == "<<" else floordiv(a.expr, by), a.constant)

    def _bracketed(self, node: ast.expr) -> bool:
        """True if a part has brackets around it in the text."""
        before, after = (
            self.text[: node.col_offset + self.lead].rstrip(),
            self.text[(node.end_col_offset or 0) + self.lead :].lstrip(),
        )
        return before.endswith("(") and after.startswith(")")

    def _bitmask(self, node: ast.expr) -> Part | None:
        """A number next to `&`, `|` or `^`, which may have one bit more than other numbers."""
        is_one = isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MAX_BITMASK
        return Part("int", sympy.Integer(node.value), True) if is_one else None  # type: ignore[attr-defined]

    def _floor(self, node: ast.BinOp, sign: str, a: Part, b: Part) -> Part:
        """`//` and `%`, which round down: the divisor is a constant, or a scalar declared to be positive."""
        for side, part in ((node.left, a), (node.right, b)):
            if part.kind != "int":
                raise self.error(
                    side, f"`{sign}` takes integers, but `{self.written(side)}` is {SAID[part.kind]}; `/` divides reals"
                )
        if b.constant and b.expr == 0:
            raise self.error(node.right, f"`{self.written(node)}` divides by zero")
        divisor = self.params.get(node.right.id) if isinstance(node.right, ast.Name) else None
        if not b.constant and not (divisor and divisor.scalar and divisor.min is not None and divisor.min >= 1):
            hint = (
                "or its declaration with `min: 1`"
                if divisor and divisor.scalar
                else "or an int scalar declared with `min: 1`"
            )
            divisor_text = f"`{sign}` by `{self.written(node.right)}`, which may be zero or negative"
            raise self.error(node.right, f"{divisor_text}; expected a whole constant, {hint}")
        by = floordiv if sign == "//" else mod
        if b.constant and b.expr < 0:  # a // -n is -a // n, and a % -n is -(-a % n)
            return self.made(node, "int", lambda: by(-a.expr, -b.expr) * (1 if sign == "//" else -1), a.constant)
        return self.made(node, "int", lambda: by(a.expr, b.expr), a.constant and b.constant)

    def _power(self, node: ast.BinOp, a: Part, b: Part) -> Part:
        """A small whole power, a root, or a power of a positive constant."""
        if b.constant and a.constant:
            return self._constant_power(node, a, b)
        if b.constant and float(b.expr) == 0.5:
            return self.made(node, "real", lambda: FUNCTIONS["sqrt"](a.expr), False)
        if b.constant and float(b.expr).is_integer() and abs(b.expr) <= 8:
            kind: Kind = "int" if a.kind == b.kind == "int" and b.expr >= 0 else "real"
            return self.made(node, kind, lambda: a.expr ** sympy.Integer(int(b.expr)), False)
        if a.constant and a.expr > 0:
            return self.made(node, "real", lambda: sympy.exp(b.expr * sympy.Float(math.log(float(a.expr)))), False)
        raise self.error(
            node.right,
            f"`**` by `{self.written(node.right)}`; expected a whole constant from -8 to 8, 0.5, "
            "or a positive constant before it",
        )

    def _constant_power(self, node: ast.BinOp, a: Part, b: Part) -> Part:
        if a.kind == b.kind == "int" and b.expr >= 0:
            if abs(a.expr) > 1 and b.expr > 30:
                raise self.large(node)
            return self.made(node, "int", lambda: sympy.Integer(int(a.expr) ** int(b.expr)), True)
        return self.made(node, "real", lambda: sympy.Float(math.pow(float(a.expr), float(b.expr))), True)

    def _compare(self, node: ast.Compare) -> Part:
        nodes = [node.left, *node.comparators]
        for before, op in zip(nodes, node.ops):
            if type(op) not in _COMPARE:
                raise self._no_operator(before, op)
        for side in nodes if len(nodes) > 2 else ():  # `a < b & c < d` is `a < (b & c) < d`
            if (
                isinstance(side, ast.BinOp)
                and (sign := _OPERATORS[type(side.op)]) in _BITS
                and not self._bracketed(side)
            ):
                hint = f"did you mean `{_INSTEAD[sign]}`?" if sign in _INSTEAD else "write two comparisons"
                raise self.error(side, f"has `{sign}` between two comparisons, where it binds more tightly; {hint}")
        parts = [self.build(n) for n in nodes]
        for side, part in zip(nodes, parts):
            if part.kind == "bool":
                hint = "write `a`, `not a`, or (a and b) or (not a and not b)"
                raise self.error(side, f"a comparison takes numbers, but `{self.written(side)}` is a condition; {hint}")
        constant = all(p.constant for p in parts)
        pairs = list(zip(node.ops, parts, parts[1:]))
        return self.made(
            node, "bool", lambda: sympy.And(*(_COMPARE[type(op)](x.expr, y.expr) for op, x, y in pairs)), constant
        )
