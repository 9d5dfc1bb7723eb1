"""Every case of every spec on a device, forward and backward, beside naive attention in the same dtype: `attngen test
--report`.

Errors are ||x - truth|| / ||truth|| against fp64. A case fails where ours is above twice naive's (which counts as at
least what rounding alone gives, see attngen.conformance.harness.Result), where one row is far off, where anything is
NaN, or where a second run differs in one bit. Specs run in processes of their own, because most of the time goes into
compiling kernels; the largest cases take turns. TRITON_INTERPRET decides when triton is imported: set it before this
file is.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.synchronize import Lock
from pathlib import Path
from types import ModuleType

import torch
import triton

from attngen.conformance.harness import (
    KEYS,
    Case,
    asked,
    heads_for,
    load_module,
    make_all_gradients,
    make_inputs,
    torch_dtype,
)
from attngen.conformance.interpreter import lighten
from attngen.conformance.over_cache import CacheCase, cache_cases, make_call, result_of
from attngen.heuristics import ALIGNED_KEYS, FUSED_HEADS, FUSED_KEYS, FUSED_ROWS, SPLIT_KEYS
from attngen.ir.dtypes import ELEMENTS
from attngen.runtime.launch import processors
from attngen.spec import Spec, load_spec

RAGGED = [(1, 1), (17, 17), (127, 127), (129, 129), (1000, 1000), (129, 1000), (1000, 129)]
LARGE = [(4096, 4096), (4095, 8191), (16384, 16384), (32768, 32768)]
MODIFIED = 16384  # rows up to which specs with score modifiers go: their oracle keeps every score, in fp64
TURNS = 2**26  # scores of a case from which on it takes turns with others: its oracle needs 16 GiB and more, in fp64
WIDE_TURNS = 2**31  # elements of keys of which the same is true: the oracle has a copy for each query head
_turns: list[Lock] = []  # of this process: what a large case holds


@dataclass(frozen=True)
class Job:
    """A spec's file, the folder of its module, and the dtype to run it in."""

    spec: Path
    folder: Path
    dtype: str


@dataclass(frozen=True)
class Table:
    """What was found of one job: a line of the page for each case, and whether it is within the bars."""

    heading: str
    lines: tuple[tuple[str, bool], ...]


def jobs(specs: Sequence[tuple[Path, Spec]], folder: Path, device: str) -> list[Job]:
    """One for each spec and dtype; Triton's interpreter cannot multiply bf16. `folder` holds the modules, by name."""
    return [
        Job(path, folder / s.name, dtype)
        for path, s in specs
        for dtype in s.dtype
        if device == "cuda" or ELEMENTS[dtype].is_interpreted
    ]


def run(work: Sequence[Job], device: str, seed: int, workers: int) -> list[Table]:
    """All of them, several at once; each case is said on stderr when it is done."""
    with processes(min(workers, max(1, len(work)))) as pool:
        return list(pool.map(run_job, work, repeat(device), repeat(seed)))


def processes(workers: int) -> ProcessPoolExecutor:
    """Processes that take turns at large cases."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start, (context.Lock(),))


def _start(lock: Lock) -> None:
    """Start a process: it takes turns, and its interpreter, if it needs that, is fast."""
    _turns.append(lock)
    lighten()


def run_job(job: Job, device: str, seed: int) -> Table:
    """Every case of one spec in one dtype."""
    spec, module = load_spec(job.spec), load_module(job.folder)
    lines = []
    work: list[Case | CacheCase] = [*cases(spec, processors(torch.device(device)) if device == "cuda" else 0)]
    work += cache_cases(spec, device == "cuda") if spec.cache else []
    for case in work:
        with _turns[0] if _is_large(spec, case) and _turns else nullcontext():
            try:
                result = result_of(module, spec, case, job.dtype, device, seed)
                same = repeats(module, spec, case, job.dtype, device, seed)
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()
        errors = " | ".join(f"{result.ours[k]:.1e} / {result.naive[k]:.1e}" if k in result.ours else "-" for k in KEYS)
        worst, row = (f"{k.removesuffix(' row')} {result.ratio(k):.2f}" for k in (result.worst, result.worst_row))
        ok = result.ok and same
        lines.append((f"| {case} | {errors} | {worst} | {row} | {'yes' if same else 'NO'} |", ok))
        print(
            f"{spec.name} {job.dtype} {case}: {worst}, row {row}{'' if ok else '  FAILED'}", file=sys.stderr, flush=True
        )
    return Table(f"{spec.name}, {job.dtype}", tuple(lines))


def _is_large(spec: Spec, case: Case | CacheCase) -> bool:
    """Whether its oracle, which keeps all scores and the keys of each query head, has no room beside that of another
    case."""
    keys = case.q_heads * (sum(case.keys) if isinstance(case, CacheCase) else case.batch * case.n_kv)
    return case.n_q * keys >= TURNS or spec.head_dim.qk * keys >= WIDE_TURNS


def cases(spec: Spec, processors: int = 0) -> Iterator[Case]:
    """Ragged and unequal sizes, other layouts; on a device of so many multiprocessors many sequences, and N up to
    32k, or MODIFIED."""
    heads = heads_for(spec)
    for n_q, n_kv in RAGGED if processors else RAGGED[:4]:
        yield Case(2, *heads, n_q, n_kv)
    for layout in ("bnhd", "packed", "expanded", "island"):
        yield Case(2, *heads, 127, 127, layout)
    if processors:
        yield crowded(spec, processors)
    for n_q, n_kv in LARGE if processors else []:
        if spec.score and n_q > MODIFIED:
            continue
        yield Case(1, *heads_for(spec, 2), n_q, n_kv)


def crowded(spec: Spec, processors: int) -> Case:
    """Ragged sequences, so many that a device of so many multiprocessors takes the backward in one pass where there is
    one.

    If query heads share keys, they are so many that a program has as many of them as it may have. Of inputs with a
    number for each score the copy engine can read the rows.
    """
    by_score = any({"Nq", "Nk"} <= set(i.shape) for i in spec.inputs())
    heads, rows = heads_for(spec), FUSED_ROWS + (ALIGNED_KEYS if by_score else 5)
    keys = max(FUSED_KEYS, FUSED_HEADS * SPLIT_KEYS) if heads[0] > heads[1] else FUSED_KEYS
    return Case(math.ceil(keys * processors / (heads[0] * rows)), *heads, rows, rows)


def repeats(module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, seed: int) -> bool:
    """Whether two runs give the same bits, forward and, where there is one, backward."""
    return all(torch.equal(a, b) for a, b in zip(*runs(module, spec, case, dtype, device, seed, 2)))


def runs(
    module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, seed: int, times: int
) -> Iterator[list[torch.Tensor]]:
    """The results of one call again and again, and where there is a backward, the gradients of q, k and v.

    Calls over a cache append the same keys to the same places each time.
    """
    if isinstance(case, CacheCase):
        call = make_call(spec, case, torch_dtype(dtype), device, seed)
        for _ in range(times):
            yield list(module.attention.with_kvcache(call.q, *call.caches, **call.arguments, return_lse=True))
        return
    q, k, v, inputs = make_inputs(spec, case, torch_dtype(dtype), device, seed)
    grads = make_all_gradients(spec, case, torch_dtype(dtype), device, seed)
    for _ in range(times):
        leaves = [x.detach().requires_grad_(spec.trains) for x in (q, k, v)]
        results = module.attention(*leaves, **inputs, **asked(spec))
        yield [*results, *(torch.autograd.grad(results[: len(grads)], leaves, grads) if spec.trains else ())]


def failures(tables: Sequence[Table]) -> list[str]:
    """The cases above a bar: the spec, the dtype, and the line."""
    return [f"{table.heading}: {line}" for table in tables for line, ok in table.lines if not ok]


def page(tables: Sequence[Table], device: str) -> str:
    """The report as Markdown."""
    where = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter on the CPU"
    text = [
        "# Verification on a GPU",
        "",
        f"{where}, torch {torch.__version__}, triton {triton.__version__}. Written by `make gpu-test`.",
        "",
        "Relative errors ||x - truth|| / ||truth|| against fp64: ours / naive attention's in the same dtype. `worst` is the largest of",
        "our errors over naive's, which counts as at least what rounding alone gives; the bar is 2. `worst row` is the same of the single",
        "row that is furthest off; the bar is 4. `bits`: a second run gives the same bits. Loss on the output and on the LSE. Cases over a",
        "cache say how many keys sequences have there, and how many the call appends, as in `cache 5,260,0+4`.",
        "",
        f"{sum(len(table.lines) for table in tables)} cases, {len(failures(tables))} above the bar.",
    ]
    columns = ("case", "out", "lse", "dq", "dk", "dv", "worst", "worst row", "bits")
    for table in tables:
        text += ["", f"## {table.heading}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        text += [line for line, _ in table.lines]
    return "\n".join(text) + "\n"
