"""Listings of the page: the changes of each pass in the IR, and Python with syntax highlighting."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from markupsafe import Markup, escape

from attngen.ir import Module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import passes
from attngen.spec import Spec


class Line(NamedTuple):
    """Lines of a diff (`added`, `removed` or `same`), or a heading, `where`, with the place of the lines below it."""

    cls: str
    text: str


class Step(NamedTuple):
    """The changes of a pass."""

    name: str
    says: str
    phase: str
    added: int
    removed: int
    diff: list[Line]
    ir: str  # empty if the page does not show it


def changes(spec: Spec, steps: list[tuple[str, Module]]) -> Iterator[Step]:
    """Yield the changes of each pass. `steps` has the name of each pass and the module after it; the first is
    `build`. Three modules are shown as a whole: the logical one, the last without warp-specialized kernels, and the
    target module."""
    says = {p.name: _says(sys.modules[type(p).__module__].__doc__) for p in passes(spec, steps[0][1])}
    portable = max(i for i, (_, module) in enumerate(steps) if not module.warp_specialized)
    shown = {0, portable, len(steps) - 1}
    before: list[str] = []
    for i, (name, module) in enumerate(steps):
        text = print_module(module)
        diff = list(_diff(before, text.splitlines())) if i else []
        sizes = {kind: sum(len(d.text.splitlines()) for d in diff if d.cls == kind) for kind in ("added", "removed")}
        sentence = says.get(name, "the computation, before any decision.")
        yield Step(name, sentence, module.phase, sizes["added"], sizes["removed"], diff, text if i in shown else "")
        before = text.splitlines()


def _says(doc: str | None) -> str:
    """Return the first paragraph of a pass's module docstring, without the pass's name."""
    return (doc or "").partition("\n\n")[0].partition(": ")[2].replace("\n", " ")


def _diff(before: list[str], after: list[str]) -> Iterator[Line]:
    """Yield the changed lines, each group with a line of context on both sides, under a heading that names its kernel,
    schedule or module."""
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(1):
        above = after[: group[0][3] + 1]
        where = next((line for line in reversed(above) if line.startswith(("kernel ", "schedule ", "module "))), "")
        yield Line("where", " ".join(where.split()[:2]))
        for tag, i1, i2, j1, j2 in group:
            parts = [("same", "  ", before[i1:i2])]
            if tag != "equal":
                parts = [("removed", "- ", before[i1:i2]), ("added", "+ ", after[j1:j2])]
            yield from (Line(cls, "\n".join(sign + line for line in lines)) for cls, sign, lines in parts if lines)


_PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>[rf]?(?:\"\"\"[\s\S]*?\"\"\"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))"""
    r"|(?P<name>@[\w.]+)|\b(?P<word>and|as|assert|class|def|elif|else|for|from|if|import|in|is|lambda|not|or|raise"
    r"|return|while|with)\b"
)


def highlight(text: str) -> Markup:
    """Return Python as HTML that marks comments, strings, names and keywords."""
    parts, at = [], 0
    for match in _PYTHON.finditer(text):
        parts += [escape(text[at : match.start()]), f'<span class="{match.lastgroup}">{escape(match[0])}</span>']
        at = match.end()
    return Markup("".join([*parts, escape(text[at:])]))
