"""The command `test`: modules of specs compared with naive attention."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli.common import Every, SpecPaths, given, lower, make_each, make_module, read_specs
from attngen.cli.console import complain, count, err
from attngen.errors import AttngenError

if TYPE_CHECKING:
    from attngen.spec import Spec

Report = typer.Option(metavar="FILE", help="run many more cases, and write all errors to this page")


def test(
    specs: SpecPaths = None,
    every: Every = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="seed of the random inputs")] = 0,
    report: Annotated[Path | None, Report] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="processes, of a report")] = 8,
) -> None:
    """Test modules of specs against naive attention.

    It runs on CUDA if there is a device, else in Triton's interpreter, on small cases. Errors of the results and of
    every gradient are relative to fp64. A case passes if none is above twice the error of naive attention in the same
    dtype. Specs that cannot be read are named, and the others are tested (not with --report, whose page needs all).

    With --report it runs every layout, calls with KV caches and, on CUDA, up to 32k queries and keys, in every element
    type; a second run must give the same bits.

    \b
    attngen test specs/causal_mqa.yaml
    attngen test specs/causal_mqa.yaml --seed 7
    attngen test --all --report docs/gpu-verification.md
    """
    loaded, unread = read_specs(given(specs, every, "test"))
    complain("\n".join(unread))  # before the others, which take a while
    if report is None:
        failed = [_test_one(path, spec, seed) for path, spec in loaded]
        complain("\n".join(reason for reason in failed if reason))
        if unread or any(failed):
            raise typer.Exit(1)
    elif unread:  # a page needs all specs
        raise typer.Exit(1)
    else:
        _report(loaded, seed, report, jobs)


def _interpret_without_cuda() -> bool:
    """Return whether there is a CUDA device; without one, set up Triton's interpreter, before triton is imported."""
    import torch

    from attngen.conformance.interpreter import check_interpreter, lighten

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)  # tensors are small
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # log2(0) of rows without a visible key
    check_interpreter()
    lighten()
    return cuda


def _report(loaded: Sequence[tuple[Path, Spec]], seed: int, report: Path, jobs: int) -> None:
    """Run all cases of specs, and write the page of their errors."""
    from attngen.codegen.files import write_file, write_module

    with tempfile.TemporaryDirectory() as folder:
        made, wrong = make_each(make_module, loaded, Path(folder))
        if wrong:
            raise AttngenError("\n".join(wrong))
        for module, files in made:
            write_module(files, Path(folder) / module.name)
        cuda = _interpret_without_cuda()
        from attngen.conformance import sweep

        device = "cuda" if cuda else "cpu"
        found = sweep.run(sweep.jobs(loaded, Path(folder), device), device, seed, jobs)
    write_file(report, sweep.page(found, device))
    failures = sweep.failures(found)
    print(f"{report}: {count(sum(len(table.lines) for table in found), 'case')}, {len(failures)} above the bar")
    if failures:
        raise AttngenError("\n".join(failures))


def _test_one(path: Path, loaded: Spec, seed: int) -> str:
    """Run the small cases of a spec, and print their errors. Return what failed, or empty text."""
    from attngen.codegen.files import write_module
    from attngen.codegen.render import render

    module = lower(path, loaded)
    failed = 0
    with err.status("importing torch") as status, tempfile.TemporaryDirectory() as folder:
        import torch

        cuda = _interpret_without_cuda()
        from attngen.conformance.cases import cli_cases
        from attngen.conformance.harness import load_module, result_names, tangent_names
        from attngen.conformance.kv_cache import cache_cases, result_of

        write_module(render(module), Path(folder) / loaded.name)
        generated = load_module(Path(folder) / loaded.name)
        print(f"{loaded.name} on {torch.cuda.get_device_name() if cuda else 'the CPU, in the interpreter of Triton'}")
        widths = {name: max(8, len(name)) + 1 for name in (*result_names(loaded), *tangent_names(loaded))}
        device = "cuda" if cuda else "cpu"
        work: list[tuple[Any, str]] = [*cli_cases(loaded, cuda)]
        dtypes = list(dict.fromkeys(dtype for _, dtype in work))
        work += [(case, d) for d in dtypes for case in (cache_cases(loaded, cuda) if loaded.cache else [])]
        longest = max(26, *(len(str(case)) for case, _ in work)) + 2
        headings = "".join(f"{name:<{width}}" for name, width in widths.items())
        print(f"{'case':<{longest}}{'dtype':<7}{headings}worst, over naive")
        for case, dtype in work:
            status.update(f"{case} {dtype}")
            result = result_of(generated, loaded, case, dtype, device, seed)
            failed += not result.ok
            errors = "".join(
                f"{result.ours[name]:<{width}.1e}" for name, width in widths.items() if name in result.ours
            )
            ratio = f"{result.worst} {result.ratio(result.worst):.2f}x"
            print(f"{case!s:<{longest}}{dtype:<7}{errors}{ratio:<14} {'ok' if result.ok else 'FAILED'}", flush=True)
    return (
        f"{count(failed, 'case')} of {loaded.name} further from the truth than twice naive attention's error"
        if failed
        else ""
    )
