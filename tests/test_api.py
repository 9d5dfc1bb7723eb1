"""`attngen.build` and `attngen.load`: what they take and give, the cache between processes, and what is damaged,
stale or of one name."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import marshal
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attngen
from attngen import api
from attngen.cache import fingerprint as sources
from attngen.cache import store
from attngen.codegen.files import write_module
from attngen.errors import AttngenError, SpecError
from attngen.spec import load_spec, make_spec
from tests.helpers import ROOT

TILES = {"block_q": 16, "block_kv": 16, "stages": 1, "warps": 4, "backend": "triton"}
SPEC: dict[str, Any] = {"name": "mine", "head_dim": 16, "dtype": "fp16", "mask": "causal", "schedule": TILES}
YAML = "name: mine\nhead_dim: 16\ndtype: fp16\nmask: causal\nschedule: {block_q: 16, block_kv: 16, stages: 1, warps: 4, backend: triton}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of this test alone; nothing is loaded."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    anew(monkeypatch)
    return tmp_path / "cache" / "modules"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the specs that this process compiles."""
    found: list[str] = []
    render = api._render

    def counted(spec: Any, path: Path | None) -> dict[str, str]:
        found.append(spec.name)
        return render(spec, path)

    monkeypatch.setattr(api, "_render", counted)
    return found


@pytest.fixture
def rendered(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same, where compiling takes no time but for the first time."""
    render = api._render

    def known(spec: Any, path: Path | None) -> dict[str, str]:
        if spec.hash() not in _RENDERED:
            _RENDERED[spec.hash()] = render(spec, path)
        else:
            compiled.append(spec.name)
        return _RENDERED[spec.hash()]

    monkeypatch.setattr(api, "_render", known)
    return compiled


_RENDERED: dict[str, dict[str, str]] = {}


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has loaded, as another process would not know it."""
    monkeypatch.setattr(api, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("attngen.built.")]:
        monkeypatch.delitem(sys.modules, name)


def qkv(device: str) -> tuple[torch.Tensor, ...]:
    made = torch.randn(3, 1, 2, 33, 16, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    return made.unbind()


def is_right(module: ModuleType, device: str, causal: bool = True) -> bool:
    """Whether a module computes attention."""
    q, k, v = qkv(device)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    return torch.allclose(module.attention(q, k, v).float(), expected, atol=2e-3)


def script(code: str, *args: object, kill: bool = False) -> str:
    """What a script prints that runs in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------- what it takes and gives


def test_data_a_file_and_a_spec_give_one_module(tmp_path: Path, device: str, cache: Path, compiled: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    module = attngen.build(SPEC)
    assert is_right(module, device)
    other_order = dict(reversed(SPEC.items()))
    for same in (dict(SPEC), other_order, OrderedDict(SPEC), path, str(path), load_spec(path), make_spec(SPEC)):
        assert attngen.build(same) is module
    assert compiled == ["mine"]
    assert [folder.name for folder in store.modules()] == [module.__name__.removeprefix("attngen.built.")]
    assert Path(str(module.__file__)).parent.parent == cache


def test_a_file_that_changed_is_another_spec(tmp_path: Path, device: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    first = attngen.build(path)
    path.write_text(YAML.replace("causal", "none"))
    second = attngen.build(path)
    assert first is not second and is_right(second, device, causal=False)


def test_the_function_stays_the_function() -> None:
    """No subpackage has its name: importing one would replace it."""
    attngen.build(SPEC)
    assert attngen.build is api.build and attngen.load is api.load
    for name in attngen.__all__:
        assert not (ROOT / "attngen" / f"{name}.py").exists() and not (ROOT / "attngen" / name / "__init__.py").exists()


def test_a_dict_that_was_seen_is_found_in_microseconds() -> None:
    attngen.build(SPEC)
    start = time.process_time()
    for _ in range(1000):
        attngen.build(dict(SPEC))
    assert time.process_time() - start < 0.5  # half a millisecond each; it takes some microseconds


PLAIN = "expected the path of a YAML file, a dict of plain data, or a Spec"
WRONG = [
    (None, f"attngen.build: got None; {PLAIN}"),
    ([SPEC], f"attngen.build: got a value of type `list`; {PLAIN}"),
    ({**SPEC, "mask": "casual"}, "spec: `mask` is `casual`, which is not a mask; did you mean `causal`?"),
    ({**SPEC, "mask": object()}, "spec: `mask`"),
    ({}, "spec: `name` is missing; expected "),
    ({**SPEC, "head_dim": 256, "schedule": {"block_q": 256}}, "spec: `schedule` does not fit: on "),
    (
        YAML,
        "attngen.build: the text is not a path; expected the path of a YAML file, or plain data, as yaml.safe_load gives",
    ),
    ("none/such.yaml", "none/such.yaml: there is no such file; `attngen new NAME` writes a spec to start from"),
    (ROOT / "specs", f"{ROOT / 'specs'}: cannot be read (Is a directory); expected a YAML spec"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_wrong_specs_get_one_sentence(wrong: Any, sentence: str, cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        attngen.build(wrong)
    assert (
        str(caught.value).startswith(sentence)
        and "\n" not in str(caught.value).removeprefix("spec: `name`").partition("\nspec")[0]
    )
    assert store.modules() == []


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text("name: wide\nhead_dim: 256\nschedule: {block_q: 256}\n")
    with pytest.raises(SpecError, match=rf"^{path}, line 3: `schedule` does not fit: on "):
        attngen.build(path)
    path.write_text("name: wide\nhead_dim: 63\n")
    with pytest.raises(SpecError, match=rf"^{path}, line 2: `head_dim` is the number 63; expected "):
        attngen.build(path)


def test_what_may_not_be_meant_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="^spec: `mask` ") as caught:
        attngen.build({**SPEC, "mask": {"expr": "kv_idx <= q_idx"}})
    assert caught[0].filename == __file__


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(
        AttngenError, match=r"/file/modules: cannot be written \(Not a directory\); name another folder in "
    ):
        attngen.build(SPEC)


# ---------------------------------------------------------------------------------------------- modules of one name


def test_two_modules_of_one_name_work_beside_each_other(device: str) -> None:
    """Called, compiled into one graph, and pickled."""
    causal, full = attngen.build(SPEC), attngen.build({**SPEC, "mask": "none"})
    assert causal is not full and causal.FORWARD is not full.FORWARD
    assert is_right(causal, device) and is_right(full, device, causal=False)
    q, k, v = qkv(device)
    both = torch.compile(
        lambda: causal.attention(q, k, v) - full.attention(q, k, v), backend="aot_eager", fullgraph=True
    )
    assert both().equal(causal.attention(q, k, v) - full.attention(q, k, v)) and both().abs().max() > 0.1
    for module in (causal, full):
        assert pickle.loads(pickle.dumps(module.Attention()))(q, k, v).equal(module.attention(q, k, v))


def test_two_that_differ_in_their_code_alone_have_operators_of_their_own(tmp_path: Path, device: str) -> None:
    """As of two versions of attngen, which schedule a spec alike."""
    first = attngen.build(SPEC)
    folder = shutil.copytree(
        Path(str(first.__file__)).parent, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert attngen.load(folder) is first
    with (folder / "runtime.py").open("a") as file:
        file.write("\nEDITED = True\n")
    second = attngen.load(folder)
    assert second.runtime.EDITED and not hasattr(first.runtime, "EDITED")
    assert first.FORWARD is not second.FORWARD
    assert is_right(first, device) and is_right(second, device)


# ---------------------------------------------------------------------------------------------- other processes

SECOND = """
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
UNPICKLE = """
import pickle, sys
assert pickle.load(open(sys.argv[1], "rb")).spec and "attngen.api" not in sys.modules
"""


def test_a_second_process_takes_it_from_the_cache(tmp_path: Path) -> None:
    """In less than 0.3 s of its processor, without the compiler; and it unpickles what the first has pickled."""
    module = attngen.build(SPEC)
    (tmp_path / "pickle").write_bytes(pickle.dumps(module.Attention(scale=0.5)))
    took = [float(script(SECOND.format(spec=SPEC), tmp_path / "pickle")) for _ in range(2)]
    assert min(took) < 0.3
    script(UNPICKLE, tmp_path / "pickle")


ONE_OF_MANY = """
import sys, torch, attngen
module = attngen.build({spec!r})
assert module.attention is not None
print(module.__file__, "attngen.codegen.render" in sys.modules)
"""


def test_of_many_processes_one_compiles(cache: Path) -> None:
    command = [sys.executable, "-c", ONE_OF_MANY.format(spec=SPEC)]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * 3, ended
    found = [output.split() for output, _ in ended]
    assert len({path for path, _ in found}) == 1 == len(store.modules())
    assert sorted(rendered for _, rendered in found) == ["False"] * 2 + ["True"]


def test_two_threads_that_make_a_folder_keep_what_is_in_it(cache: Path) -> None:
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


KILLED = """
import os, signal, attngen
from attngen.codegen import files
def swap(fresh, folder, old):
    (fresh / "runtime.py").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
files._swap = swap
attngen.build({spec!r})
"""


def test_a_killed_build_leaves_nothing_that_a_later_one_uses(cache: Path, device: str, compiled: list[str]) -> None:
    script(KILLED.format(spec=SPEC), kill=True)
    (left,) = cache.glob(".mine_*")
    assert store.modules() == []
    assert is_right(attngen.build(SPEC), device) and compiled == ["mine"]
    assert not left.exists()


# ---------------------------------------------------------------------------------------------- damaged and stale


@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "more", "receipt"])
def test_what_is_damaged_is_built_again(
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
    anew(monkeypatch)
    assert is_right(attngen.build(SPEC), device)
    assert compiled == ["mine"] * 2 and kernels.read_bytes() == before and len(store.modules()) == 1


def places(cache: Path) -> dict[str, Path]:
    """What a cache of one module has, but for what nothing reads: of each kind one."""
    (folder,) = store.modules()
    (lock,) = (cache / ".locks").glob("*.lock")
    receipt = cache / ".receipts" / store.key_of(api._request(SPEC)[0])
    kept = [folder, *folder.glob("*.py"), receipt.parent, receipt, lock.parent, lock, cache / "CACHEDIR.TAG"]
    return {
        "lock" if path == lock else "receipt" if path == receipt else path.relative_to(cache).as_posix(): path
        for path in kept
    }


def put(kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage what is at a place."""
    elsewhere = tmp_path / "elsewhere"
    inode, os_open, os_access = path.lstat().st_ino, os.open, os.access
    held = None if path.is_dir() else path.open()  # or another file may get its number
    data = b"" if path.is_dir() else path.read_bytes()
    if kind == "unreadable":  # root may read what no one may

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


KINDS = ["cut", "altered", "garbage", "gone", "folder", "link", "dangling", "loop", "pipe", "huge", "unreadable"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_heals(
    kind: str, cache: Path, tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each place, whatever is there, the next build is right, and the one after it finds what that has left.
    Nothing outside changes."""
    attngen.build(SPEC)
    for place in places(cache):
        path = places(cache)[place]
        with monkeypatch.context() as patch:
            put(kind, path, tmp_path, patch)
            before = {at: at.read_bytes() for at in tmp_path.glob("elsewhere*") if at.is_file()}
            anew(monkeypatch)
            module = attngen.build(SPEC)
            assert module.FORWARD, place
            count = len(rendered)
            anew(monkeypatch)
            assert attngen.build(SPEC).FORWARD and len(rendered) == count, place
            for folder in store.modules():  # so that locks and receipts are needed, too
                shutil.rmtree(folder)
            anew(monkeypatch)
            assert attngen.build(SPEC).FORWARD and len(rendered) == count + 1, place
            assert not path.is_symlink() and stat.S_IMODE(cache.stat().st_mode) == 0o700, place
        assert all(at.read_bytes() == data for at, data in before.items()), place
        for at in tmp_path.glob("elsewhere*"):
            shutil.rmtree(at) if at.is_dir() else at.unlink()
        assert len(store.modules()) == 1 and not list(cache.glob(".mine_*")), place
    store.clear()
    assert {path.name for path in cache.iterdir()} == {"CACHEDIR.TAG", ".locks", ".receipts"} and not list(
        cache.glob(".receipts/*")
    )


def run_if_taken(path: Path, flag: Path, unchecked: bool) -> None:
    """Write bytecode of other code for a Python file, as Python itself would take it."""
    code = marshal.dumps(compile(f"open({str(flag)!r}, 'w').close()", str(path), "exec"))
    if unchecked:  # Python does not look at the source
        header = (1).to_bytes(4, "little") + bytes(8)
    else:
        header = bytes(4) + b"".join(
            (int(n) & 0xFFFFFFFF).to_bytes(4, "little") for n in (path.stat().st_mtime, path.stat().st_size)
        )
    target = Path(importlib.util.cache_from_source(str(path)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(importlib.util.MAGIC_NUMBER + header + code)


@pytest.mark.parametrize("unchecked", [False, True])
def test_bytecode_is_never_taken(
    unchecked: bool, tmp_path: Path, device: str, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside modules of the cache and of other folders: what runs was made from the source that was checked."""
    folder = Path(str(attngen.build(SPEC).__file__)).parent
    module = attngen.build(SPEC)
    (tmp_path / "pickle").write_bytes(pickle.dumps(module.Attention()))
    copy = shutil.copytree(folder, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*folder.glob("*.py"), *copy.glob("*.py")):
        run_if_taken(path, tmp_path / "ran", unchecked)
    anew(monkeypatch)
    assert is_right(attngen.build(SPEC), device)
    anew(monkeypatch)
    assert is_right(attngen.load(copy), device)
    script(UNPICKLE, tmp_path / "pickle")
    assert rendered == ["mine"] and not (tmp_path / "ran").exists()


def test_what_was_checked_is_what_runs(device: str, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read once: another text that is there by then is compiled neither by Python nor by Triton."""
    attngen.build(SPEC)
    (folder,) = store.modules()
    anew(monkeypatch)
    find = store.kept

    def swapped(name: str) -> store.Kept | None:
        found = find(name)
        for path in folder.glob("*.py"):
            path.write_text("raise SystemExit")
        return found

    monkeypatch.setattr(store, "kept", swapped)
    module = attngen.build(SPEC)
    assert is_right(module, device) and "def " in inspect.getsource(module.runtime) and rendered == ["mine"]


@pytest.mark.parametrize(
    "form",
    ["{folder}", "../../outside/{name}", "outside/../../outside/{name}", "./{name}", "{name}\n", ".", "..", "", "x"],
)
def test_receipts_lead_to_nothing_outside_the_cache(
    form: str, cache: Path, tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attngen.build(SPEC)
    code = {"__init__.py": f"open({str(tmp_path / 'ran')!r}, 'w').close()".encode()}
    folder = tmp_path / "outside" / f"mine_{sources.hashed(code)}"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_bytes(code["__init__.py"])
    for receipt in (cache / ".receipts").iterdir():
        receipt.write_text(form.format(folder=folder, name=folder.name))
    anew(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2 and not (tmp_path / "ran").exists()


def test_an_empty_module_is_none(cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there has the digest of no files."""
    attngen.build(SPEC)
    for receipt in (cache / ".receipts").iterdir():
        receipt.write_text(f"mine_{sources.hashed({})}")
    anew(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2


# ---------------------------------------------------------------------------------------------- whom a cache trusts


def test_a_cache_is_its_users_alone(cache: Path, rendered: list[str]) -> None:
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
    anew(monkeypatch)
    sentence = rf"^{cache}: others than its owner can write in it \(mode {mode:04o}\), and what is in it runs as code of yours; [^\n]*$"
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
    anew(monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"]


def strange(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to another user."""
    inode, os_stat, os_fstat = path.stat().st_ino, os.stat, os.fstat

    def seen(found: os.stat_result) -> os.stat_result:
        return os.stat_result((*found[:4], 4243, *found[5:])) if found.st_ino == inode else found

    monkeypatch.setattr(os, "stat", lambda *args, **more: seen(os_stat(*args, **more)))
    monkeypatch.setattr(os, "fstat", lambda at: seen(os_fstat(at)))


def test_a_cache_of_another_user_is_refused(cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attngen.build(SPEC)
    anew(monkeypatch)
    strange(cache, monkeypatch)
    with pytest.raises(
        AttngenError,
        match=rf"^{cache}: it belongs to another user \(4243\) \(mode 0700\), .* {store.TRUST}=1 if you trust",
    ):
        attngen.build(SPEC)
    monkeypatch.setenv(store.TRUST, "1")
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"]


def test_a_file_of_another_user_is_no_part_of_the_cache(
    cache: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attngen.build(SPEC)
    anew(monkeypatch)
    strange(store.modules()[0] / "kernels.py", monkeypatch)
    assert attngen.build(SPEC).FORWARD and rendered == ["mine"] * 2


@pytest.mark.parametrize("value", ["~nouser/x", "a\nb", "x" * 5000, "a/" * 4000, "loop", "\x1b[31m"])
def test_what_cannot_be_a_folder_is_one_sentence(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_relative_folder_and_none(tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(store.VARIABLE, "here/it is")
    assert Path(str(attngen.build(SPEC).__file__)).parents[1] == tmp_path / "here" / "it is" / "modules"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(store.VARIABLE, "")
    assert store.root() == tmp_path / "xdg" / "attngen" / "modules"


AT_ONCE = """
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


def test_building_healing_and_clearing_at_once(
    tmp_path: Path, rendered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes and in threads: each gets its module, whatever the others do to the cache."""
    (tmp_path / "files").write_bytes(pickle.dumps(api._render(make_spec(SPEC), None)))
    command = [sys.executable, "-c", AT_ONCE.replace("{spec!r}", repr(SPEC)), str(tmp_path / "files")]
    started = [
        subprocess.Popen([*command, str(at)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for at in range(3)
    ]
    ended = [process.communicate() for process in started]
    assert [output for output, _ in ended] == ["[]\n"] * 3, ended
    rendered.clear()
    assert attngen.build(SPEC).FORWARD
    anew(monkeypatch)
    assert attngen.build(SPEC).FORWARD and len(rendered) <= 1


def test_collections_pause_while_a_module_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def lower(_: Any) -> Any:
        ran.append(gc.isenabled())
        raise AttngenError("enough")

    monkeypatch.setattr("attngen.lowering.pipeline.lower", lower)
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(AttngenError, match="enough"):
                attngen.build(SPEC)
            assert gc.isenabled() == before
        finally:
            gc.enable()
    assert ran == [False, False]


def test_another_attngen_builds_anew(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attngen.build(SPEC)
    monkeypatch.setattr(store, "digest", lambda: "another")
    anew(monkeypatch)
    attngen.build(SPEC)
    assert compiled == ["mine"] * 2


def test_the_digest_covers_every_file_that_decides_what_is_generated(tmp_path: Path) -> None:
    """A version under development has the same number, and other files. Those that Python writes do not count, nor
    where files are."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("attngen", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)

    def digest() -> str:
        code = "import sys; sys.path.insert(0, sys.argv[1]); import attngen.cache.fingerprint as s; print(s.PACKAGE, s.digest())"
        package, found = script(code, tmp_path).split()
        assert Path(package) == tmp_path / "attngen"
        return found

    seen = [digest()]
    assert seen == [sources.digest()]
    for name in ("templates/triton/module.py.jinja", "attngen/transforms/dce.py", "attngen/masks/documents.ir"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        seen.append(digest())
    assert len(set(seen)) == len(seen)
    shutil.move(tmp_path / "templates", tmp_path / "attngen" / "templates")  # as in a wheel
    (tmp_path / "attngen" / "transforms" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "attngen" / "transforms" / "__pycache__" / "dce.pyc").touch()
    assert digest() == seen[-1]


# ---------------------------------------------------------------------------------------------- load


def test_load_imports_a_folder_from_anywhere(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "my modules" / "made-here"
    files = api._render(make_spec(SPEC), None)
    write_module(files, folder)
    module = attngen.load(str(folder))
    assert is_right(module, device) and attngen.load(folder) is module
    assert module.__name__.startswith("attngen.built.made_here_") and str(folder.parent) not in sys.path
    assert pickle.loads(pickle.dumps(module.attention)) is module.attention
    write_module(api._render(make_spec({**SPEC, "mask": "none"}), None), folder)
    assert is_right(attngen.load(folder), device, causal=False) and is_right(module, device)


def test_load_of_a_copy_works_where_the_first_is_gone(tmp_path: Path, device: str) -> None:
    for name in ("a", "b"):
        write_module(api._render(make_spec(SPEC), None), tmp_path / name / "mine")
    first = attngen.load(tmp_path / "a" / "mine")
    assert attngen.load(tmp_path / "b" / "mine") is first
    shutil.rmtree(tmp_path / "a")
    second = attngen.load(tmp_path / "b" / "mine")
    assert second is not first and is_right(second, device)


def test_load_refuses_what_is_no_module_in_one_sentence(tmp_path: Path) -> None:
    def refused(path: Any) -> str:
        with pytest.raises(AttngenError) as caught:
            attngen.load(path)
        return str(caught.value)

    expected = "expected the folder of a generated module, as in `generated/causal_mqa`"
    assert (
        refused(None) == "attngen.load: got None; expected the path of a generated folder, as in `generated/causal_mqa`"
    )
    assert refused(tmp_path / "none") == f"{tmp_path}/none does not exist; {expected}"
    spec = ROOT / "specs" / "causal_mqa.yaml"
    assert refused(spec) == f"{spec} is not a folder; {expected}; `attngen.build` takes specs"
    assert (
        refused(tmp_path)
        == f"{tmp_path} is not a generated module (it has no __init__.py); `attngen build SPEC` writes one"
    )
    folder = shutil.copytree(
        ROOT / "generated" / "causal_mqa", tmp_path / "cut", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "kernels.py").write_text("def unswitch(")
    assert refused(folder) == (
        f"{folder}: cannot be imported (SyntaxError: '(' was never closed (kernels.py, line 1)); expected what `attngen build` writes"
    )
    assert not [name for name in sys.modules if name.startswith("attngen.built.cut_")]


# ---------------------------------------------------------------------------------------------- import attngen

CHEAP = """
import sys
before = set(sys.modules)
import attngen
print(attngen.__version__, sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
try:
    attngen.bild
except AttributeError as error:
    print(error)
import attngen.api
print({"torch", "triton", "sympy", "pydantic", "yaml", "filelock"} & set(sys.modules))
"""


def test_importing_attngen_imports_nothing_else() -> None:
    assert script(CHEAP).splitlines() == [
        f"{attngen.__version__} ['attngen']",
        "module `attngen` has no attribute `bild`",
        "set()",
    ]


@pytest.mark.parametrize("other", ["thread", "process"])
def test_who_waits_for_another_build_says_so_once(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A build that holds the lock for long is no silence, neither for other threads nor, by the cache's lock, for
    other processes."""
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
