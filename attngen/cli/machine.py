"""Commands about this machine: `doctor` checks its software and GPUs, and `cache` shows the modules that
`attngen.build` keeps."""

from __future__ import annotations

import importlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from attngen import __version__
from attngen.cli.console import count, new_table, out
from attngen.errors import AttngenError


def doctor() -> None:
    """Show what is installed here: torch, Triton, GPUs, the cache.

    It shows whether torch and Triton are a supported pair; for each GPU, the class of devices whose schedules it uses;
    without a GPU, that kernels run in Triton's interpreter; and where `attngen.build` keeps modules. If modules cannot
    run, it fails and says what to do.

    \b
    attngen doctor
    """
    from attngen.cache import store

    packages = {name: _installed(name) for name in ("torch", "triton", "numpy")}
    missing = [name for name, installed in packages.items() if not installed]
    _print("attngen", f"{__version__}, in {Path(__file__).parents[1]}")
    _print("python", f"{platform.python_version()}, {platform.platform()}")
    for name, installed in packages.items():
        _print(name, installed or "not installed")
    wrong = [f"there is no {name}; expected it in this environment: pip install {name}" for name in missing]
    if not missing:
        _print("pair", _pair(packages["torch"], packages["triton"]))
        wrong += _devices(packages["triton"], packages["numpy"])
    _print("cache", _kept())
    if problem := store.unwritable():
        wrong.append(problem)
    if wrong:
        raise AttngenError("\n".join(wrong))


def _print(label: str, text: str) -> None:
    print(f"{label:<8} {text}")


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


def _devices(triton: str, numpy: str) -> list[str]:
    """Print where kernels run, on each GPU or in the interpreter, and return the reasons why they cannot."""
    import torch

    from attngen.runtime.launch import interpreter_fails

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    wrong = []
    for at in range(torch.cuda.device_count()):
        found, why = _gpu(torch.cuda.get_device_properties(at))
        _print("gpu", found)
        wrong += [why] if why else []
    if interpreted and torch.cuda.device_count():
        _print("", "TRITON_INTERPRET=1 is set, so kernels run on the CPU all the same, in Triton's interpreter")
    elif not torch.cuda.device_count():
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built only for CPUs)"
        _print(
            "gpu",
            f"none{built}: kernels run on the CPU, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment",
        )
        _print(
            "",
            "TRITON_INTERPRET=1 is set"
            if interpreted
            else "TRITON_INTERPRET is not set; `attngen test` sets it itself",
        )
    if (interpreted or not torch.cuda.device_count()) and (why := interpreter_fails(triton, numpy)):
        wrong.append(why)
    return wrong


def _gpu(properties: Any) -> tuple[str, str]:
    """Return a GPU in words, and why kernels cannot run on it, or empty text."""
    import torch

    from attngen.devices import class_of

    if torch.version.hip:
        return (
            f"{properties.name}, {properties.gcnArchName}: schedules of class {class_of(properties.gcnArchName).name}",
            "",
        )
    capability = properties.major, properties.minor
    about = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    if capability < (8, 0):
        return about, f"{about}: it has no schedules; expected a GPU of compute capability 8.0 or later"
    return f"{about}: schedules of class {class_of(capability).name}", ""


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
        table = new_table("module", "MB", "built")
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
