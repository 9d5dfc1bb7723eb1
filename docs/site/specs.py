"""The page of each spec, and the page of `attngen explain --html` that it links to."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attngen.cache.collector import paused
from attngen.cost.roofline import Problem
from attngen.ir.heads import SHARINGS
from attngen.lowering.pipeline import stages
from attngen.report.page import explained, printed
from attngen.spec import Spec, load_spec
from docs.site.committed import ROOT, spec_files
from docs.site.pages import rendered

STYLE_SHEET = "../assets/explain.css"  # of the pages of `attngen explain`, from one of them
Q_HEADS, GROUPS = 16, 4  # of the calls for which pages show numbers, as in `attngen explain`


class SpecPages(NamedTuple):
    """The page of a spec as Markdown, and the page of `attngen explain --html` for it, without style and code."""

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
    found = explained(spec, text, steps, files, problem)
    markdown = rendered("spec.md.jinja", name=spec.name, **found)
    return SpecPages(spec.name, markdown, printed(found, STYLE_SHEET, f"../specs/{spec.name}/#generated-code"))
