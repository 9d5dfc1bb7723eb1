"""Checks of the parts of an expression as they are built: each part has a kind, and a value that is not too large."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from attngen.errors import shown
from attngen.ir import BITS
from attngen.lang.grammar import LangError, read_tree
from attngen.lang.limits import LEAST_REAL, MAX_BITS, MAX_INT, MAX_POWER, MAX_REAL, MAX_SIZE
from attngen.lang.params import SAID, Kind, Param


@dataclass(frozen=True)
class Part:
    """A built part of an expression. It is `constant` if it consists only of numbers."""

    kind: Kind
    expr: Any
    constant: bool = False


class Checks:
    """The checks of every part, with errors that name the part. Subclasses implement `build`."""

    def __init__(self, params: Mapping[str, Param], score: bool) -> None:
        self.params, self.score = params, score
        self.text, self.lead = "", 0  # the text being read, and the number of characters before its first part
        self.parts: dict[str, Part] = {}  # named parts
        self.used: set[str] = set()

    def read(self, text: str) -> tuple[ast.Expression, Part]:
        """Python's tree of a text, and the part that it denotes. Raises LangError."""
        tree, lead = read_tree(text)
        self.text, self.lead = text, lead
        return tree, self.build(tree.body)

    def build(self, node: ast.expr) -> Part:
        """The part that a node of Python's tree denotes. Raises LangError."""
        raise NotImplementedError

    def error(self, node: ast.expr | ast.keyword, reason: str) -> LangError:
        return LangError(node.col_offset + self.lead + 1, reason)

    def written(self, node: ast.expr) -> str:
        """The text of a part, shortened."""
        start, end = node.col_offset + self.lead, (node.end_col_offset or 0) + self.lead
        return shown(self.text[start:end])

    def number(self, node: ast.expr, user: str) -> Part:
        part = self.build(node)
        if part.kind == "bool":
            raise self.error(
                node, f"{user} takes numbers, but `{self.written(node)}` is a condition; write where(condition, 1, 0)"
            )
        return part

    def condition(self, node: ast.expr, user: str) -> Part:
        part = self.build(node)
        if part.kind != "bool":
            raise self.error(
                node,
                f"{user} takes conditions, but `{self.written(node)}` is {SAID[part.kind]}; compare it with something",
            )
        return part

    def made(self, node: ast.expr, kind: Kind, make: Callable[[], Any], constant: bool) -> Part:
        """The part that `make` returns. Raises LangError if it has no value or is too large."""
        try:
            expr = make()
            if kind == "real" and expr.is_number and not (expr.is_Rational or expr.is_Float):
                self._check(node, kind, expr)
                expr = sympy.Float(float(expr))
        except LangError:
            raise
        except OverflowError:
            raise self.large(node) from None
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            raise self._no_value(node) from None
        self._check(node, kind, expr)
        if expr.has(sympy.E):
            expr = expr.xreplace({sympy.E: sympy.Float(math.e)})
        return Part(kind, expr, constant)

    def _no_value(self, node: ast.expr) -> LangError:
        return self.error(
            node,
            f"`{self.written(node)}` has no real value: it divides by zero, or leaves the domain of a function",
        )

    def _check(self, node: ast.expr, kind: Kind, expr: Any) -> None:
        masks = {arg for bits in expr.atoms(*BITS) for arg in bits.args if arg.is_Integer}
        for size, part in enumerate(sympy.preorder_traversal(expr), 1):
            if size > MAX_SIZE:
                raise self.error(node, f"becomes more than {MAX_SIZE} operations here; expected a smaller expression")
            if part in (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
                raise self._no_value(node)
            if part.is_Integer and kind == "int" and abs(part.p) > MAX_INT and part not in masks:
                raise self.large(node)
            if part.is_Rational and max(part.p.bit_length(), part.q.bit_length()) > MAX_BITS:
                raise self.large(node)
            if part.is_Float and not abs(part) <= MAX_REAL:
                raise self.large(node)
            if part.is_Float and 0 < abs(part) < LEAST_REAL:
                raise self.error(
                    node,
                    f"`{self.written(node)}` has a number that is too small; "
                    "expected 0, or at least 1.2e-38, as in fp32",
                )
            if part.is_Pow and part.base != sympy.E:
                allowed = part.exp.is_Integer and abs(part.exp) <= MAX_POWER or abs(part.exp) == sympy.Rational(1, 2)
                if not allowed:
                    raise self.error(
                        node,
                        f"`{self.written(node)}` comes to the power {part.exp}; expected a whole one up to {MAX_POWER}",
                    )

    def large(self, node: ast.expr) -> LangError:
        most = f"whole numbers from {-MAX_INT} to {MAX_INT}, and others in the range of fp32"
        return self.error(node, f"`{self.written(node)}` has a number that is too large; expected {most}")
