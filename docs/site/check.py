"""`make docs-check`: open the built site in Chromium, at two widths, light and dark.

A page fails if the console prints something, if the page requests a file from elsewhere, or if it is wider than
the window. Screenshots of all pages are written to the named folder. It needs chromium, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
WIDTHS, HEIGHT, SCHEMES = (400, 1400), 1000, ("light", "dark")
TALLEST = 12_000  # rows of a screenshot
PAGES = (
    "",
    "getting-started/",
    "quickstart/",
    "cookbook/flexattention/",
    "reference/language/",
    "reference/masks/",
    "specs/",
    "specs/sinks_window_gqa/",
    "specs/decode_mla/",
    "explain/causal_mqa.html",
    "explain/sinks_window_gqa.html",
    "explain/decode_mla.html",
)
WIDER = "return [document.documentElement.scrollWidth - window.innerWidth, document.documentElement.scrollHeight]"


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


def _found(*names: str) -> str:
    """The path of the first of these programs that is on the PATH; exits with an error if there is none."""
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        sys.exit(
            f"error: no {names[0]} on the PATH; expected it installed, as by `apt-get install chromium chromium-driver`"
        )
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium with an empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        isolation = (
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "disable-quic",
        )
        for flag in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "hide-scrollbars",
            *isolation,
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        options.binary_location = _found("chromium", "chromium-browser", "google-chrome")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_found("chromedriver")))
        try:
            driver.get("about:blank")
            driver.get_log("performance")  # of the page that Chromium starts with
            yield driver
        finally:
            driver.quit()


def looked_at(driver: Any, home: str, page: str, width: int, scheme: str, picture: Path) -> list[str]:
    """Sentences on what is wrong with a page at a width and in a colour scheme; also writes a screenshot of it."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False},
    )
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.get(home + page)
    driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 300))")
    problems = [f"the console says: {line['message']}" for line in driver.get_log("browser")]
    events = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    problems += [f"it requests {url}" for url in sorted(requested) if not url.startswith((home, "data:", "blob:"))]
    wider, height = driver.execute_script(WIDER)
    if wider > 0:
        problems.append(f"it is {wider} pixels wider than the window")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    picture.write_bytes(base64.b64decode(taken["data"]))
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pictures", type=Path, default=ROOT / "site-pictures", help="folder for screenshots [site-pictures]"
    )
    parser.add_argument(
        "pages", nargs="*", default=PAGES, help="addresses of pages below the site's [a dozen of all kinds]"
    )
    args = parser.parse_args(argv)
    args.pictures.mkdir(exist_ok=True)
    wrong = 0
    with served(ROOT / "site") as home, browser() as driver:
        for page in args.pages:
            for width in WIDTHS:
                for scheme in SCHEMES:
                    name = page.strip("/").replace("/", "-").removesuffix(".html") or "home"
                    problems = looked_at(
                        driver, home, page, width, scheme, args.pictures / f"{name}-{width}-{scheme}.png"
                    )
                    wrong += len(problems)
                    for sentence in problems:
                        print(f"/{page}, {width} wide, {scheme}: {sentence}")
    found = f"{wrong or 'nothing'} wrong; pictures in {args.pictures}"
    print(f"{len(args.pages)} pages at {len(WIDTHS)} widths, light and dark: {found}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
