"""Compiles kernels ahead of time, for GPUs that need not be present, and reads the compiler's report."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module, tile
from attngen.ir.dtypes import of_size
from attngen.ir.names import ROWS, stride_names
from attngen.targets.common.ahead import (
    FLAGS,
    TYPES,
    code_bytes,
    compile_each,
    compiled,
    disassembled,
    load,
    numbers,
    ptxas_usage,
    triton_version,
)
from attngen.targets.common.base import CompileReport, short_digest
from attngen.targets.common.instructions import parse
from attngen.targets.common.unset import unset
from attngen.targets.triton.matrix_units import aligned
from attngen.tiles.launches import constants, launch_options
from attngen.tiles.sizes import sizes

__all__ = ["Job", "compile_all", "job", "source_digest", "triton_version"]


@dataclass(frozen=True)
class Job:
    """One kernel to compile: its file, its arguments' types, a config and a target."""

    file: Path
    kernel: str
    types: tuple[tuple[str, str], ...]  # of arguments that are not strides, as Triton names them
    tiles: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, int], ...]
    arch: int | str
    warp_size: int
    aligned_rows: bool  # strides of rows are multiples of 16
    source: str = ""  # the digest of the kernel's source
    row_strides: tuple[str, ...] = ()  # the names of the strides of rows, which the digest covers by the source

    @property
    def digest(self) -> str:
        """A short digest of the compiler's input; modules with the same kernel share it."""
        return short_digest({key: value for key, value in vars(self).items() if key not in ("file", "row_strides")})


def job(module: Module, kernel: Kernel, config: Config, file: Path, arch: int | str | None = None) -> Job:
    """The job that compiles `kernel` of a generated kernels.py under a config.

    It is for the config's device class, or for another `arch` that uses the same configs: a compute capability (86) or
    a HIP architecture.
    """
    device = CLASSES[config.device]
    element = "" if kernel.traits.prepares else of_size(module.dtypes, config.elem_bytes)  # preparing kernels read no T
    types, dims = [], sizes(module, config)
    described = {}  # tensor -> rows and columns of its tiles
    for op in kernel.ops():
        if isinstance(op, tile.Load) and op.via:
            described[kernel.accessed(op)[0].name] = ", ".join(str(dims[d]) for d in op.type.unpadded)
    for arg in kernel.args:
        dtype = element if arg.type.dtype == "T" else TYPES.get(arg.type.dtype, arg.type.dtype)
        block = described.get(arg.name) if config.tma else None
        types.append(
            (
                arg.name,
                f"tensordesc<{dtype}[1, 1, {block}]>" if block else dtype if arg.role == "scalar" else f"*{dtype}",
            )
        )
    return Job(
        file,
        kernel.name,
        tuple(types),
        tuple(constants(kernel, config).items()),
        tuple(
            ({"num_warps": config.num_warps, "num_stages": config.num_stages} | launch_options(kernel, config)).items()
        ),
        device.arch if arch is None else arch,
        device.threads_per_warp,
        aligned(module),
        source_digest(file.read_text(encoding="utf-8"), kernel.name),
        tuple(
            name
            for arg in kernel.args
            for dim, name in zip(arg.type.dims, stride_names(arg.name, arg.type.dims))
            if dim in ROWS
        ),
    )


@cache
def source_digest(kernels: str, name: str) -> str:
    """A short digest of one kernel of a kernels.py: its source and everything that it may use.

    It may use all constants and all functions that Triton compiles, except the other kernels. SCHEDULES names the
    kernels.
    """
    others = {kernel for kernel in _kernels(kernels) if kernel != name}
    return short_digest("\n".join(text for defines, text in _compiled_parts(kernels) if defines not in others))


def _kernels(kernels: str) -> list[str]:
    """The names of the kernels of a kernels.py: the keys of SCHEDULES."""
    tables = (
        n for n in ast.parse(kernels).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SCHEDULES"
    )
    return list(ast.literal_eval(next(tables).value))


@cache
def _compiled_parts(kernels: str) -> tuple[tuple[str, str], ...]:
    """The name and the text of each constant and of each function that Triton compiles, in the order written."""
    lines, parts = kernels.splitlines(), []
    for node in ast.parse(kernels).body:
        start, name = node.lineno, ""
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            start, name = min(d.lineno for d in node.decorator_list), node.name
        elif not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue  # constants are calls of tl.constexpr; tables of schedules are not
        parts.append((name, "\n".join(lines[start - 1 : node.end_lineno])))
    return tuple(parts)


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[CompileReport | str]:
    """The compile reports of jobs, in order; see compile_each."""
    return compile_each(_compile, jobs, workers)


def source(j: Job) -> Any:
    """The kernel with the types of a call whose tensors are aligned, and all flags on, as in the heaviest kernel."""
    from triton.compiler import ASTSource

    function = getattr(load(j.file), j.kernel)
    types, tiles = dict(j.types), FLAGS | dict(j.tiles)
    signature, constants, divisible = {}, {}, {}
    for i, p in enumerate(function.params):
        if p.is_constexpr:
            signature[p.name], constants[(i,)] = "constexpr", tiles[p.name]
            continue
        stride = p.name not in types and not p.do_not_specialize
        signature[p.name] = types.get(p.name, "i32")
        if signature[p.name].startswith("*") or (stride and (j.aligned_rows or p.name not in j.row_strides)):
            divisible[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, divisible)


def _compile(j: Job) -> CompileReport | str:
    done = compiled(source(j), j)
    if isinstance(done, str):
        return done
    made, said, seconds = done
    on_amd = "amdgcn" in made.asm
    registers, spilled = _amd(made.asm["amdgcn"]) if on_amd else ptxas_usage(said)
    binary = made.asm["hsaco" if on_amd else "cubin"]
    if j.arch == CLASSES["sm90"].arch and (wrong := unset(parse(disassembled(binary)))):
        return f"ptxas makes wrong machine code of it: {wrong[0]}"
    return CompileReport(
        made.metadata.shared, registers, spilled, code_bytes(binary), triton_version(), seconds, j.digest
    )


def _amd(text: str) -> tuple[int, int]:
    """Registers, including accumulators, and spilled bytes, from the metadata of the assembly."""
    return numbers(r"\.vgpr_count: +(\d+)", text)[0], 4 * numbers(r"\.vgpr_spill_count: +(\d+)", text)[0]
