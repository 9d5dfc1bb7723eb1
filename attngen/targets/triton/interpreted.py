"""Chooses the configs with which Triton's interpreter runs kernels; a module's table of schedules contains the result.

The interpreter uses the tiles of one device class for any dtype: that of unlisted NVIDIA GPUs, or else the first class
that has configs of all kernels which may be interpreted. Kernels that add in semaphore order have no portable form and
are not considered. The interpreter has no TMA, no converting instructions and no overlapping launches, so it cannot use
the configs of a class with one of these. In that case, and if no class has all kernels, the table gets configs for the
interpreter itself: the tiles of a class, with all such options off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attngen.devices import CLASSES, FALLBACK_CUDA, DeviceClass
from attngen.ir import Config, Kernel, Module
from attngen.tiles.sizes import elem_sizes

OWN_CONFIGS = "interpreter"  # in place of a device class in the tables


class Interpreted(NamedTuple):
    """The interpreter's place in the tables of schedules: it finds its configs under `name`, for elements of
    `elem_bytes`. classes: kernel -> the device class whose tiles it uses."""

    name: str
    elem_bytes: int
    classes: Mapping[str, str]

    def takes(self, kernel: Kernel, config: Config) -> bool:
        """True if the interpreter gets a copy of a portable config."""
        if self.name != OWN_CONFIGS or config.device != self.classes[kernel.name]:
            return False
        return kernel.traits.prepares or config.elem_bytes == self.elem_bytes


def interpreted(module: Module) -> Interpreted:
    """The interpreter's configs among a module's schedules."""
    elem_bytes, order = elem_sizes(module)[0], dict.fromkeys((FALLBACK_CUDA, *CLASSES))
    run = {kernel.name for kernel in module.kernels if not kernel.traits.adds_in_order and not kernel.traits.prepares}
    configs = {
        name: [config for config in all_configs if isinstance(config, Config) and config.elem_bytes == elem_bytes]
        for name, all_configs in module.schedules
    }
    has = {name: {config.device for config in configs[name]} for name in run}
    common = next((name for name in order if all(name in devices for devices in has.values())), None)
    if common and not _exceeds_interpreter(CLASSES[common]):
        return Interpreted(common, elem_bytes, {})
    usual = common or FALLBACK_CUDA
    classes = {
        kernel.name: next((name for name in (usual, *order) if name in has.get(kernel.name, order)), usual)
        for kernel in module.kernels
    }
    return Interpreted(OWN_CONFIGS, elem_bytes, classes)


def _exceeds_interpreter(device: DeviceClass) -> bool:
    """True if configs of a class may use options that the interpreter lacks."""
    return device.tma or device.converts or device.overlaps
