"""Execute a call of a module on NumPy: its host programs op by op, and the kernels that they launch (interp/tile.py).

Sizes are those of the arrays that a call passes. New tensors hold NaN until they are written (integers the least value
of their type), and have the memory layout that the ops say, so that a view may need a copy as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.heuristics import STRIP
from attngen.interp.numeric import compiled, value
from attngen.interp.statements import StatementLaunch
from attngen.interp.tile import execute_kernel
from attngen.interp.values import SINGLE, Values, spread
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Host, Kernel, Module, Op, Type, launch, parse, symbol_names, tile
from attngen.ir.behaviour import Handlers, handles
from attngen.ir.names import OUTPUTS, SIZES, VARIABLES, WHOLE_LENGTHS

Arrays = dict[str, Any]


def execute(
    module: Module, inputs: Mapping[str, Any], tiles: Mapping[str, int], dtypes: Mapping[str, Any] = SINGLE
) -> Arrays:
    """The results of a call, forward and backward, by name: `out`, `lse` and the module's other outputs; with a
    backward also `dq`, `dk`, `dv`, and `d_NAME` for each input that gets a gradient; with tangents of its arguments
    also `tangent_out`, `tangent_lse` and so on. Raises OutsideTensor if a kernel accesses memory outside a tensor.

    inputs: `q` [B, Hq, Nq, D_QK], `k` [B, Hkv, Nk, D_QK], `v` [B, Hkv, Nk, D_V]; with a backward, `grad_out` [B, Hq,
    Nq, D_V] and `grad_lse` [B, Hq, Nq], or [B, Hq, 0] for none, and likewise `grad_entropy` if the module has that
    output; `scale`; the tensors and numbers that the mask and modifiers read, by the names of the module's inputs, and
    the tensors that Python derives from them, which say, among others, where chunks of a sequence lie; `block_mask`
    [B or 1, Hq or 1, Tq, Tk] if the module takes one; `seed` and `threshold` with dropout; `splits`, of groups of
    heads; `fused`, 1 for the fused backward, if there is one; for forward mode `tq`, `tk` and `tv`, and `tNAME` for
    each input that gets a gradient. `need_q`, `need_kv` and `need_inputs` say which gradients the call needs, by
    default all; the others have no elements. If a call has only a part of the keys, `out` and `lse` of all keys may be
    given: the backward reads these in place of the call's own.
    tiles: BLOCK_Q and BLOCK_KV.
    dtypes: SINGLE or DOUBLE.
    """
    threshold = inputs.get("threshold", 0)
    given: Arrays = {"need_q": True, "need_kv": True, "need_inputs": True, "SEED": inputs.get("seed", 0)}
    given |= {"dropout_threshold": threshold, "keep_scale": 65536 / (65536 - threshold)}
    given |= {name.upper() if isinstance(x, np.ndarray) else name: x for name, x in inputs.items()}
    given |= {name: inputs[VARIABLES[name]] for name in VARIABLES if VARIABLES[name] in inputs}
    given |= {f"t{name}": inputs[f"t{name.lower()}"] for name in [*given] if f"t{name.lower()}" in inputs}

    lengths = {i.name for i in module.inputs if i.is_size}
    for i in module.inputs:
        given |= {dim: n for dim, n in zip(i.shape, np.shape(inputs[i.name] if i.shape else 0)) if dim in lengths}

    def run(name: str, of_tiles: Mapping[str, int] = tiles) -> Arrays:
        chosen = {"splits": inputs.get("splits", 1), "fused": inputs.get("fused", 0)}
        return execute_host(module, module.host(name), given, of_tiles, dtypes, chosen)

    given["Nq"] = inputs["q_len"] if module.chunk else inputs["q"].shape[2]
    for d in module.derived:
        given |= run(d.program) if d.program else {}
    if module.blocks:
        if module.blocks.data:
            given |= run("count", {"BLOCK_Q": module.blocks.size, "BLOCK_KV": STRIP})
        given |= {name.lower(): x for name, x in run("lists").items()}
    given |= run("forward")
    given |= run("key_mass") if "key_mass" in module.outputs else {}
    results = {"out": given["O"], **{name: given[OUTPUTS[name]] for name in module.outputs}}
    given |= {name: inputs[key] for name, key in (("O", "out"), ("LSE", "lse")) if key in inputs}
    found = run("backward") if module.trains else {}
    gradients = {name.lower(): found.pop(name) for name in ("dQ", "dK", "dV") if module.trains}
    forward_mode = "tQ" in given and any(host.name == "jvp" for host in module.hosts)
    tangents = {VARIABLES[name]: x for name, x in run("jvp").items()} if forward_mode else {}
    return {**results, **gradients, **found, **tangents}


def execute_host(
    module: Module,
    host: Host,
    given: Mapping[str, Any],
    tiles: Mapping[str, int],
    dtypes: Mapping[str, Any] = SINGLE,
    chosen: Mapping[str, int] = MappingProxyType({}),
) -> Arrays:
    """The results of one host program, by name.

    given: its arguments by name, and possibly more.
    tiles: BLOCK_Q and BLOCK_KV of every kernel.
    dtypes: SINGLE or DOUBLE.
    chosen: numbers by name that replace those that the program computes from the number of SMs, which is 1 here.
    """
    values: Values = {a.name: np.asarray(given[a.name], dtypes[a.type.dtype])[()] for a in host.args}
    values |= {a.name: int(values[a.name]) for a in host.args if a.name in SIZES}
    values |= _sizes(module, host, values, tiles) | {"fused": chosen.get("fused", 0)}
    return _Run(module, host, tiles, dtypes, chosen).block("entry", values)


def _sizes(module: Module, host: Host, values: Values, tiles: Mapping[str, int]) -> dict[str, int]:
    """Every size by name: those of the arguments' dimensions, and those that follow from them."""
    sizes = {**module.widths, "num_SMs": 1}
    sizes |= {name: x for name, x in values.items() if name in SIZES}
    for arg in host.args:
        for dim, length in zip(arg.type.dims, np.shape(values[arg.name]), strict=True):
            if dim.isidentifier() and sizes.setdefault(dim, length) != length:
                raise AttngenError(
                    f"host @{host.name}: %{arg.name} has {length} along {dim}; expected {sizes[dim]}, as others have"
                )
    if {"Hq", "Hkv"} <= sizes.keys():
        sizes["group"] = sizes["Hq"] // max(1, sizes["Hkv"])
        sizes["Gq"] = sizes["group"] * sizes["Nq"]
        rows = (tiles["BLOCK_Q"] + tiles["BLOCK_KV"] - 2) // tiles["BLOCK_KV"] + 1  # of a tile's sums by distance
        n_q, n_kv = (int(values.get(name, sizes.get(n, 0))) for n, name in WHOLE_LENGTHS.items())
        sizes |= {"Td": -(-sizes["Nq"] // tiles["BLOCK_Q"]) * rows, "Nd": n_q + n_kv}
        if module.blocks:
            sizes |= {"Tq": -(-sizes["Nq"] // module.blocks.size), "Tk": -(-sizes["Nk"] // module.blocks.size)}
            sizes["Ts"] = sizes["Tk"] * (module.blocks.size // STRIP)
    return sizes


class _Run(Handlers, complete=launch.HOST, control=(tile.Arg, tile.Yield)):
    """Runs the ops of one host program. The method for an op returns its value; see ir/launch.py.

    `values` holds everything that is known at a place in the program, by name; a branch gets a copy.
    """

    def __init__(
        self, module: Module, host: Host, tiles: Mapping[str, int], dtypes: Mapping[str, Any], chosen: Mapping[str, int]
    ) -> None:
        self.module, self.host, self.tiles, self.dtypes, self.chosen = module, host, tiles, dtypes, chosen

    def block(self, name: str, values: Values) -> Arrays:
        """Run a block's ops, and return the values that it yields."""
        for op in self.host.block(name).ops:
            match op:
                case tile.Arg():
                    pass  # arguments have their values from the start
                case tile.Yield():
                    return {field: values[ref] for field, ref in op.values}
                case launch.If() | launch.ClassifyBlocks() | launch.ListBlocks():
                    fields = self.handler(op)(op, values)
                    values |= {f"{op.name}.{field}": x for field, x in fields.items()}
                case _:
                    values[op.name] = self.handler(op)(op, values)
        return {}

    @handles(launch.If)
    def _if(self, op: launch.If, values: Values) -> Arrays:
        some = not op.of or any(values[ref].size for ref in op.of)
        branch = op.then if some and value(op.where, values) else op.orelse
        return self.block(branch, dict(values)) if branch else {}

    # ------------------------------------------------------------------ tensors

    def shape(self, type_: Type, values: Values) -> tuple[int, ...]:
        return tuple(int(d) if d.isdigit() else values[d] for d in type_.dims)

    @handles(launch.Alloc)
    def _alloc(self, op: launch.Alloc, values: Values) -> np.ndarray:
        if not value(op.where, values):
            if op.otherwise:  # one split: the tensor is its partial result
                return np.expand_dims(values[op.otherwise], 2)
            return np.empty((0,) * len(op.type.dims), self.dtypes[op.type.dtype])
        if "*" in op.type.dims:  # partial gradients, one for each element of an input
            source = next(x.input.upper() for x in self.module.input_gradients if x.partials == op.name)
            shape = values[source].shape
        else:
            shape = self.shape(op.type, values)
        dtype = np.dtype(self.dtypes[op.type.dtype])
        unwritten = np.nan if dtype.kind == "f" else np.iinfo(dtype).min
        fill = unwritten if op.fill is None or not value(op.fill_where, values) else float(op.fill)
        if op.like is None:
            return np.full(shape, fill, dtype)
        strides = values[op.like].strides
        order = sorted(range(len(shape)), key=lambda d: -strides[d])  # the dimensions from the outermost in memory
        laid_out = np.full([shape[d] for d in order], fill, dtype)
        return laid_out.transpose(np.argsort(order))

    @handles(launch.View)
    def _view(self, op: launch.View, values: Values) -> np.ndarray:
        source, shape = values[op.src], self.shape(op.type, values)
        if op.by == "expand":
            return np.broadcast_to(source, shape)
        if op.by in launch.COLUMN_VIEWS:
            width = shape[-1]
            return source[..., :width] if op.by == "first_columns" else source[..., -width:]
        seen = source.reshape(shape)
        if op.fresh and not np.shares_memory(seen, source):
            seen.fill(np.nan)  # a copy, which only gives room for results
        return seen

    @handles(launch.Copy)
    def _copy(self, op: launch.Copy, values: Values) -> None:
        values[op.into][...] = values[op.src].reshape(values[op.into].shape)

    # ------------------------------------------------------------------ launches

    @handles(launch.Launch)
    def _launch(self, op: launch.Launch, values: Values) -> None:
        kernel, given = self.module.kernel(op.kernel), dict(op.args)
        known = {**values, **{name: value(e, values) for name, e in op.sizes}}
        passed = {arg.name: known[given.get(arg.name, arg.name)] for arg in kernel.args}
        tensors = {arg.name: passed.pop(arg.name) for arg in kernel.args if arg.role != "scalar"}
        unwanted = {
            x.partials
            for x in self.module.input_gradients
            if x.reduction != "delta" and x.partials in tensors and not values["need_inputs"]
        }
        for arg in kernel.args:
            if arg.name in tensors.keys() - unwanted:
                self.must_fit(op, arg, tensors[arg.name], known)
        grid = {str(s): known[str(s)] for axis in kernel.grid for s in axis.extent.free_symbols if str(s) in known}
        launch_class = (
            None if not kernel.backend else StatementLaunch if kernel.traits.is_lowered else WarpSpecializedLaunch
        )
        launched, tiles = _without(kernel, unwanted), self.tiles
        if kernel.traits.is_lowered:  # its buffers have the sizes of a config
            config = self.module.configs(kernel.stands_for, kernel.backend)[0]
            tiles = {"BLOCK_Q": config.block_q, "BLOCK_KV": config.block_kv, "STAGES": config.num_stages}
        execute_kernel(self.module, launched, tensors, {**grid, **passed}, tiles, self.dtypes, launch_class)

    def must_fit(self, op: launch.Launch, arg: tile.Arg, x: np.ndarray, known: Values) -> None:
        """Raise if a tensor does not have the dimensions that the kernel declares; dimensions of any length fit."""
        expected = [known.get(d, int(d) if d.isdigit() else None) for d in arg.type.dims]
        if len(expected) != x.ndim or any(length not in (None, have) for length, have in zip(expected, x.shape)):
            dims = ", ".join(arg.type.dims)
            raise AttngenError(
                f"host @{self.host.name}: @{op.kernel} is given %{arg.name} with shape {list(x.shape)}; "
                f"expected [{dims}]"
            )

    # ------------------------------------------------------------------ arithmetic of tensors

    @handles(tile.Map)
    def _map(self, op: tile.Map, values: Values) -> Any:
        if not op.type.dims:
            return self.chosen[op.name] if op.name in self.chosen else int(compiled(op.expr)(values))
        uses = dict(op.uses)
        dims = {name: self.host.type_of(uses[name]).dims for name in symbol_names(op.expr) if name in uses}
        named = {
            name: spread(values[uses.get(name, name)], dims.get(name, ()), op.type.dims)
            for name in symbol_names(op.expr)
        }
        return np.asarray(compiled(op.expr)(named), self.dtypes[op.type.dtype])

    @handles(launch.Sum)
    def _sum(self, op: launch.Sum, values: Values) -> np.ndarray:
        dims = self.host.type_of(op.value).dims
        left = tuple(d for d in dims if d not in op.over)
        summed = values[op.value].sum(tuple(dims.index(d) for d in op.over))
        found: np.ndarray = summed.transpose([left.index(d) for d in op.type.dims])
        return found

    @handles(launch.Place)
    def _place(self, op: launch.Place, values: Values) -> np.ndarray:
        found = np.zeros(values[op.like].shape, self.dtypes[op.type.dtype])
        found[tuple(slice(None) if at == ":" else int(at) for at in op.at)] = values[op.value]
        return found

    @handles(launch.SumDistances)
    def _sum_distances(self, op: launch.SumDistances, values: Values) -> np.ndarray:
        """Add each sum to the table's element that was read for it; sums for reads outside the table are dropped."""
        found = np.zeros(values[op.like].shape, self.dtypes[op.type.dtype])
        sums = values[op.value].sum(2)  # [B, Hq, Nd]: over the rows that tiles have stored
        b, h, _ = np.indices(sums.shape, sparse=True)
        lengths = [int(values.get(name) or values[n]) for n, name in WHOLE_LENGTHS.items()]
        places = {
            **values,
            "b": b,
            "h": h,
            "hkv": h // values["group"],
            "distance": np.arange(-lengths[0], lengths[1]),
        }
        at = [np.broadcast_to(value(parse(e), places), sums.shape) for e in op.at]
        inside = np.all([(i >= -n) & (i < n) for i, n in zip(at, found.shape)], axis=0)
        np.add.at(found, tuple(i[inside] % n for i, n in zip(at, found.shape)), sums[inside])
        return found

    # ------------------------------------------------------------------ blocks of scores

    @handles(launch.ClassifyBlocks)
    def _classify_blocks(self, op: launch.ClassifyBlocks, values: Values) -> Arrays:
        assert self.module.blocks is not None
        size, count = self.module.blocks.size, values[op.src]
        rows, columns = values["Tq"], values["Tk"]
        visible = count.reshape(*count.shape[:2], rows, columns, size // STRIP).sum(4)
        inside = np.arange(rows) < values["Nq"] // size  # rows past the end may count as visible
        return {"seen": visible > 0, "full": (visible == size**2) & inside[:, None]}

    @handles(launch.ListBlocks)
    def _list_blocks(self, op: launch.ListBlocks, values: Values) -> Arrays:
        """For each row of blocks, return the block numbers, those of full blocks first, then of other visible ones,
        then of the rest; and the ranks: how many listed blocks come before each block."""
        seen = values[op.src]
        full = values[op.full] if op.full else np.zeros_like(seen)
        if op.own == "kv":
            seen, full = seen.swapaxes(2, 3), full.swapaxes(2, 3)
        order = np.where(full, 0, np.where(seen, 1, 2))
        ranks = {"full_rank": _before(full), "rank": _before(seen & ~full) + full.sum(3, keepdims=True)}
        return {**ranks, "list": np.argsort(order, axis=3, kind="stable")}


def _before(listed: np.ndarray) -> np.ndarray:
    """The number of listed blocks before each block of a row, and before the row's end."""
    return np.pad(listed.cumsum(3), ((0, 0), (0, 0), (0, 0), (1, 0)))


def _without(kernel: Kernel, parts: set[str]) -> Kernel:
    """The kernel without its stores to some tensors, as it is compiled for calls that need no gradients of inputs."""

    def change(_: str, op: Op) -> Iterator[Op]:
        stores = isinstance(op, (tile.Store, tile.Scatter)) and _tensor(kernel, op.dst.tensor) in parts
        if not stores and not (isinstance(op, tile.Base) and op.src.tensor in parts):
            yield op

    return kernel.rewrite(change) if parts else kernel


def _tensor(kernel: Kernel, ref: str) -> str:
    """The argument that a reference to memory leads to."""
    op = kernel.op(ref)
    return op.src.tensor if isinstance(op, tile.Base) else ref
