"""What a divided kernel has to be, as the compiler reports it and as its machine code is read."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import sympy

from attngen.ir.expr import exp2
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import Block, Map, SoftmaxStep
from attngen.ir.pipe import HALVES, PipelinedLoop, SoftmaxStats, SoftmaxWeights, TmaStore, Wgmma, WgmmaWait
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.common import multipliers, overlaps, room_of
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import FORWARD, LANES, MOST_REGISTERS
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.tiles.launches import groups, lane_registers, launch_registers

# Bytes that may spill outside loops, as stores and loads, of numbers that loops do not need: where sums, or dropout
# beside them, take most of the registers, and where in the backward a loop over heads, or over the program's tiles, is
# around that over tiles.
OUTSIDE = 64


def faults(module: Module, kernel: Kernel, config: Config, reading: CompileReport) -> Iterator[str]:
    """Why a row gets no certificate: the ends of sentences about its kernel, each with what was expected."""
    predicted, has = sram_bytes(module, kernel, config), room_of(kernel.ctas_per_sm)
    recomputes = any(isinstance(op, PipelinedLoop) and op.recompute for op in kernel.ops())
    by_head = any(isinstance(op, PipelinedLoop) and op.heads and not op.by_tile for op in kernel.ops())
    nested = by_head or (kernel.is_persistent and kernel.adds)
    most = OUTSIDE if recomputes or nested or is_signed(module, kernel) else 0
    if reading.spilled_bytes > most:
        yield f"spills {reading.spilled_bytes:,} bytes; expected {f'{most} at most' if most else 'none'}"
    if reading.shared_bytes != predicted:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory; expected the {predicted:,} of the closed form"
    if reading.shared_bytes > has:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory, and has {has:,}"
    if kernel.ctas_per_sm > 1:
        yield from _launch(kernel, config, reading)
    if reading.machine is not None:
        yield from _instructions(kernel, reading.machine)
        yield from _registers(kernel, config, reading.machine)
        yield from _overlap(kernel, config, reading.machine)


def _launch(kernel: Kernel, config: Config, reading: CompileReport) -> Iterator[str]:
    """A program starts with so few registers that the others of its multiprocessor have theirs."""
    most = launch_registers(kernel, config)
    if reading.registers > most:
        yield f"starts with {reading.registers} registers for each thread; expected {most} at most, as {kernel.ctas_per_sm} programs share"


def _instructions(kernel: Kernel, code: dict[str, Any]) -> Iterator[str]:
    """Products of warp groups alone, which do not wait for each other; loads and stores of the copy engine."""
    expected = {"HGMMA": "products of groups of warps", "UTMALDG": "loads by the copy engine"}
    expected |= {"UTMASTG": "stores by the copy engine"} if any(isinstance(op, TmaStore) for op in kernel.ops()) else {}
    for op, what in expected.items():
        if not code[op]:
            yield f"has no {op} in its machine code; expected {what}"
    if code["HMMA"]:
        yield f"has {code['HMMA']:,} HMMA in its machine code; expected products of groups of warps alone"
    if code["serialised"]:
        yield f"has products that wait for each other, as ptxas warns ({', '.join(code['serialised'])}); expected products in flight"
    if code["reloads"]:
        yield f"stores or loads spilled registers in its loops, {code['reloads']} times; expected them outside alone"
    if code["unset"]:
        yield f"reads a register before it is written ({code['unset'][0]}); expected each path to write it first"
    if code["reused"]:
        yield f"writes a register of a product in flight ({code['reused'][0]}); expected its operands and sum left alone until its wait"


def _registers(kernel: Kernel, config: Config, code: dict[str, Any]) -> Iterator[str]:
    """Each copy of a role has the registers that its role says, and names no others."""
    for name, found in code["roles"].items():
        expected = given(name, kernel, config)
        if sorted(found["registers"]) != expected:
            yield f"gives its copies of @{name} {_listed(found['registers'])} registers; expected {_listed(expected)}"
        for has, used in zip(found["registers"], found["used"]):
            if used > has:
                yield f"has a copy of @{name} that uses {used} registers; expected {has} at most"


def given(name: str, kernel: Kernel, config: Config) -> list[int]:
    """The registers that the copies of a role have, least first; of one that issues products, with those of all that
    do.

    Groups of four warps have what their roles say. The first group, of the role with the most warps, has what the
    others leave, which is more where a program has few warps.
    """
    warp_groups = {block.name: block.warp_group for block in kernel.warp_groups if block.warp_group}
    first = max(warp_groups, key=lambda warp_group: warp_groups[warp_group].warps)
    left = lane_registers(kernel, config) - sum(groups(kernel)) + warp_groups[first].registers
    alike = multipliers(kernel) if name in multipliers(kernel) else [name]
    own = [warp_groups[warp_group].registers for warp_group in alike for _ in range(warp_groups[warp_group].instances)]
    return sorted([*own[1:], min(MOST_REGISTERS, left // 8 * 8)] if name == first else own)


def _overlap(kernel: Kernel, config: Config, code: dict[str, Any]) -> Iterator[str]:
    """Exponentials of loops stand where the kernel's ops say: under a product of weights and V, or after it."""
    total, under = code["exponentials"], code["under"]
    least, most = under_product(kernel, config)
    if not total:
        yield "has no exponentials in loops over products of weights; expected those of the softmax"
    elif not least * total <= under <= most * total:
        share = f"{under} of the {total} exponentials in its loops between the issue of a product and its wait"
        yield f"has {share}; expected {float(least):.0%} to {float(most):.0%}"


def under_product(kernel: Kernel, config: Config) -> tuple[Fraction, Fraction]:
    """The shares of a loop's exponentials, least and most, that stand between the issue of a product of weights and its
    await.

    Those of rows, which rescale sums, may stand anywhere: each thread computes one for all of its columns. Modifiers
    come before weights, so more exponentials stand under the product by them; how many, the compiler decides. Where
    programs share a multiprocessor, products of other consumers run beside the exponentials, and any share is right.
    """
    if not overlaps(kernel) or not (kernel.stands_for == FORWARD or is_of_latents(kernel)):
        return Fraction(0), Fraction(1)
    under = outside = rows = others = 0
    columns = {"BLOCK_KV": config.block_kv, **dict.fromkeys(HALVES.values(), config.block_kv // 2)}
    for step in _turns(kernel):
        flying = False
        for op in step.ops:
            flying |= isinstance(op, Wgmma) and op.over == "BLOCK_KV"
            flying &= not (isinstance(op, WgmmaWait) and _is_of_weights(kernel, op))
            if isinstance(op, (SoftmaxStep, SoftmaxWeights)):
                count = columns[op.type.dims[-1]]
                under, outside = (under + count, outside) if flying else (under, outside + count)
            rows += LANES * isinstance(op, (SoftmaxStep, SoftmaxStats))
            if isinstance(op, Map) and op.type.dims[1:] == ("BLOCK_KV",):
                others += config.block_kv * len(op.expr.atoms(exp2, sympy.Pow))
    total = under + outside + rows
    return Fraction(under, total), 1 - Fraction(outside, total + others)


def _turns(kernel: Kernel) -> Iterator[Block]:
    """The bodies of turns of loops over tiles, but for a first and a last turn: two where even and odd turns differ."""
    for op in kernel.ops():
        if isinstance(op, PipelinedLoop):
            yield from (kernel.block(body) for body in (op.step, op.odd, op.pair) if body)


def _is_of_weights(kernel: Kernel, op: WgmmaWait) -> bool:
    issue = kernel.op(op.value)
    return isinstance(issue, Wgmma) and issue.over == "BLOCK_KV"


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers)) or "no"
