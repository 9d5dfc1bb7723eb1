"""Builds the lines that start a kernel: which tile, head, sequence and split a program has."""

from __future__ import annotations

from attngen.ir import AXIS_DIM, COLUMN_DIM, REVERSED_GROUP, SPLIT_DIM, SPLIT_SYMBOLS, GridAxis, only, tile
from attngen.ir.names import ROW_AXES
from attngen.targets.printing.memory_views import MemoryContext
from attngen.targets.printing.split_kv import split_args

# The number of sequences whose lengths are read at once: one per thread of a warp, or, for more sequences, of four
# warps.
LANES, LENGTHS = 32, 128


class ProgramContext(MemoryContext):
    """Builds the prologue of one kernel."""

    def _prologue(self, used: set[str]) -> tuple[list[str], list[str], str]:
        """Lines that compute the program's tile, head and sequence.

        If a program processes several splits of the keys: also the lines that start each iteration over splits, and
        the number of iterations of all programs.
        """
        lines, rest, outer = ["pid = tl.program_id(0)"], "pid", list(self.kernel.grid)
        over_splits = self._loops_over_splits
        iteration: list[str] = []
        iterations = ""
        if over_splits:
            (lines, iteration, iterations), outer = self._split_iteration(), []
        elif not self.kernel.traits.visits_all_tiles:
            tile_lines, rest = self._tile_start(outer.pop(0))
            lines += tile_lines
        lines += self._outer_indices(outer, rest)
        if self.kernel.kv_split and not over_splits:
            lines += self._by_sequences(
                [("unit", "_split_size", ""), (", ".join(SPLIT_SYMBOLS), "_splits_of", "b, unit")]
            )
        for axis in ROW_AXES:
            off = f"{axis}_off"
            if off in used or f"{axis}_idx" in used:
                lines.append(f"{off} = tl.arange(0, {AXIS_DIM[axis]})")
        if "dtype" in used:
            lines.append(self._dtype_line())
        if f"{self.kernel.program_axis}_idx" in used and not self.kernel.traits.visits_all_tiles:
            (iteration if over_splits else lines).append(
                f"{self.kernel.program_axis}_idx = {self.kernel.program_axis}_start + {self.kernel.program_axis}_off"
            )
        for axis in COLUMN_DIM:
            if axis in used:
                lines.append(f"{axis} = tl.arange(0, {self._width(axis)})")
        if columns := self.kernel.traits.split_d_axis:
            lines.append(f"{columns.var} = {columns.var}_start + tl.arange(0, {SPLIT_DIM[columns.var]})")
        return lines, iteration, iterations

    def _tile_start(self, own: GridAxis) -> tuple[list[str], str]:
        """Lines that compute the first row of the program's tile, and the expression for the rest of `pid`.

        With a swizzle, programs of a group of heads alternate between these heads.
        """
        tiles = f"{own.var}_tiles"
        lines = [f"{tiles} = {self.scalar(own.extent)}"]
        position, rest = f"pid % {tiles}", f"pid // {tiles}"
        many = "_swizzle_heads" if own.swizzle_rows else own.swizzle  # heads of a group
        if own.swizzle > 1 or own.swizzle_rows:
            lines += [f"_swizzle_heads = {self.scalar(own.heads)}"] if own.swizzle_rows else []
            lines += [
                f"first_head = pid // ({many} * {tiles}) * {many}",
                f"_heads_in_group = tl.minimum({many}, tl.num_programs(0) // {tiles} - first_head)  # of the swizzle",
                f"_in_group = pid - first_head * {tiles}",
                "_flat_head = first_head + _in_group % _heads_in_group",
            ]
            position, rest = "_in_group // _heads_in_group", "_flat_head"
        number = f"({f'{tiles} - 1 - {position}' if own.reversed else position})"
        if own.reversed_group:
            last_group = f"first_head + {many} >= tl.num_programs(0) // {tiles}"
            lines.append(f"{REVERSED_GROUP} = tl.where({last_group}, 1, 0)  # the last heads")
            number = f"tl.where({REVERSED_GROUP} > 0, {position}, {number[1:-1]})"
        named = {f"{own.var}_start"} if self.kernel.traits.places else set()
        return [*lines, *self._tile_position(own.var, number, named)], rest

    def _outer_indices(self, axes: list[GridAxis], rest: str) -> list[str]:
        """Lines that compute the program's head and sequence from `rest`, the part of `pid` above the tile."""
        lines = []
        for axis in axes[:-1]:
            extent = self.scalar(axis.extent)
            number = f"{rest} % {extent}"
            lines.append(
                f"{axis.var}_start = ({number}) * {SPLIT_DIM[axis.var]}"
                if axis.var in SPLIT_DIM
                else f"{axis.var} = {number}"
            )
            rest = f"{rest} // {extent}"
        return [*lines, f"{axes[-1].var} = {rest}"] if axes else lines

    def _dtype_line(self) -> str:
        """The line that names the element type: that of an output, or of an input if no output has it."""
        tensors = [a for a in self.kernel.args if a.type.dtype == "T"]
        tensor = next((a.name for a in tensors if a.role == "out"), tensors[0].name)
        loads = (op for op in only(self.kernel.ops(), tile.Load) if op.via)
        described = any(self.kernel.accessed(op)[0].name == tensor for op in loads)
        return f"dtype = {f'{tensor}.dtype if TMA else ' * described}{tensor}.dtype.element_ty"

    def _split_iteration(self) -> tuple[list[str], list[str], str]:
        """Lines that count the splits; lines that start each iteration, which processes one split; and the number of
        iterations of all programs. Heads vary faster than splits."""
        item, of_place, extents = self._split_place("place")
        before = [
            f"q_tiles = {self.scalar(self.kernel.grid[0].extent)}",
            *self._by_sequences([("unit", "_split_size", ""), ("_, _all_splits", "_splits_of", "B, unit")]),
        ]
        lines = self._by_sequences([(f"b, KV_split, {', '.join(SPLIT_SYMBOLS)}", "_split_of", f"{item}, unit")])
        return before, [*lines, *of_place], " * ".join(["_all_splits", *extents])

    def _split_place(self, place: str) -> tuple[str, list[str], list[str]]:
        """(the number of the split at `place`, lines that find its queries and heads, factors whose product is the
        number of places per split)."""
        own, *others = self.kernel.grid
        lines, item, extents = (
            [f"q_start = ({place} % q_tiles) * {AXIS_DIM[own.var]}"],
            f"{place} // q_tiles",
            ["q_tiles"],
        )
        for head in others:
            if head.var not in ("KV_split", "b"):
                extents.append(self.scalar(head.extent))
                lines.append(f"{head.var} = {item} % {extents[-1]}")
                item += f" // {extents[-1]}"
        return item, lines, extents

    def _by_sequences(self, found: list[tuple[str, str, str]]) -> list[str]:
        """Lines that call functions of the sequences' lengths; found: (names of the results, function, its other
        arguments) for each call.

        They have two forms: for few sequences, whose lengths one warp holds, so that sums need no other warp; and for
        more. Programs that multiply latents have only the second form: with two, those of 64 rows spill.
        """
        few, many = (
            [f"{names} = {self._of_lengths(name, own, n)}" for names, name, own in found] for n in (LANES, LENGTHS)
        )
        if self.module.rope and self.kernel.traits.dots:
            return many
        few, many = ([f"    {line}" for line in lines] for lines in (few, many))
        return [
            f"if B <= {LANES}:  # the lengths of so few sequences fit one warp, so sums need no other",
            *few,
            "else:",
            *many,
        ]

    def _of_lengths(self, name: str, own: str = "", at_once: int = LENGTHS) -> str:
        """A call of a function that reads all sequences' lengths, `at_once` at a time; own: its other arguments."""
        return (
            f"{name}({', '.join(['CACHE_SEQLENS', *([own] if own else []), *split_args(self.kernel), str(at_once)])})"
        )
