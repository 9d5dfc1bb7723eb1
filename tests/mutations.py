"""Fifty mistakes, each made in a copy of the sources: the tests of a push have to catch every one.

    python -m tests.mutations                all of them, one after another
    python -m tests.mutations NAME ...       these, by the first words of their descriptions
    python -m tests.mutations --list         the mistakes

A mistake is one edit. The modules of `specs` are built again from the edited sources, as its author would do, so that
the test that compares generated/ with specs/ does not catch it. Then `tests` run, which are among those that a push
runs; if they pass, the modules of all specs are built and all tests of a push run. If these pass as well, the script
prints the mistake and fails. The test that catches a mistake has to pass without it. Tests marked `share`, of which a
push runs only some cases, do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation_table import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent


# A line of pytest's summary: the test, whose parameters may have spaces, and what was wrong.
_FAILED = re.compile(r"(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - .*)?$")


def python(folder: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that has the sources, which it imports from there."""
    environment = os.environ | {"PYTHONPATH": str(folder), "ATTNGEN_CACHE_DIR": str(folder / ".cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )


def copied(folder: Path) -> None:
    """Copy the sources into a folder: all files that git has or would add."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def failed(folder: Path, *arguments: str) -> str:
    """The first test that fails in a folder; empty if all pass. A collection that fails counts as a failure."""
    every_push = ("-m", "not nightly and not share")
    done = python(
        folder, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *every_push, *arguments
    )
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not lines:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return lines[0]


def caught(mutation: Mutation, folder: Path, workers: str) -> str:
    """The test that catches a mistake; empty if none does. Raise RuntimeError if the test fails without the mistake,
    too."""
    path = folder / mutation.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has {text.count(mutation.old)} times: {mutation.old}"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    specs = [f"specs/{name}.yaml" for name in mutation.specs]
    found = _first_failure(mutation, specs, folder, workers)
    if found:
        path.write_text(text, encoding="utf-8")
        copied(folder)  # the committed modules again
        test = _FAILED.match(found)
        assert test, found
        if again := failed(folder, test[1]):
            raise RuntimeError(f"it fails without the mistake, too: {again}")
    return found


def _first_failure(mutation: Mutation, specs: list[str], folder: Path, workers: str) -> str:
    """The first test that fails: of the mutation's tests, then of all tests of a push; empty if none does."""
    for build, tests in ((specs, mutation.tests.split(" -k ")), (["--all"], ["tests"])):
        if build:
            python(folder, "-m", "attngen", "build", *build)  # if the build fails, the tests report it
        files, *only = tests
        if found := failed(
            folder, "-n", workers, "--dist", "worksteal", *files.split(), *(["-k", *only] if only else [])
        ):
            return found
    return ""


def main() -> int:
    """Make the mistakes that are asked for, and print what catches each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="the first words of a description [default: all]")
    parser.add_argument("--list", action="store_true", help="print the mistakes")
    parser.add_argument("--workers", default="auto", help="processes of pytest [default: one for each core]")
    asked = parser.parse_args()
    chosen = [m for m in MUTATIONS if not asked.name or any(m.what.startswith(name) for name in asked.name)]
    if asked.list:
        print("\n".join(f"{m.file}: {m.what}" for m in chosen))
        return 0
    passed = 0
    for mutation in chosen:
        started = time.time()
        with tempfile.TemporaryDirectory(prefix="attngen-mutation-") as folder:
            copied(Path(folder))
            found = caught(mutation, Path(folder), asked.workers)
        passed += not found
        print(f"{mutation.what}: {found or 'NOT CAUGHT'} ({time.time() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - passed} of {len(chosen)} mistakes are caught")
    return min(passed, 1)


if __name__ == "__main__":
    sys.exit(main())
