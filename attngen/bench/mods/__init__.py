"""Masks and score modifiers that people write for FlexAttention, as collected by attention-gym, rewritten here, each
with an oracle."""

from __future__ import annotations

from attngen.bench.mods import blocks, canvases, documents, graphs, scores, windows
from attngen.bench.mods.mod import Case, Made, Mod

__all__ = ["MODS", "Case", "Made", "Mod"]

MODS: dict[str, Mod] = {
    mod.name: mod for family in (windows, documents, blocks, canvases, scores, graphs) for mod in family.MODS
}
