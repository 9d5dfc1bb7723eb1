"""Rules of Triton and its devices, which the verifier checks: descriptors, configs that fit, tiles of powers of two,
operands of one type."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.devices import CLASSES
from attngen.ir import AXIS_DIM, PADDED, TENSORS, Config, Kernel, Module, axis_of, only, tile, unpadded
from attngen.ir.dtypes import QUANTISED, by_precision
from attngen.targets.triton.fit import why_not_fit
from attngen.tiles.launches import combine_warps
from attngen.tiles.sizes import tile_width


def described(module: Module, kernel: Kernel) -> Iterator[str]:
    """A load by descriptor reads a tile of rows of one head to shared memory, with zeros out of bounds; only configs of
    devices with TMA use descriptors."""
    by_descriptor = [op for op in only(kernel.ops(), tile.Load) if op.via]
    for op in by_descriptor:
        tensor, index = kernel.accessed(op)
        rows = [axis_of(i) for i in index if axis_of(i)]
        whole = (
            isinstance(tensor, tile.Arg)
            and tensor.role == "in"
            and len(index) + bool(op.pages) == 4
            and [str(i) for i in index[-2:]] == rows
        )
        if (
            op.via != "descriptor"
            or op.type.dtype not in ("T", "f32", *QUANTISED.values())
            or op.type.space not in ("sram", "?")
            or not whole
            or op.other != 0
        ):
            yield (
                f"%{op.name} is read via({op.via}); expected `descriptor`, of a tile %T[b, h, rows, columns] in sram "
                f"whose outside is 0"
            )
    for config in module.configs(kernel.name):
        if config.tma and not (by_descriptor and config.device in CLASSES and CLASSES[config.device].tma):
            why = f"{config.device} has no TMA" if by_descriptor else f"no load of @{kernel.name} is via(descriptor)"
            yield f"{config.device}: TMA=1, but {why}"
        page = module.cache.page if module.cache and config.tma and any(op.pages for op in by_descriptor) else ""
        if page and int(page) % config.block_kv:
            yield f"{config.device}: TMA=1, and pages of {page} rows are not a multiple of BLOCK_KV={config.block_kv}"


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every config fits the device class that it is for."""
    for config in module.configs(kernel.name):
        if config.device not in CLASSES:
            yield f"`{config.device}` is not a device class; expected one of {', '.join(CLASSES)}"
            continue
        reason = why_not_fit(module, kernel, config)
        if reason:
            yield reason
    for not_fitting in module.not_fitting(kernel.name):
        if not_fitting.device not in CLASSES:
            yield f"`{not_fitting.device}` is not a device class; expected one of {', '.join(CLASSES)}"


def powers_of_two(module: Module, kernel: Kernel) -> Iterator[str]:
    """Tiles are powers of two of at least 16, and head dimensions are padded to one; warps are a power of two, as many
    as a program may have."""
    for op in kernel.ops():
        for t in op.results().values():
            for name, width in module.widths.items() if not (isinstance(op, tile.Arg) and op.role in TENSORS) else ():
                wrong = name if width & (width - 1) else PADDED[name]
                if wrong in t.dims:
                    state = "padded" if wrong == name else "not padded"
                    yield f"%{op.name} is of {wrong}; a head dimension of {width} is {state} on chip"
    for dot in kernel.traits.dots:
        if (width := module.widths.get(unpadded(dot.over), 16)) < 16:
            yield f"%{dot.name} sums {width} columns; Triton needs 16 at least"
    for config in module.configs(kernel.name):
        rows = 1 if kernel.traits.combines_splits else 16  # a program combines one row; products need more
        for name, value, least in (
            ("BLOCK_Q", config.block_q, rows),
            ("BLOCK_KV", config.block_kv, rows),
            ("num_warps", config.num_warps, 1),
        ):
            if value < least or value & (value - 1):
                yield f"{config.device}: {name}={value}; Triton needs a power of two, {least} at least"
        most = 1024 // CLASSES[config.device].threads_per_warp
        if config.num_warps > most:
            yield f"{config.device}: num_warps={config.num_warps}; expected at most {most}, which are 1024 threads"
        if kernel.traits.combines_splits:
            yield from _combines_in_registers(module, config)
        if not 1 <= config.num_stages <= 8:
            yield f"{config.device}: num_stages={config.num_stages}; expected 1 to 8"
        if config.max_rows is not None and config.max_rows < 1:
            yield f"{config.device}: rows<={config.max_rows}; expected 1 or more"


def _combines_in_registers(module: Module, config: Config) -> Iterator[str]:
    """A program combines the splits of one row, and each thread holds all splits of its columns in registers."""
    device, most = CLASSES[config.device], combine_warps(module, config.device)
    if config.block_q != 1 or config.num_stages != 1:
        yield (
            f"{config.device}: BLOCK_Q={config.block_q} and num_stages={config.num_stages}; expected 1, because a "
            f"program combines the splits of one row"
        )
    if config.num_warps > most:
        yield (
            f"{config.device}: num_warps={config.num_warps}; expected at most {most}, with which each warp holds all "
            f"splits of its columns"
        )
    per_thread = config.block_kv * tile_width(module.head_dim_v) // (config.num_warps * device.threads_per_warp)
    if per_thread >= device.registers_per_thread:
        yield (
            f"{config.device}: an iteration combines {config.block_kv} splits, {per_thread} values per thread, and a "
            f"thread has {device.registers_per_thread} registers"
        )


def dot_operands(module: Module, kernel: Kernel) -> Iterator[str]:
    """Both operands of a dot have the tensors' element type, or fp16 if one was stored in 8 bits; fp32 products state
    their precision."""
    precision = module.precision if by_precision(module.dtypes) else ""
    for op in kernel.ops():
        if isinstance(op, tile.Dot):
            dtype = "fp16" if isinstance(kernel.op(op.b), tile.Deinterleave) else "T"  # an 8-bit operand
            for ref in (op.a, op.b):
                if kernel.type_of(ref).dtype != dtype:
                    yield f"%{op.name} multiplies %{ref} of {kernel.type_of(ref).dtype}; cast it to {dtype} first"
            if op.precision != precision:
                yield (
                    f"%{op.name} has precision `{op.precision}`; expected `{precision}`, by the module's dtype and "
                    f"precision"
                )


def padding_checked(module: Module, kernel: Kernel) -> Iterator[str]:
    """Tiles padded to a power of two check the head dimension on every access."""
    for op in kernel.ops():
        if isinstance(op, (tile.Load, tile.Store)):
            of = kernel.type_of(op.value) if isinstance(op, tile.Store) else op.type
            axes = {a for a, when in op.check if when == "always"}
            for padded, dim in zip(of.dims, of.unpadded):
                axis = next(letter for letter, known in AXIS_DIM.items() if known == dim) if padded != dim else ""
                if axis and axis not in axes:
                    yield f"%{op.name} is padded to {padded} but does not check {axis}"
