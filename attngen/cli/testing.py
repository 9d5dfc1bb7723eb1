"""The command `test`: modules of specs compared with naive attention."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli.common import Every, SpecPaths, given, lower, make_each, make_module, read_specs
from attngen.cli.console import Watch, complain, count, err, out, progress
from attngen.errors import AttngenError
from attngen.report.tables import Rows

if TYPE_CHECKING:
    from attngen.conformance.result import Result
    from attngen.conformance.sweep import Job, Table
    from attngen.spec import Spec

LEGEND = """
Errors: relative to exact results, in fp64. lse: log-sum-exp of each row;
dx: gradient of x; jvp(x): tangent of x in forward mode.
over naive: our error over naive attention's in the same dtype; above 2x fails.
"""
Brief = typer.Option("--brief", help="show the worst error of each result, and no case that passed")
Report = typer.Option(metavar="FILE", help="run many more cases, and write all errors to this page")


def test(
    specs: SpecPaths = None,
    every: Every = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="seed of the random inputs")] = 0,
    report: Annotated[Path | None, Report] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="processes, of a report")] = 8,
    brief: Annotated[bool, Brief] = False,
) -> None:
    """Test modules of specs against naive attention.

    It runs on CUDA if there is a device, else in Triton's interpreter, on small cases. Errors of the results and of
    every gradient are relative to fp64. A case passes if none is above twice the error of naive attention in the same
    dtype. Specs that cannot be read are named, and the others are tested (not with --report, whose page needs all).

    With --report it runs every layout, calls with KV caches and, on CUDA, up to 32k queries and keys, in every element
    type; a second run must give the same bits.

    \b
    attngen test causal_mqa
    attngen test causal_mqa --seed 7 --brief
    attngen test --all --report docs/gpu-verification.md
    """
    loaded, unread = read_specs(given(specs, every, "test"))
    complain("\n".join(unread))  # before the others, which take a while
    if report is None:
        with progress("testing", len(loaded)) as watch:
            failed = [_test_one(path, spec, seed, watch, brief) for path, spec in loaded]
        if loaded:
            out.print(LEGEND.strip(), style="dim")
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
        work = sweep.jobs(loaded, Path(folder), device)
        found = []
        with progress("testing", len(work)) as watch, sweep.processes(min(jobs, max(1, len(work)))) as pool:
            run = _run_quietly if err.is_terminal else sweep.run_job
            for job, table in zip(work, pool.map(run, work, repeat(device), repeat(seed))):
                found.append(table)
                watch.done(f"{job.spec} {job.dtype}")
    write_file(report, sweep.page(found, device))
    failures = sweep.failures(found)
    print(f"{report}: {count(sum(len(table.lines) for table in found), 'case')}, {len(failures)} above the bar")
    if failures:
        raise AttngenError("\n".join(failures))


def _run_quietly(job: Job, device: str, seed: int) -> Table:
    """Run every case of one spec in one dtype, without a line for each on stderr, where the bar is."""
    from attngen.conformance.sweep import run_job

    with contextlib.redirect_stderr(io.StringIO()):
        return run_job(job, device, seed)


def _test_one(path: Path, loaded: Spec, seed: int, watch: Watch, brief: bool) -> str:
    """Run the small cases of a spec, and print their errors. Return what failed, or empty text."""
    from attngen.codegen.files import write_module
    from attngen.codegen.render import render

    alone = watch.total == 1  # its cases are the items
    watch.show(str(path))
    module = lower(path, loaded)
    with tempfile.TemporaryDirectory() as folder:
        import torch

        cuda = _interpret_without_cuda()
        from attngen.conformance.harness import load_module
        from attngen.conformance.kv_cache import result_of

        write_module(render(module), Path(folder) / loaded.name)
        generated = load_module(Path(folder) / loaded.name)
        print(f"{loaded.name} on {torch.cuda.get_device_name() if cuda else 'the CPU, in the interpreter of Triton'}")
        work = _cases(loaded, cuda)
        lines = _Lines(loaded, [case for case, _ in work], brief)
        if alone:
            watch.expect(len(work))
        results = []
        for case, dtype in work:
            watch.show(f"{loaded.name} {case} {dtype}")
            results.append(result_of(generated, loaded, case, dtype, "cuda" if cuda else "cpu", seed))
            lines.show(results[-1])
            if alone:
                watch.done()
    if not alone:
        watch.done()
    if not brief:
        print()
    _print_worst(results)
    if far := list(_beyond(loaded.canonical().get("mask"), longest := _longest(case for case, _ in work))):
        print(f"note: no case has more than {longest} keys, so {', '.join(far)} of the mask is not reached")
    failed = sum(not result.ok for result in results)
    return (
        f"{count(failed, 'case')} of {loaded.name} further from the truth than twice naive attention's error"
        if failed
        else ""
    )


def _cases(spec: Spec, cuda: bool) -> list[tuple[Any, str]]:
    """Return the small cases of a spec, each with its dtype."""
    from attngen.conformance.cases import cli_cases
    from attngen.conformance.kv_cache import cache_cases

    work: list[tuple[Any, str]] = [*cli_cases(spec, cuda)]
    dtypes = list(dict.fromkeys(dtype for _, dtype in work))
    return work + [(case, d) for d in dtypes for case in (cache_cases(spec, cuda) if spec.cache else [])]


class _Lines:
    """The table of cases, printed line by line. A terminal too narrow for the error of each result has only the
    worst. If it is brief, it has only cases that failed."""

    def __init__(self, spec: Spec, cases: Sequence[Any], brief: bool) -> None:
        from attngen.conformance.harness import result_names, tangent_names
        from attngen.conformance.result import shown

        names = (*result_names(spec), *tangent_names(spec))
        self.brief = brief
        self.widths = {name: max(8, len(shown(name, names))) + 1 for name in names}
        self.longest = max(26, *(len(str(case)) for case in cases)) + 2
        if self.longest + 7 + sum(self.widths.values()) + 22 > out.width:
            self.widths = {}
        headings = "".join(f"{shown(name, names):<{width}}" for name, width in self.widths.items())
        if not brief:
            print(f"{'case':<{self.longest}}{'dtype':<7}{headings}worst, over naive")

    def show(self, result: Result) -> None:
        """Print the line of a case."""
        from attngen.conformance.result import shown

        if self.brief and result.ok:
            return
        errors = "".join(
            f"{result.ours[name]:<{width}.1e}" if name in result.ours else " " * width
            for name, width in self.widths.items()
        )
        ratio = f"{shown(result.worst, result.ours)} {result.ratio(result.worst):.2f}x"
        verdict = "ok" if result.ok else "FAILED"
        print(f"{result.case!s:<{self.longest}}{result.dtype:<7}{errors}{ratio:<14} {verdict}", flush=True)


def _longest(cases: Iterable[Any]) -> int:
    """Return the largest number of keys of a case, with or without a KV cache."""
    return max(max(case.keys) if hasattr(case, "keys") else case.n_kv for case in cases)


def _beyond(part: Any, keys: int, name: str = "") -> Iterator[str]:
    """Yield the numbers in a part of a spec that are at least a number of keys, with their names."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _beyond(value, keys, str(key))
    elif isinstance(part, list):
        for value in part:
            yield from _beyond(value, keys, name)
    elif isinstance(part, str):
        yield from (number for number in re.findall(r"\b\d+\b", part) if int(number) >= keys)
    elif isinstance(part, int) and not isinstance(part, bool) and part >= keys:
        yield f"{name}: {part}"


def _print_worst(results: Sequence[Result]) -> None:
    """Print our error and naive attention's for each result, in the case in which they differ most."""
    from attngen.conformance.result import shown

    table = Rows("at worst", "ours", "naive", "over naive", "case")
    names = dict.fromkeys(name for result in results for name in result.ours if not name.endswith(" row"))
    for name in names:
        having = (result for result in results if name in result.ours)
        ratio, worst = max(((r.ratio(name), r) for r in having), key=lambda pair: (pair[0] != pair[0], pair[0]))
        errors = (f"{worst.ours[name]:.1e}", f"{worst.naive[name]:.1e}", f"{ratio:.2f}x")
        table.add_row(shown(name, names), *errors, f"{worst.case} {worst.dtype}")
    with out.capture() as text:
        out.print(table)
    print(text.get(), end="")  # above the bar of the progress, which sees only what is printed
