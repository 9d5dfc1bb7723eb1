"""Specs by name: those of the folder specs/, and those that attngen ships. A spec is given as a path, such as
`specs/mine.yaml` or `./mine`, or as a name, such as `causal_gqa`."""

from __future__ import annotations

import re
from pathlib import Path

from attngen.errors import SpecError, nearest, shown

SPECS = Path("specs")  # where the command line looks for specs, and writes them


def shipped_specs() -> dict[str, Path]:
    """Return the files of the specs that attngen ships, by name. A wheel has them in this folder, a checkout at its
    top."""
    folder = Path(__file__).parent
    return _named(folder) or _named(folder.parents[1] / "specs")


def own_specs() -> dict[str, Path]:
    """Return the files of specs/ in the current folder, by name."""
    return _named(SPECS)


def known_specs() -> dict[str, Path]:
    """Return the files that names stand for: of two specs of one name, that of specs/ in the current folder."""
    return dict(sorted((shipped_specs() | own_specs()).items()))


def is_name(text: str) -> bool:
    """True if a text is a spec's name, not a path: a word without a separator and without a suffix."""
    return re.fullmatch(r"[\w-]+", text) is not None


def find_spec(text: str) -> Path:
    """Return the file of a spec that is given by its path or its name. A name stands for specs/NAME.yaml in the current
    folder, or else for the shipped spec of that name.

    Raises SpecError: there is no spec of that name. The file of a path need not exist.
    """
    if not is_name(text):
        return Path(text)
    known = known_specs()
    if text not in known:
        near = nearest(text, known)
        hint = f"did you mean `{near}`?" if near else "`attngen new NAME` writes one to start from"
        raise SpecError(
            f"there is no spec `{shown(text)}`; expected one of {SPECS}/, one that attngen ships, or a path; {hint}"
        )
    return known[text]


def _named(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
