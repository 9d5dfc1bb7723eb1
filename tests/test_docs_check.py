"""`make docs-check` finds what is wrong with a page: each check fails on a page that is made to fail it.

They need Chromium, so a push leaves them out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

HEAD = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>A page</title>
<style>:root { color-scheme: light dark } body { margin: 8px; background: #fff; color: #111; font: 16px sans-serif }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } svg { fill: #eee } }</style>
"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="100" viewBox="0 0 300 100" id="picture">{}</svg>'
WIDE = '<div style="width: 900px; height: 20px">a wide line</div>'
# What is on the page, and what is said of it. `light` and `dark` are those schemes at both widths.
BAD = {
    "a wide page": (WIDE, "400 wide: the page is 508 pixels wider than the window"),
    "cut text": (
        '<p style="width: 90px; overflow: hidden; white-space: nowrap">a line that does not fit</p>',
        'all widths and schemes: "a line that does not fit" is cut off at the side, by <p> at 8, 16',
    ),
    "text cut below": (
        '<p style="height: 20px; overflow: hidden; width: 90px">lines that do not fit in their box</p>',
        'all widths and schemes: "lines that do not fit in their box" is cut off above or below, by <p> at 8, 16',
    ),
    "text outside of its picture": (
        SVG.format('<text x="250" y="50">a long label</text>'),
        'all widths and schemes: "a long label" is cut off by its picture "picture"',
    ),
    "labels over one another": (
        SVG.format('<text x="20" y="50">one label</text><text x="50" y="55">another</text>'),
        'all widths and schemes: "one label" and "another" lie over one another in picture "picture"',
    ),
    "a label under a box": (
        SVG.format('<text x="20" y="50">a label</text><rect x="40" y="30" width="90" height="30" fill="#888"/>'),
        'all widths and schemes: "a label" is covered by a box in picture "picture"',
    ),
    "tiny text": (
        SVG.format('<text x="20" y="50" font-size="8.8">tiny</text>'),
        'all widths and schemes: the text of picture "picture" is 8.8 pixels high, expected 9 at least',
    ),
    "a figure that does not open": (
        f"<figure>{SVG.format('')}</figure>",
        'all widths and schemes: picture "picture" does not open large by click',
    ),
    "a figure that opens by a click only": (
        f"<figure>{SVG.format('')}</figure><dialog>{SVG.replace('300', '600')}</dialog>"
        "<script>document.querySelector('svg').onclick = () => document.querySelector('dialog').showModal()</script>",
        'all widths and schemes: picture "picture" does not open large by keydown',
    ),
    "a figure that opens as small": (
        f"<figure>{SVG.format('')}</figure><dialog>{SVG.format('')}</dialog>"
        "<script>document.querySelector('svg').onclick = () => document.querySelector('dialog').showModal()</script>",
        'all widths and schemes: picture "picture" does not open large by click',
    ),
    "a picture of a file that does not open": (
        '<span class="picture"><a href="#"><img src="white.svg"></a></span>',
        "all widths and schemes: picture white.svg does not open large by click",
    ),
    "a picture that is missing": ('<img src="none.svg">', "all widths and schemes: picture none.svg does not load"),
    "a white picture": ('<img src="white.svg">', "dark: picture white.svg is a white box in dark mode"),
    "labels in a file": (
        '<img src="white.svg">',
        'all widths and schemes: "one label" and "another" lie over one another in picture white.svg',
    ),
    "a white box": (
        '<div style="background: #fafafa; color: #111">a box</div>',
        "dark: <div> at 8, 8 is a white box in dark mode",
    ),
    "a white box in a picture": (
        SVG.format('<rect width="300" height="100" style="fill: white"/>'),
        'dark: picture "picture" is a white box in dark mode',
    ),
    "emphasis inside a word": (
        "<p>moves o(N<em>2d</em>2/M) elements</p>",
        'all widths and schemes: an emphasis begins or ends inside a word: "moves o(N2d2/M) eleme"',
    ),
    "faint text": (
        '<p style="color: #999">faint words</p>',
        'light: "faint words" has a contrast of 2.8 to 1, expected 4.5 at least',
    ),
    "a line on the console": ("<script>console.error('oh')</script>", "the console says:"),
    "a request to elsewhere": (
        '<link rel="stylesheet" href="http://127.0.0.2:9/x.css">',
        "it requests http://127.0.0.2:9/x.css",
    ),
}
GOOD = f"""<h1>A heading</h1><p>Some <em>words</em> and <strong>more</strong>, 2*N*d.</p>
<div style="overflow-x: auto">{WIDE}</div><pre style="overflow: auto">{"code " * 300}</pre>
{
    SVG.format(
        '<rect x="10" y="30" width="90" height="30" fill="#8888"/>'
        '<text x="20" y="50">one label</text><text x="120" y="50">another</text>'
    )
}"""


@pytest.fixture(scope="module")
def check() -> Any:
    pytest.importorskip("selenium")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium")
    from docs.site import check

    return check


@pytest.fixture(scope="module")
def driver(check: Any) -> Iterator[Any]:
    with check.browser() as driver:
        yield driver


def findings(check: Any, driver: Any, folder: Path, body: str) -> list[str]:
    (folder / "page.html").write_text(f"{HEAD}<body>{body}", encoding="utf-8")
    labels = '<text x="20" y="50">one label</text><text x="50" y="55">another</text>'
    picture = SVG.format(f'<rect width="300" height="100" fill="#fff"/>{labels}')
    (folder / "white.svg").write_text(picture, encoding="utf-8")
    with check.served(folder) as home:
        return check.findings(driver, home, "page.html")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_page_is_found(case: str, check: Any, driver: Any, tmp_path: Path) -> None:
    body, expected = BAD[case]
    found = findings(check, driver, tmp_path, body)
    assert any(sentence.startswith(f"/page.html: {expected}") for sentence in found), found


def test_nothing_is_found_on_a_good_page(check: Any, driver: Any, tmp_path: Path) -> None:
    assert findings(check, driver, tmp_path, GOOD) == []


def test_a_figure_opens_at_the_size_of_the_window_and_escape_closes_it(check: Any, driver: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    script = (check.ROOT / "docs/assets/figures.js").read_text(encoding="utf-8")
    figure = f"<figure>{SVG.format('<title>a map</title>')}</figure><script>{script}</script>"
    assert findings(check, driver, tmp_path, figure) == []
    with check.served(tmp_path) as home:
        driver.get(home + "page.html")
        size = driver.execute_script("return [innerWidth, innerHeight]")
        opened = "return [...document.querySelectorAll('dialog[open] svg')].map((e) => e.getBoundingClientRect().width)"
        for key in (Keys.ENTER, Keys.SPACE):
            driver.execute_script("document.activeElement.blur(); document.querySelector('svg').focus()")
            ActionChains(driver).send_keys(key).perform()
            assert driver.execute_script(opened) == [size[0] - 48]
            ActionChains(driver).send_keys(Keys.ESCAPE).perform()
            assert driver.execute_script(opened) == []
        driver.execute_script("document.querySelector('svg').dispatchEvent(new MouseEvent('click'))")
        driver.execute_script("document.querySelector('dialog').click()")
        # The event after which the dialog is removed comes later than the click.
        WebDriverWait(driver, 10).until(lambda at: not at.execute_script("return document.querySelector('dialog')"))


def test_a_picture_of_a_file_opens_on_the_page(check: Any, driver: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    script = (check.ROOT / "docs/assets/figures.js").read_text(encoding="utf-8")
    picture = f'<span class="picture"><a href="white.svg"><img src="white.svg"></a></span><script>{script}</script>'
    found = findings(check, driver, tmp_path, picture)
    assert not [sentence for sentence in found if "open" in sentence]
    with check.served(tmp_path) as home:
        driver.get(home + "page.html")
        size = driver.execute_script("return innerWidth")
        opened = "return [...document.querySelectorAll('dialog[open] img')].map((e) => e.getBoundingClientRect().width)"
        driver.execute_script("document.querySelector('.picture a').focus()")
        ActionChains(driver).send_keys(Keys.ENTER).perform()
        assert driver.execute_script(opened) == [size - 48]
        ActionChains(driver).send_keys(Keys.ESCAPE).perform()
        assert driver.execute_script(opened) == [] and driver.current_url == home + "page.html"


def test_a_search_that_finds_nothing_is_found(check: Any, driver: Any, tmp_path: Path) -> None:
    search = (
        '<input type="checkbox" id="__search"><input class="md-search__input"><div class="md-search__scrollwrap"></div>'
    )
    (tmp_path / "index.html").write_text(f"{HEAD}<body>{search}", encoding="utf-8")
    with check.served(tmp_path) as home:
        found = check.search_findings(driver, home)
    assert found[0] == '/: a search for "sliding window" does not find reference/masks/#sliding_window, but nothing'


def test_all_pages_of_a_site_are_read(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("index.html", "a/index.html", "b.html", "404.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{HEAD}<body><p>some words</p>", encoding="utf-8")
    assert sorted(check.all_pages(tmp_path)) == ["", "a/", "b.html"]
    assert check.main(["--site", str(tmp_path), "--pictures", str(tmp_path / "pictures"), "a/", "b.html"]) == 0
    assert "2 pages at 2 widths, light and dark: nothing wrong" in capsys.readouterr().out
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 8
