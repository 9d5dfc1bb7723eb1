"""The kinds of fields that ops have: how a field's value is written in text, and which values of the kernel it names.

An op declares the kind of a field by its annotation: `a: Ref` is an operand, `over: Word` a word, `src: Access` a
position in a tensor, which is an operand, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

import sympy

from attngen.errors import IRError
from attngen.ir.core import Access, Fact, Type
from attngen.ir.expr_text import parse, to_text

Names = Mapping[str, str]  # old name -> new name


def split(text: str, separator: str) -> list[str]:
    """Split at separators outside brackets."""
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == separator and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    return [p for p in (*parts, current) if p.strip()]


def print_type(t: Type) -> str:
    return f"{t.dtype}[{', '.join(t.dims)}] @{t.space}"


def parse_type(text: str, where: str) -> Type:
    match = re.fullmatch(r"(\w+)\[([\w/, *]*)\] @(hbm|sram|reg|flight|\?)", text.strip())
    if not match:
        raise IRError(f"{where}: `{text.strip()}` is not a type; expected `f32[BLOCK_Q, D_V] @reg`")
    dims = tuple(d.strip() for d in match[2].split(",") if d.strip())
    return Type(match[1], dims, match[3])


def print_access(a: Access) -> str:
    return f"%{a.tensor}[{', '.join(to_text(i) for i in a.index)}]"


def parse_access(text: str, where: str) -> Access:
    match = re.fullmatch(r"%([\w.]+)\[(.*)\]", text)
    if not match:
        raise IRError(f"{where}: `{text}` is not an access; expected `%K[b, h, kv, d_qk]`")
    return Access(match[1], tuple(parse(i, where) for i in split(match[2], ",")))


def parse_word(text: str, where: str) -> str:
    if not re.fullmatch(r"@?\w+", text):
        raise IRError(f"{where}: `{text}` is not a word")
    return text.removeprefix("@")


def _parse_ref(text: str, where: str) -> str:
    if not re.fullmatch(r"%\w+(\.\w+)?", text):
        raise IRError(f"{where}: `{text}` is not a value; expected `%name` or `%name.field`")
    return text[1:]


def _parse_uses(text: str, where: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in split(text, ",")]
    return tuple((parse_word(k.strip(), where), _parse_ref(v.strip(), where)) for k, _, v in pairs)


def _parse_ranges(text: str, where: str) -> Any:
    ranges = []
    for part in split(text, ","):
        lo, dots, hi = part.partition("..")
        if not dots:
            raise IRError(f"{where}: `{part.strip()}` is not a range; expected `0 .. cdiv(Nk, BLOCK_KV)`")
        ranges.append((parse(lo, where), parse(hi, where)))
    return tuple(ranges)


def _parse_checks(text: str, where: str) -> Any:
    checks = []
    for part in split(text, ","):
        axis, _, when = part.strip().partition(" if ")
        checks.append((parse_word(axis, where), parse_word(when.strip() or "always", where)))
    return tuple(checks)


def _print_facts(facts: tuple[Fact, ...]) -> str:
    return ", ".join(f"{to_text(f.literal)} needs {to_text(f.needs)} enough {to_text(f.enough)}" for f in facts)


def _parse_facts(text: str, where: str) -> tuple[Fact, ...]:
    facts = []
    for part in split(text, ","):
        match = re.fullmatch(r"(.+) needs (.+) enough (.+)", part.strip())
        if not match:
            raise IRError(
                f"{where}: `{part.strip()}` is not a fact; expected `padding needs kv_idx < last enough kv_idx < first`"
            )
        facts.append(Fact(*(parse(match[i], where) for i in (1, 2, 3))))
    return tuple(facts)


def _parse_refs(text: str, where: str) -> tuple[str, ...]:
    return tuple(_parse_ref(part.strip(), where) for part in split(text, ","))


def _parse_sizes(text: str, where: str) -> Any:
    pairs = [part.partition("=") for part in split(text, ",")]
    return tuple((parse_word(k.strip(), where), parse(v, where)) for k, _, v in pairs)


def _parse_places(text: str, where: str) -> tuple[str, ...]:
    parts = (part.strip() for part in split(text, ","))
    return tuple(part if part == ":" else to_text(parse(part, where)) for part in parts)


def _parse_count(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise IRError(f"{where}: `{text}` is not a whole number")
    return int(text)


@dataclass(frozen=True)
class Kind:
    """The kind of a field.

    print, parse: write its value as text, and read it; `parse(text, where)` raises IRError with `where`.
    refs: the values of the kernel that it names; None if it is no operand.
    renamed: its value with these renamed.
    empty: its value where the text leaves it out, if the field has no default.
    """

    print: Callable[[Any], str]
    parse: Callable[[str, str], Any]
    refs: Callable[[Any], Iterable[str]] | None = None
    renamed: Callable[[Any, Names], Any] | None = None
    empty: Any = None


WORD = Kind(str, parse_word)
COUNT = Kind(str, _parse_count)
TEXT = Kind(str, lambda text, where: text)
FLAG = Kind(lambda v: "yes", lambda text, where: True)
BLOCK = Kind(lambda v: f"@{v}", parse_word)
TYPE = Kind(print_type, parse_type)
EXPR = Kind(to_text, parse)
EXPRS = Kind(lambda v: "; ".join(map(to_text, v)), lambda t, w: tuple(parse(x, w) for x in split(t, ";")), empty=())
RANGES = Kind(lambda v: ", ".join(f"{to_text(lo)} .. {to_text(hi)}" for lo, hi in v), _parse_ranges, empty=())
CHECKS = Kind(lambda v: ", ".join(a if w == "always" else f"{a} if {w}" for a, w in v), _parse_checks)
FACTS = Kind(_print_facts, _parse_facts)
WORDS = Kind(", ".join, lambda t, w: tuple(parse_word(x.strip(), w) for x in split(t, ",")))
SIZES = Kind(lambda v: ", ".join(f"{k}={to_text(e)}" for k, e in v), _parse_sizes)
PLACES = Kind(", ".join, _parse_places)
# Kinds of operands.
REF = Kind(lambda v: f"%{v}", _parse_ref, lambda v: (v,), lambda v, names: names.get(v, v))
REFS = Kind(
    lambda v: ", ".join(f"%{r}" for r in v),
    _parse_refs,
    lambda v: v,
    lambda v, names: tuple(names.get(r, r) for r in v),
)
USES = Kind(
    lambda v: ", ".join(f"{k}=%{r}" for k, r in v),
    _parse_uses,
    lambda v: (r for _, r in v),
    lambda v, names: tuple((k, names.get(r, r)) for k, r in v),
    (),
)
ACCESS = Kind(
    print_access,
    parse_access,
    lambda v: (v.tensor,),
    lambda v, names: replace(v, tensor=names.get(v.tensor, v.tensor)),
)

# The annotations of fields.
Word = Annotated[str, WORD]
Words = Annotated[tuple[str, ...], WORDS]
Text = Annotated[str, TEXT]  # for readers; its brackets match
BlockName = Annotated[str, BLOCK]
Exprs = Annotated[tuple[Any, ...], EXPRS]
Ranges = Annotated[tuple[tuple[Any, Any], ...], RANGES]  # (start, end) of each range
Checks = Annotated[tuple[tuple[str, str], ...], CHECKS]  # (axis letter, `always` or `partial`): bounds checks
Facts = Annotated[tuple[Fact, ...], FACTS]
Sizes = Annotated[tuple[tuple[str, Any], ...], SIZES]  # (size as a kernel names it, its value)
Places = Annotated[tuple[str, ...], PLACES]
Ref = Annotated[str, REF]  # `name`, or `name.field` for an op with several results
Refs = Annotated[tuple[str, ...], REFS]
Uses = Annotated[tuple[tuple[str, str], ...], USES]  # (symbol in the expression, value that it stands for)

_BY_TYPE: dict[Any, Kind] = {bool: FLAG, int: COUNT, Type: TYPE, Access: ACCESS, Any: EXPR}


def kind_of(annotation: Any) -> Kind:
    """The kind of a field with an annotation, such as `Ref` or `Ref | None`. Raises TypeError for one without."""
    options = [option for option in get_args(annotation) or (annotation,) if option is not type(None)]
    for option in (annotation, *options):
        if kinds := [kind for kind in getattr(option, "__metadata__", ()) if isinstance(kind, Kind)]:
            return kinds[0]
    for option in (annotation, *options):
        if option in _BY_TYPE:
            return _BY_TYPE[option]
    raise TypeError(f"`{annotation}` is no kind of field; expected one of attngen/ir/fields.py")


def expressions_in(value: Any) -> Iterator[Any]:
    """Yield the expressions in a field's value: an expression, an access, or a tuple of these."""
    if isinstance(value, sympy.Basic):
        yield value
    elif isinstance(value, Access):
        yield from value.index
    elif isinstance(value, tuple):
        for part in value:
            yield from expressions_in(part)
