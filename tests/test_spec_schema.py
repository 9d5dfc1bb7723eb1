"""The JSON schema of specs: it accepts the committed specs, and refuses mistakes and reserved names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from attngen.lang.names import TAKEN, name_problem, names_schema
from attngen.spec import json_schema
from tests.helpers import ROOT, SPECS
from tests.spec_mistakes import MISTAKES


def conforms(value: Any, node: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return whether a value conforms to the JSON schema, for the keywords that our schema uses."""
    if "$ref" in node:
        found = root
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        return conforms(value, found, root)
    if "anyOf" in node and not any(conforms(value, n, root) for n in node["anyOf"]):
        return False
    if "not" in node and conforms(value, node["not"], root):
        return False
    if "const" in node and value != node["const"]:
        return False
    if "enum" in node and not any(type(value) is type(e) and value == e for e in node["enum"]):
        return False
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if "type" in node and not (
        type(value) is types.get(node["type"]) or node["type"] == "number" and type(value) in (int, float)
    ):
        return False
    if isinstance(value, str) and not re.search(node.get("pattern", ""), value):
        return False
    if isinstance(value, (int, float)):
        inside = node.get("minimum", value) <= value <= node.get("maximum", value) and value < node.get(
            "exclusiveMaximum", value + 1
        )
        return inside and value % node.get("multipleOf", 1) == 0
    if isinstance(value, list):
        distinct = not node.get("uniqueItems") or len({str(v) for v in value}) == len(value)
        return (
            distinct
            and len(value) >= node.get("minItems", 0)
            and all(conforms(v, node.get("items", {}), root) for v in value)
        )
    if isinstance(value, dict):
        known = node.get("properties", {})
        named = all(conforms(key, node.get("propertyNames", {}), root) for key in value)
        complete = (
            named
            and all(key in value for key in node.get("required", ()))
            and (known.keys() >= value.keys() or "properties" not in node)
        )
        return complete and all(conforms(v, known[k], root) for k, v in value.items() if k in known)
    return True


NAMES_OF_PARAMETERS = [
    "window",
    "slope_2",
    "my_q",
    "doc",
    "g",
    "p",
    "q",
    "k",
    "t1",
    "splits",
    "q_pos",
    "floor",
    "len",
    "lambda",
    "acc_2",
    "Q",
]


def test_conforms_handles_every_keyword_of_the_schema() -> None:
    notes = {"$schema", "$defs", "title", "description", "default", "additionalProperties"}
    checked = {
        "$ref",
        "anyOf",
        "const",
        "enum",
        "type",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMaximum",
        "multipleOf",
    }
    checked |= {"uniqueItems", "minItems", "items", "required", "properties", "propertyNames", "not"}

    def keywords(node: Any) -> set[str]:
        if not isinstance(node, dict):
            return {k for n in node for k in keywords(n)} if isinstance(node, list) else set()
        below = [
            *node.get("properties", {}).values(),
            *node.get("$defs", {}).values(),
            *node.get("anyOf", ()),
            node.get("items"),
        ]
        below += [node.get("propertyNames"), node.get("not")]
        return set(node).union(*(keywords(n) for n in below))

    assert keywords(json_schema()) <= notes | checked


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SPECS)
def test_specs_conform_to_the_json_schema(name: str) -> None:
    schema = json_schema()
    assert conforms(yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text()), schema, schema)


@pytest.mark.parametrize("name", [*NAMES_OF_PARAMETERS, *sorted(TAKEN)])
def test_the_json_schema_has_the_reserved_names(name: str) -> None:
    """An editor with the schema refuses the names that `attngen build` refuses."""
    problem = name_problem(name)
    assert problem is None or problem.startswith(("is reserved: ", "is a word of ", "is not a name; "))
    assert conforms(name, names_schema(), {}) == (problem is None)


# Ends of mistakes that the schema cannot express: rules about two keys, or about Python.
BEYOND = (
    "fp32_precision: tf32",
    "name: class",
    "mask: sliding_window",
    "score: softcap",
    "schedule: {warps: 4.0}",
    "schedule: {split: {keys: 1024}}",
    "{align: bottom_right}}]}",
    "cache: {scale: head}",
    "cache: {dtype: fp8_e4m3}",
    "scale: page}",
)


@pytest.mark.parametrize(
    "text", [t for t in MISTAKES if t.startswith("name: ") and not t.endswith(BEYOND) and "class" not in t]
)
def test_mistakes_do_not_conform_to_the_json_schema(text: str) -> None:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    if MISTAKES[text].startswith("line 3: key") or "&" in text or "<<" in text:
        return  # valid YAML that attngen refuses
    assert not conforms(data, json_schema(), json_schema())
