"""Pack GQA: for calls with few queries, the kernel `packed` makes the queries of all heads of a group the rows of one
tile.

Otherwise most of a tile would be empty, and each head would read the same keys again.
"""

from __future__ import annotations

import sympy

from attngen.builders.forward import build_forward
from attngen.builders.host import ForwardVariant
from attngen.builders.host_builder import HostBuilder, known_type
from attngen.builders.semantics import listed_blocks, varies
from attngen.builders.signature import Signature
from attngen.heuristics import FEW_QUERIES
from attngen.ir import Kernel, Module, Type, input_tensors, launch, symbol
from attngen.ir.heads import SHARINGS
from attngen.lang.part import NATURAL, Q
from attngen.spec import Spec

SIGNATURE = Signature(
    "packed",
    "q",
    ("Q", "K", "V"),
    ("O", "LSE"),
    pack_gqa=True,
    about=(
        "Forward of few queries: the rows of a tile are the queries of all heads that share a K/V head, head "
        "after head."
    ),
)


def applies(spec: Spec) -> bool:
    """True if the queries of all heads of a group may share a tile: no input, dropout or block list depends on the
    query or the head."""
    shared = SHARINGS[spec.heads.sharing].is_shared
    all_rows = spec.schedule.order == "q_outer" and not spec.chunk
    if not shared or not all_rows or spec.rope or spec.dropout or listed_blocks(spec) is not None:
        return False
    types = input_tensors(spec.inputs(), spec.derived())
    dims = {d for read in spec.reads() for d in types[read.tensor].dims}
    per_row = any(varies(spec, read, index) for read in spec.reads() for index in (Q, NATURAL["Hq"]))
    return not ({"Nq", "Hq"} & dims or per_row)


def kernels(spec: Spec) -> tuple[Kernel, ...]:
    """The forward, in tiles of packed rows."""
    return (build_forward(spec, SIGNATURE),)


def view_rows(b: HostBuilder, block: str, numbers: tuple[str, ...] = ("LSE",)) -> dict[str, str]:
    """Add views of q and of the results, in which the queries of all heads of a group are rows. Return the name of each
    tensor's view."""
    names = {name: f"{name}_rows" for name in ("Q", "O", *numbers)}
    for name, rows in names.items():
        batch, _, _, *columns = known_type(name).dims
        type_ = Type(known_type(name).dtype, (batch, "Hkv", "Gq", *columns), "hbm")
        b.add(launch.View(rows, name, "group", type_, fresh=name != "Q"), block)
    return names


def launch_packed(b: HostBuilder, block: str, module: Module) -> None:
    """Launch `packed` on views whose rows are the queries of all heads of a group."""
    names = view_rows(b, block, module.row_tensors)
    b.launch("packed", block, tuple(names.items()), Nq=symbol("Gq"), queries=symbol("Nq"))
    b.add(launch.Copy("_copy_0", "O_rows", "O"), block)


PACKED = ForwardVariant(
    name="By_size",
    where=sympy.And(sympy.Lt(symbol("Nq"), FEW_QUERIES), sympy.Lt(symbol("Hkv"), symbol("Hq"))),
    then="few_queries",
    orelse="many_queries",
    applies=applies,
    kernels=kernels,
    launch=launch_packed,
)
