"""Execute a kernel after lower-pipelines on NumPy: mbarriers, named barriers and stages are what its statements say.

Copies of TMA complete at random later times. Others see stores of threads to shared memory after a fence.
A wait at a wrong barrier or phase ends in a deadlock, or in results that are wrong, because buffers hold NaN at first
and other tiles later. A named barrier with more arrivals than threads is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from attngen.errors import AttngenError
from attngen.interp.barriers import Mbarrier, NamedBarrier
from attngen.interp.numeric import compiled
from attngen.interp.pipelines import POISON
from attngen.interp.tile import CONTROL
from attngen.interp.values import Values, applies
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import AXIS_DIM, Access, Block, Expr, WarpGroup, gl, only, pipe
from attngen.ir.behaviour import handles

ROWS = 64  # of a consumer's part of the program's tile


class StatementLaunch(WarpSpecializedLaunch, complete=gl.GL, control=CONTROL):
    """Runs the ops of a lowered kernel. `variables` holds what an instance of a warp group has assigned."""

    # ------------------------------------------------------------------ programs and expressions

    def program(self, place: Mapping[str, int], start: Values) -> Any:
        shared: Values = {
            "variables": {},
            "named": {},
            "unfenced": [],
            "writes": [],
            "reading": [],
            "ROWS": ROWS,
            "agent": "entry",
        }
        halves = {"HALF_V": start["D_V"] // 2}
        yield from super().program(place, {**start, **halves, **shared})
        if any(barrier.arrived for barrier in shared["named"].values()):
            raise AttngenError(f"@{self.kernel.name}: threads arrive at a named barrier, and the others never do")
        return {}

    def warp_group(self, block: Block, warp_group: WarpGroup, instance: int, values: Values) -> Any:
        own = {"variables": {}, "unfenced": [], "writes": [], "threads": 32 * warp_group.warps, "_WARP_GROUP": instance}
        return (yield from super().warp_group(block, warp_group, instance, {**values, **own}))

    def number(self, e: Expr, values: Values) -> int:
        """The value of an expression over integers."""
        known = {**values, **values["variables"]}
        for axis in ("q", "kv"):
            if f"_{axis}_row" in known:
                known.setdefault(f"{axis}_tile", known[f"_{axis}_row"] // known[AXIS_DIM[axis]])
        return int(compiled(e)(known))

    def numbers_of(self, exprs: tuple[Expr, ...], values: Values) -> tuple[int, ...]:
        return tuple(self.number(e, values) for e in exprs)

    def inside_of(self, name: str, values: Values) -> Any:
        """Run the body of a statement."""
        yield from self.block(name, values, values["cls"])

    # ------------------------------------------------------------------ allocation

    @handles(pipe.Pipeline)
    def _pipeline(self, op: pipe.Pipeline, values: Values) -> Any:
        """Only the pipeline of work tiles is used after lower-pipelines; its stages hold the tiles' numbers."""
        if not op.type.dims and not op.metadata_of:
            values["work tiles"] = [-2] * int(op.stages)
        yield from ()

    def pieces_of(self, smem: str) -> int:
        return max((op.pieces for op in only(self.kernel.ops(), gl.SmemView) if op.smem == smem), default=1)

    @handles(gl.AllocShared)
    def _alloc_shared(self, op: gl.AllocShared, values: Values) -> Any:
        count, shape, pieces = self.number(op.count, values), self.numbers_of(op.shape, values), self.pieces_of(op.name)
        fill = POISON if op.type.dtype == "i32" else np.nan
        whole = (*shape[:-1], shape[-1] * pieces) if shape else ()
        values[op.name] = [np.full(whole, fill, self.dtypes[op.type.dtype]) for _ in range(count // pieces)]
        values[f"{op.name} buffers"] = [
            tile if pieces == 1 else tile[:, i * shape[-1] : (i + 1) * shape[-1]]
            for tile in values[op.name]
            for i in range(pieces)
        ]
        yield from ()

    def buffer(self, smem: str, index: Expr, values: Values) -> Any:
        """A buffer in shared memory, as an array that shares its memory."""
        at, buffers = self.number(index, values), values[f"{smem} buffers"]
        if not 0 <= at < len(buffers):
            raise AttngenError(f"@{self.kernel.name}: %{smem} has {len(buffers)} buffers; number {at} is used")
        return buffers[at]

    @handles(gl.AllocMbarriers)
    def _alloc_mbarriers(self, op: gl.AllocMbarriers, values: Values) -> Any:
        values[op.name] = [Mbarrier() for _ in range(self.number(op.count, values))]
        yield from ()

    def barrier(self, name: str, index: Expr, values: Values) -> Mbarrier:
        at, found = self.number(index, values), values[name]
        if not 0 <= at < len(found):
            raise AttngenError(f"@{self.kernel.name}: %{name} has {len(found)} mbarriers; number {at} is used")
        barrier: Mbarrier = found[at]
        return barrier

    @handles(gl.MbarrierInit)
    def _mbarrier_init(self, op: gl.MbarrierInit, values: Values) -> Any:
        barrier = self.barrier(op.barrier, op.index, values)
        barrier.arrivals = barrier.left = op.arrivals
        yield from ()

    @handles(gl.NamedBarriers, gl.Comment)
    def _named_barriers(self, op: gl.NamedBarriers | gl.Comment, values: Values) -> Any:
        yield from ()

    # ------------------------------------------------------------------ barriers

    @handles(gl.MbarrierExpect)
    def _mbarrier_expect(self, op: gl.MbarrierExpect, values: Values) -> Any:
        barrier = self.barrier(op.barrier, op.index, values)
        barrier.bytes += self.number(op.bytes, values)
        barrier.arrive()
        yield False

    @handles(gl.MbarrierArrive)
    def _mbarrier_arrive(self, op: gl.MbarrierArrive, values: Values) -> Any:
        self.barrier(op.barrier, op.index, values).arrive()
        yield False

    @handles(gl.MbarrierWait)
    def _mbarrier_wait(self, op: gl.MbarrierWait, values: Values) -> Any:
        barrier, phase = self.barrier(op.barrier, op.index, values), self.number(op.phase, values)
        if phase not in (0, 1):
            raise AttngenError(f"@{self.kernel.name}: %{op.barrier} is waited for in phase {phase}; expected 0 or 1")
        while barrier.phase == phase:
            yield True
        yield False

    def threads(self) -> int:
        """The threads of the warp groups that meet at named barriers of stages: consumers and the producer."""
        groups = (
            b.warp_group
            for b in self.kernel.warp_groups
            if b.warp_group and (b.warp_group.rows or any(only(self.kernel.within(b.name), gl.TmaLoad, gl.CopyRow)))
        )
        return sum(32 * group.warps * group.instances for group in groups)

    def named_barrier(self, op: gl.NamedArrive | gl.NamedSync, values: Values) -> NamedBarrier:
        """The named barrier of an op, by its number, or by its place in its array before it has one."""
        of, at = self.kernel.op(op.barrier), self.number(op.index, values)
        assert isinstance(of, gl.NamedBarriers)
        if not 0 <= at < self.number(of.count, values):
            raise AttngenError(f"@{self.kernel.name}: %{op.barrier} has no barrier {at}")
        key = (op.barrier, at) if of.first is None else self.number(of.first, values) + at
        barrier: NamedBarrier = values["named"].setdefault(key, NamedBarrier())
        return barrier

    def arrive(self, op: gl.NamedArrive | gl.NamedSync, values: Values) -> None:
        """Arrive at a named barrier with all threads of the instance."""
        threads = self.number(op.threads, values) or self.threads()
        self.named_barrier(op, values).arrive(values["threads"], threads)

    @handles(gl.NamedArrive)
    def _named_arrive(self, op: gl.NamedArrive, values: Values) -> Any:
        self.arrive(op, values)
        yield False

    @handles(gl.NamedSync)
    def _named_sync(self, op: gl.NamedSync, values: Values) -> Any:
        barrier = self.named_barrier(op, values)
        rounds = barrier.rounds
        self.arrive(op, values)
        while barrier.rounds == rounds:
            yield True
        yield False

    @handles(gl.FenceAsync)
    def _fence_async(self, op: gl.FenceAsync, values: Values) -> Any:
        for store in values["unfenced"]:
            store()
        values["unfenced"].clear()
        yield False

    # ------------------------------------------------------------------ variables and control

    @handles(gl.Let)
    def _let(self, op: gl.Let, values: Values) -> Any:
        values["variables"][op.var] = self.number(op.expr, values)
        yield from ()

    @handles(gl.Counters)
    def _counters(self, op: gl.Counters, values: Values) -> Any:
        values["variables"] |= {name: n for name, n in ((op.stage, 0), (op.count, op.start)) if name}
        yield from ()

    @handles(gl.NextStage)
    def _next_stage(self, op: gl.NextStage, values: Values) -> Any:
        variables, stages = values["variables"], self.number(op.stages, values)
        stage = variables[op.stage] + 1 if op.stage else stages
        variables |= {op.stage: stage % stages} if op.stage else {}
        variables[op.phase] ^= int(stage == stages)
        yield from ()

    @handles(gl.NextLoad)
    def _next_load(self, op: gl.NextLoad, values: Values) -> Any:
        variables = values["variables"]
        variables[op.loads] += 1
        if op.stage:
            variables[op.stage] = (variables[op.stage] + 1) % self.number(op.stages, values)
        yield from ()

    @handles(gl.If)
    def _if(self, op: gl.If, values: Values) -> Any:
        if self.holds(op.where, values):
            yield from self.inside_of(op.body, values)
        elif op.orelse:
            yield from self.inside_of(op.orelse, values)

    def holds(self, e: Expr, values: Values) -> bool:
        return bool(compiled(e)({"_INPUT_GRADIENTS": True, **values, **values["variables"]}))

    @handles(gl.StaticFor, gl.For)
    def _for(self, op: gl.StaticFor | gl.For, values: Values) -> Any:
        for at in range(self.number(op.count, values)):
            values["variables"][op.var] = at
            yield from self.inside_of(op.body, values)

    # ------------------------------------------------------------------ shared memory

    @handles(gl.SmemView)
    def _smem_view(self, op: gl.SmemView, values: Values) -> Any:
        at = self.number(op.index, values)
        if not 0 <= at < len(values[op.smem]):
            raise AttngenError(f"@{self.kernel.name}: %{op.smem} has {len(values[op.smem])} tiles; number {at} is read")
        values[op.name] = values[op.smem][at]
        yield from ()

    @handles(gl.SmemReinterpret)
    def _smem_reinterpret(self, op: gl.SmemReinterpret, values: Values) -> Any:
        shape = self.numbers_of(op.shape, values)
        self.buffer(op.smem, op.index, values)
        values[f"{op.name} buffers"] = [np.full(shape, np.nan, self.dtypes[op.type.dtype]) for _ in range(op.count)]
        yield from ()

    @handles(gl.SmemRows)
    def _smem_rows(self, op: gl.SmemRows, values: Values) -> Any:
        rows = len(values[op.value]) // values["parts"]
        values[op.name] = values[op.value][values["instance"] * rows :][:rows]
        yield from ()

    @handles(gl.SmemLoad)
    def _smem_load(self, op: gl.SmemLoad, values: Values) -> Any:
        values[op.name] = self.buffer(op.smem, op.index, values).copy()
        yield from ()

    def later(self, values: Values, target: Any, x: Any) -> None:
        """Store to shared memory; others see it after the next fence."""

        def store() -> None:
            if any(np.shares_memory(target, source) for source in values["reading"]):
                raise AttngenError(f"@{self.kernel.name}: a buffer is overwritten before TMA has read it")
            target[...] = x

        values["unfenced"].append(store)

    def part_of(self, op: gl.SmemStore | gl.SmemStoreAcc, values: Values) -> Any:
        """What a store takes of its value: some columns, or all."""
        if not op.columns:
            return values[op.value]
        first, width = self.numbers_of(op.columns, values)
        return values[op.value][:, first : first + width]

    @handles(gl.SmemStore)
    def _smem_store(self, op: gl.SmemStore, values: Values) -> Any:
        target, x = self.buffer(op.smem, op.index, values), self.part_of(op, values)
        if op.rows:
            target = target[values["instance"] * len(x) :][: len(x)]
        target = target.T if op.transposed else target
        self.later(values, target[..., : x.shape[-1]], x)
        yield False

    @handles(gl.SmemStoreAcc)
    def _smem_store_acc(self, op: gl.SmemStoreAcc, values: Values) -> Any:
        x = self.part_of(op, values)
        self.later(values, self.buffer(op.smem, op.index, values)[:, : x.shape[1]], x)
        yield False

    @handles(gl.SplitPiece)
    def _split_piece(self, op: gl.SplitPiece, values: Values) -> Any:
        yield from ()

    @handles(gl.WriteIndex)
    def _write_index(self, op: gl.WriteIndex, values: Values) -> Any:
        self.buffer(op.smem, op.index, values)[...] = self.number(op.value, values)
        yield False

    @handles(gl.ReadIndex)
    def _read_index(self, op: gl.ReadIndex, values: Values) -> Any:
        values["variables"][op.var] = int(self.buffer(op.smem, op.index, values))
        yield False

    @handles(gl.WriteTileStart)
    def _gl_write_tile_start(self, op: gl.WriteTileStart, values: Values) -> Any:
        full = (
            self.expression(number, values)
            for tiles in pipe.masked_full_tiles(self.kernel.ops())
            if not any(self.expression(end - first, values) for first, end in tiles.before)
            for number in tiles.numbers
        )
        needed = applies(op.when, values["cls"]) or self.tile_index(values) in full
        self.buffer(op.smem, op.index, values)[...] = values[op.value] if needed else POISON
        yield False

    @handles(gl.ReadTileStart)
    def _gl_read_tile_start(self, op: gl.ReadTileStart, values: Values) -> Any:
        if applies(op.when, values["cls"]):
            axis, start = self.kernel.loop_axis, int(self.buffer(op.smem, op.index, values))
            values[f"{axis}_start"], values[f"{axis}_idx"] = start, start + np.arange(values[AXIS_DIM[axis]])
        yield from ()

    # ------------------------------------------------------------------ copies

    @staticmethod
    def tile_at(place: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]) -> tuple[Any, Any]:
        """The index of a tile's part in bounds in a tensor, and that of the part in the tile."""
        *heads, row, column = place
        whole, part = [], []
        for start, size, length in zip((row, column), shape, of[-2:]):
            first = min(max(start, 0), length)
            end = max(first, min(start + size, length))
            whole.append(slice(first, end))
            part.append(slice(first - start, end - start) if end > first else slice(0, 0))
        return (*heads, *whole), tuple(part)

    @handles(gl.TmaLoad)
    def _tma_load(self, op: gl.TmaLoad, values: Values) -> Any:
        target, barrier = self.buffer(op.smem, op.buffer, values), self.barrier(op.barrier, op.index, values)
        page = (int(values[op.page]),) if op.page else ()
        tensor, place = values[op.tensor], (*page, *self.numbers_of(op.place, values))
        index, part = self.tile_at(place, target.shape, tensor.shape)
        smem = self.kernel.op(op.smem)
        assert isinstance(smem, gl.AllocShared)
        count = 2 * int(np.prod(self.numbers_of(smem.shape, values)))

        def arrive() -> None:
            target[...] = 0
            target[part] = tensor[index]
            barrier.complete(count)

        values["pending"].append(arrive)
        yield False

    @handles(gl.CopyRow)
    def _copy_row(self, op: gl.CopyRow, values: Values) -> Any:
        target, barrier = self.buffer(op.smem, op.index, values), self.barrier(op.barrier, op.index, values)
        tensor, index = self.kernel.accessed(op.src)
        *head, row = self.numbers_of(index, values)
        left = max(0, min(len(target), self.number(op.left, values)))
        barrier.bytes += 1  # the copies arrive at the barrier, too

        def arrive() -> None:
            target[...] = 0
            target[:left] = values[tensor.name][tuple(head)][row : row + left]
            barrier.complete(1)

        values["pending"].append(arrive)
        yield False

    @handles(gl.TmaWrite)
    def _tma_write(self, op: gl.TmaWrite, values: Values) -> Any:
        source = self.buffer(op.smem, op.buffer, values)
        tensor, place = values[op.tensor], self.numbers_of(op.place, values)
        if tensor.ndim > len(place):  # a head and one of its splits are one dimension for TMA
            tensor = tensor.reshape(tensor.shape[0], -1, *tensor.shape[-2:])
        index, part = self.tile_at(place, source.shape, tensor.shape)
        adds, token = op.order is not None and self.number(op.order, values) > 0, object()
        values["writes"].append(token)
        values["reading"].append(source)

        def store() -> None:
            if self.chance.random() < 0.9:  # most complete late
                values["pending"].append(store)
                return
            at = next(i for i, x in enumerate(values["reading"]) if x is source)
            values["reading"].pop(at)
            tensor[index] = tensor[index] + source[part] if adds else source[part]
            values["writes"].remove(token)

        values["pending"].append(store)
        yield False

    @handles(gl.TmaWriteWait)
    def _tma_write_wait(self, op: gl.TmaWriteWait, values: Values) -> Any:
        while values["writes"]:
            yield True
        yield False

    # ------------------------------------------------------------------ semaphores

    @handles(gl.WaitSemaphore)
    def _wait_semaphore(self, op: gl.WaitSemaphore, values: Values) -> Any:
        semaphores, at = self.counter(op.counter, values)
        order, seen = self.number(op.order, values), self.number(op.seen, values)
        while seen != order and semaphores[at] != order:
            if semaphores[at] > order:
                raise AttngenError(f"@{self.kernel.name}: a semaphore is {semaphores[at]}, past the order {order}")
            yield True
        yield False

    def counter(self, access: Access, values: Values) -> tuple[Any, tuple[int, ...]]:
        """The tensor of semaphores, and the index of one."""
        tensor, index = self.kernel.accessed(access)
        return values[tensor.name], self.numbers_of(index, values)

    @handles(gl.ReadSemaphore)
    def _read_semaphore(self, op: gl.ReadSemaphore, values: Values) -> Any:
        semaphores, at = self.counter(op.counter, values)
        values["variables"][op.var] = int(semaphores[at])
        yield False

    @handles(gl.IncrementSemaphore)
    def _increment_semaphore(self, op: gl.IncrementSemaphore, values: Values) -> Any:
        while values["writes"]:
            yield True
        semaphores, at = self.counter(op.counter, values)
        semaphores[at] += values["threads"] // 32
        yield False

    # ------------------------------------------------------------------ work tiles

    def is_mine(self, pipeline: str, values: Values) -> bool:
        """True if the next stage of a round-robin loop is the instance's; each iteration but the first goes on to the
        next stage."""
        short, variables = pipeline.removesuffix("_pipeline"), values["variables"]
        if variables.setdefault(f"{short} started", False):
            of = self.kernel.op(pipeline)
            assert isinstance(of, pipe.Pipeline)
            stage = variables[f"{short}_stage"] + 1
            variables[f"{short}_stage"] = stage % int(of.stages)
            variables[f"{short}_phase"] ^= int(stage == int(of.stages))
        variables[f"{short} started"] = True
        return bool(variables[f"{short}_stage"] == values["instance"])

    def work_stage(self, op: pipe.WorkLoop, values: Values) -> tuple[str, Expr]:
        """The short name of the pipeline of work tiles, and its next stage."""
        short = op.pipeline.removesuffix("_pipeline")
        return short, sympy.Integer(values["variables"].get(f"{short}_stage", 0))

    def next_work_stage(self, op: pipe.WorkLoop, values: Values) -> None:
        short, variables, stages = op.pipeline.removesuffix("_pipeline"), values["variables"], len(values["work tiles"])
        stage = variables.get(f"{short}_stage", 0) + 1
        if f"{short}_stage" in variables:
            variables[f"{short}_stage"] = stage % stages
        if f"{short}_loads" in variables:
            variables[f"{short}_loads"] += 1
        elif stage == stages:
            variables[f"{short}_phase"] ^= 1

    def pass_on(self, op: pipe.WorkLoop, number: int, values: Values) -> Any:
        (short, stage), variables = self.work_stage(op, values), values["variables"]
        if f"{short}_empty" in values:
            phase = sympy.Integer(variables[f"{short}_phase"])
            yield from self._mbarrier_wait(gl.MbarrierWait("", f"{short}_empty", stage, phase), values)
        elif variables[f"{short}_loads"] >= len(values["work tiles"]):
            yield from self._named_sync(gl.NamedSync("", f"{short}_free", stage), values)
        values["work tiles"][int(stage)] = number
        self.barrier(f"{short}_full", stage, values).arrive()
        self.next_work_stage(op, values)
        yield False

    def receive(self, op: pipe.WorkLoop, values: Values) -> Any:
        short, stage = self.work_stage(op, values)
        phase = sympy.Integer(values["variables"][f"{short}_phase"])
        yield from self._mbarrier_wait(gl.MbarrierWait("", f"{short}_full", stage, phase), values)
        return values["work tiles"][int(stage)]

    def release_work(self, op: pipe.WorkLoop, values: Values) -> None:
        short, stage = self.work_stage(op, values)
        if f"{short}_empty" in values:
            self.barrier(f"{short}_empty", stage, values).arrive()
        else:
            self.arrive(gl.NamedArrive("", f"{short}_free", stage), values)
        self.next_work_stage(op, values)
