"""Where tests run: on CUDA if there is a device, else in Triton's interpreter on the CPU.

TRITON_INTERPRET decides when Triton is first imported, so it is set here, before any test is. It stays in the
environment: a test that compiles for real does so in a process of its own, without it.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import pytest

# NumPy reads it at its first import. The interpreter's matrices are small: more threads would only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

from attngen.conformance.interpreter import check_interpreter, lighten
from attngen.errors import AttngenError
from attngen.lowering import pipeline
from tests import record, share

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


PROVED = pytest.StashKey[dict[str, list[str]]]()  # tests that the record proves
CHANGED = pytest.StashKey[Collection[str]]()  # specs whose committed modules are not those in the record
SEED = pytest.StashKey["str | None"]()  # selects the cases of tests marked `share`; None runs all of them
RECORDER = pytest.StashKey[record.Recorder]()  # of a run that writes the record


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-record", action="store_true", help="write tests/record.json from the tests that pass")


def pytest_configure(config: pytest.Config) -> None:
    """Lowering verifies the last module only, the record of numerics counts, and shares of tests are selected, except
    in nightly runs. All cases of tests that are named one by one run."""
    push = "not nightly" in config.option.markexpr and " or " not in config.option.markexpr
    pipeline.VERIFY_EACH = not push
    recorded = record.read()
    seed = record.commit() if push and not config.option.write_record else None
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[PROVED], config.stash[CHANGED] = worker["proved"], worker["changed"]
    else:
        shutil.rmtree(record.ROOT / ".pytest_cache" / "lowered", ignore_errors=True)  # of earlier runs
        config.stash[PROVED] = record.proved(recorded, seed) if seed and not CUDA else {}
        config.stash[CHANGED] = record.changed(recorded) if seed and not CUDA else []
    named = any("::" in str(argument) for argument in config.args)
    config.stash[SEED] = None if named or CUDA else seed
    if config.option.write_record and not CUDA:
        config.stash[RECORDER] = record.Recorder()
        config.stash[RECORDER].watch()
    record.use_reports(recorded, seed, config.stash.get(RECORDER, None))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the tests that the record proves and the specs that changed: to find them takes
    seconds."""
    node.workerinput["proved"] = node.config.stash[PROVED]
    node.workerinput["changed"] = node.config.stash[CHANGED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take the tests and compile reports that a worker has recorded."""
    if RECORDER in node.config.stash:
        tests, reports = getattr(node, "workeroutput", {}).get("record", ({}, {}))
        node.config.stash[RECORDER].tests |= tests
        node.config.stash[RECORDER].reports |= reports


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RECORDER in session.config.stash:
        recorder = session.config.stash[RECORDER]
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["record"] = (recorder.tests, recorder.reports)
        else:
            record.write(recorder.tests, recorder.reports)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Expect nothing before the test itself is called: a fixture that other tests share must not end in a skip."""
    record.expect(None)
    if RECORDER in item.config.stash:
        item.config.stash[RECORDER].start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    record.expect(item.config.stash[PROVED].get(item.nodeid) if item.get_closest_marker("numerics") else None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if (
        RECORDER in item.config.stash
        and report.when == "call"
        and report.passed
        and item.get_closest_marker("numerics")
    ):
        item.config.stash[RECORDER].passed(item.nodeid)
    return report


_SPECS = {path.stem for path in (Path(__file__).parent.parent / "specs").glob("*.yaml")}
# Files whose tests take ten seconds and more.
SLOW = (
    "test_api.py",
    "test_compiled.py",
    "test_dtensor.py",
    "test_equality.py",
    "test_module_cache_damage.py",
    "test_module_cache_processes.py",
    "test_random_caches.py",
    "test_random_masks.py",
    "test_random_specs.py",
    "test_run.py",
    "test_example.py",
    "test_transformers.py",
    "test_transformers_families.py",
    "test_transformers_formulas.py",
    "test_transformers_specs.py",
    "test_wheel.py",
    "test_wrong_passes.py",
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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    proved = config.stash[PROVED]
    done = [i for i in items if i.get_closest_marker("numerics") and proved.get(i.nodeid) == []]
    if seed := config.stash[SEED]:
        done += share.not_selected(items, seed, _SPECS, config.stash[CHANGED])
    if done:
        config.hook.pytest_deselected(items=done)
        found = set(map(id, done))
        items[:] = [item for item in items if id(item) not in found]
    # What takes long starts first, so that no worker is left with it at the end. Then tests of a spec stand together:
    # the worker that has them lowers it, and loads its kernels, once.
    items.sort(key=lambda item: (item.path.name not in SLOW, _spec_of(item)))
    for item in items:
        if CUDA and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
