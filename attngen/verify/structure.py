"""How a module is put together: its header, blocks, arguments and loops, and what is read and rewritten."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import networkx as nx
import sympy

from attngen.ir.dtypes import ELEMENTS, agree, result_type
from attngen.ir.expr import cdiv, symbol, to_text
from attngen.ir.graph import Config, Kernel, Module, input_tensors
from attngen.ir.heads import SHARINGS
from attngen.ir.names import AXES, BLOCKS, DIMS, OUTPUTS
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    COLUMN_DIM,
    DTYPE_BYTES,
    TENSORS,
    Arg,
    Barrier,
    Base,
    Gather,
    GridDependencyWait,
    Init,
    Load,
    Loop,
    Mask,
    Op,
    OrderedAccumulate,
    OrderedAdd,
    Scatter,
    Store,
    Type,
    Yield,
    dimension,
)
from attngen.ir.pipe import PipelinedLoop
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import in_turn, ranges, shared, sharing
from attngen.targets.registry import BACKENDS
from attngen.verify.meaning import Values, latent_load

WIDTHS = set(COLUMN_DIM.values())
ROPES = range(16, 129, 16)  # columns that are rotated
NAMED = {
    "b",
    "h",
    "hkv",
    "q_idx",
    "kv_idx",
    "B",
    "Hq",
    "Hkv",
    "group",
    "Nq",
    "Nk",
}  # names that the header's mask and score may use


def header(module: Module, kernel: Kernel) -> Iterator[str]:
    """The header's fields have values that the templates know."""
    for key, value, known in (
        ("heads", module.sharing, tuple(SHARINGS)),
        ("precision", module.precision, ("ieee", "tf32")),
        ("backend", module.backend, tuple(BACKENDS)),
        *(
            ("backend", name, (module.backend, *_specializers(module, kernel)))
            for name in _named_backends(module, kernel)
        ),
        *(("dtype", d, tuple(ELEMENTS)) for d in module.dtypes),
        *((f"head_dim {n}", d, range(16, 513 + 128 * bool(module.rope), 8)) for n, d in module.head_dims),
    ):
        if value not in known:
            yield f"`{key} {value}`; expected one of {', '.join(map(str, known))}"
    if set(module.dtypes) <= ELEMENTS.keys():
        yield from _unlike(module)
    if module.outputs != tuple(name for name in OUTPUTS if name in ("lse", *module.outputs)):
        yield f"`outputs {' '.join(module.outputs)}`; expected lse, and some of {', '.join(OUTPUTS)}, in this order"
    if module.rope and (
        module.cache is None or module.head_dim_qk != module.head_dim_v + module.rope or module.rope not in ROPES
    ):
        said = f"a cache, 16 to 128 columns by 16, and {module.head_dim_v + module.rope} of q and k"
        yield f"`latent rope={module.rope}`; expected {said}"
    if module.blocks and (module.blocks.size & (module.blocks.size - 1) or not 16 <= module.blocks.size <= 4096):
        yield f"`blocks {module.blocks.size}`; expected a power of two from 16 to 4096"
    names = (*module.kernels, *(k for k in module.warp_specialized if k.of))
    for what, values in (("dtype", module.dtypes), ("kernel", tuple(k.name for k in names))):
        if not values or len(set(values)) < len(values):
            yield f"{what} `{' '.join(values)}`; expected one or more, each once"
    for text in (module.name, *(i.name for i in module.inputs)):
        if not text.isidentifier() or keyword.iskeyword(text):
            yield f"`{text}` is not an identifier"
    for text in (module.version, module.spec_hash, module.mask, module.score, *(i.help for i in module.inputs)):
        if set(text) & set('"\\{}'):  # these texts are printed inside strings
            yield f"`{text}` has a quote, a backslash or a brace"
    yield from _unnamed(module)


def _named_backends(module: Module, kernel: Kernel) -> list[str]:
    """The backends that the rows of a kernel's schedule name."""
    return [config.backend for config in dict(module.schedules).get(kernel.name, ()) if isinstance(config, Config)]


def _specializers(module: Module, kernel: Kernel) -> list[str]:
    """The backends for which a kernel is divided."""
    return [other.backend for other in module.warp_specialized if other.name == kernel.name]


def _unlike(module: Module) -> Iterator[str]:
    """Outputs have one type for all element types; there is a backward only in those that have one."""
    if not agree(module.dtypes):
        yield f"dtype `{' '.join(module.dtypes)}`, which kernels treat differently; expected types that agree on their results and weights"
    yield from (
        f"dtype `{d}`, and there is a host @backward; expected none"
        for d in module.dtypes
        if module.trains and not ELEMENTS[d].trains
    )


def _unnamed(module: Module) -> Iterator[str]:
    """The header's mask and score name only positions, sizes, inputs and derived tensors. Reads have an index for
    each dimension."""
    tensors, meaning = input_tensors(module.inputs, module.derived), module.meaning
    known = NAMED | {i.name for i in module.inputs} | tensors.keys()
    for read in meaning.reads:
        if read.tensor not in tensors or len(read.index) != len(tensors[read.tensor].dims):
            yield f"`read {read.name} from {read.tensor}` has no place in an input or in what is derived"
        yield from (f"`read {read.name}` names `{s}`, which is not known there" for s in _names(read.index) - known)
        known |= {read.name}
    said = (meaning.where, meaning.by_key, *(e for fact in meaning.known for e in fact))
    yield from (f"`mask` names `{s}`, which is no position, size or input" for s in _names(said) - known)
    yield from (
        f"`score` names `{s}`, which is no position, size or input"
        for s in _names((meaning.score, meaning.sink)) - known - {"s"}
    )


def _names(expressions: Iterable[Any]) -> set[str]:
    return {str(s) for e in expressions if e is not None for s in e.free_symbols}


def signature(module: Module, kernel: Kernel) -> Iterator[str]:
    """The grid tiles one axis, there is an entry, and every value has a type that kernels and host programs know."""
    if "entry" not in {b.name for b in kernel.blocks}:
        yield "no block @entry"
    if not kernel.grid or not kernel.tiled_axis or kernel.tiled_axis != kernel.program_axis:
        yield "the grid does not start with q or kv, and no loop of class all runs over one of them"
    if len({axis.var for axis in kernel.grid}) < len(kernel.grid):
        yield f"an axis stands twice in the grid, {', '.join(axis.var for axis in kernel.grid)}"
    for at, axis in enumerate(kernel.grid):
        if axis.swizzle < 1 or ((axis.swizzle > 1 or axis.swizzle_rows) and (at or axis.var not in AXIS_EXTENT)):
            yield f"swizzle({axis.swizzle}) of the grid axis {axis.var}; expected 1 or more heads, on an axis of tiles, the first"
        if axis.reversed_group and not (axis.swizzle_rows and kernel.adds):
            yield f"the grid axis {axis.var} is mirrored; expected that of a kernel that adds, with heads that are taken together"
    blocks = [b.name for b in kernel.blocks]
    homes = {(kernel.graph.nodes[loop.name]["block"], loop.body) for loop in kernel.loops}
    reached = nx.descendants(nx.DiGraph([("entry", "entry"), *homes]), "entry") | {"entry"}
    bodies = [body for _, body in homes]
    for name in blocks:
        if blocks.count(name) > 1 or bodies.count(name) != (name != "entry") or name not in reached:
            yield f"@{name} is not the body of loops of one other block; only @entry is no body"
    result = result_type(module.dtypes)
    known = tuple(
        dict.fromkeys(("T", *DTYPE_BYTES, result, *(["fp16"] if module.cache and module.cache.dtype else [])))
    )
    stores = [op.dst.tensor for op in kernel.ops() if isinstance(op, (Scatter, Store))]
    stores += [
        op.semaphore.tensor for op in kernel.ops() if isinstance(op, (OrderedAdd, OrderedAccumulate)) and op.semaphore
    ]
    lengths = {i.name for i in module.inputs if i.is_size}
    written = {ref for name in stores for ref in (name, *kernel.op(name).operands())}
    for op in kernel.ops():
        if isinstance(op, (Load, Store)):
            tensor, warp_group = kernel.accessed(op)[0], "out" if isinstance(op, Store) else "in"
            more = ["inout"] if warp_group == "in" else ["sum"] if isinstance(op, OrderedAdd) else ["inout", "scratch"]
            if not isinstance(tensor, Arg) or tensor.role not in (warp_group, *more):
                does = "reads" if warp_group == "in" else "adds to" if isinstance(op, OrderedAdd) else "writes"
                yield f"%{op.name} {does} %{tensor.name}, which is no tensor of role `{warp_group}`"
    for block in kernel.blocks:
        warp_groups = (*TENSORS, "scalar") if block.name == "entry" else ("carry",)
        for op in block.ops:
            if isinstance(op, Arg) and op.role not in warp_groups:
                yield f"%{op.name} is an argument `{op.role}` of @{block.name}; expected {' or '.join(warp_groups)}"
            dims = op.type.dims if isinstance(op, Arg) and op.role in TENSORS else ()
            sizes = DIMS | lengths | {d for d in dims if d.isdigit() or re.fullmatch(BLOCKS, d)}
            if not (set(dims[:-1]) <= sizes and set(dims[-1:]) <= sizes | WIDTHS):
                yield f"%{op.name} is of [{', '.join(dims)}]; expected {', '.join(sorted(DIMS))}, and at the end D_QK or D_V"
            if isinstance(op, Arg) and op.role in TENSORS[1:] and op.name not in written:
                yield f"nothing is stored to %{op.name}"
            for t in op.results().values():
                if t.dtype not in known:
                    yield f"%{op.name} is of `{t.dtype}`; expected one of {', '.join(known)}"
            if isinstance(op, Arg) and op.name == "O" and op.type.dtype != result:
                yield f"%O is of `{op.type.dtype}`; expected {result}, as the header's dtype says"


def references(module: Module, kernel: Kernel) -> Iterator[str]:
    """A reference such as `%soft.p` names a result that the op has."""
    for op in kernel.ops():
        for ref in op.operands():
            source, _, field = ref.partition(".")
            defined = kernel.op(source)
            known = dict(defined.carry) if isinstance(defined, (Loop, PipelinedLoop)) else defined.results()
            if field not in known:
                yield f"%{op.name} reads %{ref}; %{source} has {', '.join(f'.{k}' if k else 'one result' for k in known) or 'none'}"


def order(module: Module, kernel: Kernel) -> Iterator[str]:
    """A value, or a scalar that an expression names, is defined before its use, in the same block or in one around
    it."""
    if not nx.is_directed_acyclic_graph(kernel.graph):
        yield f"%{nx.find_cycle(kernel.graph)[0][0]} depends on itself"
    nodes = kernel.graph.nodes
    around = {block.name: kernel.around(block.name) for block in kernel.blocks}
    for name, data in nodes.items():
        for ref in (*data["op"].operands(), *sorted(kernel.scalars_of(data["op"]))):
            source = nodes[ref.split(".")[0]]
            places = (data, *(nodes[loop.name] for loop in around[data["block"]]))
            place = next((p for p in places if p["block"] == source["block"]), None)
            if place is None or source["order"] >= place["order"]:
                yield f"%{name} reads %{ref} where it is not defined"


def loops(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop's fields, its body's arguments and what the body yields are the same, with the same types."""
    blocks = {b.name: b for b in kernel.blocks}
    for loop in kernel.loops:
        if loop.body not in blocks:
            yield f"%{loop.name} runs @{loop.body}, which is not a block"
            continue
        if not loop.ranges:
            yield f"%{loop.name} has no range; expected one at least, as in ranges(0 .. 1)"
        walks = kernel.walks and loop.var == kernel.program_axis
        walks |= (
            kernel.prepares and loop.var in AXIS_EXTENT
        )  # it has no scores: its loops run over all tiles of either axis
        walks |= loop.var == "joined"  # a program joins all parts of its sequence
        over_tiles = loop.var in AXIS_EXTENT and not walks
        if loop.cls not in (("unknown", "full", "partial") if over_tiles else ("all",)):
            expected = (
                "all, as it does not run over tiles"
                if not walks
                else "all, as its program owns each of these tiles in turn"
            )
            expected = "unknown, full or partial, as it runs over tiles" if over_tiles else expected
            yield f"%{loop.name} has class `{loop.cls}`; expected {expected}"
        if loop.cls == "all" and loop.listed:
            yield f"%{loop.name} runs over a list, and has class `all`; expected no list, as it leaves none out"
        if loop.var in {axis.var for axis in kernel.grid}:
            yield f"%{loop.name} runs over {loop.var}, of which the grid gives each program one"
        if walks and loop.ranges != (
            (sympy.Integer(0), cdiv(symbol(AXIS_EXTENT[loop.var]), symbol(AXIS_DIM[loop.var]))),
        ):
            yield f"%{loop.name} does not run over all tiles of {loop.var}, which its program owns"
        if over_tiles and kernel.walks and kernel.program_axis not in {other.var for other in kernel.around(loop.body)}:
            yield f"%{loop.name} is in no loop over the tiles of {kernel.program_axis}, one of which its mask needs"
        if loop.var in {other.var for other in kernel.around(kernel.graph.nodes[loop.name]["block"])}:
            yield f"%{loop.name} runs over {loop.var} inside a loop over {loop.var}"
        in_group = len(loop.heads) == 1 and in_turn(kernel, loop)[1] == (0, dimension("group"))
        if loop.heads and not (in_group and kernel.adds and over_tiles):
            yield f"%{loop.name} takes heads in turn that are not the program's part of a group's, or in a kernel that adds nothing"
        if loop.by_tile and not loop.heads:
            yield f"%{loop.name} comes to each tile for all heads, and takes no heads in turn"
        counted = AXES.get(loop.var)
        if loop.var not in AXIS_EXTENT and (counted is None or ranges(kernel, loop) != [(0, dimension(counted))]):
            yield f"%{loop.name} does not run over 0 .. {counted or 'what its variable counts'}, or over the program's part of it"
        ops = blocks[loop.body].ops
        starts = {f: kernel.type_of(r) for f, r in loop.carry}
        args = {op.name: op.type for op in ops if isinstance(op, Arg)}
        yields = [op for op in ops if isinstance(op, Yield)]
        if len(yields) != 1 or ops[-1] is not yields[0]:
            yield f"@{loop.body} does not end with its one yield"
        elif not (starts == args == {f: kernel.type_of(r) for f, r in yields[0].values}):
            yield f"%{loop.name} carries {_fields(starts)}, @{loop.body} takes {_fields(args)} and yields other types or fields"


def deals(module: Module, kernel: Kernel) -> Iterator[str]:
    """Programs have parts of keys if these are dealt, by lengths that the kernel has; then they are numbered by
    parts and sequences."""
    axes = {axis.var for axis in kernel.grid}
    of_parts = "part" in axes or kernel.combines_splits
    if (kernel.kv_split is not None) != of_parts:
        how = "nothing says how" if of_parts else "it says how"
        yield f"{how} keys are dealt; expected that of kernels with parts of them, and no others"
    if kernel.kv_split is None:
        return
    lacking = [
        name for name in ("CACHE_SEQLENS", "B", "items", "Nc", "Nn") if name not in {arg.name for arg in kernel.args}
    ]
    if lacking or "b" not in axes:
        yield f"keys are dealt, and it lacks {', '.join(lacking) or 'the axis b'}"
    numbers = {arg.name for arg in kernel.args if arg.role == "scalar" and arg.type.dtype == "i32"}
    known = numbers | {"Nk", *(name for name, _ in kernel.kv_split.reads)}
    for name, at in kernel.kv_split.reads:
        tensor = next((arg.type for arg in kernel.args if arg.role == "in" and arg.name == at.tensor), Type(""))
        pairs = list(zip(tensor.dims, at.index))
        inside = all(e.is_nonnegative and prove_le(e, dimension(dim) - 1) for dim, e in pairs[1:])
        of_sequence = pairs[:1] == [("B", symbol("b"))] and _names(at.index[1:]) <= numbers
        if (tensor.dtype, len(tensor.dims)) != ("i32", len(at.index)) or not (of_sequence and inside):
            yield f"the work of a sequence reads `{name}` of %{at.tensor}; expected an i32 of sequence b, inside of that argument"
    if stray := _names((kernel.kv_split.work,)) - known:
        expected = "Nk and whole numbers of the call, or elements that it reads"
        yield f"the work of a sequence is `{to_text(kernel.kv_split.work)}`, which names `{min(stray)}`; expected {expected}"
    if of_cache := [k.name for k in module.kernels if k.kv_split and k.kv_split != kernel.kv_split]:
        yield f"keys are dealt in another way than in @{of_cache[0]}"


def latents(module: Module, kernel: Kernel) -> Iterator[str]:
    """Of a latent, kernels multiply all columns of q and k; values are those of V, or in a cache the columns of the
    latent."""
    names = {arg.name for arg in kernel.args}
    if not {"Q", "K"} <= names:
        return
    rotated = names & {"Q_ROPE", "K_ROPE"}
    if len(rotated) != (2 if module.rope else 0):
        found = ", ".join(sorted(rotated)) or "no columns that are rotated"
        yield f"it reads {found}; expected both where `latent` says so, and none elsewhere"
    wanted = "K" if kernel.reads_cache else "V"
    scaled = (
        ", numbers times their factors"
        if module.cache and module.cache.scale == "columns" and kernel.reads_cache
        else ""
    )
    values = Values(kernel)
    for dot in kernel.dots if module.rope else ():
        op = latent_load(values, dot.b) or kernel.op(dot.b)
        if dot.over == AXIS_DIM["kv"] and not (isinstance(op, Load) and kernel.accessed(op)[0].name == wanted):
            yield f"%{dot.name} multiplies weights by %{dot.b}; expected a tile of %{wanted}{scaled}"


def shares(module: Module, kernel: Kernel) -> Iterator[str]:
    """Programs that share have parts of one loop, or of all loops over one body. Of others each of them runs over
    all."""
    for axis in sharing(kernel.grid):
        found = {(loop.body, of) for loop in kernel.loops for of, (lo, hi) in shared(kernel, loop) if lo != hi}
        found = {(loop.body, in_turn(kernel, loop)[0]) for loop in kernel.loops if loop.heads} or found
        bodies = {body for body, of in found if of == axis}
        if len(bodies) != 1 or any(body in bodies and of != axis for body, of in found):
            have = ", ".join(f"@{body}" for body in sorted(bodies)) or "no body"
            yield f"programs along {axis.var} in {to_text(axis.extent)} share loops over {have}; expected parts of all ranges over one body"


def rewrites(module: Module, kernel: Kernel) -> Iterator[str]:
    """A tensor of role `inout` is loaded and then stored once, at one place, in the body of a loop whose turns have
    tiles of their own."""
    for arg in (a for a in kernel.args if a.role == "inout"):
        found = [op for op in kernel.ops() if isinstance(op, (Load, Store)) and kernel.accessed(op)[0] is arg]
        if [type(op) for op in found] != [Load, Store]:
            yield f"%{arg.name} has {len(found)} loads and stores; expected one load, and then one store"
            continue
        (read, first), (write, second) = (
            (kernel.graph.nodes[op.name]["block"], kernel.accessed(op)[1]) for op in found
        )
        if (read, first) != (write, second):
            yield f"%{arg.name} is loaded at one place and stored at another; expected a tile that is rewritten where it is read"
        around = {loop.var for loop in kernel.around(read)[:1] if loop.cls != "all"}
        if around.isdisjoint(map(str, first)):
            yield f"%{arg.name} is rewritten outside of a loop over its tiles, each of which has its turn"


def live(module: Module, kernel: Kernel) -> Iterator[str]:
    """Everything is read, also what a loop carries."""
    named = {name for op in kernel.ops() for name in kernel.scalars_of(op)}
    for op in kernel.ops():
        parameter = isinstance(op, Arg) and op.role != "carry"
        parameter |= isinstance(op, Loop) and op.body in kernel.storing
        acts = isinstance(op, (Barrier, Scatter, Store, GridDependencyWait, Yield))
        if not (parameter or acts or kernel.graph.out_degree(op.name) or op.name in named):
            yield f"%{op.name} is read by nothing"


def in_place(module: Module, kernel: Kernel) -> Iterator[str]:
    """A value that is updated in place has one reader. Carried and masked values are: each is one variable in the
    printed kernel."""
    readers: dict[str, list[str]] = {}
    for op in kernel.ops():
        for ref in op.operands():
            readers.setdefault(ref, []).append(op.name)
    for op in kernel.ops():
        updated = [r for _, r in op.carry] if isinstance(op, Loop) else [op.value] if isinstance(op, Mask) else []
        for ref in updated:
            start = kernel.op(ref)
            local = kernel.graph.nodes[start.name]["block"] == kernel.graph.nodes[op.name]["block"]
            if not local or (isinstance(op, Loop) and not isinstance(start, (Init, Loop, Arg))):
                yield f"%{op.name} updates %{ref} in place; expected an init, a carried value or, for a mask, a value of the same block"
            if isinstance(start, Arg) and start.role != "carry":
                yield f"%{op.name} updates %{ref} in place, which is an argument of the kernel"
            if others := [r for r in readers[ref] if r != op.name]:
                yield f"%{op.name} updates %{ref} in place, which %{others[0]} reads too"
        if isinstance(op, Loop) and len(set(updated)) < len(updated):
            yield f"%{op.name} starts two carried values from one"
        if isinstance(op, Yield):
            passed = [r for f, r in op.values if r != f]
            if taken := [r for r in passed if passed.count(r) > 1 or isinstance(kernel.op(r), Arg)]:
                yield f"%{op.name} gives %{taken[0]} to a field that is not its own; expected a new value for each field"
    for body in dict.fromkeys(loop.body for loop in kernel.loops):
        sharing = [loop for loop in kernel.loops if loop.body == body]
        for before, after in zip(sharing, sharing[1:]):
            if after.carry != tuple((f, f"{before.name}.{f}") for f, _ in before.carry):
                yield f"%{after.name} shares @{body} with %{before.name} and does not go on from what that one carries"


def ordered(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop that rewrites tiles comes right after a barrier, so that its loads cannot run ahead of earlier stores.

    Between a loop that writes a tensor and another one that writes or reads it, there is a barrier, too.
    """
    yield from _crossing(kernel)
    for block in kernel.blocks:
        for before, op in zip((None, *block.ops), block.ops):
            if isinstance(op, Loop) and op.body in kernel.rewriting and not isinstance(before, Barrier):
                yield f"%{op.name} loads tiles that others have stored, and no barrier is right before it"


def _crossing(kernel: Kernel) -> Iterator[str]:
    """Reasons about tensors of role `scratch`, and others that are written at two places: threads write and read
    each other's elements."""
    writes = [
        tensor for tensor, access in _accesses(kernel, kernel.block("entry").ops) if not isinstance(access, Gather)
    ]
    shared = {a.name for a in kernel.args if a.role == "scratch" or (a.role == "out" and writes.count(a.name) > 1)}
    written: dict[str, str] = {}  # tensor -> the block that wrote to it since the last barrier
    filled: set[str] = set()
    for op in kernel.block("entry").ops if shared else ():
        written = {} if isinstance(op, Barrier) else written
        block = op.body if isinstance(op, Loop) else "entry"
        accesses = [(tensor, access) for tensor, access in _accesses(kernel, (op,)) if tensor in shared]
        of_turns = {tensor for tensor, access in accesses if isinstance(op, Loop) and not isinstance(access, Gather)}
        for tensor, access in accesses:
            reads = isinstance(access, Gather)
            if tensor in written and (reads or written[tensor] != block):
                yield f"%{access.name} in @{block} takes %{tensor}, to which @{written[tensor]} writes, and no barrier is between them"
            elif reads and tensor in of_turns:
                yield f"%{access.name} in @{block} reads %{tensor}, to which other turns of the loop write"
            if reads and tensor not in filled:
                yield f"%{access.name} reads %{tensor}, which nothing has filled"
        stored = [(tensor, access) for tensor, access in accesses if not isinstance(access, Gather)]
        once = {tensor for tensor, access in stored if isinstance(access, Store) or access.op == "put"}
        often = Counter(tensor for tensor, _ in stored)
        yield from (
            f"@{block} writes elements of %{tensor} twice, in no fixed order"
            for tensor in sorted(once)
            if often[tensor] > 1
        )
        written |= {tensor: block for tensor, _ in stored}
        filled |= {tensor for tensor, access in accesses if isinstance(access, Store)}  # of all tiles


def _accesses(kernel: Kernel, ops: Iterable[Op]) -> Iterator[tuple[str, Gather | Scatter | Store]]:
    """(tensor, op) for each op that writes, or gathers, here and in the loops inside."""
    for op in ops:
        if isinstance(op, Loop):
            yield from _accesses(kernel, kernel.block(op.body).ops)
        elif isinstance(op, (Gather, Scatter, Store)):
            source = kernel.op(op.src.tensor if isinstance(op, Gather) else op.dst.tensor)
            yield (source.src.tensor if isinstance(source, Base) else source.name), op


def _fields(types: dict[str, Type]) -> str:
    return ", ".join(f"{k}: {t.dtype}[{', '.join(t.dims)}]" for k, t in types.items())
