"""Calls in expressions: the functions of the language."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from attngen.errors import shown, suggest
from attngen.ir import FUNCTIONS, Bool, Expr, clamp, erf, floor, floordiv, mod, nearest, select, trunc
from attngen.lang.checks import Checks, Part
from attngen.lang.limits import MAX_EXTREMES, MAX_INT, MAX_UNROLLED
from attngen.lang.names import CALLS, LANGUAGE, MEANT, name_problem
from attngen.lang.params import Kind, Param

OTHERS: dict[type, str] = {
    ast.Lambda: "a `lambda`",
    ast.NamedExpr: "`:=`",
    ast.Starred: "`*` before an argument",
    ast.JoinedStr: "an f-string",
    ast.Dict: "a dictionary",
    ast.Set: "a set",
    ast.List: "a list",
    ast.Tuple: "a tuple",
    ast.Slice: "a slice",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.Await: "`await`",
    ast.Yield: "`yield`",
    ast.YieldFrom: "`yield`",
}


class Functions(Checks):
    """Builds calls."""

    def __init__(self, params: Mapping[str, Param], score: bool) -> None:
        super().__init__(params, score)
        self.extremes = 0  # arguments of min and max so far
        self.indices: dict[str, int] = {}  # current values of the index names of enclosing `any`, `all` and `sum`
        self.unrolled = 1  # number of copies that are written out of the part that is being built

    def _call(self, node: ast.Call) -> Part:
        if not isinstance(node.func, ast.Name):
            if isinstance(node.func, ast.Attribute):
                self.build(node.func)
            raise self.error(node, f"calls `{self.written(node.func)}`, which is not a function")
        name = node.func.id
        if name not in CALLS:
            if name in self.params or name in LANGUAGE:
                tensor = name in self.params and self.params[name].tensor is not None
                raise self.error(
                    node, f"calls `{name}`, which is not a function" + (f"; write {name}[...]" if tensor else "")
                )
            meant = MEANT.get(name)
            hint = f"did you mean `{meant}`?" if meant in {*CALLS, "**"} else suggest(name, CALLS)
            raise self.error(node, f"calls `{shown(name)}`, which expressions do not have; {hint}")
        words, least, most = CALLS[name]
        if node.keywords:
            raise self.error(node.keywords[0], f"gives `{name}` an argument by name, which expressions do not have")
        if other := next((a for a in node.args if type(a) in OTHERS), None):
            self.build(other)
        if not least <= len(node.args) <= most:
            raise self.error(node, f"`{name}` takes {words}; here are {len(node.args)}")
        if name in _OVER:
            return self._over(node, name)
        return self._where(node) if name == "where" else self._function(node, name)

    def _over(self, node: ast.Call, name: str) -> Part:
        """Build `any`, `all` or `sum`: the last argument, once for each value of the index, combined."""
        variable, count, each = node.args
        if not isinstance(variable, ast.Name):
            raise self.error(
                variable,
                f"`{name}` names its index `{self.written(variable)}`; expected a name, as in {name}(i, 4, ...)",
            )
        if variable.id in {*self.params, *self.parts, *self.indices}:
            raise self.error(
                variable, f"`{name}` names its index `{variable.id}`, which is a name already; expected another one"
            )
        if problem := name_problem(variable.id):
            raise self.error(variable, f"`{name}` names its index `{variable.id}`, which {problem}")
        iterations = self.build(count)
        if not (iterations.constant and iterations.kind == "int" and iterations.expr >= 1):
            raise self.error(
                count, f"`{name}` has `{self.written(count)}` iterations; expected a whole constant, 1 at least"
            )
        before = self.unrolled
        self.unrolled *= int(iterations.expr)
        if self.unrolled > MAX_UNROLLED:
            raise self.error(
                count, f"`{name}` writes its last argument out {self.unrolled} times; expected {MAX_UNROLLED} at most"
            )
        parts = []
        for index in range(int(iterations.expr)):
            self.indices[variable.id] = index
            parts.append(self.number(each, f"`{name}`") if name == "sum" else self.condition(each, f"`{name}`"))
        del self.indices[variable.id]
        self.unrolled = before
        kind: Kind = "bool" if name != "sum" else "int" if all(p.kind == "int" for p in parts) else "real"
        return self.made(node, kind, lambda: _OVER[name](*(p.expr for p in parts)), all(p.constant for p in parts))

    def _where(self, node: ast.Call) -> Part:
        c = self.condition(node.args[0], "the first argument of `where`")
        a, b = (self.build(n) for n in node.args[1:])
        constant = c.constant and a.constant and b.constant
        if a.kind == b.kind == "bool":

            def either() -> Bool:
                return sympy.Or(sympy.And(c.expr, a.expr), sympy.And(sympy.Not(c.expr), b.expr))

            return self.made(node, "bool", either, constant)
        if "bool" in (a.kind, b.kind):
            raise self.error(
                node, "`where` takes two numbers or two conditions after the first argument; here is one of each"
            )
        kind: Kind = "int" if a.kind == b.kind == "int" else "real"
        return self.made(node, kind, lambda: select(c.expr, a.expr, b.expr), constant)

    def _function(self, node: ast.Call, name: str) -> Part:
        if name in ("int", "floor", "round") and (quotient := self._quotient(node.args[0])):
            return self.made(node, "int", lambda: _rounded(name, *quotient), False)
        if name in ("int", "float"):
            return self._cast(node, name)
        parts = [self.number(n, f"`{name}`") for n in node.args]
        exprs, constant = [p.expr for p in parts], all(p.constant for p in parts)
        kind: Kind = "int" if all(p.kind == "int" for p in parts) else "real"
        match name:
            case "min" | "max":
                self.extremes += len(parts)
                if self.extremes > MAX_EXTREMES:
                    raise self.error(
                        node, f"`min` and `max` have more than {MAX_EXTREMES} arguments together; expected fewer"
                    )
                return self.made(node, kind, lambda: FUNCTIONS[name](*exprs), constant)
            case "abs":
                return self.made(node, kind, lambda: _abs(exprs[0]), constant)
            case "relu":
                zero = sympy.Integer(0)  # for reals a choice, whose derivative at 0 is 0
                return self.made(
                    node,
                    kind,
                    lambda: sympy.Max(exprs[0], zero) if kind == "int" else select(exprs[0] > 0, exprs[0], zero),
                    constant,
                )
            case "clamp":
                return self.made(node, kind, lambda: clamp(*exprs), constant)
            case "floor" | "round":
                return self._whole(node, parts[0], name)
        if constant:
            return self.made(node, "real", lambda: sympy.Float(_REAL[name](float(exprs[0]))), True)
        known = _gelu if name == "gelu" else FUNCTIONS[name]
        return self.made(node, "real", lambda: known(exprs[0]), False)

    def _cast(self, node: ast.Call, name: str) -> Part:
        """`int` rounds towards zero. A condition becomes 1 or 0 by `int` and `float`.

        By `float`, a whole real stays an integer in sympy.
        """
        part = self.build(node.args[0])
        if part.kind == "bool":
            part = Part("int", select(part.expr, sympy.Integer(1), sympy.Integer(0)), part.constant)
        if name == "int":
            return self._whole(node, part, name)
        return self.made(node, "real", lambda: part.expr, part.constant)

    def _quotient(self, node: ast.expr) -> tuple[Expr, Expr] | None:
        """(integer, positive whole constant) if the part is their quotient, because integer arithmetic rounds it
        exactly."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            return None
        over = node.right.value if isinstance(node.right, ast.Constant) else 0
        above = self.build(node.left) if type(over) is int and 0 < over <= MAX_INT else None
        return (above.expr, sympy.Integer(over)) if above and above.kind == "int" and not above.constant else None

    def _whole(self, node: ast.Call, part: Part, name: str) -> Part:
        """`floor`, `round` (half to even) or `int`."""
        if part.kind == "int":
            return part
        of_number, symbolic = _WHOLE[name]
        if part.constant:
            return self.made(node, "int", lambda: sympy.Integer(of_number(float(part.expr))), True)
        return self.made(node, "int", lambda: symbolic(part.expr), False)


def _abs(x: Expr) -> Expr:
    """The absolute value. If sympy does not know that the argument is real, it is written as a choice."""
    value = sympy.Abs(x)
    return sympy.Max(x, -x) if value.has(sympy.conjugate, sympy.re, sympy.im, sympy.arg) else value


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _gelu(x: Expr) -> Expr:
    """x times the probability that a normal variable is below x (Gaussian Error Linear Units, Hendrycks and Gimpel
    2016, equation 1)."""
    return x / 2 * (1 + erf(x * sympy.Float(math.sqrt(0.5))))


_OVER: dict[str, Any] = {"any": sympy.Or, "all": sympy.And, "sum": sympy.Add}
_REAL: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "sigmoid": _sigmoid,
    "erf": math.erf,
    "sin": math.sin,
    "cos": math.cos,
    "gelu": lambda x: x / 2 * (1 + math.erf(x * math.sqrt(0.5))),
}

_WHOLE: dict[str, tuple[Callable[[float], int], Any]] = {
    "floor": (math.floor, floor),
    "round": (round, nearest),
    "int": (int, trunc),
}


def _rounded(name: str, a: Expr, b: Expr) -> Expr:
    """a / b as an integer, for integers a and b > 0: rounded down, to the nearest (half to even), or towards zero."""
    if name == "floor":
        return floordiv(a, b)
    if name == "int":
        return select(a >= 0, floordiv(a, b), -floordiv(-a, b))
    up = floordiv(2 * a + b, 2 * b)
    return up - select(
        sympy.And(sympy.Eq(mod(2 * a + b, 2 * b), 0), sympy.Eq(mod(up, sympy.Integer(2)), 1)), sympy.Integer(1), 0
    )
