"""Checks of a call's arguments. The first invalid one raises an error of one sentence."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from attngen.runtime.memory import MAX_ROW_STRIDE
from attngen.runtime.private import (
    autocast_is_on,
    current_device,
    dispatch_modes,
    guard_of,
    is_tracing,
    transforms_are_active,
)
from attngen.runtime.shards import is_dtensor

MAX_ROWS = 2**29 - 1  # so that a sum of a position, a length and a mask's parameter (below 2**30) fits in 32 bits
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HEADS = {"mha": "as many", "mqa": "one K/V head", "gqa": "a multiple of the K/V heads"}
_KV_HEADS = {"mha": "Hq", "mqa": "1", "gqa": "Hkv"}


def kind(x: object) -> str:
    """Return what an argument is, for error texts: a tensor's layout, or the name of a type."""
    if is_dtensor(x):
        return "DTensor"
    if isinstance(x, torch.Tensor):
        return "nested tensor" if x.is_nested else f"{x.layout} tensor"
    return type(x).__name__


def is_watched() -> bool:
    """True if a compiler, a tracer, a transform or a dispatch mode sees calls."""
    return torch.compiler.is_compiling() or is_tracing() or transforms_are_active() or bool(dispatch_modes())


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if none of the three is of a tensor subclass (except Parameter), and nothing but autograd sees the call."""
    return type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and not is_watched()


def _device_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int | None:
    """Return the number of the device of three tensors, -1 if the device has no number.

    None if they differ in dtype or device, or if one is not dense, is of a tensor subclass other than Parameter, or is
    a lazily negated view.
    """
    if not (
        (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        and q.layout is k.layout is v.layout is torch.strided
        and (q.dtype is k.dtype is v.dtype and not (q.is_neg() or k.is_neg() or v.is_neg()))
    ):
        return None
    number = q.get_device()
    if q.is_cuda and k.is_cuda and v.is_cuda:
        return number if number == k.get_device() == v.get_device() else None
    return number if q.device == k.device == v.device else None


# The sizes B, Hq, Hkv, Nq and Nk of a call; then the strides of q, k and v, each without the last dimension.
Shapes = tuple[int, int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def shapes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shapes:
    """Return the sizes and strides of q, k and v."""
    (b, hq, nq, _), (_, hk, nk, _) = q.shape, k.shape
    return b, hq, hk, nq, nk, q.stride()[:3], k.stride()[:3], v.stride()[:3]


class Rules:
    """Checks of q, k and v: sharing of heads, head dimensions, element types. Interpreted modules accept CPU tensors
    too."""

    def __init__(
        self, sharing: str, width_qk: int, width_v: int, dtypes: tuple[torch.dtype, ...], interpreted: bool
    ) -> None:
        self.sharing, self.width_qk, self.width_v = sharing, width_qk, width_v
        self.dtypes, self.interpreted = dtypes, interpreted
        self.devices = ("cuda", "cpu") if interpreted else ("cuda",)
        # A guard (`guard_of`, as torch.compile has them) is a fast check that three tensors are like the valid
        # tensors from which it was made. Here are all guards, each with the number of the tensors' device, and the one
        # that was made or used last.
        self.guards: dict[tuple[object, ...], tuple[Callable[..., bool], int]] = {}
        self.last: tuple[Callable[..., bool], int] = (lambda *tensors: False), 0

    def admit(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Shapes | None]:
        """Return q, k and v, cast to the dtype of torch.autocast if that is on; and their shapes if kernels can read
        them in place.

        The shapes are None for tensors that the fast check does not accept, and always if a compiler, a tracer, a
        transform or a dispatch mode sees the call.

        Raises:
            ValueError or TypeError: one sentence that names the argument, what it is and what was expected.
        """
        watched = is_watched()
        shapes = None if watched else self._fit(q, k, v)
        if shapes is None or (autocast_is_on() and q.dtype != torch.get_autocast_dtype(q.device.type)):
            q, k, v = self.autocast(q), self.autocast(k), self.autocast(v)
            shapes = None if watched else self._fit(q, k, v)
        if shapes is None:
            self.check(q, k, v)
        return q, k, v, shapes

    def _fit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shapes | None:
        """Return the shapes of plain tensors that are valid, readable in place and on the current device, else None.
        This is the fast form of `check`."""
        try:
            (b, hq, nq, d), (bk, hk, nk, dk), of_v = q.shape, k.shape, v.shape
            (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = q.stride(), k.stride(), v.stride()
        except (AttributeError, TypeError, ValueError, RuntimeError):  # not tensors, not 4D, or sparse or nested ones
            return None
        guard_passes, device = self.last
        if not guard_passes(q, k, v):
            looked_up = self._device_of_unknown(q, k, v)
            if looked_up is None:
                return None
            device = looked_up
        if device >= 0 and device != current_device():
            return None
        shared = hq == hk if self.sharing == "mha" else hk == 1 if self.sharing == "mqa" else hk and not hq % hk
        if (
            shared
            and b == bk
            and d == dk == self.width_qk
            and of_v == (b, hk, nk, self.width_v)
            and q3 == k3 == v3 == 1
            and nq <= MAX_ROWS
            and nk <= MAX_ROWS
            and (q2 <= MAX_ROW_STRIDE or nq <= 1)
            and ((k2 <= MAX_ROW_STRIDE and v2 <= MAX_ROW_STRIDE) or nk <= 1)
        ):
            return b, hq, hk, nq, nk, (q0, q1, q2), (k0, k1, k2), (v0, v1, v2)
        return None

    def _device_of_unknown(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int | None:
        """Return `_device_of` tensors that do not pass the last guard; None also if the module is not for their dtype
        or device.

        This makes a guard for such tensors, or selects the existing one.
        """
        device = _device_of(q, k, v)
        if device is None or q.dtype not in self.dtypes or q.device.type not in self.devices:
            return None
        if guard_of is not None and not (q is k or q is v or k is v):  # guards do not support a tensor passed twice
            key = q.dtype, q.device, q.requires_grad, k.requires_grad, v.requires_grad
            guard = self.guards.get(key)
            # A guard made from a Parameter, or in inference mode, rejects other tensors with the same key.
            if guard is None or not guard[0](q, k, v):
                guard = self.guards[key] = guard_of(q, k, v), device
            self.last = guard
        return device

    def autocast(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, cast to the dtype of torch.autocast if that is on and the module was built for the dtype. SDPA does
        the same."""
        if (
            isinstance(x, torch.Tensor)
            and x.device.type in ("cuda", "cpu")
            and torch.is_autocast_enabled(x.device.type)
        ):
            dtype = torch.get_autocast_dtype(x.device.type)
            if dtype in self.dtypes and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
                return x.to(dtype)
        return x

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise ValueError or TypeError, in one sentence, for the first problem of q, k and v."""
        self.check_queries_and_keys(q, k)
        self._check_rows(q, "v", v, self.width_v, f"[B, {_KV_HEADS[self.sharing]}, Nk, {self.width_v}]")
        if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
            raise ValueError(
                f"attention: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; "
                "expected one batch size, and one number of heads and rows in k and v"
            )
        hq, hk = q.shape[1], k.shape[1]
        if (hq != hk) if self.sharing == "mha" else hk != 1 if self.sharing == "mqa" else (hq % hk if hk else hq):
            expected = f"{_HEADS[self.sharing]} (the spec says {self.sharing})"
            raise ValueError(f"attention: q has {hq} heads and k {hk}; expected {expected}")
        self.check_device("q", q)

    def check_device(self, name: str, x: torch.Tensor) -> None:
        """Raise ValueError, in one sentence, if kernels cannot run on a tensor's device."""
        if x.device.type not in self.devices:
            raise ValueError(
                f"attention: {name} is on {x.device}; expected a CUDA device, or TRITON_INTERPRET=1 in the environment "
                "before Triton is imported, to run on the CPU in Triton's interpreter"
            )

    def check_queries_and_keys(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Check q and k separately, as `check` does."""
        self._check_rows(q, "q", q, self.width_qk, f"[B, Hq, Nq, {self.width_qk}]")
        self._check_rows(q, "k", k, self.width_qk, f"[B, {_KV_HEADS[self.sharing]}, Nk, {self.width_qk}]")

    def _check_rows(self, q: torch.Tensor, name: str, x: torch.Tensor, width: int, shape: str) -> None:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_nested:
            raise TypeError(f"attention: {name} is a {kind(x)}; expected a dense tensor {shape}")
        if x.dim() != 4 or x.shape[3] != width:
            raise ValueError(f"attention: {name} has shape {list(x.shape)}; expected {shape}")
        if x.shape[2] > MAX_ROWS:
            raise ValueError(f"attention: {name} has {x.shape[2]} rows; expected at most 2**29 - 1")
        if x.dtype not in self.dtypes:
            known = " or ".join(map(str, self.dtypes))
            raise TypeError(f"attention: {name} is {x.dtype}; expected {known}, which this module was built for")
        if x.dtype != q.dtype:
            raise TypeError(f"attention: {name} is {x.dtype} and q {q.dtype}; expected one dtype")
        if x.device != q.device:
            raise ValueError(f"attention: {name} is on {x.device} and q on {q.device}; expected one device")
        if x.stride(3) != 1:
            raise ValueError(
                f"attention: the last dimension of {name} has stride {x.stride(3)}; expected 1: call .contiguous()"
            )

    def check_scale(self, scale: float) -> float:
        """Return the factor on the scores as a float. (For an int, Triton would compile another kernel.)"""
        none = f"or None for 1/sqrt({self.width_qk})"
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(f"attention: scale is a {type(scale).__name__}; expected a number, {none}")
        if not 1e-30 <= scale <= 1e6:
            raise ValueError(f"attention: scale is {scale}; expected a number from 1e-30 to 1e6, {none}")
        return float(scale)


def check_number(name: str, x: float, type_: type, least: int, meaning: str) -> None:
    """Raise ValueError or TypeError, in one sentence, if a scalar input of the mask or the scores is not a `type_`, is
    below `least`, or is 2**30 or more in absolute value.

    meaning: the input's description, for the sentence.
    """
    if isinstance(x, bool) or not isinstance(x, (int, float) if type_ is float else int):
        raise TypeError(
            f"attention: {name} is a {kind(x)}; expected {'a number' if type_ is float else 'an int'}: {meaning}"
        )
    if not -(2**30) < x < 2**30 or x < least:
        bounds = f"at least {least}" if x < least else "between -2**30 and 2**30"
        raise ValueError(f"attention: {name} is {x}; expected it to be {bounds}: {meaning}")


ShapePattern = list[Any]  # for each dimension: its length, a tuple of allowed lengths, or None for any length


def check_input(
    q: torch.Tensor,
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    shape: ShapePattern,
    meaning: str,
    more: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise ValueError or TypeError, in one sentence, if a tensor input of the mask or the scores is not a dense tensor
    of this dtype and shape on q's device.

    meaning: the input's description, for the sentence.
    more: other allowed dtypes.
    """
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_nested:
        raise TypeError(
            f"attention: {name} is a {kind(x)}; expected a dense {dtype} tensor {_shape_text(shape)}: {meaning}"
        )
    if x.dtype != dtype and x.dtype not in more:
        known = " or ".join(map(str, dict.fromkeys((dtype, *more))))
        raise TypeError(f"attention: {name} is {x.dtype}; expected {known} {_shape_text(shape)}: {meaning}")
    fits = (n is None or m in (n if isinstance(n, tuple) else (n,)) for m, n in zip(x.shape, shape))
    if x.dim() != len(shape) or not all(fits):
        raise ValueError(f"attention: {name} has shape {list(x.shape)}; expected {_shape_text(shape)}: {meaning}")
    if x.device != q.device:
        raise ValueError(f"attention: {name} is on {x.device} and q on {q.device}; expected one device")


def _shape_text(shape: ShapePattern) -> str:
    lengths = ("any" if n is None else " or ".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in shape)
    return f"[{', '.join(lengths)}]"


_LARGEST = 2**31 - 1  # of int32
# Dtypes of inputs that are converted: int64 to int32, floating-point dtypes to each other.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CONVERTED: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.int32: (torch.int64,),
    **dict.fromkeys(_FLOATS, _FLOATS),
}


def take_input(
    q: torch.Tensor, name: str, x: torch.Tensor, dtype: torch.dtype, shape: ShapePattern, meaning: str
) -> torch.Tensor:
    """Check an input, and return it as kernels read it: of `dtype`, made contiguous, then with dimensions of length 1
    expanded to the call's (stride 0).

    A convertible dtype is converted by an operation that autograd records, so the gradient has the given dtype. int64
    numbers are clamped to +-(2**31 - 1): to refuse larger ones, the host would have to wait for the device.
    """
    check_input(q, name, x, dtype, shape, meaning, _CONVERTED.get(dtype, ()))
    # The functions that derive tensors need the whole input, so it is gathered. Integer inputs of masks are small.
    if is_dtensor(x) and not x.is_floating_point():
        x = x.full_tensor()  # type: ignore[attr-defined]
    if x.dtype == torch.int64 and dtype == torch.int32:
        x = x.clamp(-_LARGEST, _LARGEST)
    x = (x if x.dtype == dtype else x.to(dtype)).contiguous()
    if any(isinstance(n, tuple) for n in shape):
        return x.expand(*(m if n is None else n[-1] if isinstance(n, tuple) else n for m, n in zip(x.shape, shape)))
    return x


def check_fields(q: torch.Tensor, plan: Any, **types: tuple[torch.dtype, ShapePattern]) -> None:
    """Raise ValueError or TypeError, in one sentence, if a plan's tensors do not have these dtypes and shapes."""
    for name, (dtype, shape) in types.items():
        check_input(q, f"plan.{name}", getattr(plan, name), dtype, shape, "what attention.plan makes")
