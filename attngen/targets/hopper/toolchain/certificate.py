"""The conditions for a warp-specialized kernel's certificate, checked in the compiler's report and in machine code."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import sympy

from attngen.ir import Block, Config, Kernel, Module, exp2, only, pipe, tile
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.barriers import mma_warp_groups
from attngen.targets.hopper.configs.common import overlaps_softmax, smem_limit
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import FORWARD, LANES, MOST_REGISTERS
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.tiles.launches import groups, lane_registers, launch_registers

# The most bytes of spill stores and loads outside loops, of values that the loops do not need. Kernels may spill there
# if accumulators, with or without dropout bits, take most of the registers, or if, in the backward, a loop over heads
# or over work tiles surrounds the loop over tiles.
MOST_SPILLED_OUTSIDE = 64


def faults(module: Module, kernel: Kernel, config: Config, report: CompileReport) -> Iterator[str]:
    """Yield why a config gets no certificate: ends of sentences about its kernel, each with the expected value."""
    predicted, limit = sram_bytes(module, kernel, config), smem_limit(kernel.ctas_per_sm)
    recomputes = any(op.recompute for op in only(kernel.ops(), pipe.PipelinedLoop))
    by_head = any(op.heads and not op.by_tile for op in only(kernel.ops(), pipe.PipelinedLoop))
    nested = by_head or (kernel.traits.is_persistent and kernel.traits.adds_in_order)
    most = MOST_SPILLED_OUTSIDE if recomputes or nested or is_signed(module, kernel) else 0
    if report.spilled_bytes > most:
        yield f"spills {report.spilled_bytes:,} bytes; expected {f'{most} at most' if most else 'none'}"
    if report.shared_bytes != predicted:
        yield f"needs {report.shared_bytes:,} bytes of shared memory; expected the {predicted:,} of the closed form"
    if report.shared_bytes > limit:
        yield f"needs {report.shared_bytes:,} bytes of shared memory, and has {limit:,}"
    if kernel.ctas_per_sm > 1:
        yield from _launch(kernel, config, report)
    if report.machine is not None:
        yield from _instructions(kernel, report.machine)
        yield from _registers(kernel, config, report.machine)
        yield from _overlap(kernel, config, report.machine)


def _launch(kernel: Kernel, config: Config, report: CompileReport) -> Iterator[str]:
    """Check that a program starts with so few registers that the other programs of its SM have theirs."""
    most = launch_registers(kernel, config)
    if report.registers > most:
        yield (
            f"starts with {report.registers} registers for each thread; expected {most} at most, because "
            f"{kernel.ctas_per_sm} programs share an SM"
        )


def _instructions(kernel: Kernel, code: dict[str, Any]) -> Iterator[str]:
    """Check that all matrix products are wgmmas that do not wait for each other, and that TMA loads and stores."""
    expected = {"HGMMA": "products of warp groups", "UTMALDG": "loads by TMA"}
    expected |= {"UTMASTG": "stores by TMA"} if any(only(kernel.ops(), pipe.TmaStore)) else {}
    for op, meaning in expected.items():
        if not code[op]:
            yield f"has no {op} in its machine code; expected {meaning}"
    if code["HMMA"]:
        yield f"has {code['HMMA']:,} HMMA in its machine code; expected only products of warp groups"
    if code["serialised"]:
        yield (
            f"has products that wait for each other, as ptxas warns ({', '.join(code['serialised'])}); "
            "expected products in flight"
        )
    if code["reloads"]:
        yield f"stores or loads spilled registers in its loops, {code['reloads']} times; expected them only outside"
    if code["unset"]:
        yield f"reads a register before it is written ({code['unset'][0]}); expected each path to write it first"
    if code["reused"]:
        yield (
            f"writes a register of a product in flight ({code['reused'][0]}); expected its operands and accumulator "
            "untouched until its wait"
        )


def _registers(kernel: Kernel, config: Config, code: dict[str, Any]) -> Iterator[str]:
    """Check that each instance of a warp group has the registers that the IR says, and names no others."""
    for name, found in code["roles"].items():
        expected = registers_of_instances(name, kernel, config)
        if sorted(found["registers"]) != expected:
            has = _listed(found["registers"])
            yield f"gives its instances of @{name} {has} registers; expected {_listed(expected)}"
        for given, used in zip(found["registers"], found["used"]):
            if used > given:
                yield f"has an instance of @{name} that uses {used} registers; expected {given} at most"


def registers_of_instances(name: str, kernel: Kernel, config: Config) -> list[int]:
    """Registers per thread of the instances of a warp group, least first. For one that issues matrix products, return
    those of all warp groups that do.

    A group of four warps has the registers that the IR gives its warp group. The first group, an instance of the warp
    group with the most warps, has those that the others leave, which are more if a program has few warps.
    """
    warp_groups = {block.name: block.warp_group for block in kernel.warp_groups if block.warp_group}
    first = max(warp_groups, key=lambda warp_group: warp_groups[warp_group].warps)
    remaining = lane_registers(kernel, config) - sum(groups(kernel)) + warp_groups[first].registers
    alike = mma_warp_groups(kernel) if name in mma_warp_groups(kernel) else [name]
    registers = [
        warp_groups[warp_group].registers for warp_group in alike for _ in range(warp_groups[warp_group].instances)
    ]
    return sorted([*registers[1:], min(MOST_REGISTERS, remaining // 8 * 8)] if name == first else registers)


def _overlap(kernel: Kernel, config: Config, code: dict[str, Any]) -> Iterator[str]:
    """Check that as many of a loop's exponentials as the IR says are executed while a product of weights runs."""
    total, overlapped = code["exponentials"], code["under"]
    least, most = overlapped_share(kernel, config)
    if not total:
        yield "has no exponentials in loops over products of weights; expected those of the softmax"
    elif not least * total <= overlapped <= most * total:
        share = f"{overlapped} of the {total} exponentials in its loops between the issue of a product and its wait"
        yield f"has {share}; expected {float(least):.0%} to {float(most):.0%}"


def overlapped_share(kernel: Kernel, config: Config) -> tuple[Fraction, Fraction]:
    """Return the least and the largest share of a loop's exponentials that may lie between the issue of a product of
    weights and its wait.

    Exponentials of rows, which rescale accumulators, may be anywhere: each thread computes one for all of its columns.
    Modifiers come before the weights, so their exponentials may be there, too; how many, the compiler decides. Where
    programs share an SM, exponentials overlap with products of other consumers, and any share is right.
    """
    if not overlaps_softmax(kernel) or not (kernel.stands_for == FORWARD or is_mla_decode(kernel)):
        return Fraction(0), Fraction(1)
    inside = outside = rows = others = 0
    columns = {"BLOCK_KV": config.block_kv, **dict.fromkeys(pipe.HALF_DIM.values(), config.block_kv // 2)}
    for step in _loop_bodies(kernel):
        in_flight = False
        for op in step.ops:
            in_flight |= isinstance(op, pipe.Wgmma) and op.over == "BLOCK_KV"
            in_flight &= not (isinstance(op, pipe.WgmmaWait) and _is_of_weights(kernel, op))
            if isinstance(op, (tile.SoftmaxStep, pipe.SoftmaxWeights)):
                count = columns[op.type.dims[-1]]
                inside, outside = (inside + count, outside) if in_flight else (inside, outside + count)
            rows += LANES * isinstance(op, (tile.SoftmaxStep, pipe.SoftmaxStats))
            if isinstance(op, tile.Map) and op.type.dims[1:] == ("BLOCK_KV",):
                others += config.block_kv * len(op.expr.atoms(exp2, sympy.Pow))
    total = inside + outside + rows
    return Fraction(inside, total), 1 - Fraction(outside, total + others)


def _loop_bodies(kernel: Kernel) -> Iterator[Block]:
    """The bodies of loops over tiles, without those of a first and a last tile: two where even and odd tiles differ."""
    for op in kernel.ops():
        if isinstance(op, pipe.PipelinedLoop):
            yield from (kernel.block(body) for body in (op.step, op.odd, op.pair) if body)


def _is_of_weights(kernel: Kernel, op: pipe.WgmmaWait) -> bool:
    issue = kernel.op(op.value)
    return isinstance(issue, pipe.Wgmma) and issue.over == "BLOCK_KV"


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers)) or "no"
