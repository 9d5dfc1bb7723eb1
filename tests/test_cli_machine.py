"""`attngen doctor`, `attngen cache` and completion in shells: what they say of a machine, and change on it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen import __version__, api
from attngen.cli import machine
from tests import cli_common
from tests.cli_common import Cli, in_terminal
from tests.helpers import ROOT

project, attngen = cli_common.project, cli_common.attngen  # fixtures


def doctor_lines(output: str) -> dict[str, str]:
    """The lines of `doctor` by their first word."""
    return {line.partition(" ")[0]: line[9:] for line in output.splitlines() if line[0] != " "}


def test_doctor_describes_the_environment_and_fits_a_screen(
    attngen: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    output = attngen("doctor")
    assert len(output.splitlines()) <= 24
    found = doctor_lines(output)
    assert list(found)[:6] == ["attngen", "python", "torch", "triton", "numpy", "pair"]
    assert found["attngen"] == f"{__version__}, in {ROOT / 'attngen'}" and torch.__version__.startswith(found["torch"])
    assert found["pair"] == f"torch {found['torch']} and Triton {found['triton']} are supported together"
    assert found["cache"] == f"{tmp_path / 'modules'}: 0 modules, 0.0 MB"
    if not torch.cuda.is_available():
        assert found["gpu"].endswith(
            "kernels run on the CPU, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment"
        )
        assert "TRITON_INTERPRET=1 is set" in output


def test_doctor_folds_at_spaces_in_a_terminal_and_not_in_a_pipe(
    attngen: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(project))
    piped = attngen("doctor")
    assert all(line[:9].strip() or line.startswith(" " * 9 + "TRITON") for line in piped.splitlines())
    text = in_terminal("doctor", folder=project, columns=60)
    assert text.split() == piped.split()
    for line in text.splitlines():
        assert len(line) <= 60 or " " not in line[9:], line  # a folder's path stays whole


@pytest.mark.parametrize(
    ("name", "capability", "line"),
    [
        ("NVIDIA H200", (9, 0), "NVIDIA H200, compute capability 9.0: schedules of class sm90"),
        ("NVIDIA L4", (8, 9), "NVIDIA L4, compute capability 8.9: schedules of class any"),
        ("NVIDIA GB300", (10, 3), "NVIDIA GB300, compute capability 10.3: schedules of class sm100"),
    ],
)
def test_doctor_names_the_class_of_a_gpu(
    attngen: Cli, name: str, capability: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, name, capability)
    output = attngen("doctor")
    assert doctor_lines(output)["gpu"] == line
    assert "TRITON_INTERPRET=1 is set, so kernels run on the CPU all the same" in output


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Let torch find one GPU of this name and compute capability."""
    major, minor = capability
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, major=major, minor=minor)
    )


def test_doctor_fails_if_modules_cannot_run(attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "Tesla V100", (7, 0))
    expected = (
        "Tesla V100, compute capability 7.0: it has no schedules; expected a GPU of compute capability 8.0 or later"
    )
    assert attngen("doctor", code=1) == f"error: {expected}\n"
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.4.0"}
    monkeypatch.setattr(machine, "version", lambda package: versions[package])
    assert "error: the interpreter of Triton 3.6.0 does not work with numpy 2.4.0; expected numpy below 2.4" in attngen(
        "doctor", code=1
    )
    assert doctor_lines(attngen.output)["pair"] == "torch 2.11.0+cu130 and Triton 3.6.0 are supported together"
    versions["triton"] = "3.8.0"
    attngen("doctor", code=1)
    pairs = "2.11.0 and 3.6.0, 2.12.0 and 3.7.0, 2.13.0 and 3.7.1, 2.14.0 and 3.8.0, 2.15.0 and 3.9.0"
    assert (
        doctor_lines(attngen.output)["pair"]
        == f"torch 2.11.0+cu130 and Triton 3.8.0 are not tested together; supported pairs: {pairs}"
    )
    monkeypatch.setattr(machine, "_installed", lambda package: "" if package == "triton" else versions[package])
    assert (
        attngen("doctor", code=1) == "error: there is no triton; expected it in this environment: pip install triton\n"
    )
    assert doctor_lines(attngen.output)["triton"] == "not installed"


def test_cache_shows_modules_and_removes_them(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project / "kept"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(root))
    assert attngen("cache") == f"{root}/modules: 0 modules, 0.0 MB\n"
    assert attngen("cache", "--clear") == f"removed {root}/modules: 0 modules, 0.0 MB\n"
    module = api.build("specs/good.yaml")
    heading, line, total = attngen("cache").splitlines()
    assert heading.split() == ["module", "MB", "built"] and line.split()[0] == Path(str(module.__file__)).parent.name
    assert re.fullmatch(rf"{root}/modules: 1 module, 0\.[1-9] MB", total)
    (root / "other").touch()
    assert attngen("cache", "--clear") == f"removed {total}\n"
    assert {path.name for path in root.iterdir()} == {"modules", "other"}
    assert {path.name for path in (root / "modules").iterdir()} == {"CACHEDIR.TAG", ".locks", ".receipts"}
    assert attngen("cache") == f"{root}/modules: 0 modules, 0.0 MB\n"


def test_cache_removes_only_its_own_files(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "modules" / "mine").mkdir(parents=True)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(project))
    expected = (
        f"error: {project}/modules is not a cache of attngen (it has no CACHEDIR.TAG); expected ATTNGEN_CACHE_DIR to "
        f"name a folder"
    )
    assert attngen("cache", "--clear", code=1).startswith(expected)
    assert (project / "modules" / "mine").is_dir()


def completions(words: str, folder: Path) -> list[str]:
    """The words to which bash completes the last one of `words`."""
    asked = {"_ATTNGEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "attngen"]
    env = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.share(8)
def test_shells_complete_commands_and_specs(project: Path) -> None:
    for path in ("specs/goat.yaml", "specs/other.yaml", "elsewhere/its.yaml"):
        (project / path).parent.mkdir(exist_ok=True)
        shutil.copy(project / "specs" / "good.yaml", project / path)
    (project / "specs" / "notes.txt").touch()
    assert completions("attngen d", project) == ["dump", "doctor"]
    for start in ("", "sp", "specs/"):
        assert completions(f"attngen build {start}", project) == [
            "specs/goat.yaml",
            "specs/good.yaml",
            "specs/other.yaml",
        ]
    assert completions("attngen explain specs/go", project) == ["specs/goat.yaml", "specs/good.yaml"]
    assert completions("attngen test ./specs/o", project) == ["./specs/other.yaml"]
    assert completions("attngen dump causal_d", project) == ["causal_d256", "causal_d512_gqa", "causal_dropout_mqa"]
    assert completions("attngen new mine --like go", project) == ["goat", "good"]
    assert completions("attngen test el", project) == ["elsewhere/"]
    assert completions("attngen test elsewhere/", project) == ["elsewhere/its.yaml"]


@pytest.mark.share(4)
def test_shells_are_given_a_script(attngen: Cli) -> None:
    assert "--install-completion" in attngen("--help")
    for shell, line in {
        "bash": "complete -o default -F _attngen_completion attngen",
        "zsh": "compdef _attngen_completion attngen",
    }.items():
        env = {**os.environ, "_ATTNGEN_COMPLETE": f"source_{shell}"}
        done = subprocess.run(
            [sys.executable, "-m", "attngen"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert line in done.stdout


def test_doctor_fails_if_the_cache_cannot_be_written(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "file" / "deep"))
    expected = (
        f"{tmp_path}/file/deep/modules: cannot be written (Not a directory: {tmp_path}/file); name another folder in "
        f"ATTNGEN_CACHE_DIR"
    )
    assert expected in attngen("doctor", code=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert f"modules: cannot be written (Read-only file system: {tmp_path})" in attngen("doctor", code=1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("number", "hint"), [("EROFS", "expected a folder that this user can write"), ("ENOTEMPTY", "Try again")]
)
def test_a_cache_that_cannot_be_removed(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch, number: str, hint: str
) -> None:
    """The hint is to try again if another process may be building, and not if the disk is read-only."""
    (tmp_path / "modules" / "mine_0123456789abcdef").mkdir(parents=True)
    (tmp_path / "modules" / "CACHEDIR.TAG").touch()
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))

    def fails(*_: Any) -> None:
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr("attngen.cache.store._remove", fails)
    assert attngen("cache", "--clear", code=1).endswith(
        f"cannot be removed (no); {'is another process building? ' * (hint[0] == 'T')}{hint}\n"
    )
