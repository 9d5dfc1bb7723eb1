"""The wheel and the sdist are complete: an environment with the wheel builds, tests and calls modules without the
checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attngen import __version__
from tests.helpers import CUDA, ROOT

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
    for kind in ("ir", "json"):
        expected = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "attngen").rglob(f"*.{kind}"))
        assert sorted(n for n in names if n.endswith(f".{kind}") and ".dist-info/" not in n) == expected != []


def test_the_sdist_builds_the_same_wheel(released: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = released
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    folders = {"attngen", "docs", "examples", "generated", "specs", "templates", "tests"}
    assert {path.name for path in source.iterdir() if path.is_dir()} == folders
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
built = attngen.build("specs/mine.yaml")
assert built.attention(q, k, v).equal(attention(q, k, v)) and attngen.load("generated/mine") is built
"""


@pytest.mark.share(32)
def test_installed_commands_work_without_the_checkout(run: Run, tmp_path: Path) -> None:
    assert run("attngen", "--version") == f"{__version__}\n"
    assert run("attngen", "new", "mine").splitlines() == ["specs/mine.yaml", "next: attngen build specs/mine.yaml"]
    with (tmp_path / "specs" / "mine.yaml").open("a") as spec:
        spec.write("schedule: {backend: triton}\n")  # fewer kernels take less time
    assert run("attngen", "build", "specs/mine.yaml").endswith("1 module written to generated, 0 unchanged\n")
    cases = run("attngen", "test", "specs/mine.yaml").splitlines()[2:]
    assert cases and all(line.endswith(" ok") for line in cases)
    run("python", "-c", CALL, **({} if CUDA else {"TRITON_INTERPRET": "1"}))
    doctor = run("attngen", "doctor")
    assert f"{tmp_path / 'cache' / 'modules'}: 1 module, " in doctor and "supported together" in doctor
    assert "_attngen_completion" in run("attngen", _ATTNGEN_COMPLETE="source_bash")
