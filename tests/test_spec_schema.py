"""The JSON schema of specs: it accepts the committed specs, and refuses mistakes and reserved names."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attngen.ir.names import OF_CACHE, OF_OUTPUTS
from attngen.lang.names import NAME, TAKEN, VALUE, WHOLE, name_problem, names_schema
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


def _words(pattern: str) -> set[str]:
    """Return the words of a pattern of alternatives, and each pair of a word and a suffix. A word has at most one class
    of characters."""
    words, suffixes = (part.split("|") for part in re.findall(r"[(]([^()]*)[)]", pattern)[:2])
    found = set()
    for word in words:
        start, chars, _ = re.fullmatch(r"([^[]*)(?:\[(.*)\][+]?)?(.*)", word).groups()  # type: ignore[union-attr]
        found |= {start + (c if chars != "0-9" else "7") for c in chars} if chars else {start}
    return found | {f"{word}_{suffix}" for word in found for suffix in suffixes if suffix != "[0-9]+"}


OLD = json.loads((Path(__file__).parent / "names_of_0_1_0.json").read_text())  # names that 0.1.0 refused, and others


def test_parameters_can_have_the_names_that_they_could_have_in_0_1_0() -> None:
    words = _words(VALUE)
    assert {"acc", "dq", "t7", "acc_next", "tk_cast"} <= words and len(words) > 1000

    def refused(names: set[str], more: str = "") -> set[str]:
        known = {*OLD["refused"], *OLD.get(more, ())}
        return {n for n in names if n not in known and name_problem(n) and not re.search(OLD["pattern"], n)}

    free = {n for n in refused(words | TAKEN | {*WHOLE}) if re.fullmatch("[a-z][a-z0-9_]*", n)}
    assert {n for n in free if "is a word of" not in str(name_problem(n))} == set()
    assert {n for n in OF_CACHE if not name_problem(n)} <= {*OLD["refused with a cache"], *OLD["refused"]}
    assert {n for n in OF_OUTPUTS if not name_problem(n)} <= {*OLD["refused with more outputs"], *OLD["refused"]}


@pytest.mark.parametrize("file", ["kernels.py", "hopper.py"])
def test_no_parameter_can_have_a_new_name_of_kernels(file: str) -> None:
    """New arguments and variables are refused as names of parameters, or have letters of both cases or an underscore at
    the start. A parameter has its name there, and its tensor has the name in capitals."""
    found: set[str] = set()
    for path in sorted((ROOT / "generated").glob(f"*/{file}")):
        functions = [f for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef)]
        for function in functions:
            # Helper functions, and kernels that read only ids of documents, have no parameter of a spec.
            if not function.name.startswith("_") and "document" not in function.name:
                found |= {a.arg for a in function.args.args}
                found |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        found -= {function.name for function in functions}
    names = {n.lower() for n in found if n in (n.lower(), n.upper()) and re.fullmatch(NAME, n.lower())}
    known = {*OLD["free in kernels"], *OF_CACHE, *OF_OUTPUTS}
    assert len(names) > 200 and {n for n in names if n not in known and not name_problem(n)} == set()


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
    "cache: contiguous\npositions: {}",
    "order: kv_outer}\npositions: {}",
    "key_mass]\npositions: {}",
    "}}\npositions: {}",
    "}}}\npositions: {}",
    "positions: {chunk: 192}",
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
