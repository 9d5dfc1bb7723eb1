"""A digest of attngen's own files, which determine the generated code."""

from __future__ import annotations

import hashlib
import os
from functools import cache

from attngen.codegen.templates import PACKAGE, templates_dir


@cache
def digest() -> str:
    """Return a digest of all files of the package and all templates, by name and bytes. They are read once per process.

    So a new version, and every change during development, changes the digest.
    """
    return hashed(_files(str(PACKAGE)) | _files(str(templates_dir()), "templates/"))


def _files(folder: str, inside: str = "") -> dict[str, bytes]:
    """Return the bytes of all files below a folder except Python's caches, by `inside` and their paths in the folder.
    Path objects would take twice as long."""
    found = {}
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if name != "__pycache__"]
        at = inside + os.path.relpath(root, folder).replace(os.sep, "/").removeprefix(".") + "/" * (root != folder)
        for path in (os.path.join(root, name) for name in names):
            if os.path.isfile(path):  # not a broken link, such as editors make
                with open(path, "rb") as file:
                    found[at + os.path.basename(path)] = file.read()
    return found


def hashed(files: dict[str, bytes]) -> str:
    """Return a digest of files by name: 64 bits as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, data in sorted(files.items()):
        found.update(f"{name} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()[:16]
