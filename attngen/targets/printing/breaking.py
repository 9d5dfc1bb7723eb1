"""Breaks long lines of generated code: before the operators of lowest precedence, and inside brackets.

Printed code has spaces around every binary operator, and no space after a unary one.
"""

from __future__ import annotations

import re

_LEVELS = ("or", "and", "== != < <= > >=", "|", "&", "+ -", "* / // %")  # from the lowest precedence
_LEVEL = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()}
_SIGN = re.compile(r" (or|and|==|!=|<=|>=|<|>|\||&|\+|-|\*|//|/|%) ")


def statement(text: str, most: int) -> str:
    """Break a statement into lines of at most `most` characters, if possible. A value or condition broken at
    operators gets brackets."""
    if len(text) > most and (head := re.fullmatch(r"(if|while) (.*):", text)) and _breaks(without_texts(head[2])):
        return "\n".join(
            [f"{head[1]} (", *(f"    {line}" for line in expression(head[2], most - 4).splitlines()), "):"]
        )
    name, _, value = text.partition(" = ")
    if len(text) <= most or not re.fullmatch(r"\w+", name):
        return expression(text, most)
    if _breaks(without_texts(value)):
        return "\n".join([f"{name} = (", *(f"    {line}" for line in expression(value, most - 4).splitlines()), ")"])
    return f"{name} = {expression(value, most)}"


def expression(text: str, most: int) -> str:
    """Break an expression inside brackets into lines of at most `most` characters, if possible."""
    if len(text) <= most:
        return text
    plain = without_texts(text)
    breaks = _breaks(plain)
    if breaks:
        pieces = [text[start:end] for start, end in zip([0, *(at + 1 for at in breaks)], [*breaks, len(text)])]
        return "\n".join(
            expression(pieces[0], most) if i == 0 else _operand(piece, most) for i, piece in enumerate(pieces)
        )
    pairs = brackets(plain)
    if not pairs:
        return text
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    items = parted(text, start + 1, end)
    after = comma_after(items, text[start - 1 : start + 1])
    lines = ("    " + expression(item, most - 4).replace("\n", "\n    ") + after for item in items if item)
    return "\n".join([text[: start + 1], *lines, text[end:]])


def parted(text: str, start: int, end: int) -> list[str]:
    """Split text[start:end] at the commas outside of brackets; after a trailing comma the last item is empty."""
    plain = without_texts(text)
    commas = [i for i in outermost(plain, start, end) if plain[i] == ","]
    return [text[a:b].strip() for a, b in zip([start, *(i + 1 for i in commas)], [*commas, end])]


def comma_after(items: list[str], opening: str) -> str:
    """Return the text that follows each item on its own line: a comma in lists and calls. `opening` is the bracket and
    the character before it."""
    return "," if len(items) > 1 or (re.fullmatch(r"\w\(", opening) and " for " not in items[0]) else ""


def _operand(piece: str, most: int) -> str:
    """Break an operator and its operand."""
    sign, _, rest = piece.partition(" ")
    return f"{sign} {expression(rest, most - len(sign) - 1)}"


def without_texts(text: str) -> str:
    """Replace quoted strings by underscores, because brackets, commas and operators in them do not count."""
    return re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), text)


def outermost(plain: str, start: int, end: int) -> list[int]:
    """Return the positions from `start` up to `end` outside of brackets, including the outermost brackets
    themselves."""
    places, depth = [], 0
    for i in range(start, end):
        depth -= plain[i] in ")]"
        if depth == 0:
            places.append(i)
        depth += plain[i] in "(["
    return places


def brackets(plain: str) -> list[tuple[int, int]]:
    """Return the positions at which each outermost pair of brackets opens and closes."""
    places = outermost(plain, 0, len(plain))
    return list(zip((i for i in places if plain[i] in "(["), (i for i in places if plain[i] in ")]")))


def _breaks(plain: str) -> list[int]:
    """Return the positions of spaces before the lowest-precedence operators that are outside brackets."""
    outside = set(outermost(plain, 0, len(plain)))
    found = [
        (match.start(), _LEVEL[match[1]])
        for match in re.finditer(rf"(?={_SIGN.pattern})", plain)
        if match.start() in outside
    ]
    least = min((level for _, level in found), default=0)
    return [at for at, level in found if level == least]
