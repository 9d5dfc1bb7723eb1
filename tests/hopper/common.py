"""What the tests of the backend for Hopper share: specs that ask for it, and modules with their divided kernels."""

from __future__ import annotations

from functools import cache

from attngen.ir.graph import Kernel, Module
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import stages
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.common import infeasible
from tests.helpers import SPECS, edit, spec, target


@cache
def asking(name: str) -> Spec:
    """A spec of specs/ that asks for this backend."""
    plain = spec(name)
    return plain.model_copy(update={"schedule": plain.schedule.model_copy(update={"backend": "hopper"})})


@cache
def wide(qk: int, v: int) -> Spec:
    """A spec with heads of these widths."""
    return make_spec(
        {"name": "wide", "head_dim": {"qk": qk, "v": v}, "mask": "causal", "schedule": {"backend": "hopper"}}
    )


@cache
def after(name: str) -> dict[str, Module]:
    """The verified module after every pass, by the pass's name."""
    return dict(stages(asking(name)))


def whole(name: str) -> Module:
    """The module after the last pass."""
    return list(after(name).values())[-1]


def kernel(name: str) -> Kernel:
    """The divided forward."""
    return whole(name).warp_specialized[0]


def edited(name: str, *changes: tuple[str, str]) -> Module:
    """The module of a spec with its text edited from the divided kernel on; not verified."""
    return edited_module(whole(name), *changes)


def edited_module(module: Module, *changes: tuple[str, str], kernel: str = "fwd") -> Module:
    """The same of any module, from a divided kernel on."""
    before, at, rest = print_module(module).partition(f"kernel @{kernel} backend(hopper)")
    return parse_module(before + at + edit(rest, *changes))


def gone_and_come(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """The lines that go, and those that come."""
    return [line for line in old if line not in new], [line for line in new if line not in old]


WARP_SPECIALIZED = [name for name in SPECS if not infeasible(target(name), target(name).kernels[0])]
