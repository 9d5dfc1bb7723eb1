"""One rank's part of a batch for a model that `register(mesh=...)` runs."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Mapping
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attngen.distributed.agreement import digest
from attngen.distributed.mesh import groups_of, rank_in
from attngen.distributed.planned import layout_of
from attngen.distributed.visible import Visible, count
from attngen.errors import AttngenError
from attngen.integrations.transformers.formula import Formula, in_documents
from attngen.integrations.transformers.layer import Layer, Padded
from attngen.integrations.transformers.mask import Mask
from attngen.integrations.transformers.ranks import BatchPlan, OverRanks
from attngen.ir import Module

ROWS = ("input_ids", "inputs_embeds", "labels", "position_ids", "attention_mask")
STARTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")  # of packed documents
IGNORED = ("max_length_q", "max_length_k", "use_cache")  # longest documents; they follow from the starts
NO_LABEL = -100
ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")
MOST_LAYOUTS = 16  # remembered, of batches whose masks read no data


def shard_batch(batch: Mapping[str, Any], model: torch.nn.Module, *, data_parallel: Any = None) -> dict[str, Any]:
    """Return this rank's part of a batch, to call the model with: `model(**shard_batch(batch, model)).loss`.

    All ranks of the mesh have the same batch; the first one is compared. Its rows are divided among them so that the
    sum of the layers' visible scores is balanced. Ranks may have different numbers of rows, and no sequence has to be
    padded. Labels are shifted in the whole sequence: a row's label is the next token, of whichever rank, and the last
    row of a sequence or of a packed document has none. The loss is the sum over this rank's rows divided by the number
    of labels of the whole batch, so that losses and gradients of the ranks add up to those of one process: see
    `attngen.distributed.sum_gradients`.

    Args:
        batch: of whole sequences. `input_ids` int64 [B, N], or `inputs_embeds` [B, N, width].
            Optional: `labels` int64 [B, N], as transformers takes them, -100 where there is none.
            `position_ids` int64 [B, N]; without `attention_mask`, documents are packed where they do not rise by 1.
            `cu_seqlens` or `cu_seq_lens_q`, int32 or int64 [documents + 1]: the starts of documents packed into one
            row, and the end of the last. `attention_mask` [B, N], 0 where a key is padding.
            `num_items_in_batch`: a number of labels in place of this batch's, as for accumulated gradients.
        model: of the name that was registered with a mesh; also wrapped by FSDP or DDP.
        data_parallel: a process group, or a mesh of one dimension, of ranks with other sequences of the batch: labels
            are counted in all of them. All of them call this.

    Returns:
        `input_ids` or `inputs_embeds`, `position_ids`, `labels` and `shift_labels` (equal, shifted) of this rank's
        rows; `num_items_in_batch`, int64 []; `batch_plan`, which the model passes to its layers; `use_cache`, False.

    Raises:
        AttngenError: one sentence: the batch or the model cannot be computed over ranks.
    """
    model = _unwrapped(model)
    ranks = _ranks_of(model)
    _check_model(model, "labels" in batch)
    given = {name: x for name, x in batch.items() if x is not None}
    known = (*ROWS, *STARTS, *IGNORED, "num_items_in_batch")
    if unknown := next((name for name in given if name not in known), None):
        raise AttngenError(f"shard_batch: the batch has `{unknown}`; expected only {', '.join(known)}")
    whole, tokens = _whole_rows(given)
    sizes, device = tokens.shape[:2], tokens.device
    _check_equal(ranks, {**whole, **{name: torch.as_tensor(given[name]) for name in STARTS if name in given}})
    documents = _documents(given, whole, sizes)
    inputs = {} if documents is None else {"document_ids": documents.to(device)}
    padding = whole.pop("attention_mask", None)
    if padding is not None and not bool((padding != 0).all()):
        inputs["key_padding"] = padding.to(device) != 0
    whole.setdefault("position_ids", _positions(documents, sizes, device))
    plan = plan_of(ranks, model, sizes, inputs)
    found: dict[str, Any] = {"batch_plan": plan, "use_cache": False}
    if "labels" in whole:
        labels = whole["labels"] = _shifted(whole["labels"], documents)
        items = given.get("num_items_in_batch")
        found["num_items_in_batch"] = _labels(labels, data_parallel) if items is None else items
    rows = torch.tensor(_rows_of_rank(ranks, plan), device=device)
    found |= {name: x.index_select(1, rows.to(x.device)) for name, x in whole.items()}
    return found | ({"shift_labels": found["labels"]} if "labels" in found else {})


def _whole_rows(given: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a batch that have a value for each token, and that of the tokens. Raise AttngenError if
    their sizes differ."""
    of_tokens = next((name for name in ("input_ids", "inputs_embeds") if name in given), None)
    if of_tokens is None:
        raise AttngenError("shard_batch: the batch has neither `input_ids` nor `inputs_embeds`; expected one of them")
    whole: dict[str, torch.Tensor] = {name: given[name] for name in ROWS if name in given}
    sizes = whole[of_tokens].shape[:2]
    for name, x in whole.items():
        whole[name] = x = x.expand(sizes) if name == "position_ids" and x.dim() == 2 and x.shape[0] == 1 else x
        if x.shape[:2] != sizes or x.dim() != (3 if name == "inputs_embeds" else 2):
            raise AttngenError(
                f"shard_batch: {name} is {list(x.shape)}; expected {list(sizes)} as {of_tokens}, of whole sequences"
            )
    return whole, whole[of_tokens]


def plan_of(ranks: OverRanks, model: Any, sizes: torch.Size, inputs: dict[str, torch.Tensor]) -> BatchPlan:
    """Return the plan of a batch of whole sequences [B, N], balanced by the sum of the layers' visible scores.

    inputs: what masks read, as in BatchPlan. Without any, plans are remembered.
    """
    kinds: Counter[Formula] = Counter()
    for formula, layers in _kinds(ranks, model, sizes).items():
        kinds[in_documents(formula) if "document_ids" in inputs else formula] += layers
    if why := next((formula.why for formula in kinds if formula.why), ""):
        raise AttngenError(f"shard_batch: {why}")
    at = (tuple(kinds.items()), sizes)
    if not inputs and at in ranks.layouts:
        return ranks.layouts[at]
    padded: Padded = "padded" if "key_padding" in inputs else ""
    chunk, counted = ranks.chunk, []
    for formula, layers in kinds.items():
        found = count(_semantics(formula, padded, chunk), sizes[1], chunk, inputs)
        scores = found.scores.astype("int64") * layers
        counted.append(Visible(sizes[1], chunk, scores, found.planes, found.exact))
    layout = layout_of(reduce(_added, counted), ranks.mesh, ranks.method, ranks.balance)
    if not all(layout.owned):
        raise AttngenError(
            f"shard_batch: {sizes[1]} rows in chunks of {chunk} leave some of {layout.ranks} ranks without any; "
            f"expected {chunk * (layout.ranks - 1) + 1} rows or more, or a smaller `chunk`"
        )
    plan = BatchPlan(layout, inputs)
    if not inputs:
        for old in list(itertools.islice(ranks.layouts, max(0, len(ranks.layouts) - MOST_LAYOUTS + 1))):
            del ranks.layouts[old]
        ranks.layouts[at] = plan
    return plan


def _added(one: Visible, other: Visible) -> Visible:
    """Return the visible scores of the layers of both."""
    scores = one.scores * other.planes + other.scores * one.planes
    return Visible(one.seq_len, one.chunk, scores, one.planes * other.planes, one.exact and other.exact)


def _unwrapped(model: Any) -> Any:
    """Return the model inside of torch.compile, DDP and PEFT."""
    model = getattr(model, "_orig_mod", model)
    model = model if hasattr(model, "config") else getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _ranks_of(model: Any) -> OverRanks:
    """Return what `register` gave transformers under the model's name."""
    from transformers import AttentionInterface

    name = getattr(_config(model), "_attn_implementation", None)
    found = getattr(AttentionInterface().get(name), "__self__", None)
    if not isinstance(found, OverRanks):
        raise AttngenError(
            f"shard_batch: the model's attn_implementation is {name!r}; expected the name that was registered with "
            "`register(mesh=...)`"
        )
    return found


def _config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _check_model(model: Any, labelled: bool) -> None:
    """Raise AttngenError for a model that has layers other than attention that read several rows, or another loss."""
    config, why = _config(model), ""
    others = set(getattr(config, "layer_types", None) or ()) - {*ATTENDS}
    mixes = next((type(x).__name__ for x in model.modules() if isinstance(x, (torch.nn.Conv1d, torch.nn.RNNBase))), "")
    if getattr(config, "is_encoder_decoder", False):
        why = "has an encoder and a decoder; expected one sequence"
    elif not getattr(model, "_supports_attention_backend", False):
        why = "does not take its attention from transformers' interface"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        why = "takes no position_ids, and a rank has other positions than 0, 1, ..."
    elif others or mixes:
        why = f"has layers ({', '.join(sorted(others)) or mixes}) that read rows of other ranks"
    elif getattr(config, "attn_temperature_tuning", False):
        why = "scales queries by their number on the rank; expected `attn_temperature_tuning=False`"
    elif getattr(config, "output_router_logits", False):
        why = "adds a loss of its router, which is no sum over rows; expected `output_router_logits=False`"
    elif labelled and (loss := getattr(model, "loss_type", "ForCausalLM")) != "ForCausalLM":
        why = f"has the loss {loss}; expected that of the next token, or a batch without labels"
    if why:
        raise AttngenError(f"shard_batch: a {config.model_type} {why}")


def _kinds(ranks: OverRanks, model: Any, sizes: torch.Size) -> Counter[Formula]:
    """Return the masks of the model's layers, and how many layers have each."""
    from transformers.masking_utils import create_masks_for_generate

    config = _config(model)
    rows = torch.empty((*sizes, 1), device="meta")
    made = create_masks_for_generate(config, rows, None, None)
    if isinstance(made, Mask):
        return Counter([made.formula])
    types = Counter(getattr(config, "layer_types", None) or ())
    if not isinstance(made, dict) or not all(isinstance(mask, Mask) for mask in made.values()):
        raise AttngenError(f"shard_batch: transformers makes no masks for a {config.model_type}; expected a decoder")
    found: Counter[Formula] = Counter()
    for kind, mask in made.items():
        found[mask.formula] += types[kind]
    return found


@cache
def _semantics(formula: Formula, padded: Padded, chunk: int) -> Module:
    """Return the IR of a layer with a mask, of which only the mask matters."""
    from attngen.builders import build_module
    from attngen.spec import make_spec

    layer = Layer("mha", (64, 64), False, False, None, False, False, False, False, chunk)
    return build_module(make_spec(layer.spec(formula, padded)))


def _documents(given: Mapping[str, Any], whole: Mapping[str, torch.Tensor], sizes: torch.Size) -> torch.Tensor | None:
    """Return the document of each row, int32 [B, N]; None if each sequence is one."""
    from transformers.masking_utils import find_packed_sequence_indices

    starts = next((given[name] for name in STARTS if name in given), None)
    if starts is not None:
        starts = torch.as_tensor(starts)
        ends = starts.tolist()
        if sizes[0] != 1 or ends[:1] != [0] or ends[-1:] != [sizes[1]] or ends != sorted(ends):
            raise AttngenError(
                f"shard_batch: cu_seqlens are {_few(ends)} for {sizes[0]} sequences of {sizes[1]} rows; expected one "
                "row, with starts that rise from 0 to its end"
            )
        rows = torch.arange(sizes[1], device=starts.device)
        return torch.searchsorted(starts[1:].contiguous(), rows.to(starts.dtype), right=True).int()[None]
    if "position_ids" not in whole or "attention_mask" in whole:
        return None
    found: torch.Tensor | None = find_packed_sequence_indices(whole["position_ids"])
    return None if found is None else found.int()


def _check_equal(ranks: OverRanks, batch: Mapping[str, torch.Tensor]) -> None:
    """Raise AttngenError, on all ranks, if the first batch of a mesh is not the same on them."""
    if ranks.compared:
        return
    own = int.from_bytes(digest(*((name, x.tolist()) for name, x in sorted(batch.items())))[:7], "big")
    groups = groups_of(ranks.mesh)
    bounds = torch.tensor([own, -own], device=next(iter(batch.values())).device)
    for group in groups:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if int(bounds[0]) != -int(bounds[1]):
        raise AttngenError(
            "shard_batch: ranks of the mesh have different batches; expected the same whole batch on all of them: give "
            "each rank the samples of its place among other meshes, not of its own rank"
        )
    ranks.compared = True


def _few(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) < 9 else f"[{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}]"


def _positions(documents: torch.Tensor | None, sizes: torch.Size, device: torch.device) -> torch.Tensor:
    """Return the position of each row in its document, int64 [B, N]."""
    at = torch.arange(sizes[1], device=device).expand(sizes)
    if documents is None:
        return at
    documents = documents.to(device)
    first = torch.searchsorted(documents.contiguous(), documents.contiguous())
    return at - first


def _shifted(labels: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Return the label of the next row, int64 [B, N]; none for the last row of a sequence or document."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    if documents is not None:
        ends = torch.nn.functional.pad(documents.diff(dim=1) != 0, (0, 1), value=True)
        shifted = shifted.masked_fill(ends.to(labels.device), NO_LABEL)
    return shifted


def _labels(labels: torch.Tensor, data_parallel: Any) -> torch.Tensor:
    """Return the number of labels of the whole batch, int64 []."""
    found = (labels != NO_LABEL).sum()
    if data_parallel is not None:
        group = data_parallel.get_group() if isinstance(data_parallel, DeviceMesh) else data_parallel
        dist.all_reduce(found, group=group)
    return found


def _rows_of_rank(ranks: OverRanks, plan: BatchPlan) -> list[int]:
    """Return the rows of this rank in the whole sequence, in its order."""
    own = plan.layout.owned[rank_in(ranks.mesh)]
    return [row for chunk in own for row in plan.layout.rows_of(chunk)]
