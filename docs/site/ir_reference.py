"""The reference of the IR: its structures, ops, passes and rules, from their docstrings.

python -m docs.site.ir_reference                    # the whole page
python -m docs.site.ir_reference wgmma ping-pong    # the entries of these ops, passes, rules and structures
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from attngen.builders import build_module
from attngen.errors import suggest
from attngen.ir import Access, Block, Host, Op, Type, WarpGroup, gl, launch, pipe, tile
from attngen.ir.grid import GridAxis, KVSplit
from attngen.ir.kernel import Kernel
from attngen.ir.module import Blocks, Cache, Config, Derived, Input, InputGradient, Meaning, Module, Read
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel
from attngen.lowering.pipeline import passes
from attngen.spec import make_spec
from attngen.targets.registry import SPECIALIZERS
from attngen.verify import rules, warp_specialized_rules
from attngen.verify.host import RULES as HOST_RULES
from attngen.verify.statements import RULES as STATEMENT_RULES
from docs.site.committed import ROOT
from docs.site.pages import rendered

STRUCTURES: dict[str, tuple[type, ...]] = {
    "The module and its header": (Module, Input, Derived, InputGradient, Read, Meaning, Blocks, Cache),
    "Kernels and host programs": (Kernel, GridAxis, KVSplit, Host, Block, WarpGroup),
    "Types and accesses": (Type, Access),
    "Schedules": (Config,),
}
OPS_BY_LEVEL: dict[str, Mapping[str, type[Op]]] = {
    "Ops of kernels": tile.TILE.own,
    "Ops of warp-specialized kernels": pipe.PIPE.own,
    "Ops of lowered kernels": gl.GL.own,
    "Ops of host programs": launch.HOST.own,
}
OF_WARP_SPECIALIZED, OF_LOWERED, OF_HOST = "warp-specialized kernels", "lowered kernels", "host programs"
LOWERED = ("causal_gqa", "causal_mqa", "mla_dims", "decode_mla")  # the modules with examples of their ops
FIRST_EXAMPLE = "causal_gqa"  # the module in which examples of ops are looked for first


class Entry(NamedTuple):
    """An entry of the page: its name, the file that defines it, its fields, an example and its docstring as
    Markdown."""

    name: str
    file: str
    says: str
    fields: str = ""
    example: str = ""
    phase: str = ""


def ir_page() -> str:
    """The page of the reference."""
    return rendered(
        "ir.md.jinja", structures=structures(), levels=ops(), passes=pass_entries(), rules=rule_entries()
    ).replace("\n\n\n", "\n\n")


def structures() -> dict[str, list[Entry]]:
    """The parts of a module that are no ops, by the heading under which they stand."""
    return {
        title: [Entry(cls.__name__, _file(cls), markdown(_doc(cls), cls), _fields(cls)) for cls in classes]
        for title, classes in STRUCTURES.items()
    }


def ops() -> dict[str, list[Entry]]:
    """The ops by level, each with the first line that prints it in a generated module."""
    return {
        title: [
            Entry(kind, _file(cls), markdown(_doc(cls), cls), _fields(cls), _examples().get(kind, ""))
            for kind, cls in found.items()
        ]
        for title, found in OPS_BY_LEVEL.items()
    }


def pass_entries() -> list[Entry]:
    """The passes in order. The docstring of a pass is that of its module, whose first words are the pass's name."""
    spec = make_spec({"name": "example", "head_dim": 64, "mask": "causal"})
    return [
        Entry(p.name, _file(type(p)), markdown(_after_name(_of_module(type(p)))), phase=p.phase)
        for p in (*passes(spec, build_module(spec)), *SPECIALIZERS["hopper"].lowering)
    ]


def rule_entries() -> dict[str, list[Entry]]:
    """The rules by the phase from which on they hold; then those of warp-specialized kernels, of lowered ones, and of
    host programs."""
    by_phase: dict[str, list[Entry]] = {}
    listed: set[str] = set()
    for phase, found in rules("triton").items():
        by_phase[phase] = [_rule(name, rule) for name, rule in found.items() if name not in listed]
        listed |= set(found)
    by_phase[OF_WARP_SPECIALIZED] = [_rule(name, rule) for name, rule in warp_specialized_rules("hopper").items()]
    by_phase[OF_LOWERED] = [_rule(name, rule) for name, rule in STATEMENT_RULES.items()]
    by_phase[OF_HOST] = [_rule(name, rule) for name, rule in HOST_RULES.items()]
    return by_phase


def _after_name(doc: str) -> str:
    """A docstring without its first word, a name and a colon."""
    text = doc.partition(": ")[2]
    return text[:1].upper() + text[1:]


def _rule(name: str, rule: Callable[..., Any]) -> Entry:
    return Entry(name, _file(rule), markdown(_doc(rule)))


def _file(thing: Any) -> str:
    return Path(inspect.getfile(thing)).relative_to(ROOT).as_posix()


def _doc(thing: Any) -> str:
    """The docstring that a class or function itself has."""
    return (
        inspect.cleandoc(vars(thing).get("__doc__") or "") if isinstance(thing, type) else inspect.getdoc(thing) or ""
    )


def _of_module(cls: type) -> str:
    return inspect.cleandoc(inspect.getmodule(cls).__doc__ or "")


def _fields(cls: type) -> str:
    """The fields of a dataclass; operands have a percent sign, as values do in text."""
    operands = [name for name, _ in cls.declared.operands] if issubclass(cls, Op) else []
    named = (f for f in fields(cls) if f.name != "name" or not issubclass(cls, Op))
    return ", ".join(_field(f, f.name in operands) for f in named)


def _field(f: Field[Any], operand: bool) -> str:
    name = f"%{f.name}" if operand else f.name
    optional = f.default is not MISSING or f.default_factory is not MISSING
    return f"[{name}]" if optional else name


@cache
def _examples() -> dict[str, str]:
    """For each kind of op the first line that prints it, in the module FIRST_EXAMPLE or else in another one.

    Lines of a loop's prologue and epilogue, whose values end in `_in_first` and `_in_last`, come last.
    """
    folders = sorted((ROOT / "generated").iterdir(), key=lambda folder: (folder.name != FIRST_EXAMPLE, folder.name))
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    texts = [(folder / "schedule.ir").read_text(encoding="utf-8").partition("\nhost @")[2] for folder in folders]
    for text in (*texts, *map(_lowered, LOWERED)):
        for kind, line in _printed_ops(text):
            (others if "_in_" in line else found).setdefault(kind, line)
    return others | found


def _lowered(name: str) -> str:
    """The kernels of a module in the form in which they are printed."""
    module = parse_module((ROOT / "generated" / name / "schedule.ir").read_text(encoding="utf-8"))
    for step in SPECIALIZERS["hopper"].lowering:
        module = step.run(module)
    return "\n".join(map(print_kernel, module.warp_specialized))


def _printed_ops(text: str) -> Iterator[tuple[str, str]]:
    """(kind, line) for each op of a module's text."""
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        kind = line.partition(" = ")[2] if line.startswith("%") else line
        yield kind.partition(" ")[0], line


# ---------------------------------------------------------------------------------------------- docstrings


def markdown(doc: str, cls: type | None = None) -> str:
    """A docstring as Markdown: IR and formulas set off by indentation become blocks of text; a line that starts with
    the name of a field of `cls` and a colon becomes an item of a list."""
    names = {f.name for f in fields(cls)} if cls else set()
    return "\n\n".join(part for paragraph in doc.split("\n\n") for part in _paragraph(paragraph, names))


def _paragraph(text: str, names: set[str]) -> Iterator[str]:
    lines = text.splitlines()
    if any(re.match(r"before:|after:| {2,}(?!- )\S", line) for line in lines[:2]) and not text.startswith("- "):
        yield f"```text\n{text}\n```"
        return
    start = next((i for i, line in enumerate(lines) if _starts_field(line, names)), len(lines))
    if plain := "\n".join(lines[:start]):
        yield _escaped(plain)
    items: list[str] = []
    for line in lines[start:]:
        if _starts_field(line, names):
            name, _, rest = line.partition(":")
            items.append(f"- `{name.strip()}`:{_escaped(rest)}")
        else:
            items[-1] += f" {_escaped(line.strip())}"
    if items:
        yield "\n".join(items)


def _starts_field(line: str, names: set[str]) -> bool:
    found = re.match(r"\s*([\w, ]+): ", line)
    return bool(found) and set(re.split(r",\s*|\s+and\s+", found[1].strip())) <= names  # type: ignore[index]


def _escaped(text: str) -> str:
    """Text whose asterisks and angle brackets, outside of backticks, are themselves."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else escape(p, quote=False).replace("*", r"\*") for p in pieces)


# ---------------------------------------------------------------------------------------------- the command


def all_entries() -> Iterator[tuple[str, Entry]]:
    """(heading of its part, entry) for each entry of the page."""
    parts = {**structures(), **ops(), "Passes": pass_entries()}
    parts |= {f"Rules: {phase}": found for phase, found in rule_entries().items()}
    for title, found in parts.items():
        yield from ((title, entry) for entry in found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ops, passes, rules or structures [the whole page]")
    args = parser.parse_args(argv)
    if not args.names:
        print(ir_page())
        return 0
    entries = list(all_entries())
    for name in args.names:
        found = [(title, entry) for title, entry in entries if entry.name == name]
        if not found:
            print(f"`{name}` is not in the reference; {suggest(name, [e.name for _, e in entries])}", file=sys.stderr)
            return 1
        for title, entry in found:
            print("\n".join(filter(None, (f"{name} ({title}, {entry.file})", entry.example, entry.fields))))
            print(f"\n{entry.says}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
