"""Rules of host programs: kernels get the arguments that they declare, nothing is read before it is written, and each
branch defines the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sympy

from attngen.ir import (
    AXIS_DIM,
    SPLIT_DIM,
    TENSORS,
    WHOLE,
    Host,
    Kernel,
    Module,
    Op,
    Type,
    dimension,
    launch,
    only,
    tile,
)
from attngen.ir.expr import Bool, cdiv, conjuncts, select, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.names import (
    AXES,
    DROPOUT_SCALARS,
    FLAT,
    FOUND,
    INTEGERS,
    OUTPUTS,
    SCALARS,
    SCALES,
    SHAPES,
    SHARES,
    of_sequence,
    tensor_dtype,
)
from attngen.ir.prove import prove_le
from attngen.ir.split_kv import max_work_items
from attngen.tiles.launches import rows_are_aligned
from attngen.verify.dependent_launch import host_dependent_launch
from attngen.verify.host_writes import written
from attngen.verify.positions import lengths, sums_of_part

Rule = Callable[[Module, Host], Iterator[str]]
GRADIENTS = ("dQ", "dK", "dV")


def structure(module: Module, host: Host) -> Iterator[str]:
    """Each block except @entry is a branch of one `if`. Yields come last. A program returns the results that its
    callers expect."""
    blocks = [b.name for b in host.blocks]
    if "entry" not in blocks:
        yield "no block @entry"
        return
    branches = [name for op in only(host.ops(), launch.If) for name in (op.then, op.orelse) if name]
    for name in dict.fromkeys([*blocks, *branches]):
        if blocks.count(name) != 1 or branches.count(name) != (name != "entry"):
            yield f"@{name} is not the branch of one `if`; only @entry is no branch"
    for block in host.blocks:
        for op in block.ops:
            if isinstance(op, tile.Yield) and op is not block.ops[-1]:
                yield f"@{block.name} yields before its end"
            if isinstance(op, tile.Arg) and (block.name != "entry" or op.role not in ("in", "scalar", "flag")):
                yield f"%{op.name} is an argument `{op.role}` of @{block.name}; expected in, scalar or flag, of @entry"
    gradients = tuple(f"d_{i.name}" for i in module.inputs if i.grad) if host.name == "backward" else ()
    derived = tuple(name.upper() for d in module.derived if d.program == host.name for name in d.names)
    smooth = (OUTPUTS.get(name, name) for name in module.by_query if name not in FLAT)
    results = {"forward": ("O", *module.row_tensors), "backward": GRADIENTS, "key_mass": ("KEY_MASS",)}
    results |= {"jvp": ("tO", *(f"t{name}" for name in smooth))}
    expected = (*results.get(host.name, derived), *gradients)
    if expected and tuple(host.results) != expected:
        yield f"it returns {', '.join(host.results) or 'nothing'}; expected {', '.join(expected)}"


def defined(module: Module, host: Host) -> Iterator[str]:
    """A value is defined before it is read, in the same block or in one around it. Both branches of an `if` yield the
    same fields."""

    sizes = host.sizes

    def walk(block: str, known: set[str]) -> Iterator[str]:
        here = set(known)
        for op in host.block(block).ops:
            for ref in (*op.operands(), *_named(op, sizes)):
                if ref not in here:
                    yield f"%{op.name} reads %{ref} where it is not defined"
            if isinstance(op, launch.If):
                for name in (op.then, op.orelse):
                    yield from walk(name, here) if name else ()
                fields = [_yielded(host, name) for name in (op.then, op.orelse)]
                if fields[0] != fields[1]:
                    yield f"@{op.then} of %{op.name} yields {_fields(fields[0])}, and {_other(op)} {_fields(fields[1])}"
                here |= {f"{op.name}.{f}" for f in fields[0]}
            here |= {f"{op.name}.{f}" if f else op.name for f in op.results()}

    yield from walk("entry", set())


def arguments(module: Module, host: Host) -> Iterator[str]:
    """An argument has the type that the header gives the input, or the type that its name has in every module."""
    given = {i.name: (i.dtype, i.shape) for i in module.inputs}
    given |= {name: (d.dtype, shape) for d in module.derived for name, shape in zip(d.names, d.shapes)}
    known = {name.upper() if shape else name: types for name, types in given.items() for shape in (types[1],)}
    if host.name == "decode":  # keys are in a cache
        known = {
            name: (dtype, tuple("Nc" if d == "Nk" else d for d in shape)) for name, (dtype, shape) in known.items()
        }
    if any(d.program == host.name for d in module.derived):
        known = {name: (dtype, of_sequence(shape)) for name, (dtype, shape) in known.items()}
    known |= {name: (tensor_dtype(name), shape) for name, shape in SHAPES.items()}
    known |= {name: ("f32", module.cache.scales) for name in SCALES.values() if module.cache}
    known |= {name: (dtype, ()) for name, dtype in (SCALARS | DROPOUT_SCALARS).items()}
    for arg in host.args:
        dtype, dims = known.get(arg.name, (arg.type.dtype, arg.type.dims))
        if arg.name != "COUNT" and (arg.type.dtype, arg.type.dims) != (dtype, dims):
            yield f"%{arg.name} is {_text(arg.type)}; expected {dtype}[{', '.join(dims)}]"
    made = {
        name: (d.dtype, of_sequence(shape))
        for d in module.derived
        if d.program == host.name
        for name, shape in zip(d.names, d.shapes)
    }
    for name, ref in host.results.items() if made else ():
        have, (dtype, dims) = host.type_of(ref), made[name.lower()]
        if (have.dtype, have.dims) != (dtype, dims):
            found, expected = _text(have), f"{dtype}[{', '.join(dims)}]"
            yield f"its result {name} is {found}; expected {expected}, as `derive` says"
    # A program that `derive` names has only its own arguments as variables.
    own = {arg.name.lower() for arg in host.args} if made else given.keys()
    if host.name == "decode":  # it computes itself the tensors that programs of `derive` return elsewhere
        made = {name: known[name.upper()] for d in module.derived if d.program for name in d.names}
        for op in host.ops():
            dtype, dims = made.get(op.name.lower(), ("", ()))
            if isinstance(op, launch.Alloc) and dtype and (op.type.dtype, op.type.dims) != (dtype, dims):
                yield f"%{op.name} is {_text(op.type)}; expected {dtype}[{', '.join(dims)}], as `derive` says"
    for op in host.ops():
        if (
            not isinstance(op, (tile.Arg, launch.If, launch.Launch, launch.Copy, tile.Yield))
            and op.name.lower() in (given.keys() & own) - made.keys()
        ):
            name = op.name.lower()
            yield f"%{op.name} and the input `{name}` are one variable in Python; expected another name for one of them"


def _named(op: Op, sizes: set[str]) -> list[str]:
    """The scalars that an op's expressions and dimensions name, except the `sizes` of the call."""
    where = getattr(op, "where", sympy.true)
    filled = getattr(op, "fill_where", sympy.true)
    number = [op.expr] if isinstance(op, tile.Map) and not op.type.dims else []
    names = {
        str(s) for e in (where, filled, *number, *(e for _, e in getattr(op, "sizes", ()))) for s in e.free_symbols
    }
    return sorted((names - FOUND.keys() - sizes) | (set(SHARES.values()) & set(getattr(op, "type", Type("")).dims)))


def _yielded(host: Host, block: str) -> dict[str, Type]:
    last = host.block(block).ops[-1:] if block else ()
    return {f: host.type_of(ref) for op in only(last, tile.Yield) for f, ref in op.values}


def _text(t: Type) -> str:
    return f"{t.dtype}[{', '.join(t.dims)}]"


def _fields(fields: dict[str, Type]) -> str:
    return ", ".join(fields) or "nothing"


def _other(op: launch.If) -> str:
    """The other branch of an `if`, as the subject of "yields"."""
    return f"@{op.orelse} yields" if op.orelse else "there is no other branch, which would yield"


def types(module: Module, host: Host) -> Iterator[str]:
    """A view has the dimensions that follow from its source, and a sum those that remain."""
    for op in host.ops():
        if isinstance(op, launch.View):
            expected = _viewed(op.by, host.type_of(op.src).dims, op.type.dims)
        elif isinstance(op, launch.Sum):
            expected = tuple(d for d in host.type_of(op.value).dims if d not in op.over)
            expected = op.type.dims if sorted(expected) == sorted(op.type.dims) else expected  # in any order
        else:
            continue
        if op.type.dims != expected:
            yield f"%{op.name} is [{', '.join(op.type.dims)}]; expected [{', '.join(expected)}]"


def _viewed(by: str, dims: tuple[str, ...], have: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of a view of a tensor. `expand` may repeat a dimension to any length: it is taken from `have`."""
    if by == "expand":
        return tuple(h if d == "*" else d for d, h in zip(dims, have))
    if by == "heads":
        return tuple(x for d in dims for x in (("Hkv", "group") if d == "Hq" else (d,)))
    if by in launch.COLUMN_VIEWS:
        return (*dims[:-1], launch.COLUMN_VIEWS[by]) if dims[-1] == "D_QK" else dims
    return tuple({"Hq": "Hkv", "Nq": "Gq"}.get(d, d) for d in dims)


def launches(module: Module, host: Host) -> Iterator[str]:
    """Each argument of a kernel is a host value with the type that the kernel declares. The kernel's grid is over known
    sizes. Kernels that compute positions get the lengths of the whole sequence, and sums of dQ that are 0 where no
    program writes them.

    A fused backward that reads a number per score is launched only where TMA can read and write these numbers.
    """
    kernels = {kernel.name: kernel for kernel in module.kernels}
    by_tma = {name for name, kernel in kernels.items() if kernel.traits.adds_in_order and kernel.traits.reads_pairs}
    aligned = [op.then for op in only(host.ops(), launch.If) if rows_are_aligned() in _implied(host, op.where)]
    for op in host.ops():
        if not isinstance(op, launch.Launch):
            continue
        if op.kernel not in kernels:
            yield f"it launches @{op.kernel}; the kernels are {', '.join(kernels)}"
            continue
        kernel, given = kernels[op.kernel], dict(op.args)
        if op.kernel in by_tma and not any(op in host.block(name).ops for name in aligned):
            condition = to_text(rows_are_aligned())
            yield f"launch @{op.kernel}: it reads a number for each score; expected `{condition}` around it"
        refs = [given.get(arg.name, arg.name) for arg in kernel.args]
        for arg, ref in zip(kernel.args, refs):
            if arg.role in TENSORS[1:] and refs.count(ref) > 1:
                two = f"%{ref} is passed as %{arg.name}, which is written, and as another argument"
                yield f"launch @{op.kernel}: {two}"
        for arg in kernel.args:
            yield from (
                f"launch @{op.kernel}: {reason}" for reason in _argument(host, op, arg, given.pop(arg.name, arg.name))
            )
        for name in given:
            yield f"launch @{op.kernel}: it has no argument %{name}"
        yield from (f"launch @{op.kernel}: {reason}" for reason in _capacity(module, host, op, kernel))
        yield from (f"launch @{op.kernel}: {reason}" for reason in _items(host, op, kernel))
        yield from (f"launch @{op.kernel}: {reason}" for reason in lengths(op, kernel))
        yield from (f"launch @{op.kernel}: {reason}" for reason in sums_of_part(host, op, kernel))
        yield from _grid(host, op, kernel)
    yield from _split_alike(kernels, host)


def _capacity(module: Module, host: Host, op: launch.Launch, kernel: Kernel) -> Iterator[str]:
    """The capacity of a sequence, `Nc`, is the number of rows in its pages."""
    if module.cache is None or not module.cache.page or not any(arg.name == "PAGE_TABLE" for arg in kernel.args):
        return
    found = [o.expr for o in only(host.ops(), tile.Map) if o.name == "Nc"]
    expected = symbol("max_pages") * dimension(module.cache.page)
    if found != [expected] or "Nc" in dict(op.sizes):
        have = ", ".join(map(to_text, found)) or "unknown"
        yield f"the capacity of a sequence is {have}; expected `Nc`, {to_text(expected)}"


def _items(host: Host, op: launch.Launch, kernel: Kernel) -> Iterator[str]:
    """The tensors of partial results have room for all splits that may be made."""
    if kernel.kv_split is None:
        return
    items = next((o.expr for o in only(host.ops(), tile.Map) if o.name == "items"), symbol("items"))
    least = max_work_items(kernel.kv_split.each)
    if "items" in dict(op.sizes) or not prove_le(least, items):
        yield f"there is room for {to_text(items)} splits, and keys may have up to {to_text(least)}"


def _split_alike(kernels: dict[str, Kernel], host: Host) -> Iterator[str]:
    """Kernels with splits of the same keys compute the same splits: they get the same numbers, and the same tensors to
    read numbers from."""
    launches = [op for op in only(host.ops(), launch.Launch) if op.kernel in kernels and kernels[op.kernel].kv_split]
    names = {
        name for op in launches for arg in kernels[op.kernel].args for name in (arg.name,) if arg.role == "scalar"
    } - {"scale"}
    names |= {
        "CACHE_SEQLENS",
        *(at.tensor for op in launches if (kv_split := kernels[op.kernel].kv_split) for _, at in kv_split.reads),
    }
    given = {op.kernel: {name: e for name, e in (*op.sizes, *op.args) if name in names} for op in launches}
    if len({tuple(sorted(sizes.items(), key=str)) for sizes in given.values()}) > 1:
        kernels_with_splits = " and ".join(f"@{name}" for name in given)
        yield f"it gives {kernels_with_splits} other sizes or tensors; expected the same, as they split the same keys"


def _implied(host: Host, where: Bool) -> set[Bool]:
    """The conditions that a condition implies. If a number is positive, the conditions hold under which it is not 0."""
    found = set(conjuncts(where))
    for op in host.ops():
        if (
            isinstance(op, tile.Map)
            and isinstance(op.expr, select)
            and op.expr.args[2] == 0
            and (symbol(op.name) > 0) in found
        ):
            found |= set(conjuncts(op.expr.args[0]))
    return found


def _argument(host: Host, op: launch.Launch, arg: tile.Arg, ref: str) -> Iterator[str]:
    sizes = dict(op.sizes)
    if arg.role == "scalar" and arg.name in (FOUND.keys() | sizes.keys() | host.sizes):
        return
    if ref.partition(".")[0] not in host.by_name:
        yield f"%{arg.name} is neither an argument nor allocated"
        return
    have = host.type_of(ref)
    dims = tuple(to_text(sizes[d]) if d in sizes else d for d in arg.type.dims)
    if (have.dtype, have.dims) != (arg.type.dtype, dims):
        expected, found = (f"{t}[{', '.join(d)}]" for t, d in ((arg.type.dtype, dims), (have.dtype, have.dims)))
        yield f"%{ref} is {found}; expected {expected} for %{arg.name}"


def _grid(host: Host, op: launch.Launch, kernel: Kernel) -> Iterator[str]:
    """There is a program for each head, split and sequence, and for each tile of the program axis, unless each program
    visits all tiles.

    For keys in a cache, there is one for each tile of a sequence's capacity: no grid depends on lengths.
    """
    own = kernel.program_axis
    tiles = cdiv(symbol(kernel.traits.extent(own)), symbol(AXIS_DIM[own]))
    expected = {own: tiles} | {
        axis: dimension(size) for axis, size in AXES.items() if size.isdigit() or INTEGERS[size].is_("dim")
    }
    expected |= {axis: cdiv(symbol(WHOLE[dim]), symbol(dim)) for axis, dim in SPLIT_DIM.items()}
    expected |= {"KV_split": symbol("num_KV_splits")} if kernel.kv_split else {}
    expected |= {"kv": cdiv(symbol("Nc"), symbol("BLOCK_KV"))} if own == "kv" and kernel.traits.reads_cache else {}
    for at, axis in enumerate(kernel.grid):
        if axis.extent != expected.get(axis.var) or (axis.var == own) != (
            at == 0 and not kernel.traits.visits_all_tiles
        ):
            known = ", ".join(f"{var} in {to_text(e)}" for var, e in expected.items())
            found = f"{axis.var} in {to_text(axis.extent)}"
            yield f"launch @{op.kernel}: its grid has {found}; expected some of {known}, tiles first"
    for axis in kernel.grid:
        size = AXES.get(axis.var, "")
        split = axis.var == "KV_split" and kernel.kv_split is not None  # their number is computed on the device
        if (
            size
            and not split
            and not size.isdigit()
            and size not in (FOUND.keys() | host.sizes)
            and size not in host.by_name
        ):
            yield f"launch @{op.kernel}: its grid has {axis.var}, and the size {size} is not known"


def read(module: Module, host: Host) -> Iterator[str]:
    """Every value that is computed or allocated is read: by an op, by a kernel or as a result."""
    refs = {ref.partition(".")[0] for op in host.ops() for ref in op.operands()}
    refs |= {str(s) for op in host.ops() for e in _conditions(op) for s in e.free_symbols}
    kernels = {kernel.name: kernel for kernel in module.kernels}
    for op in host.ops():
        if isinstance(op, launch.Launch) and op.kernel in kernels:
            refs |= {arg.name for arg in kernels[op.kernel].args} - dict(op.args).keys()
    for op in host.ops():
        if (
            isinstance(op, (launch.Alloc, launch.View, launch.ListBlocks))
            or (isinstance(op, tile.Map) and not op.type.dims)
        ) and op.name not in refs:
            yield f"%{op.name} is read by nothing"


def _conditions(op: Op) -> list[Bool]:
    return [getattr(op, "where", sympy.true), *map(symbol, getattr(op, "type", Type("")).dims)]


RULES: dict[str, Rule] = {
    "host-structure": structure,
    "host-arguments": arguments,
    "host-defined": defined,
    "host-types": types,
    "host-launches": launches,
    "host-dependent-launch": host_dependent_launch,
    "host-written": written,
    "host-read": read,
}


def reasons(module: Module) -> Iterator[tuple[str, str]]:
    """Yield (rule, reason) for each violation of the first rule that a host program breaks."""
    for host in module.hosts:
        for name, rule in RULES.items():
            broken = [f"host @{host.name}: {reason}" for reason in rule(module, host)]
            yield from ((name, reason) for reason in broken)
            if broken:
                break
    launched = {op.kernel for host in module.hosts for op in only(host.ops(), launch.Launch)}
    for kernel in module.kernels:
        if module.hosts and kernel.name not in launched:
            yield "host-launches", f"no host program launches @{kernel.name}"
