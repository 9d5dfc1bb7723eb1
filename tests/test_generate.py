"""examples/generate.py: a run with small sizes, its drafted trees, and its pages."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.helpers import CUDA, ROOT

DEVICE = "cuda" if CUDA else "cpu"
SIZES = {
    "layers": 1,
    "d-model": 64,
    "heads": 4,
    "steps": 1,
    "seq": 32,
    "batch": 2,
    "slots": 2,
    "room": 128,
    "requests": 3,
}
SIZES |= {"prompt": 70, "new": 3, "chunk": 48}
SMALL = ["--device", DEVICE, *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]


def imported(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "generate.py"), *SMALL, *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.share(16)
def test_served_tokens_are_those_of_the_whole_sequence() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert "attngen, pages of 64" in done.stdout and "SDPA, contiguous" in done.stdout
    assert done.stdout.count("are those of the whole sequence") == 3  # with pages, with SDPA, with drafted trees


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--room", "100"), "--room 100: expected a multiple of 64, the tokens of a page"),
        (("--heads", "6"), "--heads 6: expected a multiple of 4, which share a K/V head"),
        (("--new", "100"), "--prompt 70 --new 100: expected at most --room, 128, together"),
    ],
)
def test_wrong_options_get_a_sentence(options: tuple[str, ...], reason: str) -> None:
    done = run(*options)
    assert done.returncode == 2 and reason in done.stderr


def test_drafted_trees() -> None:
    """In `abababac`, `a` is followed most often by `b`, then by `c`; a node sees itself and its ancestors."""
    text = torch.tensor(list(b"abababac" * 4), dtype=torch.uint8)
    drafts = imported("generate").Drafts(text, torch.device("cpu"))
    tokens = drafts.tokens(ord("a"))
    assert len(tokens) == 15 and bytes(tokens[:3]) == b"abc" and tokens[3] == ord("a")
    assert drafts.depths.tolist() == [0, 1, 1, *[2] * 4, *[3] * 8]
    assert drafts.sees[0, 9].nonzero().flatten().tolist() == [0, 1, 4, 9]
    said = [ord("x")] * 15
    assert drafts.path(tokens, said) == [0]
    said[0], said[1] = tokens[1], tokens[4]
    assert drafts.path(tokens, said) == [0, 1, 4]


def test_pages_are_reused() -> None:
    generate = imported("generate")
    args = generate.arguments([*SMALL, "--slots", "2", "--room", "256"])
    pages = generate.Pages(None, None, torch.zeros(1), args)
    assert len(pages.free) == 4
    assert pages.allocate(0, 129) and not pages.allocate(1, 65)  # three of four pages, and two more
    first = pages.pages_of[0]
    pages.release(0)
    assert pages.allocate(1, 256) and sorted(pages.pages_of[1]) == sorted([*first, *pages.table[1].tolist()[:1]])
    assert pages.table[0].tolist() == [0] * 4
