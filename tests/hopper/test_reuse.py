"""Registers of products in flight, in short SASS listings written by hand."""

from __future__ import annotations

import pytest

from attngen.targets.common.instructions import parse
from attngen.targets.hopper.toolchain.reuse import reused

SCORES = "HGMMA.64x16x16.F32.BF16 R8, gdesc[UR16], RZ, !UPT, gsb0"  # into R8 to R15
WEIGHTS = "HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR16].tnspB, R24, gsb0"  # reads R40 to R43, adds to R24 to R31
MORE = "HGMMA.64x16x16.F32.BF16 R24, R44, gdesc[UR20].tnspB, R24, gsb0"
PART = WEIGHTS.removesuffix(", gsb0")


def wait(groups: int) -> str:
    """The wait that leaves this many wgmma groups in flight."""
    return f"WARPGROUP.DEPBAR.LE gsb0, {groups:#x}"


def found(*lines: str) -> list[str]:
    """The faults in these instructions; lines that end in a colon are labels."""
    text = [
        line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    ]
    return [
        sentence.partition(" ")[2]
        for sentence in reused(parse("\n".join([".text.fwd:", *text, "        /*ff00*/    EXIT ;"])))
    ]


@pytest.mark.parametrize(
    "line",
    [
        "F2FP.BF16.F32.PACK_AB R43, R5, R4",
        "@P0 MOV R40, R5",
        "LDS.128 R37, [R2]",  # R37 to R40
        "CS2R R42, SRZ",
        "IMAD.WIDE R39, R2, R3, R4",
        "SHFL.BFLY PT, R41, R7, 0x2, 0x1f",
        "LOP3.LUT P0, R41, R7, 0x1, RZ, 0xc0, !PT",
    ],
)
def test_an_operand_is_not_written_before_the_wait(line: str) -> None:
    (fault,) = found(WEIGHTS, line, wait(0))
    assert "of an operand in flight" in fault
    assert found(WEIGHTS, wait(0), line) == found(line, WEIGHTS, wait(0)) == []


@pytest.mark.parametrize(
    "line",
    [
        "F2FP.BF16.F32.PACK_AB R44, R40, R41",  # reads the operand
        "LDS.128 R44, [R40]",
        "CS2R.32 R39, SRZ",
        "SHF.R.U64 R39, R40, 0xb, RZ",  # 64 bits are read, 32 written
        "STS.128 [R2], R40",
        "BAR.ARV R40, 0x120",
        "ISETP.NE.AND P0, PT, R40, RZ, PT",
        "R2UR UR40, R40",
    ],
)
def test_an_operand_may_be_read(line: str) -> None:
    assert found(WEIGHTS, line, wait(0)) == []


def test_an_accumulator_is_neither_read_nor_written_before_the_wait() -> None:
    for line in ("FADD R2, R15, R3", "FMUL R8, R2, R3", "@!P1 MOV R9, RZ"):
        (fault,) = found(SCORES, line, wait(0))
        assert "touches R" in fault and "of a sum in flight" in fault
        assert found(SCORES, wait(0), line) == []
    assert found(SCORES, "FADD R2, R16, R3", wait(0)) == []


def test_a_wait_retires_the_oldest_groups() -> None:
    over, under = "FADD R8, R8, R2", "MOV R40, R8"
    assert found(SCORES, WEIGHTS, wait(1), over, wait(0), under) == []
    (fault,) = found(SCORES, WEIGHTS, wait(1), over, under, wait(0))
    assert "MOV R40, R8, writes R40" in fault
    (fault,) = found(WEIGHTS, SCORES, wait(1), over, wait(0))
    assert "touches R8" in fault


def test_products_of_a_group_are_waited_for_together() -> None:
    assert len(found(PART, MORE, "MOV R40, R2", wait(0))) == len(found(PART, MORE, "MOV R44, R2", wait(0))) == 1
    assert found(PART, "MOV R44, R2", MORE, wait(0)) == []  # the operand of the second is computed while the first runs


def test_products_may_add_to_the_same_accumulator_and_not_write_an_operand() -> None:
    assert found(WEIGHTS, MORE, wait(0)) == []
    (fault,) = found(WEIGHTS, "HGMMA.64x16x16.F32.BF16 R40, gdesc[UR16], RZ, !UPT, gsb0", wait(0))
    assert "writes R40 of an operand in flight" in fault
    (fault,) = found(WEIGHTS, "HGMMA.64x16x16.F32.BF16 R48, R28, gdesc[UR16], R48, gsb0", wait(0))
    assert "reads R28 of a sum in flight" in fault


def test_all_paths_are_followed() -> None:
    """Paths lead over branches, the ends of loops, and jumps by a table; code that no path reaches is not read."""
    assert found(WEIGHTS, "@P0 BRA `(.L_x_1)", wait(0), ".L_x_1:", "MOV R40, R2")
    assert not found(WEIGHTS, "BRA `(.L_x_1)", "MOV R40, R2", ".L_x_1:", wait(0))
    assert found(".L_x_0:", "MOV R40, R2", WEIGHTS, "@P0 BRA `(.L_x_0)", wait(0))
    assert not found(".L_x_0:", "MOV R40, R2", WEIGHTS, wait(0), "@P0 BRA `(.L_x_0)")
    table = 'BRX R4 -0x270 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    assert found(WEIGHTS, table, "MOV R41, R2", ".L_x_1:", wait(0), "EXIT", ".L_x_2:", "MOV R40, R2", wait(0)) == [
        "5, MOV R40, R2, writes R40 of an operand in flight"
    ]


def test_the_code_after_a_loop_without_waits_is_read() -> None:
    assert found(".L_x_0:", WEIGHTS, "@P0 BRA `(.L_x_0)", "MOV R40, R2")
