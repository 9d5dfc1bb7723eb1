"""Checks that a module's folder has all its files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def check_files(package: str, *names: str) -> None:
    """Raise ImportError, in one sentence, if a package lacks one of these modules. It may be imported from anywhere,
    such as a zip file."""
    if missing := [f"{name}.py" for name in names if importlib.util.find_spec(f"{package}.{name}") is None]:
        folder = Path(str(sys.modules[package].__file__)).parent
        raise ImportError(
            f"attention: {folder} lacks {' and '.join(missing)}; expected all files that attngen has written there: "
            "build it again"
        )
