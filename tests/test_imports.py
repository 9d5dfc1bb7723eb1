"""How the sources are laid out: imports have no cycles between files or between packages of attngen (imports inside
functions count too), few files are at the top, and files and functions are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx

from tests.helpers import ROOT

FILES = sorted(path for path in (ROOT / "attngen").rglob("*.py*") if path.suffix in (".py", ".pyi"))
MAX_TOP_LEVEL_FILES = 8  # files, including py.typed
MAX_LINES, MAX_FUNCTION_LINES = 500, 60


def imported(path: Path) -> Iterator[str]:
    """The modules of attngen that a file imports at run time, not those that it needs only for types."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    only_for_types = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if (
            id(node) in only_for_types
            or not isinstance(node, ast.ImportFrom)
            or not (node.module or "").startswith("attngen")
        ):
            continue
        for alias in node.names:
            inside = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
            found = inside.is_dir() or inside.with_suffix(".py").exists()
            yield f"{node.module}.{alias.name}" if found else str(node.module)


def package(module: str) -> str:
    """The package of a module, which is its folder. A package contains itself; a file at the top of attngen counts as
    a package."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    return module if is_package or module.count(".") == 1 else module.rpartition(".")[0]


def cycles(edges: Iterator[tuple[str, str]]) -> list[list[str]]:
    """The groups of nodes that depend on each other."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_edges_from(edges)
    return [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def imports() -> Iterator[tuple[str, str]]:
    """Pairs of a module of attngen and a module that it imports."""
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


def test_files_have_no_import_cycles() -> None:
    assert len(FILES) > 200
    assert cycles(imports()) == []


def test_packages_have_no_import_cycles() -> None:
    """`attngen.targets.hopper` imports `attngen.targets.hopper.passes`, so no file of the latter imports the former."""
    edges = [(package(name), package(other)) for name, other in imports()]
    assert len({name for name, _ in edges}) >= 40
    assert cycles((a, b) for a, b in edges if a != b) == []


def test_a_cycle_of_packages_is_found() -> None:
    assert cycles(iter([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])) == [["a", "b", "c"]]


def test_few_files_are_at_the_top_level() -> None:
    found = sorted(path.name for path in (ROOT / "attngen").iterdir() if path.is_file())
    assert len(found) <= MAX_TOP_LEVEL_FILES, found


# Imports stand at the top of a file. Where start-up time needs it, they stand in functions: the rooms where that is so,
# and what starts faster without the import.
IN_FUNCTIONS = {
    "attngen/__init__.py": "`import attngen` imports nothing until a name is used",
    "attngen/api.py": "a module in the cache is imported without the compiler",
    "attngen/frontends": "a function that was traced before is called without the compiler",
    "attngen/integrations": "registering with transformers imports no compiler",
    "attngen/cli": "a command imports only what it runs, and `--help` nothing",
    "attngen/bench": "a child process imports only the peer that it measures",
    "attngen/tune/run.py": "a dry run imports no torch",
    "attngen/cache/store.py": "a module in the cache is imported without what only building needs; `pwd` is Unix only",
    "attngen/lang/part.py": "torch is imported where an oracle is evaluated",
    "attngen/masks": "the compiler imports no torch, which the oracles need",
    "attngen/scores": "the compiler imports no torch, which the oracles need",
    "attngen/conformance/derive.py": "the compiler imports no torch, which the oracles need",
    "attngen/report/elements.py": "torch is imported where a mask is sampled",
    "attngen/report/tilemap.py": "torch is imported where a mask is sampled",
    "attngen/runtime": "a module imports no part of Triton and torch that its calls do not use; some versions lack it",
    "attngen/targets": "modules are built without Triton, which only compilation imports",
    "attngen/conformance/interpreter.py": "Triton is imported after TRITON_INTERPRET is set",
}


def imports_in_functions(path: Path) -> bool:
    """Whether a file imports anything inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return any(isinstance(node, (ast.Import, ast.ImportFrom)) for function in functions for node in ast.walk(function))


def test_files_and_functions_are_short() -> None:
    files = sorted(p for room in ("attngen", "docs", "examples", "tests") for p in (ROOT / room).rglob("*.py"))
    lengths = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert {name: n for name, text in lengths.items() if (n := text.count("\n")) > MAX_LINES} == {}
    functions = {
        f"{name}: {node.name}": int(node.end_lineno or 0) - node.lineno + 1
        for name, text in lengths.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: n for name, n in functions.items() if n > MAX_FUNCTION_LINES} == {}


def test_imports_stand_in_functions_only_where_start_up_needs_it() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in FILES if imports_in_functions(path)}
    rooms = {name: room for name in found for room in IN_FUNCTIONS if name == room or name.startswith(f"{room}/")}
    assert found - rooms.keys() == set()
    assert set(rooms.values()) == IN_FUNCTIONS.keys()
