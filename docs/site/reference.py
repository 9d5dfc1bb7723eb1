"""The reference: the keys of a spec, masks, scores, expressions, Python, the command line and the IR, from the tables
and docstrings of attngen."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

import attngen
from attngen.builders import build_module
from attngen.cli import COMMANDS, app
from attngen.codegen.signature import Signature, signature
from attngen.ir import Input
from attngen.ir.dtypes import TORCH
from attngen.ir.names import INTEGERS
from attngen.lang import limits
from attngen.lang.meanings import FUNCTIONS, OPERATORS
from attngen.lang.names import CALLS, POSITIONS
from attngen.lang.params import DIMS, Param
from attngen.lang.part import Part
from attngen.masks import Mask, registry
from attngen.report.elements import Sample
from attngen.report.mathml import MathML
from attngen.report.page import SEES, Formula, Group, meaning
from attngen.scores import Score, score_registry
from attngen.spec import json_schema, make_spec
from docs.site.ir_reference import ir_page
from docs.site.pages import rendered

RANGES = {
    "minimum": " from {}",
    "exclusiveMinimum": " above {}",
    "maximum": " to {}",
    "multipleOf": ", a multiple of {}",
}


def reference_pages() -> dict[str, str]:
    """The pages of the reference by their place."""
    return {
        "reference/spec.md": spec_page(),
        "reference/masks.md": parts_page("Masks", "mask", registry()),
        "reference/scores.md": parts_page("Score modifiers", "score", score_registry()),
        "reference/language.md": language_page(),
        "reference/python.md": python_page(),
        "reference/commands.md": commands_page(),
        "reference/ir.md": ir_page(),
    }


# ---------------------------------------------------------------------------------------------- the keys of a spec


class Key(NamedTuple):
    """A key of a mapping in a spec."""

    name: str
    values: str
    default: str
    says: str


def spec_page() -> str:
    """Every key of a spec, from the JSON schema that `attngen schema` prints."""
    schema = json_schema()
    nested = [(name, d["description"], list(_keys(d))) for name, d in schema["$defs"].items() if d["properties"]]
    return rendered("keys.md.jinja", keys=list(_keys(schema)), nested=nested)


def _keys(schema: dict[str, Any]) -> Iterator[Key]:
    required = schema.get("required", ())
    for name, value in schema["properties"].items():
        given = "" if "$ref" in value else value.get("default")  # of a mapping, its keys have theirs
        default = "required" if name in required else f"`{_flow(given)}`" if given not in (None, "") else ""
        said = schema.get("$defs", {}).get(value.get("$ref", "").rpartition("/")[2], {})
        yield Key(name, _values(name, value), default, value.get("description") or said.get("description", ""))


def _values(name: str, schema: dict[str, Any]) -> str:
    """The values that a schema allows, in a few words."""
    if name in ("mask", "score"):
        return f"[{'masks' if name == 'mask' else 'modifiers'}]({'masks' if name == 'mask' else 'scores'}.md)"
    if "$ref" in schema:
        kind = schema["$ref"].rpartition("/")[2]
        return f"[{kind}](#{kind.lower()})"
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_values("", s) for s in schema["anyOf"] if s.get("type") != "null"))
    if "const" in schema:
        return f"`{_flow(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_flow(v)}`" for v in schema["enum"])
    if schema.get("type") == "array":
        return f"a list of {_values('', schema['items'])}"
    if schema.get("type") in ("integer", "number"):
        kind = "a whole number" if schema["type"] == "integer" else "a number"
        return "".join([kind, *(words.format(schema[k]) for k, words in RANGES.items() if k in schema)])
    return {"boolean": "`true`, `false`", "string": "text"}[schema["type"]]


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


# ---------------------------------------------------------------------------------------------- masks and scores


class Entry(NamedTuple):
    """A mask or a modifier: its description, its parameters, its arguments of a call, and a small example."""

    name: str
    says: str
    keys: list[Key]
    inputs: list[Input]
    example: str
    meant: Group
    pictures: list[Any]


def parts_page(title: str, key: str, parts: Mapping[str, type[Part]]) -> str:
    """The masks or modifiers of a registry."""
    types = {name: t.removeprefix("torch.") for name, t in TORCH.items()} | {"T": "that of q"}
    return rendered(
        "parts.md.jinja", types=types, title=title, key=key, entries=[_entry(key, part) for part in parts.values()]
    )


def _entry(key: str, part: type[Part]) -> Entry:
    given = example(part)
    said = {part.name: given} if given else part.name
    spec = make_spec({"name": "example", "head_dim": 64, key: said})
    made: Mask | Score = spec.score[0] if spec.score else spec.mask
    about, keys = inspect.cleandoc(part.__doc__ or ""), list(_keys({"properties": {}, **part.model_json_schema()}))
    if isinstance(made, Mask):
        logical = build_module(spec)
        formulas = [f for f in meaning(logical, logical, MathML())[0].formulas if f.label in ("", SEES)]
        pictures = Sample(spec).pictures
    else:
        sink, math = made.sink(), MathML().math
        formulas = [
            Formula("score", math(made.expression()), "becomes") if sink is None else Formula("sink", math(sink))
        ]
        pictures = []
    return Entry(part.name, about, keys, list(made.inputs()), f"{key}: {_flow(said)}", Group("", formulas), pictures)


def example(part: type[Part]) -> dict[str, Any]:
    """Small parameters for an example of a mask or modifier: the required ones, or, if these do not suffice, all
    integers as well."""
    fields = part.model_json_schema().get("properties", {})
    required = {name: _small(fields[name]) for name, field in part.model_fields.items() if field.is_required()}
    numbers = {name: _small(schema) for name, schema in fields.items() if _whole(schema)}
    for given in (required, required | numbers):
        try:
            part(**given)
        except ValidationError:
            continue
        return given
    raise RuntimeError(f"{part.name}: cannot make an example of it; expected integers from 4 on to be valid")


def _whole(schema: dict[str, Any]) -> bool:
    return any(s.get("type") == "integer" for s in schema.get("anyOf", [schema]))


def _small(schema: dict[str, Any]) -> Any:
    """A small value that the schema of a parameter allows."""
    found = next(s for s in schema.get("anyOf", [schema]) if s.get("type") != "null")
    if "enum" in found:
        return found["enum"][0]
    return {"integer": max(4, found.get("minimum", 4)), "number": 30.0, "boolean": True}[found["type"]]


# ---------------------------------------------------------------------------------------------- expressions


def language_page() -> str:
    """Names, operators, functions, parameters and limits of expressions."""
    words = {n.word: n.about for n in INTEGERS.values() if n.word}
    names = [
        (name, words.get(name, "position of the query among the keys: `q_idx + kv_len - q_len`")) for name in POSITIONS
    ]
    functions = [(name, takes, FUNCTIONS[name]) for name, (takes, _, _) in CALLS.items()]
    return rendered(
        "language.md.jinja",
        names=names,
        operators=list(OPERATORS.items()),
        functions=functions,
        params=list(_keys(Param.model_json_schema())),
        dims=DIMS,
        limits=limits,
    )


# ---------------------------------------------------------------------------------------------- Python and commands


def python_page() -> str:
    """The public functions of `attngen`, with their docstrings."""
    functions = {name: home for name in attngen.__all__ if (home := attngen._HOMES.get(name))}
    functions |= {
        "distributed.plan": "attngen.distributed.planned",
        "distributed.attention": "attngen.distributed.planned",
    }
    functions["integrations.transformers.register"] = "attngen.integrations.transformers"
    functions["integrations.transformers.shard_batch"] = "attngen.integrations.transformers.batch"
    functions["distributed.sum_gradients"] = "attngen.distributed.gradients"
    return rendered(
        "python.md.jinja", functions=[_function(f"attngen.{name}", home) for name, home in functions.items()]
    )


def _function(shown: str, home: str) -> Signature:
    """The signature of a function, from the code of the module that defines it, which need not be imported."""
    found = importlib.util.find_spec(home)
    assert found is not None and found.origin is not None
    name = shown.rpartition(".")[2]
    body = ast.parse(Path(found.origin).read_text(encoding="utf-8")).body
    return next(signature(shown, node) for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def commands_page() -> str:
    """The commands with their help, as `attngen COMMAND --help` prints it."""
    helps = [
        (name, CliRunner().invoke(app, [name, "--help"], prog_name="attngen", env={"COLUMNS": "100"}).stdout)
        for name in COMMANDS
    ]
    return rendered("commands.md.jinja", commands=helps)
