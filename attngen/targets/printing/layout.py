"""Lays out generated source in lines that fit: long calls, assignments and lists are broken at their commas."""

from __future__ import annotations

import re

from attngen.targets.printing.breaking import brackets, comma_after, parted, statement, without_texts

WIDTH = 100
LONGEST = 112  # maximum length of an assignment, without its indentation
MOST = 104  # maximum length of a line of an assignment that is broken only at its brackets


def call(name: str, args: list[str]) -> str:
    """Return a call on one line if it fits, else with one argument per line."""
    line = f"{name}({', '.join(args)})"
    if len(line) <= WIDTH - 12:
        return line
    return short(_one_a_line(name, args), line)


def tuple_text(items: list[str]) -> str:
    """Return the source of a tuple; empty text if there are no items."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if items else ""


def assign(var: str, expr: str) -> str:
    """Return an assignment on one line if it fits; else a call has one argument per line, and a pointer one stride per
    line."""
    line = f"{var} = {expr}"
    if len(line) > LONGEST and re.fullmatch(r"\w+( \+ [\w.]+\([^()]*\) \* \w+)+", expr):  # a pointer
        first, *rest = re.split(r" \+ (?=tl)", expr)
        return "\n".join([f"{var} = (", f"    {first}", *(f"    + {term}" for term in rest), ")"])
    return short(broken(line, LONGEST), line)


def fold(line: str, most: int = LONGEST) -> str:
    """Break a statement into lines that fit."""
    return line if len(line) <= most else short(broken(line, most), line, most)


def short(parts: str, line: str, most: int = LONGEST) -> str:
    """Return `parts`, a statement broken at its brackets, if all its lines fit; else the statement `line` broken also
    at its operators, if that makes its longest line shorter."""
    longest = max(map(len, parts.splitlines()))
    if longest <= MOST:
        return parts
    text = statement(line, most)
    return text if max(map(len, text.splitlines())) < longest else parts


def unpack(names: list[str], value: str) -> str:
    """Return an assignment of a tuple to names; the names get brackets if they do not fit on a line."""
    line = f"{', '.join(names)} = {value}"
    return line if len(line) <= LONGEST else broken(f"({', '.join(names)}) = {value}", LONGEST)


def broken(text: str, most: int) -> str:
    """Break text at the widest of its outermost brackets, one item per line; items that are still too long are broken
    in the same way.

    Index brackets are not broken.
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
    """Return items, each followed by a comma, on as few lines as possible."""
    lines = [""]
    for item in items:
        text = f"{item},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def tuple_lines(items: list[str], width: int = WIDTH) -> str:
    """Return the source of a tuple on one line if it fits, else on as few lines as possible."""
    line = tuple_text(items) or "()"
    if len(line) <= width:
        return line
    return "\n".join(["(", *(f"    {line}" for line in fill(items, width)), ")"])


def fitted(before: str, items: list[str], after: str, width: int = LONGEST) -> str:
    """Return `before(items)after` on one line if it fits, else with the items on as few separate lines as possible."""
    line = f"{before}({', '.join(items)}){after}"
    if len(line) <= width:
        return line
    return "\n".join([f"{before}(", *(f"    {line}" for line in fill(items, width - 8)), f"){after}"])


def strings(text: str, width: int = WIDTH) -> str:
    """Return a text as adjacent string literals, each on a line that fits."""
    lines = [""]
    for word in re.findall(rf"\S{{1,{width}}}\s*", text):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(f'"{line}"' for line in lines)
