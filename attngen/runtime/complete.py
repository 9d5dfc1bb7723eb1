"""Whether a module's folder is whole."""

from __future__ import annotations

from pathlib import Path


def check_files(module: str, *names: str) -> None:
    """Raise ImportError, in one sentence, if the folder of a module, whose `__file__` is given, lacks one of its files."""
    folder = Path(module).parent
    if folder.is_dir() and (missing := [name for name in names if not (folder / name).is_file()]):
        raise ImportError(
            f"attention: {folder} lacks {' and '.join(missing)}; expected all files that attngen has written there: build it again"
        )
