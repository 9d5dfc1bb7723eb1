"""Traces the functions that FlexAttention takes, `mask_mod` and `score_mod`, into expressions of the language.

A function runs once on proxies without data (proxies.py). Nothing is compiled. Captured tensors become inputs, with the
dimensions by which they are read, and a gradient if they require one. Python numbers become constants.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from attngen.errors import AttngenError
from attngen.frontends.equal import substitute_equal_reads
from attngen.frontends.operator_table import OPERATORS, SAME_AS
from attngen.frontends.proxies import Operators
from attngen.frontends.tensor_operators import READS, REDUCTIONS
from attngen.frontends.tracer import (
    OUTSIDE,
    Index,
    Note,
    NotExpressible,
    Value,
    constant,
    in_place,
    joined,
    literal,
    scalar,
    size_of,
)
from attngen.ir.names import OF_OUTPUTS
from attngen.lang.names import name_problem

if TYPE_CHECKING:
    from attngen.lang.params import Kind

Mod = Callable[..., Any]
_PLAIN = (torch.Tensor, bool, int, float, str)
DEEPEST = 8  # maximum nesting of functions that hold functions
NAMED_FROM = 7  # nodes of an expression; one of this size or more that occurs twice gets a name
_KINDS: dict[str, Kind] = {"bool": "bool", "int32": "int", "fp32": "real"}
POSITIONS = ("b", "h", "q_idx", "kv_idx")
_NOT_USED = ("layout", "device", "pin_memory", "memory_format", "non_blocking")  # arguments of operators


class TraceError(AttngenError):
    """A function has no expression. The message names the function, the operation and the line."""


@dataclass
class Table:
    """A captured tensor: the name of its input, and the indices of each read, as text."""

    name: str
    tensor: torch.Tensor
    dtype: str
    reads: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; a tensor without dimensions is read as one with one element."""
        return tuple(self.tensor.shape) or (1,)


@dataclass(frozen=True)
class Place:
    """An index at which a function reads a tensor.

    function: the function and the line of the read. tensor: the name of a captured tensor; "" for one that the function
    makes. index: the index as text. length: the length of the indexed dimension.
    """

    function: str
    tensor: str
    index: str
    length: int


@dataclass(frozen=True)
class Traced:
    """The result of tracing a pair of functions.

    mask, score: expressions as text; None for a mask that shows all keys, or a score that is not modified. mask_parts,
    score_parts: their named subexpressions.
    tables: the captured tensors. places: the indices at which functions read tensors. index_sizes: the number of values
    of each reduction index that occurs in these.
    ignores_qk: the score function does not use its score argument. `score` then adds its result to `s`, for calls with
    q and k of 0.
    """

    mask: str | None
    mask_parts: dict[str, str]
    score: str | None
    score_parts: dict[str, str]
    tables: tuple[Table, ...]
    places: tuple[Place, ...] = ()
    index_sizes: Mapping[str, int] = field(default_factory=dict)
    ignores_qk: bool = False

    @property
    def of_mask(self) -> str:
        """All text of the mask."""
        return " ".join((self.mask or "", *self.mask_parts.values()))

    @property
    def of_score(self) -> str:
        """All text of the score."""
        return " ".join((self.score or "", *self.score_parts.values()))

    def reads(self, table: Table) -> bool:
        return occurs(table.name, f"{self.of_mask} {self.of_score}")


def trace(score_mod: Mod | None, mask_mod: Mod | None, positions: tuple[str, ...] = POSITIONS) -> Traced:
    """Trace a pair of functions: score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h, q_idx, kv_idx).

    The condition under which a score is -inf, by `torch.where`, becomes part of the mask. `positions` are the names in
    the language of a function's four integer arguments: `q_pos` in place of `q_idx` is for a function that counts
    queries among the keys.

    Raises TraceError: one sentence with the function, the operation and the line.
    """
    tracer = _Tracer(positions)
    conditions: list[ast.expr] = []
    if mask_mod is not None:
        made = tracer.run(mask_mod, False)
        conditions.append(made.text)
    score, ignores_qk = None, False
    if score_mod is not None:
        made = tracer.run(score_mod, True)
        score = made.text
        ignores_qk = not occurs("s", ast.unparse(score))
        score = ast.BinOp(ast.Name("s", ast.Load()), ast.Add(), score) if ignores_qk else score
        conditions += [] if made.visible is None else [made.visible]
    mask = substitute_equal_reads(
        joined(ast.And, *conditions), {t.name for t in tracer.tables.values() if t.dtype == "int32"}
    )
    shown = isinstance(mask, ast.Name) and mask.id == "true"
    plain = isinstance(score, ast.Name) and score.id == "s"
    mask_text, mask_parts = (None, {}) if shown else _named(mask, "m")
    score_text, score_parts = (None, {}) if score is None or plain else _named(score, "x")
    places, index_sizes = tuple(tracer.places), tracer.index_sizes
    traced = Traced(mask_text, mask_parts, score_text, score_parts, (), places, index_sizes, ignores_qk)
    return replace(traced, tables=tuple(t for t in tracer.tables.values() if traced.reads(t)))


def occurs(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


class _Tracer:
    """Traces one function after the other; their tensors share one set of names."""

    def __init__(self, positions: tuple[str, ...]) -> None:
        self.positions = positions
        self.tables: dict[int, Table] = {}
        self.index_sizes: dict[str, int] = {}
        self.places: dict[Place, None] = {}  # an ordered set
        self.where = ""  # the function, and the line of its operator

    def fresh(self, count: int) -> str:
        """Return a new name for a reduction index with this many values."""
        name = f"i{len(self.index_sizes) + 1}" if self.index_sizes else "i"
        self.index_sizes[name] = count
        return name

    def noting(self) -> Note:
        """Return a function that records the reads of the current operator."""
        where, names = self.where, {table.name for table in self.tables.values()}

        def note(made: ast.expr, index: ast.expr, length: int) -> None:
            table = made.value.id if isinstance(made, ast.Subscript) and isinstance(made.value, ast.Name) else ""
            self.places[Place(where, table if table in names else "", ast.unparse(index), length)] = None

        return note

    def run(self, mod: Mod, score: bool) -> Value:
        """Trace a function, and return its result."""
        argument = "score_mod" if score else "mask_mod"
        inner = inspect.unwrap(getattr(mod, "func", mod))
        code = getattr(inner, "__code__", None)
        captured = [(name, x) for name, x in leaves(mod) if isinstance(x, torch.Tensor)]
        names = {id(x): name for name, x in reversed(captured)}
        device = next((x.device for _, x in captured), torch.device("cpu"))

        def at() -> str:
            return f"{argument} `{_title(mod)}`" + (
                f", line {operators.line} of {operators.file}" if operators.line else ""
            )

        def evaluate(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
            self.where = at()
            return self._call(names, operator, args, kwargs)

        operators = Operators(evaluate, device, code.co_filename if code else "")
        inputs = [
            scalar("real" if name == "s" else "int", ast.Name(name, ast.Load()))
            for name in (*["s"] * score, *self.positions)
        ]
        try:
            return self._result(operators.run(mod, inputs), names, mod, argument, score)
        except TraceError:
            raise
        except NotExpressible as error:
            raise TraceError(f"{at()}: {error}") from None
        except Exception as error:
            line = f", line {operators.line}" if operators.line else ""
            raise TraceError(f"{argument} `{_title(mod)}`{line} cannot be traced: {_first_line(error)}") from None

    def _result(self, made: Any, names: dict[int, str], mod: Mod, argument: str, score: bool) -> Value:
        """Convert the function's result to a value. Raise TraceError if it is not a number or condition."""
        expected = "a number" if score else "a condition"
        made = self._captured(made, names) if isinstance(made, torch.Tensor) else made
        if not isinstance(made, Value) or made.shape:
            given = f"a tensor of shape {list(made.shape)}" if isinstance(made, Value) else f"`{type(made).__name__}`"
            raise TraceError(f"{argument} `{_title(mod)}` gives {given}; expected {expected}")
        if (made.kind == "bool") == score:
            given = "a condition" if score else "a number"
            raise TraceError(f"{argument} `{_title(mod)}` gives {given}; expected {expected}")
        return made

    def _captured(self, tensor: torch.Tensor, names: dict[int, str]) -> Value:
        """Return the value of a tensor that the function holds, and add it to the tables."""
        if id(tensor) not in self.tables:
            kind = "bool" if tensor.dtype == torch.bool else "fp32" if tensor.is_floating_point() else "int32"
            self.tables[id(tensor)] = Table(self._name(names.get(id(tensor), "")), tensor, kind)
        table = self.tables[id(tensor)]

        def read(index: Index) -> ast.expr:
            table.reads.append(tuple(map(ast.unparse, index)))
            at = index[0] if len(index) == 1 else ast.Tuple(list(index), ast.Load())
            return ast.Subscript(ast.Name(table.name, ast.Load()), at, ast.Load())

        kind = _KINDS[table.dtype]
        return Value(kind, tuple(tensor.shape), read) if tensor.dim() else scalar(kind, read((literal(0),)))

    def _name(self, name: str) -> str:
        """Return an unused name that a parameter can have: the function's `name` for the tensor, if possible."""
        stem = re.sub("[^a-z0-9_]+", "_", name.lower()).strip("_")[:24] or "table"
        stem = stem if stem[0].isalpha() else f"t_{stem}"
        taken = stem in OF_OUTPUTS or re.fullmatch(r"[imx][0-9]*", stem)
        stem = f"my_{stem}" if taken or name_problem(stem) else stem
        known = {table.name for table in self.tables.values()}
        return next(name for name in (stem, *(f"{stem}_{n}" for n in range(2, 1000))) if name not in known)

    def _call(self, names: dict[int, str], operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """Return the value of an operator call. A tensor without dimensions that the function makes from a number
        while it runs is that number."""
        made = operator is torch.ops.aten.lift_fresh.default

        def of(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return constant(x.item()) if made and not x.dim() and id(x) not in names else self._captured(x, names)
            if isinstance(x, list):
                return [of(y) for y in x]
            return constant(x) if isinstance(x, (bool, int, float)) else x

        name = _operator(operator)
        changes = operator._schema.is_mutable
        of_name = SAME_AS.get(name, name)
        found = OPERATORS.get(of_name.removesuffix("_") if changes else of_name)
        try:
            if found is None:
                raise NotExpressible(
                    f"has no expression; expected arithmetic, comparisons, `torch.where` and the like, or {OUTSIDE}"
                )
            if name == "aten::detach" and _may_have_gradient(args[0]):
                raise NotExpressible(
                    "stops a gradient, which expressions do not; expected a tensor that was detached outside of the "
                    "function"
                )
            args, kwargs = [*map(of, args)], {k: of(v) for k, v in kwargs.items() if k not in _NOT_USED}
            first = (self.fresh,) if found in REDUCTIONS else (self.noting(),) if found in READS else ()
            try:
                inspect.signature(found).bind(*first, *args, **kwargs)
            except TypeError:
                raise NotExpressible(f"has no expression with these arguments; expected fewer, or {OUTSIDE}") from None
            made_of = found(*first, *args, **kwargs)
            return in_place(args[0], made_of) if changes else made_of
        except NotExpressible as error:
            raise NotExpressible(f"`{name}` {error}") from None


def _may_have_gradient(x: Any) -> bool:
    return x.requires_grad if isinstance(x, torch.Tensor) else x.kind == "real" and x.number is None


def _operator(target: Any) -> str:
    """Return an operator's name without its overload, such as `aten::add`."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else str(target)


def _title(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def leaves(mod: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and strings that a function holds, with its names for them, and those of the functions
    that it holds.

    Attributes of an object, a class or a module are included if the function's code names them. torch.compile can
    follow this function, and then guards these values like those that it reads itself.
    """
    named, within = _names_in(mod), (*within, _persistent(mod))
    for name, value in held(mod):
        yield from _leaves_of(name, value, named, within)
    yield from _named_attributes(mod.__self__ if inspect.ismethod(mod) else mod, named, within)
    for name, value in _globals(mod, named):
        if isinstance(value, (type, ModuleType)):
            yield from _leaves_of(name, value, named, within)


def _leaves_of(name: str, value: Any, named: tuple[str, ...], within: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _leaves_of(f"{name}_{i}", x, named, within)
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from _leaves_of(f"{name}_{key}", x, named, within)
    elif len(within) > DEEPEST or any(_persistent(value) is x for x in within):
        return
    elif isinstance(value, (type, ModuleType)):
        for attribute in named:
            x = getattr(value, attribute, None)
            if isinstance(x, _PLAIN):
                yield attribute, x
    elif callable(value):
        yield from leaves(value, within)
        yield from _named_attributes(value, named, (*within, value))
    elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        for attribute, x in getattr(value, "__dict__", {}).items():
            if isinstance(x, _PLAIN):
                yield attribute, x
        yield from _named_attributes(value, named, (*within, value))


def _persistent(mod: Any) -> Any:
    """Return an object that is the same at each access: of a method its function."""
    return mod.__func__ if inspect.ismethod(mod) else mod


def _named_attributes(value: Any, named: tuple[str, ...], within: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an object's attributes that a function's code names, except plain values in its `__dict__`,
    which the caller yields."""
    if inspect.isfunction(value) or isinstance(value, partial):
        return
    seen = getattr(value, "__dict__", {})
    for attribute in named:
        x = getattr(value, attribute, None)
        if not isinstance(x, _PLAIN) or attribute not in seen:
            yield from _leaves_of(attribute, x, named, within)


def _names_in(mod: Any) -> tuple[str, ...]:
    """Return the names that a function's code looks up, including functions inside it."""
    while isinstance(mod, partial):
        mod = mod.func
    code = getattr(mod, "__code__", None)  # a method has that of its function
    if code is None:
        code = getattr(
            getattr(mod, "forward" if isinstance(mod, torch.nn.Module) else "__call__", None), "__code__", None
        )
    return () if code is None else tuple(names_of(code))


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names that code looks up, including functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_of(inner)


def _globals(mod: Any, named: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the globals of a function's module that its code names."""
    found = getattr(mod, "__globals__", {})
    for name in named:
        if (value := found.get(name)) is not None:
            yield name, value


def held(mod: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function depends on besides its arguments."""
    if isinstance(getattr(mod, "func", None), Callable):  # type: ignore[arg-type]
        yield "func", mod.func  # functools.partial
        for i, x in enumerate(getattr(mod, "args", ())):
            yield f"arg_{i}", x
        yield from (getattr(mod, "keywords", None) or {}).items()
        return
    if inspect.ismethod(mod):
        yield "self", mod.__self__
        mod = mod.__func__
    if isinstance(mod, torch.nn.Module):
        yield from mod.named_parameters()
        yield from mod.named_buffers()
        for name, x in vars(mod).items():
            if isinstance(x, (bool, int, float, str)) and name != "training":
                yield name, x
        return
    if not inspect.isfunction(mod):
        yield from vars(mod).items() if hasattr(mod, "__dict__") and not isinstance(mod, type) else ()
        return
    cells = zip(mod.__code__.co_freevars, mod.__closure__ or ())
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    defaults = mod.__defaults__ or ()
    yield from zip(mod.__code__.co_varnames[: mod.__code__.co_argcount][-len(defaults) :] if defaults else (), defaults)
    yield from (mod.__kwdefaults__ or {}).items()
    for name, value in _globals(mod, _names_in(mod)):
        if not isinstance(value, (type, ModuleType)):
            yield name, value


def _named(e: ast.expr, letter: str) -> tuple[str, dict[str, str]]:
    """Return an expression's text, and its subexpressions that occur more than once by name, each in terms of those
    before it."""
    parents: dict[int, int] = {}
    order: list[ast.expr] = []

    def visit(node: ast.expr) -> bool:
        """Count the occurrences of a node, and return whether a reduction index occurs in it."""
        parents[id(node)] = parents.get(id(node), 0) + 1
        if parents[id(node)] > 1:
            return id(node) in bound
        inside = [visit(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if any(inside) or isinstance(node, ast.Name) and re.fullmatch(r"i[0-9]*", node.id):
            bound.add(id(node))
        order.append(node)
        return id(node) in bound

    bound: set[int] = set()
    visit(e)
    names: dict[int, str] = {}
    parts: dict[str, str] = {}

    def text(node: ast.expr) -> str:
        return ast.unparse(_replaced(node, names))

    for node in order:
        if node is not e and parents[id(node)] > 1 and id(node) not in bound and size_of(node) >= NAMED_FROM:
            parts[name := f"{letter}{len(parts) + 1}"] = text(node)
            names[id(node)] = name
    return text(e), parts


def _replaced(node: Any, names: dict[int, str], known: dict[int, Any] | None = None) -> Any:
    """Return a copy of an expression, with named nodes replaced by their names."""
    known = {} if known is None else known
    if id(node) in known:
        return known[id(node)]
    fields = {}
    for key, value in ast.iter_fields(node):
        if isinstance(value, list):
            fields[key] = [_inner(x, names, known) for x in value]
        else:
            fields[key] = _inner(value, names, known)
    known[id(node)] = type(node)(**fields)
    return known[id(node)]


def _inner(x: Any, names: dict[int, str], known: dict[int, Any]) -> Any:
    if id(x) in names:
        return ast.Name(names[id(x)], ast.Load())
    return _replaced(x, names, known) if isinstance(x, ast.AST) else x
