"""The fields of a spec, and the masks, inputs and expressions that follow from them."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
)
from pydantic_core import PydanticCustomError

from attngen.ir import Bool, Derived, Expr, Input, Read, symbol
from attngen.ir.dtypes import ELEMENTS, agree
from attngen.ir.heads import SHARINGS
from attngen.ir.names import OUTPUTS
from attngen.lang.part import unique
from attngen.masks import Mask, registry
from attngen.scores import Score
from attngen.spec import document
from attngen.spec.forms import parse_mask, parse_score
from attngen.spec.sections import (
    Backward,
    Cache,
    HeadDim,
    Heads,
    KeysValues,
    Positions,
    Schedule,
    parse_backward,
    parse_cache,
    parse_head_dim,
)

# Packages that Python, generated modules and attngen import: names that a module cannot have.
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


def _element_type(value: str) -> str:
    """Accept an element type of the table."""
    if value in ELEMENTS:
        return value
    raise PydanticCustomError("known", "no element type")


def _output_name(value: str) -> str:
    """Accept an output that calls can return."""
    if value in OUTPUTS:
        return value
    raise PydanticCustomError("given", "no output")


def _parse_list(value: Any) -> Any:
    """Convert a list to a tuple, and one word to a tuple of one."""
    return tuple(value) if isinstance(value, list) else value if isinstance(value, tuple) else (value,)


class SpecFields(BaseModel):
    """The fields of a spec, each checked on its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, title="attngen spec")
    name: str = Field(
        pattern="^[a-z][a-z0-9_]{0,63}$",
        description="an identifier of lower-case letters, digits and _, 64 at most, as in causal_mqa",
    )
    heads: Heads = Heads()
    head_dim: Annotated[HeadDim, BeforeValidator(parse_head_dim)] = Field(description="one number, or {qk: , v: }")
    dtype: Annotated[tuple[Annotated[str, AfterValidator(_element_type)], ...], BeforeValidator(_parse_list)] = Field(
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
        default=False, description="whether calls take `dropout_p` and `seed`, and drop probabilities"
    )
    backward: Annotated[Backward | None, BeforeValidator(parse_backward)] = Field(
        default=Backward(), description="how gradients are computed; false builds a module without a backward"
    )
    cache: Annotated[Cache | None, BeforeValidator(parse_cache)] = Field(
        default=None,
        description="where `attention.with_kvcache` reads keys and values: contiguous, or {paged: {page_size: 64}}",
    )
    kv: KeysValues | None = Field(
        default=None, description="how keys and values are stored: {latent: {rope: 64}} for MLA; separately by default"
    )
    positions: Positions | None = Field(
        default=None,
        description="calls have chunks of a longer sequence, for context parallelism, and say where each starts: "
        "{chunk: 384}",
    )
    schedule: Schedule = Schedule()
    outputs: Annotated[tuple[Annotated[str, AfterValidator(_output_name)], ...], BeforeValidator(_parse_list)] = Field(
        default=("lse",), description="further results of calls next to the output; `lse` is always among them"
    )

    @field_validator("name")
    @classmethod
    def _importable(cls, value: str) -> str:
        if keyword.iskeyword(value):
            raise ValueError(f"is `{value}`, a keyword of Python, so nothing could import it; expected another name")
        if value in PACKAGES:
            raise ValueError(f"is `{value}`, a package that its module would shadow; expected another name")
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

    @property
    def trains(self) -> bool:
        return self.backward is not None

    @property
    def factors(self) -> str:
        """Granularity of the scales of an 8-bit cache: `head`, `page`, or with a latent `columns`; empty without
        scales."""
        if self.cache is None or not self.cache.dtype:
            return ""
        return "columns" if self.rope else self.cache.scale or "head"

    @property
    def chunk(self) -> int:
        """Rows of a chunk, if calls have chunks of a sequence; else 0."""
        return self.positions.chunk if self.positions else 0

    @property
    def rope(self) -> int:
        """Rotated head_dim of a key next to its latent; 0 without a latent."""
        return self.kv.latent.rope if self.kv else 0

    def parts(self) -> Iterator[tuple[document.Path, Mask | Score]]:
        """The mask and the modifiers, each with the path of its key."""
        yield ("mask",), self.mask
        for i, score in enumerate(self.score):
            yield ("score", i) if len(self.score) > 1 else ("score",), score

    def key_of(self, tensor: str) -> document.Path:
        """The path of the mask or modifier that declares an input of the call."""
        return next(path for path, part in self.parts() if any(i.name == tensor for i in part.inputs()))

    def inputs(self) -> tuple[Input, ...]:
        """The run-time inputs of mask and modifiers."""
        return unique(i for part in (self.mask, *self.score) for i in part.inputs())

    def learned(self) -> tuple[Input, ...]:
        """The inputs that get gradients."""
        return tuple(i for i in self.inputs() if i.grad and self.trains)

    def derived(self) -> tuple[Derived, ...]:
        """The tensors that the wrapper computes from the inputs."""
        return unique(d for part in (self.mask, *self.score) for d in part.derived())

    def reads(self) -> tuple[Read, ...]:
        """The reads of tensors by mask and modifiers; each read has a unique name."""
        return unique(read for part in (self.mask, *self.score) for read in part.reads())

    def visible(self) -> Bool:
        """The condition under which a query sees a key, with the K/V head expressed by the sharing of heads."""
        return self.mask.expression().xreplace(SHARINGS[self.heads.sharing].known)

    def visible_by_key(self) -> Bool:
        """The same condition, for kernels whose programs own keys."""
        return self.mask.by_key().xreplace(SHARINGS[self.heads.sharing].known)

    def modified(self) -> Expr:
        """The score that the softmax sees, as an expression in the scaled product `s`. It is a natural exponent."""
        score: Expr = symbol("s")
        for part in self.score:
            score = part.expression().xreplace({symbol("s"): score})
        return score.xreplace(SHARINGS[self.heads.sharing].known)
