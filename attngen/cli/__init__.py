"""The command line: one file for each group of commands.

Commands import heavy libraries inside their functions, so that the command line starts fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from attngen import __version__
from attngen.cli.bench import DETAILS as BENCH
from attngen.cli.bench import bench
from attngen.cli.build import build, dump, emit
from attngen.cli.console import fail, out
from attngen.cli.conventions import Command, Group, conventional
from attngen.cli.explain import DETAILS as EXPLAIN
from attngen.cli.explain import explain
from attngen.cli.machine import cache, doctor
from attngen.cli.models import specs_for
from attngen.cli.profile import profile
from attngen.cli.specs import list_specs, new, schema
from attngen.cli.testing import test
from attngen.cli.tune import tune
from attngen.cli.verify import verify
from attngen.errors import AttngenError

UNLIMITED = 10_000  # columns of output that does not go to a terminal
GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "Write a spec": {"new": new, "list": list_specs, "schema": schema, "specs-for": specs_for},
    "Build and check": {"build": build, "test": test, "verify": verify},
    "Look inside": {"explain": explain, "dump": dump, "emit": emit},
    "Measure on a GPU": {"bench": bench, "tune": tune, "profile": profile},
    "This machine": {"doctor": doctor, "cache": cache},
}
EPILOGS = {"bench": BENCH, "explain": EXPLAIN}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
app = typer.Typer(
    help="Compile declarative attention specs (YAML) into Triton kernels, forward and backward.\n\n"
    "\b\n"
    "attngen new my_attention                  a spec to start from\n"
    "attngen build my_attention                compile it to generated/my_attention/\n"
    "attngen test my_attention                 compare it with naive attention\n"
    "attngen explain my_attention              fit, least time, which kernels\n\n"
    "Then, in Python: from generated.my_attention import attention; in notebooks, attngen.build",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _group, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        _below = EPILOGS.get(_name)
        app.command(_name, cls=Command, rich_help_panel=_group, epilog=_below)(conventional(_command))


def _version(value: bool) -> None:
    if value:
        print(f"attngen {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if not out.is_terminal:
        out.width = UNLIMITED


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. An error that attngen raises on purpose is printed as a line on stderr, with exit code 1; usage
    errors exit with 2."""
    try:
        app(args, prog_name="attngen")
    except AttngenError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
