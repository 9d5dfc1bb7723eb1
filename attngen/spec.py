"""The spec: what a user writes in YAML, as pydantic models, and its errors.

`load_spec` reads one file and raises SpecError with one sentence per mistake: file, line, key, what was expected, a hint.
What was expected is read off the JSON schema that `attngen schema` prints.
"""

from __future__ import annotations

import hashlib
import json
import keyword
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import sympy
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from attngen import document
from attngen.document import read_document, shown
from attngen.errors import SpecError, nearest, suggest
from attngen.ir.expr import symbol
from attngen.ir.graph import Derived, Input
from attngen.lang import LangError, Param, Read, name_problem, names_schema
from attngen.masks import AllOf, AnyOf, Mask, Not, Written, registry
from attngen.parts import Part, unique
from attngen.scores import Score, WrittenScore, score_registry

Dtype = Literal["bf16", "fp16", "fp32"]
MAX_BYTES = 64 * 1024
ALGEBRA = ("all_of", "any_of", "not", "expr")
MASK_FORMS = (
    "a mask: its name as in `causal`, {name: {parameter: value}}, {expr: text}, {all_of: [masks]}, {any_of: [masks]} or {not: mask}"
)
SCORE_FORMS = "a score modifier: its name as in `alibi`, {name: {parameter: value}} or {expr: text}"
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Mistakes(ValueError):
    """What is wrong below a value: the path of each mistake from there, and the sentence that follows the key's name."""

    def __init__(self, *found: tuple[document.Path, str]) -> None:
        super().__init__(*found)
        self.found = found


def _whole(value: Any) -> Any:
    """Only integers: for a Literal, True is 1 and 64.0 is 64."""
    if type(value) is int or value is None:
        return value
    raise PydanticCustomError("whole", "not a whole number")


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


Block = Annotated[Literal[16, 32, 64, 128, 256], BeforeValidator(_whole)]


class Schedule(BaseModel):
    """The order of the loops; and overrides of what tile selection would choose, for the forward, dK/dV and dQ kernels on every device."""

    model_config = _STRICT
    order: Literal["q_outer", "kv_outer"] = Field(
        default="q_outer",
        description="q_outer: FlashAttention-2's, a program per tile; kv_outer: FlashAttention-1's, whose programs walk over tiles of keys",
    )
    block_q: Block | None = Field(default=None, description="rows of a query tile")
    block_kv: Block | None = Field(default=None, description="rows of a key tile")
    stages: Annotated[Literal[1, 2, 3, 4, 5], BeforeValidator(_whole)] | None = Field(
        default=None, description="depth of the load pipeline"
    )
    warps: Annotated[Literal[1, 2, 4, 8, 16], BeforeValidator(_whole)] | None = Field(default=None, description="warps per program")


class Backward(BaseModel):
    """How gradients are computed."""

    model_config = _STRICT
    deterministic: bool = Field(
        default=True, description="every sum in a fixed order; false lets learned inputs be read anywhere, their gradients added atomically"
    )


def _parse_head_dim(value: Any) -> Any:
    return value if isinstance(value, (dict, HeadDim)) else {"qk": value, "v": value}


def _parse_dtype(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, tuple) else (value,)


def parse_mask(value: Any) -> Mask:
    """A mask from its spec form: `name`, `{name: {parameters}}`, `{expr: text, params: {...}}`, or any_of, all_of, not of masks."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if value is None or isinstance(value, bool):
        raise Mistakes(((), f"is {_said(value)}; expected {MASK_FORMS}; for no mask write `none`"))
    if isinstance(value, dict) and "expr" in value:
        return _parse_written(Written, value)
    if isinstance(value, list) and value or isinstance(value, dict) and len(value) > 1:
        raise Mistakes(((), f"is {_said(value)} of {len(value)}; expected one mask; for several at once write {{all_of: [masks]}}"))
    if not isinstance(value, dict) or not value:
        raise Mistakes(((), f"is {_said(value)}; expected {MASK_FORMS}"))
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
    """Score modifiers from their spec form: a list of names, `{name: {parameters}}` or `{expr: text, params: {...}}`."""
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
        raise Mistakes(((), f"is {_said(value)}; expected {SCORE_FORMS}"))
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
        raise Mistakes(((cls.name,), f"is {_said(params)}; expected its parameters, {_said_by(cls.model_json_schema())}"))
    try:
        return cls.model_validate(params or {}, strict=True)
    except ValidationError as error:
        found = _mistakes(error, cls.model_json_schema(), params or {})
        raise Mistakes(*(((cls.name, *path), text) for path, text in found)) from None


def _parse_written(cls: type[SomePart], value: dict[str, Any]) -> SomePart:
    """A mask or modifier of the form {expr: text, params: {name: declaration}}."""
    if stray := next((key for key in value if key not in ("expr", "params")), None):
        raise Mistakes(((stray,), f"is no known key; {suggest(str(stray), ['expr', 'params'])}"))
    text, declared = value["expr"], value.get("params")
    declared = {} if declared is None else declared
    if not isinstance(text, str):
        raise Mistakes((("expr",), f'is {_said(text)}; expected an expression in quotes, as in "kv_idx <= q_pos"'))
    if not isinstance(declared, dict):
        raise Mistakes((("params",), f"is {_said(declared)}; expected the declarations of parameters by name"))
    params: dict[str, Param] = {}
    found: list[tuple[document.Path, str]] = []
    for name, declaration in declared.items():
        try:
            if problem := name_problem(name):
                raise ValueError(problem)
            params[name] = Param.model_validate(declaration)
        except ValidationError as error:
            found += [(("params", name, *path), text) for path, text in _mistakes(error, Param.model_json_schema(), declaration)]
        except ValueError as error:
            found.append((("params", name), str(error)))
    if found:
        raise Mistakes(*found)
    part: Any = cls.model_validate({"expr": text, "params": params})
    try:
        _ = part.parsed
    except LangError as error:
        raise Mistakes((("expr",), f"at column {error.column} {error.reason}" if error.column else error.reason)) from None
    made: SomePart = part
    return made


def _parse_several(cls: type[AllOf] | type[AnyOf], value: Any) -> Mask:
    name = cls.name
    if not isinstance(value, list) or not value:
        raise Mistakes(((name,), f"is {_said(value)}; expected a list of at least one mask, as in [causal, key_padding]"))
    masks: list[Mask] = []
    found: list[tuple[document.Path, str]] = []
    for i, item in enumerate(value):
        try:
            mask = parse_mask(item)
        except Mistakes as error:
            found += [((name, i, *path), text) for path, text in error.found]
            continue
        if mask.names_blocks() and any(m.names_blocks() for m in masks):
            found.append(((name, i), "names blocks a second time; expected one `block_sparse`: combine the block masks in the call"))
        if mask in masks:
            found.append(((name, i), f"is `{mask.describe()}` again; expected each mask once: a repeat {_REPEAT[name]}"))
        masks.append(mask if name == "all_of" else mask.unlisted())
    if found:
        raise Mistakes(*found)
    return cls(masks=tuple(masks))


_REPEAT = {"all_of": "hides nothing more", "any_of": "shows nothing more"}


def _mask_schema() -> dict[str, Any]:
    named = _named_schemas(registry())
    mask = {"$ref": "#/properties/mask"}
    every = {"type": "array", "minItems": 1, "uniqueItems": True, "items": mask}
    for name, below in (("all_of", every), ("any_of", every), ("not", mask)):
        named.append({"type": "object", "properties": {name: below}, "required": [name], "additionalProperties": False})
    return {"description": "which keys a query sees", "anyOf": [*named, _written_schema()]}


def _score_schema() -> dict[str, Any]:
    named = _named_schemas(score_registry())
    for name, cls in score_registry().items():
        if cls.short:
            short = cls.model_json_schema()["properties"][cls.short]
            named.append({"type": "object", "properties": {name: short}, "required": [name], "additionalProperties": False})
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
        found.append({"type": "object", "properties": {name: params}, "required": [name], "additionalProperties": False})
    return found


def _written_schema() -> dict[str, Any]:
    params = {
        "type": "object",
        "propertyNames": names_schema(),
        "additionalProperties": {**Param.model_json_schema(), "title": "parameter"},
    }
    text = {
        "type": "string",
        "description": "an expression over q_pos, q_idx, kv_idx, b, h, hkv, q_len, kv_len, its parameters, and s in scores",
    }
    return {"type": "object", "properties": {"expr": text, "params": params}, "required": ["expr"], "additionalProperties": False}


class Spec(BaseModel):
    """An attention variant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, title="attngen spec")
    name: str = Field(
        pattern="^[a-z][a-z0-9_]{0,63}$",
        description="an identifier of lower-case letters, digits and _, 64 at most, as in causal_mqa",
    )
    heads: Heads = Heads()
    head_dim: Annotated[HeadDim, BeforeValidator(_parse_head_dim)] = Field(description="one number, or {qk: , v: }")
    dtype: Annotated[tuple[Dtype, ...], BeforeValidator(_parse_dtype)] = Field(
        default=("bf16", "fp16"), description="element types the module accepts"
    )
    fp32_precision: Literal["ieee", "tf32"] = Field(default="ieee", description="how fp32 matrix products are computed")
    mask: Annotated[SerializeAsAny[Mask], BeforeValidator(parse_mask)] = Field(
        default_factory=lambda: registry()["none"](), validate_default=False
    )
    score: Annotated[tuple[SerializeAsAny[Score], ...], BeforeValidator(parse_score)] = Field(
        default=(), description="what is done to scores, in order, before the mask"
    )
    dropout: bool = Field(default=False, description="whether calls can drop probabilities: their `dropout_p` and `seed`")
    backward: Backward = Backward()
    schedule: Schedule = Schedule()

    @field_validator("name")
    @classmethod
    def _importable(cls, value: str) -> str:
        if keyword.iskeyword(value):
            raise ValueError(f"is `{value}`, a word of Python's grammar, so nothing could import it; expected another name")
        return value

    @field_validator("dtype")
    @classmethod
    def _distinct(cls, value: tuple[Dtype, ...]) -> tuple[Dtype, ...]:
        if not value:
            raise ValueError(f"is an empty list; expected at least one of {', '.join(f'`{d}`' for d in get_args(Dtype))}")
        if len(set(value)) != len(value):
            raise ValueError("names an element type twice; expected each once")
        return tuple(d for d in get_args(Dtype) if d in value)

    @model_validator(mode="after")
    def _tf32_needs_fp32(self) -> Spec:
        if self.fp32_precision == "tf32" and "fp32" not in self.dtype:
            raise Mistakes((("fp32_precision",), "is `tf32`, but `dtype` has no `fp32`; add it there, or leave this key out"))
        return self

    @model_validator(mode="after")
    def _one_meaning(self) -> Spec:
        """Inputs of one name are declared alike by the mask and the modifiers."""
        known: dict[str, Input] = {}
        made: dict[str, Derived] = {}
        for key, part in (("mask", self.mask), *(("score", s) for s in self.score)):
            for i in part.inputs():
                if known.setdefault(i.name, i) != i:
                    raise Mistakes(((key,), f"declares `{i.name}` again, in another way; expected one declaration, or another name"))
            for d in part.derived():
                for name in d.names:
                    if made.setdefault(name, d) != d:
                        raise Mistakes(((key,), f"computes `{name}` in two ways; expected one of the masks that need it"))
        reads = {r.name: "mask" for r in self.mask.reads()} | {r.name: "score" for s in self.score for r in s.reads()}
        for name in made:
            if name in known:
                raise Mistakes((("mask",), f"computes `{name}`, which is a parameter's name too; expected another name for the parameter"))
        for name, key in reads.items():
            if name in known and not known[name].shape:
                raise Mistakes(((key,), f"reads a tensor as `{name}`, a parameter's name too; expected another name for the parameter"))
        if self.mask.expression() == sympy.false:
            raise Mistakes((("mask",), "hides every key from every query; expected a condition that some pairs meet"))
        for key, part, e in (("mask", self.mask, self.mask.expression()), *(("score", s, s.expression()) for s in self.score)):
            if isinstance(part, (Written, WrittenScore)):
                seen = {str(s) for s in e.free_symbols} | {str(s) for r in part.reads() for x in r.index for s in x.free_symbols}
                kept = seen | {r.tensor for r in part.reads() if r.name in seen}
                if gone := next((i.name for i in part.inputs() if i.name not in kept), None):
                    raise Mistakes(((key,), f"does not depend on `{gone}`, once simplified; expected it to, or the parameter left out"))
        if gone := self._forgotten():
            key = "mask" if any(i.name == gone for i in self.mask.inputs()) else "score"
            raise Mistakes(((key,), f"does not depend on `{gone}`, once simplified; expected it to, or the part that declares it left out"))
        scored = [s for s in self.score if s.sink() is None]
        if any(symbol("s") not in s.expression().free_symbols for s in scored):
            raise Mistakes((("score",), "forgets the score `s`; expected an expression in it"))
        return self

    def _forgotten(self) -> str | None:
        """An input on which neither the mask nor the scores depend as a whole."""
        score: Any = symbol("s")
        for part in self.score:
            score = part.expression().xreplace({symbol("s"): score})
        sinks = [sink for part in self.score if (sink := part.sink()) is not None]
        masks = (self.mask.expression(), self.mask.by_key())
        facts = [e for fact in self.mask.facts() if any(mask.has(fact.literal) for mask in masks) for e in fact]
        seen = {str(s) for e in (*masks, *facts, score, *sinks) for s in e.free_symbols}
        for read in reversed(self.reads()):
            if read.name in seen:
                seen |= {read.tensor, *(str(s) for e in read.index for s in e.free_symbols)}
        for made in self.derived():
            if not seen.isdisjoint(made.names):
                seen |= set(made.sources)
        return next((i.name for i in self.inputs() if i.name not in seen), None)

    @model_validator(mode="after")
    def _order_can(self) -> Spec:
        """What a program that walks over tiles of keys cannot do."""
        if self.schedule.order == "q_outer":
            return self
        read = next((i.name for i in self.inputs() if i.shape), None)
        cannot = (
            (self.dropout, "dropout", "cannot drop weights"),
            (self.mask.blocks() is not None, "mask", "visits no lists of blocks"),
            (read is not None, "score" if any(i.name == read for s in self.score for i in s.inputs()) else "mask", f"reads no `{read}`"),
            (self.head_dim.qk + self.head_dim.v > 256, "head_dim", "holds dK and dV of at most 256 columns together"),
        )
        if found := next(((key, what) for wrong, key, what in cannot if wrong), None):
            raise Mistakes(((found[0],), f"asks for what `schedule: {{order: kv_outer}}` does not do: it {found[1]}; expected `q_outer`"))
        return self

    def inputs(self) -> tuple[Input, ...]:
        """The run-time inputs of mask and modifiers."""
        return unique(i for part in (self.mask, *self.score) for i in part.inputs())

    def derived(self) -> tuple[Derived, ...]:
        """What the wrapper computes from them."""
        return unique(d for part in (self.mask, *self.score) for d in part.derived())

    def reads(self) -> tuple[Read, ...]:
        """How mask and modifiers read tensors; each read has a name of its own."""
        found: dict[str, Read] = {}
        for part in (self.mask, *self.score):
            for read in part.reads():
                if found.setdefault(read.name, read) != read:
                    raise SpecError(
                        f"{self.name}: `{read.tensor}` is read as `{read.name}` in two ways; expected another name in one of them"
                    )
        return tuple(found.values())

    def notes(self) -> tuple[tuple[str, str], ...]:
        """What may not be what the author means: the key, and the sentence that follows its name."""
        return unique((key, note) for key, part in (("mask", self.mask), *(("score", s) for s in self.score)) for note in part.notes())

    def canonical(self) -> dict[str, Any]:
        """The spec as plain data with every default filled in; `score`, `backward` and the order of loops only where they say something."""
        plain = self.model_dump(mode="json", exclude={"mask", "score", *(["backward"] if self.backward == Backward() else [])})
        if self.schedule.order == "q_outer":
            del plain["schedule"]["order"]
        plain |= {"score": [s.data() for s in self.score]} if self.score else {}
        return {**plain, "mask": self.mask.data()}

    def hash(self) -> str:
        """A digest of the canonical form: equal specs, equal hash."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    schema["properties"]["mask"] = {**_mask_schema(), "default": "none"}
    schema["properties"]["score"] = _score_schema()
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
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SpecError(f"{path}: larger than {MAX_BYTES // 1024} KiB; expected a short YAML spec")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: byte {error.start} is not UTF-8 text; expected a YAML spec") from error
    except FileNotFoundError as error:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.yaml")))
        hint = f"did you mean {path.with_name(near)}?" if near else "`attngen new NAME` writes a spec to start from"
        raise SpecError(f"{path}: there is no such file; {hint}") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); expected a YAML spec") from error
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str = "spec") -> Spec:
    """A spec from YAML text; `source` names it in errors."""
    data, lines = read_document(text, source)
    return make_spec(data, source, lines)


def make_spec(data: Any, source: str = "spec", lines: dict[document.Path, int] | None = None) -> Spec:
    """A spec from plain data; `lines` gives the line of each key that came from a file."""
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"the file holds {_said(data)}"
        raise SpecError(f"{source}: {what}; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start")
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        sentences = []
        for path, text in _mistakes(error, json_schema(), data):
            sentences.append(f"{_place(source, lines or {}, path)}: `{_dotted(path)}` {text}")
        raise SpecError("\n".join(dict.fromkeys(sentences))) from None


def place(path: Path, key: str) -> str:
    """The file, and the line of a key in it, for an error found after the spec was read."""
    _, lines = read_document(path.read_text(encoding="utf-8-sig"), str(path))
    return _place(str(path), lines, (key,))


def _place(source: str, lines: dict[document.Path, int], path: document.Path) -> str:
    prefixes = (path[:n] for n in range(len(path), 0, -1))
    line = next((lines[p] for p in prefixes if p in lines), None)
    return f"{source}, line {line}" if line else source


def _mistakes(error: ValidationError, schema: dict[str, Any], data: Any) -> Iterator[tuple[document.Path, str]]:
    """pydantic's errors on `data` in the words of a spec: the path of each, and the sentence that follows its name."""
    for e in error.errors():
        path, kind = e["loc"], e["type"]
        cause = e.get("ctx", {}).get("error")
        if isinstance(cause, Mistakes):
            yield from (((*path, *below), text) for below, text in cause.found)
        elif isinstance(cause, ValueError):
            yield path, str(cause)
        elif kind == "missing":
            yield path, f"is missing; expected {_expected(schema, path)}"
        elif kind == "extra_forbidden":
            known = {key for node in _nodes(schema, path[:-1]) for key in node.get("properties", {})}
            yield path, f"is no known key; {suggest(str(path[-1]), known)}"
        else:
            path, value = _given(data, path)
            words = [str(w) for node in _nodes(schema, path) for w in node.get("enum", ())]
            near = nearest(value, words) if isinstance(value, str) else None
            yield path, f"is {_said(value)}; expected {_expected(schema, path)}" + (f"; did you mean `{near}`?" if near else "")


def _given(data: Any, path: document.Path) -> tuple[document.Path, Any]:
    """The part of a path that the data has (a shorthand has no parts), and the value there."""
    for n, key in enumerate(path):
        keys = data if isinstance(data, dict) else dict(enumerate(data)) if isinstance(data, list) else {}
        if key not in keys:
            return path[:n], data
        data = keys[key]
    return path, data


def _nodes(schema: dict[str, Any], path: document.Path) -> list[dict[str, Any]]:
    """The alternatives that a JSON schema has at a path, references resolved, without null."""

    def resolve(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if "anyOf" in node:
            return [found for option in node["anyOf"] for found in resolve(option)]
        return [] if node.get("type") == "null" else [node]

    nodes = resolve(schema)
    for key in path:
        below = (node["items"] if isinstance(key, int) else node["properties"][key] for node in nodes if _has(node, key))
        nodes = [found for node in below for found in resolve(node)]
    return nodes


def _has(node: dict[str, Any], key: str | int) -> bool:
    return "items" in node if isinstance(key, int) else key in node.get("properties", {})


def _expected(schema: dict[str, Any], path: document.Path) -> str:
    return ", or ".join(_said_by(node) for node in _nodes(schema, path))


def _said_by(node: dict[str, Any]) -> str:
    """What a node of a JSON schema asks for, in words."""
    if "enum" in node:
        words = [f"`{w}`" for w in node["enum"]]
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    match node.get("type"):
        case "integer":
            least, most = node.get("minimum"), node.get("maximum")
            size = "" if least is None else f" of {least} or more" if most is None else f" from {least} to {most}"
            return f"a whole number{size}" + (f" that is a multiple of {node['multipleOf']}" if "multipleOf" in node else "")
        case "boolean":
            return "`true` or `false`"
        case "array":
            return "a list of these"
        case "object":
            parts = (f"{key}: {'|'.join(map(str, below.get('enum', ['...'])))}" for key, below in node.get("properties", {}).items())
            return f"{{{', '.join(parts)}}}"
    return str(node.get("description", "text"))


def _said(value: Any) -> str:
    """A value of YAML in words."""
    match value:
        case None:
            return "empty"
        case bool():
            return f"the boolean `{str(value).lower()}`"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text `{shown(value)}`"
    return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"


def _dotted(path: document.Path) -> str:
    """A path as one word: `mask.all_of[1].key_padding`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{shown(key)}" for key in path).removeprefix(".")


def starter(name: str) -> str:
    """A commented spec to start from."""
    masks, modifiers = ", ".join(registry()), ", ".join(score_registry())
    return f"""\
# {name}: an attention variant. `attngen build specs/{name}.yaml` compiles it, `attngen schema` describes every key.
name: {name}

# How query heads share K/V heads: mha (one each), mqa (one for all), gqa (one per group). Counts come from the tensors.
heads: {{sharing: mha}}

# Width of a head, a multiple of 8 from 16 to 256; or {{qk: 192, v: 128}}.
head_dim: 64

# Element types the module accepts: bf16, fp16, fp32.
dtype: [bf16, fp16]

# Which keys a query sees. Masks: {masks}. `attngen list` says what each does.
# With parameters: {{sliding_window: {{left: 1023, right: 0}}}}. Several at once: {{all_of: [causal, key_padding]}},
# any_of, not. Or an expression: {{expr: "kv_idx <= q_pos + extra", params: {{extra: {{scalar: int}}}}}}.
mask: causal

# What is done to scores, in order, before the mask: {modifiers}, or an expression.
# score: [{{softcap: 30.0}}, {{expr: "s - 0.1 * abs(q_pos - kv_idx)"}}]

# Dropout on the attention weights: calls take dropout_p and seed. Without it, leave this out.
# dropout: true

# Tiles are chosen per device. To fix them: schedule: {{block_q: 128, block_kv: 64, stages: 3, warps: 8}}
"""
