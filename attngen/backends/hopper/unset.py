"""Reads Hopper's machine code, as nvdisasm prints it: is each uniform register written before it is read, on every path?

Descriptors of tiles are in uniform registers. ptxas 12.8 can compute one at the start of a loop, and read it at the start of
another loop that is also reached past the first one. Then products read whatever tile an old number points to, and nothing says so.
"""

from __future__ import annotations

import re

from attngen.backends.hopper.instructions import Instruction

_WRITES = {".128": 4, ".64": 2, ".WIDE": 2, "CS2R": 2}  # in names of instructions -> the registers that these write; others write one
_UNIFORM, _REGISTERS = 64, 256  # numbers of uniform registers, and of a thread's own behind them
_OWN = ((1 << _REGISTERS) - 1) << _UNIFORM  # a thread's own registers: the compiler says itself if one of them is not set


def unset(code: list[Instruction]) -> list[str]:
    """A sentence for each instruction that reads a uniform register which some path to it has not written; none if all is well.

    A move reads nothing yet: what it writes is as unset as what it moves. So a pair is kept of which one half is never read.
    """
    known: dict[int, int] = {0: _OWN}  # instruction -> the registers that all paths to it have written, a bit for each
    left = [0]
    while left:
        at = left.pop()
        after = _after(code[at], known[at])
        for to in code[at].then:
            both = known[to] & after if to in known else after
            if known.get(to) != both:
                known[to] = both
                left.append(to)
    found = []
    for at in sorted(known):
        missing = [] if _moved(code[at]) is not None else [n for n in sorted(_read(code[at])) if not known[at] >> n & 1]
        if missing:
            text = f"{code[at].name} {', '.join(code[at].operands)}"
            name = f"UR{missing[0]}" if missing[0] < _UNIFORM else f"R{missing[0] - _UNIFORM}"
            found.append(f"instruction {at}, {text}, reads {name}, which not every path has written")
    return found


def _after(one: Instruction, known: int) -> int:
    """The registers that are written after an instruction."""
    moved = _moved(one)
    if moved is None or known >> moved & 1:
        return known | sum(1 << n for n in _written(one))
    return known & ~sum(1 << n for n in _written(one))


def _moved(one: Instruction) -> int | None:
    """The register that an instruction moves to another one, and does nothing else; None of another instruction."""
    *others, source = one.operands or ("",)
    plain = one.op in ("MOV", "UMOV", "R2UR") or (one.op == "IMAD" and others[1:] == ["RZ", "RZ"])
    match = re.fullmatch(r"U?R(\d+)", source)
    return int(match[1]) + _UNIFORM * (not source.startswith("U")) if plain and match else None


def _written(one: Instruction) -> frozenset[int]:
    match = re.fullmatch(r"(U?)R(\d+)", one.target)
    if not match:
        return frozenset()
    start = int(match[2]) + _UNIFORM * (not match[1])
    count = int(one.name.split("x")[1]) // 2 if one.is_product else next((n for part, n in _WRITES.items() if part in one.name), 1)
    return frozenset(range(start, start + count))


def _read(one: Instruction) -> set[int]:
    """The registers that an instruction names, but for the one that it writes; of descriptors of a product, all that it reads."""
    if one.is_product:
        at = next(int(n) for text in one.operands for n in re.findall(r"gdesc\[UR(\d+)\]", text))
        return set(range(at, at + 4)) if one.operands[1].startswith("gdesc") else {at + 2, at + 3}
    named = [int(n) + _UNIFORM * (not of) for text in one.operands for of, n in re.findall(r"\b(U?)R(\d+)\b", text)]
    return set(named[1:] if _written(one) else named)
