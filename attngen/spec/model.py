"""The spec as pydantic models: every key, its values and defaults, and the rules that tie keys to one another."""

from __future__ import annotations

import hashlib
import json
import keyword
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import sympy
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from attngen.errors import shown
from attngen.heuristics import UNIT
from attngen.ir.dtypes import ELEMENTS, LATENT_GROUP, agree, by_precision
from attngen.ir.expr import Bool, Expr, symbol
from attngen.ir.graph import Derived, Input, Read
from attngen.ir.heads import SHARINGS
from attngen.ir.names import OF_OUTPUTS, OUTPUTS
from attngen.lang.limits import WIDEST_HEAD, WIDEST_LATENT, WIDEST_ROPE
from attngen.lang.part import unique
from attngen.masks import Mask, registry, union_note
from attngen.scores import Score
from attngen.spec import document
from attngen.spec.forms import mask_schema, parse_mask, parse_score, score_schema
from attngen.spec.sentences import Mistakes
from attngen.tiles.ranges import is_too_long, shows_nothing

# Packages that Python, generated modules and attngen import: the names that a module cannot have.
PACKAGES = frozenset(sys.stdlib_module_names) | {
    *(
        "attngen",
        "filelock",
        "jinja2",
        "matplotlib",
        "networkx",
        "numpy",
        "platformdirs",
        "pydantic",
        "rich",
        "sympy",
        "torch",
        "triton",
    ),
    *("typer", "yaml", "generated", "hypothesis", "pip", "pytest", "setuptools", "site"),
}
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def _whole(value: Any) -> Any:
    """Only integers: for a Literal, True is 1 and 64.0 is 64."""
    if type(value) is int or value is None:
        return value
    raise PydanticCustomError("whole", "not a whole number")


def _known(value: str) -> str:
    """An element type of the table."""
    if value in ELEMENTS:
        return value
    raise PydanticCustomError("known", "no element type")


def _given(value: str) -> str:
    """An output that calls can give."""
    if value in OUTPUTS:
        return value
    raise PydanticCustomError("given", "no output")


class Heads(BaseModel):
    """How query heads share K/V heads; the counts come from the tensors of the call."""

    model_config = _STRICT
    sharing: Literal["mha", "mqa", "gqa"] = Field(
        default="mha",
        description="mha: one K/V head per query head; mqa: one in all; gqa: one per group of query heads",
    )


class HeadDim(BaseModel):
    """Width of a head of q and k, and of v: multiples of 8 from 16 to 512, or more where values are part of a
    latent."""

    model_config = _STRICT
    qk: int = Field(ge=16, multiple_of=8)
    v: int = Field(ge=16, multiple_of=8)


class Latent(BaseModel):
    """What DeepSeek's multi-head latent attention (MLA) keeps of each key: a latent, and columns that are rotated."""

    model_config = _STRICT
    rope: int = Field(
        ge=16,
        le=WIDEST_ROPE,
        multiple_of=16,
        description="columns of a key that are rotated, after those of the latent",
    )


class KeysValues(BaseModel):
    """How keys and values are stored."""

    model_config = _STRICT
    latent: Latent = Field(
        description="values are the first columns of the keys, which a cache has once; projections are absorbed in q"
    )


Block = Annotated[Literal[16, 32, 64, 128, 256], BeforeValidator(_whole)]


class Schedule(BaseModel):
    """The order of the loops; and overrides of what tile selection would choose, for the forward, dK/dV and dQ
    kernels on every device."""

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
    warps: Annotated[Literal[1, 2, 4, 8, 16], BeforeValidator(_whole)] | None = Field(
        default=None, description="warps per program"
    )
    split: Literal["balanced"] | Parts = Field(
        default="balanced",
        description="how the keys of a cache are dealt among programs; balanced: evenly over the device; {keys: n}: in parts of n keys, "
        "with which what a sequence gets does not depend on the others of a call",
    )
    backend: Literal["auto", "triton", "hopper"] = Field(
        default="auto",
        description="triton: portable kernels; hopper: also a forward for that GPU whose warps have roles, of Gluon; auto: where it pays",
    )

    @property
    def keys_of_part(self) -> int:
        """Keys of a part of fixed length; 0 where parts are balanced."""
        return self.split.keys if isinstance(self.split, Parts) else 0


class Paged(BaseModel):
    """Pages of a cache."""

    model_config = _STRICT
    page_size: Literal["any"] | Annotated[int, Field(ge=2, le=65536)] = Field(
        default="any", description="keys of a page; any: calls may have pages of any size"
    )


class Cache(BaseModel):
    """Where the keys and values of `attention.with_kvcache` lie."""

    model_config = _STRICT
    paged: Paged | None = Field(default=None, description="in pages, which a table names for each sequence")
    dtype: Literal["fp8_e4m3"] | None = Field(
        default=None,
        description="element type of keys and values in the cache, of 8 bits, with factors `k_scale` and `v_scale`, or of a latent one "
        f"for each key and {LATENT_GROUP} columns, beside it; q's without it",
    )
    scale: Literal["head", "page"] | None = Field(
        default=None,
        description="what has a factor of its own: each K/V head (`head`, the default), or each head of a page (`page`)",
    )

    @property
    def page(self) -> str:
        """The rows of a page as the IR has them: empty without pages, a number, or `page_rows` for any."""
        return "" if self.paged is None else "page_rows" if self.paged.page_size == "any" else str(self.paged.page_size)


class Parts(BaseModel):
    """Parts of fixed length."""

    model_config = _STRICT
    keys: int = Field(ge=UNIT, le=2**20, multiple_of=UNIT, description=f"keys of a part, a multiple of {UNIT}")


class Backward(BaseModel):
    """How gradients are computed."""

    model_config = _STRICT
    deterministic: bool = Field(
        default=True,
        description="every sum in a fixed order; false lets learned inputs be read anywhere, their gradients added atomically",
    )


def _parse_head_dim(value: Any) -> Any:
    return value if isinstance(value, (dict, HeadDim)) else {"qk": value, "v": value}


def _parse_backward(value: Any) -> Any:
    """`false` is None: no backward. An empty key says nothing, so it is refused as `true` is."""
    if value is None or value is True:
        given = "empty" if value is None else "the boolean `true`"
        raise ValueError(f"is {given}; expected `false`, for a module without gradients, or {{deterministic: ...}}")
    return None if value is False else value


_CACHES = "`contiguous`, {paged: {page_size: 64}}, {dtype: fp8_e4m3}, or both of these keys"


def _parse_cache(value: Any) -> Any:
    """`contiguous`, or a mapping with `paged`, `dtype` or both; `paged` alone is of any page size."""
    if value is None:
        raise ValueError(f"is empty; expected {_CACHES}")
    if value == "contiguous":
        return {}
    if value == "paged" or value == {"paged": None}:
        return {"paged": {}}
    if not isinstance(value, (dict, Cache)) or value == {}:
        raise ValueError(f"is `{shown(value)}`; expected {_CACHES}")
    return value | {"paged": {}} if isinstance(value, dict) and value.get("paged", {}) is None else value


def _parse_list(value: Any) -> Any:
    """A list as a tuple, and one word as a list of one."""
    return tuple(value) if isinstance(value, list) else value if isinstance(value, tuple) else (value,)


def _needed(part: Mask | Score, heads: dict[Expr, Expr]) -> set[str]:
    """The names of what the expressions of a mask or modifier depend on, also by what they read, and what that is
    computed from."""
    expressions = [part.expression()]
    expressions += [part.by_key()] if isinstance(part, Mask) else [part.sink() or sympy.true]
    names = {str(s) for e in expressions for s in e.xreplace(heads).free_symbols}
    for read in reversed(part.reads()):  # nested ones come first
        if read.name in names:
            names |= {read.tensor, *(str(s) for e in read.index for s in e.free_symbols)}
    return names | {source for d in part.derived() if names & set(d.names) for source in d.sources}


TOO_LONG = (
    "has more cases than are solved for the tiles that it leaves; what is not solved is computed for each pair, which is right and may "
    "be slower; a shorter condition is solved in full"
)


class Spec(BaseModel):
    """An attention variant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, title="attngen spec")
    name: str = Field(
        pattern="^[a-z][a-z0-9_]{0,63}$",
        description="an identifier of lower-case letters, digits and _, 64 at most, as in causal_mqa",
    )
    heads: Heads = Heads()
    head_dim: Annotated[HeadDim, BeforeValidator(_parse_head_dim)] = Field(description="one number, or {qk: , v: }")
    dtype: Annotated[tuple[Annotated[str, AfterValidator(_known)], ...], BeforeValidator(_parse_list)] = Field(
        default=("bf16", "fp16"), description="element types the module accepts"
    )
    fp32_precision: Literal["ieee", "tf32"] = Field(
        default="ieee",
        description="how products of fp32 matrices are computed; tf32 reads 10 of the 23 bits of a fraction",
    )
    mask: Annotated[SerializeAsAny[Mask], BeforeValidator(parse_mask)] = Field(
        default_factory=lambda: registry()["none"](), validate_default=False
    )
    score: Annotated[tuple[SerializeAsAny[Score], ...], BeforeValidator(parse_score)] = Field(
        default=(), description="what is done to scores, in order, before the mask"
    )
    dropout: bool = Field(
        default=False, description="whether calls can drop probabilities: their `dropout_p` and `seed`"
    )
    backward: Annotated[Backward | None, BeforeValidator(_parse_backward)] = Field(
        default=Backward(), description="how gradients are computed; false builds a module without a backward"
    )
    cache: Annotated[Cache | None, BeforeValidator(_parse_cache)] = Field(
        default=None,
        description="where `attention.with_kvcache` reads keys and values: contiguous, or {paged: {page_size: 64}}",
    )
    kv: KeysValues | None = Field(
        default=None, description="how keys and values are stored: {latent: {rope: 64}} for MLA; apart without it"
    )
    schedule: Schedule = Schedule()
    outputs: Annotated[tuple[Annotated[str, AfterValidator(_given)], ...], BeforeValidator(_parse_list)] = Field(
        default=("lse",), description="what calls can give beside the output; `lse` is always among them"
    )

    @field_validator("name")
    @classmethod
    def _importable(cls, value: str) -> str:
        if keyword.iskeyword(value):
            raise ValueError(
                f"is `{value}`, a word of Python's grammar, so nothing could import it; expected another name"
            )
        if value in PACKAGES:
            raise ValueError(
                f"is `{value}`, a package that its module would hide where both can be imported; expected another name"
            )
        return value

    @field_validator("dtype")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"is an empty list; expected at least one of {', '.join(f'`{d}`' for d in ELEMENTS)}")
        if len(set(value)) != len(value):
            raise ValueError("names an element type twice; expected each once")
        if not agree(value):
            given = ", ".join(
                f"`{d}` gives {ELEMENTS[d].results or d}, of weights times {1 << ELEMENTS[d].weights}" for d in value
            )
            raise ValueError(
                f"has element types that kernels treat differently: {given}; expected a spec for each kind"
            )
        return tuple(d for d in ELEMENTS if d in value)

    @field_validator("outputs")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names an output twice; expected each once")
        return tuple(name for name in OUTPUTS if name in ("lse", *value))

    @model_validator(mode="after")
    def _trains_if_its_types_do(self) -> Spec:
        if self.trains and (fixed := next((d for d in self.dtype if not ELEMENTS[d].trains), None)):
            raise Mistakes(
                (("dtype",), f"names `{fixed}`, in which there is no backward; expected `backward: false` beside it")
            )
        return self

    @model_validator(mode="after")
    def _tf32_needs_fp32(self) -> Spec:
        if self.fp32_precision == "tf32" and not by_precision(self.dtype):
            raise Mistakes(
                (("fp32_precision",), "is `tf32`, but `dtype` has no `fp32`; add it there, or leave this key out")
            )
        return self

    @model_validator(mode="after")
    def _names_mean_one_thing(self) -> Spec:
        """A name stands for one thing: one declaration of an input, one way to compute a tensor, one way to read it."""
        known: dict[str, Input] = {}
        made: dict[str, Derived] = {}
        reads: dict[str, Read] = {}
        for path, part in self._parts():
            for i in part.inputs():
                if known.setdefault(i.name, i) != i:
                    raise Mistakes(
                        (path, f"declares `{i.name}` again, in another way; expected one declaration, or another name")
                    )
            for d in part.derived():
                for name in d.names:
                    if made.setdefault(name, d) != d:
                        raise Mistakes((path, f"computes `{name}` in two ways; expected one of the masks that need it"))
            for read in part.reads():
                if reads.setdefault(read.name, read) != read:
                    two = f"reads `{read.tensor}` as `{read.name}`, which is read in another way too"
                    raise Mistakes((path, f"{two}; expected another name in one of them"))
        if taken := next((name for name in made if name in known), None):
            raise Mistakes(
                (
                    ("mask",),
                    f"computes `{taken}`, which is a parameter's name too; expected another name for the parameter",
                )
            )
        for path, part in self._parts():
            if taken := next((r.name for r in part.reads() if r.name in known and not known[r.name].shape), None):
                raise Mistakes(
                    (
                        path,
                        f"reads a tensor as `{taken}`, a parameter's name too; expected another name for the parameter",
                    )
                )
        return self

    @model_validator(mode="after")
    def _expressions_say_something(self) -> Spec:
        """The mask shows some pairs, scores depend on `s`, and what is written out depends on every parameter, once
        simplified."""
        heads = SHARINGS[self.heads.sharing].known
        if shows_nothing(self.visible()):
            raise Mistakes((("mask",), "hides every key from every query; expected a condition that some pairs meet"))
        for path, part in self._parts():
            needed = _needed(part, heads)
            if gone := next((i.name for i in part.inputs() if i.name not in needed and not i.is_size), None):
                raise Mistakes(
                    (path, f"does not depend on `{gone}`, once simplified; expected it to, or the parameter left out")
                )
            if (
                isinstance(part, Score)
                and part.sink() is None
                and symbol("s") not in part.expression().xreplace(heads).free_symbols
            ):
                raise Mistakes((path, "forgets the score `s`; expected an expression in it"))
        if gone := self._forgotten():
            said = (
                f"does not depend on `{gone}`, once simplified; expected it to, or the part that declares it left out"
            )
            raise Mistakes((self.key_of(gone), said))
        return self

    def _forgotten(self) -> str | None:
        """An input on which neither the mask nor the scores depend as a whole."""
        sinks = [sink for part in self.score if (sink := part.sink()) is not None]
        masks = (self.visible(), self.visible_by_key())
        facts = [e for fact in self.mask.facts() if any(mask.has(fact.literal) for mask in masks) for e in fact]
        seen = {str(s) for e in (*masks, *facts, self.modified(), *sinks) for s in e.free_symbols}
        for read in reversed(self.reads()):
            if read.name in seen:
                seen |= {read.tensor, *(str(s) for e in read.index for s in e.free_symbols)}
        for made in self.derived():
            if not seen.isdisjoint(made.names):
                seen |= set(made.sources)
        return next((i.name for i in self.inputs() if i.name not in seen and not i.is_size), None)

    @model_validator(mode="after")
    def _split_is_of_a_cache(self) -> Spec:
        if self.cache is None and self.schedule.keys_of_part:
            raise Mistakes(
                (("schedule", "split"), "deals the keys of a cache, and there is none; expected `cache` beside it")
            )
        return self

    @model_validator(mode="after")
    def _widths_are_known(self) -> Spec:
        """Heads are wide only where values are part of a latent, which is for serving alone."""
        dim, rope = self.head_dim, self.rope
        if not rope:
            if wide := next((n for n in (dim.qk, dim.v) if n > WIDEST_HEAD), 0):
                expected = f"expected at most {WIDEST_HEAD}, or `kv: {{latent: ...}}` beside it"
                raise Mistakes((("head_dim",), f"has {wide} columns; {expected}"))
            return self
        missing: tuple[tuple[bool, document.Path, str], ...] = (
            (self.cache is None, ("kv",), "is for keys in a cache, and there is none; expected `cache` beside it"),
            (self.trains, ("kv",), "is for serving, and the spec has a backward; expected `backward: false` beside it"),
            (
                self.heads.sharing != "mqa",
                ("heads",),
                f"has `{self.heads.sharing}`, and a latent is one for all heads; expected `mqa`",
            ),
            (
                dim.v > WIDEST_LATENT,
                ("head_dim",),
                f"has {dim.v} columns of v; expected at most {WIDEST_LATENT}, the widest latent",
            ),
            (
                dim.qk != dim.v + rope,
                ("head_dim",),
                f"has {dim.qk} columns of q and k; expected {dim.v + rope}: {dim.v} of the latent and {rope} that are rotated",
            ),
        )
        if found := next(((path, what) for wrong, path, what in missing if wrong), None):
            raise Mistakes(found)
        return self

    @model_validator(mode="after")
    def _eight_bits_can_be_read(self) -> Spec:
        """What a cache of 8-bit numbers asks of the rest of a spec."""
        cache = self.cache
        if cache is None or not (cache.dtype or cache.scale):
            return self
        wide = next((d for d in self.dtype if ELEMENTS[d].bytes != 2), "")
        odd = next((n for n in (self.head_dim.qk, self.head_dim.v) if n % 16 or n < 32), 0)
        cannot: tuple[tuple[bool, document.Path, str], ...] = (
            (
                not cache.dtype,
                ("cache", "scale"),
                "is of numbers of 8 bits, and the cache has none; expected `dtype: fp8_e4m3` beside it",
            ),
            (
                cache.scale == "page" and not cache.paged,
                ("cache", "scale"),
                "is `page`, and there are no pages; expected `head`, or `paged`",
            ),
            (
                bool(self.rope and cache.scale),
                ("cache", "scale"),
                f"is `{cache.scale}`, and a latent has a factor for each key and {LATENT_GROUP} columns; expected the key left out",
            ),
            (
                bool(self.rope) and self.head_dim.v != WIDEST_LATENT,
                ("head_dim",),
                f"has {self.head_dim.v} columns of v; expected {WIDEST_LATENT}, those of a latent that is kept in 8 bits",
            ),
            (bool(wide), ("dtype",), f"names `{wide}`, beside a cache of 8 bits; expected `bf16`, `fp16` or both"),
            (
                bool(odd and not self.rope),
                ("head_dim",),
                f"has {odd} columns, beside a cache of 8 bits; expected a multiple of 16, 32 at least",
            ),
        )
        if found := next(((path, what) for wrong, path, what in cannot if wrong), None):
            raise Mistakes(found)
        return self

    @model_validator(mode="after")
    def _lengths_are_of_a_call(self) -> Spec:
        if self.cache is not None and (size := next((i for i in self.inputs() if i.is_size), None)):
            tensor = next(i.name for i in self.inputs() if size.name in i.shape)
            said = f"declares `{tensor}` with `any` length, which calls over a cache do not take; expected a number, or a name"
            raise Mistakes((self.key_of(tensor), said))
        return self

    @model_validator(mode="after")
    def _order_can(self) -> Spec:
        """What a program that walks over tiles of keys cannot do."""
        if self.schedule.order == "q_outer":
            return self
        read = {read.tensor: path for path, part in self._parts() for read in part.reads()}
        read |= {i.name: path for path, part in self._parts() for i in part.inputs() if i.shape}
        tensor, home = next(iter(read.items()), ("", ("mask",)))
        cannot: tuple[tuple[bool, document.Path, str], ...] = (
            (self.dropout, ("dropout",), "cannot drop weights"),
            (self.mask.blocks() is not None, ("mask",), "visits no lists of blocks"),
            (bool(tensor), home, f"reads no `{tensor}`"),
            (
                self.head_dim.qk + self.head_dim.v > 256,
                ("head_dim",),
                "holds dK and dV of at most 256 columns together",
            ),
        )
        if found := next(((path, what) for wrong, path, what in cannot if wrong), None):
            path, what = found
            raise Mistakes(
                (path, f"asks for what `schedule: {{order: kv_outer}}` does not do: it {what}; expected `q_outer`")
            )
        return self

    @model_validator(mode="after")
    def _outputs_can(self) -> Spec:
        """Outputs are of programs that own tiles, and of calls that have all keys at hand; their names are theirs."""
        more = ", ".join(f"`{name}`" for name in self.outputs[1:])
        if not more:
            return self
        if self.cache is not None:
            raise Mistakes(
                (
                    ("outputs",),
                    f"asks for {more}, which calls over a cache do not give; expected `lse` alone beside `cache`",
                )
            )
        if self.schedule.order != "q_outer":
            raise Mistakes(
                (
                    ("outputs",),
                    f"asks for {more}, which `order: {self.schedule.order}` does not give; expected `q_outer`",
                )
            )
        if taken := next((i.name for i in self.inputs() if i.name in OF_OUTPUTS), None):
            has = f"declares `{taken}`, a name that modules with `outputs` have themselves"
            raise Mistakes((self.key_of(taken), f"{has}; expected another one"))
        return self

    @model_validator(mode="after")
    def _derivatives_have_names(self) -> Spec:
        """Generated code names the gradient and the tangent of an input after it."""
        learned = {i.name for i in self.learned()}
        for name in (i.name for i in self.inputs() if i.name[1:] in learned):
            what = {"d": "gradient", "t": "tangent"}.get(name[0])
            if what:
                has = f"declares `{name}`, the name that the {what} of `{name[1:]}` has in generated code"
                raise Mistakes((self.key_of(name), f"{has}; expected another one"))
        return self

    @property
    def trains(self) -> bool:
        """Whether its module has a backward."""
        return self.backward is not None

    @property
    def factors(self) -> str:
        """What has a factor of its own in a cache of 8 bits: `head`, `page`, or of a latent `columns`; empty where
        there are no factors."""
        if self.cache is None or not self.cache.dtype:
            return ""
        return "columns" if self.rope else self.cache.scale or "head"

    @property
    def rope(self) -> int:
        """Columns of a key that are not of its latent; 0 where values are apart."""
        return self.kv.latent.rope if self.kv else 0

    def _parts(self) -> Iterator[tuple[document.Path, Mask | Score]]:
        """The mask and the modifiers, each with the path of its key."""
        yield ("mask",), self.mask
        for i, score in enumerate(self.score):
            yield ("score", i) if len(self.score) > 1 else ("score",), score

    def key_of(self, tensor: str) -> document.Path:
        """The path of the mask or modifier that declares an input of the call."""
        return next(path for path, part in self._parts() if any(i.name == tensor for i in part.inputs()))

    def inputs(self) -> tuple[Input, ...]:
        """The run-time inputs of mask and modifiers."""
        return unique(i for part in (self.mask, *self.score) for i in part.inputs())

    def learned(self) -> tuple[Input, ...]:
        """The inputs that get gradients."""
        return tuple(i for i in self.inputs() if i.grad and self.trains)

    def derived(self) -> tuple[Derived, ...]:
        """What the wrapper computes from them."""
        return unique(d for part in (self.mask, *self.score) for d in part.derived())

    def reads(self) -> tuple[Read, ...]:
        """How mask and modifiers read tensors; each read has a name of its own."""
        return unique(read for part in (self.mask, *self.score) for read in part.reads())

    def visible(self) -> Bool:
        """The condition under which a query sees a key, with what the sharing of heads says of the K/V head."""
        return self.mask.expression().xreplace(SHARINGS[self.heads.sharing].known)

    def visible_by_key(self) -> Bool:
        """The same condition, as kernels that own keys have it."""
        return self.mask.by_key().xreplace(SHARINGS[self.heads.sharing].known)

    def modified(self) -> Expr:
        """The score that the softmax sees, as an expression in the scaled product `s`. It is a natural exponent."""
        score: Expr = symbol("s")
        for part in self.score:
            score = part.expression().xreplace({symbol("s"): score})
        return score.xreplace(SHARINGS[self.heads.sharing].known)

    def notes(self) -> tuple[tuple[document.Path, str], ...]:
        """What may not be what the author means: the path of the key, and the sentence that follows its name."""
        found = [(path, note) for path, part in self._parts() for note in part.notes()]
        numbers = frozenset(i.name for i in self.mask.inputs() if not i.shape and i.dtype == "i32")
        found += [(("mask",), TOO_LONG)] if is_too_long(self.mask.expression(), numbers) else []
        of_union = union_note(self.mask)
        return unique(iter(found + ([(("mask",), of_union)] if of_union else [])))

    def canonical(self) -> dict[str, Any]:
        """The spec as plain data with every default filled in; `score`, `backward`, `outputs`, the backend and the
        order of loops only where they say something."""
        unsaid = [name for name in ("backward", "outputs") if getattr(self, name) == Spec.model_fields[name].default]
        plain = self.model_dump(mode="json", exclude={"mask", "score", *unsaid})
        del plain["cache"], plain["kv"]
        if self.cache is not None:
            plain["cache"] = self.cache.model_dump(mode="json", exclude_none=True) or "contiguous"
        plain |= {"kv": self.kv.model_dump(mode="json")} if self.kv else {}
        for key in ("order", "backend", "split"):
            if plain["schedule"][key] == Schedule.model_fields[key].default:
                del plain["schedule"][key]
        plain |= {"score": [s.data() for s in self.score]} if self.score else {}
        plain |= {} if self.trains else {"backward": False}
        return {**plain, "mask": self.mask.data()}

    def hash(self) -> str:
        """A digest of the canonical form: equal specs, equal hash."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    schema["properties"]["mask"] = {**mask_schema(), "default": "none"}
    schema["properties"]["score"] = score_schema()
    schema["properties"]["head_dim"] = {
        "description": "width of a head: one number, or one for q and k and one for v",
        "anyOf": [
            {"type": "integer", "minimum": 16, "maximum": WIDEST_HEAD, "multipleOf": 8},
            {"$ref": "#/$defs/HeadDim"},
        ],
    }
    schema["properties"]["backward"]["anyOf"] = [{"const": False}, {"$ref": "#/$defs/Backward"}]
    schema["properties"]["cache"] = {
        "description": "where `attention.with_kvcache` reads keys and values",
        "anyOf": [{"enum": ["contiguous", "paged"]}, {"$ref": "#/$defs/Cache"}],
    }
    types = {"enum": list(ELEMENTS)}
    schema["properties"]["dtype"] = {
        "description": "element types the module accepts",
        "default": ["bf16", "fp16"],
        "anyOf": [types, {"type": "array", "minItems": 1, "uniqueItems": True, "items": types}],
    }
    outputs = {"enum": list(OUTPUTS)}
    schema["properties"]["outputs"] = {
        "description": "what calls can give beside the output; `lse` is always among them",
        "default": ["lse"],
        "anyOf": [outputs, {"type": "array", "minItems": 1, "uniqueItems": True, "items": outputs}],
    }
    return schema
