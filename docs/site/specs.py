"""The page of each spec, and the page of `attngen explain --html` that it links to."""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attngen.cache.collector import paused
from attngen.codegen.signature import signatures
from attngen.cost.roofline import Problem
from attngen.ir.heads import SHARINGS
from attngen.lowering.pipeline import stages
from attngen.report.elements import Sample
from attngen.report.listing import highlight
from attngen.report.mathml import MathML
from attngen.report.page import meaning, page
from attngen.report.tilemap import tile_maps
from attngen.spec import Spec, load_spec
from docs.site.committed import ROOT, spec_files
from docs.site.pages import rendered

SHOWN = ("__init__.py", "kernels.py", "hopper.py")  # of a module's files
Q_HEADS, GROUPS = 16, 4  # of the calls for which pages show numbers, as in `attngen explain`


class SpecPages(NamedTuple):
    """The page of a spec as Markdown, and the output of `attngen explain --html` for it."""

    name: str
    markdown: str
    explained: str


@cache
def started() -> dict[str, Future[SpecPages]]:
    """The pages of all specs by name, which as many processes as there are cores begin to make, the longest first."""
    paths = spec_files()
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"))
    futures = {path.stem: pool.submit(pages_of, path) for path in sorted(paths, key=_length, reverse=True)}
    pool.shutdown(wait=False)
    return {path.stem: futures[path.stem] for path in paths}


def _length(path: Path) -> int:
    return (ROOT / "generated" / path.stem / "schedule.ir").stat().st_size


def pages_of(path: Path) -> SpecPages:
    """Both pages of a spec's file."""
    with paused():
        return make_pages(path, load_spec(path))


def make_pages(path: Path, spec: Spec) -> SpecPages:
    """Both pages of a spec, with the code that is committed for it."""
    text, folder = path.read_text(encoding="utf-8"), ROOT / "generated" / spec.name
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
    steps = list(stages(spec, verify_each=False))  # tests verify the committed specs after each pass
    problem = Problem(q_heads=Q_HEADS, kv_heads=SHARINGS[spec.heads.sharing].kv_heads(Q_HEADS, GROUPS))
    logical, module, sample = steps[0][1], steps[-1][1], Sample(spec)
    about = " ".join(line.lstrip("# ") for line in re.match(r"(?:#.*\n)*", text)[0].splitlines())  # type: ignore[index]
    markdown = rendered(
        "spec.md.jinja",
        name=spec.name,
        about=about,
        module=module,
        text=text,
        meant=meaning(logical, module, MathML())[0],
        pictures=sample.pictures,
        maps=tile_maps(sample, module, problem),
        signatures=list(signatures(files["__init__.py"])),
        code=[(name, highlight(files[name], "py")) for name in SHOWN if name in files],
    )
    return SpecPages(spec.name, markdown, page(spec, text, steps, files, problem))
