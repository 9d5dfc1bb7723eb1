"""Helpers of the tests of the Hopper backend: specs that select it, their modules after each pass, and edits of the IR
text."""

from __future__ import annotations

import re
from functools import cache

from attngen.ir import Kernel, Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.forward import infeasible
from tests.helpers import SPECS, edit, spec, stages_of, target
from tests.hopper.texts import kernel_after


@cache
def hopper_spec(name: str) -> Spec:
    """A spec of specs/ with `schedule: {backend: hopper}`."""
    plain = spec(name)
    return plain.model_copy(update={"schedule": plain.schedule.model_copy(update={"backend": "hopper"})})


@cache
def spec_with_head_dims(qk: int, v: int) -> Spec:
    """A causal spec for Hopper with these head_dims of Q and K, and of V."""
    return make_spec(
        {"name": "wide", "head_dim": {"qk": qk, "v": v}, "mask": "causal", "schedule": {"backend": "hopper"}}
    )


@cache
def after_passes(name: str) -> dict[str, Module]:
    """The verified module after every pass, by the pass's name."""
    return stages_of(hopper_spec(name))


def lowered(name: str) -> Module:
    """The module after the last pass."""
    return list(after_passes(name).values())[-1]


def forward_kernel(name: str) -> Kernel:
    """The warp-specialized forward kernel after the last pass."""
    return lowered(name).warp_specialized[0]


def edited(name: str, *changes: tuple[str, str]) -> Module:
    """The module of a spec with its text edited from the warp-specialized forward on; not verified."""
    return edited_module(lowered(name), *changes)


def edited_module(module: Module, *changes: tuple[str, str], kernel: str = "fwd") -> Module:
    """The module with its text edited from a warp-specialized kernel on; not verified."""
    before, at, rest = print_module(module).partition(f"kernel @{kernel} backend(hopper)")
    return parse_module(before + at + edit(rest, *changes))


def edited_mla_decode(*changes: tuple[str, str]) -> Module:
    """The module of decode_mla with its text edited from the warp-specialized decode kernel on; not verified."""
    return edited_module(target("decode_mla"), *changes, kernel="decode")


def lines_of(kernel: Kernel, block: str) -> list[str]:
    """The ops of a block or warp group of a kernel, as text."""
    text = print_kernel(kernel)
    found = (
        re.split(rf"(?:block|warp_group) @{block}\b", text, maxsplit=1)[1]
        .split("\n  block ")[0]
        .split("\n  warp_group ")[0]
    )
    return [line.strip() for line in found.splitlines()[1:] if not line.strip().startswith("about")]


def lines(after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The ops of a block of the warp-specialized forward after a pass, as text."""
    return lines_of(kernel_after(name, "fwd", after) or after_passes(name)[after].warp_specialized[0], block)


def op_kinds(after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The kinds of a block's ops."""
    return [
        line.partition(" = ")[2].split()[0] if line.startswith("%") else line.split()[0]
        for line in lines(after, block, name)
    ]


def index_of(ops: list[str], name: str) -> int:
    """The index of the first op with this name."""
    return next(i for i, op in enumerate(ops) if op.startswith(f"{name} ="))


def removed_and_added(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """The lines that are only in `old`, and those that are only in `new`."""
    return [line for line in old if line not in new], [line for line in new if line not in old]


WARP_SPECIALIZED = [name for name in SPECS if not infeasible(target(name), target(name).kernels[0])]
