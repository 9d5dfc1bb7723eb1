"""The last step of printing Python: no line has more than LIMIT characters, for any spec.

Templates and layout.py make lines that fit for most specs. A line may still be too long because of a mask in words, the
names of inputs, or the reasons why no config fits on a device.
"""

from __future__ import annotations

import io
import re
import textwrap
import tokenize
from itertools import accumulate

from attngen.targets.printing.breaking import expression, outermost, parted, without_texts
from attngen.targets.printing.layout import WIDTH, fill, fold, strings

LIMIT = 120
_TEXT = re.compile(r'\w*"[^"]*"')
_NAMES = r"\w+(?:, \w+)+"


def within(source: str) -> str:
    """Return the same program without lines longer than LIMIT."""
    lines = source.splitlines()
    if all(len(line) <= LIMIT for line in lines):
        return source
    depths, prose, comments = _scan(source, len(lines))
    made = []
    for row, line in enumerate(lines, 1):
        if len(line) <= LIMIT:
            made.append(line)
        elif row in prose:
            made += _docstring(line)
        else:
            indent, end = _indent(line), comments.get(row, len(line))
            made += textwrap.wrap(line[end:], LIMIT, initial_indent=indent, subsequent_indent=f"{indent}# ")
            made += textwrap.indent(
                _code(line[:end].strip(), LIMIT - len(indent), depths[row] > 0), indent
            ).splitlines()
    return "\n".join(made) + "\n"


def _scan(source: str, count: int) -> tuple[list[int], set[int], dict[int, int]]:
    """Return the bracket depth at the start of each line, the lines in docstrings, and the column where each comment
    starts, by line. Lines count from 1."""
    change, prose, comments = [0] * (count + 2), set(), {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.OP:
            change[row + 1] += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT:
            comments[row] = column
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            prose |= set(range(row, token.end[0] + 1))
    return list(accumulate(change)), prose, comments


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _docstring(line: str) -> list[str]:
    """Break a line of a docstring; continuation lines are indented past a label or the name of an argument."""
    indent, text = _indent(line), line.strip()
    label = re.match(r"[a-z ]+: {2,}", text)
    hang = len(label[0]) if label else 4 if indent and re.match(r"\w+: ", text) else 0
    end = [f'{indent}"""'] if text.startswith('"""') and text.endswith('"""') else []
    text = text.removesuffix('"""') if end else text
    return (
        textwrap.wrap(text, LIMIT, initial_indent=indent, subsequent_indent=indent + " " * hang, break_on_hyphens=False)
        + end
    )


def _filled(items: list[str]) -> str:
    """Return a tuple with its items on as few separate lines as possible."""
    return "\n".join(["(", *(f"    {line}" for line in fill(items, WIDTH)), ")"])


def _code(text: str, room: int, nested: bool) -> str:
    """Break a line of code into lines of at most `room` characters, if possible; `nested`: the line is inside brackets.

    A long string outside of the line's brackets is split into pieces in new brackets; otherwise the line is broken at
    its brackets.
    """
    if len(text) <= room:
        return text
    if not nested and (unpacked := re.fullmatch(f"({_NAMES}) = (.*)", text)):
        return " = ".join(
            _filled(side.split(", ")) if re.fullmatch(_NAMES, side) else fold(side) for side in unpacked.groups()
        )
    plain = without_texts(text)
    if any(plain.count(left) != plain.count(right) for left, right in ("()", "[]")) or plain.startswith((")", "]")):
        return text  # part of a statement that is already broken
    outside = set(outermost(plain, 0, len(plain)))
    texts = [found for found in _TEXT.finditer(text) if found.start() in outside and found[0][0] == '"']
    longest = max(texts, key=lambda found: len(found[0]), default=None)
    if longest and len(longest[0]) > room // 2:
        pieces = strings(longest[0][1:-1])
        before, after = text[: longest.start()], text[longest.end() :]
        return f"{before}(\n{textwrap.indent(pieces, '    ')}\n){after}" if before or after else pieces
    items = parted(text, 0, len(text)) if nested else []
    if len(items) > 2 and max(map(len, items)) < room:  # arguments, several on a line
        return "\n".join(fill([item for item in items if item], room)).removesuffix("," * (not text.endswith(",")))
    comma = "," if nested and text.endswith(",") else ""
    lines = (expression(text.removesuffix(","), room - 1) + comma if nested else fold(text, room)).splitlines()
    if len(lines) == 1:
        return text
    return "\n".join(
        textwrap.indent(_code(line.strip(), room - len(_indent(line)), True), _indent(line)) for line in lines
    )
