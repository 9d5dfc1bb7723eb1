"""The verifier: one table of rules per phase. A rule yields a reason for each thing that breaks it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import sympy
from sympy.logic.boolalg import Boolean

from attngen.errors import VerifyError
from attngen.ir.expr import REAL, TO_INTEGER, cdiv, conjuncts, floordiv, mod, prove_le, select, span, symbol, to_text, with_rows
from attngen.ir.graph import PHASES, Kernel, Module
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    BLOCKS,
    DTYPE_BYTES,
    Arg,
    Barrier,
    Base,
    Dot,
    Dropout,
    Gather,
    Init,
    Keep,
    Load,
    Loop,
    Map,
    Mask,
    Op,
    Position,
    Reduce,
    Scatter,
    Seed,
    SoftmaxStep,
    Store,
    Type,
    Yield,
    dimension,
)

Rule = Callable[[Module, Kernel], Iterator[str]]
CONSTANTS = {"LOG2E", "LN2"}
SIZES, WIDTHS = {"B", "Hq", "Hkv", "splits", "Nq", "Nk", "Nlse", "Tq", "Tk", "Tq1", "Tk1", "Ts", "Td", "Nd"}, {"D_QK", "D_V"}
SCORES = ("BLOCK_Q", "BLOCK_KV")
POSITIONS = {"q_idx", "kv_idx", "q_start", "kv_start", "BLOCK_Q", "BLOCK_KV", "D_QK", "D_V"}
# names of the printed kernel that are no values of the IR
RESERVED = POSITIONS | CONSTANTS | {f"{axis}_{part}" for axis in ("q", "kv") for part in ("ahead", "at", "off", "stop", "tile", "tiles")}
RESERVED |= {"D_QK_PAD", "D_V_PAD", "d_qk", "d_v", "dtype", "float", "pid", "tl", "triton"}
RESERVED |= {"first_head", "heads_abreast", "own_head", "turn"}
RESERVED |= {
    "at",
    "BLOCK",
    "DROPOUT",
    "TMA",
    "LEARN",
    "floor_div",
    "floor_mod",
    "store_distances",
    "dropout_keep",
    "philox",
    "position",
    "tile_at",
    "keep_mask",
}


def verify(module: Module) -> Module:
    """The module itself, if every rule of its phase holds; otherwise VerifyError with rule, reason and the IR's text."""
    from attngen.ir.text import print_module

    try:
        if module.phase not in RULES:
            raise VerifyError("phase", f"`{module.phase}` is not a phase; expected one of {', '.join(PHASES)}", "")
        for kernel in module.kernels:
            for name, rule in RULES[module.phase].items():
                for reason in rule(module, kernel):
                    raise VerifyError(name, f"kernel @{kernel.name}: {reason}", "")
    except VerifyError as error:
        raise VerifyError(error.rule, error.reason, print_module(module)) from None
    return module


# ---------------------------------------------------------------------------------------------- every phase


def header(module: Module, kernel: Kernel) -> Iterator[str]:
    """The module's own fields are ones that the templates know."""
    for key, value, known in (
        ("heads", module.sharing, ("mha", "mqa", "gqa")),
        ("precision", module.precision, ("ieee", "tf32")),
        ("backend", module.backend, ("triton",)),
        *(("dtype", d, ("bf16", "fp16", "fp32")) for d in module.dtypes),
        *((f"head_dim {n}", d, range(16, 257, 8)) for n, d in (("qk", module.head_dim_qk), ("v", module.head_dim_v))),
    ):
        if value not in known:
            yield f"`{key} {value}`; expected one of {', '.join(map(str, known))}"
    if module.blocks and (module.blocks.size & (module.blocks.size - 1) or not 16 <= module.blocks.size <= 4096):
        yield f"`blocks {module.blocks.size}`; expected a power of two from 16 to 4096"
    for what, values in (("dtype", module.dtypes), ("kernel", tuple(k.name for k in module.kernels))):
        if not values or len(set(values)) < len(values):
            yield f"{what} `{' '.join(values)}`; expected one or more, each once"
    for text in (module.name, *(i.name for i in module.inputs)):
        if not text.isidentifier() or keyword.iskeyword(text):
            yield f"`{text}` is not an identifier"
    for text in (module.version, module.spec_hash, module.mask, module.score, *(i.help for i in module.inputs)):
        if set(text) & set('"\\{}'):  # they are printed inside strings
            yield f"`{text}` has a quote, a backslash or a brace"


def signature(module: Module, kernel: Kernel) -> Iterator[str]:
    """The grid tiles one axis, there is an entry, and every value is of a type that kernels and wrapper know."""
    if "entry" not in {b.name for b in kernel.blocks}:
        yield "no block @entry"
    if not kernel.grid or not kernel.own_axis:
        yield "the grid does not start with q or kv, and no loop of class all runs over one of them"
    for at, axis in enumerate(kernel.grid):
        if axis.abreast < 1 or (axis.abreast > 1 and (at or axis.var not in AXIS_EXTENT)):
            yield f"abreast({axis.abreast}) of the grid axis {axis.var}; expected 1 or more heads, on an axis of tiles, the first"
    blocks = [b.name for b in kernel.blocks]
    homes = {(kernel.graph.nodes[loop.name]["block"], loop.body) for loop in kernel.loops}
    reached = nx.descendants(nx.DiGraph([("entry", "entry"), *homes]), "entry") | {"entry"}
    bodies = [body for _, body in homes]
    for name in blocks:
        if blocks.count(name) > 1 or bodies.count(name) != (name != "entry") or name not in reached:
            yield f"@{name} is not the body of loops of one other block; only @entry is no body"
    stores = [op.dst.tensor for op in kernel.ops() if isinstance(op, (Scatter, Store))]
    written = {ref for name in stores for ref in (name, *kernel.op(name).operands())}
    for op in kernel.ops():
        if isinstance(op, (Load, Store)):
            tensor, role = _accessed(kernel, op)[0], "out" if isinstance(op, Store) else "in"
            if not isinstance(tensor, Arg) or tensor.role not in (role, "inout"):
                yield f"%{op.name} {'writes' if role == 'out' else 'reads'} %{tensor.name}, which is no tensor of role `{role}`"
    for block in kernel.blocks:
        roles = ("in", "out", "inout", "scalar") if block.name == "entry" else ("carry",)
        for op in block.ops:
            if isinstance(op, Arg) and op.role not in roles:
                yield f"%{op.name} is an argument `{op.role}` of @{block.name}; expected {' or '.join(roles)}"
            dims = op.type.dims if isinstance(op, Arg) and op.role in ("in", "out", "inout") else ()
            sizes = SIZES | {d for d in dims if d.isdigit() or re.fullmatch(BLOCKS, d)}
            if not (set(dims[:-1]) <= sizes and set(dims[-1:]) <= sizes | WIDTHS):
                yield f"%{op.name} is of [{', '.join(dims)}]; expected {', '.join(sorted(SIZES))}, and at the end D_QK or D_V"
            if isinstance(op, Arg) and op.role in ("out", "inout") and op.name not in written:
                yield f"nothing is stored to %{op.name}"
            for t in op.results().values():
                if t.dtype not in ("T", *DTYPE_BYTES):
                    yield f"%{op.name} is of `{t.dtype}`; expected one of T, {', '.join(DTYPE_BYTES)}"


def _accessed(kernel: Kernel, op: Load | Store | Base) -> tuple[Op, tuple[Any, ...]]:
    """The op that declares the tensor an access leads to, and all of its indices: those of the base first, if it has one."""
    access = op.dst if isinstance(op, Store) else op.src
    source = kernel.op(access.tensor)
    if isinstance(source, Base):
        return kernel.op(source.src.tensor), source.src.index + access.index
    return source, access.index


def _around(kernel: Kernel, block: str) -> list[Loop]:
    """The loops that run a block, from the innermost out; of several with one body, the first."""
    found = []
    while loop := next((loop for loop in kernel.loops if loop.body == block), None):
        found.append(loop)
        block = kernel.graph.nodes[loop.name]["block"]
    return found


def order(module: Module, kernel: Kernel) -> Iterator[str]:
    """Values are defined before they are used, in the same block or in one around it; so are scalars that expressions name."""
    if not nx.is_directed_acyclic_graph(kernel.graph):
        yield f"%{nx.find_cycle(kernel.graph)[0][0]} depends on itself"
    nodes = kernel.graph.nodes
    around = {block.name: _around(kernel, block.name) for block in kernel.blocks}
    for name, data in nodes.items():
        named = {str(s) for e in _expressions(data["op"]) for s in e.free_symbols} & nodes.keys()
        bound = {k for k, _ in getattr(data["op"], "uses", ())} | _variables(kernel)
        for ref in (*data["op"].operands(), *sorted(named - bound)):
            source = nodes[ref.split(".")[0]]
            places = (data, *(nodes[loop.name] for loop in around[data["block"]]))
            place = next((p for p in places if p["block"] == source["block"]), None)
            if place is None or source["order"] >= place["order"]:
                yield f"%{name} reads %{ref} where it is not defined"


def loops(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop's fields, its body's arguments and what the body yields are the same, with the same types."""
    from attngen.ir.interface import query_heads

    blocks = {b.name: b for b in kernel.blocks}
    for loop in kernel.loops:
        if loop.body not in blocks:
            yield f"%{loop.name} runs @{loop.body}, which is not a block"
            continue
        walks = kernel.walks and loop.var == kernel.own_axis
        over_tiles = loop.var in AXIS_EXTENT and not walks
        if loop.cls not in (("unknown", "full", "partial") if over_tiles else ("all",)):
            expected = "all, as it does not run over tiles" if not walks else "all, as its program owns each of these tiles in turn"
            expected = "unknown, full or partial, as it runs over tiles" if over_tiles else expected
            yield f"%{loop.name} has class `{loop.cls}`; expected {expected}"
        if loop.var == kernel.own_axis and not kernel.walks:
            yield f"%{loop.name} runs over {loop.var}, of which the grid gives each program one tile"
        if walks and loop.ranges != ((sympy.Integer(0), cdiv(symbol(AXIS_EXTENT[loop.var]), symbol(AXIS_DIM[loop.var]))),):
            yield f"%{loop.name} does not run over all tiles of {loop.var}, which its program owns"
        if over_tiles and kernel.walks and kernel.own_axis not in {other.var for other in _around(kernel, loop.body)}:
            yield f"%{loop.name} is in no loop over the tiles of {kernel.own_axis}, one of which its mask needs"
        if loop.var in {other.var for other in _around(kernel, kernel.graph.nodes[loop.name]["block"])}:
            yield f"%{loop.name} runs over {loop.var} inside a loop over {loop.var}"
        if loop.var not in AXIS_EXTENT and loop.ranges != (query_heads(kernel.is_split),):
            first, end = map(to_text, query_heads(kernel.is_split))
            yield f"%{loop.name} does not run over {first} .. {end}, the program's query heads of its key head"
        ops = blocks[loop.body].ops
        starts = {f: kernel.type_of(r) for f, r in loop.carry}
        args = {op.name: op.type for op in ops if isinstance(op, Arg)}
        yields = [op for op in ops if isinstance(op, Yield)]
        if len(yields) != 1 or ops[-1] is not yields[0]:
            yield f"@{loop.body} does not end with its one yield"
        elif not (starts == args == {f: kernel.type_of(r) for f, r in yields[0].values}):
            yield f"%{loop.name} carries {_fields(starts)}, @{loop.body} takes {_fields(args)} and yields other types or fields"


def lists(module: Module, kernel: Kernel) -> Iterator[str]:
    """With block sparsity every loop over tiles visits listed ones, between positions in its program's own row; tiles divide blocks.

    Where data lists them, full loops run over those that come first, with nothing to mask, and partial ones over the others; the
    tiles of the kernel that finds them are strips of the blocks.
    """
    from attngen.ir.interface import BESIDE, BLOCK_LISTS, FULL_RANKS, STRIP

    rank, listed = BLOCK_LISTS[kernel.own_axis]
    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops if kernel.name not in BESIDE else ():
        base = kernel.op(loop.listed) if loop.listed else None
        lists = isinstance(base, Base) and base.src.tensor == listed
        if loop.cls != "all" and module.blocks and not lists:
            yield f"%{loop.name} visits tiles of blocks that do not count; expected `listed` with a row of %{listed}"
        if base is not None and (loop.cls == "all" or not module.blocks):
            yield f"%{loop.name} visits listed tiles; expected all of them: " + ("it is over no tiles" if module.blocks else "blocks no")
        ranked = FULL_RANKS[kernel.own_axis] if data and loop.cls == "full" else rank
        start = ranked != rank or not data  # what is ranked there comes first
        for e in (e for pair in loop.ranges for e in pair) if lists else ():
            bound = kernel.op(str(e)) if str(e) in kernel.graph else None
            ranks = kernel.op(bound.src) if isinstance(bound, Position) else None
            if not (e == 0 and start) and not (isinstance(ranks, Base) and ranks.src.tensor == ranked):
                yield f"%{loop.name} runs to or from `{to_text(e)}`; expected {'0 or ' * start}a position among %{ranked}"
    size = module.blocks.size if module.blocks and kernel.loops else None
    for row in module.rows(kernel.name):
        if size and max(row.block_q, row.block_kv) > size:
            yield f"{row.device}: tiles of {row.block_q}x{row.block_kv} do not divide blocks of {size}"
        if size and kernel.name == "blocks" and (row.block_q, row.block_kv) != (size, STRIP):
            yield f"{row.device}: tiles of {row.block_q}x{row.block_kv}; expected strips of blocks, {size}x{STRIP}"


def drops(module: Module, kernel: Kernel) -> Iterator[str]:
    """With dropout, whatever multiplies V or its gradient is dropped, from one draw; without it nothing is."""
    draws = [op for op in kernel.ops() if isinstance(op, Keep)]
    drop = [op for op in kernel.ops() if isinstance(op, Dropout)]
    expected = 1 if module.dropout and kernel.dots else 0
    if (len(draws), len(drop)) != (expected, expected):
        says = "yes" if module.dropout else "no"
        yield f"{len(draws)} draws and {len(drop)} values dropped; expected {expected} of each (dropout {says})"


def live(module: Module, kernel: Kernel) -> Iterator[str]:
    """Everything is read: what a loop carried and its body does not read, say, would be lost."""
    named: set[str] = set()  # by expressions, as bounds of loops name scalars
    for op in kernel.ops():
        named |= {str(s) for e in _expressions(op) for s in e.free_symbols} - {k for k, _ in getattr(op, "uses", ())}
    for op in kernel.ops():
        parameter = isinstance(op, Arg) and op.role != "carry"
        parameter |= isinstance(op, Loop) and op.body in kernel.storing
        if not (parameter or isinstance(op, (Barrier, Scatter, Store, Yield)) or kernel.graph.out_degree(op.name) or op.name in named):
            yield f"%{op.name} is read by nothing"


def in_place(module: Module, kernel: Kernel) -> Iterator[str]:
    """What is updated in place has one reader: a carried value is one variable from start to end, and so is a masked one."""
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


def _fields(types: dict[str, Type]) -> str:
    return ", ".join(f"{k}: {t.dtype}[{', '.join(t.dims)}]" for k, t in types.items())


def references(module: Module, kernel: Kernel) -> Iterator[str]:
    """A field reference names a result that the op has."""
    for op in kernel.ops():
        for ref in op.operands():
            source, _, field = ref.partition(".")
            defined = kernel.op(source)
            known = dict(defined.carry) if isinstance(defined, Loop) else defined.results()
            if field not in known:
                yield f"%{op.name} reads %{ref}; %{source} has {', '.join(f'.{k}' if k else 'one result' for k in known) or 'none'}"


def types(module: Module, kernel: Kernel) -> Iterator[str]:
    """Dimensions agree by name: contractions, broadcasts, accesses. Element types are what is loaded, stored and computed."""
    for op in kernel.ops():
        for e in _expressions(op):
            if any(_is_condition(arg) for sub in sympy.preorder_traversal(e) for arg in _numbers_in(sub)):
                yield f"%{op.name}: `{to_text(e)}` computes with a condition"
        yield from (f"%{op.name}: {reason}" for reason in _type_errors(kernel, op))


def _map_errors(kernel: Kernel, op: Map) -> Iterator[str]:
    text, value = to_text(op.expr), op.type.dtype
    for ref in (r for _, r in op.uses if kernel.type_of(r).dtype == "ptr"):
        yield f"%{ref} is a pointer"
    dims = {d for _, ref in op.uses for d in kernel.type_of(ref).dims}
    dims |= {AXIS_DIM[a] for a in ("q", "kv") if symbol(f"{a}_idx") in op.expr.free_symbols}
    if dims != set(op.type.dims):
        yield f"the expression is of [{', '.join(sorted(dims))}], the value of [{', '.join(op.type.dims)}]"
    if _is_condition(op.expr) != (value == "b1"):
        yield f"`{text}` is {'a number' if value == 'b1' else 'a condition'}, the value {value}"
    if value == "T" and not op.type.dims:
        yield "a value of no dimensions is of T; expected f32 or i32"
    for division in op.expr.atoms(floordiv, cdiv, mod):
        if not _integral(kernel, division, dict(op.uses)):
            yield f"`{to_text(division)}` divides what is no integer"
    whole = _integral(kernel, op.expr, dict(op.uses))
    if op.expr.free_symbols and whole != (value == "i32") and (value == "i32" or not dims):
        yield f"`{text}` is {'an integer' if whole else 'no integer'}, the value {value}"


def _uses_errors(kernel: Kernel, op: Gather | Map | Mask | Scatter) -> Iterator[str]:
    whole = _dims(kernel, op)
    for _, ref in op.uses:
        dims = kernel.type_of(ref).dims
        if not set(dims) <= set(whole) or (len(dims) == 2 and dims != whole):
            yield f"%{ref} of [{', '.join(dims)}] does not broadcast to [{', '.join(whole)}]"


def _dims(kernel: Kernel, op: Gather | Map | Mask | Scatter) -> tuple[str, ...]:
    """The dimensions of a result; of a scatter, which has none, those of what it adds."""
    return kernel.type_of(op.value).dims if isinstance(op, Scatter) else op.type.dims


def _is_condition(e: Any) -> bool:
    return isinstance(e, Boolean) and not e.is_Symbol


def _numbers_in(e: Any) -> tuple[Any, ...]:
    """The arguments of an expression that have to be numbers."""
    if isinstance(e, (sympy.And, sympy.Or, sympy.Not)):
        return ()
    return e.args[1:] if isinstance(e, select) else e.args


def _type_errors(kernel: Kernel, op: Op) -> Iterator[str]:
    of = kernel.type_of
    match op:
        case Dot():
            a, b = of(op.a), of(op.b)
            if len(a.dims) != 2 or len(b.dims) != 2 or op.over not in a.dims or op.over not in b.dims:
                yield f"cannot contract [{', '.join(a.dims)}] with [{', '.join(b.dims)}] over {op.over}"
                return
            dims = tuple(d for t in (a, b) for d in t.dims if d != op.over)
            if dims != op.type.dims or op.type.dtype != "f32":
                yield f"the product is f32[{', '.join(dims)}]"
            if op.acc and of(op.acc).dtype != "f32":
                yield f"the accumulator is {of(op.acc).dtype}; expected f32"
            if op.acc and of(op.acc).dims != dims:
                yield f"the accumulator is [{', '.join(of(op.acc).dims)}], the product [{', '.join(dims)}]"
        case Map():
            yield from _map_errors(kernel, op)
            yield from _uses_errors(kernel, op)
        case Mask():
            yield from (f"`{to_text(e)}` is no condition" for e in _expressions(op) if not isinstance(e, Boolean))
            yield from _uses_errors(kernel, op)
            if of(op.value) != op.type:
                yield "a masked value keeps its type"
            if op.when not in ("always", "partial"):
                yield f"applies `{op.when}`; expected always or partial"
        case Loop():
            for e in (e for r in op.ranges for e in r):
                if _is_condition(e) or not _integral(kernel, e, {}):
                    yield f"runs to or from `{to_text(e)}`, which is no integer"
            if op.listed and of(op.listed).dtype != "ptr":
                yield f"visits what %{op.listed} lists, which is no pointer"
        case Position():
            if of(op.src).dtype != "ptr" or op.type.dtype != "i32" or op.type.dims:
                yield "is made of a pointer to ranks, and is one i32"
            if _is_condition(op.tile) or not _integral(kernel, op.tile, {}):
                yield f"`{to_text(op.tile)}` is no integer"
        case Seed():
            if of(op.src) not in (Type("i64", (), s) for s in ("hbm", "?")) or (op.type.dtype, op.type.dims) != ("i64", ()):
                yield "is one i64, read from a tensor of one i64"
        case Keep():
            one = [(of(r).dtype, of(r).dims) for r in (op.seed, op.threshold)]
            if one != [("i64", ()), ("i32", ())] or op.type.dtype != "b1" or sorted(op.type.dims) != ["BLOCK_KV", "BLOCK_Q"]:
                yield "needs a seed (i64) and a threshold (i32), and is b1 of BLOCK_Q and BLOCK_KV"
        case Dropout():
            if of(op.value) != op.type or op.type.dtype != "f32" or (of(op.keep).dtype, of(op.keep).dims) != ("b1", op.type.dims):
                yield "keeps the type of an f32 value, by a b1 of its dimensions"
        case Init():
            if op.type.dtype != "f32" or not op.value.is_number:
                yield f"starts at `{to_text(op.value)}` as {op.type.dtype}; expected a number as f32"
        case SoftmaxStep():
            row = op.type.dims[:1]
            if {of(r).dtype for r in (op.s, op.m)} != {"f32"} or (op.scale and of(op.scale).dims):
                yield "needs s and m in f32, and one number as scale"
            if of(op.s).dims != op.type.dims or of(op.m).dims != row:
                yield f"needs s of [{', '.join(op.type.dims)}], and m of its rows"
            if op.guard not in ("always", "partial"):
                yield f"guards `{op.guard}`; expected always or partial"
        case Reduce():
            value = of(op.value).dims
            if op.over not in value or tuple(d for d in value if d != op.over) != op.type.dims:
                yield f"cannot reduce [{', '.join(value)}] over {op.over} to [{', '.join(op.type.dims)}]"
            if op.op not in ("sum", "min", "max"):
                yield f"`{op.op}` is not a reduction; expected sum, min or max"
        case Gather():
            source = kernel.op(op.src.tensor)
            if not isinstance(source, Arg) or source.role != "in" or source.type.dtype != op.type.dtype:
                yield f"gathers {op.type.dtype} from %{op.src.tensor}, which is no input of that"
            elif len(op.src.index) != len(source.type.dims):
                yield f"%{op.src.tensor} has {len(source.type.dims)} dimensions, the access {len(op.src.index)}"
            if not all(_integral(kernel, e, dict(op.uses)) for e in op.src.index):
                yield "is indexed by what is no integer"
            yield from _uses_errors(kernel, op)
        case Scatter():
            target = kernel.op(op.dst.tensor)
            if not isinstance(target, Arg) or target.role != "out" or target.type.dtype != "f32" or of(op.value).dtype != "f32":
                yield f"adds {of(op.value).dtype} to %{op.dst.tensor}; expected f32, and an output of that"
            elif len(op.dst.index) != len(target.type.dims):
                yield f"%{op.dst.tensor} has {len(target.type.dims)} dimensions, the access {len(op.dst.index)}"
            if not all(_integral(kernel, e, dict(op.uses)) for e in op.dst.index):
                yield "is indexed by what is no integer"
            yield from _uses_errors(kernel, op)
        case Load() | Base() | Store():
            access = op.dst if isinstance(op, Store) else op.src
            declared, index = _accessed(kernel, op)
            tensor = of(declared.name)
            if isinstance(op, Store) and op.by:
                if (
                    op.by != "distance"
                    or tensor.dims != ("B", "Hq", "Td", "Nd")
                    or len(index) != 2
                    or set(of(op.value).dims) != set(SCORES)
                ):
                    yield "stores sums by distance of a tile of scores to a row of [B, Hq, Td, Nd]"
                return
            if not isinstance(op, Base) and len(index) != len(tensor.dims):
                yield f"%{access.tensor} has {len(tensor.dims)} dimensions, the access {len(index)}"
            moved = of(op.value) if isinstance(op, Store) else op.type
            if not isinstance(op, Base) and moved.dtype != tensor.dtype:
                yield f"%{access.tensor} holds {tensor.dtype}, the value is {moved.dtype}"
            tile = of(op.value).dims if isinstance(op, Store) else op.type.dims
            dims = tuple(AXIS_DIM[a] for a in access.axes())
            turned = set(access.axes()) == {"q", "kv"}  # a tile of scores may be loaded transposed
            if not isinstance(op, Base) and tuple(d.removesuffix("_PAD") for d in tile) not in (dims, dims[::-1] if turned else dims):
                yield f"the access is of [{', '.join(dims)}], the value of [{', '.join(tile)}]"
            checks = () if isinstance(op, Base) else op.check
            if len({axis for axis, _ in checks}) < len(checks):
                yield "checks an axis twice"
            for axis, when in checks:
                if axis not in access.axes() or when not in ("always", "partial"):
                    yield f"cannot check `{axis} if {when}`; expected one of {', '.join(access.axes())}, always or partial"


def _integral(kernel: Kernel, e: Any, uses: dict[str, str]) -> bool:
    """Whether an expression is made of integers: positions, sizes, and scalars of the kernel that are."""
    e = e.replace(lambda x: isinstance(x, TO_INTEGER), lambda x: sympy.Integer(0))  # of whatever they are made
    refs = {uses.get(str(s), str(s)) for s in e.free_symbols} - POSITIONS - _variables(kernel)
    whole = all(ref.split(".")[0] in kernel.graph and kernel.type_of(ref).dtype == "i32" for ref in refs)
    divided = any(power.exp.is_negative for power in e.atoms(sympy.Pow)) or not all(n.is_Integer for n in e.atoms(sympy.Rational))
    return whole and not divided and not e.has(*REAL, sympy.Float, sympy.oo)


def indexing(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every dimension is indexed by what it counts; heads as the sharing says: no program reads or writes another one's."""
    from attngen.analysis.bounds import last_row
    from attngen.ir.interface import STRIP

    h, hkv, g, group = map(symbol, ("h", "hkv", "g", "group"))
    heads = {
        "mha": {"Hq": [h], "Hkv": [h]},
        "mqa": {"Hq": [h, g], "Hkv": [sympy.Integer(0)]},
        "gqa": {"Hq": [h, hkv * group + g], "Hkv": [floordiv(h, group), hkv]},
    }
    letters: dict[str, Any] = {"B": symbol("b")} | {extent: symbol(axis) for axis, extent in AXIS_EXTENT.items()}
    letters["splits"] = symbol("split")
    if module.blocks:
        size = sympy.Integer(module.blocks.size)
        letters |= {"Tq": floordiv(symbol("q_start"), size), "Tk": floordiv(symbol("kv_start"), size)}
        letters["Ts"] = floordiv(symbol("kv_start"), sympy.Integer(STRIP))
    for op in kernel.ops():
        if not isinstance(op, (Base, Load, Store)):
            continue
        tensor, indices = _accessed(kernel, op)
        for dim, index in zip(kernel.type_of(tensor.name).dims, indices):
            right = [letters[dim]] if dim in letters else heads[module.sharing].get(dim, [])
            if isinstance(op, Load) and not op.type.dims and AXIS_EXTENT[kernel.own_axis] == dim:  # the first or last row of the own tile
                right = [symbol(f"{kernel.own_axis}_start"), last_row(kernel.own_axis)]
            if index not in right:
                expected = " or ".join(map(to_text, right))
                yield f"%{op.name} indexes {dim} of %{tensor.name} by `{to_text(index)}`; expected `{expected}` (heads {module.sharing})"
    for op in kernel.ops():
        if isinstance(op, (Gather, Scatter)):
            yield from _outside(kernel, op, letters, heads[module.sharing])
    queries = [op.src.index[1] for op in kernel.ops() if isinstance(op, (Load, Base)) and op.src.tensor == "Q" and len(op.src.index) > 1]
    for op in kernel.ops():
        if isinstance(op, Keep) and op.head not in queries:
            yield f"%{op.name} draws for head `{to_text(op.head)}`; expected that of %Q, `{' or '.join(map(to_text, queries))}`"


def _outside(kernel: Kernel, op: Gather | Scatter, letters: dict[str, Any], heads: dict[str, Any]) -> Iterator[str]:
    """What is read or written outside of a tensor: each index is proven inside, or the condition says so."""
    conditions = conjuncts(op.where)
    does, access = ("write", op.dst) if isinstance(op, Scatter) else ("read", op.src)
    for dim, index in zip(kernel.type_of(access.tensor).dims, access.index):
        extent = dimension(dim)
        low, high = span(index)
        if dim not in ("Nq", "Nk") and index in [letters.get(dim), *heads.get(dim, [])]:
            continue
        if isinstance(index, select) and index.args[1] == index.args[2] + extent:  # from the end where it is negative
            low = low if not prove_le(-extent, span(index.args[2])[0]) else sympy.Integer(0)
            high = span(index.args[2])[1]
        if not (low >= 0 or index.is_nonnegative or (index >= 0) in conditions):
            yield f"%{op.name} may {does} %{access.tensor} before its start, at `{to_text(index)}`; expected `where` to say it does not"
        if not (prove_le(high, extent - 1) or prove_le(index, extent - 1) or (index < extent) in conditions):
            yield f"%{op.name} may {does} %{access.tensor} past its end, at `{to_text(index)}`; expected `where` to say it does not"


def names(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every symbol of an expression is an operand, a scalar of the kernel, a position or a constant; values have names of their own."""
    scalars = {op.name for op in kernel.ops() if isinstance(op, (Arg, Gather, Load, Map, Position, Reduce)) and not op.results()[""].dims}
    own = kernel.own_axis
    divisors = {i.name for i in module.inputs if i.least is not None and i.least > 0}
    for a in kernel.grid:
        yield from _unknown(f"the grid axis {a.var}", a.extent, scalars | {"B", "BLOCK_Q", "BLOCK_KV"})
    for op in kernel.ops():
        known = scalars | CONSTANTS | {a.var for a in kernel.grid} - set(AXIS_DIM) | {"BLOCK_Q", "BLOCK_KV"}
        axes = set() if kernel.walks else {own}
        known |= {f"{axis}_start" for axis in axes}
        for loop in _around(kernel, kernel.graph.nodes[op.name]["block"]):
            known |= {f"{loop.var}_start"} if loop.var in AXIS_DIM else {loop.var}
            axes |= {loop.var} & set(AXIS_DIM)
        if isinstance(op, (Gather, Map, Mask, Scatter)):
            known |= {f"{a}_idx" for a in (AXIS_DIM if isinstance(op, Mask) else axes) if AXIS_DIM[a] in _dims(kernel, op)}
            known |= _facts_rows(kernel, op) if isinstance(op, Mask) else set()
        elif isinstance(op, (Load, Store, Base)):
            known |= axes | {"d_qk", "d_v", AXIS_EXTENT[own]}
        for symbol_name, ref in getattr(op, "uses", ()):
            if symbol_name != ref and (symbol_name in known | POSITIONS or not kernel.type_of(ref).dims):
                yield f"%{op.name} takes `{symbol_name}` for %{ref}; a scalar has one name in all expressions"
        for e in _expressions(op):
            yield from _unknown(f"%{op.name}", e, known | {s for s, _ in getattr(op, "uses", ())})
            for division in e.atoms(floordiv, cdiv, mod):
                if not (division.args[1].is_positive or str(division.args[1]) in divisors):
                    yield f"%{op.name}: `{to_text(division)}` divides by what is not known to be positive"
    steps = sum(isinstance(op, SoftmaxStep) for op in kernel.ops())
    if steps > 1:
        yield f"{steps} softmax steps; expected one"
    taken = RESERVED | _variables(kernel) - set(AXIS_DIM) | (set(SoftmaxStep.FIELDS) if steps else set())
    for op in kernel.ops():
        plain = op.name.isascii() and op.name.isidentifier() and not op.name.startswith("__")
        if not plain or keyword.iskeyword(op.name) or op.name in taken or op.name.startswith("stride_"):
            yield f"%{op.name} is a name that the printed kernel needs for itself"


def _facts_rows(kernel: Kernel, op: Mask) -> set[str]:
    """Values with one number for each row of the own tile, which facts may name."""
    names = {str(s) for fact in op.known for e in fact[1:] for s in e.free_symbols} & kernel.graph.nodes.keys()
    return {n for n in names if isinstance(kernel.op(n), (Gather, Load)) and kernel.type_of(n).dims == (AXIS_DIM[kernel.own_axis],)}


def bounds_checked(module: Module, kernel: Kernel) -> Iterator[str]:
    """Accesses to rows are bounds-checked: always, or in partial tiles alone along the axis of the loop."""
    looped = {loop.body: loop.var for loop in kernel.loops if loop.cls != "all"}
    for block in kernel.blocks:
        for op in block.ops:
            if not isinstance(op, (Load, Store)):
                continue
            access = op.dst if isinstance(op, Store) else op.src
            for axis in {"q", "kv"} & set(access.axes()):
                when = dict(op.check).get(axis)
                if when != "always" and not (when == "partial" and looped.get(block.name) == axis):
                    yield f"%{op.name} in @{block.name} does not check {axis}" + (" in full tiles too" if when else "")


def rewrites(module: Module, kernel: Kernel) -> Iterator[str]:
    """A tensor of role `inout` is loaded and then stored once, at one place, in the body of a loop whose turns have tiles of their own."""
    for arg in (a for a in kernel.args if a.role == "inout"):
        found = [op for op in kernel.ops() if isinstance(op, (Load, Store)) and _accessed(kernel, op)[0] is arg]
        if [type(op) for op in found] != [Load, Store]:
            yield f"%{arg.name} has {len(found)} loads and stores; expected one load, and then one store"
            continue
        (read, first), (write, second) = ((kernel.graph.nodes[op.name]["block"], _accessed(kernel, op)[1]) for op in found)
        if (read, first) != (write, second):
            yield f"%{arg.name} is loaded at one place and stored at another; expected a tile that is rewritten where it is read"
        around = {loop.var for loop in _around(kernel, read)[:1] if loop.cls != "all"}
        if around.isdisjoint(map(str, first)):
            yield f"%{arg.name} is rewritten outside of a loop over its tiles, each of which has its turn"


def _variables(kernel: Kernel) -> set[str]:
    """Loop and grid variables, and the letters of axes."""
    return {loop.var for loop in kernel.loops} | {a.var for a in kernel.grid} | set(AXIS_DIM)


def _expressions(op: Op) -> list[Any]:
    """Every expression of an op."""
    match op:
        case Map():
            return [op.expr]
        case Gather():
            return [*op.src.index, op.where]
        case Scatter():
            return [*op.dst.index, op.where]
        case Mask():
            return [op.where, *(e for fact in op.known for e in fact)]
        case Loop():
            return [e for r in op.ranges for e in r] + list(op.tiles)
        case Load() | Base():
            return list(op.src.index)
        case Store():
            return list(op.dst.index)
        case Position():
            return [op.tile]
        case Keep():
            return [op.head]
        case Init():
            return [op.value]
    return []


def _unknown(where: str, e: Any, known: set[str]) -> Iterator[str]:
    for s in sorted(map(str, getattr(e, "free_symbols", ()))):
        if s not in known:
            yield f"{where}: `{to_text(e)}` has `{s}`, which is no operand, scalar or position"


# ---------------------------------------------------------------------------------------------- scheduled


def classified(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every loop over tiles has a class."""
    for loop in kernel.loops:
        if loop.cls == "unknown":
            yield f"%{loop.name} has class unknown; classify-tiles and split-loops come first"


def covers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Loops over tiles visit, between them and once each, every tile that holds something visible, and none before the first."""
    from attngen.passes.classify_tiles import tile_ranges

    for loop in kernel.loops:
        for (_, before), (after, _) in zip(loop.ranges, loop.ranges[1:]):
            if not _le(kernel, before, after):
                yield f"%{loop.name} runs up to {to_text(before)} and then from {to_text(after)}, which is not proven to be further on"
        for lo, hi in loop.ranges:
            if not _le(kernel, sympy.Integer(0), lo) or not _le(kernel, lo, hi):
                yield f"%{loop.name} runs {to_text(lo)} .. {to_text(hi)}, which is not proven to rise from 0 or more"
    for body in dict.fromkeys(loop.body for loop in kernel.loops if loop.cls != "all"):
        runs = _runs(tuple(with_rows(e, kernel.own_axis) for e in tile_ranges(kernel, body)))
        mine = [loop for loop in kernel.loops if loop.body == body]
        apart = module.blocks is not None and module.blocks.data and all(loop.listed for loop in mine)  # no block is in two lists
        for loops in [[loop] for loop in mine] if apart else [mine]:
            ranges = [pair for loop in loops for pair in loop.ranges]
            pieces = [tuple(with_rows(kernel.resolve(e), kernel.own_axis) for e in pair) for pair in ranges]
            if not _covered(runs, pieces):
                have, need = (", ".join(f"{to_text(p[0])} .. {to_text(p[-1])}" for p in some) for some in (pieces, runs))
                yield f"the loops over @{body} run {have}, which is not proven to be all of {need}, once each"
        if apart and sorted(loop.cls for loop in mine) != ["full", "partial"]:
            yield f"the loops over @{body} are {', '.join(loop.cls for loop in mine)}; expected full and partial, for both lists of blocks"


def _runs(tiles: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The bounds of each run of tiles."""
    return [tiles[i : i + 4] for i in range(0, len(tiles), 4)]


def _covered(runs: list[tuple[Any, ...]], pieces: list[tuple[Any, Any]]) -> bool:
    """Whether the pieces are chains, in rising order, that cover the runs: all in one chain, or each run in its own."""
    if any(len(c) == len(pieces) and prove_le(c[0][0], runs[0][0]) and prove_le(runs[-1][3], c[-1][1]) for c in _chains(pieces)):
        return True
    left: list[tuple[Any, Any]] = list(pieces)
    last: list[tuple[Any, Any]] = []
    for run in (r for r in runs if r[0] != r[3]):
        candidates = [last] * bool(last) + sorted(_chains(left), key=len, reverse=True)  # a shorter one would leave empty pieces
        chain = next((c for c in candidates if prove_le(c[0][0], run[0]) and prove_le(run[3], c[-1][1])), None)
        if chain is None or (last and chain is not last and not prove_le(last[-1][1], chain[0][0])):
            return False
        left, last = [p for p in left if p not in chain], chain
    return not left


def _le(kernel: Kernel, a: Any, b: Any) -> bool:
    """Whether a <= b is proven, with the kernel's named scalars written out, for a program whose tile has a row."""
    return prove_le(*(with_rows(kernel.resolve(e), kernel.own_axis) for e in (a, b)))


def _chains(pieces: list[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Orders in which each range starts where the one before it ends."""
    chains = []
    for first in range(len(pieces)):
        chain, rest = [pieces[first]], [p for i, p in enumerate(pieces) if i != first]
        while following := next((p for p in rest if p[0] == chain[-1][1]), None):
            chain.append(following)
            rest.remove(following)
        chains.append(chain)
    return chains


def ends_hidden(module: Module, kernel: Kernel) -> Iterator[str]:
    """Keys past the end are masked wherever a program sums over keys: zeros that are loaded for them would count as scores."""
    from attngen.passes.simplify import implies

    inside = symbol("kv_idx") < symbol("Nk")
    sums = {loop.body for loop in kernel.loops if loop.var == "kv" and loop.cls != "all"}
    sums |= {b.name for b in kernel.blocks if any(isinstance(op, Dot) and op.over == "BLOCK_KV" for op in b.ops)}
    for body in (b.name for b in kernel.blocks if b.name in sums):
        parts = [p for op in kernel.block(body).ops if isinstance(op, Mask) for p in conjuncts(op.where)]
        if not any(p == inside or implies(p, inside, "q", "kv") for p in parts):
            yield f"no mask in @{body} hides the keys from Nk on; expected a condition from which `kv_idx < Nk` follows"


def full_is_proven(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop of class full runs only over tiles that the mask's expression proves full, or over blocks that are listed as such."""
    from attngen.passes.classify_tiles import tile_ranges

    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops:
        if loop.cls != "full" or (data and loop.listed):
            continue
        runs = _runs(tile_ranges(kernel, loop.body))
        for lo, hi in ((kernel.resolve(lo), kernel.resolve(hi)) for lo, hi in loop.ranges):
            if not any(prove_le(start, lo) and prove_le(hi, end) for _, start, end, _ in runs):
                proven = ", ".join(f"{to_text(start)} .. {to_text(end)}" for _, start, end, _ in runs)
                yield (
                    f"%{loop.name} runs {to_text(lo)} .. {to_text(hi)} as class full, but only {proven} is proven to hold "
                    "nothing masked or out of bounds; class partial is right for any range"
                )


def placed(module: Module, kernel: Kernel) -> Iterator[str]:
    """Once place-memory has run, every value has a memory space."""
    spaces = {op.name: t.space for op in kernel.ops() for t in op.results().values()}
    if "?" in spaces.values() and len(set(spaces.values())) > 1:
        yield f"%{next(n for n, s in spaces.items() if s == '?')} has no memory space"


def described(module: Module, kernel: Kernel) -> Iterator[str]:
    """Loads by descriptor are of tiles of rows of one head, zeros where out of bounds, for shared memory; rows that take them are for
    devices that can."""
    from attngen.devices import CLASSES

    by_descriptor = [op for op in kernel.ops() if isinstance(op, Load) and op.via]
    for op in by_descriptor:
        tensor, index = _accessed(kernel, op)
        rows = [str(i) for i in index if str(i) in AXIS_DIM]
        whole = isinstance(tensor, Arg) and tensor.role == "in" and len(index) == 4 and [str(i) for i in index[2:]] == rows
        if op.via != "descriptor" or op.type.dtype != "T" or op.type.space not in ("sram", "?") or not whole or op.other != 0:
            yield f"%{op.name} is read via({op.via}); expected `descriptor`, of a tile %T[b, h, rows, columns] in sram whose outside is 0"
    for row in module.rows(kernel.name):
        if row.tma and not (by_descriptor and row.device in CLASSES and CLASSES[row.device].tma):
            why = f"{row.device} has no engine that reads them" if by_descriptor else f"no load of @{kernel.name} is via(descriptor)"
            yield f"{row.device}: TMA=1, but {why}"


def fits(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every row of the schedule table fits the device class it is for."""
    from attngen.analysis.sram import misfit
    from attngen.devices import CLASSES

    for row in module.rows(kernel.name):
        if row.device not in CLASSES:
            yield f"`{row.device}` is not a device class; expected one of {', '.join(CLASSES)}"
            continue
        reason = misfit(module, kernel, row)
        if reason:
            yield reason
    for unfit in module.unfit(kernel.name):
        if unfit.device not in CLASSES:
            yield f"`{unfit.device}` is not a device class; expected one of {', '.join(CLASSES)}"


# ---------------------------------------------------------------------------------------------- target


def scheduled_everywhere(module: Module, kernel: Kernel) -> Iterator[str]:
    """There is a schedule for each device class and element size, ending in one for any number of rows, or one line that says
    why there is none; some class has one."""
    from attngen.analysis.sram import elem_sizes
    from attngen.devices import CLASSES

    rows, unfit = module.rows(kernel.name), [(u.device, u.elem_bytes) for u in module.unfit(kernel.name)]
    for size in elem_sizes(module):
        if not any(r.elem_bytes == size for r in rows):
            yield f"no device class has a schedule at {size} bytes"
    for device in CLASSES:
        for size in elem_sizes(module):
            mine = [r.max_rows for r in rows if (r.device, r.elem_bytes) == (device, size)]
            if (device, size) in unfit:
                if mine or unfit.count((device, size)) > 1:
                    yield f"there is a line `none` for {device} at {size} bytes, and another line"
                continue
            limits = [m for m in mine if m is not None]
            if not mine or mine[-1] is not None or mine.count(None) != 1 or limits != sorted(set(limits)):
                yield f"the rows for {device} at {size} bytes do not rise to rows<=inf"


def powers_of_two(module: Module, kernel: Kernel) -> Iterator[str]:
    """Triton's tiles: powers of two, 16 at least, head dimensions padded to one; warps a power of two, as many as a program may have."""
    from attngen.devices import CLASSES

    widths = {"D_QK": module.head_dim_qk, "D_V": module.head_dim_v}
    for op in kernel.ops():
        for t in op.results().values():
            for name, width in widths.items() if not (isinstance(op, Arg) and op.role in ("in", "out", "inout")) else ():
                wrong = name if width & (width - 1) else f"{name}_PAD"
                if wrong in t.dims:
                    yield f"%{op.name} is of {wrong}; a head dimension of {width} is {'padded' if wrong == name else 'not padded'} on chip"
    for row in module.rows(kernel.name):
        for what, value, least in (("BLOCK_Q", row.block_q, 16), ("BLOCK_KV", row.block_kv, 16), ("num_warps", row.num_warps, 1)):
            if value < least or value & (value - 1):
                yield f"{row.device}: {what}={value}; Triton needs a power of two, {least} at least"
        most = 1024 // CLASSES[row.device].threads_per_warp
        if row.num_warps > most:
            yield f"{row.device}: num_warps={row.num_warps}; expected at most {most}, which are 1024 threads"
        if not 1 <= row.num_stages <= 8:
            yield f"{row.device}: num_stages={row.num_stages}; expected 1 to 8"
        if row.max_rows is not None and row.max_rows < 1:
            yield f"{row.device}: rows<={row.max_rows}; expected 1 or more"


def dot_operands(module: Module, kernel: Kernel) -> Iterator[str]:
    """Both operands of a dot have the tensors' element type; products of fp32 say their precision, as the header does."""
    precision = module.precision if "fp32" in module.dtypes else ""
    for op in kernel.ops():
        if isinstance(op, Dot):
            for ref in (op.a, op.b):
                if kernel.type_of(ref).dtype != "T":
                    yield f"%{op.name} multiplies %{ref} of {kernel.type_of(ref).dtype}; cast it to T first"
            if op.precision != precision:
                yield f"%{op.name} has precision `{op.precision}`; expected `{precision}`, by the module's dtype and precision"


def padding_checked(module: Module, kernel: Kernel) -> Iterator[str]:
    """Tiles padded to a power of two check the head dimension on every access."""
    for op in kernel.ops():
        if isinstance(op, (Load, Store)):
            dims = kernel.type_of(op.value).dims if isinstance(op, Store) else op.type.dims
            axes = {a for a, when in op.check if when == "always"}
            for d in dims:
                if d.endswith("_PAD") and d.removesuffix("_PAD").lower() not in axes:
                    yield f"%{op.name} is padded to {d} but does not check {d.removesuffix('_PAD').lower()}"


def ordered(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop that rewrites tiles follows a barrier, beyond which what it loads cannot be read ahead."""
    for block in kernel.blocks:
        for before, op in zip((None, *block.ops), block.ops):
            if isinstance(op, Loop) and op.body in kernel.rewriting and not isinstance(before, Barrier):
                yield f"%{op.name} loads tiles that others have stored, and no barrier is right before it"


_STRUCTURE: dict[str, Rule] = {
    "header": header,
    "signature": signature,
    "references": references,
    "order": order,
    "loops": loops,
    "types": types,
    "indexing": indexing,
    "names": names,
    "bounds-checked": bounds_checked,
    "rewrites": rewrites,
}
_SCHEDULED: dict[str, Rule] = {
    "classified": classified,
    "covers": covers,
    "full-is-proven": full_is_proven,
    "ends-hidden": ends_hidden,
    "placed": placed,
    "described": described,
    "fits": fits,
}
_TARGET: dict[str, Rule] = {
    "lists": lists,
    "drops": drops,
    "ordered": ordered,
    "in-place": in_place,
    "scheduled-everywhere": scheduled_everywhere,
    "powers-of-two": powers_of_two,
    "dot-operands": dot_operands,
    "padding-checked": padding_checked,
    "live": live,
}
RULES: dict[str, dict[str, Rule]] = {
    "logical": _STRUCTURE,
    "scheduled": {**_STRUCTURE, **_SCHEDULED},
    "target": {**_STRUCTURE, **_SCHEDULED, **_TARGET},
}
