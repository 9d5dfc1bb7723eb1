"""The command `bench`: modules compared with their peers on a GPU."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import SpecPaths
from attngen.cli.console import count, out, print_rows, progress
from attngen.cli.conventions import choice
from attngen.errors import AttngenError
from attngen.ir.dtypes import ELEMENTS

if TYPE_CHECKING:
    from attngen.bench.results import Results
    from attngen.bench.run import Setup, Work

WHAT, SIZES, HOW, OUTPUT = "What to measure", "Sizes of the specs", "How to measure", "Results"  # headings of its help
GRIDS = "paper, fa3, flex, variants, decode, mods or a YAML file"
WORDS = "select cells, as in D64,D128,causal,N4096 or ragged,page16,B8: one word of each kind"
COMPARE = "results.json of another run: show what changed, fail if ours got slower"
HOST = "also host times of a forward: without gradients, under torch.compile with and without them, in a CUDA graph"
MASKS = "also wall time and memory of preparing masks (plans, block masks), and of a call that does it too"
Grids = Annotated[
    list[str] | None, typer.Option("--grid", metavar="NAME|FILE", help=GRIDS, show_default=False, rich_help_panel=WHAT)
]
Words = typer.Option(metavar="WORDS", help=WORDS, rich_help_panel=WHAT)
Peers = typer.Option(metavar="NAMES", help="as in ours,flash,flex [default: the grid's, or all]", rich_help_panel=WHAT)
Dry = typer.Option("--list", help="measure nothing; show the cells, and what peers cannot do", rich_help_panel=WHAT)
Rows = typer.Option("--n", metavar="ROWS", help="rows, or rows of q:rows of k and v", rich_help_panel=SIZES)
Batch = typer.Option(min=1, max=2**16, help="sequences [default: 16384 / rows]", rich_help_panel=SIZES)
Heads = typer.Option(min=1, max=2**16, help="query heads", rich_help_panel=SIZES)
KVHeads = typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]", rich_help_panel=SIZES)
Dtype = choice(list(ELEMENTS), help="element type [default: the spec's first]", rich_help_panel=SIZES)
Rounds = typer.Option(min=1, max=100, help="times are medians of this many rounds", rich_help_panel=HOW)
Jobs = typer.Option(
    min=1, max=64, help="cells that compile at once [default: half the cores, 8 at most]", rich_help_panel=HOW
)
Limit = typer.Option(min=1, max=3600, help="seconds that a step of a peer may take", rich_help_panel=HOW)
Host = typer.Option("--host", help=HOST, rich_help_panel=HOW)
Masks = typer.Option("--masks", help=MASKS, rich_help_panel=HOW)
Out = typer.Option("--out", help="folder for results.json, results.csv and plots", rich_help_panel=OUTPUT)
Compare = typer.Option(help=COMPARE, rich_help_panel=OUTPUT)
From = typer.Option("--from", help="measure nothing; show the results.json of a run", rich_help_panel=OUTPUT)


DETAILS = """
A cell is a spec and its sizes. It runs forward, backward and both in a separate process, the peers alternating.
Dropout is off; masks and plans are made in advance. A peer that fails or hangs loses only its own results.

Measured: milliseconds (medians of rounds, L2 flushed), TFLOP/s, the fraction of the peak that this run measured,
the spread; peak memory, host time of a forward call, seconds to the first result with empty caches.

\b
Peers:
  ours                           the module of the spec
  flash, cudnn, efficient, math  SDPA's backends
  flex                           FlexAttention, from the spec
  flex_flash                     its FlashAttention-4 backend, if installed
  fa4                            FlashAttention-4, if installed
  flashinfer                     FlashInfer, if installed
  naive                          the formula in PyTorch

\b
Grids (flex, variants and mods also write Markdown tables):
  paper     the seed study's
  fa3       FlashAttention-3's
  flex      FlexAttention's variants, with --masks
  variants  what dropout costs, and what block sparsity saves
  decode    steps of decoding with a KV cache
  mods      functions written for FlexAttention, given to both sides

Specs with a cache are called by `attention.with_kvcache`, many times in a CUDA graph whose inputs rotate through
more than the L2 holds. Also shown: the bytes of K and V that some query sees, their rate in TB/s, and its fraction
of the copy rate that this run measured.

SDPA's backends read contiguous caches, with a mask tensor if some query does not see all rows; flashinfer reads
pages. --n 1:65536 is one query per sequence.

With --compare, times that changed by more than both runs' spreads (at least 2%) are shown, and the exit code is 1
if one of ours got slower or is missing. With only --compare, the cells and peers are those of its file.
"""  # below the options in its help


def bench(
    specs: SpecPaths = None,
    grid: Grids = None,
    only: Annotated[str | None, Words] = None,
    peers: Annotated[str | None, Peers] = None,
    dry: Annotated[bool, Dry] = False,
    n: Annotated[str, Rows] = "1024,4096,16384",
    batch: Annotated[int | None, Batch] = None,
    heads: Annotated[int, Heads] = 16,
    kv_heads: Annotated[int | None, KVHeads] = None,
    dtype: Annotated[str | None, Dtype] = None,
    rounds: Annotated[int, Rounds] = 5,
    jobs: Annotated[int | None, Jobs] = None,
    limit: Annotated[float, Limit] = 120,
    host: Annotated[bool, Host] = False,
    masks: Annotated[bool, Masks] = False,
    out_dir: Annotated[Path, Out] = Path("bench"),
    compare: Annotated[Path | None, Compare] = None,
    from_: Annotated[Path | None, From] = None,
) -> None:
    """Measure modules and their peers on this GPU in one run.

    \b
    attngen bench causal_gqa
    attngen bench causal_gqa -n 4096 --peers ours,flash,flex
    attngen bench --grid fa3                      a named set of cells
    attngen bench --grid decode --only ragged,page64
    attngen bench --compare docs/bench/h200.json  what changed since that run
    attngen bench --from bench/results.json       show a run again
    """
    if from_ is not None and (specs or grid or only or dry):
        raise AttngenError("--from shows a run as it is; leave out SPEC, --grid, --only and --list")
    from attngen.bench.results import read_results
    from attngen.bench.run import Setup
    from attngen.bench.work import select

    old = read_results(compare) if compare else None
    if from_ is not None:
        return _show(read_results(from_), old, compare, out_dir)
    setup = Setup(rounds, jobs or max(1, min(8, len(os.sched_getaffinity(0)) // 2)), limit, host, masks)
    sizes = {"n": n, "batch": batch, "heads": heads, "kv_heads": kv_heads, "dtype": dtype}
    work = select(specs or [], grid or [], old, only, peers, sizes)
    return _show_work(work, setup) if dry else _show(_measured(work, setup, out_dir), old, compare, out_dir)


def _show_work(work: Work, setup: Setup) -> None:
    """Print the cells, and what peers cannot do."""
    from attngen.bench.work import listing

    print_rows(*listing(work, setup))


def _measured(work: Work, setup: Setup, out_dir: Path) -> Results:
    """Measure cells. results.json is written after each, so that an interrupted run keeps its results."""
    from attngen.bench.results import Results
    from attngen.bench.run import machine, run
    from attngen.bench.run import progress as rates
    from attngen.codegen.files import write_file

    start = time.perf_counter()
    with progress("measuring", len(work)) as watch, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        watch.show("peak rates")
        results = Results({**machine(setup, Path(folder)), "rounds": setup.rounds})
        for i, lines in enumerate(run(work, setup, Path(folder), results, watch.show), 1):
            write_file(out_dir / "results.json", results.text())
            cell = f"{i}/{len(work)} {lines[0].cell}: {rates(lines)}"
            watch.note(f"[{time.perf_counter() - start:.0f} s] {cell}")
            watch.done()
    return results


def _show(results: Results, old: Results | None, compare: Path | None, out_dir: Path) -> None:
    """Print the table of a run, and what changed since an older run. Raise AttngenError if something failed or got
    slower."""
    from attngen.bench.results import failures, moves, other_machine

    _show_table(results, out_dir)
    failed = [f"{line.cell} {line.peer}: {line.why}" for line in results.failed()]
    if old:
        if different := other_machine(results, old):
            out.print(f"another machine: {different}")
        moved = moves(results, old)
        for move in moved:
            out.print(str(move))
        out.print(f"{count(len(moved), 'time')} moved; {count(results.shared(old), 'line')} in both runs")
        failed += [f"slower than in {compare}: {move}" for move in failures(moved)]
    if failed:
        raise AttngenError("\n".join(failed))


def _show_table(results: Results, out_dir: Path) -> None:
    """Print the table of a run, and write its files."""
    from attngen.bench import plots
    from attngen.bench.reports import reports
    from attngen.bench.results import (
        CACHE_HEADINGS,
        HEADINGS,
        HOST_HEADINGS,
        MASK_HEADINGS,
        cache_rows,
        host_rows,
        mask_rows,
        ratios,
        rows,
    )
    from attngen.codegen.files import write_file

    m = results.machine
    out.print(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}")
    out.print(f"peaks: {m['matmul_tflops']:.0f} TFLOP/s bf16 matrix product, {m['copy_tb_s']:.2f} TB/s copy")
    tabled = {HEADINGS: rows, CACHE_HEADINGS: cache_rows, HOST_HEADINGS: host_rows, MASK_HEADINGS: mask_rows}
    for headings, made in tabled.items():
        if found := list(made(results)):
            print_rows(headings, found)
    for line in ratios(results):
        out.print(str(line))
    tables = reports(results)
    for text in tables.values():
        print(f"\n{text}")
    files = {
        "results.json": results.text(),
        "results.csv": results.csv(),
        **tables,
        **(plots.plots(results) if plots.available() else {}),
    }
    for name, text in files.items():
        write_file(out_dir / name, text)
    missing = "" if plots.available() else f"; no plots: {plots.MISSING}"
    out.print(f"{', '.join(str(out_dir / name) for name in files)}{missing}")
