"""What a user asks of a module first, as plain data for JSON and for the terminal: does it fit, how fast is it at
least, what does it take, and which kernels run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attngen.cost.calls import CALLS, Run, call, chosen, ranges
from attngen.cost.roofline import Problem, rows_of_call
from attngen.cost.serving import decoding
from attngen.devices import CLASSES, DEVICES, FALLBACK_CUDA, Device
from attngen.ir import Config, Kernel, Module, launch, only
from attngen.targets.registry import SPECIALIZERS
from attngen.tiles.tiles import unbounded


def summary(module: Module, problem: Problem, unspecialized: Iterable[str] = ()) -> dict[str, Any]:
    """Return what `attngen explain --json` prints.

    unspecialized: sentences on why kernels are not warp-specialized.
    """
    return {
        "module": module.name,
        "mask": module.mask,
        "score": module.score,
        "heads": module.sharing,
        "head_dim": {"qk": module.head_dim_qk, "v": module.head_dim_v},
        "dtypes": list(module.dtypes),
        "size": {
            "batch": problem.batch,
            "q_heads": problem.q_heads,
            "kv_heads": problem.kv_heads,
            "queries": problem.n_q,
            "keys": problem.n_kv,
        },
        "devices": [
            *(_device(module, device, problem) for device in DEVICES.values()),
            {
                "device": None,
                "class": FALLBACK_CUDA,
                "calls": [_elsewhere(module, name, problem) for name in _calls(module)],
            },
        ],
        "kernels": list(_kernels(module)),
        "does_not_fit": [
            {"kernel": kernel.name, "class": none.device, "element_bytes": none.elem_bytes, "reason": none.reason}
            for kernel in module.kernels
            for none in module.not_fitting(kernel.name)
        ],
        "not_warp_specialized": list(unspecialized),
        "inputs_that_hide_nothing": list(_unknown_inputs(module)),
    }


def _unknown_inputs(module: Module) -> Iterator[str]:
    """Yield the inputs from which loops get bounds in a call. Figures assume values of them that hide nothing."""
    bounds = {name for kernel in module.kernels if kernel.loops for name in unbounded(kernel)}
    for given in module.inputs:
        derived = (d.names for d in module.derived if given.name in d.sources)
        if bounds & {given.name, *(name for names in derived for name in names)}:
            yield given.name


def kernels_of_classes(module: Module) -> Iterator[tuple[str, ...]]:
    """Yield each device class and, for forward and backward, the kernels with matrix products that long calls run
    there, with their tiles."""
    for cls in CLASSES:
        yield cls, *(", ".join(_long(module, name, cls)) for name in module.directions)


def _long(module: Module, name: str, cls: str) -> Iterator[str]:
    """Yield the kernels of long calls of a host program on a device class: the fused backward, if there is one."""
    launched = (module.kernel(op.kernel) for op in only(module.host(name).ops(), launch.Launch))
    fused = [kernel for kernel in launched if kernel.traits.adds_in_order and ranges(module, kernel, cls)]
    for kernel in fused or map(module.kernel, module.host(name).common_launches()):
        found = ranges(module, kernel, cls)
        if kernel.traits.dots:
            yield f"{kind(found[-1].config.backend)} {kernel.name} {found[-1].config.tile}" if found else "none fits"


def kind(backend: str) -> str:
    """Return how a kernel is made, in one word: warp-specialized, for `Hopper`, or `portable`."""
    return backend.capitalize() if backend in SPECIALIZERS else "portable"


def _calls(module: Module) -> list[str]:
    return [host.name for host in module.hosts if host.name in CALLS]


def _elsewhere(module: Module, name: str, problem: Problem) -> dict[str, Any]:
    """Return a call on NVIDIA GPUs of other classes, whose rates are not known."""
    kernels = [module.kernel(launched) for launched in module.host(name).common_launches()]
    found = [(k, chosen(module, k, FALLBACK_CUDA, rows_of_call(k, problem))) for k in kernels]
    made = [{**_config(r.kernel, r.config), "products": bool(k.traits.dots)} for k, r in found if r]
    return {**_unknown(name, len(made) == len(kernels)), "kernels": made}


def _unknown(name: str, fits: bool) -> dict[str, Any]:
    """Return a call without times."""
    keys = ("seconds_at_least", "bound", "flops", "hbm_bytes", "loaded_bytes", "extra_bytes")
    return {"call": name, "fits": fits, **dict.fromkeys(keys), "kernels": []}


def _device(module: Module, device: Device, problem: Problem) -> dict[str, Any]:
    calls = [_call(module, name, device, problem) for name in _calls(module)]
    if module.splitting_kernel:
        calls.append(_decode(module, module.splitting_kernel, device, problem))
    return {"device": device.name, "class": device.cls, "calls": calls}


def _call(module: Module, name: str, device: Device, problem: Problem) -> dict[str, Any]:
    found = call(module, name, device, problem)
    if found is None:
        return _unknown(name, False)
    return {
        "call": name,
        "fits": True,
        "seconds_at_least": found.seconds,
        "bound": found.binds,
        "flops": found.flops,
        "hbm_bytes": found.hbm_bytes,
        "loaded_bytes": found.loaded_bytes,
        "extra_bytes": found.extra_bytes,
        "kernels": [_run(run) for run in found.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    e = run.estimate
    return {
        **_config(run.made, run.config),
        "products": bool(run.kernel.traits.dots),
        "seconds_at_least": e.seconds,
        "shared_bytes": e.sram,
        "shared_limit": e.limit,
    }


def _decode(module: Module, kernel: Kernel, device: Device, problem: Problem) -> dict[str, Any]:
    """Return a call with one query per sequence and a KV cache of the problem's keys."""
    found = decoding(module, device, problem)
    run = chosen(module, kernel, device.cls, problem.q_heads // problem.kv_heads)
    if found is None or run is None:
        return _unknown("decode", False)
    return {
        "call": "decode",
        "fits": True,
        "seconds_at_least": found.seconds,
        "bound": found.binds,
        "flops": found.flops,
        "hbm_bytes": found.moved,
        "loaded_bytes": found.moved,
        "extra_bytes": int(found.partials / 2),  # written once and read once
        "kernels": [{**_config(run.kernel, run.config), "products": True}],
    }


def _kernels(module: Module) -> Iterator[dict[str, Any]]:
    """Yield what runs for each kernel with matrix products, by device class and the number of rows of a call."""
    for kernel in module.kernels:
        if not kernel.traits.dots:
            continue
        for cls in CLASSES:
            for found in ranges(module, kernel, cls):
                rows = {"more_than": found.least, "at_most": found.most}
                made = _config(found.kernel, found.config)
                yield {"for": kernel.name, "class": cls, "axis": kernel.program_axis, **rows, **made}


def _config(kernel: Kernel, config: Config) -> dict[str, Any]:
    return {
        "kernel": kernel.name,
        "backend": config.backend,
        "tile": config.tile,
        "warps": config.num_warps,
        "stages": config.num_stages,
        "measured": config.measured,
    }
