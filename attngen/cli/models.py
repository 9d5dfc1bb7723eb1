"""Commands for models of other libraries: `specs-for`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attngen.cli.console import Watch, count, progress
from attngen.cli.conventions import choice
from attngen.ir.dtypes import ELEMENTS

Use = choice(("training", "serving", "both"), "--for", help="what the specs are for")
Dtype = choice(list(ELEMENTS), help="element type [default: the configuration's]")


def specs_for(
    config: Annotated[Path, typer.Argument(help="a config.json of Hugging Face's transformers", show_default=False)],
    out_dir: Annotated[Path, typer.Option("--out", help="folder that gets the specs")] = Path("specs"),
    use: Annotated[str, Use] = "both",
    dtype: Annotated[str | None, Dtype] = None,
) -> None:
    """Write the specs of a model's attention layers.

    The model is made without weights, and runs once. `attngen build` compiles the specs, and
    attngen.integrations.transformers.register("generated") has models use them.

    \b
    attngen specs-for config.json                 writes specs/layer_*.yaml
    attngen specs-for config.json --for serving   only decoding with a KV cache
    """
    with progress("reading") as watch:
        watch.show("importing transformers")
        specs = _read(config, use, dtype, watch)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, text in specs.items():
        (out_dir / f"{name}.yaml").write_text(text, encoding="utf-8")
    print(f"{out_dir} has {count(len(specs), 'spec')}: {', '.join(specs)}")


def _read(config: Path, use: str, dtype: str | None, watch: Watch) -> dict[str, str]:
    """Return the specs of a model by their names."""
    import torch

    from attngen.integrations.transformers.ahead import USES
    from attngen.integrations.transformers.ahead import specs_for as found

    given = getattr(torch, ELEMENTS[dtype].torch) if dtype else None
    return found(config, USES if use == "both" else (use,), given, watch.at)
