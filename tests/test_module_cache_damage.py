"""The cache of built modules: damaged entries are built again, and files of other users are refused."""

from __future__ import annotations

import importlib.util
import inspect
import marshal
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import attngen
from attngen import api
from attngen.cache import fingerprint, store
from attngen.errors import AttngenError
from tests import module_cache_common
from tests.module_cache_common import SPEC, UNPICKLE, forget_loaded, is_right, script

# Fixtures.
cache, compiled, rendered = module_cache_common.cache, module_cache_common.compiled, module_cache_common.rendered


@pytest.mark.share(16)
@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "more", "receipt"])
def test_a_damaged_module_is_built_again(
    damage: str, cache: Path, device: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(str(attngen.build(SPEC).__file__)).parent
    kernels = folder / "kernels.py"
    before = kernels.read_bytes()
    match damage:
        case "cut":
            kernels.write_bytes(before[: len(before) // 2])
        case "gone":
            kernels.unlink()
        case "empty":
            shutil.rmtree(folder)
            folder.mkdir()
        case "more":
            (folder / "hopper.py").write_text("")
        case "receipt":
            for receipt in (cache / ".receipts").iterdir():
                receipt.write_bytes(b"\xff")
    forget_loaded(monkeypatch)
    assert is_right(attngen.build(SPEC), device)
    assert compiled == ["mine"] * 2 and kernels.read_bytes() == before and len(store.modules()) == 1


def cache_entries(cache: Path) -> dict[str, Path]:
    """The entries of a cache with one module that are read, by name."""
    (folder,) = store.modules()
    (lock,) = (cache / ".locks").glob("*.lock")
    receipt = cache / ".receipts" / store.key_of(api._request(SPEC)[0])
    kept = [folder, *folder.glob("*.py"), receipt.parent, receipt, lock.parent, lock, cache / "CACHEDIR.TAG"]
    return {
        "lock" if path == lock else "receipt" if path == receipt else path.relative_to(cache).as_posix(): path
        for path in kept
    }


def damage_entry(kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the file or folder at a path by a damaged one."""
    elsewhere = tmp_path / "elsewhere"
    inode, os_open, os_access = path.lstat().st_ino, os.open, os.access
    held = None if path.is_dir() else path.open()  # so that no other file gets its inode
    data = b"" if path.is_dir() else path.read_bytes()
    if kind == "unreadable":  # root may read files of any mode, so opening them has to fail

        def is_it(at: Any) -> bool:
            return held is not None and os.path.lexists(str(at)) and os.lstat(str(at)).st_ino == inode

        def refused(at: Any, *args: Any, **more: Any) -> int:
            if is_it(at):
                raise PermissionError(13, "Permission denied", str(at))
            return os_open(at, *args, **more)

        monkeypatch.setattr(os, "open", refused)
        monkeypatch.setattr(os, "access", lambda at, *args, **more: not is_it(at) and os_access(at, *args, **more))
        path.chmod(0)
        return
    if path.is_dir():
        elsewhere.is_dir() or shutil.copytree(path, elsewhere)
        shutil.rmtree(path)
    else:
        path.unlink()
    match kind:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "altered":
            path.write_bytes(data[:-9] + b"#" + data[-8:] or b"#")
        case "garbage":
            path.write_bytes(b"\xff\x00\n" * 99)
        case "folder":
            (path / "below").mkdir(parents=True)
            (path / "below").chmod(0)
            path.chmod(0)
        case "link":
            elsewhere.exists() or elsewhere.write_bytes(data)
            path.symlink_to(elsewhere)
        case "dangling":
            path.symlink_to(tmp_path / "none")
        case "loop":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**34)


DAMAGES = ["cut", "altered", "garbage", "gone", "folder", "link", "dangling", "loop", "pipe", "huge", "unreadable"]


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_repaired(
    kind: str, cache: Path, tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever replaces an entry of the cache, the next build is right, and the one after it uses the cache. Nothing
    outside changes."""
    attngen.build(SPEC)
    for entry in cache_entries(cache):
        path = cache_entries(cache)[entry]
        with monkeypatch.context() as patch:
            damage_entry(kind, path, tmp_path, patch)
            before = {at: at.read_bytes() for at in tmp_path.glob("elsewhere*") if at.is_file()}
            forget_loaded(monkeypatch)
            module = attngen.build(SPEC)
            assert module.FORWARD, entry
            count = len(rendered)
            forget_loaded(monkeypatch)
            assert attngen.build(SPEC).FORWARD and len(rendered) == count, entry
            for folder in store.modules():  # so that locks and receipts are needed, too
                shutil.rmtree(folder)
            forget_loaded(monkeypatch)
            assert attngen.build(SPEC).FORWARD and len(rendered) == count + 1, entry
            assert not path.is_symlink() and stat.S_IMODE(cache.stat().st_mode) == 0o700, entry
        assert all(at.read_bytes() == data for at, data in before.items()), entry
        for at in tmp_path.glob("elsewhere*"):
            shutil.rmtree(at) if at.is_dir() else at.unlink()
        assert len(store.modules()) == 1 and not list(cache.glob(".mine_*")), entry
    store.clear()
    assert {path.name for path in cache.iterdir()} == {"CACHEDIR.TAG", ".locks", ".receipts"} and not list(
        cache.glob(".receipts/*")
    )


def write_bytecode(path: Path, flag: Path, unchecked: bool) -> None:
    """Write bytecode for a Python file that Python would use, and that makes the file `flag`."""
    code = marshal.dumps(compile(f"open({str(flag)!r}, 'w').close()", str(path), "exec"))
    if unchecked:  # Python does not check the source
        header = (1).to_bytes(4, "little") + bytes(8)
    else:
        header = bytes(4) + b"".join(
            (int(n) & 0xFFFFFFFF).to_bytes(4, "little") for n in (path.stat().st_mtime, path.stat().st_size)
        )
    target = Path(importlib.util.cache_from_source(str(path)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(importlib.util.MAGIC_NUMBER + header + code)


@pytest.mark.share(8)
@pytest.mark.parametrize("unchecked", [False, True])
def test_bytecode_is_never_used(
    unchecked: bool, tmp_path: Path, device: str, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the cache and of other folders are compiled from the source that was checked."""
    folder = Path(str(attngen.build(SPEC).__file__)).parent
    module = attngen.build(SPEC)
    (tmp_path / "pickle").write_bytes(pickle.dumps(module.Attention()))
    copy = shutil.copytree(folder, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*folder.glob("*.py"), *copy.glob("*.py")):
        write_bytecode(path, tmp_path / "ran", unchecked)
    forget_loaded(monkeypatch)
    assert is_right(attngen.build(SPEC), device)
    forget_loaded(monkeypatch)
    assert is_right(attngen.load(copy), device)
    script(UNPICKLE, tmp_path / "pickle")
    assert rendered == ["mine"] and not (tmp_path / "ran").exists()


def test_the_checked_source_is_what_runs(device: str, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read once: text that replaces them later is compiled neither by Python nor by Triton."""
    attngen.build(SPEC)
    (folder,) = store.modules()
    forget_loaded(monkeypatch)
    find = store.kept

    def swapped(name: str) -> store.Kept | None:
        found = find(name)
        for path in folder.glob("*.py"):
            path.write_text("raise SystemExit")
        return found

    monkeypatch.setattr(store, "kept", swapped)
    module = attngen.build(SPEC)
    assert is_right(module, device) and "def " in inspect.getsource(module.runtime) and rendered == ["mine"]


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "form",
    ["{folder}", "../../outside/{name}", "outside/../../outside/{name}", "./{name}", "{name}\n", ".", "..", "", "x"],
)
def test_receipts_name_no_folder_outside_the_cache(
    form: str, cache: Path, tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attngen.build(SPEC)
    code = {"__init__.py": f"open({str(tmp_path / 'ran')!r}, 'w').close()".encode()}
    folder = tmp_path / "outside" / f"mine_{fingerprint.hashed(code)}"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_bytes(code["__init__.py"])
    for receipt in (cache / ".receipts").iterdir():
        receipt.write_text(form.format(folder=folder, name=folder.name))
    forget_loaded(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2 and not (tmp_path / "ran").exists()


def test_a_receipt_for_no_files_is_ignored(cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing folder has the digest of no files, which a receipt may name."""
    attngen.build(SPEC)
    for receipt in (cache / ".receipts").iterdir():
        receipt.write_text(f"mine_{fingerprint.hashed({})}")
    forget_loaded(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2


def test_only_its_user_can_open_a_cache(cache: Path, rendered: list[str]) -> None:
    before = os.umask(0)
    try:
        attngen.build(SPEC)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_cache_that_others_can_write_is_refused(
    mode: int, cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = attngen.build(SPEC)
    pickled = pickle.dumps(module.Attention())
    cache.chmod(mode)
    forget_loaded(monkeypatch)
    sentence = (
        rf"^{cache}: others than its owner can write in it \(mode {mode:04o}\), and what is in it runs as code of "
        rf"yours; [^\n]*$"
    )
    for call in (
        lambda: attngen.build(SPEC),
        lambda: attngen.build({**SPEC, "mask": "none"}),
        lambda: pickle.loads(pickled),
    ):
        with pytest.raises(AttngenError, match=sentence):
            call()
    monkeypatch.setenv(store.TRUST, "1")
    assert attngen.build(SPEC).FORWARD and pickle.loads(pickled).spec and rendered == ["mine"]
    monkeypatch.delenv(store.TRUST)
    cache.chmod(0o755)  # others may read it
    forget_loaded(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"]


def give_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to another user."""
    inode, os_stat, os_fstat = path.stat().st_ino, os.stat, os.fstat

    def seen(found: os.stat_result) -> os.stat_result:
        return os.stat_result((*found[:4], 4243, *found[5:])) if found.st_ino == inode else found

    monkeypatch.setattr(os, "stat", lambda *args, **more: seen(os_stat(*args, **more)))
    monkeypatch.setattr(os, "fstat", lambda at: seen(os_fstat(at)))


def test_a_cache_of_another_user_is_refused(cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attngen.build(SPEC)
    forget_loaded(monkeypatch)
    give_to_another_user(cache, monkeypatch)
    with pytest.raises(
        AttngenError,
        match=rf"^{cache}: it belongs to another user \(4243\) \(mode 0700\), .* {store.TRUST}=1 if you trust",
    ):
        attngen.build(SPEC)
    monkeypatch.setenv(store.TRUST, "1")
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"]


def test_a_file_of_another_user_is_not_used(cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attngen.build(SPEC)
    forget_loaded(monkeypatch)
    give_to_another_user(store.modules()[0] / "kernels.py", monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2


@pytest.mark.parametrize("value", ["~nouser/x", "a\nb", "x" * 5000, "a/" * 4000, "loop", "\x1b[31m"])
def test_an_impossible_folder_gets_one_sentence(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv(store.VARIABLE, value)
    for call in (lambda: attngen.build(SPEC), store.modules, store.clear):
        with pytest.raises(
            AttngenError,
            match=rf"^{store.VARIABLE} is '[^\n]*', which cannot be a folder \(.*\); expected a path, such as /tmp",
        ) as caught:
            call()
        assert len(str(caught.value)) < 300


def test_a_relative_folder_and_an_empty_one(
    tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(store.VARIABLE, "here/it is")
    assert Path(str(attngen.build(SPEC).__file__)).parents[1] == tmp_path / "here" / "it is" / "modules"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(store.VARIABLE, "")
    assert store.root() == tmp_path / "xdg" / "attngen" / "modules"
