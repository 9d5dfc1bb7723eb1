"""Private interfaces of torch and Triton that make calls faster, each with a public fallback.

No other file of the runtime uses a private interface. Each is probed once, when the module is imported, as far as that
needs no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
import triton
from torch.autograd import forward_ad


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
