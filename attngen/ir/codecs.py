"""The textual form of ops' fields: each field has a codec, which prints and parses its values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attngen.errors import IRError
from attngen.ir.core import Access, Fact, Type
from attngen.ir.expr_text import parse, to_text


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


def _parse_ref(text: str, where: str) -> str:
    if not re.fullmatch(r"%\w+(\.\w+)?", text):
        raise IRError(f"{where}: `{text}` is not a value; expected `%name` or `%name.field`")
    return text[1:]


def parse_word(text: str, where: str) -> str:
    if not re.fullmatch(r"@?\w+", text):
        raise IRError(f"{where}: `{text}` is not a word")
    return text.removeprefix("@")


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


Codec = tuple[Callable[[Any], str], Callable[[str, str], Any]]
_REF: Codec = (lambda v: f"%{v}", _parse_ref)
_WORD: Codec = (str, parse_word)
_EXPR: Codec = (to_text, parse)
_ACCESS: Codec = (print_access, parse_access)
_FLAG: Codec = (lambda v: "yes", lambda t, w: True)
_USES: Codec = (lambda v: ", ".join(f"{k}=%{r}" for k, r in v), _parse_uses)
_RANGES: Codec = (lambda v: ", ".join(f"{to_text(lo)} .. {to_text(hi)}" for lo, hi in v), _parse_ranges)
_CODECS: dict[str, Codec] = {
    "type": (print_type, parse_type),
    **dict.fromkeys(("src", "dst", "semaphore"), _ACCESS),
    **dict.fromkeys(
        ("a", "b", "acc", "value", "s", "m", "scale", "shift", "seed", "threshold", "keep", "pages", "columns_of"), _REF
    ),
    **dict.fromkeys(("listed", "tile_indices", "round_robin", "pipeline", "metadata_of", "page"), _REF),
    **dict.fromkeys(("staging", "base", "rows"), _REF),
    **dict.fromkeys(("uses", "values", "carry"), _USES),
    **dict.fromkeys(("expr", "where", "unswitch", "other", "head", "tile", "stages", "order", "most"), _EXPR),
    **dict.fromkeys(
        (
            "role",
            "var",
            "cls",
            "over",
            "precision",
            "when",
            "guard",
            "op",
            "by",
            "via",
            "per_instance",
            "to",
            "do",
            "first_along",
        ),
        _WORD,
    ),
    **dict.fromkeys(
        (
            "score",
            "recompute",
            "fetches",
            "reversed",
            "kept",
            "in_order",
            "mbarrier_release",
            "exchange",
            "ends",
            "by_tile",
            "early",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("like", "otherwise", "into", "full"), _REF),
    **dict.fromkeys(
        ("body", "then", "orelse", "kernel", "first", "step", "last", "skip", "odd", "pair"),
        (lambda v: f"@{v}", parse_word),
    ),
    "args": _USES,
    "own": _WORD,
    "fill": _EXPR,
    "fill_where": _EXPR,
    "fresh": _FLAG,
    **dict.fromkeys(("of", "keep_alive"), (lambda v: ", ".join(f"%{r}" for r in v), _parse_refs)),
    "sizes": (lambda v: ", ".join(f"{k}={to_text(e)}" for k, e in v), _parse_sizes),
    "at": (", ".join, _parse_places),
    **dict.fromkeys(("least", "columns"), (str, _parse_count)),
    "ranges": _RANGES,
    "heads": _RANGES,
    "needed": _RANGES,
    "tiles": (lambda v: "; ".join(map(to_text, v)), lambda t, w: tuple(parse(x, w) for x in split(t, ";"))),
    "known": (_print_facts, _parse_facts),
    "check": (lambda v: ", ".join(a if w == "always" else f"{a} if {w}" for a, w in v), _parse_checks),
}


_WORDS: Codec = (", ".join, lambda t, w: tuple(parse_word(x.strip(), w) for x in split(t, ",")))
_BY_KIND: dict[str, dict[str, Codec]] = {
    "work_loop": {"of": (lambda v: f"@{v}", parse_word)},
    "init": {"value": _EXPR},
    "pipelined_loop": {"partial": _RANGES, "full": _RANGES, "instance_partial": _RANGES},
    "producer_store": {"metadata": _USES},
    **dict.fromkeys(("read_metadata", "read_tile_start"), {"tile": _REF}),
    "sum": {"over": _WORDS},
    **dict.fromkeys(("seed", "list_position", "view", "copy", "classify_blocks", "list_blocks"), {"src": _REF}),
}
# Words of the header's lines `mask` and `score` -> fields of Meaning.
MASKS = {"where": "where", "by_key": "by_key", "known": "known"}
SCORES = {"expr": "score", "sink": "sink"}
MEANING: dict[str, Codec] = {
    **dict.fromkeys(("where", "by_key", "expr", "sink"), _EXPR),
    "known": (_print_facts, _parse_facts),
}


def codecs_of(kind: str) -> dict[str, Codec]:
    """The codec of each field of an op, by name. Some kinds override a field's codec: the value of an init is a number,
    for example, and the source of a view is a whole value."""
    return {**_CODECS, **_BY_KIND.get(kind, {})}


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
