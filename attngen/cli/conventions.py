"""What all commands have in common: their metavars, short options, and the layout of their help.

Typer's versions print metavars and arguments differently, so both are set here from the types of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

METAVARS: dict[Any, str] = {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "FILE"}
COLUMN = 26  # widest first column of help; a longer name has a line of its own
FOLDERS = "_dir"  # how parameters that name a folder end
SHORT = {  # the short form of an option, the same in all commands
    "--all": "-a",
    "--batch": "-b",
    "--device": "-d",
    "--grid": "-g",
    "--jobs": "-j",
    "--n": "-n",
    "--seq": "-n",
    "--out": "-o",
    "--peers": "-p",
    "--seed": "-s",
    "--target": "-t",
    "--verbose": "-v",
    "--write": "-w",
}
Function = TypeVar("Function", bound=Callable[..., Any])


def choice(words: Sequence[str], *names: str, **more: Any) -> Any:
    """Return an option whose values are these words, which are its metavar; case does not matter.

    names, more: arguments of typer.Option.
    """

    def chosen(given: str) -> str:
        found = next((word for word in words if word.lower() == given.lower()), None)
        if found is None:
            raise typer.BadParameter(f"`{given}`; expected {', '.join(words[:-1])} or {words[-1]}")
        return found

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.lower().startswith(incomplete.lower())]

    return typer.Option(*names, metavar=f"[{'|'.join(words)}]", parser=chosen, autocompletion=complete, **more)


def conventional(command: Function) -> Function:
    """Give each option of a command its short form, and a metavar for its type if it has none."""
    annotations = {name: p.annotation for name, p in inspect.signature(command, eval_str=True).parameters.items()}
    command.__annotations__ |= annotations  # evaluated once, as each evaluation makes new options
    for name, annotation in annotations.items():
        if get_origin(annotation) is not Annotated:
            continue
        kind, *infos = get_args(annotation)
        for info in infos:
            if isinstance(info, OptionInfo):
                info.metavar = info.metavar or _metavar(name, kind)
                _shorten(info, name)
    return command


def _metavar(name: str, kind: Any) -> str | None:
    """Return the metavar of a parameter of a type, such as `int | None` or `list[str]`; None for flags."""
    if name.endswith(FOLDERS):
        return "DIR"
    inner = [kind, *get_args(kind), *(part for one in get_args(kind) for part in get_args(one))]
    return next((METAVARS[part] for part in inner if part in METAVARS), None)


def _shorten(info: OptionInfo, name: str) -> None:
    """Add the short form to the names of an option. In Annotated, typer has the first of these names in `default`."""
    named = [info.default] if isinstance(info.default, str) else []
    names = [*named, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]
    names += [SHORT[long] for long in names if long in SHORT and SHORT[long] not in names]
    info.default, info.param_decls = names[0], tuple(names[1:])


def _sections(records: Iterable[tuple[str, tuple[str, str]]], formatter: Any) -> None:
    """Write rows of help under their headings, in the order in which these first occur. All have the same columns."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, row in records:
        sections.setdefault(title, []).append(row)
    width = min(COLUMN, max((len(name) for rows in sections.values() for name, _ in rows), default=0))
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl([(name.ljust(width), says) for name, says in rows])


class Command(TyperCommand):
    """A command whose help has options under the headings of their `rich_help_panel`, as plain text."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_usage(param) for param in self.get_params(ctx) if _is_argument(param))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _sections(self._records(ctx), formatter)

    def _records(self, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if _is_argument(param):
                yield "Arguments", (_name(param), record[1])
            else:
                yield getattr(param, "rich_help_panel", None) or "Options", record


class Group(TyperGroup):
    """The group of all commands, whose help has them under the headings of their `rich_help_panel`, before its
    options."""

    command_class = Command

    def format_options(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        _sections(
            (
                (getattr(command, "rich_help_panel", None) or "Commands", (name, command.get_short_help_str(limit)))
                for name, command in self.commands.items()
            ),
            formatter,
        )
        records = (param.get_help_record(ctx) for param in self.get_params(ctx))
        _sections((("Options", record) for record in records if record is not None), formatter)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _name(param: Any) -> str:
    """Return the name of an argument in help, with dots if it may have several values."""
    return (param.metavar or param.name.upper()) + "..." * (param.nargs != 1)


def _usage(param: Any) -> str:
    return _name(param) if param.required else f"[{_name(param)}]"
