"""Ranks agree before they send anything, so that what is wrong on one of them is the same error on all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from attngen.distributed.collectives import one_sentence

DIGEST = 8  # bytes
PROBLEM = 496  # bytes of a sentence in UTF-8; longer ones are cut


def digest(*facts: Any) -> bytes:
    """Return a digest of facts, of which equal ones have equal `repr`."""
    return hashlib.sha256(repr(facts).encode()).digest()[:DIGEST]


def agree(groups: Sequence[Any], device: torch.device, plan: bytes, call: bytes, problem: str) -> None:
    """Exchange digests and problems with all other ranks.

    groups: the process groups of a mesh's dimensions. plan: digest of what ranks share for many calls. call: digest of
    the sizes of this call. problem: what is wrong on this rank, empty if nothing is.

    Raises:
        ValueError: one sentence, the same on every rank: a rank has a problem, another plan or other sizes.
    """
    text = problem.encode()[:PROBLEM]
    record = torch.tensor(list(plan + call + text.ljust(PROBLEM, b"\0")), dtype=torch.uint8, device=device)
    records = record[None]
    for group in reversed(groups):
        ranks = dist.get_world_size(group)
        found = [torch.empty_like(records) for _ in range(ranks)]
        with one_sentence(range(ranks)):
            dist.all_gather(found, records, group=group)
        records = torch.cat(found)
    rows = [bytes(row) for row in records.tolist()]
    for rank, row in enumerate(rows):
        if found_problem := row[2 * DIGEST :].rstrip(b"\0").decode(errors="ignore"):
            raise ValueError(f"attention: on rank {rank} {found_problem}")
        if row[:DIGEST] != rows[0][:DIGEST]:
            raise ValueError(
                f"attention: ranks 0 and {rank} have different plans; expected equal layouts, methods and lists of "
                "chunks on all ranks: make them from the same spec, lengths and number of ranks"
            )
        if row[DIGEST : 2 * DIGEST] != rows[0][DIGEST : 2 * DIGEST]:
            raise ValueError(
                f"attention: ranks 0 and {rank} make different calls; expected on all ranks the same kernel, "
                "batch size, heads, head dimensions, dtype, inputs, and tensors that require gradients"
            )
