"""Run modules on a GPU many times, concurrently with other work: each run must give the bits of the first.

    python -m tests.soak --repeats 1000 specs/*.yaml
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.soak --repeats 2 --no-other-work specs/*.yaml

`make soak` runs the first command, `make sanitize` the second with each tool. Calls are short and long, and with a KV
cache if the spec has one. Long calls have enough programs for the fused backward, so every kernel runs that the module
has for this GPU. The other work is a chain of matrix products on another stream.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import load_module
from attngen.conformance.kv_cache import CacheCase, cache_cases
from attngen.conformance.sweep import crowded, runs
from attngen.errors import AttngenError
from attngen.runtime.launch import num_sms
from attngen.spec import Spec, load_spec


def cases(spec: Spec, num_sms: int) -> Iterator[Case | CacheCase]:
    """Calls with a KV cache, if the spec has one; one query, a ragged call, and one large enough for the fused
    backward."""
    yield from cache_cases(spec, True) if spec.cache else ()
    heads = heads_for(spec)
    yield Case(2, *heads, 1, 1000)
    yield Case(2, *heads, 127, 129)
    yield crowded(spec, num_sms)


def differing(
    module: ModuleType,
    spec: Spec,
    case: Case | CacheCase,
    dtype: str,
    device: str,
    repeats: int,
    concurrent: bool = False,
) -> int:
    """Number of the `repeats` runs, forward and backward, whose bits differ from those of the first run; with
    `concurrent`, other work runs at the same time."""
    first: list[torch.Tensor] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    side = torch.cuda.Stream() if concurrent else None
    matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) if concurrent else None
    for run, found in enumerate(runs(module, spec, case, dtype, device, 0, repeats + 1)):
        if side is not None and matrix is not None and run % 4 == 0:
            with torch.cuda.stream(side):
                matrix = (matrix @ matrix).clamp(-1, 1)
        bits = [x.detach().contiguous().view(torch.uint8) for x in found]
        first = first or bits
        wrong += torch.stack([(a != b).any() for a, b in zip(bits, first)]).any()
    return int(wrong)


def soak(paths: list[Path], folder: Path, device: str, repeats: int, concurrent: bool) -> list[str]:
    """Run all cases, print a line for each, and return the lines of those that differ."""
    found = []
    for path in paths:
        spec = load_spec(path)
        module = load_module(folder / spec.name)
        for case in cases(spec, num_sms(torch.device(device))):
            wrong = differing(module, spec, case, spec.dtype[0], device, repeats, concurrent)
            line = f"{spec.name} {spec.dtype[0]} {case}: {wrong} of {repeats} runs differ"
            print(line, flush=True)
            found += [line] if wrong else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("specs", nargs="+", type=Path, help="files of specs, whose modules are built")
    parser.add_argument("--generated", type=Path, default=Path("generated"), help="the folder of the modules")
    parser.add_argument("--repeats", type=int, default=1000, help="runs of each case after the first")
    parser.add_argument("--no-other-work", action="store_true", help="no other work during the runs")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tests.soak: torch finds no GPU; expected one with CUDA")
    try:
        found = soak(asked.specs, asked.generated, "cuda", asked.repeats, not asked.no_other_work)
    except AttngenError as error:
        raise SystemExit(f"tests.soak: {error}") from error
    print(*(found or [f"all runs of {len(asked.specs)} specs gave the same bits"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
