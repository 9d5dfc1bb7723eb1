"""Kernels as graphs: DOT text, and SVG by Graphviz's `dot` if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from attngen.errors import AttngenError
from attngen.ir import Kernel, Module, pipe
from attngen.ir.printer import print_op

COLOURS = {"hbm": "#d9d9d9", "sram": "#b3d9ff", "reg": "#ffffff", "flight": "#ffe0b3", "?": "#ffffff"}


def to_dot(module: Module) -> str:
    """Return DOT text with one cluster per kernel and block. Boxes are ops, coloured by memory space; dashed edges
    enter loop bodies."""
    lines = [
        f'digraph "{module.name}" {{',
        "  rankdir=TB; node [shape=box, style=filled, fontname=monospace, fontsize=9];",
    ]
    for kernel in (*module.kernels, *module.warp_specialized):
        lines += _kernel(kernel)
    return "\n".join([*lines, "}", ""])


def _kernel(kernel: Kernel) -> list[str]:
    called = f"{kernel.name} {kernel.backend}".rstrip()

    def node(name: str) -> str:
        return f'"{called}.{name}"'

    lines = [f'  subgraph "cluster_{called}" {{ label="@{called}"; fontname=monospace;']
    for block in kernel.blocks:
        lines.append(f'    subgraph "cluster_{called}_{block.name}" {{ label="@{block.name}"; style=dashed;')
        for op in block.ops:
            space = next((t.space for t in op.results().values()), "reg")
            label = print_op(op).split(" : ")[0].replace("\\", "\\\\").replace('"', '\\"')
            style = f'fillcolor="{COLOURS[space]}", tooltip="{op.kind}"'
            lines.append(f'      {node(op.name)} [label="{label}", {style}];')
        lines.append("    }")
    lines.append("  }")
    lines += [f"  {node(a)} -> {node(b)};" for a, b in kernel.graph.edges]
    for op in kernel.ops():
        firsts = [kernel.block(body).ops[0].name for body in pipe.bodies_of(op)]
        lines += [f"  {node(op.name)} -> {node(first)} [style=dashed];" for first in firsts]
    return lines


def write_graph(module: Module, path: Path) -> None:
    """Write a .dot or an .svg file; AttngenError for another suffix, or for .svg without Graphviz."""
    dot = to_dot(module)
    if path.suffix == ".dot":
        path.write_text(dot, encoding="utf-8")
        return
    if path.suffix != ".svg":
        raise AttngenError(f"--graph {path}: expected a name that ends in .dot or .svg")
    if shutil.which("dot") is None:
        raise AttngenError(
            f"--graph {path}: drawing SVG needs Graphviz's `dot` on the PATH; install it, or write a .dot file"
        )
    try:
        subprocess.run(["dot", "-Tsvg", "-o", str(path)], input=dot, text=True, check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise AttngenError(f"--graph {path}: dot failed: {error.stderr.strip()}") from None
