"""Tensors that a call derives from its inputs before kernels run, computed on the CPU for benchmark peers and tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from attngen.builders.programs import IN_CACHE, program_module
from attngen.interp.host import execute_host
from attngen.scores import derive_functions

if TYPE_CHECKING:
    import torch

    from attngen.ir.module import Derived
    from attngen.ir.sizes import Sizes
    from attngen.spec import Spec

TILE = 4096  # positions per program of an executed host program


def function(name: str) -> Any:
    """Return a function that a mask or modifier declares, with torch in its globals. Its file does not import torch;
    the modules do into which its source is printed."""
    import torch

    f = derive_functions()[name]
    return FunctionType(f.__code__, {**f.__globals__, "torch": torch}, name, f.__defaults__)


def derive(
    spec: Spec, sizes: Sizes, given: Mapping[str, Any], device: torch.device | str, programs: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors that a spec's masks and modifiers derive, by name, on the device; without `programs`, only
    those of Python functions.

    given: the inputs of a call. With `cache_seqlens`, int32 [B], it is a call with a KV cache, and the variants of the
    host programs for a KV cache are executed.
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
    """Return the results of a host program by name, executed on NumPy with `tile` positions per program."""
    import torch

    module = program_module(d.program)
    sources = {s.upper() if s in given else s: given[s].cpu().numpy() if s in given else sizes.of(s) for s in d.sources}
    results = execute_host(module, module.hosts[0], sources, {"BLOCK_Q": tile, "BLOCK_KV": tile})
    return {name: torch.from_numpy(results[name.upper()]).int() for name in d.names}


def executed_in_cache(d: Derived, sizes: Sizes, given: Mapping[str, Any], tile: int = TILE) -> dict[str, torch.Tensor]:
    """Return the same for a call with a KV cache that appends no keys, by the variant of the program for it."""
    import torch

    module = program_module(d.program + IN_CACHE)
    names = [a.name for a in module.hosts[0].args if a.role == "in"]
    sources = {name: given[name.lower()].cpu().numpy() for name in names} | {"Nq": sizes.n_q, "Nn": 0}
    results = execute_host(module, module.hosts[0], sources, {"BLOCK_Q": tile, "BLOCK_KV": tile})
    return {name.lower(): torch.from_numpy(x).int() for name, x in results.items()}
