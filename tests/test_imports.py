"""Imports go downwards only: no file, and no package, of attngen needs itself, be it through an import inside a
function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx

from tests.helpers import ROOT

FILES = sorted((ROOT / "attngen").rglob("*.py"))
MOST_AT_THE_TOP = 8  # files, of which one is py.typed


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


def package(module: str) -> str:
    """The package that a module is in: its folder. A package is in itself, a file at the top of attngen is a package
    of its own."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    return module if is_package or module.count(".") == 1 else module.rpartition(".")[0]


def circles(edges: Iterator[tuple[str, str]]) -> list[list[str]]:
    """The groups of nodes that need each other."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_edges_from(edges)
    return [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def needs() -> Iterator[tuple[str, str]]:
    """Each module of attngen with each module that it imports."""
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from ((name, other) for other in imported(path))


def test_only_the_registry_names_a_target() -> None:
    folder = ROOT / "attngen" / "targets"
    targets = {path.parent.name for path in folder.glob("*/__init__.py")} - {"common", "printing"}
    assert targets == {"hopper", "triton"}
    for path in FILES:
        named = {name.split(".")[2] for name in imported(path) if name.startswith("attngen.targets.")} & targets
        inside = {path.relative_to(folder).parts[0]} if path.is_relative_to(folder) else set()
        assert named <= inside or path == folder / "registry.py", path


def test_no_file_needs_itself() -> None:
    assert len(FILES) > 200
    assert circles(needs()) == []


def test_no_package_needs_itself() -> None:
    """`attngen.targets.hopper` needs `attngen.targets.hopper.passes`, so no file of that imports from the former."""
    edges = [(package(name), package(other)) for name, other in needs()]
    assert len({name for name, _ in edges}) >= 40
    assert circles((a, b) for a, b in edges if a != b) == []


def test_a_circle_of_packages_is_found() -> None:
    assert circles(iter([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])) == [["a", "b", "c"]]


def test_few_files_are_at_the_top() -> None:
    found = sorted(path.name for path in (ROOT / "attngen").iterdir() if path.is_file())
    assert len(found) <= MOST_AT_THE_TOP, found
