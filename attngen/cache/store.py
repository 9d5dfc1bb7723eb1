"""The cache of built modules: a folder of the user, from which a later process imports the modules that an earlier one
has compiled.

    modules/causal_mqa_0123456789abcdef/    a module, under its name and a digest of its code
    modules/.receipts/KEY                   the name of that folder; KEY is a digest of the request and attngen's files
    modules/.locks/HH.lock                  held by the process that compiles a spec whose hash begins with HH

A module is written to a temporary folder and moved into place. Its code is read once, compared with the digest in its
name, and run from memory: a partial or damaged module counts as absent, and bytecode next to it is not read. No key of
this version finds a module that another version of attngen has built.

At most MOST modules are kept. One more replaces the least recently used one, of any version: the time of a folder is
when a process last imported it.

The digest detects damage, not malice: anyone who can write in the folder can make this user's processes run their code.
So only this user can write in the folder, and a folder in which others can write is refused. docs/security.md says what
is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from attngen.cache.fingerprint import digest, hashed
from attngen.codegen.files import in_use, scratch, write_file, write_module
from attngen.errors import AttngenError

VARIABLE = "ATTNGEN_CACHE_DIR"  # environment variable: the folder that holds modules/
TRUST = "ATTNGEN_TRUST_CACHE"  # environment variable: 1 trusts a folder that others own or can write
PATIENCE = 5.0  # seconds of waiting for another build, after which a line is printed
# The tag marks the folder as a cache for backup programs (https://bford.info/cachedir/), and as made by attngen.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Modules that attngen has built. `attngen cache --clear` removes them.\n"
)
_NAME = re.compile(r"[A-Za-z0-9_]+_([0-9a-f]{16})")  # name of a module's folder
MOST = 512  # number of modules that are kept, of about 0.2 MB each
_LONGEST = 2**24  # maximum bytes of a module's file; written files have up to 2**18


class Kept(NamedTuple):
    """A module of the cache: its folder, and the bytes of its Python files by name, as they were checked."""

    folder: Path
    code: dict[str, bytes]


def root() -> Path:
    """Return the folder of built modules: in that of ATTNGEN_CACHE_DIR, or in the user's cache folder, such as
    ~/.cache/attngen/modules.

    Raise AttngenError if the variable cannot be a folder's path.
    """
    given = os.environ.get(VARIABLE)
    try:
        if given:
            place = Path(given).expanduser().absolute()
        else:
            from platformdirs import user_cache_path

            place = user_cache_path("attngen", appauthor=False)
        if not str(place).isprintable():
            raise ValueError("it has characters that cannot be printed")
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            place.stat()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        shown = repr(given if given and len(given) < 100 else f"{given[:100]}..." if given else "")
        raise AttngenError(
            f"{VARIABLE} is {shown}, which cannot be a folder ({why}); expected a path, such as /tmp/mine"
        ) from None
    return place / "modules"


def _check() -> None:
    """Raise AttngenError if users other than this one and root can have written the contents of the cache.
    ATTNGEN_TRUST_CACHE=1 allows it."""
    try:
        found = root().stat()
    except OSError:
        return  # it does not exist, or cannot be read
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if (
        not stat.S_ISDIR(found.st_mode)
        or (_is_own(found) and (not others or not _has_users()))
        or os.environ.get(TRUST) == "1"
    ):
        return
    problem = (
        "others than its owner can write in it"
        if _is_own(found)
        else f"it belongs to another user ({_owner(found.st_uid)})"
    )
    fix = (
        "after a look at what is in it, `chmod go-w` it"
        if _is_own(found)
        else f"name a folder of your own in {VARIABLE}"
    )
    raise AttngenError(
        f"{root()}: {problem} (mode {stat.S_IMODE(found.st_mode):04o}), and what is in it runs as code of yours; "
        f"{fix}, or set {TRUST}=1 if you trust all who can write there"
    )


def _has_users() -> bool:
    """True if files have meaningful modes and owners; on Windows they do not."""
    return hasattr(os, "geteuid")


def _is_own(found: os.stat_result) -> bool:
    """True if a file or folder belongs to this user, or to root, who can write anywhere."""
    return not _has_users() or found.st_uid in (os.geteuid(), 0)


def _owner(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read(path: Path, most: int) -> bytes:
    """Return the bytes of a file of the cache. Raise OSError if it is a link, a pipe, a folder, another user's, or
    longer than `most`."""
    plain = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, os.O_RDONLY | plain), "rb") as file:
        found = os.fstat(file.fileno())  # of the opened file: its name may lead to another one by now
        if not stat.S_ISREG(found.st_mode) or not (_is_own(found) or os.environ.get(TRUST) == "1"):
            raise OSError(f"{path} is not a file of this user")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return data


def key_of(request: bytes) -> str:
    """Return the key of a request to this version of attngen."""
    return hashlib.sha256(digest().encode() + request).hexdigest()[:32]


def find(key: str) -> Kept | None:
    """Return the module that was built for a key; None if there is none, or its code is damaged."""
    try:
        return kept(_read(root() / ".receipts" / key, 256).decode("ascii"))
    except (OSError, UnicodeDecodeError):
        return None


def kept(name: str) -> Kept | None:
    """Return the module in the cache's folder of this name; None if there is none, or its code is damaged.

    Raise AttngenError if others can have written it.
    """
    if not (named := _NAME.fullmatch(name)):
        return None
    _check()
    folder = root() / name
    try:
        if folder.is_symlink():
            return None
        code = {path.name: _read(path, _LONGEST) for path in folder.glob("*.py")}
    except OSError:
        return None
    if "__init__.py" not in code or hashed(code) != named[1]:
        return None
    with suppress(OSError):  # the cache may be read-only
        os.utime(folder)  # marks it as used now
    return Kept(folder, code)


def keep(name: str, files: dict[str, str]) -> Kept:
    """Write the files of a built module, in place of a damaged one. Call it under `building`."""
    code = {file: text.encode() for file, text in files.items() if file.endswith(".py")}
    made = Kept(root() / f"{name}_{hashed(code)}", code)
    if kept(made.folder.name) is None:
        with _writing():
            root().mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove(made.folder)
            write_module(files, made.folder)
            _make_room(made.folder)
    return made


def _make_room(kept: Path) -> None:
    """Remove the least recently used modules beyond MOST, except `kept`, and receipts of removed modules."""
    used = sorted((_used(folder), folder) for folder in modules() if folder != kept)
    if len(used) < MOST:
        return
    for _, folder in used[: len(used) + 1 - MOST]:
        _remove(folder)
    for receipt in _own_folder(root() / ".receipts").iterdir():
        with suppress(OSError, UnicodeDecodeError):
            if not (root() / _read(receipt, 256).decode("ascii")).is_dir():
                _remove(receipt)


def _used(folder: Path) -> float:
    """Return when a module was last written or imported by a process; 0 if another process has removed it."""
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def note(key: str, folder: Path) -> None:
    """Write the receipt with which `find` finds a folder."""
    with _writing():
        receipt = _own_folder(root() / ".receipts") / key
        _clear_way(receipt)
        write_file(receipt, folder.name)


@contextmanager
def building(spec_hash: str) -> Iterator[None]:
    """Hold the lock of a spec, so that only one process compiles it. The system releases it if the process is killed.

    Raise AttngenError if the folder cannot be written, or if others can write it.
    """
    from filelock import FileLock, Timeout

    _check()
    with _writing():
        _own_folder(root() / ".locks")
        _clear_way(root() / _TAG)
        if not (root() / _TAG).exists():
            write_file(root() / _TAG, _TAG_TEXT)
        # Two hexadecimal digits of the hash: there are at most 256 lock files.
        held = _own_folder(root() / ".locks") / f"{spec_hash.rpartition(':')[2][:2]}.lock"
        _clear_way(held)
        lock = FileLock(held)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            print(f"attngen: waits for another process that builds the same spec ({lock.lock_file})", file=sys.stderr)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing() -> Iterator[None]:
    """Turn system errors while the cache is written into AttngenError, in one sentence."""
    try:
        yield
    except OSError as error:
        raise AttngenError(
            f"{root()}: cannot be written ({error.strerror}); name another folder in {VARIABLE}"
        ) from None


def _own_folder(path: Path) -> Path:
    """Make a folder of the cache that only this user can access, in place of any file or link of that name, and return
    it.

    The path is inspected once: a folder that another process makes afterwards must not be removed with its locks.
    """
    root().mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        is_folder = True  # mkdir makes it
    if not is_folder:
        _remove(path)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _clear_way(path: Path) -> None:
    """Remove anything at the path of a file to be written, unless it is a file that can be read and written."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK | os.W_OK)):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove an entry of the cache of any kind atomically."""
    with suppress(FileNotFoundError):  # it does not exist, or another process has removed it
        if not path.is_symlink() and path.is_dir():
            path.chmod(0o700)  # otherwise a read-only folder cannot be moved
        with scratch(path) as rest:
            os.rename(path, rest / "removed")


def unwritable() -> str:
    """Return why modules cannot be written to the cache, as a sentence; empty text if they can. If the cache does not
    exist, its nearest existing parent is checked."""
    nearest = next(path for path in (root(), *root().parents) if os.path.lexists(path))
    if nearest.is_dir():
        try:
            with tempfile.TemporaryFile(dir=nearest):
                return ""
        except OSError as error:
            why = error.strerror
    else:
        why = "Not a directory"
    return f"{root()}: cannot be written ({why}: {nearest}); name another folder in {VARIABLE}"


def modules() -> list[Path]:
    """Return the folders of all built modules, including those of other versions."""
    return sorted(path.parent for path in root().glob("*/schedule.ir"))


def size(folder: Path) -> int:
    """Return the number of bytes of the files below a folder. Files that are removed meanwhile count as 0."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += path.lstat().st_size if path.is_file() else 0
    return found


def clear() -> None:
    """Remove all modules. Raise AttngenError if attngen did not make the folder, or something cannot be removed.

    The folder stays, with its tag, its locks and files that other processes are writing, because these may build at the
    same time.
    """
    if not root().exists():
        return
    stay = (_TAG, ".locks", ".receipts")
    if not (root() / _TAG).is_file() and any(path.name not in stay and not in_use(path) for path in root().iterdir()):
        raise AttngenError(
            f"{root()} is not a cache of attngen (it has no {_TAG}); expected {VARIABLE} to name a folder for caches"
        )
    try:
        for path in (*_own_folder(root() / ".receipts").iterdir(), *root().iterdir()):
            if path.name not in stay and not in_use(path):
                _remove(path)
    except OSError as error:
        busy = error.errno in (errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT)
        hint = "is another process building? Try again" if busy else "expected a folder that this user can write"
        raise AttngenError(f"{root()}: cannot be removed ({error.strerror}); {hint}") from None
