"""The Python API: `attngen.build` and `attngen.load`.

This file imports the compiler only if it has to compile, so a module of the cache is imported as fast as its kernels.
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
from attngen.specs import find_spec

if TYPE_CHECKING:
    from attngen.spec import Spec

FILES = ("__init__.py", "kernels.py", "runtime.py")  # every generated module has these
_LOADED: dict[bytes, ModuleType] = {}  # by request
MOST = 64  # number of modules of traced functions that are held; one more drops the least recently used
_RECENT: OrderedDict[ModuleType, set[bytes]] = (
    OrderedDict()
)  # these modules, the latest at the end, with their requests
_STAYING: set[ModuleType] = set()  # the other modules: callers or graphs may hold parts of them
_LOCK = threading.RLock()


def build(spec: Spec | dict[str, Any] | str | os.PathLike[str]) -> ModuleType:
    """Compile a spec and import the module. A later call, in this or another process, takes it from the cache.

    Args:
        spec: plain data, such as {"name": "mine", "head_dim": 64, "mask": "causal"}; the path of a YAML file; a name,
            such as "causal_gqa", which stands for specs/causal_gqa.yaml in the current folder, or else for the spec of
            that name that attngen ships; or a Spec. Text without a separator and without a suffix is a name, even if
            there is such a file: write "./causal_gqa" for that.

    Returns:
        The generated module: `module.attention(q, k, v)`, and `module.Attention`, a torch.nn.Module. Specs with equal
        code share a module.

    Raises:
        SpecError: the spec is wrong, or cannot be built; one sentence per mistake, with the file and the line if there
            is one.
        AttngenError: the cache cannot be written, or others can write it, or the module cannot be imported.

    Compiling takes seconds, needs no GPU, and warns about parts of the spec that may not mean what its author intended.
    The cache is ~/.cache/attngen, or the equivalent of the user's system; the environment variable ATTNGEN_CACHE_DIR
    names another folder. A folder that other users own or can write is refused, because its modules are code, unless
    ATTNGEN_TRUST_CACHE=1 is set. The key of a module consists of the spec and of attngen's own files, so another
    version, or an edited one, compiles again. If several processes build the same spec at once, one compiles it and the
    others wait. The cache keeps the 512 most recently used modules. `attngen cache` shows it and clears it.
    """
    with _alone():
        return stay(_built(*_request(spec)))


def build_completed(data: dict[str, Any], complete: Callable[[dict[str, Any]], dict[str, Any]]) -> ModuleType:
    """Return the module of the spec `complete(data)`, like `build`. A module of the cache is found by `data`, without a
    call of `complete`.

    It is held while it is among the MOST that were used last. A caller that stores it checks `is_held` at each use, and
    builds it again if it is not held.

    Args:
        data: plain data.
        complete: returns the complete spec of the data, and may need the compiler for that.
    """
    request = b"part" + marshal.dumps(data, 2)
    with _alone():
        module = _built(request, lambda: _spec_of(complete(data)), None)
        if module not in _STAYING:
            _RECENT.setdefault(module, set()).add(request)
            _RECENT.move_to_end(module)
            while len(_RECENT) > MOST:
                _forget(*_RECENT.popitem(last=False))
        return module


def is_held(module: ModuleType) -> bool:
    """Return whether a module of `build_completed` is still held, and mark it as used."""
    try:
        _RECENT.move_to_end(module)
    except KeyError:
        return module in _STAYING
    return True


def stay(module: ModuleType) -> ModuleType:
    """Hold a module until the process ends, because a caller has it, or a graph that holds its operators or its memory
    but not the module. Return it."""
    with _LOCK:
        _RECENT.pop(module, None)
        _STAYING.add(module)
    return module


def _forget(module: ModuleType, requests: set[bytes]) -> None:
    """Release a module and its operators. Calls that autograd recorded still hold them."""
    for request in requests:
        _LOADED.pop(request, None)
    forget(module.__name__)
    module.OPERATORS.release()


def _built(request: bytes, read: Callable[[], Spec], path: Path | None) -> ModuleType:
    """Return the module of a request, as `_request` returns it. Call it under `_alone`."""
    if request not in _LOADED:
        key = store.key_of(request)
        _LOADED[request] = _import(*(store.find(key) or _compile(key, read(), path)))
    return _LOADED[request]


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of this process, and print a line if another thread holds it for long."""
    if not _LOCK.acquire(timeout=store.PATIENCE):
        print("attngen: waits for another thread of this process that builds or loads a module", file=sys.stderr)
        _LOCK.acquire()
    try:
        yield
    finally:
        _LOCK.release()


def load(path: str | os.PathLike[str]) -> ModuleType:
    """Import a folder that `attngen build` has written. It may be anywhere: it does not have to be on sys.path.

    The folder's current code is imported: after `attngen build` has changed it, `load` returns a new module. Folders
    with equal code share a module.

    Args:
        path: the folder, such as "generated/causal_mqa".

    Returns:
        The module: `module.attention(q, k, v)`, and `module.Attention`, a torch.nn.Module.

    Raises:
        AttngenError: the path is not a generated module, or it cannot be imported; one sentence.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise AttngenError(
            f"attngen.load: got {_kind(path)}; expected the path of a generated folder, as in `generated/causal_mqa`"
        )
    folder = Path(path)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        hint = "; `attngen.build` takes specs" if folder.suffix in (".yaml", ".yml") else ""
        raise AttngenError(
            f"{folder} {problem}; expected the folder of a generated module, as in `generated/causal_mqa`{hint}"
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
    """Return a caller's request as bytes that are equal only for equal specs, a function that reads the spec, and the
    spec's file if there is one."""
    if isinstance(spec, dict):
        with suppress(ValueError):  # it is not plain data
            # With version 2 the bytes depend only on values.
            return b"data" + marshal.dumps(spec, 2), lambda: _spec_of(spec), None
        spec = _spec_of(spec)
    elif isinstance(spec, (str, os.PathLike)):
        path = find_spec(spec) if isinstance(spec, str) else Path(spec)
        with suppress(OSError, ValueError):
            with path.open("rb") as file:
                data = file.read(2**20)  # specs are shorter; longer files are refused
            return b"file" + data, lambda: _spec_in(data, path), path
        if "\n" in str(spec):
            raise SpecError(
                "attngen.build: the text is not a path; expected the path of a YAML file, the name of a spec, or plain "
                "data, as yaml.safe_load gives"
            )
        spec = _spec_at(path)
    from attngen.spec import Spec

    if not isinstance(spec, Spec):
        raise SpecError(
            f"attngen.build: got {_kind(spec)}; expected the path of a YAML file, the name of a spec, a dict of plain "
            "data, or a Spec"
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
    """Return a spec's module from the cache, where another form of the spec or another process may have put it;
    otherwise compile it."""
    own = store.key_of(b"spec" + spec.hash().encode())
    found = store.find(own)
    if found is None:
        with store.building(spec.hash()):
            found = store.find(own)  # a process that held the lock before may have built it
            if found is None:
                found = store.keep(spec.name, _render(spec, path))
                store.note(own, found.folder)
    if key != own:
        with suppress(AttngenError):  # a read-only cache gets no receipt
            store.note(key, found.folder)
    return found


def _render(spec: Spec, path: Path | None) -> dict[str, str]:
    """Compile a spec, and return the files of its module."""
    with paused():
        from attngen.codegen.render import render
        from attngen.lowering.pipeline import lower
        from attngen.spec import naming, place

        for where, text in spec.notes():
            warnings.warn(f"{place(path, where)}: `{where[0]}` {text}", stacklevel=5)
        with naming(path):
            return render(lower(spec))


def _import(folder: Path, code: dict[str, bytes]) -> ModuleType:
    """Import a generated module under its name and a digest of its code. Raise AttngenError, in one sentence, if that
    fails.

    Args:
        folder: the path that its `__file__` and tracebacks show.
        code: the bytes of its Python files, by name. These run: nothing is read from the folder.
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
