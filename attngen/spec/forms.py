"""Parses the forms in which a spec writes masks and score modifiers, and gives their JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from attngen.errors import shown, suggest
from attngen.lang.grammar import LangError
from attngen.lang.names import name_problem, names_schema
from attngen.lang.params import Param
from attngen.lang.part import Part
from attngen.masks import AllOf, AnyOf, Mask, Not, Written, registry
from attngen.scores import Score, WrittenScore, score_registry
from attngen.spec import document
from attngen.spec.sentences import Mistakes, mistakes, said, said_by

_WRITTEN = ["expr", "let", "params"]
ALGEBRA = ("all_of", "any_of", "not", "expr")
MASK_FORMS = (
    "a mask: its name as in `causal`, {name: {parameter: value}}, {expr: text}, "
    "{all_of: [masks]}, {any_of: [masks]} or {not: mask}"
)
SCORE_FORMS = "a score modifier: its name as in `alibi`, {name: {parameter: value}} or {expr: text}"


def parse_mask(value: Any) -> Mask:
    """Parse a mask: `name`, `{name: {parameters}}`, `{expr: text, params: {...}}`, or any_of, all_of or not of
    masks."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if value is None or isinstance(value, bool):
        raise Mistakes(((), f"is {said(value)}; expected {MASK_FORMS}; for no mask write `none`"))
    if isinstance(value, dict) and "expr" in value:
        return _parse_written(Written, value)
    if isinstance(value, list) and value or isinstance(value, dict) and len(value) > 1:
        raise Mistakes(
            ((), f"is {said(value)} of {len(value)}; expected one mask; for several at once write {{all_of: [masks]}}")
        )
    if not isinstance(value, dict) or not value:
        raise Mistakes(((), f"is {said(value)}; expected {MASK_FORMS}"))
    ((name, params),) = value.items()
    if name in ("all_of", "any_of"):
        return _parse_several(AllOf if name == "all_of" else AnyOf, params)
    if name == "not":
        try:
            mask = parse_mask(params)
        except Mistakes as error:
            raise Mistakes(*((("not", *path), text) for path, text in error.found)) from None
        return Not(masks=(mask.unlisted(),))
    known = registry()
    if name not in known:
        raise Mistakes(((), f"is `{shown(name)}`, which is not a mask; {suggest(str(name), [*known, *ALGEBRA])}"))
    return _parse_named(known[name], params)


def parse_score(value: Any) -> tuple[Score, ...]:
    """Parse score modifiers: a list of names, `{name: {parameters}}` or `{expr: text, params: {...}}`."""
    if isinstance(value, tuple):
        return value
    items = value if isinstance(value, list) else [value]
    scores: list[Score] = []
    found: list[tuple[document.Path, str]] = []
    for i, item in enumerate(items):
        path: document.Path = (i,) if isinstance(value, list) else ()
        try:
            score = _parse_one_score(item)
        except Mistakes as error:
            found += [((*path, *below), text) for below, text in error.found]
            continue
        if any(score.name == s.name for s in scores) and score.name != "expr":
            found.append((path, f"is `{score.describe()}` again; expected each modifier once"))
        scores.append(score)
    if found:
        raise Mistakes(*found)
    return tuple(scores)


def _parse_one_score(value: Any) -> Score:
    if isinstance(value, str):
        value = {value: {}}
    if isinstance(value, dict) and "expr" in value:
        return _parse_written(WrittenScore, value)
    if not isinstance(value, dict) or len(value) != 1:
        raise Mistakes(((), f"is {said(value)}; expected {SCORE_FORMS}"))
    ((name, params),) = value.items()
    known = score_registry()
    if name not in known:
        raise Mistakes(((), f"is `{shown(name)}`, which is no score modifier; {suggest(str(name), [*known, 'expr'])}"))
    if known[name].short and type(params) in (int, float):
        params = {known[name].short: params}
    return _parse_named(known[name], params)


SomePart = TypeVar("SomePart", bound=Part)


def _parse_named(cls: type[SomePart], params: Any) -> SomePart:
    if params is not None and not isinstance(params, dict):
        schema = cls.model_json_schema()
        short = getattr(cls, "short", "")
        expected = f"{said_by(schema['properties'][short])}, or " if short else ""
        raise Mistakes(((cls.name,), f"is {said(params)}; expected {expected}its parameters, {said_by(schema)}"))
    try:
        return cls.model_validate(params or {}, strict=True)
    except ValidationError as error:
        found = mistakes(error, cls.model_json_schema(), params or {})
        raise Mistakes(*(((cls.name, *path), text) for path, text in found)) from None


def _parse_written(cls: type[SomePart], value: dict[str, Any]) -> SomePart:
    """Parse a mask or modifier of the form {expr: text, let: {name: text}, params: {name: declaration}}."""
    if stray := next((key for key in value if key not in _WRITTEN), None):
        raise Mistakes(((stray,), f"is no known key; {suggest(str(stray), _WRITTEN)}"))
    text, declared = value["expr"], value.get("params")
    declared = {} if declared is None else declared
    if not isinstance(text, str):
        raise Mistakes((("expr",), f'is {said(text)}; expected an expression in quotes, as in "kv_idx <= q_pos"'))
    if not isinstance(declared, dict):
        raise Mistakes((("params",), f"is {said(declared)}; expected the declarations of parameters by name"))
    let = {} if value.get("let") is None else value["let"]
    if not isinstance(let, dict) or not all(isinstance(x, str) for x in let.values()):
        raise Mistakes(
            (("let",), f'is {said(let)}; expected expressions in quotes by name, as in {{row: "q_idx // 64"}}')
        )
    params: dict[str, Param] = {}
    found: list[tuple[document.Path, str]] = []
    for name, declaration in declared.items():
        try:
            if problem := name_problem(name):
                raise ValueError(problem)
            params[name] = Param.model_validate(declaration)
        except ValidationError as error:
            found += [
                (("params", name, *path), text)
                for path, text in mistakes(error, Param.model_json_schema(), declaration)
            ]
        except ValueError as error:
            found.append((("params", name), str(error)))
    if found:
        raise Mistakes(*found)
    part: Any = cls.model_validate({"expr": text, "let": let, "params": params})
    try:
        _ = part.parsed
    except LangError as error:
        key = ("let", error.part) if error.part else ("expr",)
        raise Mistakes((key, f"at column {error.column} {error.reason}" if error.column else error.reason)) from None
    made: SomePart = part
    return made


def _parse_several(cls: type[AllOf] | type[AnyOf], value: Any) -> Mask:
    name = cls.name
    if not isinstance(value, list) or not value:
        raise Mistakes(
            ((name,), f"is {said(value)}; expected a list of at least one mask, as in [causal, key_padding]")
        )
    masks: list[Mask] = []
    found: list[tuple[document.Path, str]] = []
    for i, item in enumerate(value):
        try:
            mask = parse_mask(item)
        except Mistakes as error:
            found += [((name, i, *path), text) for path, text in error.found]
            continue
        if mask.names_blocks() and any(m.names_blocks() for m in masks):
            found.append(
                (
                    (name, i),
                    "names blocks a second time; expected one `block_sparse`: combine the block masks in the call",
                )
            )
        if mask in masks:
            found.append(
                ((name, i), f"is `{mask.describe()}` again; expected each mask once: a repeat {_REPEAT[name]}")
            )
        masks.append(mask if name == "all_of" else mask.unlisted())
    if found:
        raise Mistakes(*found)
    return cls(masks=tuple(masks))


_REPEAT = {"all_of": "hides nothing more", "any_of": "shows nothing more"}


def mask_schema() -> dict[str, Any]:
    named = _named_schemas(registry())
    mask = {"$ref": "#/properties/mask"}
    every = {"type": "array", "minItems": 1, "uniqueItems": True, "items": mask}
    for name, below in (("all_of", every), ("any_of", every), ("not", mask)):
        named.append({"type": "object", "properties": {name: below}, "required": [name], "additionalProperties": False})
    return {"description": "which keys a query sees", "anyOf": [*named, _written_schema()]}


def score_schema() -> dict[str, Any]:
    named = _named_schemas(score_registry())
    for name, cls in score_registry().items():
        if cls.short:
            short = cls.model_json_schema()["properties"][cls.short]
            named.append(
                {"type": "object", "properties": {name: short}, "required": [name], "additionalProperties": False}
            )
    one = {"anyOf": [*named, _written_schema()]}
    return {
        "description": "what is done to scores, in order, before the mask",
        "default": [],
        "anyOf": [{"type": "array", "items": one}, *one["anyOf"]],
    }


def _named_schemas(known: Mapping[str, type[Part]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"enum": list(known)}]
    for name, cls in known.items():
        params = {**cls.model_json_schema(), "title": name}
        found.append(
            {"type": "object", "properties": {name: params}, "required": [name], "additionalProperties": False}
        )
    return found


def _written_schema() -> dict[str, Any]:
    params = {
        "type": "object",
        "propertyNames": names_schema(),
        "additionalProperties": {**Param.model_json_schema(), "title": "parameter"},
    }
    text = {
        "type": "string",
        "description": "an expression over q_pos, q_idx, kv_idx, b, h, hkv, q_len, kv_len, its parameters, "
        "and s in scores",
    }
    let = {
        "type": "object",
        "propertyNames": names_schema(),
        "additionalProperties": {"type": "string"},
        "description": "expressions by name, for parts that the expression repeats; each may use those before it",
    }
    properties = {"expr": text, "let": let, "params": params}
    return {"type": "object", "properties": properties, "required": ["expr"], "additionalProperties": False}
