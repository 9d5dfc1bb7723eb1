"""Builds the context from which the template prints a generated module's kernels.py."""

from __future__ import annotations

import json
from typing import Any

from attngen.devices import CLASSES, FALLBACK_CUDA, FALLBACK_HIP
from attngen.ir import PADDED, DoesNotFit, Module, tile
from attngen.targets.common.base import Printed
from attngen.targets.printing.context import KernelContext
from attngen.targets.printing.split_kv import split_functions
from attngen.targets.printing.views import KernelView
from attngen.targets.triton.interpreted import Interpreted, interpreted
from attngen.tiles.launches import constants, launch_options


def printed(module: Module) -> Printed:
    """The kernels of a target module, and their file."""
    views = {kernel.name: KernelContext(module, kernel).view() for kernel in module.kernels}
    return Printed(views, "triton/kernels.py.jinja", _context(module, views))


def _context(module: Module, views: dict[str, KernelView]) -> dict[str, Any]:
    """The names that the template of kernels.py reads."""
    constants = []
    for name, size in module.widths.items():
        if name == "D_QK" and module.rope:  # no tile is as wide as D_QK then
            continue
        constants.append((name, size))
        if size & (size - 1):
            constants.append((PADDED[name], 1 << size.bit_length()))
    if module.blocks:
        constants.append(("BLOCK", module.blocks.size))
    if module.chunk:
        constants.append(("UNIT", module.unit))
    taken = interpreted(module)
    names = dict.fromkeys(row.device for _, rows in module.schedules for row in rows if row.device in CLASSES)
    device_classes = [(repr(c), name) for name in names for c in CLASSES[name].capabilities]
    device_classes += [(f'"{name}"', name) for name in names if not CLASSES[name].capabilities and name != "any"]
    return {
        "module": module,
        "constants": constants,
        "schedules": _schedules(module, views, taken),
        "interpreted": taken,
        "device_classes": device_classes,
        "kernels": [views[kernel.name] for kernel in module.kernels if not kernel.traits.adds_in_order],
        "distances": any(x.reduction == "distance" for x in module.input_gradients),
        "floors": any(view.words & {"_floor_div", "_floor_mod"} for view in views.values()),
        "quantised": module.cache is not None and bool(module.cache.dtype),
        "groups": any("_of_columns" in view.words for view in views.values()),
        "scans": any(isinstance(op, tile.Scan) for kernel in module.kernels for op in kernel.ops()),
        "casts": any(view.words & {"_to_floor", "_to_int", "_to_round"} for view in views.values()),
        "fallback_cuda": FALLBACK_CUDA,
        "fallback_hip": FALLBACK_HIP,
        "split_kv": split_functions(module),
        "page": _page(module),
    }


def _page(module: Module) -> str:
    """The number of rows of a page, if descriptors read from pages; else empty text."""
    described = any(
        isinstance(op, tile.Load) and op.pages and op.via for kernel in module.kernels for op in kernel.ops()
    )
    return module.cache.page if module.cache and described else ""


def _schedules(module: Module, views: dict[str, KernelView], taken: Interpreted) -> list[Any]:
    """Kernel -> key of the table -> its configs as source, or the sentence on why there are none."""
    out = []
    for kernel in module.kernels:
        view = views[kernel.name]
        classes: dict[str, Any] = {}
        interpreter: dict[str, Any] = {}  # the interpreter's configs
        for config in dict(module.schedules)[kernel.name]:
            if isinstance(config, DoesNotFit):
                classes[f'("{config.device}", {config.elem_bytes})'] = json.dumps(config.reason)
                continue
            if config.backend != module.backend:
                continue
            values = constants(kernel, config)
            tiles = {tile: values[tile] for tile in view.tiles} | {
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
            }
            options = tiles | launch_options(kernel, config) | {flag: values[flag] for flag in view.flags}
            key = f'("{config.device}", {config.elem_bytes})'
            classes.setdefault(key, []).append((config.max_rows, _source(options)))
            if taken.takes(kernel, config):
                options, key = tiles | dict.fromkeys(view.flags, False), f'("{taken.name}", {config.elem_bytes})'
                interpreter.setdefault(key, []).append((config.max_rows, _source(options)))
        classes |= interpreter
        for warp_specialized, config in module.stand_ins(kernel.name):
            tiles = {
                "BLOCK_Q": config.block_q,
                "BLOCK_KV": config.block_kv,
                "STAGES": config.num_stages,
                **launch_options(warp_specialized, config),
            }
            named = {"KERNEL": json.dumps(warp_specialized.name)} if warp_specialized.of else {}
            entry = classes.setdefault(f'("{config.device}", {config.elem_bytes}, "{config.backend}")', [])
            if config.min_rows and not entry:
                entry.append((config.min_rows, "None"))  # calls of fewer rows run the portable kernel
            entry.append((config.max_rows, _source(tiles | named)))
        out.append((kernel.name, list(classes.items())))
    return out


def _source(options: dict[str, Any]) -> str:
    """The source of a config's tile sizes and launch options."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in options.items()) + "}"
