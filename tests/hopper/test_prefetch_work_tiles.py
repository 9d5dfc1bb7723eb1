"""The producer fetches the next work tile between its loops of loads (the pass prefetch-work-tiles)."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.verify import verify
from tests import chunks
from tests.helpers import stages_of
from tests.hopper.common import edited_module, lowered
from tests.hopper.texts import texts_of

WINDOW, CAUSAL = texts_of("window of chunks", "fwd"), texts_of("causal 64 of chunks", "fwd")
FETCH = "    prefetch_tile %Work_pipeline\n"
RELEASE = "    reload_tile %Work_pipeline\n"
REFUSED = {
    "two": ([(FETCH, FETCH + FETCH)], "is one of several that fetch the next work tile; expected one"),
    "in a consumer": (
        [(FETCH, ""), (RELEASE, RELEASE + FETCH)],
        "expected this in the body of the work_loop that fetches",
    ),
    "of other stages": ([(FETCH, "    prefetch_tile %K_pipeline\n")], "fetches a work tile for %K_pipeline"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_fetches_are_refused(mistake: str) -> None:
    changes, reason = REFUSED[mistake]
    module = WINDOW.module("prefetch-work-tiles")
    with pytest.raises(VerifyError, match=f"`types`: .*{re.escape(reason)}"):
        verify(edited_module(module, *changes))


REVERSED = "ranges(kv_full_end_at .. kv_end_at) body(@copy) cls(partial) reversed(yes)"
WRONG_ORDERS = {
    "rising": (
        [(REVERSED, REVERSED.removesuffix(" reversed(yes)"))],
        "`same-tiles`: .*run over tiles in different orders",
    ),
    "full tiles too": (
        [("cls(full)", "cls(full) reversed(yes)")],
        "`same-tiles`: .*run over tiles in different orders",
    ),
    "several ranges": (
        [(REVERSED, f"ranges(0 .. 0, {REVERSED.removeprefix('ranges(')}")],
        "`loop-bodies`: .*%copy_keys_partial is reversed; expected one range, nothing carried",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_ORDERS)
def test_loads_in_another_order_than_the_consumers_are_refused(mistake: str) -> None:
    changes, reason = WRONG_ORDERS[mistake]
    module = verify(CAUSAL.module("prefetch-work-tiles"))
    with pytest.raises(VerifyError, match=reason):
        verify(edited_module(module, *changes))


def test_a_reversed_loop_counts_down() -> None:
    spec = chunks.spec_of("causal", head_dim=64, schedule={"backend": "hopper"})
    source = render(stages_of(spec)["legalize-gluon"])["hopper.py"]
    assert "for kv_tile in range(kv_end_at - 1, kv_full_end_at - 1, -1):" in source


def test_programs_that_wait_for_others_do_not_fetch_ahead() -> None:
    load = "    producer_load %K_pipeline"
    module = lowered("causal_mha")
    with pytest.raises(VerifyError, match="programs of this kernel fetch a tile when they start it"):
        verify(edited_module(module, (load, FETCH + load), kernel="bwd"))


def test_one_function_places_the_first_work_tile_and_the_next() -> None:
    source = render(
        stages_of(chunks.spec_of("window", head_dim=128, schedule={"backend": "hopper"}))["legalize-gluon"]
    )["hopper.py"]
    assert re.findall(r"= fwd_tile\(\s*([\w.]+)\(", source) == ["gl.program_id", "_broadcast"]
    (returned,) = re.findall(r"    _q_row = gl.where\(_number < TILES, _q_row, -1\)\n    return \((.*)\)", source)
    numbers = ["_q_row", "q_start", "h", "b", "kv_first_at", "kv_full_first_at", "kv_full_end_at", "kv_end_at"]
    assert returned.split(", ") == numbers
