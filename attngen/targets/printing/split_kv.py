"""Builds the context of templates/split_kv.jinja: the functions that split a cache's keys among programs."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.heuristics import LEAST_UNITS, UNIT
from attngen.ir import Kernel, Module, symbol
from attngen.ir.names import stride_names
from attngen.ir.split_kv import units_of
from attngen.targets.printing.printer import to_triton


def split_functions(module: Module) -> dict[str, Any]:
    """The strings and numbers of these functions in Triton; {} if no kernel splits keys."""
    kernel = module.splitting_kernel
    if kernel is None or kernel.kv_split is None:
        return {}
    kv_split = kernel.kv_split
    whole = {symbol(name): sympy.Symbol(name, integer=True) for name, _ in kv_split.reads}
    work = to_triton(units_of(kv_split.work).xreplace(whole), lambda name: (name, ()), ())
    return {
        "split_args": ", ".join(split_args(kernel)),
        "elements": _elements(kernel),
        "work": f"tl.cast({work}, tl.int32)" if "tl.int64" in work else work,  # it is summed in 32 bits
        "each": kv_split.each,
        "unit": UNIT,
        "waves": kv_split.waves,
        "least_units": LEAST_UNITS,
    }


def split_args(kernel: Kernel) -> list[str]:
    """The arguments of these functions: sizes of the call, sizes by which work is counted, and the tensors whose
    elements it reads with their strides."""
    assert kernel.kv_split is not None
    reads = dict(kernel.kv_split.reads)
    named = {
        str(s) for e in (kernel.kv_split.work, *(e for at in reads.values() for e in at.index)) for s in e.free_symbols
    }
    tensors = [arg for arg in kernel.args if arg.name in {at.tensor for at in reads.values()}]
    strides = [stride for arg in tensors for stride in stride_names(arg.name, arg.type.dims)]
    return [
        "B",
        "items",
        "Nc",
        "Nn",
        *sorted(named - {"Nk", "b"} - reads.keys()),
        *(arg.name for arg in tensors),
        *strides,
    ]


def _elements(kernel: Kernel) -> list[tuple[str, str]]:
    """(name, address) of each element that the work of the sequences `at` reads."""
    assert kernel.kv_split is not None
    found = []
    for name, at in kernel.kv_split.reads:
        strides = stride_names(at.tensor, kernel.type_of(at.tensor).dims)
        *steps, last = ["at" if e == symbol("b") else to_triton(e, lambda n: (n, ())) for e in at.index]
        terms = [f"tl.cast({step}, tl.int64) * {stride}" for step, stride in zip(steps, strides)]
        found.append((name, " + ".join([at.tensor, *terms, *([last] if last != "0" else [])])))
    return found
