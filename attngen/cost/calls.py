"""The kernels that a call launches on a device, under which configs, and what they take at least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from attngen.cost.roofline import Estimate, Problem, estimate, numbers_of_call, rows_of_call
from attngen.devices import Device
from attngen.interp.numeric import compiled
from attngen.ir import Config, Host, Kernel, Module, Op, launch, only, tile
from attngen.tiles.sizes import elem_sizes, lengths, tile_bytes
from attngen.tiles.tiles import evaluate

CALLS = ("forward", "backward", "jvp")  # host programs of calls without a KV cache


class Run(NamedTuple):
    """A kernel of a call, the kernel that runs in its place under a config, and the roofline estimate."""

    kernel: Kernel
    made: Kernel
    estimate: Estimate

    @property
    def config(self) -> Config:
        return self.estimate.config


class Call(NamedTuple):
    """A call of a host program on a device: its kernels in order, and bytes of memory in addition to arguments and
    results."""

    runs: list[Run]
    extra_bytes: int

    @property
    def seconds(self) -> float:
        """The least time by the roofline: the sum of its kernels' times."""
        return sum(run.estimate.seconds for run in self.runs)

    @property
    def flops(self) -> float:
        return sum(run.estimate.flops for run in self.runs)

    @property
    def hbm_bytes(self) -> float:
        return sum(run.estimate.bytes for run in self.runs)

    @property
    def loaded_bytes(self) -> float:
        """Bytes that programs load and store, wherever these come from."""
        return sum(run.estimate.loaded for run in self.runs)

    @property
    def binds(self) -> str:
        """Whether compute or memory bounds the time of the longest kernel."""
        return max((run.estimate for run in self.runs), key=lambda e: e.seconds).binds


def call(module: Module, name: str, device: Device, problem: Problem) -> Call | None:
    """Return a call of the host program of a name; None if no tile of some kernel fits."""
    host, numbers = module.host(name), _numbers(module, device, problem)
    ops = list(_executed(host, numbers))
    runs = []
    for launched in dict.fromkeys(op.kernel for op in only(ops, launch.Launch)):
        kernel = module.kernel(launched)
        found = chosen(module, kernel, device.cls, rows_of_call(kernel, problem))
        made = estimate(module, kernel, device, problem, found.config) if found else None
        if found is None or made is None:
            return None
        runs.append(Run(kernel, found.kernel, made))
    results = {ref for op in only(host.block("entry").ops, tile.Yield) for _, ref in op.values}
    allocated = (op for op in only(ops, launch.Alloc) if op.name not in results)
    extra = sum(int(evaluate(tile_bytes(op.type), numbers)) for op in allocated if compiled(op.where)(numbers))
    return Call(runs, extra)


class Range(NamedTuple):
    """Calls of more than `least` rows, and of at most `most` if it is not None, and what they run."""

    least: int
    most: int | None
    kernel: Kernel
    config: Config


def ranges(module: Module, kernel: Kernel, cls: str) -> list[Range]:
    """Return what runs for a kernel on a device class, by the number of rows of a call, at the smallest element size.

    Empty if no tile fits. Warp-specialized kernels stand in for the portable one from their least number of rows on.
    """
    size = min(elem_sizes(module, kernel))
    usual = [c for c in module.configs(kernel.name) if (c.device, c.elem_bytes) == (cls, size)]
    others = [(k, c) for k, c in module.stand_ins(kernel.name) if (c.device, c.elem_bytes) == (cls, size)]
    first = others[0][1].min_rows if others else None
    found: list[Range] = []
    for config in usual:
        least = found[-1].most if found else 0
        if least is None or (first is not None and least >= first):
            break
        most = config.max_rows if first is None else min(first, config.max_rows or first)
        found.append(Range(least, most, kernel, config))
    for (made, config), following in zip(others, [*others[1:], None]):
        found.append(Range(config.min_rows, following[1].min_rows if following else None, made, config))
    return found


def chosen(module: Module, kernel: Kernel, cls: str, rows: int) -> Range | None:
    """Return what runs for a kernel on a device class in a call of some rows; None if no tile fits."""
    return next((r for r in ranges(module, kernel, cls) if r.least < rows and (r.most is None or rows <= r.most)), None)


def _numbers(module: Module, device: Device, problem: Problem) -> dict[str, Any]:
    """Return the values of all symbols of host programs."""
    known = {
        **module.widths,
        "elem": min(elem_sizes(module)),
        "B": problem.batch,
        "Hq": problem.q_heads,
        "Hkv": problem.kv_heads,
        "group": problem.q_heads // problem.kv_heads,
        **lengths(module, problem.n_q, problem.n_kv),
        "queries": problem.n_q,
    }
    return numbers_of_call(module, known, device)


def _executed(host: Host, numbers: dict[str, Any], block: str = "entry") -> Iterator[Op]:
    """Yield the ops of a host program that a call runs, in whose tensors there are elements."""
    for op in host.block(block).ops:
        yield op
        if isinstance(op, launch.If) and (chosen := op.then if compiled(op.where)(numbers) else op.orelse):
            yield from _executed(host, numbers, chosen)
