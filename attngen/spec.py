"""The spec: what a user writes in YAML, as pydantic models, and its errors.

`load_spec` reads one file safely (one document, plain data) and raises SpecError with one sentence per mistake: file,
line, key, what was expected, and a hint.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from attngen.errors import SpecError, suggest
from attngen.masks import AllOf, Mask, registry

Dtype = Literal["bf16", "fp16", "fp32"]
MAX_BYTES = 64 * 1024
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Heads(BaseModel):
    """How query heads share K/V heads; the counts come from the tensors of the call."""

    model_config = _STRICT
    sharing: Literal["mha", "mqa", "gqa"] = Field(
        default="mha", description="mha: one K/V head per query head; mqa: one in all; gqa: one per group of query heads"
    )


class HeadDim(BaseModel):
    """Width of a head of q and k, and of v: multiples of 8 from 16 to 256."""

    model_config = _STRICT
    qk: int = Field(ge=16, le=256, multiple_of=8)
    v: int = Field(ge=16, le=256, multiple_of=8)


class Schedule(BaseModel):
    """Overrides of what tile selection would choose, for the forward, dK/dV and dQ kernels on every device."""

    model_config = _STRICT
    block_q: Literal[16, 32, 64, 128, 256] | None = Field(default=None, description="rows of a query tile")
    block_kv: Literal[16, 32, 64, 128, 256] | None = Field(default=None, description="rows of a key tile")
    num_warps: Literal[1, 2, 4, 8, 16] | None = Field(default=None, description="warps per program")
    num_stages: Literal[1, 2, 3, 4, 5] | None = Field(default=None, description="depth of the load pipeline")


def _parse_head_dim(value: Any) -> Any:
    return {"qk": value, "v": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _parse_dtype(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def parse_mask(value: Any) -> Any:
    """A mask from its spec form: `name`, `{name: {parameters}}` or `{all_of: [masks]}`."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("expected a mask's name, {name: {parameters}} or {all_of: [masks]}; for no mask write `none`")
    ((name, params),) = value.items()
    if name == "all_of":
        if not isinstance(params, list) or not params:
            raise ValueError("`all_of` expects a list of at least one mask")
        return AllOf(masks=tuple(parse_mask(m) for m in params))
    if name not in registry():
        raise ValueError(f"`{name}` is not a mask; {suggest(name, [*registry(), 'all_of'])}")
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"parameters of the mask `{name}` are a mapping, as in {{{name}: {{key: value}}}}")
    try:
        return registry()[name].model_validate(params or {}, strict=True)
    except ValidationError as error:
        known = registry()[name].model_fields
        raise ValueError("; ".join(_sentence(e, f"mask `{name}`", known) for e in error.errors())) from None


def _mask_schema() -> dict[str, Any]:
    named: list[dict[str, Any]] = [{"enum": list(registry())}]
    for name, cls in registry().items():
        params = {**cls.model_json_schema(), "title": name}
        named.append({"type": "object", "properties": {name: params}, "required": [name], "additionalProperties": False})
    every = {"type": "array", "minItems": 1, "items": {"$ref": "#/properties/mask"}}
    combined = {"type": "object", "properties": {"all_of": every}, "required": ["all_of"], "additionalProperties": False}
    return {"description": "which keys a query sees", "anyOf": [*named, combined]}


class Spec(BaseModel):
    """An attention variant."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="attngen spec")
    name: str = Field(description="identifier; also the folder of the generated module")
    heads: Heads = Heads()
    head_dim: Annotated[HeadDim, BeforeValidator(_parse_head_dim)] = Field(description="one number, or {qk: , v: }")
    dtype: Annotated[tuple[Dtype, ...], BeforeValidator(_parse_dtype)] = Field(
        default=("bf16", "fp16"), min_length=1, description="element types the module accepts"
    )
    fp32_precision: Literal["ieee", "tf32"] = Field(default="ieee", description="how fp32 matrix products are computed")
    mask: Annotated[SerializeAsAny[Mask], BeforeValidator(parse_mask)] = Field(
        default_factory=lambda: registry()["none"](), validate_default=False
    )
    schedule: Schedule = Schedule()

    @field_validator("name")
    @classmethod
    def _identifier(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", value) or keyword.iskeyword(value):
            raise ValueError("expected an identifier of lower-case letters, digits and _ (64 at most), as in `causal_mqa`")
        return value

    @field_validator("dtype")
    @classmethod
    def _distinct(cls, value: tuple[Dtype, ...]) -> tuple[Dtype, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names an element type twice")
        return tuple(d for d in get_args(Dtype) if d in value)

    @model_validator(mode="after")
    def _tf32_needs_fp32(self) -> Spec:
        if self.fp32_precision == "tf32" and "fp32" not in self.dtype:
            raise ValueError("`fp32_precision: tf32` needs fp32 in `dtype`")
        return self

    def canonical(self) -> dict[str, Any]:
        """The spec as plain data with every default filled in."""
        return {**self.model_dump(mode="json", exclude={"mask"}), "mask": _mask_data(self.mask)}

    def hash(self) -> str:
        """A digest of the canonical form: equal specs, equal hash."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _mask_data(mask: Mask) -> dict[str, Any]:
    if isinstance(mask, AllOf):
        return {"all_of": [_mask_data(m) for m in mask.masks]}
    return {mask.name: mask.model_dump(mode="json")}


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec, for editors."""
    schema = Spec.model_json_schema()
    schema["properties"]["mask"] = {**_mask_schema(), "default": "none"}
    schema["properties"]["head_dim"] = {
        "description": "width of a head: one number, or one for q and k and one for v",
        "anyOf": [{"type": "integer", "minimum": 16, "maximum": 256, "multipleOf": 8}, {"$ref": "#/$defs/HeadDim"}],
    }
    types = {"enum": list(get_args(Dtype))}
    schema["properties"]["dtype"] = {
        "description": "element types the module accepts",
        "default": ["bf16", "fp16"],
        "anyOf": [types, {"type": "array", "minItems": 1, "uniqueItems": True, "items": types}],
    }
    return schema


# ---------------------------------------------------------------------------------------------- reading a file


def load_spec(path: str | Path) -> Spec:
    """Read a spec file.

    Raises SpecError: one sentence per mistake, naming the file, the line and the key.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than {MAX_BYTES // 1024} KiB; expected a short YAML spec")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text; expected a YAML spec") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); expected a YAML spec") from error
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str = "spec") -> Spec:
    """A spec from YAML text; `source` names it in errors."""
    data, lines = _read_yaml(text, source)
    if not isinstance(data, dict):
        raise SpecError(f"{source}: expected a mapping with keys like `name`, `head_dim` and `mask`; see `attngen new`")
    try:
        return Spec.model_validate(data, strict=False)
    except ValidationError as error:
        sentences = []
        for e in error.errors():
            path = [p for p in e["loc"] if isinstance(p, (str, int)) and p != "function-before"]
            line = next((lines[tuple(path[:n])] for n in range(len(path), 0, -1) if tuple(path[:n]) in lines), None)
            where = f"{source}, line {line}" if line else source
            sentences.append(f"{where}: {_sentence(e, 'the spec', _known_keys(path[:-1]))}")
        raise SpecError("\n".join(dict.fromkeys(sentences))) from None


def _known_keys(path: list[str | int]) -> dict[str, Any]:
    models: dict[str, type[BaseModel]] = {"heads": Heads, "head_dim": HeadDim, "schedule": Schedule}
    return (models[str(path[0])] if path and path[0] in models else Spec).model_fields


def _sentence(error: Any, owner: str, known: dict[str, Any]) -> str:
    """One pydantic error as one sentence in the words of a spec."""
    key = ".".join(str(p) for p in error["loc"])
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"{owner} has no key `{key}`; {suggest(key.split('.')[-1], known)}"
    if kind == "missing":
        return f"key `{key}` is missing; expected {known[key].description or 'a value'}" if key in known else f"key `{key}` is missing"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        words = [w.strip(" '") for w in re.split(r",| or ", error["ctx"]["expected"])]
        hint = f"; {suggest(value, words)}" if isinstance(value, str) else ""
        message = f"expected {error['ctx']['expected']}{hint}"
    prefix = f"key `{key}`: " if key else ""
    shown = "" if kind == "value_error" and not isinstance(value, (str, int)) else f"`{_short(value)}`: "
    if kind == "value_error" and "`" in message:
        shown = ""
    return f"{owner}, {prefix}{shown}{message[:1].lower()}{message[1:]}" if owner != "the spec" else f"{prefix}{shown}{message}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is not a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, source: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """Plain data of the one document, and the line of every key."""
    try:
        events = list(yaml.parse(text, Loader=_Loader))
        alias = next((e for e in events if isinstance(e, yaml.AliasEvent) or getattr(e, "anchor", None)), None)
        if alias:
            raise SpecError(f"{source}, line {_line(alias)}: anchors and aliases are not part of a spec")
        documents = [e for e in events if isinstance(e, yaml.DocumentStartEvent)]
        if len(documents) > 1:
            raise SpecError(f"{source}, line {_line(documents[1])}: a second document starts here; expected one spec per file")
        root = yaml.compose(text, Loader=_Loader)
        loader = _Loader(text)
        try:
            return loader.get_single_data(), dict(_key_lines(root, ()))
        finally:
            loader.dispose()
    except RecursionError:
        raise SpecError(f"{source}: nested too deeply for a spec") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{where}: not valid YAML: {problem}") from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _key_lines(node: yaml.Node | None, path: tuple[str | int, ...]) -> Any:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _key_lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), value.start_mark.line + 1
            yield from _key_lines(value, (*path, i))


def starter(name: str) -> str:
    """A commented spec to start from."""
    return f"""\
# {name}: an attention variant. `attngen build specs/{name}.yaml` compiles it, `attngen schema` describes every key.
name: {name}

# How query heads share K/V heads: mha (one each), mqa (one for all), gqa (one per group). Counts come from the tensors.
heads: {{sharing: mha}}

# Width of a head, a multiple of 8 from 16 to 256; or {{qk: 192, v: 128}}.
head_dim: 64

# Element types the module accepts: bf16, fp16, fp32.
dtype: [bf16, fp16]

# Which keys a query sees: none, causal, {{sliding_window: {{left: 1023, right: 0}}}}, key_padding,
# {{key_padding: {{lengths: true}}}}, or several at once: {{all_of: [causal, key_padding]}}.
mask: causal

# Tiles are chosen per device. To fix them: schedule: {{block_q: 128, block_kv: 64, num_warps: 8, num_stages: 3}}
"""
