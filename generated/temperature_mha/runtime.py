"""The runtime: checks, allocation, launches and autograd, the same in every module that attngen generates."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from operator import itemgetter, or_
from pathlib import Path
from torch.autograd import forward_ad
from types import CellType, FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import triton

# -------------------- Private interfaces of torch and Triton that make calls faster, each with a public fallback.

def _first(private: Callable[[], Any], public: Any) -> Any:
    """Return the result of `private`, or `public` if this version of torch or Triton does not have it."""
    try:
        return private()
    except Exception:
        return public


def _called(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return the function after one call that shows that it works."""
    function(*args)
    return function


def _entered(guard: Callable[[], Any]) -> Callable[[], Any]:
    """Return the context manager's class after entering it once to show that it works."""
    with guard():
        return guard


def _guards(like: torch.Tensor) -> Callable[..., Callable[..., bool]]:
    """Return the function that makes guards, after a check with an fp32 tensor of one dimension that guards distinguish
    tensors."""
    make: Any = torch._C._dynamo.guards.TensorGuards

    def guard_of(*tensors: torch.Tensor) -> Callable[..., bool]:
        sizes = [[None] * x.dim() for x in tensors]
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=sizes).check
        return check

    knows = guard_of(like)
    negated = like.new_empty(1, dtype=torch.complex64).conj().imag  # its sign is lazy
    others = negated, like[None], like.double(), like.to("meta"), torch.nn.Parameter(like)
    if not knows(like.new_empty(2)) or any(map(knows, others)):
        raise NotImplementedError
    return guard_of


# Makes an uninitialised tensor of (shape, strides, dtype) on the CPU, or on the current CUDA device.
empty_cpu = _first(
    lambda: _called(
        torch._C._dynamo.guards._empty_strided_cpu,  # type: ignore[attr-defined]
        (1,),
        (1,),
        torch.float32,
    ),
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
)
empty_cuda = _first(
    lambda: torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
# The number of the current CUDA device.
current_device = _first(lambda: torch._C._cuda_getDevice, torch.cuda.current_device)
# The address of the current stream of a CUDA device, which is given by its number.
current_stream = _first(
    lambda: torch._C._cuda_getCurrentRawStream, lambda device: torch.cuda.current_stream(device).cuda_stream
)
# Whether torch.autocast is on for some device.
autocast_is_on = _first(
    lambda: _called(torch._C._is_any_autocast_enabled),
    lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
)
# Whether torch.jit is tracing.
is_tracing = _first(lambda: _called(torch._C._is_tracing), torch.jit.is_tracing)  # type: ignore[attr-defined]
# Whether a transform of torch.func, or a dispatch mode, is active. No public interface exists; without the private ones
# the answer is yes.
transforms_are_active = _first(lambda: _called(torch._C._are_functorch_transforms_active), lambda: True)
dispatch_modes = _first(lambda: _called(torch._C._len_torch_dispatch_stack), lambda: 1)
# Makes a guard of tensors: a function that returns whether as many other tensors have the same class, layout, dtype,
# device, `requires_grad` and number of dimensions, under the same modes; sizes and strides may differ. It returns False
# if a tensor is passed twice. It aborts the process if a tensor has no sizes, such as a nested tensor. If `guard_of` is
# None, tensors have to be checked one by one.
guard_of = _first(lambda: _guards(torch.empty(1, device="cpu", dtype=torch.float32)), None)
# In this context operators run and autograd records nothing. If it is None, derivatives are registered by
# torch.library.
below_autograd = _first(lambda: _entered(torch._C._AutoDispatchBelowAutograd), None)


def in_forward_ad(*tensors: object) -> bool:
    """True if forward-mode derivatives may be needed: a dual level is open or, by the public fallback, a tensor has a
    tangent."""
    try:
        return bool(forward_ad._current_level >= 0)
    except AttributeError:
        return has_tangents(*tensors)


def has_tangents(*tensors: object) -> bool:
    """True if some of these have forward-mode tangents while a dual level is open."""
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def apply_of(function: Any) -> Callable[..., Any]:
    """Return an autograd function's `apply` for plain calls, without its check for transforms of torch.func."""
    found: Callable[..., Any] = _first(lambda: super(torch.autograd.Function, function).apply, function.apply)
    return found


def hooks_look_on() -> bool:
    """True if a profiler has hooks on Triton's launches. A direct launch would not call them."""
    try:
        hooks = triton.knobs.runtime
        return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
    except AttributeError:  # a hook that is set by assignment has no `calls`
        return True


def parts_of(compiled: Any, args: list[Any]) -> tuple[Any, ...] | None:
    """Return the parts of Triton with which a compiled kernel is launched directly, for arguments such as these, or
    None if this version of Triton lacks one.

    The parts are: a function that returns a device's stream; the launcher; the launcher's arguments after the stream;
    a bool, whether the launcher takes the kernel's arguments as one tuple; and a function that encodes descriptors in
    these arguments, or None if the launcher takes descriptors as they are.
    """
    with contextlib.suppress(AttributeError):
        stream, launcher = triton.runtime.driver.active.get_current_stream, compiled.run
        handles = compiled.function, compiled.packed_metadata, None, None, None
        run, before, packed = _inner_parts(launcher, *handles) or (launcher, handles, False)
        return stream, *_encoding_parts(run, before, packed, args)
    return None


def _inner_parts(launcher: Any, function: Any, metadata: Any, *hooks: None) -> tuple[Any, ...] | None:
    """Return the function that a CUDA launcher calls for a kernel without scratch memory, the arguments before those of
    the kernel, and whether the kernel's are one tuple. Triton 3.6 has one form of launcher, 3.7 and later another; for
    any other launcher, return None."""
    try:
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        before = function, launcher.launch_cooperative_grid, launcher.launch_pdl
        if hasattr(launcher, "kernel_signature"):
            return (
                launcher.launch,
                (*before, metadata, *hooks, None, None, launcher.arg_annotations, launcher.kernel_signature),
                True,
            )
        return launcher.launch, (*before, None, None, metadata, *hooks), False
    except AttributeError:
        return None


def _encoding_parts(run: Any, before: tuple[Any, ...], packed: bool, args: list[Any]) -> tuple[Any, ...]:
    """Return the last four items of `parts_of`.

    If a kernel has descriptors, Triton wraps its launcher in a function that encodes them at each launch. This returns
    the launcher inside, and a copy of the wrapping function that returns the launch's arguments and launches nothing.
    """
    first = (1, 1, 1, 0, *before)
    try:
        cells = dict(zip(run.__code__.co_freevars, run.__closure__))
        launcher = cells["launcher"].cell_contents
        cells["launcher"] = CellType(lambda *args: args)
        copied = FunctionType(run.__code__, run.__globals__, closure=tuple(cells.values()))

        def encode(args: list[Any]) -> list[Any]:
            return list(copied(*first, args)[-1] if packed else copied(*first, *args)[len(first) :])

        encode(args)
    except Exception:  # the launcher is not wrapped, or in another form
        return run, before, packed, None
    return launcher, before, packed, encode


# -------------------- Calls with DTensors: each rank computes its sequences, heads or queries; the forward needs no
# communication.

# Names of dimensions 0, 1 and 2 of q. The dimensions of the other tensors have the same names.
_DIMS = ("B", "Hq", "Nq")
_WORDS = {"B": "sequences", "Hq": "heads", "Nq": "queries"}
_KV = ("B", "Hkv", "Nk")


def is_dtensor(x: Any) -> bool:
    """True if x is a DTensor of torch.distributed."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(x, found.DTensor)


def check_local(argument: str, x: torch.Tensor) -> None:
    """Raise NotImplementedError if x is a DTensor in a call with an argument that is not available for DTensors."""
    if is_dtensor(x):
        raise NotImplementedError(
            f"attention: {argument} is not known of DTensors; expected a call of local tensors: to_local()"
        )


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return x; for a DTensor, a tensor with its global sizes, dtype and device over one row of memory, because plans
    read only sizes."""
    return torch.empty(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape) if is_dtensor(x) else x


def on_shards(
    call: Callable[..., Sequence[torch.Tensor]],
    shards: Sequence[str],
    tensors: Sequence[Any],
    dims: Sequence[Sequence[str]],
    numbers: Sequence[Any],
) -> list[torch.Tensor]:
    """Return the results of `call(*tensors, *numbers)` as DTensors with q's placements: each rank calls it with its
    shards.

    shards: the dimensions of q that may be sharded. tensors: q, k and v, which are DTensors, and operands, which are
    DTensors or replicated tensors. dims: the names of the dimensions of each operand. The gradient of a tensor that
    several ranks read is summed over these ranks.

    Raises:
        ValueError or TypeError: one sentence that says how the tensors are placed and what was expected.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    q, k, v, *_ = tensors
    for name, x in zip("qkv", (q, k, v)):
        if not is_dtensor(x) or x.device_mesh != q.device_mesh:
            given = f"{name} is on another mesh" if is_dtensor(x) else f"{name} is a {type(x).__name__}"
            raise TypeError(
                f"attention: q, k or v is a DTensor, and {given}; expected DTensors of one mesh for all three"
            )
    mesh: Any = q.device_mesh
    one_head = k.shape[1] == 1
    split = [_split(placement, shards) for placement in q.placements]
    _check_even(q, k, split, mesh)

    def part(at: int, x: Any) -> torch.Tensor | None:
        if x is None:
            return None
        names = _DIMS if at == 0 else _KV if at < 3 else dims[at - 3]
        placed: list[Any] = []
        summed: list[Any] = []
        for dim in split:
            of_x = "Hkv" if dim == "Hq" and dim not in names and not one_head else dim
            shard = of_x in names and (at < 3 or x.shape[names.index(of_x)] > 1)  # a dimension of 1 is replicated
            placed.append(Shard(names.index(of_x)) if shard else Replicate())
            summed.append(Partial() if dim and not shard else placed[-1])
        if not is_dtensor(x):
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if at < 3 and any(have != want and not have.is_replicate() for have, want in zip(x.placements, placed)):
            raise ValueError(
                f"attention: {'qkv'[at]} has placements {list(x.placements)} and q {list(q.placements)}; "
                f"expected {placed} of it, or a DTensor that is replicated"
            )
        local: torch.Tensor = x.redistribute(mesh, placed).to_local(grad_placements=summed)
        return local

    results = call(*(part(at, x) for at, x in enumerate(tensors)), *numbers)
    return [DTensor.from_local(x, mesh, q.placements, run_check=False) for x in results]


def _check_even(q: Any, k: Any, split: Sequence[str], mesh: Any) -> None:
    """Raise ValueError if the ranks do not get equal numbers of sequences, heads or queries.

    split: the dimension of q that each dimension of the mesh shards; empty where it replicates.
    """
    one_head = k.shape[1] == 1
    for dim in dict.fromkeys(filter(None, split)):
        ranks = 1
        for of_mesh, name in enumerate(split):
            ranks *= mesh.size(of_mesh) if name == dim else 1
        for name, x in (("q", q), ("k", k)):
            whole = name == "k" and (dim == "Nq" or (dim == "Hq" and one_head))
            count = x.shape[_DIMS.index(dim)]
            if count % ranks and not whole:
                raise ValueError(
                    f"attention: {name} has {count} {_WORDS[dim]}, sharded over {ranks} ranks; expected a multiple of "
                    f"{ranks}, so that each rank has the keys of its queries"
                )


def _split(placement: Any, shards: Sequence[str]) -> str:
    """Return the dimension of q that a placement shards; empty text if it replicates. Raise ValueError for other
    placements."""
    if placement.is_replicate():
        return ""
    dim = placement.dim if placement.is_shard() else None
    if dim is not None and dim % 4 < 3 and _DIMS[dim % 4] in shards:
        return _DIMS[dim % 4]
    possible = (
        " or ".join(f"Shard({_DIMS.index(name)}) ({_WORDS[name]})" for name in _DIMS if name in shards) or "no Shard"
    )
    why = (
        "; the mask or the scores count positions, heads or sequences, from 0 on each rank"
        if dim is not None and dim % 4 < 3
        else ""
    )
    raise ValueError(f"attention: q has the placement {placement}{why}; expected Replicate, {possible}")


# -------------------- Memory: which tensors kernels can read in place, and how results are laid out.

MAX_ROW_STRIDE = 2**23  # in elements: offsets inside a tile have 32 bits, and a tile has at most 256 rows
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, H, N, D], or a copy if kernels cannot read it in place: its rows are not contiguous, the stride
    between them is too large, or its sign is lazy."""
    if x.is_neg():
        x = x.resolve_neg()
    _, _, step, of_column = x.stride()
    if of_column == 1 and (step <= MAX_ROW_STRIDE or x.shape[2] <= 1):
        return x
    return x.contiguous()


def strides(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the strides of each tensor, without that of the last dimension."""
    return [x.stride()[:-1] for x in tensors]


def rows_layout(x: torch.Tensor, width: int) -> Layout:
    """Return shape and strides of a new [B, H, N, width]. Its dimensions have the order in memory of x's dimensions,
    unless the stride between rows would be too large."""
    b, h, n, _ = x.shape
    if x.is_contiguous():
        return (b, h, n, width), (h * n * width, n * width, width, 1)
    return _ordered_layout(x.shape, x.stride(), width)


def _ordered_layout(shape: tuple[int, ...], steps: tuple[int, ...], width: int) -> Layout:
    """Return `rows_layout` of a tensor with this shape and these strides, which is not contiguous."""
    shape = shape[:3]
    order = sorted(range(3), key=steps.__getitem__, reverse=True)
    if width * math.prod(shape[d] for d in order[order.index(2) + 1 :]) > MAX_ROW_STRIDE:
        order = [0, 1, 2]
    strides, step = [0, 0, 0, 1], width
    for d in reversed(order):
        strides[d] = step
        step = step * max(shape[d], 1)
    return (*shape, width), tuple(strides)


_known_layout = functools.lru_cache(maxsize=1024)(_ordered_layout)


def empty(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the device of x, which has to be the current device."""
    made: torch.Tensor = (empty_cuda if x.is_cuda else empty_cpu)(shape, steps, dtype)
    return made


class Notes(threading.local):
    """Records what a host program does in this thread while `taken` is entered: its launches, and the tensors that it
    fills with 0."""

    on = False
    launches: list[Any] = []
    zeros: list[torch.Tensor] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
        """Record into the lists (launches, tensors). The lists are dropped here afterwards, so that the tensors can be
        freed."""
        self.on, self.launches, self.zeros = True, [], []
        try:
            yield self.launches, self.zeros
        finally:
            self.on, self.launches, self.zeros = False, [], []


NOTES = Notes()


def zeros(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor like that of `empty`, filled with 0."""
    made = empty(x, shape, steps, dtype).zero_()
    if NOTES.on:
        NOTES.zeros.append(made)
    return made


def empty_rows(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised [B, H, N, width] with the layout of `rows_layout`, and the dtype of x by default."""
    dtype = dtype or x.dtype
    if not x.is_contiguous():
        return empty(x, *_known_layout(x.shape, x.stride(), width), dtype)
    b, h, n, _ = x.shape
    of_head = n * width
    made: torch.Tensor = (empty_cuda if x.is_cuda else empty_cpu)(
        (b, h, n, width), (h * of_head, of_head, width, 1), dtype
    )
    return made


def nothing(x: torch.Tensor, dimensions: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor without elements, with the dtype of x by default."""
    return x.new_empty((0,) * dimensions, dtype=dtype or x.dtype)


@functools.cache
def no_rows(device: torch.device) -> torch.Tensor:
    """Return a placeholder for a gradient of the LSE that is zero: [1, 1, 0] fp32. Its strides are multiples of 16 like
    those of most tensors."""
    return torch.empty_strided((1, 1, 0), (16, 16, 1), dtype=torch.float32, device=device)


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the device of its first argument, a tensor, is the current device while it runs, because
    Triton launches there."""

    def run(x: torch.Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.get_device() == current_device():
            return function(x, *args)
        with torch.cuda.device(x.device):
            return function(x, *args)

    return run


def by_group(
    x: torch.Tensor, group: int, fresh: bool = False, shaped: bool = False
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return (tensor, strides) to read x [B, Hq, N, ...] as [B, Hkv, group * N, ...]: the queries of all heads of a
    group, head after head.

    The tensor is x itself if its heads are contiguous in memory. Otherwise it is a copy; with `fresh`, an
    uninitialised tensor. With `shaped` it has these sizes and strides, as descriptors need; kernels that address rows
    by strides do not need that, and it takes time.
    """
    n, strides = x.shape[2], x.stride()
    if (n > 1 and strides[1] != strides[2] * n) or strides[1] > MAX_ROW_STRIDE * n:
        x = x.new_empty(x.shape) if fresh else x.contiguous()
        strides = x.stride()
    steps = (strides[0], group * strides[1], strides[2] if n > 1 else strides[1], *strides[3:])
    return x.as_strided((x.shape[0], x.shape[1] // group, group * n, *x.shape[3:]), steps) if shaped else x, steps


def copy_back(x: torch.Tensor, to: torch.Tensor) -> None:
    """Copy x to `to`, unless both are the same tensor."""
    if x is not to:
        to.copy_(x)


def room_for_splits(x: torch.Tensor, splits: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return (tensor, strides) of a buffer [B, Hkv, splits, Nk, D] for partial results of x [B, Hkv, Nk, D].

    With one split the tensor is x itself.
    """
    if splits == 1:
        of_batch, of_head, of_row, _ = x.stride()
        return x, (of_batch, of_head, 0, of_row)
    b, h, n, d = x.shape
    steps = (h * splits * n * d, splits * n * d, n * d, d)
    return empty(x, (b, h, splits, n, d), (*steps, 1), x.dtype), steps


# -------------------- Checks of a call's arguments. The first invalid one raises an error of one sentence.

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


# -------------------- Calls with a KV cache: their checks, and how they run.

OF_NUMPY = (torch.float16, torch.float32)  # dtypes that Triton's interpreter can multiply
Tensors = tuple[torch.Tensor, ...]


def _error(error: type[Exception], name: str, given: str, expected: str) -> Exception:
    return error(f"attention.with_kvcache: {name} {given}; expected {expected}")


GROUP = 128  # number of columns of a latent that share a factor
_NEAR = f"contiguous rows, at most {MAX_ROW_STRIDE} elements apart"


def _kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor of factors that is checked."""
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg()


def _is_dense(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.layout is torch.strided and not is_dtensor(x)


def _is_near(x: torch.Tensor, rows: int) -> bool:
    """True if kernels can read the rows of a tensor, which lie along its dimension `rows`."""
    return x.stride(3) == 1 and (x.stride(rows) <= MAX_ROW_STRIDE or x.shape[rows] <= 1) and not x.is_neg()


def _repeats_elements(x: torch.Tensor) -> bool:
    """True if elements of a tensor share memory, such as those of an expanded one; or its dimensions are not nested in
    memory."""
    end = 0
    for step, n in sorted((step, n) for n, step in zip(x.shape, x.stride()) if n > 1):
        if step <= end:
            return True
        end += step * (n - 1)
    return False


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors share an element. No tensor has two elements in the same place of memory. Tensors with
    different strides count as sharing only if their first elements are the same.

    Elements i of x and j of y are the same if the sum of (i - j) * strides is the distance of y from x. Because
    dimensions are nested in memory, the difference along the widest dimension has two possible values, and so on.
    """
    dims = [(a, b, n, m) for a, b, n, m in zip(x.stride(), y.stride(), x.shape, y.shape) if n > 1 or m > 1]
    distance = y.data_ptr() - x.data_ptr()
    if any(a != b for a, b, _, _ in dims) or distance % x.element_size():
        return distance == 0
    left = {distance // x.element_size()}
    for step, _, n, m in sorted(dims, reverse=True):
        left = {rest - d * step for rest in left for d in (rest // step, rest // step + 1) if -m < d < n}
    return 0 in left


def _distance(caches: Tensors) -> tuple[int, int]:
    """Return by how many bytes the last cache starts after the first, and how many bytes suffice so that two caches of
    their sizes do not overlap."""
    ends = (sum(step * (n - 1) for n, step in zip(x.shape, x.stride())) + 1 for x in caches)
    return caches[-1].data_ptr() - caches[0].data_ptr(), max(ends) * caches[0].element_size() if len(caches) > 1 else 0


def without_backward(*tensors: Any) -> None:
    """Raise NotImplementedError, in one sentence, if a call with a KV cache needs gradients or tangents of some of
    these."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise NotImplementedError("attention.with_kvcache has no backward; expected a call under torch.no_grad()")
    if in_forward_ad(*tensors) and has_tangents(*tensors):
        raise NotImplementedError("attention.with_kvcache has no forward mode; expected tensors without tangents")


class CacheRules:
    """Checks of caches, and of new keys and values.

    page: keys of a page; 0 if a call's tensors decide it, and None if a cache has no pages.
    latent: values are columns of the keys, so that there is one cache for both.
    dtype: dtype of the caches, if it is not that of q. These have factors then, as `scale` says: one for each "head",
    or for each "page" and head. For latents it is "columns": one for GROUP columns of a key, stored in the cache, whose
    rows of bytes have numbers, factors and rotated columns.
    """

    def __init__(
        self, rules: Rules, page: int | None, latent: bool = False, dtype: torch.dtype | None = None, scale: str = ""
    ) -> None:
        self.rules, self.page, self.dtype, self.scale = rules, page, dtype, scale
        self.widths = {"k": rules.width_qk} | ({} if latent else {"v": rules.width_v})
        self.new = dict(self.widths)  # head dimensions of new keys and values
        self.whole = 2 if dtype else 1  # row strides must be multiples of this, because kernels read as many as one
        if scale == "columns":
            # The ends of numbers and of factors in a row, in bytes.
            self.ends = (rules.width_v, rules.width_v + 4 * (rules.width_v // GROUP))
            self.widths, self.whole = {"k": self.ends[1] + 2 * (rules.width_qk - rules.width_v)}, 4
        rows = "B, S" if page is None else f"pages, {page or 'page_size'}"
        self.shapes = {f"{name}_cache": f"[{rows}, Hkv, {width}]" for name, width in self.widths.items()}
        # The last valid call: a guard and the layouts of its tensors; its factors; and, if it stored keys, the bytes
        # between its caches and how many bytes suffice so that they do not overlap.
        self.last: tuple[Callable[..., bool], list[Layout]] = (lambda *tensors: False), []
        self.last_scales: list[Any] = []
        self.distance = (0, 0)

    def admit(
        self,
        q: torch.Tensor,
        caches: Tensors,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor | None,
        new: tuple[torch.Tensor | None, ...],
        scales: Tensors = (),
        inputs: tuple[Any, ...] = (),
    ) -> tuple[torch.Tensor, Tensors, Tensors]:
        """Return q as kernels read it; the caches with heads before rows; and new keys and values, () if there are
        none.

        caches: of keys, and of values unless these are columns of the keys; new: new keys, and values, in the same
        order; scales: the factors of 8-bit caches; inputs: tensors that mask and scores read, which may require a
        gradient. Kernels read two numbers of an 8-bit cache as one of 16 bits.

        Raises:
            ValueError, TypeError or NotImplementedError: one sentence that names the argument, what it is and what was
            expected.
        """
        without_backward(q, *caches, *new, *scales, *inputs)
        given_new = tuple(x for x in new if x is not None)
        table = () if page_table is None else (page_table,)
        rest = (cache_seqlens, *table, *given_new)
        if (page_table is None) != (self.page is None) or not (
            self._knows(q, *caches, *rest) and self._knows_scales(scales)
        ):
            self._check(q, caches, cache_seqlens, page_table, new)
            self._check_scales(q, caches[0], scales)
            if q.stride(3) != 1 or (q.stride(2) > MAX_ROW_STRIDE and q.shape[2] > 1) or q.is_neg():
                q = q.resolve_neg().contiguous()
            self._remember(q, *caches, *rest)
            self.distance = _distance(caches) if given_new else (0, 0)
            self.last_scales = [_kind_of(x) for x in scales]
        if self.scale == "columns":
            return q, self._parts_of_rows(caches[0].transpose(1, 2), q.dtype), given_new
        if self.dtype is not None:
            return q, tuple(cache.view(torch.int16).transpose(1, 2) for cache in caches), given_new
        return q, tuple(cache.transpose(1, 2) for cache in caches), given_new

    def _parts_of_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """Split rows of bytes into pairs of numbers as 16-bit integers, the rotated columns, and the factors."""
        numbers, factors = self.ends
        return (
            rows[..., :numbers].view(torch.int16),
            rows[..., factors:].view(dtype),
            rows[..., numbers:factors].view(torch.float32),
        )

    def _knows(self, *tensors: Any) -> bool:
        """True if the tensors of a call are like those of the last valid call: in kind, sizes and strides, and with
        caches at multiples of 16 bytes that do not overlap if keys are stored. This is the fast form of `_check`."""
        like, layouts = self.last
        try:
            alike = [(x.shape, x.stride()) for x in tensors] == layouts
        except (AttributeError, TypeError, RuntimeError):  # not tensors, or sparse or nested ones
            return False
        caches = tensors[1 : 1 + len(self.widths)]
        odd = any(x.storage_offset() % self.whole for x in caches)
        if not alike or odd or is_watched() or not like(*tensors):
            return False
        starts, (known, enough) = [x.data_ptr() for x in caches], self.distance
        between = starts[-1] - starts[0]
        return not any(start % 16 for start in starts) and (between == known or abs(between) >= enough)

    def _knows_scales(self, scales: Tensors) -> bool:
        """True if factors are like those of the last valid call. One tensor may be passed for both."""
        try:
            return [_kind_of(x) for x in scales] == self.last_scales
        except (AttributeError, TypeError, RuntimeError):
            return False

    def _remember(self, *tensors: torch.Tensor) -> None:
        """Store a guard of the tensors of a valid call. Guards do not support a tensor that is passed twice."""
        if guard_of is not None and len(set(map(id, tensors))) == len(tensors) and not is_watched():
            self.last = guard_of(*tensors), [(x.shape, x.stride()) for x in tensors]

    def _check(
        self,
        q: torch.Tensor,
        caches: Tensors,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor | None,
        new: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Raise ValueError or TypeError, in one sentence, for the first invalid argument."""
        self._check_queries(q)
        self._check_cache(q, caches)
        self._check_numbers("cache_seqlens", cache_seqlens, q, [q.shape[0]], "[B]")
        if self.page is not None:
            self._check_numbers("page_table", page_table, q, [q.shape[0], None], "[B, max_pages]")
            assert page_table is not None
            if page_table.shape[1] * caches[0].shape[1] > MAX_ROWS:
                given = f"has room for {page_table.shape[1]} pages of {caches[0].shape[1]} keys"
                raise _error(ValueError, "page_table", given, "at most 2**29 - 1 keys of a sequence")
        rows: int | None = None
        for name, x, cache in zip(self.widths, new if any(x is not None for x in new) else (), caches):
            self._check_new(name, x, q, cache, [rows])
            assert x is not None
            rows = x.shape[2]
        if rows is not None:
            self._check_stored(caches, page_table)

    def _check_scales(self, q: torch.Tensor, k_cache: torch.Tensor, scales: Tensors) -> None:
        shape = [k_cache.shape[0], k_cache.shape[2]] if self.scale == "page" else [k_cache.shape[2]]
        text = "[pages, Hkv]" if self.scale == "page" else "[Hkv]"
        for name, x in zip(("k_scale", "v_scale"), scales):
            if not _is_dense(x) or x.dtype is not torch.float32 or x.device != q.device:
                given = f"is {x.dtype} on {x.device}" if _is_dense(x) else f"is a {kind(x)}"
                raise _error(TypeError, name, given, f"torch.float32 {text} on {q.device}, as q is")
            if list(x.shape) != shape:
                raise _error(ValueError, name, f"has shape {list(x.shape)}", f"{text}, and the cache has {shape}")
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                raise _error(
                    ValueError, name, f"has strides {list(x.stride())}", "1 for the last dimension: call .contiguous()"
                )
            if x.is_neg():
                raise _error(
                    ValueError, name, "is a negated view", "numbers as they lie in memory: call .resolve_neg()"
                )

    def _check_queries(self, q: torch.Tensor) -> None:
        expected = f"[B, Hq, Nq, {self.rules.width_qk}]"
        if not _is_dense(q):
            raise _error(TypeError, "q", f"is a {kind(q)}", f"a dense tensor {expected}")
        if q.dim() != 4 or q.shape[3] != self.rules.width_qk:
            raise _error(ValueError, "q", f"has shape {list(q.shape)}", expected)
        if q.dtype not in self.rules.dtypes:
            known = " or ".join(map(str, self.rules.dtypes))
            raise _error(TypeError, "q", f"is {q.dtype}", f"{known}, which this module was built for")
        self.rules.check_device("q", q)

    def _check_cache(self, q: torch.Tensor, caches: Tensors) -> None:
        rules, k_cache = self.rules, caches[0]
        for (name, width), x in zip(self.widths.items(), caches):
            self._check_rows(q, f"{name}_cache", x, width)
        if any(x.shape[:3] != k_cache.shape[:3] for x in caches):
            given = f"have shapes {' and '.join(str(list(x.shape)) for x in caches)}"
            raise _error(ValueError, "k_cache and v_cache", given, "one number of rows and heads in both")
        if self.page is None and k_cache.shape[0] != q.shape[0]:
            raise _error(ValueError, "k_cache", f"has {k_cache.shape[0]} sequences", f"{q.shape[0]}, as many as q has")
        if self.page and k_cache.shape[1] != self.page:
            raise _error(
                ValueError, "k_cache", f"has pages of {k_cache.shape[1]} keys", f"{self.page}, as the spec says"
            )
        hq, hk = q.shape[1], k_cache.shape[2]
        if (hq != hk) if rules.sharing == "mha" else hk != 1 if rules.sharing == "mqa" else (hq % hk if hk else hq):
            raise _error(
                ValueError,
                "q",
                f"has {hq} heads and k_cache {hk}",
                f"heads that are shared as the spec says, {rules.sharing}",
            )

    def _check_rows(self, q: torch.Tensor, name: str, x: torch.Tensor, width: int) -> None:
        if not _is_dense(x):
            raise _error(TypeError, name, f"is a {kind(x)}", f"a dense tensor {self.shapes[name]}")
        if x.dim() != 4 or x.shape[3] != width:
            raise _error(ValueError, name, f"has shape {list(x.shape)}", self.shapes[name])
        if x.dtype != (self.dtype or q.dtype) or x.device != q.device:
            expected = (
                f"{self.dtype} on {q.device}, the device of q" if self.dtype else f"{q.dtype} on {q.device}, as q is"
            )
            raise _error(TypeError, name, f"is {x.dtype} on {x.device}", expected)
        if not _is_near(x, 1):
            raise _error(ValueError, name, f"has strides {list(x.stride())}", _NEAR)
        if self.dtype and (x.storage_offset() % self.whole or any(step % self.whole for step in x.stride()[:3])):
            given = f"starts at element {x.storage_offset()} of its storage and has strides {list(x.stride())}"
            numbers = f"multiples of {self.whole}" if self.whole > 2 else "even numbers"
            raise _error(
                ValueError, name, given, f"{numbers}, as kernels read {self.whole} elements as one: call .clone()"
            )
        unit = 16 // x.element_size()  # TMA needs rows at multiples of 16 bytes
        if x.data_ptr() % 16 or any(step % unit for n, step in zip(x.shape[:3], x.stride()) if n > 1):
            raise _error(
                ValueError,
                name,
                f"starts at {x.data_ptr()} and has strides {list(x.stride())}",
                "rows at multiples of 16 bytes",
            )
        if x.shape[1] > MAX_ROWS or (self.page is not None and x.shape[1] < 1):
            raise _error(
                ValueError,
                name,
                f"has {x.shape[1]} rows",
                "1 to 2**29 - 1" if self.page is not None else "at most 2**29 - 1",
            )

    def _check_stored(self, caches: Tensors, page_table: torch.Tensor | None) -> None:
        """Raise ValueError, in one sentence, if stored keys would overwrite others."""
        for name, x in zip(self.shapes, caches):
            if x.numel() and _repeats_elements(x):
                given = f"has strides {list(x.stride())}, by which elements share memory"
                raise _error(
                    ValueError, name, given, "a place for each element, as new keys are stored: call .contiguous()"
                )
        if any(map(torch.Tensor.numel, caches)) and _share_memory(caches[0], caches[-1]) and len(caches) > 1:
            raise _error(
                ValueError, "k_cache and v_cache", "share memory", "two caches that share none, as new keys are stored"
            )
        if page_table is not None and page_table.shape[0] > 1 and not page_table.stride(0):
            given = f"has strides {list(page_table.stride())}, by which all sequences have the same pages"
            raise _error(ValueError, "page_table", given, "pages of its own for each, as new keys are stored")

    def _check_numbers(
        self, name: str, x: torch.Tensor | None, q: torch.Tensor, shape: list[int | None], text: str
    ) -> None:
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.int32:
            given = f"is {x.dtype}" if isinstance(x, torch.Tensor) else f"is a {kind(x)}"
            raise _error(TypeError, name, given, f"torch.int32 {text}, on the device")
        if x.dim() != len(shape) or any(n is not None and n != m for m, n in zip(x.shape, shape)):
            raise _error(ValueError, name, f"has shape {list(x.shape)}", f"{text}, and q has B = {q.shape[0]}")
        if x.device != q.device:
            raise _error(ValueError, name, f"is on {x.device} and q on {q.device}", "one device")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise _error(
                ValueError, name, f"has strides {list(x.stride())}", "1 for the last dimension: call .contiguous()"
            )

    def _check_new(
        self, name: str, x: torch.Tensor | None, q: torch.Tensor, cache: torch.Tensor, rows: list[int | None]
    ) -> None:
        text = f"[{q.shape[0]}, {cache.shape[2]}, new, {self.new[name]}]"
        if x is None or not _is_dense(x):
            expected = f"both k and v, {text}, or neither" if "v" in self.widths else f"a dense tensor {text}"
            raise _error(TypeError, name, f"is a {kind(x)}", expected)
        shape = [q.shape[0], cache.shape[2], *rows, self.new[name]]
        if x.dim() != 4 or any(n is not None and n != m for m, n in zip(x.shape, shape)):
            alike = ", with as many new ones in k and v" if "v" in self.widths else ""
            raise _error(ValueError, name, f"has shape {list(x.shape)}", text + alike)
        if x.dtype != q.dtype or x.device != cache.device:
            expected = f"{q.dtype} on {cache.device}, as {'q' if self.dtype else 'the cache'} is"
            raise _error(TypeError, name, f"is {x.dtype} on {x.device}", expected)
        if not _is_near(x, 2):
            raise _error(ValueError, name, f"has strides {list(x.stride())}", f"{_NEAR}: call .contiguous()")


@on_its_device
def call_with_cache(
    q: torch.Tensor,
    caches: Tensors,
    new: Tensors,
    of_cache: Tensors,
    operands: tuple[Any, ...],
    append: Any,
    decode: Any,
    interpreted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call with a KV cache, and return (out, lse): the host program `append`, if there are new keys, and then
    `decode`.

    caches: of keys, and of values; new: new keys and values. of_cache: the lengths, and the page table and the factors
    if there are any. operands: the other arguments of `decode`.
    """
    appended, dtype = 0, q.dtype
    if new:
        append(*new, *caches, *of_cache)
        appended = new[0].shape[2]
    if interpreted and dtype not in OF_NUMPY:
        q, caches = q.float(), tuple(cache.float() if cache.is_floating_point() else cache for cache in caches)
    out, lse = decode(q, *caches, *of_cache, *operands, appended)
    return out.to(dtype), lse


# -------------------- Warp-specialized kernels in Gluon: whether this machine can run them, and the tile counters that
# programs share.

CHOICE = "ATTNGEN_BACKEND"  # environment variable: `triton`, or the name of a file of warp-specialized kernels
# Versions of Triton for which the machine code of these kernels was inspected (docs/versions.md): no wgmma is
# serialized, and nothing writes an operand of a wgmma before its wait. The ptxas of Triton 3.6 to 3.8 can do that
# (triton#11781). Other versions were not inspected.
TRUSTED = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def warp_specialized(kernels: ModuleType, backend: str) -> ModuleType | None:
    """Return the file of a module's warp-specialized kernels; None if this Triton is not trusted to compile them, or
    the environment says `triton`.

    Raise ValueError if the environment asks for a backend that the module does not have. Warn once of a Triton that is
    not trusted.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", "triton", backend):
        raise ValueError(
            f"attention: {CHOICE} is `{asked}` in the environment; expected triton or {backend}, or nothing"
        )
    if asked == "triton":
        return None
    try:
        found = ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:  # Triton is installed under another name
        found = ""
    if found and found not in TRUSTED:
        known = f"{', '.join(TRUSTED)}, whose machine code of its kernels for {backend} was read"
        warnings.warn(f"attention: Triton {found} is not one of {known}: portable kernels are used", stacklevel=2)
        return None
    return importlib.import_module(f"{kernels.__name__.rpartition('.')[0]}.{backend}")


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
# By device: counters that no graph has taken yet. This module has to stay alive while graphs run.
_OF_GRAPHS: dict[int, Iterator[torch.Tensor]] = {}
# Number of captured launches of this module, per device, whose counters are zeroed in advance. Later launches, and
# launches that are captured before any other launch, zero theirs with a kernel of the graph.
CAPTURED = 2**14


def counter_of(device: int) -> torch.Tensor:
    """Return the tile counter of a launch: its first two numbers are 0 before the launch and after it.

    Launches on a stream run one after the other and share a counter. A launch that a graph captures gets its own,
    because the graph may run concurrently with others.
    """
    if torch.cuda.is_current_stream_capturing():
        for found in _OF_GRAPHS.get(device, ()):
            return found
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    key = device, current_stream(device)
    if key not in _COUNTERS:
        if device not in _OF_GRAPHS:
            _OF_GRAPHS.setdefault(device, map(_zeros(device, CAPTURED).__getitem__, range(CAPTURED)))
        _COUNTERS[key] = _zeros(device, 1)[0]
        # Launches may still run when the module is freed.
        _COUNTERS[key].record_stream(torch.cuda.current_stream(device))
    return _COUNTERS[key]


def _zeros(device: int, rows: int) -> torch.Tensor:
    """Return rows of four zeros: 16 bytes, because kernels need aligned counters.

    A separate thread allocates them: while torch.compile prepares a graph, allocations of its thread belong to the
    graph.
    """

    def made() -> torch.Tensor:
        found = torch.zeros(rows, 4, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()  # graphs and launches run on any stream
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


# -------------------- Tensor descriptors, with which TMA reads and writes tiles.

@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


def laid_out(descriptor: Any) -> Any:
    """Return a Triton descriptor as a Gluon descriptor, which also has the tile's layout in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x, block = descriptor.base, descriptor.block_shape
    return TensorDescriptor(x, descriptor.shape, descriptor.strides, block, _layout(*block[2:], x.dtype))


def descriptor(x: torch.Tensor, rows: int, columns: int = 0, gluon: bool = False) -> Any:
    """Return a descriptor with which TMA loads tiles of `rows` rows from x, [B, H, N, D]: Gluon's if `gluon`, else
    Triton's.

    In x [B, H, S, N, D], with S splits per head, each split counts as a head. A tile has `columns` columns; by default
    the next power of two from D on. Columns beyond D read as zeros. Rows have to start at multiples of 16 bytes; a
    tensor whose rows do not is copied.
    """
    if not x.numel():
        x = x.new_zeros((1, 1, 1, max(1, x.shape[-1])))  # a placeholder, of which no tile is read
    form = None if x.data_ptr() % 16 else _form(gluon, rows, columns, x.dtype, *_of_heads(x))
    if form is None:
        x = x.clone(memory_format=torch.contiguous_format)
        form = _form(gluon, rows, columns, x.dtype, *_of_heads(x))
        assert form is not None
    made: Any = object.__new__(form[0])
    vars(made).update(form[1], base=x)
    return made


def _of_heads(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of x [B, H, N, D], or of x [B, H, S, N, D] as [B, H * S, N, D]."""
    if x.dim() == 4:
        return x.shape, x.stride()
    (b, h, parts, n, d), (of_b, of_h, of_part, *rest) = x.shape, x.stride()
    return (b, h * parts, n, d), (of_b, of_part if parts > 1 else of_h, *rest)


@functools.lru_cache(maxsize=1024)
def _form(
    gluon: bool, rows: int, columns: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[type, dict[str, Any]] | None:
    """Return the class of a descriptor and its fields except the tensor; None if rows do not start at multiples of 16
    bytes.

    Constructing a descriptor, with its class's checks, takes ten times as long as filling in these fields.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    unit = 16 // dtype.itemsize
    if any(s % unit for n, s in zip(shape, strides[:3]) if n > 1):
        return None
    steps = [*(s if n > 1 else unit for n, s in zip(shape, strides[:3])), 1]
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made: Any = TensorDescriptor(like, list(shape), steps, [1, 1, rows, columns or triton.next_power_of_2(shape[3])])
    made = laid_out(made) if gluon else made
    return type(made), dict(vars(made))


class Described:
    """The arguments of a kernel that are passed by descriptor, and the cache of their encodings for the driver.

    An encoded descriptor is an address, sizes and strides, and holds no tensor. So it can be reused by each later call
    with such a tensor at that address.
    """

    MOST = 1024  # number of cached calls; one more clears the cache

    def __init__(self, places: Sequence[tuple[int, int, int]], gluon: bool = False) -> None:
        self.places = sorted(places)  # (position, rows and columns of a tile), as `descriptor` takes them
        self.gluon = gluon
        self.known: dict[tuple[Any, ...], list[tuple[int, list[Any]]]] = {}

    def put(self, args: list[Any], tensors: Sequence[Any]) -> None:
        """Replace the described arguments by descriptors of their tensors."""
        for at, rows, columns in self.places:
            args[at] = descriptor(tensors[at], rows, columns, self.gluon)

    def encoded(
        self,
        args: list[Any],
        tensors: Sequence[Any],
        strides: tuple[int, ...],
        encode: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Return the arguments with descriptors as `encode` encodes them; cached by addresses, sizes and strides.

        The list `args` has to stay alive until the launch: it may hold a descriptor of a copy.
        """
        key = strides, *[(args[at], tensors[at].shape) for at, _, _ in self.places]
        known = self.known.get(key)
        if known is not None:
            for at, numbers in known:
                args[at : at + 1] = numbers
            return args
        self.put(args, tensors)
        found = encode(args)
        more = (len(found) - len(args)) // len(self.places)  # arguments of an encoded descriptor after the first
        starts = [at + i * more for i, (at, _, _) in enumerate(self.places)]
        if all(args[at].base is tensors[at] for at, _, _ in self.places) and not any(
            isinstance(x, torch.Tensor) for x in found
        ):
            if len(self.known) >= self.MOST:
                self.known.clear()
            self.known[key] = [(at, found[at : at + more + 1]) for at in starts]
        return found


# -------------------- Launches: the schedule for a call's sizes, and the fast launch of a kernel that Triton has
# compiled.

_address: Callable[[Any], int] = torch.Tensor.data_ptr
_NONE: tuple[tuple[Any, ...], list[Launch]] = (), []
_HIP = bool(torch.version.hip)  # on AMD a compiled kernel also depends on which tensors take 2 GiB or more
# Launches by everything that a compiled kernel depends on; for a number that is only its kind (see `kind_of`). So the
# table is small, however many shapes the calls have.
LAUNCHES: dict[tuple[Any, ...], list[Launch]] = {}
# For each kernel, its last call with aligned tensors: everything that its launches depend on, and the launches.
LAST: dict[Kernel, tuple[tuple[Any, ...], list[Launch]]] = {}
# The recorded steps of host programs, by the form of their arguments (see `remembered`).
STEPS: dict[tuple[Any, ...], Any] = {}


def forget_launches() -> None:
    """Clear all caches of launches, because schedules or kernels have changed."""
    LAUNCHES.clear()
    LAST.clear()
    STEPS.clear()
    _specialized_configs.cache_clear()


def is_interpreted(kernel: Any) -> bool:
    """True if kernels run in Triton's interpreter: TRITON_INTERPRET=1 was in the environment when Triton was imported.

    Raise ImportError, in one sentence, if the interpreter does not work with the installed numpy.
    """
    if isinstance(kernel, triton.JITFunction):
        return False
    with contextlib.suppress(PackageNotFoundError):  # Triton is installed under another name
        if why := interpreter_fails(version("triton"), version("numpy")):
            raise ImportError(f"attention: {why}")
    return True


def interpreter_fails(triton_version: str, numpy_version: str) -> str:
    """Return why the interpreter of this Triton does not work with this numpy, and what to install; empty text if it
    works."""
    of_triton, of_numpy = (tuple(map(int, text.split(".")[:2])) for text in (triton_version, numpy_version))
    if of_triton >= (3, 7) or of_numpy < (2, 4):
        return ""
    clash = f"the interpreter of Triton {triton_version} does not work with numpy {numpy_version}"
    return f"{clash}; expected numpy below 2.4: pip install 'numpy<2.4'"


# The filter of warnings that the interpreter causes, as `warnings.filterwarnings` stores it. It is never removed,
# because filters belong to all threads.
_IN_INTERPRETER = ("ignore", None, RuntimeWarning, re.compile(r"triton\.runtime\.interpreter"), 0)


@contextlib.contextmanager
def interpreting(kernel: Any) -> Iterator[None]:
    """Enter this context to launch a kernel that may be interpreted. For a compiled kernel it does nothing.

    Only one thread of the process at a time may use the interpreter, because it replaces functions of Triton's language
    while a kernel runs. The lock is stored in the interpreter, where all generated modules find it. NumPy's warnings
    are off: rows without a visible key divide by zero, and a row with only NaN has no maximum.
    """
    if isinstance(kernel, triton.JITFunction):
        yield
        return
    import numpy
    from triton.runtime import interpreter

    if _IN_INTERPRETER not in warnings.filters:
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=_IN_INTERPRETER[3].pattern)
    with vars(interpreter).setdefault("attngen_lock", threading.RLock()), numpy.errstate(all="ignore"):
        yield


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs of a device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def device_class(kernels: ModuleType, device: torch.device) -> str:
    """Return the class of a device in the module's table of schedules. An unlisted device gets the class for other
    devices of its vendor."""
    if device.type != "cuda":
        return str(kernels.INTERPRETED_AS)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(kernels.DEVICE_CLASSES.get(properties.gcnArchName.split(":")[0], kernels.OTHER_HIP))
    return str(kernels.DEVICE_CLASSES.get((properties.major, properties.minor), kernels.OTHER_CUDA))


def is_scheduled(kernels: ModuleType, kernel: str, x: torch.Tensor, rows: int) -> bool:
    """True if a kernel that has only a warp-specialized form has a schedule for the dtype and device of x and for
    `rows`."""
    for most, config in _specialized_configs(kernels, kernel, x.device, x.element_size()):
        if most is None or rows <= most:
            return config is not None
    return False


@functools.cache
def _specialized_configs(kernels: ModuleType, kernel: str, device: torch.device, elem_bytes: int) -> Any:
    """Return ((largest number of rows, tile sizes and launch options), ...) of a kernel that has only a
    warp-specialized form; () if it cannot run."""
    for key, entries in kernels.SCHEDULES[kernel].items():
        if (
            key[:2] == (device_class(kernels, device), elem_bytes)
            and device.type == "cuda"
            and warp_specialized(kernels, key[2])
        ):
            return entries
    return ()


def schedules(kernels: ModuleType, kernel: str, x: torch.Tensor) -> Any:
    """Return ((largest number of rows, tile sizes and launch options), ...) of a kernel for the dtype and device of x.

    Raise ValueError if no tile fits the device.
    """
    # The interpreter uses the schedules of one element size for all dtypes.
    interpreted = x.device.type != "cuda" and x.is_floating_point()
    elem_bytes = kernels.INTERPRETED_BYTES if interpreted else x.element_size()
    found = kernels.SCHEDULES[kernel][device_class(kernels, x.device), elem_bytes]
    if isinstance(found, str):
        raise ValueError(f"attention: {found}")
    return found


def launch_configs(kernels: ModuleType, kernel: str, x: torch.Tensor) -> list[tuple[ModuleType, Any, Any]]:
    """Return [(file of the kernel, largest number of rows, tile sizes and launch options), ...] for the dtype and
    device of x.

    A warp-specialized kernel replaces the portable one if there is a file of such kernels, except for numbers of rows
    for which it has no options.
    """
    table = kernels.SCHEDULES[kernel]
    only_specialized = all(len(key) == 3 for key in table)
    portable = [] if only_specialized else [(kernels, most, config) for most, config in schedules(kernels, kernel, x)]
    mine = device_class(kernels, x.device), x.element_size()
    for key in (key for key in table if len(key) == 3 and key[:2] == mine and x.device.type == "cuda"):
        if file := warp_specialized(kernels, key[2]):
            few = max((most for most, config in table[key] if config is None), default=0)
            kept = [(kernels, few if most is None else min(few, most), config) for _, most, config in portable if few]
            return kept + [(file, most, config) for most, config in table[key] if config]
    return portable


def schedule(kernels: ModuleType, kernel: str, x: torch.Tensor, rows: int) -> dict[str, Any]:
    """Return tile sizes and launch options of a kernel for `rows` rows along the axis that it tiles."""
    config: dict[str, Any] = next(
        config for most, config in schedules(kernels, kernel, x) if most is None or rows <= most
    )
    return config


def kind_of(n: int) -> int:
    """Return the kind of an integer, for which Triton specializes a kernel: whether it is 1, is divisible by 16, or
    needs 64 bits."""
    return 1 if n == 1 else (0 if n % 16 else 2) + (0 if n < 2**31 else 4)


class Launch:
    """A kernel with one config of its schedule, for arguments of one kind. Only its first call goes through Triton's
    own launcher."""

    def __init__(
        self, kernel: Kernel, file: ModuleType, most: int | None, config: dict[str, Any], device: torch.device
    ) -> None:
        self.config = {name: value for name, value in config.items() if name != "KERNEL"}
        # A second warp-specialized kernel, for a range of rows, has its own name.
        self.file, self.name = file, config.get("KERNEL", kernel.name)
        self.most = float("inf") if most is None else most  # largest number of rows that the config is for
        self.block = config[kernel.tile] if kernel.tile else 0
        described = [(at, config[tile], 0) for at, tile in kernel.described] if config.get("TMA") else []
        self.most_programs = 0  # grid size of a persistent kernel: as many programs as the device can hold at once
        gluon = file is not kernel.kernels
        if gluon:
            described = [
                (at, config.get(rows) or rows, sum(columns)) for at, rows, *columns in file.DESCRIBED[self.name]
            ]
            self.most_programs = file.PERSISTENT.get(self.name, 0) * num_sms(device)
        self.described = Described(described, gluon=gluon) if described else None
        self.parts: tuple[Any, ...] | None = None

    def start(
        self,
        device: int,
        programs: int,
        tensors: tuple[torch.Tensor | None, ...],
        args: list[Any],
        more: tuple[Any, ...],
        strides: tuple[int, ...],
    ) -> None:
        """Start it. args: the addresses of the tensors, in a list that may be changed; more: the numbers and then the
        strides."""
        parts = None if hooks_look_on() else self.parts
        if self.most_programs:
            counter: Any = counter_of(device)
            more = (*more, counter if parts is None else _address(counter), programs)
            programs = min(programs, self.most_programs)
        if parts is None:
            args = list(tensors)  # Triton needs their dtypes, which addresses do not have
            if self.described:
                self.described.put(args, tensors)
            self.first(programs, args, more)
            return
        stream, run, before, packed, encode, device, constants = parts
        args += more + constants
        passed = args
        if self.described:
            if encode:
                passed = self.described.encoded(args, tensors, strides, encode)
            else:
                self.described.put(args, tensors)
        if packed:
            run(programs, 1, 1, stream(device), *before, tuple(passed))
        else:
            run(programs, 1, 1, stream(device), *before, *passed)

    def first(self, programs: int, args: list[Any], numbers: tuple[Any, ...]) -> None:
        """Launch it through Triton, which compiles it if necessary and calls a profiler's hooks. Store what a direct
        launch needs."""
        function = getattr(self.file, self.name)
        with interpreting(function):
            compiled = function[(programs, 1, 1)](*args, *numbers, **self.config)
        if compiled is None:  # the interpreter compiles nothing
            return
        constants = tuple(self.config[p.name] for p in function.params if p.is_constexpr)
        if parts := parts_of(compiled, [*args, *numbers, *constants]):
            self.parts = *parts, torch.cuda.current_device(), constants


class Kernel:
    """A kernel of the module, launched by calling it.

    tile: the name of the program tile's size, such as "BLOCK_Q"; empty if a program loops over all tiles.
    described: (position, name of the tile's size) of each tensor that a schedule may read by descriptor.
    heads: positions of numbers that have few values in a model, such as numbers of heads: there is a compiled kernel
    for each value.
    specialised: positions of numbers for which Triton specializes kernels by kind (see `kind_of`), as it does for
    strides.
    flags: names of the constants that a call passes. There is a compiled kernel for each value.
    """

    def __init__(
        self,
        kernels: ModuleType,
        name: str,
        tile: str = "",
        described: tuple[tuple[int, str], ...] = (),
        heads: tuple[int, ...] = (),
        specialised: tuple[int, ...] = (),
        flags: tuple[str, ...] = (),
    ) -> None:
        self.kernels, self.name, self.tile = kernels, name, tile
        self.described, self.specialised, self.flags = described, specialised, flags
        self.heads = itemgetter(*heads) if heads else len
        self.varied = itemgetter(*heads, *specialised) if heads or specialised else len

    def __call__(
        self,
        x: torch.Tensor,
        rows: int,
        programs: int,
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[Any, ...],
        strides: tuple[int, ...],
        flags: tuple[bool, ...] = (),
    ) -> None:
        """Launch it, with the config for the dtype and device of x and for `rows`.

        There are `programs` programs per tile of rows; or that many in total if programs loop over all tiles.
        """
        if flags:  # a tensor may be missing for one value of a flag
            args: Any = [t if t is None else t.data_ptr() for t in tensors]
            unit = gcd(16, *filter(None, args))
        else:
            args = list(map(_address, tensors))
            unit = gcd(16, *args)
        aligned = unit == 16 and not _HIP
        call = strides, self.varied(numbers), flags, x.dtype, x.get_device()
        last, launches = LAST.get(self, _NONE)
        if not aligned or call != last:
            launches = self._find(x, args, tensors, numbers, strides, flags, aligned)
            if aligned:
                LAST[self] = call, launches
        for launch in launches:
            if rows <= launch.most:
                break
        if launch.block:
            programs *= -(-rows // launch.block)
        more = numbers + strides
        if NOTES.on:
            NOTES.launches.append((launch, programs, more, strides, tensors) if aligned else None)
        launch.start(x.get_device(), programs, tensors, args, more, strides)

    def _find(
        self,
        x: torch.Tensor,
        addresses: list[Any],
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[Any, ...],
        strides: tuple[int, ...],
        flags: tuple[bool, ...],
        aligned: bool,
    ) -> list[Launch]:
        """Return the launches for arguments of these kinds, one for each config of its schedule."""
        wide = reduce(or_, strides)
        kinds: Any = None  # the usual kinds: addresses and strides are multiples of 16, strides fit in 32 bits
        if not aligned or wide & 15 or wide >= 2**31 or self.specialised:
            kinds = (
                *[kind_of(numbers[i]) for i in self.specialised],
                *[a is None or a % 16 == 0 for a in addresses],
                *map(kind_of, strides),
                *[t is None or not _HIP or t.untyped_storage().nbytes() < 2**31 for t in tensors],
            )
        key = self.name, x.dtype, x.get_device(), self.heads(numbers), flags, kinds
        launches = LAUNCHES.get(key)
        if launches is None:
            more = dict(zip(self.flags, flags))
            configs = launch_configs(self.kernels, self.name, x)
            launches = LAUNCHES[key] = [
                Launch(self, file, most, {**config, **more}, x.device) for file, most, config in configs
            ]
        return launches


# -------------------- Host programs that are recorded once for each form of their arguments, and then replayed.

_MOST = 1024  # number of forms that are remembered; one more clears them
_shape: Callable[[Any], torch.Size] = torch.Tensor.size
_strides: Callable[[Any], tuple[int, ...]] = torch.Tensor.stride


class Steps(NamedTuple):
    """The steps of a host program for arguments of one form. Its tensors are numbered: first its arguments, then those
    that it makes."""

    # Each new tensor: shape, strides, dtype, and whether it is filled with 0.
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]]
    # Each launch; the number of its programs; its numbers and then strides; the strides; a function that takes its
    # tensors out of all tensors.
    launches: list[tuple[Launch, int, tuple[Any, ...], tuple[int, ...], Callable[[list[Any]], tuple[Any, ...]]]]
    results: Callable[[list[Any]], tuple[Any, ...]]

    def repeat(self, given: Iterable[Any]) -> tuple[torch.Tensor, ...] | None:
        """Replay the steps for these arguments, and return the results; None if an address is not a multiple of 16."""
        tensors = list(given)
        addresses = [t if t is None else t.data_ptr() for t in tensors]
        if gcd(16, *filter(None, addresses)) != 16:
            return None
        x = tensors[0]
        for shape, strides, dtype, zero in self.made:
            made = empty(x, shape, strides, dtype)
            tensors.append(made.zero_() if zero else made)
            addresses.append(made.data_ptr())
        device = x.get_device()
        for launch, programs, more, strides, taken in self.launches:
            launch.start(device, programs, taken(tensors), list(taken(addresses)), more, strides)
        return self.results(tensors)


def _taking(numbers: Iterable[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that takes the items at these numbers out of a list."""
    at = tuple(numbers)
    return itemgetter(*at) if len(at) > 1 else lambda items: tuple(items[i] for i in at)


def _noted(
    given: Iterable[Any], results: tuple[torch.Tensor, ...], launched: list[Any], filled: list[torch.Tensor]
) -> Steps | None:
    """Return the steps of a program; None if they do not hold for all arguments of this form.

    That is the case if a tensor was passed twice, if an address is not a multiple of 16, and on AMD.
    """
    tensors = list(given)
    numbers = {id(x): at for at, x in enumerate(tensors)}
    if len(numbers) < len(tensors) or not all(launched):
        return None

    def number(x: torch.Tensor | None) -> int:
        if id(x) not in numbers:
            numbers[id(x)] = len(tensors)
            tensors.append(x)
        return numbers[id(x)]

    count = len(tensors)
    launches = [(*launch, _taking(map(number, taken))) for *launch, taken in launched]
    returned = _taking(map(number, results))
    zeros = set(map(id, filled))
    return Steps([(tuple(x.shape), x.stride(), x.dtype, id(x) in zeros) for x in tensors[count:]], launches, returned)


def remembered(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a host program so that it is recorded and replayed. Its first `count` arguments are tensors, of which
    the last may be None.

    The program may only make tensors and launch kernels, by the runtime. Its steps have to depend only on the device,
    on the sizes, strides and dtypes of its tensors, on whether the last one is None, and on its numbers.
    """

    def of(program: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(program)
        def run(*args: Any) -> Any:
            dense = args[: count if args[count - 1] is not None else count - 1]
            rest = args[len(dense) :]
            form = (
                program,
                args[0].get_device(),
                *[t.dtype for t in dense],
                *map(_shape, dense),
                *map(_strides, dense),
                *rest,
            )
            steps = STEPS.get(form)
            if steps is not None:
                found = steps.repeat(args[:count])
                return program(*args) if found is None else found
            with NOTES.taken() as (launches, zeros):
                results = program(*args)
            if steps := _noted(args[:count], results, launches, zeros):
                if len(STEPS) >= _MOST:
                    STEPS.clear()
                STEPS[form] = steps
            return results

        return run

    return of


# -------------------- Lists of visible blocks of scores. Kernels visit the blocks of a list one after the other.

_MOST = 64  # number of sizes whose plans are kept; one more clears them
_KEPT: dict[Any, dict[int, Any]] = {}


def kept_plan(make: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """Return the plan of a mask that reads no data and depends only on `sizes`: made once for each device and stream.

    A plan that is made while a graph is captured, or while torch.compile traces, belongs to the graph and is not kept.
    """
    if type(q) is not torch.Tensor and type(q) is not torch.nn.Parameter or torch.compiler.is_compiling():
        return make(q, k)
    plans = _KEPT.get((make, q.device, sizes), {})
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        # Existing plans are complete, because a capture starts with a wait for the device.
        return next(iter(plans.values()), None) or make(q, k)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    if stream not in plans:
        if len(_KEPT) >= _MOST:
            _KEPT.clear()
        _KEPT[make, q.device, sizes] = plans = {**plans, stream: make(q, k)}
    return plans[stream]


class BlockPlan(NamedTuple):
    """The visible blocks per row and per column of the block mask [B or 1, Hq or 1, Tq, Tk]. All tensors are int32.

    `kv_list` [B or 1, Hq or 1, Tq, Tk] has a list for each row of blocks: first the indices of visible blocks, in
    rising order, then the others. `kv_rank` [..., Tq, Tk + 1] has for each block the number of visible blocks before it
    in its row. `q_list` and `q_rank` are the same for the transposed mask.
    """

    kv_rank: torch.Tensor
    kv_list: torch.Tensor
    q_rank: torch.Tensor
    q_list: torch.Tensor


def transposed(mask: torch.Tensor) -> torch.Tensor:
    """Return a block mask [B, H, Tq, Tk] as [B, H, Tk, Tq]."""
    return mask.transpose(2, 3).contiguous()


def list_blocks(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ranks, lists) of every row of a block mask [B, H, Tq, Tk], as in BlockPlan."""
    rank = torch.nn.functional.pad(mask.cumsum(3, dtype=torch.int32), (1, 0))
    listed = torch.sort(mask, dim=3, descending=True, stable=True).indices.to(torch.int32)
    return rank.contiguous(), listed.contiguous()


def list_partial_blocks(seen: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (full ranks, ranks, lists) of every row. A list has first the full blocks, then the partial ones; a rank
    is a position in it."""
    full_rank = torch.nn.functional.pad(full.cumsum(3, dtype=torch.int32), (1, 0))
    rank = torch.nn.functional.pad((seen & ~full).cumsum(3, dtype=torch.int32), (1, 0)) + full_rank[..., -1:]
    listed = torch.sort(seen.to(torch.int8) + full, dim=3, descending=True, stable=True).indices.to(torch.int32)
    return full_rank.contiguous(), rank.contiguous(), listed.contiguous()


def seen_and_full(count: torch.Tensor, n_q: int, n_kv: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks [B, H, Tq, Tk]: blocks with a visible pair, and full blocks, in which all pairs are visible and
    in bounds.

    `count` [B, H, Tq, strips] has the number of visible pairs in each strip of a block.
    """
    columns = -(-n_kv // block)
    count = count.unflatten(3, (columns, count.shape[3] // max(columns, 1))).sum(4) if columns else count
    inside = torch.arange(count.shape[2], device=count.device) < n_q // block
    return count > 0, (count == block * block) & inside[:, None]


def check_block_mask(block_mask: torch.Tensor) -> torch.Tensor:
    """Return a block mask as [B or 1, Hq or 1, Tq, Tk].

    Raises:
        ValueError or TypeError: one sentence that says what the mask is and what was expected.
    """
    if not isinstance(block_mask, torch.Tensor) or block_mask.layout != torch.strided or block_mask.dtype != torch.bool:
        given = block_mask.dtype if isinstance(block_mask, torch.Tensor) else kind(block_mask)
        raise TypeError(
            f"attention: block_mask is a {given}; expected a dense torch.bool tensor of blocks, or what attention.plan "
            "made of one"
        )
    if not 2 <= block_mask.dim() <= 4:
        raise ValueError(
            f"attention: block_mask has shape {list(block_mask.shape)}; expected [B, Hq, Tq, Tk], or what broadcasts "
            "to it"
        )
    return block_mask.reshape((1,) * (4 - block_mask.dim()) + tuple(block_mask.shape))


def blocks_of_call(
    block_mask: torch.Tensor,
    q_chunks: torch.Tensor,
    kv_chunks: torch.Tensor,
    n_q: int,
    n_kv: int,
    chunk: int,
    block: int,
) -> torch.Tensor:
    """Return the part of a sequence's block mask that a call with chunks of the sequence has, [B or 1, Hq or 1, Tq, Tk]
    with the blocks of the call.

    block_mask: torch.bool [Tq, Tk] of the whole sequence, with up to two leading dimensions that broadcast to B and Hq.
    q_chunks, kv_chunks: where each chunk of `chunk` rows starts. n_q, n_kv: rows of the call. block: rows of a block.

    Raises:
        ValueError or TypeError: one sentence that says what the mask is and what was expected.
    """
    mask = check_block_mask(block_mask)
    for dim, starts, rows in ((2, q_chunks, n_q), (3, kv_chunks, n_kv)):
        row = torch.arange(0, rows, block, device=starts.device)
        at = (starts[row // chunk] + row % chunk) // block
        mask = mask.index_select(dim, at.to(mask.device))
    return mask


def check_blocks(q: torch.Tensor, k: torch.Tensor, blocks: BlockPlan, block: int) -> None:
    """Raise ValueError, in one sentence, if lists of blocks do not have the shapes for this call."""
    rows, columns = -(-q.shape[2] // block), -(-k.shape[2] // block)
    shape = list(blocks.kv_list.shape)
    if shape[2:] != [rows, columns] or shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"attention: block_mask has shape {shape}; expected {[q.shape[0], q.shape[1], rows, columns]}, or what "
            f"broadcasts to it: one element for each {block} x {block} scores"
        )
    shapes = ([rows, columns + 1], [rows, columns], [columns, rows + 1], [columns, rows])
    for name, x, last in zip(blocks._fields, blocks, shapes):
        if x.device != q.device:
            raise ValueError(f"attention: block_mask is on {x.device} and q on {q.device}; expected one device")
        if x.dtype != torch.int32 or list(x.shape) != shape[:2] + last or not x.is_contiguous():
            raise ValueError(
                f"attention: {name} of the BlockPlan is not what attention.plan makes; expected its tensors unchanged"
            )


def check_plan(q: torch.Tensor, k: torch.Tensor, plan: Any, lists: Sequence[Any], block: int, heads: list[int]) -> None:
    """Raise ValueError or TypeError, in one sentence, if a plan's lists do not fit a call.

    lists: (name, names of its last two dimensions) of each list: numbers of blocks of queries (Tq) or of keys (Tk), or
    one more (Tq1, Tk1). heads: the lists' lengths along B and H.
    """
    if (plan.n_q, plan.n_kv) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"attention: plan is of {plan.n_q} queries and {plan.n_kv} keys, the call of {q.shape[2]} and "
            f"{k.shape[2]}; expected what attention.plan makes of these q and k"
        )
    rows, columns = -(-q.shape[2] // block), -(-k.shape[2] // block)
    lengths = {"Tq": rows, "Tq1": rows + 1, "Tk": columns, "Tk1": columns + 1}
    for name, dims in lists:
        x = getattr(plan, name)
        check_input(
            q, f"plan.{name}", x, torch.int32, [*heads, *(lengths[d] for d in dims)], "what attention.plan makes"
        )
        if not x.is_contiguous():
            raise ValueError(f"attention: plan.{name} is not contiguous; expected what attention.plan makes")


# -------------------- Checks of data that kernels rely on (promises): lengths, starts, ids, page tables, block lists.

CHECK = "ATTNGEN_CHECK"  # environment variable: 1 checks all calls, 0 none of them
# For each promise: a bool tensor that is True where it is broken, and a function that makes the error text of an index.
Promise = tuple[torch.Tensor, Callable[..., str]]
Promises = Sequence[Promise]
_BY_PLAN = "what attention.plan makes"


def checks_data(interpreted: bool) -> bool:
    """True if calls without `check` check their data: as set by ATTNGEN_CHECK, by default only in Triton's interpreter.

    Raise ValueError, in one sentence, if the variable is neither 0 nor 1.
    """
    asked = os.environ.get(CHECK, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"attention: {CHECK} is `{asked}` in the environment; expected 1, 0, or nothing")
    return asked == "1" if asked else interpreted


def can_wait(x: torch.Tensor) -> bool:
    """True if the host may wait for the device of x: no CUDA graph is being captured, and no tracer or transform sees
    the call."""
    return not is_watched() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_data(call: str, *promises: Promises) -> None:
    """Raise ValueError, in one sentence, for the first broken promise. If none is broken, the host waits for the device
    once."""
    found = [(broken, say) for several in promises for broken, say in several if broken.numel()]
    if not found or not bool(torch.stack([broken.any() for broken, _ in found]).any()):
        return
    broken, say = next((broken, say) for broken, say in found if bool(broken.any()))
    raise ValueError(f"{call}: {say(*broken.nonzero()[0].tolist())}")


def promised(
    name: str,
    x: torch.Tensor,
    meaning: str,
    least: int | None = None,
    most: int | torch.Tensor | None = None,
    first: int | None = None,
    rising: bool = False,
    multiple: int = 1,
    rows: torch.Tensor | None = None,
) -> Promises:
    """Return the promises of an integer input `x`.

    least, most: bounds of each number; `most` may be a tensor that broadcasts to x. first: the first number of each
    row. rising: numbers never fall along a row. multiple: each number is a multiple of it. rows: int [B], how many
    numbers of each row of x [B, n] are checked; None: all.
    """
    found: list[Promise] = []
    counts = (
        torch.ones_like(x, dtype=torch.bool)
        if rows is None
        else torch.arange(x.shape[-1], device=x.device) < rows[:, None]
    )

    def given(*at: int) -> str:
        return f"{name}[{', '.join(map(str, at))}] is {int(x[at])}"

    if first is not None:
        wrong = (x[..., :1] != first) & counts[..., :1]
        found.append((wrong, lambda *at: f"{given(*at)}; expected {first}: {meaning}"))
    if rising:

        def falls(*at: int) -> str:
            *row, last = at
            return f"{given(*row, last + 1)}, after {int(x[at])}; expected numbers that never fall: {meaning}"

        found.append(((x[..., 1:] < x[..., :-1]) & counts[..., 1:], falls))
    if least is not None or most is not None:

        def bounds(*at: int) -> str:
            largest = int(most.expand(x.shape)[at]) if isinstance(most, torch.Tensor) else most
            both = least is not None and largest is not None
            text = (
                f"a number from {least} to {largest}"
                if both
                else f"at least {least}"
                if largest is None
                else f"at most {largest}"
            )
            return f"{given(*at)}; expected {text}: {meaning}"

        outside = torch.zeros_like(counts)
        outside = outside if least is None else outside | (x < least)
        outside = outside if most is None else outside | (x > most)
        found.append((outside & counts, bounds))
    if multiple > 1:
        rest = (x % multiple != 0) & counts
        found.append((rest, lambda *at: f"{given(*at)}; expected a multiple of {multiple}: {meaning}"))
    return found


def promised_of_plan(plan: Any, *names: str) -> Promises:
    """Return the promises of a plan's tensors whose numbers never fall: the semaphore order of some kernels relies on
    them."""
    return [
        promise for name in names for promise in promised(f"plan.{name}", getattr(plan, name), _BY_PLAN, rising=True)
    ]


def listed(blocks: Any) -> Promises:
    """Return the promises of block lists, a BlockPlan or a plan of data: all of them follow from one mask, as
    attention.plan makes them."""
    expected: dict[str, tuple[torch.Tensor, ...]]
    names: tuple[str, ...]
    first = getattr(blocks, "kv_full_rank", None)
    if first is None:
        seen = blocks.kv_rank.diff(dim=-1) > 0
        expected = {"kv": list_blocks(seen), "q": list_blocks(transposed(seen))}
        names = ("rank", "list")
    else:
        full = first.diff(dim=-1) > 0
        seen = full | (blocks.kv_rank.diff(dim=-1) > 0)
        by_q = list_partial_blocks(transposed(seen), transposed(full))
        expected = {"kv": list_partial_blocks(seen, full), "q": by_q}
        names = ("full_rank", "rank", "list")
    return [_as_made(blocks, f"{side}_{name}", made) for side in expected for name, made in zip(names, expected[side])]


def _as_made(blocks: Any, name: str, made: torch.Tensor) -> Promise:
    """Return the promise that a list of a plan is equal to `made`, which follows from the other lists."""
    x = getattr(blocks, name)

    def say(*at: int) -> str:
        expected = f"{int(made[at])}, which follows from its other lists: {_BY_PLAN}"
        return f"{name}{list(at)} of the plan is {int(x[at])}; expected {expected}"

    return x != made, say


def new_keys(new: Sequence[torch.Tensor]) -> int:
    """Number of new keys of each sequence in a call with a KV cache."""
    return new[0].shape[2] if new else 0


def promised_of_cache(
    caches: Sequence[torch.Tensor],
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    new: Sequence[torch.Tensor],
    first: int | torch.Tensor = 0,
    **scales: torch.Tensor,
) -> Promises:
    """Return the promises of a call with a KV cache.

    Lengths are not negative, and the cache has room for all keys, including the new ones. The pages that hold a
    sequence's keys exist, and no new key is stored in a row that holds another key. Factors are positive and finite.

    caches: [B or pages, Hkv, rows, columns]; cache_seqlens: [B]; page_table: [B, max_pages]; new: [B, Hkv, new,
    columns]; first: the first key of each sequence that is read, [B] or 0: pages before it may have been freed;
    scales: [Hkv], or [pages, Hkv].
    """
    rows, more = caches[0].shape[2], new_keys(new)
    room = rows if page_table is None else page_table.shape[1] * rows
    given = f" and the call {more} new ones" if more else ""

    def seqlens(b: int) -> str:
        expected = f"a number from 0 to {room - more}: the cache has room for {room} keys of a sequence{given}"
        return f"cache_seqlens[{b}] is {int(cache_seqlens[b])}; expected {expected}"

    found: list[Promise] = [((cache_seqlens < 0) | (cache_seqlens > room - more), seqlens)]
    used = None  # which pages hold keys
    if page_table is not None:
        of_pages, used = _promised_of_pages(caches[0].shape[0], rows, cache_seqlens, page_table, more, bool(new), first)
        found += of_pages
    for name, x in scales.items():

        def factor(*at: int, name: str = name, x: torch.Tensor = x) -> str:
            return f"{name}{list(at)} is {float(x[at])}; expected a positive, finite number"

        of_used = True if used is None or x.dim() < 2 else used[:, None]
        found.append((~((x > 0) & (x < torch.inf)) & of_used, factor))
    return found


def _promised_of_pages(
    pages: int,
    rows: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    more: int,
    stores: bool,
    first: int | torch.Tensor,
) -> tuple[list[Promise], torch.Tensor | None]:
    """Return the promises of a page table, and which pages hold keys, bool [pages]; None if there are no pages.

    rows: keys of a page. more: number of new keys of each sequence. stores: whether the call stores new keys. first: as
    in `promised_of_cache`.
    """
    room, keys = page_table.shape[1] * rows, (cache_seqlens + more)[:, None]
    stored_from = cache_seqlens[:, None] if stores else keys
    read_from = torch.minimum(stored_from, torch.as_tensor(first, device=keys.device).expand(len(keys))[:, None])
    start = torch.arange(0, room, rows, device=keys.device)
    held = (start < keys) & (start + rows > read_from)

    def table(b: int, page: int) -> str:
        expected = f"a number from 0 to {pages - 1}: the cache has {pages} pages, and sequence {b} keys in this one"
        return f"page_table[{b}, {page}] is {int(page_table[b, page])}; expected {expected}"

    found: list[Promise] = [(held & ((page_table < 0) | (page_table >= pages)), table)]
    if not pages:
        return found, None
    page = page_table.clamp(0, pages - 1).long()
    used = torch.zeros(pages, dtype=torch.int32, device=keys.device)
    used = used.scatter_add_(0, page.flatten(), held.int().flatten()) > 0
    if stores:
        position = torch.arange(room, device=keys.device)
        row = page.repeat_interleave(rows, 1) * rows + position % rows
        counted = held.repeat_interleave(rows, 1) & (position < keys)
        keys_of_row = torch.zeros(pages * rows, dtype=torch.int32, device=keys.device)
        keys_of_row.scatter_add_(0, row.flatten(), counted.int().flatten())

        def shared(b: int, key: int) -> str:
            given = f"page_table[{b}, {key // rows}] is {int(page_table[b, key // rows])}"
            expected = "a page of its own: each new key needs a row of the cache that no other key has"
            return f"{given}, where another sequence has keys, too; expected {expected}"

        found.append((counted & (position >= stored_from) & (keys_of_row[row] > 1), shared))
    return found, used


# -------------------- Dropout of a call: checks of its arguments, and the dropout mask of a seed.

def check_dropout(
    q: torch.Tensor, dropout_p: float, seed: int | torch.Tensor | None
) -> tuple[torch.Tensor | None, int, float]:
    """Return (seed on q's device, or None if nothing is dropped; the dropped share in 65536ths; 1 / the kept share).

    Raises:
        ValueError or TypeError: one sentence that names the argument, what it is and what was expected.
    """
    # `float` comes first because isinstance with an abstract class is slow.
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (float, numbers.Real)):
        raise TypeError(f"attention: dropout_p is a {type(dropout_p).__name__}; expected a number, 0 <= dropout_p < 1")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"attention: dropout_p is {dropout_p}; expected 0 <= dropout_p < 1")
    threshold = min(round(float(dropout_p) * 65536), 65535)
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            raise ValueError(
                f"attention: seed is {seed.dtype} {list(seed.shape)} on {seed.device}; expected torch.int64, "
                f"one element, on {q.device}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                f"attention: seed is a {type(seed).__name__}; expected an int, an int64 tensor of one element, or None"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"attention: seed is {seed}; expected an int of 64 bits")
    if threshold == 0:
        return None, 0, 1.0
    if seed is None:
        seed = torch.randint(2**63 - 1, (), device=q.device)
    elif not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)
    return seed, threshold, 65536 / (65536 - threshold)


def dropout_mask_by(keep_mask: Any) -> Callable[..., torch.Tensor]:
    """Make `attention.dropout_mask` from the module's kernel that generates the dropout mask."""

    def dropout_mask(
        shape: tuple[int, int, int, int],
        dropout_p: float,
        seed: int | torch.Tensor,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return which weights a call with this dropout_p and seed keeps: torch.bool of shape (B, Hq, Nq, Nk). For
        tests and debugging.

        The default device is that of the seed if it is a tensor, otherwise the current CUDA device, or the CPU if
        Triton's interpreter runs kernels.

        Raises:
            ValueError or TypeError: one sentence that names the argument, what it is and what was expected.
        """
        interpreted = is_interpreted(keep_mask)
        if device is None:
            device = seed.device if isinstance(seed, torch.Tensor) else "cpu" if interpreted else "cuda"
        if not (
            torch.cuda.is_available()
            if (kind_ := torch.device(device).type) == "cuda"
            else interpreted and kind_ == "cpu"
        ):
            raise ValueError(
                f"attention.dropout_mask: device is {device}; expected a CUDA device that this machine has, or "
                "TRITON_INTERPRET=1 in the environment before Triton is imported, to run on the CPU"
            )
        keep = torch.ones(shape, dtype=torch.bool, device=device)
        key, threshold, _ = check_dropout(keep, dropout_p, seed)
        if key is not None and keep.numel():
            batch, heads, n_q, n_kv = shape
            tiles = triton.cdiv(n_q, 32) * triton.cdiv(n_kv, 32)
            launch = functools.partial(keep_mask[tiles * batch * heads,], BLOCK_Q=32, BLOCK_KV=32)
            with interpreting(keep_mask):
                on_its_device(launch)(key, keep, threshold, heads, n_q, n_kv)
        return keep

    return dropout_mask


# -------------------- The host's part of the backward: the number of splits of a group of heads, and sums of inputs'
# gradients.

@functools.lru_cache(maxsize=1024)
def divisor(a: int, b: int) -> int:
    """Return the greatest divisor of a that is at most b; 1 if b is 0."""
    return next((n for n in range(min(a, b), 0, -1) if a % n == 0), 1)


def distance_parts(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, needed: bool, distances: int | None = None
) -> torch.Tensor:
    """Return a zeroed buffer for partial sums by distance, fp32 [B, Hq, rows, distances]; without elements unless
    `needed`.

    distances: their number; None for Nq + Nk, as in calls that have all rows of a sequence. Each query tile of the dQ
    kernel has its own rows, one for each key tile that a diagonal crosses there.
    """
    config = schedule(kernel.kernels, kernel.name, q, q.shape[2])
    crossed = (config["BLOCK_Q"] + config["BLOCK_KV"] - 2) // config["BLOCK_KV"] + 1  # key tiles per diagonal
    rows = triton.cdiv(q.shape[2], config["BLOCK_Q"]) * crossed
    shape = (*q.shape[:2], rows, q.shape[2] + k.shape[2] if distances is None else distances)
    return torch.zeros(shape if needed else (0, 0, 0, 0), device=q.device, dtype=torch.float32)


def by_distance(
    parts: torch.Tensor, x: torch.Tensor, dim: int, kept: tuple[int, ...], index: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a table x that is read by distance along its dimension `dim`.

    `parts` [B, Hq, rows, distances] are summed over rows, and over B and Hq unless `kept` names them. `index` has the
    table's index of each distance. index_put_ adds in a fixed order, on CUDA too.
    """
    sums = parts.sum((*(d for d in (0, 1) if d not in kept), 2)).movedim(-1, 0)
    whole = torch.zeros_like(x).movedim(dim, 0).contiguous()
    inside = (index >= -len(whole)) & (index < len(whole))
    sums = sums * inside.view(-1, *[1] * (sums.dim() - 1))
    whole.index_put_((index % len(whole),), sums, accumulate=True)
    return whole.movedim(0, dim).contiguous()


def placed(x: torch.Tensor, like: torch.Tensor, *index: Any) -> torch.Tensor:
    """Return the gradient of `like` that is x at `index` and zero elsewhere."""
    whole = torch.zeros_like(like)
    whole[index] = x
    return whole


# -------------------- Additional outputs of calls.

def check_max_score(requested: bool | str) -> None:
    """Raise ValueError or TypeError, in one sentence, if a call's `return_max_score` is neither a bool nor "head"."""
    if not isinstance(requested, (bool, str)):
        raise TypeError(f'attention: return_max_score is a {kind(requested)}; expected True, False or "head"')
    if requested not in (True, False, "head"):
        raise ValueError(
            f'attention: return_max_score is "{requested}"; expected True, for each query, or "head", for each head'
        )


def largest(max_score: torch.Tensor, requested: bool | str) -> torch.Tensor:
    """Return the largest scores [B, Hq, Nq] as they are, or for "head" the largest of each head [Hq]; -inf where no key
    is visible."""
    if requested != "head":
        return max_score
    return max_score.amax((0, 2)) if max_score.numel() else max_score.new_full(max_score.shape[1:2], -torch.inf)


# -------------------- Derivatives that calls refuse: each error is one sentence with what was expected.

def refuse_second_derivatives(*args: Any) -> Any:
    raise RuntimeError(
        "attention: its gradients cannot be differentiated again; expected only first derivatives, "
        "or naive attention where second ones are needed"
    )


def refuse_derivatives_of_tangents(*args: Any) -> Any:
    raise RuntimeError(
        "attention: the tangents that forward mode gives cannot be differentiated again; expected that of the output "
        "detached, as in MeanFlow's loss, or naive attention where its gradient is needed"
    )


def refuse_vmap(*args: Any) -> Any:
    raise NotImplementedError(
        "attention: torch.func.vmap cannot map it; expected the mapped dimension as part of B, the first of all tensors"
    )


def refuse_gradients(*tensors: Any) -> None:
    """Raise NotImplementedError, in one sentence, if one of these tensors needs a gradient or has a tangent. Modules
    without a backward call this."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        refuse_backward()
    if in_forward_ad(*tensors) and has_tangents(*tensors):
        refuse_forward_mode()


def refuse_backward(*args: Any, **more: Any) -> None:
    raise NotImplementedError(
        "attention: this module has no backward (its spec says `backward: false`); call it under torch.no_grad()"
    )


def refuse_forward_mode() -> None:
    raise NotImplementedError(
        "attention: this module has no forward mode (its spec says `backward: false` or `positions`); expected tensors "
        "without tangents"
    )


# -------------------- The arguments and results of a module's operators, and their declarations to torch.

class Signature(NamedTuple):
    """The arguments (operands) of a module's operators after q, k and v, and their results.

    schema: declarations of the operands, such as "Tensor slope, float scale". The first `tensors` of them are tensors.
    learned: positions of the operands that get gradients.
    summed: the dQ kernel writes partial sums of such a gradient, so it has to run for that gradient too.
    unordered: names of the operands whose gradients are added atomically, in no fixed order.
    results: the dtype of outputs, if it is not that of q.
    rows: row vectors that calls return in addition to the output, fp32 [B, Hq, Nq]. The last `flat` of these have no
    gradient.
    kept: the rows that the backward and forward mode read; empty if they read exactly those with a gradient.
    dims: dimensions of each tensor operand, such as "B Nk". shards: the dimensions of q that may be sharded, because
    neither the mask nor the scores depend on positions along them.
    """

    schema: str
    tensors: int
    widths: tuple[int, int]  # head dimensions of q and k, and of v
    learned: tuple[int, ...] = ()
    summed: bool = False
    unordered: tuple[str, ...] = ()
    results: torch.dtype | None = None
    rows: tuple[str, ...] = ("lse",)
    flat: int = 0
    kept: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    shards: tuple[str, ...] = ("B", "Hq")

    @property
    def smooth(self) -> tuple[str, ...]:
        """The rows that have a gradient."""
        return self.rows[: len(self.rows) - self.flat]


def schemas_of(signature: Signature) -> tuple[str, str, str]:
    """Return the declarations to torch of the forward, the backward and the jvp operator, without their names."""
    operands, count = signature.schema, len(signature.learned)
    rows = ", ".join(f"Tensor {name}" for name in signature.rows)
    kept = ", ".join(f"Tensor {name}" for name in signature.kept or signature.smooth)
    saved = f"Tensor q, Tensor k, Tensor v, Tensor out, {kept}"
    grad_rows = ", ".join(f"Tensor? grad_{name}" for name in signature.smooth)
    needs = "bool need_q, bool need_kv" + (", bool need_inputs" if count else "")
    gradients = "".join(f", Tensor d_{i}" for i in range(count))
    tangents = "".join(f", Tensor t_{i}" for i in range(count))
    results = ", ".join(f"Tensor tangent_{name}" for name in ("out", *signature.smooth))
    return (
        f"(Tensor q, Tensor k, Tensor v, {operands}) -> (Tensor out, {rows})",
        f"(Tensor grad_out, {grad_rows}, {saved}, {operands}, {needs}) -> (Tensor dq, Tensor dk, Tensor dv{gradients})",
        f"({saved}, Tensor tq, Tensor tk, Tensor tv, {operands}{tangents}) -> ({results})",
    )


# -------------------- A module's operators of torch.library, which torch can trace and autograd can record.

Results = tuple[torch.Tensor, ...]
_OF_NUMPY = (torch.float16, torch.float32)  # dtypes that Triton's interpreter can multiply


def _wants_order() -> bool:
    """True if torch is set to raise for algorithms that are not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _rows(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor like that of `empty_rows`, made by a public operator, for tracers."""
    shape, strides = rows_layout(addressable(x), width)
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


class Operators:
    """The operators `attngen::NAME_forward`, `attngen::NAME_backward` and `attngen::NAME_jvp` of a module, which run
    its host programs.

    The host programs are

        forward(q, k, v, *operands, shapes=None) -> (out, *rows)
        backward(grad_out, *grad_rows, q, k, v, out, *kept, *operands, need_q, need_kv[, need_inputs])
            -> (dq, dk, dv, *gradients)
        jvp(q, k, v, out, *kept, tq, tk, tv, *operands, *tangents) -> (tangent_out, *tangent_rows)

    where grad_rows and tangent_rows are of the rows that have a gradient, and gradients and tangents are of the learned
    operands. They get tensors that kernels can read in place. A module whose `backward` or `jvp` is None has no such
    operators. If another copy of the module has registered NAME, a `_` is appended to it.

    Operators exist until the process ends, because graphs of torch hold them but not the module; see `release` for the
    exception.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        forward: Callable[..., Results],
        backward: Callable[..., Results] | None,
        jvp: Callable[..., Results] | None,
        interpreted: bool,
    ) -> None:
        self.library = torch.library.Library("attngen", "FRAGMENT")
        self._registered: list[Callable[..., Any]] = []
        self._root = [self]  # the dispatcher holds this list, and through it this object
        self._traced = False
        while hasattr(torch.ops.attngen, f"{name}_forward"):
            name += "_"
        self.name, self.signature, self.interpreted = name, signature, interpreted
        self.learned = tuple(3 + i for i in signature.learned)  # positions among all arguments
        self.numbers_at = 3 + signature.tensors  # position of the first argument that is not a tensor
        self.host_forward: Any = forward
        self.host_backward: Any = backward
        self.host_jvp: Any = jvp
        self.run_backward = on_its_device(self._backward)
        read = signature.kept or signature.smooth
        self.smooth, self.kept = len(signature.smooth), len(read)
        # Takes the output and the kept rows out of the results.
        self.keep = itemgetter(0, *(1 + signature.rows.index(name) for name in read))
        of_forward, of_backward, of_jvp = schemas_of(signature)
        self.forward = self.define("forward", of_forward, self._forward, self.fake_forward)
        self.backward: Any = backward and self.define("backward", of_backward, self._backward, self._fake_backward)
        self.jvp: Any = jvp and self.define("jvp", of_jvp, self._jvp, self._fake_jvp)
        # Calls that autograd records: of the operator; of the host program, for only the output and for all results.
        self.recorded = _recorded_operator(self)
        self.recorded_backward: Any = backward and _recorded_once(self.backward, refuse_second_derivatives)
        self.recorded_jvp: Any = jvp and _recorded_once(self.jvp, refuse_derivatives_of_tangents)
        self.apply = apply_of(_recorded_calls(self, forward, with_rows=False))
        self.apply_with_rows = apply_of(_recorded_calls(self, forward, with_rows=True))
        self.no_rows = (None,) * len(signature.rows)
        self._register_autograd()

    def define(self, suffix: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """Define the operator NAME_suffix: `kernel` runs it, `fake` returns results of the right shapes to tracers."""
        self.library.define(f"{self.name}_{suffix}{schema}")
        op = getattr(getattr(torch.ops.attngen, f"{self.name}_{suffix}"), "default")  # noqa: B009 - typed as a module
        self.library.impl(op, self._weak(on_its_device(kernel)), "CompositeExplicitAutograd")
        torch.library.register_fake(op.name(), self._weak(self._noting(fake)), lib=self.library)
        torch.library.register_vmap(
            op.name(), functools.partial(weakref.proxy(refuse_vmap), self._root), lib=self.library
        )
        return op

    def _weak(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a weak proxy of a function for the dispatcher, so that the dispatcher does not keep alive what the
        function holds. The function lives as long as this object."""
        self._registered.append(function)
        made: Callable[..., Any] = weakref.proxy(function)
        return made

    def _noting(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a note that a tracer has called it: from then on the operators are kept."""

        def traced(*args: Any) -> Any:
            self._traced, self._root[:] = True, [self]
            return fake(*args)

        return traced

    def release(self) -> None:
        """Allow the operators and the module to be freed once nothing in Python holds the module. Calls that autograd
        recorded hold it.

        Operators that a tracer has seen are kept, because its graph holds only the operators, and would call freed
        ones. The caller has to know that none was traced with real tensors, which is not seen here, and that no CUDA
        graph has captured a call.
        """
        if not self._traced:
            self._root.clear()

    def __call__(
        self,
        shapes: Shapes | None,
        return_rows: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *operands: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return (out, *rows); without `return_rows` the rows may be None.

        With `shapes`, q, k and v are plain and readable in place, on the current device, so no dispatcher is needed.
        """
        if shapes is None or in_forward_ad(q, k, v) or (self.interpreted and q.dtype not in _OF_NUMPY):
            return self._through_dispatcher(q, k, v, *operands)
        learned = self.signature.learned
        needed = (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (learned and any(operands[i].requires_grad for i in learned))
        )
        if needed and torch.is_grad_enabled():
            if return_rows:
                return self.apply_with_rows(q, k, v, *operands, shapes)
            return self.apply(q, k, v, *operands, shapes), *self.no_rows
        return self.host_forward(q, k, v, *operands, shapes)

    def define_key_mass(self, schema: str, kernel: Callable[..., Any]) -> Any:
        """Define `attngen::NAME_key_mass`, (q, k, lse, *operands) -> [B, Hq, Nk] fp32, which the host program
        `kernel` computes."""

        def run(*args: Any) -> Any:
            q, k, *rest = self._multiplied(*args)
            return kernel(addressable(q), addressable(k), *rest)

        def fake(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
            return q.new_empty((*q.shape[:2], k.shape[2]), dtype=torch.float32)

        return self.define("key_mass", schema, run, fake)

    def _multiplied(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments in dtypes that can be multiplied. Triton's interpreter cannot multiply dtypes that NumPy
        lacks, such as bf16: it gets fp32 instead."""
        dtype = args[0].dtype
        if self.interpreted and dtype not in _OF_NUMPY:
            return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in args)
        return args

    def _through_dispatcher(self, *args: Any) -> Results:
        """Call the operator; in the interpreter, with dtypes that it can multiply. A transform of torch.func sees the
        recorded call instead."""
        if any(map(is_dtensor, args[:3])):
            return self._on_shards(*args)
        dtype, args = args[0].dtype, self._multiplied(*args)
        out, *rows = self.recorded.apply(*args) if _is_transformed() else self.forward(*args)
        return out.to(self.signature.results or dtype), *rows

    def _on_shards(self, *args: Any) -> Results:
        """Run a call with DTensors: the operator on each rank's shards."""
        tensors, numbers = args[: self.numbers_at], args[self.numbers_at :]
        if any(
            x is not None and "? seed" in declared
            for x, declared in zip(tensors[3:], self.signature.schema.split(", "))
        ):
            raise NotImplementedError(
                "attention: dropout counts sequences and heads from 0 on each rank, so that all would drop the same "
                "weights; expected dropout_p=0 of DTensors, or a call of local tensors with a seed for each rank"
            )
        dims = [dims.split() for dims in self.signature.dims]
        return tuple(on_shards(self._through_dispatcher, self.signature.shards, tensors, dims, numbers))

    # ------------------------------------------------------------------ what the dispatcher calls

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        return self.host_forward(addressable(q), addressable(k), addressable(v), *operands)

    def _backward(self, grad_out: torch.Tensor, *args: Any) -> Results:
        """Run the host program. `args`: the gradients of rows, None for zero; q, k and v; the output, the rows, the
        operands; which gradients are needed."""
        signature = self.signature
        grad_rows, (q, k, v, *saved) = args[: self.smooth], args[self.smooth :]
        if signature.unordered and saved[-1] and _wants_order():
            raise RuntimeError(
                f"attention: the gradient of {', '.join(signature.unordered)} is added atomically, in no fixed order; "
                "expected torch.use_deterministic_algorithms(False), or a spec without `deterministic: false`"
            )
        grad_rows = tuple(no_rows(q.device) if x is None else x.resolve_neg().contiguous() for x in grad_rows)
        q, k, v = addressable(q), addressable(k), addressable(v)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in saved):  # hooks of saved tensors may return these
            saved = [x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in saved]
        return self.host_backward(addressable(grad_out), *grad_rows, q, k, v, *saved)

    def _jvp(self, q: torch.Tensor, *args: Any) -> Results:
        """Run the host program. `args`: k, v, the output, the rows; tangents of q, k and v; the operands; tangents of
        learned operands."""
        rows, numbers = 3 + self.kept, len(self.signature.learned)
        k, v, out = map(addressable, args[:3])
        tangents = map(addressable, args[rows : rows + 3])
        operands, learned = args[rows + 3 : len(args) - numbers], map(_by_elements, args[len(args) - numbers :])
        return self.host_jvp(
            addressable(q), k, v, out, *map(_by_elements, args[3:rows]), *tangents, *operands, *learned
        )

    def _fake_jvp(self, q: torch.Tensor, *args: Any) -> Results:
        out, *rows = self.fake_forward(q, q, q)
        return out, *rows[: self.smooth]

    def fake_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        rows = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in self.signature.rows)
        return _rows(q, self.signature.widths[1], self.signature.results), *rows

    def _fake_backward(self, grad_out: torch.Tensor, *args: Any) -> Results:
        (q, k, v), learned = args[self.smooth : self.smooth + 3], self.signature.learned
        operands = args[self.smooth + 4 + self.kept :]  # after the output and the rows
        need_inputs = bool(learned) and operands[-1]
        need_q, need_kv = operands[-3:-1] if learned else operands[-2:]
        width_qk, width_v = self.signature.widths
        dq = _rows(q, width_qk) if need_q or (need_inputs and self.signature.summed) else q.new_empty(0)
        dk, dv = (_rows(k, width_qk), _rows(v, width_v)) if need_kv else (k.new_empty(0), v.new_empty(0))
        inputs = [operands[i] for i in learned]
        return dq, dk, dv, *(torch.empty_like(x) if need_inputs else x.new_empty((0,) * x.dim()) for x in inputs)

    # ------------------------------------------------------------------ autograd

    def _record(self, *args: Any) -> Any:
        """Call the forward operator so that autograd records it."""
        if self.backward is None:
            refuse_gradients(*args[:3], *(args[i] for i in self.learned))
        return self.recorded.apply(*args)

    def _register_autograd(self) -> None:
        if below_autograd is None:
            if self.backward:
                torch.library.register_autograd(
                    self.forward.name(), _public_backward(self), setup_context=_public_setup(self), lib=self.library
                )
                torch.library.register_autograd(self.backward.name(), refuse_second_derivatives, lib=self.library)
                if self.jvp:
                    torch.library.register_autograd(self.jvp.name(), refuse_derivatives_of_tangents, lib=self.library)
            else:
                name = self.forward.name()
                torch.library.register_autograd(name, refuse_backward, setup_context=refuse_backward, lib=self.library)
            return
        self.library.impl(self.forward, self._weak(_where_recorded(self.forward, self._record)), "Autograd")
        if self.backward:
            self.library.impl(
                self.backward, self._weak(_where_recorded(self.backward, self.recorded_backward.apply)), "Autograd"
            )
        if self.jvp:
            self.library.impl(self.jvp, self._weak(_where_recorded(self.jvp, self.recorded_jvp.apply)), "Autograd")

    def save(self, ctx: Any, args: Sequence[Any], results: Results) -> None:
        """Save what the backward and forward mode need: q, k, v, the operands, the output and the rows that they
        read."""
        saved = (*self.keep(results), *args[: self.numbers_at])
        ctx.save_for_backward(*saved)
        if in_forward_ad(*saved):
            ctx.save_for_forward(*saved)
        ctx.numbers = args[self.numbers_at :]
        if self.signature.flat:
            ctx.mark_non_differentiable(*results[1 + self.smooth :])

    def tangents(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the tangents of the output and of the rows, from those of the arguments; None for rows without one.

        Raise NotImplementedError, in one sentence, for a tangent of an input that has no gradient either.
        """
        if self.jvp is None:
            refuse_forward_mode()
        saved, at = ctx.saved_tensors, 1 + self.kept
        q, k, v, *tensors = saved[at:]
        for i, tangent in enumerate(tangents[3 : self.numbers_at]):
            if tangent is not None and i not in self.signature.learned:
                name = self.signature.schema.split(", ")[i].split()[-1]
                raise NotImplementedError(
                    f"attention: {name} has a tangent; expected one only of q, k, v and inputs with `grad: true` in "
                    "the spec"
                )
        given = [_tangent(x, t) for x, t in zip((q, k, v), tangents)]
        learned = [_tangent(tensors[i], tangents[3 + i]) for i in self.signature.learned]
        call = self.recorded_jvp.apply if _is_transformed() else self.jvp
        # Results are detached, because otherwise autograd would record a path from tangents to results.
        results = (x.detach() for x in saved[:at])
        found = call(q, k, v, *results, *given, *tensors, *ctx.numbers, *learned)
        return *found, *[None] * self.signature.flat

    def gradients(self, ctx: Any, grad_out: torch.Tensor | None, *grad_rows: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of q, k, v and of each argument after them; None for those that are not needed."""
        need_q, need_k, need_v, *need = ctx.needs_input_grad
        rest: list[Any] = [None] * len(need)
        grad_rows = (*grad_rows, *self.no_rows)[: self.smooth]  # a call for only the output has none
        if grad_out is None and all(x is None for x in grad_rows):
            return None, None, None, *rest
        saved = ctx.saved_tensors
        (out, *rows), (q, k, v, *tensors) = saved[: 1 + self.kept], saved[1 + self.kept :]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        learned = self.signature.learned
        needs = (need_q, need_k or need_v, any(need)) if learned else (need_q, need_k or need_v)
        if is_plain(q, k, v):
            call = self.backward if torch.is_grad_enabled() else self.run_backward  # without gradients both are equal
        else:
            call = self.recorded_backward.apply if _is_transformed() else self.backward
        dq, dk, dv, *inputs = call(grad_out, *grad_rows, q, k, v, out, *rows, *tensors, *ctx.numbers, *needs)
        for at, gradient in zip(learned, inputs):
            rest[at] = gradient if need[at] else None
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, *rest


def _is_transformed() -> bool:
    """True if a transform of torch.func is active. It sees autograd functions, but not what is below an operator."""
    return not torch.compiler.is_compiling() and below_autograd is not None and transforms_are_active()


def _tangent(x: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    """Return the tangent of x, or zeros if it has none."""
    return torch.zeros_like(x) if tangent is None else tangent


def _by_elements(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if kernels cannot read it in place: its last dimension is strided, or its sign is lazy."""
    x = x.resolve_neg()
    return x if not x.dim() or x.stride(-1) == 1 else x.contiguous()


def _where_recorded(op: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    """Return the autograd kernel of an operator: it calls `record` if gradients are recorded, otherwise the operator
    itself."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() or in_forward_ad(*args):
            return record(*args)
        with below_autograd():
            return op(*args)

    return call


def _recorded_calls(
    operators: Operators, run: Callable[..., Results], with_rows: bool
) -> type[torch.autograd.Function]:
    """Make the autograd function of calls that `run` computes: (q, k, v, *operands, shapes) -> out, or (out, *rows)."""
    keep, numbers_at, flat, smooth = (
        operators.keep,
        operators.numbers_at,
        operators.signature.flat,
        1 + operators.smooth,
    )

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = run(*args)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*keep(results) + args[:numbers_at])  # as `save` does
            ctx.numbers = args[numbers_at:-1]
            if flat:
                ctx.mark_non_differentiable(*results[smooth:])
            return results if with_rows else results[0]  # autograd tracks fewer outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            return operators.gradients(ctx, *grads)

    return Attention


def _recorded_operator(operators: Operators) -> type[torch.autograd.Function]:
    """Make the autograd function of calls of the forward operator, (q, k, v, *operands) -> (out, *rows), for all modes
    and transforms."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with below_autograd():
                return operators.forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            operators.save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            return operators.gradients(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
            return operators.tangents(ctx, *tangents)

        vmap = staticmethod(refuse_vmap)

    return Attention


def _recorded_once(op: Any, refuse: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Make the autograd function of an operator whose results cannot be differentiated again."""

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with below_autograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        backward = staticmethod(refuse)
        jvp = staticmethod(refuse)
        vmap = staticmethod(refuse_vmap)

    return Derivative


def _public_setup(operators: Operators) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        operators.save(ctx, inputs, output)

    return setup


def _public_backward(operators: Operators) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return operators.gradients(ctx, *grads)

    return backward


# -------------------- Operators of calls with a KV cache, which torch.compile sees in place of their checks and
# launches.

class CacheOperators:
    """`attngen::NAME_served`, which reads the caches, and `attngen::NAME_stored`, which first stores new keys and
    values in them.

    Both run `with_kvcache`, and have its arguments: q; `caches`, of keys and values; `new` keys and values in the same
    order, which only the second operator has; other `tensors`; and `numbers`, declared for example as "float scale".
    """

    def __init__(
        self,
        operators: Operators,
        with_kvcache: Callable[..., Any],
        caches: Sequence[str],
        new: Sequence[str],
        tensors: Sequence[str],
        numbers: Sequence[str],
    ) -> None:
        self.with_kvcache, self.fake = with_kvcache, operators.fake_forward
        rest = [*(f"Tensor {name}" for name in tensors), *numbers]
        read = ["Tensor q", *(f"Tensor {name}" for name in caches), *rest]
        stored = [
            "Tensor q",
            *(f"Tensor({mark}!) {name}" for mark, name in zip("abc", caches)),
            *(f"Tensor? {name}" for name in new),
            *rest,
        ]
        # `served` and `stored` are the suffixes of the operators' names, which callers know.
        self.served = self._define(operators, "served", read)
        self.stored = self._define(operators, "stored", stored)

    def _define(self, operators: Operators, suffix: str, arguments: list[str]) -> Any:
        names = [argument.split()[-1] for argument in arguments]

        def run(*args: Any) -> Results:
            out, lse = self.with_kvcache(**dict(zip(names, args)), return_lse=True)
            return out, lse

        def fake(q: torch.Tensor, *args: Any) -> Results:
            return self.fake(q, q, q)

        return operators.define(suffix, f"({', '.join(arguments)}) -> (Tensor out, Tensor lse)", run, fake)

    def __call__(self, q: torch.Tensor, caches: Sequence[Any], new: Sequence[Any], *rest: Any) -> Any:
        """Return (out, lse), by the operator for these arguments. Raise NotImplementedError if a gradient is needed."""
        without_backward(q, *caches, *new, *rest)
        return self.served(q, *caches, *rest) if all(x is None for x in new) else self.stored(q, *caches, *new, *rest)


# -------------------- Errors for arguments that a call does not have: one sentence, with the key of a spec that does
# the same.

_SPEC = "a module does what its spec says: write "
_CAUSAL = f"{_SPEC}`mask: causal`"
_ALLOWED = "{expr: 'allowed[b, q_idx, kv_idx]', params: {allowed: {tensor: [B, Nq, Nk], dtype: bool}}}"
_MASK = f"{_SPEC}a mask, such as `mask: causal`, or `mask: {_ALLOWED}`"
_BIAS = f"{_SPEC}`score: [dense_bias]`"
_DROPOUT = f"{_SPEC}`dropout: true`"
_SCALE = "write `scale`"
_SINK = f"{_SPEC}`score: [sink]`"
_PADDING = f"{_SPEC}`mask: key_padding`"
_LENGTHS = f"{_SPEC}`mask: {{key_padding: {{lengths: true}}}}`"
_PACKED = f"{_SPEC}`mask: {{document: {{packed: true, causal: true}}}}`"
_WEIGHTS = "kernels do not keep weights; naive attention does"
_CACHE = f"{_SPEC}`cache: contiguous`, and call `attention.with_kvcache`"
# Names of arguments of SDPA, FlashAttention, FlexAttention, xformers, transformers and modules of other specs -> hint.
HINTS = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask"), f"{_MASK}; a mask of numbers is `score: [dense_bias]`"),
    **dict.fromkeys(("attn_bias", "bias", "position_bias"), _BIAS),
    **dict.fromkeys(("dropout_p", "dropout", "p", "seed"), _DROPOUT),
    **dict.fromkeys(
        ("enable_gqa", "num_heads", "num_kv_heads"),
        f"{_SPEC}`heads: {{sharing: gqa}}`; numbers of heads are those of the tensors",
    ),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), _SCALE),
    **dict.fromkeys(
        ("window_size", "sliding_window", "window"), f"{_SPEC}`mask: {{sliding_window: {{left: 1023, right: 0}}}}`"
    ),
    **dict.fromkeys(("softcap", "logits_soft_cap"), f"{_SPEC}`score: [{{softcap: 30.0}}]`"),
    **dict.fromkeys(("sink", "sinks", "s_aux", "learnable_sink"), _SINK),
    "alibi_slopes": f"{_SPEC}`score: [{{alibi: {{slopes: given}}}}]`",
    "relative_bias": f"{_SPEC}`score: [{{relative_bias: {{max_distance: 128}}}}]`",
    "temperature": f"{_SPEC}`score: [temperature]`",
    "score_mod": f"{_SPEC}`score: [{{expr: 's - abs(q_pos - kv_idx)'}}]`, or call `attngen.flex_attention`",
    "mask_mod": f"{_SPEC}`mask: {{expr: 'kv_idx <= q_pos'}}`, or call `attngen.flex_attention`",
    "block_mask": f"{_SPEC}`mask: {{block_sparse: {{block: 128}}}}`, or call `attngen.flex_attention`",
    "kernel_options": f"{_SPEC}`schedule: {{block_q: 64}}`",
    **dict.fromkeys(("key_padding", "key_padding_mask"), _PADDING),
    **dict.fromkeys(("kv_lengths", "seqlens", "seqlens_k", "seqused_k"), _LENGTHS),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k", "max_seqlen"),
        _PACKED,
    ),
    "document_ids": f"{_SPEC}`mask: {{all_of: [causal, document]}}`",
    "prefix_length": f"{_SPEC}`mask: prefix_lm`",
    "tree_mask": f"{_SPEC}`mask: tree`, with `cache: contiguous`",
    "deterministic": f"{_SPEC}`backward: {{deterministic: false}}`; without it gradients are deterministic",
    **dict.fromkeys(("return_attn_probs", "output_attentions", "need_weights"), _WEIGHTS),
    **dict.fromkeys(("return_softmax_lse", "return_aux"), "write `return_lse=True`"),
    **{f"return_{name}": f"{_SPEC}`outputs: [lse, {name}]`" for name in ("entropy", "max_score", "key_mass")},
    **dict.fromkeys(("k_cache", "v_cache", "cache_seqlens", "page_table", "block_table", "past_key_values"), _CACHE),
    **dict.fromkeys(
        ("tensor_layout", "layout"), "tensors are [B, H, N, D], and `x.transpose(1, 2)` of others costs no copy"
    ),
    "plan": "only masks that read data have a plan; this one reads none",
}


def refuse_arguments(call: str, function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raise TypeError, in one sentence, for the first argument that a function does not have. `check` is ignored: the
    module has nothing to check."""
    for name in unknown:
        if name == "check":
            continue
        known = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is not p.VAR_KEYWORD and p.name != "self"
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near and name not in HINTS
            else HINTS.get(name, "an argument for each input comes from the spec")
        )
        raise TypeError(f"{call}: {name} is no argument; expected {', '.join(known)}; {hint}")


# -------------------- Checks that a module's folder has all its files.

def check_files(package: str, *names: str) -> None:
    """Raise ImportError, in one sentence, if a package lacks one of these modules. It may be imported from anywhere,
    such as a zip file."""
    if missing := [f"{name}.py" for name in names if importlib.util.find_spec(f"{package}.{name}") is None]:
        folder = Path(str(sys.modules[package].__file__)).parent
        raise ImportError(
            f"attention: {folder} lacks {' and '.join(missing)}; expected all files that attngen has written there: "
            "build it again"
        )


# -------------------- `attention` as a torch.nn.Module.

class AttentionModule(torch.nn.Module):
    """A module without parameters that computes attention. It holds scale and dropout_p; `forward` takes the other
    arguments of `attention`."""

    attention: ClassVar[Callable[..., Any]]
    spec: ClassVar[str]
    drops: ClassVar[bool]  # whether the spec has dropout, which applies in training

    def __init__(self, *, scale: float | None = None, dropout_p: float = 0.0, **unknown: NoReturn) -> None:
        super().__init__()
        if unknown:
            refuse_arguments("Attention", type(self).__init__, unknown)
        if dropout_p and not self.drops:
            raise TypeError(f"attention: dropout_p is {dropout_p}; expected none, as the spec has no dropout")
        self.scale, self.dropout_p = scale, dropout_p

    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if held := next((name for name in ("scale", "dropout_p") if name in inputs), ""):
            raise TypeError(
                f"Attention: {held} is given to a call; expected it where the module is made, as in "
                f"Attention({held}=0.1)"
            )
        dropping = {"dropout_p": self.dropout_p if self.training else 0.0} if self.drops else {}
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.attention(
            *args, **inputs, **dropping, scale=self.scale
        )
        return found

    def extra_repr(self) -> str:
        return f"spec={self.spec}, {f'dropout_p={self.dropout_p}, ' if self.drops else ''}scale={self.scale}"
