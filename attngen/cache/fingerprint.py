"""A digest of attngen's own files, which decide what is generated."""

from __future__ import annotations

import hashlib
import os
from functools import cache

from attngen.codegen.templates import PACKAGE, templates_dir


@cache
def digest() -> str:
    """A digest of the names and bytes of all files of the package and of its templates, read once in a process.

    It covers the version, which is one of them, and what a version under development changes.
    """
    return hashed(_files(str(PACKAGE)) | _files(str(templates_dir()), "templates/"))


def _files(folder: str, inside: str = "") -> dict[str, bytes]:
    """The bytes of all files below a folder but Python's caches, by their paths there after `inside`. Path objects
    take twice as long."""
    found = {}
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if name != "__pycache__"]
        at = inside + os.path.relpath(root, folder).replace(os.sep, "/").removeprefix(".") + "/" * (root != folder)
        for path in (os.path.join(root, name) for name in names):
            if os.path.isfile(path):  # and no link that leads nowhere, as editors make them
                with open(path, "rb") as file:
                    found[at + os.path.basename(path)] = file.read()
    return found


def hashed(files: dict[str, bytes]) -> str:
    """A digest of files by name: 64 bits as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, data in sorted(files.items()):
        found.update(f"{name} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()[:16]
