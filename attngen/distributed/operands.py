"""The operands of a generated module's operators for a call with chunks: what follows from lists of chunks and from
masks is made once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from attngen.distributed.layout import Chunks
from attngen.distributed.remembered import Remembered
from attngen.ir import Module

MOST_CALLS = 512  # pairs of lists of chunks whose operands are kept
MOST_DERIVED = 16  # inputs whose derived tensors are kept
MOST_SEEDS = 16
LARGEST = 2**31 - 1
STARTS = ("q_chunks", "kv_chunks")
Inputs = Mapping[str, Any]


class Operands:
    """Makes the operands of a module's operators, in the order of `names`.

    A first call of some sizes is checked as the module's `attention` checks its arguments. Later calls with the same
    chunks, sizes and numbers take their derived tensors from it, if the inputs from which these are derived are the
    same tensors, and launch nothing on the device. Other inputs are taken from each call; those that already have the
    dtype that kernels read are passed as they are.
    """

    def __init__(self, module: ModuleType, ir: Module) -> None:
        self.chunk = int(module.CHUNK)
        self.names = [declared.split()[-1] for declared in module.SIGNATURE.schema.split(", ")]
        tensors = [i for i in ir.inputs if i.shape and i.name not in STARTS]
        self.direct = {self.names.index(i.name): i.name for i in tensors if i.name in self.names}
        self.seed = self.names.index("seed") if ir.dropout else -1
        sources = {source for d in ir.derived for source in d.sources}
        data = ir.blocks is not None and ir.blocks.data
        self.sources = [i.name for i in tensors if i.name in sources or (data and not i.grad)] + ["block_mask"]
        # Derived tensors that are the same for all chunks.
        self.whole = [at for d in ir.derived if not {*STARTS} & {*d.sources} for at in map(self.names.index, d.names)]
        self._of_call = _function(module)
        self.calls, self.derived = Remembered(MOST_CALLS), Remembered(MOST_DERIVED)
        self._seeds = Remembered(MOST_SEEDS)

    def of(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_chunks: Chunks, kv_chunks: Chunks, inputs: Inputs
    ) -> list[Any]:
        """Return the operands of a call; see LocalKernel.forward."""
        device = q.device
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "seed"}
        numbers = tuple(sorted((n, x) for n, x in inputs.items() if n not in tensors and n != "seed" and x is not None))
        sources = [tensors[name] for name in self.sources if name in tensors]
        key = (q_chunks, kv_chunks, q.dtype, q.shape, k.shape, v.shape, numbers)
        forms = tuple((name, x.dtype, x.shape) for name, x in tensors.items())

        def make() -> tuple[list[Any], dict[int, Any]]:
            starts = [
                torch.tensor([chunk * self.chunk for chunk in chunks], dtype=torch.int32).to(device)
                for chunks in (q_chunks, kv_chunks)
            ]
            found = list(self._of_call(q, k, v, **dict(zip(STARTS, starts)), **inputs))
            of_whole = self.derived.get(
                (q.shape[:2], k.shape[1], numbers, forms), sources, device, lambda: [found[at] for at in self.whole]
            )
            for at, x in zip(self.whole, of_whole):
                found[at] = x
            fresh = {at: (found[at].dtype, found[at].shape) for at in self.direct}
            for at in self.direct:
                found[at] = None
            return found, fresh

        kept, fresh = self.calls.get((key, forms), sources, device, make)
        operands = list(kept)
        for at, (dtype, shape) in fresh.items():
            operands[at] = _taken(inputs[self.direct[at]], dtype, shape)
        if self.seed >= 0 and kept[self.seed] is not None:
            operands[self.seed] = self._seed(inputs["seed"], device)
        return operands

    def _seed(self, seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
        if isinstance(seed, torch.Tensor):
            return seed
        made: torch.Tensor = self._seeds.get(
            seed, (), device, lambda: torch.full((), seed, dtype=torch.int64, device=device)
        )
        return made


def _taken(x: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return an input as kernels read it."""
    if x.dtype == torch.int64 and dtype == torch.int32:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype).contiguous().expand(shape)


def _function(module: ModuleType) -> Callable[..., tuple[Any, ...]]:
    """Return a copy of the module's `attention` that returns the operands of its operators instead of calling them."""
    rows = (None,) * len(module.SIGNATURE.rows)

    def operators(shapes: Any, return_rows: bool, q: Any, k: Any, v: Any, *operands: Any) -> tuple[Any, ...]:
        return operands, *rows

    of = module.attention
    copy = FunctionType(of.__code__, {**of.__globals__, "OPERATORS": operators}, of.__name__, of.__defaults__)
    copy.__kwdefaults__ = of.__kwdefaults__
    return copy
