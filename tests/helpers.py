"""What the tests share: specs and the modules they lower to, small IR written as text, edits of text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen.ir.graph import Module
from attngen.ir.text import parse_module, print_kernel
from attngen.ir.verify import verify
from attngen.passes.base import Pass
from attngen.passes.pipeline import stages
from attngen.spec import Spec, load_spec

ROOT = Path(__file__).parent.parent
SPECS = sorted(p.stem for p in (ROOT / "specs").glob("*.yaml"))


@cache
def spec(name: str) -> Spec:
    """A spec of specs/ by name."""
    return load_spec(ROOT / "specs" / f"{name}.yaml")


@cache
def lowered(name: str) -> dict[str, Module]:
    """A spec's verified module after every pass, by the pass's name; the logical one is `build`."""
    return dict(stages(spec(name)))


def target(name: str) -> Module:
    """A spec's module after the last pass."""
    return lowered(name)["legalize-triton"]


def edit(text: str, *changes: tuple[str, str]) -> str:
    """The text with the first occurrence of each old string replaced; every one must occur."""
    for old, new in changes:
        assert old in text, f"`{old}` is not in the text"
        text = text.replace(old, new, 1)
    return text


def module(kernels: str, phase: str = "logical", head_dim: int = 64, dtype: str = "bf16") -> Module:
    """A verified module of kernels, and schedules, written as text; the rest of its header does not matter."""
    return verify(unverified(kernels, phase, head_dim, dtype))


def unverified(kernels: str, phase: str = "logical", head_dim: int = 64, dtype: str = "bf16") -> Module:
    header = f"""\
module @small
  version 0
  spec sha256:0
  phase {phase}
  backend triton
  heads mha
  head_dim qk={head_dim} v={head_dim}
  dtype {dtype}
  precision ieee
  mask small
"""
    return parse_module(header + kernels, "small.ir")


def after(step: Pass, before: Module) -> list[str]:
    """The first kernel's lines, without indentation, after a pass and the verifier."""
    return lines(print_kernel(verify(step.run(before)).kernels[0]))


def lines(text: str) -> list[str]:
    """Lines without indentation, blank ones left out."""
    return [line.strip() for line in text.splitlines() if line.strip()]
