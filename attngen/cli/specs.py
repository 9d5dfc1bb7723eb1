"""Commands about specs: list them, write a new one, print their JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli.common import complete_spec, read_specs
from attngen.cli.console import head_dim, out
from attngen.errors import AttngenError, SpecError
from attngen.report.tables import Rows
from attngen.specs import SPECS, find_spec, own_specs, shipped_specs

if TYPE_CHECKING:
    from attngen.spec import Spec


Json = typer.Option("--json", help="print them as JSON")


def list_specs(as_json: Annotated[bool, Json] = False) -> None:
    """List the specs in specs/, masks and score modifiers. Without specs/, list the specs that attngen ships.

    Keys of --json: specs (file, name, mask, score, heads, head_dim, dtypes), masks and scores (name, about).

    \b
    attngen list
    attngen list --json
    """
    from attngen.masks import registry
    from attngen.scores import score_registry

    own = own_specs()
    loaded, wrong = read_specs(list((own or shipped_specs()).values()))
    if as_json:
        parts = {"masks": _parts(registry()), "scores": _parts(score_registry())}
        print(json.dumps({"specs": [_described(path, spec) for path, spec in loaded], **parts}, indent=2))
    else:
        _print_specs(f"{SPECS}/*.yaml" if own else "shipped spec", loaded)
        _print_parts("mask", registry())
        _print_parts("score modifier", score_registry())
    if wrong:
        raise SpecError("\n".join(wrong))


def _described(path: Path, spec: Spec) -> dict[str, Any]:
    """Return a spec as data for JSON."""
    return {
        "file": str(path),
        "name": spec.name,
        "mask": spec.mask.describe(),
        "score": [s.describe() for s in spec.score],
        "heads": spec.heads.sharing,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "dtypes": list(spec.dtype),
    }


def _print_specs(heading: str, loaded: Sequence[tuple[Path, Spec]]) -> None:
    """Print a table of specs."""
    table = Rows(heading, "mask + score", "heads", "dim", "dtype", folds=("mask + score",))
    for path, spec in loaded:
        dim = head_dim(spec.head_dim.qk, spec.head_dim.v)
        parts = " + ".join(part.describe() for part in (spec.mask, *spec.score))
        table.add_row(path.stem, parts, spec.heads.sharing, dim, ",".join(spec.dtype))
    out.print(table)


def _parts(known: Mapping[str, type]) -> list[dict[str, str]]:
    """Return masks or modifiers as data: their names, and the first sentence of their docstrings."""
    return [{"name": name, "about": _first_sentence(part.__doc__ or "")} for name, part in known.items()]


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring. A full stop ends it before a capital letter: not in `et al. 2020`."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0]


def _print_parts(heading: str, known: Mapping[str, type]) -> None:
    """Print a table of masks or modifiers."""
    table = Rows(heading, "", folds=("",))
    for part in _parts(known):
        table.add_row(part["name"], part["about"])
    out.print()
    out.print(table)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new spec", show_default=False)],
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC",
            help="copy this spec: its name, such as causal_gqa, or its file",
            autocompletion=complete_spec,
            parser=find_spec,
        ),
    ] = None,
) -> None:
    """Write specs/NAME.yaml: a commented spec, or a copy of another.

    \b
    attngen new my_attention
    attngen new my_attention --like window_gqa   a copy of a shipped spec
    attngen build my_attention
    """
    from attngen.spec import make_spec, starter

    make_spec({"name": name, "head_dim": 64}, "attngen new")
    text = starter(name) if like is None else renamed(like, name)
    path = SPECS / f"{name}.yaml"
    SPECS.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise AttngenError(f"{path} exists already; choose another name") from None
    print(f"{path}\nnext: attngen build {path}")


def renamed(like: Path, name: str) -> str:
    """Return the text of a spec, with its comments, under another name."""
    from attngen.spec import load_spec, parse_spec

    own = load_spec(like).name
    text, changed = re.subn(
        rf"^(name: *)(['\"]?){own}\2(?=\s|$)", rf"\g<1>{name}", like.read_text("utf-8-sig"), flags=re.MULTILINE
    )
    if changed != 1 or parse_spec(text, str(like)).name != name:
        raise SpecError(f"{like}: its name cannot be replaced; expected a line `name: {own}`")
    return text


def schema() -> None:
    """Print the JSON schema of a spec, for editors and validators.

    \b
    attngen schema > attngen.schema.json
    """
    from attngen.spec import json_schema

    print(json.dumps(json_schema(), indent=2))
