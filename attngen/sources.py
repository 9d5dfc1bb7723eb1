"""attngen's own files: where the templates are, and a digest of all that decides what is generated."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent


def templates_dir() -> Path:
    """The folder of the templates: inside the package in a wheel, beside it in a checkout."""
    packaged = PACKAGE / "templates"
    return packaged if packaged.is_dir() else PACKAGE.parent / "templates"


@cache
def digest() -> str:
    """A digest of the names and bytes of all files of the package and of its templates, read once in a process.

    It covers the version, which is one of them, and what a version under development changes.
    """
    files = {path.relative_to(PACKAGE).as_posix(): path for path in _files(PACKAGE)}
    files |= {f"templates/{path.relative_to(templates_dir()).as_posix()}": path for path in _files(templates_dir())}
    return hashed({name: path.read_bytes() for name, path in files.items()})


def _files(folder: Path) -> list[Path]:
    """All files below a folder but Python's caches."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]


def hashed(files: dict[str, bytes]) -> str:
    """A digest of files by name: 64 bits as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, data in sorted(files.items()):
        found.update(f"{name} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()[:16]
