"""Instructions of Hopper's machine code, as nvdisasm prints them, and which may follow which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?(.*?)\s*;?\s*$")
_LABEL = re.compile(r"(\.L\w+):")
_READERS = ("BAR", "BRX", "JMX", "RET", "NANOSLEEP", "WARPSYNC", "CALL", "BMOV")  # which write no register
_ALWAYS = re.compile(r"(BRX|EXIT|RET|(BRA|JMP)(\.\w+)* `)")  # the line after it is reached by jumps alone


@dataclass(frozen=True)
class Instruction:
    """One instruction without its guard, with the numbers of those that may come next."""

    text: str
    then: tuple[int, ...]
    guarded: bool = False  # it runs where a predicate says so

    @cached_property
    def name(self) -> str:
        """HGMMA.64x128x16.F32.BF16 of `HGMMA.64x128x16.F32.BF16 R24, ...`."""
        return self.text.split(maxsplit=1)[0] if self.text else ""

    @cached_property
    def op(self) -> str:
        """HGMMA of the same."""
        return self.name.split(".")[0]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """What comes after the name, without remarks on the reuse of a register."""
        _, _, after = self.text.partition(" ")
        return tuple(text.strip().removesuffix(".reuse") for text in after.split(",")) if after.strip() else ()

    @cached_property
    def target(self) -> str:
        """The operand that it writes, but for predicates; empty text where it writes none."""
        if self.name.startswith(_READERS):
            return ""
        return next(
            (text for text in self.operands[:2] if not re.fullmatch(r"U?P[0-9T]", text)), ""
        )  # predicates come before it

    @cached_property
    def width(self) -> int:
        """How many registers it writes, by its modifiers; of a product, those of its sums in a thread: N / 2 of 64
        rows and N columns."""
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
        """Whether the matrix units run it."""
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
        jumps = [] if body.startswith("BSSY") else re.findall(r"\.L\w+", body)  # which names where threads meet again
        named = tuple(labels[name] for name in jumps if name in labels)
        always = not guard and _ALWAYS.match(body) is not None
        after = () if always or at + 1 == len(lines) else (at + 1,)
        made.append(Instruction(body, tuple(to for to in (*named, *after) if to < len(lines)), bool(guard)))
    return made
