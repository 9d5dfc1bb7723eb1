"""Finds the Jinja templates."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def templates_dir() -> Path:
    """Return the folder of the templates: inside the package in a wheel, next to it in a checkout."""
    packaged = PACKAGE / "templates"
    return packaged if packaged.is_dir() else PACKAGE.parent / "templates"
