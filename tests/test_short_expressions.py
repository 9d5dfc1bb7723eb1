"""Short expressions, of up to 200 characters, build within a limit of CPU time. Random ones build in child processes.

    python -m tests.test_short_expressions --count 200 --seed 7

builds more of them, two at a time, and marks those that take more than ten seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attngen.ir import parse, prove
from attngen.ir.prove import MOST_STEPS, prove_le
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec

BAR = 10.0  # seconds of CPU time per build
LIMIT = 60  # seconds per process, far above the bar as the machine may be slow, to find builds that hang
LONGEST = 200  # characters
NEST = "abs(1 - " * 12 + "{}" + ")" * 12
CHAIN = (
    "min(kv_idx, kv_idx*2), q_idx*3), kv_idx*4), q_idx*5), kv_idx*6), q_idx*7), kv_idx*8), q_idx*9), kv_idx*10), "
    "q_idx*11), kv_idx*12)"
)
EXTREMES = ", ".join(f"q_idx*{n}, kv_idx*{n + 1} + q_idx" for n in range(2, 14, 2))
# Expressions that once took more than ten seconds, some of them many minutes.
HUNG: tuple[tuple[str, str], ...] = (
    ("mask", "sum(i, 32, abs(kv_idx - i)) <= q_idx"),
    ("mask", NEST.format("kv_idx") + " <= q_idx"),
    ("mask", NEST.format("q_idx - kv_idx") + " <= 3"),
    ("score", NEST.format("s")),
    ("score", "s - " + NEST.format("kv_idx - q_idx")),
    ("mask", "all(i, 128, abs(kv_idx - i*q_idx) >= i)"),
    ("mask", "sum(i, 128, where(kv_idx > i*i, 1, 0)) <= q_idx"),
    ("mask", "min(max(" * 5 + CHAIN + " <= q_idx"),
    ("score", f"s + min({EXTREMES})"),
    ("mask", "sum(i, 128, abs(2 - q_idx)) >= max(window, abs(window - (6 - spans[b, kv_idx])), q_idx - kv_idx)"),
    (
        "mask",
        (
            "all(i, 32, q_idx == 7 and i <= window + kv_idx and window > abs(kv_len - i) or any(j, 4, i != kv_idx - "
            "kv_len or q_idx != j + i))"
        ),
    ),
    (
        "score",
        (
            "log(1 + abs(sum(i, 64, sigmoid(sin(where(i < 37, abs(3 + tanh(4 * s) ** 2), abs(2 - (abs((log(1 + abs("
            "sum(j, 2, i)))) * slope[h])))))))))"
        ),
    ),
)
PARAMS: dict[str, dict[str, Any]] = {
    "window": {"scalar": "int"},
    "cap": {"value": 4.0},
    "rate": {"scalar": "float", "grad": True},
    "slope": {"tensor": ["H"], "grad": True},
    "dense": {"tensor": ["H", "Nq", "Nk"], "grad": True},
    "starts": {"tensor": ["B", "Nq"], "dtype": "int32"},
    "spans": {"tensor": ["B", "Nk"], "dtype": "int32"},
}
INTEGERS = ("q_idx", "kv_idx", "q_idx", "kv_idx", "q_idx - kv_idx", "kv_len", "window", "h")
DATA = ("starts[b, q_idx]", "spans[b, kv_idx]")
REALS = ("s", "s", "slope[h]", "cap", "dense[h, q_idx, kv_idx]", "0.5", "kv_idx / 8", "q_idx - kv_idx")
_BUILD = """
import json, sys, time, warnings
from attngen.errors import SpecError
from attngen.codegen.render import render
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
warnings.simplefilter("ignore")
try:
    spec = make_spec(json.loads(sys.argv[1]))
    render(lower(spec))
    print("built with", len(spec.notes()), "notes")
except SpecError as error:
    print("refused:", error)
print(time.process_time())
"""


def spec_of(kind: str, text: str) -> dict[str, Any]:
    """Return the spec of a mask or a score with one expression, and the parameters that it reads."""
    params = {name: param for name, param in PARAMS.items() if re.search(rf"\b{name}\b", text)}
    part = {"expr": text} | ({"params": params} if params else {})
    return {"name": "short", "head_dim": 64} | (
        {"mask": part} if kind == "mask" else {"mask": "causal", "score": [part]}
    )


def _whole(text: str) -> str:
    """Return the text, in parentheses unless it is a name, a number or a call."""
    return text if re.fullmatch(r"\w+|\w+\([^()]*\)", text) else f"({text})"


class Writer:
    """Writer of random expressions of about a given length, with nesting, chains, choices and iterations."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.indices: list[str] = []  # index names of the enclosing `any`, `all` and `sum`
        self.left = 128  # how many more times iterations may repeat their body

    def number(self, room: int, real: bool = False) -> str:
        """Return a number of about `room` characters."""
        chance = self.chance
        k = str(chance.randint(1, 99)) if chance.random() < 0.3 else str(chance.randint(1, 9))
        if room < 16:
            names = (*REALS, *INTEGERS[:5]) if real else INTEGERS * 2 + DATA
            return chance.choice((*names, *self.indices * 3, k))
        # The language limits `min` and `max` in a body that is repeated often.
        few = 128 // self.left <= 4
        if chance.random() < 0.5:  # nesting
            inner = self.number(room - 9, real)
            whole = _whole(inner)
            ways = [f"abs({k} - {whole})", f"abs({inner})", f"{k} * {whole}", f"{k} - {whole}"]
            ways += [f"{name}({inner}, {k})" for name in ("min", "max")] * few
            if real:
                ways += [f"{name}({inner})" for name in ("tanh", "sigmoid", "relu", "sin", "exp", "gelu")]
                ways += [f"log(1 + abs({inner}))", f"{whole} ** 2", f"{whole} / {k}"]
            else:
                ways += [f"{whole} // {k}", f"{whole} % {k}", f"{whole} & {k}", f"clamp({inner}, -{k}, {k}{k})"]
            return chance.choice(ways)
        if chance.random() < 0.15 and self.left > 1:
            return self._over(["sum"], room, lambda inner: self.number(inner, real))
        part = int(room * chance.uniform(0.1, 0.9)) - 4
        a, b = self.number(part, real), self.number(room - part - 8, real)
        ways = [f"{name}({a}, {b})" for name in ("min", "max")] * few
        ways += [f"{a} + {b}", f"{a} - {_whole(b)}", f"{_whole(a)} * {_whole(b)}", f"abs({a} - {_whole(b)})"]
        if room > 40:
            ways += [f"where({a} > {b}, {k}, {self.number(8, real)})", f"where({self.number(8)} < {k}, {a}, {b})"]
        return chance.choice(ways)

    def condition(self, room: int) -> str:
        """Return a condition of about `room` characters."""
        chance = self.chance
        if room > 40 and chance.random() < 0.25 and self.left > 1:
            return self._over(["any", "all"], room, self.condition)
        if room > 40 and chance.random() < 0.5:
            part = int(room * chance.uniform(0.2, 0.8))
            a, b = self.condition(part), self.condition(room - part)
            return chance.choice([f"({a}) and ({b})", f"({a}) or ({b})", f"{a} and {b}", f"not ({a}) or ({b})"])
        part = int(room * chance.uniform(0.1, 0.9))
        return f"{self.number(part)} {chance.choice(['<=', '<', '>=', '==', '!='])} {self.number(room - part - 4)}"

    def _over(self, names: list[str], room: int, inner: Any) -> str:
        count = min(self.left, self.chance.choice([2, 8, 32, 64, 128]))
        index, self.left = f"i{len(self.indices)}", self.left // count
        self.indices.append(index)
        text = f"{self.chance.choice(names)}({index}, {count}, {inner(room - 14)})"
        self.indices.pop()
        self.left *= count
        return text


def random_expression(seed: int) -> tuple[str, str]:
    """Return a random mask or score of at most LONGEST characters, often close to that, which reads positions or the
    score."""
    chance = random.Random(seed)
    while True:
        kind, room = chance.choice(["mask", "mask", "score"]), chance.choice([40, 80, 120, 160, 180, 200])
        writer = Writer(chance)
        if kind == "mask":
            text = writer.condition(room)
        else:
            text = chance.choice(["{}", "s + {}", "s - ({})"]).format(writer.number(room, real=True))
        words = set(re.findall(r"\w+", text))
        if len(text) <= LONGEST and (words & {"s"} if kind == "score" else {"q_idx", "kv_idx"} <= words):
            return kind, text


def build(kind: str, text: str) -> tuple[str, float]:
    """Return the result of a build in its own process, which may be a refusal with one sentence, and its CPU
    seconds."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, json.dumps(spec_of(kind, text))],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT)),
    )
    assert done.returncode == 0, f"{kind} {text}: {done.stderr[-500:] or f'takes more than {LIMIT} s of CPU time'}"
    result, seconds = done.stdout.strip().rsplit("\n", 1)
    return result, float(seconds)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "text"), HUNG)
def test_expressions_that_hung_build(kind: str, text: str) -> None:
    build(kind, text)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100))
def test_random_short_expressions_build(seed: int) -> None:
    build(*random_expression(seed))


@pytest.mark.share(8)
def test_a_mask_with_many_cases_is_noted() -> None:
    """The note is there if comparisons are left unsolved, or if bounds of tiles are too long, also with an argument of
    the call in them."""
    unsolved, chain, of_window = (
        HUNG[0][1],
        "min(max(" * 5 + CHAIN + " <= q_idx",
        "sum(i, 32, abs(kv_idx - i*window)) <= q_idx",
    )
    for text, noted in (
        (unsolved, True),
        (chain, True),
        (of_window, True),
        ("kv_idx <= q_idx + kv_len - q_len", False),
    ):
        notes = [note for _, note in make_spec(spec_of("mask", text)).notes()]
        assert any("more cases than are solved" in note for note in notes) == noted, text


@pytest.mark.share(4)
def test_a_mask_that_is_too_long_builds_once_shortened() -> None:
    """More of a shorter mask is solved. After `simplify` shortens a mask, tiles must not be classified more precisely
    than the loops that were made from the long mask."""
    lower(make_spec(spec_of("mask", "abs(2*kv_idx - q_idx) <= 1 and all(i, 8, abs(h - 1) + abs(h - 8) >= i)")))


@pytest.mark.share(16)
def test_a_proof_does_not_depend_on_earlier_proofs() -> None:
    """A statement that takes too many steps is not proven, whether its parts are cached or not."""
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


def _builds(count: int, seed: int, workers: int) -> Iterator[tuple[int, str, str, str, float]]:
    def one(number: int) -> tuple[int, str, str, str, float]:
        kind, text = random_expression(number)
        try:
            return number, kind, text, *build(kind, text)
        except AssertionError as error:
            return number, kind, text, f"FAILED: {error}", float(LIMIT)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, range(seed, seed + count))


def main() -> None:
    """Build random expressions and print the result of each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    found = []
    for number, kind, text, result, seconds in _builds(options.count, options.seed, options.workers):
        found.append((result, seconds))
        mark = "OVER" if seconds > BAR else "    "
        print(f"{mark} {number} {seconds:5.1f} s {kind} {text}: {result[:400]}", flush=True)
    over, built = sum(s > BAR for _, s in found), sum(result.startswith("built") for result, _ in found)
    print(
        f"{len(found)} expressions, {built} built, {over} took more than {BAR} s of CPU time, "
        f"{sum('FAILED' in s for s, _ in found)} failed"
    )


if __name__ == "__main__":
    main()
