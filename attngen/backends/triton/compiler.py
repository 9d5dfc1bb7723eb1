"""Kernels compiled ahead of time, for GPUs that need not be here, and what the compiler says of them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attngen.backends.base import Reading, short_digest
from attngen.backends.triton.sram import aligned
from attngen.bounds.sizes import sizes
from attngen.devices import CLASSES
from attngen.errors import last_line
from attngen.ir.dtypes import of_size
from attngen.ir.graph import Kernel, Module, Row
from attngen.ir.names import ROWS, stride_names
from attngen.ir.ops import Base, Load

_TYPES = {"f32": "fp32", "i32": "i32", "i64": "i64", "b1": "i1"}
_EXECUTABLE = 0x4  # ELF's SHF_EXECINSTR


@dataclass(frozen=True)
class Job:
    """One kernel to compile: the file it is in, its arguments' types, a schedule, a target."""

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
        """A short digest of all that the compiler is given; modules that have the same kernel share it."""
        return short_digest({key: value for key, value in vars(self).items() if key not in ("file", "row_strides")})


def triton_version() -> str:
    """The version of the compiler that is installed."""
    import triton

    return str(triton.__version__)


def job(module: Module, kernel: Kernel, row: Row, file: Path, arch: int | str | None = None) -> Job:
    """The job that compiles `kernel` of a generated kernels.py under a schedule row.

    For the row's own device class, or for another `arch` that takes its rows: a compute capability (86), a HIP architecture.
    """
    device = CLASSES[row.device]
    element = "" if kernel.prepares else of_size(module.dtypes, row.elem_bytes)  # one that prepares reads none
    types, dims = [], sizes(module, row)
    described = {}  # tensor -> rows and columns of its tiles
    for op in kernel.ops():
        base = kernel.op(op.src.tensor) if isinstance(op, Load) and op.via else None
        if isinstance(op, Load) and isinstance(base, Base):
            described[base.src.tensor] = ", ".join(str(dims[d]) for d in op.type.unpadded)
    for arg in kernel.args:
        dtype = element if arg.type.dtype == "T" else _TYPES.get(arg.type.dtype, arg.type.dtype)
        tile = described.get(arg.name) if row.tma else None
        types.append((arg.name, f"tensordesc<{dtype}[1, 1, {tile}]>" if tile else dtype if arg.role == "scalar" else f"*{dtype}"))
    return Job(
        file,
        kernel.name,
        tuple(types),
        (("BLOCK_Q", row.block_q), ("BLOCK_KV", row.block_kv), ("TMA", row.tma)),
        (("num_warps", row.num_warps), ("num_stages", row.num_stages)),
        device.arch if arch is None else arch,
        device.threads_per_warp,
        aligned(module),
        source_digest(file.read_text(encoding="utf-8"), kernel.name),
        tuple(name for arg in kernel.args for dim, name in zip(arg.type.dims, stride_names(arg.name, arg.type.dims)) if dim in ROWS),
    )


@cache
def source_digest(kernels: str, name: str) -> str:
    """A short digest of one kernel of a kernels.py: its source, and what it may use of the rest.

    That is constants and functions that Triton compiles, but for the other kernels: those that SCHEDULES names.
    """
    others = {kernel for kernel in _kernels(kernels) if kernel != name}
    return short_digest("\n".join(text for defines, text in _compiled_parts(kernels) if defines not in others))


def _kernels(kernels: str) -> list[str]:
    """The names of its kernels: the keys of its table of schedules."""
    tables = (n for n in ast.parse(kernels).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SCHEDULES")
    return list(ast.literal_eval(next(tables).value))


@cache
def _compiled_parts(kernels: str) -> tuple[tuple[str, str], ...]:
    """The name and the text of each constant and of each function that Triton compiles, in the order written."""
    lines, parts = kernels.splitlines(), []
    for node in ast.parse(kernels).body:
        start, name = node.lineno, ""
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            start, name = min(d.lineno for d in node.decorator_list), node.name
        elif not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):  # constants; tables of schedules are not calls
            continue
        parts.append((name, "\n".join(lines[start - 1 : node.end_lineno])))
    return tuple(parts)


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[Reading | str]:
    """The readings of jobs, in order: by as many processes as there are cores, or `workers`.

    The processes never interpret, see no cache, and need no GPU. A kernel that several modules have (`delta`, say) is compiled once.
    One that does not compile gives the sentence on why.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), len(jobs)) or 1
    with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
        spawn = multiprocessing.get_context("spawn")  # a forked one would keep this process's Triton, which may interpret
        with ProcessPoolExecutor(workers, spawn, _prepare, (folder,)) as pool:
            alike = [replace(j, file=Path()) for j in jobs]
            started = {key: pool.submit(_compile, j) for key, j in reversed([*zip(alike, jobs)])}
            for future in (started[key] for key in alike):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield "the compiler's process ended"


def _prepare(folder: str) -> None:
    """Set up a process before it imports Triton."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}


def _compile(j: Job) -> Reading | str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_load(j.file), j.kernel)
    types, tiles = dict(j.types), dict(j.tiles)
    signature, constants, divisible = {}, {}, {}
    for i, p in enumerate(function.params):
        if p.is_constexpr:
            signature[p.name], constants[(i,)] = "constexpr", tiles.get(p.name, True)  # a flag is on: that is the heavier kernel
            continue
        stride = p.name not in types
        signature[p.name] = types.get(p.name, "i32")
        if signature[p.name].startswith("*") or (stride and (j.aligned_rows or p.name not in j.row_strides)):
            divisible[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip" if isinstance(j.arch, str) else "cuda", j.arch, j.warp_size)
    said, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            made = triton.compile(ASTSource(function, signature, constants, divisible), target=target, options=dict(j.options))
    except Exception as error:  # of many kinds, of Triton's own and of its tools'
        return last_line(error)
    seconds = time.perf_counter() - start
    registers, spilled = _amd(made.asm["amdgcn"]) if target.backend == "hip" else _nvidia(said.getvalue())
    binary = made.asm["hsaco" if target.backend == "hip" else "cubin"]
    return Reading(made.metadata.shared, registers, spilled, code_bytes(binary), triton_version(), seconds, j.digest)


@cache
def _load(file: Path) -> ModuleType:
    name = f"attngen_certified_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _nvidia(log: str) -> tuple[int, int]:
    """Registers and spilled bytes, as ptxas says."""
    return _numbers(r"Used (\d+) registers", log)[0], sum(_numbers(r"(\d+) bytes spill (?:stores|loads)", log))


def _amd(text: str) -> tuple[int, int]:
    """Registers (the accumulators' counted) and spilled bytes, as the metadata of the assembly says."""
    return _numbers(r"\.vgpr_count: +(\d+)", text)[0], 4 * _numbers(r"\.vgpr_spill_count: +(\d+)", text)[0]


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(n) for n in re.findall(pattern, text)]


def code_bytes(elf: bytes) -> int:
    """Bytes of machine code in an object file (ELF, 64 bits, little endian)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    headers: list[Any] = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    return sum(length for _, _, flags, _, _, length in headers if flags & _EXECUTABLE)
