"""The command `profile`: bytes that kernels move, measured by Nsight Compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import SpecPath
from attngen.cli.console import err, out
from attngen.cli.conventions import choice
from attngen.errors import AttngenError
from attngen.ir.names import DIRECTIONS
from attngen.report.tables import Rows

if TYPE_CHECKING:
    from attngen.bench.profile_results import Found


def profile(
    spec: SpecPath,
    seq: Annotated[str, typer.Option(help="lengths, queries and keys")] = "4096,8192",
    tiles: Annotated[
        str, typer.Option(help="rows of the tiles kept on chip; `none`: only the tiles of the built spec")
    ] = "16,32,64,128",
    direction: Annotated[str, choice((*DIRECTIONS, "both"), help="kernels to measure")] = "both",
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="sequences")] = 8,
    heads: Annotated[int, typer.Option(min=1, max=2**16, help="query heads")] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="seconds that ncu may take")] = 600,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="folder that gets profile.csv, profile.json and plots")
    ] = None,
) -> None:
    """Compare the bytes that kernels move with the prediction.

    On a machine with CUDA and ncu (NVIDIA Nsight Compute): bytes of device memory, and loads and stores that reach the
    L2, of each kernel in both loop orders, and of naive attention. Caches are flushed before each kernel; clocks are
    not changed.

    \b
    attngen profile causal_fa1
    attngen profile causal_fa1 -n 4096,16384 -o docs/io
    """
    from attngen.bench.profile import run, write
    from attngen.cost.roofline import Problem
    from attngen.ir.heads import SHARINGS
    from attngen.spec import load_spec, naming

    loaded = load_spec(spec)
    if kv_heads is not None and loaded.heads.sharing != "gqa":
        raise AttngenError(
            f"--kv-heads is for gqa; {spec} says {loaded.heads.sharing}, whose number of K/V heads is fixed"
        )
    shared = kv_heads or SHARINGS[loaded.heads.sharing].kv_heads(heads, 4)
    lengths, rows = _numbers(seq, "--seq"), _numbers(tiles, "--tiles") if tiles != "none" else []
    if wrong := next((t for t in rows if t not in (16, 32, 64, 128, 256)), None):
        raise typer.BadParameter(f"{wrong} rows; expected 16, 32, 64, 128 or 256", param_hint="--tiles")
    if direction == "backward" and not loaded.trains:
        raise AttngenError(
            f"--direction backward is for modules that have one; {spec} says `backward: false`; expected forward"
        )
    directions = (DIRECTIONS if loaded.trains else DIRECTIONS[:1]) if direction == "both" else (direction,)
    with err.status("profiling") as status, naming(spec):
        found = run(loaded, spec, Problem(batch, heads, shared), lengths, rows, directions, budget, status.update)
    _show(found)
    for path in write(found, out_dir) if out_dir else ():
        print(path)


def _show(found: Found) -> None:
    """Print a table of the measurements, and what failed."""
    from attngen.bench.profile_results import ORDERS, ratio

    table = Rows(
        "order", "on chip", "N", "kernel", "tile", "GB DRAM", "predicted", "ratio", "GB L2", "predicted", "ratio"
    )
    for line in found.lines:
        moved = line.predicted
        kernel = f"{line.kernel} {line.direction}"
        cells = [ORDERS.get(line.order, line.order), str(line.tile or "as built"), str(line.n), kernel, line.tiles]
        for level in ("dram", "l2"):
            near = ratio(line, level)
            cells += [
                f"{getattr(line.measured, level) / 1e9:.3f}",
                f"{getattr(moved, level) / 1e9:.3f}" if moved else "",
            ]
            cells.append(f"{near:.2f}" if near is not None else "")
        table.add_row(*cells)
    out.print(f"{found.spec} on {found.device}: B={found.batch}, {found.heads} heads, {found.kv_heads} K/V heads")
    out.print(table)
    for sentence in found.failed:
        print(sentence)


def _numbers(text: str, option: str) -> list[int]:
    """Parse numbers separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"`{text}`; expected integers separated by commas, as in 4096,16384", param_hint=option
        )
    return found
