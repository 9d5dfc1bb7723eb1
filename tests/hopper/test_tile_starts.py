"""Positions of tiles in the whole sequence, which reach the consumers with the tiles (the pass stage-tile-starts)."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir.printer import print_module
from attngen.verify import verify
from tests import chunks
from tests.helpers import stages_of
from tests.hopper.common import edited_module
from tests.hopper.texts import texts_of

WINDOW = texts_of("window of chunks", "fwd")
WRITE = "    write_tile_start %KV_START_pipeline %_kv_tile_start when(partial)\n"
TILE = "    producer_load %K_pipeline %K[b, h, kv, d_qk]\n"
REFUSED = {
    "no start": (
        WRITE,
        "",
        "expected a pipeline to which the starts of these tiles are written",
    ),
    "a start after its tile": (
        WRITE + TILE,
        TILE + WRITE,
        "is not among the loads of %K_pipeline and of its metadata",
    ),
    "a start in the stages of tiles": (
        WRITE,
        WRITE + "    write_tile_start %K_pipeline %_kv_tile_start\n",
        "expected a pipeline of metadata with one number for each tile",
    ),
    "the start of another tile": (
        "read_tile_start %KV_START_pipeline tile(%k)",
        "read_tile_start %KV_START_pipeline tile(%q)",
        "expected a pipeline to which the starts of these tiles are written",
    ),
    "a start in full tiles": (
        "tile(%k) when(partial)",
        "tile(%k)",
        "reads %KV_START_pipeline always; expected partial, as write_tile_start writes it",
    ),
    "a mask of full tiles": (
        "    %masked_1 = mask %s where(kv_idx >= ",
        "    %masked_1 = mask %s when(always) where(kv_idx >= ",
        "reads the position of %k in partial tiles; %masked_1 needs it in all",
    ),
    "a tile that is released": (
        "    read_tile_start %KV_START_pipeline tile(%k) when(partial)\n",
        "    consumer_release %k\n    read_tile_start %KV_START_pipeline tile(%k) when(partial)\n",
        "reads metadata of %k where this block has not waited for it, or has released it",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_starts_of_tiles_are_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    module = WINDOW.module("stage-tile-starts")
    with pytest.raises(VerifyError, match=f"`types`: .*{re.escape(reason)}"):
        verify(edited_module(module, (old, new)))


def test_a_start_is_read_before_the_mask_that_needs_it() -> None:
    module = WINDOW.module("stage-tile-starts")
    read = "    read_tile_start %KV_START_pipeline tile(%k) when(partial)\n"
    (block,) = (b for b in re.findall(r"  block @step\n(?:    .*\n)*", print_module(module)) if read in b)
    mask = next(line for line in block.splitlines(keepends=True) if "= mask " in line)
    late = block.replace(read, "").replace(mask, mask + read).replace("    consumer_release %k\n", "")
    with pytest.raises(VerifyError, match="reads the position of %k after %"):
        verify(edited_module(module, (block, late)))


def test_kernels_that_wait_for_semaphores_look_positions_up_around_the_l1_cache() -> None:
    spec = chunks.spec_of("causal", head_dim=64, schedule={"backend": "hopper"})
    functions = re.split(r"\ndef ", render(stages_of(spec)["legalize-gluon"])["hopper.py"])
    counts = {
        kernel: [
            sum(len(re.findall(what, body)) for body in functions if body.startswith(kernel))
            for what in (r"(?:_position_of|_tile_of_call|_lookup)\(", "NC=True")
        ]
        for kernel in ("fwd", "bwd")
    }
    (lookups, around), (lookups_backward, around_backward) = counts["fwd"], counts["bwd"]
    assert lookups > around == 0
    assert lookups_backward == around_backward > 0
