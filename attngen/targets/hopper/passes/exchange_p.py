"""exchange-p: of two roles with half of a latent's columns each, one computes the weights of even tiles, and one those
of odd tiles.

before:  warp_group @left ...                                    warp_group @right ...
           %keys_full_left = loop kv ... body(@step_left)          %keys_full_right = loop kv ... body(@step_right)
after:   warp_group @producer ...
           %copy_keys = pipelined_loop kv partial(...) full(...) step(@copy_even) odd(@copy_odd)
         warp_group @left ...                                    warp_group @right ...
           %keys_left = pipelined_loop kv ...                      %keys_right = pipelined_loop kv ...
             step(@own) odd(@told)                                   step(@lone) pair(@both)
           producer_store %L_left_pipeline %keys_left_l            producer_store %L_right_pipeline %keys_right_l
           consumer_wait %L_right_pipeline                         consumer_wait %L_left_pipeline
         block @own                                              block @both
           wait for K of an even tile                              wait for K of an odd tile
           S; release K; softmax                                   S; release K
           store P, its maximum and its factor                     wait for P of the even tile, and its factor
           O += P V; release V                                     O += P V of the even tile; release V
         block @told                                               softmax of the odd tile, from that maximum on
           wait for P of an odd tile, and its factor               store P, its maximum and its factor
           O += P V; release V                                     O += P V; release V
                                                                 block @lone
                                                                   the same as @told, of an even tile

The running maximum passes from tile to tile with the weights, so that no weights are rescaled. Sums of rows are those
of a role's own tiles, rescaled at every tile, and added up at the end. The role on the right comes to two tiles in one
turn: the softmax of the odd one runs beside the product of the even one, as software-pipeline-weights has it.

Tiles of keys have rings: an even tile and an odd one, each in three pieces with barriers of their own. Who multiplies
scores clears the rows past the end, as values of a cache are there that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import SIDES, Arg, Block, Dot, Gather, Load, Loop, Map, Mask, Op, Reduce, SoftmaxStep, Type, Yield
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    LocalLoad,
    Pack,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    ReadMetadata,
    Rematerialize,
    ZeroOutOfBounds,
)
from attngen.targets.hopper.configs.families import with_latents
from attngen.targets.hopper.configs.mla_decode import OTHER
from attngen.transforms.base import Pass

PARITY = {"left": "even", "right": "odd"}  # role -> the tiles whose weights it computes
ONE = sympy.Integer(1)
ROW = Type("f32", ("BLOCK_Q",), "sram")


@dataclass(frozen=True)
class ExchangeP(Pass):
    name: ClassVar[str] = "exchange-p"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_latents(module, _shared)


def _shared(kernel: Kernel) -> Kernel:
    left, right = (_Side(kernel, name) for name in PARITY)
    bodies = {
        "own": ("an even tile: its scores, its weights, and their product", left.own("own")),
        "told": ("an odd tile: the product of the weights that the role on the right has computed", left.told("told")),
        "lone": (
            "a last even tile: the product of the weights that the role on the left has computed",
            right.told("lone"),
        ),
        "both": (
            "an odd tile, as even ones are on the left; its softmax runs beside the product of the even tile before",
            right.both("both"),
        ),
    }
    instances = {parity: tuple(left.copied(name, parity)) for name, parity in PARITY.items()}
    queries = tuple(next(op for op in left.ops if isinstance(op, Load) and op.name == dot.a) for dot in left.scores)
    once = tuple(Pipeline(_pipeline(op), op.type, ONE) for op in queries)
    exchanged = (
        Pipeline("P_pipeline", Type("T", ("BLOCK_Q", "BLOCK_KV"), "sram"), ONE, exchange=True),
        Pipeline("M_pipeline", ROW, ONE, beside="P_pipeline"),
        Pipeline("ALPHA_pipeline", ROW, ONE, beside="P_pipeline"),
        *(Pipeline(f"L_{name}_pipeline", ROW, ONE) for name in PARITY),
    )
    tiles = tuple(Pipeline(_pipeline(op, parity), op.type, ONE) for parity in instances for op in left.keys)
    fills = (ProducerLoad(f"fill_{_pipeline(op)}", _pipeline(op), op.src) for op in queries)
    loop = replace(left.pipelined, name="copy_keys", carry=(), step="copy_even", odd="copy_odd")
    entry, producer = kernel.block("entry"), kernel.block("producer")
    blocks = (
        replace(entry, ops=(*entry.ops, *once, *tiles, *exchanged)),
        replace(
            producer, ops=(*fills, loop, *(ProducerTail(f"drain_{pipeline.name}", pipeline.name) for pipeline in tiles))
        ),
        replace(kernel.block("left"), ops=tuple(left.warp_group(step="own", odd="told"))),
        replace(kernel.block("right"), ops=tuple(right.warp_group(step="lone", pair="both"))),
        *(
            Block(f"copy_{parity}", ops, f"what the roles take of an {parity} tile")
            for parity, ops in instances.items()
        ),
        *(Block(name, tuple(ops), about) for name, (about, ops) in bodies.items()),
    )
    return replace(kernel, blocks=blocks)


def _pipeline(op: Load, parity: str = "") -> str:
    """The name of the ring of a tile, or of a half of its columns: `K_left_even_pipeline`."""
    side = next((str(e).removesuffix("_v") for e in op.src.index if str(e) in SIDES), "")
    return "_".join(part for part in (op.src.tensor, side, parity, "pipeline") if part)


class _Side:
    """One of the two roles as it is before, and the ops that it has after."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel, self.name, self.parity = kernel, name, PARITY[name]
        self.ops = kernel.block(name).ops
        self.loops = [op for op in self.ops if isinstance(op, Loop)]
        self.step = kernel.block(self.loops[0].body).ops
        self.keys = [op for op in self.step if isinstance(op, Load)]
        self.pages = [op for op in self.step if isinstance(op, Gather)]
        dots = [op for op in self.step if isinstance(op, Dot)]
        self.scores, self.product = dots[:-1], dots[-1]
        self.soft = next(op for op in self.step if isinstance(op, SoftmaxStep))
        self.yielded = dict(next(op for op in self.step if isinstance(op, Yield)).values)
        self.args = [op for op in self.step if isinstance(op, Arg)]
        of_m = {field for field, ref in self.yielded.items() if ref == f"{self.soft.name}.m"}
        self.m = next(iter(of_m))
        self.keeps_m = any(f"{self.loops[-1].name}.{self.m}" in op.operands() for op in self.ops)
        ranges = {loop.cls: loop.ranges for loop in self.loops}
        self.pipelined = PipelinedLoop(
            f"keys_{name}", self.loops[0].var, ranges.get("partial", ()), ranges.get("full", ()), ()
        )

    # ------------------------------------------------------------------ bodies

    def own(self, body: str) -> Iterator[Op]:
        """A turn for a tile whose weights the role computes."""
        yield from self._named(
            body, [*self._carried(), *self._scores(self.parity), *self._weights(), *self._sums(), *self._end()]
        )

    def told(self, body: str) -> Iterator[Op]:
        """A turn for a tile whose weights the other role has computed."""
        refs = self._after_told()
        ends = [(field, refs.get(ref, ref)) for field, ref in self._yields({field: field for field in self.yielded})]
        yield from self._named(body, [*self._carried(), *self._told(self.keeps_m), Yield("yield", tuple(ends))])

    def both(self, body: str) -> Iterator[Op]:
        """A turn for two tiles: the first one is the other role's."""
        refs = self._after_told()
        rest = [op.with_operands(refs) for op in (*self._weights(), *self._sums(), *self._end())]
        yield from self._named(body, [*self._carried(), *self._scores(self.parity), *self._told(goes_on=True), *rest])

    def copied(self, name: str, parity: str) -> Iterator[Op]:
        """What the producer copies of a tile: first the half that is free first, that of the role whose tile it is."""
        page = None
        of_row = {symbol("kv_idx"): symbol("kv_start")}
        for op in self.pages:
            page = f"page_{parity}"
            index = tuple(e.xreplace(of_row) for e in op.src.index)
            yield Gather(page, replace(op.src, index=index), op.uses, Type("i32", (), "reg"), op.where.xreplace(of_row))
        sides = {f"{name}_v": 1, OTHER[f"{name}_v"]: 2}
        for tile in sorted(self.keys, key=lambda tile: max(sides.get(str(e), 0) for e in tile.src.index)):
            yield ProducerLoad(f"fill_{_pipeline(tile, parity)}", _pipeline(tile, parity), tile.src, page)
        yield Yield(f"yield_{parity}", ())

    def warp_group(self, step: str, odd: str = "", pair: str = "") -> Iterator[Op]:
        """The role: its loops are one pipeline, after which both roles add up their sums of rows."""
        last = self.loops[-1]
        starts = dict(self.loops[0].carry)
        carry = tuple((self._field(field), ref) for field, ref in starts.items() if field != self.m or self.keeps_m)
        whole = replace(self.pipelined, carry=carry, step=step, odd=odd, pair=pair)
        results = {f"{last.name}.{field}": f"{whole.name}.{self._field(field)}" for field in starts}
        rows = next(f"{last.name}.{field}" for field in starts if self._is_of_rows(field))
        total, (other,) = f"l_all_{self.name}", (name for name in PARITY if name != self.name)
        dropped = {ref for field, ref in starts.items() if field == self.m and not self.keeps_m}
        queries = {dot.a for dot in self.scores}
        for op in self.ops:
            if isinstance(op, Load) and op.name in queries:
                yield ConsumerWait(op.name, _pipeline(op), op.type)
            elif op is self.loops[0]:
                yield whole
                yield ProducerStore(f"share_l_{self.name}", f"L_{self.name}_pipeline", results[rows])
                yield ConsumerWait(f"l_taken_{self.name}", f"L_{other}_pipeline", ROW)
                yield LocalLoad(f"l_other_{self.name}", f"l_taken_{self.name}", replace(ROW, space="reg"))
                yield ConsumerRelease(f"give_l_{self.name}", f"l_taken_{self.name}")
                uses = (("l_own", results[rows]), ("l_other", f"l_other_{self.name}"))
                yield Map(total, symbol("l_own") + symbol("l_other"), uses, replace(ROW, space="reg"))
            elif op not in self.loops and op.name not in dropped:
                yield op.with_operands({**results, rows: total})

    # ------------------------------------------------------------------ parts of bodies, under the names that they have before

    def _carried(self) -> list[Op]:
        return [op for op in self.args if op.name != self.m or self.keeps_m]

    def _scores(self, parity: str) -> Iterator[Op]:
        """Each product of scores as its piece of the tile comes. What no other product reads is given back."""
        tiles = {op.name: op for op in self.keys}
        for dot in self.scores:
            yield ConsumerWait(dot.b, _pipeline(tiles[dot.b], parity), tiles[dot.b].type)
            near = f"{self._field(dot.a)}_near"
            yield Rematerialize(near, dot.a, self.kernel.type_of(dot.a))
            yield replace(dot, a=near)
        yield from (
            ConsumerRelease(f"give_{name}", name)
            for name in self._read_once()
            if not self.kernel.clears(tiles[name]) and name not in self._halves()
        )

    def _halves(self) -> list[str]:
        """The tiles that are half of the columns of values: the role's own half first."""
        found = [op.name for op in self.keys if {*map(str, op.src.index)} & {*SIDES}]
        return sorted(found, key=lambda name: name != self.product.b)

    def _read_once(self) -> list[str]:
        return [dot.b for dot in self.scores if dot.b != self.product.b]

    def _weights(self) -> Iterator[Op]:
        """Masks, modifiers, and the softmax; what is past the end is cleared before others take the tile."""
        before = [
            op
            for op in self.step
            if isinstance(op, (Map, Mask)) and self.soft.name in nx.descendants(self.kernel.graph, op.name)
        ]
        yield from before
        yield from (ZeroOutOfBounds(f"clear_{name}", name) for name in self._halves())
        yield from (ConsumerRelease(f"give_{name}", name) for name in self._halves() if name != self.product.b)
        yield self.soft
        yield Pack("weights", self.product.a, Type("T", ("BLOCK_Q", "BLOCK_KV"), "reg"))

    def _sums(self) -> Iterator[Op]:
        """Sums of rows; then the weights are shared."""
        yield from (op for op in self.step if isinstance(op, Reduce))
        yield from self._of(self._rows())
        soft = self.soft.name
        yield ProducerStore(
            "share_p", "P_pipeline", "weights", (("M_pipeline", f"{soft}.m"), ("ALPHA_pipeline", f"{soft}.alpha"))
        )

    def _end(self) -> Iterator[Op]:
        """The product of the weights."""
        yield from self._of(str(self.product.acc))
        yield replace(self.product, a="weights")
        yield ConsumerRelease(f"give_{self.product.b}", self.product.b)
        yield Yield("yield", tuple(self._yields(self.yielded)))

    def _told(self, goes_on: bool) -> Iterator[Op]:
        """The product of weights that the other role has computed; its maximum, if this role goes on from that."""
        product, soft, keys = self.product, self.soft.name, {op.name: op for op in self.keys}
        row = replace(ROW, space="reg")
        yield ConsumerWait("p_told", "P_pipeline", Type("T", ("BLOCK_Q", "BLOCK_KV"), "sram"))
        if goes_on:
            yield ReadMetadata("m_told", "M_pipeline", "p_told", row)
        yield ReadMetadata("alpha_told", "ALPHA_pipeline", "p_told", row)
        sums = [op.name for op in self.step if isinstance(op, Reduce)]
        for op in (*self._of(self._rows()), *self._of(str(product.acc))):
            assert isinstance(op, Map)
            added = {symbol(name): sympy.Integer(0) for name, ref in op.uses if ref in sums}
            uses = tuple(
                (name, "alpha_told" if ref == f"{soft}.alpha" else ref) for name, ref in op.uses if ref not in sums
            )
            yield replace(op, name=self._told_of(op.name), expr=op.expr.xreplace(added), uses=uses)
        (other,) = (parity for parity in PARITY.values() if parity != self.parity)
        yield ConsumerWait("v_told", _pipeline(keys[product.b], other), keys[product.b].type)
        yield replace(
            product, name=self._told_of(product.name), a="p_told", b="v_told", acc=self._told_of(str(product.acc))
        )
        yield ConsumerRelease("give_p_told", "p_told")
        yield ConsumerRelease("give_v_told", "v_told")

    def _after_told(self) -> dict[str, str]:
        """What is carried -> the same after a tile whose weights the other role has computed."""
        of_sums = next(field for field, ref in self.yielded.items() if ref == self.product.name)
        of_rows = next(field for field, ref in self.yielded.items() if ref == self._rows())
        return {self.m: "m_told", of_rows: self._told_of(self._rows()), of_sums: self._told_of(self.product.name)}

    def _rows(self) -> str:
        """The sums of rows that a turn yields."""
        return next(ref for field, ref in self.yielded.items() if self._is_of_rows(field))

    def _is_of_rows(self, field: str) -> bool:
        return field != self.m and self.yielded[field] != self.product.name

    def _of(self, ref: str) -> list[Op]:
        return [op for op in self.step if op.name == ref]

    def _yields(self, values: dict[str, str]) -> Iterator[tuple[str, str]]:
        yield from ((field, ref) for field, ref in values.items() if field != self.m or self.keeps_m)

    # ------------------------------------------------------------------ names

    def _told_of(self, name: str) -> str:
        """The name of what is computed of weights that the other role has."""
        return f"{self._field(name)}_told"

    def _field(self, field: str) -> str:
        return field.removesuffix(f"_{self.name}")

    def _named(self, body: str, ops: Sequence[Op]) -> Iterator[Op]:
        """The ops, and what they define, under names that say in which body they are."""
        own = f"_{self.name}"
        names = {op.name: f"{op.name.removesuffix(own)}_in_{body}" for op in ops}
        refs = {
            f"{op.name}.{field}".rstrip("."): f"{names[op.name]}.{field}".rstrip(".")
            for op in ops
            for field in op.results()
        }
        for op in ops:
            moved = replace(op.with_operands(refs), name=names[op.name])
            if isinstance(moved, Yield):
                moved = replace(moved, values=tuple((self._field(field), ref) for field, ref in moved.values))
            yield moved
