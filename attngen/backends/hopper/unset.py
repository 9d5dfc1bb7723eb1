"""Reads Hopper's machine code, as nvdisasm prints it: is each uniform register written before it is read, on every path?

Descriptors of tiles are in uniform registers. ptxas 12.8 can compute one at the start of a loop, and read it at the start of
another loop that is also reached past the first one. Then products read whatever tile an old number points to, and nothing says so.
"""

from __future__ import annotations

import re

from attngen.backends.hopper.instructions import Instruction

_PAIRS = (".64", ".WIDE")  # in the names of instructions that write two


def unset(code: list[Instruction]) -> list[str]:
    """A sentence for each instruction that reads a uniform register which some path to it has not written; none if all is well."""
    known: dict[int, int] = {0: 0}  # instruction -> the registers that all paths to it have written, a bit for each
    left = [0]
    while left:
        at = left.pop()
        after = known[at] | sum(1 << n for n in _written(code[at]))
        for to in code[at].then:
            both = known[to] & after if to in known else after
            if known.get(to) != both:
                known[to] = both
                left.append(to)
    found = []
    for at in sorted(known):
        missing = [n for n in sorted(_read(code[at])) if not known[at] >> n & 1]
        if missing:
            text = f"{code[at].name} {', '.join(code[at].operands)}"
            found.append(f"instruction {at}, {text}, reads UR{missing[0]}, which not every path has written")
    return found


def _written(one: Instruction) -> frozenset[int]:
    match = re.fullmatch(r"UR(\d+)", one.target)
    if not match:
        return frozenset()
    start = int(match[1])
    return frozenset(range(start, start + (2 if any(pair in one.name for pair in _PAIRS) else 1)))


def _read(one: Instruction) -> set[int]:
    """The registers that an instruction names, but for the one that it writes; of descriptors of a product, all that it reads."""
    if one.is_product:
        at = next(int(n) for text in one.operands for n in re.findall(r"gdesc\[UR(\d+)\]", text))
        return set(range(at, at + 4)) if one.operands[1].startswith("gdesc") else {at + 2, at + 3}
    named = [int(n) for text in one.operands for n in re.findall(r"\bUR(\d+)\b", text)]
    return set(named[1:] if _written(one) else named)
