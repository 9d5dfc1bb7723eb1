"""What the tests of `attngen.build` and its cache share: a spec, an empty cache, other processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen import api
from attngen.cache import store
from tests.helpers import ROOT

TILES = {"block_q": 16, "block_kv": 16, "stages": 1, "warps": 4, "backend": "triton"}
SPEC: dict[str, Any] = {"name": "mine", "head_dim": 16, "dtype": "fp16", "mask": "causal", "schedule": TILES}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test, without loaded modules."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    forget_loaded(monkeypatch)
    return tmp_path / "cache" / "modules"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the specs that this process compiles, in order."""
    found: list[str] = []
    render = api._render

    def counted(spec: Any, path: Path | None) -> dict[str, str]:
        found.append(spec.name)
        return render(spec, path)

    monkeypatch.setattr(api, "_render", counted)
    return found


@pytest.fixture
def rendered(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same, with the files of a spec kept, so that compiling takes time only once."""
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


def forget_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the modules that this process has loaded, as if it were another process."""
    monkeypatch.setattr(api, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("attngen.built.")]:
        monkeypatch.delitem(sys.modules, name)


def qkv(device: str) -> tuple[torch.Tensor, ...]:
    """Random q, k and v."""
    made = torch.randn(3, 1, 2, 33, 16, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    return made.unbind()


def is_right(module: ModuleType, device: str, causal: bool = True) -> bool:
    """Whether a module computes attention right."""
    q, k, v = qkv(device)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    return torch.allclose(module.attention(q, k, v).float(), expected, atol=2e-3)


def script(code: str, *args: object, kill: bool = False) -> str:
    """The output of a script that runs in another process, which `kill` expects to be killed."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return done.stdout.strip()


UNPICKLE = """
import pickle, sys
assert pickle.load(open(sys.argv[1], "rb")).spec and "attngen.api" not in sys.modules
"""
