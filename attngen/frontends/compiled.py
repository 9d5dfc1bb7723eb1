"""`flex_attention` inside torch.compile. While it traces a call, the functions' module is found or built, as a constant
of the graph.

torch.compile follows `leaves`, so it sees the tensors that the functions hold, which become inputs of the graph, and
traces again where a number is another one.
"""

from __future__ import annotations

from inspect import ismethod
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.torch_version import TorchVersion

from attngen.api import stay
from attngen.errors import AttngenError
from attngen.frontends import pairs
from attngen.frontends.block_masks import is_block_mask
from attngen.frontends.trace import Mod, leaves
from attngen.ir.sizes import Sizes

# For each call that was traced: the module, the plan of its block mask, tensors that say which blocks are in its lists,
# and whether its score forgets products. torch.compile reads a dict once for a whole graph, and attributes of a module
# when they are asked for.
KEPT = ModuleType("kept")
OLD = (
    TorchVersion(torch.__version__) < "2.12"
)  # it takes no block mask for a constant, and does not follow what a module holds
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
    """flex_attention's call, as torch.compile traces it."""
    arguments = (query, key, value, score_mod, block_mask, scale, return_lse, return_aux)
    mask_mod = block_mask.mask_mod if is_block_mask(block_mask) else block_mask
    if OLD and (is_block_mask(block_mask) or ismethod(score_mod) or ismethod(mask_mod)):
        torch._dynamo.graph_break(msg="flex_attention: a block mask or a method is part of a graph from torch 2.12 on")
        return _outside(*arguments)
    try:
        held = [x for mod in (score_mod, mask_mod) if mod is not None for _, x in leaves(mod)]
    except AttributeError:  # of what the compiled function defines, torch.compile has no code to look into
        torch._dynamo.graph_break(
            msg="flex_attention: a function is defined inside of what is compiled; expected one from outside of it"
        )
        return _outside(*arguments)
    tensors = [x for x in held if isinstance(x, torch.Tensor)]
    numbers = tuple(_known(x) for x in held if not isinstance(x, torch.Tensor))
    sizes = (0, query.shape[1], key.shape[1], 0, 0)
    if tensors or is_block_mask(block_mask):  # whose dimensions are named where they are as long
        sizes = tuple(_known(n) for n in (query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2]))
    lse, largest = return_lse, False
    if return_aux is not None:
        lse, largest = return_aux.lse, return_aux.max_scores
    widths = (query.shape[3], value.shape[3])
    kept, places, reason = _found(
        *pairs.owned(score_mod),
        *pairs.owned(block_mask),
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
    module, plan, lists, forgets = getattr(KEPT, kept)
    if forgets:
        query, key = pairs.without_products(query, key)
    inputs: dict[str, Any] = {}
    for table, at in places:
        inputs[table] = pairs.as_input(tensors[at] if at >= 0 else lists[-1 - at])
    if plan is not None:
        inputs["plan"] = plan
    return pairs.results(module, query, key, value, inputs, scale, lse, largest, return_aux is not None)


def _known(x: Any) -> Any:
    """A number that torch.compile has guarded: it may hold others as symbols, and keys of a dict are none."""
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
    """The name of what is kept for a call; for each input the place of a tensor among those that the functions hold,
    or, as -1 - place, among those that are kept; and a reason if there is nothing that a graph can call. Functions are
    as `owned` says them.

    `numbers` are those that the functions hold: torch.compile takes what this gives for another call with equal
    arguments.
    """
    score_mod, block_mask = _joined(score, of_score), _joined(mask, of_mask)
    if isinstance(block_mask, BlockMask) and not is_block_mask(block_mask):
        return (
            "",
            (),
            "flex_attention: a block mask is made inside of what is compiled; expected one from outside of it",
        )
    try:
        of_call = Sizes(*sizes)
        masked, pair = pairs.found(score_mod, block_mask, of_call)
        if pair.apart[1]:
            return "", (), "flex_attention: products of rows become columns of q and k outside of torch.compile alone"
        module = stay(pairs.module_of(pair, pair.whole, dtype, widths, of_call, largest))
    except (AttngenError, ValueError, TypeError, IndexError) as error:
        return "", (), str(error)
    mods = (score_mod, block_mask.mask_mod if masked else block_mask)
    held = [x for mod in mods if mod is not None for _, x in leaves(mod) if isinstance(x, torch.Tensor)]
    places: list[tuple[str, int]] = []
    lists: list[torch.Tensor] = []
    of_lists = (
        []
        if masked is None or masked.mask_mod in (None, block_mask.mask_mod)
        else [x for _, x in leaves(masked.mask_mod)]
    )
    for table in pair.whole.tables:
        at = next((i for i, x in enumerate(held) if x is table.tensor), None)
        if at is None and any(x is table.tensor for x in of_lists):
            lists.append(table.tensor)
            at = -len(lists)
        if at is None:
            return (
                "",
                (),
                f"flex_attention: `{table.name}` is not among what the functions hold, so torch.compile would not see it change",
            )
        places.append((table.name, at))
    plan = None
    if masked and hasattr(module, "LISTS"):
        query, key = (
            torch.empty(widths[0], dtype=dtype, device=device).expand(sizes[0], h, n, -1)
            for h, n in zip(sizes[1:3], sizes[3:])
        )
        inputs = {table.name: pairs.as_input(table.tensor) for table in pair.whole.tables}
        plan = pairs.planned(masked, module, query, key, inputs, of_call)
    kept = f"call_{len(vars(KEPT))}"
    setattr(KEPT, kept, (module, plan, tuple(lists), pair.whole.forgets))
    return kept, tuple(places), ""


def _joined(mod: Any, of: Any) -> Any:
    """What `owned` has taken apart."""
    return None if mod is pairs.nothing else mod if of is pairs.nothing else MethodType(mod, of)


_outside = torch.compiler.disable(pairs.call, reason="attngen.flex_attention could not be part of this graph")
