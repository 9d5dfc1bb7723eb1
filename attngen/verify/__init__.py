"""The verifier: tables of rules by phase. Each file of this package has the rules of one topic.

A rule is a function that yields a sentence for each violation that it finds in a kernel. A backend adds rules for the
requirements of its compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from attngen.errors import VerifyError
from attngen.ir import PHASES, Kernel, Module
from attngen.ir.printer import print_module
from attngen.targets.common.base import Rule
from attngen.targets.registry import BACKENDS, SPECIALIZERS
from attngen.verify import host, statements
from attngen.verify.async_products import wgmma_waits
from attngen.verify.caches import zero_out_of_bounds
from attngen.verify.combine import combine
from attngen.verify.dependent_launch import dependent_launch
from attngen.verify.header import header
from attngen.verify.indexing import bounds_checked, indexing
from attngen.verify.masks import masks
from attngen.verify.order import ordered_accumulate, semaphore_order
from attngen.verify.outputs import outputs
from attngen.verify.pipe_types import warp_group_types
from attngen.verify.pipelined_loops import loop_bodies
from attngen.verify.portable import same_tiles
from attngen.verify.positions import positions
from attngen.verify.protocol import protocol
from attngen.verify.quantised import quantised
from attngen.verify.schedule import dropout, memory_space, scheduled_everywhere
from attngen.verify.scopes import all_used, defined_in_scope
from attngen.verify.scores import scores
from attngen.verify.split_d import split_d
from attngen.verify.structure import defined, latents, loops, references, signature, split_axis, split_kv
from attngen.verify.symbols import names
from attngen.verify.tiles import (
    block_lists,
    classified,
    covers,
    extremes,
    full_is_proven,
    load_rows,
    out_of_bounds_keys,
    unswitch,
)
from attngen.verify.types import types
from attngen.verify.updates import barriers, in_place, live, rewrites
from attngen.verify.warp_groups import warp_groups

_STRUCTURE: dict[str, Rule] = {
    "header": header,
    "signature": signature,
    "references": references,
    "defined": defined,
    "loops": loops,
    "split-axis": split_axis,
    "split-kv": split_kv,
    "latents": latents,
    "types": types,
    "indexing": indexing,
    "names": names,
    "bounds-checked": bounds_checked,
    "split-d": split_d,
    "rewrites": rewrites,
    "ordered-accumulate": ordered_accumulate,
    "positions": positions,
}
_SCHEDULED: dict[str, Rule] = {
    "classified": classified,
    "extremes": extremes,
    "covers": covers,
    "full-is-proven": full_is_proven,
    "unswitch": unswitch,
    "out-of-bounds-keys": out_of_bounds_keys,
    "load-rows": load_rows,
    "semaphore-order": semaphore_order,
    "dependent-launch": dependent_launch,
    "memory-space": memory_space,
}
_TARGET: dict[str, Rule] = {
    "block-lists": block_lists,
    "dropout": dropout,
    "barriers": barriers,
    "in-place": in_place,
    "scheduled-everywhere": scheduled_everywhere,
}
_WARP_SPECIALIZED: dict[str, Rule] = {
    "references": references,
    "defined": defined_in_scope,
    "warp-groups": warp_groups,
    "loop-bodies": loop_bodies,
    "types": warp_group_types,
    "same-tiles": same_tiles,
    "wgmma-wait": wgmma_waits,
    "zero-out-of-bounds": zero_out_of_bounds,
    "live": all_used,
    "unswitch": unswitch,
}
_MEANING: dict[str, Rule] = {
    "mask": masks,
    "scores": scores,
    "quantised": quantised,
    "combine": combine,
    "outputs": outputs,
}


@cache
def rules(backend: str) -> dict[str, dict[str, Rule]]:
    """The rules of each phase by name, in the order in which they are checked: those of all backends and those of
    this one."""
    given = BACKENDS[backend].rules if backend in BACKENDS else {}  # the rule `header` refuses unknown backends
    scheduled = {**_SCHEDULED, **given.get("scheduled", {})}
    return {
        "logical": {**_STRUCTURE, **_MEANING},
        "scheduled": {**_STRUCTURE, **scheduled, **_MEANING},
        "target": {**_STRUCTURE, **scheduled, **_TARGET, **given.get("target", {}), "live": live, **_MEANING},
    }


@cache
def warp_specialized_rules(backend: str) -> dict[str, Rule]:
    """The rules of a backend's warp-specialized kernels.

    These rules do not compare a kernel's results with those of the portable kernel in whose place it runs; only tests
    do.
    """
    return (
        {**_WARP_SPECIALIZED, **SPECIALIZERS[backend].rules, "protocol": protocol}
        if backend in SPECIALIZERS
        else {"backend": _no_specializer}
    )


def _no_specializer(module: Module, kernel: Kernel) -> Iterator[str]:
    yield f"is for the backend `{kernel.backend}`; expected {', '.join(SPECIALIZERS)}"


# For each verified kernel: the facts that the rules have read in addition to it, and the names of the rules that hold.
_HELD: WeakKeyDictionary[Kernel, tuple[dict[str, Any], set[str]]] = WeakKeyDictionary()


def _violations(module: Module, kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Yield (rule, reason) for each violation.

    A pass leaves most kernels unchanged, so a rule that held for a kernel is not checked again.
    """
    read = {**vars(module), "phase": "", "hosts": module.trains, "kernels": [k.name for k in module.kernels]}
    # Rules of portable kernels read only these facts of warp-specialized ones. Rules of a warp-specialized kernel also
    # read the portable kernel in whose place it runs.
    read["warp-specialized"] = [(k.name, k.backend, k.of) for k in module.warp_specialized]
    read["stands for"] = next((k for k in module.kernels if kernel.backend and k.name == kernel.stands_for), None)
    read["split KV"] = [(k.name, k.kv_split) for k in module.kernels]
    read["schedules"] = dict(module.schedules).get(kernel.name)
    before, held = _HELD.get(kernel, (read, set()))
    held = held if before == read else set()
    checked = rules(module.backend)[module.phase] if not kernel.backend else warp_specialized_rules(kernel.backend)
    checked = statements.RULES if kernel.traits.is_lowered else checked
    for name, rule in checked.items():
        if name not in held:
            yield from ((name, reason) for reason in rule(module, kernel))
    _HELD[kernel] = read, held | checked.keys()


def verify(module: Module) -> Module:
    """Return the module if every rule of its phase holds; otherwise raise VerifyError with the rule, the reason and
    the IR's text."""
    try:
        if module.phase not in PHASES:
            raise VerifyError("phase", f"`{module.phase}` is not a phase; expected one of {', '.join(PHASES)}", "")
        for kernel in (*module.kernels, *module.warp_specialized):
            for name, reason in _violations(module, kernel):
                raise VerifyError(name, f"kernel @{kernel.name}: {reason}", "")
        for name, reason in host.reasons(module):
            raise VerifyError(name, reason, "")
    except VerifyError as error:
        raise VerifyError(error.rule, error.reason, print_module(module)) from None
    return module
