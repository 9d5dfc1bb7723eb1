"""Why a config does not fit its device or is miscompiled, and why the shared-memory formula may be an upper bound."""

from __future__ import annotations

from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module, only, tile, unpadded
from attngen.targets.triton.matrix_units import SCORES, aligned, by_warp_groups, in_tf32, takes_scores
from attngen.targets.triton.sram import is_continued, is_read_alike, reduces_single_product, sram_bytes
from attngen.tiles.sizes import mode, sizes

TENSOR_ROWS = 128  # rows of a column of tensor memory
NARROW = 64  # a tile's descriptor has its highest bit set if a row of the tile has at most so many bytes
JOINED_ROWS = 32  # rows that four threads of a matrix instruction hold if dropout concatenates the operand's words


def slack(module: Module, kernel: Kernel, config: Config) -> str | None:
    """Why the closed form may exceed the number that the compiler reports; None if both should be equal."""
    if kernel.traits.rewriting:
        return "a tile that is rewritten changes layout through shared memory, in as many steps as the compiler takes"
    if any(only(kernel.ops(), tile.Interleave)):
        return "even and odd columns change layout to be interleaved, in as many steps as the compiler takes"
    if reduces_single_product(kernel):
        return "warps exchange partial sums of rows, and the compiler chooses how many warps share a row"
    if not aligned(module):
        return "rows of a head dimension that is not a multiple of 16 are not copied ahead"
    if any(op.pages for op in only(kernel.ops(), tile.Load)):
        return "loads of rows in pages wait for the page numbers, so fewer tiles are copied ahead"
    if CLASSES[config.device].shares_stationary and any(
        is_read_alike(kernel, op) for op in only(kernel.ops(), tile.Load)
    ):
        return "scores may change layout in the buffer of a tile that several products have read"
    if config.num_stages == 1 and kernel.loops:
        return "with a single buffer, tiles whose uses do not overlap share room"
    if kernel.traits.dots and in_tf32(module, config):
        return "in TF32 a tile that several products read may change layout through shared memory"
    if kernel.traits.dots and any(
        op.type.dtype == "b1" and set(op.type.dims) == SCORES for op in only(kernel.ops(), tile.Gather, tile.Load)
    ):
        return "a boolean per score may be loaded where it is used, without a change of layout"
    if any(op.type.dims == ("BLOCK_KV", "BLOCK_Q") for op in only(kernel.ops(), tile.Load)):
        return "a tile of scores that is loaded transposed may not be copied ahead"
    moved = [kernel.type_of(op.value) for op in only(kernel.ops(), tile.Scatter, tile.Store)]
    moved += [op.type for op in only(kernel.ops(), tile.Gather)]
    if any(set(t.dims) == SCORES for t in moved):
        return "tiles of scores that are gathered, or stored in the loop, may share room one after another"
    if kernel.traits.has_dropout and CLASSES[config.device].moves_random:
        return "dropout's random words may be computed where they are used, without a change of layout"
    return None


def why_not_fit(
    module: Module, kernel: Kernel, config: Config, change: str = "BLOCK_Q, BLOCK_KV, num_stages or head_dim"
) -> str | None:
    """One sentence on why a config does not fit its device class and what to `change`, or why it is miscompiled; None
    if all is well."""
    device = CLASSES[config.device]
    need = sram_bytes(module, kernel, config)
    if need <= device.smem_per_block:
        return (
            _exceeds_tensor_memory(module, kernel, config)
            or _reads_unset_register(module, kernel, config)
            or miscounts(module, kernel, config)
        )
    columns = f"BLOCK_D={config.columns}, " if config.columns else ""
    return (
        f"on {config.device} the kernel @{kernel.name} needs {need:,} bytes of shared memory with "
        f"BLOCK_Q={config.block_q}, BLOCK_KV={config.block_kv}, {columns}num_stages={config.num_stages} at "
        f"{config.elem_bytes} bytes per element, and has {device.smem_per_block:,}; a smaller {change} needs less"
    )


def _exceeds_tensor_memory(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence if accumulators need more tensor memory than the device has, so that no launch would start; or None.

    Each product has its own columns, even if another product continues its sum. So has an operand computed from scores.
    Two tiles share columns if each has half as many rows as a column.
    """
    device, dims = CLASSES[config.device], sizes(module, config)
    if not (device.tensor_columns and any(is_continued(kernel, op) for op in only(kernel.ops(), tile.Load))):
        return None
    made = [dims[kernel.type_of(dot.a).dims[1]] for dot in kernel.traits.dots if takes_scores(kernel, dot)]
    columns = sum(dims[dot.type.unpadded[1]] for dot in kernel.traits.dots) + sum(made) * config.elem_bytes // 4
    columns = columns * min(config.block_q, TENSOR_ROWS) // TENSOR_ROWS
    if columns <= device.tensor_columns:
        return None
    return (
        f"on {config.device} the kernel @{kernel.name} needs {columns} columns of tensor memory with "
        f"BLOCK_KV={config.block_kv}, and has {device.tensor_columns}; a smaller BLOCK_KV or head_dim needs less"
    )


def _reads_unset_register(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence if ptxas would let a product read a register that nothing has written; or None.

    Products of four warps read a tile through a shared-memory descriptor, whose highest bit is set if a row of the tile
    has at most 64 bytes. If the tile is at the same place in each iteration, ptxas 12.8 (Triton 3.6.0 to 3.7.1) may
    omit instructions that compute the descriptors of its later rows (docs/fit.md). This was seen for tiles that only
    one product reads and that are narrower than those of the scores' products.

    The place changes between iterations if the tile is loaded by TMA into two or more buffers. With pointers, the
    strides of a call decide that, so they are always refused. A tile computed on chip, as from 8-bit elements, always
    has the same place.
    """
    device, dims = CLASSES[config.device], sizes(module, config)
    if device.name != "sm90" or mode(module, config.elem_bytes) == "tf32" or not by_warp_groups(module, kernel, config):
        return None
    scores = [dot for dot in kernel.traits.dots if set(dot.type.dims) == SCORES]
    widest = max(dims[unpadded(dot.over)] for dot in scores)

    def width(dot: tile.Dot) -> int:
        return dims[dot.type.unpadded[1]]

    only_readers = (
        dot
        for dot in kernel.traits.dots
        if takes_scores(kernel, dot) and sum(dot.b in (other.a, other.b) for other in kernel.traits.dots) == 1
    )
    narrow = [dot for dot in only_readers if width(dot) < widest and width(dot) * config.elem_bytes <= NARROW]
    made = [dot for dot in narrow if not isinstance(kernel.op(dot.b), tile.Load)]
    wrong = made if config.tma and config.num_stages > 1 else narrow
    if not wrong:
        return None
    rows = scores[0].type.dims[0]
    described = not made and any(op.via for op in only(kernel.ops(), tile.Load))
    return (
        f"on {config.device} the kernel @{kernel.name} is wrong with {rows}={dims[rows]}: tiles of {width(wrong[0])} "
        "columns stay at one place in shared memory, and ptxas has products read a register that nothing has written; "
        f"expected {rows} below {device.matrix_rows}" + (", or num_stages=2 or more with TMA=1" if described else "")
    )


def miscounts(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence if Triton would count some scores twice; or None.

    On its way to a warp-level product, an operand computed on chip gets a thread layout by the narrowest elements that
    were loaded for it: each of four threads holds as many consecutive ones as fill 32 bits, and twice as many if
    dropout concatenates its words. A product over fewer rows than four threads then hold sums some rows twice. Triton
    3.6.0 to 3.7.1 do so; 3.8.0 does not (triton-lang/triton#11691). Instructions of four warps, which read operands
    from shared memory, lay them out by their own width.
    """
    device = CLASSES[config.device]
    if device.backend != "cuda" or not kernel.traits.has_dropout or mode(module, config.elem_bytes) == "ieee":
        return None
    if by_warp_groups(module, kernel, config):
        return None
    narrow = any(op.type.dtype == "b1" and op.type.dims for op in only(kernel.ops(), tile.Gather, tile.Load))
    dims = sizes(module, config)
    over = next((dot.over for dot in kernel.traits.dots if dot.over in SCORES and dims[dot.over] < JOINED_ROWS), None)
    if over is None or not narrow:
        return None
    blocks = ", and so blocks of the mask," if module.blocks and module.blocks.size < JOINED_ROWS else ""
    return (
        f"on {config.device} the kernel @{kernel.name} is wrong with {over}={dims[over]}: where dropout meets booleans "
        f"of a mask, Triton counts scores twice in tiles of fewer than {JOINED_ROWS}; expected tiles{blocks} of "
        f"{JOINED_ROWS} "
        "or more"
    )
