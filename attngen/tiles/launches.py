"""How kernels are launched: so that as many programs share a multiprocessor as they say; and for which calls."""

from __future__ import annotations

import sympy

from attngen.devices import CLASSES
from attngen.heuristics import ALIGNED_KEYS, JOINED_EACH
from attngen.ir.expr import Bool, mod, symbol
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.names import SUMS
from attngen.ir.ops import OWN
from attngen.tiles.sizes import tile_width

GROUP = 4  # warps that have a number of registers together: those of a copy are filled up to a multiple


def rows_are_aligned() -> Bool:
    """The condition that rows of a number for each key, in 16 bits, start where the copy engine can read and write
    them."""
    return sympy.Eq(mod(symbol("Nk"), sympy.Integer(ALIGNED_KEYS)), 0)


def groups(kernel: Kernel) -> list[int]:
    """The registers of each lane of a kernel's groups of four warps. Roles of fewer warps share groups, which have
    those of the most."""
    warp_groups = [block.warp_group for block in kernel.warp_groups if block.warp_group]
    whole = [
        warp_group.registers
        for warp_group in warp_groups
        for _ in range(warp_group.instances * (warp_group.warps // GROUP))
    ]
    rest = sorted(
        (
            warp_group.registers
            for warp_group in warp_groups
            for _ in range(warp_group.instances * (warp_group.warps % GROUP))
        ),
        reverse=True,
    )
    return [*whole, *rest[::GROUP]]


def launch_registers(kernel: Kernel, config: Config) -> int:
    """The registers of each thread of a program at its launch, with which so many programs fit a multiprocessor: a
    multiple of 8."""
    device = CLASSES[config.device]
    threads = max(1, len(groups(kernel))) * GROUP * device.threads_per_warp
    return min(device.registers_per_thread + 1, device.registers_per_sm // (kernel.ctas_per_sm * threads)) // 8 * 8


def lane_registers(kernel: Kernel, config: Config) -> int:
    """Those of all groups of a program, for each lane: roles share them."""
    return len(groups(kernel)) * launch_registers(kernel, config)


def most_registers(kernel: Kernel, config: Config) -> int:
    """Of a thread of a kernel that deals keys: those of a multiprocessor, or the part that leaves room for as many
    programs of few rows as there are."""
    device, kv_split = CLASSES[config.device], kernel.kv_split
    each = device.registers_per_sm // (config.num_warps * device.threads_per_warp)
    if (
        kv_split
        and kv_split.ctas_per_sm_packed
        and kv_split.ctas_per_sm_for(config.max_rows) == kv_split.ctas_per_sm_packed
    ):
        each = each // kv_split.ctas_per_sm_packed // 8 * 8
    return min(device.registers_per_thread, each)


def joining_warps(module: Module, device: str) -> int:
    """The most warps of a program that joins the parts of a row, so that each has all parts of the columns that it
    has."""
    return max(1, tile_width(module.head_dim_v) // (JOINED_EACH * CLASSES[device].threads_per_warp))


def constants(kernel: Kernel, config: Config) -> dict[str, int]:
    """The constants that a schedule row gives to a printed portable kernel, by their names: sizes of tiles, and
    flags."""
    device = CLASSES[config.device]
    return {
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "TMA": config.tma,
        **({OWN[axis.var]: config.columns} if (axis := kernel.shared_columns) else {}),
        **({"BLOCK_PARTS": config.block_kv} if kernel.combines_splits else {}),
        **({"CONVERTS": device.converts} if kernel.reads_quantised else {}),
        **({"OVERLAPS": device.overlaps} if kernel.overlaps else {}),
    }


def launch_options(kernel: Kernel, config: Config) -> dict[str, int]:
    """The options of a launch, by Triton's names.

    Where divided programs share a multiprocessor, the registers at launch are among them. So they are where programs
    take part after
    part: no more are launched than a multiprocessor has room for, and ptxas is not to let values spill to make room for
    others, but for as many more as there are of few rows. Where parts are joined, all loads of a turn are then in
    flight before one is waited for.

    Where kernels of fp32 give each other the maximum of a row, products are rounded before they are added: with some
    fused into additions, the forward and the backward pass would have different scores of the same pair, and large
    scores differ by more than weights may.
    """
    limit, device = {}, CLASSES[config.device]
    if kernel.ctas_per_sm > 1:
        limit = {"maxnreg": launch_registers(kernel, config)}
    elif kernel.kv_split and not kernel.backend and device.backend == "cuda":
        limit = {"maxnreg": most_registers(kernel, config)}
    early = {"launch_pdl": True} if kernel.waits and device.overlaps else {}
    passed = not {arg.name for arg in kernel.args}.isdisjoint((*SUMS, "ROW_MAX"))
    rounded = {"enable_fp_fusion": False} if passed and config.elem_bytes == 4 else {}
    return {"num_warps": config.num_warps, **limit, **early, **rounded}
