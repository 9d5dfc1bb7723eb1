"""The cache of built modules between processes, threads and versions of attngen."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

import attngen
from attngen import api
from attngen.cache import fingerprint, store
from attngen.spec import make_spec
from tests import module_cache_common
from tests.helpers import ROOT
from tests.module_cache_common import SPEC, UNPICKLE, forget_loaded, is_right, script

# Fixtures.
cache, compiled, rendered = module_cache_common.cache, module_cache_common.compiled, module_cache_common.rendered


SECOND_PROCESS = """
import pickle, sys, time, torch
start = time.process_time()
import attngen
module = attngen.build({spec!r})
took = time.process_time() - start
heavy = {{"sympy", "pydantic", "networkx", "jinja2", "yaml", "typer", "rich"}} & set(sys.modules)
assert not heavy, heavy
twin = pickle.load(open(sys.argv[1], "rb"))
assert type(twin) is module.Attention
print(took)
"""


@pytest.mark.share(4)
def test_a_second_process_takes_the_module_from_the_cache(tmp_path: Path) -> None:
    """It needs less than 0.3 s of CPU time, no compiler, and unpickles objects of the first process."""
    module = attngen.build(SPEC)
    (tmp_path / "pickle").write_bytes(pickle.dumps(module.Attention(scale=0.5)))
    took = [float(script(SECOND_PROCESS.format(spec=SPEC), tmp_path / "pickle")) for _ in range(2)]
    assert min(took) < 0.3
    script(UNPICKLE, tmp_path / "pickle")


CONCURRENT_BUILD = """
import sys, torch, attngen
module = attngen.build({spec!r})
assert module.attention is not None
print(module.__file__, "attngen.codegen.render" in sys.modules)
"""


@pytest.mark.share(8)
def test_one_of_many_processes_compiles(cache: Path) -> None:
    command = [sys.executable, "-c", CONCURRENT_BUILD.format(spec=SPEC)]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * 3, ended
    found = [output.split() for output, _ in ended]
    assert len({path for path, _ in found}) == 1 == len(store.modules())
    assert sorted(rendered for _, rendered in found) == ["False"] * 2 + ["True"]


def test_two_threads_that_make_a_folder_keep_its_files(cache: Path) -> None:
    """Neither removes the folder that the other has just made, with the lock in it."""
    for step in range(100):
        ready = threading.Barrier(2)

        def make(name: str, folder: Path = cache / str(step), ready: threading.Barrier = ready) -> None:
            ready.wait()
            (store._own_folder(folder) / name).touch()

        threads = [threading.Thread(target=make, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(path.name for path in (cache / str(step)).iterdir()) == ["one", "two"]


KILLED_BUILD = """
import os, signal, attngen
from attngen.codegen import files
def swap(fresh, folder, old):
    (fresh / "runtime.py").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
files._swap = swap
attngen.build({spec!r})
"""


@pytest.mark.share(8)
def test_a_later_build_uses_nothing_of_a_killed_one(cache: Path, device: str, compiled: list[str]) -> None:
    script(KILLED_BUILD.format(spec=SPEC), kill=True)
    (left,) = cache.glob(".mine_*")
    assert store.modules() == []
    assert is_right(attngen.build(SPEC), device) and compiled == ["mine"]
    assert not left.exists()


BUILD_AND_CLEAR = """
import pickle, random, shutil, sys, threading
import attngen
from attngen import api
from attngen.cache import store
files = pickle.load(open(sys.argv[1], "rb"))
api._render = lambda spec, path: files
failed = []

def work(seed):
    chance = random.Random(seed)
    for _ in range(25):
        try:
            match chance.randrange(5):
                case 0:
                    store.clear()
                case 1:
                    for folder in store.modules():
                        shutil.rmtree(folder, ignore_errors=True)
                case 2:
                    for folder in store.modules():
                        (folder / "kernels.py").unlink(missing_ok=True)
            with api._LOCK:
                api._LOADED.clear()
                for name in [name for name in sys.modules if name.startswith("attngen.built.")]:
                    del sys.modules[name]
                assert attngen.build({spec!r}).attention
        except BaseException as error:
            failed.append(repr(error))

threads = [threading.Thread(target=work, args=(10 * int(sys.argv[2]) + at,)) for at in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed)
"""


@pytest.mark.share(32)
def test_processes_and_threads_build_repair_and_clear_concurrently(
    tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread of each process gets its module, whatever the others do to the cache."""
    (tmp_path / "files").write_bytes(pickle.dumps(api._render(make_spec(SPEC), None)))
    command = [sys.executable, "-c", BUILD_AND_CLEAR.replace("{spec!r}", repr(SPEC)), str(tmp_path / "files")]
    started = [
        subprocess.Popen([*command, str(at)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for at in range(3)
    ]
    ended = [process.communicate() for process in started]
    assert [output for output, _ in ended] == ["[]\n"] * 3, ended
    rendered.clear()
    assert attngen.build(SPEC).FORWARD
    forget_loaded(monkeypatch)
    assert attngen.build(SPEC).FORWARD and len(rendered) <= 1


def test_another_version_of_attngen_builds_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attngen.build(SPEC)
    monkeypatch.setattr(store, "digest", lambda: "another")
    forget_loaded(monkeypatch)
    attngen.build(SPEC)
    assert compiled == ["mine"] * 2


def test_the_digest_covers_every_file_that_changes_generated_code(tmp_path: Path) -> None:
    """Versions under development have the same number and other files. Files that Python writes do not count, nor does
    the location of files."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("attngen", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)

    def digest() -> str:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import attngen.cache.fingerprint as s; print(s.PACKAGE, "
            "s.digest())"
        )
        package, found = script(code, tmp_path).split()
        assert Path(package) == tmp_path / "attngen"
        return found

    seen = [digest()]
    assert seen == [fingerprint.digest()]
    for name in ("templates/triton/module.py.jinja", "attngen/transforms/dce.py", "attngen/masks/documents.ir"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        seen.append(digest())
    assert len(set(seen)) == len(seen)
    shutil.move(tmp_path / "templates", tmp_path / "attngen" / "templates")  # as in a wheel
    (tmp_path / "attngen" / "transforms" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "attngen" / "transforms" / "__pycache__" / "dce.pyc").touch()
    assert digest() == seen[-1]


@pytest.mark.parametrize("other", ["thread", "process"])
def test_waiting_for_another_build_prints_one_line(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A thread prints it when another thread builds for long, and a process when another process holds the lock of
    the cache."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    monkeypatch.setattr(api, "_built", lambda *_: ModuleType("built"))
    held, waited = threading.Event(), threading.Event()

    def hold() -> None:
        with api._alone() if other == "thread" else store.building("sha256:ab"):
            held.set()
            waited.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    threading.Timer(0.5, waited.set).start()
    if other == "thread":
        api.build({"name": "x", "head_dim": 64})
    else:
        with store.building("sha256:ab"):
            pass
    holder.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"attngen: waits for another {other}")
