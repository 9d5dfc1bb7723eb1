"""Traces the functions that FlexAttention takes, `mask_mod` and `score_mod`, into expressions of the language.

A function runs once on numbers without data (standins.py). Nothing is compiled. Tensors that it captures become inputs:
with the dimensions by which they are read, and a gradient where they require one. Python's numbers are written out.
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
from attngen.frontends.equal import agreed
from attngen.frontends.operators import OPERATORS, READS, REDUCTIONS, SAME_AS
from attngen.frontends.proxies import Operators
from attngen.frontends.tracer import (
    OUTSIDE,
    Index,
    Note,
    Untold,
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
DEEPEST = 8  # of functions that hold functions
NAMED_FROM = 7  # parts of an expression; one with as many that occurs twice gets a name
_KINDS: dict[str, Kind] = {"bool": "bool", "int32": "int", "fp32": "real"}
POSITIONS = ("b", "h", "q_idx", "kv_idx")
_NOT_USED = ("layout", "device", "pin_memory", "memory_format", "non_blocking")  # of operators' arguments


class TraceError(AttngenError):
    """A function that has no expression: which one, the operation and the line."""


@dataclass
class Table:
    """A captured tensor: the name of its input, and the indices at which it is read, each as text."""

    name: str
    tensor: torch.Tensor
    dtype: str
    reads: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; a number of no dimension is read as a tensor with one element."""
        return tuple(self.tensor.shape) or (1,)


@dataclass(frozen=True)
class Place:
    """An index by which a function reads a tensor.

    function: which function does so, and in which line. tensor: the name of a captured tensor; "" for one that the
    function makes.
    index: its text. length: of the dimension.
    """

    function: str
    tensor: str
    index: str
    length: int


@dataclass(frozen=True)
class Traced:
    """What was traced.

    mask, score: expressions as text, None where there is nothing to say, and named parts of each. tables: the captured
    tensors.
    places: the indices by which functions read tensors. turns: how many turns the reductions have whose names are in
    these.
    forgets: the function of a score does not use it, so that what is added to the score says all: it is for calls whose
    products are 0.
    """

    mask: str | None
    mask_parts: dict[str, str]
    score: str | None
    score_parts: dict[str, str]
    tables: tuple[Table, ...]
    places: tuple[Place, ...] = ()
    turns: Mapping[str, int] = field(default_factory=dict)
    forgets: bool = False

    @property
    def of_mask(self) -> str:
        """All text of the mask."""
        return " ".join((self.mask or "", *self.mask_parts.values()))

    @property
    def of_score(self) -> str:
        """All text of the score."""
        return " ".join((self.score or "", *self.score_parts.values()))

    def reads(self, table: Table) -> bool:
        """Whether a captured tensor is in the text of one of them."""
        return occurs(table.name, f"{self.of_mask} {self.of_score}")


def trace(score_mod: Mod | None, mask_mod: Mod | None, positions: tuple[str, ...] = POSITIONS) -> Traced:
    """Trace a pair of functions: score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h, q_idx, kv_idx).

    A score that is -inf under a condition, by `torch.where`, gives the mask that condition. `positions` are what the
    language calls the four numbers that a function is given: `q_pos` in place of `q_idx` is for a function that counts
    queries among the keys.

    Raises TraceError: one sentence with the function, the operation and the line.
    """
    tracer = _Tracer(positions)
    conditions: list[ast.expr] = []
    if mask_mod is not None:
        made = tracer.run(mask_mod, False)
        conditions.append(made.text)
    score, forgets = None, False
    if score_mod is not None:
        made = tracer.run(score_mod, True)
        score = made.text
        forgets = not occurs("s", ast.unparse(score))
        score = ast.BinOp(ast.Name("s", ast.Load()), ast.Add(), score) if forgets else score
        conditions += [] if made.visible is None else [made.visible]
    mask = agreed(joined(ast.And, *conditions), {t.name for t in tracer.tables.values() if t.dtype == "int32"})
    shown = isinstance(mask, ast.Name) and mask.id == "true"
    plain = isinstance(score, ast.Name) and score.id == "s"
    mask_text, mask_parts = (None, {}) if shown else _named(mask, "m")
    score_text, score_parts = (None, {}) if score is None or plain else _named(score, "x")
    traced = Traced(mask_text, mask_parts, score_text, score_parts, (), tuple(tracer.places), tracer.turns, forgets)
    return replace(traced, tables=tuple(t for t in tracer.tables.values() if traced.reads(t)))


def occurs(name: str, text: str) -> bool:
    """Whether a name is one of the words of a text."""
    return re.search(rf"\b{name}\b", text) is not None


class _Tracer:
    """Traces functions one after the other. Their tensors are named together."""

    def __init__(self, positions: tuple[str, ...]) -> None:
        self.positions = positions
        self.tables: dict[int, Table] = {}
        self.turns: dict[str, int] = {}
        self.places: dict[Place, None] = {}  # in the order in which they are met
        self.where = ""  # the function, and the line of its operator

    def fresh(self, count: int) -> str:
        name = f"i{len(self.turns) + 1}" if self.turns else "i"
        self.turns[name] = count
        return name

    def noting(self) -> Note:
        """A function that notes the places of the current operator."""
        where, names = self.where, {table.name for table in self.tables.values()}

        def note(made: ast.expr, index: ast.expr, length: int) -> None:
            table = made.value.id if isinstance(made, ast.Subscript) and isinstance(made.value, ast.Name) else ""
            self.places[Place(where, table if table in names else "", ast.unparse(index), length)] = None

        return note

    def run(self, mod: Mod, score: bool) -> Value:
        """The value that a function gives."""
        what = "score_mod" if score else "mask_mod"
        inner = inspect.unwrap(getattr(mod, "func", mod))
        code = getattr(inner, "__code__", None)
        captured = [(name, x) for name, x in leaves(mod) if isinstance(x, torch.Tensor)]
        names = {id(x): name for name, x in reversed(captured)}
        device = next((x.device for _, x in captured), torch.device("cpu"))

        def at() -> str:
            return f"{what} `{_title(mod)}`" + (
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
            return self._result(operators.run(mod, inputs), names, mod, what, score)
        except TraceError:
            raise
        except Untold as error:
            raise TraceError(f"{at()}: {error}") from None
        except Exception as error:
            line = f", line {operators.line}" if operators.line else ""
            raise TraceError(f"{what} `{_title(mod)}`{line} cannot be traced: {_first_line(error)}") from None

    def _result(self, made: Any, names: dict[int, str], mod: Mod, what: str, score: bool) -> Value:
        wanted = "a number" if score else "a condition"
        made = self._captured(made, names) if isinstance(made, torch.Tensor) else made
        if not isinstance(made, Value) or made.shape:
            given = f"a tensor of shape {list(made.shape)}" if isinstance(made, Value) else f"`{type(made).__name__}`"
            raise TraceError(f"{what} `{_title(mod)}` gives {given}; expected {wanted}")
        if (made.kind == "bool") == score:
            raise TraceError(
                f"{what} `{_title(mod)}` gives {'a condition' if score else 'a number'}; expected {wanted}"
            )
        return made

    def _captured(self, tensor: torch.Tensor, names: dict[int, str]) -> Value:
        """A tensor that the function holds."""
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

    def _name(self, wanted: str) -> str:
        """A name that a parameter can have, and no other tensor has: as in the function, if it can be."""
        stem = re.sub("[^a-z0-9_]+", "_", wanted.lower()).strip("_")[:24] or "table"
        stem = stem if stem[0].isalpha() else f"t_{stem}"
        taken = stem in OF_OUTPUTS or re.fullmatch(r"[imx][0-9]*", stem)
        stem = f"my_{stem}" if taken or name_problem(stem) else stem
        known = {table.name for table in self.tables.values()}
        return next(name for name in (stem, *(f"{stem}_{n}" for n in range(2, 1000))) if name not in known)

    def _call(self, names: dict[int, str], operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """The value of an operator. A tensor of no dimension that the function makes of a number while it runs is
        that number."""
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
                raise Untold(
                    f"has no expression; expected arithmetic, comparisons, `torch.where` and the like, or {OUTSIDE}"
                )
            if name == "aten::detach" and _may_learn(args[0]):
                raise Untold(
                    "stops a gradient, which expressions do not; expected a tensor that was detached outside of the function"
                )
            args, kwargs = [*map(of, args)], {k: of(v) for k, v in kwargs.items() if k not in _NOT_USED}
            first = (self.fresh,) if found in REDUCTIONS else (self.noting(),) if found in READS else ()
            try:
                inspect.signature(found).bind(*first, *args, **kwargs)
            except TypeError:
                raise Untold(f"has no expression with these arguments; expected fewer, or {OUTSIDE}") from None
            made_of = found(*first, *args, **kwargs)
            return in_place(args[0], made_of) if changes else made_of
        except Untold as error:
            raise Untold(f"`{name}` {error}") from None


def _may_learn(x: Any) -> bool:
    """Whether a captured tensor, or a value, may have a gradient."""
    return x.requires_grad if isinstance(x, torch.Tensor) else x.kind == "real" and x.number is None


def _operator(target: Any) -> str:
    """An operator's name without its overload, as in `aten::add`."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else str(target)


def _title(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def leaves(mod: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and words that a function holds, by the names that it has for them, and those of the
    functions that it holds.

    Of what an object, a class or a module holds that is neither, those count that the function's code names.
    torch.compile can follow it: then it looks for changes of these as it does for those of what it reads itself.
    """
    said, within = _said_by(mod), (*within, _own(mod))
    for name, value in held(mod):
        yield from _leaves_of(name, value, said, within)
    yield from _named_of(mod.__self__ if inspect.ismethod(mod) else mod, said, within)
    for name, value in _global(mod, said):
        if isinstance(value, (type, ModuleType)):
            yield from _leaves_of(name, value, said, within)


def _leaves_of(name: str, value: Any, said: tuple[str, ...], within: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _leaves_of(f"{name}_{i}", x, said, within)
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from _leaves_of(f"{name}_{key}", x, said, within)
    elif len(within) > DEEPEST or any(_own(value) is x for x in within):
        return
    elif isinstance(value, (type, ModuleType)):
        for attribute in said:
            x = getattr(value, attribute, None)
            if isinstance(x, _PLAIN):
                yield attribute, x
    elif callable(value):
        yield from leaves(value, within)
        yield from _named_of(value, said, (*within, value))
    elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        for attribute, x in getattr(value, "__dict__", {}).items():
            if isinstance(x, _PLAIN):
                yield attribute, x
        yield from _named_of(value, said, (*within, value))


def _own(mod: Any) -> Any:
    """What is one object however often it is asked for: of a method its function."""
    return mod.__func__ if inspect.ismethod(mod) else mod


def _named_of(value: Any, said: tuple[str, ...], within: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Leaves of an object's attributes that a function's code names, but for those that are seen without it."""
    if inspect.isfunction(value) or isinstance(value, partial):
        return
    seen = getattr(value, "__dict__", {})
    for attribute in said:
        x = getattr(value, attribute, None)
        if not isinstance(x, _PLAIN) or attribute not in seen:
            yield from _leaves_of(attribute, x, said, within)


def _said_by(mod: Any) -> tuple[str, ...]:
    """The names that a function's code looks up, those of functions inside it included."""
    while isinstance(mod, partial):
        mod = mod.func
    code = getattr(mod, "__code__", None)  # a method has that of its function
    if code is None:
        code = getattr(
            getattr(mod, "forward" if isinstance(mod, torch.nn.Module) else "__call__", None), "__code__", None
        )
    return () if code is None else tuple(names_of(code))


def names_of(code: CodeType) -> Iterator[str]:
    """The names that code looks up, those of functions inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_of(inner)


def _global(mod: Any, said: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """What a function finds in its module under the names of its code."""
    found = getattr(mod, "__globals__", {})
    for name in said:
        if (value := found.get(name)) is not None:
            yield name, value


def held(mod: Any) -> Iterator[tuple[str, Any]]:
    """What a function depends on besides its arguments: names and values."""
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
    for name, value in _global(mod, _said_by(mod)):
        if not isinstance(value, (type, ModuleType)):
            yield name, value


def _named(e: ast.expr, letter: str) -> tuple[str, dict[str, str]]:
    """An expression's text, and its parts that occur more than once, under names of their own: each in terms of
    those before it."""
    parents: dict[int, int] = {}
    order: list[ast.expr] = []

    def visit(node: ast.expr) -> bool:
        """Count the places of a part; whether it has the name of a turn in it."""
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
    """A copy of an expression, with named parts as their names."""
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
