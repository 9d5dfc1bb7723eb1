"""What the mask functions of transformers say: functions of (batch, head, query, key) become the mask of a spec, once
for each kind.

A model makes such functions anew in every forward, out of the same pieces with other tensors. So what was traced is
kept by the function's
form: its code, and the numbers and functions that it holds. Tensors are inputs of the spec, and are taken from the
function at hand. A function that depends on anything else, such as an object of the user's or a tensor's size, has no
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
from attngen.frontends.specs import written
from attngen.frontends.trace import held, names_of, trace
from attngen.frontends.tracer import joined
from attngen.masks import KV, Mask, Q
from attngen.masks.causal import Causal
from attngen.masks.sliding_window import SlidingWindow

MaskFunction = Callable[..., Any]
POSITIONS = ("b", "h", "q_pos", "kv_idx")  # a mask function counts queries among the keys
OFFSET = "kv_offset"  # the position of the first key at hand, where a mask depends on more than distances
_DEPTH = 12  # functions that hold functions
_MOST = 256  # formulas that are kept; with one more all are forgotten
_OF_SIZES = frozenset(
    ("len", "ndim", "ndimension", "nelement", "numel", "shape", "size")
)  # what a trace writes out of a tensor's size


@dataclass(frozen=True, eq=False)
class Formula:
    """A mask as a spec says it. There is one object for all functions that say the same.

    parts: the masks of which all must hold; none where every key is visible.
    tables: the tensors of the function that the spec takes, and how: name -> (its number, the dimensions that are read
    at a position).
    causal: no key after a query is visible. offset: whether the call says where the keys at hand begin.
    packed: whether queries see their own sequence alone, of those that lie one after the other. why: the reason, where
    there is no formula.
    """

    parts: tuple[Any, ...] = ()
    tables: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    causal: bool = False
    offset: bool = False
    packed: bool = False
    why: str = ""


_KNOWN: dict[Any, Formula] = {}  # by the form of functions
_SAME: dict[str, Formula] = {}  # by what they say


class _Formless(Exception):
    """A function depends on what may change without notice."""


def formula(function: MaskFunction, offset: int) -> tuple[Formula, list[torch.Tensor]]:
    """The formula of a mask function, traced where its form is new, and the tensors that the function holds.

    offset: the position of the first key at hand, as a sliding cache has it.
    """
    inside = _packed(function)
    rises = inside is not None and (inside[2] or _never_falls(inside[1]))
    tracing = _Tracing([], offset > 0, rises)
    try:
        form = (_form(function, tracing.tensors, 0), tracing.offset, rises)
    except _Formless:
        form, tracing = None, _Tracing([], offset > 0, rises, anew=True)
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
    """What a value is, so far as a trace depends on it. Its tensors are listed in the order in which they are met.

    Raises _Formless: the trace depends on more.
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

    tensors: those that the function holds. anew: the function is traced in every forward, and tensors that the trace
    meets are added.
    offset: whether the keys at hand begin after the first. rises: of packed sequences, whether their numbers never fall
    along a row.
    """

    tensors: list[torch.Tensor]
    offset: bool
    rises: bool
    anew: bool = False

    def number(self, x: torch.Tensor) -> int | None:
        """The number of a tensor; None where the next function of the form would not have it."""
        found = next((i for i, y in enumerate(self.tensors) if y is x), None)
        if found is None and self.anew:
            self.tensors.append(x)
            return len(self.tensors) - 1
        return found


def _formula(function: MaskFunction, tracing: _Tracing) -> Formula:
    """Trace a mask function; a formula with a reason where that cannot be."""
    if (inside := _packed(function)) is not None:
        inner, ids, remapped = inside
        made = _formula(inner, tracing)
        made = in_documents(made) if remapped else _joined(made, tracing.rises)
        number = tracing.number(ids)
        if not made.why and number is not None:
            return replace(made, tables=(*made.tables, ("document_ids", number, (1,))))
    try:
        traced = trace(None, function, POSITIONS)
        if (text := _said(traced.mask)) is None:
            return Formula()
        data = written(text, traced.mask_parts, traced, None, free=False)
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
        if (own := tracing.number(table.tensor)) is None:
            return Formula(why=f"the mask reads the tensor `{table.name}`, which its function makes anew")
        at = tuple(d for d in range(len(table.shape)) if {read[d] for read in table.reads} <= {"q_pos", "kv_idx"})
        tables.append((table.name, own, at))
    return Formula((data,), tuple(tables), _is_causal(mask), moves)


@cache
def in_documents(made: Formula) -> Formula:
    """The formula inside each of several sequences, one after the other: positions count within each, and distances
    are the same."""
    if made.why or made.packed:
        return made
    if made.offset or made.tables or not all(_shifts(read(part)) for part in made.parts):
        return Formula(why="the mask depends on more than distances, and sequences are packed")
    return _joined(made)


def _joined(made: Formula, rises: bool = True) -> Formula:
    """The formula, where a query also sees its own sequence alone. rises: the sequences are numbered as they lie."""
    return (
        made
        if made.why
        else replace(made, parts=(*made.parts, {"document": {"sorted": True}} if rises else "document"), packed=True)
    )


def read(data: Any) -> Mask:
    """The mask of a spec's data."""
    from attngen.spec import make_spec

    return make_spec({"name": "traced", "head_dim": 64, "mask": data}, "the mask function").mask


# ------------------------------------------------------------------------------------------------ what transformers makes


def _packed(function: MaskFunction) -> tuple[MaskFunction, torch.Tensor, bool] | None:
    """Of a function for packed sequences: the rest of it, the number of each position's sequence, and whether the rest
    is of positions inside each sequence, in place of positions in the row.
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


def _never_falls(ids: torch.Tensor) -> bool:
    """Whether the numbers of sequences never fall along a row. transformers has waited for them, too."""
    return ids.is_meta or not bool((ids.diff(dim=1) < 0).any())


# ------------------------------------------------------------------------------------------------ what formulas say


def _named(mask: Mask, text: str) -> Any:
    """The name of a mask that attngen has under one: causal, or a window."""
    said = _conditions(mask)
    if said == _conditions(Causal()):
        return "causal"
    numbers = {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, int)
    }
    for number in sorted(n for n in numbers if n > 0):
        for left, right in ((number - 1, 0), (number, number)):
            if said == _conditions(SlidingWindow(left=left, right=right)):
                return {"sliding_window": {"left": left, "right": right}}
    return None


def _said(text: str | None) -> str | None:
    """A mask's text without `q_pos >= 0`, which holds of all positions; None where nothing is left."""
    if text is None:
        return None
    e = ast.parse(text, mode="eval").body
    parts = e.values if isinstance(e, ast.BoolOp) and isinstance(e.op, ast.And) else [e]
    left = [part for part in parts if ast.unparse(part) not in ("q_pos >= 0", "0 <= q_pos")]
    return ast.unparse(joined(ast.And, *left)) if left else None


def _conditions(mask: Mask) -> frozenset[Any]:
    """The conditions of which all must hold, each in one form."""
    return _flat(mask.expression())


def _flat(e: Any) -> frozenset[Any]:
    """A condition as those of which all must hold; |x| <= c is two."""
    parts = [e] if not isinstance(e, sympy.And) else e.args
    found: list[Any] = []
    for part in parts:
        within = isinstance(part, sympy.Le) and isinstance(part.lhs, sympy.Abs)
        found += [part.lhs.args[0] <= part.rhs, -part.lhs.args[0] <= part.rhs] if within else [part]
    return frozenset(map(_form_of, found))


def _form_of(e: Any) -> Any:
    """A condition, with comparisons of integers as `x >= 0`."""

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
    """Whether one of the conditions hides every later key."""
    return not _conditions(Causal()).isdisjoint(_conditions(mask))


def _shifts(mask: Mask) -> bool:
    """Whether a mask says the same of positions that are all moved by as much."""
    by = sympy.Dummy("by", integer=True, nonnegative=True)
    return _flat(mask.expression().subs({Q: Q + by, KV: KV + by}, simultaneous=True)) == _conditions(mask)


class _Moved(ast.NodeTransformer):
    """Positions in a text, counted from the first key of the sequence; tensors are read at those of the keys at
    hand."""

    computed = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        there = node.id in ("q_pos", "kv_idx")
        return ast.BinOp(node, ast.Add(), ast.Name(OFFSET, ast.Load())) if there else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        inside = [x for e in index if not isinstance(e, ast.Name) for x in ast.walk(e)]
        self.computed |= any(isinstance(x, ast.Name) and x.id in ("q_pos", "kv_idx") for x in inside)
        return node


def _moved(data: dict[str, Any]) -> dict[str, Any] | None:
    """A written mask that is told where the keys at hand begin; None if a tensor is read at a computed position."""
    change = _Moved()
    texts = {
        name: ast.unparse(change.visit(ast.parse(text, mode="eval")))
        for name, text in {**data.get("let", {}), "": data["expr"]}.items()
    }
    if change.computed:
        return None
    let = {name: text for name, text in texts.items() if name}
    params = {**data.get("params", {}), OFFSET: {"scalar": "int"}}
    return {"expr": texts[""], **({"let": let} if let else {}), "params": params}
