"""A generated module as the kernel of one rank."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from attngen.distributed.inputs import ir_of
from attngen.distributed.layout import Chunks
from attngen.distributed.local import Backward, Stats
from attngen.distributed.operands import STARTS, Inputs, Operands
from attngen.ir import symbol_names

OF_WHOLE = ("q_len", "kv_len")
OF_CALL = ("scale", "check")
DROPOUT = ("dropout_p", "seed")
MULTIPLIED = (torch.float16, torch.float32)  # by Triton's interpreter
LOG2_E = 1.4426950408889634


def module_kernel(module: Any) -> ModuleKernel:
    """Return the kernel of one rank that a generated module with positions is.

    Calls of it take, besides the arguments of the module's `attention`, the numbers `q_len` and `kv_len`, the rows of
    the whole sequence, in `inputs`. Masks, modifiers and dropout are those of the whole sequence.

    module: what `attngen.build` or `attngen.load` returns, or its `attention`.

    Raises:
        ValueError: one sentence: the spec has no `positions`.
    """
    owner = module if isinstance(module, ModuleType) else sys.modules.get(getattr(module, "__module__", None) or "")
    if owner is None or not hasattr(owner, "OPERATORS"):
        raise ValueError(f"attention: module is {module!r}; expected what attngen.build returns, or its `attention`")
    return _kernel_of(owner)


@lru_cache(maxsize=64)
def _kernel_of(module: ModuleType) -> ModuleKernel:
    return ModuleKernel(module)


class ModuleKernel:
    """See `module_kernel` and LocalKernel."""

    def __init__(self, module: ModuleType) -> None:
        if not hasattr(module, "CHUNK"):
            raise ValueError(
                f"attention: the module {ir_of(module).name} has no positions, so a call has to have the whole "
                "sequence; expected `positions: {chunk: 384}` in its spec"
            )
        ir = ir_of(module)
        self.module, self.ir, self.chunk = module, ir, int(module.CHUNK)
        self.digest = f"{module.SPEC_HASH} {module.ATTNGEN_VERSION}"
        signature = module.SIGNATURE
        # Of the row vectors that a backward reads, all but LSE and sums belong to outputs that are not returned here.
        self.kept = signature.kept or signature.smooth
        self.rows = ("lse", *(name for name in self.kept if name in ("m_all", "inv_l_all")))
        self.tensors = {i.name: i for i in ir.inputs if i.shape and i.name not in STARTS}
        self.numbers = {i.name: i for i in ir.inputs if not i.shape and not i.is_size and i.name not in OF_WHOLE}
        self.learned = tuple(name for name, i in self.tensors.items() if i.grad)
        self.sinks = () if ir.meaning.sink is None else tuple(symbol_names(ir.meaning.sink))
        self.dims = {name: i.shape for name, i in self.tensors.items()}
        self.operands = Operands(module, ir)

    # ------------------------------------------------------------------ what a call may have

    def problem(self, inputs: Inputs) -> str:
        """Return what is wrong with the inputs of a call, as a clause; empty text if nothing is."""
        known = {*self.tensors, *self.numbers, *OF_WHOLE, *OF_CALL}
        known |= {*DROPOUT} if self.ir.dropout else set()
        known |= {"block_mask"} if self._has_block_mask else set()
        for name in inputs:
            if name.startswith("return_"):
                return f"{name} is given, and attention over ranks returns out and LSE; expected it left out"
            if name not in known:
                return f"{name} is given; expected inputs among {', '.join(sorted(known))}"
        required = {**self.tensors, **self.numbers}
        needed = [*required, *OF_WHOLE, *(["block_mask"] if self._has_block_mask and self._needs_blocks else [])]
        for name in needed:
            if inputs.get(name) is None:
                meaning = required[name].help if name in required else "that of the whole sequence"
                return f"{name} is missing; expected it: {meaning}"
        if inputs.get("dropout_p") and inputs.get("seed") is None:
            return "seed is missing; expected, with dropout, the same seed on all ranks"
        return ""

    @property
    def _has_block_mask(self) -> bool:
        return self.ir.blocks is not None and not self.ir.blocks.data

    @property
    def _needs_blocks(self) -> bool:
        return self.ir.blocks is not None and not self.ir.blocks.pattern

    def needs_all_heads(self, inputs: Inputs) -> str:
        """Return why a rank cannot compute a part of the heads, as a clause; empty text if it can."""
        if self.ir.dropout and inputs.get("dropout_p", 0):
            return "dropout depends on the number of a head"
        if "Hq" not in self.module.SIGNATURE.shards:
            return "the mask or the scores depend on the number of a head"
        for d in self.ir.derived:
            heads = {"Hq", "Hkv"}
            if heads & {*d.sources}:
                return f"{d.names[0]} follows from the number of heads"
            of_heads = [s for s in d.sources if heads & {*self.dims.get(s, ())}]
            if of_heads and not all(heads & {*shape} for shape in d.shapes):
                return f"{d.names[0]} is derived from all heads of {of_heads[0]}"
        blocks = inputs.get("block_mask")
        if isinstance(blocks, torch.Tensor) and blocks.dim() > 2 and blocks.shape[-3] > 1:
            return "the block mask differs between heads"
        return ""

    # ------------------------------------------------------------------ launches

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_chunks: Chunks,
        kv_chunks: Chunks,
        inputs: Inputs,
    ) -> tuple[torch.Tensor, Stats]:
        """See LocalKernel. Nothing is launched if there are no queries or no keys."""
        if not q_chunks or not kv_chunks:
            return self._nothing(q, v, inputs)
        operands = self.operands.of(q, k, v, q_chunks, kv_chunks, inputs)
        out, *rows = self.module.FORWARD(*self._multiplied(q, k, v, *operands))
        names = self.module.SIGNATURE.rows
        return out.to(self.module.SIGNATURE.results or q.dtype), {name: rows[names.index(name)] for name in self.rows}

    def backward(
        self, of: Backward, q_chunks: Chunks, kv_chunks: Chunks, inputs: Inputs, wanted: Collection[str]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """See LocalKernel."""
        signature = self.module.SIGNATURE
        if not hasattr(self.module, "BACKWARD"):
            raise NotImplementedError(
                f"attention: the module {self.ir.name} has no backward; expected a spec without `backward: false`"
            )
        if not q_chunks or not kv_chunks:
            return self._no_gradients(of, inputs, wanted)
        operands = self.operands.of(of.q, of.k, of.v, q_chunks, kv_chunks, inputs)
        grad_rows = [of.grad_lse if name == "lse" else None for name in signature.smooth]
        kept = [of.stats[name] if name in of.stats else torch.zeros_like(of.stats["lse"]) for name in self.kept]
        needs = (True, True, bool(wanted)) if signature.learned else (True, True)
        args = self._multiplied(of.grad_out, *grad_rows, of.q, of.k, of.v, of.out, *kept, *operands, *needs)
        dq, dk, dv, *gradients = self.module.BACKWARD(*args)
        by_name = {self.operands.names[at]: x for at, x in zip(signature.learned, gradients)}
        return dq, dk, dv, {name: by_name[name].sum_to_size(inputs[name].shape) for name in wanted}

    def _multiplied(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments, in Triton's interpreter in fp32 if it cannot multiply their dtype, such as bf16."""
        dtype = args[0].dtype
        if not self.module.INTERPRETED or dtype in MULTIPLIED:
            return args
        return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in args)

    # ------------------------------------------------------------------ without queries or keys

    def _nothing(self, q: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, Stats]:
        """Return the results of queries without keys: their LSE is that of a sink, or -inf."""
        rows = q.shape[:3]
        lse = q.new_full(rows, -torch.inf, dtype=torch.float32)
        for name in self.sinks:
            lse.copy_(inputs[name][:, None])
        empty = lse == -torch.inf
        stats = {"lse": lse, "m_all": (lse * LOG2_E).masked_fill(empty, torch.inf), "inv_l_all": (~empty).float()}
        out = q.new_zeros((*rows, v.shape[3]), dtype=self.module.SIGNATURE.results or q.dtype)
        return out, {name: stats[name] for name in self.rows}

    def _no_gradients(
        self, of: Backward, inputs: Inputs, wanted: Collection[str]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients of queries without keys, or of keys without queries: only a sink has any."""
        gradients = {name: torch.zeros_like(inputs[name], dtype=torch.float32) for name in wanted}
        for name in {*self.sinks} & {*wanted}:
            delta = (of.out.float() * of.grad_out.float()).sum(3)
            delta = delta if of.grad_lse is None else delta - of.grad_lse
            share = torch.exp(inputs[name].float()[:, None] - of.stats["lse"]).nan_to_num()  # of -inf in -inf: 0
            gradients[name] -= (share * delta).sum((0, 2))
        return torch.zeros_like(of.q), torch.zeros_like(of.k), torch.zeros_like(of.v), gradients
