"""Ahead-of-time compilation by Triton, which backends share, in processes that need no GPU and never interpret."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attngen.errors import last_line
from attngen.ir.dtypes import QUANTISED
from attngen.targets.common.base import CompileReport

# IR type -> Triton's name
TYPES = {
    "f32": "fp32",
    "i32": "i32",
    "i64": "i64",
    "b1": "i1",
    **dict.fromkeys(QUANTISED.values(), "i16"),
}
FLAGS = {
    "DROPOUT": True,
    "_INPUT_GRADIENTS": True,
}  # constants that a call sets: they are on, as in the heaviest kernel
_EXECUTABLE = 0x4  # ELF's SHF_EXECINSTR


def triton_version() -> str:
    """The version of the installed Triton."""
    import triton

    return str(triton.__version__)


def compile_each(
    compile_one: Callable[[Any], CompileReport | str], jobs: Sequence[Any], workers: int | None = None
) -> Iterator[CompileReport | str]:
    """The compile reports of jobs, in order, made by `workers` processes (by default one per core).

    The processes never interpret, see no cache, and need no GPU. A kernel that several modules have, such as `delta`,
    is compiled once. The result for a kernel that does not compile is a sentence with the reason. Jobs have a field
    `file`; compile_one is a function that processes can import.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), len(jobs)) or 1
    with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
        # A forked process would keep this process's Triton, which may interpret.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, _prepare, (folder,)) as pool:
            alike = [replace(j, file=Path()) for j in jobs]
            started = {key: pool.submit(compile_one, j) for key, j in reversed([*zip(alike, jobs)])}
            for future in (started[key] for key in alike):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield "the compiler's process ended"


def _prepare(folder: str) -> None:
    """Set up a process before it imports Triton."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}


def compiled(source: Any, job: Any) -> tuple[Any, str, float] | str:
    """Compile the source of a job: (Triton's result, the output of its tools, seconds); or a sentence on why it does
    not compile."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip" if isinstance(job.arch, str) else "cuda", job.arch, job.warp_size)

    log, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            result = triton.compile(source, target=target, options=dict(job.options))
    except Exception as error:  # Triton and its tools raise many kinds
        return last_line(error)
    return result, log.getvalue(), time.perf_counter() - start


@cache
def load(file: Path) -> ModuleType:
    """Import a Python file of kernels."""
    name = f"attngen_certified_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ptxas_usage(log: str) -> tuple[int, int]:
    """Registers and spilled bytes, from the log of ptxas."""
    return numbers(r"Used (\d+) registers", log)[0], sum(numbers(r"(\d+) bytes spill (?:stores|loads)", log))


def numbers(pattern: str, text: str) -> list[int]:
    """The integers that a pattern finds."""
    return [int(n) for n in re.findall(pattern, text)]


def code_bytes(elf: bytes) -> int:
    """Bytes of machine code in an object file (ELF, 64 bits, little endian)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    headers: list[Any] = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    return sum(length for _, _, flags, _, _, length in headers if flags & _EXECUTABLE)


def disassembled(binary: bytes) -> str:
    """Machine code as text, by the nvdisasm in Triton's wheel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
