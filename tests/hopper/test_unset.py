"""Uniform registers that some path to their reader has not written, in short SASS listings."""

from __future__ import annotations

import pytest

from attngen.targets.common.instructions import parse
from attngen.targets.common.unset import unset
from tests.hopper.test_sass import CODE, faults_of, printed

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
# Two loops over tiles. The first one may have no iteration; then the second one is reached without it.
LOOPS = f"""
  ULDC UR8, c[0x0][0x210]
  UMOV UR7, 0x40000040
  UMOV UR6, 0x200
  BSSY B0, `(.L_x_2)
  @!P0 BRA `(.L_x_2)
  UIADD3 UR4, UR8, 0x400, URZ
  UMOV UR5, 0x40000040
.L_x_1:
  {PRODUCT}
  WARPGROUP.DEPBAR.LE gsb0, 0x0
  @P1 BRA `(.L_x_1)
.L_x_2:
  BSYNC B0
.L_x_3:
  {PRODUCT}
  WARPGROUP.DEPBAR.LE gsb0, 0x0
  @P2 BRA `(.L_x_3)
  EXIT
"""
DESCRIPTOR = "  UIADD3 UR4, UR8, 0x400, URZ\n  UMOV UR5, 0x40000040\n"


def found(text: str) -> list[str]:
    return unset(parse(printed(text)))


def test_a_descriptor_that_only_a_skipped_loop_computes_is_unset() -> None:
    (fault,) = found(LOOPS)
    assert fault == f"instruction 11, {PRODUCT}, reads UR4, which not every path has written"


@pytest.mark.parametrize("before", ["  BSSY B0", "  BSYNC B0"])
def test_a_descriptor_that_each_path_computes_is_set(before: str) -> None:
    """It is computed before both loops, or again where their paths meet."""
    assert found(LOOPS.replace(before, DESCRIPTOR + before)) == []


def test_an_iteration_that_always_runs_sets_it_for_both_loops() -> None:
    """The product of @first does this in kernels that overlap a consumer with itself."""
    assert found(LOOPS.replace("  @!P0 BRA `(.L_x_2)\n", "")) == []


def test_the_reconvergence_point_of_bssy_is_no_jump_target() -> None:
    """BSSY names the point where threads reconverge. A jump there would skip the code between."""
    straight = LOOPS.replace("  @!P0 BRA `(.L_x_2)\n", "")
    code = parse(printed(straight))
    at = next(i for i, one in enumerate(code) if one.op == "BSSY")
    assert code[at].then == (at + 1,)
    jump = straight.replace("BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_2)")
    assert found(straight) == [] != found(jump)


@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("UIADD3 UR4, UR9, 0x400, URZ", 9),
        ("UIADD3 UR9, UR9, 0x1, URZ", 9),  # it reads what it writes
        ("UIADD3.X UR4, UP0, UR9, URZ, URZ, UP1, !UPT", 9),
        ("R2UR UR4, R9\n  UMOV UR5, UR9\n  UIADD3 UR6, UR4, UR5, URZ", 5),  # a move forwards its source
        ("ULDC.64 UR8, c[0x0][0x210]\n  UIADD3 UR4, UR10, UR9, URZ", 10),  # a pair is two registers
        ("UIMAD.WIDE.U32 UR8, UR1, 0x3, URZ", 1),
        ("UISETP.GT.AND UP0, UPT, UR9, UR10, UPT", 9),  # it writes only predicates
        ("LDS R4, [R2+UR9+0x10]", 9),
        ("UTMALDG.4D [UR9], [R2], desc[R4]", 9),
        ("UMOV UR4, 0x1\n  UMOV UR5, 0x1\n  UMOV UR6, 0x1\n  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", 7),
        (
            "UMOV UR6, 0x1\n  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0",
            7,
        ),  # the left operand is in registers, so it reads no descriptor for it
    ],
)
def test_each_kind_of_instruction_reads_its_registers(text: str, register: int) -> None:
    (fault,) = found(f"  {text}\n  EXIT")
    assert fault.endswith(f"reads UR{register}, which not every path has written")


@pytest.mark.parametrize(
    "text",
    [
        "ULDC.64 UR8, c[0x0][0x210]\n  UIADD3 UR4, UR8, UR9, URZ",
        "UISETP.GE.AND UP0, UPT, URZ, 0x1, UPT\n  USEL UR4, URZ, 0x1, UP0\n  UMOV UR5, UR4",
        "UMOV UR6, 0x1\n  UMOV UR7, 0x1\n  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0",
        "R2UR UR4, R9\n  BAR.SYNC.DEFER_BLOCKING UR4, 0x80",
        "UMOV UR21, 0x1\n  IMAD.WIDE.U32 R24, R28, UR21, RZ",  # a factor has one register, although the sum has two
    ],
)
def test_a_register_that_is_written_first_may_be_read(text: str) -> None:
    assert found(f"  {text}\n  EXIT") == []


@pytest.mark.parametrize(
    "move", ["MOV R8, UR9", "IMAD.U32 R8, RZ, RZ, UR9", "MOV R7, UR9\n  IMAD.MOV.U32 R8, RZ, RZ, R7"]
)
def test_a_moved_register_counts_as_read_where_its_copy_is_read(move: str) -> None:
    """ptxas keeps pairs in a thread's own registers, and one half may be unset. This matters only where that half is
    read."""
    kept = f"  {move}\n  R2UR UR10, R8\n"
    assert found(f"{kept}  UMOV UR10, 0x1\n  UIADD3 UR4, UR10, 0x1, URZ\n  EXIT") == []
    assert found(f"  {move}\n  LDS.64 R8, [R2]\n  R2UR UR10, R8\n  UIADD3 UR4, UR10, 0x1, URZ\n  EXIT") == []
    (fault,) = found(f"{kept}  UIADD3 UR4, UR10, 0x1, URZ\n  EXIT")
    assert fault.endswith("reads UR10, which not every path has written")
    (fault,) = found(f"  {move}\n  IADD3 R4, R8, 0x1, RZ\n  EXIT")
    assert fault.endswith("reads R8, which not every path has written")


# Instructions that read more registers than they name, or that may not overwrite a moved register.
IMPLICIT_READS = {
    "the operands of a TMA load": ("UMOV UR9, UR20", "UTMALDG.2D [UR8], [UR4]", "UR9"),
    "a descriptor": ("UMOV UR9, UR20", "LDG.E R4, desc[UR8][R2.64]", "UR9"),
    "an address": ("MOV R3, UR20", "LDG.E R4, desc[UR4][R2.64]", "R3"),
    "a stored value": ("MOV R3, UR20", "STG.E.64 [R6.64], R2", "R3"),
    "a sum of two": ("MOV R9, UR20", "IMAD.WIDE R4, R2, 0x4, R8", "R9"),
    "an operand of a product": ("MOV R25, UR20", "HGMMA.64x64x16.F32.BF16 R40, R24, gdesc[UR4], R40, gsb0", "R25"),
    "the accumulator of a product": ("MOV R55, UR20", "HGMMA.64x64x16.F32.BF16 R40, gdesc[UR4], R40, gsb0", "R55"),
    "no move, but a product": ("MOV R11, UR20", "IMAD.WIDE.U32 R8, RZ, RZ, R10", "R11"),
    "a write of one register": ("MOV R9, UR20", "CS2R.32 R8, SR_CLOCKLO\n  IADD3 R4, R9, 0x1, RZ", "R9"),
    "a write that may not happen": ("MOV R8, UR20", "@P0 MOV R8, 0x1\n  IADD3 R4, R8, 0x1, RZ", "R8"),
}


@pytest.mark.parametrize("name", IMPLICIT_READS)
def test_registers_that_an_instruction_does_not_name_are_read_as_well(name: str) -> None:
    move, reader, register = IMPLICIT_READS[name]
    written = "".join(f"  UMOV UR{n}, 0x1\n" for n in range(4, 10))
    (fault,) = found(f"{written}  {move}\n  {reader}\n  EXIT")
    assert fault.endswith(f"reads {register}, which not every path has written")


def test_a_predicated_move_reads() -> None:
    (fault,) = found("  @!P0 MOV R8, UR20\n  EXIT")
    assert fault.endswith("reads UR20, which not every path has written")


def test_a_product_reads_as_many_registers_as_its_accumulator_has() -> None:
    written = "".join(f"  UMOV UR{n}, 0x1\n" for n in range(4, 8))
    product = "HGMMA.64x64x16.F32.BF16 R40, gdesc[UR4], R40, gsb0"
    assert found(f"{written}  MOV R72, UR20\n  MOV R39, UR20\n  MOV R4, UR20\n  {product}\n  EXIT") == []


def test_a_certificate_names_the_first_reader() -> None:
    (fault,) = faults_of(CODE.replace("  ULDC.64 UR18, c[0x0][0x218]\n", ""))
    assert fault.startswith("reads a register before it is written (instruction ")
    assert fault.endswith("reads UR18, which not every path has written); expected each path to write it first")
