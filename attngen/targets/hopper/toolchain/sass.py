"""Read Hopper's machine code, as nvdisasm prints it: the registers and exponentials of each part of a kernel, and the
exponentials that overlap with a product.

A part begins where warps set their number of registers (USETMAXREG), and ends where they set it again. Each instance of
a warp group is one part. A product is a group of HGMMA instructions, the last of which names the group's counter
(gsb0). It is in flight until a wait (WARPGROUP.DEPBAR) leaves fewer groups than were issued since.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from attngen.targets.common.instructions import Instruction

# A product whose left operand is in registers: that of weights and V.
_IN_REGISTERS = r"HGMMA\S*\s+R\d+, R\d+, gdesc"
_ADDRESSES = re.compile(r"\[[^\]]*\]")
_MOST_GROUPS = 8  # in flight, of which a part keeps track

Groups = tuple[bool, ...]  # products in flight, oldest first: whether each is of weights


OUTSIDE = 256  # registers of the launch's warps before the warp groups start and after they end, and of some consumers


@dataclass(frozen=True)
class Part:
    """The code between two changes of a warp's number of registers."""

    registers: int  # that its warps have
    used: int  # that its instructions name
    ops: Counter[str]
    exponentials: int  # in loops over products of weights
    under: int  # of these, the ones between the issue of such a product and its wait, on every path to them
    reloads: int  # loads and stores of spilled registers, in the same loops


def parts(code: list[Instruction], sums: int = 0) -> Iterator[Part]:
    """Yield the parts of a kernel, in the order of the code.

    sums: where weights may be in shared memory, the columns of the accumulators of their products; else 0.
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
    """One more than the highest register that an instruction names: wide results and data take several registers, and
    wide addresses two."""
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
        for place in _ADDRESSES.findall(one.text)
        for n, pair in re.findall(r"\bR(\d+)(\.64)?", place)
    ]
    named = [int(n) for n in re.findall(r"\bR(\d+)\b", _ADDRESSES.sub("", one.text))]
    return max(
        [*found, *(n + (wide if i == 0 else 4 if one.is_product else 1) for i, n in enumerate(named))], default=0
    )


def _next(code: list[Instruction], at: int, start: int) -> Iterator[int]:
    """The instructions that may follow an instruction within the part that begins at `start`."""
    return (to for to in code[at].then if code[to].op != "USETMAXREG" or at == to == start)


def _reached(code: list[Instruction], start: int) -> set[int]:
    """The instructions of the part that begins at `start`."""
    found, remaining = {start}, [start]
    while remaining:
        new = [to for to in _next(code, remaining.pop(), start) if to not in found]
        found.update(new)
        remaining += new
    return found


def _graph(code: list[Instruction], inside: set[int]) -> nx.DiGraph[int]:
    """The control-flow graph of a part: its instructions, with edges to those that may come next."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_edges_from((at, to) for at in inside for to in code[at].then if to in inside)
    return graph


def _loops(
    code: list[Instruction], graph: nx.DiGraph[int], inside: set[int], weights: re.Pattern[str]
) -> Iterator[set[int]]:
    """The innermost loops that hold a product of weights, including the loops inside them that wait for barriers."""
    for loop in nx.strongly_connected_components(graph.subgraph(inside)):
        if len(loop) > 1 and any(weights.match(code[i].text) for i in loop):
            entries = {to for to in loop if any(at not in loop for at in graph.predecessors(to))}
            yield from (list(_loops(code, graph, loop - entries, weights)) if entries else []) or [loop]


def _covered(code: list[Instruction], start: int, weights: re.Pattern[str]) -> set[int]:
    """The instructions of a part that are reached only while a product of weights is in flight."""
    uncovered: set[int] = set()
    seen: set[tuple[int, Groups, str]] = set()
    remaining: list[tuple[int, Groups, str]] = [(start, (), "")]
    while remaining:
        state = remaining.pop()
        if state in seen:
            continue
        seen.add(state)
        at, groups, issued = state
        if not any(groups) and issued != "weights":
            uncovered.add(at)
        groups, issued = _after(code[at].text, groups, issued, weights)
        remaining += [(to, groups, issued) for to in _next(code, at, start)]
    return {at for at, _, _ in seen} - uncovered


def _after(text: str, groups: Groups, issued: str, weights: re.Pattern[str]) -> tuple[Groups, str]:
    """The products in flight after an instruction; `issued`: the kind of a product whose group is issued in part."""
    if text.startswith("HGMMA"):
        issued = "weights" if weights.match(text) else issued or "scores"
        if "gsb0" in text:
            return (*groups, issued == "weights")[-_MOST_GROUPS:], ""
    elif waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
        kept = int(waits[1], 16)
        return groups[len(groups) - min(kept, len(groups)) :], issued
    return groups, issued
