"""What a call of a module computes: its kernels, launched on NumPy in the order in which the generated wrapper launches them.

All that is known of launching by hand is here: what is allocated, what is launched after what, which results are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attngen.ir.execute import SINGLE, execute_kernel
from attngen.ir.expr import parse
from attngen.ir.graph import Kernel, Learned, Module
from attngen.ir.numeric import value
from attngen.policy import STRIP

Arrays = dict[str, Any]


def execute(module: Module, inputs: Mapping[str, Any], tiles: Mapping[str, int], dtypes: Mapping[str, Any] = SINGLE) -> Arrays:
    """The results of a call, forward and backward, by name.

    inputs: `q` [B, Hq, Nq, D_QK], `k` [B, Hkv, Nk, D_QK], `v` [B, Hkv, Nk, D_V], `grad_out` [B, Hq, Nq, D_V]; `grad_lse` [B, Hq, Nq],
    or [B, Hq, 0] for none; `scale`; what the mask and modifiers read by the names of the module's inputs, and what is derived of these;
    `block_mask` [B, Hq, Tq, Tk] where the module has one; `seed` and `threshold` with dropout; `splits`, of groups of heads.
    tiles: BLOCK_Q and BLOCK_KV; dtypes: SINGLE or DOUBLE. Raises OutsideTensor where a kernel leaves a tensor.

    Results: `out`, `lse`, `dq`, `dk`, `dv`, and `d_NAME` of each input that is learned. A module that has these kernels besides gives
    `packed out` and `packed lse`, of @packed; `delta` and `lse2`, of @delta, which calls launch that want no gradient of q.
    """
    return _Call(module, inputs, tiles, dtypes).results()


class _Call:
    def __init__(self, module: Module, inputs: Mapping[str, Any], tiles: Mapping[str, int], dtypes: Mapping[str, Any]) -> None:
        self.module, self.inputs, self.dtypes, self.tiles = module, inputs, dtypes, tiles
        self.kernels = {kernel.name: kernel for kernel in module.kernels}
        q, k = inputs["q"], inputs["k"]
        heads = {"B": q.shape[0], "Hq": q.shape[1], "Hkv": k.shape[1], "group": q.shape[1] // max(1, k.shape[1])}
        self.sizes: dict[str, Any] = {**heads, "Nq": q.shape[2], "Nk": k.shape[2], "Nlse": inputs["grad_lse"].shape[2]}
        self.sizes |= {"splits": inputs.get("splits", 1), "scale": inputs["scale"]}
        threshold = inputs.get("threshold", 0)
        self.sizes |= {"dropout_threshold": threshold, "keep_scale": 65536 / (65536 - threshold)}
        given = {"Q": q, "K": k, "V": inputs["v"], "dO": inputs["grad_out"], "dLSE": inputs["grad_lse"]}
        given |= {name.upper(): x for name, x in inputs.items() if isinstance(x, np.ndarray) and name not in ("q", "k", "v")}
        given["SEED"] = np.asarray(inputs.get("seed", 0))
        types = {arg.name: arg.type.dtype for kernel in module.kernels for arg in kernel.args}
        self.tensors = {name: np.asarray(x, dtypes[types[name]]) for name, x in given.items() if name in types}
        if module.blocks:
            self.tensors |= self.block_lists()

    def allocate(self, kernel: Kernel, **starts: float) -> None:
        """Room for what a kernel writes: NaN, or where it starts."""
        dims = {**self.sizes, "D_QK": self.module.head_dim_qk, "D_V": self.module.head_dim_v, **self.distance_lines()}
        for arg in kernel.args:
            if arg.role in ("out", "inout"):
                shape = [dims[d] if d in dims else int(d) for d in arg.type.dims]
                self.tensors[arg.name] = np.full(shape, starts.get(arg.name, np.nan), self.dtypes[arg.type.dtype])

    def distance_lines(self) -> dict[str, int]:
        """The sizes of sums by distance: so many lines for each tile of queries (see Store)."""
        block_q, block_kv = self.tiles["BLOCK_Q"], self.tiles["BLOCK_KV"]
        lines = (block_q + block_kv - 2) // block_kv + 1
        return {"Td": -(-self.sizes["Nq"] // block_q) * lines, "Nd": self.sizes["Nq"] + self.sizes["Nk"]}

    def launch(self, name: str, tiles: Mapping[str, int] | None = None) -> None:
        kernel = self.kernels[name]
        scalars = {**{n: x for n, x in self.inputs.items() if not isinstance(x, np.ndarray)}, **self.sizes}
        tensors = {arg.name: self.tensors[arg.name] for arg in kernel.args if arg.role != "scalar"}
        execute_kernel(self.module, kernel, tensors, scalars, tiles or self.tiles, self.dtypes)

    def results(self) -> Arrays:
        out, lse = self.forward()
        self.tensors |= {"O": out, "LSE": lse}
        found = {"out": out, "lse": lse, **self.backward()}
        for name in (i.name for i in self.module.inputs if i.grad):
            parts = (self.summed(x) for x in self.module.learned if x.input == name)
            found[f"d_{name}"] = sum(parts, np.zeros_like(self.tensors[name.upper()]))
        return found | self.aside()

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        self.allocate(self.kernels["fwd"], O_ACC=0, ROW_MAX=-np.inf, ROW_SUM=0)
        self.launch("fwd")
        if self.module.order == "kv_outer":
            self.allocate(self.kernels["fwd_end"])
            self.launch("fwd_end")
        return self.tensors["O"], self.tensors["LSE"]

    def backward(self) -> Arrays:
        """@dq before the kernels of keys, for which it makes DELTA and LSE2; by keys, @delta before @bwd."""
        by_key = self.module.order == "kv_outer"
        parts = {x.parts: 0 for x in self.module.learned if x.by != "row"}
        for name in ("delta", "bwd", "dq_end") if by_key else ("dq", "dkdv", "dk", "dv"):
            if name in self.kernels:
                self.allocate(self.kernels[name], DQ_ACC=0, **parts)
                self.launch(name)
        dk, dv = (x.sum(2) if x.ndim == 5 else x for x in (self.tensors["dK"], self.tensors["dV"]))
        return {"dq": self.tensors["dQ"], "dk": dk, "dv": dv}

    def aside(self) -> Arrays:
        """What kernels compute that other calls launch: with few queries, or without a gradient of q."""
        found: Arrays = {}
        if self.module.order == "q_outer":
            self.allocate(self.kernels["delta"])
            self.launch("delta")
            found = {"delta": self.tensors["DELTA"], "lse2": self.tensors["LSE2"]}
        if "packed" in self.kernels:
            sizes, queries = self.sizes, self.sizes["Nq"]
            rows = sizes["group"] * queries
            self.tensors["Q"] = self.tensors["Q"].reshape(sizes["B"], sizes["Hkv"], rows, self.module.head_dim_qk)
            self.sizes = {**sizes, "Nq": rows, "queries": queries}
            self.allocate(self.kernels["packed"])
            self.launch("packed")
            of_query = (sizes["B"], sizes["Hq"], queries)
            found |= {
                "packed out": self.tensors["O"].reshape(*of_query, self.module.head_dim_v),
                "packed lse": self.tensors["LSE"].reshape(of_query),
            }
        return found

    def block_lists(self) -> Arrays:
        """Ranks and lists of the blocks that count, of rows of blocks and of columns; found by @blocks where data says which."""
        blocks = self.module.blocks
        assert blocks is not None
        rows, columns = (-(-self.sizes[n] // blocks.size) for n in ("Nq", "Nk"))
        if not blocks.data:
            seen: np.ndarray = self.inputs["block_mask"]
            full = np.zeros_like(seen)
        else:
            strips = blocks.size // STRIP
            count = np.zeros((self.sizes["B"], self.sizes["Hq"], rows, columns * strips))
            self.tensors["COUNT"] = count
            self.launch("blocks", {"BLOCK_Q": blocks.size, "BLOCK_KV": STRIP})
            visible = count.reshape(*count.shape[:3], columns, strips).sum(4)
            inside = np.arange(rows) < self.sizes["Nq"] // blocks.size  # rows past the end may count as visible
            seen, full = visible > 0, (visible == blocks.size**2) & inside[:, None]
        return {**_lists("KV", seen, full), **_lists("Q", seen.swapaxes(2, 3), full.swapaxes(2, 3))}

    def summed(self, x: Learned) -> np.ndarray:
        """A gradient of an input from its parts: each is added where the input is read for it."""
        like = self.tensors[x.input.upper()]
        keep_scale, n_q, n_kv = (self.sizes[name] for name in ("keep_scale", "Nq", "Nk"))
        if x.by == "element":
            return self.tensors[x.parts]
        if x.by == "row":  # of a sink, which has a probability in every row and no value
            probability = np.exp(like[:, None] - self.tensors["LSE"])
            return -(probability * self.tensors["DELTA"] * keep_scale).sum((0, 2))
        parts = self.tensors[x.parts]
        if x.by == "distance":
            parts = parts.sum(2) * keep_scale
        places: Arrays = {**self.sizes, **dict(zip(("b", "h", "q", "kv"), np.indices(parts.shape, sparse=True)))}
        places |= {"hkv": places["h"] // self.sizes["group"], "distance": np.arange(-n_q, n_kv)}
        at = [np.broadcast_to(value(parse(e), places), parts.shape) for e in x.index]
        inside = np.all([(i >= -n) & (i < n) for i, n in zip(at, like.shape)], axis=0)
        found = np.zeros_like(like)
        np.add.at(found, tuple(i[inside] % n for i, n in zip(at, like.shape)), parts[inside])
        return found


def _lists(name: str, seen: np.ndarray, full: np.ndarray) -> Arrays:
    """Of each row of blocks: the numbers of the full ones, of the others that are seen, of the rest; how many come before each block."""

    def ranks(listed: np.ndarray) -> np.ndarray:
        return np.pad(listed.cumsum(3), ((0, 0), (0, 0), (0, 0), (1, 0)))

    order = 2 - seen.astype(int) - full
    return {
        f"{name}_FULL_RANK": ranks(full),
        f"{name}_RANK": ranks(seen & ~full) + full.sum(3, keepdims=True),
        f"{name}_LIST": np.argsort(order, axis=3, kind="stable"),
    }
