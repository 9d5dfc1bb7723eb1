"""The command `bench`: modules compared with their peers on a GPU."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import SpecPaths
from attngen.cli.console import count, err, print_rows
from attngen.errors import AttngenError

if TYPE_CHECKING:
    from attngen.bench.results import Results
    from attngen.bench.run import Setup, Work

Grids = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="NAME|FILE", help="paper, fa3, flex, variants, decode, mods or a YAML file"),
]
Words = typer.Option(
    metavar="WORDS", help="select cells, as in D64,D128,causal,N4096 or ragged,page16,B8: one word of each kind"
)
Peers = typer.Option(metavar="NAMES", help="as in ours,flash,flex [default: the grid's, or all]")
Rows = typer.Option("--n", metavar="ROWS", help="of SPECS: rows, or rows of q:rows of k and v")
Batch = typer.Option(min=1, max=2**16, help="of SPECS: sequences [default: 16384 / rows]")
Heads = typer.Option(min=1, max=2**16, help="of SPECS: query heads")
KVHeads = typer.Option(min=1, max=2**16, help="of SPECS: K/V heads of gqa [default: heads / 4]")
Dtype = typer.Option(help="of SPECS: element type [default: the spec's first]")
Out = typer.Option("--out", help="folder for results.json, results.csv and plots")
Compare = typer.Option(help="results.json of another run: show what changed, fail if ours got slower")
From = typer.Option("--from", help="measure nothing; show the results.json of a run")
Dry = typer.Option("--list", help="measure nothing; show the cells, and what peers cannot do")
Rounds = typer.Option(min=1, max=100, help="times are medians of this many rounds")
Jobs = typer.Option(min=1, max=64, help="cells that compile at once [default: half the cores, 8 at most]")
Limit = typer.Option(min=1, max=3600, help="seconds that a step of a peer may take")
Host = typer.Option(
    "--host",
    help="also host times of a forward call: without gradients, under torch.compile with and without them, in a CUDA "
    "graph",
)
Masks = typer.Option(
    "--masks",
    help="also wall time and memory of preparing masks (plans, block masks), and of a call that does it too",
)


def bench(
    specs: SpecPaths = None,
    grid: Grids = None,
    only: Annotated[str | None, Words] = None,
    peers: Annotated[str | None, Peers] = None,
    n: Annotated[str, Rows] = "1024,4096,16384",
    batch: Annotated[int | None, Batch] = None,
    heads: Annotated[int, Heads] = 16,
    kv_heads: Annotated[int | None, KVHeads] = None,
    dtype: Annotated[str | None, Dtype] = None,
    out_dir: Annotated[Path, Out] = Path("bench"),
    compare: Annotated[Path | None, Compare] = None,
    from_: Annotated[Path | None, From] = None,
    dry: Annotated[bool, Dry] = False,
    rounds: Annotated[int, Rounds] = 5,
    jobs: Annotated[int | None, Jobs] = None,
    limit: Annotated[float, Limit] = 120,
    host: Annotated[bool, Host] = False,
    masks: Annotated[bool, Masks] = False,
) -> None:
    """Measure modules and their peers on this GPU in one run.

    Each cell (a spec and its sizes) runs forward, backward and both in a separate process, the peers alternating:
    milliseconds (medians of rounds, L2 flushed), TFLOP/s, the fraction of the peak that this run measured, the spread;
    peak memory, host time of a forward call, seconds to the first result with empty caches. Peers: ours, flash, cudnn,
    efficient, math (SDPA's backends), flex (FlexAttention, from the spec), flex_flash (its FlashAttention-4 backend)
    and fa4 (FlashAttention-4) if installed, flashinfer, naive. Dropout is off; masks and plans are made in advance. A
    peer that fails or hangs loses only its own results.

    Grids: paper (the seed study's), fa3 (FlashAttention-3's), flex (FlexAttention's variants, with --masks), variants
    (what dropout costs, and what block sparsity saves), decode (steps of decoding with a KV cache) and mods (functions
    written for FlexAttention, given to both sides). flex, variants and mods also write Markdown tables.

    Specs with a cache are called by `attention.with_kvcache`, many times in a CUDA graph whose inputs rotate through
    more than the L2 holds. Also shown: the bytes of K and V that some query sees, their rate in TB/s, and its fraction
    of the copy rate that this run measured. SDPA's backends read contiguous caches, with a mask tensor if some query
    does not see all rows; flashinfer, if installed, reads pages. --n 1:65536 is one query per sequence.

    With --compare, times that changed by more than both runs' spreads (at least 2%) are shown, and the exit code is 1
    if one of ours got slower or is missing. With only --compare, the cells and peers are those of its file.

    \b
    attngen bench specs/causal_gqa.yaml --n 4096 --peers ours,flash,flex
    attngen bench --grid decode --only ragged,page64
    attngen bench --compare docs/bench/h200.json
    attngen bench --from bench/results.json --compare docs/bench/h200.json
    """
    if from_ is not None and (specs or grid or only or dry):
        raise AttngenError("--from shows a run as it is; leave out SPECS, --grid, --only and --list")
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
    from attngen.bench.run import machine, progress, run
    from attngen.codegen.files import write_file

    start = time.perf_counter()
    with (
        err.status("measuring peak rates") as status,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):

        def watch(text: str, done: bool = False) -> None:
            status.update(text)
            if done or not err.is_terminal:
                err.print(f"[{time.perf_counter() - start:.0f} s] {text}")

        results = Results({**machine(setup, Path(folder)), "rounds": setup.rounds})
        for i, lines in enumerate(run(work, setup, Path(folder), results, watch), 1):
            write_file(out_dir / "results.json", results.text())
            watch(f"{i}/{len(work)} {lines[0].cell}: {progress(lines)}", done=True)
    return results


def _show(results: Results, old: Results | None, compare: Path | None, out_dir: Path) -> None:
    """Print the table of a run, and what changed since an older run. Raise AttngenError if something failed or got
    slower."""
    from attngen.bench.results import failures, moves, other_machine

    _show_table(results, out_dir)
    failed = [f"{line.cell} {line.peer}: {line.why}" for line in results.failed()]
    if old:
        if different := other_machine(results, old):
            print(f"another machine: {different}")
        moved = moves(results, old)
        for move in moved:
            print(move)
        print(f"{count(len(moved), 'time')} moved; {count(results.shared(old), 'line')} in both runs")
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
    print(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}")
    print(f"peaks: {m['matmul_tflops']:.0f} TFLOP/s bf16 matrix product, {m['copy_tb_s']:.2f} TB/s copy")
    tabled = {HEADINGS: rows, CACHE_HEADINGS: cache_rows, HOST_HEADINGS: host_rows, MASK_HEADINGS: mask_rows}
    for headings, made in tabled.items():
        if found := list(made(results)):
            print_rows(headings, found)
    for line in ratios(results):
        print(line)
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
    print(f"{', '.join(str(out_dir / name) for name in files)}{missing}")
