"""What a push leaves out: tests that the record proves, and cases of tests marked `share`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import record, share

SPECS = [f"spec{i}" for i in range(40)]


def case(test: str, parameter: str, n: int | None = 4) -> Any:
    """A test of pytest with one parameter, marked `share(n)` unless n is None."""
    mark = None if n is None else pytest.mark.share(n).mark
    return SimpleNamespace(
        nodeid=f"{test}[{parameter}]",
        callspec=SimpleNamespace(params={"name": parameter}),
        get_closest_marker=lambda name: mark if name == "share" else None,
    )


def selected(items: list[Any], seed: str, changed: tuple[str, ...] = ()) -> set[str]:
    left = share.not_selected(items, seed, SPECS, changed)
    return {item.nodeid for item in items if item not in left}


def test_a_push_runs_one_in_n_cases_and_every_case_in_time() -> None:
    cases = [case("f.py::test_a", spec) for spec in SPECS]
    runs = [selected(cases, f"commit {i}") for i in range(60)]
    assert {len(run) for run in runs} == {10} and set.union(*runs) == {c.nodeid for c in cases}


def test_all_tests_select_the_same_specs() -> None:
    run = selected([case(f"f.py::test_{t}", spec) for t in "ab" for spec in SPECS], "commit")
    assert {name[-7:] for name in run if "_a[" in name} == {name[-7:] for name in run if "_b[" in name}


def test_a_test_with_few_cases_runs_in_one_of_n_pushes() -> None:
    runs = [len(selected([case("f.py::test_a", "x")], f"commit {i}")) for i in range(400)]
    assert 60 < sum(runs) < 140


def test_tests_without_the_mark_and_changed_specs_always_run() -> None:
    cases = [case("f.py::test_a", spec, n=None) for spec in SPECS] + [
        case("f.py::test_b", spec, n=100) for spec in SPECS
    ]
    for i in range(20):
        run = selected(cases, f"commit {i}", changed=("spec7", "spec9"))
        assert {c.nodeid for c in cases[:40]} | {"f.py::test_b[spec7]", "f.py::test_b[spec9]"} <= run


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A record of two tests, one of which builds a module itself."""
    monkeypatch.setattr(record, "committed_digest", {"causal": "c1", "window": "w1"}.__getitem__)
    monkeypatch.setattr(record, "test_digest", {"f.py": "f1", "g.py": "g1"}.__getitem__)
    return {
        "versions": record.versions(),
        "modules": {"causal": "c1", "window": "w1"},
        "files": {"f.py": "f1", "g.py": "g1"},
        "tests": {"f.py::test_a": ["causal", "window"], "g.py::test_b": ["#b1", "causal"]},
    }


def test_a_test_is_proved_if_all_that_it_runs_is_as_recorded(proof: dict[str, Any]) -> None:
    assert record.proved(proof, None) == {"f.py::test_a": [], "g.py::test_b": ["b1"]}


@pytest.mark.parametrize(
    ("table", "key", "left"),
    [
        ("versions", "triton", set()),
        ("modules", "causal", set()),
        ("modules", "window", {"g.py::test_b"}),
        ("files", "f.py", {"g.py::test_b"}),
        ("files", "g.py", {"f.py::test_a"}),
    ],
)
def test_a_change_has_its_tests_run(proof: dict[str, Any], table: str, key: str, left: set[str]) -> None:
    proof[table][key] = "another"
    assert record.proved(proof, None).keys() == left


def test_each_commit_runs_some_proved_tests(proof: dict[str, Any]) -> None:
    proof["tests"] = {f"f.py::test_{i}": ["causal"] for i in range(64)}
    run = [proof["tests"].keys() - record.proved(proof, f"commit {i}").keys() for i in range(120)]
    assert {len(names) for names in run} == {4} and set().union(*run) == proof["tests"].keys()


def test_a_module_changes_with_its_kernels_for_hopper() -> None:
    names = [path.parent.name for path in record.GENERATED.glob("*/kernels.py")]
    current = {
        "modules": {name: record.committed_digest(name) for name in names},
        "warp_specialized": record.warp_specialized(),
    }
    assert record.changed(current) == []
    assert record.changed({**current, "modules": {**current["modules"], "causal_mha": "0"}}) == ["causal_mha"]
    other = {**current["warp_specialized"], "causal_gqa": "0"}
    assert record.changed({**current, "warp_specialized": other}) == ["causal_gqa"]


def test_the_digest_of_code_leaves_out_comments_docstrings_and_shares() -> None:
    text = 'def f(x):\n    """What it does."""\n    return x < 1  # why\n'
    assert record.code_digest(text) == record.code_digest("def f(x):\n\n    return (x < 1)\n")
    assert record.code_digest(text) == record.code_digest(f"@pytest.mark.share(4)\n{text}")
    assert record.code_digest(text) != record.code_digest(f"@pytest.mark.numerics\n{text}")
    assert record.code_digest(text) != record.code_digest(text.replace("<", "<="))


def test_the_digest_of_a_test_has_the_rooms_with_which_it_computes_values() -> None:
    files = record.imported(record.ROOT / "tests/test_lengths.py")
    found = {path.relative_to(record.ROOT).as_posix() for path in files}
    assert {"attngen/interp/host.py", "tests/helpers.py", "tests/test_lengths.py"} <= found
    assert not any(path.startswith("attngen/ir/") for path in found)


def test_every_table_of_the_record_has_a_line_for_each_entry() -> None:
    assert record.RECORD.read_text(encoding="utf-8") == record._text(record.read())
