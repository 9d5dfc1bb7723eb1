"""The rule `quantised`: 8-bit caches. Values that are read are multiplied by their scales, and new ones are divided by
theirs. There is a scale per head, per page and head, or per group of a latent's columns."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.interp.e4m3 import LARGEST
from attngen.ir import Expr, Kernel, Module, Op, only, select, symbol, tile, to_text
from attngen.ir.names import SCALES
from attngen.verify.values import Values, quantised_load, scale_of


def quantised(module: Module, kernel: Kernel) -> Iterator[str]:
    """8-bit values are multiplied by their scales once, and new ones are scaled down by theirs once. Even columns stay
    even, and odd ones odd."""
    if module.cache is None or not module.cache.dtype:
        return
    values = Values(kernel)
    for config in module.configs(kernel.name) if kernel.traits.tile_page else ():
        if kernel.traits.tile_page % config.block_kv:
            tiles = f"tiles of {config.block_kv} keys, which have one scale each"
            yield f"{config.device}: {tiles}, do not divide pages of {kernel.traits.tile_page}"
    latent = module.cache.scale == "columns"
    for op in kernel.ops():
        if isinstance(op, tile.Append) and op.dst.tensor in SCALES:
            yield from _stored(
                kernel, values, op, _new_scale(kernel, values) if latent else scale_of(kernel, values, op)
            )
        elif isinstance(op, tile.Append) and op.dst.tensor in SCALES.values():
            yield from _new_scales(kernel, values, op)
        elif isinstance(op, tile.Interleave) and isinstance(kernel.op(op.a), tile.Loop):
            yield from _columns(kernel, op)
    if latent:  # the rules `scores` and `latents` check products with latents
        return
    products = [
        dot for dot in kernel.traits.dots if (load := quantised_load(kernel, dot.b)) and load.src.tensor.startswith("V")
    ]
    if kernel.traits.reads_quantised and len(products) != 2:
        yield f"{len(products)} products sum values of %V; expected one of even and one of odd columns"
    for dot in products:
        yield from _summed(kernel, values, dot)


def _new_scale(kernel: Kernel, values: Values) -> Expr:
    """The scales of a latent's new columns: those that the kernel stores."""
    stored = next((op.value for op in only(kernel.ops(), tile.Append) if op.dst.tensor == SCALES["K"]), None)
    return values.of(stored) if stored else symbol("K_SCALE")


def _new_scales(kernel: Kernel, values: Values, op: tile.Append) -> Iterator[str]:
    """New scales map the largest number of each group to the largest one of 8 bits; none is 0."""
    found = values.of(op.value)
    sizes = [s for s in found.free_symbols if isinstance(kernel.op(values.others.get(s, op.value)), tile.Reduce)]
    size = kernel.op(values.others[sizes[0]]) if len(sizes) == 1 else None
    least = [x for x in found.args if x.is_number and x > 0] if isinstance(found, sympy.Max) else []
    if isinstance(size, tile.Reduce) and least and found == sympy.Max(sizes[0] / LARGEST, *least) and size.op == "max":
        new = next((s for s in values.of(size.value).free_symbols if values.elements.get(s) == "K_NEW"), None)
        if new is not None and values.of(size.value) == sympy.Max(new, -new) and size.type.dims[-1:] == ("GROUPS_V",):
            return
    expected = f"the largest size in a group of K_NEW / {LARGEST}, and more than 0"
    yield f"%{op.name} stores `{to_text(found)}`; expected {expected}"


def _stored(kernel: Kernel, values: Values, op: tile.Append, expected: Expr) -> Iterator[str]:
    """An append stores the even and odd columns of new values over their scales."""
    tensor = op.dst.tensor
    pairs = kernel.op(op.value)
    columns = kernel.op(pairs.a) if isinstance(pairs, tile.Interleave) else None
    if (
        not isinstance(pairs, tile.Interleave)
        or not isinstance(columns, tile.Deinterleave)
        or (pairs.a, pairs.b) != tuple(f"{columns.name}.{h}" for h in tile.HALVES)
    ):
        yield f"%{op.name} stores %{op.value}; expected the even and the odd columns of one tile"
        return
    found = values.of(columns.value)
    new = next((s for s in found.free_symbols if values.elements.get(s) == f"{tensor}_NEW"), None)
    if new is None or found != new / expected:
        scale = to_text(expected)
        yield f"%{op.name} stores `{to_text(found)}`; expected an element of {tensor}_NEW / {scale}"


def _columns(kernel: Kernel, op: tile.Interleave) -> Iterator[str]:
    """Sums stored in even columns are sums of even columns, and those in odd columns sums of odd ones."""
    for ref, half in zip((op.a, op.b), tile.HALVES):
        loop, field = kernel.op(ref), ref.rpartition(".")[2]
        last = kernel.block(loop.body).ops[-1] if isinstance(loop, tile.Loop) else None
        made = kernel.op(dict(last.values)[field]) if isinstance(last, tile.Yield) else None
        sources = [made, *(kernel.op(r) for r in made.operands())] if made else []
        if not any(dot.b.endswith(f".{half}") for dot in only(sources, tile.Dot)):
            yield f"%{op.name} has %{ref} in {half} columns, which is no sum of {half} columns"


def _summed(kernel: Kernel, values: Values, dot: tile.Dot) -> Iterator[str]:
    """Sums of values are multiplied by the values' scales: at the end, tile by tile, or with the weights relative to
    the largest scale of a tile."""
    load = quantised_load(kernel, dot.b)
    assert load is not None
    scale = scale_of(kernel, values, load)
    weights = kernel.op(dot.a)
    while isinstance(weights, tile.Map) and len(weights.uses) == 1:  # a cast
        weights = kernel.op(weights.uses[0][1])
    made = [kernel.op(name) for name in kernel.graph.successors(dot.name)]
    if isinstance(weights, tile.SoftmaxStep) and all(_times(values, op, dot, scale) for op in made):
        return
    if isinstance(weights, tile.SoftmaxStep):
        stores = [op for op in only(kernel.ops(), tile.Store) if kernel.accessed(op)[0].name in ("O", "O_PARTIAL")]
        for op in stores:
            if sympy.Mul.make_args(values.of(op.value)).count(scale) != 1:
                found = to_text(values.of(op.value))
                yield f"%{op.value} is stored as `{found}`; expected the factor {to_text(scale)} in it, once"
        return
    sizes = [op for op in only(kernel.ops(), tile.Reduce) if op.op == "max" and values.of(op.value) == scale]
    for size in (values.of(op.name) for op in sizes[:1]):
        p = [values.of(f"{op.name}.p") for op in only(kernel.ops(), tile.SoftmaxStep)]
        if values.of(weights.name) == p[0] * select(size > 0, scale / size, 0) and all(
            _times(values, op, dot, size) for op in made
        ):
            return
    found = to_text(values.of(weights.name))
    yield f"%{dot.name} sums values by weights `{found}`; expected the factor {to_text(scale)} in them"


def _times(values: Values, op: Op, dot: tile.Dot, size: Expr) -> bool:
    """True if an op adds the product `dot` times `size`, the largest scale of its tile."""
    return isinstance(op, tile.Map) and sympy.expand(values.of(op.name)).coeff(values.of(dot.name)) == size
