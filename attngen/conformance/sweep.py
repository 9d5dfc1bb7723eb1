"""`attngen test --report`: run every case of every spec on a device, forward and backward, and compare it with naive
attention in the same dtype.

Errors are ||x - truth|| / ||truth|| against fp64. A case fails if our error is above twice naive's (which counts as at
least the error of rounding, see `Result`), if one row is far off, if anything is NaN, or if a second run differs in one
bit. Specs run in separate processes, because most of the time goes into compiling kernels; the largest cases run one at
a time. TRITON_INTERPRET takes effect when triton is imported, so set it before this file is imported.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from pathlib import Path
from types import ModuleType

import torch
import triton

from attngen.conformance.cases import Case, heads_for, make_all_gradients, make_inputs, torch_dtype
from attngen.conformance.harness import asked, load_module
from attngen.conformance.interpreter import lighten
from attngen.conformance.kv_cache import CacheCase, cache_cases, make_call, result_of
from attngen.conformance.result import KEYS, shown
from attngen.heuristics import ALIGNED_KEYS, FUSED_HEADS, FUSED_KEYS, FUSED_ROWS, SPLIT_KEYS
from attngen.ir.dtypes import ELEMENTS
from attngen.runtime.launch import num_sms
from attngen.spec import Spec, load_spec

RAGGED = [(1, 1), (17, 17), (127, 127), (129, 129), (1000, 1000), (129, 1000), (1000, 129)]
LARGE = [(4096, 4096), (4095, 8191), (16384, 16384), (32768, 32768)]
MODIFIED = 16384  # most rows for specs with score modifiers, whose oracle keeps every score in fp64
# Cases with at least this number of scores run one at a time: their oracle needs 16 GiB and more, in fp64.
LARGE_SCORES = 2**26
# The same for this number of elements of keys, which the oracle copies for each query head.
LARGE_KEYS = 2**31
_lock: list[Lock] = []  # in each worker process: the lock that a large case holds


@dataclass(frozen=True)
class Job:
    """A spec's file, the folder of its module, and the dtype of the run."""

    spec: Path
    folder: Path
    dtype: str


@dataclass(frozen=True)
class Table:
    """The results of one job: a line of the report per case, and whether the case passed."""

    heading: str
    lines: tuple[tuple[str, bool], ...]


def jobs(specs: Sequence[tuple[Path, Spec]], folder: Path, device: str) -> list[Job]:
    """Return one job per spec and dtype; Triton's interpreter cannot multiply bf16. `folder` has the modules, by
    name."""
    return [
        Job(path, folder / s.name, dtype)
        for path, s in specs
        for dtype in s.dtype
        if device == "cuda" or ELEMENTS[dtype].is_interpreted
    ]


def processes(workers: int) -> ProcessPoolExecutor:
    """Return worker processes that run large cases one at a time."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start, (context.Lock(),))


def _start(lock: Lock) -> None:
    """Initialise a worker process: its lock for large cases, and a faster interpreter if kernels are interpreted."""
    _lock.append(lock)
    lighten()


def run_job(job: Job, device: str, seed: int) -> Table:
    """Run every case of one spec in one dtype."""
    spec, module = load_spec(job.spec), load_module(job.folder)
    lines = []
    work: list[Case | CacheCase] = [*cases(spec, num_sms(torch.device(device)) if device == "cuda" else 0)]
    work += cache_cases(spec, device == "cuda") if spec.cache else []
    for case in work:
        with _lock[0] if _is_large(spec, case) and _lock else nullcontext():
            try:
                result = result_of(module, spec, case, job.dtype, device, seed)
                same = repeats(module, spec, case, job.dtype, device, seed)
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()
        errors = " | ".join(f"{result.ours[k]:.1e} / {result.naive[k]:.1e}" if k in result.ours else "-" for k in KEYS)
        worst, row = (
            f"{shown(k.removesuffix(' row'), result.ours)} {result.ratio(k):.2f}"
            for k in (result.worst, result.worst_row)
        )
        ok = result.ok and same
        lines.append((f"| {case} | {errors} | {worst} | {row} | {'yes' if same else 'NO'} |", ok))
        print(
            f"{spec.name} {job.dtype} {case}: {worst}, row {row}{'' if ok else '  FAILED'}", file=sys.stderr, flush=True
        )
    return Table(f"{spec.name}, {job.dtype}", tuple(lines))


def _is_large(spec: Spec, case: Case | CacheCase) -> bool:
    """True if a case's oracle, which keeps all scores and a copy of the keys per query head, does not fit in memory
    along with that of another case."""
    keys = case.q_heads * (sum(case.keys) if isinstance(case, CacheCase) else case.batch * case.n_kv)
    return case.n_q * keys >= LARGE_SCORES or spec.head_dim.qk * keys >= LARGE_KEYS


def cases(spec: Spec, num_sms: int = 0) -> Iterator[Case]:
    """Yield ragged and unequal sizes and other layouts; on a device with `num_sms` SMs also many sequences, and N up to
    32k, or MODIFIED."""
    heads = heads_for(spec)
    for n_q, n_kv in RAGGED if num_sms else RAGGED[:4]:
        yield Case(2, *heads, n_q, n_kv)
    for layout in ("bnhd", "packed", "expanded", "island"):
        yield Case(2, *heads, 127, 127, layout)
    if num_sms:
        yield crowded(spec, num_sms)
    for n_q, n_kv in LARGE if num_sms else []:
        if spec.score and n_q > MODIFIED:
            continue
        yield Case(1, *heads_for(spec, 2), n_q, n_kv)


def crowded(spec: Spec, num_sms: int) -> Case:
    """Return ragged sequences, enough of them for a device with `num_sms` SMs to run the fused backward if there is
    one.

    If query heads share keys, there are enough of them for a program to have as many as possible. Rows of inputs with a
    number per score are aligned for TMA.
    """
    by_score = any({"Nq", "Nk"} <= set(i.shape) for i in spec.inputs())
    heads, rows = heads_for(spec), FUSED_ROWS + (ALIGNED_KEYS if by_score else 5)
    keys = max(FUSED_KEYS, FUSED_HEADS * SPLIT_KEYS) if heads[0] > heads[1] else FUSED_KEYS
    return Case(math.ceil(keys * num_sms / (heads[0] * rows)), *heads, rows, rows)


def repeats(module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, seed: int) -> bool:
    """True if two runs give the same bits, in the forward and in the backward if there is one."""
    return all(torch.equal(a, b) for a, b in zip(*runs(module, spec, case, dtype, device, seed, 2)))


def runs(
    module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, seed: int, times: int
) -> Iterator[list[torch.Tensor]]:
    """Yield the results of a call, and the gradients of q, k and v if there is a backward, `times` times.

    Calls with a KV cache append the same keys to the same places each time.
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
    """Return the failed cases: the spec, the dtype, and the line."""
    return [f"{table.heading}: {line}" for table in tables for line, ok in table.lines if not ok]


def page(tables: Sequence[Table], device: str) -> str:
    """Return the report as Markdown."""
    where = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter on the CPU"
    text = [
        "# Verification on a GPU",
        "",
        f"{where}, torch {torch.__version__}, triton {triton.__version__}. Written by `make gpu-test`.",
        "",
        "Relative errors ||x - truth|| / ||truth|| against fp64: ours / naive attention's in the same dtype. `worst`",
        "is the largest ratio of our error to naive's, which counts as at least the error of rounding; the bar is 2.",
        "`worst row` is the same for the row that is furthest off; the bar is 4. `bits`: a second run gives the same",
        "bits. Loss on the output and on the LSE. Cases with a KV cache name the keys of each sequence and the number",
        "that the call appends, as in `cache 5,260,0+4`.",
        "",
        f"{sum(len(table.lines) for table in tables)} cases, {len(failures(tables))} above the bar.",
        "",
        "`out` and `lse` are the output and the log-sum-exp of each row, `dq`, `dk`, `dv` and other names with d the",
        "gradients, and `jvp(out)` and `jvp(lse)` the tangents of `out` and `lse` in forward mode.",
    ]
    columns = ("case", "out", "lse", "dq", "dk", "dv", "worst", "worst row", "bits")
    for table in tables:
        text += ["", f"## {table.heading}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        text += [line for line, _ in table.lines]
    return "\n".join(text) + "\n"
