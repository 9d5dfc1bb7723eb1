"""Shared by commands: arguments that name specs, reading specs, and compiling many of them in several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from glob import escape, glob
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from attngen.cli.console import progress
from attngen.errors import AttngenError, SpecError
from attngen.specs import SPECS, find_spec, known_specs, own_specs

if TYPE_CHECKING:
    from attngen.ir.module import Module
    from attngen.spec import Spec


def complete_spec(incomplete: str) -> list[str]:
    """Return shell completions of a spec: the matching files of specs/; if there are none, the matching names of specs;
    if there are none, folders and other *.yaml files."""
    if found := [str(path) for path in own_specs().values() if str(path).startswith(incomplete)]:
        return found
    if found := [name for name in known_specs() if name.startswith(incomplete)]:
        return found
    paths = [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob(f"{escape(incomplete)}*"))]
    return [path for path in paths if path.endswith(("/", ".yaml"))]


GENERATED = Path("generated")


def _argument(about: str) -> Any:
    """Return an argument whose values are names or files of specs."""
    return typer.Argument(
        metavar="SPEC", help=about, show_default=False, autocompletion=complete_spec, parser=find_spec
    )


SpecPath = Annotated[Path, _argument("a spec's name or file, such as causal_mqa or specs/causal_mqa.yaml")]
SpecPaths = Annotated[list[Path] | None, _argument("names or files of specs")]
Every = Annotated[bool, typer.Option("--all", help="every spec in specs/")]
FEW = 4  # number of specs that one process compiles in the time in which another one starts
T = TypeVar("T")


def given(specs: list[Path] | None, every: bool, command: str) -> list[Path]:
    """Return the files that a command names, each once. Raise typer.BadParameter if there are none."""
    paths = list(dict.fromkeys([*(specs or []), *(all_specs() if every else [])]))
    if not paths:
        expected = f"expected `attngen {command} specs/NAME.yaml` or `attngen {command} --all`"
        raise typer.BadParameter(f"none given; {expected}", param_hint="SPEC")
    return paths


def all_specs() -> list[Path]:
    """Return all files of specs/. Raise SpecError if there are none."""
    found = list(own_specs().values())
    if not found:
        raise SpecError(
            f"no *.yaml in {SPECS}/; run attngen in the folder that holds {SPECS}/, or write one with "
            "`attngen new NAME`"
        )
    return found


def read_specs(paths: Sequence[Path]) -> tuple[list[tuple[Path, Spec]], list[str]]:
    """Return the specs of files, and the errors of invalid files."""
    from attngen.spec import load_spec

    loaded, wrong = [], []
    for path in paths:
        try:
            loaded.append((path, load_spec(path)))
        except SpecError as error:
            wrong.append(str(error))
    return loaded, wrong


def load_specs(paths: Sequence[Path]) -> list[tuple[Path, Spec]]:
    """Return the specs of files. Raise SpecError, with all errors, if a file is invalid."""
    loaded, wrong = read_specs(paths)
    if wrong:
        raise SpecError("\n".join(wrong))
    return loaded


def make_each(
    make: Callable[..., T], loaded: Sequence[tuple[Path, Spec]], *args: object, workers: int | None = None
) -> tuple[list[T], list[str]]:
    """Return the results of `make(path, spec, *args)` for each spec, and the errors of the others. Many specs are split
    among as many processes as there are cores."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    workers = min(workers or len(os.sched_getaffinity(0)), len(loaded) // FEW)
    made: list[T] = []
    wrong: list[str] = []
    with progress("compiling", len(loaded)) as watch, ExitStack() as stack:
        each: Callable[..., Iterator[T | AttngenError]] = map
        if workers > 1:
            each = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        found = each(_attempt, repeat(make), *zip(*loaded), *map(repeat, args)) if loaded else iter(())
        for path, _ in loaded:
            watch.show(str(path))
            one = next(found)
            watch.done()
            if isinstance(one, AttngenError):
                wrong.append(str(one))
            else:
                made.append(one)
    return made, wrong


def _attempt(make: Callable[..., T], *args: object) -> T | AttngenError:
    """Return the result of `make`, or the error that it raises."""
    try:
        return make(*args)
    except AttngenError as error:
        return AttngenError(str(error))  # subclasses may not survive pickling between processes


def make_module(path: Path, spec: Spec, out_dir: Path) -> tuple[Module, dict[str, str]]:
    """Return the module of a spec and its files, with the compile reports that `out_dir` has of them."""
    from attngen.certify.certificate import keep
    from attngen.codegen.render import render

    module = lower(path, spec)
    return module, keep(module, render(module), out_dir / module.name)


def lower(path: Path, spec: Spec, after: str | None = None) -> Module:
    """Return the module of a spec that was read from `path`, which errors name."""
    from attngen.lowering.pipeline import lower as lowered
    from attngen.spec import naming

    with naming(path):
        return lowered(spec, after)
