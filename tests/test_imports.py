"""Imports go downwards only: no file of attngen needs itself, be it through an import inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx

from tests.helpers import ROOT


def imported(path: Path) -> Iterator[str]:
    """The modules of attngen that a file imports when it runs; not those that it names in types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unseen = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in unseen or not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("attngen"):
            continue
        for alias in node.names:
            inside = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
            found = inside.is_dir() or inside.with_suffix(".py").exists()
            yield f"{node.module}.{alias.name}" if found else str(node.module)


def test_only_the_registry_names_a_backend() -> None:
    folder = ROOT / "attngen" / "backends"
    backends = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert backends == {"hopper", "triton"}
    for path in (ROOT / "attngen").rglob("*.py"):
        named = {name.split(".")[2] for name in imported(path) if name.startswith("attngen.backends.")} & backends
        inside = {path.relative_to(folder).parts[0]} if path.is_relative_to(folder) else set()
        assert named <= inside or path == folder / "__init__.py", path


def test_no_file_needs_itself() -> None:
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for path in (ROOT / "attngen").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph.add_edges_from((name, other) for other in imported(path))
    assert len(graph) > 80
    assert [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1] == []


def test_tables_of_schedules_stand_below_passes_and_passes_below_tuning() -> None:
    needed = {
        package: {name for path in (ROOT / "attngen" / package).glob("*.py") for name in imported(path)}
        for package in ("schedules", "passes")
    }
    assert [name for name in needed["schedules"] if name.startswith(("attngen.passes", "attngen.tune"))] == []
    assert [name for name in needed["passes"] if name.startswith("attngen.tune")] == []
