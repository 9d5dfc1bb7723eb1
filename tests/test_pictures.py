"""The committed pictures of the docs: they are those of their data, have a light and a dark form, and their text is
inside of them and does not overlap."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from docs.site.pictures import DOCS, SOURCES, changed
from docs.site.readme import FLEX, Workload, speed, speed_caption, speed_table
from tests.helpers import ROOT

SVG = "{http://www.w3.org/2000/svg}"
OWN = "bench/readme.json"  # whose pictures do not depend on matplotlib
README = ["assets/attngen.svg", "assets/attngen-dark.svg"]
DRAWN = sorted(
    str(path.relative_to(DOCS)) for folder in ("assets", "bench", "io", ".") for path in (DOCS / folder).glob("*.svg")
)
COLOURS_AND_IDS = r"#[0-9a-f]{6}\b|\b[mp][0-9a-f]{10}\b"
PINNED = re.search(r"^matplotlib==(\S+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)


class Box(NamedTuple):
    """The place of a text, measured in DejaVu Sans, which is wider than most fonts of a reader's system."""

    words: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def boxes(root: ElementTree.Element) -> list[Box]:
    """Return the boxes of all texts of a picture."""
    style = "".join(e.text or "" for e in root.iter(f"{SVG}style"))
    sizes = {cls: float(size) for cls, size in re.findall(r"\.(\w+) \{[^}]*?font-size: (\d+)px", style)}
    usual = re.search(r"text \{ font: (\d+)px", style)
    found = []
    for e in root.iter(f"{SVG}text"):
        assert e.get("transform") is None, f"{e.text}: a text that is turned or moved is not measured"
        own, cls, words = e.get("style", ""), e.get("class", ""), e.text or ""
        size = re.search(r"font-size: ([\d.]+)px", own)
        points = float(size[1]) if size else sizes.get(cls, float(usual[1]) if usual else 16.0)
        bold = "font-weight: 700" in own or cls == "strong"
        font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=points)
        width, _, _ = TextToPath().get_text_width_height_descent(words, font, ismath=False)
        anchor = re.search(r"text-anchor: (\w+)", own)
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor[1] if anchor else e.get("text-anchor", "start")]
        x, y = float(e.get("x", "0")) - shift * width, float(e.get("y", "0"))
        found.append(Box(words, x, y - 0.75 * points, x + width, y + 0.22 * points))
    return found


def test_each_picture_has_a_light_and_a_dark_form() -> None:
    assert set(README) <= set(DRAWN) and len(DRAWN) > 15
    light = [name for name in DRAWN if not name.endswith("-dark.svg")]
    assert sorted([*light, *(name.replace(".svg", "-dark.svg") for name in light)]) == DRAWN
    for name in light:
        forms = [(DOCS / n).read_text(encoding="utf-8") for n in (name, name.replace(".svg", "-dark.svg"))]
        for form, page in zip(forms, ("#ffffff", "#0f1317")):
            assert page in form[: form.index("<text")], f"{name}: no opaque background"
        assert len({re.sub(COLOURS_AND_IDS, "", form) for form in forms}) == 1, f"{name}: the forms differ in more"


@pytest.mark.parametrize("source", [source for source in SOURCES if source != OWN])
@pytest.mark.share(3)
def test_pictures_are_those_of_their_data(source: str) -> None:
    """`python -m docs.site.pictures --write` draws them again."""
    assert PINNED is not None
    if matplotlib.__version__ != PINNED[1]:
        pytest.skip(f"matplotlib is {matplotlib.__version__}; the pictures are of {PINNED[1]}")
    assert list(changed(source)) == []


def test_the_picture_of_the_readme_is_that_of_its_data() -> None:
    assert list(changed(OWN)) == []


@pytest.mark.parametrize("name", [name for name in DRAWN if not name.endswith("-dark.svg")])
def test_texts_are_inside_of_a_picture_and_apart(name: str) -> None:
    root = ElementTree.parse(DOCS / name).getroot()
    x, y, width, height = map(float, root.get("viewBox", "").split())
    assert (x, y) == (0, 0) and root.find(f"{SVG}title") is not None
    found = boxes(root)
    assert found
    for box in found:
        assert box.left >= 0 and box.right <= width and box.top >= 0 and box.bottom <= height, f"{name}: {box}"
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other), f"{name}: {one} and {other} overlap"
    pixels = 4 / 3 if root.get("width", "").endswith("pt") else 1.0
    assert pixels * min((box.bottom - box.top) / 0.97 for box in found) >= 10.9, f"{name}: text under 11 pixels"


# ---------------------------------------------------------------------------------------------- the speed table


def test_the_speed_table() -> None:
    header, rule, *rows = speed_table().splitlines()
    assert header == f"| workload | attngen | fastest other kernel | {FLEX} |" and rule.count("---") == 4
    assert len(rows) == len(speed().workloads) == 6 and len({row.count("|") for row in rows}) == 1
    assert all(" / " in row.split("|")[2] and " / " in row.split("|")[4] for row in rows)
    assert speed().device in speed_caption() and speed().date in speed_caption()


def test_the_best_kernel_is_that_of_each_direction() -> None:
    peers = {FLEX: {"forward": 1.0}, "a": {"forward": 2.0, "backward": 3.0}, "b": {"forward": 2.5, "backward": 2.0}}
    row = Workload("x", {"forward": 0.5, "backward": 1.0}, peers)
    assert row.best("forward") == (2.0, "a") and row.best("backward") == (2.0, "b") and row.speedup("forward") == 2.0
    assert Workload("x", row.ours, {FLEX: {"forward": 1.0}}).best("forward") is None


def test_the_readme_shows_the_picture_and_the_table() -> None:
    """`python -m docs.site.readme` prints the table."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert speed_table() in readme and speed().date in readme
    for name in README:
        assert f"docs/{name}" in readme


def test_each_is_on_a_page() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    light = [name for name in DRAWN if not name.endswith("-dark.svg")]
    assert [name for name in light if name.rpartition("/")[2] not in text] == []
