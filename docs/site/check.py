"""`make docs-check`: read the built site in Chromium, all pages, at two widths, light and dark.

It reports each thing that a reader cannot see or read, as one sentence: text or pictures that are cut off, white boxes
in dark mode, low contrast, labels of pictures that lie over one another or are tiny, figures that do not open large,
emphasis inside a word, lines on the console, requests to elsewhere. It also searches for SEARCHED. It needs chromium or
google-chrome, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException

from attngen.cli.console import progress

ROOT = Path(__file__).resolve().parents[2]
WIDTHS, HEIGHT, SCHEMES = (400, 1400), 1000, ("light", "dark")
STATES = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
TALLEST = 12_000  # rows of a screenshot
SEARCHED = {"sliding window": ("reference/masks/#sliding_window", "specs/window_gqa/")}  # words, and what they find
CHECK = (Path(__file__).parent / "check.js").read_text(encoding="utf-8")
# Everything is open and nothing moves while a page is read.
STILL = """
const style = document.createElement("style");
style.textContent = "*, ::before, ::after { transition: none !important; animation: none !important }";
document.head.append(style);
document.querySelectorAll("details").forEach((e) => { e.open = true; });
document.querySelectorAll("img[loading=lazy]").forEach((e) => { e.loading = "eager"; });
"""
SETTLED = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => document.fonts.ready.then(() => setTimeout(done, 60))));
"""
RESULTS = """
const [words, done] = arguments, input = document.querySelector("input.md-search__input");
document.querySelector("#__search").checked = true;
input.focus();
input.value = words;
for (const kind of ["keydown", "input", "keyup"]) input.dispatchEvent(new Event(kind, { bubbles: true }));
const links = () => [...document.querySelectorAll(".md-search-result__item a")].map((a) => a.href);
const started = Date.now();
const timer = setInterval(() => {
  document.querySelector(".md-search__scrollwrap").scrollTop = 1e6; // which adds results
  if (links().length < 8 && Date.now() - started < 8000) return;
  clearInterval(timer);
  setTimeout(() => done(links()), 500);
}, 100);
"""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()


def installed(*names: str, folder: str | None = None) -> str:
    """The path of the first of these programs that is in the folder or on the PATH; exits with an error if there is
    none."""
    path = next((found for name in names if (found := shutil.which(name, path=folder) or shutil.which(name))), None)
    if path is None:
        sys.exit(
            f"error: no {names[0]} on the PATH; expected it installed, as by `apt-get install chromium chromium-driver`"
        )
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium with an empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        quiet = ("first-run", "sandbox"), ("background-networking", "component-update", "sync", "quic", "gpu")
        flags = [f"{word}-{flag}" for word, flags in zip(("no", "disable"), quiet) for flag in flags]
        for flag in ("headless=new", "hide-scrollbars", f"user-data-dir={profile}", *flags):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        options.binary_location = installed("google-chrome", "chromium", "chromium-browser")
        # CHROMEWEBDRIVER is the folder of GitHub's runners that has it.
        service = webdriver.ChromeService(installed("chromedriver", folder=os.environ.get("CHROMEWEBDRIVER")))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.set_script_timeout(60)
            driver.get("about:blank")
            driver.get_log("performance")  # of the page that Chromium starts with
            yield driver
        finally:
            driver.quit()


def _become(driver: Any, width: int, scheme: str) -> None:
    """Give the window this width, and the reader this colour scheme."""
    metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def findings(driver: Any, home: str, page: str, pictures: Path | None = None) -> list[str]:
    """Sentences on what is wrong with a page, each with the widths and schemes in which it is; with `pictures`, also
    writes screenshots to that folder."""
    found: dict[str, list[str]] = {}
    _become(driver, *STATES[0])
    driver.get(home + page)
    driver.execute_script(STILL)
    for width, scheme in STATES:
        _become(driver, width, scheme)
        driver.execute_async_script(SETTLED)
        for sentence in driver.execute_async_script(CHECK, scheme == "dark")["sentences"]:
            found.setdefault(sentence, []).append(f"{width} {scheme}")
        if pictures:
            name = page.strip("/").replace("/", "-").removesuffix(".html") or "home"
            _screenshot(driver, width, pictures / f"{name}-{width}-{scheme}.png")
    problems = [f"the console says: {line['message']}" for line in driver.get_log("browser")]
    events = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    problems += [f"it requests {url}" for url in sorted(requested) if not url.startswith((home, "data:", "blob:"))]
    problems += [f"{_states(states)}: {sentence}" for sentence, states in found.items()]
    return [f"/{page}: {sentence}" for sentence in problems]


def _states(states: list[str]) -> str:
    """The widths and schemes of a finding, in few words."""
    if len(states) == len(STATES):
        return "all widths and schemes"
    for word in (*map(str, WIDTHS), *SCHEMES):
        if set(states) == {f"{w} {s}" for w, s in STATES if word in (str(w), s)}:
            return f"{word} wide" if word.isdigit() else word
    return ", ".join(states)


def _screenshot(driver: Any, width: int, picture: Path) -> None:
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(base64.b64decode(taken["data"]))


def search_findings(driver: Any, home: str) -> list[str]:
    """Sentences on searches that do not find what SEARCHED says."""
    problems = []
    for words, expected in SEARCHED.items():
        _become(driver, WIDTHS[-1], SCHEMES[0])
        driver.get(home)
        links = [link.removeprefix(home) for link in driver.execute_async_script(RESULTS, words)]
        pages = [link.partition("?")[0] + ("#" + link.partition("#")[2] if "#" in link else "") for link in links]
        problems += [
            f'/: a search for "{words}" does not find {page}, but {", ".join(pages[:5]) or "nothing"}'
            for page in expected
            if page not in pages
        ]
    return problems


def all_pages(site: Path) -> list[str]:
    """The addresses of all pages of a built site, the largest files first."""
    files = sorted(site.rglob("*.html"), key=lambda file: -file.stat().st_size)
    return [file.relative_to(site).as_posix().removesuffix("index.html") for file in files if file.name != "404.html"]


def check(site: Path, pages: Sequence[str], pictures: Path | None = None, jobs: int | None = None) -> list[str]:
    """Read pages of a site, in as many browsers as there are cores; prints findings as they come."""
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(pages))
    problems: list[str] = []
    with served(site) as home, ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Any] = SimpleQueue()
        for driver in pool.map(lambda _: stack.enter_context(browser()), range(jobs)):
            free.put(driver)

        def read(page: str) -> list[str]:
            driver = free.get()
            try:
                return findings(driver, home, page, pictures)
            except WebDriverException as error:
                return [f"/{page}: it cannot be read: {error.msg}"]
            finally:
                free.put(driver)

        with progress("reading", len(pages)) as watch:
            for page, sentences in zip(pages, pool.map(read, pages)):
                watch.done(f"/{page}")
                problems += _said(sentences)
        if "" in pages:
            problems += _said(search_findings(free.get(), home))
    return problems


def _said(sentences: list[str]) -> list[str]:
    for sentence in sentences:
        print(sentence, flush=True)
    return sentences


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the folder of the built site [site]")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write screenshots of the pages to this folder")
    parser.add_argument("--jobs", type=int, metavar="INTEGER", help="number of browsers [one for each core]")
    parser.add_argument("pages", nargs="*", help="addresses of pages below the site's, such as specs/ [all pages]")
    args = parser.parse_args(argv)
    pages = args.pages or all_pages(args.site)
    problems = check(args.site, pages, args.pictures, args.jobs)
    print(f"{len(pages)} pages at {len(WIDTHS)} widths, light and dark: {len(problems) or 'nothing'} wrong")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
