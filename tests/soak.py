"""Modules on a GPU, many times over, with other work beside them: each run must give the bits of the first.

    python -m tests.soak --repeats 1000 specs/*.yaml
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.soak --repeats 2 --alone specs/*.yaml

`make soak` runs the first, `make sanitize` the second with each tool. Calls are over a cache, where there is one, and
short and long. The long ones have as many programs as a backward in one pass asks for, so every kernel of a module runs
that a GPU of this kind takes. The other work is a chain of matrix products on a stream of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from attngen.conformance.harness import Case, heads_for, load_module
from attngen.conformance.over_cache import CacheCase, cache_cases
from attngen.conformance.sweep import crowded, runs
from attngen.errors import AttngenError
from attngen.runtime.launch import processors
from attngen.spec import Spec, load_spec


def cases(spec: Spec, processors: int) -> Iterator[Case | CacheCase]:
    """Calls over a cache, where there is one; a row, a ragged call, and one that is large enough for a backward in
    one pass."""
    yield from cache_cases(spec, True) if spec.cache else ()
    heads = heads_for(spec)
    yield Case(2, *heads, 1, 1000)
    yield Case(2, *heads, 127, 129)
    yield crowded(spec, processors)


def differing(
    module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, repeats: int, beside: bool = False
) -> int:
    """How many of so many further runs, forward and backward, give other bits than the first. beside: other work
    runs at the same time."""
    first: list[torch.Tensor] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    side = torch.cuda.Stream() if beside else None
    matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) if beside else None
    for run, found in enumerate(runs(module, spec, case, dtype, device, 0, repeats + 1)):
        if side is not None and matrix is not None and run % 4 == 0:
            with torch.cuda.stream(side):
                matrix = (matrix @ matrix).clamp(-1, 1)
        bits = [x.detach().contiguous().view(torch.uint8) for x in found]
        first = first or bits
        wrong += torch.stack([(a != b).any() for a, b in zip(bits, first)]).any()
    return int(wrong)


def soak(paths: list[Path], folder: Path, device: str, repeats: int, beside: bool) -> list[str]:
    """What went wrong, a line for each case; each case is said on stdout when it is done."""
    found = []
    for path in paths:
        spec = load_spec(path)
        module = load_module(folder / spec.name)
        for case in cases(spec, processors(torch.device(device))):
            wrong = differing(module, spec, case, spec.dtype[0], device, repeats, beside)
            line = f"{spec.name} {spec.dtype[0]} {case}: {wrong} of {repeats} runs differ"
            print(line, flush=True)
            found += [line] if wrong else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("specs", nargs="+", type=Path, help="files of specs, whose modules are built")
    parser.add_argument("--generated", type=Path, default=Path("generated"), help="the folder of the modules")
    parser.add_argument("--repeats", type=int, default=1000, help="runs of each case after the first")
    parser.add_argument("--alone", action="store_true", help="no other work beside the runs")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tests.soak: torch finds no GPU; expected one with CUDA")
    try:
        found = soak(asked.specs, asked.generated, "cuda", asked.repeats, not asked.alone)
    except AttngenError as error:
        raise SystemExit(f"tests.soak: {error}") from error
    print(*(found or [f"all runs of {len(asked.specs)} specs gave the same bits"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
