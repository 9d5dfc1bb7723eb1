"""An error that attngen raises on purpose has no chain of tracebacks before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attngen
from attngen import errors
from tests.helpers import ROOT

INTENDED = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.AttngenError)
}
INTENDED |= {"LangError", "TraceError", "VerifyError"}
# Errors from a bug in attngen, or from the imports of a folder, keep their cause, which helps to find them.
WITH_CAUSE = ("this is a mistake of attngen", "cannot be imported")


def chained(tree: ast.AST) -> Iterator[ast.Raise]:
    """The statements in exception handlers that raise an error on purpose without `from None`."""
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        for node in ast.walk(handler):
            name = (
                node.exc.func.id
                if isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and isinstance(node.exc.func, ast.Name)
                else ""
            )
            if (
                name in INTENDED
                and isinstance(node, ast.Raise)
                and not (isinstance(node.cause, ast.Constant) and node.cause.value is None)
            ):
                yield node


@pytest.mark.share(4)
@pytest.mark.parametrize("path", sorted((ROOT / "attngen").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_intended_errors_show_no_other_error(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = [ast.get_source_segment(source, node) or "" for node in chained(ast.parse(source))]
    assert [text for text in found if not any(words in text for words in WITH_CAUSE)] == []


def test_the_error_of_a_wrong_spec_has_no_cause(tmp_path: Path) -> None:
    for given in (
        {"name": "x", "head_dim": 63},
        {"name": "x", "head_dim": 64, "mask": {"expr": "sin(q_idx) <"}},
        tmp_path / "none.yaml",
    ):
        with pytest.raises(errors.AttngenError) as caught:
            attngen.build(given)  # type: ignore[arg-type]
        error: BaseException | None = caught.value
        while error is not None:
            assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)
            error = error.__context__ if not error.__suppress_context__ else None
