"""Check in Hopper's machine code, as nvdisasm prints it, that nothing touches the registers of products in flight.

A product (HGMMA) reads its left operand and adds to its accumulator while the instructions after it run, until a wait
(WARPGROUP.DEPBAR) that retires its group. Until then nothing else may write these registers, or read the accumulator.
ptxas before 13.3 can give the registers of the operand to other values (triton#11781, and the release notes of CUDA
13.3), and does not say so. Therefore its output is checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.targets.common.instructions import Instruction

_MOST_GROUPS = 8  # in flight, whose registers are tracked separately


@dataclass(frozen=True)
class Group:
    """Registers of products that are waited for together."""

    operands: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()


Flight = tuple[Group, ...]  # the groups in flight, oldest first; the last is open, and new products are added to it


def reused(code: list[Instruction]) -> list[str]:
    """Return a sentence for each instruction that touches registers of a product in flight, on any path through the
    code; none if all is well."""
    found: dict[int, str] = {}
    seen: set[tuple[int, Flight]] = set()
    remaining: list[tuple[int, Flight]] = [(0, (Group(),))]
    while remaining:
        state = remaining.pop()
        if state in seen:
            continue
        seen.add(state)
        at, flight = state
        if fault := _fault(code[at], flight):
            found[at] = f"instruction {at}, {code[at].name} {', '.join(code[at].operands)}, {fault}"
        flight = _after(code[at], flight)
        remaining += [(to, flight) for to in code[at].then]
    return [found[at] for at in sorted(found)]


def _written(one: Instruction) -> frozenset[int]:
    """The registers that an instruction writes; none for a product."""
    found = None if one.is_product else re.fullmatch(r"R(\d+)", one.target)
    return _span(int(found[1]), one.width) if found else frozenset()


def _touched(one: Instruction) -> frozenset[int]:
    """The registers that an instruction writes, and the first of each operand."""
    return _written(one) | {int(n) for text in one.operands for n in re.findall(r"\bR(\d+)\b", text)}


def _operand(product: Instruction) -> frozenset[int]:
    """The registers of a product's left operand: four, of 64 rows of 32 bytes; none where it is in shared memory."""
    found = re.match(r"R(\d+)", product.operands[1])
    return _span(int(found[1]), 4) if found else frozenset()


def _sum(product: Instruction) -> frozenset[int]:
    """The registers of a product's accumulator."""
    return _span(int(product.operands[0][1:]), product.width)


def _span(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))


def _fault(op: Instruction, flight: Flight) -> str:
    """Return how an instruction misuses registers of products in flight; empty text if it does not."""
    operands = frozenset[int]().union(*(group.operands for group in flight))
    sums = frozenset[int]().union(*(group.sums for group in flight))
    if op.is_product:  # it may add to an accumulator in flight: the tensor cores keep the order
        return _sentence("writes", _sum(op) & operands, "an operand") or _sentence(
            "reads", _operand(op) & sums, "a sum"
        )
    return _sentence("writes", _written(op) & operands, "an operand") or _sentence(
        "touches", _touched(op) & sums, "a sum"
    )


def _sentence(verb: str, registers: frozenset[int], owner: str) -> str:
    return f"{verb} R{min(registers)} of {owner} in flight" if registers else ""


def _after(op: Instruction, flight: Flight) -> Flight:
    """The groups in flight after an instruction."""
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
