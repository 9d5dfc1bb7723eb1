"""Checks in Hopper's machine code that each uniform register is written before it is read, on every path.

Tile descriptors are in uniform registers. ptxas 12.8 can compute one at the start of a loop, and read it at the start
of another loop that is also reached without the first one; or compute none at all, for a narrow tile at a fixed place.
Products then read whatever tile an old value points to, without any error.

A move of an unset register does no harm by itself: ptxas keeps pairs in a thread's own registers of which one half is
unset and never read. So values are followed through moves to the instructions that read them.
"""

from __future__ import annotations

import re

from attngen.targets.common.instructions import Instruction

_WIDE = (".128", ".64", ".WIDE")  # modifiers of instructions whose operands may be up to four registers
_UNIFORM, _REGISTERS = 64, 256  # uniform registers, numbered first here, and a thread's own
_MOVES = re.compile(r"(MOV|UMOV|R2UR)(\.BROADCAST)?|IMAD(\.U32|\.MOV|\.MOV\.U32)")
_TMA = "UTMA"  # prefix of TMA instructions, whose operands are a tile's place and a descriptor
_PLACE = 7  # most registers of that place: an address, a barrier and five coordinates


def unset(code: list[Instruction]) -> list[str]:
    """A sentence for each instruction that reads a uniform register which some path to it has not written."""
    # instruction -> the uniform registers that all paths to it have written, and the registers to which some path has
    # moved an unset one
    known: dict[int, tuple[int, int]] = {0: (0, 0)}
    left = [0]
    while left:
        at = left.pop()
        written, moved = _after(code[at], *known[at])
        for to in code[at].then:
            both = (known[to][0] & written, known[to][1] | moved) if to in known else (written, moved)
            if known.get(to) != both:
                known[to] = both
                left.append(to)
    found = []
    for at in sorted(known):
        one, (written, moved) = code[at], known[at]
        missing = [n for n in sorted(_named(one)) if not written >> n & 1] + [
            n for n in sorted(_group(one)) if moved >> n & 1
        ]
        if missing and _source(one) is None:
            name = f"UR{missing[0]}" if missing[0] < _UNIFORM else f"R{missing[0] - _UNIFORM}"
            text = f"{one.name} {', '.join(one.operands)}"
            found.append(f"instruction {at}, {text}, reads {name}, which not every path has written")
    return found


def _after(one: Instruction, written: int, moved: int) -> tuple[int, int]:
    """The two sets after an instruction. A guarded one may not run, so it leaves moved unset values in place."""
    targets, source = _bits(_written(one)), _source(one)
    if source is not None and (moved >> source & 1 or (source < _UNIFORM and not written >> source & 1)):
        moved |= targets
    elif not one.guarded:
        moved &= ~targets
    return written | targets & _bits(range(_UNIFORM)), moved


def _bits(numbers: set[int] | range) -> int:
    return sum(1 << n for n in numbers)


def _source(one: Instruction) -> int | None:
    """The register that an unguarded instruction moves to another one, if it does nothing else."""
    *others, source = one.operands or ("",)
    plain = (
        _MOVES.fullmatch(one.name) and len(one.operands) == (4 if one.op == "IMAD" else 2) and set(others[1:]) <= {"RZ"}
    )
    match = re.fullmatch(r"(U?)R(\d+)", source) if plain and not one.guarded else None
    return _number(match[1], match[2]) if match else None


def _number(uniform: str, digits: str) -> int:
    return int(digits) + _UNIFORM * (not uniform)


def _written(one: Instruction) -> set[int]:
    match = re.fullmatch(r"(U?)R(\d+)", one.target)
    if not match:
        return set()
    start = _number(match[1], match[2])
    return set(range(start, start + one.width))


def _named(one: Instruction) -> set[int]:
    """The uniform registers that an instruction names, except the one that it writes; for the descriptors of a product,
    all registers that it reads."""
    if one.is_product:
        at = next(int(n) for text in one.operands for n in re.findall(r"gdesc\[UR(\d+)\]", text))
        return set(range(at, at + 4)) if one.operands[1].startswith("gdesc") else {at + 2, at + 3}
    named = [int(n) for text in one.operands for n in re.findall(r"\bUR(\d+)\b", text)]
    return set(named[1:] if one.target.startswith("UR") else named)


def _group(one: Instruction) -> set[int]:
    """The registers that an instruction may read: for each named one, as many consecutive ones as it can read there."""
    found: set[int] = set()
    wide = 4 if any(part in one.name for part in _WIDE) else 2 if one.op.startswith(_TMA) else 1
    before = one.operands.index(one.target) if one.op == "IMAD" else len(one.operands)
    for i, text in enumerate(one.operands):
        for uniform, digits, pair in (
            [] if text == one.target and i == 0 and _written(one) else re.findall(r"\b(U?)R(\d+)(\.64)?", text)
        ):
            factor = before < i <= before + 2  # 32 bits, even if the sum is wide
            least = max(1 if factor else wide, 2 if pair or "desc[" in text else 1)
            count = 4 if "gdesc" in text else one.width if one.is_product else least
            count = _PLACE if one.op.startswith(_TMA) and i == 0 else count
            start, end = _number(uniform, digits), _UNIFORM if uniform else _UNIFORM + _REGISTERS
            found |= set(range(start, min(start + count, end)))
    return found
