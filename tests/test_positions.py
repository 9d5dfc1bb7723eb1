"""Specs with `positions`: what they say, and what is refused when they are built. tests/spec_mistakes.py has the
sentences of the rules of specs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import SpecError
from attngen.lowering.pipeline import lower
from attngen.spec import json_schema, make_spec, parse_spec
from tests import cli_common
from tests.chunks import ALLOWED
from tests.cli_common import Cli
from tests.helpers import SPECS, spec
from tests.test_spec_schema import conforms

project, attngen = cli_common.project, cli_common.attngen  # fixtures

BASE = "name: x\nhead_dim: 64\n"


def test_a_chunk_has_384_rows_unless_the_spec_says_another_number() -> None:
    assert parse_spec(BASE).chunk == 0
    assert parse_spec(BASE + "positions: {}").chunk == 384
    assert parse_spec(BASE + "positions: {chunk: 128}").chunk == 128


def test_specs_without_positions_keep_their_hash() -> None:
    plain, short, long, other = (
        parse_spec(BASE + more) for more in ("", "positions: {}", "positions: {chunk: 384}", "positions: {chunk: 192}")
    )
    assert "positions" not in plain.canonical() and plain.hash() == "sha256:e34f4b070ace6569"
    assert long.canonical()["positions"] == {"chunk": 384}
    assert short.hash() == long.hash() and len({plain.hash(), long.hash(), other.hash()}) == 3
    again = make_spec(long.canonical())
    assert again.hash() == long.hash() and again.chunk == 384


@pytest.mark.parametrize(
    ("positions", "valid"),
    [({"chunk": 64}, True), ({}, True), ({"chunk": 100}, False), ({"chunk": "64"}, False), ({"rows": 64}, False)],
)
def test_the_json_schema_knows_positions(positions: dict[str, Any], valid: bool) -> None:
    schema = json_schema()
    assert conforms({"name": "x", "head_dim": 64, "positions": positions}, schema, schema) == valid


def test_committed_specs_have_no_positions() -> None:
    assert not [name for name in SPECS if spec(name).chunk]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"mask": ALLOWED, "positions": {"chunk": 192}},
            "`positions.chunk` is 192, and the mask lists blocks of 128 x 128 scores (its data says which count), "
            "which lie in chunks; expected a multiple of 128",
        ),
        (
            {"schedule": {"block_q": 128}, "positions": {"chunk": 192}},
            "`schedule.block_q` is 128, and calls have chunks of 192 rows, which tiles divide; expected 64 or less",
        ),
        (
            {"schedule": {"block_kv": 128}, "positions": {"chunk": 64}},
            "`schedule.block_kv` is 128, and calls have chunks of 64 rows, which tiles divide; expected 64 or less",
        ),
        (
            {"schedule": {"backend": "hopper"}, "positions": {"chunk": 192}},
            "`schedule.backend` is hopper, and the kernel @fwd cannot be warp-specialized: its calls have chunks of "
            "192 rows, and a program has 128",
        ),
    ],
)
def test_chunks_that_tiles_or_blocks_do_not_divide_are_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)):
        lower(make_spec({"name": "x", "head_dim": 64, **more}))


@pytest.mark.parametrize("more", ["", "mask: {document: {packed: true}}\nscore: sink\n"])
def test_explain_has_the_figures_of_a_call_with_all_chunks(project: Path, attngen: Cli, more: str) -> None:
    base = f"{BASE}heads: {{sharing: gqa}}\n{more}"
    (project / "specs" / "x.yaml").write_text(base)
    plain = attngen("explain", "specs/x.yaml", "--kernels")
    (project / "specs" / "x.yaml").write_text(f"{base}positions: {{chunk: 384}}\n")
    found = attngen("explain", "specs/x.yaml", "--kernels")
    note = "Calls have chunks of 384 rows; figures are of a call with all of them"
    assert note in found and note not in plain
    assert not re.search(r"count = .*\b(Rq|Rk)\b", attngen("explain", "specs/x.yaml", "--theory"))
    text = attngen("explain", "specs/x.yaml", "--loops", "--formulas")
    assert "q_end_at = tiles of the call before tile q_end" in text
    attngen("explain", "specs/x.yaml", "--html", "x.html")
    assert "tiles of the call come before tile" in (project / "x.html").read_text()


@pytest.mark.share(4)
def test_attngen_test_calls_with_all_chunks_in_order(project: Path, attngen: Cli) -> None:
    (project / "specs" / "x.yaml").write_text("name: x\nhead_dim: 16\nmask: causal\npositions: {chunk: 64}\n")
    found = attngen("test", "specs/x.yaml")
    assert "dq" in found and "jvp" not in found.partition("dx: gradient")[0]
