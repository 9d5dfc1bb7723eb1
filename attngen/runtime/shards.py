"""Calls with DTensors: each rank computes its sequences, heads or queries; the forward needs no communication."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Names of dimensions 0, 1 and 2 of q. The dimensions of the other tensors have the same names.
_DIMS = ("B", "Hq", "Nq")
_WORDS = {"B": "sequences", "Hq": "heads", "Nq": "queries"}
_KV = ("B", "Hkv", "Nk")


def is_dtensor(x: Any) -> bool:
    """True if x is a DTensor of torch.distributed."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(x, found.DTensor)


def check_local(argument: str, x: torch.Tensor) -> None:
    """Raise NotImplementedError if x is a DTensor in a call with an argument that is not available for DTensors."""
    if is_dtensor(x):
        raise NotImplementedError(
            f"attention: {argument} is not known of DTensors; expected a call of local tensors: to_local()"
        )


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return x; for a DTensor, a tensor with its global sizes, dtype and device over one row of memory, because plans
    read only sizes."""
    return torch.empty(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape) if is_dtensor(x) else x


def on_shards(
    call: Callable[..., Sequence[torch.Tensor]],
    shards: Sequence[str],
    tensors: Sequence[Any],
    dims: Sequence[Sequence[str]],
    numbers: Sequence[Any],
) -> list[torch.Tensor]:
    """Return the results of `call(*tensors, *numbers)` as DTensors with q's placements: each rank calls it with its
    shards.

    shards: the dimensions of q that may be sharded. tensors: q, k and v, which are DTensors, and operands, which are
    DTensors or replicated tensors. dims: the names of the dimensions of each operand. The gradient of a tensor that
    several ranks read is summed over these ranks.

    Raises:
        ValueError or TypeError: one sentence that says how the tensors are placed and what was expected.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    q, k, v, *_ = tensors
    for name, x in zip("qkv", (q, k, v)):
        if not is_dtensor(x) or x.device_mesh != q.device_mesh:
            given = f"{name} is on another mesh" if is_dtensor(x) else f"{name} is a {type(x).__name__}"
            raise TypeError(
                f"attention: q, k or v is a DTensor, and {given}; expected DTensors of one mesh for all three"
            )
    mesh: Any = q.device_mesh
    one_head = k.shape[1] == 1
    split = [_split(placement, shards) for placement in q.placements]
    _check_even(q, k, split, mesh)

    def part(at: int, x: Any) -> torch.Tensor | None:
        if x is None:
            return None
        names = _DIMS if at == 0 else _KV if at < 3 else dims[at - 3]
        placed: list[Any] = []
        summed: list[Any] = []
        for dim in split:
            of_x = "Hkv" if dim == "Hq" and dim not in names and not one_head else dim
            shard = of_x in names and (at < 3 or x.shape[names.index(of_x)] > 1)  # a dimension of 1 is replicated
            placed.append(Shard(names.index(of_x)) if shard else Replicate())
            summed.append(Partial() if dim and not shard else placed[-1])
        if not is_dtensor(x):
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if at < 3 and any(have != want and not have.is_replicate() for have, want in zip(x.placements, placed)):
            raise ValueError(
                f"attention: {'qkv'[at]} has placements {list(x.placements)} and q {list(q.placements)}; "
                f"expected {placed} of it, or a DTensor that is replicated"
            )
        local: torch.Tensor = x.redistribute(mesh, placed).to_local(grad_placements=summed)
        return local

    results = call(*(part(at, x) for at, x in enumerate(tensors)), *numbers)
    return [DTensor.from_local(x, mesh, q.placements, run_check=False) for x in results]


def _check_even(q: Any, k: Any, split: Sequence[str], mesh: Any) -> None:
    """Raise ValueError if the ranks do not get equal numbers of sequences, heads or queries.

    split: the dimension of q that each dimension of the mesh shards; empty where it replicates.
    """
    one_head = k.shape[1] == 1
    for dim in dict.fromkeys(filter(None, split)):
        ranks = 1
        for of_mesh, name in enumerate(split):
            ranks *= mesh.size(of_mesh) if name == dim else 1
        for name, x in (("q", q), ("k", k)):
            whole = name == "k" and (dim == "Nq" or (dim == "Hq" and one_head))
            count = x.shape[_DIMS.index(dim)]
            if count % ranks and not whole:
                raise ValueError(
                    f"attention: {name} has {count} {_WORDS[dim]}, sharded over {ranks} ranks; expected a multiple of "
                    f"{ranks}, so that each rank has the keys of its queries"
                )


def _split(placement: Any, shards: Sequence[str]) -> str:
    """Return the dimension of q that a placement shards; empty text if it replicates. Raise ValueError for other
    placements."""
    if placement.is_replicate():
        return ""
    dim = placement.dim if placement.is_shard() else None
    if dim is not None and dim % 4 < 3 and _DIMS[dim % 4] in shards:
        return _DIMS[dim % 4]
    possible = (
        " or ".join(f"Shard({_DIMS.index(name)}) ({_WORDS[name]})" for name in _DIMS if name in shards) or "no Shard"
    )
    why = (
        "; the mask or the scores count positions, heads or sequences, from 0 on each rank"
        if dim is not None and dim % 4 < 3
        else ""
    )
    raise ValueError(f"attention: q has the placement {placement}{why}; expected Replicate, {possible}")
