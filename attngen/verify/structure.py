"""Rules of a kernel's structure: its grid, arguments, blocks and loops, and how programs split work."""

from __future__ import annotations

import re
from collections.abc import Iterator

import networkx as nx
import sympy

from attngen.ir import DTYPE_BYTES, TENSORS, Kernel, Module, Type, only, pipe, tile
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, COLUMN_DIM, dimension
from attngen.ir.dtypes import result_type
from attngen.ir.expr import cdiv, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.names import AXES, BLOCKS, DIMS
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import head_range, ranges, shared, sharing
from attngen.verify.header import names_in
from attngen.verify.values import Values, latent_load

WIDTHS = set(COLUMN_DIM.values())


def signature(module: Module, kernel: Kernel) -> Iterator[str]:
    """The grid tiles one axis, each block except @entry is the body of loops in one block, and arguments and values
    have types that kernels and host programs support."""
    yield from _blocks(kernel)
    yield from _grid(kernel)
    yield from _accessed_roles(kernel)
    yield from _arguments(module, kernel)
    result = result_type(module.dtypes)
    cached = ["fp16"] if module.cache and module.cache.dtype else []  # values of an 8-bit cache
    known = tuple(dict.fromkeys(("T", *DTYPE_BYTES, result, *cached)))
    for op in kernel.ops():
        for t in op.results().values():
            if t.dtype not in known:
                yield f"%{op.name} is of `{t.dtype}`; expected one of {', '.join(known)}"
        if isinstance(op, tile.Arg) and op.name == "O" and op.type.dtype != result:
            yield f"%O is of `{op.type.dtype}`; expected {result}, as the header's dtype says"


def _grid(kernel: Kernel) -> Iterator[str]:
    if not kernel.grid or not kernel.traits.tiled_axis or kernel.traits.tiled_axis != kernel.program_axis:
        yield "the grid does not start with q or kv, and no loop of class all runs over one of them"
    if len({axis.var for axis in kernel.grid}) < len(kernel.grid):
        yield f"an axis is twice in the grid, {', '.join(axis.var for axis in kernel.grid)}"
    for at, axis in enumerate(kernel.grid):
        if axis.swizzle < 1 or ((axis.swizzle > 1 or axis.swizzle_rows) and (at or axis.var not in AXIS_EXTENT)):
            yield (
                f"swizzle({axis.swizzle}) of the grid axis {axis.var}; expected 1 or more heads, on an axis of tiles "
                f"that comes first"
            )
        if axis.reversed_group and not (axis.swizzle_rows and kernel.traits.adds_in_order):
            yield f"the grid axis {axis.var} has reversed_group; expected swizzle_rows, and a kernel with ordered adds"


def _blocks(kernel: Kernel) -> Iterator[str]:
    """Blocks form a tree: each except @entry is the body of loops in one other block."""
    blocks = [b.name for b in kernel.blocks]
    if "entry" not in blocks:
        yield "no block @entry"
    homes = {(kernel.graph.nodes[loop.name]["block"], loop.body) for loop in kernel.loops}
    reached = nx.descendants(nx.DiGraph([("entry", "entry"), *homes]), "entry") | {"entry"}
    bodies = [body for _, body in homes]
    for name in blocks:
        if blocks.count(name) > 1 or bodies.count(name) != (name != "entry") or name not in reached:
            yield f"@{name} is not the body of loops of one other block; only @entry is no body"


def _accessed_roles(kernel: Kernel) -> Iterator[str]:
    """Loads read inputs, and stores write outputs."""
    for op in kernel.ops():
        if isinstance(op, (tile.Load, tile.Store)):
            tensor, role = kernel.accessed(op)[0], "out" if isinstance(op, tile.Store) else "in"
            more = ["inout"] if role == "in" else ["sum"] if isinstance(op, tile.OrderedAdd) else ["inout", "scratch"]
            if not isinstance(tensor, tile.Arg) or tensor.role not in (role, *more):
                does = "reads" if role == "in" else "adds to" if isinstance(op, tile.OrderedAdd) else "writes"
                yield f"%{op.name} {does} %{tensor.name}, which is no tensor of role `{role}`"


def _arguments(module: Module, kernel: Kernel) -> Iterator[str]:
    """Arguments have roles that fit their block, tensors have known dimensions, and all outputs are written."""
    ordered = only(kernel.ops(), tile.OrderedAdd, tile.OrderedAccumulate)
    stores = [op.dst.tensor for op in only(kernel.ops(), tile.Scatter, tile.Store)]
    stores += [op.semaphore.tensor for op in ordered if op.semaphore]
    written = {ref for name in stores for ref in (name, *kernel.op(name).operands())}
    lengths = {i.name for i in module.inputs if i.is_size}
    for block in kernel.blocks:
        roles = (*TENSORS, "scalar") if block.name == "entry" else ("carry",)
        for op in only(block.ops, tile.Arg):
            if op.role not in roles:
                yield f"%{op.name} is an argument `{op.role}` of @{block.name}; expected {' or '.join(roles)}"
            dims = op.type.dims if op.role in TENSORS else ()
            sizes = DIMS | lengths | {d for d in dims if d.isdigit() or re.fullmatch(BLOCKS, d)}
            if not (set(dims[:-1]) <= sizes and set(dims[-1:]) <= sizes | WIDTHS):
                expected = f"{', '.join(sorted(DIMS))}, and at the end D_QK or D_V"
                yield f"%{op.name} is of [{', '.join(dims)}]; expected {expected}"
            if op.role in TENSORS[1:] and op.name not in written:
                yield f"nothing is stored to %{op.name}"


def references(module: Module, kernel: Kernel) -> Iterator[str]:
    """A reference such as `%soft.p` names a result that the op has."""
    for op in kernel.ops():
        for ref in op.operands():
            source, _, field = ref.partition(".")
            op_of = kernel.op(source)
            known = dict(op_of.carry) if isinstance(op_of, (tile.Loop, pipe.PipelinedLoop)) else op_of.results()
            if field not in known:
                results = ", ".join(f".{k}" if k else "one result" for k in known) or "none"
                yield f"%{op.name} reads %{ref}; %{source} has {results}"


def defined(module: Module, kernel: Kernel) -> Iterator[str]:
    """Values, and scalars that expressions name, are defined before their use: in the same block, or in one around
    it."""
    if not nx.is_directed_acyclic_graph(kernel.graph):
        yield f"%{nx.find_cycle(kernel.graph)[0][0]} depends on itself"
    nodes = kernel.graph.nodes
    around = {block.name: kernel.loops_around(block.name) for block in kernel.blocks}
    for name, data in nodes.items():
        for ref in (*data["op"].operands(), *sorted(kernel.traits.scalars_of(data["op"]))):
            source = nodes[ref.split(".")[0]]
            users = (data, *(nodes[loop.name] for loop in around[data["block"]]))
            user = next((p for p in users if p["block"] == source["block"]), None)
            if user is None or source["order"] >= user["order"]:
                yield f"%{name} reads %{ref} where it is not defined"


def loops(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop has a class and ranges that fit its variable. Its fields, its body's arguments and the values that the
    body yields are the same, with the same types."""
    blocks = {b.name: b for b in kernel.blocks}
    for loop in kernel.loops:
        if loop.body not in blocks:
            yield f"%{loop.name} runs @{loop.body}, which is not a block"
            continue
        yield from _loop_class(kernel, loop)
        yield from _loop_range(kernel, loop)
        yield from _loop_heads(kernel, loop)
        yield from _loop_direction(loop)
        yield from _loop_fields(kernel, loop)


def _runs_over_all(kernel: Kernel, loop: tile.Loop) -> bool:
    """True if a loop visits all tiles of its axis: the program axis where programs visit all its tiles, either axis in
    a kernel that prepares tensors, or the splits of a sequence, which a program combines."""
    own = kernel.traits.visits_all_tiles and loop.var == kernel.program_axis
    return own or (kernel.traits.prepares and loop.var in AXIS_EXTENT) or loop.var == "KV_splits"


def _runs_over_tiles(kernel: Kernel, loop: tile.Loop) -> bool:
    return loop.var in AXIS_EXTENT and not _runs_over_all(kernel, loop)


def _loop_class(kernel: Kernel, loop: tile.Loop) -> Iterator[str]:
    over_tiles = _runs_over_tiles(kernel, loop)
    if loop.cls not in (("unknown", "full", "partial") if over_tiles else ("all",)):
        if over_tiles:
            expected = "unknown, full or partial, as it runs over tiles"
        elif _runs_over_all(kernel, loop):
            expected = "all, as its program has all of these tiles"
        else:
            expected = "all, as it does not run over tiles"
        yield f"%{loop.name} has class `{loop.cls}`; expected {expected}"
    if loop.cls == "all" and loop.listed:
        yield f"%{loop.name} runs over a list, and has class `all`; expected no list, as it leaves none out"


def _loop_range(kernel: Kernel, loop: tile.Loop) -> Iterator[str]:
    if not loop.ranges:
        yield f"%{loop.name} has no range; expected one at least, as in ranges(0 .. 1)"
    if loop.var in {axis.var for axis in kernel.grid}:
        yield f"%{loop.name} runs over {loop.var}, which is an axis of the grid"
    around_loop = {other.var for other in kernel.loops_around(kernel.graph.nodes[loop.name]["block"])}
    if loop.var in around_loop:
        yield f"%{loop.name} runs over {loop.var} inside a loop over {loop.var}"
    counted = AXES.get(loop.var)
    if loop.var not in AXIS_EXTENT:
        if counted is None or ranges(kernel, loop) != [(0, dimension(counted))]:
            extent = counted or "the extent of its variable"
            yield f"%{loop.name} does not run over 0 .. {extent}, or over the program's part of it"
    elif _runs_over_all(kernel, loop):
        every = (sympy.Integer(0), cdiv(symbol(AXIS_EXTENT[loop.var]), symbol(AXIS_DIM[loop.var])))
        if loop.ranges != (every,):
            yield f"%{loop.name} does not run over all tiles of {loop.var}, which its program has"
    elif kernel.traits.visits_all_tiles and kernel.program_axis not in {o.var for o in kernel.loops_around(loop.body)}:
        yield f"%{loop.name} is in no loop over the tiles of {kernel.program_axis}, one of which its mask needs"


def _loop_heads(kernel: Kernel, loop: tile.Loop) -> Iterator[str]:
    in_group = len(loop.heads) == 1 and head_range(kernel, loop)[1] == (0, dimension("group"))
    if loop.heads and not (in_group and kernel.traits.adds_in_order and _runs_over_tiles(kernel, loop)):
        yield (
            f"%{loop.name} runs for several heads; expected those of the program's part of a group, over tiles, in a "
            f"kernel with ordered adds"
        )
    if loop.by_tile and not loop.heads:
        yield f"%{loop.name} runs each tile for all heads, and has no heads"


def _loop_direction(loop: tile.Loop) -> Iterator[str]:
    if loop.reversed:
        yield f"%{loop.name} is reversed; expected this only in a warp group that loads tiles for others"


def _loop_fields(kernel: Kernel, loop: tile.Loop) -> Iterator[str]:
    ops = kernel.block(loop.body).ops
    starts = {f: kernel.type_of(r) for f, r in loop.carry}
    args = {op.name: op.type for op in only(ops, tile.Arg)}
    yields = list(only(ops, tile.Yield))
    if len(yields) != 1 or ops[-1] is not yields[0]:
        yield f"@{loop.body} does not end with its one yield"
    elif not (starts == args == {f: kernel.type_of(r) for f, r in yields[0].values}):
        carried, taken = _fields(starts), _fields(args)
        yield f"%{loop.name} carries {carried}, @{loop.body} takes {taken} and yields other types or fields"


def split_kv(module: Module, kernel: Kernel) -> Iterator[str]:
    """Kernels with split-KV state how keys are split, by formulas in numbers and elements that they have. Their
    programs are numbered by splits and sequences. All such kernels of a module split keys in the same way."""
    axes = {axis.var for axis in kernel.grid}
    has_splits = "KV_split" in axes or kernel.traits.combines_splits
    if (kernel.kv_split is not None) != has_splits:
        have = "does not say" if has_splits else "says"
        yield f"it {have} how keys are split; expected that in kernels with splits of the keys, and in no others"
    if kernel.kv_split is None:
        return
    lacking = [
        name for name in ("CACHE_SEQLENS", "B", "items", "Nc", "Nn") if name not in {arg.name for arg in kernel.args}
    ]
    if lacking or "b" not in axes:
        yield f"keys are split, and it lacks {', '.join(lacking) or 'the axis b'}"
    numbers = {arg.name for arg in kernel.args if arg.role == "scalar" and arg.type.dtype == "i32"}
    known = numbers | {"Nk", *(name for name, _ in kernel.kv_split.reads)}
    for name, at in kernel.kv_split.reads:
        tensor = next((arg.type for arg in kernel.args if arg.role == "in" and arg.name == at.tensor), Type(""))
        pairs = list(zip(tensor.dims, at.index))
        inside = all(e.is_nonnegative and prove_le(e, dimension(dim) - 1) for dim, e in pairs[1:])
        of_sequence = pairs[:1] == [("B", symbol("b"))] and names_in(at.index[1:]) <= numbers
        if (tensor.dtype, len(tensor.dims)) != ("i32", len(at.index)) or not (of_sequence and inside):
            yield (
                f"the work of a sequence reads `{name}` of %{at.tensor}; expected an i32 of sequence b, in bounds of "
                f"that argument"
            )
    if stray := names_in((kernel.kv_split.work,)) - known:
        expected = "Nk and integers of the call, or elements that it reads"
        work = to_text(kernel.kv_split.work)
        yield f"the work of a sequence is `{work}`, which names `{min(stray)}`; expected {expected}"
    if others := [k.name for k in module.kernels if k.kv_split and k.kv_split != kernel.kv_split]:
        yield f"keys are split in another way than in @{others[0]}"


def latents(module: Module, kernel: Kernel) -> Iterator[str]:
    """With latents, kernels multiply all of head_dim of q and k, with its RoPE part. Values are those of V, or in a
    cache the columns of the latent."""
    names = {arg.name for arg in kernel.args}
    if not {"Q", "K"} <= names:
        return
    ropes = names & {"Q_ROPE", "K_ROPE"}
    if len(ropes) != (2 if module.rope else 0):
        found = ", ".join(sorted(ropes)) or "neither Q_ROPE nor K_ROPE"
        yield f"it reads {found}; expected both with the header's `latent`, and neither without it"
    expected = "K" if kernel.traits.reads_cache else "V"
    scales = module.cache and module.cache.scale == "columns" and kernel.traits.reads_cache
    scaled = ", multiplied by its scales" if scales else ""
    values = Values(kernel)
    for dot in kernel.traits.dots if module.rope else ():
        op = latent_load(values, dot.b) or kernel.op(dot.b)
        if dot.over == AXIS_DIM["kv"] and not (isinstance(op, tile.Load) and kernel.accessed(op)[0].name == expected):
            yield f"%{dot.name} multiplies weights by %{dot.b}; expected a tile of %{expected}{scaled}"


def split_axis(module: Module, kernel: Kernel) -> Iterator[str]:
    """Programs along a split axis partition one loop, or all loops over one body. Each of them runs all other loops in
    full."""
    for axis in sharing(kernel.grid):
        found = {(loop.body, of) for loop in kernel.loops for of, (lo, hi) in shared(kernel, loop) if lo != hi}
        found = {(loop.body, head_range(kernel, loop)[0]) for loop in kernel.loops if loop.heads} or found
        bodies = {body for body, of in found if of == axis}
        if len(bodies) != 1 or any(body in bodies and of != axis for body, of in found):
            have = ", ".join(f"@{body}" for body in sorted(bodies)) or "no body"
            extent = to_text(axis.extent)
            yield f"programs along {axis.var} in {extent} split loops over {have}; expected all ranges over one body"


def _fields(types: dict[str, Type]) -> str:
    return ", ".join(f"{k}: {t.dtype}[{', '.join(t.dims)}]" for k, t in types.items())
