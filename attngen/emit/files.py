"""Writes files whole or not at all. All files of a generated module are written or none, and only over what attngen wrote."""

from __future__ import annotations

import difflib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attngen.errors import AttngenError


def write_module(files: dict[str, str], folder: Path) -> bool:
    """Write a generated module to `folder`, whole or not at all; True if anything changed.

    The files are written to a temporary folder beside `folder`, which is then moved into place. If `folder` is a link, the
    folder that it leads to is written. Raises AttngenError if `folder` holds something that attngen did not generate, or cannot be written.
    """
    try:
        folder = folder.resolve() if folder.is_dir() else folder
        _refuse_strangers(files, folder)
        _remove_leftovers(folder)
        if read_module(folder) == files:
            return False
        if folder.parent.exists() and not folder.parent.is_dir():
            raise AttngenError(f"{folder.parent} is not a folder; give another --out")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as temporary:
            fresh, old = temporary / "fresh", temporary / "old"
            fresh.mkdir()
            for name, text in files.items():
                (fresh / name).write_text(text, encoding="utf-8", newline="\n")
            _swap(fresh, folder, old)
    except OSError as error:
        raise AttngenError(f"cannot write {folder}: {error.strerror}") from error
    return True


def write_file(path: Path, text: str) -> None:
    """Write one file whole or not at all. Its folder is made if need be; if `path` is a link, the file that it leads to is written.

    Raises AttngenError if it cannot be written.
    """
    try:
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        with scratch(target) as temporary:
            fresh = temporary / target.name
            fresh.write_text(text, encoding="utf-8", newline="\n")
            os.replace(fresh, target)
    except OSError as error:
        raise AttngenError(f"{path}: cannot be written ({error.strerror})") from error


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A temporary hidden folder beside `target`; its name contains the target's name, the machine and the process id."""
    with tempfile.TemporaryDirectory(prefix=f"{_scratch_prefix(target)}{os.getpid()}-", dir=target.parent) as folder:
        yield Path(folder)


def _scratch_prefix(target: Path) -> str:
    return f".{target.name}-{platform.node()}-"


def _remove_leftovers(target: Path) -> None:
    """Remove hidden folders for `target` that killed processes of this machine left behind."""
    prefix = _scratch_prefix(target)
    for folder in target.parent.glob(".*"):
        if folder.name.startswith(prefix) and folder.name.removeprefix(prefix).partition("-")[0].isdecimal() and not in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)


def in_use(path: Path) -> bool:
    """Whether a path is such a hidden folder, of a process of this machine that runs."""
    found = re.fullmatch(rf"\..+-{re.escape(platform.node())}-([0-9]+)-\w+", path.name)
    return found is not None and _runs(int(found[1]))


def _runs(pid: int) -> bool:
    """Whether a process with this id runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _refuse_strangers(files: dict[str, str], folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise AttngenError(f"{folder} exists and is not a folder; give another --out")
    entries = [p for p in folder.iterdir() if p.name != "__pycache__"]
    found = {p.name for p in entries}
    if found and "schedule.ir" not in found:
        raise AttngenError(f"{folder} exists and is not a generated module (it has no schedule.ir); give another --out")
    if strangers := sorted(p.name for p in entries if p.name not in files or not p.is_file() or p.is_symlink()):
        raise AttngenError(f"{folder} holds {', '.join(strangers)}, which attngen does not write; move it elsewhere, or give another --out")


def _swap(fresh: Path, folder: Path, old: Path) -> None:
    """Move `fresh` to `folder`, and what was there to `old`; if that fails, everything stays where it was."""
    if not folder.exists():
        os.rename(fresh, folder)
        return
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        os.rename(old, folder)
        raise


def read_module(folder: Path) -> dict[str, str]:
    """The texts of a generated module's files by name, without Python's caches."""
    if not folder.is_dir():
        return {}
    found = (p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {p.name: p.read_text(encoding="utf-8", errors="replace") for p in sorted(found)}


def diff_module(files: dict[str, str], folder: Path) -> str:
    """A unified diff from the files in `folder` to `files`; empty if they are the same."""
    if not folder.exists():
        return f"{folder} does not exist"
    have = read_module(folder)
    parts: list[str] = []
    for name in sorted({*files, *have}):
        old, new = have.get(name, ""), files.get(name, "")
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"{folder / name}", f"{name} from the spec", lineterm="", n=1)
        parts.extend(lines)
    return "\n".join(parts)
