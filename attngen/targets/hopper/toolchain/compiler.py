"""Compile warp-specialized kernels ahead of time, without a GPU, and report facts from the compiler's log and from its
machine code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module, only, pipe
from attngen.ir.dtypes import of_size
from attngen.targets.common.ahead import (
    FLAGS,
    TYPES,
    code_bytes,
    compile_each,
    compiled,
    disassembled,
    load,
    ptxas_usage,
    triton_version,
)
from attngen.targets.common.base import CompileReport, short_digest
from attngen.targets.common.instructions import parse
from attngen.targets.common.unset import unset
from attngen.targets.hopper.configs.barriers import mma_warp_groups
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import COUNTER
from attngen.targets.hopper.toolchain.reuse import reused
from attngen.targets.hopper.toolchain.sass import OUTSIDE, Part, parts
from attngen.tiles.launches import launch_options
from attngen.tiles.sizes import tile_width

# Instructions that are counted: products of warp groups and of warps, loads and stores by TMA.
COUNTED = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG")


@dataclass(frozen=True)
class Job:
    """One kernel to compile: its file, the types of its arguments, a config, a target."""

    file: Path
    kernel: str
    dtype: str  # of the tensors that are passed by descriptor
    types: tuple[tuple[str, str], ...]  # of arguments that are not strides, by Triton's names
    widths: tuple[tuple[str, int], ...]  # columns of whole tiles of tensors
    tiles: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, int], ...]
    arch: int | str
    warp_size: int
    marks: tuple[tuple[str, str], ...]  # warp groups, and an instruction that only the code of each has
    source: str = ""  # the digest of the kernel's source
    sums: int = 0  # columns of accumulators, where weights may be in shared memory (see sass.parts)

    @property
    def digest(self) -> str:
        """A short digest of the compiler's whole input; modules that have the same kernel share it."""
        return short_digest(
            {key: value for key, value in vars(self).items() if key != "file" and (key != "sums" or value)}
        )


def job(module: Module, kernel: Kernel, config: Config, file: Path) -> Job:
    """Return the job that compiles a kernel of a generated hopper.py under a config."""
    device, element = CLASSES[config.device], of_size(module.dtypes, config.elem_bytes)
    types = []
    for arg in kernel.args:
        dtype = TYPES.get(arg.type.dtype, element)
        types.append((arg.name, dtype if arg.role == "scalar" else f"*{dtype}"))
    types.append((COUNTER, "*i32"))
    widths = {name: tile_width(width) for name, width in module.widths.items()}
    return Job(
        file,
        kernel.name,
        element,
        tuple(types),
        tuple(
            (arg.name, widths[arg.type.dims[-1]])
            for arg in kernel.args
            if arg.type.dims and arg.type.dims[-1] in widths
        ),
        (("BLOCK_Q", config.block_q), ("BLOCK_KV", config.block_kv), ("STAGES", config.num_stages)),
        tuple(launch_options(kernel, config).items()),
        device.arch,
        device.threads_per_warp,
        tuple(marks(kernel)),
        source_digest(file.read_text(encoding="utf-8"), kernel.name),
        module.head_dim_v // 2 if is_mla_decode(kernel) else 0,
    )


def marks(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Yield warp groups, each with an instruction that only its code has: a product if it issues matrix products, a TMA
    load if it fills pipelines.

    Where several warp groups issue products, the first one stands for all.
    """
    multiplying = mma_warp_groups(kernel)
    for block in kernel.warp_groups:
        ops = list(kernel.within(block.name))
        if block.name in multiplying:
            if block.name == multiplying[0]:
                yield block.name, "HGMMA"
        elif any(only(ops, pipe.ProducerLoad)):
            yield block.name, "UTMALDG"


@cache
def source_digest(text: str, name: str) -> str:
    """A short digest of a kernel's hopper.py without its docstring, which names the spec it was generated from."""
    first = ast.parse(text).body[0]
    return short_digest("\n".join([name, *text.splitlines()[first.end_lineno or 0 :]]))


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[CompileReport | str]:
    """Compile jobs, and yield their reports in order; see compile_each."""
    return compile_each(_compile, jobs, workers)


def _compile(j: Job) -> CompileReport | str:
    result = compiled(source(j), j)
    if isinstance(result, str):
        return result
    kernel, log, seconds = result
    binary = kernel.asm["cubin"]
    code = machine_code(disassembled(binary), log, j.marks, j.sums)
    return CompileReport(
        kernel.metadata.shared, *ptxas_usage(log), code_bytes(binary), triton_version(), seconds, j.digest, code
    )


def source(j: Job) -> Any:
    """Return the source that Triton compiles for a job: the kernel with the types of a call whose tensors are aligned.

    All flags are on, which gives the heavier kernel.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    file = load(j.file)
    function, element = getattr(file, j.kernel), {"bf16": gl.bfloat16, "fp16": gl.float16}[j.dtype]
    types, tiles, widths = dict(j.types), FLAGS | dict(j.tiles), dict(j.widths)
    names = [p.name for p in function.params]
    for at, rows, *columns in file.DESCRIBED[j.kernel]:
        block = [1, 1, tiles.get(rows, rows), *(columns or [widths[names[at]]])]
        dtype = types[names[at]].lstrip("*")
        of = element if dtype == j.dtype else gl.float32
        types[names[at]] = f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, of)!r}>"
    signature, constants, divisible = {}, {}, {}
    for i, p in enumerate(function.params):
        if p.is_constexpr:
            signature[p.name], constants[p.name] = "constexpr", tiles[p.name]
            continue
        signature[p.name] = types.get(p.name, "i32")
        if signature[p.name].startswith("*") or (p.name.startswith("stride_") and not p.do_not_specialize):
            divisible[(i,)] = [["tt.divisibility", 16]]
    return GluonASTSource(function, signature, constants, divisible)


def machine_code(text: str, log: str, marks: Sequence[tuple[str, str]], sums: int = 0) -> dict[str, Any]:
    """Return facts about a kernel's machine code, in a form that JSON can hold.

    - roles: warp group -> for each of its instances, the registers that its warps have, and those that its instructions
      name;
    - serialised: the numbers of ptxas' warnings that products wait for each other;
    - reused: instructions that write a register of a product in flight;
    - unset: instructions that read a uniform register that a path to them has not written;
    - under: how many of the `exponentials` in loops are executed while a product of weights runs;
    - reloads: loads and stores of spilled registers in such loops.
    """
    code = parse(text)
    of: dict[str, list[Part]] = {warp_group: [] for warp_group, _ in marks}
    for part in parts(code, sums):
        if part.registers == OUTSIDE and not part.ops["HGMMA"]:
            continue  # the entry, which may have early loads
        warp_group = next((warp_group for warp_group, op in marks if part.ops[op]), None)
        if warp_group is not None:
            of[warp_group].append(part)
    all_splits = [part for found in of.values() for part in found]
    return {
        "roles": {
            warp_group: {"registers": [p.registers for p in found], "used": [p.used for p in found]}
            for warp_group, found in of.items()
        },
        **{op: sum(instruction.op == op for instruction in code) for op in COUNTED},
        "serialised": sorted(set(re.findall(r"\bC75\d\d\b", log))),
        "reused": reused(code),
        "unset": unset(code),
        "exponentials": sum(p.exponentials for p in all_splits),
        "under": sum(p.under for p in all_splits),
        "reloads": sum(p.reloads for p in all_splits),
    }
