"""`attngen profile`: the bytes that kernels move, predicted by the model and measured by Nsight Compute's counters.

It compares FlashAttention-2's loop order with FlashAttention-1's and with naive attention, for several lengths and
several sizes of the tile that stays on chip: of queries in the former order, of keys in the latter. The rows of this
tile stand for M, the on-chip memory of a program.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attngen.bench.counters import Bytes, Launch, find_ncu, profile
from attngen.bench.profile_plot import plot
from attngen.bench.profile_results import NAIVE, ORDERS, Found, Line, rows
from attngen.codegen.files import write_file, write_module
from attngen.codegen.render import render
from attngen.cost.io import Traffic, dram_bytes, l2_bytes, left_in_cache, standard_bytes
from attngen.cost.roofline import Problem, chip, config_for, rows_of_call, values
from attngen.devices import DEVICES, Device, class_of
from attngen.errors import AttngenError, FitError, SpecError
from attngen.ir import Kernel, Module
from attngen.ir.dtypes import ELEMENTS
from attngen.lowering.pipeline import lower
from attngen.spec import Spec
from attngen.tiles.tiles import evaluate

MARK = "call_starts"  # the kernel with which `profiled` marks the start of a call
STREAMED = 32  # rows of the streamed tiles
MOST_SCORES = 2**32  # most elements of the score matrices of naive attention: 8 GiB each, at 2 bytes


@dataclass(frozen=True)
class Call:
    """One profiled call, forward or backward: of a module, with `tile` rows on chip or as built; or of naive
    attention."""

    order: str
    tile: int | None
    n: int
    direction: str

    @property
    def name(self) -> str:
        return f"{self.order}{f' {self.tile}' if self.tile else ''} N={self.n} {self.direction}"


def device_here() -> Device:
    """Return the GPU of this machine; AttngenError if there is none."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        raise AttngenError(
            "attngen profile reads the counters of an NVIDIA GPU; this machine has none that torch can use"
        )
    properties = torch.cuda.get_device_properties(0)
    known = next((d for d in DEVICES.values() if d.name in properties.name.split()), None)
    if known:
        return known
    capability = (properties.major, properties.minor)
    cls = class_of(capability).name
    return Device(
        properties.name,
        cls,
        properties.multi_processor_count,
        0.0,
        float(properties.L2_cache_size),
        {},
        "as its driver says",
    )


def variants(spec: Spec, tiles: Sequence[int]) -> Iterator[tuple[str, int | None, Module]]:
    """Yield the modules to profile: both loop orders that the spec can have, as built and with each tile.

    A tile that fits no device class is left out.
    """
    for order in ORDERS:
        for tile in (None, *tiles):
            blocks = (
                {"block_q": tile, "block_kv": STREAMED}
                if order == "q_outer"
                else {"block_q": STREAMED, "block_kv": tile}
            )
            data = spec.canonical()
            schedule = {**data["schedule"], "order": order} if tile is None else {"order": order, **blocks}
            try:
                changed = Spec.model_validate(
                    {**data, "schedule": {k: v for k, v in schedule.items() if v is not None}}
                )
                yield order, tile, lower(changed)
            except (FitError, SpecError, ValueError):  # pydantic's errors are ValueErrors
                if tile is None and order == spec.schedule.order:
                    raise


def predicted(module: Module, kernel: Kernel, device: Device, problem: Problem) -> tuple[str, Bytes] | None:
    """Return the tile of a kernel on a device, and its bytes according to the model; None if no tile fits there."""
    config = config_for(module, kernel, device, rows_of_call(kernel, problem))
    if config is None:
        return None
    numbers = {**values(module, kernel, config, problem), **chip(module, kernel, config, device)}

    def number(traffic: Traffic) -> list[float]:
        return [float(evaluate(e, numbers)) for e in traffic]

    moved = dram_bytes(kernel)
    read, written = number(moved)
    kept = float(evaluate(left_in_cache(moved), numbers))
    return f"{config.block_q}x{config.block_kv}", Bytes(read, written - kept, *number(l2_bytes(kernel)))


def predicted_naive(module: Module, direction: str, problem: Problem) -> Bytes:
    """Return the bytes of separate operations, each of which moves its operands and its result once, without those of
    the mask."""
    numbers = {
        "Nq": problem.n_q,
        "Nk": problem.n_kv,
        **module.widths,
        "elem": ELEMENTS[module.dtypes[0]].bytes,
    }
    moved = problem.batch * problem.q_heads * float(evaluate(standard_bytes(direction), numbers))
    return Bytes(moved, 0.0, moved, 0.0)


def run(
    spec: Spec,
    spec_path: Path,
    problem: Problem,
    lengths: Sequence[int],
    tiles: Sequence[int],
    directions: Sequence[str],
    budget: float,
    watch: Callable[[str], None],
) -> Found:
    """Build the modules, call them and naive attention under `ncu`, and compare predictions with its counters.

    Raises AttngenError: no CUDA, no `ncu`, no permission to read counters; or a spec whose bytes depend on data.
    """
    if spec.inputs() or spec.mask.blocks():
        data = f"reads `{spec.inputs()[0].name}`" if spec.inputs() else "visits lists of blocks"
        raise AttngenError(
            f"attngen profile: {spec.name} {data}, on which the bytes that move depend; expected a spec without"
        )
    device = device_here()
    find_ncu()
    modules: dict[tuple[str, int | None], Module] = {}
    with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
        folders: dict[tuple[str, int | None], Path] = {}
        for order, tile, module in variants(spec, tiles):
            watch(f"building {order} {tile or ''}")
            modules[order, tile] = module
            folders[order, tile] = Path(folder) / f"{order}_{tile or 'own'}"
            write_module(render(module), folders[order, tile])
        calls = [Call(*key, n, direction) for n in lengths for key in modules for direction in directions]
        scores = problem.batch * problem.q_heads
        calls += [
            Call(NAIVE, None, n, direction)
            for n in lengths
            if scores * n * n <= MOST_SCORES
            for direction in directions
        ]
        plan = Path(folder) / "plan.json"
        listed = [
            {"name": c.name, "n": c.n, "direction": c.direction, "module": str(folders.get((c.order, c.tile), ""))}
            for c in calls
        ]
        sizes = {"device": "cuda", "batch": problem.batch, "heads": problem.q_heads, "kv_heads": problem.kv_heads}
        plan.write_text(json.dumps({"spec": str(spec_path.resolve()), **sizes, "calls": listed}), encoding="utf-8")
        printed: list[str] = []

        def heard(line: str) -> None:
            printed.append(line)
            watch(line)

        launches = profile("attngen.bench.profiled", [str(plan)], budget, heard)
    lines, failed = attribute(calls, modules, launches, printed, device, problem)
    return Found(device.name, spec.name, problem.batch, problem.q_heads, problem.kv_heads, tuple(lines), tuple(failed))


def attribute(
    calls: Sequence[Call],
    modules: Mapping[tuple[str, int | None], Module],
    launches: Iterable[Launch],
    printed: Iterable[str],
    device: Device,
    problem: Problem,
) -> tuple[list[Line], list[str]]:
    """Return lines for the launches of each call, and sentences for the calls that failed. `printed` is the child's
    output."""
    groups: list[list[Launch]] = []
    for launch in launches:
        if launch.kernel == MARK:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    words = [line.split(maxsplit=2) for line in printed if line.startswith(("started ", "failed "))]
    started = [int(at) for state, at, *_ in words if state == "started"]
    wrong = {int(at): rest for state, at, rest in (w for w in words if len(w) == 3) if state == "failed"}
    if len(groups) != len(started):
        raise AttngenError(
            f"ncu profiled {len(groups)} calls, and {len(started)} started; expected as many: run it again"
        )
    lines = [
        line
        for at, group in zip(started, groups)
        if at not in wrong
        for line in _lines(calls[at], modules, group, device, problem)
    ]
    return lines, [f"not profiled: {reason}" for reason in wrong.values()]


def _lines(
    call: Call,
    modules: Mapping[tuple[str, int | None], Module],
    launches: Sequence[Launch],
    device: Device,
    problem: Problem,
) -> Iterator[Line]:
    sized = replace(problem, n_q=call.n, n_kv=call.n)
    if call.order == NAIVE:
        module = next(iter(modules.values()))
        yield Line(
            NAIVE,
            None,
            call.n,
            call.direction,
            "all",
            "",
            predicted_naive(module, call.direction, sized),
            _sum(launches),
        )
        return
    module = modules[call.order, call.tile]
    kernels = {kernel.name: kernel for kernel in module.kernels_of(call.direction)}
    for name, kernel in kernels.items():
        tile, moved = predicted(module, kernel, device, sized) or ("", None)
        mine = [launch for launch in launches if launch.kernel == name]
        if mine:
            yield Line(
                call.order, call.tile, call.n, call.direction, name, tile if kernel.loops else "", moved, _sum(mine)
            )
    others = [launch for launch in launches if launch.kernel not in kernels]
    if others:
        yield Line(call.order, call.tile, call.n, call.direction, "torch", "", None, _sum(others))


def _sum(launches: Iterable[Launch]) -> Bytes:
    total = Bytes(0.0, 0.0, 0.0, 0.0)
    for launch in launches:
        total += launch.moved
    return total


def write(found: Found, folder: Path) -> list[Path]:
    """Write profile.csv, profile.json and, for the forward, profile.svg and profile-dark.svg; AttngenError without
    matplotlib, after the other two."""
    flat, table = rows(found), io.StringIO()
    writer = csv.DictWriter(table, list(flat[0]) if flat else [])
    writer.writeheader()
    writer.writerows(flat)
    head = {k: v for k, v in asdict(found).items() if k != "lines"}
    paths = [folder / f"profile.{suffix}" for suffix in ("csv", "json")]
    write_file(paths[0], table.getvalue())
    write_file(paths[1], json.dumps({**head, "lines": flat}, indent=2) + "\n")
    for name, text in plot(found).items():
        paths.append(folder / name)
        write_file(paths[-1], text)
    return paths
