"""What a call derives from its inputs before kernels run, computed here on the CPU: for peers in benchmarks, and for
tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from attngen.builders.programs import IN_CACHE, alone
from attngen.interp.host import execute_host
from attngen.scores import derive_functions

if TYPE_CHECKING:
    import torch

    from attngen.ir.graph import Derived
    from attngen.ir.sizes import Sizes
    from attngen.spec import Spec

TILE = 4096  # positions that an executed program takes at a time


def function(name: str) -> Any:
    """A function that a mask or modifier declares. Its file does not import torch, as the modules do that its source
    is printed into."""
    import torch

    f = derive_functions()[name]
    return FunctionType(f.__code__, {**f.__globals__, "torch": torch}, name, f.__defaults__)


def derive(
    spec: Spec, sizes: Sizes, given: Mapping[str, Any], device: torch.device | str, programs: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors that a spec's masks and modifiers derive, by name, on the device; without `programs`, those of Python
    functions alone.

    given: the inputs of a call; with `cache_seqlens`, int32 [B], of one over a cache: then what programs find over a
    cache.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for d in spec.derived():
        if d.program and programs:
            make = executed_in_cache if "cache_seqlens" in given else executed
            found |= {name: x.to(device) for name, x in make(d, sizes, given).items()}
        if d.program:
            continue
        sources = [
            given[s] if s in given else torch.device(device) if s == "device" else sizes.of(s) for s in d.sources
        ]
        made = function(d.function)(*sources)
        found |= dict(zip(d.names, made if isinstance(made, tuple) else (made,)))
    return found


def executed(d: Derived, sizes: Sizes, given: Mapping[str, Any], tile: int = TILE) -> dict[str, torch.Tensor]:
    """The results of a host program by name, executed on NumPy, `tile` positions at a time."""
    import torch

    module = alone(d.program)
    sources = {s.upper() if s in given else s: given[s].cpu().numpy() if s in given else sizes.of(s) for s in d.sources}
    results = execute_host(module, module.hosts[0], sources, {"BLOCK_Q": tile, "BLOCK_KV": tile})
    return {name: torch.from_numpy(results[name.upper()]).int() for name in d.names}


def executed_in_cache(d: Derived, sizes: Sizes, given: Mapping[str, Any], tile: int = TILE) -> dict[str, torch.Tensor]:
    """The same over a cache, of queries that append nothing: by the program that finds it there."""
    import torch

    module = alone(d.program + IN_CACHE)
    names = [a.name for a in module.hosts[0].args if a.role == "in"]
    sources = {name: given[name.lower()].cpu().numpy() for name in names} | {"Nq": sizes.n_q, "Nn": 0}
    results = execute_host(module, module.hosts[0], sources, {"BLOCK_Q": tile, "BLOCK_KV": tile})
    return {name.lower(): torch.from_numpy(x).int() for name, x in results.items()}
