"""The committed pictures of the docs that are drawn from committed data, each in a light and a dark form.

`python -m docs.site.pictures` lists those that differ from their data, and `--write` draws them again. Their bytes
depend on the version of matplotlib, which requirements-dev.txt pins; those of README's picture do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

from attngen.bench import profile_plot
from attngen.bench.plots import plots
from attngen.bench.profile_results import read
from attngen.bench.results import read_results
from attngen.codegen.files import write_file
from docs.site.committed import ROOT
from docs.site.readme import pictures

DOCS = ROOT / "docs"


def _bench(data: str) -> dict[str, str]:
    return {f"bench/{name}": svg for name, svg in plots(read_results(DOCS / data)).items()}


def _profile(data: str) -> dict[str, str]:
    found = read((DOCS / data).read_text(encoding="utf-8"))
    return {f"io/{name}": svg for name, svg in profile_plot.plot(found).items()}


def _training(data: str) -> dict[str, str]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        page = import_module("lm_page")
    finally:
        sys.path.remove(str(ROOT / "examples"))
    found: dict[str, str] = page.plots(json.loads((DOCS / data).read_text(encoding="utf-8")), "lm-training")
    return found


# Files with data, and the function that draws the pictures of each: their texts by their paths below docs/.
SOURCES: dict[str, Callable[[], dict[str, str]]] = {
    "bench/readme.json": pictures,
    **{
        data: partial(draw, data)
        for data, draw in (
            ("bench/h200.json", _bench),
            ("bench/h200-paper.json", _bench),
            ("bench/h200-decode.json", _bench),
            ("io/profile.json", _profile),
            ("lm-training.json", _training),
        )
    },
}


def changed(source: str) -> dict[str, str]:
    """Return the pictures of a file with data that are not committed as drawn, by their paths below docs/."""
    return {
        name: svg
        for name, svg in SOURCES[source]().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != svg
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pictures that differ")
    args = parser.parse_args(argv)
    found = {name: svg for source in SOURCES for name, svg in changed(source).items()}
    for name, svg in found.items():
        print(f"{'wrote' if args.write else 'differs:'} docs/{name}")
        if args.write:
            write_file(DOCS / name, svg)
    return int(bool(found) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
