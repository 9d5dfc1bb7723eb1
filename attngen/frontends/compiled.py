"""`flex_attention` inside torch.compile: while a call is traced, its module is found or built, as a constant of the
graph.

torch.compile follows `leaves`, so the tensors that the functions hold become inputs of the graph, and a number that
changes causes a recompilation.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import ismethod
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.torch_version import TorchVersion

from attngen.api import stay
from attngen.errors import AttngenError
from attngen.frontends import pairs
from attngen.frontends.block_masks import Masked, is_block_mask
from attngen.frontends.trace import Mod, Table, leaves
from attngen.ir.sizes import Sizes

# For each traced call: the module, the plan of its block mask, the tensors of the block mask's lists, and whether its
# score ignores q @ k. These are attributes of a module because torch.compile reads a dict once for a whole graph, and
# an attribute of a module on access.
KEPT = ModuleType("kept")
# Older torch.compile does not accept a block mask as a constant, and does not follow the attributes of a module.
OLD = TorchVersion(torch.__version__) < "2.12"
Found = tuple[str, tuple[tuple[str, int], ...], str]


def call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    return_lse: bool,
    return_aux: Any,
) -> Any:
    """Run flex_attention's call; torch.compile traces this function."""
    arguments = (query, key, value, score_mod, block_mask, scale, return_lse, return_aux)
    mask_mod = block_mask.mask_mod if is_block_mask(block_mask) else block_mask
    if OLD and (is_block_mask(block_mask) or ismethod(score_mod) or ismethod(mask_mod)):
        torch._dynamo.graph_break(msg="flex_attention: a block mask or a method is part of a graph from torch 2.12 on")
        return _outside(*arguments)
    try:
        held = [x for mod in (score_mod, mask_mod) if mod is not None for _, x in leaves(mod)]
    except AttributeError:  # torch.compile has no code object of a function that the compiled function defines
        torch._dynamo.graph_break(
            msg="flex_attention: a function is defined inside of the compiled function; expected one from outside of it"
        )
        return _outside(*arguments)
    tensors = [x for x in held if isinstance(x, torch.Tensor)]
    numbers = tuple(_known(x) for x in held if not isinstance(x, torch.Tensor))
    sizes = (0, query.shape[1], key.shape[1], 0, 0)
    if tensors or is_block_mask(block_mask):  # their dimensions are named after the sizes that they equal
        sizes = tuple(_known(n) for n in (query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2]))
    lse, largest = return_lse, False
    if return_aux is not None:
        lse, largest = return_aux.lse, return_aux.max_scores
    widths = (query.shape[3], value.shape[3])
    kept, places, reason = _found(
        *pairs.identity_of(score_mod),
        *pairs.identity_of(block_mask),
        numbers,
        query.dtype,
        str(query.device),
        widths,
        sizes,
        largest,
    )
    if reason:
        torch._dynamo.graph_break(msg=reason)
        return _outside(*arguments)
    module, plan, lists, ignores_qk = getattr(KEPT, kept)
    if ignores_qk:
        query, key = pairs.without_products(query, key)
    inputs: dict[str, Any] = {}
    for table, at in places:
        inputs[table] = pairs.as_input(tensors[at] if at >= 0 else lists[-1 - at])
    if plan is not None:
        inputs["plan"] = plan
    return pairs.results(module, query, key, value, inputs, scale, lse, largest, return_aux is not None)


def _known(x: Any) -> Any:
    """Return a number that torch.compile has specialized: it may hold numbers as symbols, but not the keys of a
    dict."""
    return next(iter({x: None}))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _found(
    score: Mod,
    of_score: Any,
    mask: Any,
    of_mask: Any,
    numbers: tuple[Any, ...],
    dtype: torch.dtype,
    device: str,
    widths: tuple[int, int],
    sizes: tuple[int, ...],
    largest: bool,
) -> Found:
    """Find or build the module of a call. Functions are passed as `identity_of` returns them.

    Return (name, places, reason): the attribute of KEPT; for each input the place of its tensor among those that the
    functions hold, or -1 - place among those in KEPT; and the reason if the call cannot be part of a graph.

    `numbers` are those that the functions hold. They are arguments because torch.compile reuses this result for calls
    with equal arguments.
    """
    score_mod, block_mask = _as_function(score, of_score), _as_function(mask, of_mask)
    if isinstance(block_mask, BlockMask) and not is_block_mask(block_mask):
        inside = "a block mask is made inside of the compiled function; expected one from outside of it"
        return "", (), f"flex_attention: {inside}"
    try:
        of_call = Sizes(*sizes)
        masked, pair = pairs.find_pair(score_mod, block_mask, of_call)
        if pair.split[1]:
            return "", (), "flex_attention: products of rows become columns of q and k only outside of torch.compile"
        module = stay(pairs.module_of(pair, pair.whole, dtype, widths, of_call, largest))
    except (AttngenError, ValueError, TypeError, IndexError) as error:
        return "", (), str(error)
    places, lists, missing = _places(pair.whole.tables, masked, score_mod, block_mask)
    if missing:
        unseen = "is not held by the functions, so torch.compile would not see it change"
        return "", (), f"flex_attention: `{missing}` {unseen}"
    plan = None
    if masked and hasattr(module, "LISTS"):
        query, key = (
            torch.empty(widths[0], dtype=dtype, device=device).expand(sizes[0], h, n, -1)
            for h, n in zip(sizes[1:3], sizes[3:])
        )
        inputs = {table.name: pairs.as_input(table.tensor) for table in pair.whole.tables}
        plan = pairs.plan_for(masked, module, query, key, inputs, of_call)
    kept = f"call_{len(vars(KEPT))}"
    setattr(KEPT, kept, (module, plan, tuple(lists), pair.whole.ignores_qk))
    return kept, tuple(places), ""


def _places(
    tables: Iterable[Table], masked: Masked | None, score_mod: Mod | None, block_mask: Any
) -> tuple[list[tuple[str, int]], list[torch.Tensor], str]:
    """Find the tensor of each table among those that the functions hold, or among the lists of the block mask.

    Return (places, lists, missing): (name, place) of each table, as `_found` returns them; the used tensors of the
    lists; and the name of the first table that is in neither, or empty text.
    """
    mods = (score_mod, block_mask.mask_mod if masked else block_mask)
    held = [x for mod in mods if mod is not None for _, x in leaves(mod) if isinstance(x, torch.Tensor)]
    reads_lists = masked is not None and masked.mask_mod not in (None, block_mask.mask_mod)
    of_lists = [x for _, x in leaves(masked.mask_mod)] if masked and reads_lists else []
    places: list[tuple[str, int]] = []
    lists: list[torch.Tensor] = []
    for table in tables:
        at = next((i for i, x in enumerate(held) if x is table.tensor), None)
        if at is None and any(x is table.tensor for x in of_lists):
            lists.append(table.tensor)
            at = -len(lists)
        if at is None:
            return [], [], table.name
        places.append((table.name, at))
    return places, lists, ""


def _as_function(mod: Any, of: Any) -> Any:
    """Return the function or method that `identity_of` was called with."""
    return None if mod is pairs.nothing else mod if of is pairs.nothing else MethodType(mod, of)


_outside = torch.compiler.disable(pairs.call, reason="attngen.flex_attention could not be part of this graph")
