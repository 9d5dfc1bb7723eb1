"""The cache of built modules: a folder of the user, from which a later process imports what an earlier one has compiled.

    modules/causal_mqa_0123456789abcdef/    a module, under its name and a digest of its code
    modules/.receipts/KEY                   the name of that folder; KEY is a digest of what was asked for and of attngen's own files
    modules/.locks/HASH.lock                held by the process that compiles the spec with this hash
    modules/.templates/                     the templates of modules, as Jinja has compiled them

A module is written beside its place and moved there. Before it is imported, its code is held against the digest in its name, so
what is half-written or damaged counts as absent. What another version of attngen has built is found by no key of this one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attngen.emit.files import write_file, write_module
from attngen.errors import AttngenError
from attngen.sources import digest, hashed

VARIABLE = "ATTNGEN_CACHE_DIR"  # in the environment: the folder that holds modules/
PATIENCE = 5.0  # seconds of waiting for another build, after which a line says so
_TAG = "CACHEDIR.TAG"  # which tells programs that make backups what is a cache (https://bford.info/cachedir/), and us that it is ours
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Modules that attngen has built. `attngen cache --clear` removes them.\n"


def root() -> Path:
    """The folder of built modules: in that of ATTNGEN_CACHE_DIR, or in the user's cache folder, as ~/.cache/attngen/modules."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser().absolute() / "modules"
    from platformdirs import user_cache_path

    return user_cache_path("attngen", appauthor=False) / "modules"


def code_digest(folder: Path) -> str:
    """A digest of the Python files of a generated module. OSError if they cannot be read."""
    return hashed({path.name: path.read_bytes() for path in folder.glob("*.py")})


def key_of(asked: bytes) -> str:
    """The key of what a caller asks of this attngen."""
    return hashlib.sha256(digest().encode() + asked).hexdigest()[:32]


def find(key: str) -> Path | None:
    """The folder of the module that was built for a key; None if there is none, or if its code is not what was written."""
    try:
        name = (root() / ".receipts" / key).read_text(encoding="ascii")
        folder = root() / name
        return folder if name.endswith(f"_{code_digest(folder)}") else None
    except (OSError, UnicodeDecodeError):
        return None


def keep(name: str, files: dict[str, str]) -> Path:
    """Write the files of a built module, in place of what is damaged, and return its folder. Call it under `building`."""
    code = {file: text.encode() for file, text in files.items() if file.endswith(".py")}
    folder = root() / f"{name}_{hashed(code)}"
    if folder.is_dir() and code_digest(folder) != hashed(code):
        shutil.rmtree(folder)
    if not folder.is_dir():
        write_module(files, folder)
    return folder


def note(key: str, folder: Path) -> None:
    """Write the receipt by which `find` finds a folder."""
    write_file(root() / ".receipts" / key, folder.name)


@contextmanager
def building(spec_hash: str) -> Iterator[None]:
    """Hold the lock of a spec, so that of many processes one compiles it. The system releases it if the process is killed.

    AttngenError if the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    try:
        (root() / ".locks").mkdir(parents=True, exist_ok=True)
        if not (root() / _TAG).exists():
            write_file(root() / _TAG, _TAG_TEXT)
        lock = FileLock(root() / ".locks" / f"{spec_hash.rpartition(':')[2]}.lock")
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            print(f"attngen: waits for another process that builds the same spec ({lock.lock_file})", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise AttngenError(f"{root()}: cannot be written ({error.strerror}); name another folder in {VARIABLE}") from error
    try:
        yield
    finally:
        lock.release()


def templates() -> Path:
    """The folder of templates as Jinja has compiled them, which takes longer than to fill them in. It may be missing, or not writable."""
    folder = root() / ".templates"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def modules() -> list[Path]:
    """The folders of all built modules, those of other versions too."""
    return sorted(path.parent for path in root().glob("*/schedule.ir"))


def size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def clear() -> None:
    """Remove the cache. AttngenError if the folder is not one that attngen made, or cannot be removed."""
    if not root().exists():
        return
    if not (root() / _TAG).is_file():
        raise AttngenError(f"{root()} is not a cache of attngen (it has no {_TAG}); expected {VARIABLE} to name a folder for caches")
    try:
        shutil.rmtree(root())
    except OSError as error:
        raise AttngenError(f"{root()}: cannot be removed ({error.strerror}); is another process building? Try again") from error
