"""What it costs that programs share the columns of a sum: each computes all scores, and loads what these are made
of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from attngen.cost.flops import executed_flops
from attngen.cost.io import hbm_bytes
from attngen.cost.roofline import Problem, row_for, scheduled_rows, values
from attngen.devices import DEVICES, Device
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.names import SHARES
from attngen.ir.ops import OWN, WHOLE
from attngen.tiles.sizes import column_choices
from attngen.tiles.tiles import evaluate


def parts_of_columns(
    module: Module, problem: Problem, devices: Iterable[Device] = tuple(DEVICES.values())
) -> Iterator[str]:
    """A sentence for each kernel whose programs may share the columns of a sum, and each way in which they do on some
    devices.

    FLOPs and bytes loaded are held against those of the same tile in programs that have all columns.
    """
    for kernel in (kernel for kernel in module.kernels if kernel.shared_columns):
        said: dict[str, list[str]] = {}
        for device in devices:
            if config := row_for(module, kernel, device, scheduled_rows(kernel, problem)):
                said.setdefault(_said(module, kernel, config, problem), []).append(device.name)
        yield from (f"@{kernel.name} on {', '.join(names)}: {what}." for what, names in said.items())


def _said(module: Module, kernel: Kernel, config: Config, problem: Problem) -> str:
    assert kernel.shared_columns
    width = module.widths[WHOLE[OWN[kernel.shared_columns.var]]]
    programs = -(-width // config.columns)
    if programs == 1:
        return f"a program holds all {width} columns of its sum"
    whole = replace(config, columns=column_choices(module, kernel)[0])
    known = [{**values(module, kernel, r, problem), **dict.fromkeys(SHARES.values(), 1)} for r in (config, whole)]
    (flops, all_flops), (moved, all_moved) = (
        [float(evaluate(formula, numbers)) for numbers in known]
        for formula in (executed_flops(kernel), hbm_bytes(kernel))
    )
    costs = f"{flops / all_flops:.2f} times the FLOPs and {moved / all_moved:.2f} times the bytes loaded and stored"
    return f"{programs} programs share the {width} columns of a sum, each computes all scores, and so they take {costs} of one for all"
