"""The text of expressions: `to_text` prints them, and `parse` reads them back to the same expression.

Text is parsed with Python's `ast` on a whitelist, never with `eval`.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import sympy
from sympy.core.function import Application
from sympy.printing.str import StrPrinter

from attngen.errors import IRError
from attngen.ir.expr import FUNCTIONS, Expr, floordiv, mod, symbol


class _Printer(StrPrinter):
    """Prints the grammar that `parse` reads."""

    def _print_floordiv(self, e: Any) -> str:
        a, b = (
            self._print(x) if isinstance(x, Application) or x.is_Symbol or x.is_Integer else f"({self._print(x)})"
            for x in e.args
        )
        return f"({a} // {b})"

    def _print_mod(self, e: Any) -> str:
        a, b = (
            self._print(x) if isinstance(x, Application) or x.is_Symbol or x.is_Integer else f"({self._print(x)})"
            for x in e.args
        )
        return f"({a} % {b})"

    def _print_Abs(self, e: Any) -> str:
        return f"abs({self._print(e.args[0])})"

    def _print_Min(self, e: Any) -> str:
        return f"min({self._sorted(e)})"

    def _print_Max(self, e: Any) -> str:
        return f"max({self._sorted(e)})"

    def _sorted(self, e: Any) -> str:
        return ", ".join(self._print(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_And(self, e: Any) -> str:
        return " and ".join(self._wrapped(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_Or(self, e: Any) -> str:
        return " or ".join(self._wrapped(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_Not(self, e: Any) -> str:
        return f"not {self._wrapped(e.args[0])}"

    def _wrapped(self, e: Any) -> str:
        text = self._print(e)
        return f"({text})" if isinstance(e, (sympy.And, sympy.Or)) else text

    def _print_Relational(self, e: Any) -> str:
        return f"{self._print(e.lhs)} {e.rel_op} {self._print(e.rhs)}"

    def _print_BooleanTrue(self, e: Any) -> str:
        return "true"

    def _print_BooleanFalse(self, e: Any) -> str:
        return "false"

    def _print_Infinity(self, e: Any) -> str:
        return "inf"

    def _print_NegativeInfinity(self, e: Any) -> str:
        return "-inf"

    def _print_Float(self, e: Any) -> str:
        return repr(float(e))


@cache
def to_text(e: Any) -> str:
    """The expression in the IR's grammar."""
    text = str(_Printer().doprint(e))
    return text[1:-1] if isinstance(e, (floordiv, mod)) else text


_COMPARE = {
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}


def parse(text: str, where: str = "expression") -> Any:
    """Parse an expression of the IR's grammar into sympy. Raises IRError, naming `where`, on anything outside the
    grammar."""
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise IRError(f"{where}: `{shown}` is not an expression") from None
    try:
        value = _Builder(shown, where).visit(tree.body)
    except (TypeError, ValueError):
        value = sympy.nan
    except RecursionError:
        raise IRError(f"{where}: `{shown}` is nested too deeply") from None
    if value.has(sympy.nan, sympy.zoo, sympy.I):
        raise IRError(
            f"{where}: `{shown}` has no value: it divides by zero, subtracts infinities, takes the "
            "logarithm of a negative number, or mixes numbers and conditions"
        )
    return value


def _times(a: Expr, b: Expr) -> Expr:
    """a * b, where the product of a number and a sum is not expanded, because it is printed that way inside larger
    products."""
    if b.is_Number and a.is_Add:
        a, b = b, a
    if a.is_Number and b.is_Add and a.is_finite and a not in (0, 1):
        return sympy.Mul(a, b, evaluate=False)
    return a * b


class _Builder(ast.NodeVisitor):
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where

    def generic_visit(self, node: ast.AST) -> Any:
        raise IRError(f"{self.where}: `{self.text}` uses {type(node).__name__}, which expressions do not have")

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            return self.generic_visit(node)
        return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Float(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        constants = {"true": sympy.true, "false": sympy.false, "inf": sympy.oo}
        return constants.get(node.id, symbol(node.id))

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        a, b = self.visit(node.left), self.visit(node.right)
        match node.op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return _times(a, b)
            case ast.Div():
                return a / b
            case ast.FloorDiv():
                return floordiv(a, b)
            case ast.Mod():
                return mod(a, b)
            case ast.Pow() if b.is_Integer and abs(b) <= 64 and not (a.is_Number or a.is_Mul):
                return a**b  # a product of equal factors is printed so
            case ast.Pow() if a.is_Number and a.is_positive and b.free_symbols:
                return a**b
        return self.generic_visit(node.op)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.USub):
            return _times(sympy.Integer(-1), value)
        return sympy.Not(value) if isinstance(node.op, ast.Not) else self.generic_visit(node.op)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        connective = sympy.And if isinstance(node.op, ast.And) else sympy.Or
        return connective(*(self.visit(v) for v in node.values))

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            return self.generic_visit(node)
        return _COMPARE[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0]))

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else "?"
        if name not in FUNCTIONS or node.keywords:
            raise IRError(f"{self.where}: `{self.text}` calls `{name}`; known: {', '.join(sorted(FUNCTIONS))}")
        try:
            return FUNCTIONS[name](*(self.visit(a) for a in node.args))
        except TypeError as error:
            raise IRError(f"{self.where}: `{self.text}`: {error}") from None
