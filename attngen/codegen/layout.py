"""Lays out generated source in lines that fit: calls, assignments and lists that are too long are broken at their
commas."""

from __future__ import annotations

import re

from attngen.codegen.breaking import brackets, comma_after, parted, statement, without_texts

WIDTH = 100
LONGEST = 120  # characters of an assignment, without its indentation
MOST = 124  # characters of each line of an assignment that is broken at its brackets alone


def call(name: str, args: list[str]) -> str:
    """A call on one line if it fits, else with one argument a line."""
    line = f"{name}({', '.join(args)})"
    if len(line) <= WIDTH - 12:
        return line
    return short(_one_a_line(name, args), line)


def tuple_text(items: list[str]) -> str:
    """The source of a tuple; empty text if there are no items."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if items else ""


def assign(var: str, expr: str) -> str:
    """An assignment on one line if it fits; else a call has one argument a line, and a pointer one stride a line."""
    line = f"{var} = {expr}"
    if len(line) > LONGEST and re.fullmatch(r"\w+( \+ [\w.]+\([^()]*\) \* \w+)+", expr):  # a pointer: one stride a line
        first, *rest = re.split(r" \+ (?=tl)", expr)
        return "\n".join([f"{var} = (", f"    {first}", *(f"    + {term}" for term in rest), ")"])
    return short(broken(line, LONGEST), line)


def fold(line: str, most: int = LONGEST) -> str:
    """A statement on lines that fit."""
    return line if len(line) <= most else short(broken(line, most), line)


def short(parts: str, line: str) -> str:
    """`parts`, a statement broken at its brackets, if all its lines fit; else the statement `line`, broken at its
    operators too."""
    return statement(line, LONGEST) if any(len(part) > MOST for part in parts.splitlines()) else parts


def unpack(names: list[str], value: str) -> str:
    """An assignment of a value's parts to names; the names get brackets if they do not fit on a line."""
    line = f"{', '.join(names)} = {value}"
    return line if len(line) <= LONGEST else broken(f"({', '.join(names)}) = {value}", LONGEST)


def broken(text: str, most: int) -> str:
    """Text broken at the widest of its outermost brackets, one item a line; items that are still too long are broken in
    the same way.

    Brackets of an index are left as they are.
    """
    pairs = [pair for pair in brackets(without_texts(text)) if not re.search(r"[\w)\]]\[$", text[: pair[0] + 1])]
    if len(text) <= most or not pairs:
        return text
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    items = parted(text, start + 1, end)
    comma = comma_after(items, text[start - 1 : start + 1])
    items = [item for item in items if item]
    lines = (
        "    " + broken(item, most - 4).replace("\n", "\n    ") + (comma or "," * (k < len(items) - 1))
        for k, item in enumerate(items)
    )
    return "\n".join([text[: start + 1], *lines, text[end:]])


def _one_a_line(name: str, args: list[str]) -> str:
    lines = (broken(a, LONGEST).replace("\n", "\n    ") for a in args)
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), ")"])


def fill(items: list[str], width: int) -> list[str]:
    """Items, each followed by a comma, on as few lines as possible."""
    lines = [""]
    for item in items:
        text = f"{item},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def tuple_lines(items: list[str], width: int = WIDTH) -> str:
    """The source of a tuple, on one line if it fits, else on as few lines as possible."""
    line = tuple_text(items) or "()"
    if len(line) <= width:
        return line
    return "\n".join(["(", *(f"    {line}" for line in fill(items, width)), ")"])


def fitted(before: str, items: list[str], after: str, width: int = LONGEST) -> str:
    """`before(items)after` on one line if it fits, else with the items on as few lines of their own as possible."""
    line = f"{before}({', '.join(items)}){after}"
    if len(line) <= width:
        return line
    return "\n".join([f"{before}(", *(f"    {line}" for line in fill(items, width - 8)), f"){after}"])


def strings(text: str, width: int = WIDTH) -> str:
    """A text as string literals that Python joins, each on a line that fits."""
    lines = [""]
    for word in re.findall(rf"\S{{1,{width}}}\s*", text):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(f'"{line}"' for line in lines)
