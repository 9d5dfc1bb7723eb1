"""Reads the signatures of a generated module's functions, and the meanings of their arguments, from its code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A function of a module: its signature as code, its summary, and its arguments (name, type, default, meaning) if
    they are documented."""

    name: str
    code: str
    says: str
    args: list[list[str]]
    returns: str


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
            yield _signature(shown, functions[name])


def _signature(shown: str, node: ast.FunctionDef) -> Signature:
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
    return Signature(shown, text, parts[""], rows if meanings else [], " ".join(parts.get("Returns", "").split()))


def _parts(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by heading. The text before the first heading is joined to one paragraph, with
    an empty heading."""
    head, *rest = re.split(r"^(Args|Returns|Raises):\n", doc, flags=re.MULTILINE)
    return {"": " ".join(head.split()), **dict(zip(rest[::2], rest[1::2]))}


def _meanings(text: str) -> dict[str, str]:
    """Return the meaning of each argument, from lines `name: meaning` with indented continuation lines."""
    text = inspect.cleandoc("\n" + text)
    found = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}
