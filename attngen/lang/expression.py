"""Parses masks and scores from text into expressions of the IR."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from attngen.errors import IRError, shown
from attngen.ir import Bool, Expr, Read
from attngen.lang.convert import Builder
from attngen.lang.grammar import LangError
from attngen.lang.names import name_problem
from attngen.lang.params import SAID, Param


@dataclass(frozen=True)
class Expression:
    """A parsed mask or score: its text, its declared parameters, the sympy expression, and its reads, nested ones
    first.

    tree: Python's tree of the text.
    let: the tree of each named part, which may use the parts before it.
    """

    text: str
    params: tuple[tuple[str, Param], ...]
    expr: Expr | Bool
    reads: tuple[Read, ...]
    tree: ast.Expression = field(compare=False, repr=False)
    let: Mapping[str, ast.Expression] = field(default_factory=dict, compare=False, repr=False)


def parse_mask(text: str, params: Mapping[str, Param], let: Mapping[str, str] | None = None) -> Expression:
    """Parse a condition over positions, parameters and named parts. Raises LangError."""
    return _parse(text, params, let or {}, score=False)


def parse_score(text: str, params: Mapping[str, Param], let: Mapping[str, str] | None = None) -> Expression:
    """Parse a number over the score `s`, positions, parameters and named parts. Raises LangError."""
    return _parse(text, params, let or {}, score=True)


def _parse(text: str, params: Mapping[str, Param], let: Mapping[str, str], score: bool) -> Expression:
    for name in params:
        if problem := name_problem(name):
            raise LangError(None, f"the parameter `{shown(name)}` {problem}")
    builder = Builder(params, score)
    trees: dict[str, ast.Expression] = {}
    try:
        for name, part in let.items():
            if problem := "is a parameter too; expected another name" if name in params else name_problem(name):
                raise LangError(None, f"the part `{shown(name)}` {problem}")
            try:
                trees[name], builder.parts[name] = builder.read(part)
            except LangError as error:
                raise LangError(error.column, error.reason, name) from None
        tree, built = builder.read(text)
        expr, reads = builder.finish(built.expr)
    except (RecursionError, MemoryError):
        raise LangError(None, "is nested too deeply") from None
    except IRError as error:
        raise LangError(None, f"is not what kernels can compute: {error}") from None
    if idle := next((name for name in let if name not in builder.used), None):
        raise LangError(None, f"does not use the part `{idle}`; expected each named one to be used")
    if (built.kind == "bool") == score:
        hint = "write where(condition, a, b)" if score else "compare it with something"
        raise builder.error(
            tree.body, f"is {SAID[built.kind]}; expected {'a number' if score else 'a condition'}: {hint}"
        )
    if unused := next((name for name in params if name not in builder.used), None):
        raise LangError(None, f"does not use the parameter `{unused}`; expected each declared one to be used")
    return Expression(text, tuple(params.items()), expr, reads, tree, trees)
