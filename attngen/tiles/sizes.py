"""Elements and bytes of values and tiles, and the values that a config gives to the symbols of formulas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

import sympy

from attngen.heuristics import LEAST_SHARED
from attngen.ir import DTYPE_BYTES, Config, Kernel, Module, Type, only, tile
from attngen.ir.dims import SIDES, SPLIT_DIM, TILED, WHOLE, axis_of, dimension
from attngen.ir.dtypes import ELEMENTS, of_size
from attngen.ir.expr import Expr, cdiv, select, symbol
from attngen.ir.names import CALL_ROWS, WHOLE_LENGTHS
from attngen.tiles.tiles import evaluate

ELEM = symbol("elem")  # bytes of one element of q, k and v
STAGES = symbol("stages")


def elem_sizes(module: Module, kernel: Kernel | None = None) -> tuple[int, ...]:
    """Return the bytes per element of the module's dtypes, smallest first; of an i32 for a kernel that prepares."""
    if kernel is not None and kernel.traits.prepares:
        return (DTYPE_BYTES["i32"],)
    return tuple(sorted({ELEMENTS[d].bytes for d in module.dtypes}))


@cache
def tile_width(head_dim: int) -> int:
    """Return the width of a head dimension on chip, in elements: padded to a power of two."""
    return 1 << (head_dim - 1).bit_length()


def elements(t: Type) -> Expr:
    """Return the number of elements of a value, as a formula in BLOCK_Q, BLOCK_KV, D_QK and D_V; for a tensor also in
    B, Hq, Hkv, Nq and Nk."""
    lengths = {
        "*": sympy.Integer(1),
        "Td": 2 * cdiv(symbol("Nq"), sympy.Integer(64)),
        "Nd": symbol("Nq") + symbol("Nk"),
    }
    lengths |= dict.fromkeys(SIDES.values(), symbol("D_V") / 2)
    return sympy.Mul(*(lengths.get(d) or dimension(d) for d in t.unpadded))


def tile_bytes(t: Type) -> Expr:
    """Return the bytes of a value, as a formula in the symbols of `elements` and in `elem`."""
    known = (
        ELEM
        if t.dtype == "T"
        else sympy.Integer(ELEMENTS[t.dtype].bytes if t.dtype in ELEMENTS else DTYPE_BYTES[t.dtype])
    )
    return known * elements(t)


def share_of(op: tile.Load) -> Expr:
    """Return 1 for a loaded tile; 0 for a program's slice of a loaded tile if the slice is the whole tile."""
    if not op.columns_of:
        return sympy.Integer(1)
    own = SPLIT_DIM[axis_of(op.src.index[-1])]
    return select(symbol(own) < symbol(WHOLE[own]), sympy.Integer(1), sympy.Integer(0))


def block_d_choices(module: Module, kernel: Kernel) -> tuple[int, ...]:
    """Return the possible widths of a program's slice of head_dim with split-D: all, a half, a quarter and so on; (0,)
    without."""
    if (axis := kernel.traits.split_d_axis) is None:
        return (0,)
    whole = tile_width(module.widths[WHOLE[SPLIT_DIM[axis.var]]])
    return tuple(whole >> halved for halved in range(whole.bit_length()) if whole >> halved >= LEAST_SHARED)


def mode(module: Module, elem_bytes: int) -> str:
    """Return how matrix products of elements of this size are computed: as ELEMENTS says for the type of that size,
    else `tf32` or `ieee`."""
    return ELEMENTS[of_size([*module.dtypes, *ELEMENTS], elem_bytes)].products or module.precision


@lru_cache(maxsize=10_000)  # the configs of a few modules, each of which several formulas take
def sizes(module: Module, config: Config) -> Mapping[str, int]:
    """Return the values that a config gives to the symbols of formulas."""
    return {
        **{dim: getattr(config, field) for dim, field in TILED.items()},
        **{name: tile_width(width) for name, width in module.widths.items()},
        "stages": config.num_stages,
        "elem": config.elem_bytes,
    }


def lengths(module: Module, n_q: int, n_kv: int) -> dict[str, int]:
    """Return the values of all sizes that follow from the rows of a sequence. If calls have chunks of a sequence, they
    are those of a call that has all of them."""
    found = {"Nq": n_q, "Nk": n_kv}
    if not module.chunk:
        return found
    for (size, rows), short in zip((*found.items(),), "qk"):
        chunks = -(-rows // module.chunk)
        units = chunks * (module.chunk // module.unit)
        found |= {CALL_ROWS[size]: rows, WHOLE_LENGTHS[size]: rows}
        found |= {f"C{short}": chunks, f"U{short}": units, f"W{short}1": units + 1}
    return found


def lies_in_pages(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if each tile of keys that TMA loads by descriptor is in one page of the KV cache."""
    described = config.tma and any(op.via and op.pages for op in only(kernel.ops(), tile.Load))
    return not described or (module.cache is not None and int(module.cache.page) % config.block_kv == 0)


def streamed_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Return the bytes that one iteration of the loop over tiles loads."""
    return int(evaluate(_streamed(kernel), sizes(module, config)))


@cache
def _streamed(kernel: Kernel) -> Expr:
    bodies = sorted({loop.body for loop in kernel.loops if loop.cls != "all"})
    return sympy.Add(
        *(share_of(op) * tile_bytes(op.type) for body in bodies for op in only(kernel.block(body).ops, tile.Load))
    )
