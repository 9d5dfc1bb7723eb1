"""The expression language of a spec's masks and scores: text and declared parameters in, sympy out.

Text is read with Python's `ast` on a whitelist, and never evaluated. Every part of an expression is a condition, an integer or a
real; a mask is a condition, a score is a number. `//` and `%` round down, as Python's. A read of a tensor parameter takes a negative
index from the end, as Python does; what is outside even so reads 0 (false). Whatever the language does not have is refused by name.

Functions are those of real numbers: the root of a negative number, or 0 / 0, is not defined, and simplification may hide it.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, get_args

import sympy
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from attngen.document import shown
from attngen.errors import IRError, suggest
from attngen.ir.expr import FUNCTIONS, Bool, Expr, clamp, floordiv, mod, parse, select, sigmoid, symbol, to_text
from attngen.ir.graph import Read
from attngen.ir.interface import WRAPPER

MAX_TEXT = 2000  # characters
MAX_NODES = 200  # of Python's tree
MAX_DEPTH = 64  # of Python's tree
MAX_SIZE = 1000  # nodes of the sympy expression
MAX_EXTREMES = 32  # arguments of all min and max together: sympy compares each with each
MAX_POWER = 9  # what the IR's grammar has
MAX_INT = 2**30 - 1  # kernels sum an integer, a position and a length in 32 bits
MAX_REAL = 3.4028234663852886e38  # of fp32
LEAST_REAL = 2.0**-126  # of fp32 that is not subnormal, which kernels take for zero
MAX_BITS = 127  # of the parts of a fraction
MAX_DIM = 2**24

Kind = Literal["bool", "int", "real"]
Dim = Literal["B", "H", "Hkv", "Nq", "Nk"]
DIMS: tuple[str, ...] = get_args(Dim)
_SAID: dict[Kind, str] = {"bool": "a condition", "int": "an integer", "real": "a real number"}
_KINDS: dict[str, Kind] = {"fp32": "real", "int32": "int", "bool": "bool", "int": "int", "float": "real"}

# The names of the language, and the IR's symbols of them.
POSITIONS = {"q_idx": "q_idx", "kv_idx": "kv_idx", "b": "b", "h": "h", "hkv": "hkv", "q_len": "Nq", "kv_len": "Nk"}
CONDITIONS = {"true": True, "false": False}
SCORE = "s"
# What a function takes, in words, and the least and most arguments.
CALLS = {
    "min": (f"2 to {MAX_EXTREMES} numbers", 2, MAX_EXTREMES),
    "max": (f"2 to {MAX_EXTREMES} numbers", 2, MAX_EXTREMES),
    "abs": ("1 number", 1, 1),
    "clamp": ("3 numbers: x, the least, the most", 3, 3),
    "where": ("3 arguments: a condition, what holds if it is true, and if not", 3, 3),
    **dict.fromkeys(("exp", "log", "tanh", "sigmoid", "sqrt"), ("1 number", 1, 1)),
}
LANGUAGE = frozenset({*POSITIONS, *CONDITIONS, SCORE, *CALLS})
# What calls of a generated function, its wrapper, its kernels and the IR's text name already.
TAKEN = frozenset({*FUNCTIONS, *WRAPPER}) | {
    *("at", "d_qk", "d_v", "dropout_keep", "dtype", "keep_mask", "math", "philox", "pid", "position", "tile_at", "tl", "torch", "triton"),
    *(f"{axis}_{part}" for axis in ("q", "kv") for part in ("ahead", "at", "off", "stop", "tile", "tiles")),
    *("inf", "mod", "nan"),
    *("first_head", "heads_abreast", "own_head", "turn"),
}
# Values of the kernels, and how those made of them are named.
_VALUES = "acc alpha count d[koqpsv] delta dlse dscore group hq inv_l k keep keys kv l lse lse2 m masked n[kq] o o_do p product q qk "
_VALUES += "queries rescaled s score shrunk sink2 soft t[0-9]+ total v visible"
_MADE = "all at batch cast end first full head init kept list new next out partial rank row rows scale scale2 seen step sum"
_VALUE = re.compile(f"({_VALUES.replace(' ', '|')})(_({_MADE.replace(' ', '|')}|[0-9]+))*")
_MEANT = {"q": "q_idx", "k": "kv_idx", "kv": "kv_idx", "Nq": "q_len", "Nk": "kv_len", "select": "where", "score": "s", "pow": "**"}

_PARAM = "{tensor: [dimensions]}, {scalar: int}, {scalar: float} or {value: number}"
_KEYS = {"tensor": ("dtype", "grad"), "scalar": ("min",), "value": ()}


class LangError(ValueError):
    """An expression that is not in the language: the column (from 1) where, if it is one place, and a sentence."""

    def __init__(self, column: int | None, reason: str) -> None:
        self.column, self.reason = column, reason
        super().__init__(f"column {column}: {reason}" if column else reason)


# ---------------------------------------------------------------------------------------------- parameters


def _dims(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= 4:
        raise ValueError(f"is `{shown(value)}`; expected a list of 1 to 4 dimensions, as in [B, Nk]")
    for dim in value:
        if type(dim) is int and not 1 <= dim <= MAX_DIM:
            raise ValueError(f"has the dimension {shown(dim)}; expected a whole number from 1 to {MAX_DIM}")
        if type(dim) is not int and not (isinstance(dim, str) and dim in DIMS):
            raise ValueError(f"has the dimension `{shown(dim)}`; expected one of {', '.join(DIMS)} or a whole number")
    return tuple(value)


def _least(value: Any) -> Any:
    if type(value) is not int or abs(value) > MAX_INT:
        raise ValueError(f"is `{shown(value)}`; expected a whole number from {-MAX_INT} to {MAX_INT}")
    return value


def _value(value: Any) -> Any:
    if type(value) is int and abs(value) > MAX_INT:
        raise ValueError(f"is {shown(value)}; expected a whole number from {-MAX_INT} to {MAX_INT}: kernels add it in 32 bits")
    if type(value) is float and not (value == 0 or LEAST_REAL <= abs(value) <= MAX_REAL):
        raise ValueError(f"is {shown(value)}; expected a finite number that fp32 has")
    if type(value) not in (bool, int, float):
        raise ValueError(f"is `{shown(value)}`; expected a number, `true` or `false`")
    return value


class Param(BaseModel):
    """A parameter of an expression: a tensor or a scalar of the call, or a value fixed in the spec; exactly one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    tensor: Annotated[tuple[Dim | int, ...], BeforeValidator(_dims)] | None = Field(
        default=None, description="a tensor of the call: 1 to 4 dimensions out of B, H, Hkv, Nq, Nk, or whole numbers"
    )
    dtype: Literal["fp32", "int32", "bool"] = Field(default="fp32", description="element type of the tensor")
    grad: bool = Field(default=False, description="whether the fp32 tensor gets a gradient")
    scalar: Literal["int", "float"] | None = Field(default=None, description="a number of the call")
    min: Annotated[int, BeforeValidator(_least)] | None = Field(default=None, description="the least int that calls may give")
    value: Annotated[bool | int | float, BeforeValidator(_value)] | None = Field(default=None, description="a number fixed in the spec")

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"is `{shown(data)}`; expected {_PARAM}")
        keys = [str(key) for key in data]
        forms = [form for form in _KEYS if form in keys]
        known = {*_KEYS, *(key for below in _KEYS.values() for key in below)}
        if unknown := next((key for key in keys if key not in known), None):
            raise ValueError(f"has the key `{shown(unknown)}`, which is not known; {suggest(unknown, known)}")
        if len(forms) != 1:
            raise ValueError(f"has {' and '.join(f'`{f}`' for f in forms) or 'no form'}; expected one of {_PARAM}")
        if empty := next((key for key in keys if data[key] is None), None):
            raise ValueError(f"has an empty `{empty}`; expected one of {_PARAM}")
        if stray := next((key for key in keys if key != forms[0] and key not in _KEYS[forms[0]]), None):
            home = next(form for form, below in _KEYS.items() if stray in below)
            raise ValueError(f"has `{stray}` beside `{forms[0]}`; expected it only beside `{home}`")
        if data.get("grad") is True and data.get("dtype", "fp32") != "fp32":
            raise ValueError(f"has `grad: true` and the dtype `{shown(data['dtype'])}`; only fp32 tensors get a gradient")
        if "min" in keys and data["scalar"] != "int":
            raise ValueError(f"has `min` beside the scalar `{shown(data['scalar'])}`; expected it only beside `scalar: int`")
        return data

    @model_serializer
    def data(self) -> dict[str, Any]:
        """Plain data with the defaults of its form filled in."""
        if self.tensor is not None:
            return {"tensor": list(self.tensor), "dtype": self.dtype, "grad": self.grad}
        if self.scalar is not None:
            return {"scalar": self.scalar} if self.min is None else {"scalar": self.scalar, "min": self.min}
        return {"value": self.value}

    @property
    def dims(self) -> tuple[str, ...]:
        """The tensor's dimensions by the IR's names (B, Hq, Hkv, Nq, Nk) or as digits; none for a number."""
        return tuple("Hq" if d == "H" else str(d) for d in self.tensor or ())

    @property
    def kind(self) -> Kind:
        """What its elements are in an expression."""
        if self.value is not None:
            return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "real"
        return _KINDS[self.scalar or self.dtype]


def name_problem(name: Any) -> str | None:
    """Why a parameter cannot have that name, as a sentence that follows the name; None if it can."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]{0,31}", name):
        return "is not a name; expected small letters, digits and _, 32 at most, the first a letter"
    if keyword.iskeyword(name) or name in LANGUAGE or hasattr(builtins, name):
        return f"is a word of {'the language' if name in LANGUAGE else 'Python'}; expected another name"
    if name in TAKEN or _VALUE.fullmatch(name) or symbol(name).is_integer:
        return "is a name that kernels and calls have already; expected another one"
    return None


# ---------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Expression:
    """A parsed mask or score: its text, all declared parameters, the sympy expression, and the reads in it, nested ones first."""

    text: str
    params: tuple[tuple[str, Param], ...]
    expr: Expr | Bool
    reads: tuple[Read, ...]
    tree: ast.Expression = field(compare=False, repr=False)


def parse_mask(text: str, params: Mapping[str, Param]) -> Expression:
    """A condition over positions and parameters. Raises LangError."""
    return _parse(text, params, score=False)


def parse_score(text: str, params: Mapping[str, Param]) -> Expression:
    """A number over the score `s`, positions and parameters. Raises LangError."""
    return _parse(text, params, score=True)


def _parse(text: str, params: Mapping[str, Param], score: bool) -> Expression:
    for name in params:
        if problem := name_problem(name):
            raise LangError(None, f"the parameter `{shown(name)}` {problem}")
    tree, lead = _tree(text)
    builder = _Builder(text, lead, params, score)
    try:
        built = builder.build(tree.body)
        expr, reads = builder.finish(built.expr)
    except (RecursionError, MemoryError) as error:
        raise LangError(None, "is nested too deeply") from error
    except IRError as error:
        raise LangError(None, f"is not what kernels can compute: {error}") from error
    if (built.kind == "bool") == score:
        hint = "write where(condition, a, b)" if score else "compare it with something"
        raise builder.error(tree.body, f"is {_SAID[built.kind]}; expected {'a number' if score else 'a condition'}: {hint}")
    if unused := next((name for name in params if name not in builder.used), None):
        raise LangError(None, f"does not use the parameter `{unused}`; expected each declared one to be used")
    return Expression(text, tuple(params.items()), expr, reads, tree)


def _tree(text: Any) -> tuple[ast.Expression, int]:
    """Python's tree of the text, and how many characters come before it. Nothing of the tree is checked but its size."""
    if not isinstance(text, str) or not text.strip():
        raise LangError(None, "is empty; expected an expression, as in `kv_idx <= q_idx`")
    if len(text) > MAX_TEXT:
        raise LangError(None, f"has {len(text)} characters; expected {MAX_TEXT} at most")
    for at, char in enumerate(text):
        if char in "#$;?\\`" or not (" " <= char <= "~" or char in "\t\r\n"):
            raise LangError(at + 1, f"has the character `{shown(char)}`, which expressions do not have")
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    if any(depth > MAX_DEPTH for depth in depths):
        raise LangError(None, f"is nested more than {MAX_DEPTH} deep; expected less")
    flat = re.sub(r"\s", " ", text)
    lead = len(flat) - len(flat.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(flat.strip(), mode="eval")
    except (RecursionError, MemoryError) as error:
        raise LangError(None, "is nested too deeply") from error
    except (SyntaxError, ValueError) as error:
        raise _syntax(flat, lead, error) from None
    level, count, depth = [tree.body], 0, 0
    while level:
        count, depth = count + len(level), depth + 1
        if count > MAX_NODES:
            raise LangError(None, f"has more than {MAX_NODES} names, numbers and operations; expected fewer")
        if depth > MAX_DEPTH:
            raise LangError(None, f"is nested more than {MAX_DEPTH} deep; expected less")
        level = _below(level)
    return tree, lead


def _below(level: list[ast.expr]) -> list[ast.expr]:
    """The expressions one level further down."""
    nodes: list[ast.AST] = list(level)
    found: list[ast.expr] = []
    while nodes:
        for child in ast.iter_child_nodes(nodes.pop()):
            (found if isinstance(child, ast.expr) else nodes).append(child)  # type: ignore[arg-type]
    return found


def _syntax(flat: str, lead: int, error: Exception) -> LangError:
    """What is wrong with text that is not Python, by the likeliest cause."""
    for pattern, hint in _NOT_PYTHON:
        if found := re.search(pattern, flat):
            return LangError(found.start() + 1, f"uses `{found[0]}`, which expressions do not have{hint}")
    if quote := re.search("['\"]", flat):
        return LangError(quote.start() + 1, "uses text in quotes, which expressions do not have")
    for word in re.finditer(r"(?<![0-9.])\b[A-Za-z_]\w*", flat):
        if keyword.iskeyword(word[0]) and word[0] not in ("and", "or", "not", "True", "False"):
            hint = "; write where(condition, a, b)" if word[0] in ("if", "else") else ""
            return LangError(word.start() + 1, f"uses `{word[0]}`, which expressions do not have{hint}")
    opened: list[int] = []
    for at, char in enumerate(flat):
        if char in "([{":
            opened.append(at)
        elif char in ")]}" and (not opened or flat[opened.pop()] != {")": "(", "]": "[", "}": "{"}[char]):
            return LangError(at + 1, f"closes a `{char}` that was not opened")
    if opened:
        return LangError(opened[-1] + 1, f"opens a `{flat[opened[-1]]}` that is never closed")
    if last := re.search(r"([-+*/%<>=!,.]{1,2}|\b(and|or|not))\s*$", flat):
        return LangError(last.start() + 1, f"ends in `{last[0].strip()}`; expected a name or a number after it")
    offset = error.offset if isinstance(error, SyntaxError) else None
    column = min(max(offset, 1) + lead, len(flat.rstrip())) if isinstance(offset, int) else None
    return LangError(column, "is not an expression from here on; expected one as in `kv_idx <= q_idx`")


_NOT_PYTHON = (
    ("&&", "; did you mean `and`?"),
    (r"\|\|", "; did you mean `or`?"),
    ("!(?!=)", "; did you mean `not`?"),
    (":=", ""),
    ("(?<![<>=!])=(?!=)", "; did you mean `==`?"),
)


@dataclass(frozen=True)
class _Part:
    """A built part of an expression; `constant` if it is made of numbers alone."""

    kind: Kind
    expr: Any
    constant: bool = False


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
_INSTEAD = {"&": "and", "|": "or", "^": "**", "is": "==", "is not": "!="}
_OTHERS: dict[type, str] = {
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


class _Builder:
    """Checks and translates a tree, from the leaves up."""

    def __init__(self, text: str, lead: int, params: Mapping[str, Param], score: bool) -> None:
        self.text, self.lead, self.params, self.score = text, lead, params, score
        self.used: set[str] = set()
        self.reads: dict[tuple[str, tuple[Expr, ...]], sympy.Symbol] = {}
        self.extremes = 0

    # ------------------------------------------------------------------------------------------ errors

    def error(self, node: ast.expr | ast.keyword, reason: str) -> LangError:
        return LangError(node.col_offset + self.lead + 1, reason)

    def _written(self, node: ast.expr) -> str:
        """The text of a part, in short."""
        start, end = node.col_offset + self.lead, (node.end_col_offset or 0) + self.lead
        return shown(self.text[start:end])

    def _number(self, node: ast.expr, what: str) -> _Part:
        part = self.build(node)
        if part.kind == "bool":
            raise self.error(node, f"{what} takes numbers, but `{self._written(node)}` is a condition; write where(condition, 1, 0)")
        return part

    def _condition(self, node: ast.expr, what: str) -> _Part:
        part = self.build(node)
        if part.kind != "bool":
            raise self.error(node, f"{what} takes conditions, but `{self._written(node)}` is {_SAID[part.kind]}; compare it with something")
        return part

    def _made(self, node: ast.expr, kind: Kind, make: Callable[[], Any], constant: bool) -> _Part:
        """The part that `make` gives, if it has a value and is not too large."""
        try:
            expr = make()
            if kind == "real" and expr.is_number and not (expr.is_Rational or expr.is_Float):
                self._check(node, kind, expr)
                expr = sympy.Float(float(expr))
        except LangError:
            raise
        except OverflowError as error:
            raise self._large(node) from error
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise self._no_value(node) from error
        self._check(node, kind, expr)
        if expr.has(sympy.E):
            expr = expr.xreplace({sympy.E: sympy.Float(math.e)})
        return _Part(kind, expr, constant)

    def _no_value(self, node: ast.expr) -> LangError:
        return self.error(node, f"`{self._written(node)}` has no real value: it divides by zero, or leaves what a function is defined for")

    def _check(self, node: ast.expr, kind: Kind, expr: Any) -> None:
        for size, part in enumerate(sympy.preorder_traversal(expr), 1):
            if size > MAX_SIZE:
                raise self.error(node, f"becomes more than {MAX_SIZE} operations here; expected a smaller expression")
            if part in (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
                raise self._no_value(node)
            if part.is_Integer and kind == "int" and abs(part.p) > MAX_INT:
                raise self._large(node)
            if part.is_Rational and max(part.p.bit_length(), part.q.bit_length()) > MAX_BITS:
                raise self._large(node)
            if part.is_Float and not abs(part) <= MAX_REAL:
                raise self._large(node)
            if part.is_Float and 0 < abs(part) < LEAST_REAL:
                raise self.error(
                    node, f"`{self._written(node)}` has a number that is too small; expected 0, or at least 1.2e-38 as fp32 has"
                )
            if part.is_Pow and part.base != sympy.E:
                allowed = part.exp.is_Integer and abs(part.exp) <= MAX_POWER or abs(part.exp) == sympy.Rational(1, 2)
                if not allowed:
                    raise self.error(node, f"`{self._written(node)}` comes to the power {part.exp}; expected a whole one up to {MAX_POWER}")

    def _large(self, node: ast.expr) -> LangError:
        most = f"whole numbers from {-MAX_INT} to {MAX_INT}, and others that fp32 has"
        return self.error(node, f"`{self._written(node)}` has a number that is too large; expected {most}")

    # ------------------------------------------------------------------------------------------ parts

    def build(self, node: ast.expr) -> _Part:
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
                join, word = (sympy.And, "`and`") if isinstance(node.op, ast.And) else (sympy.Or, "`or`")
                parts = [self._condition(value, word) for value in node.values]
                return self._made(node, "bool", lambda: join(*(p.expr for p in parts)), all(p.constant for p in parts))
            case ast.Compare():
                return self._compare(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                return self._read(node)
            case ast.IfExp():
                raise self.error(node, "uses `if ... else`, which expressions do not have; write where(condition, a, b)")
            case ast.Attribute():
                raise self.error(node, f"uses the attribute `.{shown(node.attr)}`, which expressions do not have")
        raise self.error(node, f"uses {_OTHERS.get(type(node), type(node).__name__)}, which expressions do not have")

    def _literal(self, node: ast.Constant) -> _Part:
        match node.value:
            case bool():
                return _Part("bool", sympy.true if node.value else sympy.false, True)
            case int():
                if node.value > MAX_INT:
                    raise self._large(node)
                return _Part("int", sympy.Integer(node.value), True)
            case float():
                if not node.value <= MAX_REAL:
                    raise self._large(node)
                return _Part("real", sympy.Float(node.value), True)
            case complex():
                raise self.error(node, f"uses the imaginary number `{self._written(node)}`, which expressions do not have")
            case str() | bytes():
                raise self.error(node, "uses text in quotes, which expressions do not have")
        raise self.error(node, f"uses `{self._written(node)}`, which expressions do not have")

    def _name(self, node: ast.Name) -> _Part:
        name = node.id
        if name in self.params:
            self.used.add(name)
            param = self.params[name]
            if param.tensor is not None:
                raise self.error(node, f"uses the tensor `{name}` without an index; write {name}[{', '.join(self._indices(param))}]")
            if param.value is None:
                return _Part(param.kind, symbol(name))
            make = {"bool": lambda v: sympy.true if v else sympy.false, "int": sympy.Integer, "real": sympy.Float}[param.kind]
            return _Part(param.kind, make(param.value), True)
        if name in POSITIONS:
            return _Part("int", symbol(POSITIONS[name]))
        if name in CONDITIONS:
            return _Part("bool", sympy.true if CONDITIONS[name] else sympy.false, True)
        if name == SCORE and self.score:
            return _Part("real", symbol(SCORE))
        if name == SCORE:
            raise self.error(node, "uses the score `s`, which masks do not have")
        if name in CALLS:
            raise self.error(node, f"uses the function `{name}` without arguments; it takes {CALLS[name][0]}")
        known = {*POSITIONS, *CONDITIONS, *self.params, *((SCORE,) if self.score else ())}
        meant = _MEANT.get(name)
        hint = f"did you mean `{meant}`?" if meant in known else suggest(name, known)
        raise self.error(node, f"uses `{shown(name)}`, which is no name of the language and not declared in `params`; {hint}")

    def _indices(self, param: Param) -> list[str]:
        """An index as it is likely meant, for a hint."""
        return [{"B": "b", "Hq": "h", "Hkv": "hkv", "Nq": "q_idx", "Nk": "kv_idx"}.get(d, "q_idx - kv_idx") for d in param.dims]

    def _unary(self, node: ast.UnaryOp) -> _Part:
        if isinstance(node.op, ast.Not):
            part = self._condition(node.operand, "`not`")
            return self._made(node, "bool", lambda: sympy.Not(part.expr), part.constant)
        if isinstance(node.op, ast.Invert):
            raise self.error(node, "uses `~`, which expressions do not have; did you mean `not`?")
        part = self._number(node.operand, f"`{'-' if isinstance(node.op, ast.USub) else '+'}`")
        return self._made(node, part.kind, lambda: -part.expr if isinstance(node.op, ast.USub) else part.expr, part.constant)

    def _no_operator(self, node: ast.expr, op: ast.AST) -> LangError:
        """Refuses an operator; `node` is what comes before it."""
        sign = _OPERATORS[type(op)]
        hint = f"; did you mean `{_INSTEAD[sign]}`?" if sign in _INSTEAD else ""
        column = self.text.find(sign.split()[0], (node.end_col_offset or 0) + self.lead) + 1
        return LangError(column or None, f"uses `{sign}`, which expressions do not have{hint}")

    def _binary(self, node: ast.BinOp) -> _Part:
        sign = _OPERATORS[type(node.op)]
        if sign not in ("+", "-", "*", "/", "//", "%", "**"):
            raise self._no_operator(node.left, node.op)
        a, b = self._number(node.left, f"`{sign}`"), self._number(node.right, f"`{sign}`")
        constant = a.constant and b.constant
        kind: Kind = "int" if a.kind == b.kind == "int" else "real"
        match sign:
            case "+":
                return self._made(node, kind, lambda: a.expr + b.expr, constant)
            case "-":
                return self._made(node, kind, lambda: a.expr - b.expr, constant)
            case "*":
                return self._made(node, kind, lambda: a.expr * b.expr, constant)
            case "/":
                if b.expr.is_zero:
                    raise self.error(node.right, f"`{self._written(node)}` divides by zero")
                return self._made(node, "real", lambda: a.expr / b.expr, constant)
            case "**":
                return self._power(node, a, b)
        return self._floor(node, sign, a, b)

    def _floor(self, node: ast.BinOp, sign: str, a: _Part, b: _Part) -> _Part:
        """`//` and `%`, which round down: the divisor is a number known here, or a scalar declared to be positive."""
        for side, part in ((node.left, a), (node.right, b)):
            if part.kind != "int":
                raise self.error(side, f"`{sign}` takes integers, but `{self._written(side)}` is {_SAID[part.kind]}; `/` divides reals")
        if b.constant and b.expr == 0:
            raise self.error(node.right, f"`{self._written(node)}` divides by zero")
        divisor = self.params.get(node.right.id) if isinstance(node.right, ast.Name) else None
        if not b.constant and not (divisor and divisor.scalar and divisor.min is not None and divisor.min >= 1):
            hint = "or its declaration with `min: 1`" if divisor and divisor.scalar else "or an int scalar declared with `min: 1`"
            what = f"`{sign}` by `{self._written(node.right)}`, which may be zero or negative"
            raise self.error(node.right, f"{what}; expected a whole constant, {hint}")
        by = floordiv if sign == "//" else mod
        if b.constant and b.expr < 0:  # a // -n is -a // n, and a % -n is -(-a % n)
            return self._made(node, "int", lambda: by(-a.expr, -b.expr) * (1 if sign == "//" else -1), a.constant)
        return self._made(node, "int", lambda: by(a.expr, b.expr), a.constant and b.constant)

    def _power(self, node: ast.BinOp, a: _Part, b: _Part) -> _Part:
        """A small whole power, a root, or a power of a positive constant."""
        if b.constant and a.constant:
            return self._constant_power(node, a, b)
        if b.constant and float(b.expr) == 0.5:
            return self._made(node, "real", lambda: FUNCTIONS["sqrt"](a.expr), False)
        if b.constant and float(b.expr).is_integer() and abs(b.expr) <= 8:
            kind: Kind = "int" if a.kind == b.kind == "int" and b.expr >= 0 else "real"
            return self._made(node, kind, lambda: a.expr ** sympy.Integer(int(b.expr)), False)
        if a.constant and a.expr > 0:
            return self._made(node, "real", lambda: sympy.exp(b.expr * sympy.Float(math.log(float(a.expr)))), False)
        raise self.error(
            node.right,
            f"`**` by `{self._written(node.right)}`; expected a whole constant from -8 to 8, 0.5, or a positive constant before it",
        )

    def _constant_power(self, node: ast.BinOp, a: _Part, b: _Part) -> _Part:
        if a.kind == b.kind == "int" and b.expr >= 0:
            if abs(a.expr) > 1 and b.expr > 30:
                raise self._large(node)
            return self._made(node, "int", lambda: sympy.Integer(int(a.expr) ** int(b.expr)), True)
        return self._made(node, "real", lambda: sympy.Float(math.pow(float(a.expr), float(b.expr))), True)

    def _compare(self, node: ast.Compare) -> _Part:
        nodes = [node.left, *node.comparators]
        for before, op in zip(nodes, node.ops):
            if type(op) not in _COMPARE:
                raise self._no_operator(before, op)
        parts = [self.build(n) for n in nodes]
        for side, part in zip(nodes, parts):
            if part.kind == "bool":
                hint = "write `a`, `not a`, or (a and b) or (not a and not b)"
                raise self.error(side, f"a comparison takes numbers, but `{self._written(side)}` is a condition; {hint}")
        constant = all(p.constant for p in parts)
        pairs = list(zip(node.ops, parts, parts[1:]))
        return self._made(node, "bool", lambda: sympy.And(*(_COMPARE[type(op)](x.expr, y.expr) for op, x, y in pairs)), constant)

    def _call(self, node: ast.Call) -> _Part:
        if not isinstance(node.func, ast.Name):
            if isinstance(node.func, ast.Attribute):
                self.build(node.func)
            raise self.error(node, f"calls `{self._written(node.func)}`, which is not a function")
        name = node.func.id
        if name not in CALLS:
            if name in self.params or name in LANGUAGE:
                tensor = name in self.params and self.params[name].tensor is not None
                raise self.error(node, f"calls `{name}`, which is not a function" + (f"; write {name}[...]" if tensor else ""))
            meant = _MEANT.get(name)
            hint = f"did you mean `{meant}`?" if meant in {*CALLS, "**"} else suggest(name, CALLS)
            raise self.error(node, f"calls `{shown(name)}`, which expressions do not have; {hint}")
        words, least, most = CALLS[name]
        if node.keywords:
            raise self.error(node.keywords[0], f"gives `{name}` an argument by name, which expressions do not have")
        if other := next((a for a in node.args if type(a) in _OTHERS), None):
            self.build(other)
        if not least <= len(node.args) <= most:
            raise self.error(node, f"`{name}` takes {words}; here are {len(node.args)}")
        return self._where(node) if name == "where" else self._function(node, name)

    def _where(self, node: ast.Call) -> _Part:
        c = self._condition(node.args[0], "the first argument of `where`")
        a, b = (self.build(n) for n in node.args[1:])
        constant = c.constant and a.constant and b.constant
        if a.kind == b.kind == "bool":

            def either() -> Bool:
                return sympy.Or(sympy.And(c.expr, a.expr), sympy.And(sympy.Not(c.expr), b.expr))

            return self._made(node, "bool", either, constant)
        if "bool" in (a.kind, b.kind):
            raise self.error(node, "`where` takes two numbers or two conditions after the first argument; here is one of each")
        kind: Kind = "int" if a.kind == b.kind == "int" else "real"
        return self._made(node, kind, lambda: select(c.expr, a.expr, b.expr), constant)

    def _function(self, node: ast.Call, name: str) -> _Part:
        parts = [self._number(n, f"`{name}`") for n in node.args]
        exprs, constant = [p.expr for p in parts], all(p.constant for p in parts)
        kind: Kind = "int" if all(p.kind == "int" for p in parts) else "real"
        match name:
            case "min" | "max":
                self.extremes += len(parts)
                if self.extremes > MAX_EXTREMES:
                    raise self.error(node, f"`min` and `max` have more than {MAX_EXTREMES} arguments together; expected fewer")
                return self._made(node, kind, lambda: FUNCTIONS[name](*exprs), constant)
            case "abs":
                return self._made(node, kind, lambda: _abs(exprs[0]), constant)
            case "clamp":
                return self._made(node, kind, lambda: clamp(*exprs), constant)
        if constant:
            return self._made(node, "real", lambda: sympy.Float(_REAL[name](float(exprs[0]))), True)
        known = sigmoid if name == "sigmoid" else FUNCTIONS[name]
        return self._made(node, "real", lambda: known(exprs[0]), False)

    # ------------------------------------------------------------------------------------------ reads

    def _read(self, node: ast.Subscript) -> _Part:
        param = self.params.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if param is None or param.tensor is None or not isinstance(node.value, ast.Name):
            if not isinstance(node.value, ast.Name):
                raise self.error(node, f"indexes `{self._written(node.value)}`, which is not a tensor parameter")
            if node.value.id not in LANGUAGE and param is None:
                self._name(node.value)
            raise self.error(node, f"indexes `{node.value.id}`, which is not a tensor parameter")
        tensor = node.value.id
        self.used.add(tensor)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) != len(param.dims):
            want = f"{tensor}[{', '.join(self._indices(param))}]"
            raise self.error(node, f"indexes `{tensor}` by {len(indices)}, but it has {len(param.dims)} dimensions; expected as in {want}")
        parts = [self.build(n) for n in indices]
        for n, part in zip(indices, parts):
            if symbol(SCORE) in part.expr.free_symbols:
                raise self.error(n, f"the index `{self._written(n)}` of `{tensor}` depends on the score; expected positions and parameters")
            if part.kind != "int":
                raise self.error(n, f"the index `{self._written(n)}` of `{tensor}` is {_SAID[part.kind]}; expected an integer")
        key = tensor, tuple(p.expr for p in parts)
        if key not in self.reads:
            ways = sum(t == tensor for t, _ in self.reads)
            # a name with a space cannot be declared; `finish` gives the final ones
            self.reads[key] = symbol(tensor) if not ways else symbol(f"{tensor} {ways}")
        return _Part(param.kind, self.reads[key])

    def finish(self, expr: Any) -> tuple[Any, tuple[Read, ...]]:
        """The expression and its reads under their final names."""
        taken = {*self.params, *LANGUAGE, *TAKEN}
        names: dict[sympy.Symbol, sympy.Symbol] = {}
        for tensor in {t: None for t, _ in self.reads}:
            ways = [(index, at) for (t, index), at in self.reads.items() if t == tensor]
            if len(ways) == 1:
                continue
            number = 0
            for index, at in ways:
                name = _suffixed(tensor, index)
                while name is None or name in taken or symbol(name).is_integer:
                    number += 1
                    name = f"{tensor}_{number}"
                taken.add(name)
                names[at] = symbol(name)
        reads = ((t, index, at) for (t, index), at in self.reads.items())
        final = tuple(Read(names.get(at, at).name, t, tuple(_settled(i.xreplace(names)) for i in index)) for t, index, at in reads)
        return _settled(expr.xreplace(names)), final


def _suffixed(tensor: str, index: tuple[Expr, ...]) -> str | None:
    """`doc_q` for doc[b, q_idx]: by the positions that are indices as they are, if there are any and all others are b, h or hkv."""
    short = {symbol("q_idx"): "q", symbol("kv_idx"): "kv"}
    plain = {symbol(n) for n in ("b", "h", "hkv")}
    letters = [short[i] for i in index if i in short]
    return "_".join([tensor, *letters]) if letters and all(i in short or i in plain for i in index) else None


def _settled(expr: Any) -> Any:
    """The expression as the IR's text gives it back: sympy leaves some parts, as min(x, max(1, 2)), for a second look."""
    for _ in range(4):
        again = parse(to_text(expr))
        if again == expr:
            return expr
        expr = again
    return expr


def _abs(x: Expr) -> Expr:
    """The absolute value; of what sympy does not know to be real, by its definition."""
    value = sympy.Abs(x)
    return sympy.Max(x, -x) if value.has(sympy.conjugate, sympy.re, sympy.im, sympy.arg) else value


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


_REAL: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "sigmoid": _sigmoid,
}
