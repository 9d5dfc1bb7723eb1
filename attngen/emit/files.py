"""Writing generated modules: all files or none, and only over what attngen wrote."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from pathlib import Path

from attngen.errors import AttngenError


def write_module(files: dict[str, str], folder: Path) -> bool:
    """Write a generated module to `folder`, whole or not at all; True if anything changed.

    The files are written to a temporary folder beside it, which is then moved into place. Raises AttngenError if `folder`
    holds something that attngen did not generate.
    """
    if folder.exists() and not (folder / "schedule.ir").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise AttngenError(f"{folder} exists and is not a generated module (it has no schedule.ir); give another --out")
    if read_module(folder) == files:
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise AttngenError(f"cannot write to {folder.parent}: {error.strerror}") from error
    try:
        for name, text in files.items():
            (fresh / name).write_text(text, encoding="utf-8", newline="\n")
        fresh.chmod(0o755)
        old = fresh.with_name(f"{fresh.name}-old")
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise AttngenError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def read_module(folder: Path) -> dict[str, str]:
    """The files of a generated module; Python's caches do not count."""
    if not folder.is_dir():
        return {}
    found = (p for p in folder.iterdir() if p.is_file())
    return {p.name: p.read_text(encoding="utf-8", errors="replace") for p in sorted(found)}


def diff_module(files: dict[str, str], folder: Path) -> str:
    """A unified diff from what is in `folder` to what should be; empty if they are the same."""
    have = read_module(folder)
    parts: list[str] = []
    for name in sorted({*files, *have}):
        old, new = have.get(name, ""), files.get(name, "")
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"{folder / name}", f"{name} from the spec", lineterm="", n=1)
        parts.extend(lines)
    return "\n".join(parts)
