"""For random small specs, the module after every pass computes the same results as the module before it, and the first
module computes those of naive attention.

All outputs and all gradients are compared in float64 by the IR's executor (tests/transforms/equality.py). Masks and
scores are random sentences of the grammar in tests/lang_strategies.py, as in tests/transforms/random_masks.py and
tests/test_random_scores.py.

    python -m tests.transforms.test_equality --checks 5000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from attngen.builders import build_module
from attngen.errors import SpecError
from attngen.ir import Module
from attngen.ir.names import OUTPUTS
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower, passes
from attngen.spec import Spec, make_spec
from attngen.transforms.classify_tiles import ClassifyTiles
from tests import record
from tests.helpers import module_of
from tests.transforms.equality import Call, Unequal, check_steps
from tests.transforms.random_specs import random_specs

SPECS, SEEDS = 50, (2, 3, 4, 11)  # specs of each seed that a nightly run checks
PUSHED = 12  # specs that a push checks, in two tests; the commit determines their seeds
KINDS = {
    "mha",
    "mqa",
    "gqa",
    "modified",
    "dropout",
    "kv_outer",
    "pack_gqa",
    "padded",
    "blocks",
    "blocks from data",
    "fused",
    *OUTPUTS,
}
KINDS |= {f"gradient by {by}" for by in ("query", "score", "distance", "element", "delta")}


@dataclass
class Tally:
    """Counts of what was checked."""

    specs: int = 0
    refused: int = 0
    modules: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        return f"{self.modules:,} modules of {self.specs:,} specs ({self.refused:,} refused): {kinds}"


def kinds_of(spec: Spec, module: Module) -> list[str]:
    """Return the features of a spec that the tests count."""
    found = [spec.heads.sharing, *spec.outputs, *(f"gradient by {x.reduction}" for x in module.input_gradients)]
    found += ["modified"] if spec.score else []
    found += ["dropout"] if spec.dropout else []
    found += ["kv_outer"] if spec.schedule.order == "kv_outer" else []
    found += ["fused"] if any(k.traits.adds_in_order for k in module.kernels) else []
    found += ["pack_gqa"] if any(k.pack_gqa for k in module.kernels) else []
    found += ["blocks from data" if module.blocks.data else "blocks"] if module.blocks else []
    found += ["padded"] if any(d & (d - 1) for d in (spec.head_dim.qk, spec.head_dim.v)) else []
    return list(dict.fromkeys(found))


def drive(
    number: int, specs: int, calls: int = 1, only: int | None = None, report: Callable[[str], None] | None = None
) -> Tally:
    """Check random specs, or only the one at the place `only`. A failure is raised, or passed to `report`."""
    tally = Tally()
    for place, data in enumerate(random_specs(number)):
        if tally.specs >= specs or (only is not None and place > only):
            break
        if only not in (None, place):
            continue
        try:
            spec = make_spec(data)
            module = build_module(spec)
        except SpecError:
            tally.refused += 1
            assert tally.refused < 100 + 10 * tally.specs, f"nearly all specs are refused: {data}"
            continue
        chance = random.Random(f"{number} {place}")
        try:
            for _ in range(calls):
                call = Call.random(chance, spec, module)
                tally.modules += check_steps(spec, module, call, passes(spec, module))
        except Exception as error:
            reason = f"--seed {number} --only {place}: {error!r}; {json.dumps(data)} at {call}"
            if report is None:
                raise Unequal(reason) from error
            report(reason)
        tally.specs += 1
        for kind in kinds_of(spec, module):
            tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
    return tally


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_every_pass_keeps_the_results_of_random_modules(seed: int) -> None:
    """Each seed gives specs with all KINDS of features."""
    tally = drive(seed, SPECS)
    assert tally.specs == SPECS and tally.modules >= 5 * SPECS
    assert tally.kinds.keys() >= KINDS


@pytest.mark.share(2)
@pytest.mark.parametrize("half", range(2))
def test_every_pass_keeps_the_results_of_the_commits_random_modules(half: int) -> None:
    tally = drive(record.number(half), PUSHED // 2)
    assert tally.specs == PUSHED // 2 and tally.modules >= 5 * (PUSHED // 2)


@pytest.mark.share(16)
def test_a_mask_that_is_proven_to_hide_every_key_is_lowered() -> None:
    """No tile is left to visit; one loop stays, so that its body is used."""
    mask = {
        "expr": "2 * min(clamp(kv_len, 1, window), min(kv_len, q_idx, 2), 4) >= 7",
        "params": {"window": {"scalar": "int"}},
    }
    spec = make_spec({"name": "hidden", "head_dim": 16, "mask": mask})
    module = build_module(spec)
    assert lower(spec).phase == "target"
    assert check_steps(spec, module, Call.random(random.Random(1), spec, module), passes(spec, module)) > 5


@pytest.mark.share(16)
@pytest.mark.parametrize("expr", ["kv_idx != 3 and 0.5 * q_len <= 0", "0.5 * q_len <= 0 and seen[b, kv_idx]"])
def test_a_mask_that_is_false_for_packed_queries_is_lowered(expr: str, tmp_path: Path, device: str) -> None:
    """@packed runs only with at least one query, so its mask simplifies to `false`. Reading a spec does not assume
    that there are queries."""
    seen = {"seen": torch.ones(1, 9, dtype=torch.bool, device=device)} if "seen" in expr else {}
    mask = {"expr": expr, "params": {name: {"tensor": ["B", "Nk"], "dtype": "bool"} for name in seen}}
    spec = make_spec({"name": "hidden", "head_dim": 16, "heads": {"sharing": "gqa"}, "mask": mask})
    module = build_module(spec)
    call = Call.random(random.Random(1), spec, module, (5, 9))
    assert check_steps(spec, module, call, passes(spec, module)) > 5
    q = torch.ones(1, 4, 5, 16, device=device, dtype=torch.float16)
    k = torch.ones(1, 2, 9, 16, device=device, dtype=torch.float16)
    out, lse = module_of(spec, tmp_path).attention(q, k, k, return_lse=True, **seen)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_bounds_of_tiles_print_as_they_parse() -> None:
    """In these bounds, sympy keeps a max directly inside a max, which the parser does not."""
    module = build_module(
        make_spec({"name": "nested", "head_dim": 16, "mask": {"not": {"chunked": {"size": 16, "align": "top_left"}}}})
    )
    text = print_module(ClassifyTiles().run(module))
    assert print_module(parse_module(text)) == text


def main() -> None:
    parser = argparse.ArgumentParser(description="checks that passes keep the results of random modules")
    parser.add_argument("--checks", type=int, default=5000, help="specs to check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1, help="calls of each spec")
    parser.add_argument("--only", type=int, help="the number of the one spec to check")
    given = parser.parse_args()
    failures: list[str] = []

    def failed(reason: str) -> None:
        failures.append(reason)
        print(reason, flush=True)

    start = time.time()
    tally = drive(given.seed, given.checks, given.calls, given.only, failed)
    print(f"{tally}; {len(failures)} failures; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
