"""exchange-p: let the two warp groups that split the columns of O share the work of P: @left computes S and P of even
tiles, @right those of odd tiles, and they exchange P through shared memory, as FlashMLA does.

For MLA decode. Before, both warp groups computed S and P of all tiles.

A tile of K has three pieces, each in a pipeline of its own: the left and the right half of the latent's columns, and
the rotated columns (RoPE). Even and odd tiles have separate pipelines, of one stage each. V is the latent: V of @left
is the left half of K, and V of @right the right half. The warp group that computes S of a tile waits for all three
pieces. The other one waits only for its V, after it has received P.

before:  warp_group @left ...
           %keys_full_left = loop kv ... body(@step_left)
         warp_group @right ...
           %keys_full_right = loop kv ... body(@step_right)

after:   warp_group @producer ...
           %copy_keys = pipelined_loop kv partial(...) full(...) step(@copy_even) odd(@copy_odd)

         warp_group @left ...
           %keys_left = pipelined_loop kv ... step(@own) odd(@received)
           producer_store %L_left_pipeline %keys_left_l
           consumer_wait %L_right_pipeline
         block @own                         an even tile
           wait for all of K; S; release the rotated columns
           mask; zero the rows of both halves past the end; release the right half
           softmax; store P, the row maxima m and the rescaling factors alpha
           O = alpha O + P V; release V
         block @received                    an odd tile
           wait for P, m and alpha of @right; wait for V
           O = alpha O + P V; release P, V

         warp_group @right ...
           %keys_right = pipelined_loop kv ... step(@single) pair(@both)
           producer_store %L_right_pipeline %keys_right_l
           consumer_wait %L_left_pipeline
         block @both                        an even tile and the odd tile after it
           wait for all of K of the odd tile; S; release the rotated columns
           wait for P, m and alpha of @left, and for V, of the even tile
           O = alpha O + P V of the even tile; release P, V
           mask; zero the rows of both halves past the end; release the left half of the odd tile
           softmax of the odd tile, whose running maximum starts at that m; store P, m and alpha
           O = alpha O + P V of the odd tile; release V
         block @single                      a last even tile without an odd one
           as @received, without m

The running maximum passes from tile to tile with P, in the order of tiles, so both warp groups scale P and O alike.
Each adds up the row sums of its own tiles, rescales them by the alpha of every tile, and adds those of the other at the
end.

An iteration of @right covers two tiles, so that software-pipeline-weights can overlap the softmax of the odd tile with
P V of the even one. An iteration of @left covers one tile, and waits for its product.

Rows past the end are zeroed, because rows of a cache that were never written may hold anything. The warp group that
computes S does it for both halves, before it passes P on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import sympy

from attngen.ir import SIDES, Block, Kernel, Module, Op, Type, only, pipe, symbol, tile
from attngen.targets.hopper.configs.families import with_mla_decode
from attngen.targets.hopper.configs.mla_decode import OTHER
from attngen.transforms.base import Pass

PARITY = {"left": "even", "right": "odd"}  # warp group -> the tiles whose S and P it computes
ONE = sympy.Integer(1)
ROW = Type("f32", ("BLOCK_Q",), "sram")


@dataclass(frozen=True)
class ExchangeP(Pass):
    name: ClassVar[str] = "exchange-p"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_mla_decode(module, _exchange)


def _exchange(kernel: Kernel) -> Kernel:
    left, right = (_Side(kernel, name) for name in PARITY)
    bodies = {
        "own": ("an even tile: its scores, its weights, and their product", left.own("own")),
        "received": (
            "an odd tile: the product of the weights that the right warp group has computed",
            left.received("received"),
        ),
        "single": (
            "a last even tile: the product of the weights that the left warp group has computed",
            right.received("single"),
        ),
        "both": (
            "an odd tile, as even ones are on the left; its softmax overlaps with the product of the even tile before",
            right.both("both"),
        ),
    }
    copies = {parity: tuple(left.copies(name, parity)) for name, parity in PARITY.items()}
    queries = tuple(next(op for op in only(left.ops, tile.Load) if op.name == dot.a) for dot in left.scores)
    once = tuple(pipe.Pipeline(_pipeline(op), op.type, ONE) for op in queries)
    exchanged = (
        pipe.Pipeline("P_pipeline", Type("T", ("BLOCK_Q", "BLOCK_KV"), "sram"), ONE, exchange=True),
        pipe.Pipeline("M_pipeline", ROW, ONE, metadata_of="P_pipeline"),
        pipe.Pipeline("ALPHA_pipeline", ROW, ONE, metadata_of="P_pipeline"),
        *(pipe.Pipeline(f"L_{name}_pipeline", ROW, ONE) for name in PARITY),
    )
    tiles = tuple(pipe.Pipeline(_pipeline(op, parity), op.type, ONE) for parity in copies for op in left.keys)
    query_loads = (pipe.ProducerLoad(f"_load_{_pipeline(op)}", _pipeline(op), op.src) for op in queries)
    loop = replace(left.pipelined, name="copy_keys", carry=(), step="copy_even", odd="copy_odd")
    entry, producer = kernel.block("entry"), kernel.block("producer")
    blocks = (
        replace(entry, ops=(*entry.ops, *once, *tiles, *exchanged)),
        replace(
            producer,
            ops=(
                *query_loads,
                loop,
                *(pipe.ProducerTail(f"_tail_{pipeline.name}", pipeline.name) for pipeline in tiles),
            ),
        ),
        replace(kernel.block("left"), ops=tuple(left.warp_group(step="own", odd="received"))),
        replace(kernel.block("right"), ops=tuple(right.warp_group(step="single", pair="both"))),
        *(Block(f"copy_{parity}", ops, f"the loads of an {parity} tile") for parity, ops in copies.items()),
        *(Block(name, tuple(ops), about) for name, (about, ops) in bodies.items()),
    )
    return replace(kernel, blocks=blocks)


def _pipeline(op: tile.Load, parity: str = "") -> str:
    """The pipeline of a tile, or of half of its columns, by name: for example `K_left_even_pipeline`."""
    side = next((str(e).removesuffix("_v") for e in op.src.index if str(e) in SIDES), "")
    return "_".join(part for part in (op.src.tensor, side, parity, "pipeline") if part)


class _Side:
    """One of the two warp groups: its ops before the pass, and those after it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel, self.name, self.parity = kernel, name, PARITY[name]
        self.ops = kernel.block(name).ops
        self.loops = list(only(self.ops, tile.Loop))
        self.step = kernel.block(self.loops[0].body).ops
        self.keys = list(only(self.step, tile.Load))
        self.pages = list(only(self.step, tile.Gather))
        dots = list(only(self.step, tile.Dot))
        self.scores, self.product = dots[:-1], dots[-1]
        self.soft = next(only(self.step, tile.SoftmaxStep))
        self.yielded = dict(next(only(self.step, tile.Yield)).values)
        self.args = list(only(self.step, tile.Arg))
        of_m = {field for field, ref in self.yielded.items() if ref == f"{self.soft.name}.m"}
        self.m = next(iter(of_m))
        self.keeps_m = any(f"{self.loops[-1].name}.{self.m}" in op.operands() for op in self.ops)
        ranges = {loop.cls: loop.ranges for loop in self.loops}
        self.pipelined = pipe.PipelinedLoop(
            f"keys_{name}", self.loops[0].var, ranges.get("partial", ()), ranges.get("full", ()), ()
        )

    # ------------------------------------------------------------------ bodies

    def own(self, body: str) -> Iterator[Op]:
        """The body for a tile whose weights this warp group computes."""
        yield from self._named(
            body,
            [
                *self._carried_args(),
                *self._issue_scores(self.parity),
                *self._softmax_after_zeroing(),
                *self._row_sum_and_store_p(),
                *self._accumulate_and_yield(),
            ],
        )

    def received(self, body: str) -> Iterator[Op]:
        """The body for a tile whose weights the other warp group computes."""
        refs = self._carried_after_received()
        ends = [(field, refs.get(ref, ref)) for field, ref in self._yields({field: field for field in self.yielded})]
        yield from self._named(
            body, [*self._carried_args(), *self._accumulate_received(self.keeps_m), tile.Yield("_yield", tuple(ends))]
        )

    def both(self, body: str) -> Iterator[Op]:
        """The body for two tiles: the weights of the first are the other warp group's."""
        refs = self._carried_after_received()
        rest = [
            op.with_operands(refs)
            for op in (*self._softmax_after_zeroing(), *self._row_sum_and_store_p(), *self._accumulate_and_yield())
        ]
        yield from self._named(
            body,
            [
                *self._carried_args(),
                *self._issue_scores(self.parity),
                *self._accumulate_received(continues=True),
                *rest,
            ],
        )

    def copies(self, name: str, parity: str) -> Iterator[Op]:
        """The producer's loads of a tile.

        The half that the tile's own warp group multiplies comes first, because its stage is released first.
        """
        page = None
        of_row = {symbol("kv_idx"): symbol("kv_start")}
        for op in self.pages:
            page = f"page_{parity}"
            index = tuple(e.xreplace(of_row) for e in op.src.index)
            yield tile.Gather(
                page, replace(op.src, index=index), op.uses, Type("i32", (), "reg"), op.where.xreplace(of_row)
            )
        sides = {f"{name}_v": 1, OTHER[f"{name}_v"]: 2}
        for key in sorted(self.keys, key=lambda key: max(sides.get(str(e), 0) for e in key.src.index)):
            yield pipe.ProducerLoad(f"_load_{_pipeline(key, parity)}", _pipeline(key, parity), key.src, page)
        yield tile.Yield(f"_yield_{parity}", ())

    def warp_group(self, step: str, odd: str = "", pair: str = "") -> Iterator[Op]:
        """The warp group's ops: its loops are merged into one, after which both warp groups add up their row sums."""
        last = self.loops[-1]
        starts = dict(self.loops[0].carry)
        carry = tuple((self._field(field), ref) for field, ref in starts.items() if field != self.m or self.keeps_m)
        merged = replace(self.pipelined, carry=carry, step=step, odd=odd, pair=pair)
        results = {f"{last.name}.{field}": f"{merged.name}.{self._field(field)}" for field in starts}
        rows = next(f"{last.name}.{field}" for field in starts if self._is_row_sum(field))
        total, (other,) = f"l_all_{self.name}", (name for name in PARITY if name != self.name)
        dropped = {ref for field, ref in starts.items() if field == self.m and not self.keeps_m}
        queries = {dot.a for dot in self.scores}
        for op in self.ops:
            if isinstance(op, tile.Load) and op.name in queries:
                yield pipe.ConsumerWait(op.name, _pipeline(op), op.type)
            elif op is self.loops[0]:
                yield merged
                yield pipe.ProducerStore(f"_store_l_{self.name}", f"L_{self.name}_pipeline", results[rows])
                yield pipe.ConsumerWait(f"l_taken_{self.name}", f"L_{other}_pipeline", ROW)
                yield pipe.LocalLoad(f"l_other_{self.name}", f"l_taken_{self.name}", replace(ROW, space="reg"))
                yield pipe.ConsumerRelease(f"_release_l_{self.name}", f"l_taken_{self.name}")
                uses = (("l_own", results[rows]), ("l_other", f"l_other_{self.name}"))
                yield tile.Map(total, symbol("l_own") + symbol("l_other"), uses, replace(ROW, space="reg"))
            elif op not in self.loops and op.name not in dropped:
                yield op.with_operands({**results, rows: total})

    # ------------------------------------------------------------------ parts of bodies, with names as before the pass

    def _carried_args(self) -> list[Op]:
        return [op for op in self.args if op.name != self.m or self.keeps_m]

    def _issue_scores(self, parity: str) -> Iterator[Op]:
        """Issue each product of scores when its piece of the tile arrives. Release the pieces that no other product
        reads."""
        tiles = {op.name: op for op in self.keys}
        for dot in self.scores:
            yield pipe.ConsumerWait(dot.b, _pipeline(tiles[dot.b], parity), tiles[dot.b].type)
            remat = f"{self._field(dot.a)}_ADDR"
            yield pipe.Rematerialize(remat, dot.a, self.kernel.type_of(dot.a))
            yield replace(dot, a=remat)
        yield from (
            pipe.ConsumerRelease(f"_release_{name}", name)
            for name in self._read_once()
            if not self.kernel.traits.zeroes_past_end(tiles[name]) and name not in self._halves()
        )

    def _halves(self) -> list[str]:
        """The halves of the columns of V: the warp group's own half first."""
        found = [op.name for op in self.keys if {*map(str, op.src.index)} & {*SIDES}]
        return sorted(found, key=lambda name: name != self.product.b)

    def _read_once(self) -> list[str]:
        return [dot.b for dot in self.scores if dot.b != self.product.b]

    def _softmax_after_zeroing(self) -> Iterator[Op]:
        """Masks, modifiers and softmax. Before the softmax, zero the rows of V past the end, because the other warp
        group reads its half after it has received P; and release that half."""
        before = [
            op
            for op in only(self.step, tile.Map, tile.Mask)
            if self.soft.name in nx.descendants(self.kernel.graph, op.name)
        ]
        yield from before
        yield from (pipe.ZeroOutOfBounds(f"_zero_{name}", name) for name in self._halves())
        yield from (pipe.ConsumerRelease(f"_release_{name}", name) for name in self._halves() if name != self.product.b)
        yield self.soft
        yield pipe.Pack("weights", self.product.a, Type("T", ("BLOCK_Q", "BLOCK_KV"), "reg"))

    def _row_sum_and_store_p(self) -> Iterator[Op]:
        """Update the row sums; then store P, with m and alpha, for the other warp group."""
        yield from only(self.step, tile.Reduce)
        yield from self._ops_named(self._row_sum())
        soft = self.soft.name
        yield pipe.ProducerStore(
            "_store_p", "P_pipeline", "weights", (("M_pipeline", f"{soft}.m"), ("ALPHA_pipeline", f"{soft}.alpha"))
        )

    def _accumulate_and_yield(self) -> Iterator[Op]:
        """Rescale O, add P V, release V, and yield."""
        yield from self._ops_named(str(self.product.acc))
        yield replace(self.product, a="weights")
        yield pipe.ConsumerRelease(f"_release_{self.product.b}", self.product.b)
        yield tile.Yield("_yield", tuple(self._yields(self.yielded)))

    def _accumulate_received(self, continues: bool) -> Iterator[Op]:
        """Add P V with the P that the other warp group has computed: read its alpha, rescale the row sums and O, and
        multiply.

        continues: also read its row maxima, from which this warp group's next softmax starts.
        """
        product, soft, keys = self.product, self.soft.name, {op.name: op for op in self.keys}
        row = replace(ROW, space="reg")
        yield pipe.ConsumerWait("p_RECEIVED", "P_pipeline", Type("T", ("BLOCK_Q", "BLOCK_KV"), "sram"))
        if continues:
            yield pipe.ReadMetadata("m_RECEIVED", "M_pipeline", "p_RECEIVED", row)
        yield pipe.ReadMetadata("alpha_RECEIVED", "ALPHA_pipeline", "p_RECEIVED", row)
        sums = [op.name for op in only(self.step, tile.Reduce)]
        for op in (*self._ops_named(self._row_sum()), *self._ops_named(str(product.acc))):
            assert isinstance(op, tile.Map)
            added = {symbol(name): sympy.Integer(0) for name, ref in op.uses if ref in sums}
            uses = tuple(
                (name, "alpha_RECEIVED" if ref == f"{soft}.alpha" else ref) for name, ref in op.uses if ref not in sums
            )
            yield replace(op, name=self._received_of(op.name), expr=op.expr.xreplace(added), uses=uses)
        (other,) = (parity for parity in PARITY.values() if parity != self.parity)
        yield pipe.ConsumerWait("v_RECEIVED", _pipeline(keys[product.b], other), keys[product.b].type)
        yield replace(
            product,
            name=self._received_of(product.name),
            a="p_RECEIVED",
            b="v_RECEIVED",
            acc=self._received_of(str(product.acc)),
        )
        yield pipe.ConsumerRelease("_release_p_RECEIVED", "p_RECEIVED")
        yield pipe.ConsumerRelease("_release_v_RECEIVED", "v_RECEIVED")

    def _carried_after_received(self) -> dict[str, str]:
        """Carried value -> the value after a tile whose P the other warp group has computed."""
        of_sums = next(field for field, ref in self.yielded.items() if ref == self.product.name)
        of_rows = next(field for field, ref in self.yielded.items() if ref == self._row_sum())
        return {
            self.m: "m_RECEIVED",
            of_rows: self._received_of(self._row_sum()),
            of_sums: self._received_of(self.product.name),
        }

    def _row_sum(self) -> str:
        """The row sums that an iteration yields."""
        return next(ref for field, ref in self.yielded.items() if self._is_row_sum(field))

    def _is_row_sum(self, field: str) -> bool:
        return field != self.m and self.yielded[field] != self.product.name

    def _ops_named(self, ref: str) -> list[Op]:
        return [op for op in self.step if op.name == ref]

    def _yields(self, values: dict[str, str]) -> Iterator[tuple[str, str]]:
        yield from ((field, ref) for field, ref in values.items() if field != self.m or self.keeps_m)

    # ------------------------------------------------------------------ names

    def _received_of(self, name: str) -> str:
        """The name of a value computed from the other warp group's weights."""
        return f"{self._field(name)}_RECEIVED"

    def _field(self, field: str) -> str:
        return field.removesuffix(f"_{self.name}")

    def _named(self, body: str, ops: Sequence[Op]) -> Iterator[Op]:
        """Append the body to the names of the ops and of the values that they define."""
        suffix = f"_{self.name}"
        names = {op.name: f"{op.name.removesuffix(suffix)}_in_{body}" for op in ops}
        refs = {
            f"{op.name}.{field}".rstrip("."): f"{names[op.name]}.{field}".rstrip(".")
            for op in ops
            for field in op.results()
        }
        for op in ops:
            moved = replace(op.with_operands(refs), name=names[op.name])
            if isinstance(moved, tile.Yield):
                moved = replace(moved, values=tuple((self._field(field), ref) for field, ref in moved.values))
            yield moved
