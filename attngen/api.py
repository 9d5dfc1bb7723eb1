"""What Python calls: `attngen.build` and `attngen.load`.

Nothing here imports the compiler unless it has to compile: a module that is in the cache is imported in the time that
its kernels take.
"""

from __future__ import annotations

import marshal
import os
import re
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attngen.cache import store
from attngen.cache.collector import paused
from attngen.cache.fingerprint import hashed
from attngen.cache.loader import forget, import_source, read_source
from attngen.errors import AttngenError, SpecError, last_line

if TYPE_CHECKING:
    from attngen.spec import Spec

FILES = ("__init__.py", "kernels.py", "runtime.py")  # of every generated module
_LOADED: dict[bytes, ModuleType] = {}  # by what was asked for
MOST = 64  # modules of traced functions that are held; what was used longest ago is forgotten
_RECENT: OrderedDict[ModuleType, set[bytes]] = OrderedDict()  # these, that used last at the end, and what was asked for
_STAYING: set[ModuleType] = set()  # the others: callers or graphs may hold something of them
_LOCK = threading.RLock()


def build(spec: Spec | dict[str, Any] | str | os.PathLike[str]) -> ModuleType:
    """The module of a spec, compiled and imported. A later call, in this or another process, takes it from the cache.

    Args:
        spec: plain data, as in {"name": "mine", "head_dim": 64, "mask": "causal"}; the path of a YAML file; or a Spec.

    Returns:
        the generated module: `module.attention(q, k, v)`, and `module.Attention`, a torch.nn.Module. Equal code is one
        module.

    Raises:
        SpecError: the spec is wrong, or cannot be built; one sentence per mistake, with the file and the line where
        there is one. AttngenError: the cache cannot be written, or others can write it, or the module cannot be
        imported.

    Compiling takes seconds, needs no GPU, and warns of what in the spec may not be what its author means. The cache is
    ~/.cache/attngen, or what the user's system has instead; the environment variable ATTNGEN_CACHE_DIR names another
    folder. One that other users own or can write is refused, as its modules are code, unless ATTNGEN_TRUST_CACHE=1 is
    set. Modules are found in it by the spec and by attngen's own files, so that another version, or an edited one,
    compiles anew. Processes that ask for one spec at once wait for the first, which compiles it. The cache keeps the
    512 modules that were used last. `attngen cache` shows it and clears it.
    """
    with _alone():
        return stay(_built(*_request(spec)))


def build_completed(data: dict[str, Any], complete: Callable[[dict[str, Any]], dict[str, Any]]) -> ModuleType:
    """The module of the spec `complete(data)`, as `build` gives it. One that is in the cache is found by `data`, and
    nothing is completed.

    It is held while it is among the MOST that were used last. Who keeps it asks `is_held` at each use, and builds it
    again if it is not.

    Args:
        data: plain data.
        complete: adds to a spec what follows from its data, and may need the compiler for it.
    """
    asked = b"part" + marshal.dumps(data, 2)
    with _alone():
        module = _built(asked, lambda: _spec_of(complete(data)), None)
        if module not in _STAYING:
            _RECENT.setdefault(module, set()).add(asked)
            _RECENT.move_to_end(module)
            while len(_RECENT) > MOST:
                _forget(*_RECENT.popitem(last=False))
        return module


def is_held(module: ModuleType) -> bool:
    """Whether a module of `build_completed` is still held, and note that it is used."""
    try:
        _RECENT.move_to_end(module)
    except KeyError:
        return module in _STAYING
    return True


def stay(module: ModuleType) -> ModuleType:
    """Hold a module until the process ends: a caller has it, or a graph that holds its operators or its memory and
    not the module."""
    with _LOCK:
        _RECENT.pop(module, None)
        _STAYING.add(module)
    return module


def _forget(module: ModuleType, asked: set[bytes]) -> None:
    """Hold a module no longer, nor its operators. Calls that autograd recorded still do."""
    for request in asked:
        _LOADED.pop(request, None)
    forget(module.__name__)
    module.OPERATORS.release()


def _built(asked: bytes, read: Callable[[], Spec], path: Path | None) -> ModuleType:
    """The module of what `_request` says. Call it under `_alone`."""
    if asked not in _LOADED:
        key = store.key_of(asked)
        _LOADED[asked] = _import(*(store.find(key) or _compile(key, read(), path)))
    return _LOADED[asked]


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of this process, and say so once if another thread has it for long."""
    if not _LOCK.acquire(timeout=store.PATIENCE):
        print("attngen: waits for another thread of this process that builds or loads a module", file=sys.stderr)
        _LOCK.acquire()
    try:
        yield
    finally:
        _LOCK.release()


def load(path: str | os.PathLike[str]) -> ModuleType:
    """Import a generated folder, as `attngen build` writes it, from anywhere: no folder has to be on sys.path.

    The folder is imported as its code is now: after `attngen build` has changed it, `load` gives a new module. Equal
    code is one module.

    Args:
        path: the folder, as in "generated/causal_mqa".

    Returns:
        the module: `module.attention(q, k, v)`, and `module.Attention`, a torch.nn.Module.

    Raises:
        AttngenError: the path is no generated module, or it cannot be imported; one sentence.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise AttngenError(
            f"attngen.load: got {_kind(path)}; expected the path of a generated folder, as in `generated/causal_mqa`"
        )
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        hint = "; `attngen.build` takes specs" if folder.suffix in (".yaml", ".yml") else ""
        raise AttngenError(
            f"{folder} {what}; expected the folder of a generated module, as in `generated/causal_mqa`{hint}"
        )
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise AttngenError(
            f"{folder} is not a generated module (it has no {missing[0]}); `attngen build SPEC` writes one"
        )
    try:
        code = read_source(folder)
    except OSError as error:
        raise AttngenError(
            f"{folder}: cannot be read ({error.strerror}); expected what `attngen build` writes"
        ) from None
    with _alone():
        return stay(_import(folder.resolve(), code))


def _request(spec: Any) -> tuple[bytes, Callable[[], Spec], Path | None]:
    """What a caller asks for: as bytes that are equal only for equal specs, as a function that reads the spec, and
    the file that has it."""
    if isinstance(spec, dict):
        with suppress(ValueError):  # of what is no plain data
            return (
                b"data" + marshal.dumps(spec, 2),
                lambda: _spec_of(spec),
                None,
            )  # 2: what is written depends on values alone
        spec = _spec_of(spec)
    elif isinstance(spec, (str, os.PathLike)):
        path = Path(spec)
        with suppress(OSError, ValueError):
            with path.open("rb") as file:
                data = file.read(2**20)  # a spec is shorter, and what is longer is refused
            return b"file" + data, lambda: _spec_in(data, path), path
        if "\n" in str(spec):
            raise SpecError(
                "attngen.build: the text is not a path; expected the path of a YAML file, or plain data, as yaml.safe_load gives"
            )
        spec = _spec_at(path)
    from attngen.spec import Spec

    if not isinstance(spec, Spec):
        raise SpecError(
            f"attngen.build: got {_kind(spec)}; expected the path of a YAML file, a dict of plain data, or a Spec"
        )
    return b"spec" + spec.hash().encode(), lambda: spec, None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type `{type(value).__name__}`"


def _spec_of(data: dict[str, Any]) -> Spec:
    from attngen.spec import make_spec

    return make_spec(data)


def _spec_in(data: bytes, path: Path) -> Spec:
    from attngen.spec import decode_spec

    return decode_spec(data, str(path))


def _spec_at(path: Path) -> Spec:
    from attngen.spec import load_spec

    return load_spec(path)


def _compile(key: str, spec: Spec, path: Path | None) -> store.Kept:
    """A spec's module in the cache, where another form of the spec or another process may have put it; else compiled
    now."""
    own = store.key_of(b"spec" + spec.hash().encode())
    found = store.find(own)
    if found is None:
        with store.building(spec.hash()):
            found = store.find(own)  # of a process that held the lock before
            if found is None:
                found = store.keep(spec.name, _render(spec, path))
                store.note(own, found.folder)
    if key != own:
        with suppress(AttngenError):  # a cache that can only be read has no more to say
            store.note(key, found.folder)
    return found


def _render(spec: Spec, path: Path | None) -> dict[str, str]:
    """The files of a spec's module."""
    with paused():
        from attngen.codegen.render import render
        from attngen.lowering.pipeline import lower
        from attngen.spec import naming, place

        for where, text in spec.notes():
            warnings.warn(f"{place(path, where)}: `{where[0]}` {text}", stacklevel=5)
        with naming(path):
            return render(lower(spec))


def _import(folder: Path, code: dict[str, bytes]) -> ModuleType:
    """Import a generated module under its name and a digest of its code; AttngenError, in one sentence, if that fails.

    Args:
        folder: where it is said to be.
        code: the bytes of its Python files, by name. They are what runs: nothing is read from the folder.
    """
    from attngen import built

    try:
        digest = hashed(code)
        stem = re.sub(r"\W", "_", folder.name.removesuffix(f"_{digest}"))
        name = f"{built.__name__}.{stem}_{digest}"
        known = sys.modules.get(name)
        if known is not None and Path(str(known.__file__)).is_file():
            return known
        with paused():
            return import_source(name, folder, code)
    except Exception as error:
        raise AttngenError(
            f"{folder}: cannot be imported ({last_line(error)}); expected what `attngen build` writes"
        ) from error
