"""Rules of host programs.

A kernel gets the arguments that it declares. Nothing is read before it is written. Every branch leaves the results
defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sympy

from attngen.ir.expr import Bool, cdiv, conjuncts, select, symbol, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.host import COLUMNS, Alloc, Copy, Host, If, Launch, ListBlocks, Sum, View
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
    tensor_dtype,
)
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, OWN, TENSORS, WHOLE, Arg, Map, Op, Scatter, Type, Yield, dimension
from attngen.ir.prove import prove_le
from attngen.ir.split_kv import least_items
from attngen.tiles.launches import rows_are_aligned
from attngen.verify.dependent_launch import overlaps

Rule = Callable[[Module, Host], Iterator[str]]
POSITIVE = {name for name, n in INTEGERS.items() if n.least and not n.source}  # that are never 0, whatever a call gives
GRADIENTS = ("dQ", "dK", "dV")


def structure(module: Module, host: Host) -> Iterator[str]:
    """Each block but @entry is a branch of one `if`. Yields come last. A program gives the results that its callers
    expect."""
    blocks = [b.name for b in host.blocks]
    if "entry" not in blocks:
        yield "no block @entry"
        return
    branches = [name for op in host.ops() if isinstance(op, If) for name in (op.then, op.orelse) if name]
    for name in dict.fromkeys([*blocks, *branches]):
        if blocks.count(name) != 1 or branches.count(name) != (name != "entry"):
            yield f"@{name} is not the branch of one `if`; only @entry is no branch"
    for block in host.blocks:
        for op in block.ops:
            if isinstance(op, Yield) and op is not block.ops[-1]:
                yield f"@{block.name} yields before its end"
            if isinstance(op, Arg) and (block.name != "entry" or op.role not in ("in", "scalar", "flag")):
                yield f"%{op.name} is an argument `{op.role}` of @{block.name}; expected in, scalar or flag, of @entry"
    learned = tuple(f"d_{i.name}" for i in module.inputs if i.grad) if host.name == "backward" else ()
    derived = tuple(name.upper() for d in module.derived if d.program == host.name for name in d.names)
    smooth = (OUTPUTS.get(name, name) for name in module.by_query if name not in FLAT)
    results = {"forward": ("O", *module.row_tensors), "backward": GRADIENTS, "key_mass": ("KEY_MASS",)}
    results |= {"jvp": ("tO", *(f"t{name}" for name in smooth))}
    expected = (*results.get(host.name, derived), *learned)
    if expected and tuple(host.results) != expected:
        yield f"it gives {', '.join(host.results) or 'nothing'}; expected {', '.join(expected)}"


def defined(module: Module, host: Host) -> Iterator[str]:
    """A value is defined before it is read, in the same block or in one around it. Both branches of an `if` yield
    the same fields."""

    sizes = host.sizes

    def walk(block: str, known: set[str]) -> Iterator[str]:
        here = set(known)
        for op in host.block(block).ops:
            for ref in (*op.operands(), *_named(op, sizes)):
                if ref not in here:
                    yield f"%{op.name} reads %{ref} where it is not defined"
            if isinstance(op, If):
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
    known |= {name: (tensor_dtype(name), shape) for name, shape in SHAPES.items()}
    known |= {name: ("f32", module.cache.scales) for name in SCALES.values() if module.cache}
    known |= {name: (dtype, ()) for name, dtype in (SCALARS | DROPOUT_SCALARS).items()}
    for arg in host.args:
        dtype, dims = known.get(arg.name, (arg.type.dtype, arg.type.dims))
        if arg.name != "COUNT" and (arg.type.dtype, arg.type.dims) != (dtype, dims):
            yield f"%{arg.name} is {arg.type.dtype}[{', '.join(arg.type.dims)}]; expected {dtype}[{', '.join(dims)}]"
    made = {
        name: (d.dtype, shape)
        for d in module.derived
        if d.program == host.name
        for name, shape in zip(d.names, d.shapes)
    }
    for name, ref in host.results.items() if made else ():
        have, (dtype, dims) = host.type_of(ref), made[name.lower()]
        if (have.dtype, have.dims) != (dtype, dims):
            yield f"its result {name} is {have.dtype}[{', '.join(have.dims)}]; expected {dtype}[{', '.join(dims)}], as `derive` says"
    own = (
        {arg.name.lower() for arg in host.args} if made else given.keys()
    )  # the variables of a program that `derive` names
    if host.name == "decode":  # it makes itself what programs give elsewhere
        made = {name: known[name.upper()] for d in module.derived if d.program for name in d.names}
        for op in host.ops():
            dtype, dims = made.get(op.name.lower(), ("", ()))
            if isinstance(op, Alloc) and dtype and (op.type.dtype, op.type.dims) != (dtype, dims):
                yield f"%{op.name} is {op.type.dtype}[{', '.join(op.type.dims)}]; expected {dtype}[{', '.join(dims)}], as `derive` says"
    for op in host.ops():
        if not isinstance(op, (Arg, If, Launch, Copy, Yield)) and op.name.lower() in (given.keys() & own) - made.keys():
            yield f"%{op.name} and the input `{op.name.lower()}` are one variable in Python; expected another name for one of them"


def _named(op: Op, sizes: set[str]) -> list[str]:
    """The scalars that an op's expressions and dimensions name, without the `sizes` of the call."""
    where = getattr(op, "where", sympy.true)
    number = [op.expr] if isinstance(op, Map) and not op.type.dims else []
    names = {str(s) for e in (where, *number, *(e for _, e in getattr(op, "sizes", ()))) for s in e.free_symbols}
    return sorted((names - FOUND.keys() - sizes) | (set(SHARES.values()) & set(getattr(op, "type", Type("")).dims)))


def _yielded(host: Host, block: str) -> dict[str, Type]:
    last = host.block(block).ops[-1:] if block else ()
    return {f: host.type_of(ref) for op in last if isinstance(op, Yield) for f, ref in op.values}


def _fields(fields: dict[str, Type]) -> str:
    return ", ".join(fields) or "nothing"


def _other(op: If) -> str:
    return f"@{op.orelse}" if op.orelse else "there is no other branch, which yields"


def types(module: Module, host: Host) -> Iterator[str]:
    """A view has the dimensions that its source's become, and a sum those that are left."""
    for op in host.ops():
        if isinstance(op, View):
            expected = _seen(op.by, host.type_of(op.src).dims, op.type.dims)
        elif isinstance(op, Sum):
            expected = tuple(d for d in host.type_of(op.value).dims if d not in op.over)
            expected = op.type.dims if sorted(expected) == sorted(op.type.dims) else expected  # in any order
        else:
            continue
        if op.type.dims != expected:
            yield f"%{op.name} is [{', '.join(op.type.dims)}]; expected [{', '.join(expected)}]"


def _seen(by: str, dims: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of a view of a tensor; those that it repeats may be any."""
    if by == "expand":
        return tuple(w if d == "*" else d for d, w in zip(dims, wanted))
    if by == "heads":
        return tuple(x for d in dims for x in (("Hkv", "group") if d == "Hq" else (d,)))
    if by in COLUMNS:
        return (*dims[:-1], COLUMNS[by]) if dims[-1] == "D_QK" else dims
    return tuple({"Hq": "Hkv", "Nq": "Gq"}.get(d, d) for d in dims)


def launches(module: Module, host: Host) -> Iterator[str]:
    """Each argument of a kernel is a value of the host, of the type that the kernel declares. The kernel's grid is over
    known sizes.

    A kernel in one pass that reads numbers of scores is launched if the copy engine can read and write these.
    """
    kernels = {kernel.name: kernel for kernel in module.kernels}
    apart = {name for name, kernel in kernels.items() if kernel.adds and kernel.reads_pairs}
    aligned = [op.then for op in host.ops() if isinstance(op, If) and rows_are_aligned() in _said(host, op.where)]
    for op in host.ops():
        if not isinstance(op, Launch):
            continue
        if op.kernel not in kernels:
            yield f"it launches @{op.kernel}; the kernels are {', '.join(kernels)}"
            continue
        kernel, given = kernels[op.kernel], dict(op.args)
        if op.kernel in apart and not any(op in host.block(name).ops for name in aligned):
            yield f"launch @{op.kernel}: it reads a number for each score; expected `{to_text(rows_are_aligned())}` around it"
        refs = [given.get(arg.name, arg.name) for arg in kernel.args]
        for arg, ref in zip(kernel.args, refs):
            if arg.role in TENSORS[1:] and refs.count(ref) > 1:
                yield f"launch @{op.kernel}: %{ref} is given for %{arg.name}, which is written, and for another argument"
        for arg in kernel.args:
            yield from (
                f"launch @{op.kernel}: {reason}" for reason in _argument(host, op, arg, given.pop(arg.name, arg.name))
            )
        for name in given:
            yield f"launch @{op.kernel}: it has no argument %{name}"
        yield from (f"launch @{op.kernel}: {reason}" for reason in _room(module, host, op, kernel))
        yield from (f"launch @{op.kernel}: {reason}" for reason in _items(host, op, kernel))
        yield from _grid(host, op, kernel)
    yield from _split_alike(kernels, host)


def _room(module: Module, host: Host, op: Launch, kernel: Kernel) -> Iterator[str]:
    """A sequence has room for as many keys as its pages have rows."""
    if module.cache is None or not module.cache.page or not any(arg.name == "PAGE_TABLE" for arg in kernel.args):
        return
    rooms = [o.expr for o in host.ops() if isinstance(o, Map) and o.name == "Nc"]
    expected = symbol("max_pages") * dimension(module.cache.page)
    if rooms != [expected] or "Nc" in dict(op.sizes):
        yield f"a sequence has room for {', '.join(map(to_text, rooms)) or 'nothing known'}; expected `Nc`, {to_text(expected)}"


def _items(host: Host, op: Launch, kernel: Kernel) -> Iterator[str]:
    """There is room for all parts into which keys may be dealt."""
    if kernel.kv_split is None:
        return
    items = next((o.expr for o in host.ops() if isinstance(o, Map) and o.name == "items"), symbol("items"))
    least = least_items(kernel.kv_split.each)
    if "items" in dict(op.sizes) or not prove_le(least, items):
        yield f"there is room for {to_text(items)} parts, and keys are dealt into {to_text(least)} at most"


def _split_alike(kernels: dict[str, Kernel], host: Host) -> Iterator[str]:
    """Kernels with parts of the same keys find the same parts: they get the same numbers, and the same tensors to
    read them in."""
    launches = [
        op for op in host.ops() if isinstance(op, Launch) and op.kernel in kernels and kernels[op.kernel].kv_split
    ]
    by = {
        name for op in launches for arg in kernels[op.kernel].args for name in (arg.name,) if arg.role == "scalar"
    } - {"scale"}
    by |= {
        "CACHE_SEQLENS",
        *(at.tensor for op in launches if (kv_split := kernels[op.kernel].kv_split) for _, at in kv_split.reads),
    }
    given = {op.kernel: {name: e for name, e in (*op.sizes, *op.args) if name in by} for op in launches}
    if len({tuple(sorted(sizes.items(), key=str)) for sizes in given.values()}) > 1:
        names = " and ".join(f"@{name}" for name in given)
        yield f"it gives {names} other sizes or tensors; expected the same, as they have parts of the same keys"


def _said(host: Host, where: Bool) -> set[Bool]:
    """The conditions that hold where one does; where a number is positive, those under which it is not 0."""
    found = set(conjuncts(where))
    for op in host.ops():
        if (
            isinstance(op, Map)
            and isinstance(op.expr, select)
            and op.expr.args[2] == 0
            and (symbol(op.name) > 0) in found
        ):
            found |= set(conjuncts(op.expr.args[0]))
    return found


def _argument(host: Host, op: Launch, arg: Arg, ref: str) -> Iterator[str]:
    sizes = dict(op.sizes)
    if arg.role == "scalar" and arg.name in (FOUND.keys() | sizes.keys() | host.sizes):
        return
    if ref.partition(".")[0] not in host.by_name:
        yield f"%{arg.name} is neither given nor allocated"
        return
    have = host.type_of(ref)
    dims = tuple(to_text(sizes[d]) if d in sizes else d for d in arg.type.dims)
    if (have.dtype, have.dims) != (arg.type.dtype, dims):
        expected, found = (f"{t}[{', '.join(d)}]" for t, d in ((arg.type.dtype, dims), (have.dtype, have.dims)))
        yield f"%{ref} is {found}; expected {expected} for %{arg.name}"


def _grid(host: Host, op: Launch, kernel: Kernel) -> Iterator[str]:
    """There is a program for each tile of the kernel's own axis, unless programs walk over tiles; and for each head,
    split and sequence.

    Of keys in a cache, there is one for each tile of those for which a sequence has room: no grid depends on lengths.
    """
    own = kernel.program_axis
    tiles = cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))
    expected = {own: tiles} | {
        axis: dimension(size) for axis, size in AXES.items() if size.isdigit() or INTEGERS[size].is_("dim")
    }
    expected |= {axis: cdiv(symbol(WHOLE[dim]), symbol(dim)) for axis, dim in OWN.items()}
    expected |= {"part": symbol("parts")} if kernel.kv_split else {}
    expected |= {"kv": cdiv(symbol("Nc"), symbol("BLOCK_KV"))} if own == "kv" and kernel.reads_cache else {}
    for at, axis in enumerate(kernel.grid):
        if axis.extent != expected.get(axis.var) or (axis.var == own) != (at == 0 and not kernel.walks):
            known = ", ".join(f"{var} in {to_text(e)}" for var, e in expected.items())
            yield f"launch @{op.kernel}: its grid has {axis.var} in {to_text(axis.extent)}; expected some of {known}, tiles first"
    for axis in kernel.grid:
        size = AXES.get(axis.var, "")
        split = axis.var == "part" and kernel.kv_split is not None  # the device finds how many
        if (
            size
            and not split
            and not size.isdigit()
            and size not in (FOUND.keys() | host.sizes)
            and size not in host.by_name
        ):
            yield f"launch @{op.kernel}: its grid has {axis.var}, and nothing says how many {size} there are"


def written(module: Module, host: Host) -> Iterator[str]:
    """On every path, a tensor is written before it is read. One without elements needs no writing.

    Gradients by score of which a mask leaves some out, and those that are added to at any element, are not written by
    the kernels alone.
    """
    yield from _Writes(module, host).reasons()


class _Writes:
    """Walks through a program and keeps the set of tensors that are written so far."""

    def __init__(self, module: Module, host: Host) -> None:
        self.host, self.kernels = host, {kernel.name: kernel for kernel in module.kernels}
        self.except_where: dict[str, Bool] = {}  # tensor -> condition; it is written unless the condition holds
        self.partial = {x.parts for x in module.learned if x.by in ("score", "element") and not module.covers(x)}
        self.found: list[str] = []

    def reasons(self) -> list[str]:
        done = self._block("entry", {op.name for op in self.host.args})
        for name, ref in self.host.results.items():
            if self._tensor(ref) not in done and not self._is_field(ref):
                self.found.append(f"its result {name} is not written on every path")
        return self.found

    def _is_field(self, ref: str) -> bool:
        return isinstance(self.host.by_name[ref.partition(".")[0]], If)

    def _tensor(self, ref: str) -> str:
        """The tensor whose elements a value has; for a view, its source."""
        op = self.host.by_name[ref.partition(".")[0]]
        return self._tensor(op.src) if isinstance(op, View) else op.name

    def _block(self, block: str, state: set[str]) -> set[str]:
        for op in self.host.block(block).ops:
            state = self._op(op, state)
        return state

    def _op(self, op: Op, state: set[str]) -> set[str]:
        match op:
            case Alloc():
                return state | {op.name} if op.fill is not None or op.where == sympy.false else state
            case If():
                return self._if(op, state)
            case Launch() if op.kernel in self.kernels:
                return self._launch(op, state)
            case Copy():
                return state | {op.into} if op.src in state else state
            case View():
                return state
        reads = (
            [ref for _, ref in op.values if not self._is_field(ref)] if isinstance(op, Yield) else list(op.operands())
        )
        for ref in reads:
            self._read(op.name, ref, state)
        return state | {op.name}

    def _read(self, reader: str, ref: str, state: set[str]) -> None:
        name = self._tensor(ref)
        if not {name, ref.partition(".")[0]} & state:
            self.found.append(f"{reader} reads %{ref}, which is not written on every path to it")

    def _launch(self, op: Launch, state: set[str]) -> set[str]:
        given = dict(op.args)
        args = self.kernels[op.kernel].args
        moved = {
            op.dst.tensor for op in self.kernels[op.kernel].ops() if isinstance(op, Scatter) and op.op in ("min", "max")
        }
        for arg in args:
            if arg.role in ("in", "inout", "sum") or (arg.role == "out" and arg.name in moved):
                self._read(f"@{op.kernel}", given.get(arg.name, arg.name), state)
        for arg in args:
            if arg.role in ("out", "inout", "sum") and arg.name not in self.partial:
                state = state | self._write(given.get(arg.name, arg.name))
        return state

    def _write(self, ref: str) -> set[str]:
        """The tensors that are written when a kernel writes to a value."""
        op = self.host.by_name.get(ref)
        if isinstance(op, View):
            source = self.host.by_name[op.src]
            contiguous = isinstance(source, Alloc) and not source.like
            return (
                {ref, op.src} if contiguous else {ref}
            )  # a view of another layout may be a new tensor; `copy` writes it back
        if isinstance(op, Alloc) and op.otherwise:
            self.except_where[op.otherwise] = op.where
        return {ref}

    def _if(self, op: If, state: set[str]) -> set[str]:
        inside = self._block(op.then, state)
        if (
            op.where != sympy.true and not op.of
        ):  # tensors that are written unless this condition holds; then the branch writes them
            inside_all = {name for name, where in self.except_where.items() if where == op.where and name in inside}
            state = state | inside_all
        outside = state | (self._empty(op.of) if op.where == sympy.true else set())
        outside = self._block(op.orelse, outside) if op.orelse else outside
        return (inside & outside) | state | {op.name}

    def _empty(self, tensors: tuple[str, ...]) -> set[str]:
        """The tensors that are empty whenever all of these are."""
        found = set(tensors)
        for name in tensors:
            dims, where = self._extent(name)
            for other in (op.name for op in self.host.ops() if isinstance(op, Alloc)):
                more, when = self._extent(other)
                if dims <= more and (where in (sympy.true, when) or when in sympy.Or.make_args(where)):
                    found.add(other)
        return found

    def _extent(self, name: str) -> tuple[set[str], Bool]:
        """The dimensions of a tensor that may be 0, and the condition of its allocation."""
        op = self.host.by_name[name]
        return set(self.host.type_of(name).dims) - POSITIVE, op.where if isinstance(op, Alloc) else sympy.true


def read(module: Module, host: Host) -> Iterator[str]:
    """Everything that is made is read, by an op, by a kernel or as a result."""
    refs = {ref.partition(".")[0] for op in host.ops() for ref in op.operands()}
    refs |= {str(s) for op in host.ops() for e in _conditions(op) for s in e.free_symbols}
    kernels = {kernel.name: kernel for kernel in module.kernels}
    for op in host.ops():
        if isinstance(op, Launch) and op.kernel in kernels:
            refs |= {arg.name for arg in kernels[op.kernel].args} - dict(op.args).keys()
    for op in host.ops():
        if (
            isinstance(op, (Alloc, View, ListBlocks)) or (isinstance(op, Map) and not op.type.dims)
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
    "host-overlaps": overlaps,
    "host-written": written,
    "host-read": read,
}


def reasons(module: Module) -> Iterator[tuple[str, str]]:
    """(rule, reason) for each violation. For each program, only the first rule that it breaks."""
    for host in module.hosts:
        for name, rule in RULES.items():
            broken = [f"host @{host.name}: {reason}" for reason in rule(module, host)]
            yield from ((name, reason) for reason in broken)
            if broken:
                break
    launched = {op.kernel for host in module.hosts for op in host.ops() if isinstance(op, Launch)}
    for kernel in module.kernels:
        if module.hosts and kernel.name not in launched:
            yield "host-launches", f"no host program launches @{kernel.name}"
