"""Commands about this machine: `doctor` checks its software and GPUs, and `cache` shows the modules that
`attngen.build` keeps."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from attngen import __version__
from attngen.cli.console import count, out, print_labelled
from attngen.errors import AttngenError
from attngen.report.tables import Rows


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print it as JSON")] = False) -> None:
    """Show what is installed here: torch, Triton, GPUs, the cache.

    It shows whether torch and Triton are a supported pair; for each GPU, the class of devices whose schedules it uses;
    without a GPU, that kernels run in Triton's interpreter; and where `attngen.build` keeps modules. If modules cannot
    run, it fails and says what to do.

    Keys of --json: attngen, python, platform, torch, triton, numpy (versions, null if not installed), supported_pair,
    gpus (name, class, runs), interpreter, cache (folder, modules, bytes), problems.

    \b
    attngen doctor
    attngen doctor --json
    """
    from attngen.cache import store

    packages = {name: _installed(name) for name in ("torch", "triton", "numpy")}
    missing = [name for name, installed in packages.items() if not installed]
    wrong = [f"there is no {name}; expected it in this environment: pip install {name}" for name in missing]
    lines = [("attngen", f"{__version__}, in {Path(__file__).parents[1]}")]
    lines.append(("python", f"{platform.python_version()}, {platform.platform()}"))
    lines += [(name, installed or "not installed") for name, installed in packages.items()]
    gpus: list[Gpu] = []
    if not wrong:
        lines.append(("pair", _pair(packages["torch"], packages["triton"])))
        gpus = _gpus()
        lines += _devices(gpus)
        wrong += _why_not(gpus, packages["triton"], packages["numpy"])
    lines.append(("cache", _kept()))
    if problem := store.unwritable():
        wrong.append(problem)
    if as_json:
        print(json.dumps(_as_data(packages, gpus, wrong), indent=2))
    else:
        for label, text in lines:
            print_labelled(label, text)
    if wrong:
        raise AttngenError("\n".join(wrong))


def _as_data(packages: dict[str, str], gpus: list[Gpu], wrong: list[str]) -> dict[str, Any]:
    """Return what `doctor` found as data for JSON."""
    from attngen.cache import store
    from attngen.versions import is_supported

    folders = store.modules()
    return {
        "attngen": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: installed or None for name, installed in packages.items()},
        "supported_pair": all(packages.values()) and is_supported(packages["torch"], packages["triton"]),
        "gpus": [{"name": gpu.name, "class": gpu.cls or None, "runs": not gpu.why_not} for gpu in gpus],
        "interpreter": _interpreted() or not gpus,
        "cache": {"folder": str(store.root()), "modules": len(folders), "bytes": sum(map(store.size, folders))},
        "problems": wrong,
    }


def _installed(name: str) -> str:
    """Return the version of a package; empty text if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:  # it may have another name, such as Triton's builds for ROCm
        try:
            return str(importlib.import_module(name).__version__)
        except ImportError:
            return ""


def _pair(torch: str, triton: str) -> str:
    """Return in words whether these versions are supported together."""
    from attngen.versions import PAIRS, is_supported

    if is_supported(torch, triton):
        return f"torch {torch} and Triton {triton} are supported together"
    known = ", ".join(f"{a} and {b}" for a, b in PAIRS.items())
    return f"torch {torch} and Triton {triton} are not tested together; supported pairs: {known}"


class Gpu(NamedTuple):
    """A GPU of this machine: its name, what is shown of it, the device class whose schedules it uses, and why kernels
    cannot run on it, or empty text."""

    name: str
    about: str
    cls: str
    why_not: str = ""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _gpus() -> list[Gpu]:
    """Return the GPUs of this machine."""
    import torch

    return [_gpu(torch.cuda.get_device_properties(at)) for at in range(torch.cuda.device_count())]


def _devices(gpus: list[Gpu]) -> Iterator[tuple[str, str]]:
    """Yield where kernels run, on each GPU or in the interpreter, as lines."""
    import torch

    yield from (("gpu", gpu.about) for gpu in gpus)
    if gpus:
        if _interpreted():
            yield "", "TRITON_INTERPRET=1 is set, so kernels run on the CPU all the same, in Triton's interpreter"
        return
    built = "" if torch.version.cuda or torch.version.hip else " (this torch is built only for CPUs)"
    where = "kernels run on the CPU, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment"
    yield "gpu", f"none{built}: {where}"
    is_set = "TRITON_INTERPRET=1 is set"
    yield "", is_set if _interpreted() else "TRITON_INTERPRET is not set; `attngen test` sets it itself"


def _why_not(gpus: list[Gpu], triton: str, numpy: str) -> Iterator[str]:
    """Yield the reasons why kernels cannot run."""
    from attngen.runtime.launch import interpreter_fails

    yield from (gpu.why_not for gpu in gpus if gpu.why_not)
    if (_interpreted() or not gpus) and (why := interpreter_fails(triton, numpy)):
        yield why


def _gpu(properties: Any) -> Gpu:
    """Return a GPU from torch's properties of it."""
    import torch

    from attngen.devices import class_of

    if torch.version.hip:
        cls = class_of(properties.gcnArchName).name
        return Gpu(properties.name, f"{properties.name}, {properties.gcnArchName}: schedules of class {cls}", cls)
    capability = properties.major, properties.minor
    about = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    if capability < (8, 0):
        why = f"{about}: it has no schedules; expected a GPU of compute capability 8.0 or later"
        return Gpu(properties.name, about, "", why)
    cls = class_of(capability).name
    return Gpu(properties.name, f"{about}: schedules of class {cls}", cls)


def cache(clear: Annotated[bool, typer.Option("--clear", help="remove all modules in it")] = False) -> None:
    """Show the modules that `attngen.build` keeps, or remove them.

    They are in the user's cache folder, or in the one that ATTNGEN_CACHE_DIR names, and include those of other versions
    of attngen. There are at most 512: one more replaces the least recently used one. A cache that other users own or
    can write is not loaded, unless ATTNGEN_TRUST_CACHE=1 is set.

    \b
    attngen cache
    attngen cache --clear
    """
    from attngen.cache import store

    if clear:
        before = _kept()
        store.clear()
        print(f"removed {before}")
        return
    if folders := store.modules():
        table = Rows("module", "MB", "built")
        for folder in folders:
            built = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "schedule.ir").stat().st_mtime))
            table.add_row(folder.name, f"{store.size(folder) / 1e6:.1f}", built)
        out.print(table)
    print(_kept())


def _kept() -> str:
    """Return the folder of built modules, their number and their size as text."""
    from attngen.cache import store

    folders = store.modules()
    return f"{store.root()}: {count(len(folders), 'module')}, {sum(map(store.size, folders)) / 1e6:.1f} MB"
