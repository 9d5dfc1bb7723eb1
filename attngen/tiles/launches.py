"""Launch options of kernels: warps, registers for the number of CTAs per SM, PDL; and conditions on calls."""

from __future__ import annotations

import sympy

from attngen.devices import CLASSES
from attngen.heuristics import ALIGNED_KEYS, COMBINE_COLUMNS_PER_THREAD
from attngen.ir import SPLIT_DIM, Bool, Config, Kernel, Module, mod, symbol
from attngen.ir.names import ROW_STATS
from attngen.tiles.sizes import tile_width

GROUP = 4  # warps of a warpgroup, which have the same number of registers; an instance's warps are padded to a multiple


def rows_are_aligned() -> Bool:
    """Return the condition that rows of one 16-bit number per key are aligned for TMA loads and stores."""
    return sympy.Eq(mod(symbol("Nk"), sympy.Integer(ALIGNED_KEYS)), 0)


def groups(kernel: Kernel) -> list[int]:
    """Return the registers per thread of each group of four warps. Warp groups of fewer warps share one group, which
    has the largest of their register counts."""
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
    """Return the registers per thread at launch with which `ctas_per_sm` programs fit an SM: a multiple of 8."""
    device = CLASSES[config.device]
    threads = max(1, len(groups(kernel))) * GROUP * device.threads_per_warp
    return min(device.registers_per_thread + 1, device.registers_per_sm // (kernel.ctas_per_sm * threads)) // 8 * 8


def lane_registers(kernel: Kernel, config: Config) -> int:
    """Return the sum over a program's groups of their registers per thread at launch, which its warp groups share."""
    return len(groups(kernel)) * launch_registers(kernel, config)


def split_kv_registers(kernel: Kernel, config: Config) -> int:
    """Return the most registers per thread of a split-KV kernel: one program may fill an SM, or, for few rows,
    `ctas_per_sm_packed` programs share it."""
    device, kv_split = CLASSES[config.device], kernel.kv_split
    each = device.registers_per_sm // (config.num_warps * device.threads_per_warp)
    if (
        kv_split
        and kv_split.ctas_per_sm_packed
        and kv_split.ctas_per_sm_for(config.max_rows) == kv_split.ctas_per_sm_packed
    ):
        each = each // kv_split.ctas_per_sm_packed // 8 * 8
    return min(device.registers_per_thread, each)


def combine_warps(module: Module, device: str) -> int:
    """Return the largest number of warps for a program of a combine kernel. Each warp combines all splits of its own
    columns of head_dim."""
    return max(1, tile_width(module.head_dim_v) // (COMBINE_COLUMNS_PER_THREAD * CLASSES[device].threads_per_warp))


def constants(kernel: Kernel, config: Config) -> dict[str, int]:
    """Return the constants that a config gives to a printed portable kernel, by name: tile sizes and flags."""
    device = CLASSES[config.device]
    return {
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "TMA": config.tma,
        **({SPLIT_DIM[axis.var]: config.columns} if (axis := kernel.traits.split_d_axis) else {}),
        **({"BLOCK_KV_splits": config.block_kv} if kernel.traits.combines_splits else {}),
        **({"CONVERTS": device.converts} if kernel.traits.reads_quantised else {}),
        **({"OVERLAPS": device.overlaps} if kernel.traits.overlaps else {}),
    }


def launch_options(kernel: Kernel, config: Config) -> dict[str, int]:
    """Return the launch options, by Triton's names.

    `maxnreg` is set if several warp-specialized programs share an SM, and for split-KV kernels. The latter launch no
    more programs than the SMs have room for, so ptxas must not spill values to make room for others (except for the
    additional programs of few rows). Combine programs then have all loads of an iteration in flight before they wait
    for one.

    fp32 kernels that pass row maxima to each other disable the fusion of multiplications into additions. With it, the
    forward and the backward pass would compute different scores for the same pair, and large scores would differ by
    more than weights may.
    """
    limit, device = {}, CLASSES[config.device]
    if kernel.ctas_per_sm > 1:
        limit = {"maxnreg": launch_registers(kernel, config)}
    elif kernel.kv_split and not kernel.backend and device.backend == "cuda":
        limit = {"maxnreg": split_kv_registers(kernel, config)}
    early = {"launch_pdl": True} if kernel.traits.waits and device.overlaps else {}
    passed = not {arg.name for arg in kernel.args}.isdisjoint((*ROW_STATS, "ROW_MAX"))
    rounded = {"enable_fp_fusion": False} if passed and config.elem_bytes == 4 else {}
    return {"num_warps": config.num_warps, **limit, **early, **rounded}
