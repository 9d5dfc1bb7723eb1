"""The command line. Heavy libraries are imported by the commands that need them, so that `build` starts fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from attngen import __version__
from attngen.devices import CLASSES, DEVICES, FALLBACK_CUDA
from attngen.errors import AttngenError, FitError, SpecError, VerifyError, suggest

if TYPE_CHECKING:
    from attngen.analysis.roofline import Problem
    from attngen.bench.results import Results
    from attngen.ir.graph import Module
    from attngen.spec import Spec
    from attngen.tune.tuner import Plan

app = typer.Typer(
    help="Compile declarative attention specs (YAML) into Triton kernels, forward and backward.\n\n"
    "\b\nattngen new my_attention                  a spec to start from\nattngen build specs/my_attention.yaml     "
    "compile it to generated/my_attention/\nattngen test specs/my_attention.yaml      compare it with naive attention\n\n"
    "Then, in Python: from generated.my_attention import attention",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="a spec file, as in specs/causal_mqa.yaml", show_default=False)]
SPECS, GENERATED = Path("specs"), Path("generated")
FEW = 4  # specs that one process compiles sooner than another would start
UNLIMITED = 10_000  # columns, where nobody's terminal limits them
T = TypeVar("T")


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    if not out.is_terminal:
        out.width = UNLIMITED


def _table(*headings: str, folds: str = "") -> Table:
    """An open table whose cells are never cut; only the column `folds` may break into lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading != folds)
    return table


@app.command()
def build(
    specs: Annotated[list[Path] | None, typer.Argument(metavar="SPECS", help="spec files", show_default=False)] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets one folder per spec")] = GENERATED,
    every: Annotated[bool, typer.Option("--all", help="every spec in specs/")] = False,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail, with a diff, if files are not what the specs give")] = False,
) -> None:
    """Compile specs to Triton modules.

    Each gets a folder with __init__.py, kernels.py, schedule.ir and report.json. All specs are compiled before anything is
    written, so a wrong one leaves every file as it was.

    \b
    attngen build specs/causal_mqa.yaml               writes generated/causal_mqa/
    attngen build specs/causal_mqa.yaml --out build   writes build/causal_mqa/
    attngen build --all --check                       for CI: is generated/ what specs/ give?
    """
    from attngen.emit.files import diff_module, write_module
    from attngen.spec import load_spec

    paths = _given(specs, every, "build")
    loaded = [(path, load_spec(path)) for path in paths]
    names = [spec.name for _, spec in loaded]
    for path, spec in loaded:
        if names.count(spec.name) > 1:
            raise SpecError(f"{path}: another spec of this build is named `{spec.name}` too; names must differ")
    modules = list(_modules(loaded, out_dir))
    if check:
        diffs = [diff_module(files, out_dir / module.name) for module, files in modules]
        stale = sorted(p.name for p in out_dir.iterdir() if (p / "schedule.ir").is_file()) if every and out_dir.is_dir() else []
        diffs += [f"{out_dir / name} has no spec" for name in stale if name not in names]
        if any(diffs):
            print("\n".join(d for d in diffs if d))
            raise AttngenError(f"{out_dir} is not what the specs give; run `attngen build` without --check")
        print(f"{out_dir} is what {_count(len(modules), 'spec')} give{'s' if len(modules) == 1 else ''}")
        return
    table = _table("module", "mask", "heads", "dim", "sm90 fwd", "dK dV", "dQ", "", folds="mask")
    written = 0
    for module, files in modules:
        changed = write_module(files, out_dir / module.name)
        written += changed
        tiles = (_tiles(module, kernels) for kernels in (("fwd",), ("dkdv", "dk", "dv", "bwd"), ("dq",)))
        dim = _head_dim(module.head_dim_qk, module.head_dim_v)
        table.add_row(module.name, module.mask, module.sharing, dim, *tiles, "written" if changed else "same")
    out.print(table)
    print(f"{_count(written, 'module')} written to {out_dir}, {len(modules) - written} unchanged")


def _given(specs: list[Path] | None, every: bool, command: str) -> list[Path]:
    paths = list(dict.fromkeys([*(specs or []), *(_all_specs() if every else [])]))
    if not paths:
        expected = f"expected `attngen {command} specs/NAME.yaml` or `attngen {command} --all`"
        raise typer.BadParameter(f"none given; {expected}", param_hint="SPECS")
    return paths


def _modules(loaded: Sequence[tuple[Path, Spec]], out_dir: Path, workers: int | None = None) -> Iterator[tuple[Module, dict[str, str]]]:
    """The modules of specs and their files, with the readings that `out_dir` has of them."""
    return _each(_module, loaded, out_dir, workers=workers)


def _each(make: Callable[..., T], loaded: Sequence[tuple[Path, Spec]], *args: object, workers: int | None = None) -> Iterator[T]:
    """`make(path, spec, *args)` of each spec; many are made by as many processes as cores."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    workers = min(workers or len(os.sched_getaffinity(0)), len(loaded) // FEW)
    with err.status("compiling") as status, ExitStack() as stack:
        each: Callable[..., Iterator[T]] = map
        if workers > 1:
            each = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        made = each(make, *zip(*loaded), *map(repeat, args))
        for path, _ in loaded:
            status.update(f"compiling {path}")
            yield next(made)


def _emitted(folder: Path) -> tuple[Module, dict[str, str]]:
    """The module that the schedule.ir in a folder gives, and its files, with the readings that the folder has of them."""
    from attngen.certify.certificate import keep
    from attngen.emit.render import render
    from attngen.ir.text import parse_module
    from attngen.ir.verify import verify

    ir = folder / "schedule.ir"
    if not ir.is_file():
        raise AttngenError(f"{folder} is not built; run `attngen build` first")
    module = verify(parse_module(ir.read_text(encoding="utf-8"), str(ir)))
    return module, keep(render(module), folder)


def _module(path: Path, spec: Spec, out_dir: Path) -> tuple[Module, dict[str, str]]:
    from attngen.certify.certificate import keep
    from attngen.emit.render import render

    module = _lower(path, spec)
    return module, keep(render(module), out_dir / module.name)


def _lower(path: Path, spec: Spec, after: str | None = None) -> Module:
    """The module of a spec that was read from a file, which errors name."""
    from attngen.passes.pipeline import lower

    with _naming(path):
        return lower(spec, after)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What does not fit is an error that names the spec's file, and the line."""
    from attngen.spec import place

    try:
        yield
    except FitError as error:
        raise SpecError(f"{place(path, error.key)}: {error}") from error


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _head_dim(qk: int, v: int) -> str:
    return f"{qk}" if qk == v else f"{qk}/{v}"


def _tiles(module: Module, kernels: tuple[str, ...]) -> str:
    """The tiles on sm90 of those of the kernels that the module has."""
    have = [kernel.name for kernel in module.kernels if kernel.name in kernels]
    rows = [next((r for r in reversed(module.rows(name)) if r.device == "sm90"), None) for name in have]
    return " ".join(f"{row.block_q}x{row.block_kv}" if row else "none" for row in rows)


def _all_specs() -> list[Path]:
    found = sorted(SPECS.glob("*.yaml"))
    if not found:
        raise SpecError(f"no *.yaml in {SPECS}/; run attngen in the folder that holds {SPECS}/, or write one with `attngen new NAME`")
    return found


@app.command("verify")
def verify_fit(
    specs: Annotated[list[Path] | None, typer.Argument(metavar="SPECS", help="spec files", show_default=False)] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that holds one folder per spec")] = GENERATED,
    every: Annotated[bool, typer.Option("--all", help="every spec in specs/")] = False,
    target: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(CLASSES)} [default: all but `any`]")] = None,
    rows: Annotated[bool, typer.Option("--every-row", help="compile the schedules for few rows, and for every element size, too")] = False,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed",
            help="of the modules as they are built: compile kernels whose reading in report.json is not of them, and one in "
            "16 of the others, which the commit draws",
        ),
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="build the modules, and record the readings in their report.json")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="processes [default: one a core]")] = None,
) -> None:
    """Compile kernels, without a GPU, beside what was predicted.

    For each target, without a GPU: shared memory predicted and reported, registers, spilled bytes, code size. It fails where
    a kernel spills on an NVIDIA target, needs more than predicted, or more than 10% less without a reason, or where the
    readings in report.json are not these.

    \b
    attngen verify specs/causal_mqa.yaml                 after attngen build, and verify --write
    attngen verify specs/causal_mqa.yaml --target sm90 --write
    attngen verify --all                                 every kernel of every spec
    attngen verify --all --changed                       for CI: what has changed, and a share of the rest
    """
    import tempfile
    import time

    from attngen.analysis.sram import sram_bytes
    from attngen.certify.certificate import Found, chosen, known, percent, reason, record, stale, violations
    from attngen.certify.compiler import Reading, compile_all, job
    from attngen.emit.files import write_module
    from attngen.spec import load_spec

    targets = target or [name for name in CLASSES if name != FALLBACK_CUDA]
    for name in targets:
        if name not in CLASSES:
            raise typer.BadParameter(f"`{name}` is not a target; {suggest(name, CLASSES)}", param_hint="--target")
    loaded = [(path, load_spec(path)) for path in _given(specs, every, "verify")]
    made = [_emitted(out_dir / spec.name) for _, spec in loaded] if changed else list(_modules(loaded, out_dir, jobs))
    modules, files = [module for module, _ in made], {module.name: texts for module, texts in made}
    work = [(module, kernel, row) for module in modules for kernel, row in chosen(module, targets, rows)]
    found: dict[str, Found] = {module.name: {} for module in modules}
    wrong: list[str] = []
    table = _table("module", "kernel", "target", "tile", "predicted", "reported", "", "registers", "spills", "code", "s", "", folds="")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, err.status("compiling") as status:
        sources = {name: Path(folder) / f"{name}.py" for name in files}
        for name, path in sources.items():
            path.write_text(files[name]["kernels.py"], encoding="utf-8")
        asked = [job(module, kernel, row, sources[module.name]) for module, kernel, row in work]
        taken = known(work, asked, files, out_dir) if changed else [None] * len(work)
        compiled = compile_all([one for one, reading in zip(asked, taken) if reading is None], jobs)
        for i, ((module, kernel, row), before) in enumerate(zip(work, taken), 1):
            reading = before or next(compiled)
            status.update(f"{i} of {len(work)}: {module.name} @{kernel.name} on {row.device}")
            wrong += violations(module, kernel, row, reading)
            tile, predicted = f"{row.block_q}x{row.block_kv}x{row.num_warps}x{row.num_stages}", sram_bytes(module, kernel, row)
            cells = [module.name, kernel.name, row.device, tile, f"{predicted:,}"]
            if isinstance(reading, Reading):
                found[module.name][kernel.name, row] = reading
                wrong += [] if write else stale(module, kernel, row, reading, files[module.name])
                cells += [f"{reading.shared_bytes:,}", percent(predicted, reading.shared_bytes), f"{reading.registers}"]
                cells += [f"{reading.spilled_bytes:,}", f"{reading.code_bytes:,}", f"{reading.seconds:.1f}"]
                cells.append(reason(module, kernel, row, reading))
            if before is None:
                table.add_row(*cells)
    for module in modules:
        for kernel in module.kernels:
            for unfit in module.unfit(kernel.name):
                if unfit.device in targets:
                    table.add_row(module.name, kernel.name, unfit.device, "none", *[""] * 7, unfit.reason)
    out.print(table)
    kept = len(taken) - taken.count(None)
    print(f"{_count(len(work) - kept, 'kernel')} compiled for {', '.join(targets)} in {time.perf_counter() - start:.0f} s")
    if changed:
        print(f"{_count(kept, 'reading')} of the same kernels by the same compiler taken from report.json")
    if write:
        for module in modules:
            write_module(record(module, files[module.name], found[module.name]), out_dir / module.name)
    if wrong:
        raise AttngenError("\n".join(wrong))


@app.command()
def emit(
    ir: Annotated[
        Path, typer.Argument(metavar="FILE", help="textual IR of the target phase, as in generated/NAME/schedule.ir", show_default=False)
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets the module's folder", show_default=False)],
) -> None:
    """Render a module from its textual IR alone.

    Edit tiles, stages or warps there by hand, and get the kernels that they give.

    \b
    attngen emit generated/causal_mqa/schedule.ir --out build     writes build/causal_mqa/
    """
    from attngen.certify.certificate import keep
    from attngen.emit.files import write_module
    from attngen.emit.render import render
    from attngen.ir.text import parse_module
    from attngen.ir.verify import verify

    try:
        text = ir.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AttngenError(f"{ir}: cannot be read as text; expected a schedule.ir") from error
    module = parse_module(text, str(ir))
    if module.phase != "target":
        raise AttngenError(f"{ir}: the IR is in phase `{module.phase}`; expected phase `target`, the last, as in schedule.ir")
    write_module(keep(render(verify(module)), out_dir / module.name), out_dir / module.name)
    print(out_dir / module.name)


@app.command()
def explain(
    spec: SpecPath,
    n: Annotated[int, typer.Option("--seq", min=1, max=2**24, help="queries and keys")] = 16384,
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="sequences")] = 1,
    heads: Annotated[int | None, typer.Option(min=1, max=2**16, help="query heads [default: 16]")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]")] = None,
    theory: Annotated[bool, typer.Option("--theory", help="theorems instead: closed forms, orders, limits")] = False,
    model: Annotated[str | None, typer.Option(help="with --theory, for a layer of this model, as in llama-70b")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="write a page to this .html file instead")] = None,
) -> None:
    """Show formulas, SRAM fit, bytes, FLOPs, roofline and tiles.

    For every device that attngen knows, at the problem size that the options give. The page of --html has charts and maps of
    tiles too, the IR after each pass, and the generated code; it is one file that loads nothing.

    \b
    attngen explain specs/causal_mqa.yaml
    attngen explain specs/causal_gqa.yaml --seq 4096 --heads 32 --kv-heads 8
    attngen explain specs/causal_gqa.yaml --theory --model llama-70b --seq 131072
    attngen explain specs/causal_mqa.yaml --html causal_mqa.html
    """
    from attngen.analysis.models import find_model
    from attngen.analysis.roofline import Problem
    from attngen.certify.certificate import keep
    from attngen.emit.explain import explain as explanation
    from attngen.emit.render import render
    from attngen.emit.theory import explain_theory
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    sharing, dim = loaded.heads.sharing, loaded.head_dim
    if kv_heads is not None and sharing != "gqa":
        raise AttngenError(f"--kv-heads is for gqa; {spec} says {sharing}, whose number of K/V heads is fixed")
    if html is not None and theory:
        raise AttngenError("--html is a page of what `explain` shows without --theory; expected one of them")
    if model is not None and not theory:
        raise AttngenError("--model is for the numbers of --theory; expected both or neither")
    sizes = find_model(model) if model is not None else None
    if sizes is not None:
        if heads is not None or kv_heads is not None:
            raise AttngenError(f"--model {sizes.name} says how many heads there are; leave out --heads and --kv-heads")
        if sharing not in (sizes.sharing, "gqa") or (dim.qk, dim.v) != (sizes.head_dim_qk, sizes.head_dim_v):
            theirs = f"{sizes.sharing} with head dim {_head_dim(sizes.head_dim_qk, sizes.head_dim_v)}"
            ours = f"{sharing} with head dim {_head_dim(dim.qk, dim.v)}"
            raise AttngenError(f"--model {sizes.name} is {theirs}, and {spec} is {ours}; expected a spec that agrees")
        heads, kv_heads = sizes.q_heads, sizes.kv_heads
    heads = heads or 16
    shared = {"mha": heads, "mqa": 1, "gqa": kv_heads or max(1, heads // 4)}[sharing]
    if heads % shared:
        raise AttngenError(f"--heads {heads} is not a multiple of --kv-heads {shared}")
    problem = Problem(batch, heads, shared, n, n)
    if html is not None:
        _write_page(spec, loaded, problem, html)
        return
    module = _lower(spec, loaded)
    if theory:
        parts = explain_theory(module, problem, sizes)
    else:
        report = json.loads(keep(render(module), GENERATED / module.name)["report.json"])
        parts = explanation(module, problem, report)
    for part in parts:
        out.print(part)


def _write_page(path: Path, spec: Spec, problem: Problem, html: Path) -> None:
    from attngen.certify.certificate import keep
    from attngen.emit.files import write_file
    from attngen.emit.page import check_path, page
    from attngen.emit.render import render
    from attngen.passes.pipeline import stages

    check_path(html)
    with _naming(path):
        steps = list(stages(spec))
    files = keep(render(steps[-1][1]), GENERATED / spec.name)
    write_file(html, page(spec, path.read_text(encoding="utf-8-sig"), steps, files, problem))
    print(html)


@app.command()
def profile(
    spec: SpecPath,
    seq: Annotated[str, typer.Option(help="lengths, queries and keys")] = "4096,8192",
    tiles: Annotated[str, typer.Option(help="rows of tiles that stay on chip; `none`: only as specs are built")] = "16,32,64,128",
    direction: Annotated[str, typer.Option(help="forward, backward or both")] = "both",
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="sequences")] = 8,
    heads: Annotated[int, typer.Option(min=1, max=2**16, help="query heads")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]")] = None,
    budget: Annotated[int, typer.Option(min=1, help="seconds that ncu may take")] = 600,
    out_dir: Annotated[Path | None, typer.Option("--out", help="folder that gets profile.csv, profile.json and profile.svg")] = None,
) -> None:
    """Measure the bytes that kernels move, beside what is predicted.

    On a machine with CUDA and ncu (NVIDIA Nsight Compute): bytes of device memory, and loads and stores as the kernels ask them of
    the L2, of each kernel in either order of loops, and of naive attention. Caches are flushed before each kernel; clocks stay as they are.

    \b
    attngen profile specs/causal_fa1.yaml
    attngen profile specs/causal_fa1.yaml --seq 4096,16384 --tiles 32,64,128 --direction forward --out docs/io
    """
    from attngen.analysis.roofline import Problem
    from attngen.bench.profile import ORDERS, ratio, run, write
    from attngen.ir.interface import DIRECTIONS
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    if direction not in (*DIRECTIONS, "both"):
        raise typer.BadParameter(f"`{direction}` is no direction; {suggest(direction, (*DIRECTIONS, 'both'))}", param_hint="--direction")
    if kv_heads is not None and loaded.heads.sharing != "gqa":
        raise AttngenError(f"--kv-heads is for gqa; {spec} says {loaded.heads.sharing}, whose number of K/V heads is fixed")
    shared = {"mha": heads, "mqa": 1, "gqa": kv_heads or max(1, heads // 4)}[loaded.heads.sharing]
    lengths, rows = _numbers(seq, "--seq"), _numbers(tiles, "--tiles") if tiles != "none" else []
    if wrong := next((t for t in rows if t not in (16, 32, 64, 128, 256)), None):
        raise typer.BadParameter(f"{wrong} rows; expected 16, 32, 64, 128 or 256", param_hint="--tiles")
    directions = DIRECTIONS if direction == "both" else (direction,)
    with err.status("profiling") as status:
        found = run(loaded, spec, Problem(batch, heads, shared), lengths, rows, directions, budget, status.update)
    table = _table("order", "on chip", "N", "kernel", "tile", "GB DRAM", "predicted", "ratio", "GB L2", "predicted", "ratio")
    for line in found.lines:
        moved = line.predicted
        kernel = f"{line.kernel} {line.direction}"
        cells = [ORDERS.get(line.order, line.order), str(line.tile or "as built"), str(line.n), kernel, line.tiles]
        for level in ("dram", "l2"):
            near = ratio(line, level)
            cells += [f"{getattr(line.measured, level) / 1e9:.3f}", f"{getattr(moved, level) / 1e9:.3f}" if moved else ""]
            cells.append(f"{near:.2f}" if near is not None else "")
        table.add_row(*cells)
    out.print(f"{found.spec} on {found.device}: B={found.batch}, {found.heads} heads, {found.kv_heads} K/V heads")
    out.print(table)
    for sentence in found.failed:
        print(sentence)
    for path in write(found, out_dir) if out_dir else ():
        print(path)


def _numbers(text: str, option: str) -> list[int]:
    """Numbers with commas between them."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"`{text}`; expected whole numbers with commas between them, as in 4096,16384", param_hint=option)
    return found


@app.command()
def dump(
    spec: SpecPath,
    after: Annotated[str | None, typer.Option(help="pass to stop after, `build` for the logical IR [default: the last]")] = None,
    graph: Annotated[Path | None, typer.Option(help="write the kernels' graphs to a .dot or .svg file instead")] = None,
) -> None:
    """Print the IR after a pass, or draw it.

    \b
    attngen dump specs/causal_mqa.yaml                          the final IR
    attngen dump specs/causal_mqa.yaml --after build            before the first pass
    attngen dump specs/causal_mqa.yaml --after split-loops
    attngen dump specs/causal_mqa.yaml --graph causal_mqa.dot   or .svg, with Graphviz
    """
    from attngen.ir.text import print_module
    from attngen.spec import load_spec

    module = _lower(spec, load_spec(spec), after)
    if graph is None:
        print(print_module(module), end="")
        return
    from attngen.emit.graphviz import write_graph

    write_graph(module, graph)
    print(graph)


@app.command()
def test(
    spec: SpecPath,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="seed of the random inputs")] = 0,
) -> None:
    """Test a spec's module against naive attention.

    It runs on CUDA if there is a device, else in Triton's interpreter, on small cases. Errors are relative, against fp64. A
    case passes if none is above twice what naive attention has in the same dtype.

    \b
    attngen test specs/causal_mqa.yaml
    attngen test specs/causal_mqa.yaml --seed 7
    """
    import tempfile
    import warnings

    from attngen.emit.files import write_module
    from attngen.emit.render import render
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    module = _lower(spec, loaded)
    failed = 0
    with err.status("importing torch") as status, tempfile.TemporaryDirectory() as folder:
        import torch

        cuda = torch.cuda.is_available()
        if not cuda:
            os.environ["TRITON_INTERPRET"] = "1"
            warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # log2(0) of rows that see nothing
        from attngen.testing import KEYS, cli_cases, load_module, run_case

        write_module(render(module), Path(folder) / loaded.name)
        generated = load_module(Path(folder) / loaded.name)
        print(f"{loaded.name} on {torch.cuda.get_device_name() if cuda else 'the CPU, in the interpreter of Triton'}")
        print(f"{'case':<28}{'dtype':<7}{''.join(f'{key:<9}' for key in KEYS)}worst, over naive")
        for case, dtype in cli_cases(loaded, cuda):
            status.update(f"{case} {dtype}")
            result = run_case(generated, loaded, case, dtype, "cuda" if cuda else "cpu", seed)
            failed += not result.ok
            errors = "".join(f"{result.ours[key]:<9.1e}" for key in KEYS)
            ratio = f"{result.worst} {result.ratio(result.worst):.2f}x"
            print(f"{case!s:<28}{dtype:<7}{errors}{ratio:<14}{'ok' if result.ok else 'FAILED'}", flush=True)
    if failed:
        raise AttngenError(f"{_count(failed, 'case')} of {loaded.name} further from the truth than twice naive attention's error")


@app.command()
def bench(
    specs: Annotated[list[Path] | None, typer.Argument(metavar="SPECS", help="spec files", show_default=False)] = None,
    grid: Annotated[list[str] | None, typer.Option(metavar="NAME|FILE", help="paper, fa3 or a YAML file instead of SPECS")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="WORDS", help="a part of them, as in D64,D128,causal,N4096: one word of each kind")
    ] = None,
    peers: Annotated[str | None, typer.Option(metavar="NAMES", help="as in ours,flash,flex [default: the grid's, or all]")] = None,
    n: Annotated[str, typer.Option("--n", metavar="ROWS", help="of SPECS: rows, or rows of q:rows of k and v")] = "1024,4096,16384",
    batch: Annotated[int | None, typer.Option(min=1, max=2**16, help="of SPECS: sequences [default: 16384 / rows]")] = None,
    heads: Annotated[int, typer.Option(min=1, max=2**16, help="of SPECS: query heads")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=2**16, help="of SPECS: K/V heads of gqa [default: heads / 4]")] = None,
    dtype: Annotated[str | None, typer.Option(help="of SPECS: element type [default: the spec's first]")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder for results.json, results.csv and plots")] = Path("bench"),
    compare: Annotated[Path | None, typer.Option(help="results.json of another run: show what moved, fail if ours got slower")] = None,
    from_: Annotated[Path | None, typer.Option("--from", help="measure nothing; show the results.json of a run")] = None,
    dry: Annotated[bool, typer.Option("--list", help="measure nothing; show the cells, and what peers cannot do")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="times are medians of so many rounds")] = 5,
    jobs: Annotated[int | None, typer.Option(min=1, max=64, help="cells that compile at once [default: half the cores, 8 at most]")] = None,
    limit: Annotated[float, typer.Option(min=1, max=3600, help="seconds that a step of a peer may take")] = 120,
    host: Annotated[bool, typer.Option("--host", help="host times without gradients, compiled and in a CUDA graph, too")] = False,
) -> None:
    """Measure modules beside their peers on this GPU, in one run.

    Forward, backward and both, of each cell (a spec and its sizes) in a process of its own, the peers in turn: milliseconds (medians of
    rounds, the L2 flushed), TFLOP/s, the fraction of the roof that this run measured, the spread; peak memory of a forward and backward,
    host time of a forward call, seconds to the first result with empty caches. Peers: ours, flash, cudnn, efficient, math (SDPA's
    backends), flex (FlexAttention, written from the spec), fa4 (FlashAttention-4, where it is installed), naive. Dropout is off, masks
    and plans are made before. A peer that fails or hangs loses its own figures alone.

    With --host also the host's time of a forward call without gradients, of one under torch.compile with and without, and of one in a
    CUDA graph.

    With --compare, times that moved by more than both runs' spreads (2% at least) are shown, and the exit code is 1 if one of ours
    got slower or was lost. With --compare alone, the cells and peers are those of its file.

    \b
    attngen bench specs/causal_gqa.yaml --n 4096 --peers ours,flash,flex
    attngen bench --grid fa3 --only D128,causal --out bench
    attngen bench specs/causal_mqa.yaml --n 512 --batch 4 --host
    attngen bench --grid paper --grid fa3 --list
    attngen bench --compare docs/bench/h200.json
    attngen bench --from bench/results.json --compare docs/bench/h200.json
    """
    import tempfile
    import time

    from attngen.bench.results import Results, failures, moves, other_machine, read_results
    from attngen.bench.run import Setup, machine, progress, run
    from attngen.bench.work import listing, select
    from attngen.emit.files import write_file

    if from_ is not None and (specs or grid or only or dry):
        raise AttngenError("--from shows a run as it is; leave out SPECS, --grid, --only and --list")
    old = read_results(compare) if compare else None
    setup = Setup(rounds, jobs or max(1, min(8, len(os.sched_getaffinity(0)) // 2)), limit, host)
    if from_ is not None:
        results = read_results(from_)
    else:
        sizes = {"n": n, "batch": batch, "heads": heads, "kv_heads": kv_heads, "dtype": dtype}
        work = select(specs or [], grid or [], old, only, peers, sizes)
        if dry:
            headings, rows = listing(work, setup)
            _print_rows(headings, rows)
            return
        start = time.perf_counter()
        with err.status("measuring the roofs") as status, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

            def watch(text: str, done: bool = False) -> None:
                status.update(text)
                if done or not err.is_terminal:
                    err.print(f"[{time.perf_counter() - start:.0f} s] {text}")

            results = Results({**machine(setup, Path(folder)), "rounds": rounds})
            for i, lines in enumerate(run(work, setup, Path(folder), results, watch), 1):
                write_file(out_dir / "results.json", results.text())  # what a run that is ended early keeps
                watch(f"{i}/{len(work)} {lines[0].cell}: {progress(lines)}", done=True)
    _show_bench(results, out_dir)
    failed = [f"{line.cell} {line.peer}: {line.why}" for line in results.failed()]
    if old:
        if different := other_machine(results, old):
            print(f"another machine: {different}")
        moved = moves(results, old)
        for move in moved:
            print(move)
        print(f"{_count(len(moved), 'time')} moved; {_count(results.shared(old), 'line')} in both runs")
        failed += [f"slower than in {compare}: {move}" for move in failures(moved)]
    if failed:
        raise AttngenError("\n".join(failed))


def _show_bench(results: Results, out_dir: Path) -> None:
    """Print the table of a run, and write its files."""
    from attngen.bench import plots
    from attngen.bench.results import HEADINGS, HOST_HEADINGS, host_rows, ratios, rows
    from attngen.emit.files import write_file

    m = results.machine
    print(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}")
    print(f"roofs: {m['matmul_tflops']:.0f} TFLOP/s bf16 matrix product, {m['copy_tb_s']:.2f} TB/s copy")
    _print_rows(HEADINGS, rows(results))
    if hosts := list(host_rows(results)):
        _print_rows(HOST_HEADINGS, hosts)
    for line in ratios(results):
        print(line)
    files = {"results.json": results.text(), "results.csv": results.csv(), **(plots.plots(results) if plots.available() else {})}
    for name, text in files.items():
        write_file(out_dir / name, text)
    print(f"{', '.join(str(out_dir / name) for name in files)}{'' if plots.available() else f'; no plots: {plots.MISSING}'}")


def _print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = _table(*headings)
    for row in rows:
        table.add_row(*row)
    out.print(table)


@app.command()
def tune(
    specs: Annotated[list[Path] | None, typer.Argument(metavar="SPECS", help="spec files", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="every spec in specs/")] = False,
    device: Annotated[str | None, typer.Option(help=f"of {', '.join(DEVICES)} [default: the GPU here]")] = None,
    budget: Annotated[float | None, typer.Option(min=1, help="seconds of measuring [default: as many as it takes]")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be measured, and why the rest would not; needs no GPU")
    ] = False,
    whole_grid: Annotated[
        int | None, typer.Option(metavar="N", help="compare with the whole grid, for N queries and keys, instead")
    ] = None,
    results: Annotated[Path | None, typer.Option(metavar="FILE", help="keep all times here, and take those that it has")] = None,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="the table [default: the device's, in attngen/tune]")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="processes that compile [default: one a core]")] = None,
) -> None:
    """Measure the schedules that the model left, and keep the fastest.

    What fits, would not spill, and is modelled to be fast is compiled by several processes, and measured kernel by kernel, for 512,
    1k, 4k and 16k queries and keys. The fastest go into a table, from which `attngen build` takes them for every kernel of their
    class; where none is faster than the model's choice by more than times spread, that stays.

    \b
    attngen tune specs/causal_mha.yaml --dry-run         the candidates; needs no GPU
    attngen tune specs/causal_mha.yaml --budget 60
    attngen tune specs/*.yaml --results tune.jsonl       goes on where it ended; the table anew from the file, without a GPU
    attngen tune specs/causal_mha.yaml --whole-grid 4096 what the model's pruning costs, and saves
    """
    from attngen.emit.files import write_file
    from attngen.spec import load_spec
    from attngen.tune import run, summary
    from attngen.tune.classes import RANGES
    from attngen.tune.table import Table, path_of, read_table

    loaded = [(path, load_spec(path)) for path in _given(specs, every, "tune")]
    sources = {spec.name: path for path, spec in loaded}
    if len(sources) < len(loaded):
        raise SpecError("two of the specs have one name; expected each once")
    if whole_grid is not None and whole_grid not in (sizes := [rows for _, rows in RANGES]):
        raise AttngenError(f"--whole-grid {whole_grid} is not a size that is measured; expected one of {', '.join(map(str, sizes))}")
    name, here = run.which_device(device, dry_run, results)
    plans = list(_each(_plan, loaded, DEVICES[name].cls))
    if dry_run:
        for plan in plans:
            print("\n".join(summary.candidates(plan)))
        return
    if whole_grid is not None:
        with run.machine(plans, sources, jobs) as gpu:
            print(summary.aligned(summary.COMPARED, summary.COMPARED_WIDTHS))
            for cell, pair in run.compare_all(plans, gpu, whole_grid):
                print(summary.compared(cell, pair), flush=True)
        return
    path = table or path_of(name)
    before = read_table(path) if path.is_file() else Table(name)
    found = run.read_results(results, name, plans)
    print(summary.aligned(summary.MEASURED))
    for plan, known in run.known(plans, found):
        print("\n".join(summary.measured(plan, known)))
    if here:
        with run.machine(plans, sources, jobs) as gpu:
            for plan, made in run.tune(plans, gpu, found, budget or float("inf")):
                print("\n".join(summary.measured(plan, made)), flush=True)
    print("\n".join(summary.totals(run.known(plans, found))))
    after = run.tabled(before, plans, found)
    write_file(path, after.text())
    print(f"{path} has {len(after.entries)} measured schedules\nnext: attngen build --all; attngen verify --all --write")


def _plan(path: Path, spec: Spec, device_class: str) -> Plan:
    from attngen.tune.tuner import plan

    with _naming(path):
        return plan(spec, device_class)


@app.command("list")
def list_specs() -> None:
    """List the specs in specs/, and the masks that a spec can name.

    \b
    attngen list
    """
    from attngen.masks import registry
    from attngen.spec import load_spec

    table = _table("spec", "mask", "heads", "dim", "dtype", folds="mask")
    for path in _all_specs():
        spec = load_spec(path)
        dim = _head_dim(spec.head_dim.qk, spec.head_dim.v)
        table.add_row(str(path), spec.mask.describe(), spec.heads.sharing, dim, ",".join(spec.dtype))
    out.print(table)
    masks = _table("mask", "", folds="")
    for name, mask in registry().items():
        masks.add_row(name, (mask.__doc__ or "").splitlines()[0])
    out.print()
    out.print(masks)


@app.command()
def new(name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new spec", show_default=False)]) -> None:
    """Write specs/NAME.yaml: a commented spec that builds as it is.

    \b
    attngen new my_attention
    attngen build specs/my_attention.yaml
    """
    from attngen.spec import make_spec, starter

    make_spec({"name": name, "head_dim": 64}, "attngen new")
    path = SPECS / f"{name}.yaml"
    SPECS.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter(name))
    except FileExistsError as error:
        raise AttngenError(f"{path} exists already; choose another name") from error
    print(f"{path}\nnext: attngen build {path}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a spec, for editors and validators.

    \b
    attngen schema > attngen.schema.json
    """
    from attngen.spec import json_schema

    print(json.dumps(json_schema(), indent=2))


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: an error that attngen raises on purpose is a line on stderr and exit code 1; usage errors exit with 2."""
    try:
        app(args, prog_name="attngen")
    except VerifyError as error:
        print(error.ir_text, file=sys.stderr)
        _fail(str(error))
    except AttngenError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str) -> None:
    for line in message.splitlines():
        err.print(f"error: {line}", style="red")
    sys.exit(1)
