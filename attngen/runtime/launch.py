"""Launches: the schedule for a call's sizes, and the fast launch of a kernel that Triton has compiled."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from operator import itemgetter, or_
from types import ModuleType
from typing import Any

import torch
import triton

from attngen.runtime.descriptors import Described
from attngen.runtime.memory import NOTES
from attngen.runtime.private import hooks_look_on, parts_of
from attngen.runtime.warp_specialized import counter_of, warp_specialized

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
