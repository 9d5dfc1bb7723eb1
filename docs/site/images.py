"""Pictures of pages: each is shown in the form for the reader's colour scheme, in a box that scrolls where it is wide,
and opens large at a click (assets/figures.js)."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

PICTURE = re.compile(r"<img\b[^>]*>")
PIXELS = {"": 1.0, "px": 1.0, "pt": 4 / 3}


def dark_form(path: str) -> str:
    """The path of a picture's form for dark mode: `x.svg` has `x-dark.svg` beside it."""
    place = PurePosixPath(path)
    return str(place.with_name(f"{place.stem}-dark{place.suffix}"))


def with_pictures(html: str, url: str, file_of: Callable[[str], Path | None]) -> str:
    """The HTML of a page with its pictures in both forms. Raise ValueError if a picture lacks its dark form.

    url: the address of the page, relative to the site's.
    file_of: returns the file of a path in the site, or None if there is none.
    """

    def both(found: re.Match[str]) -> str:
        image = found[0]
        source = _attribute(image, "src")
        if "://" in source or source.startswith("data:"):
            return image
        path = posixpath.normpath(posixpath.join(url, source))
        light, dark = file_of(path), file_of(dark_form(path))
        if light is None or dark is None:
            lacks = "is not in docs/" if light is None else f"has no dark form; expected {dark_form(path)} beside it"
            raise ValueError(f"the picture {path} {lacks}")
        forms = (_form(image, source, light, "light"), _form(image, dark_form(source), dark, "dark"))
        return f'<span class="picture">{"".join(forms)}</span>'

    return PICTURE.sub(both, html)


def _form(image: str, source: str, file: Path, scheme: str) -> str:
    """A form of a picture, shown in one scheme, and a link to its file. Material hides images whose address ends with
    the name of the other scheme."""
    width, height = _size(file)
    size = f' width="{width}" height="{height}" style="--own: {width}px"' if width else ""
    alt = _attribute(image, "alt")
    return f'<a href="{source}"><img alt="{alt}" src="{source}#only-{scheme}" loading="lazy"{size}></a>'


def _attribute(tag: str, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', tag)
    return found[1] if found else ""


def _size(file: Path) -> tuple[int, int]:
    """The width and the height of an SVG in pixels, 0 if it does not say them."""
    head = re.search(r"<svg\b[^>]*>", file.read_text(encoding="utf-8")) if file.suffix == ".svg" else None
    sizes = [re.search(rf'\b{name}="([\d.]+)(px|pt|)"', head[0]) if head else None for name in ("width", "height")]
    width, height = (round(float(size[1]) * PIXELS[size[2]]) if size else 0 for size in sizes)
    return width, height
