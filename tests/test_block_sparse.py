"""Block-sparse masks: any mask of blocks, plans, patterns, and the errors of wrong calls."""

from __future__ import annotations

import re

import pytest
import torch

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import reference_mask
from attngen.conformance.result import KEYS
from attngen.ir.sizes import Sizes
from attngen.masks import registry
from attngen.spec import make_spec
from tests.helpers import NIGHTLY, SPECS, built, module_of
from tests.helpers import spec as spec_of
from tests.test_numerics import SEQUENCES, dtypes, problem, run, small

pytestmark = pytest.mark.numerics

SPARSE = [name for name in SPECS if spec_of(name).mask.blocks()]


def masks(rows: int, columns: int, device: str, heads: int = 4) -> dict[str, torch.Tensor]:
    """Masks of blocks of many shapes and kinds, for two sequences."""
    draw = torch.Generator().manual_seed(0)
    some = torch.rand(2, heads, rows, columns, generator=draw) < 0.5
    ones = torch.ones(rows, columns, dtype=torch.bool)
    found = {
        "all": ones,
        "none": ~ones,
        "random": some,
        "of each head": some[:1],
        "of each sequence": some[:, :1],
        "two dimensions": some[0, 0],
        "three dimensions": some[0],
        "one block": torch.zeros_like(ones).index_put(
            (torch.tensor(rows - 1), torch.tensor(columns - 1)), torch.tensor(True)
        ),
        "last column": torch.arange(columns) == torch.full((rows, 1), columns - 1),
        "empty rows and columns": some & (torch.arange(rows) % 2 == 0)[:, None] & (torch.arange(columns) % 2 == 1),
        "strided": some.transpose(2, 3).contiguous().transpose(2, 3),
        "expanded": torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(2, heads, rows, columns),
    }
    return {name: mask.to(device) for name, mask in found.items()}


EACH = (
    "none",
    "random",
    "of each head",
    "empty rows and columns",
)  # run for each spec; wrappers make lists from all kinds in the same way


def kinds():
    """Every spec with every kind of mask."""
    pairs = [(name, kind) for name in SPARSE for kind in masks(1, 1, "cpu")]
    return [pytest.param(n, k, marks=() if n == SPARSE[0] or k in EACH else NIGHTLY) for n, k in pairs]


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_any_mask_of_blocks(name, kind, device):
    size = spec_of(name).mask.blocks().size
    n_q, n_kv = size + 9, 2 * size + 1
    blocks = masks(2, 3, device, small(name).q_heads)[kind]
    result = run_case(
        built(name), spec_of(name), small(name, n_q, n_kv), dtypes(name)[0], device, inputs={"block_mask": blocks}
    )
    assert result.ok, str(result)


@pytest.mark.parametrize("name", SPARSE)
def test_a_plan_gives_the_same_bits(name, device):
    size = spec_of(name).mask.blocks().size
    leaves, _, grads = problem(name, small(name, size + 1, size + 1), device)
    for kind in ("random", "of each head", "two dimensions"):
        mask = masks(2, 2, device, small(name).q_heads)[kind]
        plan = built(name).attention.plan(mask)
        assert isinstance(plan, built(name).BlockPlan)
        first, second = run(name, leaves, {"block_mask": mask}, grads), run(name, leaves, {"block_mask": plan}, grads)
        assert all(first[key].equal(second[key]) for key in KEYS)


@pytest.mark.parametrize("name", SPARSE)
def test_what_a_plan_holds(name, device):
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool, device=device)
    plan = built(name).attention.plan(mask)
    assert plan.kv_rank[0, 0].tolist() == [[0, 1, 1, 2, 3], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert [row[:n] for row, n in zip(plan.kv_list[0, 0].tolist(), (3, 0, 1))] == [[0, 2, 3], [], [1]]
    assert plan.q_rank[0, 0].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert [row[:1] for row in plan.q_list[0, 0].tolist()] == [[0], [2], [0], [0]]


PATTERNS = {
    "butterfly": ["11101000", "11010100", "10110010", "01110001", "10001110", "01001101", "00101011", "00010111"],
    "local_global": ["11111111", "11100000", "11110000", "10111000", "10011100", "10001110", "10000111", "10000011"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_against_a_table(pattern, tmp_path):
    """Patterns of eight by eight blocks equal tables written by hand, and the masks of the oracle."""
    parameters = {"local": 1, "globals": 1} if pattern == "local_global" else {}
    mask = {"block_sparse": {"block": 16, "pattern": pattern, **parameters}}
    spec = make_spec({"name": "small", "head_dim": 16, "mask": mask})
    made = module_of(spec, tmp_path / "small").attention.block_pattern(128, 128, torch.device("cpu"))
    assert ["".join(str(int(x)) for x in row) for row in made] == PATTERNS[pattern]
    scores = reference_mask(spec.mask, torch.empty(1, 1, 128, 16), torch.empty(1, 1, 128, 16), {})
    assert scores[0, 0, ::16, ::16].equal(made) and scores[0, 0].equal(
        made.repeat_interleave(16, 0).repeat_interleave(16, 1)
    )


def test_the_global_corner_of_unequal_lengths():
    """The diagonal ends in the last corner, as the diagonal of `causal` does."""
    mask = registry()["block_sparse"](block=16, pattern="local_global", local=0, globals=0)
    scores = mask.reference(Sizes(1, 1, 1, 32, 64), torch.device("cpu"), {})[0, 0, ::16, ::16]
    assert scores.tolist() == [[False, False, True, False], [False, False, False, True]]


@pytest.mark.share(16)
@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize(
    "other", ["causal", {"sliding_window": {"left": 70, "right": 20}}, {"key_padding": {}}], ids=str
)
def test_blocks_of_any_size_with_any_other_mask(block, other, device, tmp_path):
    spec = make_spec({"name": "both", "head_dim": 16, "mask": {"all_of": [other, {"block_sparse": {"block": block}}]}})
    result = run_case(
        module_of(spec, tmp_path / "both"), spec, Case(SEQUENCES, *heads_for(spec, 2), 150, 200), "fp16", device
    )
    assert result.ok, str(result)


WRONG = [
    (
        lambda m: m.float(),
        TypeError,
        "block_mask is a torch.float32; expected a dense torch.bool tensor of blocks, or what attention.plan",
    ),
    (lambda m: [[True]], TypeError, "block_mask is a list; expected a dense torch.bool tensor of blocks"),
    (lambda m: m[0], ValueError, r"block_mask has shape \[1\]; expected \[B, Hq, Tq, Tk\], or what broadcasts to it"),
    (
        lambda m: m.expand(5, 1, 1, 1),
        ValueError,
        r"block_mask has shape \[5, 1, 1, 1\]; expected \[2, \d, 1, 1\], or what broadcasts",
    ),
    (
        lambda m: m.expand(2, 4, 65, 65),
        ValueError,
        r"has shape \[2, 4, 65, 65\]; expected \[2, \d, 1, 1\], .*: one element for each 128",
    ),
    (lambda m: m.to("meta"), ValueError, "block_mask is on meta and q on"),
]


@pytest.mark.parametrize(("change", "kind", "sentence"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_calls(change, kind, sentence, device):
    name = "block_sparse_mha"
    leaves, _, _ = problem(name, small(name, 65, 65), device)
    right = torch.ones(1, 1, dtype=torch.bool, device=device)
    built(name).attention(*leaves, block_mask=right)
    with pytest.raises(kind, match=f"attention: .*{sentence}"):
        built(name).attention(*leaves, block_mask=change(right))


def test_a_plan_that_was_changed_is_refused(device):
    name = "block_sparse_mha"
    leaves, _, _ = problem(name, small(name, 65, 65), device)
    plan = built(name).attention.plan(torch.ones(1, 1, dtype=torch.bool, device=device))
    with pytest.raises(
        ValueError, match=re.escape("attention: q_rank of the BlockPlan is not what attention.plan makes")
    ):
        built(name).attention(*leaves, block_mask=plan._replace(q_rank=plan.q_rank.long()))
