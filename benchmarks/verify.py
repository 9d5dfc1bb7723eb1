"""Every spec on the GPU, forward and backward, beside naive attention in the same dtype: writes docs/gpu-verification.md.

    python benchmarks/verify.py [--out docs/gpu-verification.md] [--specs specs/causal_mqa.yaml ...] [--device cuda]

Errors are ||x - truth|| / ||truth|| against fp64. A case fails where ours is above twice naive's (which counts as at least what
rounding alone gives, see attngen.testing.Result), where one row is far off, where anything is NaN, or where a second run differs in one
bit. Specs run in
processes of their own, because most of the time goes into compiling kernels; the largest cases take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

RAGGED = [(1, 1), (17, 17), (127, 127), (129, 129), (1000, 1000), (129, 1000), (1000, 129)]
LARGE = [(4096, 4096), (4095, 8191), (16384, 16384), (32768, 32768)]
MODIFIED = 16384  # rows up to which specs with score modifiers go: their oracle keeps every score, in fp64
TURNS = 2**26  # scores of a case from which on it takes turns with others
_lock: Any = None


def _start(lock: Any) -> None:
    global _lock
    _lock = lock


def cases(spec: Any, device: str) -> Iterator[Any]:
    """Ragged and unequal sizes, other layouts, and N up to 32k, or MODIFIED."""
    from attngen.testing import Case, heads_for

    heads = heads_for(spec)
    for n_q, n_kv in RAGGED if device == "cuda" else RAGGED[:4]:
        yield Case(2, *heads, n_q, n_kv)
    for layout in ("bnhd", "packed", "expanded", "island"):
        yield Case(2, *heads, 127, 127, layout)
    for n_q, n_kv in LARGE if device == "cuda" else []:
        if spec.score and n_q > MODIFIED:
            continue
        yield Case(1, *heads_for(spec, 2), n_q, n_kv)


def repeats(module: Any, spec: Any, case: Any, dtype: str, device: str) -> bool:
    """Whether two runs give the same bits, forward and backward."""
    import torch

    from attngen.testing import TORCH_DTYPES, make_gradients, make_inputs

    q, k, v, inputs = make_inputs(spec, case, TORCH_DTYPES[dtype], device)
    grads = make_gradients(spec, case, TORCH_DTYPES[dtype], device)
    runs = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results = module.attention(*leaves, **inputs, return_lse=True)
        runs.append([*results, *torch.autograd.grad(results, leaves, grads)])
    return all(torch.equal(a, b) for a, b in zip(*runs))


def run_spec(path: Path, dtype: str, device: str) -> tuple[str, list[tuple[str, bool]]]:
    """(heading, lines of the table with whether each is within the bar) of one spec in one dtype."""
    import torch

    from attngen.emit.files import write_module
    from attngen.emit.render import render
    from attngen.passes.pipeline import lower
    from attngen.spec import load_spec
    from attngen.testing import KEYS, load_module, run_case

    spec = load_spec(path)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_module(render(lower(spec)), Path(folder) / spec.name)
        module = load_module(Path(folder) / spec.name)
        for case in cases(spec, device):
            large = case.batch * case.q_heads * case.n_q * case.n_kv >= TURNS
            if large:
                _lock.acquire()
            try:
                result = run_case(module, spec, case, dtype, device)
                same = repeats(module, spec, case, dtype, device)
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()
                if large:
                    _lock.release()
            errors = " | ".join(f"{result.ours[k]:.1e} / {result.naive[k]:.1e}" for k in KEYS)
            worst, row = (f"{k.removesuffix(' row')} {result.ratio(k):.2f}" for k in (result.worst, result.worst_row))
            lines.append((f"| {case} | {errors} | {worst} | {row} | {'yes' if same else 'NO'} |", result.ok and same))
            print(f"{spec.name} {dtype} {case}: {worst}, row {row}{'' if lines[-1][1] else '  FAILED'}", file=sys.stderr, flush=True)
    return f"{spec.name}, {dtype}", lines


def page(results: list[tuple[str, list[tuple[str, bool]]]], device: str) -> str:
    """The report as Markdown."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter on the CPU"
    lines = [line for _, table in results for line in table]
    failed = sum(not ok for _, ok in lines)
    text = [
        "# Verification on a GPU",
        "",
        f"{name}, torch {torch.__version__}, triton {triton.__version__}. Written by `make gpu-test`.",
        "",
        "Relative errors ||x - truth|| / ||truth|| against fp64: ours / naive attention's in the same dtype. `worst` is the largest of",
        "our errors over naive's, which counts as at least what rounding alone gives; the bar is 2. `worst row` is the same of the single",
        "row that is furthest off; the bar is 4. `bits`: a second run gives the same bits. Loss on the output and on the LSE.",
        "",
        f"{len(lines)} cases, {failed} above the bar.",
    ]
    for heading, table in results:
        text += [
            "",
            f"## {heading}",
            "",
            "| case | out | lse | dq | dk | dv | worst | worst row | bits |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        text += [line for line, _ in table]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/gpu-verification.md"))
    parser.add_argument("--specs", type=Path, nargs="*", default=sorted(Path("specs").glob("*.yaml")))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from attngen.spec import load_spec

    jobs = [(path, dtype) for path in args.specs for dtype in load_spec(path).dtype if args.device == "cuda" or dtype != "bf16"]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, context, _start, (context.Lock(),)) as pool:
        results = list(pool.map(run_spec, *zip(*jobs), [args.device] * len(jobs)))
    args.out.write_text(page(results, args.device), encoding="utf-8")
    bad = [line for _, table in results for line, ok in table if not ok]
    print(f"{args.out}: {sum(len(t) for _, t in results)} cases, {len(bad)} above the bar")
    for line in bad:
        print(line)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
