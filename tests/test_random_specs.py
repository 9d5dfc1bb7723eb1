"""Random specs of the whole spec language: the module of each is right, or the spec gets one sentence.

A spec goes through every pass with the verifier. Its module is emitted from the text of its IR, as by `attngen emit`,
and runs on one small problem: results and all gradients are compared with naive attention, as by `attngen test`.

`python -m tests.test_random_specs --specs 5000 --seed 7` tests more than CI.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
import sympy

from attngen.cli.common import lower
from attngen.codegen.files import diff_module, write_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, cli_cases, heads_for
from attngen.conformance.harness import load_module, run_case
from attngen.conformance.kv_cache import CacheCase, run_cache_case
from attngen.conformance.result import Result
from attngen.errors import SpecError, VerifyError
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.spec import Spec, load_spec, make_spec
from attngen.verify import verify
from tests.conftest import CUDA
from tests.spec_strategies import Data, cache_data, drawn, spec_data

pytestmark = pytest.mark.numerics

CI_SEEDS, CI_SPECS = (4, 2, 7), 24  # per seed
LENGTHS = (17, 33, 70, 135)  # of queries and of keys, always different


def as_yaml(data: Data) -> str:
    """Return a spec with a line for each key; values are JSON, which is YAML."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in data.items())


# Compares some calls of a module with naive attention, on a device.
Held = Callable[[ModuleType, Spec, random.Random, str], list[Result]]


def one_call(module: ModuleType, spec: Spec, chance: random.Random, device: str) -> list[Result]:
    case, dtype, seed = problem(spec, chance)
    return [run_case(module, spec, case, dtype, device, seed)]


def calls_with_a_cache(module: ModuleType, spec: Spec, chance: random.Random, device: str) -> list[Result]:
    """Compare each kind of call of `with_kvcache`, and a call with gradients if the spec has a backward."""
    results = one_call(module, spec, chance, device) if spec.trains else []
    for case in cache_problems(spec, chance):
        results.append(
            run_cache_case(module, spec, case, chance.choice(dtypes(spec, spec.dtype)), device, chance.randrange(1000))
        )
    return results


def outcome(data: Data, path: Path, device: str, held: Held = one_call) -> str:
    """Return `built` if the module is right, or the sentence that the spec gets. Raise other errors, and sentences
    without a line number."""
    path.write_text(as_yaml(data))
    try:
        spec = load_spec(path)
        files = render(lower(path, spec))
    except SpecError as error:
        if isinstance(error.__cause__, VerifyError):
            raise
        for line in str(error).splitlines():
            assert re.match(rf"{re.escape(str(path))}, line [0-9]+: `[\w.\[\]]+` ", line) and line.isprintable(), line
        return str(error).splitlines()[0].partition(": ")[2]
    assert max(len(line) for name, text in files.items() if name.endswith(".py") for line in text.splitlines()) <= 140
    emit(files, path.parent / "emitted")
    module = load_module(path.parent / "emitted")
    not_fitting = {
        f"attention: {row}"
        for rows in module.kernels.SCHEDULES.values()
        for row in rows.values()
        if isinstance(row, str)
    }
    try:
        results = held(module, spec, random.Random(as_yaml(data)), device)
    except ValueError as error:  # no tile fits this device, as the table of schedules says
        if str(error) not in not_fitting:
            raise
        return str(error)
    assert (wrong := [str(result) for result in results if not result.ok]) == [], "\n".join(wrong)
    return "built"


def emit(files: dict[str, str], folder: Path) -> None:
    """Write a module from only the text of its IR, and check that the files are the same."""
    write_module(render(verify(parse_module(files["schedule.ir"]))), folder)
    assert (diff := diff_module(files, folder)) == "", diff


def problem(spec: Spec, chance: random.Random) -> tuple[Case, str, int]:
    """Return a small case of ragged sizes, a dtype in which `attngen test` runs the spec, and a seed for the inputs.

    The error of a few numbers varies by chance. So a case with one query has eight sequences, and a spec that learns
    one number per head, such as a sink, has at least six query heads.
    """
    n_q = chance.choice((1, *LENGTHS))
    n_kv = chance.choice([n for n in LENGTHS if n != n_q])
    per_head = spec.trains and any(i.grad and {*i.shape} <= {"Hq", "Hkv"} for i in spec.inputs())
    fewest = chance.choice((6, 8)) if per_head else 4
    heads = heads_for(spec, fewest if per_head or spec.heads.sharing == "gqa" else chance.randint(2, 3))
    case = Case(8 if n_q == 1 else chance.randint(1, 2), *heads, n_q, n_kv, chance.choice(["bhnd", "bnhd", "island"]))
    return case, chance.choice(dtypes(spec, [dtype for _, dtype in cli_cases(spec, CUDA)])), chance.randrange(1000)


def dtypes(spec: Spec, given: Sequence[str]) -> Sequence[str]:
    """Return the dtypes to choose from. If scores have a tanh, fp32 is left out if there is another dtype: the LSE of a
    query that sees one key is a score, not a sum, and with `softcap` in fp32 it has twice the error of torch's."""
    rough = any(part.sink() is None and part.expression().has(sympy.tanh) for part in spec.score)
    return [dtype for dtype in given if not (rough and dtype == "fp32")] or given


def cache_problems(spec: Spec, chance: random.Random) -> Iterator[CacheCase]:
    """Yield small calls with a cache: of one query, of a few with existing keys, and of many with new keys. Some
    sequences have no key, or end at the edge of a page or a tile. There are several sequences for the reason in
    `problem`."""
    assert spec.cache is not None
    page = {"": 0, "page_rows": chance.choice((3, 16, 80))}.get(spec.cache.page)
    page = int(spec.cache.page) if page is None else page
    q_heads, kv_heads = heads_for(spec, 4 if spec.heads.sharing == "gqa" else 2)
    edges = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, *([page - 1, page, page + 1] if page else []))
    for n_q, new, sequences in ((1, 1, 5), (chance.randint(2, 5), 0, 3), (many := chance.choice((21, 70)), many, 2)):
        lengths = [chance.choice([n for n in (*edges, chance.randint(0, 150)) if n <= 150]) for _ in range(sequences)]
        if not new:  # queries are at the last keys
            lengths = [max(n, n_q) for n in lengths]
        room = max(lengths) + new
        room = -(-room // page) * page if page else room
        shared = bool(page) and chance.random() < 0.3
        yield CacheCase(q_heads, kv_heads, n_q, tuple(lengths), new, room, page, chance.random() < 0.3, shared)


Outcomes = Iterator[tuple[Data, str | Exception]]


def outcomes(number: int, count: int, device: str) -> Outcomes:
    """Yield random specs, each with its outcome or with an unexpected exception."""
    yield from _outcomes(drawn(spec_data(), count, number), one_call, device)


def of_caches(number: int, count: int, device: str) -> Outcomes:
    """Do the same for specs with a KV cache."""
    yield from _outcomes(drawn(cache_data(), count, number), calls_with_a_cache, device)


def _outcomes(specs: list[Data], held: Held, device: str) -> Outcomes:
    for data in specs:
        with TemporaryDirectory() as folder:
            try:
                yield data, outcome(data, Path(folder) / "drawn.yaml", device, held)
            except Exception as error:
                yield data, error


KINDS = (  # of specs, by their text
    *('"sharing": "mha"', '"sharing": "mqa"', '"sharing": "gqa"', '"order": "kv_outer"'),
    *('"dropout": true', '"deterministic": false', '"backward": false'),
)


@pytest.mark.share(8)
@pytest.mark.parametrize("number", CI_SEEDS)
def test_each_spec_is_right_or_gets_one_sentence(number: int, device: str) -> None:
    """Specs of each kind are among those that are right. The version of Hypothesis decides which specs a seed gives, so
    more are drawn of a kind that none has."""
    built = built_of(outcomes(number, CI_SPECS, device))
    assert len(built) >= CI_SPECS // 3
    for kind in KINDS:
        if not any(kind in json.dumps(data) for data in built):
            more = [data for data in drawn(spec_data(), 10 * CI_SPECS, number) if kind in json.dumps(data)]
            built += built_of(_outcomes(more[:4], one_call, device))
    assert [kind for kind in KINDS if not any(kind in json.dumps(data) for data in built)] == []


def built_of(found: Outcomes) -> list[Data]:
    """Return the specs that build, if no other one raised an unexpected exception."""
    tried = list(found)
    assert [(data, error) for data, error in tried if isinstance(error, Exception)] == []
    return [data for data, what in tried if what == "built"]


CAUSAL: Data = {"name": "drawn", "head_dim": 16, "mask": "causal"}


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "mask",
    [
        "0 < kv_idx and 1 < kv_idx and q_idx <= kv_idx",  # of two lower bounds, one follows from the other
        "kv_idx * 3 == q_idx",  # a bound that is a multiple of a position
        "(q_idx > q_len and seen[b, kv_idx]) or kv_idx <= q_idx",  # no pair meets one side
        "(q_idx + 3 < kv_idx and kv_idx < q_idx + 2) or kv_idx % 3 == 0",
    ],
)
def test_masks_whose_bounds_were_not_proven_are_right(mask: str, tmp_path: Path, device: str) -> None:
    params = {"seen": {"tensor": ["B", "Nk"], "dtype": "bool"}} if "seen" in mask else {}
    assert outcome({**CAUSAL, "mask": {"expr": mask, "params": params}}, tmp_path / "x.yaml", device) == "built"


@pytest.mark.parametrize("order", ["q_outer", "kv_outer"])
@pytest.mark.parametrize(
    "mask",
    [
        "q_idx < 3 == q_idx",
        "0 < kv_idx > q_idx and q_idx < q_len < q_idx",
        "kv_idx > kv_len",
        "q_idx > q_len and seen[b, kv_idx]",
        "kv_idx > kv_len and seen[b, q_idx]",
        "q_idx % 4 == 5 and seen[b, kv_idx]",
        "(q_idx > q_len and seen[b, kv_idx]) or (kv_idx > 5 and kv_idx <= 5)",
        "q_idx + 3 < kv_idx and kv_idx < q_idx + 2 and kv_idx > q_len + 3",
        "kv_idx > kv_len and kv_idx - q_idx > kv_len - q_len + 1 and kv_idx - q_idx <= kv_len - q_len - 1",
        "kv_idx <= q_pos and kv_idx >= kv_len and kv_idx - q_idx > kv_len - q_len",
        "q_len + kv_idx == 0",  # there is a query
    ],
)
def test_masks_that_no_pair_meets_say_so(mask: str, order: str, tmp_path: Path, device: str) -> None:
    axis = "Nq" if "seen[b, q_idx]" in mask else "Nk"
    params = {"seen": {"tensor": ["B", axis], "dtype": "bool"}} if "seen" in mask else {}
    data = {**CAUSAL, "mask": {"expr": mask, "params": params}, "schedule": {"order": order}}
    said = "`mask` hides every key from every query; expected a condition that some pairs meet"
    assert outcome(data, tmp_path / "x.yaml", device) == said


@pytest.mark.share(4)
def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """IR that breaks a rule is raised, and not returned as a sentence."""
    assert outcome(CAUSAL, tmp_path / "x.yaml", device) == "built"

    def broken(*_: object) -> None:
        raise VerifyError("covers", "@fwd", "")

    monkeypatch.setattr("attngen.lowering.pipeline.verify", broken)
    with pytest.raises(SpecError, match="breaks rule `covers`: @fwd; this is a mistake of attngen, not of the spec"):
        outcome(CAUSAL, tmp_path / "x.yaml", device)


TF32: Data = {"dtype": "fp32", "fp32_precision": "tf32"}


@pytest.mark.share(16)
@pytest.mark.parametrize("more", [{}, TF32], ids=["16-bit", "tf32"])
@pytest.mark.parametrize(("kernel", "wrong"), [("fwd", "(out|lse)"), ("dq", "dq"), ("dkdv", "d[kv]")])
def test_a_wrong_kernel_is_found(
    kernel: str, wrong: str, more: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The wrong kernel is causal, and hides the last key of each query."""

    def edited(module: Module, rendered: Callable[[Module], dict[str, str]] = render) -> dict[str, str]:
        files = rendered(module)
        before, name, text = files["kernels.py"].partition(f"def {kernel}(")
        return files | {"kernels.py": before + name + re.sub(r"([<>])= (?=\(\w+_idx)", r"\1 ", text, count=1)}

    monkeypatch.setattr(f"{__name__}.render", edited)
    with pytest.raises(AssertionError, match=f"worst {wrong} "):
        outcome({**CAUSAL, **more}, tmp_path / "x.yaml", device)


@pytest.mark.share(16)
def test_a_text_that_gives_another_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The parsed module has another number of stages than the printed one."""
    two = parse_module(
        render(lower(tmp_path, make_spec(CAUSAL)))["schedule.ir"].replace("num_stages=3", "num_stages=2")
    )
    monkeypatch.setattr(f"{__name__}.parse_module", lambda _: two)
    with pytest.raises(AssertionError, match=r'-.*"num_stages": 2'):
        outcome(CAUSAL, tmp_path / "x.yaml", device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="draws specs, and says which neither give a right module nor get one sentence"
    )
    parser.add_argument("--specs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--caches", action="store_true", help="specs with a cache of keys and values")
    given = parser.parse_args()
    start, failures = time.time(), 0
    counts: Counter[str] = Counter()
    found = (of_caches if given.caches else outcomes)(given.seed, given.specs, "cuda" if CUDA else "cpu")
    for i, (data, what) in enumerate(found, 1):
        if i % 100 == 0:
            print(f"{i} of {given.specs}, {failures} failures; {time.time() - start:.0f} s", flush=True)
        if isinstance(what, Exception):
            failures += 1
            print(f"{type(what).__name__}: {str(what)[:600]}\n{as_yaml(data)}\n", flush=True)
            continue
        counts[re.sub(r"`.*?`|[0-9,]+", "..", what)[:90]] += 1
    for sentence, n in counts.most_common():
        print(f"{n:6} {sentence}")
    print(f"{given.specs} specs, {failures} failures; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
