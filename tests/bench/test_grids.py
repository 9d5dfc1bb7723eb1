"""Grids of benchmark cells: those of attngen, YAML files and their errors, selections, and the choices of the
command."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.bench.cases.catalog import decode, fa3, find_grid, flex, paper
from attngen.bench.cases.grids import cell, only, read_grid
from attngen.bench.peers import PEERS
from attngen.bench.run import Setup
from attngen.bench.work import listing, select
from attngen.errors import AttngenError
from attngen.spec import make_spec
from tests.helpers import ROOT

SIZES = {"n": "1024,1:4096", "batch": None, "heads": 16, "kv_heads": None, "dtype": None}
GOOD = """\
peers: [flash, ours]
cells:
  - specs: [specs/causal_gqa.yaml, specs/window_gqa.yaml]
    n: [1024, [1, 8192]]
    tokens: 8192
    heads: 8
    kv_heads: 2
  - {specs: specs/causal_mqa.yaml, n: 512, batch: 3, dtype: fp16}
  - {specs: specs/decode_sinks_paged_gqa.yaml, n: [[1, 900]], batch: 2, ragged: 100, page_size: 16}
"""


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_grid_of_the_paper() -> None:
    cells = paper().cells
    assert len(cells) == 2 * 2 * 6 and len({str(c) for c in cells}) == 24
    assert {(c.batch, c.heads, c.spec.head_dim.qk, c.dtype) for c in cells} == {(4, 16, 64, "fp16")}
    assert {c.n_q for c in cells} == {c.n_kv for c in cells} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {(c.spec.mask.name, c.kv_heads) for c in cells} == {("causal", 16), ("causal", 1), ("none", 16), ("none", 1)}
    assert "naive" in paper().peers


def test_the_grid_of_flash_attention_3() -> None:
    cells = fa3().cells
    assert len(cells) == 3 * 2 * 6
    assert {(c.batch * c.n_q, c.heads * c.spec.head_dim.qk, c.dtype) for c in cells} == {(16384, 2048, "bf16")}
    assert {c.spec.head_dim.qk for c in cells} == {64, 128, 256}


def test_a_spec_in_two_grids_is_measured_once_per_list_of_peers() -> None:
    work = select([], ["paper", "fa3"], None, None, None, SIZES)
    assert len(work) == 60
    assert set(work.values()) == {("ours", "flash", "naive"), ("ours", "flash", "cudnn", "flex", "fa4")}


def test_flex_flash_says_where_flash_attention_4_is_not_installed() -> None:
    cells = {c.spec.name: c for c in flex().cells}
    assert PEERS["flex_flash"].cannot(cells["flex_alibi"]) == "FlashAttention-4 is not installed"


def test_a_grid_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    grid = find_grid(str(path))
    assert (grid.name, grid.peers) == ("mine", ("flash", "ours"))
    assert [str(c) for c in grid.cells] == [
        "causal_gqa bf16 B8 H8/2 N1024",
        "causal_gqa bf16 B1 H8/2 Nq1 Nk8192",
        "window_gqa bf16 B8 H8/2 N1024",
        "window_gqa bf16 B1 H8/2 Nq1 Nk8192",
        "causal_mqa fp16 B3 H16/1 N512",
        "decode_sinks_paged_gqa bf16 B2 H16/4 Nq1 Nk900 ragged=100 page=16",
    ]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("cells:", "cell:", ": expected a list under `cells:`, each with `specs` and `n`"),
        ("peers:", "piers:", ", line 1: `piers`: is no key of a grid; did you mean `peers`?"),
        ("peers: [flash, ours]", "peers: ours", ", line 1: `peers`: expected a list of names, as in [ours, flash]"),
        ("    tokens:", "    tokins:", ", line 5: `tokins`: is no key of a grid; did you mean `tokens`?"),
        ("    n: [1024, [1, 8192]]\n", "", ", line 3: `cells`: has no `n`; expected a list of them"),
        ("n: 512", "n: 0", ", line 8: `n`: is `0`; expected a whole number from 1 to 16777216"),
        ("heads: 8", "heads: 8.5", ", line 6: `heads`: is `8.5`; expected a whole number from 1 to 16777216"),
        ("batch: 3", "batch: 3, tokens: 9", ", line 8: `batch`: is given together with `tokens`; expected one of them"),
        ("dtype: fp16", "dtype: f16", ", line 8: `dtype`: is `f16`; expected bf16, fp16 or fp32"),
        ("dtype: fp16", "dtype: fp32", ", line 8: `cells`: causal_mqa is not built for fp32; expected bf16 or fp16"),
        (
            "kv_heads: 2",
            "kv_heads: 3",
            ", line 3: `cells`: causal_gqa: 8 query heads are not a multiple of 3 K/V heads",
        ),
        (
            "batch: 3",
            "kv_heads: 4",
            ", line 8: `cells`: causal_mqa is mqa, which has 1 K/V heads for 16 query heads, not 4",
        ),
        (
            "ragged: 100",
            "ragged: 901",
            (
                ", line 9: `cells`: decode_sinks_paged_gqa: `ragged` is 901; expected a spec with `cache`, and 900, "
                "the keys, at most"
            ),
        ),
        (
            "batch: 3",
            "ragged: 3",
            ", line 8: `cells`: causal_mqa: `ragged` is 3; expected a spec with `cache`, and 512, the keys, at most",
        ),
        (
            "batch: 3",
            "page_size: 16",
            (
                ", line 8: `cells`: causal_mqa: `page_size` is 16; expected a spec with `cache: {paged: {page_size: "
                "any}}`"
            ),
        ),
        (
            "specs: specs/causal_mqa.yaml",
            "specs: 7",
            ", line 8: `specs`: is `7`; expected files, as in [specs/causal_gqa.yaml]",
        ),
    ],
)
def test_a_wrong_grid_is_one_sentence(tmp_path: Path, old: str, new: str, error: str) -> None:
    path = tmp_path / "mine.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(AttngenError) as caught:
        read_grid(path)
    assert str(caught.value) == f"{path}{error}"


def test_only_selects_cells_by_words() -> None:
    found = only(fa3().cells, "D64,d128,causal,n4096, 512")
    assert [str(c) for c in found] == [
        "causal_mha_d64 bf16 B32 H32 N512",
        "causal_mha_d64 bf16 B4 H32 N4096",
        "causal_mha_d128 bf16 B32 H16 N512",
        "causal_mha_d128 bf16 B4 H16 N4096",
    ]
    assert [str(c) for c in only(decode().cells, "ragged,page16")] == [
        "decode_page16 bf16 B64 H32/8 Nq1 Nk65536 ragged=512"
    ]
    assert [c.n_kv for c in only(decode().cells, "B1,decode_rows")] == [1024, 4096, 16384, 65536, 131072]
    with pytest.raises(AttngenError, match="--only: no cell has `d65`; did you mean `d64`?"):
        only(fa3().cells, "D65")
    with pytest.raises(AttngenError, match="--only .* leaves no cell"):
        only([*paper().cells, *fa3().cells], "fp16,D128")


@pytest.mark.parametrize(
    ("specs", "grids", "words", "peers", "sizes", "error"),
    [
        ([], [], None, None, {}, "nothing to measure; expected"),
        (["specs/causal_mha.yaml"], ["fa3"], None, None, {}, "SPEC and --grid are both given"),
        ([], ["fa4"], None, None, {}, "--grid fa4 is no grid of attngen and no file; did you mean `fa3`?"),
        ([], ["fa3"], None, "ours,flesh", {}, "`flesh` is no peer; did you mean `flash`?"),
        (["specs/causal_mha.yaml"], [], None, None, {"n": "1k"}, "--n has `1k`; expected rows, as in 1024,4096"),
        (["specs/causal_mha.yaml"], [], None, None, {"kv_heads": 4}, "causal_mha is mha, which has 16 K/V heads"),
        (["specs/causal_mha.yaml"], [], None, None, {"dtype": "fp32"}, "causal_mha is not built for fp32"),
    ],
)
def test_a_wrong_command_is_one_sentence(
    specs: list[str], grids: list[str], words: None, peers: str, sizes: dict, error: str
) -> None:
    with pytest.raises(AttngenError) as caught:
        select([Path(s) for s in specs], grids, None, words, peers, {**SIZES, **sizes})
    assert str(caught.value).startswith(error)


def test_the_listing_says_what_each_peer_cannot_do() -> None:
    names = ("causal_mha", "window_gqa", "sinks_window_gqa", "causal_fp32", "softcap_window_gqa")
    work = select([ROOT / "specs" / f"{name}.yaml" for name in names], [], None, None, None, SIZES)
    headings, rows = listing(work, Setup())
    assert headings == ["cell", *PEERS] and len(rows) == 10
    table = {row[0].split()[0] + (" decode" if "Nq1" in row[0] else ""): dict(zip(headings, row)) for row in rows}
    assert {table[name]["ours"] for name in table} == {table[name]["naive"] for name in table} == {"yes"}
    assert table["causal_mha"]["flash"] == table["causal_mha"]["math"] == "yes"
    assert table["causal_mha decode"]["flash"] == "its causal is top-left"
    assert (
        table["causal_fp32"]["flash"] == table["causal_fp32"]["cudnn"] == "no fp32"
        and table["causal_fp32"]["efficient"] == "yes"
    )
    assert table["window_gqa"]["cudnn"] == "no mask but causal and none" and table["window_gqa"]["flex"] == "yes"
    assert table["softcap_window_gqa"]["flash"] == "no score modifiers"
    assert table["sinks_window_gqa"]["flex"] == "no sink in a score_mod"


def test_the_defaults_of_a_cell() -> None:
    spec = make_spec({"name": "x", "heads": {"sharing": "gqa"}, "head_dim": 64})
    assert str(cell("", spec, 4096, 4096)) == "x bf16 B4 H16/4 N4096"
    assert str(cell("", spec, 32768, 32768)) == "x bf16 B1 H16/4 N32768"
