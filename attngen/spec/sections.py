"""The sections of a spec as pydantic models: their keys, values and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)
from pydantic_core import PydanticCustomError

from attngen.errors import shown
from attngen.heuristics import UNIT
from attngen.ir.dtypes import LATENT_GROUP
from attngen.lang.limits import WIDEST_ROPE

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def _whole(value: Any) -> Any:
    """Accept only integers: a Literal would take True for 1 and 64.0 for 64."""
    if type(value) is int or value is None:
        return value
    raise PydanticCustomError("whole", "not a whole number")


class Heads(BaseModel):
    """How query heads share K/V heads; the counts come from the tensors of the call."""

    model_config = _STRICT
    sharing: Literal["mha", "mqa", "gqa"] = Field(
        default="mha",
        description="mha: one K/V head per query head; mqa: one in all; gqa: one per group of query heads",
    )


class HeadDim(BaseModel):
    """head_dim of q and k, and of v: multiples of 8 from 16 to 512, or more where values are part of a latent."""

    model_config = _STRICT
    qk: int = Field(ge=16, multiple_of=8)
    v: int = Field(ge=16, multiple_of=8)


class Latent(BaseModel):
    """The latent and the rotated part that DeepSeek's multi-head latent attention (MLA) stores per key."""

    model_config = _STRICT
    rope: int = Field(
        ge=16,
        le=WIDEST_ROPE,
        multiple_of=16,
        description="rotated head_dim of a key (RoPE), after that of the latent",
    )


class KeysValues(BaseModel):
    """How keys and values are stored."""

    model_config = _STRICT
    latent: Latent = Field(
        description="values are the first part of the keys, stored once in a cache; projections are absorbed in q"
    )


Block = Annotated[Literal[16, 32, 64, 128, 256], BeforeValidator(_whole)]


class Schedule(BaseModel):
    """The loop order; and overrides of tile selection, for the forward, dK/dV and dQ kernels on every device."""

    model_config = _STRICT
    order: Literal["q_outer", "kv_outer"] = Field(
        default="q_outer",
        description="q_outer: FlashAttention-2's order, one program per tile; "
        "kv_outer: FlashAttention-1's order, one program loops over all key tiles",
    )
    block_q: Block | None = Field(default=None, description="rows of a query tile")
    block_kv: Block | None = Field(default=None, description="rows of a key tile")
    stages: Annotated[Literal[1, 2, 3, 4, 5], BeforeValidator(_whole)] | None = Field(
        default=None, description="depth of the load pipeline"
    )
    warps: Annotated[Literal[1, 2, 4, 8, 16], BeforeValidator(_whole)] | None = Field(
        default=None, description="warps per program"
    )
    split: Literal["balanced"] | FixedSplits = Field(
        default="balanced",
        description="how the keys of a cache are split among programs (split-KV); balanced: evenly over the device; "
        "{keys: n}: in splits of n keys, so that the result of a sequence does not depend on the others in a call",
    )
    backend: Literal["auto", "triton", "hopper"] = Field(
        default="auto",
        description="triton: portable kernels; hopper: also warp-specialized Gluon kernels for that GPU; "
        "auto: where they are faster",
    )

    @property
    def keys_per_split(self) -> int:
        """Keys of a split of fixed length; 0 if splits are balanced."""
        return self.split.keys if isinstance(self.split, FixedSplits) else 0


class Paged(BaseModel):
    """Pages of a cache."""

    model_config = _STRICT
    page_size: Literal["any"] | Annotated[int, Field(ge=2, le=65536)] = Field(
        default="any", description="keys of a page; any: calls may have pages of any size"
    )


class Cache(BaseModel):
    """The layout of the keys and values of `attention.with_kvcache`."""

    model_config = _STRICT
    paged: Paged | None = Field(default=None, description="in pages, listed per sequence in a page table")
    dtype: Literal["fp8_e4m3"] | None = Field(
        default=None,
        description="8-bit element type of keys and values in the cache, with scales `k_scale` and `v_scale`, or with "
        f"one scale per key and {LATENT_GROUP} numbers of a latent; by default the type of q",
    )
    scale: Literal["head", "page"] | None = Field(
        default=None,
        description="granularity of scales: one per K/V head (`head`, the default), or per head and page (`page`)",
    )

    @property
    def page(self) -> str:
        """The rows of a page in the IR: empty without pages, a number, or `page_rows` for any."""
        return "" if self.paged is None else "page_rows" if self.paged.page_size == "any" else str(self.paged.page_size)


class FixedSplits(BaseModel):
    """Splits of fixed length."""

    model_config = _STRICT
    keys: int = Field(ge=UNIT, le=2**20, multiple_of=UNIT, description=f"keys of a split, a multiple of {UNIT}")


class Positions(BaseModel):
    """Calls have chunks of a sequence, as the ranks of context parallelism have, and say where each chunk starts."""

    model_config = _STRICT
    chunk: int = Field(
        default=384,
        ge=64,
        le=4096,
        multiple_of=64,
        description="rows of a chunk, which have to be a multiple of the rows of kernels' tiles: 384 allows all tiles "
        "up to 128 rows, and 192",
    )


class Backward(BaseModel):
    """How gradients are computed."""

    model_config = _STRICT
    deterministic: bool = Field(
        default=True,
        description="every sum in a fixed order; false lets learned inputs be read at any index, "
        "and adds their gradients with atomics",
    )


def parse_head_dim(value: Any) -> Any:
    return value if isinstance(value, (dict, HeadDim)) else {"qk": value, "v": value}


def parse_backward(value: Any) -> Any:
    """Parse `backward`: `false` becomes None, no backward. An empty key is refused, as `true` is, because it says
    nothing."""
    if value is None or value is True:
        given = "empty" if value is None else "the boolean `true`"
        raise ValueError(f"is {given}; expected `false`, for a module without gradients, or {{deterministic: ...}}")
    return None if value is False else value


_CACHES = "`contiguous`, {paged: {page_size: 64}}, {dtype: fp8_e4m3}, or both of these keys"


def parse_cache(value: Any) -> Any:
    """Parse `contiguous`, or a mapping with `paged`, `dtype` or both; `paged` without a size is of any page size."""
    if value is None:
        raise ValueError(f"is empty; expected {_CACHES}")
    if value == "contiguous":
        return {}
    if value == "paged" or value == {"paged": None}:
        return {"paged": {}}
    if not isinstance(value, (dict, Cache)) or value == {}:
        raise ValueError(f"is `{shown(value)}`; expected {_CACHES}")
    return value | {"paged": {}} if isinstance(value, dict) and value.get("paged", {}) is None else value
