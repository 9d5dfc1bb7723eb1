"""The specs of the project, for the site and the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def spec_files(root: Path = ROOT) -> list[Path]:
    """The committed spec files, without those that `attngen new` wrote; all of them where the folder is no checkout."""
    found = sorted((root / "specs").glob("*.yaml"))
    git = ["git", "ls-files", "--", "specs"]
    try:
        known = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return found
    return [path for path in found if f"specs/{path.name}" in known] or found
