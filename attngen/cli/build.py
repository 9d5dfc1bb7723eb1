"""Commands that compile: `build` from specs, `emit` from the IR's text, `dump` up to a pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import (
    GENERATED,
    Every,
    SpecPaths,
    complete_spec,
    given,
    lower,
    make_each,
    make_module,
    read_specs,
)
from attngen.cli.console import complain, count, err, head_dim, out
from attngen.errors import AttngenError, SpecError, VerifyError
from attngen.report.tables import Rows
from attngen.specs import find_spec

if TYPE_CHECKING:
    from attngen.ir.kernel import Kernel
    from attngen.ir.module import Module
    from attngen.spec import Spec


def build(
    specs: SpecPaths = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets one folder per spec")] = GENERATED,
    every: Every = False,
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; fail, with a diff, if files are not what the specs give")
    ] = False,
) -> None:
    """Compile specs to Triton modules.

    Each gets a folder with __init__.py, kernels.py, schedule.ir and report.json. All specs are compiled before anything
    is written: if a spec is wrong, no file changes. Each wrong spec is named.

    \b
    attngen build causal_mqa               writes generated/causal_mqa/
    attngen build causal_mqa --out build   writes build/causal_mqa/
    attngen build --all --check            for CI: is it up to date?
    """
    loaded, unread = read_specs(given(specs, every, "build"))
    complain("\n".join(unread))  # before the others, which take a while
    names = [spec.name for _, spec in loaded]
    if twin := next((path for path, spec in loaded if names.count(spec.name) > 1), None):
        raise SpecError(
            f"{twin}: another spec of this build is named `{dict(loaded)[twin].name}` too; names must differ"
        )
    _note(loaded)
    modules, unbuilt = make_each(make_module, loaded, out_dir)
    complain("\n".join(unbuilt))
    if unread or unbuilt:
        raise typer.Exit(1)
    (_check if check else _write)(modules, out_dir, every)


def _note(loaded: list[tuple[Path, Spec]]) -> None:
    """Print notes about parts of the specs that may not mean what their authors intended."""
    from attngen.spec import place

    for path, spec in loaded:
        for key, note in spec.notes():
            err.print(f"{place(path, key)}: note: `{key[0]}` {note}")


def _check(modules: list[tuple[Module, dict[str, str]]], out_dir: Path, every: bool) -> None:
    """Fail, with a diff, if a folder does not hold these modules, or with `every` holds other modules."""
    from attngen.codegen.files import diff_module

    names = {module.name for module, _ in modules}
    diffs = [diff_module(files, out_dir / module.name) for module, files in modules]
    have = sorted(p.name for p in out_dir.iterdir() if p.name != "__pycache__") if every and out_dir.is_dir() else []
    diffs += [f"{out_dir / name} has no spec" for name in have if name not in names]
    if any(diffs):
        print("\n".join(d for d in diffs if d))
        raise AttngenError(f"{out_dir} is not what the specs give; run `attngen build` without --check")
    print(f"{out_dir} is what {count(len(modules), 'spec')} give{'s' if len(modules) == 1 else ''}")


def _write(modules: list[tuple[Module, dict[str, str]]], out_dir: Path, _: bool) -> None:
    """Write the modules, and print a table of them; of a single one, the kernels that it runs."""
    from attngen.codegen.files import write_module

    if len(modules) == 1:
        _write_one(*modules[0], out_dir)
        return
    table = Rows(
        "module", "mask", "heads", "dim", "sm90 fwd", "dK dV", "dQ", "", folds=("mask", "sm90 fwd", "dK dV", "dQ")
    )
    written = 0
    for module, files in modules:
        changed = write_module(files, out_dir / module.name)
        written += changed
        tiles = (_tiles(module, written) for written in ({"O", "O_ACC"}, {"dK", "dV"}, {"dQ"}))
        dim = head_dim(module.head_dim_qk, module.head_dim_v)
        table.add_row(module.name, module.mask, module.sharing, dim, *tiles, "written" if changed else "same")
    out.print(table)
    print(f"{count(written, 'module')} written to {out_dir}, {len(modules) - written} unchanged")


def _write_one(module: Module, files: dict[str, str], out_dir: Path) -> None:
    """Write a module, and print the kernels that its long calls run on each device class."""
    from attngen.codegen.files import write_module
    from attngen.report.summary import kernels_of_classes

    changed = write_module(files, out_dir / module.name)
    dim = head_dim(module.head_dim_qk, module.head_dim_v)
    table = Rows("GPUs", *module.directions, folds=module.directions)
    for row in kernels_of_classes(module):
        table.add_row(*row)
    out.print(f"{module.name}: {module.mask}, {module.sharing}, head dim {dim}; kernels of long calls, and their tiles")
    out.print(table)
    out.print(f"{out_dir / module.name}: {', '.join(files)} {'written' if changed else 'unchanged'}")
    package = ".".join(out_dir.parts)
    if all(part.isidentifier() for part in out_dir.parts):  # a package below the current folder
        out.print(f"next, in Python, in this folder: from {package}.{module.name} import attention")


def _tiles(module: Module, written: set[str]) -> str:
    """Return the sm90 tiles of the kernels with matmuls that write one of these tensors.

    Tiles of warp-specialized kernels for long calls come last, with their backend.
    """
    launched = [
        kernel for direction in ("forward", "backward") for kernel in module.kernels_of(direction) if kernel.traits.dots
    ]
    have = [k.name for k in launched if written & {a.name for a in k.args if a.role in ("out", "inout")}]
    configs = [next((c for c in reversed(module.configs(name)) if c.device == "sm90"), None) for name in have]
    long = [
        config
        for k in module.kernels
        if k.traits.dots and _writes(k, written)
        for _, config in module.stand_ins(k.name)[-1:]
        if config.device == "sm90"
    ]
    tiles = [
        " ".join(config.tile if config else "none" for config in configs),
        *dict.fromkeys(f"{config.backend} {config.tile}" for config in long),
    ]
    return ", ".join(filter(None, tiles))


def _writes(kernel: Kernel, written: set[str]) -> bool:
    """True if a kernel writes one of these tensors, or sums from which another kernel computes it."""
    return any(
        a.role in ("out", "inout", "sum") and {a.name, a.name.removesuffix("_ACC")} & written for a in kernel.args
    )


def emit(
    ir: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="textual IR of the target phase, such as generated/NAME/schedule.ir",
            show_default=False,
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets the module's folder", show_default=False)],
    verbose: Annotated[bool, typer.Option("--verbose", help="also print the IR if it breaks a rule")] = False,
) -> None:
    """Render a module from only its textual IR.

    Edit tiles, stages or warps there by hand, and get the kernels for them.

    \b
    attngen emit generated/causal_mqa/schedule.ir -o build
    """
    from attngen.certify.certificate import keep
    from attngen.codegen.files import write_module
    from attngen.codegen.render import render

    module = _read(ir, verbose)
    if module.phase != "target":
        raise AttngenError(
            f"{ir}: the IR is in phase `{module.phase}`; expected phase `target`, the last, as in schedule.ir"
        )
    files = keep(module, render(module), out_dir / module.name)
    write_module(files, out_dir / module.name)
    print(out_dir / module.name)


def dump(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC",
            help="a spec's name or file; or IR, such as generated/NAME/schedule.ir",
            show_default=False,
            autocompletion=complete_spec,
            parser=find_spec,
        ),
    ],
    after: Annotated[
        str | None, typer.Option(help="pass to stop after, `build` for the logical IR [default: the last]")
    ] = None,
    graph: Annotated[Path | None, typer.Option(help="write the kernels' graphs to a .dot or .svg file instead")] = None,
    lanes: Annotated[
        Path | None, typer.Option(help="write a timeline of its warp groups to this .svg file instead")
    ] = None,
) -> None:
    """Print the IR after a pass, or draw it.

    --lanes shows the warp-specialized kernel: what each warp group does over time, the stages of pipelines, the wgmmas
    in flight. Durations are assumed. For a file of IR, edited by hand, it shows the edited kernel. A second file, with
    -dark in its name, has the same picture in dark colours.

    \b
    attngen dump causal_mqa                 the final IR
    attngen dump causal_mqa --after build   before the first pass
    attngen dump causal_mqa --after split-loops
    attngen dump causal_mqa --graph a.dot   or .svg, with Graphviz
    attngen dump causal_gqa --lanes a.svg   and a-dark.svg
    """
    from attngen.ir.printer import print_module
    from attngen.spec import load_spec

    if spec.suffix == ".ir" and after is not None:
        raise AttngenError(f"{spec} is IR, on which no pass runs; leave out --after")
    module = _read(spec) if spec.suffix == ".ir" else lower(spec, load_spec(spec), after)
    if graph is None and lanes is None:
        print(print_module(module), end="")
    if graph is not None:
        from attngen.report.graphviz import write_graph

        write_graph(module, graph)
        print(graph)
    if lanes is not None:
        from attngen.report.lanes import write_lanes

        for file in write_lanes(module, lanes):
            print(file)


def _read(ir: Path, verbose: bool = False) -> Module:
    """Return the verified module of a file of IR. verbose: print the IR if it breaks a rule."""
    from attngen.ir.parser import parse_module
    from attngen.verify import verify

    try:
        text = ir.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise AttngenError(f"{ir}: cannot be read as text; expected a schedule.ir") from None
    try:
        return verify(parse_module(text, str(ir)))
    except VerifyError as error:
        if verbose:
            print(error.ir_text, file=sys.stderr)
        raise AttngenError(f"{ir}: {error}") from None
