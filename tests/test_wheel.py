"""The wheel alone is enough: it holds the templates, and its command builds what is committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    (path,) = folder.glob("attngen-*.whl")
    return path


def test_the_wheel_holds_the_package_and_its_templates_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    templates = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "templates").rglob("*.jinja"))
    assert sorted(n.removeprefix("attngen/") for n in names if n.endswith(".jinja")) == templates
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"attngen"}
    assert not [n for n in names if "__pycache__" in n]
    algorithms = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "attngen").rglob("*.ir"))
    assert sorted(n for n in names if n.endswith(".ir")) == algorithms != []


def test_installed_it_builds_what_is_committed(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=work, env=env, check=True, capture_output=True, text=True).stdout

    where = "import attngen, attngen.emit.render as r; print(attngen.__file__, r.templates_dir())"
    assert run(sys.executable, "-c", where).split() == [str(site / "attngen" / "__init__.py"), str(site / "attngen" / "templates")]
    shutil.copytree(ROOT / "generated" / "causal_padding_gqa", work / "causal_padding_gqa")  # with the compiler's readings
    for path in (work / "causal_padding_gqa").glob("*.py"):
        path.unlink()
    run(str(site / "bin" / "attngen"), "build", str(ROOT / "specs" / "causal_padding_gqa.yaml"), "--out", str(work))
    for path in (ROOT / "generated" / "causal_padding_gqa").iterdir():
        if path.is_file():
            assert (work / "causal_padding_gqa" / path.name).read_bytes() == path.read_bytes(), path.name
