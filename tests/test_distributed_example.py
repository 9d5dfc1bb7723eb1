"""examples/context_parallel.py: docs/distributed.md shows it, and two processes over gloo run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.docs_common import blocks
from tests.helpers import ROOT

EXAMPLE = ROOT / "examples" / "context_parallel.py"


def test_the_page_shows_the_example() -> None:
    (shown,) = blocks("docs/distributed.md", "python")
    _, _, code = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)
    assert shown.strip() == code.strip()


@pytest.mark.share(4)
def test_two_processes_give_the_results_of_one() -> None:
    """They print what the page shows."""
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **hidden, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = next(block for block in blocks("docs/distributed.md", "text") if "as on one rank" in block)
    # The processes write to one pipe: a line of one may come before the end of the other's.
    assert sorted(re.findall(r"rank \d.*?on one rank", done.stdout)) == shown.splitlines()
