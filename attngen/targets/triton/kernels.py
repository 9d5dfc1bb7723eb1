"""kernels.py of a generated module: what its template sees."""

from __future__ import annotations

import json
from typing import Any

from attngen.devices import CLASSES, FALLBACK_CUDA, FALLBACK_HIP
from attngen.ir.graph import DoesNotFit, Module
from attngen.ir.ops import PADDED, Load, Scan
from attngen.targets.common.base import Printed
from attngen.targets.printing.context import KernelContext
from attngen.targets.printing.split_kv import dealing
from attngen.targets.printing.views import KernelView
from attngen.targets.triton.interpreted import Interpreted, interpreted
from attngen.tiles.launches import constants, launch_options


def printed(module: Module) -> Printed:
    """The kernels of a target module, and their file."""
    views = {kernel.name: KernelContext(module, kernel).view() for kernel in module.kernels}
    return Printed(views, "triton/kernels.py.jinja", _context(module, views))


def _context(module: Module, views: dict[str, KernelView]) -> dict[str, Any]:
    """What the template of kernels.py sees."""
    constants = []
    for name, size in module.widths.items():
        if name == "D_QK" and module.rope:  # which no tile has
            continue
        constants.append((name, size))
        if size & (size - 1):
            constants.append((PADDED[name], 1 << size.bit_length()))
    if module.blocks:
        constants.append(("BLOCK", module.blocks.size))
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
        "kernels": [views[kernel.name] for kernel in module.kernels if not kernel.adds],
        "distances": any(x.by == "distance" for x in module.learned),
        "floors": any(view.words & {"floor_div", "floor_mod"} for view in views.values()),
        "quantised": module.cache is not None and bool(module.cache.dtype),
        "groups": any("of_columns" in view.words for view in views.values()),
        "scans": any(isinstance(op, Scan) for kernel in module.kernels for op in kernel.ops()),
        "casts": any(view.words & {"to_floor", "to_int", "to_round"} for view in views.values()),
        "fallback_cuda": FALLBACK_CUDA,
        "fallback_hip": FALLBACK_HIP,
        "deals": dealing(module),
        "page": _page(module),
    }


def _page(module: Module) -> str:
    """How many rows a page has, where descriptors read from pages; else empty text."""
    described = any(isinstance(op, Load) and op.pages and op.via for kernel in module.kernels for op in kernel.ops())
    return module.cache.page if module.cache and described else ""


def _schedules(module: Module, views: dict[str, KernelView], taken: Interpreted) -> list[Any]:
    out = []
    for kernel in module.kernels:
        view = views[kernel.name]
        classes: dict[str, Any] = {}  # rows, or the sentence on why there are none
        own: dict[str, Any] = {}  # the interpreter's rows
        for row in dict(module.schedules)[kernel.name]:
            if isinstance(row, DoesNotFit):
                classes[f'("{row.device}", {row.elem_bytes})'] = json.dumps(row.reason)
                continue
            if row.backend != module.backend:
                continue
            given = constants(kernel, row)
            tiles = {tile: given[tile] for tile in view.tiles} | {
                "num_warps": row.num_warps,
                "num_stages": row.num_stages,
            }
            config = tiles | launch_options(kernel, row) | {flag: given[flag] for flag in view.flags}
            classes.setdefault(f'("{row.device}", {row.elem_bytes})', []).append((row.max_rows, _config(config)))
            if taken.takes(kernel, row):
                config = tiles | dict.fromkeys(view.flags, False)
                own.setdefault(f'("{taken.name}", {row.elem_bytes})', []).append((row.max_rows, _config(config)))
        classes |= own
        for warp_specialized, row in module.stand_ins(kernel.name):
            tiles = {
                "BLOCK_Q": row.block_q,
                "BLOCK_KV": row.block_kv,
                "STAGES": row.num_stages,
                **launch_options(warp_specialized, row),
            }
            named = {"KERNEL": json.dumps(warp_specialized.name)} if warp_specialized.of else {}
            entry = classes.setdefault(f'("{row.device}", {row.elem_bytes}, "{row.backend}")', [])
            if row.min_rows and not entry:
                entry.append((row.min_rows, "None"))  # the portable kernel's
            entry.append((row.max_rows, _config(tiles | named)))
        out.append((kernel.name, list(classes.items())))
    return out


def _config(config: dict[str, Any]) -> str:
    """The source of a row's tile sizes and launch options."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in config.items()) + "}"
