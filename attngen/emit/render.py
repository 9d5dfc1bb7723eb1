"""Target modules to files: Jinja prints the views, nothing else. The same module gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import sympy

from attngen.analysis.report import report
from attngen.devices import CLASSES, FALLBACK_CUDA, FALLBACK_HIP
from attngen.emit import layout
from attngen.emit.context import KernelContext, KernelView
from attngen.emit.host import HostContext, handle
from attngen.emit.wrapper import Wrapper, sizes_in
from attngen.ir.graph import Module, Unfit
from attngen.ir.host import Alloc, Splits
from attngen.ir.interface import STRIP, verify_interface
from attngen.ir.text import print_module
from attngen.runtime import bundle


def templates_dir() -> Path:
    """The templates: in the wheel inside the package, in a checkout beside it."""
    packaged = Path(str(resources.files("attngen"))) / "templates"
    return packaged if packaged.is_dir() else packaged.parent.parent / "templates"


def render(module: Module) -> dict[str, str]:
    """The generated files of a target module by name: `__init__.py`, `kernels.py`, `runtime.py`, `schedule.ir`, `report.json`."""
    verify_interface(module)
    views = {kernel.name: KernelContext(module, kernel).view() for kernel in module.kernels}
    env = _environment()
    return {
        "__init__.py": env.get_template("triton/module.py.jinja").render(_module_context(module, views)),
        "kernels.py": env.get_template("triton/kernels.py.jinja").render(_kernels_context(module, views)),
        "runtime.py": bundle(),
        "schedule.ir": print_module(module),
        "report.json": json.dumps(report(module), indent=2) + "\n",
    }


@cache
def _environment() -> jinja2.Environment:
    """The templates, compiled once."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.globals["call"] = layout.call
    env.globals["assign"] = layout.assign
    env.globals["fold"] = layout.fold
    env.globals["unpack"] = layout.unpack
    env.globals["fitted"] = layout.fitted
    env.globals["strings"] = layout.strings
    env.globals["tuple_lines"] = layout.tuple_lines
    env.filters["fill"] = layout.fill
    return env


def _kernels_context(module: Module, views: dict[str, KernelView]) -> dict[str, Any]:
    constants = []
    for name, size in (("D_QK", module.head_dim_qk), ("D_V", module.head_dim_v)):
        constants.append((name, size))
        if size & (size - 1):
            constants.append((f"{name}_PAD", 1 << size.bit_length()))
    if module.blocks:
        constants.append(("BLOCK", module.blocks.size))
    sizes = sorted({row.elem_bytes for _, rows in module.schedules for row in rows})
    names = dict.fromkeys(row.device for _, rows in module.schedules for row in rows if row.device in CLASSES)
    device_classes = [(repr(c), name) for name in names for c in CLASSES[name].capabilities]
    device_classes += [(f'"{name}"', name) for name in names if not CLASSES[name].capabilities and name != "any"]
    return {
        "module": module,
        "constants": constants,
        "schedules": _schedules(module, views),
        "elem_sizes": sizes,
        "interpreted": _interpreted(module, sizes[0]),
        "device_classes": device_classes,
        "kernels": list(views.values()),
        "distances": any(x.by == "distance" for x in module.learned),
        "floors": any(view.words & {"floor_div", "floor_mod"} for view in views.values()),
        "casts": any(view.words & {"to_floor", "to_int", "to_round"} for view in views.values()),
        "fallback_cuda": FALLBACK_CUDA,
        "fallback_hip": FALLBACK_HIP,
    }


def _interpreted(module: Module, elem_bytes: int) -> str:
    """The device class whose schedules the interpreter takes: what other NVIDIA GPUs take, or else one that every kernel has."""
    has = [{(r.device, r.elem_bytes) for r in rows if not isinstance(r, Unfit)} for _, rows in module.schedules]
    return next((c for c in (FALLBACK_CUDA, *CLASSES) if all((c, elem_bytes) in rows for rows in has)), FALLBACK_CUDA)


def _schedules(module: Module, views: dict[str, KernelView]) -> list[Any]:
    out = []
    for kernel, rows in module.schedules:
        classes: dict[str, Any] = {}  # rows, or the sentence on why there are none
        for row in rows:
            if isinstance(row, Unfit):
                classes[f'("{row.device}", {row.elem_bytes})'] = json.dumps(row.reason)
                continue
            blocks = {"BLOCK_Q": row.block_q, "BLOCK_KV": row.block_kv}
            config = {t: blocks[t] for t in views[kernel].tiles} | {"num_warps": row.num_warps, "num_stages": row.num_stages}
            config |= {"TMA": row.tma} if views[kernel].tma else {}
            entry = classes.setdefault(f'("{row.device}", {row.elem_bytes})', [])
            entry.append((row.max_rows, "{" + ", ".join(f'"{key}": {value}' for key, value in config.items()) + "}"))
        out.append((kernel, list(classes.items())))
    return out


def _module_context(module: Module, views: dict[str, KernelView]) -> dict[str, Any]:
    wrapper = Wrapper(module)
    hosts = [(host.name, TITLES[host.name], HostContext(module, host, views).view()) for host in module.hosts]
    given = [f"{i.name}: {wrapper.given_type(i).removesuffix(' = None')}" for i in (wrapper.data_inputs if wrapper.data else [])]
    return {
        "module": module,
        "w": wrapper,
        "operator": f"{module.name}_{hashlib.sha256(print_module(module).encode()).hexdigest()[:12]}",
        "handles": [handle(kernel, views[kernel.name]) for kernel in module.kernels],
        "kernel_names": [kernel.name for kernel in module.kernels],
        "programs": hosts,
        "infinite": any(isinstance(op, Alloc) and op.fill == -sympy.oo for host in module.hosts for op in host.ops()),
        "splits": next((op.least for host in module.hosts for op in host.ops() if isinstance(op, Splits)), 0),
        "strip": STRIP,
        "data_args": "".join(f", {i.name}={i.name}" for i in wrapper.data_inputs) if wrapper.data else "",
        "data_params": "".join(f", {text}" for text in given),
        "sizes_in": sizes_in,
    }


TITLES = {
    "forward": "Launch the forward kernels: (out, lse).",
    "backward": "Launch the backward kernels: (dq, dk, dv, gradients of inputs), without elements where they are not needed.",
    "count": "Evaluate the mask: how many pairs are visible in each strip of a block of scores.",
    "lists": "The blocks that count, of each row of blocks and of each column: how many come before each, and their numbers.",
}
