"""What Triton's interpreter runs kernels with. It is decided here alone, and a module's table of schedules says it.

It takes the tiles of one device class, whatever a call's dtype: that of other NVIDIA GPUs, or else the first one that
has all kernels which may be interpreted. Kernels that add have no portable form and are not asked. The interpreter has
no copy engine, no converting instructions and no launches that overlap, so the rows of a class with one of these are
not for it. Then, and where no class has all kernels, the table gets rows of the interpreter's own: the tiles of a
class, with all such options off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attngen.devices import CLASSES, FALLBACK_CUDA, DeviceClass
from attngen.ir.graph import Config, Kernel, Module
from attngen.tiles.sizes import elem_sizes

OWN_ROWS = "interpreter"  # stands where tables have a device class


class Interpreted(NamedTuple):
    """Where the interpreter finds its rows: under `name`, for elements of `elem_bytes`. They are the tiles of a
    class for each kernel."""

    name: str
    elem_bytes: int
    classes: Mapping[str, str]

    def takes(self, kernel: Kernel, config: Config) -> bool:
        """Whether a portable row becomes one of the interpreter's own."""
        if self.name != OWN_ROWS or config.device != self.classes[kernel.name]:
            return False
        return kernel.prepares or config.elem_bytes == self.elem_bytes


def interpreted(module: Module) -> Interpreted:
    """What the interpreter takes of a module's schedules."""
    elem_bytes, order = elem_sizes(module)[0], dict.fromkeys((FALLBACK_CUDA, *CLASSES))
    run = {kernel.name for kernel in module.kernels if not kernel.adds and not kernel.prepares}
    rows = {
        name: [config for config in rows if isinstance(config, Config) and config.elem_bytes == elem_bytes]
        for name, rows in module.schedules
    }
    has = {name: {config.device for config in rows[name]} for name in run}
    common = next((name for name in order if all(name in able for able in has.values())), None)
    if common and not _has_more(CLASSES[common]):
        return Interpreted(common, elem_bytes, {})
    usual = common or FALLBACK_CUDA
    classes = {
        kernel.name: next((name for name in (usual, *order) if name in has.get(kernel.name, order)), usual)
        for kernel in module.kernels
    }
    return Interpreted(OWN_ROWS, elem_bytes, classes)


def _has_more(device: DeviceClass) -> bool:
    """Whether rows of a class may ask for what the interpreter has not."""
    return device.tma or device.converts or device.overlaps
