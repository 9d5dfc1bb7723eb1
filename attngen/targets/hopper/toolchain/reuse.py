"""Reads Hopper's machine code, as nvdisasm prints it: are the registers of products in flight left alone?

A product (HGMMA) reads its left operand and adds to its sum while the instructions after it run, until a wait
(WARPGROUP.DEPBAR) that retires its group. Until then nothing else may write these registers, or read the sum. ptxas
before 13.3 can give those of the operand to others (triton#11781, and the release notes of CUDA 13.3), and it says
nothing. So what it made is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.targets.common.instructions import Instruction

_MOST_GROUPS = 8  # in flight that are told apart


@dataclass(frozen=True)
class Group:
    """Registers of products that are waited for together."""

    operands: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()


Flight = tuple[Group, ...]  # the groups in flight, oldest first; products join the last, which is open


def reused(code: list[Instruction]) -> list[str]:
    """A sentence for each instruction that touches registers of a product in flight, on any path through the code;
    none if all is well."""
    found: dict[int, str] = {}
    seen: set[tuple[int, Flight]] = set()
    left: list[tuple[int, Flight]] = [(0, (Group(),))]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        at, flight = state
        if said := _wrong(code[at], flight):
            found[at] = f"instruction {at}, {code[at].name} {', '.join(code[at].operands)}, {said}"
        flight = _after(code[at], flight)
        left += [(to, flight) for to in code[at].then]
    return [found[at] for at in sorted(found)]


def _written(one: Instruction) -> frozenset[int]:
    """The registers that it writes, but for a product's sum."""
    found = None if one.is_product else re.fullmatch(r"R(\d+)", one.target)
    return _span(int(found[1]), one.width) if found else frozenset()


def _touched(one: Instruction) -> frozenset[int]:
    """The registers that it writes, and the first of each operand."""
    return _written(one) | {int(n) for text in one.operands for n in re.findall(r"\bR(\d+)\b", text)}


def _operand(product: Instruction) -> frozenset[int]:
    """The registers of a product's left operand: four, of 64 rows of 32 bytes; none where it is in shared memory."""
    found = re.match(r"R(\d+)", product.operands[1])
    return _span(int(found[1]), 4) if found else frozenset()


def _sum(product: Instruction) -> frozenset[int]:
    """The registers of a product's sum."""
    return _span(int(product.operands[0][1:]), product.width)


def _span(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))


def _wrong(op: Instruction, flight: Flight) -> str:
    """What an instruction does to registers of products in flight; empty text if nothing."""
    operands = frozenset[int]().union(*(group.operands for group in flight))
    sums = frozenset[int]().union(*(group.sums for group in flight))
    if op.is_product:  # it may add to a sum in flight: the matrix units keep the order
        return _sentence("writes", _sum(op) & operands, "an operand") or _sentence(
            "reads", _operand(op) & sums, "a sum"
        )
    return _sentence("writes", _written(op) & operands, "an operand") or _sentence(
        "touches", _touched(op) & sums, "a sum"
    )


def _sentence(verb: str, registers: frozenset[int], what: str) -> str:
    return f"{verb} R{min(registers)} of {what} in flight" if registers else ""


def _after(op: Instruction, flight: Flight) -> Flight:
    """What is in flight after an instruction."""
    *closed, last = flight
    if op.is_product:
        last = Group(last.operands | _operand(op), last.sums | _sum(op))
        if op.operands[-1] != "gsb0":  # more of its group follow
            return (*closed, last)
        if len(closed) == _MOST_GROUPS:
            oldest, *closed = closed
            closed[0] = Group(oldest.operands | closed[0].operands, oldest.sums | closed[0].sums)
        return (*closed, last, Group())
    if op.name.startswith("WARPGROUP.DEPBAR"):
        most = int(op.operands[-1], 16)
        return (*closed[max(0, len(closed) - most) :], last)
    return flight
