"""Rules of divided kernels: what a kernel that is divided into roles has beside what all kernels have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import networkx as nx

from attngen.devices import CLASSES
from attngen.interp.numeric import compiled
from attngen.ir.expr import to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, SIDES, Arg, Load, Loop, Map, Op, OrderedAccumulate, OrderedAdd, Store, Yield
from attngen.ir.pipe import (
    HALVES,
    PARTIALS,
    PARTS,
    PLACE,
    WHOLE,
    ConcatHalves,
    ConsumerRelease,
    ConsumerWait,
    ConvertLayout,
    LocalLoad,
    Pack,
    PartialReduce,
    PinAfterWait,
    PinBeforeWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    Ranges,
    ReadMetadata,
    ReloadTile,
    Rematerialize,
    ScaledIota,
    SchedulerBarrier,
    SemaphoreAcquire,
    SemaphoreRelease,
    SliceRows,
    SoftmaxStats,
    SoftmaxWeights,
    SplitHalves,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
    WorkLoop,
    WriteTileIndex,
    ZeroOutOfBounds,
    bodies_of,
)
from attngen.tiles.intervals import mentions
from attngen.tiles.launches import groups, lane_registers
from attngen.tiles.order import makers_of, whole_range
from attngen.tiles.warp_groups import instance_bounds
from attngen.verify.caches import of_all_columns, page_of, places
from attngen.verify.types import turn_errors, types

_ROWS: set[tuple[str, tuple[str, ...]]] = {("f32", ("BLOCK_Q",))}
_HELD = {PinAfterWait: _ROWS, PinBeforeWait: _ROWS | {("f32", ("BLOCK_Q", PARTIALS)), ("f32", ("BLOCK_KV", "BLOCK_Q"))}}
_OF_WHOLE = {whole: own for own, whole in WHOLE.items()}
SPREADS = ("scores", "sums", "chains", "operand")
TURNS = ("init", "sync", "arrive", "tail")


def warp_groups(module: Module, kernel: Kernel) -> Iterator[str]:
    """After @entry come one role that fills rings and others that take from them; the copies of one of these share
    the rows of a tile."""
    if kernel.stands_for not in {k.name for k in module.kernels}:
        yield f"no kernel of the module is @{kernel.stands_for}, for which it could stand in"
        return
    if kernel.args != module.kernel(kernel.stands_for).args:
        yield f"it has other arguments than @{kernel.stands_for}, for which it stands in"
    found = {block.name: block.warp_group for block in kernel.blocks if block.warp_group}
    filled = {op.pipeline for op in kernel.ops() if isinstance(op, ProducerLoad)}
    fills, takes = (
        {r for r in found for op in kernel.within(r) if isinstance(op, kind) and op.pipeline in filled}
        for kind in (ProducerLoad, ConsumerWait)
    )
    yield from _sharing(kernel)
    if kernel.blocks[0].name != "entry" or kernel.blocks[0].warp_group:
        yield "its first block is not @entry"
    if any(isinstance(op, (ProducerLoad, ConsumerWait)) for op in kernel.ops()) and not (
        len(fills) == 1 and takes and not fills & takes
    ):
        yield f"{len(fills)} roles fill rings and {len(takes)} take from them; expected one that fills, and others that take"
    for name, warp_group in found.items():
        if warp_group and not 1 <= warp_group.instances <= 3:
            yield f"@{name} has {warp_group.instances} copies; expected 1 to 3"
        if warp_group is not None and (warp_group.registers % 8 > 0 or not 24 <= warp_group.registers <= 240):
            yield f"@{name} has {warp_group.registers} registers; expected a multiple of 8 from 24 to 240"
    given = sum(groups(kernel))
    for row in module.configs(kernel.name, kernel.backend):
        if row.device in CLASSES and given > (most := lane_registers(kernel, row)):
            who = (
                f"each of {kernel.ctas_per_sm} programs on a multiprocessor" if kernel.ctas_per_sm > 1 else "a program"
            )
            yield f"the roles' groups of four warps have {given} registers for each lane; {who} has {most} at its launch"
        for name, warp_group in found.items():
            if (
                warp_group
                and warp_group.rows
                and warp_group.instances * warp_group.rows != (own := row.rows_of(kernel.program_axis))
            ):
                yield (
                    f"@{name} has {warp_group.instances} copies of {warp_group.rows} rows, and {row.device} has "
                    f"{AXIS_DIM[kernel.program_axis]}={own}"
                )


def _sharing(kernel: Kernel) -> Iterator[str]:
    """A ring that copies of a role share a tile through has one such role, and one that takes from it.

    That is the same one, or one of one copy, or of copies to which the tiles are dealt. Through a ring in relay two
    roles share tiles, and each takes those of the other.
    """
    pipelines = {op.pipeline for op in kernel.ops() if isinstance(op, ProducerStore)}
    relays = {op.name for op in kernel.ops() if isinstance(op, Pipeline) and op.exchange}
    for pipeline in sorted(pipelines | relays):
        using = [
            (
                b,
                [
                    type(op)
                    for op in kernel.within(b.name)
                    if isinstance(op, (ProducerStore, ConsumerWait)) and op.pipeline == pipeline
                ],
            )
            for b in kernel.warp_groups
        ]
        shares, takes = ([b for b, kinds in using if kind in kinds] for kind in (ProducerStore, ConsumerWait))
        alone = [b.warp_group.instances == 1 or pipeline in kernel.round_robin for b in takes if b.warp_group]
        if pipeline in relays:
            if shares != takes or [b.warp_group.instances for b in shares if b.warp_group] != [1, 1]:
                yield f"%{pipeline} is in relay; expected two roles of one copy each that share tiles through it, and take them"
            shares = []
        elif len(shares) != 1 or len(takes) != 1 or not (takes == shares or alone == [True]):
            who, whom = (", ".join(f"@{b.name}" for b in found) or "nobody" for found in (shares, takes))
            yield (
                f"%{pipeline} is shared by {who} and taken by {whom}; expected one role each, the "
                f"same, or the second of one copy or dealt"
            )
        for b in shares:
            if b.warp_group and b.warp_group.instances != 2 and (b.warp_group.instances != 1 or takes == shares):
                yield f"{b.warp_group.instances} copies of @{b.name} share a tile through %{pipeline}; expected 2"
        if any(isinstance(op, ProducerLoad) and op.pipeline == pipeline for op in kernel.ops()):
            yield f"%{pipeline} is filled by the copy engine and by copies of a role"


def scopes(module: Module, kernel: Kernel) -> Iterator[str]:
    """A value is defined before its use: in the same block, in one around it, in what comes before each tile, or in
    @entry.

    Each body belongs to one role.
    """
    if not nx.is_directed_acyclic_graph(kernel.graph):
        yield f"%{nx.find_cycle(kernel.graph)[0][0]} depends on itself"
    blocks = {block.name for block in kernel.blocks if not block.warp_group and block.name != "entry"}
    before = {op.of for op in kernel.ops() if isinstance(op, WorkLoop)}
    around: dict[str, Op] = {}  # body -> the op that runs it
    homes: dict[str, set[str]] = {}
    for op in kernel.ops():
        for body in (*bodies_of(op), *([op.of] if isinstance(op, WorkLoop) else [])):
            if body not in blocks:
                yield f"%{op.name} runs @{body}, which is no body"
                return
        for body in bodies_of(op):
            around[body] = op
            homes.setdefault(body, set()).add(kernel.graph.nodes[op.name]["block"])
    for name in sorted(blocks - before):
        if len(homes.get(name, ())) != 1:
            yield f"@{name} is run by the ops of {len(homes.get(name, ()))} blocks; expected one"
            return
    if before & homes.keys():
        yield f"@{min(before & homes.keys())} comes before each tile, and is a body too"
        return
    for name, data in kernel.graph.nodes.items():
        for ref in (*data["op"].operands(), *sorted(kernel.scalars_of(data["op"]))):
            if not _is_defined(kernel, around, ref, data):
                yield f"%{name} reads %{ref} where it is not defined"


def _is_defined(kernel: Kernel, around: dict[str, Op], ref: str, place: dict[str, Any]) -> bool:
    """Whether a value is defined before a place: a node of the kernel's graph."""
    source = kernel.graph.nodes[ref.split(".")[0]]
    seen = {"entry"}
    while place["block"] != source["block"] and place["block"] in around:
        op = around[place["block"]]
        seen |= {op.of} if isinstance(op, WorkLoop) else set()
        place = kernel.graph.nodes[op.name]
    if place["block"] == source["block"]:
        return bool(source["order"] < place["order"])
    return source["block"] in seen


def bodies(module: Module, kernel: Kernel) -> Iterator[str]:
    """What a pipeline carries, what its bodies take and what they yield have the same fields and types."""
    for op in kernel.ops():
        if isinstance(op, PipelinedLoop):
            starts = {field: kernel.type_of(ref) for field, ref in op.carry}
            if not op.step or bool(op.first) != bool(op.last):
                yield f"%{op.name} has not @first, @step and @last, nor @step alone"
                continue
            turns = [body for body in op.bodies if body != op.skip]
            takes = [_taken(kernel, body, f"_in_{body}") for body in turns]
            gives = [_yielded(kernel, body) for body in turns]
            if op.odd or op.pair:
                yield from _by_twos(op)
                fits = all(starts == found for found in (*takes, *gives))
            else:
                fits = starts == takes[0] == gives[-1]
            if not (fits and (op.odd or op.pair or len(turns) == 1 or gives[0] == takes[1] == gives[1] == takes[2])):
                who = ", ".join(f"@{body}" for body in turns)
                yield f"%{op.name}: what {who} take and yield does not fit what it carries"
            yield from _hidden(kernel, op)
            if not (op.partial or op.full):
                yield f"%{op.name} has no range"
            alone = not (op.first or op.tile_indices or op.reversed)
            if op.in_order and not (alone and len(op.full) <= 1 and whole_range((*op.partial, *op.full))):
                yield f"%{op.name} comes to tiles in their order; expected @step alone, one range of full ones, and others beside it"
            yield from _dealing(module, kernel, op)
            if op.by_tile and not (op.in_order and op.heads and not op.listed):
                yield f"%{op.name} comes to each tile for all heads; expected heads, and a loop over tiles in their order, of no list"
            if op.recompute and not (op.in_order and op.carry):
                yield f"%{op.name} computes its numbers again in each turn; expected a loop over tiles in their order, with sums"
        elif isinstance(op, Loop):
            carried = {field: kernel.type_of(ref) for field, ref in op.carry}
            if not carried == _taken(kernel, op.body, "") == _yielded(kernel, op.body):
                yield f"%{op.name}: what @{op.body} takes and yields does not fit what it carries"


def _by_twos(op: PipelinedLoop) -> Iterator[str]:
    """Where even and odd turns differ, they differ in nothing else."""
    others = (op.first, op.listed, op.reversed, op.skip, op.in_order, op.recompute, op.heads, op.round_robin)
    if any(others) or (op.odd and op.pair):
        yield f"%{op.name} has turns by twos; expected @step, and @{op.odd or op.pair} for every other turn, or for two, and nothing else"


def _dealing(module: Module, kernel: Kernel, op: PipelinedLoop) -> Iterator[str]:
    """Turns are dealt to copies by the slots of a ring, one for each copy. A turn takes one tile from it, and
    nothing else does."""
    if op.round_robin is None:
        return
    pipeline, alone = kernel.op(op.round_robin), op.bodies == (op.step,) and not op.carry
    warp_group = kernel.warp_group_of(op)
    takes = [
        o
        for b in kernel.warp_groups
        for o in kernel.within(b.name)
        if isinstance(o, ConsumerWait) and o.pipeline == op.round_robin
    ]
    used = [
        type(o)
        for o in kernel.block(op.step).ops
        if isinstance(o, (ConsumerWait, ConsumerRelease, SchedulerBarrier, ProducerLoad, ProducerStore, Wgmma))
    ]
    if (
        not isinstance(pipeline, Pipeline)
        or not alone
        or len(takes) != 1
        or used != [ConsumerWait, ConsumerRelease]
        or takes[0] not in kernel.block(op.step).ops
    ):
        yield (
            f"%{op.name} deals turns by %{op.round_robin}; expected a ring from which @step takes a tile and gives it back, and nothing "
            f"carried"
        )
        return
    stages = compiled(pipeline.stages)
    for row in module.configs(kernel.name, kernel.backend):
        n = int(stages({"num_stages": row.num_stages}))
        if warp_group is None or warp_group.instances != n or n < 2:
            yield f"%{op.name} deals turns by %{op.round_robin}, of {n} slots; expected as many as the role has copies, and two or more"


def _hidden(kernel: Kernel, op: PipelinedLoop) -> Iterator[str]:
    """Tiles that a copy passes over are those of which the bounds say, for its own rows, that these see nothing."""
    if not (op.reversed or op.skip or op.instance_partial):
        return
    own, skips = instance_bounds(kernel, op.partial, op.full, op.listed), bool(op.skip or op.instance_partial)
    if own is None:
        yield f"%{op.name} has partial tiles that come backwards or are passed over; expected one range of them, behind one of full ones"
    elif (skips or op.carry) and not (op.skip and op.instance_partial and op.reversed):
        yield f"%{op.name} passes over tiles; expected backwards, skip and own_partial"
    elif skips and op.instance_partial != (own,):
        yield f"%{op.name}: for a copy's own rows, the bounds of the loop are instance_partial({' .. '.join(map(to_text, own))})"


def _taken(kernel: Kernel, body: str, suffix: str) -> dict[str, Any]:
    return {op.name.removesuffix(suffix): op.type for op in kernel.block(body).ops if isinstance(op, Arg)}


def _yielded(kernel: Kernel, body: str) -> dict[str, Any]:
    last = kernel.block(body).ops[-1:]
    return {field: kernel.type_of(ref) for op in last if isinstance(op, Yield) for field, ref in op.values}


def walks(module: Module, kernel: Kernel) -> Iterator[str]:
    """All roles run over the same tiles in the same order: those of the kernel for which this one stands in, full and
    partial.

    Programs are those of that kernel, in its order, and add in the same turns. Tiles come from where it loads them, and
    leave to where it stores them.
    """
    portable = module.kernel(kernel.stands_for)
    if kernel.grid != portable.grid:
        yield f"its grid is not that of @{portable.name} as it is portable"
    turns, expected = (
        [(op.semaphore, op.order, makers_of(k, op)) for op in k.ops() if isinstance(op, OrderedAdd)]
        for k in (kernel, portable)
    )
    if turns != expected:
        yield f"its programs add in other turns than those of @{portable.name} as it is portable"
    yield from _merged(kernel, portable)
    yield from _moved(kernel, portable)
    around = portable.of_heads  # here its heads are a part of the loops inside
    tiles = (loop for loop in portable.loops if loop is not around)
    wanted: dict[str, Any] = {
        loop.cls: (loop.ranges, loop.listed, (around.ranges if around else loop.heads, loop.by_tile)) for loop in tiles
    }
    scalars = dict(portable.named)
    for name, expr in kernel.named:
        if scalars.get(name) != expr:
            yield f"%{name} is `{to_text(expr)}`; in the kernel it stands in for it is `{to_text(scalars.get(name, expr))}`"
    orders = {}
    for warp_group in kernel.warp_groups:
        runs = [run for op in kernel.within(warp_group.name) for run in _runs(op)]
        orders[warp_group.name] = [run for run in runs if run[1]]
        for cls, ranges, *rest, _ in runs:
            if (ranges, *rest) != wanted.get(cls, ((), *rest)) and ranges:
                yield f"@{warp_group.name} runs over other tiles of class {cls} than @{portable.name} as it is portable"
        if runs and {run[0] for run in runs if run[1]} != wanted.keys():
            yield f"@{warp_group.name} runs over tiles of class {', '.join(run[0] for run in runs if run[1])}; expected {', '.join(wanted)}"
    if len({repr(order) for order in orders.values() if order}) > 1:
        yield f"{' and '.join(f'@{name}' for name in orders)} run over tiles in different orders"


def _moved(kernel: Kernel, portable: Kernel) -> Iterator[str]:
    """What is copied from other places than those at which the portable kernel loads, or not stored once at each at
    which that stores."""
    loads = {(*_target(portable, op), page_of(portable, op)) for op in portable.ops() if isinstance(op, Load)}
    for op in kernel.ops():
        if (
            isinstance(op, ProducerLoad)
            and (op.src.tensor, of_all_columns(op.src.index), page_of(kernel, op)) not in loads
        ):
            yield f"%{op.name} copies from where @{portable.name} loads nothing as it is portable"
    apart = any(
        isinstance(op, (TmaStore, Store)) and {*map(str, _target(kernel, op)[1])} & {*SIDES} for op in kernel.ops()
    )
    stored, wanted = (
        Counter(
            place for op in k.ops() if isinstance(op, (TmaStore, Store)) for place in places(*_target(k, op), apart)
        )
        for k in (kernel, portable)
    )
    for tensor, index in {**wanted, **stored}:
        if stored[tensor, index] != wanted[tensor, index]:
            times, place = stored[tensor, index], f"%{tensor}[{', '.join(map(to_text, index))}]"
            yield f"it stores {times} times at {place}; @{portable.name} as it is portable stores {wanted[tensor, index]} times there"


def _merged(kernel: Kernel, portable: Kernel) -> Iterator[str]:
    """Each copy stores what programs merge in one turn: it follows the program before it, puts all tiles, flushes, and
    raises.

    Before they are put, tiles are merged as in the portable kernel.
    """
    merges, own = ([op for op in k.ops() if isinstance(op, OrderedAccumulate)] for k in (portable, kernel))
    wanted = [(*_target(portable, op), op.order) for op in merges]
    if own:
        if [(*_target(kernel, op), op.order, op.semaphore, op.ends) for op in own] != [
            (*w, op.semaphore, op.ends) for w, op in zip(wanted, merges)
        ]:
            yield f"it merges other tiles than @{portable.name} as it is portable"
        return
    of_turns = {portable.through(op.semaphore) for op in merges if op.semaphore}
    pipelines = {op.staging for op in kernel.ops() if isinstance(op, TmaStore) and op.order is not None}

    adds = {op.semaphore.tensor for op in kernel.ops() if isinstance(op, OrderedAdd) and op.semaphore}

    def in_turn(op: Op) -> bool:
        ends = isinstance(op, SemaphoreRelease) and kernel.through(op.semaphore) in of_turns
        leaves = (isinstance(op, TmaStore) and op.order is not None) or (
            isinstance(op, TmaStoreWait) and op.staging in pipelines
        )
        return ends or leaves or (isinstance(op, SemaphoreAcquire) and op.semaphore.tensor not in adds)

    steps = [op for op in kernel.ops() if in_turn(op)]
    if [(*_target(kernel, op), op.order) for op in steps if isinstance(op, TmaStore)] != wanted:
        yield f"it puts other tiles in turn than those that @{portable.name} merges as it is portable"
    if not merges:
        yield from (
            f"%{op.name} waits for a turn, and nothing is merged" for op in steps if isinstance(op, SemaphoreAcquire)
        )
        return
    kinds = [type(op) for op in steps]
    blocks = {kernel.graph.nodes[op.name]["block"] for op in steps}
    expected = [
        SemaphoreAcquire,
        *[TmaStore] * len(merges),
        *[TmaStoreWait] * kinds.count(TmaStoreWait),
        SemaphoreRelease,
    ]
    following = [(kernel.through(op.semaphore), op.order) for op in steps if isinstance(op, SemaphoreAcquire)]
    if (
        kinds != expected
        or not kinds.count(TmaStoreWait)
        or len(blocks) > 1
        or following != [(*of_turns, merges[0].order)]
    ):
        yield "its copies merge tiles; expected one follow, all puts, their flush and then one raise, in one block"


def _target(kernel: Kernel, op: Load | TmaStore | Store) -> tuple[str, tuple[Any, ...]]:
    """The tensor and the indices at which an op stores."""
    if isinstance(op, TmaStore):
        return op.dst.tensor, op.dst.index
    tensor, index = kernel.accessed(op)
    return tensor.name, index


def _runs(op: Op) -> Iterator[tuple[str, Ranges, str | None, tuple[Ranges, bool], tuple[bool, bool]]]:
    """What an op runs over: a class of tiles, where they are, the heads, and whether tiles come from last to first,
    or by their numbers."""
    if isinstance(op, Loop):
        yield op.cls, op.ranges, op.listed, (op.heads, op.by_tile), (False, False)
    if isinstance(op, PipelinedLoop):
        yield "partial", op.partial, op.listed, (op.heads, op.by_tile), (op.reversed, op.in_order)
        yield "full", op.full, op.listed, (op.heads, op.by_tile), (False, op.in_order)


def used(module: Module, kernel: Kernel) -> Iterator[str]:
    """Everything is read, but for what acts by itself."""
    named = {name for op in kernel.ops() for name in kernel.scalars_of(op)}
    for op in kernel.ops():
        acts = isinstance(
            op,
            (
                ZeroOutOfBounds,
                ProducerTail,
                ProducerLoad,
                TmaStoreWait,
                SemaphoreAcquire,
                ConsumerRelease,
                TmaStore,
                SemaphoreRelease,
                ReloadTile,
                ProducerStore,
                Store,
                WriteTileIndex,
                SchedulerBarrier,
                WorkLoop,
                Yield,
            ),
        )
        acts |= isinstance(op, Arg) and op.role != "carry"
        acts |= isinstance(op, Arg) and op.role == "carry" and _is_read_in_turn(kernel, op)
        acts |= any(isinstance(o, (OrderedAdd, ProducerLoad)) for body in bodies_of(op) for o in kernel.block(body).ops)
        if not (acts or kernel.graph.out_degree(op.name) or op.name in named):
            yield f"%{op.name} is read by nothing"


def _is_read_in_turn(kernel: Kernel, arg: Arg) -> bool:
    """Whether a carried value is read in another turn, where even and odd ones differ."""
    home = kernel.block_of(arg).name
    loop = next(
        (op for op in kernel.ops() if isinstance(op, PipelinedLoop) and (op.odd or op.pair) and home in op.bodies), None
    )
    names = {f"{loop.field(arg.name, home)}_in_{body}" for body in loop.bodies} if loop else set()
    return any(kernel.graph.out_degree(name) for name in names & set(kernel.graph))


def flights(module: Module, kernel: Kernel) -> Iterator[str]:
    """A product in flight is read by its await alone, in the same block, or by one that goes on from it. Its operand
    in registers is held until they are awaited."""
    for op in kernel.ops():
        if isinstance(op, Wgmma):
            users = [kernel.op(name) for name in kernel.graph.successors(op.name)]
            home = kernel.graph.nodes[op.name]["block"]
            if _goes_on(kernel, op, users):
                continue
            if [type(user) for user in users] != [WgmmaWait] or kernel.graph.nodes[users[0].name]["block"] != home:
                yield f"%{op.name} is in flight; expected one await in @{home} to read it"
                continue
            held = tuple(_held(kernel, op))
            awaited = users[0]
            if isinstance(awaited, WgmmaWait) and awaited.keep_alive != held:
                yield f"%{awaited.name} holds {_refs(awaited.keep_alive)}; expected {_refs(held)}, which the product reads from registers"


def _goes_on(kernel: Kernel, op: Wgmma, users: list[Op]) -> bool:
    """Whether another product of the block goes on from it."""
    after = [user for user in users if isinstance(user, Wgmma) and user.acc == op.name]
    return len(users) == 1 and [kernel.block_of(user) for user in after] == [kernel.block_of(op)]


def _held(kernel: Kernel, op: Wgmma) -> Iterator[str]:
    """The operands in registers of a product, and of those that it goes on from, first ones first."""
    before = kernel.op(op.acc) if op.acc else None
    if isinstance(before, Wgmma):
        yield from _held(kernel, before)
    if kernel.type_of(op.a).space == "reg":
        yield op.a


def _refs(names: tuple[str, ...]) -> str:
    return " and ".join(f"%{name}" for name in names) or "nothing"


def _pipeline_errors(kernel: Kernel, op: Pipeline) -> Iterator[str]:
    if op.beside:
        tiles = kernel.op(op.beside)
        fits = isinstance(tiles, Pipeline) and (tiles.stages, tiles.per_instance, tiles.beside, op.per_instance) == (
            op.stages,
            "",
            None,
            "",
        )
        known = (
            {("i32", "sram"), ("f32", "sram")}
            if isinstance(tiles, Pipeline) and op.type.dims == tiles.type.dims[:1]
            else {("i32", "sram")}
        )
        if not fits or (op.type.dtype, op.type.space) not in known or (len(known) == 1 and op.type.dims):
            yield f"lies beside %{op.beside}; expected as many slots, and a number of 32 bits for each row of a tile, or one i32[], in sram"
    elif op.type.space != "sram" or (len(op.type.dims) != 2 and not _is_of_places(op) and not _is_of_rows(kernel, op)):
        yield "is of tiles, of rows that a role shares, or of places i32[], in sram"
    if op.exchange and (op.stages, op.per_instance, op.columns, op.mbarrier_release, op.beside) != (
        1,
        "",
        0,
        False,
        None,
    ):
        yield "is in relay; expected one slot, which all roles have"
    if op.per_instance and op.per_instance not in {warp_group.name for warp_group in kernel.warp_groups}:
        yield f"is for each copy of @{op.per_instance}, which is no role"
    if op.stages.is_Integer and op.stages < 1:
        yield f"has {op.stages} slots; expected 1 or more"


def _is_of_places(op: Op) -> bool:
    """Whether it is a ring that passes places of tiles, the same to all."""
    return isinstance(op, Pipeline) and (op.type.dtype, op.type.dims, op.per_instance, op.beside) == (
        "i32",
        (),
        "",
        None,
    )


def _is_of_rows(kernel: Kernel, op: Pipeline) -> bool:
    """Whether it passes a number of each row from one role to another."""
    shared = any(
        isinstance(user, ProducerStore) and user.pipeline == op.name
        for user in map(kernel.op, kernel.graph.successors(op.name))
    )
    return shared and (op.type.dtype, op.type.dims, op.per_instance) == ("f32", (AXIS_DIM[kernel.program_axis],), "")


def _work_loop_errors(kernel: Kernel, op: WorkLoop) -> Iterator[str]:
    works = [other for other in kernel.ops() if isinstance(other, WorkLoop)]
    if not _is_of_places(kernel.op(op.pipeline)):
        yield f"passes places through %{op.pipeline}, which is no ring of i32[]"
    if len({(other.pipeline, other.of) for other in works}) > 1 or sum(other.draws for other in works) != 1:
        yield "belongs to roles of which one draws, which pass places through one ring and know the same of a tile"
    homes = [kernel.graph.nodes[other.name]["block"] for other in works]
    if sorted(homes) != sorted(warp_group.name for warp_group in kernel.warp_groups):
        yield f"{len(works)} ops run over the program's tiles; expected one in each role"


def _reload_tile_errors(kernel: Kernel, op: ReloadTile) -> Iterator[str]:
    bodies = {(other.pipeline, other.body) for other in kernel.ops() if isinstance(other, WorkLoop) and not other.draws}
    if (op.pipeline, kernel.graph.nodes[op.name]["block"]) not in bodies:
        yield f"reads a place from %{op.pipeline} where this role has none"


def _producer_load_errors(kernel: Kernel, op: ProducerLoad) -> Iterator[str]:
    source, pipeline = kernel.op(op.src.tensor), kernel.op(op.pipeline)
    dims = tuple(AXIS_DIM[axis] for axis in op.src.axes())
    if (
        not isinstance(source, Arg)
        or source.role != "in"
        or not isinstance(pipeline, Pipeline)
        or (dims, source.type.dtype)
        != (tuple(_OF_WHOLE.get(d, d) for d in pipeline.type.unpadded), pipeline.type.dtype)
    ):
        yield "fills a ring with tiles of another type"
    if isinstance(pipeline, Pipeline):
        yield from _order_errors(kernel, op, pipeline)


def _places_errors(kernel: Kernel, op: PipelinedLoop) -> Iterator[str]:
    """Numbers of tiles that come with the tiles are read before these are given back."""
    told = {o.pipeline for o in kernel.ops() if isinstance(o, WriteTileIndex)}
    if told - {op.tile_indices} and op.listed and op.first:
        yield f"does not take its places from %{min(told)}, which a role tells them"
    if not op.tile_indices:
        return
    pipeline = kernel.op(op.tile_indices)
    if not isinstance(pipeline, Pipeline) or op.tile_indices not in told or not op.listed:
        yield f"has its places from %{op.tile_indices}; expected listed tiles, and a ring that a role tells their numbers"
        return
    for body in op.bodies:
        ops = list(kernel.block(body).ops)
        placed = [at for at, o in enumerate(ops) if any(mentions(e, PLACE) for e in o.expressions)]
        takes = [o.name for o in ops if isinstance(o, ConsumerWait) and o.pipeline == pipeline.beside]
        given = [at for at, o in enumerate(ops) if isinstance(o, ConsumerRelease) and o.value in takes]
        if placed and (not given or max(placed) > min(given)):
            yield f"runs @{body}, which needs the place of a tile after it has given the tile back, whose number comes with it"


def _write_tile_index_errors(kernel: Kernel, op: WriteTileIndex) -> Iterator[str]:
    pipeline = kernel.op(op.pipeline)
    if not isinstance(pipeline, Pipeline) or not pipeline.beside or pipeline.type.dims:
        yield f"tells %{op.pipeline} a number; expected a ring of i32[] that lies beside another one"
    else:
        yield from _order_errors(kernel, op, pipeline)


def _order_errors(kernel: Kernel, op: ProducerLoad | WriteTileIndex, pipeline: Pipeline) -> Iterator[str]:
    """What lies beside a tile is filled just before it."""
    ops = list(kernel.block_of(op).ops)
    at, tiles = ops.index(op), pipeline.beside or pipeline.name
    beside = [o.name for o in kernel.ops() if isinstance(o, Pipeline) and o.beside == tiles]
    start = at - beside.index(pipeline.name) if pipeline.name in beside else at - len(beside)
    if [
        o.pipeline if isinstance(o, (ProducerLoad, WriteTileIndex)) else ""
        for o in ops[max(0, start) :][: len(beside) + 1]
    ] != [
        *beside,
        tiles,
    ]:
        yield f"is not among the fills of %{tiles} and of what lies beside it; expected these one after another, that of %{tiles} last"


def _read_metadata_errors(kernel: Kernel, op: ReadMetadata) -> Iterator[str]:
    pipeline, take = kernel.op(op.pipeline), kernel.op(op.beside)
    if not isinstance(pipeline, Pipeline) or not isinstance(take, ConsumerWait) or pipeline.beside != take.pipeline:
        yield f"reads from %{op.pipeline} beside %{op.beside}; expected a tile that is taken from the ring which it lies beside"
        return
    if replace(pipeline.type, space="reg") != op.type:
        yield f"reads numbers of another type than %{op.pipeline} has"
    names = [o.value if isinstance(o, ConsumerRelease) else o.name for o in kernel.block_of(op).ops]
    if take.name not in names or take.name in names[names.index(take.name) + 1 : names.index(op.name)]:
        yield f"reads beside %{op.beside} where this block has not taken it, or has given it back"


def _consumer_wait_errors(kernel: Kernel, op: ConsumerWait) -> Iterator[str]:
    if not isinstance(kernel.op(op.pipeline), Pipeline) or kernel.type_of(op.pipeline) != op.type:
        yield f"takes a tile of another type than %{op.pipeline} has"


def _local_load_errors(kernel: Kernel, op: LocalLoad) -> Iterator[str]:
    tile = kernel.type_of(op.value)
    taken = isinstance(kernel.op(op.value), ConsumerWait) and tile.space == "sram"
    if not taken or op.type.space != "reg" or op.type.dtype != tile.dtype or sorted(op.type.dims) != sorted(tile.dims):
        yield f"lifts %{op.value} as {op.type.dtype}[{', '.join(op.type.dims)}]; expected a taken tile or its transpose, in registers"
    home = kernel.block_of(op).ops
    if any(isinstance(o, ConsumerRelease) and o.value == op.value for o in home[: home.index(op)]):
        yield f"lifts %{op.value}, which has been given back before"


def _zero_out_of_bounds_errors(kernel: Kernel, op: ZeroOutOfBounds) -> Iterator[str]:
    take, rows = kernel.op(op.value), AXIS_DIM[kernel.loop_axis]
    if (
        not isinstance(take, ConsumerWait)
        or take.type.dims[:1] != (rows,)
        or take not in kernel.block_of(op).ops
        or not kernel.reads_cache
    ):
        yield f"clears rows of %{op.value}; expected a tile of rows of a cache that this block has taken"


def _consumer_release_errors(kernel: Kernel, op: ConsumerRelease) -> Iterator[str]:
    take = kernel.op(op.value)
    if (
        not isinstance(take, ConsumerWait)
        or kernel.graph.nodes[take.name]["block"] != kernel.graph.nodes[op.name]["block"]
    ):
        yield "gives back what this block has not taken"


def _slice_rows_errors(kernel: Kernel, op: SliceRows) -> Iterator[str]:
    whole, own = kernel.type_of(op.value), AXIS_DIM[kernel.program_axis]
    mine = replace(op.type, dims=tuple(WHOLE[own] if d == own else d for d in op.type.dims))
    if (
        not isinstance(kernel.op(op.value), (Rematerialize, ConsumerWait))
        or op.type.dims[:1] != (own,)
        or mine != whole
    ):
        yield f"is of the copy's own rows, {own}, of a taken tile of {WHOLE[own]}"


def _rematerialize_errors(kernel: Kernel, op: Rematerialize) -> Iterator[str]:
    if not isinstance(kernel.op(op.value), ConsumerWait) or kernel.type_of(op.value) != op.type:
        yield f"is %{op.value} under another type, or that is no taken tile"


def _producer_store_errors(kernel: Kernel, op: ProducerStore) -> Iterator[str]:
    pipeline, value = kernel.type_of(op.pipeline), kernel.type_of(op.value)
    wholes = {part: whole for whole, part in PARTS.items()} | WHOLE
    parts = [at for at, (mine, whole) in enumerate(zip(value.dims, pipeline.dims)) if mine != whole]
    fits = (
        len(value.dims) == len(pipeline.dims)
        and len(parts) == 1
        and wholes.get(value.dims[parts[0]]) == pipeline.dims[parts[0]]
    )
    warp_group = kernel.warp_group_of(op)
    fits |= warp_group is not None and warp_group.instances == 1 and value.dims == pipeline.dims
    beside = {
        o.name: replace(o.type, space="reg")
        for o in kernel.ops()
        if isinstance(o, Pipeline) and o.beside == op.pipeline
    }
    if {name: kernel.type_of(ref) for name, ref in op.beside} != beside:
        found, wanted = (", ".join(names) or "nothing" for names in ([name for name, _ in op.beside], beside))
        yield f"writes rows to {found} beside %{op.pipeline}; expected {wanted}"
    if (
        not isinstance(kernel.op(op.pipeline), Pipeline)
        or not fits
        or value.dtype != pipeline.dtype
        or value.space != "reg"
    ):
        found, tile = (f"{t.dtype}[{', '.join(t.dims)}]" for t in (value, pipeline))
        yield f"writes {found} to %{op.pipeline}, of {tile}; expected a copy's part of one dimension"


def _scaled_iota_errors(kernel: Kernel, op: ScaledIota) -> Iterator[str]:
    step = kernel.type_of(op.value)
    if (step.dtype, step.dims) != ("f32", ()) or (op.type.dtype, op.type.dims, op.type.space) != (
        "f32",
        ("BLOCK_KV",),
        "reg",
    ):
        yield "multiplies places of keys by one number: f32[] makes f32[BLOCK_KV] @reg"


def _wgmma_errors(kernel: Kernel, op: Wgmma) -> Iterator[str]:
    a, b = kernel.type_of(op.a), kernel.type_of(op.b)
    dims = tuple(d for t in (a, b) for d in t.dims if d != op.over)
    parts = [
        tuple(PARTS[d] if d == whole else d for d in dims)
        for whole in PARTS
        if whole in dims and op.over in WHOLE.values()
    ]
    fits = op.over in a.dims and op.over in b.dims and op.type.dims in (dims, *parts)
    if not fits or (op.type.dtype, op.type.space) != ("f32", "flight"):
        yield f"the product is f32[{', '.join(dims)}] @flight"
    if {a.dtype, b.dtype} != {"T"} or b.space != "sram":
        yield "multiplies values of the tensors' element type, the second in sram"
    before = kernel.type_of(op.acc) if op.acc else None
    if before and ((before.dtype, before.dims) != ("f32", dims) or before.space not in ("reg", "flight")):
        yield f"the accumulator is not f32[{', '.join(dims)}], in registers or in flight"
    pieces = [_pieces(kernel, ref) for ref in (op.a, op.b)]
    summed = [n if op.over == t.dims[-1] else 0 for n, t in zip(pieces, (a, b))]
    sums = bool(op.acc) or op.type.dims == (
        "BLOCK_Q",
        PARTS["D_QK"],
    )  # whose columns may lie in the pieces of the second operand
    columns = sums and pieces[1] and op.over in b.dims[:1] and b.dims[-1] == "D_QK"
    if len(set(summed)) > 1 or pieces != (summed if not columns else [summed[0], pieces[1]]):
        found = " and ".join(str(n or "all") for n in pieces)
        yield f"its operands lie in pieces of {found} columns; expected pieces of one width, over {op.over}"


def _pieces(kernel: Kernel, ref: str) -> int:
    """The columns of the pieces in which a value lies, if it is a tile that does."""
    take = kernel.take_of(ref)
    pipeline = kernel.op(take.pipeline) if take else None
    return pipeline.columns if isinstance(pipeline, Pipeline) else 0


def _wgmma_wait_errors(kernel: Kernel, op: WgmmaWait) -> Iterator[str]:
    flying = kernel.type_of(op.value)
    if flying.space != "flight" or (flying.dtype, flying.dims, "reg") != (op.type.dtype, op.type.dims, op.type.space):
        yield f"awaits %{op.value}, which is not in flight, or has another type"


def _pack_errors(kernel: Kernel, op: Pack) -> Iterator[str]:
    value = kernel.type_of(op.value)
    if (value.dtype, value.dims, value.space) != ("f32", op.type.dims, op.type.space) or op.type.dtype != "T":
        yield "packs a value of f32 to the tensors' element type"


def _same_errors(kernel: Kernel, op: ConvertLayout | PinAfterWait | PinBeforeWait) -> Iterator[str]:
    if kernel.type_of(op.value) != op.type:
        yield "changes the type of a value"
    if isinstance(op, ConvertLayout) and op.to not in SPREADS:
        yield f"converts to({op.to}); expected {', '.join(SPREADS)}"
    if isinstance(op, (PinAfterWait, PinBeforeWait)) and (op.type.dtype, op.type.dims) not in _HELD[type(op)]:
        yield f"{'holds' if isinstance(op, PinBeforeWait) else 'defers'} {op.type.dtype}[{', '.join(op.type.dims)}]; expected a row of f32"
    if isinstance(op, PinAfterWait):
        home = kernel.block_of(op).ops
        if not any(isinstance(other, WgmmaWait) for other in home[: home.index(op)]):
            yield "is deferred until after an await, and none comes before it"


def _rows_errors(kernel: Kernel, op: SoftmaxStats) -> Iterator[str]:
    s, m = kernel.type_of(op.s), kernel.type_of(op.m)
    if (
        s.dtype != "f32"
        or m != op.type
        or s.dims[:1] != op.type.dims
        or len(s.dims) != 2
        or (op.scale and kernel.type_of(op.scale).dims)
    ):
        yield "needs scores in f32, m of their rows, which is what it computes, and one number as scale"
    if op.guard not in ("always", "partial"):
        yield f"guards `{op.guard}`; expected always or partial"


def _softmax_weights_errors(kernel: Kernel, op: SoftmaxWeights) -> Iterator[str]:
    base = kernel.type_of(op.base)
    rows = (base.dtype, base.dims) == ("f32", op.type.dims[:1])
    if (
        kernel.type_of(op.s) != op.type
        or op.type.dtype != "f32"
        or not rows
        or (op.scale and kernel.type_of(op.scale).dims)
    ):
        yield "needs scores of its own type, f32, a base for each row, and one number as scale"


def _partial_reduce_errors(kernel: Kernel, op: PartialReduce) -> Iterator[str]:
    value = kernel.type_of(op.value)
    if (
        value.dims != ("BLOCK_Q", op.over)
        or op.type != replace(value, dims=("BLOCK_Q", PARTIALS))
        or value.dtype != "f32"
    ):
        yield f"adds up {value.dtype}[{', '.join(value.dims)}] over {op.over}; expected columns of f32, and sums f32[BLOCK_Q, {PARTIALS}]"


def _split_halves_errors(kernel: Kernel, op: SplitHalves | ConcatHalves) -> Iterator[str]:
    """A join is a halving the other way round."""
    whole, half = (
        (kernel.type_of(op.value), op.type) if isinstance(op, SplitHalves) else (op.type, kernel.type_of(op.a))
    )
    if isinstance(op, ConcatHalves) and kernel.type_of(op.b) != half:
        yield f"joins %{op.a} and %{op.b}, whose types differ"
    dims = tuple(HALVES[d] if d == op.over else d for d in whole.dims) if op.over in HALVES else ()
    if op.over not in whole.dims or (half.dtype, half.dims, half.space) != (whole.dtype, dims, whole.space):
        yield f"has halves of {half.dtype}[{', '.join(half.dims)}] over {op.over}; expected {whole.dtype}[{', '.join(dims)}]"


def _ordered_add_errors(kernel: Kernel, op: OrderedAdd) -> Iterator[str]:
    ops = kernel.block_of(op).ops
    later = ops[ops.index(op) :]
    if not isinstance(kernel.op(op.value), ConsumerWait):
        return
    if op.semaphore is not None:
        raised = [
            o for o in kernel.ops() if isinstance(o, SemaphoreRelease) and o.semaphore.tensor == op.semaphore.tensor
        ]
        if [o.semaphore for o in raised if o in later] != [op.semaphore] or len(raised) > 1:
            yield "has a turn, and it is not raised once after it, in the same block"
    if [o in later for o in kernel.ops() if isinstance(o, ConsumerRelease) and o.value == op.value] != [True]:
        yield f"adds %{op.value}, which is not given back once after that"
    warp_group = kernel.warp_group_of(op)
    if warp_group is None or warp_group.warps != 1:
        yield "is told to the copy engine by several warps, or outside of roles; expected a role of one warp, which waits for the engine"


def _scheduler_barrier_errors(kernel: Kernel, op: SchedulerBarrier) -> Iterator[str]:
    if op.do not in TURNS:
        yield f"does `{op.do}`; expected {', '.join(TURNS)}"
    warp_group = kernel.warp_group_of(op)
    if warp_group is None or warp_group.instances == 1 or not warp_group.rows:
        yield "is in a role of one copy; expected several, which share the rows of a tile"


def _semaphore_acquire_errors(kernel: Kernel, op: SemaphoreAcquire) -> Iterator[str]:
    yield from turn_errors(kernel, op.semaphore, op.order)
    adds, follows = (
        [o for o in kernel.ops() if isinstance(o, k) and o.semaphore and o.semaphore.tensor == op.semaphore.tensor]
        for k in (OrderedAdd, SemaphoreAcquire)
    )
    later = kernel.block_of(op).ops
    awaited = [(o.semaphore, o.order) for o in adds if o in later[later.index(op) :]]
    if adds and (len(follows) > 1 or awaited != [(op.semaphore, op.order)]):
        yield "is not the one wait for the turn of an add after it, in the same block"


def _tma_store_errors(kernel: Kernel, op: TmaStore) -> Iterator[str]:
    target, pipeline, value = kernel.op(op.dst.tensor), kernel.op(op.staging), kernel.type_of(op.value)
    scores = isinstance(pipeline, Pipeline) and op.is_of_scores(kernel)
    dims = kernel.type_of(op.staging).dims if scores else value.unpadded
    if not isinstance(target, Arg) or target.role != "out" or tuple(AXIS_DIM[a] for a in op.dst.axes()) != dims:
        yield "writes a tile to what is no output of its dimensions"
    if not isinstance(pipeline, Pipeline) or not pipeline.per_instance or pipeline.type.dtype != value.dtype:
        yield "goes through a ring that each copy has of its own, of the same element type"
    elif scores:
        yield from _put_back_errors(kernel, op)
    elif pipeline.type.dims[:1] != value.dims[:1]:
        yield "goes through a ring of other rows"


def _put_back_errors(kernel: Kernel, op: TmaStore) -> Iterator[str]:
    """Numbers of scores leave through the slot of a taken tile that has been lifted to registers, and have left when
    it is given back."""
    ops = list(kernel.block_of(op).ops)
    before, after = ops[: ops.index(op)], ops[ops.index(op) :]
    taken = {o.name for o in before if isinstance(o, ConsumerWait) and o.pipeline == op.staging}
    lifted = [{o.value for o in ops if isinstance(o, LocalLoad) and o.value in taken} for ops in (before, after)]
    if not taken or lifted != [taken, set()]:
        yield f"goes through the slot of a tile of %{op.staging} that has not been lifted, or is lifted later"
    ends = [
        type(o)
        for o in after
        if (isinstance(o, TmaStoreWait) and o.staging == op.staging)
        or (isinstance(o, ConsumerRelease) and o.value in taken)
    ]
    if ends != [TmaStoreWait, ConsumerRelease]:
        yield f"is not flushed before the tile of %{op.staging} is given back"


_ERRORS: dict[type[Op], Callable[..., Iterator[str]]] = {
    Pipeline: _pipeline_errors,
    ProducerLoad: _producer_load_errors,
    ConsumerWait: _consumer_wait_errors,
    ReadMetadata: _read_metadata_errors,
    WriteTileIndex: _write_tile_index_errors,
    PipelinedLoop: _places_errors,
    ScaledIota: _scaled_iota_errors,
    LocalLoad: _local_load_errors,
    ConsumerRelease: _consumer_release_errors,
    ZeroOutOfBounds: _zero_out_of_bounds_errors,
    SliceRows: _slice_rows_errors,
    Rematerialize: _rematerialize_errors,
    ProducerStore: _producer_store_errors,
    Wgmma: _wgmma_errors,
    WgmmaWait: _wgmma_wait_errors,
    Pack: _pack_errors,
    ConvertLayout: _same_errors,
    PinAfterWait: _same_errors,
    PinBeforeWait: _same_errors,
    SoftmaxStats: _rows_errors,
    SoftmaxWeights: _softmax_weights_errors,
    PartialReduce: _partial_reduce_errors,
    SplitHalves: _split_halves_errors,
    ConcatHalves: _split_halves_errors,
    SchedulerBarrier: _scheduler_barrier_errors,
    OrderedAdd: _ordered_add_errors,
    SemaphoreAcquire: _semaphore_acquire_errors,
    TmaStore: _tma_store_errors,
    WorkLoop: _work_loop_errors,
    ReloadTile: _reload_tile_errors,
}


def warp_group_types(module: Module, kernel: Kernel) -> Iterator[str]:
    """Types, as in all kernels; rings, takes and products agree with what fills, gives and reads them."""
    yield from types(module, kernel)
    for op in kernel.ops():
        errors = _ERRORS.get(type(op))
        yield from (f"%{op.name}: {reason}" for reason in errors(kernel, op)) if errors else ()
        if any(t.space == "flight" for t in op.results().values()) and not isinstance(op, Wgmma):
            yield f"%{op.name}: only a product that is issued is in flight"
        if isinstance(op, (Map, Load)) and any(kernel.type_of(ref).space == "flight" for ref in op.operands()):
            yield f"%{op.name}: computes with a product in flight; await it first"
