"""Host ops that sum the partial gradients of inputs that kernels write."""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy

from attngen.builders.host_builder import HostBuilder
from attngen.builders.positions import whole
from attngen.ir import (
    LARGEST,
    Expr,
    Input,
    InputGradient,
    Module,
    Type,
    exp2,
    launch,
    log2,
    parse,
    symbol,
    tile,
    to_text,
)
from attngen.ir.names import LSE, WHOLE_LENGTHS

NEED_INPUTS = symbol("need_inputs")
_ROWS = ("B", "Hq", "Nq")


def sum_input_gradients(b: HostBuilder, module: Module) -> dict[str, str]:
    """Sum the partial gradients that kernels have written; the gradients have no elements if they are not needed."""
    inputs = [i for i in module.inputs if i.grad]
    if not inputs:
        return {}
    b.add(launch.If("Input_gradients", "gradients", where=NEED_INPUTS, orelse="no_gradients"))
    found = {f"d_{i.name}": _gradient(b, module, i) for i in inputs}
    b.give("gradients", **found)
    for i in inputs:
        b.alloc(f"no_{i.name}", "no_gradients", Type(i.dtype, i.shape, "hbm"), where=sympy.false)
    b.give("no_gradients", **{f"d_{i.name}": f"no_{i.name}" for i in inputs})
    return {name: f"Input_gradients.{name}" for name in found}


def _gradient(b: HostBuilder, module: Module, i: Input) -> str:
    terms = [_term(b, module, i, x, at) for at, x in enumerate(x for x in module.input_gradients if x.input == i.name)]
    if len(terms) == 1:
        return terms[0]
    type_ = Type("f32", i.shape, "hbm")
    return b.add(
        tile.Map(f"d_{i.name}", sympy.Add(*map(symbol, terms)), tuple((t, t) for t in terms), type_), "gradients"
    )


def _term(b: HostBuilder, module: Module, i: Input, x: InputGradient, at: int) -> str:
    """The part of an input's gradient that comes from one of its reads."""
    name, tensor = f"{x.partials}_{at}", i.name.upper()
    kept = {"keep_scale": "keep_scale"} if module.dropout else {}
    if x.reduction == "element":
        return x.partials
    if x.reduction == "delta":  # minus the sink's probability, times delta, because the sink has no value vector
        e, uses = _of_sink(symbol(i.name), module, kept)
        uses |= {i.name: tensor, "delta": "DELTA", **kept}
        b.add(tile.Map(f"{i.name}_rows", e, tuple(uses.items()), Type("f32", _ROWS, "hbm")), "gradients")
        return b.add(
            launch.Sum(f"{i.name}_sum", f"{i.name}_rows", ("B", "Nq"), Type("f32", ("Hq",), "hbm")), "gradients"
        )
    if x.reduction == "distance":
        index = tuple(_of_whole(e) for e in x.index) if module.chunk else x.index
        b.add(launch.SumDistances(name, x.partials, tensor, index, Type("f32", i.shape, "hbm")), "gradients")
        if not kept:
            return name
        uses = {"sums": name, **kept}
        return b.add(
            tile.Map(f"{name}_kept", sympy.Mul(*map(symbol, uses)), tuple(uses.items()), Type("f32", i.shape, "hbm")),
            "gradients",
        )
    return _sum_to_index(b, module, i, x, name)


def _of_whole(e: str) -> str:
    """An index with the lengths of the whole sequence."""
    return to_text(parse(e).xreplace({symbol(size): symbol(name) for size, name in WHOLE_LENGTHS.items()}))


def _of_sink(sink: Expr, module: Module, kept: Iterable[str]) -> tuple[Expr, dict[str, str]]:
    """(gradient of a sink per row, values it reads in addition to the sink and DELTA).

    A row that sees no key may have an infinite LSE.
    """
    log2e = sympy.Float(1 / math.log(2))
    if module.row_stats == LSE:
        uses = {"lse": "LSE"}
        ln_p = sink - sympy.Max(symbol("lse"), -LARGEST)
        p, log2_p = (
            sympy.exp(ln_p),
            sympy.Max(ln_p, _NO_WEIGHT) * log2e,  # not a difference of products, each of which may overflow
        )
    else:
        uses = {name.lower(): name for name in module.row_stats}
        log2_p = sympy.Max(sympy.Min(sink * log2e, LARGEST), -LARGEST) - symbol("m_all")
        p = exp2(log2_p) * symbol("inv_l_all")
        log2_p = sympy.Max(log2_p + log2(symbol("inv_l_all")), _NO_WEIGHT)
    subtrahend = symbol("delta")
    if "entropy" in module.outputs:
        uses |= {"dentropy2": "DENTROPY2"}
        subtrahend += symbol("dentropy2") * log2_p
    return -p * sympy.Mul(subtrahend, *map(symbol, kept)), uses


_NO_WEIGHT = -1024  # e or 2 to the power of this, or of anything below, is 0 in fp32


_DIMS = {"b": "B", "h": "Hq", "hkv": "Hkv", "q": "Nq", "kv": "Nk"}


def _sum_to_index(b: HostBuilder, module: Module, i: Input, x: InputGradient, name: str) -> str:
    """Sum partial gradients per query, entry or score to the index at which the input is read. If calls have chunks of
    a sequence, there is one for each query or score of the whole, 0 where the call does not have it."""
    dtype = i.dtype if x.reduction == "score" else "f32"
    entries = [size for size, e in zip(i.shape, x.index) if e == "entry"]
    value, dims = x.partials, ["B", "Hq", *entries, "Nq", *(["Nk"] if x.reduction == "score" else [])]
    dims = [*whole(dims)] if module.chunk and not x.by_row else dims
    if "hkv" in x.index:
        dims[1:2] = ["Hkv", "group"]
        value = b.add(launch.View(f"{name}_heads", value, "heads", Type(dtype, tuple(dims), "hbm")), "gradients")
    of_index = {e: whole((dim,))[0] if module.chunk else dim for e, dim in _DIMS.items()}
    target = tuple(of_index.get(e, size) for size, e in zip(i.shape, x.index) if not e.isdigit())
    over = tuple(d for d in dims if d not in target)
    if over or tuple(dims) != target:
        value = b.add(launch.Sum(f"{name}_sum", value, over, Type(dtype, target, "hbm")), "gradients")
    if len(target) == len(x.index):
        return value
    places = tuple(e if e.isdigit() else ":" for e in x.index)
    return b.add(
        launch.Place(f"{name}_placed", value, i.name.upper(), places, Type(dtype, i.shape, "hbm")), "gradients"
    )
