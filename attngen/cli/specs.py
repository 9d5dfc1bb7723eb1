"""Commands about specs: list them, write a new one, print their JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

from attngen.cli.common import SPECS, all_specs, read_specs
from attngen.cli.console import head_dim, new_table, out
from attngen.errors import AttngenError, SpecError


def list_specs() -> None:
    """List the specs in specs/, masks and score modifiers.

    \b
    attngen list
    """
    from attngen.masks import registry
    from attngen.scores import score_registry

    loaded, wrong = read_specs(all_specs())
    table = new_table("spec", "mask", "score", "heads", "dim", "dtype", folds="mask")
    for path, spec in loaded:
        dim, score = head_dim(spec.head_dim.qk, spec.head_dim.v), ", ".join(s.describe() for s in spec.score)
        table.add_row(str(path), spec.mask.describe(), score, spec.heads.sharing, dim, ",".join(spec.dtype))
    out.print(table)
    _print_parts("mask", registry())
    _print_parts("score modifier", score_registry())
    if wrong:
        raise SpecError("\n".join(wrong))


def _print_parts(heading: str, known: Mapping[str, type]) -> None:
    """Print a table of masks or modifiers: their names, and the first line of their docstrings."""
    table = new_table(heading, "")
    for name, part in known.items():
        table.add_row(name, (part.__doc__ or "").splitlines()[0])
    out.print()
    out.print(table)


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
    except FileExistsError:
        raise AttngenError(f"{path} exists already; choose another name") from None
    print(f"{path}\nnext: attngen build {path}")


def schema() -> None:
    """Print the JSON schema of a spec, for editors and validators.

    \b
    attngen schema > attngen.schema.json
    """
    from attngen.spec import json_schema

    print(json.dumps(json_schema(), indent=2))
