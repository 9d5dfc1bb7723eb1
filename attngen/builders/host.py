"""The host programs as IR: what a call allocates, launches and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from attngen.builders.signature import parts_of
from attngen.heuristics import FUSED_HEADS, FUSED_KEYS, FUSED_LISTED, FUSED_ROWS, FUSED_SHORT, SPLIT_KEYS
from attngen.ir.expr import LARGEST, Bool, Expr, divisor, exp2, floordiv, log2, select, symbol
from attngen.ir.graph import Blocks, Input, Kernel, Learned, Module
from attngen.ir.host import Alloc, CutBlocks, Host, If, Launch, ListBlocks, Place, Sum, SumDistances, View
from attngen.ir.names import DROPOUT_SCALARS, FLAT, LSE, OUTPUTS, PAIRS, SHAPES, block_lists, tensor_dtype
from attngen.ir.ops import Arg, Base, Block, Gather, Load, Map, Mask, Op, Type, Uses, Yield
from attngen.ir.split_axes import sharing
from attngen.spec import Spec
from attngen.tiles.launches import rows_are_aligned

NEED_Q, NEED_KV, NEED_INPUTS = map(symbol, ("need_q", "need_kv", "need_inputs"))
_ROWS = ("B", "Hq", "Nq")


class Way(NamedTuple):
    """A way to compute the forward that some calls take, with kernels of its own. Each is in a file of its own, such as
    packed.py.

    name: that of the `if` in @forward; `where` is its condition, under which a call takes this way, `then` and `orelse`
    are its blocks.
    applies: whether modules of a spec have it; `kernels`: those that they have for it.
    launch: adds the ops of the block `then`, which compute %O, %LSE and the module's other outputs.
    """

    name: str
    where: Bool
    then: str
    orelse: str
    applies: Callable[[Spec], bool]
    kernels: Callable[[Spec], tuple[Kernel, ...]]
    launch: Callable[[HostBuilder, str, Module], None]


def build_hosts(module: Module, ways: Iterable[Way], trains: bool) -> Module:
    """The module with the host programs that launch its kernels; `trains` says whether those of the backward are among
    them.

    A call takes the first of the `ways` to compute the forward that is for it.
    """
    data = module.blocks is not None and module.blocks.data
    programs = [_forward(module, ways), *([_backward(module), _jvp(module)] if trains else [])]
    programs += [_key_mass(module)] if "key_mass" in module.outputs else []
    if module.blocks:
        programs += (
            [_count(module, module.blocks), _lists(module.blocks, True)] if data else [_lists(module.blocks, False)]
        )
    return replace(module, hosts=tuple(programs))


class HostBuilder:
    """Collects the ops of one host program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[str, list[Op]] = {"entry": []}

    def add(self, op: Op, block: str = "entry") -> str:
        self.blocks.setdefault(block, []).append(op)
        return op.name

    def tensor(self, name: str) -> str:
        """An argument of a known name and shape."""
        return self.add(Arg(name, "in", known_type(name)))

    def type_of(self, name: str) -> Type:
        """The type of what has a name in the program."""
        return next(op.results()[""] for ops in self.blocks.values() for op in ops if op.name == name)

    def alloc(self, name: str, block: str = "entry", type_: Type | None = None, **options: Any) -> str:
        return self.add(Alloc(name, type_ or known_type(name), **options), block)

    def launch(self, kernel: str, block: str, args: Uses = (), **sizes: Any) -> None:
        given = tuple((size, sympy.sympify(value)) for size, value in sizes.items())
        self.add(Launch(f"launch_{self._count()}", kernel, args, given), block)

    def branch(self, name: str, then: str, block: str = "entry", **options: Any) -> None:
        self.add(If(name, then, **options), block)

    def give(self, block: str = "entry", **values: str) -> None:
        self.add(Yield(f"yield_{self._count()}", tuple(values.items())), block)

    def _count(self) -> int:
        return sum(map(len, self.blocks.values()))

    def host(self) -> Host:
        return Host(self.name, tuple(Block(name, tuple(ops)) for name, ops in self.blocks.items()))


def known_type(name: str) -> Type:
    """The type of a tensor that has one in every module."""
    return Type(tensor_dtype(name), SHAPES[name], "hbm")


def split_columns(b: HostBuilder, block: str, source: str, argument: str, named: str = "") -> Uses:
    """Views of a tensor's columns, those of the latent and those that are rotated, as a kernel's arguments that are
    named after `argument`.

    named: the start of the views' names, if they are not named after the argument.
    """
    name, seen = named or argument, b.type_of(source)
    views = {"latent": ("first_columns", "D_V", ""), "rope": ("last_columns", "D_ROPE", "_ROPE")}
    stem, new = argument.removesuffix("_NEW"), "_NEW" * argument.endswith("_NEW")
    given = []
    for part, (by, width, suffix) in views.items():
        ref = b.add(View(f"{name}_{part}", source, by, Type(seen.dtype, (*seen.dims[:-1], width), "hbm")), block)
        given.append((f"{stem}{suffix}{new}", ref))
    return tuple(given)


def operands(b: HostBuilder, module: Module, direction: str) -> None:
    """The arguments after q, k and v: what mask, modifiers and dropout read, block lists and numbers.

    Lists that are the same for all sequences or heads are repeated for these. Where keys are in a cache, in the
    direction `decode`, one of each key has room for all keys that a sequence may have. In the direction `key_mass` they
    are those of this kernel, which drops nothing.
    """
    alone = direction == "key_mass"
    kernels = [module.kernel(direction)] if alone else module.kernels
    read = {a.name.lower() for kernel in kernels for a in kernel.args}
    given = {i.name: (i.dtype, i.shape) for i in module.inputs if i.shape and i.name in read}
    derived = [d for d in module.derived if not (d.program and direction == "decode")]  # programs are part of @decode
    given |= {
        name: (d.dtype, shape) for d in derived for name, shape in zip(d.names, d.shapes) if not alone or name in read
    }
    for name, (dtype, dims) in given.items():
        shape = tuple("Nc" if d == "Nk" and direction == "decode" else d for d in dims)
        b.add(Arg(name.upper(), "in", Type(dtype, shape, "hbm")))
    lists = {own: block_lists(own, module.blocks.data) if module.blocks else {} for own in ("q", "kv")}
    walked = {"forward": ("q",), "jvp": ("q",), "key_mass": ("kv",)}.get(direction, ("q", "kv"))
    for own in walked if alone else lists:
        for name, dims in lists[own].items():
            b.add(Arg(name.lower(), "in", Type("i32", ("*", "*", *dims[2:]), "hbm")))
    drops = module.dropout and not alone
    if drops:
        b.add(Arg("SEED", "in", Type("i64", (), "hbm")))
    numbers = {i.name: i.dtype for i in module.inputs if not i.shape and (not alone or i.name in read)} | (
        DROPOUT_SCALARS if drops else {}
    )
    for name, dtype in (numbers | {"scale": "f32"}).items():
        b.add(Arg(name, "scalar", Type(dtype, (), "reg")))
    for own in walked:
        for name, dims in lists[own].items():
            b.add(View(name, name.lower(), "expand", Type("i32", dims, "hbm")))


def _forward(module: Module, ways: Iterable[Way]) -> Host:
    """The output, the LSE, and what else the module gives of each query."""
    b = HostBuilder("forward")
    for name in ("Q", "K", "V"):
        b.tensor(name)
    operands(b, module, "forward")
    b.alloc("O", like="Q")
    for name in module.row_tensors:
        b.alloc(name)
    b.branch("Launched", "launches", of=("O",))
    b.give(O="O", **{name: name for name in module.row_tensors})
    block = "launches"
    for way in ways:
        b.branch(way.name, way.then, block, where=way.where, orelse=way.orelse)
        way.launch(b, way.then, module)
        block = way.orelse
    if module.order == "kv_outer":
        b.alloc("O_ACC", block, fill=sympy.Integer(0))
        b.alloc("ROW_MAX", block, fill=-sympy.oo)
        b.alloc("ROW_SUM", block, fill=sympy.Integer(0))
        b.launch("fwd", block)
        b.launch("fwd_end", block)
    else:
        args = (*split_columns(b, block, "Q", "Q"), *split_columns(b, block, "K", "K")) if module.rope else ()
        b.launch("fwd", block, args)
    return b.host()


def _jvp(module: Module) -> Host:
    """The tangents of the output and of the rows' numbers that have gradients, from those of q, k, v and learned
    inputs."""
    b = HostBuilder("jvp")
    kernel = module.kernel("jvp")
    own = [arg.name for arg in kernel.args if arg.role == "in" and arg.name in SHAPES]
    for name in own:
        b.tensor(name)
    operands(b, module, "jvp")
    for i in module.inputs:
        if i.grad:
            b.add(Arg(f"t{i.name.upper()}", "in", Type(i.dtype, i.shape, "hbm")))
    written = [arg.name for arg in kernel.args if arg.role == "out"]
    for name in written:
        b.alloc(name, like="Q" if name == "tO" else None)
    b.branch("Launched", "launches", of=("tO",))
    b.give(**{name: name for name in written})
    b.launch("jvp", "launches")
    return b.host()


def _key_mass(module: Module) -> Host:
    """The weight that all queries give each key."""
    b = HostBuilder("key_mass")
    for name in ("Q", "K", *module.sums):
        b.tensor(name)
    operands(b, module, "key_mass")
    b.alloc("KEY_MASS")
    b.branch("Launched", "launches", of=("KEY_MASS",))
    b.give(KEY_MASS="KEY_MASS")
    b.launch("key_mass", "launches")
    return b.host()


def _backward(module: Module) -> Host:
    """The gradients of q, k, v and learned inputs. A gradient that is not needed has no elements."""
    b = HostBuilder("backward")
    smooth = [OUTPUTS[name] for name in module.by_query if name not in FLAT]
    for name in ("dO", *(f"d{output}" for output in smooth), "Q", "K", "V", "O", *module.kept):
        b.tensor(name)
    operands(b, module, "backward")
    flags = ["need_q", "need_kv", *(["need_inputs"] if module.learned else [])]
    for flag in flags:
        b.add(Arg(flag, "flag", Type("b1", (), "reg")))
    summed = any(x.by != "row" for x in module.learned)
    b.alloc("dQ", like="Q", where=sympy.Or(NEED_Q, NEED_INPUTS) if summed else NEED_Q)
    walks = module.order == "kv_outer"
    for name in ("K", "V"):
        b.alloc(f"d{name}", like=name, where=sympy.true if walks else NEED_KV)
    covered = {x.parts for x in module.learned if module.covers(x)}
    for arg in parts_of(module.learned, module.inputs):
        fill = None if arg.name in covered else sympy.Integer(0)  # elements that no program writes are zero
        b.alloc(arg.name, type_=replace(arg.type, space="hbm"), where=NEED_INPUTS, fill=fill)
    b.alloc("DELTA")
    if module.sums == LSE:
        b.alloc("LSE2")
    if "entropy" in module.outputs:
        b.alloc("DENTROPY2")
    shared = any(sharing(kernel.grid) for kernel in module.kernels)
    if walks:
        _launch_by_key(b, module)
    elif fused := next((kernel for kernel in module.kernels if kernel.adds), None):
        wanted = sympy.And(NEED_Q, NEED_KV, sympy.Gt(symbol("fused"), 0), _many_keys(module))
        if fused.reads_pairs:
            wanted = sympy.And(wanted, rows_are_aligned())
        limited = None
        if sharing(fused.grid):
            b.add(Map("in_one_pass", select(wanted, sympy.Integer(1), sympy.Integer(0)), (), Type("i32", (), "reg")))
            limited = wanted = sympy.Gt(symbol("in_one_pass"), 0)
        if shared:
            b.add(Map("splits", _splits(limited), (), Type("i32", (), "reg")))
        b.branch("In_one_pass", "one_pass", where=wanted, orelse="apart")
        _launch_fused(b, module, fused)
        _launch_by_owner(b, module, "apart")
    else:
        if shared:
            b.add(Map("splits", _splits(None), (), Type("i32", (), "reg")))
        _launch_by_owner(b, module)
    results = {"dQ": "dQ", "dK": "dK", "dV": "dV"}
    if walks:  # @bwd always writes both
        b.branch("Needed", "both", where=NEED_KV, orelse="neither")
        b.give("both", dK="dK", dV="dV")
        for name in ("K", "V"):
            b.alloc(f"no_d{name}", "neither", known_type(f"d{name}"), like=name, where=sympy.false)
        b.give("neither", dK="no_dK", dV="no_dV")
        results |= {"dK": "Needed.dK", "dV": "Needed.dV"}
    b.give(**results, **_learned(b, module))
    return b.host()


def _launch_by_key(b: HostBuilder, module: Module) -> None:
    """FlashAttention-1's order: one kernel walks over the keys and rewrites sums of dQ."""
    b.branch("By_rows", "statistics", of=("O",))
    b.launch("delta", "statistics")
    b.branch("Walked", "keys", of=("dQ", "dK"))
    b.alloc("DQ_ACC", "keys", like=None, fill=sympy.Integer(0))
    b.launch("bwd", "keys")
    b.branch("Ended", "queries", "keys", of=("dQ",))
    b.launch("dq_end", "queries")


def _many_keys(module: Module) -> Bool:
    """Whether sequences are long, and each multiprocessor has several programs of key tiles: of few, most would wait
    for first turns.

    Of shorter sequences there are more. Where blocks are listed, programs wait for each other more: shorter sequences
    are left out there, and those that are too long.
    """
    batch, heads, queries, keys, processors = map(symbol, ("B", "Hq", "Nq", "Nk", "processors"))
    ways = [
        sympy.And(queries >= rows, keys >= rows, batch * heads * keys >= each * processors)
        for rows, each in ((FUSED_ROWS, FUSED_KEYS), FUSED_SHORT)
    ]
    return sympy.And(ways[0], keys <= FUSED_LISTED) if module.blocks else sympy.Or(*ways)


def _launch_fused(b: HostBuilder, module: Module, fused: Kernel) -> None:
    """One kernel for all gradients, whose sums of dQ a last one turns into the element type."""
    b.launch("delta", "one_pass")
    if sharing(fused.grid):
        b.add(Map(PAIRS, floordiv(symbol("splits") + 1, sympy.Integer(2)), (), Type("i32", (), "reg")), "one_pass")
    there = {"dK", "dV", *(x.parts for x in module.learned)}
    for arg in fused.args:
        if arg.name not in there and arg.role in ("out", "sum"):
            b.alloc(arg.name, "one_pass", like=None, fill=sympy.Integer(0) if arg.role == "sum" else None)
    if sharing(fused.grid):
        _launch_sharing(b, [fused], "one_pass", "heads", PAIRS)
    else:
        _launch_apart(b, fused)
    b.launch("dq_end", "one_pass")


def _launch_by_owner(b: HostBuilder, module: Module, block: str = "entry") -> None:
    """First the kernel that owns queries, which also computes what the others need of each query; then the kernels
    that own keys."""
    b.branch("By_query", "queries", block, of=("dQ",), orelse="statistics")
    b.launch("dq", "queries")
    b.branch("By_rows", "rows_alone", "statistics", of=("O",))
    b.launch("delta", "rows_alone")
    b.branch("By_key", "keys", block, of=("dK",))
    owners = [kernel for kernel in module.kernels if kernel.writes & {"dK", "dV"} and kernel.dots and not kernel.adds]
    if any(sharing(kernel.grid) for kernel in owners):
        _launch_sharing(b, owners, "keys", "parts")
    else:
        for kernel in owners:
            b.launch(kernel.name, "keys")


def _launch_sharing(b: HostBuilder, owners: Sequence[Kernel], block: str, what: str, of: str = "splits") -> None:
    """Kernels of which several programs share the query heads of a group. @dkdv_end sums what they write of dK and dV,
    if these are several parts.

    what: the name of what they write, which is different for each block; of: the number of parts.
    """
    parts, several = {}, sympy.Gt(symbol(of), 1)
    for name in ("dK", "dV"):
        batch, heads, *rest = known_type(name).dims
        parts[name] = b.alloc(
            f"{name}_{what}", block, Type("T", (batch, heads, of, *rest), "hbm"), where=several, otherwise=name
        )
    for kernel in owners:
        written = {a.name for a in kernel.args if a.role == "out"}
        b.launch(kernel.name, block, tuple((name, ref) for name, ref in parts.items() if name in written))
    b.branch(f"Summed_{what}", f"sum_{what}", block, where=several)
    sizes = {"splits": symbol(of)} if of != "splits" else {}
    b.launch("dkdv_end", f"sum_{what}", tuple((f"{name.upper()}_PARTS", ref) for name, ref in parts.items()), **sizes)


def _launch_apart(b: HostBuilder, fused: Kernel) -> None:
    """The kernel in one pass, of which each program has one query head. @dkdv_end sums what the programs of a group
    have of dK and dV."""
    apart = [arg for arg in fused.args if arg.name in ("dK", "dV") and arg.type.dims != known_type(arg.name).dims]
    heads = {
        arg.name: b.alloc(f"{arg.name.upper()}_HEADS", "one_pass", replace(arg.type, space="hbm")) for arg in apart
    }
    b.launch("bwd", "one_pass", tuple(heads.items()))
    for arg in apart:
        batch, _, *rest = arg.type.dims
        parts = Type("T", (batch, "Hkv", "group", *rest), "hbm")
        b.add(View(f"{arg.name.upper()}_PARTS", heads[arg.name], "heads", parts), "one_pass")
    if apart:
        b.launch("dkdv_end", "one_pass", splits=symbol("group"))


def _splits(wanted: Bool | None) -> Any:
    """How many programs share the query heads of a group: 1, unless each multiprocessor would have fewer than
    SPLIT_KEYS keys, counted over sequences and heads. It divides the group. In one pass, under the condition
    `wanted`, a program has FUSED_HEADS of them at most."""
    batch, heads, keys, group, processors = map(symbol, ("B", "Hkv", "Nk", "group", "processors"))
    most = floordiv(batch * heads * keys * group, SPLIT_KEYS * processors)  # query heads of one program
    limit = group if wanted is None else sympy.Min(group, select(wanted, sympy.Integer(FUSED_HEADS), group))
    return sympy.Max(
        1, floordiv(group, divisor(group, sympy.Min(limit, sympy.Max(1, most))))
    )  # a call may have no heads


# ---------------------------------------------------------------------------------------------- gradients of inputs


def _learned(b: HostBuilder, module: Module) -> dict[str, str]:
    """The gradients of inputs, summed from the parts that kernels have written; without elements if they are not
    needed."""
    learned = [i for i in module.inputs if i.grad]
    if not learned:
        return {}
    b.add(If("Learned", "gradients", where=NEED_INPUTS, orelse="no_gradients"))
    found = {f"d_{i.name}": _gradient(b, module, i) for i in learned}
    b.give("gradients", **found)
    for i in learned:
        b.alloc(f"no_{i.name}", "no_gradients", Type(i.dtype, i.shape, "hbm"), where=sympy.false)
    b.give("no_gradients", **{f"d_{i.name}": f"no_{i.name}" for i in learned})
    return {name: f"Learned.{name}" for name in found}


def _gradient(b: HostBuilder, module: Module, i: Input) -> str:
    terms = [_term(b, module, i, x, at) for at, x in enumerate(x for x in module.learned if x.input == i.name)]
    if len(terms) == 1:
        return terms[0]
    type_ = Type("f32", i.shape, "hbm")
    return b.add(Map(f"d_{i.name}", sympy.Add(*map(symbol, terms)), tuple((t, t) for t in terms), type_), "gradients")


def _term(b: HostBuilder, module: Module, i: Input, x: Learned, at: int) -> str:
    """The part of an input's gradient that comes from one of its reads."""
    name, tensor = f"{x.parts}_{at}", i.name.upper()
    kept = {"keep_scale": "keep_scale"} if module.dropout else {}
    if x.by == "element":
        return x.parts
    if x.by == "row":  # minus the sink's probability, times delta: its value is zero
        e, uses = _of_sink(symbol(i.name), module, kept)
        uses |= {i.name: tensor, "delta": "DELTA", **kept}
        b.add(Map(f"{i.name}_rows", e, tuple(uses.items()), Type("f32", _ROWS, "hbm")), "gradients")
        return b.add(Sum(f"{i.name}_sum", f"{i.name}_rows", ("B", "Nq"), Type("f32", ("Hq",), "hbm")), "gradients")
    if x.by == "distance":
        b.add(SumDistances(name, x.parts, tensor, x.index, Type("f32", i.shape, "hbm")), "gradients")
        if not kept:
            return name
        uses = {"sums": name, **kept}
        return b.add(
            Map(f"{name}_kept", sympy.Mul(*map(symbol, uses)), tuple(uses.items()), Type("f32", i.shape, "hbm")),
            "gradients",
        )
    return _sum_of_places(b, i, x, name)


def _of_sink(sink: Expr, module: Module, kept: Iterable[str]) -> tuple[Expr, dict[str, str]]:
    """The gradient of a sink by row, and what it reads besides the sink and DELTA. A row that sees no key may have
    an infinite LSE."""
    log2e = sympy.Float(1 / math.log(2))
    if module.sums == LSE:
        uses = {"lse": "LSE"}
        ln_p = sink - sympy.Max(symbol("lse"), -LARGEST)
        p, log2_p = (
            sympy.exp(ln_p),
            sympy.Max(ln_p, _NO_WEIGHT) * log2e,
        )  # a product of the difference: each term may overflow
    else:
        uses = {name.lower(): name for name in module.sums}
        log2_p = sympy.Max(sympy.Min(sink * log2e, LARGEST), -LARGEST) - symbol("m_all")
        p = exp2(log2_p) * symbol("inv_l_all")
        log2_p = sympy.Max(log2_p + log2(symbol("inv_l_all")), _NO_WEIGHT)
    less = symbol("delta")
    if "entropy" in module.outputs:
        uses |= {"dentropy2": "DENTROPY2"}
        less += symbol("dentropy2") * log2_p
    return -p * sympy.Mul(less, *map(symbol, kept)), uses


_NO_WEIGHT = -1024  # e or 2 to the power of this, and of less, is 0 in fp32
_DIMS = {"b": "B", "h": "Hq", "hkv": "Hkv", "q": "Nq", "kv": "Nk"}


def _sum_of_places(b: HostBuilder, i: Input, x: Learned, name: str) -> str:
    """Parts by query, by entry or by score, summed to the place at which the input is read."""
    dtype = i.dtype if x.by == "score" else "f32"
    entries = [size for size, e in zip(i.shape, x.index) if e == "entry"]
    value, dims = x.parts, ["B", "Hq", *entries, "Nq", *(["Nk"] if x.by == "score" else [])]
    if "hkv" in x.index:
        dims[1:2] = ["Hkv", "group"]
        value = b.add(View(f"{name}_heads", value, "heads", Type(dtype, tuple(dims), "hbm")), "gradients")
    wanted = tuple(_DIMS.get(e, size) for size, e in zip(i.shape, x.index) if not e.isdigit())
    over = tuple(d for d in dims if d not in wanted)
    if over or tuple(dims) != wanted:
        value = b.add(Sum(f"{name}_sum", value, over, Type(dtype, wanted, "hbm")), "gradients")
    if len(wanted) == len(x.index):
        return value
    places = tuple(e if e.isdigit() else ":" for e in x.index)
    return b.add(Place(f"{name}_placed", value, i.name.upper(), places, Type(dtype, i.shape, "hbm")), "gradients")


# ---------------------------------------------------------------------------------------------- blocks of scores


def _count(module: Module, blocks: Blocks) -> Host:
    """The number of visible pairs in each strip of a block. If the mask is the same for all sequences, or all heads,
    it is counted once."""
    kernel = module.kernel("blocks")
    b = HostBuilder("count")
    for name in ("Q", "K"):
        b.tensor(name)
    for arg in kernel.args:
        if arg.role == "in":
            b.add(Arg(arg.name, "in", replace(arg.type, space="hbm")))
    for i in module.inputs:
        if not i.shape and any(a.name == i.name for a in kernel.args):
            b.add(Arg(i.name, "scalar", Type(i.dtype, (), "reg")))
    one = {size: sympy.Integer(1) for size, letter in (("B", "b"), ("Hq", "h")) if not _depends(kernel, letter)}
    dims = tuple("1" if d in one else d for d in known_type("COUNT").dims)
    b.alloc("COUNT", type_=Type("f32", dims, "hbm"), fill=sympy.Integer(0))
    b.branch("Launched", "launches", of=("COUNT",))
    b.launch("blocks", "launches", **one)
    b.give(COUNT="COUNT")
    return b.host()


def _depends(kernel: Kernel, letter: str) -> bool:
    """Whether the mask that a kernel evaluates depends on the sequence (`b`) or on the head (`h`)."""
    written = {a.name for a in kernel.args if a.role == "out"}
    for op in kernel.ops():
        if isinstance(op, (Base, Load)) and op.src.tensor not in written:
            places: tuple[Any, ...] = op.src.index
        elif isinstance(op, Gather):
            places = (*op.src.index, op.where)
        elif isinstance(op, Mask):
            places = (op.where,)
        else:
            places = (op.expr,) if isinstance(op, Map) else ()
        if any(symbol(letter) in e.free_symbols for e in places):
            return True
    return False


def _lists(blocks: Blocks, data: bool) -> Host:
    """The lists of blocks, made from the result of @count or from a mask of blocks."""
    b = HostBuilder("lists")
    mask, full = "BLOCK_MASK", None
    if data:
        for name in ("Q", "K"):
            b.tensor(name)
        b.add(Arg("COUNT", "in", Type("f32", ("*", "*", "Tq", "Ts"), "hbm")))
        b.add(CutBlocks("blocks", "COUNT", Type("b1", ("*", "*", "Tq", "Tk"), "hbm")))
        mask, full = "blocks.seen", "blocks.full"
    else:
        b.add(Arg(mask, "in", Type("b1", ("*", "*", "Tq", "Tk"), "hbm")))
    results: dict[str, str] = {}
    for own, (rows, columns) in (("q", ("Tq", "Tk")), ("kv", ("Tk", "Tq"))):
        b.add(ListBlocks(f"of_{own}", mask, own, Type("i32", ("*", "*", rows, columns), "hbm"), full))
        fields = ("full_rank", "rank", "list") if data else ("rank", "list")
        results |= {name: f"of_{own}.{f}" for name, f in zip(block_lists(own, blocks.data), fields)}
    b.give(**results)
    return b.host()
