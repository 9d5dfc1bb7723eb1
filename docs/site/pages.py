"""What pages of the site share: where files of the project are in it, templates, and cells of tables."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jinja2

from attngen.report.page import environment
from docs.site.committed import ROOT

NOTEBOOK_PAGE = "quickstart.md"
# Files outside docs/ that are pages of the site.
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/quickstart.ipynb": NOTEBOOK_PAGE,
}
# Other paths outside docs/, as patterns, and where the site has what they say.
TOLD = {
    "specs": "specs/index.md",
    r"specs/(\w+)\.yaml": r"specs/\1.md",
    "attngen/spec/model.py": "reference/spec.md",
    "attngen/(masks|scores)": r"reference/\1.md",
    r"attngen/(masks|scores)/(\w+)\.py": r"reference/\1.md#\2",
    "attngen/lang": "reference/language.md",
    "attngen/api.py": "reference/python.md",
    "attngen/cli": "reference/commands.md",
}


@cache
def _templates() -> jinja2.Environment:
    found = environment(Path(__file__).parent)
    found.filters |= {"cell": cell, "code": code}
    return found


def rendered(template: str, **values: Any) -> str:
    """A template of this folder, filled in."""
    return _templates().get_template(template).render(values)


def cell(text: object) -> str:
    """Text for a cell of a table: one line, with bars that do not end the cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: object) -> str:
    """Code for a cell of a table: what Markdown has between backticks may have no bar there."""
    return f"<code>{escape(str(text)).replace('|', '&#124;')}</code>"


def figures_css() -> str:
    """The style sheet of drawings and formulas: that of the pages of `attngen explain`, with the colours of the
    reader's scheme."""
    return rendered("figures.css.jinja")


def variants_page() -> str:
    """The table of variants of the README, each name a link to the variant's page, and what it is beside the name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("\n## Variants\n")
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    heads, _, *variants = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    rows = [(f"[{name}]({name.strip('`')}.md)", what, *others) for name, *others, what in variants]
    return rendered("variants.md.jinja", heads=[heads[0], heads[-1], *heads[1:-1]], rows=rows)


def relinked(markdown: str, place: str) -> str:
    """The text of the page `place` with its relative links, which hold in the repository, made to hold in the site.

    A link to what the site does not have stays as it is: a strict build refuses it.
    """
    source = next((source for source, page in OUTSIDE.items() if page == place), f"docs/{place}")

    def pointed(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        told = (match.expand(page) for pattern, page in TOLD.items() if (match := re.fullmatch(pattern, path)))
        target = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else next(told, None))
        return (
            found[0]
            if target is None
            else f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{found[2] or ''})"
        )

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)", pointed, markdown)
