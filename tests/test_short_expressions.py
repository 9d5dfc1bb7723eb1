"""Short expressions build within a budget of steps: random ones of up to 200 characters, in processes whose CPU time is limited."""

from __future__ import annotations

import random
import resource
import subprocess
import sys

import pytest

from attngen.ir import prove
from attngen.ir.expr import parse
from attngen.ir.prove import MOST_STEPS, prove_le
from attngen.spec import make_spec

LIMIT = 60  # seconds of CPU time, far above the ten that a build may take: it finds what hangs
HUNG = (
    "sum(i, 32, abs(kv_idx - i)) <= q_idx",
    "abs(1 - " * 12 + "kv_idx" + ")" * 12 + " <= q_idx",
    "sum(i, 128, where(kv_idx > i*i, 1, 0)) <= q_idx",
)
_BUILD = """
import sys, warnings
from attngen.passes.pipeline import lower
from attngen.errors import SpecError
from attngen.spec import make_spec
warnings.simplefilter("ignore")
try:
    lower(make_spec({"name": "short", "head_dim": 64, "mask": {"expr": sys.argv[1]}}))
except SpecError as error:
    print(error)
"""


def condition(draw: random.Random) -> str:
    """A random condition of at most 200 characters, of what has cases: nests, chains, joined comparisons, and what is written out."""

    def number(depth: int) -> str:
        if not depth:
            return draw.choice(["q_idx", "kv_idx", "q_idx - kv_idx", "q_idx * kv_idx", "kv_len", str(draw.randint(1, 99))])
        a, b = number(depth - 1), number(draw.randrange(depth))
        k = draw.randint(1, 9)
        return draw.choice(
            [f"abs({k} - {a})", f"min({a}, {b})", f"max({a}, {b})", f"({a}) // {k}", f"({a}) % {k}", f"({a}) * ({b})"]
            + [f"where({a} > {b}, {k}, {a})", f"sum(i{depth}, {draw.choice([2, 8])}, abs({a} - i{depth}))"]
        )

    while True:
        compared = [f"{number(draw.randint(0, 4))} {draw.choice(['<=', '<', '==', '!='])} {number(1)}" for _ in range(draw.randint(1, 3))]
        text = draw.choice([" and ", " or "]).join(compared)
        if draw.random() < 0.3:
            text = f"{draw.choice(['any', 'all'])}(n, {draw.choice([8, 32, 128])}, {text.replace('99', 'n')})"
        if len(text) <= 200 and "kv_idx" in text and "q_idx" in text:
            return text


def _ends(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, text],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT)),
    )
    assert done.returncode == 0, f"{text}: {done.stderr[-500:] or 'more than the CPU time that a build has'}"


@pytest.mark.nightly
@pytest.mark.parametrize("text", HUNG)
def test_what_hung_builds(text: str) -> None:
    _ends(text)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100))
def test_random_short_conditions_build(seed: int) -> None:
    _ends(condition(random.Random(seed)))


def test_a_mask_with_many_cases_is_noted() -> None:
    long, short = (
        make_spec({"name": "short", "head_dim": 64, "mask": {"expr": text}}) for text in (HUNG[0], "kv_idx <= q_idx + kv_len - q_len")
    )
    assert [note for _, note in long.notes() if "more cases than are solved" in note]
    assert not [note for _, note in short.notes() if "more cases than are solved" in note]


def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    """A question that takes too many steps is not proven, whether its parts are known or not."""
    a = parse(" + ".join(f"min(q_start * {n}, kv_start + {n})" for n in range(2, 16)))
    b = parse(" + ".join(f"max(q_start * {n}, kv_start + {n})" for n in range(2, 16)))
    prove._proof.cache_clear()
    cold = prove._proof(a, b)
    for x in a.args:
        for y in b.args:
            prove_le(x, y)
    parts = prove._proof.cache_info().currsize
    assert prove._proof(a, b) == cold and cold[1] <= MOST_STEPS < parts + MOST_STEPS
    prove._proof.cache_clear()
    for x in reversed(b.args):
        prove_le(sum(a.args[1:]), x)
    assert prove._proof(a, b) == cold
