"""The record: the tests of numerics that passed, with digests of the code that they ran, and compile reports of
kernels. With it, a push need not run and compile everything again.

A test marked `numerics` launches kernels of generated modules in Triton's interpreter and compares the results with
naive attention. Its outcome depends on the code of these modules, on the code of the test, its helpers and the oracle,
and on the versions of torch, Triton and NumPy. `pytest --write-record` (`make nightly`) runs all tests and writes these
into tests/record.json: digests of modules and of tests' files, and for each test that passed the modules whose kernels
it launched.

`pytest` then skips a test if all of that is as recorded, except one test in 16, selected by the commit's hash. A test
that is not in the record, or whose module changed, runs. Comments and docstrings do not count. On a GPU, and in a
nightly run, nothing is skipped.

Tests that compile kernels ahead of time call `compile_all` here. It returns the recorded compile reports of the same
sources by the same Triton, except one in 16, and compiles the others. The checks of a test always run.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from attngen.certify.certificate import checked_out, sampled
from attngen.targets.common.base import CompileReport, short_digest

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "record.json"
GENERATED = ROOT / "generated"
# The code that every test of numerics depends on besides its own file: helpers, the harness, the oracle, and the specs,
# masks and score modifiers, which have the oracle's formulas.
COMMON = (
    ROOT / "tests" / "helpers.py",
    *(
        p
        for room in ("conformance", "spec", "lang", "masks", "scores")
        for p in sorted((ROOT / "attngen" / room).glob("*.py"))
    ),
)
# Rooms with which a test may compute the values that it expects. The rest of attngen makes the modules, and shows in
# their bytes.
EXPECTING = [ROOT / "attngen" / room for room in ("interp", "tiles", "cost", "report", "bench")]


def code_digest(text: str) -> str:
    """A digest of Python source without comments, docstrings, layout, and the marks `share` of tests: 16 hexadecimal
    digits."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            of_share = [d for d in node.decorator_list if ast.unparse(d).startswith("pytest.mark.share(")]
            node.decorator_list = [d for d in node.decorator_list if d not in of_share]
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


@cache
def file_digest(path: Path) -> str:
    """`code_digest` of a file; empty if there is none."""
    return _text_digest(path.read_text(encoding="utf-8")) if path.is_file() else ""


_text_digest = cache(code_digest)  # all modules have the same runtime.py


def module_digest(folder: Path) -> str:
    """A digest of the code of a generated module that the interpreter runs: all Python files except hopper.py, which
    runs only on a GPU."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.glob("*.py") if path.name != "hopper.py"):
        found.update(f"{path.name} {_text_digest(path.read_text(encoding='utf-8'))}\n".encode())
    return found.hexdigest()[:16]


@cache
def committed_digest(name: str) -> str:
    """`module_digest` of a committed module."""
    return module_digest(GENERATED / name)


def versions() -> dict[str, str]:
    """The versions of the packages that compute in the interpreter."""
    import triton  # not sooner: it asks for TRITON_INTERPRET, which conftest sets

    return {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__}


def test_digest(file: str) -> str:
    """A digest of the code that a test file runs besides modules: the files of `imported`, and those that all tests of
    numerics depend on."""
    found = "".join(map(file_digest, (*imported(ROOT / file), *COMMON)))
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def imported(file: Path) -> list[Path]:
    """A test file; the files of tests/ that it imports, directly or through others, except conftest.py and this one,
    which only choose tests; and the files of EXPECTING that one of these imports itself."""
    found, remaining = set(), [file]
    while remaining:
        path = remaining.pop()
        if path in found or path.name in ("conftest.py", "record.py") or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = ROOT / str(node.module).replace(".", "/")
            files = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
            remaining += [path for path in files if ROOT / "tests" in path.parents]
            found |= {path for path in files if path.parent in EXPECTING and path.is_file()}
    return sorted(found)


@cache
def commit() -> str:
    """The seed that selects what runs although the record proves it: the commit that is checked out; without git, a
    digest of the record."""
    return checked_out(ROOT) or short_digest(read())


def number(which: int) -> int:
    """A seed for random tests of a push: another one for each commit and each `which`."""
    return int(short_digest(f"{commit()} {which}")[:8], 16)


def proved(record: dict[str, Any], seed: str | None) -> dict[str, list[str]]:
    """The tests that may be skipped. Most are skipped when they are collected; a test that builds modules itself has to
    build them first, and its value lists their recorded digests.

    A module under generated/ stands in the record by its name, and has to have the recorded digest now. One that the
    test builds stands there by its digest, with which `built_again` compares the built module. `seed` selects the tests
    that run nevertheless; None selects none.
    """
    if record.get("versions") != versions():
        return {}
    current = {name for name, digest in record["modules"].items() if committed_digest(name) == digest}
    files = {file for file, digest in record["files"].items() if test_digest(file) == digest}
    found = {}
    for name, used in record["tests"].items():
        committed = [module for module in used if not module.startswith("#")]
        if name.partition("::")[0] in files and current.issuperset(committed):
            found[name] = [module[1:] for module in used if module.startswith("#")]
    for name in sampled(found, seed) if seed else ():
        del found[name]
    return found


def changed(record: dict[str, Any]) -> list[str]:
    """The names of committed modules that are not those in the record, with their kernels for Hopper."""
    recorded, specialized = record.get("modules", {}), record.get("warp_specialized", {})
    now = warp_specialized()
    return [
        folder.name
        for folder in sorted(GENERATED.iterdir())
        if (folder / "kernels.py").is_file()
        and (recorded.get(folder.name), specialized.get(folder.name))
        != (committed_digest(folder.name), now.get(folder.name))
    ]


def warp_specialized() -> dict[str, str]:
    """The digests of the committed hopper.py, by the names of modules."""
    return {path.parent.name: file_digest(path) for path in sorted(GENERATED.glob("*/hopper.py"))}


def read() -> dict[str, Any]:
    """The committed record; empty if there is none."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def write(tests: dict[str, list[str]], reports: dict[str, Any]) -> None:
    """Write the record of tests that passed, each with the modules whose kernels it launched. Tests that did not run
    now stay if they are proved; reports stay as long as the versions."""
    old = read()
    tests = {name: old["tests"][name] for name in proved(old, seed=None)} | tests
    names = sorted({module for used in tests.values() for module in used if not module.startswith("#")})
    record = {
        "versions": versions(),
        "modules": {name: committed_digest(name) for name in names},
        "warp_specialized": warp_specialized(),
        "files": {file: test_digest(file) for file in sorted({name.partition("::")[0] for name in tests})},
        "tests": dict(sorted(tests.items())),
        "reports": dict(sorted(((old["reports"] if old.get("versions") == versions() else {}) | reports).items())),
    }
    RECORD.write_text(_text(record), encoding="utf-8")


def _text(record: dict[str, dict[str, Any]]) -> str:
    """The record as JSON with a line for each entry."""
    tables = []
    for name, table in record.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        tables.append(f" {json.dumps(name)}: {{{f'{chr(10)}{lines}{chr(10)} ' if lines else ''}}}")
    return "{\n" + ",\n".join(tables) + "\n}\n"


class Recorder:
    """Notes, while tests run, which modules' kernels each one launches in the interpreter, and compile reports."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}
        self.reports: dict[str, Any] = {}
        self.launched: set[Path] = set()
        self._digests: dict[Path, str] = {}

    def watch(self) -> None:
        """Note the folder of each kernel that Triton's interpreter runs from now on."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def noted(function: Any, *args: Any, **options: Any) -> Any:
            self.launched.add(Path(function.fn.__code__.co_filename).parent)
            return run(function, *args, **options)

        InterpretedFunction.run = noted

    def passed(self, name: str) -> None:
        """Note that a test passed, with the modules of the kernels that ran since the last call of `start`."""
        if self.launched and all((folder / "kernels.py").is_file() for folder in self.launched):
            self.tests[name] = sorted(map(self._named, self.launched))

    def start(self) -> None:
        """Forget the kernels that ran before."""
        self.launched.clear()

    def _named(self, folder: Path) -> str:
        if folder.parent == GENERATED:
            return folder.name
        if folder not in self._digests:
            self._digests[folder] = f"#{module_digest(folder)}"
        return self._digests[folder]


# The reports that `compile_all` returns without compiling, by the digest of a job; and the recorder of the others.
_reports: dict[str, Any] = {}
_recorder: Recorder | None = None


def use_reports(record: dict[str, Any], seed: str | None, recorder: Recorder | None) -> None:
    """Let `compile_all` return recorded reports, or none if `seed` is None, and give `recorder` the reports that it
    compiles."""
    global _recorder
    _recorder = recorder
    _reports.clear()
    if seed is not None and record.get("versions") == versions():
        _reports.update(record["reports"])
        for digest in sampled(_reports, seed):
            del _reports[digest]


def compile_all(
    compiler: Callable[[Sequence[Any], int | None], Iterable[CompileReport | str]], jobs: Sequence[Any], workers: int
) -> list[CompileReport | str]:
    """The compile report of each job, or the sentence that says why it does not compile: recorded, or from
    `compiler`."""
    left = [job for job in jobs if job.digest not in _reports]
    made = {job.digest: found for job, found in zip(left, compiler(left, workers) if left else ())}
    if _recorder is not None:
        _recorder.reports |= {
            digest: found if isinstance(found, str) else asdict(found) for digest, found in made.items()
        }
    return [made[job.digest] if job.digest in made else _report(_reports[job.digest]) for job in jobs]


def _report(found: Any) -> CompileReport | str:
    return found if isinstance(found, str) else CompileReport(**found)


# The digests that the running test has still to build before the record proves it; None where the record does not.
_expected: set[str] | None = None


def expect(digests: list[str] | None) -> None:
    """Start a test. It is skipped as soon as the modules that it has built have all these digests; never if None."""
    global _expected
    _expected = None if digests is None else set(digests)


def built_again(folder: Path) -> None:
    """Skip the running test if the module in `folder`, which it has just built, is the last that it had to build."""
    if _expected is not None:
        _expected.discard(module_digest(folder))
        if not _expected:
            pytest.skip("proved by tests/record.json")
