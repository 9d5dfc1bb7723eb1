"""The cases of repeated tests that a push runs.

A test marked `share(n)` repeats one check for many specs or variants, or runs a whole command whose parts other tests
check. A push runs one n-th of its cases, and a test with fewer cases in some pushes only; the commit's hash selects
them. It also runs every case of a spec whose committed module is not the one in the record. Nightly runs, GPU runs and
runs of tests that are named one by one (`FILE::TEST`) run all cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from attngen.targets.common.base import short_digest

MARK = "share"


def number(text: str) -> int:
    """A number that a text gives, the same in every process."""
    return int(short_digest(text), 16)


def not_selected(items: Iterable[Any], seed: str, specs: Collection[str], changed: Collection[str]) -> list[Any]:
    """The tests of pytest that a push with this seed does not run.

    `specs` are the names of committed specs, and `changed` are those of which all cases run. The same specs are
    selected for all tests, so that each one is lowered once, and tests of a file that have one case are selected
    together, since they may share a fixture.
    """
    cases = defaultdict(list)
    for item in items:
        mark, spec = item.get_closest_marker(MARK), spec_of(item, specs)
        if mark and spec not in changed:
            file, _, test = item.nodeid.partition("[")[0].partition("::")
            cases[file, test, mark.args[0]].append((number(f"{seed} {spec or item.nodeid}"), item))
    left = []
    for (file, _, share), found in cases.items():
        found.sort(key=lambda case: case[0])
        left += [item for _, item in found[(len(found) + number(f"{seed} {file}") % share) // share :]]
    return left


def spec_of(item: Any, specs: Collection[str]) -> str:
    """The committed spec that a case of a test is for; empty text if it is for none."""
    given = getattr(item, "callspec", None)
    return next((x for x in given.params.values() if isinstance(x, str) and x in specs), "") if given else ""
