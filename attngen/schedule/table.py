"""Tables of measured schedules: one small file per GPU with one line per entry. select-tiles prefers them to the cost
model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError, suggest
from attngen.ir import Config, Kernel, Module, only, tile
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.classes import Key, key
from attngen.tiles.sizes import block_d_choices, lies_in_pages
from attngen.tiles.tiles import tile_loops

FOLDER = Path(__file__).parent
Schedule = dict[str, Any]  # a config's tile sizes and launch options, by name
KNOBS = tuple(
    f.name
    for f in fields(Config)
    if f.name not in ("device", "elem_bytes", "max_rows", "measured", "backend", "min_rows")
)


def schedule_of(config: Config) -> Schedule:
    """Return the tile sizes and launch options of a config, without the range it is for; `columns` only with
    split-D."""
    return {name: getattr(config, name) for name in KNOBS if name != "columns" or config.columns}


def shown(schedule: Mapping[str, int]) -> str:
    """Return a schedule as docs and tables write it: `128x64x8x3`, `128x64x8x3 TMA`, or `64x32x8x2 TMA, 256
    columns`."""
    columns = f", {schedule['columns']} columns" if schedule.get("columns") else ""
    return (
        "x".join(str(schedule[name]) for name in KNOBS if name not in ("tma", "columns"))
        + " TMA" * schedule["tma"]
        + columns
    )


@dataclass(frozen=True)
class WarpSpecialized:
    """A schedule of a backend's warp-specialized kernel, and its time."""

    backend: str
    schedule: Schedule
    ms: float


@dataclass(frozen=True)
class Entry:
    """The fastest portable schedule measured for a key, and the cost model's choice, which is the same if nothing was
    faster.

    warp_specialized: faster schedules of warp-specialized kernels, fastest first; None if none was measured with it.
    """

    schedule: Schedule
    ms: float
    model: Schedule
    model_ms: float | None  # None if it cannot run there, or spills
    triton: str  # the version that compiled the measured kernel
    warp_specialized: tuple[WarpSpecialized, ...] | None = None
    gpu: str = ""  # the GPU of the measurement, as its driver names it, if it is not the table's

    def plain(self) -> dict[str, Any]:
        """Return the entry as data for JSON."""
        defaults = {"warp_specialized": None, "gpu": ""}
        return {name: value for name, value in asdict(self).items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True)
class Table:
    """The measured schedules of one device, by key, and the GPU and versions of the measurement."""

    device: str  # a key of devices.DEVICES
    gpu: str = ""  # as the driver names it
    torch: str = ""
    triton: str = ""
    entries: dict[Key, Entry] = field(default_factory=dict)

    def config(self, module: Module, kernel: Kernel, elem_bytes: int, max_rows: int | None) -> Config | None:
        """Return the measured config of a kernel for a range of rows; None without an entry, or if it would spill or
        not fit."""
        entry = self.entries.get(key(module, kernel, elem_bytes, max_rows)) if self.entries else None
        if entry is None:
            return None
        config = Config(
            DEVICES[self.device].cls, elem_bytes, max_rows, **entry.schedule, measured=True, backend=module.backend
        )
        return config if usable(module, kernel, config) else None

    def warp_specialized(
        self, module: Module, kernel: Kernel, elem_bytes: int, max_rows: int | None, backend: str
    ) -> dict[Config, float] | None:
        """Return the configs with which a backend's warp-specialized kernel is faster than the portable one in a range,
        with their times, fastest first.

        None if this was not measured.
        """
        entry = self.entries.get(key(module, kernel, elem_bytes, max_rows)) if self.entries else None
        if entry is None or entry.warp_specialized is None:
            return None
        usual = Config(DEVICES[self.device].cls, elem_bytes, None, **entry.schedule, measured=True, backend=backend)
        return {
            replace(usual, **found.schedule): found.ms for found in entry.warp_specialized if found.backend == backend
        }

    def text(self) -> str:
        """Return the text of the file: a header, then one line per entry, sorted."""
        head = {"device": self.device, "gpu": self.gpu, "torch": self.torch, "triton": self.triton}
        lines = [
            json.dumps({**k._asdict(), **e.plain()})
            for k, e in sorted(self.entries.items(), key=lambda item: _order(item[0]))
        ]
        body = ",\n  ".join(lines)
        return json.dumps(head)[:-1] + f', "entries": [{f"{chr(10)}  {body}{chr(10)}" if lines else ""}]}}\n'


def _order(k: Key) -> tuple[Any, ...]:
    return (*k[:-1], k.max_rows or float("inf"))


def usable(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if a config fits the module: its tiles divide the mask's blocks and the sequence's chunks, TMA and head_dim
    slices are possible where it uses them, and it is not known to spill."""
    divides = not (module.blocks and tile_loops(kernel)) or max(config.block_q, config.block_kv) <= module.blocks.size
    described = any(op.via for op in only(kernel.ops(), tile.Load))
    return (
        divides
        and module.chunk % config.block_q == module.chunk % config.block_kv == 0
        and config.columns in block_d_choices(module, kernel)
        and (described or not config.tma)
        and lies_in_pages(module, kernel, config)
        and backend_of(config).cost.cycles(module, kernel, config) < float("inf")
    )


def read_table(path: Path) -> Table:
    """Read the table in a file; AttngenError if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lines = data.pop("entries")
        table = Table(**data, entries=dict(map(_entry, lines)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AttngenError(
            f"{path}: cannot be read as a table of `attngen tune`; expected a file that it wrote ({error})"
        ) from None
    if table.device not in DEVICES:
        raise AttngenError(f"{path}: `{table.device}` is not a device; {suggest(table.device, DEVICES)}")
    return table


def _entry(line: dict[str, Any]) -> tuple[Key, Entry]:
    k = Key(*(line.pop(name) for name in Key._fields))
    schedule, model = (_schedule(line.pop(name)) for name in ("schedule", "model"))
    given = line.pop("warp_specialized", None)
    warp_specialized = (
        None
        if given is None
        else tuple(WarpSpecialized(d["backend"], _schedule(d["schedule"]), d["ms"]) for d in given)
    )
    for one in warp_specialized or ():
        if one.backend not in SPECIALIZERS:
            raise ValueError(f"`{one.backend}` specializes no kernels; {suggest(one.backend, SPECIALIZERS)}")
    return k, Entry(schedule=schedule, model=model, **line, warp_specialized=warp_specialized)


def _schedule(given: dict[str, Any]) -> Schedule:
    return schedule_of(Config("", 0, None, **given))


def path_of(device: str) -> Path:
    """Return the path of a device's committed table."""
    return FOLDER / f"{device.lower()}.json"


@cache
def committed() -> Mapping[str, Table]:
    """Return the tables that come with attngen, by device class."""
    return {name: read_table(path_of(c.tuned_on)) for name, c in CLASSES.items() if c.tuned_on}
