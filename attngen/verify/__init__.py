"""The verifier: one table of rules per phase, by topic in the files beside. A rule yields a reason for each thing that
breaks it.

A backend gives the rules of what its compiler asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from attngen.errors import VerifyError
from attngen.ir.graph import PHASES, Kernel, Module
from attngen.ir.text import print_module
from attngen.targets.common.base import Rule
from attngen.targets.registry import BACKENDS, SPECIALIZERS
from attngen.verify import host
from attngen.verify.caches import ends
from attngen.verify.combine import joins
from attngen.verify.dependent_launch import waits
from attngen.verify.indexing import bounds_checked, indexing, names
from attngen.verify.meaning import masks_as_said, scores_as_said
from attngen.verify.order import merges, turns
from attngen.verify.outputs import outputs
from attngen.verify.pipe import bodies, flights, scopes, used, walks, warp_group_types, warp_groups
from attngen.verify.protocol import protocol
from attngen.verify.quantised import quantised
from attngen.verify.schedule import drops, placed, scheduled_everywhere
from attngen.verify.split_d import columns
from attngen.verify.structure import (
    deals,
    header,
    in_place,
    latents,
    live,
    loops,
    order,
    ordered,
    references,
    rewrites,
    shares,
    signature,
)
from attngen.verify.tiles import classified, covers, cuts, ends_hidden, extremes, full_is_proven, lists, needed
from attngen.verify.types import types

_STRUCTURE: dict[str, Rule] = {
    "header": header,
    "signature": signature,
    "references": references,
    "order": order,
    "loops": loops,
    "shares": shares,
    "deals": deals,
    "latents": latents,
    "types": types,
    "indexing": indexing,
    "names": names,
    "bounds-checked": bounds_checked,
    "columns": columns,
    "rewrites": rewrites,
    "merges": merges,
}
_SCHEDULED: dict[str, Rule] = {
    "classified": classified,
    "extremes": extremes,
    "covers": covers,
    "full-is-proven": full_is_proven,
    "cuts": cuts,
    "ends-hidden": ends_hidden,
    "needed": needed,
    "turns": turns,
    "waits": waits,
    "placed": placed,
}
_TARGET: dict[str, Rule] = {
    "lists": lists,
    "drops": drops,
    "ordered": ordered,
    "in-place": in_place,
    "scheduled-everywhere": scheduled_everywhere,
}
_WARP_SPECIALIZED: dict[str, Rule] = {
    "references": references,
    "scopes": scopes,
    "roles": warp_groups,
    "bodies": bodies,
    "types": warp_group_types,
    "walks": walks,
    "flights": flights,
    "ends-cleared": ends,
    "used": used,
    "cuts": cuts,
}
_MEANING: dict[str, Rule] = {
    "mask": masks_as_said,
    "scores": scores_as_said,
    "quantised": quantised,
    "joins": joins,
    "outputs": outputs,
}


@cache
def rules(backend: str) -> dict[str, dict[str, Rule]]:
    """The rules of each phase by name: those that every backend shares, and those that one gives; in the order in
    which they are tried."""
    given = BACKENDS[backend].rules if backend in BACKENDS else {}  # the rule `header` refuses one that does not exist
    scheduled = {**_SCHEDULED, **given.get("scheduled", {})}
    return {
        "logical": {**_STRUCTURE, **_MEANING},
        "scheduled": {**_STRUCTURE, **scheduled, **_MEANING},
        "target": {**_STRUCTURE, **scheduled, **_TARGET, **given.get("target", {}), "live": live, **_MEANING},
    }


@cache
def warp_specialized_rules(backend: str) -> dict[str, Rule]:
    """The rules of kernels that are divided for a backend. What one computes is held against the kernel it stands in
    for by tests."""
    return (
        {**_WARP_SPECIALIZED, **SPECIALIZERS[backend].rules, "protocol": protocol}
        if backend in SPECIALIZERS
        else {"backend": _no_specializer}
    )


def _no_specializer(module: Module, kernel: Kernel) -> Iterator[str]:
    yield f"is for the backend `{kernel.backend}`; expected {', '.join(SPECIALIZERS)}"


# Of each verified kernel: what the rules read besides it, and the names of those that hold.
_HELD: WeakKeyDictionary[Kernel, tuple[dict[str, Any], set[str]]] = WeakKeyDictionary()


def _broken(module: Module, kernel: Kernel) -> Iterator[tuple[str, str]]:
    """(rule, reason) for each thing that breaks a rule. A pass leaves most kernels as they are: what holds for one
    is not tried again."""
    read = {**vars(module), "phase": "", "hosts": module.trains, "kernels": [k.name for k in module.kernels]}
    # Of divided kernels the rules of others read these alone; those of a divided one read the kernel that it stands in
    # for, too.
    read["divided"] = [(k.name, k.backend, k.of) for k in module.warp_specialized]
    read["stands for"] = next((k for k in module.kernels if kernel.backend and k.name == kernel.stands_for), None)
    read["deals"] = [(k.name, k.kv_split) for k in module.kernels]
    read["schedules"] = dict(module.schedules).get(kernel.name)
    before, held = _HELD.get(kernel, (read, set()))
    held = held if before == read else set()
    wanted = rules(module.backend)[module.phase] if not kernel.backend else warp_specialized_rules(kernel.backend)
    for name, rule in wanted.items():
        if name not in held:
            yield from ((name, reason) for reason in rule(module, kernel))
    _HELD[kernel] = read, held | wanted.keys()


def verify(module: Module) -> Module:
    """The module itself, if every rule of its phase holds; otherwise VerifyError with rule, reason and the IR's
    text."""
    try:
        if module.phase not in PHASES:
            raise VerifyError("phase", f"`{module.phase}` is not a phase; expected one of {', '.join(PHASES)}", "")
        for kernel in (*module.kernels, *module.warp_specialized):
            for name, reason in _broken(module, kernel):
                raise VerifyError(name, f"kernel @{kernel.name}: {reason}", "")
        for name, reason in host.reasons(module):
            raise VerifyError(name, reason, "")
    except VerifyError as error:
        raise VerifyError(error.rule, error.reason, print_module(module)) from None
    return module
