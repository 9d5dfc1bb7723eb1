"""Reads machine code of Hopper, as nvdisasm prints it: what the parts of a kernel hold, and what stands under a
product.

A part begins where warps say how many registers they have (USETMAXREG), and ends where they say so again. Each role is
one part for each of its copies. A product is a group of HGMMA instructions, of which the last names the group's counter
(gsb0). It is in flight until a wait (WARPGROUP.DEPBAR) leaves fewer groups than were issued since.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from attngen.targets.common.instructions import Instruction

_IN_REGISTERS = r"HGMMA\S*\s+R\d+, R\d+, gdesc"  # a product whose left operand is in registers: that of weights and V
_PLACES = re.compile(r"\[[^\]]*\]")  # in memory
_MOST_GROUPS = 8  # in flight, of which a part keeps track

Groups = tuple[bool, ...]  # products in flight, oldest first: whether each is of weights


@dataclass(frozen=True)
class Part:
    """What the code between two changes of a warp's registers holds."""

    registers: int  # that its warps have
    used: int  # that its instructions name
    ops: Counter[str]
    exponentials: int  # in loops over products of weights
    # those of them that stand between the issue of such a product and the wait for it, whichever way they are reached
    under: int
    reloads: int  # of spilled registers, and stores of these, in the same loops


def parts(code: list[Instruction], sums: int = 0) -> Iterator[Part]:
    """The parts of a kernel in which warps have a number of registers of their own, in the order of the code.

    sums: where weights may lie in shared memory, the columns of the sums that products of them add to; else 0.
    """
    weights = re.compile(rf"{_IN_REGISTERS}|HGMMA\.64x{sums}x\S*\s" if sums else _IN_REGISTERS)
    for start, instruction in enumerate(code):
        if instruction.op == "USETMAXREG":
            inside = _reached(code, start)
            loops = set().union(*_loops(code, _graph(code, inside), inside, weights))
            covered = _covered(code, start, weights)
            exponentials = [i for i in loops if code[i].text.startswith("MUFU.EX2")]
            yield Part(
                int(instruction.text.split()[-1], 16),
                max(registers_named(code[i]) for i in inside),
                Counter(code[i].op for i in inside),
                len(exponentials),
                sum(i in covered for i in exponentials),
                sum(code[i].op in ("LDL", "STL") for i in loops),
            )


def registers_named(one: Instruction) -> int:
    """One more than the highest register that it names: wide results and data take several, and wide addresses two."""
    wide = (
        one.width
        if one.is_product
        else 4
        if ".128" in one.name
        else 2
        if re.search(r"\.64|\.WIDE|^CS2R$", one.name)
        else 1
    )
    found = [
        int(n) + (2 if pair else 1)
        for place in _PLACES.findall(one.text)
        for n, pair in re.findall(r"\bR(\d+)(\.64)?", place)
    ]
    named = [int(n) for n in re.findall(r"\bR(\d+)\b", _PLACES.sub("", one.text))]
    return max(
        [*found, *(n + (wide if i == 0 else 4 if one.is_product else 1) for i, n in enumerate(named))], default=0
    )


def _next(code: list[Instruction], at: int, start: int) -> Iterator[int]:
    """The instructions that may follow one in the part that begins at `start`."""
    return (to for to in code[at].then if code[to].op != "USETMAXREG" or at == to == start)


def _reached(code: list[Instruction], start: int) -> set[int]:
    """The instructions of the part that begins at `start`."""
    found, left = {start}, [start]
    while left:
        new = [to for to in _next(code, left.pop(), start) if to not in found]
        found.update(new)
        left += new
    return found


def _graph(code: list[Instruction], inside: set[int]) -> nx.DiGraph[int]:
    """The instructions of a part, with edges to those that may come next."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_edges_from((at, to) for at in inside for to in code[at].then if to in inside)
    return graph


def _loops(
    code: list[Instruction], graph: nx.DiGraph[int], inside: set[int], weights: re.Pattern[str]
) -> Iterator[set[int]]:
    """The innermost loops that hold a product of weights; loops in which barriers are awaited are part of them."""
    for loop in nx.strongly_connected_components(graph.subgraph(inside)):
        if len(loop) > 1 and any(weights.match(code[i].text) for i in loop):
            entries = {to for to in loop if any(at not in loop for at in graph.predecessors(to))}
            yield from (list(_loops(code, graph, loop - entries, weights)) if entries else []) or [loop]


def _covered(code: list[Instruction], start: int, weights: re.Pattern[str]) -> set[int]:
    """The instructions of a part that are reached with a product of weights in flight alone."""
    bare: set[int] = set()
    seen: set[tuple[int, Groups, str]] = set()
    left: list[tuple[int, Groups, str]] = [(start, (), "")]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        at, groups, issued = state
        if not any(groups) and issued != "weights":
            bare.add(at)
        groups, issued = _after(code[at].text, groups, issued, weights)
        left += [(to, groups, issued) for to in _next(code, at, start)]
    return {at for at, _, _ in seen} - bare


def _after(text: str, groups: Groups, issued: str, weights: re.Pattern[str]) -> tuple[Groups, str]:
    """The products in flight after an instruction; `issued` says what has been issued of the next one."""
    if text.startswith("HGMMA"):
        issued = "weights" if weights.match(text) else issued or "scores"
        if "gsb0" in text:
            return (*groups, issued == "weights")[-_MOST_GROUPS:], ""
    elif waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
        kept = int(waits[1], 16)
        return groups[len(groups) - min(kept, len(groups)) :], issued
    return groups, issued
