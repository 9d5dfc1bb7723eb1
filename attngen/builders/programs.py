"""Host programs and kernels, as IR text next to the masks, that derive tensors from a call's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import resources

from attngen.ir import DEFAULT_BACKEND, Derived, Host, Kernel, Module
from attngen.ir.parser import parse_programs


def add_programs(module: Module) -> Module:
    """The module with the host programs that its `derive` lines name, and their kernels."""
    for name in dict.fromkeys(d.program for d in module.derived if d.program):
        hosts, kernels = program(name)
        module = replace(module, hosts=module.hosts + hosts, kernels=module.kernels + kernels)
    return module


# suffix of a program's variant for calls with a KV cache
IN_CACHE = "_in_cache"


def in_cache(derived: Iterable[Derived]) -> Iterator[tuple[Host, tuple[Kernel, ...]]]:
    """The host programs, with their kernels, that derive tensors for calls with a KV cache."""
    for name in dict.fromkeys(d.program for d in derived if d.program):
        (host,), kernels = program(name + IN_CACHE)
        yield host, kernels


@cache
def program(name: str) -> tuple[tuple[Host, ...], tuple[Kernel, ...]]:
    """The host program of attngen/masks/NAME.ir, and its kernels."""
    text = resources.files("attngen.masks").joinpath(f"{name}.ir").read_text(encoding="utf-8")
    return parse_programs(text, f"{name}.ir")


@cache
def program_module(name: str) -> Module:
    """A module with only this program, to execute it."""
    hosts, kernels = program(name)
    return Module(
        name=name,
        version="",
        spec_hash="",
        phase="logical",
        backend=DEFAULT_BACKEND,
        sharing="mha",
        head_dim_qk=16,
        head_dim_v=16,
        dtypes=(),
        precision="ieee",
        mask="",
        score="",
        order="q_outer",
        blocks=None,
        dropout=False,
        inputs=(),
        derived=(),
        input_gradients=(),
        kernels=kernels,
        hosts=hosts,
    )
