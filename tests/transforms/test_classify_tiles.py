"""classify-tiles gives closed-form bounds of empty, partial and full tiles (soundness: test_tiles_bruteforce.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.errors import VerifyError
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.verify import verify
from tests.helpers import KV_OUTER, SMALL, changes, edit, module, unverified

LOOP = "%keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step)"
TILES = {  # mask: "visible start; full start; full end; visible end"
    "kv_idx < Nk": "0; 0; Nk // BLOCK_KV; cdiv(Nk, BLOCK_KV)",
    "kv_idx < Nk and kv_idx <= q_idx": "0; 0; min(Nk, q_start + 1) // BLOCK_KV; "
    "cdiv(min(Nk, Nq, BLOCK_Q + q_start), BLOCK_KV)",
    "kv_idx < 100": "0; 0; min(100, Nk) // BLOCK_KV; cdiv(min(100, Nk), BLOCK_KV)",
    "kv_idx >= 100": "min(cdiv(Nk, BLOCK_KV), (100 // BLOCK_KV)); min(cdiv(100, BLOCK_KV), cdiv(Nk, BLOCK_KV)); "
    "max((Nk // BLOCK_KV), min(cdiv(100, BLOCK_KV), cdiv(Nk, BLOCK_KV))); cdiv(Nk, BLOCK_KV)",
    "kv_idx < Nk and q_idx < 100": "0; 0; select(min(Nq, BLOCK_Q + q_start) <= 100, (Nk // BLOCK_KV), 0); "
    "select(q_start <= 99, cdiv(Nk, BLOCK_KV), 0)",  # a condition on the program's own tile
    "kv_idx < Nk and 3 == kv_idx and kv_idx <= 2": "0; 0; 0; 0",  # no key meets both
    "kv_idx < Nk and Nq < q_idx": "0; 0; 0; 0",  # there is no such query
    "kv_idx*q_idx < 100": "0; 0; 0; cdiv(Nk, BLOCK_KV)",  # not linear
    "kv_idx < q_idx + 1/2": "0; 0; 0; cdiv(Nk, BLOCK_KV)",  # not over integers
    "kv_idx <= q_idx/2": "0; 0; 0; cdiv(Nk, BLOCK_KV)",
}


@pytest.mark.parametrize("where, tiles", TILES.items(), ids=TILES)
def test_a_loop_gets_the_bounds_of_its_mask(where, tiles):
    before = module(edit(SMALL, ("where(kv_idx < Nk)", f"where({where})")))
    assert changes(ClassifyTiles(), before) == [f"- {LOOP}", f"+ {LOOP} tiles({tiles})"]


def test_a_kv_outer_program_masks_the_last_keys():
    """No tile of queries is full if the program's tile of keys passes the end: the zeros loaded there would count as
    scores."""
    loop = "%queries = loop q ranges(0 .. cdiv(Nq, BLOCK_Q)) body(@step)"
    tiles = "0; 0; select(BLOCK_KV + kv_start <= Nk, (Nq // BLOCK_Q), 0); cdiv(Nq, BLOCK_Q)"
    assert changes(ClassifyTiles(), module(KV_OUTER)) == [f"- {loop}", f"+ {loop} tiles({tiles})"]


def test_facts_about_an_opaque_mask_bound_its_tiles():
    opaque = "kv_idx*q_idx < 100"
    bounded = f"where({opaque}) known({opaque} needs kv_idx < 90 enough kv_idx < 50)"
    before = module(edit(SMALL, ("where(kv_idx < Nk)", bounded)))
    assert changes(ClassifyTiles(), before)[1:] == [
        f"+ {LOOP} tiles(0; 0; min(50, Nk) // BLOCK_KV; cdiv(min(90, Nk), BLOCK_KV))"
    ]


def test_a_loop_that_is_classified_keeps_its_bounds():
    before = module(edit(SMALL, ("body(@step)", "body(@step) cls(partial)")))
    assert changes(ClassifyTiles(), before) == []


def test_a_mask_with_an_undefined_name_is_refused():
    before = replace(
        unverified(edit(SMALL, ("where(kv_idx < Nk)", "where(kv_idx < window)"))), meaning=unverified(SMALL).meaning
    )
    with pytest.raises(VerifyError, match="rule `names`: .*`window`, which is no operand, scalar or position"):
        verify(ClassifyTiles().run(before))
