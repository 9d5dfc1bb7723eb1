"""Where tests run: on CUDA if there is a device, else in Triton's interpreter on the CPU.

TRITON_INTERPRET decides when Triton is first imported, so it is set here, before any test is. It stays in the
environment: a test that compiles for real does so in a process of its own, without it.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# NumPy reads it at its first import. The interpreter's matrices are small: more threads would only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

from attngen.conformance.interpreter import check_interpreter, lighten
from attngen.errors import AttngenError
from attngen.lowering import pipeline

# SymPy's caches are large and stay; the default thresholds would spend a tenth of the time on looking through them.
gc.set_threshold(50_000, 20, 100)
CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, in processes that tests start
    lighten()
    torch.set_num_threads(1)  # tensors are small, and the other cores have workers of their own
try:
    check_interpreter()
except AttngenError as error:
    pytest.exit(str(error), returncode=4)


def pytest_configure(config: pytest.Config) -> None:
    """Lowering verifies the last module only, except in nightly runs."""
    pipeline.VERIFY_EACH = config.option.markexpr != "not nightly"


_SPECS = {path.stem for path in (Path(__file__).parent.parent / "specs").glob("*.yaml")}
# Files whose tests take ten seconds and more.
SLOW = (
    "test_api.py",
    "test_compiled.py",
    "test_dtensor.py",
    "test_equality.py",
    "test_random_caches.py",
    "test_random_masks.py",
    "test_random_specs.py",
    "test_run.py",
    "test_example.py",
    "test_transformers.py",
    "test_wheel.py",
)


@pytest.fixture(scope="session")
def device() -> str:
    """The device that generated modules run on; tests that use it are `gpu` tests where it is CUDA."""
    return "cuda" if CUDA else "cpu"


def _spec_of(item: pytest.Item) -> str:
    """The spec that a test is of; none if it shares a fixture with other tests of its file."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    given = getattr(item, "callspec", None)
    alone = all(f.scope in ("function", "session") for found in fixtures for f in found)
    return next((x for x in given.params.values() if isinstance(x, str) and x in _SPECS), "") if given and alone else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long starts first, so that no worker is left with it at the end. Then tests of a spec stand together:
    # the worker that has them lowers it, and loads its kernels, once.
    items.sort(key=lambda item: (item.path.name not in SLOW, _spec_of(item)))
    for item in items:
        if CUDA and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
