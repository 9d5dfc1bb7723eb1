"""The rule of caches of 8-bit numbers: what is read goes with the factors of its head, of its page and head, or of a
latent's columns; what is stored, too."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.interp.e4m3 import LARGEST
from attngen.ir.expr import Expr, select, symbol, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.names import SCALES
from attngen.ir.ops import (
    HALVES,
    Append,
    Deinterleave,
    Dot,
    Interleave,
    Loop,
    Map,
    Op,
    Reduce,
    SoftmaxStep,
    Store,
    Yield,
)
from attngen.verify.meaning import Values, quantised_load, scale_of


def quantised(module: Module, kernel: Kernel) -> Iterator[str]:
    """Numbers of 8 bits are multiplied by their factors once, and new ones divided by theirs; even columns stay
    even, and odd ones odd."""
    if module.cache is None or not module.cache.dtype:
        return
    values = Values(kernel)
    for row in module.configs(kernel.name) if kernel.tile_page else ():
        if kernel.tile_page % row.block_kv:
            yield f"{row.device}: tiles of {row.block_kv} keys, which have one factor each, do not divide pages of {kernel.tile_page}"
    latent = module.cache.scale == "columns"
    for op in kernel.ops():
        if isinstance(op, Append) and op.dst.tensor in SCALES:
            yield from _stored(
                kernel, values, op, _new_scale(kernel, values) if latent else scale_of(kernel, values, op)
            )
        elif isinstance(op, Append) and op.dst.tensor in SCALES.values():
            yield from _new_scales(kernel, values, op)
        elif isinstance(op, Interleave) and isinstance(kernel.op(op.a), Loop):
            yield from _columns(kernel, op)
    if latent:  # the rules of scores and of latents say what they are multiplied by
        return
    sums = [dot for dot in kernel.dots if (load := quantised_load(kernel, dot.b)) and load.src.tensor.startswith("V")]
    if kernel.reads_quantised and len(sums) != 2:
        yield f"{len(sums)} products sum values of %V; expected one of even and one of odd columns"
    for dot in sums:
        yield from _summed(kernel, values, dot)


def _new_scale(kernel: Kernel, values: Values) -> Expr:
    """What a latent's new columns are divided by: the factors that the kernel stores."""
    stored = next((op.value for op in kernel.ops() if isinstance(op, Append) and op.dst.tensor == SCALES["K"]), None)
    return values.of(stored) if stored else symbol("K_SCALE")


def _new_scales(kernel: Kernel, values: Values, op: Append) -> Iterator[str]:
    """New factors make the largest number of each group the largest one of 8 bits; none is 0."""
    found = values.of(op.value)
    sizes = [s for s in found.free_symbols if isinstance(kernel.op(values.others.get(s, op.value)), Reduce)]
    size = kernel.op(values.others[sizes[0]]) if len(sizes) == 1 else None
    least = [x for x in found.args if x.is_number and x > 0] if isinstance(found, sympy.Max) else []
    if isinstance(size, Reduce) and least and found == sympy.Max(sizes[0] / LARGEST, *least) and size.op == "max":
        new = next((s for s in values.of(size.value).free_symbols if values.elements.get(s) == "K_NEW"), None)
        if new is not None and values.of(size.value) == sympy.Max(new, -new) and size.type.dims[-1:] == ("GROUPS_V",):
            return
    yield f"%{op.name} stores `{to_text(found)}`; expected the largest size of a group of K_NEW / {LARGEST}, and more than 0"


def _stored(kernel: Kernel, values: Values, op: Append, expected: Expr) -> Iterator[str]:
    """What is appended are both halves of new numbers, divided by their factors."""
    tensor = op.dst.tensor
    joined = kernel.op(op.value)
    columns = kernel.op(joined.a) if isinstance(joined, Interleave) else None
    if (
        not isinstance(joined, Interleave)
        or not isinstance(columns, Deinterleave)
        or (joined.a, joined.b) != tuple(f"{columns.name}.{h}" for h in HALVES)
    ):
        yield f"%{op.name} stores %{op.value}; expected the even and the odd columns of one tile"
        return
    found = values.of(columns.value)
    new = next((s for s in found.free_symbols if values.elements.get(s) == f"{tensor}_NEW"), None)
    if new is None or found != new / expected:
        yield f"%{op.name} stores `{to_text(values.of(columns.value))}`; expected an element of {tensor}_NEW / {to_text(expected)}"


def _columns(kernel: Kernel, op: Interleave) -> Iterator[str]:
    """What is stored in even columns was summed of even ones, and odd of odd."""
    for ref, half in zip((op.a, op.b), HALVES):
        loop, field = kernel.op(ref), ref.rpartition(".")[2]
        last = kernel.block(loop.body).ops[-1] if isinstance(loop, Loop) else None
        made = kernel.op(dict(last.values)[field]) if isinstance(last, Yield) else None
        sources = [made, *(kernel.op(r) for r in made.operands())] if made else []
        if not any(isinstance(dot, Dot) and dot.b.endswith(f".{half}") for dot in sources):
            yield f"%{op.name} has %{ref} in {half} columns, which is no sum of {half} columns"


def _summed(kernel: Kernel, values: Values, dot: Dot) -> Iterator[str]:
    """Sums of values are multiplied by the factors of these: at the end, tile by tile, or with the weights, over the
    largest of a tile."""
    load = quantised_load(kernel, dot.b)
    assert load is not None
    scale = scale_of(kernel, values, load)
    weights = kernel.op(dot.a)
    while isinstance(weights, Map) and len(weights.uses) == 1:  # a cast
        weights = kernel.op(weights.uses[0][1])
    made = [kernel.op(name) for name in kernel.graph.successors(dot.name)]
    if isinstance(weights, SoftmaxStep) and all(_times(values, op, dot, scale) for op in made):
        return
    if isinstance(weights, SoftmaxStep):
        stores = [
            op for op in kernel.ops() if isinstance(op, Store) and kernel.accessed(op)[0].name in ("O", "O_PARTS")
        ]
        for op in stores:
            if sympy.Mul.make_args(values.of(op.value)).count(scale) != 1:
                yield f"%{op.value} is stored, `{to_text(values.of(op.value))}`; expected the factor {to_text(scale)} in it, once"
        return
    sizes = [op for op in kernel.ops() if isinstance(op, Reduce) and op.op == "max" and values.of(op.value) == scale]
    for size in (values.of(op.name) for op in sizes[:1]):
        p = [values.of(f"{op.name}.p") for op in kernel.ops() if isinstance(op, SoftmaxStep)]
        if values.of(weights.name) == p[0] * select(size > 0, scale / size, 0) and all(
            _times(values, op, dot, size) for op in made
        ):
            return
    yield f"%{dot.name} sums values by weights `{to_text(values.of(weights.name))}`; expected the factor {to_text(scale)} in them"


def _times(values: Values, op: Op, dot: Dot, size: Expr) -> bool:
    """Whether an op adds a product times the largest factor of its tile."""
    return isinstance(op, Map) and sympy.expand(values.of(op.name)).coeff(values.of(dot.name)) == size
