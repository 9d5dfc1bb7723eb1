"""The page of models: what attngen does with each family of Hugging Face's transformers, from models.yaml, which the
tests hold true."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import yaml

from attngen.lang.limits import WIDEST_HEAD
from docs.site.committed import ROOT
from docs.site.pages import rendered

TABLE = ROOT / "docs" / "site" / "models.yaml"


@dataclass(frozen=True)
class Family:
    """A row of the table; models.yaml says what each key means."""

    name: str
    group: str
    title: str
    attention: str
    model: str
    generates: bool
    type: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    images: int | None = None
    outcome: Literal["yes", "falls back", "refused", "own attention"] = "yes"
    layers: int = 0
    eager: int = 0
    where: str = ""
    says: str = ""

    @property
    def runs(self) -> bool:
        """True if attngen computes all of its attention that calls transformers' interface."""
        return self.outcome == "yes"

    @property
    def trained(self) -> str:
        """The cell of the table: what a forward and backward do."""
        return "in part" if self.outcome == "falls back" and self.layers else self.outcome

    @property
    def served(self) -> str:
        """The cell of the table: what `generate()` does."""
        return self.trained if self.generates else "–"


@cache
def families() -> tuple[Family, ...]:
    """The rows of models.yaml, in its order."""
    rows = []
    for group in yaml.safe_load(TABLE.read_text(encoding="utf-8")):
        given = {key: value for key, value in group.items() if key != "families"}
        for name, own in group["families"].items():
            sizes = _present({**group.get("sizes", {}), **own.get("sizes", {})})
            rows.append(Family(**{"name": name, "type": name, **given, **own, "sizes": sizes}))
    return tuple(rows)


def _present(data: Any) -> Any:
    """The data without keys that are null."""
    return {k: _present(x) for k, x in data.items() if x is not None} if isinstance(data, dict) else data


def models_page() -> str:
    """The table of families, by group."""
    rows = families()
    counts = {
        "runs": sum(row.runs for row in rows),
        "serves": sum(row.runs and row.generates for row in rows),
        "falls_back": sum(row.outcome == "falls back" for row in rows),
        "others": sum(row.outcome in ("refused", "own attention") for row in rows),
    }
    groups = {row.group: [other for other in rows if other.group == row.group] for row in rows}
    (version,) = re.findall(
        r"^transformers==([\d.]+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.M
    )
    return rendered("models.md.jinja", groups=groups, version=version, widest=WIDEST_HEAD, **counts)
