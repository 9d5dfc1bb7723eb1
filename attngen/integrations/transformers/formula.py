"""Converts mask functions of transformers, of (batch, head, query, key), to masks of specs, once for each form.

A model makes new functions in every forward, from the same parts with other tensors. So traces are cached by the form
of a function: its code, and the numbers and functions that it holds. Tensors are inputs of the spec, and are taken from
the current function. A function that depends on anything else, such as an object of the user or a tensor's size, has no
form, and is traced in every forward.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import sympy
import torch

from attngen.errors import AttngenError
from attngen.frontends.specs import entry_of
from attngen.frontends.trace import held, names_of, trace
from attngen.frontends.tracer import joined
from attngen.masks import KV, Mask, Q
from attngen.masks.causal import Causal
from attngen.masks.sliding_window import SlidingWindow

MaskFunction = Callable[..., Any]
POSITIONS = ("b", "h", "q_pos", "kv_idx")  # a mask function counts queries among the keys
OFFSET = "kv_offset"  # input: the position of the first existing key, if a mask depends on more than distances
_DEPTH = 12  # maximum nesting of functions that hold functions
_MOST = 256  # number of cached formulas; one more clears the cache
# Names with which a function may read a tensor's size, which a trace writes out as a constant.
_OF_SIZES = frozenset(("len", "ndim", "ndimension", "nelement", "numel", "shape", "size"))


@dataclass(frozen=True, eq=False)
class Formula:
    """A mask in the form of a spec. There is one object for all functions with the same mask.

    parts: the masks whose conjunction it is; empty if every key is visible.
    tables: the tensors of the function that the spec takes: (name, its number, the dimensions that are read at a
    position).
    causal: whether no key after a query is visible. offset: whether the call has to pass the position of the first
    existing key.
    packed: whether queries see only their own sequence, of several that are packed into a row. why: the reason if there
    is no formula.
    """

    parts: tuple[Any, ...] = ()
    tables: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    causal: bool = False
    offset: bool = False
    packed: bool = False
    why: str = ""


_KNOWN: dict[Any, Formula] = {}  # by the form of functions
_SAME: dict[str, Formula] = {}  # by their contents


class _Formless(Exception):
    """A function depends on something that may change unnoticed."""


def formula(function: MaskFunction, offset: int) -> tuple[Formula, list[torch.Tensor]]:
    """Return the formula of a mask function, traced if its form is new, and the tensors that the function holds.

    offset: the position of the first existing key, above 0 for a sliding cache.
    """
    inside = _packed(function)
    rises = inside is not None and (inside[2] or _never_falls(inside[1]))
    tracing = _Tracing([], offset > 0, rises)
    try:
        form = (_form(function, tracing.tensors, 0), tracing.offset, rises)
    except _Formless:
        form, tracing = None, _Tracing([], offset > 0, rises, grows=True)
    if form is not None and form in _KNOWN:
        return _KNOWN[form], tracing.tensors
    made = _formula(function, tracing)
    if len(_SAME) >= _MOST:
        _SAME.clear()
        _KNOWN.clear()
    made = _SAME.setdefault(repr(made), made)
    if form is not None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[form] = made
    return made, tracing.tensors


def _form(x: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    """Return the form of a value: everything on which a trace depends. Append its tensors to `tensors`, in order.

    Raise _Formless if a trace depends on more.
    """
    if isinstance(x, torch.Tensor):
        number = next((i for i, y in enumerate(tensors) if y is x), len(tensors))
        tensors += [x] if number == len(tensors) else []
        return ("tensor", number, x.dtype, x.dim(), x.shape if x.dim() == 1 and x.shape[0] == 1 else None)
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device)):
        return (type(x), x)
    if isinstance(x, (list, tuple)):
        return tuple(_form(y, tensors, depth + 1) for y in x)
    if depth >= _DEPTH:
        raise _Formless
    if type(x) is partial:
        return (partial, *(_form(y, tensors, depth + 1) for y in (x.func, x.args, *sorted(x.keywords.items()))))
    if isinstance(x, BuiltinFunctionType) and (x.__self__ is None or isinstance(x.__self__, ModuleType)):
        return x
    if not isinstance(x, FunctionType):
        raise _Formless
    names = set(names_of(x.__code__))
    if not names.isdisjoint(_OF_SIZES):
        raise _Formless
    of_module = {name: x.__globals__[name] for name in sorted(names) if name in x.__globals__}
    parts = dict(held(x)) | {name: y for name, y in of_module.items() if y is not torch}
    return (x.__code__, *((name, _form(y, tensors, depth + 1)) for name, y in parts.items()))


@dataclass
class _Tracing:
    """One trace.

    tensors: those that the function holds. grows: whether the trace adds further tensors, because the function has no
    form and is traced in every forward.
    offset: whether the first keys do not exist any more. rises: for packed sequences, whether their numbers never fall
    along a row.
    """

    tensors: list[torch.Tensor]
    offset: bool
    rises: bool
    grows: bool = False

    def number(self, x: torch.Tensor) -> int | None:
        """Return the number of a tensor; None if the next function of the form would not have it."""
        found = next((i for i, y in enumerate(self.tensors) if y is x), None)
        if found is None and self.grows:
            self.tensors.append(x)
            return len(self.tensors) - 1
        return found


def _formula(function: MaskFunction, tracing: _Tracing) -> Formula:
    """Trace a mask function. Return a formula with `why` if that is not possible."""
    if (inside := _packed(function)) is not None:
        inner, ids, remapped = inside
        made = _formula(inner, tracing)
        made = in_documents(made) if remapped else _with_documents(made, tracing.rises)
        number = tracing.number(ids)
        if not made.why and number is not None:
            return replace(made, tables=(*made.tables, ("document_ids", number, (1,))))
    try:
        traced = trace(None, function, POSITIONS)
        if (text := _without_trivial(traced.mask)) is None:
            return Formula()
        data = entry_of(text, traced.mask_parts, traced, None, free=False)
        mask = read(data)
    except AttngenError as error:
        return Formula(why=str(error))
    if named := _named(mask, text):
        return Formula((named,), causal=_is_causal(mask))
    moves = tracing.offset and not _shifts(mask)
    if moves:
        if (moved := _moved(data)) is None:
            return Formula(
                why="the mask reads a tensor at computed positions, and the cache has dropped its first keys"
            )
        data = moved
    tables = []
    for table in traced.tables:
        if (number := tracing.number(table.tensor)) is None:
            return Formula(why=f"the mask reads the tensor `{table.name}`, which its function makes in every call")
        at = tuple(d for d in range(len(table.shape)) if {read[d] for read in table.reads} <= {"q_pos", "kv_idx"})
        tables.append((table.name, number, at))
    return Formula((data,), tuple(tables), _is_causal(mask), moves)


@cache
def in_documents(made: Formula) -> Formula:
    """Return the formula for packed sequences, in which positions count within each sequence and distances are
    unchanged."""
    if made.why or made.packed:
        return made
    if made.offset or made.tables or not all(_shifts(read(part)) for part in made.parts):
        return Formula(why="the mask depends on more than distances, and sequences are packed")
    return _with_documents(made)


def _with_documents(made: Formula, rises: bool = True) -> Formula:
    """Return the formula in conjunction with `document`. rises: the numbers of sequences never fall along a row."""
    if made.why:
        return made
    document = {"document": {"sorted": True}} if rises else "document"
    return replace(made, parts=(*made.parts, document), packed=True)


def read(data: Any) -> Mask:
    """Return the mask of a spec's data."""
    from attngen.spec import make_spec

    return make_spec({"name": "traced", "head_dim": 64, "mask": data}, "the mask function").mask


# ------------------------------------------------------------------------------------- functions of transformers


def _packed(function: MaskFunction) -> tuple[MaskFunction, torch.Tensor, bool] | None:
    """Split a function for packed sequences into the remaining function, the sequence number of each position, and
    whether the remaining function takes positions within each sequence instead of positions in the row. Return None for
    other functions.
    """
    parts = dict(held(function)).get("mask_functions")
    if (
        not isinstance(parts, tuple)
        or len(parts) != 2
        or not getattr(function, "__qualname__", "").startswith("and_masks.")
    ):
        return None
    whose = [getattr(part, "__qualname__", "").split(".")[0] for part in parts]
    if "packed_sequence_mask_function" not in whose:
        return None
    at = whose.index("packed_sequence_mask_function")
    ids, rest = dict(held(parts[at])).get("packed_sequence_mask"), parts[1 - at]
    remapped = whose[1 - at] == "remap_positions_for_packed_sequence"
    rest = dict(held(rest)).get("mask_function") if remapped else rest
    if (
        not callable(rest)
        or not isinstance(ids, torch.Tensor)
        or ids.dim() != 2
        or ids.dtype not in (torch.int32, torch.int64)
    ):
        return None
    return rest, ids, remapped


def of_rows(function: MaskFunction) -> MaskFunction:
    """Return a mask function without the packed sequences that transformers found, or mistook, in positions of only
    some rows of a sequence."""
    inside = _packed(function)
    return function if inside is None else inside[0]


def _never_falls(ids: torch.Tensor) -> bool:
    """True if the numbers of sequences never fall along a row. This waits for the device, as transformers does."""
    return ids.is_meta or not bool((ids.diff(dim=1) < 0).any())


# ------------------------------------------------------------------------------------- analysis of formulas


def _named(mask: Mask, text: str) -> Any:
    """Return the predefined mask that is equal to this one, `causal` or a sliding window; None if there is none."""
    conditions = _conditions(mask)
    if conditions == _conditions(Causal()):
        return "causal"
    numbers = {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, int)
    }
    for number in sorted(n for n in numbers if n > 0):
        for left, right in ((number - 1, 0), (number, number)):
            if conditions == _conditions(SlidingWindow(left=left, right=right)):
                return {"sliding_window": {"left": left, "right": right}}
    return None


def _without_trivial(text: str | None) -> str | None:
    """Return a mask's text without `q_pos >= 0`, which is always true; None if nothing is left."""
    if text is None:
        return None
    e = ast.parse(text, mode="eval").body
    parts = e.values if isinstance(e, ast.BoolOp) and isinstance(e.op, ast.And) else [e]
    left = [part for part in parts if ast.unparse(part) not in ("q_pos >= 0", "0 <= q_pos")]
    return ast.unparse(joined(ast.And, *left)) if left else None


def _conditions(mask: Mask) -> frozenset[Any]:
    """Return the conditions whose conjunction a mask is, each in normal form."""
    return _flat(mask.expression())


def _flat(e: Any) -> frozenset[Any]:
    """Return the conjuncts of a condition in normal form; |x| <= c becomes two."""
    parts = [e] if not isinstance(e, sympy.And) else e.args
    found: list[Any] = []
    for part in parts:
        within = isinstance(part, sympy.Le) and isinstance(part.lhs, sympy.Abs)
        found += [part.lhs.args[0] <= part.rhs, -part.lhs.args[0] <= part.rhs] if within else [part]
    return frozenset(map(_form_of, found))


def _form_of(e: Any) -> Any:
    """Return a condition with comparisons of integers in the form `x >= 0`."""

    def one(r: Any) -> Any:
        x = sympy.expand(r.lhs - r.rhs)
        if not x.is_integer or isinstance(r, (sympy.Eq, sympy.Ne)):
            return type(r).__name__, x
        x = -x if isinstance(r, (sympy.Lt, sympy.Le)) else x
        return "at_least", sympy.expand(x - 1 if isinstance(r, (sympy.Lt, sympy.Gt)) else x)

    if isinstance(e, sympy.core.relational.Relational):
        return one(e)
    return (e.func, tuple(map(_form_of, e.args))) if isinstance(e, (sympy.And, sympy.Or, sympy.Not)) else e


def _is_causal(mask: Mask) -> bool:
    return not _conditions(Causal()).isdisjoint(_conditions(mask))


def _shifts(mask: Mask) -> bool:
    """True if a mask stays the same when all positions are shifted by the same number."""
    by = sympy.Dummy("by", integer=True, nonnegative=True)
    return _flat(mask.expression().subs({Q: Q + by, KV: KV + by}, simultaneous=True)) == _conditions(mask)


class _AddOffset(ast.NodeTransformer):
    """Adds the offset to positions, so that they count from the first key of the sequence, except in indices of
    tensors, which have only the existing keys."""

    computed = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_position = node.id in ("q_pos", "kv_idx")
        return ast.BinOp(node, ast.Add(), ast.Name(OFFSET, ast.Load())) if is_position else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        inside = [x for e in index if not isinstance(e, ast.Name) for x in ast.walk(e)]
        self.computed |= any(isinstance(x, ast.Name) and x.id in ("q_pos", "kv_idx") for x in inside)
        return node


def _moved(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return a spec's mask with the position of the first existing key as an input; None if a tensor is read at a
    computed position."""
    change = _AddOffset()
    texts = {
        name: ast.unparse(change.visit(ast.parse(text, mode="eval")))
        for name, text in {**data.get("let", {}), "": data["expr"]}.items()
    }
    if change.computed:
        return None
    let = {name: text for name, text in texts.items() if name}
    params = {**data.get("params", {}), OFFSET: {"scalar": "int"}}
    return {"expr": texts[""], **({"let": let} if let else {}), "params": params}
