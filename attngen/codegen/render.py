"""Renders target modules to files. Jinja only prints the views. Equal modules render to equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
import sympy

from attngen.codegen.cache_wrapper import CacheWrapper
from attngen.codegen.host import HostContext, handle
from attngen.codegen.lines import within
from attngen.codegen.templates import templates_dir
from attngen.codegen.wrapper import Wrapper
from attngen.codegen.wrapper_text import sizes_in
from attngen.cost.report import report
from attngen.heuristics import STRIP
from attngen.ir import Module, launch
from attngen.ir.printer import print_module
from attngen.runtime import bundle
from attngen.targets.common.base import PrintedKernel
from attngen.targets.printing import layout
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.verify.inputs import verify_interface


def render(module: Module) -> dict[str, str]:
    """Return the generated files of a target module by name: `__init__.py`, `kernels.py`, `runtime.py`, `schedule.ir`,
    `report.json`, and a file for each backend with warp-specialized kernels."""
    verify_interface(module)
    printed = backend_of(module).printed(module)
    env = _environment()
    specializers = [SPECIALIZERS[name] for name in sorted({kernel.backend for kernel in module.warp_specialized})]
    warp_specialized = {d.file: within(env.get_template(d.template).render(d.context(module))) for d in specializers}
    return {
        "__init__.py": within(
            env.get_template("triton/module.py.jinja").render(
                _module_context(
                    module, printed.kernels, ["kernels", *(file.removesuffix(".py") for file in warp_specialized)]
                )
            )
        ),
        "kernels.py": within(env.get_template(printed.template).render(printed.context)),
        **warp_specialized,
        "runtime.py": bundle(),
        "schedule.ir": print_module(module),
        "report.json": json.dumps(report(module), indent=2) + "\n",
    }


@cache
def _environment() -> jinja2.Environment:
    """Return the Jinja environment. It is made once, so that each template is compiled once."""
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


def _module_context(module: Module, views: Mapping[str, PrintedKernel], files: list[str]) -> dict[str, Any]:
    wrapper = CacheWrapper(module) if module.cache else Wrapper(module)
    derived = {
        d.program: f"Compute what kernels read of {' and '.join(wrapper.planned)}." for d in module.derived if d.program
    }
    titles = {**TITLES, "forward": f"Launch the forward kernels: ({', '.join(['out', *wrapper.rows])}).", **derived}
    hosts = [(host.name, titles[host.name], HostContext(module, host, views).view()) for host in module.hosts]
    taken = [i for i in (wrapper.data_inputs if wrapper.data else []) if not i.is_size]
    given = [f"{i.name}: {wrapper.given_type(i).removesuffix(' = None')}" for i in taken]
    return {
        "module": module,
        "files": files,
        "w": wrapper,
        "operator": f"{module.name}_{hashlib.sha256(print_module(module).encode()).hexdigest()[:12]}",
        "handles": [handle(kernel, views[kernel.name]) for kernel in module.kernels],
        "kernel_names": [kernel.name for kernel in module.kernels],
        "programs": hosts,
        "infinite": any(
            isinstance(op, launch.Alloc) and op.fill == -sympy.oo for host in module.hosts for op in host.ops()
        ),
        "strip": STRIP,
        "data_args": "".join(f", {i.name}={i.name}" for i in taken),
        "data_params": "".join(f", {text}" for text in given),
        "sizes_in": sizes_in,
        "strings_of": lambda names, suffix: layout.tuple_text([f'"{name}{suffix}"' for name in names]),
    }


TITLES = {
    "backward": (
        "Launch the backward kernels: (dq, dk, dv, gradients of inputs), without elements where they are not needed."
    ),
    "jvp": "Launch the kernel of forward mode: tangents of out and of the rows' numbers that have gradients.",
    "key_mass": "Launch the kernel that sums weights over queries: key_mass.",
    "append": "Store new keys and values in the cache.",
    "decode": "Launch the kernels that read keys from the cache: (out, lse).",
    "count": "Evaluate the mask: how many pairs are visible in each strip of a block of scores.",
    "lists": (
        "List the visible blocks of each row and column of blocks: how many come before each block, and their indices."
    ),
}
