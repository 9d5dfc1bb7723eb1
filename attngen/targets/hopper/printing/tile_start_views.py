"""Builds the views of ops that pass where a tile lies in the whole sequence, of which calls have chunks."""

from __future__ import annotations

from typing import Any

from attngen.ir.dims import AXIS_DIM
from attngen.ir.names import STARTS
from attngen.ir.pipe import ConsumerWait, LoadTileStart, ReadTileStart, WriteTileStart
from attngen.ir.pipe_control import MaskedFullTiles, masked_full_tiles
from attngen.targets.hopper.printing.pipeline_views import PipelineContext
from attngen.targets.printing.memory_views import applies


class TileStartContext(PipelineContext):
    """Builds the views of these ops."""

    def _load_tile_start(self, op: LoadTileStart, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "ptr": self._start_of_tile(), "check": ""}

    def _start_of_tile(self) -> str:
        """The pointer to the number that says where the loop's tile lies."""
        return f"{STARTS[self.loop][0]} + {self.loop}_tile * ({AXIS_DIM[self.loop]} // UNIT)"

    def _write_tile_start(self, op: WriteTileStart, cls: str) -> dict[str, Any]:
        """The line that writes a tile's start. A loop of full tiles loads it only for the tile that consumers mask,
        and only then."""
        tiles = str(self.pipelines[op.pipeline].metadata_of)
        full = () if applies(op.when, cls) else masked_full_tiles(self.kernel.ops())
        start = f"gl.load({self._start_of_tile()})" if full else self.var(op.value)
        text = {
            "pipeline": self._short(tiles),
            "row": {"start": start, "into": self._short(op.pipeline)},
            "waits": self._metadata_of(tiles, cls)[0] == op.pipeline,
            "only_if": " | ".join(map(self._is_among, full)),
        }
        return {**text, **self._stage(tiles)}

    def _is_among(self, tiles: MaskedFullTiles) -> str:
        """The condition under which the loop's tile is one of these, and the program visits none of those before."""
        same = [f"({self.loop}_tile == {self.scalar(number)})" for number in tiles.numbers]
        among = same[0] if len(same) == 1 else f"({' | '.join(same)})"
        return f"{among} & ({self._number(tiles.before)} == 0)" if tiles.before else among

    def _read_tile_start(self, op: ReadTileStart, cls: str) -> dict[str, Any]:
        """The line that reads the position of a tile. `_define_position` adds those that need its value: where a loop
        computes with it only in some tiles, the others do not wait for it. With `when` partial, full tiles read a
        number of another tile, and use it nowhere."""
        wait = self.kernel.op(op.tile)
        assert isinstance(wait, ConsumerWait)
        stage = self._stage(wait.pipeline, "_WARP_GROUP")["index"]
        return {"lines": [f"{self.loop}_start = _read_index({self._short(op.pipeline)}_smem.index({stage}))"]}
