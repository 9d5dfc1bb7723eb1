"""Reads a spec from a file, from YAML text, or from plain data; each mistake is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attngen.errors import BuildError, SpecError, VerifyError, nearest
from attngen.spec import document
from attngen.spec.document import key_name, read_document
from attngen.spec.model import Spec, json_schema
from attngen.spec.sentences import mistakes, said

MAX_BYTES = 64 * 1024


def load_spec(path: str | Path) -> Spec:
    """Read a spec file.

    Raises SpecError: one sentence per mistake, with the file, the line and the key.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise SpecError(
                f"{path}: is a link to {path.readlink()}, which does not exist; expected a YAML spec"
            ) from None
        near = nearest(path.stem, (p.stem for p in path.parent.glob("*.yaml") if p.exists()))
        hint = (
            f"did you mean {path.with_name(near + '.yaml')}?"
            if near
            else "`attngen new NAME` writes a spec to start from"
        )
        raise SpecError(f"{path}: there is no such file; {hint}") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); expected a YAML spec") from None
    return decode_spec(data, str(path))


def decode_spec(data: bytes, source: str) -> Spec:
    """A spec from the bytes of the file `source`; more than MAX_BYTES are refused."""
    if len(data) > MAX_BYTES:
        raise SpecError(f"{source}: larger than {MAX_BYTES // 1024} KiB; expected a short YAML spec")
    try:
        return parse_spec(data.decode("utf-8"), source)
    except UnicodeDecodeError as error:
        raise SpecError(f"{source}: byte {error.start} is not UTF-8 text; expected a YAML spec") from None


def parse_spec(text: str, source: str = "spec") -> Spec:
    """A spec from YAML text; `source` names it in errors."""
    data, lines = read_document(text, source)
    return make_spec(data, source, lines)


def make_spec(data: Any, source: str = "spec", lines: dict[document.Path, int] | None = None) -> Spec:
    """A spec from plain data; `lines` gives the line of each key that came from a file."""
    if not isinstance(data, dict):
        found = "the file is empty" if data is None else f"the file holds {said(data)}"
        raise SpecError(
            f"{source}: {found}; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start"
        )
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        sentences = []
        for path, text in mistakes(error, json_schema(), data):
            sentences.append(f"{_place(source, lines or {}, path)}: `{key_name(path)}` {text}")
        raise SpecError("\n".join(dict.fromkeys(sentences))) from None


def place(path: Path | None, key: document.Path) -> str:
    """The file, and the line of a key in it, for an error found after the spec was read; `spec` if there is no file."""
    if path is None:
        return "spec"
    _, lines = read_document(path.read_text(encoding="utf-8-sig"), str(path))
    return _place(str(path), lines, key)


@contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Turn errors of building and verifying into errors that name the spec's file and the line."""
    try:
        yield
    except BuildError as error:
        raise SpecError(f"{place(path, error.path)}: {error}") from None
    except VerifyError as error:
        raise SpecError(f"{path or 'spec'}: {error}; this is a mistake of attngen, not of the spec") from error


def _place(source: str, lines: dict[document.Path, int], path: document.Path) -> str:
    prefixes = (path[:n] for n in range(len(path), 0, -1))
    line = next((lines[p] for p in prefixes if p in lines), None)
    return f"{source}, line {line}" if line else source
