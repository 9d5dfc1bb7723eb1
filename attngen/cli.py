"""The command line. Heavy libraries are imported by the commands that need them, so that `build` starts fast."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attngen import __version__
from attngen.errors import AttngenError, SpecError, VerifyError

app = typer.Typer(
    help="Compile declarative attention specs (YAML) into Triton kernels, forward and backward.\n\n"
    "Start with `attngen new my_attention`, then `attngen build specs/my_attention.yaml` and "
    "`from generated.my_attention import attention`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

SpecPath = Annotated[Path, typer.Argument(help="a spec file, as in specs/causal_mqa.yaml", show_default=False)]
SPECS, GENERATED = Path("specs"), Path("generated")


def _version(value: bool) -> None:
    if value:
        out.print(__version__)
        raise typer.Exit()


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


@app.command()
def build(
    specs: Annotated[list[Path] | None, typer.Argument(help="spec files", show_default=False)] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets one folder per spec")] = GENERATED,
    every: Annotated[bool, typer.Option("--all", help="every spec in specs/")] = False,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail, with a diff, if files are not what the specs give")] = False,
) -> None:
    """Lower specs to Triton modules: `generated/NAME/{__init__.py, kernels.py, schedule.ir, report.json}`.

    All specs are lowered before anything is written, so a wrong one leaves every file as it was.
    """
    from attngen.emit.files import diff_module, write_module
    from attngen.emit.render import render
    from attngen.passes.pipeline import lower
    from attngen.spec import load_spec

    paths = [*(specs or []), *(_all_specs() if every else [])]
    if not paths:
        raise SpecError("no spec given; expected `attngen build specs/NAME.yaml` or `attngen build --all`")
    loaded = [(path, load_spec(path)) for path in paths]
    names = [spec.name for _, spec in loaded]
    for path, spec in loaded:
        if names.count(spec.name) > 1:
            raise SpecError(f"{path}: another spec of this build is named `{spec.name}` too; names must differ")
    modules = []
    with err.status("lowering", spinner="dots") as status:
        for path, spec in loaded:
            status.update(f"lowering {path}")
            module = lower(spec)
            modules.append((module, render(module)))
    if check:
        diffs = [diff_module(files, out_dir / module.name) for module, files in modules]
        stale = sorted(p.name for p in out_dir.iterdir() if (p / "schedule.ir").is_file()) if every and out_dir.is_dir() else []
        diffs += [f"{out_dir / name} has no spec" for name in stale if name not in names]
        if any(diffs):
            print("\n".join(d for d in diffs if d))
            raise AttngenError(f"{out_dir} is not what the specs give; run `attngen build` without --check")
        out.print(f"{len(modules)} modules in {out_dir} are what their specs give")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("module", "mask", "heads", "head dim", "dtype", "tiles on sm90: fwd, dkdv, dq", "written"):
        table.add_column(heading)
    for module, files in modules:
        changed = write_module(files, out_dir / module.name)
        tiles = ", ".join(_tile(module, kernel) for kernel in ("fwd", "dkdv", "dq"))
        dims = f"{module.head_dim_qk}" + (f"/{module.head_dim_v}" if module.head_dim_v != module.head_dim_qk else "")
        where = f"{out_dir / module.name}" + ("" if changed else " (unchanged)")
        table.add_row(module.name, module.mask, module.sharing, dims, " ".join(module.dtypes), tiles, where)
    out.print(table)


def _tile(module: Any, kernel: str) -> str:
    row = next(r for r in reversed(module.rows(kernel)) if r.device == "sm90")
    return f"{row.block_q}x{row.block_kv}"


def _all_specs() -> list[Path]:
    found = sorted(SPECS.glob("*.yaml"))
    if not found:
        raise SpecError(f"no specs in {SPECS}/; expected *.yaml there, in the folder that attngen is run from")
    return found


@app.command()
def emit(
    ir: Annotated[Path, typer.Argument(help="textual IR of the target phase, as in generated/NAME/schedule.ir", show_default=False)],
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets the module's folder", show_default=False)],
) -> None:
    """Render a module from its textual IR alone; edit tiles, stages or loops there and see the kernel they give."""
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
        raise AttngenError(f"{ir}: the IR is in phase `{module.phase}`; only phase `target` can be rendered")
    write_module(render(verify(module)), out_dir / module.name)
    out.print(f"{out_dir / module.name}")


@app.command()
def explain(
    spec: SpecPath,
    n: Annotated[int, typer.Option("--seq", min=1, max=2**24, help="queries and keys")] = 16384,
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="sequences")] = 1,
    heads: Annotated[int, typer.Option(min=1, max=2**16, help="query heads")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]")] = None,
) -> None:
    """Formulas, SRAM fit per device, bytes, FLOPs, roofline and tile choice."""
    from attngen.analysis.roofline import Problem
    from attngen.emit.explain import explain as explanation
    from attngen.passes.pipeline import lower
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    shared = {"mha": heads, "mqa": 1, "gqa": kv_heads or max(1, heads // 4)}[loaded.heads.sharing]
    if heads % shared:
        raise AttngenError(f"--heads {heads} is not a multiple of --kv-heads {shared}")
    for part in explanation(lower(loaded), Problem(batch, heads, shared, n, n)):
        out.print(part)


@app.command()
def dump(
    spec: SpecPath,
    after: Annotated[str | None, typer.Option(help="pass to stop after, `build` for the logical IR [default: the last]")] = None,
    graph: Annotated[Path | None, typer.Option(help="write the kernels' graphs to a .dot or .svg file instead")] = None,
) -> None:
    """Print the IR after a pass, or draw it."""
    from attngen.ir.text import print_module
    from attngen.passes.pipeline import lower
    from attngen.spec import load_spec

    module = lower(load_spec(spec), after)
    if graph is None:
        print(print_module(module), end="")
        return
    from attngen.emit.graphviz import write_graph

    write_graph(module, graph)
    out.print(f"{graph}")


@app.command()
def test(
    spec: SpecPath,
    seed: Annotated[int, typer.Option(help="seed of the random inputs")] = 0,
) -> None:
    """Test a spec's module against naive attention: on CUDA if there is a device, else in Triton's interpreter."""
    import tempfile

    from attngen.emit.files import write_module
    from attngen.emit.render import render
    from attngen.passes.pipeline import lower
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    module = lower(loaded)
    with err.status("importing torch", spinner="dots") as status:
        import torch

        cuda = torch.cuda.is_available()
        if not cuda:
            os.environ["TRITON_INTERPRET"] = "1"
        from attngen.testing import cli_cases, load_module, run_case

        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for heading in ("case", "dtype", "out", "lse", "dq", "dk", "dv", "worst vs naive", ""):
            table.add_column(heading)
        failed = 0
        with tempfile.TemporaryDirectory() as folder:
            write_module(render(module), Path(folder) / loaded.name)
            generated = load_module(Path(folder) / loaded.name)
            for case, dtype in cli_cases(loaded, cuda):
                status.update(f"{case} {dtype}")
                result = run_case(generated, loaded, case, dtype, "cuda" if cuda else "cpu", seed)
                failed += not result.ok
                errors = [f"{result.ours[k]:.1e}" for k in ("out", "lse", "dq", "dk", "dv")]
                worst = max(result.ratio(k) for k in result.ours)
                table.add_row(str(case), dtype, *errors, f"{worst:.2f}x", "ok" if result.ok else "FAILED")
    out.print(table)
    where = torch.cuda.get_device_name() if cuda else "Triton's interpreter on the CPU"
    out.print(f"{loaded.name} on {where}: relative errors against fp64; the bar is twice naive attention's in the same dtype")
    if failed:
        raise AttngenError(f"{failed} cases of {loaded.name} are further from the truth than the bar allows")


@app.command("list")
def list_specs() -> None:
    """Specs in specs/, and the masks that a spec can name."""
    from attngen.masks import registry
    from attngen.spec import load_spec

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("spec", "mask", "heads", "head dim", "dtype"):
        table.add_column(heading)
    for path in _all_specs():
        spec = load_spec(path)
        table.add_row(str(path), spec.mask.describe(), spec.heads.sharing, f"{spec.head_dim.qk}/{spec.head_dim.v}", " ".join(spec.dtype))
    out.print(table)
    out.print()
    for name, mask in registry().items():
        out.print(f"mask [bold]{name}[/bold]: {(mask.__doc__ or '').splitlines()[0]}")


@app.command()
def new(name: Annotated[str, typer.Argument(help="name of the new spec", show_default=False)]) -> None:
    """Write specs/NAME.yaml: a commented starter that builds as it is."""
    from attngen.spec import parse_spec, starter

    text = starter(name)
    parse_spec(text, f"specs/{name}.yaml")
    path = SPECS / f"{name}.yaml"
    if path.exists():
        raise AttngenError(f"{path} exists already; choose another name")
    SPECS.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    out.print(f"{path}\nnext: attngen build {path}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a spec, for editors and validators."""
    from attngen.spec import json_schema

    print(json.dumps(json_schema(), indent=2))


def main() -> None:
    """Entry point: an error that attngen raises on purpose is one message and exit code 1; usage errors exit with 2."""
    try:
        app()
    except VerifyError as error:
        print(error.ir_text, file=sys.stderr)
        err.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    except AttngenError as error:
        err.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
