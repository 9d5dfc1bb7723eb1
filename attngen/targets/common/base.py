"""What a backend gives: all that depends on the compiler that turns kernels into machine code.

Whoever needs a backend asks the registry, attngen/targets/registry.py, for that of a module or of a schedule row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attngen.ir.expr import Expr
from attngen.ir.graph import Config, Kernel, Module
from attngen.transforms.base import Pass

Rule = Callable[[Module, Kernel], Iterator[str]]  # of the verifier: a reason for each thing that breaks it


@dataclass(frozen=True)
class Choices:
    """The values that a schedule row's fields may take, in the order in which they are tried."""

    blocks: tuple[int, ...]  # of BLOCK_Q and BLOCK_KV, smallest first
    warps: tuple[int, ...]
    stages: tuple[int, ...]  # deepest first


@dataclass(frozen=True)
class ResourceModel:
    """The model of what a program takes on chip, under a schedule row."""

    formula: Callable[[Module, Kernel, Config], Expr]  # bytes of shared memory, in closed form
    sram_bytes: Callable[[Module, Kernel, Config], int]
    registers: Callable[[Module, Kernel, Config], int]  # of 32 bits that live tiles take, per thread
    why_not_fit: Callable[
        ..., str | None
    ]  # (module, kernel, row, change=...): a sentence where a row does not fit, or is compiled wrongly
    slack: Callable[[Module, Kernel, Config], str | None]  # why the formula may be above what the compiler reports


@dataclass(frozen=True)
class Cost:
    """The model by which tiles are chosen."""

    cycles: Callable[[Module, Kernel, Config], float]  # of a multiprocessor; inf where a row cannot run
    occupancy: Callable[[Module, Kernel, Config], int]  # programs that share a multiprocessor
    register_limit: Callable[[Config], int]  # registers per thread that live tiles may take
    spills: Callable[[Module, Kernel, Config], bool]  # whether a row is known to spill
    spilling: str  # the file that lists such rows, for readers
    row_key: Callable[[Module, Kernel, Config], str]  # a row, as that file names it


class PrintedKernel(Protocol):
    """What host programs need to know of a kernel as it is printed."""

    params: list[str]
    not_specialized: list[str]
    dropout: bool  # it has the flag DROPOUT, by which calls that drop nothing compile to kernels that draw nothing
    learns: (
        bool  # it has the flag LEARN, by which calls that need no gradients of inputs compile to kernels that sum none
    )


@dataclass(frozen=True)
class Printed:
    """The kernels of a module as they are printed, and the file that holds them: its template, and what that sees."""

    kernels: Mapping[str, PrintedKernel]
    template: str
    context: Mapping[str, Any]


@dataclass(frozen=True)
class CompileReport:
    """What the compiler says of one kernel for one target."""

    shared_bytes: int
    registers: int  # of 32 bits, per thread
    spilled_bytes: int  # per thread: of stores and loads as ptxas counts them, of registers on AMD
    code_bytes: int
    triton: str
    seconds: float = field(compare=False)
    job: str = ""  # the digest of what was compiled
    machine: dict[str, Any] | None = None  # what a backend reads in the machine code beside this, as JSON can hold it

    @property
    def digest(self) -> str:
        """A short digest of what was compiled, by which Triton, and of what was said of it: an edited number has
        another."""
        return short_digest({key: value for key, value in vars(self).items() if key != "seconds" and value is not None})


class Job(Protocol):
    """One kernel to compile."""

    @property
    def digest(self) -> str:
        """A short digest of all that the compiler is given."""


@dataclass(frozen=True)
class Compiler:
    """Compilation ahead of time, for GPUs that need not be here."""

    version: Callable[[], str]
    job: Callable[
        [Module, Kernel, Config, Path], Any
    ]  # the Job of a kernel of a generated kernels.py under a schedule row
    compile_all: Callable[[Sequence[Any], int | None], Iterator[CompileReport | str]]  # of Jobs, by so many processes
    source: Callable[[Any], Any]  # what Triton compiles for a Job
    source_digest: Callable[[str, str], str]  # of the text of kernels.py and a kernel's name: of all its source


@dataclass(frozen=True)
class Backend:
    """A backend. Its passes run around the choice of tiles, which the others share; its rules join those of a phase."""

    name: str
    prepare: tuple[Pass, ...]  # before tiles are chosen
    legalize: tuple[Pass, ...]  # last: from the scheduled phase to the target one
    rules: Mapping[str, Mapping[str, Rule]]  # by phase, `scheduled` and `target`, and name
    choices: Choices
    resources: ResourceModel
    cost: Cost
    printed: Callable[[Module], Printed]
    compiler: Compiler
    file: str = "kernels.py"  # of the generated module: its kernels


@dataclass(frozen=True)
class Specialization:
    """How a backend divides one kernel: whether it does, and under which schedule rows."""

    kernel: str
    beside: tuple[
        str, ...
    ]  # other kernels of the modules in which it may be divided: of those without them nobody is told why it is not
    infeasible: Callable[[Module], str]  # why it cannot be divided, as the end of a sentence; empty text if it can
    row: Callable[
        [Module, int | None, int | None, int | None], Config
    ]  # its own choice, with a spec's block_q, block_kv and stages in place
    long: Callable[
        [Module], Config | None
    ]  # a row that is faster than that one from some number of rows on, if there is one
    least: Callable[
        [Module, Config], int
    ]  # the rows of a call, beyond which a row of it is taken where smaller calls were not measured
    candidates: Callable[
        [Module], tuple[Config, ...]
    ]  # rows that are worth measuring, for any number of rows; none if it cannot divide
    not_preferred: Callable[
        [Module], str
    ]  # why it leaves the kernel portable if nobody asks; empty text where it expects to be faster


# A schedule row for each divided kernel that a kernel gets, the one for fewer rows first; or why it gets none, as the
# end of a sentence.
Choose = Callable[[Specialization, Module], tuple[Config, ...] | str]


@dataclass(frozen=True)
class Specializer:
    """A backend that divides kernels into roles, which stand in for the portable ones on one device class (see
    Module.divided)."""

    name: str
    device: str
    specializations: tuple[Specialization, ...]  # of the kernels that it divides
    passes: Callable[[Choose], tuple[Pass, ...]]
    rules: Mapping[str, Rule]  # of its kernels, beside those that all divided kernels have
    file: str  # of the generated module: its kernels
    template: str
    context: Callable[[Module], Mapping[str, Any]]  # what the template sees
    resources: ResourceModel
    compiler: Compiler
    faults: Callable[
        [Module, Kernel, Config, CompileReport], Iterator[str]
    ]  # what a reading says against a row: the end of a sentence each


def short_digest(of: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of something that JSON can hold, or of a text."""
    text = of if isinstance(of, str) else json.dumps(of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
