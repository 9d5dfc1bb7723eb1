"""What commands share: arguments that name specs, reading them, and compiling many of them in several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from glob import escape, glob
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from attngen.cli.console import err
from attngen.errors import AttngenError, SpecError

if TYPE_CHECKING:
    from attngen.ir.graph import Module
    from attngen.spec import Spec


def complete_spec(incomplete: str) -> list[str]:
    """What a shell may complete a spec's file to: the files of specs/ that start so; without any, folders and other
    *.yaml files."""
    if found := [str(path) for path in sorted(SPECS.glob("*.yaml")) if str(path).startswith(incomplete)]:
        return found
    paths = [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob(f"{escape(incomplete)}*"))]
    return [path for path in paths if path.endswith(("/", ".yaml"))]


SPECS, GENERATED = Path("specs"), Path("generated")
_FILE = typer.Argument(
    metavar="SPEC", help="a spec file, as in specs/causal_mqa.yaml", show_default=False, autocompletion=complete_spec
)
_FILES = typer.Argument(metavar="SPECS", help="spec files", show_default=False, autocompletion=complete_spec)
SpecPath = Annotated[Path, _FILE]
SpecPaths = Annotated[list[Path] | None, _FILES]
Every = Annotated[bool, typer.Option("--all", help="every spec in specs/")]
FEW = 4  # specs that one process compiles sooner than another would start
T = TypeVar("T")


def given(specs: list[Path] | None, every: bool, command: str) -> list[Path]:
    """The files that a command names, each once; typer.BadParameter if there are none."""
    paths = list(dict.fromkeys([*(specs or []), *(all_specs() if every else [])]))
    if not paths:
        expected = f"expected `attngen {command} specs/NAME.yaml` or `attngen {command} --all`"
        raise typer.BadParameter(f"none given; {expected}", param_hint="SPECS")
    return paths


def all_specs() -> list[Path]:
    """Every file of specs/; SpecError if there is none."""
    found = sorted(SPECS.glob("*.yaml"))
    if not found:
        raise SpecError(
            f"no *.yaml in {SPECS}/; run attngen in the folder that holds {SPECS}/, or write one with `attngen new NAME`"
        )
    return found


def read_specs(paths: Sequence[Path]) -> tuple[list[tuple[Path, Spec]], list[str]]:
    """The specs of files, and what is wrong with the files that hold none."""
    from attngen.spec import load_spec

    loaded, wrong = [], []
    for path in paths:
        try:
            loaded.append((path, load_spec(path)))
        except SpecError as error:
            wrong.append(str(error))
    return loaded, wrong


def load_specs(paths: Sequence[Path]) -> list[tuple[Path, Spec]]:
    """The specs of files; SpecError, with what is wrong with every one of them, if one holds none."""
    loaded, wrong = read_specs(paths)
    if wrong:
        raise SpecError("\n".join(wrong))
    return loaded


def make_each(
    make: Callable[..., T], loaded: Sequence[tuple[Path, Spec]], *args: object, workers: int | None = None
) -> tuple[list[T], list[str]]:
    """`make(path, spec, *args)` of each spec, and what is wrong with the others; many are made by as many processes
    as cores."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    workers = min(workers or len(os.sched_getaffinity(0)), len(loaded) // FEW)
    made: list[T] = []
    wrong: list[str] = []
    with err.status("compiling") as status, ExitStack() as stack:
        each: Callable[..., Iterator[T | AttngenError]] = map
        if workers > 1:
            each = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        found = each(_attempt, repeat(make), *zip(*loaded), *map(repeat, args)) if loaded else iter(())
        for path, _ in loaded:
            status.update(f"compiling {path}")
            one = next(found)
            if isinstance(one, AttngenError):
                wrong.append(str(one))
            else:
                made.append(one)
    return made, wrong


def _attempt(make: Callable[..., T], *args: object) -> T | AttngenError:
    """What `make` gives, or the error that it raises."""
    try:
        return make(*args)
    except AttngenError as error:
        return AttngenError(str(error))  # which goes from one process to another


def make_module(path: Path, spec: Spec, out_dir: Path) -> tuple[Module, dict[str, str]]:
    """The module of a spec and its files, with the readings that `out_dir` has of them."""
    from attngen.certify.certificate import keep
    from attngen.codegen.render import render

    module = lower(path, spec)
    return module, keep(module, render(module), out_dir / module.name)


def lower(path: Path, spec: Spec, after: str | None = None) -> Module:
    """The module of a spec that was read from a file, which errors name."""
    from attngen.lowering.pipeline import lower as lowered
    from attngen.spec import naming

    with naming(path):
        return lowered(spec, after)
