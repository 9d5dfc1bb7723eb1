"""Builds the views of ops that pass where a tile lies in the whole sequence, of which calls have chunks."""

from __future__ import annotations

from typing import Any

from attngen.ir import AXIS_DIM, pipe
from attngen.ir.behaviour import handles
from attngen.ir.names import STARTS
from attngen.targets.hopper.printing.pipeline_views import PipelineContext
from attngen.targets.printing.memory_views import applies


class TileStartContext(PipelineContext):
    """Builds the views of these ops."""

    @handles(pipe.LoadTileStart)
    def _load_tile_start(self, op: pipe.LoadTileStart, cls: str) -> dict[str, Any]:
        return {"lines": [f"{self.var(op.name)} = {self._start_of_tile()}"]}

    def _start_of_tile(self) -> str:
        """The lookup of where the loop's tile lies."""
        number = f"{STARTS[self.loop][0]} + {self.loop}_tile * ({AXIS_DIM[self.loop]} // UNIT)"
        return f"_lookup({number}{self.lookup_options})"

    @property
    def lookup_options(self) -> str:
        """`NC=True` if the kernel waits for semaphores, which drops what ordinary loads leave in the L1 cache."""
        return ", NC=True" if self.kernel.traits.adds_in_order else ""

    @handles(pipe.WriteTileStart)
    def _write_tile_start(self, op: pipe.WriteTileStart, cls: str) -> dict[str, Any]:
        """The line that writes a tile's start. A loop of full tiles loads it only for the tile that consumers mask,
        and only then."""
        tiles = str(self.pipelines[op.pipeline].metadata_of)
        full = () if applies(op.when, cls) else pipe.masked_full_tiles(self.kernel.ops())
        start = self._start_of_tile() if full else self.var(op.value)
        text = {
            "pipeline": self._short(tiles),
            "row": {"start": start, "into": self._short(op.pipeline)},
            "waits": self._metadata_of(tiles, cls)[0] == op.pipeline,
            "only_if": _any_of([self._is_among(tiles) for tiles in full]),
        }
        return {**text, **self._stage(tiles)}

    def _is_among(self, tiles: pipe.MaskedFullTiles) -> str:
        """The condition under which the loop's tile is one of these, and the program visits none of those before."""
        among = _any_of([f"{self.loop}_tile == {self.scalar(number)}" for number in tiles.numbers])
        return f"({among}) & ({self._number(tiles.before)} == 0)" if tiles.before else among

    @handles(pipe.ReadTileStart)
    def _read_tile_start(self, op: pipe.ReadTileStart, cls: str) -> dict[str, Any]:
        """The line that reads the position of a tile. `_define_position` adds those that need its value: where a loop
        computes with it only in some tiles, the others do not wait for it. With `when` partial, full tiles read a
        number of another tile, and use it nowhere."""
        wait = self.kernel.op(op.tile)
        assert isinstance(wait, pipe.ConsumerWait)
        stage = self._stage(wait.pipeline, "_WARP_GROUP")["index"]
        return {"lines": [f"{self.loop}_start = _read_index({self._short(op.pipeline)}_smem.index({stage}))"]}


def _any_of(conditions: list[str]) -> str:
    """A condition that is true if one of these is; empty text if there are none."""
    return conditions[0] if len(conditions) == 1 else " | ".join(f"({text})" for text in conditions)
