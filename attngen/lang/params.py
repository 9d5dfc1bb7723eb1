"""Declared parameters of an expression: tensors and scalars of the call, and values fixed in the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_serializer, model_validator

from attngen.errors import shown, suggest
from attngen.ir.names import BLOCKS
from attngen.lang.limits import LEAST_REAL, MAX_DIM, MAX_INT, MAX_REAL
from attngen.lang.names import ANY

Kind = Literal["bool", "int", "real"]
Dim = Literal["B", "H", "Hkv", "Nq", "Nk"]
DIMS: tuple[str, ...] = get_args(Dim)
Blocks = Annotated[str, StringConstraints(pattern=f"^{BLOCKS}$")]
SAID: dict[Kind, str] = {"bool": "a condition", "int": "an integer", "real": "a real number"}
_KINDS: dict[str, Kind] = {"fp32": "real", "int32": "int", "bool": "bool", "int": "int", "float": "real"}
_PARAM = "{tensor: [dimensions]}, {scalar: int}, {scalar: float} or {value: number}"
_KEYS = {"tensor": ("dtype", "grad"), "scalar": ("min",), "value": ()}


def _dims(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= 4:
        raise ValueError(f"is `{shown(value)}`; expected a list of 1 to 4 dimensions, as in [B, Nk]")
    for dim in value:
        if type(dim) is int and not 1 <= dim <= MAX_DIM:
            raise ValueError(f"has the dimension {shown(dim)}; expected a whole number from 1 to {MAX_DIM}")
        if type(dim) is not int and not (isinstance(dim, str) and (dim in (*DIMS, ANY) or re.fullmatch(BLOCKS, dim))):
            hint = "one of " + ", ".join(DIMS) + f", a whole number, `{ANY}`, or a number of blocks as in Nq/32"
            raise ValueError(f"has the dimension `{shown(dim)}`; expected {hint}")
    return tuple(value)


def _least(value: Any) -> Any:
    if type(value) is not int or abs(value) > MAX_INT:
        raise ValueError(f"is `{shown(value)}`; expected a whole number from {-MAX_INT} to {MAX_INT}")
    return value


def _value(value: Any) -> Any:
    if type(value) is int and abs(value) > MAX_INT:
        raise ValueError(
            f"is {shown(value)}; expected a whole number from {-MAX_INT} to {MAX_INT}: kernels add it in 32 bits"
        )
    if type(value) is float and not (value == 0 or LEAST_REAL <= abs(value) <= MAX_REAL):
        raise ValueError(f"is {shown(value)}; expected a finite number in the range of fp32")
    if type(value) not in (bool, int, float):
        raise ValueError(f"is `{shown(value)}`; expected a number, `true` or `false`")
    return value


class Param(BaseModel):
    """A parameter of an expression; exactly one of: a tensor of the call, a scalar of the call, a value fixed in the
    spec."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    tensor: Annotated[tuple[Dim | Blocks | Literal["any"] | int, ...], BeforeValidator(_dims)] | None = Field(
        default=None,
        description="a tensor of the call: 1 to 4 dimensions out of B, H, Hkv, Nq, Nk, whole numbers, `any` length, "
        "or blocks as in Nq/32 (rounded up)",
    )
    dtype: Literal["fp32", "int32", "bool"] = Field(default="fp32", description="element type of the tensor")
    grad: bool = Field(default=False, description="whether the fp32 tensor gets a gradient")
    scalar: Literal["int", "float"] | None = Field(default=None, description="a number of the call")
    min: Annotated[int, BeforeValidator(_least)] | None = Field(
        default=None, description="the least int that calls may pass"
    )
    value: Annotated[bool | int | float, BeforeValidator(_value)] | None = Field(
        default=None, description="a number fixed in the spec"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"is `{shown(data)}`; expected {_PARAM}")
        keys = [str(key) for key in data]
        forms = [form for form in _KEYS if form in keys]
        known = {*_KEYS, *(key for below in _KEYS.values() for key in below)}
        if unknown := next((key for key in keys if key not in known), None):
            raise ValueError(f"has the key `{shown(unknown)}`, which is not known; {suggest(unknown, known)}")
        if len(forms) != 1:
            raise ValueError(f"has {' and '.join(f'`{f}`' for f in forms) or 'no form'}; expected one of {_PARAM}")
        if empty := next((key for key in keys if data[key] is None), None):
            raise ValueError(f"has an empty `{empty}`; expected one of {_PARAM}")
        if stray := next((key for key in keys if key != forms[0] and key not in _KEYS[forms[0]]), None):
            home = next(form for form, below in _KEYS.items() if stray in below)
            raise ValueError(f"has `{stray}` with `{forms[0]}`; expected it only with `{home}`")
        if data.get("grad") is True and data.get("dtype", "fp32") != "fp32":
            raise ValueError(
                f"has `grad: true` and the dtype `{shown(data['dtype'])}`; only fp32 tensors get a gradient"
            )
        if data.get("grad") is True and ANY in tuple(data["tensor"] or ()):
            raise ValueError(f"has `grad: true` and a dimension of `{ANY}` length; expected a number, or a name")
        if "min" in keys and data["scalar"] != "int":
            raise ValueError(
                f"has `min` with the scalar `{shown(data['scalar'])}`; expected it only with `scalar: int`"
            )
        return data

    @model_serializer
    def data(self) -> dict[str, Any]:
        """Plain data with the defaults of its form filled in."""
        if self.tensor is not None:
            return {"tensor": list(self.tensor), "dtype": self.dtype, "grad": self.grad}
        if self.scalar is not None:
            return {"scalar": self.scalar} if self.min is None else {"scalar": self.scalar, "min": self.min}
        return {"value": self.value}

    @property
    def dims(self) -> tuple[str, ...]:
        """The tensor's dimensions by the IR's names (B, Hq, Hkv, Nq, Nk), as digits, or `any`; none for a number."""
        return tuple("Hq" if d == "H" else str(d) for d in self.tensor or ())

    @property
    def kind(self) -> Kind:
        """The kind of its elements in an expression."""
        if self.value is not None:
            return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "real"
        return _KINDS[self.scalar or self.dtype]
