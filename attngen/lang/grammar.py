"""Parses text into Python's tree with `ast`; text is never evaluated. An error names the likeliest cause."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from itertools import accumulate
from typing import Any

from attngen.errors import shown
from attngen.lang.limits import MAX_DEPTH, MAX_NODES, MAX_TEXT


class LangError(ValueError):
    """An expression that is not in the language: a sentence, the column (from 1) if the error is at one place, and the
    named part that contains it."""

    def __init__(self, column: int | None, reason: str, part: str = "") -> None:
        self.column, self.reason, self.part = column, reason, part
        super().__init__(f"column {column}: {reason}" if column else reason)


def read_tree(text: Any) -> tuple[ast.Expression, int]:
    """Python's tree of the text, and the number of characters before it. Only the tree's size is checked."""
    if not isinstance(text, str) or not text.strip():
        raise LangError(None, "is empty; expected an expression, as in `kv_idx <= q_idx`")
    if len(text) > MAX_TEXT:
        raise LangError(None, f"has {len(text)} characters; expected {MAX_TEXT} at most")
    for at, char in enumerate(text):
        if char in "#$;?\\`" or not (" " <= char <= "~" or char in "\t\r\n"):
            raise LangError(at + 1, f"has the character `{shown(char)}`, which expressions do not have")
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    if any(depth > MAX_DEPTH for depth in depths):
        raise LangError(None, f"is nested more than {MAX_DEPTH} deep; expected less")
    flat = re.sub(r"\s", " ", text)
    lead = len(flat) - len(flat.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(flat.strip(), mode="eval")
    except (RecursionError, MemoryError):
        raise LangError(None, "is nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        raise _syntax(flat, lead, error) from None
    level, count, depth = [tree.body], 0, 0
    while level:
        count, depth = count + len(level), depth + 1
        if count > MAX_NODES:
            raise LangError(None, f"has more than {MAX_NODES} names, numbers and operations; expected fewer")
        if depth > MAX_DEPTH:
            raise LangError(None, f"is nested more than {MAX_DEPTH} deep; expected less")
        level = _below(level)
    return tree, lead


def _below(level: list[ast.expr]) -> list[ast.expr]:
    """The expressions one level further down."""
    nodes: list[ast.AST] = list(level)
    found: list[ast.expr] = []
    while nodes:
        for child in ast.iter_child_nodes(nodes.pop()):
            (found if isinstance(child, ast.expr) else nodes).append(child)  # type: ignore[arg-type]
    return found


def _syntax(flat: str, lead: int, error: Exception) -> LangError:
    """The likeliest reason that text is not Python, as a sentence."""
    for pattern, hint in _NOT_PYTHON:
        if found := re.search(pattern, flat):
            return LangError(found.start() + 1, f"uses `{found[0]}`, which expressions do not have{hint}")
    if quote := re.search("['\"]", flat):
        return LangError(quote.start() + 1, "uses text in quotes, which expressions do not have")
    for word in re.finditer(r"(?<![0-9.])\b[A-Za-z_]\w*", flat):
        if keyword.iskeyword(word[0]) and word[0] not in ("and", "or", "not", "True", "False"):
            hint = "; write where(condition, a, b)" if word[0] in ("if", "else") else ""
            return LangError(word.start() + 1, f"uses `{word[0]}`, which expressions do not have{hint}")
    opened: list[int] = []
    for at, char in enumerate(flat):
        if char in "([{":
            opened.append(at)
        elif char in ")]}" and (not opened or flat[opened.pop()] != {")": "(", "]": "[", "}": "{"}[char]):
            return LangError(at + 1, f"closes a `{char}` that was not opened")
    if opened:
        return LangError(opened[-1] + 1, f"opens a `{flat[opened[-1]]}` that is never closed")
    if last := re.search(r"([-+*/%<>=!,.]{1,2}|\b(and|or|not))\s*$", flat):
        return LangError(last.start() + 1, f"ends in `{last[0].strip()}`; expected a name or a number after it")
    offset = error.offset if isinstance(error, SyntaxError) else None
    column = min(max(offset, 1) + lead, len(flat.rstrip())) if isinstance(offset, int) else None
    return LangError(column, "is not an expression from here on; expected one as in `kv_idx <= q_idx`")


_NOT_PYTHON = (
    ("&&", "; did you mean `and`?"),
    (r"\|\|", "; did you mean `or`?"),
    ("!(?!=)", "; did you mean `not`?"),
    (":=", ""),
    ("(?<![<>=!])=(?!=)", "; did you mean `==`?"),
)
