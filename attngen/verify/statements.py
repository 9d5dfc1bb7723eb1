"""Rules of kernels after lower-pipelines: buffers, barriers and their indices, counts and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import networkx as nx
import sympy

from attngen.ir import Block, Expr, Kernel, Module, Op, gl, only, pipe, symbol, symbol_names, to_text

MBARRIER = (gl.MbarrierInit, gl.MbarrierExpect, gl.MbarrierArrive, gl.MbarrierWait)
NAMED = (gl.NamedArrive, gl.NamedSync)
SMEM = (gl.SmemView, gl.SmemLoad, gl.SmemStore, gl.SmemStoreAcc)
NAMED_BARRIERS = 16  # of a CTA (PTX ISA, barrier)
INSTANCE = symbol("_WARP_GROUP")


def bodies(module: Module, kernel: Kernel) -> Iterator[str]:
    """The bodies of statements and loops are blocks of the kernel, none of which runs itself."""
    names = {block.name for block in kernel.blocks} - {"entry", *(block.name for block in kernel.warp_groups)}
    runs: nx.DiGraph[str] = nx.DiGraph()
    for block in kernel.blocks:
        for op in block.ops:
            for body in pipe.bodies_of(op):
                runs.add_edge(block.name, body)
                if body not in names:
                    yield f"%{op.name} runs @{body}; expected the body of a statement or a loop"
    if not nx.is_directed_acyclic_graph(runs):
        first, _ = nx.find_cycle(runs)[0]
        yield f"@{first} runs itself"


def integers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Counts, numbers and indices of arrays are integers, made of constants, stages and instances."""
    known = {"STAGES", "_WARP_GROUP", "at", "copy", "piece", *_counted(kernel)}
    for op in kernel.ops():
        counts = [
            getattr(op, field)
            for field in ("count", "first")
            if op.kind in ("alloc_shared", "alloc_mbarriers", "named_barriers", "static_for")
            and getattr(op, field, None) is not None
        ]
        for e in counts:
            if not {*symbol_names(e)} <= {"STAGES"} or not e.subs(symbol("STAGES"), 2).is_Integer:
                yield f"%{op.name} has the number `{to_text(e)}`; expected integers and STAGES"
        for _, index, _ in _indexed(kernel, op):
            unknown = {*symbol_names(index)} - known
            if unknown or not index.subs(dict.fromkeys(index.free_symbols, 1)).is_Integer:
                yield f"%{op.name} has the index `{to_text(index)}`; expected integers, stages and instances"


def _counted(kernel: Kernel) -> set[str]:
    """The variables of stages and phases."""
    counters = only(kernel.ops(), gl.Counters)
    return {name for op in counters for name in (op.stage, op.count) if name}


def buffers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Statements refer to arrays of their kind: mbarriers, named barriers, buffers in shared memory."""
    kinds: dict[str, tuple[tuple[type[Op], ...], str]] = {
        "barrier": ((gl.AllocMbarriers,), "mbarriers"),
        "smem": ((gl.AllocShared, gl.SmemReinterpret), "buffers in shared memory"),
    }
    for op in kernel.ops():
        for field, (classes, what) in kinds.items():
            of_named = field == "barrier" and isinstance(op, NAMED)
            expected = (gl.NamedBarriers,) if of_named else classes
            ref = getattr(op, field, None)
            if op.kind in gl.GL.own and ref and not isinstance(kernel.op(ref), expected):
                yield f"%{op.name} refers to %{ref}; expected {'named barriers' if of_named else what}"


def initialised(module: Module, kernel: Kernel) -> Iterator[str]:
    """Each mbarrier is initialised once, in the entry, with as many arrivals as arrive in a phase."""
    entry = [*_within(kernel, kernel.block("entry"), {})]
    inits: dict[str, list[tuple[gl.MbarrierInit, Expr]]] = {}
    for op, loops in entry:
        if isinstance(op, gl.MbarrierInit):
            inits.setdefault(op.barrier, []).append((op, loops.get(str(op.index), sympy.Integer(0))))
    for array in only(kernel.block("entry").ops, gl.AllocMbarriers):
        found = inits.get(array.name, [])
        if [sympy.simplify(count - array.count) for _, count in found] != [0]:
            yield f"%{array.name} has {to_text(array.count)} mbarriers; expected one loop that initialises them all"
            continue
        expected = _arrivals(kernel, array.name)
        if expected != found[0][0].arrivals:
            yield (
                f"%{array.name} is initialised for {found[0][0].arrivals} arrivals; {expected} warp groups arrive at a "
                "phase of it"
            )


def _arrivals(kernel: Kernel, barrier: str) -> int:
    """The arrivals at a phase of an mbarrier: one of each instance of a warp group that arrives there, or one if each
    instance has its own mbarrier. The entry's early loads arrive once."""
    total = 0
    alternating = {f"{pipeline.removesuffix('_pipeline')}_empty" for pipeline in kernel.traits.round_robin}
    for block in (kernel.block("entry"), *kernel.warp_groups):
        ops = [op for op, _ in _within(kernel, block, {}) if isinstance(op, (gl.MbarrierExpect, gl.MbarrierArrive))]
        if own := [op for op in ops if op.barrier == barrier]:
            instances = block.warp_group.instances if block.warp_group else 1
            total += 1 if barrier in alternating or any(INSTANCE in op.index.free_symbols for op in own) else instances
    for op in only(kernel.ops(), pipe.WorkLoop):
        short = op.pipeline.removesuffix("_pipeline")
        group = kernel.warp_group_of(op)
        if group and barrier == f"{short}_{'full' if op.fetches else 'empty'}":
            total += group.instances
    return total


def named_barriers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Named barriers have distinct numbers below 16, and as many threads as arrive."""
    stages = {config.num_stages for config in module.configs(kernel.stands_for, kernel.backend)}
    for count in sorted(stages):
        taken: dict[int, str] = {}
        for op in only(kernel.block("entry").ops, gl.NamedBarriers):
            if op.first is None:
                continue
            first, n = (int(e.subs(symbol("STAGES"), count)) for e in (op.first, op.count))
            for number in range(first, first + n):
                if number >= NAMED_BARRIERS:
                    yield f"%{op.name} has the number {number} with {count} stages; expected less than {NAMED_BARRIERS}"
                if number in taken:
                    yield f"%{op.name} has the number {number} of %{taken[number]} with {count} stages"
                taken[number] = op.name
    uses: dict[str, set[Expr]] = {}
    for use in only(kernel.ops(), *NAMED):
        uses.setdefault(use.barrier, set()).add(use.threads)
    for name, threads in uses.items():
        if len(threads) > 1:
            numbers = " and ".join(sorted(map(str, threads)))
            yield f"%{name} has {numbers} threads; expected one number of threads"


def indices(module: Module, kernel: Kernel) -> Iterator[str]:
    """Indices of buffers and barriers are inside their arrays, for every stage and instance."""
    stages = {config.num_stages for config in module.configs(kernel.stands_for, kernel.backend)} or {2}
    for block in (kernel.block("entry"), *kernel.warp_groups):
        instances = block.warp_group.instances if block.warp_group else 1
        for op, loops in _within(kernel, block, {}):
            for ref, index, n in _indexed(kernel, op):
                array = kernel.op(ref)
                if not isinstance(array, (gl.AllocShared, gl.AllocMbarriers, gl.NamedBarriers)):
                    continue
                for count in sorted(stages):
                    if wrong := _outside(index, array.count, n, count, instances, loops, kernel):
                        yield f"%{op.name} uses number {wrong} of %{ref}, which has {to_text(array.count)}"
                        break


def _indexed(kernel: Kernel, op: Op) -> Iterator[tuple[str, Expr, int]]:
    """The arrays that a statement indexes: (array, index, elements at each index)."""
    if isinstance(op, (*MBARRIER, *NAMED)):
        yield op.barrier, op.index, 1
    elif isinstance(op, SMEM):
        yield op.smem, op.index, op.pieces if isinstance(op, gl.SmemView) else 1
    elif isinstance(op, gl.TmaLoad):
        yield op.barrier, op.index, 1
        yield op.smem, op.buffer, 1
    elif isinstance(op, gl.TmaWrite):
        yield op.smem, op.buffer, 1


def _outside(
    index: Expr, size: Expr, n: int, stages: int, instances: int, loops: dict[str, Expr], kernel: Kernel
) -> str:
    """A value of an index outside of an array; empty if there is none."""
    known: dict[Any, Any] = {symbol("STAGES"): stages}
    size = int(size.subs(known)) // n
    index = index.subs(known)
    ranges = []
    names = sorted(index.free_symbols, key=str)
    for name in names:
        if name == INSTANCE:
            ranges.append(range(instances))
        elif str(name) in loops:
            ranges.append(range(int(loops[str(name)].subs(known))))
        else:
            ranges.append(range(_stages_of(kernel, str(name), known)))
    for values in product(*ranges):
        found = int(index.subs(dict(zip(names, values))))
        if not 0 <= found < size:
            return str(found)
    return ""


def _stages_of(kernel: Kernel, name: str, known: dict[Any, Any]) -> int:
    """The number of values of a stage variable: as many as the pipeline that it counts has stages."""
    short = name.removesuffix("_stage").removesuffix("_phase")
    pipeline = next((op for op in only(kernel.ops(), pipe.Pipeline) if op.name == f"{short}_pipeline"), None)
    if name.endswith("_phase") or pipeline is None:
        return 2
    return int(pipeline.stages.subs({**known, symbol("num_stages"): known[symbol("STAGES")]}))


def _within(kernel: Kernel, block: Block, loops: dict[str, Expr]) -> Iterator[tuple[Op, dict[str, Expr]]]:
    """The ops of a block and of the bodies that they run, each with the variables of the unrolled loops around it."""
    for op in block.ops:
        yield op, loops
        inside = {**loops, op.var: op.count} if isinstance(op, gl.StaticFor) else loops
        for body in pipe.bodies_of(op):
            yield from _within(kernel, kernel.block(body), inside)


RULES: dict[str, Callable[[Module, Kernel], Iterator[str]]] = {
    "bodies": bodies,
    "integers": integers,
    "buffers": buffers,
    "initialised": initialised,
    "named-barriers": named_barriers,
    "indices": indices,
}
