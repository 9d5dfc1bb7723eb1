"""Host programs as IR: the tensors that a call allocates, the kernels that it launches, and the sums that it
computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from attngen.builders.host_blocks import build_count, build_lists
from attngen.builders.host_builder import HostBuilder, known_type, operands, split_columns
from attngen.builders.host_input_gradients import NEED_INPUTS, sum_input_gradients
from attngen.builders.positions import of_call, of_whole_type
from attngen.builders.signature import partial_tensors
from attngen.heuristics import FUSED_HEADS, FUSED_KEYS, FUSED_LISTED, FUSED_ROWS, FUSED_SHORT, SPLIT_KEYS
from attngen.ir import Bool, Host, Kernel, Module, Type, divisor, floordiv, launch, select, symbol, tile
from attngen.ir.names import FLAT, LSE, OUTPUTS, PAIRS, SHAPES, WHOLE_LENGTHS
from attngen.ir.split_axes import sharing
from attngen.spec import Spec
from attngen.tiles.launches import rows_are_aligned

NEED_Q, NEED_KV = symbol("need_q"), symbol("need_kv")


class ForwardVariant(NamedTuple):
    """A variant of the forward that some calls take, with separate kernels. Each is in its own file, such as
    pack_gqa.py.

    name: the name of the `if` in @forward.
    where: its condition, under which a call takes this variant.
    then, orelse: its blocks.
    applies: whether a spec's module has the variant.
    kernels: its kernels for a spec.
    launch: adds the ops of the block `then`, which compute %O, %LSE and the module's other outputs.
    """

    name: str
    where: Bool
    then: str
    orelse: str
    applies: Callable[[Spec], bool]
    kernels: Callable[[Spec], tuple[Kernel, ...]]
    launch: Callable[[HostBuilder, str, Module], None]


def build_hosts(module: Module, variants: Iterable[ForwardVariant], trains: bool) -> Module:
    """The module with the host programs that launch its kernels; those of the backward only if it `trains`.

    A call takes the first of the forward `variants` whose condition holds.
    """
    data = module.blocks is not None and module.blocks.data
    programs = [_forward(module, variants), *([_backward(module)] if trains else [])]
    programs += [_jvp(module)] if any(kernel.name == "jvp" for kernel in module.kernels) else []
    programs += [_key_mass(module)] if "key_mass" in module.outputs else []
    if module.blocks:
        programs += [build_count(module, module.blocks)] if data else []
        programs += [build_lists(module.blocks, data)]
    return replace(module, hosts=tuple(programs))


def _forward(module: Module, variants: Iterable[ForwardVariant]) -> Host:
    """Build `forward`: the output, the LSE, and the module's other outputs per query."""
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
    for variant in variants:
        b.branch(variant.name, variant.then, block, where=variant.where, orelse=variant.orelse)
        variant.launch(b, variant.then, module)
        block = variant.orelse
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
    """Build `jvp`: the tangents of the output and of differentiable row outputs, from those of q, k, v and learned
    inputs."""
    b = HostBuilder("jvp")
    kernel = module.kernel("jvp")
    tensors = [arg.name for arg in kernel.args if arg.role == "in" and arg.name in SHAPES]
    for name in tensors:
        b.tensor(name)
    operands(b, module, "jvp")
    for i in module.inputs:
        if i.grad:
            b.add(tile.Arg(f"t{i.name.upper()}", "in", Type(i.dtype, i.shape, "hbm")))
    written = [arg.name for arg in kernel.args if arg.role == "out"]
    for name in written:
        b.alloc(name, like="Q" if name == "tO" else None)
    b.branch("Launched", "launches", of=("tO",))
    b.give(**{name: name for name in written})
    b.launch("jvp", "launches")
    return b.host()


def _key_mass(module: Module) -> Host:
    """Build `key_mass`: the weight that all queries give each key."""
    b = HostBuilder("key_mass")
    for name in ("Q", "K", *module.row_stats):
        b.tensor(name)
    operands(b, module, "key_mass")
    b.alloc("KEY_MASS")
    b.branch("Launched", "launches", of=("KEY_MASS",))
    b.give(KEY_MASS="KEY_MASS")
    b.launch("key_mass", "launches")
    return b.host()


def _backward(module: Module) -> Host:
    """Build `backward`: the gradients of q, k, v and learned inputs. A gradient that is not needed has no elements."""
    b = HostBuilder("backward")
    smooth = [OUTPUTS[name] for name in module.by_query if name not in FLAT]
    for name in ("dO", *(f"d{output}" for output in smooth), "Q", "K", "V", "O", *module.kept):
        b.tensor(name)
    operands(b, module, "backward")
    flags = ["need_q", "need_kv", *(["need_inputs"] if module.input_gradients else [])]
    for flag in flags:
        b.add(tile.Arg(flag, "flag", Type("b1", (), "reg")))
    summed = any(x.reduction != "delta" for x in module.input_gradients)
    b.alloc("dQ", like="Q", where=sympy.Or(NEED_Q, NEED_INPUTS) if summed else NEED_Q)
    kv_outer = module.order == "kv_outer"
    for name in ("K", "V"):
        b.alloc(f"d{name}", like=name, where=sympy.true if kv_outer else NEED_KV)
    covered = {x.partials for x in module.input_gradients if module.covers(x)}
    by_row = {x.partials for x in module.input_gradients if x.by_row}
    for arg in partial_tensors(module.input_gradients, module.inputs):
        fill = None if arg.name in covered else sympy.Integer(0)  # elements that no program writes are zero
        type_ = of_whole_type(arg.type) if module.chunk and arg.name not in by_row else arg.type
        b.alloc(arg.name, type_=replace(type_, space="hbm"), where=NEED_INPUTS, fill=fill)
    b.alloc("DELTA")
    if module.row_stats == LSE:
        b.alloc("LSE2")
    if "entropy" in module.outputs:
        b.alloc("DENTROPY2")
    shared = any(sharing(kernel.grid) for kernel in module.kernels)
    if kv_outer:
        _launch_by_key(b, module)
    elif fused := next((kernel for kernel in module.kernels if kernel.traits.adds_in_order), None):
        wanted = sympy.And(NEED_Q, NEED_KV, sympy.Gt(symbol("fused"), 0), _many_keys(module))
        if fused.traits.reads_pairs:
            wanted = sympy.And(wanted, rows_are_aligned())
        limited = None
        if sharing(fused.grid):
            b.add(
                tile.Map("_use_fused", select(wanted, sympy.Integer(1), sympy.Integer(0)), (), Type("i32", (), "reg"))
            )
            limited = wanted = sympy.Gt(symbol("_use_fused"), 0)
        if shared:
            b.add(tile.Map("splits", _splits(limited), (), Type("i32", (), "reg")))
        b.branch("Use_fused", "fused", where=wanted, orelse="separate")
        _launch_fused(b, module, fused)
        _launch_by_owner(b, module, "separate")
    else:
        if shared:
            b.add(tile.Map("splits", _splits(None), (), Type("i32", (), "reg")))
        _launch_by_owner(b, module)
    results = {"dQ": "dQ", "dK": "dK", "dV": "dV"}
    if kv_outer:  # @bwd always writes both
        b.branch("Needed", "both", where=NEED_KV, orelse="neither")
        b.give("both", dK="dK", dV="dV")
        for name in ("K", "V"):
            b.alloc(f"no_d{name}", "neither", known_type(f"d{name}"), like=name, where=sympy.false)
        b.give("neither", dK="no_dK", dV="no_dV")
        results |= {"dK": "Needed.dK", "dV": "Needed.dV"}
    b.give(**results, **sum_input_gradients(b, module))
    return b.host()


def _launch_by_key(b: HostBuilder, module: Module) -> None:
    """FlashAttention-1's loop order: one kernel loops over the keys and rewrites sums of dQ."""
    b.branch("By_rows", "statistics", of=("O",))
    b.launch("delta", "statistics")
    b.branch("By_keys", "keys", of=("dQ", "dK"))
    b.alloc("DQ_ACC", "keys", like=None, fill=sympy.Integer(0))
    b.launch("bwd", "keys")
    b.branch("Ended", "queries", "keys", of=("dQ",))
    b.launch("dq_end", "queries")


def _many_keys(module: Module) -> Bool:
    """The condition that sequences are long and each SM has several programs of key tiles. With few programs per SM,
    most would wait for the semaphore.

    Shorter sequences need more programs. With block lists, programs wait for each other longer: shorter sequences are
    excluded there, and also those that are too long.
    """
    batch, heads, queries, keys, num_sms = map(symbol, ("B", "Hq", "Nq", "Nk", "num_SMs"))
    conditions = [
        sympy.And(queries >= rows, keys >= rows, batch * heads * keys >= each * num_sms)
        for rows, each in ((FUSED_ROWS, FUSED_KEYS), FUSED_SHORT)
    ]
    return sympy.And(conditions[0], keys <= FUSED_LISTED) if module.blocks else sympy.Or(*conditions)


def _launch_fused(b: HostBuilder, module: Module, fused: Kernel) -> None:
    """Launch one kernel for all gradients, then a kernel that casts its sums of dQ to the element type."""
    b.launch("delta", "fused")
    if sharing(fused.grid):
        b.add(tile.Map(PAIRS, floordiv(symbol("splits") + 1, sympy.Integer(2)), (), Type("i32", (), "reg")), "fused")
    allocated = {"dK", "dV", *(x.partials for x in module.input_gradients)}
    for arg in fused.args:
        if arg.name not in allocated and arg.role in ("out", "sum"):
            b.alloc(arg.name, "fused", like=None, **_initial(module, arg))
    if sharing(fused.grid):
        _launch_splits(b, [fused], "fused", "heads", PAIRS)
    else:
        _launch_per_query_head(b, fused)
    b.launch("dq_end", "fused")


def _initial(module: Module, arg: tile.Arg) -> dict[str, Any]:
    """What a tensor of the fused backward is filled with: sums with 0.

    With chunks, a call may have a part of the keys, and gets the LSE of all of them. No program writes the dQ of a row
    that sees none of the part, and its LSE does not tell.
    """
    if arg.role == "sum":
        return {"fill": sympy.Integer(0)}
    if arg.name == "DQ_ACC" and module.chunk:
        return {"fill": sympy.Integer(0), "fill_where": sympy.Lt(symbol("Nk"), symbol(WHOLE_LENGTHS["Nk"]))}
    return {}


def _launch_by_owner(b: HostBuilder, module: Module, block: str = "entry") -> None:
    """Launch the kernel that owns queries, which also computes the row statistics for the others, and then the kernels
    that own keys."""
    b.branch("By_query", "queries", block, of=("dQ",), orelse="statistics")
    b.launch("dq", "queries")
    b.branch("By_rows", "rows_only", "statistics", of=("O",))
    b.launch("delta", "rows_only")
    b.branch("By_key", "keys", block, of=("dK",))
    owners = [
        kernel
        for kernel in module.kernels
        if kernel.traits.writes & {"dK", "dV"} and kernel.traits.dots and not kernel.traits.adds_in_order
    ]
    if any(sharing(kernel.grid) for kernel in owners):
        _launch_splits(b, owners, "keys", "partial")
    else:
        for kernel in owners:
            b.launch(kernel.name, "keys")


def _launch_splits(b: HostBuilder, owners: Sequence[Kernel], block: str, suffix: str, of: str = "splits") -> None:
    """Launch kernels in which several programs share the query heads of a group.

    @dkdv_end sums the parts of dK and dV that they write, if there are several.

    suffix: the suffix of the parts' names, different for each block. of: the number of parts.
    """
    parts, several = {}, sympy.Gt(symbol(of), 1)
    for name in ("dK", "dV"):
        batch, heads, *rest = known_type(name).dims
        parts[name] = b.alloc(
            f"{name}_{suffix}", block, Type("T", (batch, heads, of, *rest), "hbm"), where=several, otherwise=name
        )
    for kernel in owners:
        written = {a.name for a in kernel.args if a.role == "out"}
        b.launch(kernel.name, block, tuple((name, ref) for name, ref in parts.items() if name in written))
    b.branch(f"Summed_{suffix}", f"sum_{suffix}", block, where=several)
    sizes = {"splits": symbol(of)} if of != "splits" else {}
    args = tuple((f"{name.upper()}_PARTIAL", ref) for name, ref in parts.items())
    b.launch("dkdv_end", f"sum_{suffix}", args, **sizes)


def _launch_per_query_head(b: HostBuilder, fused: Kernel) -> None:
    """Launch the fused kernel in which each program has one query head.

    @dkdv_end sums dK and dV over the programs of a group.
    """
    per_head = [
        arg for arg in fused.args if arg.name in ("dK", "dV") and of_call(arg.type).dims != known_type(arg.name).dims
    ]
    types = {arg.name: of_call(arg.type) for arg in per_head}
    heads = {
        name: b.alloc(f"{name.upper()}_HEADS", "fused", replace(type_, space="hbm")) for name, type_ in types.items()
    }
    b.launch("bwd", "fused", tuple(heads.items()))
    for arg in per_head:
        batch, _, *rest = types[arg.name].dims
        parts = Type("T", (batch, "Hkv", "group", *rest), "hbm")
        b.add(launch.View(f"{arg.name.upper()}_PARTIAL", heads[arg.name], "heads", parts), "fused")
    if per_head:
        b.launch("dkdv_end", "fused", splits=symbol("group"))


def _splits(limited: Bool | None) -> Any:
    """Number of programs that share the query heads of a group, a divisor of the group size.

    It is 1, unless each SM would have fewer than SPLIT_KEYS keys, counted over sequences and heads. In the fused
    backward, under the condition `limited`, a program has at most FUSED_HEADS query heads.
    """
    batch, heads, keys, group, num_sms = map(symbol, ("B", "Hkv", "Nk", "group", "num_SMs"))
    most = floordiv(batch * heads * keys * group, SPLIT_KEYS * num_sms)  # query heads per program
    limit = group if limited is None else sympy.Min(group, select(limited, sympy.Integer(FUSED_HEADS), group))
    heads_per_program = divisor(group, sympy.Min(limit, sympy.Max(1, most)))
    return sympy.Max(1, floordiv(group, heads_per_program))  # a call may have no heads
