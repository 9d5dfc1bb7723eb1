"""Reads Hopper's machine code, as nvdisasm prints it: are the registers of products in flight left alone?

A product (HGMMA) reads its left operand and adds to its sum while the instructions after it run, until a wait (WARPGROUP.DEPBAR) that
retires its group. Until then nothing else may write these registers, or read the sum. ptxas before 13.3 can give those of the operand to
others (triton#11781, and the release notes of CUDA 13.3), and it says nothing. So what it made is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.\w+):")
_READERS = ("BAR", "BRX", "JMX", "RET", "NANOSLEEP", "WARPSYNC", "CALL", "BMOV")  # which write no register
_JUMPS = ("BRA", "BRX", "JMP", "BSSY", "CALL")
_MOST_GROUPS = 8  # in flight that are told apart


@dataclass(frozen=True)
class Instruction:
    """A line of code: its guard (empty text where it always runs), its name with modifiers, its operands."""

    guard: str
    name: str
    operands: tuple[str, ...]

    @property
    def is_product(self) -> bool:
        """Whether the matrix units run it."""
        return self.name.startswith("HGMMA")

    @property
    def ends(self) -> bool:
        """Whether the line after it is reached by jumps alone."""
        op = self.name.split(".")[0]
        return not self.guard and (op in ("EXIT", "BRX", "RET") or (op in ("BRA", "JMP") and self.operands[0].startswith("`")))

    @property
    def written(self) -> frozenset[int]:
        """The registers that it writes, but for a product's sum."""
        if self.is_product or self.name.startswith(_READERS):
            return frozenset()
        first = next((text for text in self.operands[:2] if not re.fullmatch(r"U?P[0-9T]", text)), "")  # predicates come before it
        found = re.fullmatch(r"R(\d+)", first)
        return _span(int(found[1]), _width(self.name)) if found else frozenset()

    @property
    def touched(self) -> frozenset[int]:
        """The registers that it writes, and the first of each operand."""
        return self.written | {int(n) for text in self.operands for n in re.findall(r"\bR(\d+)\b", text)}

    @property
    def operand(self) -> frozenset[int]:
        """The registers of a product's left operand: four, of 64 rows of 32 bytes; none where it is in shared memory."""
        found = re.match(r"R(\d+)", self.operands[1])
        return _span(int(found[1]), 4) if found else frozenset()

    @property
    def sum(self) -> frozenset[int]:
        """The registers of a product's sum: of each thread, N / 2 numbers of fp32, of 64 rows and N columns."""
        columns = re.search(r"\.64x(\d+)x", self.name)
        assert columns, self.name
        return _span(int(self.operands[0][1:]), int(columns[1]) // 2)


@dataclass(frozen=True)
class Group:
    """Registers of products that are waited for together."""

    operands: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()


Flight = tuple[Group, ...]  # the groups in flight, oldest first; products join the last, which is open


def reused(sass: str) -> list[str]:
    """A sentence for each instruction that touches registers of a product in flight, on any path through the code; none if all is well."""
    code, labels = _parsed(sass)
    found: dict[int, str] = {}
    seen: set[tuple[int, Flight]] = set()
    left: list[tuple[int, Flight]] = [(0, (Group(),))]
    while left:
        state = left.pop()
        if state in seen or state[0] >= len(code):
            continue
        seen.add(state)
        at, flight = state
        here = code[at]
        if said := _wrong(here, flight):
            found[at] = f"instruction {at}, {here.name} {', '.join(here.operands)}, {said}"
        flight = _after(here, flight)
        if here.name.startswith(_JUMPS):
            left += [(labels[name], flight) for text in here.operands for name in re.findall(r"\.L_\w+", text)]
        if not here.ends:
            left.append((at + 1, flight))
    return [found[at] for at in sorted(found)]


def _parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions in order, and which of them each label stands before."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            operands = tuple(text.strip().removesuffix(".reuse") for text in found[3].split(",")) if found[3] else ()
            code.append(Instruction(found[1] or "", found[2], operands))
    return code, labels


def _span(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))


def _width(name: str) -> int:
    """How many registers an instruction writes, by its modifiers."""
    op, *more = name.split(".")
    if op == "LDSM":
        return int(more[-1]) if more[-1].isdigit() else 1
    if op.startswith(("LD", "ATOM", "F2I")):
        return 4 if "128" in more else 2 if {"64", "U64", "S64"} & {*more} else 1
    return 2 if op in ("DADD", "DMUL", "DFMA", "LEPC") or "WIDE" in more or (op == "CS2R" and "32" not in more) else 1


def _wrong(op: Instruction, flight: Flight) -> str:
    """What an instruction does to registers of products in flight; empty text if nothing."""
    operands = frozenset[int]().union(*(group.operands for group in flight))
    sums = frozenset[int]().union(*(group.sums for group in flight))
    if op.is_product:  # it may add to a sum in flight: the matrix units keep the order
        return _sentence("writes", op.sum & operands, "an operand") or _sentence("reads", op.operand & sums, "a sum")
    return _sentence("writes", op.written & operands, "an operand") or _sentence("touches", op.touched & sums, "a sum")


def _sentence(verb: str, registers: frozenset[int], what: str) -> str:
    return f"{verb} R{min(registers)} of {what} in flight" if registers else ""


def _after(op: Instruction, flight: Flight) -> Flight:
    """What is in flight after an instruction."""
    *closed, last = flight
    if op.is_product:
        last = Group(last.operands | op.operand, last.sums | op.sum)
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
