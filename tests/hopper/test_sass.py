"""The SASS reader, on short listings, and the message of a certificate for each mistake in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.ir import Block, Kernel, WarpGroup
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.common.instructions import parse
from attngen.targets.hopper.configs.sm90 import REGISTERS, SHARED_REGISTERS
from attngen.targets.hopper.toolchain.certificate import faults, overlapped_share, registers_of_instances
from attngen.targets.hopper.toolchain.compiler import machine_code, marks
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.targets.hopper.toolchain.sass import Part, parts, registers_named
from tests.hopper.common import after_passes, forward_kernel, lowered

TILES = {"backend": "hopper", "block_q": 64, "block_kv": 128, "stages": 2}
# One consumer, whose warps have all registers that setmaxnreg can give. The softmax of tiles of 128 keys is split.
ONE = lower(make_spec({"name": "one", "head_dim": 64, "mask": "causal", "backward": False, "schedule": TILES}))
SCORES = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0"
WEIGHTS = "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88, gsb0"
BARRIER, ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EXPONENTIAL = "MUFU.EX2 R2, R3"
AFTER = "\n  ".join(3 * ["MUFU.EX2 R4, R5"])  # the other half
CODE = f"""
  ULDC.64 UR6, c[0x0][0x208]
  UMOV UR8, 0x400
  ULDC.64 UR16, c[0x0][0x210]
  ULDC.64 UR18, c[0x0][0x218]
  @P0 BRA `(.L_x_2)
.L_x_0:
  USETMAXREG.DEALLOC.CTAPOOL 0x40
  UTMALDG.4D [UR8], [UR16], desc[UR6]
  @P0 BRA `(.L_x_0)
  BRX R4 -0x290 (*"BRANCH_TARGETS .L_x_0,.L_x_2"*)
.L_x_2:
  USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x100
  @!P0 BRA `(.L_x_2)
  {EXPONENTIAL}
.L_x_3:
  {SCORES}
  {WEIGHTS}
  {BARRIER}
  {EXPONENTIAL}
  {EXPONENTIAL}
  @P1 BRA `(.L_x_4)
.L_x_5:
  {EXPONENTIAL}
  {ALL}
  {AFTER}
  @P0 BRA `(.L_x_3)
  {EXPONENTIAL}
  UTMASTG.4D [UR8], [UR16]
  EXIT
.L_x_4:
  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x280e0], RZ
  @!P0 BRA `(.L_x_4)
  BRA `(.L_x_5)
"""


def printed(text: str) -> str:
    """Instructions as nvdisasm prints them."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * at:04x}*/    {line} ;" for at, line in enumerate(lines)
    )


def read(text: str) -> list[Part]:
    return list(parts(parse(printed(text))))


def test_products_as_wide_as_outputs_are_those_of_weights_where_p_may_be_in_shared_memory() -> None:
    made = parse(
        printed(CODE.replace(WEIGHTS, "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], gdesc[UR16].tnspB, R88, gsb0"))
    )
    _, consumer = read(CODE)
    (_, plain), (_, known) = parts(made), parts(made, 64)
    assert (plain.exponentials, plain.under) == (0, 0)
    assert (known.exponentials, known.under) == (consumer.exponentials, consumer.under) and known.under


def test_the_parts_of_a_kernel_belong_to_its_warp_groups() -> None:
    producer, consumer = read(CODE)
    assert (producer.registers, producer.ops["UTMALDG"], producer.ops["HGMMA"]) == (64, 1, 0)
    assert (consumer.registers, consumer.ops["HGMMA"], consumer.ops["UTMALDG"]) == (256, 2, 0)
    assert (producer.used, consumer.used) == (4 + 1, 152 + 4)


WIDE = {
    "HGMMA.64x128x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT": 88 + 64,
    "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88, gsb0": 152 + 4,
    "STS.128 [R200+0x10], R4": 201,
    "LDS.128 R200, [R4]": 204,
    "STG.E desc[UR50][R12.64+0x20], R7": 14,
    "CS2R R88, SRZ": 90,
    "IMAD.WIDE R8, R2, 0x4, R6": 10,
    "FADD R3, R4, R5.reuse": 6,
    "EXIT": 0,
}


@pytest.mark.parametrize("text", WIDE)
def test_registers_named_of_an_instruction(text: str) -> None:
    assert registers_named(parse(printed(text))[0]) == WIDE[text]


def test_exponentials_count_in_loops_over_products_of_weights() -> None:
    """Exponentials before and after the loop do not count. A loop that waits for a barrier is part of the loop."""
    consumer = read(CODE)[1]
    assert (consumer.under, consumer.exponentials) == (3, 6)


def test_the_work_loop_is_no_loop_over_tiles() -> None:
    """A persistent program has a loop over work tiles around the loop over tiles of keys."""
    around = CODE.replace(f"  {EXPONENTIAL}\n.L_x_3:", f".L_x_6:\n  {EXPONENTIAL}\n.L_x_3:")
    consumer = read(around.replace("  EXIT\n", "  @P3 BRA `(.L_x_6)\n  EXIT\n"))[1]
    assert (consumer.under, consumer.exponentials) == (3, 6)


# Edits of the code between the issue of a product and its wait, and how many of six exponentials overlap it then.
ORDERS = {
    "after the wait": (f"{EXPONENTIAL}\n  {ALL}", f"{ALL}\n  {EXPONENTIAL}", 2),
    "before the issue": (f"{WEIGHTS}\n  {BARRIER}\n  {EXPONENTIAL}", f"{BARRIER}\n  {EXPONENTIAL}\n  {WEIGHTS}", 2),
    "only while scores are multiplied": (f"{SCORES}\n  {WEIGHTS}\n", f"{WEIGHTS}\n  {SCORES}\n", 0),
    "a wait on one of two paths": ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x280e0], RZ", ALL, 2),
    "the product in two halves": (WEIGHTS, f"{WEIGHTS.removesuffix(', gsb0')}\n  {WEIGHTS}", 3),
}


@pytest.mark.parametrize("order", ORDERS)
def test_overlap_with_a_product_is_read_on_every_path(order: str) -> None:
    old, new, under = ORDERS[order]
    assert old in CODE
    consumer = read(CODE.replace(old, new))[1]
    assert (consumer.under, consumer.exponentials) == (under, 6)


def faults_of(text: str = CODE, log: str = "", **changes: int) -> list[str]:
    """The faults that a certificate reports for a kernel with this machine code."""
    (config,), warp_specialized = ONE.configs("fwd", "hopper"), ONE.warp_specialized[0]
    code = machine_code(printed(text), log, list(marks(warp_specialized)))
    report = CompileReport(sram_bytes(ONE, warp_specialized, config), 255, 0, 4096, "0", 1.0, machine=code)
    return list(faults(ONE, warp_specialized, config, replace(report, **changes)))  # type: ignore[arg-type]


def test_a_correct_kernel_gets_its_certificate() -> None:
    assert faults_of() == []


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        (
            "butterfly_gqa",
            (64 / 68, 1),
        ),  # tiles of 64 keys, whose softmax is not split, and one for the row in each of four threads
        ("full_mha", (64 / 132, 68 / 132)),
        ("softcap_window_gqa", (64 / 132, 1 - 64 / (132 + 2 * 128))),  # a modifier has an exponential, and a quotient
    ],
)
def test_the_ops_give_the_share_of_exponentials_that_overlap_a_product(name: str, shares: tuple[float, float]) -> None:
    (config,) = lowered(name).configs("fwd", "hopper")
    assert tuple(map(float, overlapped_share(forward_kernel(name), config))) == shares
    before = after_passes(name)["software-pipeline-softmax"].warp_specialized[0]
    least, most = overlapped_share(before, config)
    assert (float(least), most) == (config.block_kv / (config.block_kv + 4), 1)


LOSS = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient registers"
)
MISTAKES = {
    "no product": (WEIGHTS, "NOP", "has no exponentials in loops over products of weights"),
    "no products at all": ("HGMMA", "FFMA", "has no HGMMA in its machine code; expected products of warp groups"),
    "products of warps": ("EXIT", "HMMA.16816.F32 R4\n  EXIT", "has 1 HMMA in its machine code"),
    "no loads by TMA": (
        "UTMALDG.4D",
        "LDG.E",
        "has no UTMALDG in its machine code; expected loads by TMA",
    ),
    "no stores by TMA": (
        "UTMASTG.4D",
        "STG.E",
        "has no UTMASTG in its machine code; expected stores by TMA",
    ),
    "other registers": ("0x40", "0x20", "gives its instances of @producer 32 registers; expected 64"),
    "a missing instance": ("UTMALDG.4D", "LDG.E", "gives its instances of @producer no registers; expected 64"),
    "too many registers": (
        "UTMALDG.4D [UR8]",
        "UTMALDG.4D [R70]",
        "has an instance of @producer that uses 71 registers; expected 64 at most",
    ),
    "exponentials outside": (
        f"{WEIGHTS}\n  {BARRIER}",
        f"{WEIGHTS}\n  {ALL}",
        "has 0 of the 6 exponentials in its loops between the issue of a product and its wait; expected 48% to 52%",
    ),
    "the other half moved before the wait": (
        f"{ALL}\n  {AFTER}",
        f"{AFTER}\n  {ALL}",
        "has 6 of the 6 exponentials in its loops between the issue of a product and its wait; expected 48% to 52%",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_machine_code_is_found(mistake: str) -> None:
    old, new, message = MISTAKES[mistake]
    assert old in CODE
    assert any(fault.startswith(message) for fault in faults_of(CODE.replace(old, new)))


def test_a_certificate_checks_the_output_of_the_compiler() -> None:
    assert faults_of(spilled_bytes=16) == ["spills 16 bytes; expected none"]
    (message,) = faults_of(log=LOSS)
    assert message == "has products that wait for each other, as ptxas warns (C7510); expected products in flight"
    assert faults_of(shared_bytes=90352) == [
        "needs 90,352 bytes of shared memory; expected the 90,452 of the closed form"
    ]


@pytest.mark.parametrize(("instances", "first", "programs"), [(1, 256, 1), (2, 240, 1), (3, 160, 1), (2, 112, 2)])
def test_the_first_warp_group_has_the_registers_that_the_others_leave(
    instances: int, first: int, programs: int
) -> None:
    consumer, producer = SHARED_REGISTERS if programs > 1 else REGISTERS[instances]
    blocks = (
        Block("producer", (), warp_group=WarpGroup(1, 1, producer)),
        Block("consumer", (), warp_group=WarpGroup(instances, 4, consumer, 64)),
    )
    made, (config,) = Kernel("fwd", (), blocks, ctas_per_sm=programs), ONE.configs("fwd", "hopper")
    assert registers_of_instances("producer", made, config) == [producer]
    assert registers_of_instances("consumer", made, config) == sorted([*[consumer] * (instances - 1), first])
