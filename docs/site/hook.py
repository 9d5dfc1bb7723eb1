"""The hook of MkDocs: adds generated pages to those of docs/, and replaces links to files outside docs/ by links to
their pages."""

from __future__ import annotations

from functools import cache

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.committed import ROOT, spec_files
from docs.site.notebook import notebook_page
from docs.site.pages import NOTEBOOK_PAGE, OUTSIDE, figures_css, relinked, variants_page
from docs.site.reference import reference_pages
from docs.site.specs import spec_pages

SPECS = "Specs"  # the part of the navigation that lists specs


@cache
def generated() -> dict[str, str]:
    """All generated files by their path in the site's sources; made once, also by `mkdocs serve`."""
    files = {
        page: (ROOT / source).read_text(encoding="utf-8") for source, page in OUTSIDE.items() if page != NOTEBOOK_PAGE
    }
    files |= {NOTEBOOK_PAGE: notebook_page(), "assets/figures.css": figures_css(), "specs/index.md": variants_page()}
    files |= reference_pages()
    for made in spec_pages():
        files |= {f"specs/{made.name}.md": made.markdown, f"explain/{made.name}.html": made.explained}
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the page of each spec in the navigation, under the heading that mkdocs.yml has for them."""
    (part,) = (part[SPECS] for part in config.nav or [] if SPECS in part)
    part += [f"specs/{path.stem}.md" for path in spec_files() if f"specs/{path.stem}.md" not in part]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated files."""
    for place, content in generated().items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace a page's links to files of the repository by links to their pages."""
    return relinked(markdown, page.file.src_uri)
