"""Parses Hopper's machine code, as nvdisasm prints it, into instructions and their successors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?(.*?)\s*;?\s*$")
_LABEL = re.compile(r"(\.L\w+):")
_READERS = ("BAR", "BRX", "JMX", "RET", "NANOSLEEP", "WARPSYNC", "CALL", "BMOV")  # instructions that write no register
_ALWAYS = re.compile(r"(BRX|EXIT|RET|(BRA|JMP)(\.\w+)* `)")  # only jumps reach the line after such an instruction


@dataclass(frozen=True)
class Instruction:
    """One instruction without its guard."""

    text: str
    then: tuple[int, ...]  # the numbers of the instructions that may come next
    guarded: bool = False  # a predicate says whether it runs

    @cached_property
    def name(self) -> str:
        """The name with its modifiers: HGMMA.64x128x16.F32.BF16 of `HGMMA.64x128x16.F32.BF16 R24, ...`."""
        return self.text.split(maxsplit=1)[0] if self.text else ""

    @cached_property
    def op(self) -> str:
        """The name without modifiers: HGMMA of the same instruction."""
        return self.name.split(".")[0]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands, without `.reuse`."""
        _, _, after = self.text.partition(" ")
        return tuple(text.strip().removesuffix(".reuse") for text in after.split(",")) if after.strip() else ()

    @cached_property
    def target(self) -> str:
        """The register operand that it writes, which follows any predicates; empty text if it writes none."""
        if self.name.startswith(_READERS):
            return ""
        return next((text for text in self.operands[:2] if not re.fullmatch(r"U?P[0-9T]", text)), "")

    @cached_property
    def width(self) -> int:
        """The number of registers that it writes, by its modifiers. A product writes the accumulator's registers of a
        thread: N / 2 for 64 rows and N columns."""
        op, *more = self.name.split(".")
        if columns := re.search(r"^HGMMA\S*\.64x(\d+)x", self.name):
            return int(columns[1]) // 2
        if op == "LDSM":
            return int(more[-1]) if more[-1].isdigit() else 1
        if op.startswith(("LD", "ATOM", "F2I")):
            return 4 if "128" in more else 2 if {"64", "U64", "S64"} & {*more} else 1
        uniform = op.startswith("U") and "64" in more
        return (
            2
            if uniform
            or op in ("DADD", "DMUL", "DFMA", "LEPC")
            or "WIDE" in more
            or (op == "CS2R" and "32" not in more)
            else 1
        )

    @property
    def is_product(self) -> bool:
        """True if the tensor cores run the instruction."""
        return self.op == "HGMMA"


def parse(text: str) -> list[Instruction]:
    """The instructions of a kernel."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            lines.append((found[1] or "", found[2]))
    made = []
    for at, (guard, body) in enumerate(lines):
        jumps = [] if body.startswith("BSSY") else re.findall(r"\.L\w+", body)  # BSSY names the reconvergence point
        named = tuple(labels[name] for name in jumps if name in labels)
        always = not guard and _ALWAYS.match(body) is not None
        after = () if always or at + 1 == len(lines) else (at + 1,)
        made.append(Instruction(body, tuple(to for to in (*named, *after) if to < len(lines)), bool(guard)))
    return made
