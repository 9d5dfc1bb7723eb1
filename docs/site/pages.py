"""What pages of the site share: where files of the project are in it, templates, and cells of tables."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from attngen.emit.page import environment

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK_PAGE = "quickstart.md"
# Files outside docs/, and the pages that the site has of them.
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/quickstart.ipynb": NOTEBOOK_PAGE,
}


@cache
def _templates() -> jinja2.Environment:
    found = environment(Path(__file__).parent)
    found.filters["cell"] = cell
    return found


def rendered(template: str, **values: Any) -> str:
    """A template of this folder, filled in."""
    return _templates().get_template(template).render(values)


def cell(text: object) -> str:
    """Text for a cell of a table: one line, with bars that do not end the cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def figures_css() -> str:
    """The style sheet of drawings and formulas: that of the pages of `attngen explain`, with the colours of the reader's scheme."""
    return rendered("figures.css.jinja")


def variants_page() -> str:
    """The table of variants of the README, each name a link to the variant's page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("\n## Variants\n")
    table = [line for line in section.splitlines() if line.startswith("|")]
    end = next((i for i, line in enumerate(table) if i > 1 and not line.startswith("| `")), len(table))
    return rendered("variants.md.jinja", table=[re.sub(r"^\| `(\w+)`", r"| [`\1`](\1.md)", line) for line in table[:end]])


def relinked(markdown: str, place: str) -> str:
    """The text of the page `place` with its relative links, which hold in the repository, made to hold in the site.

    A link to what the site does not have stays as it is: a strict build refuses it.
    """
    source = next((source for source, page in OUTSIDE.items() if page == place), f"docs/{place}")

    def pointed(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        target = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return found[0] if target is None else f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{found[2] or ''})"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)", pointed, markdown)
