"""Random compositions of all functions of the language, three deep, build or are refused with a sentence about the
spec.

They are score modifiers, with gradient tensors for every kind of reduction and sometimes within a soft cap, and masks,
with data, named parts and bitwise operations; under every kind of mask, forward, backward and in forward mode. No rule
of the verifier may refuse one.

The passes run from logical IR up to those that choose tiles, and after each of them the verifier checks all rules that
compare expressions. One spec in 50 continues to target IR, with the tile that it names. No kernel is printed or run:
tests/test_random_scores.py and tests/test_random_specs.py check numbers. The command line tests more, and `--whole`
takes each spec to target IR:

    python -m tests.test_random_expressions --count 2000 --seed 7
"""

from __future__ import annotations

import argparse
import ast
import importlib
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from attngen.errors import SpecError, VerifyError
from attngen.lang.names import CALLS
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.spec_strategies import Data

pytestmark = pytest.mark.numerics

DEPTH = 3
PUSHED, EACH = 6, 25  # tests on a push, and specs per test
WHOLE = 50  # one spec in so many goes to target IR
MOST_TIME = 120  # seconds of CPU time per spec on the command line
LAST = "assign-memory-space"  # the last pass before tiles are chosen

# Functions by the type of their result. Functions that take only numbers get as many as they accept.
CONDITIONS = ("any", "all")
ROUNDED = ("int", "floor", "round")
WHOLE_NUMBERS = ("min", "max", "abs", "clamp", "where", "relu", "sum", *ROUNDED)  # integer results for integers
# Operators by the type of their operands.
WHOLE_SIGNS = {
    "//": ast.FloorDiv,
    "%": ast.Mod,
    "&": ast.BitAnd,
    "|": ast.BitOr,
    "^": ast.BitXor,
    "<<": ast.LShift,
    ">>": ast.RShift,
}
REAL_SIGNS = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "**": ast.Pow}
COMPARED = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq}
JOINED = {"and": ast.And, "or": ast.Or, "not": ast.Not}
SIGNS = WHOLE_SIGNS | REAL_SIGNS | COMPARED | JOINED
FIRST = [*CALLS, *SIGNS]

GRAD = {"grad": True}
REAL_READS: dict[str, Data] = {
    "slope[h]": {"slope": {"tensor": ["H"], **GRAD}},
    "gain[hkv]": {"gain": {"tensor": ["Hkv"], **GRAD}},
    "level[b]": {"level": {"tensor": ["B"], **GRAD}},
    "rows[b, h, q_idx]": {"rows": {"tensor": ["B", "H", "Nq"], **GRAD}},
    "columns[b, kv_idx]": {"columns": {"tensor": ["B", "Nk"], **GRAD}},
    "apart[q_idx - kv_idx]": {"apart": {"tensor": [9], **GRAD}},
    "near[h, clamp(kv_idx - q_idx, -4, 4) + 4]": {"near": {"tensor": ["H", 9], **GRAD}},
    "dense[b, h, q_idx, kv_idx]": {"dense": {"tensor": ["B", "H", "Nq", "Nk"], **GRAD}},
    "entries[h, bucket[b, q_idx, kv_idx]]": {
        "entries": {"tensor": ["H", 8], **GRAD},
        "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
    },
    "weight[b, kv_idx // 2]": {"weight": {"tensor": ["B", "Nk"]}},
    "rate": {"rate": {"scalar": "float"}},
    "cap": {"cap": {"value": 4.0}},
}
WHOLE_READS: dict[str, Data] = {
    "doc[b, q_idx]": {"doc": {"tensor": ["B", "any"], "dtype": "int32"}},
    "doc[b, kv_idx]": {"doc": {"tensor": ["B", "any"], "dtype": "int32"}},
    "limit[h]": {"limit": {"tensor": ["H"], "dtype": "int32"}},
    "reach": {"reach": {"scalar": "int"}},
    "step": {"step": {"scalar": "int", "min": 1}},
    "sinks": {"sinks": {"value": 3}},
}
FLAGS: dict[str, Data] = {
    "seen[b, kv_idx]": {"seen": {"tensor": ["B", "Nk"], "dtype": "bool"}},
    "awake[b, q_idx]": {"awake": {"tensor": ["B", "Nq"], "dtype": "bool"}},
    "allowed[b, h, q_idx, kv_idx]": {"allowed": {"tensor": ["B", "H", "Nq", "Nk"], "dtype": "bool"}},
    "always": {"always": {"value": True}},
}
AT = {"table": {"tensor": [12], **GRAD}, "lookup": {"tensor": ["any"], "dtype": "int32"}}  # read at a random index
PARAMS = {
    name: param for reads in (REAL_READS, WHOLE_READS, FLAGS) for read in reads.values() for name, param in read.items()
} | AT
NAMED: list[Any] = [
    "none",
    "causal",
    "document",
    {"document": {"sorted": True}},
    "key_padding",
    {"block_sparse": {"block": 32}},
    {"expr": "(q_idx - kv_idx) % 3 == 0"},  # stripes
]


class Drawn:
    """Writer of a random expression with its named parts."""

    def __init__(self, chance: random.Random, score: bool, first: str) -> None:
        self.chance, self.score = chance, score
        self.first = first  # the function or operator to use first
        self.let: dict[str, str] = {}
        self.iterators: list[str] = []
        self.steps = 0  # number of enclosing conditions and rounding functions, which have no gradient

    def data(self, text: str) -> Data:
        """Return the expression as in a spec."""
        used = text
        for name, part in reversed(self.let.items()):  # a part may use those before it
            used += f"\n{part}" if re.search(rf"\b{name}\b", used) else ""
        self.let = {name: part for name, part in self.let.items() if re.search(rf"\b{name}\b", used)}
        params = {name: param for name, param in PARAMS.items() if re.search(rf"\b{name}\b", used)}
        return {"expr": text, **({"params": params} if params else {}), **({"let": self.let} if self.let else {})}

    def real(self, depth: int) -> str:
        if not depth:
            reads = [
                text
                for text, params in REAL_READS.items()
                if not (self.steps and any("grad" in param for param in params.values()))
            ]
            leaves = [*["s"] * 8, "-1.5"] if self.score else []
            return self.chance.choice([*leaves, *reads, "0.5", "2.0", "(q_idx - kv_idx) / 16"])
        if self.first in WHOLE_SIGNS or not self.first and self.chance.random() < 0.1:
            return self.whole(depth)
        if self.first in (*CONDITIONS, *COMPARED, *JOINED):
            return self.function("where", self.real, depth)
        if self.asks(CALLS, 0.6):
            return self.named(
                self.function(self.pick([name for name in CALLS if name not in CONDITIONS]), self.real, depth)
            )
        sign = self.pick([*REAL_SIGNS, *([] if self.steps else ["["])])
        a, b = self.real(depth - 1), self.real(self.chance.randrange(depth))
        if sign == "**":
            k = self.chance.choice(["2", "3", "-1", "-2", "0.5", "4"])
            return self.chance.choice([f"({a}) ** {k}", f"{abs(float(k))} ** ({a})"])
        return (
            f"table[{self.whole(depth - 1)}]"
            if sign == "["
            else f"{self.chance.choice(['', '', '-'])}({a}) {sign} ({b})"
        )

    def whole(self, depth: int) -> str:
        if not depth:
            places = ["q_idx", "kv_idx", "q_idx - kv_idx", "q_pos", "q_len", "kv_len", "b", "h", "hkv"]
            return self.chance.choice([*places, *WHOLE_READS, *self.iterators, str(self.chance.randint(0, 9))])
        if self.asks(WHOLE_NUMBERS, 0.5):
            return self.named(self.function(self.pick(WHOLE_NUMBERS), self.whole, depth))
        sign = self.pick([*WHOLE_SIGNS, "+", "-", "*", "**", "["])
        a, b = self.whole(depth - 1), self.whole(self.chance.randrange(depth))
        if sign == "[":
            return f"lookup[{a}]"
        seconds = {"//": ["1", "2", "5", "16", "-3", "step"], "<<": ["1", "4", "h", f"({b})"], "**": ["2", "3"]}
        seconds |= {"%": seconds["//"], ">>": seconds["<<"]}
        return f"{self.chance.choice(['', '', '-'])}({a}) {sign} {self.chance.choice(seconds.get(sign, [f'({b})']))}"

    def condition(self, depth: int) -> str:
        self.steps += 1
        drawn = self._condition(depth)
        self.steps -= 1
        return drawn

    def _condition(self, depth: int) -> str:
        if not depth and not self.first and self.chance.random() < 0.4:
            return self.chance.choice([*FLAGS, "kv_idx <= q_pos"])
        joins = self.first in (*CONDITIONS, *JOINED)
        if not depth or not joins and (self.first or self.chance.random() < 0.4):
            signs = [self.pick([*COMPARED]), self.chance.choice([*COMPARED])]
            number = (
                self.whole if self.first in WHOLE_SIGNS or not self.first and self.chance.random() < 0.7 else self.real
            )
            a, b, c = (f"({number(d)})" for d in (depth, *(self.chance.randrange(depth + 1) for _ in "bc")))
            return f"{a} {signs[0]} {b}" + (f" {signs[1]} {c}" if self.chance.random() < 0.15 else "")
        if self.asks(CONDITIONS, 0.4):
            return self.named(self.function(self.pick([*CONDITIONS, "where"]), self.condition, depth))
        sign = self.pick([*JOINED])
        a, b = self.condition(depth - 1), self.condition(self.chance.randrange(depth))
        return f"not ({a})" if sign == "not" else f"({a}) {sign} ({b})"

    def asks(self, names: Collection[str], share: float) -> bool:
        """Return whether `first` is among the names; once it has been used, True for a share of calls."""
        return self.first in names if self.first else self.chance.random() < share

    def pick(self, names: Sequence[str]) -> str:
        """Return one of these functions or operators: `first` if it is among them, else any."""
        if self.first in names:
            name, self.first = self.first, ""
            return name
        return self.chance.choice(names)

    def function(self, name: str, part: Any, depth: int) -> str:
        """Return a call whose first argument has the full remaining depth."""
        below = depth - 1
        if name in (*CONDITIONS, "sum"):
            index = f"i{depth}{len(self.iterators)}"
            self.iterators.append(index)
            each = part(below)
            self.iterators.pop()
            return f"{name}({index}, {self.chance.randint(1, 4)}, {each})"
        if name == "where":
            return f"where({self.condition(below)}, {part(below)}, {part(self.chance.randrange(depth))})"
        if name in ROUNDED:
            whole = [f"({self.whole(below)}) / {self.chance.randint(2, 9)}", f"({self.condition(below)})"][
                : 2 if name == "int" else 1
            ]
            self.steps += 1
            real = self.real(below)
            self.steps -= 1
            return f"{name}({self.chance.choice([real, *whole])})"
        if name == "float":
            return f"float({self.chance.choice([self.condition, self.whole, self.real])(below)})"
        count = self.chance.randint(CALLS[name][1], min(CALLS[name][2], 3))
        return f"{name}({', '.join([part(below), *(part(self.chance.randrange(depth)) for _ in range(count - 1))])})"

    def named(self, text: str) -> str:
        """Return the text, or sometimes the name of a new part with this text."""
        if self.iterators or self.chance.random() > 0.1:
            return text
        name = f"named{len(self.let)}"
        self.let[name] = text
        return name


def spec_of(number: int) -> Data:
    """Return the spec of a number. Two of three have a random modifier, and every second one a random mask."""
    chance = random.Random(number)
    data: Data = {"name": "drawn", "head_dim": 16, "dtype": [chance.choice(["fp16", "fp32"])]}
    data["heads"] = {"sharing": chance.choice(["mha", "gqa", "mqa"])}
    data["backward"] = chance.choice([{"deterministic": True}, {"deterministic": False}, False])
    data["schedule"] = {"block_q": 32, "block_kv": 32, "warps": 4, "stages": 1}
    first = FIRST[number // 3 % len(FIRST)]
    if number % 3:
        modifier = Drawn(chance, score=True, first=first)
        text = modifier.real(DEPTH)
        text = text if re.search(r"\bs\b", "\n".join([text, *modifier.let.values()])) else f"s + ({text})"
        if capped := chance.random() < 0.2:
            text = f"20 * tanh(({text}) / 20)"
        data["score"] = [modifier.data(text), *([{"softcap": 20.0}] if not capped and chance.random() < 0.2 else [])]
    data["mask"] = chance.choice(NAMED)
    if number % 2 or not number % 3:
        mask = Drawn(chance, score=False, first=first)
        condition = mask.data(mask.condition(DEPTH))
        data["mask"] = (
            condition if chance.random() < 0.7 else {chance.choice(["all_of", "any_of"]): [condition, data["mask"]]}
        )
    shared = {name for part in written(data["mask"]) for name in part.get("params", {})}
    for part in written(data.get("score")):  # no tensor belongs to both the mask and the modifier
        for name in sorted(shared & {*part.get("params", {})}):
            _rename(part, name)
    return data


def _rename(part: Data, name: str) -> None:
    def renamed(text: str) -> str:
        return re.sub(rf"\b{name}\b", f"{name}_own", text)

    part["expr"] = renamed(part["expr"])
    part["params"][f"{name}_own"] = part["params"].pop(name)
    if "let" in part:
        part["let"] = {key: renamed(text) for key, text in part["let"].items()}


def last_pass(number: int) -> str | None:
    """Return the last pass to run for a spec; None for all passes."""
    return LAST if number % WHOLE else None


def outcome(data: Data, after: str | None = None) -> str:
    """Return `built`, or the sentence that the spec gets. Raise other errors: broken rules, and sentences that name no
    key."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lower(make_spec(data), after)
    except SpecError as error:
        if isinstance(error.__cause__, VerifyError):
            raise
        keys = "|".join(Spec.model_fields)
        for line in str(error).splitlines():
            assert re.match(rf"(.*: )?`({keys})\b[\w.\[\]]*` ", line) and line.isprintable(), line
        return str(error).splitlines()[0]
    return "built"


def written(data: Any) -> Iterator[Data]:
    """Yield the expressions in the modifiers or the mask of a spec."""
    if isinstance(data, dict) and "expr" in data:
        yield data
    elif isinstance(data, (dict, list)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from written(part)


@pytest.mark.share(32)
@pytest.mark.parametrize("part", range(PUSHED))
def test_compositions_build_or_get_a_sentence_about_the_spec(part: int) -> None:
    found = {number: outcome(spec_of(number), last_pass(number)) for number in range(part * EACH, (part + 1) * EACH)}
    assert sum(what == "built" for what in found.values()) >= EACH // 2, found


def test_the_whole_table_is_drawn() -> None:
    """Every function and operator of the language is in some modifier and in some mask."""
    specs = [spec_of(number) for number in range(PUSHED * EACH)]
    for kind in ("score", "mask"):
        drawn = [expression for data in specs for expression in written(data.get(kind))]
        trees = [
            ast.parse(text, mode="eval")
            for expression in drawn
            for text in (expression["expr"], *expression.get("let", {}).values())
        ]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert (
            set(CALLS) - called == set() and {*SIGNS.values(), ast.USub, ast.Subscript} - set(map(type, nodes)) == set()
        )
        assert any("let" in expression for expression in drawn)
    assert [name for name in PARAMS if not any(re.search(rf"\b{name}\b", repr(data)) for data in specs)] == []


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken rule is raised, and so is a sentence that names no key."""
    capped = {"name": "x", "head_dim": 16, "score": [{"expr": "20 * tanh((s - abs(q_idx - kv_idx)) / 20)"}]}
    assert outcome(capped, LAST) == "built"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("attngen.verify.scores"), "equal", lambda a, b: False)
        with pytest.raises(VerifyError, match="breaks rule `scores`"):
            outcome({**capped, "name": "y"}, LAST)

    def refused(_: object) -> None:
        raise SpecError("the loop has no bound")

    monkeypatch.setattr(f"{__name__}.make_spec", refused)
    with pytest.raises(AssertionError, match="the loop has no bound"):
        outcome(capped)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Lowers random specs; prints those that neither build nor get a sentence about them"
    )
    parser.add_argument("--count", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--whole", action="store_true", help=f"take each to target IR, not one in {WHOLE}")
    given = parser.parse_args()

    def late(*_: object) -> None:
        raise TimeoutError(f"takes more than {MOST_TIME} s of CPU time")

    signal.signal(signal.SIGVTALRM, late)
    failures = 0
    counts: Counter[str] = Counter()
    for i, number in enumerate(range(given.seed * 10_000, given.seed * 10_000 + given.count), 1):
        data = spec_of(number)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_TIME)
        try:
            what = outcome(data, None if given.whole else last_pass(number))
        except Exception as error:
            failures += 1
            print(f"{number}: {type(error).__name__}: {str(error)[:600]}\n{data}\n", flush=True)
            continue
        counts[re.sub(r"`.*?`|[0-9,]+", "..", what)[:90]] += 1
        if i % 100 == 0:
            print(f"{i} of {given.count}, {failures} failures; {time.process_time():.0f} s", flush=True)
    for sentence, n in counts.most_common():
        print(f"{n:6} {sentence}")
    print(f"{given.count} specs, {failures} failures; {time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()
