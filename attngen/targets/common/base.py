"""The protocol of a backend: everything that depends on the compiler of its kernels.

attngen/targets/registry.py finds the backend of a module or of a config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attngen.ir import Config, Expr, Kernel, Module
from attngen.transforms.base import Pass

Rule = Callable[[Module, Kernel], Iterator[str]]  # a rule of the verifier: yields a sentence per violation


@dataclass(frozen=True)
class Choices:
    """The values that a config's fields may take, in the order in which they are tried."""

    blocks: tuple[int, ...]  # of BLOCK_Q and BLOCK_KV, smallest first
    warps: tuple[int, ...]
    stages: tuple[int, ...]  # deepest first


@dataclass(frozen=True)
class ResourceModel:
    """The model of a program's shared memory and registers under a config."""

    formula: Callable[[Module, Kernel, Config], Expr]  # bytes of shared memory, in closed form
    sram_bytes: Callable[[Module, Kernel, Config], int]
    registers: Callable[[Module, Kernel, Config], int]  # 32-bit registers per thread that live tiles take
    # (module, kernel, config, change=...): a sentence if the config does not fit, or is miscompiled
    why_not_fit: Callable[..., str | None]
    slack: Callable[[Module, Kernel, Config], str | None]  # why the formula may exceed the compiler's number


@dataclass(frozen=True)
class Cost:
    """The model by which tiles are chosen."""

    cycles: Callable[[Module, Kernel, Config], float]  # SM cycles; inf if a config cannot run
    occupancy: Callable[[Module, Kernel, Config], int]  # programs that share an SM
    register_limit: Callable[[Config], int]  # registers per thread that live tiles may take
    spills: Callable[[Module, Kernel, Config], bool]  # whether a config is known to spill
    spilling: str  # the file that lists such configs, for readers
    row_key: Callable[[Module, Kernel, Config], str]  # a config's name in that file


class PrintedKernel(Protocol):
    """The part of a printed kernel that host programs read."""

    params: list[str]
    not_specialized: list[str]
    dropout: bool  # has the flag DROPOUT: without dropout, a call compiles to a kernel that generates no random bits
    # Has the flag _INPUT_GRADIENTS: if a call needs no gradients of inputs, its kernel is compiled without them.
    sums_input_gradients: bool


@dataclass(frozen=True)
class Printed:
    """The printed kernels of a module, and the template of their file with its context."""

    kernels: Mapping[str, PrintedKernel]
    template: str
    context: Mapping[str, Any]


@dataclass(frozen=True)
class CompileReport:
    """The compiler's report on one kernel for one target."""

    shared_bytes: int
    registers: int  # 32-bit registers per thread
    spilled_bytes: int  # per thread: bytes of spill stores and loads as ptxas counts them; of spilled registers on AMD
    code_bytes: int
    triton: str
    seconds: float = field(compare=False)
    job: str = ""  # the digest of the job
    machine: dict[str, Any] | None = None  # facts that a backend reads in the machine code, as JSON

    @property
    def digest(self) -> str:
        """A short digest of the job, Triton's version and the report, which changes if a number is edited."""
        return short_digest({key: value for key, value in vars(self).items() if key != "seconds" and value is not None})


class Job(Protocol):
    """One kernel to compile."""

    @property
    def digest(self) -> str:
        """A short digest of the compiler's input."""


@dataclass(frozen=True)
class Compiler:
    """Compilation ahead of time, for GPUs that need not be present."""

    version: Callable[[], str]
    job: Callable[[Module, Kernel, Config, Path], Any]  # the Job of a generated file's kernel under a config
    compile_all: Callable[[Sequence[Any], int | None], Iterator[CompileReport | str]]  # (jobs, number of processes)
    source: Callable[[Any], Any]  # Triton's source of a Job
    source_digest: Callable[[str, str], str]  # (text of kernels.py, kernel's name): digest of all source that it uses


@dataclass(frozen=True)
class Backend:
    """A backend. Its passes run before and after tile selection, which backends share; its rules add to a phase's."""

    name: str
    prepare: tuple[Pass, ...]  # run before tiles are chosen
    legalize: tuple[Pass, ...]  # run last: from the scheduled phase to the target phase
    rules: Mapping[str, Mapping[str, Rule]]  # phase, `scheduled` or `target` -> name -> rule
    choices: Choices
    resources: ResourceModel
    cost: Cost
    printed: Callable[[Module], Printed]
    compiler: Compiler
    file: str = "kernels.py"  # the file of the generated module that holds the kernels


@dataclass(frozen=True)
class Specialization:
    """How a backend warp-specializes one kernel: when it can, and under which configs."""

    kernel: str
    # Other kernels that a module must have, too; without them, no reason is given why this one is not specialized.
    requires: tuple[str, ...]
    infeasible: Callable[[Module], str]  # why it cannot be specialized, as the end of a sentence; "" if it can
    # (module, block_q, block_kv, stages): the default config, with a spec's own values where they are not None
    row: Callable[[Module, int | None, int | None, int | None], Config]
    long: Callable[[Module], Config | None]  # a config that is faster for calls of many rows, if there is one
    # The number of rows beyond which calls use a config, unless measurements give another number.
    least: Callable[[Module, Config], int]
    candidates: Callable[[Module], tuple[Config, ...]]  # configs worth measuring; () if it is infeasible
    not_preferred: Callable[[Module], str]  # why the portable kernel is the default; "" if it is expected to be slower


# The configs of the warp-specialized kernels that a kernel gets, one each, the one for fewer rows first; or why it gets
# none, as the end of a sentence.
Choose = Callable[[Specialization, Module], tuple[Config, ...] | str]


@dataclass(frozen=True)
class Specializer:
    """A backend that warp-specializes kernels, which replace the portable ones on one device class (see
    Module.warp_specialized)."""

    name: str
    device: str
    specializations: tuple[Specialization, ...]
    passes: Callable[[Choose], tuple[Pass, ...]]
    lowering: tuple[Pass, ...]  # from the target module to the statements that are printed
    rules: Mapping[str, Rule]  # rules of its kernels, in addition to those of all warp-specialized kernels
    file: str  # the file of the generated module that holds the kernels
    template: str
    context: Callable[[Module], Mapping[str, Any]]  # the names that the template reads
    resources: ResourceModel
    compiler: Compiler
    # Why a compile report rules out a config: ends of sentences.
    faults: Callable[[Module, Kernel, Config, CompileReport], Iterator[str]]


def short_digest(of: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON value or a text."""
    text = of if isinstance(of, str) else json.dumps(of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
