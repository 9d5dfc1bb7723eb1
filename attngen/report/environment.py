"""The templates of pages, and the colours of both schemes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from attngen.codegen.templates import templates_dir

SCHEMES = ("light", "dark")


def environment(*folders: Path) -> jinja2.Environment:
    """Return the templates of pages and those of other folders. Values are escaped in HTML, not in other text."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, templates_dir() / "html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=lambda name: str(name).endswith(".html.jinja"),
    )
    found.filters["marked"] = marked
    return found


def marked(text: str) -> Markup:
    """Return a sentence of a docstring as HTML, with code for text in backticks."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def colours(scheme: str) -> dict[str, str]:
    """Return the colours of a scheme, by their names in style sheets."""
    text = str(getattr(environment().get_template("colours.css.jinja").module, scheme)())
    return dict(re.findall(r"--(\w+): (#\w+);", text))
