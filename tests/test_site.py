"""The documentation site: generated pages have every spec and every word of the tables, links are rewritten, and the
notebook runs.

`make docs` builds the site and refuses broken links. These tests need no MkDocs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import Field

import attngen
from attngen.cli import COMMANDS, main
from attngen.lang.convert import _OPERATORS
from attngen.lang.meanings import FUNCTIONS, OPERATORS
from attngen.lang.names import CALLS, POSITIONS
from attngen.masks import Mask, registry
from attngen.report.page import style_sheet
from attngen.scores import score_registry
from attngen.spec import Spec
from docs.site.committed import spec_files
from docs.site.images import with_pictures
from docs.site.pages import MOST_MB, OUTSIDE, cell, code, description, figures_css, relinked, size_of, variants_page
from docs.site.reference import example, reference_pages
from docs.site.specs import make_pages
from tests.helpers import ROOT, SPECS, spec
from tests.test_prose import emphasis_in_words

REFERENCE = reference_pages()


def titles(page: str, level: str = "##") -> list[str]:
    """Return the headings of a page at a level, without backticks."""
    return [title.replace("`", "") for title in re.findall(rf"^{level} (.*)$", REFERENCE[page], re.MULTILINE)]


def rows(page: str) -> list[str]:
    """Return the first cells of a page's tables that are code."""
    return re.findall(r"^\| <code>(.*?)</code> \|", REFERENCE[page], re.MULTILINE)


# ---------------------------------------------------------------------------------------------- the reference


def test_the_reference_has_every_mask_modifier_command_and_function() -> None:
    assert titles("reference/masks.md") == list(registry())
    assert titles("reference/scores.md") == list(score_registry())
    assert titles("reference/commands.md") == [f"attngen {name}" for name in COMMANDS]
    public = [name for name in attngen.__all__ if not name.startswith("_")]
    of_training = [f"integrations.transformers.{name}" for name in ("register", "shard_batch")]
    of_ranks = [f"distributed.{name}" for name in ("plan", "attention", "sum_gradients")]
    assert titles("reference/python.md") == [
        f"attngen.{name}" for name in (*public, *of_ranks[:2], *of_training, *of_ranks[2:])
    ]
    assert set(Spec.model_fields) <= set(rows("reference/spec.md"))


def test_the_reference_of_python_lists_arguments_and_errors() -> None:
    """Docstrings are prose: no section of one is left as text, and no text is lost."""
    page = REFERENCE["reference/python.md"]
    assert "- `score_mod`: score_mod(score, b, h, q_idx, kv_idx) -> score, or None.\n" in page
    assert "- `ValueError, TypeError`: an argument is not what was expected" in page
    assert "\n\nThe first call with a pair of functions traces them" in page and "Args:" not in page
    assert (
        "\n\nReturns: The generated module: `module.attention(q, k, v)`" in page
        and "    block_mask: Any = None," in page
    )


def test_every_word_of_the_language_is_explained() -> None:
    listed = rows("reference/language.md")
    assert [*FUNCTIONS] == [*CALLS] and set(CALLS) | set(POSITIONS) <= set(listed)
    explained = {sign for signs in OPERATORS for sign in signs.split()}
    arithmetic = set(_OPERATORS.values()) - {"@", "is", "is not", "in", "not in"}  # which expressions do not have
    assert explained >= arithmetic | {"<", "<=", ">", ">=", "==", "!=", "and", "or", "not"}


@pytest.mark.parametrize("page", ["masks", "scores", "language"])
def test_yaml_of_the_reference_is_valid(page: str) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", REFERENCE[f"reference/{page}.md"], re.MULTILINE | re.DOTALL):
        Spec.model_validate({"name": "shown", "head_dim": 64} | yaml.safe_load(block))


def test_the_reference_makes_an_example_of_a_new_mask() -> None:
    class Near(Mask):
        """A mask for this test."""

        name = "near"
        size: int = Field(ge=16)
        kind: str = Field(json_schema_extra={"enum": ["one", "two"]})
        wide: int | None = None

    assert example(Near) == {"size": 16, "kind": "one"}


# ---------------------------------------------------------------------------------------------- specs


def test_the_table_of_variants_links_to_the_page_of_each() -> None:
    assert (
        sorted(re.findall(r"^\| \[`(\w+)`\]\(\1\.md\) \| .+ \| (?:mha|mqa|gqa) \|", variants_page(), re.MULTILINE))
        == SPECS
    )
    assert [path.stem for path in spec_files()] == SPECS


@pytest.mark.share(16)
def test_the_page_of_a_spec_has_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the spec, a picture, maps of tiles, the signature and the code, and links to the page of `attngen explain
    --html`."""
    name = "softcap_window_gqa"
    path = ROOT / "specs" / f"{name}.yaml"
    made = make_pages(path, spec(name))
    assert f"```yaml\n{path.read_text()}```" in made.markdown and f"](../explain/{name}.html)" in made.markdown
    for title in (
        "The mask, the first elements",
        "Tiles of @fwd (Hopper, 128 × 128)",
        "Tiles of @bwd (Hopper, 64 × 128)",
        "Tiles of @jvp (Hopper, 128 × 64)",
        "Shared memory on sm90: 227 KiB",
        "Roofline of H100: portable, Triton",
        "Roofline of H100: warp-specialized, Hopper",
    ):
        assert f"<figcaption>{title}</figcaption>" in made.markdown
    assert (
        "attention(\n    q: torch.Tensor," in made.markdown
        and "| <code>return_lse</code> | <code>False</code> |" in made.markdown
    )
    code = made.markdown.partition("## Generated code")[2]
    assert re.findall("<summary>(.*)</summary>", code) == ["__init__.py", "kernels.py", "hopper.py"]
    assert "<td>warp-specialized, Hopper</td>" in made.markdown.partition("## What a call launches")[2]
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["explain", f"specs/{name}.yaml", "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    # On the site the page links to the style sheet that all these pages share, and to the code on the spec's page.
    (style,) = re.findall(r"<style>\n(.*?)</style>", page, re.DOTALL)
    assert style.strip() == style_sheet().strip()
    page = page.replace(f"<style>\n{style}</style>", '<link rel="stylesheet" href="../assets/explain.css"/>')
    page = page.replace("style-src 'unsafe-inline'", "style-src 'self' 'unsafe-inline'")
    before, _, code = page.partition('<section id="code">\n<h2>Generated code</h2>\n')
    link = f'<p><a href="../specs/{name}/#generated-code">The page of the spec</a> has it.</p>\n</section>'
    assert (
        made.explained
        == before + '<section id="code">\n<h2>Generated code</h2>\n' + link + code[code.index("\n</main>") :]
    )
    shown = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", code, re.DOTALL)
    assert len(shown) >= 2 and all(f"<pre><code>{text}</code></pre>" in made.markdown for text in shown)


# ---------------------------------------------------------------------------------------------- pages and links


def test_links_are_rewritten_for_the_site() -> None:
    assert relinked("[a](../semantics.md#padding)", "cookbook/sdpa.md") == "[a](../semantics.md#padding)"
    assert (
        relinked("[a](docs/ir.md) [b](CHANGELOG.md#tests) [c](#start)", "contributing.md")
        == "[a](ir.md) [b](changelog.md#tests) [c](#start)"
    )
    assert (
        relinked("![a](docs/bench/x.svg) [b](https://x.org/y)", "contributing.md")
        == "![a](bench/x.svg) [b](https://x.org/y)"
    )
    assert relinked("[a](../../attngen/masks/document.py)", "cookbook/sdpa.md") == "[a](../reference/masks.md#document)"
    assert (
        relinked("[a](../specs/causal_mqa.yaml) [b](../specs)", "index.md")
        == "[a](specs/causal_mqa.md) [b](specs/index.md)"
    )
    assert relinked("[a](../site/models.yaml)", "cookbook/huggingface.md") == "[a](../models.md)"
    # Not in the site, so MkDocs refuses them
    assert relinked("[a](../examples/tiny_lm.py)", "index.md") == "[a](../examples/tiny_lm.py)"
    assert relinked("[a](../README.md)", "index.md") == "[a](../README.md)"
    assert all((ROOT / source).is_file() for source in OUTSIDE)


def test_pictures_are_shown_in_the_scheme_of_the_reader(tmp_path: Path) -> None:
    for name in ("x.svg", "x-dark.svg", "y.svg"):
        (tmp_path / name).write_text('<svg xmlns="http://www.w3.org/2000/svg" width="300pt" height="150pt"></svg>')

    def file_of(path: str) -> Path | None:
        file = tmp_path / path.removeprefix("bench/")
        return file if path.startswith("bench/") and file.exists() else None

    html = with_pictures('<p><img alt="a &amp; b" src="../bench/x.svg" /></p>', "page/", file_of)
    forms = re.findall(r'<a href="([^"]+)"><img alt="a &amp; b" src="([^"]+)" [^>]*width="(\d+)" height="(\d+)"', html)
    assert forms == [
        ("../bench/x.svg", "../bench/x.svg#only-light", "400", "200"),
        ("../bench/x-dark.svg", "../bench/x-dark.svg#only-dark", "400", "200"),
    ]
    outside = '<img src="https://x.org/y.svg">'
    assert with_pictures(outside, "page/", file_of) == outside
    with pytest.raises(
        ValueError, match=r"^the picture bench/y.svg has no dark form; expected bench/y-dark.svg beside"
    ):
        with_pictures('<img src="../bench/y.svg">', "page/", file_of)
    with pytest.raises(ValueError, match=r"^the picture bench/z.svg is not in docs/$"):
        with_pictures('<img src="../bench/z.svg">', "page/", file_of)


def test_a_page_is_described_by_its_first_paragraph() -> None:
    assert description("<h1>A</h1>\n<p>The <code>a &lt; b</code>\nof it.</p><p>More.</p>") == "The a < b of it."
    assert description("<h1>A</h1>") == "" and description(f"<p>{'word ' * 99}</p>").endswith("word word ...")


def test_a_large_site_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "page.html").open("wb") as file:
        file.truncate(10**6)
        assert size_of(tmp_path) == 1
        file.truncate((MOST_MB + 1) * 10**6)
    with pytest.raises(ValueError, match="has 41.0 MB; expected 40 at most"):
        size_of(tmp_path)


def test_text_with_bars_stays_one_cell() -> None:
    assert cell("a | b\n  c") == "a \\| b c" and code("a | <b>") == "<code>a &#124; &lt;b&gt;</code>"


def test_formulas_in_cells_stay_as_they_are() -> None:
    assert cell("above -2**31, `2**30`") == "above -2\\*\\*31, `2**30`" and code("**") == "<code>&#42;&#42;</code>"
    pages = {**REFERENCE, "specs/index.md": variants_page()}
    assert {place: found for place, text in pages.items() if (found := list(emphasis_in_words(text)))} == {}


def test_figures_have_the_colours_of_both_schemes() -> None:
    light, _, dark = figures_css().partition('[data-md-color-scheme="slate"]')
    assert "--full: #2f6fb5" in light and "--full: #4a8fd9" in dark and ".full { fill: var(--full)" in dark


def test_the_navigation_has_every_page_that_is_written_by_hand() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", text.partition("\nnav:\n")[2]))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written | set(REFERENCE) | set(OUTSIDE.values()) | {"specs/index.md", "models.md"} == listed


def test_ci_builds_the_site() -> None:
    assert re.search(r"^make -k .*\bdocs\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs: docs-ready\n")[2].partition("\n\n")[0]
    assert "mkdocs build --strict" in recipe


# ---------------------------------------------------------------------------------------------- the notebook


@pytest.mark.share(16)
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """The notebook runs from top to bottom, in its own process, on the CPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "ATTNGEN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "docs.site.notebook"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_uncommitted_specs_are_ignored(tmp_path: Path) -> None:
    """`attngen new` writes to specs/, and neither the tests nor the site use such a spec before it is in git. Without
    git all specs are used."""
    (tmp_path / "specs").mkdir()
    for name in ("ours", "tried"):
        (tmp_path / "specs" / f"{name}.yaml").touch()
    assert [path.stem for path in spec_files(tmp_path)] == ["ours", "tried"]
    for command in (["init", "-q"], ["add", "specs/ours.yaml"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert [path.stem for path in spec_files(tmp_path)] == ["ours"]
