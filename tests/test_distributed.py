"""Context parallelism over gloo: every method gives the results of one process, and a fault ends in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen.distributed.collectives import Run, route, runs
from attngen.distributed.layout import Layout
from attngen.distributed.merge import merge
from tests.helpers import ROOT


def launch(store: Path, ranks: int, part: str) -> list[tuple[str, str]]:
    """What processes of tests.distributed_ranks print, and their errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_ranks", str(rank), str(ranks), f"file://{store}/ranks", part],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_results_of_one(tmp_path: Path, ranks: int) -> None:
    """Outputs, LSE and gradients of six masks, four layouts and all methods, also in checkpoints, under torch.compile
    and of DTensors, bit for bit twice; what is wrong on one rank is the same sentence on all."""
    for out, errors in launch(tmp_path, ranks, "right"):
        assert out == "right\n", errors


def test_a_rank_that_hangs_or_exits_is_an_error_on_all_others_in_time(tmp_path: Path) -> None:
    *others, (last, _) = launch(tmp_path, 4, "lost")
    assert last == ""
    for out, errors in others:
        assert out == "right\n", errors


def test_runs_are_the_shared_rows_of_two_lists_of_chunks() -> None:
    layout = Layout(18, 4, ((0, 1, 2, 3, 4),))
    assert runs(layout, (0, 1, 3, 4), (1, 2, 3, 4)) == (Run(4, 0, 4), Run(8, 8, 6))
    assert runs(layout, (0, 1, 3, 4), (0, 1, 3, 4)) == (Run(0, 0, 14),)
    assert runs(layout, (2,), (4,)) == runs(layout, (), (1,)) == ()


def test_a_rank_receives_what_it_needs_and_does_not_hold() -> None:
    layout = Layout(18, 4, ((0, 3), (1, 4), (2,)))
    way = route(layout, layout.owned, ((0, 1, 2), (1, 4), ()), rank=0)
    assert way.rows == 12 and way.sends == () and way.copies == (Run(0, 0, 4),)
    assert way.receives == ((1, Run(0, 4, 4)), (2, Run(0, 8, 4)))


def test_parts_merge_to_the_whole_and_empty_rows_stay_empty() -> None:
    g = torch.Generator().manual_seed(0)
    s, v = torch.randn(3, 5, 8, generator=g) * 30, torch.randn(3, 8, 4, generator=g)
    s[:, 1], s[:, 2, :4], s[:, 3, 4:] = -torch.inf, -torch.inf, -torch.inf

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(s[..., keys], -1).nan_to_num() @ v[:, keys], torch.logsumexp(s[..., keys], -1)

    (out, lse), (whole, whole_lse) = part(slice(0, 4)), part(slice(0, 8))
    merge(out, lse, *part(slice(4, 8)))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    assert (out[:, 1] == 0).all() and (lse[:, 1] == -torch.inf).all()
