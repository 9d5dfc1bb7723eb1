"""The hook of MkDocs: adds generated pages to those of docs/, replaces links to files outside docs/ by links to their
pages, shows each picture in the reader's colour scheme, and limits the size of the site."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attngen.cli.console import Watch, err, steps
from attngen.errors import AttngenError
from attngen.report.page import style_sheet
from docs.site.committed import ROOT, spec_files
from docs.site.images import with_pictures
from docs.site.models import models_page
from docs.site.notebook import notebook_page
from docs.site.pages import NOTEBOOK_PAGE, OUTSIDE, description, figures_css, relinked, size_of, variants_page
from docs.site.reference import reference_pages
from docs.site.specs import SpecPages, started

SPECS = "Specs"  # the part of the navigation that lists specs


class Build:
    """The present build: its start, and its progress."""

    def __init__(self) -> None:
        self.shown = ExitStack()

    def start(self) -> None:
        """Show its progress from now on."""
        self.started, self.begin = time.monotonic(), self.shown.enter_context(steps())

    def stop(self) -> None:
        """Show it no more."""
        self.shown.close()

    def step(self, title: str, total: int) -> None:
        """Begin a step on so many pages."""
        self.pages: Watch = self.begin(title, total)


build = Build()


@cache
def generated() -> dict[str, str]:
    """All generated files but those of specs, by their path in the site's sources; made once, also by `mkdocs
    serve`."""
    files = {
        page: (ROOT / source).read_text(encoding="utf-8") for source, page in OUTSIDE.items() if page != NOTEBOOK_PAGE
    }
    files |= {NOTEBOOK_PAGE: notebook_page(), "specs/index.md": variants_page()}
    files |= {"assets/figures.css": figures_css(), "assets/explain.css": style_sheet()}
    files["models.md"] = models_page()
    return files | reference_pages()


@cache
def of_specs() -> dict[str, Callable[[], str]]:
    """The generated files of specs by their path: functions that wait for the process that makes the file."""
    files: dict[str, Callable[[], str]] = {}
    for name, future in started().items():
        files[f"specs/{name}.md"] = partial(_made, future, "markdown")
        files[f"explain/{name}.html"] = partial(_made, future, "explained")
    return files


def _made(future: Future[SpecPages], field: str) -> str:
    try:
        return str(getattr(future.result(), field))
    except AttngenError as error:
        raise PluginError(str(error)) from error


def on_pre_build(config: MkDocsConfig) -> None:
    """Start to make the pages of specs, and to show how far they are."""
    made = started()
    build.start()
    watch = build.begin("explaining", len(made))
    for name, future in made.items():
        future.add_done_callback(lambda _, name=name: watch.done(name))  # type: ignore[misc]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the page of each spec in the navigation, under the heading that mkdocs.yml has for them."""
    (part,) = (part[SPECS] for part in config.nav or [] if SPECS in part)
    part += [f"specs/{path.stem}.md" for path in spec_files() if f"specs/{path.stem}.md" not in part]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated files. Those of specs are empty until they are read or copied."""
    for place, content in (generated() | dict.fromkeys(of_specs(), "")).items():
        files.append(File.generated(config, place, content=content))
    build.step("reading", len(files.documentation_pages()))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Return the text of a spec's page."""
    build.pages.done(page.file.src_uri)
    return of_specs()[page.file.src_uri]() if page.file.src_uri in of_specs() else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace a page's links to files of the repository by links to their pages."""
    return relinked(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show each picture in the reader's colour scheme, and describe the page by its first paragraph."""
    page.meta.setdefault("description", description(html) or config.site_description)

    def file_of(path: str) -> Path | None:
        file = files.get_file_from_path(path)
        return Path(file.abs_src_path) if file and file.abs_src_path else None

    try:
        return with_pictures(html, page.url, file_of)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Fill in the pages of `attngen explain`."""
    for place, content in of_specs().items():
        if (file := files.get_file_from_path(place)) and not file.is_documentation_page():
            file.content_string = content()
    build.step("writing", len(files.documentation_pages()))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Count a page."""
    build.pages.done(page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Print how long the build took and how large the site is, and refuse a large one."""
    build.stop()
    try:
        megabytes = size_of(Path(config.site_dir))
    except ValueError as error:
        raise PluginError(str(error)) from error
    err.print(f"{config.site_dir}: {time.monotonic() - build.started:.0f} s, {megabytes:.1f} MB")


def on_build_error(error: Exception) -> None:
    """Leave the terminal as it was."""
    build.stop()
