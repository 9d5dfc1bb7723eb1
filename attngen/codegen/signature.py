"""Reads the signatures of a generated module's functions, and the meanings of their arguments, from its code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A function: its signature as code, its summary, its arguments (name, type, default, meaning) if they are
    documented, what it returns, the errors that it raises, and the text after these sections."""

    name: str
    code: str
    says: str
    args: list[list[str]]
    returns: str
    raises: dict[str, str]
    notes: str


def signatures(code: str) -> Iterator[Signature]:
    """Yield the signatures of `attention` and of the functions that are its attributes, such as `attention.plan`."""
    tree = ast.parse(code)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {"attention": "attention"}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and ast.unparse(node.targets[0]).startswith("attention.")
        ):
            public[ast.unparse(node.targets[0])] = node.value.id
    for shown, name in public.items():
        if name in functions:
            yield signature(shown, functions[name])


def signature(shown: str, node: ast.FunctionDef) -> Signature:
    """Return the signature of a function under the name `shown`, from its code and the sections of its docstring."""
    parts = _parts(inspect.cleandoc(ast.get_docstring(node) or ""))
    meanings = _meanings(parts.get("Args", ""))
    args = node.args
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    named = [*zip(args.args, defaults), *zip(args.kwonlyargs, args.kw_defaults)]
    rows = [
        [
            a.arg,
            ast.unparse(a.annotation) if a.annotation else "",
            ast.unparse(default) if default else "",
            meanings.get(a.arg, ""),
        ]
        for a, default in named
    ]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    lines = [
        f"{name}{f': {kind}' if kind else ''}{f' = {default}' if default else ''}" for name, kind, default, _ in rows
    ]
    star = ["*"] if args.kwonlyargs else []
    listed = [*lines[: len(args.args)], *star, *lines[len(args.args) :]]
    text = f"{shown}(\n" + "".join(f"    {line},\n" for line in listed) + f"){returns}"
    returned, raises = " ".join(parts.get("Returns", "").split()), _meanings(parts.get("Raises", ""))
    return Signature(shown, text, parts[""], rows if meanings else [], returned, raises, parts["Notes"])


def _parts(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by heading. The paragraphs before the first heading have an empty heading, and
    those after the last section are `Notes`."""
    head, *rest = re.split(r"^(Args|Returns|Raises):\n", doc, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2]))
    notes = ""
    for title, body in sections.items():
        inside, *after = re.split(r"^(?=\S)", body, maxsplit=1, flags=re.MULTILINE)
        sections[title], notes = inside, notes + "".join(after)
    return {"": _paragraphs(head), "Notes": _paragraphs(notes)} | sections


def _paragraphs(text: str) -> str:
    """Return a text with each paragraph on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def _meanings(text: str) -> dict[str, str]:
    """Return the meaning of each argument or error, from lines `name: meaning` with indented continuation lines."""
    text = inspect.cleandoc("\n" + text)
    found = re.findall(r"^([\w, ]+): (.*(?:\n[ ]+.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}
