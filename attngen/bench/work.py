"""Cells of a command, from specs, grids or an older run, and the peers of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attngen.bench.cases.catalog import find_grid
from attngen.bench.cases.grids import Cell, cell, only
from attngen.bench.peers import PEERS
from attngen.bench.results import Results
from attngen.bench.run import Setup, Work
from attngen.errors import AttngenError, shown, suggest
from attngen.spec import load_spec


def select(
    specs: Sequence[Path],
    grids: Sequence[str],
    old: Results | None,
    words: str | None,
    peers: str | None,
    sizes: dict[str, Any],
) -> Work:
    """Return the cells and their peers, those of `old` if nothing else is named; AttngenError if there are none, or the
    arguments conflict.

    sizes: n (text), batch, heads, kv_heads and dtype, for cells of specs.
    """
    if specs and grids:
        raise AttngenError("SPEC and --grid are both given; expected one of them: a grid's file can name specs")
    named = _peers(peers) if peers is not None else None
    work: dict[Cell, tuple[str, ...]] = {}
    if specs:
        rest = {key: sizes[key] for key in ("batch", "heads", "kv_heads", "dtype")}
        rows = _rows(sizes["n"])
        work = {
            cell("specs", load_spec(path), n_q, n_kv, **rest): tuple(PEERS)
            for path in dict.fromkeys(specs)
            for n_q, n_kv in rows
        }
    elif grids:
        for name in dict.fromkeys(grids):
            found = find_grid(name)
            work |= dict.fromkeys(found.cells, _known(found.peers) or tuple(PEERS))
    elif old:
        work = {c: _known(line.peer for line in old.lines if line.cell is c) for c in old.cells()}
    else:
        raise AttngenError(
            "nothing to measure; expected `attngen bench specs/NAME.yaml`, `attngen bench --grid fa3` or --compare FILE"
        )
    _check_names(work)
    chosen = only(list(work), words) if words else list(work)
    return {c: named or work[c] for c in chosen}


def _check_names(cells: Iterable[Cell]) -> None:
    """Raise AttngenError if two specs have one name, by which results and modules are found."""
    known: dict[str, Cell] = {}
    for c in cells:
        if known.setdefault(c.spec.name, c).spec != c.spec:
            raise AttngenError(f"two specs are named `{c.spec.name}`; names must differ")


def _peers(text: str) -> tuple[str, ...]:
    return _known(name.strip() for name in text.split(",") if name.strip()) or tuple(PEERS)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once, in the order of PEERS; AttngenError for an unknown one."""
    given = list(names)
    for name in given:
        if name not in PEERS:
            raise AttngenError(f"`{shown(name)}` is no peer; {suggest(name, PEERS)}")
    return tuple(name for name in PEERS if name in given)


def _rows(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        sides = part.strip().split(":")
        if len(sides) > 2 or not all(side.isdecimal() and 1 <= int(side) <= 2**24 for side in sides):
            raise AttngenError(
                f"--n has `{shown(part)}`; expected rows, as in 1024,4096, or rows of q and of k and v, as in 1:65536"
            )
        found.append((int(sides[0]), int(sides[-1])))
    return found


def listing(work: Work, setup: Setup) -> tuple[list[str], list[list[str]]]:
    """Return a table of cells by peers: `yes`, or why not."""
    names = [name for name in PEERS if any(name in peers for peers in work.values())]
    rows = [
        [str(c), *(("" if name not in peers else setup.cannot(c, name) or "yes") for name in names)]
        for c, peers in work.items()
    ]
    return ["cell", *names], rows
