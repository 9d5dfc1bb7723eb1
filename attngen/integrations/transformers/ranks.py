"""Attention of a model whose sequences lie on several ranks (context parallelism), as transformers calls it.

Masks and positions are those of the whole sequences. All layers share the rows of a batch's plan, and each kind of
layers has its own list of keys to receive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, cast, get_args

import torch

from attngen.distributed.balance import Balance
from attngen.distributed.layout import Layout
from attngen.distributed.planned import attention, plan
from attngen.distributed.shard import METHODS, Shard
from attngen.errors import AttngenError
from attngen.integrations.transformers.attend import cast_for_autocast, unsupported
from attngen.integrations.transformers.formula import MaskFunction, formula, in_documents, of_rows
from attngen.integrations.transformers.layer import Padded, layer_of, module_of
from attngen.integrations.transformers.mask import Mask

CHUNKS = range(64, 4097, 64)  # those of a spec's `positions`
BALANCES = get_args(Balance)


@dataclass(eq=False)
class BatchPlan:
    """Which rank holds which rows of a batch. `shard_batch` makes it, and a model passes it to its layers.

    layout: the rows of each rank, the same in all sequences of the batch.
    inputs: what masks read, of the whole sequences: `document_ids` int32 [B, N], `key_padding` bool [B, N].
    shards: the plan of each kind of layers, made at its first call.
    """

    layout: Layout
    inputs: dict[str, torch.Tensor]
    shards: dict[Any, Shard] = field(default_factory=dict)

    @property
    def padded(self) -> Padded:
        return "padded" if "key_padding" in self.inputs else ""


class OverRanks:
    """The attention function and the mask function of transformers for the ranks of a mesh.

    mesh: a process group or a mesh, chunk: rows of a chunk, method, balance: see `attngen.distributed.plan`.
    """

    def __init__(self, mesh: Any, chunk: int, method: str, balance: str) -> None:
        allowed: list[tuple[str, Any, Any]] = [("method", method, ("auto", *METHODS)), ("balance", balance, BALANCES)]
        allowed += [("chunk", chunk, CHUNKS)]
        for name, x, among in allowed:
            if x not in among:
                shown = f"a multiple of 64, up to {CHUNKS[-1]}" if name == "chunk" else ", ".join(among)
                raise AttngenError(f"register: {name} is {x!r}; expected {shown}")
        self.mesh, self.chunk, self.method, self.balance = mesh, chunk, method, cast(Balance, balance)
        self.compared = False  # whether a batch was found to be the same on all ranks
        self.layouts: dict[Any, BatchPlan] = {}  # of batches whose masks read no data

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mask_of(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int = 0,
        mask_function: MaskFunction | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> Mask:
        """Make the mask of a kind of layers; transformers calls this in each forward, with the sizes of this rank's
        rows. The formula is that of whole sequences, without documents and padding, which are the plan's.

        Raises:
            AttngenError: one sentence: the mask depends on more than positions, such as a tensor of this rank's rows.
        """
        from transformers.masking_utils import causal_mask_function

        why = "a KV cache has keys; expected `use_cache=False`" if q_length != kv_length or kv_offset else ""
        why = why or ("`attention_mask` came with the batch of a rank" if attention_mask is not None else "")
        found, tensors = formula(of_rows(mask_function or causal_mask_function), 0)
        if found.tables or found.packed:
            why = why or "its mask reads a tensor, which has only this rank's rows"
        if why := why or found.why:
            raise _refused("the model", why)
        return Mask((batch_size, q_length, kv_length), found, {}, None, 0, _no_elements)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        batch_plan: BatchPlan | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of one layer with the keys of all ranks. All of them call it, and run its backward.

        Args: see `attend`, with this rank's rows of query, key and value; batch_plan is of `shard_batch`.

        Returns:
            ([B, rows, Hq, Dv], None). Gradients of learned inputs are this rank's part.

        Raises:
            AttngenError or ValueError: one sentence: the layer or the batch cannot be computed over ranks.
        """
        query, key, value = cast_for_autocast(query, key, value)
        mask, why = attention_mask, ""
        if batch_plan is None:
            why = "no plan of its batch arrives at its attention; expected a call with what `shard_batch` returns"
        elif mask is None:
            why = "it has no mask, which may mean causal or all keys"
        elif dropout:
            why = f"it drops weights with probability {dropout:g}; expected `attention_dropout=0`"
        elif position_bias is not None:
            why = "its position bias has only this rank's rows"
        if why := why or unsupported(mask, query, key, value, more):
            raise _refused(type(module).__name__, why)
        assert batch_plan is not None
        wanted = in_documents(mask.formula) if "document_ids" in batch_plan.inputs else mask.formula
        if wanted.why:
            raise _refused(type(module).__name__, wanted.why)
        layer = replace(layer_of(query, key, value, 0.0, softcap, s_aux is not None, False, False), chunk=self.chunk)
        built = module_of(layer, wanted, batch_plan.padded)
        inputs: dict[str, Any] = {**batch_plan.inputs}
        inputs |= {} if s_aux is None else {"sink": s_aux.float()}
        inputs |= {} if scaling is None else {"scale": scaling}
        shard = self.shard(batch_plan, built, query, key)
        out = attention(built, query, key, value, plan=shard, sum_gradients=False, **inputs)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).contiguous(), None

    def shard(self, of: BatchPlan, built: ModuleType, query: torch.Tensor, key: torch.Tensor) -> Shard:
        """Return the plan of a kind of layers for a batch."""
        heads, at = (query.shape[1], key.shape[1]), (built, query.shape[:2], key.shape[1])
        if at not in of.shards:
            of.shards[at] = plan(
                built,
                self.mesh,
                seq_len=of.layout.seq_len,
                method=self.method,
                layout=of.layout,
                inputs=of.inputs,
                q_heads=heads[0],
                kv_heads=heads[1],
                batch=query.shape[0],
            )
        return of.shards[at]


def _refused(what: str, why: str) -> AttngenError:
    return AttngenError(f"transformers: over ranks attngen cannot run {what}: {why}")


def _no_elements() -> torch.Tensor:
    raise _refused("the model", "it reads the elements of its mask, of which a rank has none")
