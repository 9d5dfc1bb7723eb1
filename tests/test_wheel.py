"""The wheel and the sdist are complete: an environment with the wheel builds, tests and calls modules without the
checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from attngen import __version__
from tests.helpers import CUDA, ROOT, SPECS

Run = Callable[..., str]


def package(source: Path, folder: Path, *targets: str) -> list[Path]:
    """Build targets of a source tree with hatchling, and return one file for each."""
    chosen = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return [next(folder.glob("*.whl" if target == "wheel" else "*.tar.gz")) for target in targets]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the sdist."""
    wheel, sdist = package(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return wheel, sdist


@pytest.fixture(scope="module")
def environment(released: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin/ of an environment that has the wheel. Its other packages are those of the current environment,
    without attngen."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(released[0]),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    (packages / "present.pth").write_text("\n".join(here) + "\n")
    return python.parent


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Return a function that runs a command of the environment in an empty folder, and returns its output."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env["ATTNGEN_CACHE_DIR"] = str(tmp_path / "cache")

    def found(command: str, *args: object, **more: str) -> str:
        words = [str(environment / command), *map(str, args)]
        done = subprocess.run(words, cwd=tmp_path, env=env | more, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return found


@pytest.mark.share(16)
def test_the_wheel_has_only_the_package_and_its_templates(released: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(released[0]).namelist()
    templates = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "templates").rglob("*.jinja"))
    assert sorted(n.removeprefix("attngen/") for n in names if n.endswith(".jinja")) == templates
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"attngen"}
    assert not [n for n in names if "__pycache__" in n]
    assert "attngen/py.typed" in names
    assert sorted(n for n in names if n.endswith(".yaml")) == [f"attngen/specs/{name}.yaml" for name in SPECS]
    for kind in ("ir", "json"):
        expected = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "attngen").rglob(f"*.{kind}"))
        assert sorted(n for n in names if n.endswith(f".{kind}") and ".dist-info/" not in n) == expected != []


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(archive.read(name).decode("utf-8"))


def relative(markdown: str) -> list[str]:
    """The links and pictures of a page that lead nowhere outside of the repository."""
    html = MarkdownIt("commonmark").enable("table").render(markdown)
    found = re.findall(r"\b(?:href|src|srcset)=[\"']?([^\"'> ]*)", re.sub(r"(?s)<code.*?</code>", "", html))
    return [link for link in found if not re.match(r"https?://|mailto:", link)]


@pytest.mark.share(4)
def test_the_long_description_is_the_readme_without_relative_links(released: tuple[Path, Path]) -> None:
    described = str(metadata_of(released[0]).get_payload())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert relative(readme) and relative(described) == []
    assert re.findall(r"(?ms)^```.*?^```", described) == re.findall(r"(?ms)^```.*?^```", readme)
    assert len(described.split()) > 0.9 * len(readme.split())


def test_relative_links_of_any_form_are_left_out() -> None:
    config = pytest.importorskip("tomllib", reason="Python 3.10 has none").loads((ROOT / "pyproject.toml").read_text())
    page = README
    for rule in config["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    assert relative(README) == [
        "docs/dark.svg",
        "docs/light.svg",
        "a.png",
        "docs/a.svg",
        "b.png",
        "docs/b.md",
        "docs/a.md",
        "#limits",
        "docs/c.md",
    ]
    assert page == DESCRIPTION and relative(page) == []


README = """\
# attngen

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/dark.svg">
  <img alt="tiles" src="docs/light.svg" width="800">
</picture>

![a chart](a.png)
A [![picture](docs/a.svg) in a link](https://example.org) and <img src="b.png">.
<a href="docs/b.md">The docs</a>, [more](docs/a.md), [**limits**](#limits), [`code`](docs/c.md), [there](https://x.org/a).

```python
kernel[grid](q, k)
```
"""
DESCRIPTION = """\
# attngen

A [ in a link](https://example.org) and .
The docs, more, **limits**, `code`, [there](https://x.org/a).

```python
kernel[grid](q, k)
```
"""


@pytest.mark.share(4)
def test_the_metadata_says_what_is_supported(released: tuple[Path, Path]) -> None:
    found = metadata_of(released[0])
    classifiers = found.get_all("Classifier", [])
    assert found["Requires-Python"] == ">=3.10" and {"attention", "Triton", "KV cache"} <= {
        *found["Keywords"].split(",")
    }
    versions = [f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)]
    assert {*versions, "Typing :: Typed", "Operating System :: POSIX :: Linux"} <= {*classifiers}
    # The owner has chosen no licence yet, and the project has no public address.
    assert not [c for c in classifiers if "License" in c] and not found["License"] and not found["License-Expression"]
    assert not found["Author"] and not found["Project-URL"]


@pytest.mark.share(16)
def test_pip_keeps_the_torch_and_triton_of_an_environment(released: tuple[Path, Path], environment: Path) -> None:
    """The environment has all that the wheel requires, so pip would install nothing more."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "python"), "install", "--no-index", "--dry-run"]
    done = subprocess.run([*pip, str(released[0])], capture_output=True, text=True)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stdout + done.stderr


def test_the_sdist_builds_the_same_wheel(released: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = released
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    folders = {"attngen", "docs", "examples", "generated", "specs", "templates", "tests"}
    assert {path.name for path in source.iterdir() if path.is_dir()} == folders
    top = {"CHANGELOG.md", "Makefile", "README.md", "pyproject.toml", "requirements-cpu.txt", "requirements-dev.txt"}
    assert top <= {path.name for path in source.iterdir()}
    assert not [*source.rglob("__pycache__"), *source.rglob("*.pyc")]
    (again,) = package(source, tmp_path / "dist", "wheel")
    made, remade = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert {name: made.read(name) for name in made.namelist()} == {
        name: remade.read(name) for name in remade.namelist()
    }


@pytest.mark.share(4)
def test_the_installed_package_builds_the_committed_module(environment: Path, run: Run, tmp_path: Path) -> None:
    where = "import attngen, attngen.cache.fingerprint as s; print(attngen.__file__, s.templates_dir())"
    package, templates = map(Path, run("python", "-c", where).split())
    assert package.is_relative_to(environment.parent) and templates == package.parent / "templates"
    # The folder has the compile reports.
    shutil.copytree(ROOT / "generated" / "causal_padding_gqa", tmp_path / "causal_padding_gqa")
    for path in (tmp_path / "causal_padding_gqa").glob("*.py"):
        path.unlink()
    run("attngen", "build", ROOT / "specs" / "causal_padding_gqa.yaml", "--out", tmp_path)
    for path in (ROOT / "generated" / "causal_padding_gqa").iterdir():
        if path.is_file():
            assert (tmp_path / "causal_padding_gqa" / path.name).read_bytes() == path.read_bytes(), path.name


CALL = """
import torch, attngen
from generated.mine import attention
q, k, v = torch.randn(3, 1, 2, 40, 64, dtype=torch.float16, device="cuda" if torch.cuda.is_available() else "cpu")
built = attngen.build("mine")
assert built.attention(q, k, v).equal(attention(q, k, v)) and attngen.load("generated/mine") is built
"""


@pytest.mark.share(32)
def test_installed_commands_work_without_the_checkout(run: Run, tmp_path: Path) -> None:
    assert run("attngen", "--version") == f"attngen {__version__}\n" == run("python", "-m", "attngen", "--version")
    assert "\ncausal_mqa " in run("attngen", "list")
    assert run("attngen", "new", "mine").splitlines() == ["specs/mine.yaml", "next: attngen build specs/mine.yaml"]
    with (tmp_path / "specs" / "mine.yaml").open("a") as spec:
        spec.write("schedule: {backend: triton}\n")  # fewer kernels take less time
    assert "report.json written\n" in run("attngen", "build", "mine")
    cases = run("attngen", "test", "mine").partition("\n\n")[0].splitlines()[2:]  # a blank line is after them
    assert cases and all(line.endswith(" ok") for line in cases)
    run("python", "-c", CALL, **({} if CUDA else {"TRITON_INTERPRET": "1"}))
    doctor = run("attngen", "doctor")
    assert f"{tmp_path / 'cache' / 'modules'}: 1 module, " in doctor and "supported together" in doctor
    assert "_attngen_completion" in run("attngen", _ATTNGEN_COMPLETE="source_bash")


@pytest.mark.nightly
def test_a_copy_of_a_shipped_spec_is_built_and_tested_by_its_name(run: Run, tmp_path: Path) -> None:
    run("attngen", "new", "x", "--like", "window_gqa")
    run("attngen", "build", "x")
    assert " ok\n" in run("attngen", "test", "x")
    assert "report.json written\n" in run("attngen", "build", "causal_fp32")
    assert {path.name for path in (tmp_path / "generated").iterdir()} == {"causal_fp32", "x"}
