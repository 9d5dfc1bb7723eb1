"""The cost of split-D, where programs split the columns of a wide sum: each of them computes all scores, and loads
all tiles that the scores need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from attngen.cost.flops import executed_flops
from attngen.cost.io import hbm_bytes
from attngen.cost.roofline import Problem, config_for, rows_of_call, values
from attngen.devices import DEVICES, Device
from attngen.ir import SPLIT_DIM, WHOLE, Config, Kernel, Module
from attngen.ir.names import SHARES
from attngen.tiles.sizes import block_d_choices
from attngen.tiles.tiles import evaluate


def split_d_costs(
    module: Module, problem: Problem, devices: Iterable[Device] = tuple(DEVICES.values())
) -> Iterator[str]:
    """Yield a sentence for each kernel with split-D and each way in which it splits columns on some devices.

    FLOPs and bytes loaded are compared with those of programs that have the same tile and all columns.
    """
    for kernel in (kernel for kernel in module.kernels if kernel.traits.split_d_axis):
        costs: dict[str, list[str]] = {}
        for device in devices:
            if config := config_for(module, kernel, device, rows_of_call(kernel, problem)):
                costs.setdefault(_cost(module, kernel, config, problem), []).append(device.name)
        yield from (f"@{kernel.name} on {', '.join(names)}: {cost}." for cost, names in costs.items())


def _cost(module: Module, kernel: Kernel, config: Config, problem: Problem) -> str:
    assert kernel.traits.split_d_axis
    width = module.widths[WHOLE[SPLIT_DIM[kernel.traits.split_d_axis.var]]]
    programs = -(-width // config.columns)
    if programs == 1:
        return f"a program holds all {width} columns of its sum"
    whole = replace(config, columns=block_d_choices(module, kernel)[0])
    known = [{**values(module, kernel, r, problem), **dict.fromkeys(SHARES.values(), 1)} for r in (config, whole)]
    (flops, all_flops), (moved, all_moved) = (
        [float(evaluate(formula, numbers)) for numbers in known]
        for formula in (executed_flops(kernel), hbm_bytes(kernel))
    )
    costs = f"{flops / all_flops:.2f} times the FLOPs and {moved / all_moved:.2f} times the bytes loaded and stored"
    split = f"{programs} programs split the {width} columns of a sum, and each computes all scores"
    return f"{split}: they take {costs} of one program with all columns"
