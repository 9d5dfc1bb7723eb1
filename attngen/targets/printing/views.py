"""What the templates see of a kernel: a view of each op, and of the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

LOOP_COMMENTS = {
    "full": "tiles with nothing to mask: no mask, no bounds checks",
    "partial": "tiles that the mask or the ends of the tensors cut",
    "all": "query heads that share this key head",
    "split": "parts of this key head's gradients",
    "joined": "parts of this sequence's keys",
    "own": "key tiles, each on chip while query tiles pass by",
}


@dataclass
class Node:
    """A view of one op: its kind names the macro that prints it, `text` holds that macro's strings."""

    kind: str
    text: dict[str, Any]
    body: list[Node] = field(default_factory=list)


@dataclass
class KernelView:
    """A kernel as its template prints it."""

    name: str
    summary: str
    params: list[str]
    tiles: list[str]
    dropout: bool  # has the flag DROPOUT, by which calls that drop nothing compile to kernels that draw nothing
    # What else a schedule gives. TMA: tiles are read through descriptors, given in place of their tensors. CONVERTS: an
    # instruction of the device converts pairs of 8-bit numbers. OVERLAPS: programs of two launches run beside each
    # other.
    flags: list[str]
    learns: bool  # has the flag LEARN, by which calls that need no gradients of inputs compile to kernels that sum none
    not_specialized: list[str]
    prologue: list[str]
    iteration: list[
        str
    ]  # where programs take one part of the keys after another, the lines by which each iteration starts,
    iterations: str  # and how many iterations all programs have
    nodes: list[Node]
    words: set[str]  # that occur in it


def gathered(nodes: list[Node]) -> list[Node]:
    """The same, in each row of bases last those that descriptors stand in for, the first of which says so."""
    found: list[Node] = []
    for is_base, run in groupby(nodes, lambda node: node.kind == "base"):
        if not is_base:
            found += run
            continue
        row = sorted(run, key=lambda node: bool(node.text["described"]))
        for node in [node for node in row if node.text["described"]][:1]:
            node.text["described"] = "first"
        found += row
    return found


def names_in(nodes: list[Node]) -> set[str]:
    """Every word in the strings of these nodes and their bodies."""
    words: set[str] = set()
    for node in nodes:
        words |= set(re.findall(r"\w+", repr(list(node.text.values()))))  # not its keys, which are no code
        words |= names_in(node.body)
    return words
