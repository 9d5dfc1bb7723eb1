"""A text of a lowered kernel in which one phase, stage, count, barrier or number is changed is refused: by a rule, or
by the executor, in which it deadlocks, misuses a barrier or computes something else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from attngen.errors import AttngenError, VerifyError
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.targets.hopper import HOPPER
from attngen.verify import verify
from tests.helpers import use_fused
from tests.hopper.common import lowered
from tests.hopper.test_gl_execution import run
from tests.transforms.equality import Unequal, must_be_equal

NAME = "causal_gqa"


class Mutation(NamedTuple):
    """An edit of the first `old` in a kernel, and the rule that refuses it; empty if the executor does."""

    what: str
    kernel: str
    old: str
    new: str
    rule: str = ""


K_WAIT = "mbarrier_wait %K_full index(K_stage) phase(K_phase)"
Q_NEXT = "next_stage phase(Q_phase) stages(STAGES) stage(Q_stage)"
MUTATIONS = (
    Mutation("a wait has the other phase", "fwd", K_WAIT, K_WAIT.replace("(K_phase)", "(1 - K_phase)")),
    Mutation("a wait has the phase 0", "fwd", K_WAIT, K_WAIT.replace("(K_phase)", "(0)")),
    Mutation("a wait is for the first stage", "fwd", K_WAIT, K_WAIT.replace("K_stage", "0")),
    Mutation("a wait is at another barrier", "fwd", K_WAIT, K_WAIT.replace("%K_full", "%V_full")),
    Mutation("a wait is missing", "fwd", f"    {K_WAIT}\n", ""),
    Mutation(
        "a consumer starts in phase 1", "fwd", "stage(K_stage) count(K_phase)", "stage(K_stage) count(K_phase) start(1)"
    ),
    Mutation(
        "a consumer counts more stages than there are",
        "fwd",
        "next_stage phase(K_phase) stages(STAGES) stage(K_stage)",
        "next_stage phase(K_phase) stages(3) stage(K_stage)",
    ),
    Mutation("a consumer stays at a stage", "fwd", "    next_stage phase(K_phase) stages(STAGES) stage(K_stage)\n", ""),
    Mutation(
        "a release is of the first stage", "fwd", "named_arrive %K_free index(K_stage)", "named_arrive %K_free index(0)"
    ),
    Mutation(
        "a release is of another tile",
        "fwd",
        "named_arrive %K_free index(K_stage)",
        "named_arrive %V_free index(K_stage)",
    ),
    Mutation("a release is missing", "fwd", "    named_arrive %V_free index(V_stage) early(yes)\n", ""),
    Mutation(
        "two pipelines share a barrier", "fwd", "count(STAGES) first(7)", "count(STAGES) first(6)", "named-barriers"
    ),
    Mutation("a number is too large", "fwd", "first(2*STAGES + 7)", "first(2*STAGES + 11)", "named-barriers"),
    Mutation(
        "an mbarrier expects two arrivals",
        "fwd",
        "%K_full index(at) arrivals(1)",
        "%K_full index(at) arrivals(2)",
        "initialised",
    ),
    Mutation(
        "half of the mbarriers are initialised",
        "fwd",
        "static_for at count(4)",
        "static_for at count(2)",
        "initialised",
    ),
    Mutation(
        "a buffer is missing", "fwd", "%Q_smem = alloc_shared count(4)", "%Q_smem = alloc_shared count(3)", "indices"
    ),
    Mutation(
        "an mbarrier is missing",
        "fwd",
        "%Q_full = alloc_mbarriers count(4)",
        "%Q_full = alloc_mbarriers count(3)",
        "initialised",
    ),
    Mutation("too few bytes are expected", "fwd", "bytes(2*BLOCK_KV*D_QK)", "bytes(BLOCK_KV*D_QK)"),
    Mutation("the producer waits too late", "fwd", "if where(Q_loads >= 2)", "if where(Q_loads >= 3)"),
    Mutation("the producer never waits", "fwd", "if where(K_loads >= STAGES)", "if where(K_loads < 0)"),
    Mutation("a load goes to the first buffer", "fwd", "smem(%K_smem) buffer(K_stage)", "smem(%K_smem) buffer(0)"),
    Mutation(
        "a load arrives at the first barrier", "fwd", "barrier(%K_full) index(K_stage)", "barrier(%K_full) index(0)"
    ),
    Mutation(
        "a load is of the tile before",
        "fwd",
        "place(b; h // group; kv_start; 0)",
        "place(b; h // group; kv_start - 64; 0)",
    ),
    Mutation(
        "the producer stays at a stage", "fwd", "    next_load loads(V_loads) stages(STAGES) stage(V_stage)\n", ""
    ),
    Mutation(
        "an instance reads the other's queries",
        "fwd",
        "%Q_smem index(2*Work_stage + _WARP_GROUP)",
        "%Q_smem index(2*Work_stage - _WARP_GROUP + 1)",
    ),
    Mutation("no fence follows a store", "fwd", "    fence_async\n    tma_write", "    tma_write"),
    Mutation(
        "the producer does not wait at its end",
        "fwd",
        "    for _ count(min(K_loads, STAGES))",
        "    for _ count(0*min(K_loads, STAGES))",
    ),
    Mutation(
        "an instance waits for itself", "bwd", "index(2*Q_stage - _WARP_GROUP + 1)", "index(2*Q_stage + _WARP_GROUP)"
    ),
    Mutation(
        "a barrier has two numbers of threads",
        "bwd",
        "named_arrive %dS_written index(2*Q_stage + _WARP_GROUP) threads(256)",
        "named_arrive %dS_written index(2*Q_stage + _WARP_GROUP) threads(128)",
        "named-barriers",
    ),
    Mutation(
        "one instance fills a tile of two",
        "bwd",
        "%dQ_full index(at) arrivals(2)",
        "%dQ_full index(at) arrivals(1)",
        "initialised",
    ),
    Mutation("a writer waits for a release of no tile", "bwd", "count(dQ_phase) start(1)", "count(dQ_phase)"),
    Mutation(
        "no instance starts",
        "bwd",
        "    named_arrive %turns index(0) threads(256) note(the first instance starts)\n",
        "",
    ),
    Mutation(
        "instances wait at one barrier", "bwd", "named_sync %turns index(_WARP_GROUP)", "named_sync %turns index(0)"
    ),
    Mutation("a semaphore is counted in halves", "bwd", "order(4*(split % 2))", "order(2*(split % 2))"),
    Mutation(
        "tiles of dQ are not released",
        "bwd",
        "    mbarrier_arrive %dQ_empty index(dQ_stage)\n",
        "",
        "initialised",
    ),
    Mutation(
        "a stage is overwritten before it is stored",
        "fwd",
        "    tma_write_wait note(the previous tile's outputs have left the stage)\n",
        "",
    ),
    Mutation("a stage is counted twice", "bwd", f"    {Q_NEXT}\n", f"    {Q_NEXT}\n    {Q_NEXT}\n"),
)


@cache
def text() -> str:
    """The text after assign-barriers."""
    module = lowered(NAME)
    for step in HOPPER.lowering:
        module = step.run(module)
    return print_module(verify(module))


def edited(mutation: Mutation) -> str:
    before, at, rest = text().partition(f"kernel @{mutation.kernel} backend(hopper)")
    kernel, end, after = rest.partition("\nkernel @")
    assert mutation.old in kernel, mutation
    return before + at + kernel.replace(mutation.old, mutation.new, 1) + end + after


def executable(module: Module) -> Module:
    """The module with its lowered kernels in place of the portable ones."""
    made = {kernel.stands_for: kernel for kernel in reversed(module.warp_specialized)}
    return use_fused(replace(module, kernels=tuple(made.get(kernel.name, kernel) for kernel in module.kernels)))


def test_the_text_is_printed_as_it_is_read() -> None:
    assert print_module(parse_module(text())) == text()


@pytest.mark.share(8)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.what for mutation in MUTATIONS])
def test_a_changed_text_is_refused(mutation: Mutation) -> None:
    if mutation.rule:
        with pytest.raises(VerifyError, match=f"rule `{mutation.rule}`"):
            verify(parse_module(edited(mutation)))
        return
    module = executable(verify(parse_module(edited(mutation))))
    with np.errstate(all="ignore"), pytest.raises((AttngenError, Unequal, AssertionError)):
        for seed in range(8):
            must_be_equal(*run(module, NAME, seed, (300, 700) if seed % 2 else (700, 300)), mutation.what)
