"""Helpers of the site's pages: where files of the project are in the site, templates, and cells of tables."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import jinja2

from attngen.report.environment import environment
from attngen.report.page import description as description_of_spec
from attngen.spec import parse_spec
from docs.site.committed import spec_files

MOST_MB = 40  # size of the site
DESCRIPTION = 200  # letters of a description
NOTEBOOK_PAGE = "quickstart.md"
# Files outside docs/ that are pages of the site.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/quickstart.ipynb": NOTEBOOK_PAGE,
}
# Other paths outside docs/, as patterns, and the page of the site that has their content.
LINK_TARGETS = {
    "specs": "specs/index.md",
    r"specs/(\w+)\.yaml": r"specs/\1.md",
    "attngen/spec/fields.py": "reference/spec.md",
    "attngen/(masks|scores)": r"reference/\1.md",
    r"attngen/(masks|scores)/(\w+)\.py": r"reference/\1.md#\2",
    "attngen/lang": "reference/language.md",
    "attngen/api.py": "reference/python.md",
    "attngen/cli": "reference/commands.md",
    "attngen/(ir|transforms|verify)": "reference/ir.md",
    "docs/site/models.yaml": "models.md",
}


@cache
def _templates() -> jinja2.Environment:
    found = environment(Path(__file__).parent)
    found.filters |= {"cell": cell, "code": code}
    return found


def rendered(template: str, **values: Any) -> str:
    """Render a template of this folder."""
    return _templates().get_template(template).render(values)


def cell(text: object) -> str:
    """Text for a cell of a table: one line, with escaped bars, and outside of code with escaped asterisks."""
    line = " ".join(str(text).split()).replace("|", "\\|")
    return "".join(part if part.startswith("`") else part.replace("*", "\\*") for part in re.split("(`[^`]*`)", line))


def code(text: object) -> str:
    """Code for a cell of a table, as HTML, because Markdown's backticks allow no bar in a table."""
    return f"<code>{escape(str(text)).replace('|', '&#124;').replace('*', '&#42;')}</code>"


def figures_css() -> str:
    """The style sheet of figures and formulas: that of the pages of `attngen explain`, with the colours of the
    reader's scheme."""
    return rendered("figures.css.jinja")


def variants_page() -> str:
    """The tables of specs for training and for serving, from the files of the specs: each has a name that links to its
    page, its leading comment, and its main properties."""
    texts = {path: path.read_text(encoding="utf-8") for path in spec_files()}
    specs = [(description_of_spec(text), parse_spec(text, str(path))) for path, text in texts.items()]
    return rendered(
        "variants.md.jinja",
        tables={
            "For training": [(about, spec) for about, spec in specs if spec.cache is None],
            "For serving, with a KV cache": [(about, spec) for about, spec in specs if spec.cache is not None],
        },
    )


def relinked(markdown: str, place: str) -> str:
    """The text of the page `place`, with relative links of the repository replaced by links of the site.

    A link whose target is not in the site stays unchanged: a strict build refuses it.
    """
    source = next((source for source, page in OUTSIDE.items() if page == place), f"docs/{place}")

    def relink(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        pages = (match.expand(page) for pattern, page in LINK_TARGETS.items() if (match := re.fullmatch(pattern, path)))
        inside = path.removeprefix("docs/") if path.startswith("docs/") else None
        target = OUTSIDE.get(path) or next(pages, inside)
        return (
            found[0]
            if target is None
            else f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{found[2] or ''})"
        )

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)", relink, markdown)


def size_of(folder: Path) -> float:
    """The size of a built site in MB. Raise ValueError if it is too large."""
    megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    if megabytes > MOST_MB:
        raise ValueError(f"{folder} has {megabytes:.1f} MB; expected {MOST_MB} at most")
    return megabytes


def description(html: str) -> str:
    """The description of a page for search engines: the beginning of its first paragraph, without markup."""
    found = re.search(r"<p>(.*?)</p>", html, re.DOTALL)
    text = " ".join(unescape(re.sub(r"<[^>]*>", "", found[1])).split()) if found else ""
    return text if len(text) <= DESCRIPTION else f"{text[:DESCRIPTION].rpartition(' ')[0]} ..."
