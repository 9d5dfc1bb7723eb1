"""The views that templates print: of one op, and of a kernel as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

LOOP_COMMENTS = {
    "full": "tiles with nothing to mask: no mask, no bounds checks",
    "partial": "tiles that the mask or the end of a tensor cuts",
    "all": "query heads that share this key head",
    "split": "parts of this key head's gradients",
    "KV_splits": "splits of this sequence's keys",
    "own": "tiles of keys, each kept on chip during the loop over query tiles",
}


@dataclass
class Node:
    """A view of one op: `kind` names the macro that prints it, `text` holds that macro's strings."""

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
    dropout: bool  # has the flag DROPOUT: without dropout, a call compiles to a kernel that generates no random bits
    # Other flags that a config sets. TMA: tiles are read by descriptors, which are passed in place of their tensors.
    # CONVERTS: the device has an instruction that converts pairs of 8-bit numbers. OVERLAPS: programs of two launches
    # run at the same time.
    flags: list[str]
    # Has the flag _INPUT_GRADIENTS: if a call needs no gradients of inputs, its kernel is compiled without them.
    sums_input_gradients: bool
    not_specialized: list[str]
    prologue: list[str]
    iteration: list[str]  # lines that start each iteration, if a program processes one split of the keys after another
    iterations: str  # the number of iterations of all programs
    nodes: list[Node]
    words: set[str]  # every word in its source


def gathered(nodes: list[Node]) -> list[Node]:
    """Reorder each run of bases so that those which only pointer loads need come last. The first of these is marked, so
    that one `if not TMA` covers them."""
    found: list[Node] = []
    for is_base, run in groupby(nodes, lambda node: node.kind == "base"):
        if not is_base:
            found += run
            continue
        bases = sorted(run, key=lambda node: bool(node.text["described"]))
        for node in [node for node in bases if node.text["described"]][:1]:
            node.text["described"] = "first"
        found += bases
    return found


def names_in(nodes: list[Node]) -> set[str]:
    """Every word in the strings of these nodes and their bodies, except in their comments."""
    words: set[str] = set()
    for node in nodes:
        code = [value for key, value in node.text.items() if key not in ("comment", "about")]  # nor are keys code
        words |= set(re.findall(r"\w+", repr(code)))
        words |= names_in(node.body)
    return words
