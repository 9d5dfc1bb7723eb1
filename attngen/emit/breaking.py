"""Long lines of generated code, broken: before the operators that bind least, and inside of brackets.

What is printed puts spaces around every operator of two sides, and none after one of one side.
"""

from __future__ import annotations

import re

_LEVELS = ("== != < <= > >=", "|", "&", "+ -", "* / // %")  # from those that bind least
_LEVEL = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()}
_SIGN = re.compile(r" (==|!=|<=|>=|<|>|\||&|\+|-|\*|//|/|%) ")


def statement(text: str, most: int) -> str:
    """A statement on lines of at most so many characters, if it can be: the value of an assignment gets brackets of its own."""
    name, _, value = text.partition(" = ")
    if len(text) <= most or not re.fullmatch(r"\w+", name):
        return expression(text, most)
    if _cuts(_plain(value)):
        return "\n".join([f"{name} = (", *(f"    {line}" for line in expression(value, most - 4).splitlines()), ")"])
    return f"{name} = {expression(value, most)}"


def expression(text: str, most: int) -> str:
    """An expression that stands in brackets already."""
    if len(text) <= most:
        return text
    plain = _plain(text)
    cuts = _cuts(plain)
    if cuts:
        pieces = [text[start:end] for start, end in zip([0, *(at + 1 for at in cuts)], [*cuts, len(text)])]
        return "\n".join(expression(pieces[0], most) if i == 0 else _operand(piece, most) for i, piece in enumerate(pieces))
    groups = _groups(plain)
    if not groups:
        return text
    start, end = max(groups, key=lambda group: group[1] - group[0])
    items, at = [], start + 1
    for comma in [i for i in _outermost(plain, start + 1, end) if plain[i] == ","] + [end]:
        items.append(text[at:comma].strip())
        at = comma + 1
    after = "," if len(items) > 1 or re.match(r"\w", text[start - 1 : start]) else ""
    lines = ("    " + expression(item, most - 4).replace("\n", "\n    ") + after for item in items if item)
    return "\n".join([text[: start + 1], *lines, text[end:]])


def _operand(piece: str, most: int) -> str:
    """An operator and what follows it."""
    sign, _, rest = piece.partition(" ")
    return f"{sign} {expression(rest, most - len(sign) - 1)}"


def _plain(text: str) -> str:
    """The text without what is in quotes, where brackets, commas and operators mean nothing."""
    return re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), text)


def _outermost(plain: str, start: int, end: int) -> list[int]:
    """The places between two that are in no brackets."""
    places, depth = [], 0
    for i in range(start, end):
        depth -= plain[i] in ")]"
        if depth == 0:
            places.append(i)
        depth += plain[i] in "(["
    return places


def _groups(plain: str) -> list[tuple[int, int]]:
    """Where the outermost brackets open and close."""
    places = _outermost(plain, 0, len(plain))
    return list(zip((i for i in places if plain[i] in "(["), (i for i in places if plain[i] in ")]")))


def _cuts(plain: str) -> list[int]:
    """The spaces before the outermost operators that bind least."""
    outermost = set(_outermost(plain, 0, len(plain)))
    found = [(match.start(), _LEVEL[match[1]]) for match in re.finditer(rf"(?={_SIGN.pattern})", plain) if match.start() in outermost]
    least = min((level for _, level in found), default=0)
    return [at for at, level in found if level == least]
