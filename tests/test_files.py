"""Writing a module writes all its files or none, and nothing outside its folder."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attngen.codegen.files import diff_module, read_module, write_file, write_module
from attngen.errors import AttngenError
from tests.helpers import ROOT

OLD = {"__init__.py": "old\n", "schedule.ir": "old\n"}
NEW = {"__init__.py": "new\n", "kernels.py": "new\n", "schedule.ir": "new\n"}


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_module_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "x"
    assert write_module(OLD, folder)
    assert not write_module(OLD, folder)
    assert write_module(NEW, folder)
    assert read_module(folder) == NEW
    assert tree(tmp_path / "deep") == ["x", "x/__init__.py", "x/kernels.py", "x/schedule.ir"]


def test_line_ends_are_the_same_everywhere(tmp_path: Path) -> None:
    write_module(NEW, tmp_path / "x")
    assert (tmp_path / "x" / "kernels.py").read_bytes() == b"new\n"


def test_bytecode_caches_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_module(OLD, folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"\x00")
    assert not write_module(OLD, folder)
    assert write_module(NEW, folder)


@pytest.mark.parametrize("failing", ["write", "move the old away", "move the new in"])
def test_a_failure_midway_leaves_the_old_files_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    folder = tmp_path / "x"
    write_module(OLD, folder)
    rename, write_text, calls = os.rename, Path.write_text, []

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken_rename(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == (1 if failing == "move the old away" else 2):
            full()
        rename(source, target)

    def broken_write(self: Path, *args: Any, **kwargs: Any) -> int:
        if self.name == "schedule.ir":
            full()
        return write_text(self, *args, **kwargs)

    if failing == "write":
        monkeypatch.setattr(Path, "write_text", broken_write)
    else:
        monkeypatch.setattr(os, "rename", broken_rename)
    with pytest.raises(AttngenError, match="cannot write .*x: No space left on device"):
        write_module(NEW, folder)
    assert read_module(folder) == OLD
    assert tree(tmp_path) == ["x", "x/__init__.py", "x/schedule.ir"]


def test_an_interrupt_midway_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    write_module(OLD, folder)
    rename = os.rename

    def interrupted(source: Path, target: Path) -> None:
        if source.name == "fresh":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_module(NEW, folder)
    assert read_module(folder) == OLD
    assert tree(tmp_path) == ["x", "x/__init__.py", "x/schedule.ir"]


@pytest.mark.parametrize("renames", [0, 1])
def test_the_next_build_removes_the_files_of_a_killed_one(tmp_path: Path, renames: int) -> None:
    """A build is killed before it moves the old module away or the new one in; other folders stay."""
    write_module(OLD, tmp_path / "x")
    others = [
        tmp_path / f".x-{platform.node()}-{os.getpid()}-a",
        tmp_path / ".x-elsewhere-1-a",
        tmp_path / f".y-{platform.node()}-1-a",
    ]
    for folder in others:
        folder.mkdir()
    code = f"""
import os, signal
from pathlib import Path
from attngen.codegen.files import write_module
rename, left = os.rename, [{renames}]
def killed(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    rename(source, target)
os.rename = killed
write_module({NEW!r}, Path({str(tmp_path / "x")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*"))) == len(others) + 1
    assert write_module(NEW, tmp_path / "x")
    assert sorted(tmp_path.glob(".*")) == sorted(others) and read_module(tmp_path / "x") == NEW


def test_folders_that_attngen_did_not_write_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    with pytest.raises(
        AttngenError, match="mine exists and is not a generated module .it has no schedule.ir.; give another --out"
    ):
        write_module(NEW, folder)
    (folder / "schedule.ir").write_text("")
    with pytest.raises(
        AttngenError,
        match="mine holds notes.md, which attngen does not write; move it elsewhere, or give another --out",
    ):
        write_module(NEW, folder)
    assert (folder / "notes.md").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(AttngenError, match="file exists and is not a folder"):
        write_module(NEW, file)
    with pytest.raises(AttngenError, match="file is not a folder; give another --out"):
        write_module(NEW, file / "x")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("foreign", [".git/config", "kernels.py/precious"])
def test_hidden_files_and_folders_named_as_a_modules_files_are_kept(tmp_path: Path, foreign: str) -> None:
    write_module(OLD, tmp_path / "x")
    path = tmp_path / "x" / foreign
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(AttngenError, match=f"x holds {path.parent.name}, which attngen does not write"):
        write_module(NEW, tmp_path / "x")
    assert path.read_text() == "mine"


def test_a_link_to_a_module_is_followed(tmp_path: Path) -> None:
    write_module(OLD, tmp_path / "real" / "x")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "x")
    assert write_module(NEW, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and read_module(tmp_path / "real" / "x") == NEW


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AttngenError, match="out.html: cannot be written \\(No space left on device\\)"):
        write_file(path, "new")
    assert os.listdir(tmp_path) == ["out.html"] and path.read_text() == "old"


def test_a_file_is_written_in_a_new_folder_and_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "table.json"
    (tmp_path / "link").symlink_to(path)
    for text in ("old\r\n", "new\n"):
        write_file(tmp_path / "link", text)
        assert path.read_bytes() == text.encode() and (tmp_path / "link").is_symlink()
    assert os.listdir(path.parent) == ["table.json"]
    with pytest.raises(AttngenError, match="table.json/x: cannot be written \\(.*\\)"):
        write_file(path / "x", "")


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert write_module(NEW, tmp_path / "x")


def test_diffs_name_every_file_that_differs(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    assert diff_module(NEW, folder) == f"{folder} does not exist"
    write_module(NEW, folder)
    assert diff_module(NEW, folder) == ""
    (folder / "kernels.py").write_text("edited\n")
    (folder / "extra.py").write_text("extra\n")
    lines = diff_module(NEW, folder).splitlines()
    assert lines == [
        f"{folder}/extra.py is not written from the spec",
        f"--- {folder}/kernels.py", "+++ kernels.py from the spec", "@@ -1 +1 @@", "-edited", "+new",
    ]  # fmt: skip


@pytest.mark.parametrize("difference", ["file", "hidden file", "folder", "link", "line ends", "no last line end"])
def test_a_diff_shows_every_kind_of_difference(tmp_path: Path, difference: str) -> None:
    folder = tmp_path / "x"
    write_module(NEW, folder)
    (folder / "__pycache__").mkdir()
    assert diff_module(NEW, folder) == ""
    if difference == "file":
        (folder / "extra.py").write_text("")
    elif difference == "hidden file":
        (folder / ".extra").write_text("")
    elif difference == "folder":
        (folder / "extra").mkdir()
    elif difference == "link":
        (folder / "extra").symlink_to(tmp_path / "nowhere")
    else:
        (folder / "kernels.py").write_bytes(b"new\r\n" if difference == "line ends" else b"new")
    expected = "kernels.py has other line ends, or an end without one" if "line end" in difference else "extra"
    assert expected in diff_module(NEW, folder) and len(diff_module(NEW, folder).splitlines()) == 1


def test_files_of_an_earlier_spec_are_replaced(tmp_path: Path) -> None:
    """The new spec has no kernels for Hopper, so the hopper.py that attngen wrote is removed; a hopper.py of a user is
    kept, and the build refused."""
    header = (
        '"""Gluon kernels of `x` for Hopper. Generated by attngen 0.1.0 from sha256:0123456789abcdef; do not edit.\n'
        '"""\n'
    )
    folder = tmp_path / "x"
    write_module({**OLD, "hopper.py": header}, folder)
    assert write_module(NEW, folder) and read_module(folder) == NEW
    (folder / "hopper.py").write_text('"""My kernels."""\n')
    with pytest.raises(AttngenError, match="holds hopper.py, which attngen does not write"):
        write_module(NEW, folder)


@pytest.mark.share(16)
@pytest.mark.parametrize("missing", ["kernels.py", "runtime.py", "hopper.py"])
def test_importing_a_folder_that_lacks_a_file_names_the_file(tmp_path: Path, missing: str) -> None:
    shutil.copytree(ROOT / "generated" / "causal_mha", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine" / missing).unlink()
    done = subprocess.run(
        [sys.executable, "-c", "import mine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode and "circular" not in last
    no_runtime = "ModuleNotFoundError: No module named 'mine.runtime'"
    assert last == (
        no_runtime
        if missing == "runtime.py"
        else (
            f"ImportError: attention: {tmp_path}/mine lacks {missing}; expected all files that attngen has "
            f"written there: build it again"
        )
    )
