"""The page of `explain --html`: one file that loads nothing, says what the analysis says, and is written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import sympy

from attngen.analysis.roofline import Problem
from attngen.bounds.tiles import count_tiles
from attngen.certify.certificate import keep
from attngen.cli import main
from attngen.emit.charts import PLOT
from attngen.emit.mathml import MathML
from attngen.emit.page import page
from attngen.emit.render import render
from attngen.emit.tilemap import TileMap, draw_tiles, tile_maps
from attngen.ir.expr import parse, symbol
from attngen.ir.graph import Blocks, Module
from attngen.ir.ops import Loop
from tests.helpers import ROOT, lowered, spec, target

NAMES = ("causal_mqa", "local_global_dropout_mha", "causal_padding_gqa")


@cache
def html(name: str, problem: Problem | None = None) -> str:
    text = (ROOT / "specs" / f"{name}.yaml").read_text()
    files = keep(render(target(name)), ROOT / "generated" / name)  # with the compiler's readings
    return page(spec(name), text, list(lowered(name).items()), files, problem or Problem())


@cache
def tree(name: str) -> ET.Element:
    return ET.fromstring(html(name))


def words(element: ET.Element) -> str:
    return "".join(element.itertext())


# ---------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_nothing(name: str) -> None:
    for element in tree(name).iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        for key, value in element.attrib.items():
            assert key not in ("src", "srcset", "data", "action") and not key.startswith("on")
            assert key != "href" or value.startswith("#")
            assert "url(" not in value
    (style,) = tree(name).iter("style")
    assert "url(" not in words(style) and "@import" not in words(style)
    (policy,) = (e for e in tree(name).iter("meta") if e.get("http-equiv") == "Content-Security-Policy")
    assert policy.get("content") == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize("name", NAMES)
def test_links_and_labels_lead_somewhere(name: str) -> None:
    ids = [e.get("id") for e in tree(name).iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    named = [e.get("href", "")[1:] for e in tree(name).iter("a")]
    for chart in tree(name).iter("svg"):
        assert chart.get("role") == "img" and [e.tag for e in chart][:2] == ["title", "desc"]
        named += chart.get("aria-labelledby", "").split()
    assert set(named) == set(ids)


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_the_spec_every_pass_and_the_code(name: str) -> None:
    listed = {e.get("aria-label", ""): words(e) for e in tree(name).iter("pre")}
    assert listed["The spec as written"] == (ROOT / "specs" / f"{name}.yaml").read_text()
    files = render(target(name))
    for file in ("__init__.py", "kernels.py", "schedule.ir"):
        assert listed[file] == files[file]
    assert [label for label in listed if label.startswith("The IR after ")] == [f"The IR after {step}" for step in lowered(name)]
    assert listed["The IR after legalize-triton"] == files["schedule.ir"]
    assert "-     %masked = mask %score where(" in html("causal_mqa") and "+     %masked = mask %s where(" in html("causal_mqa")


def test_texts_are_escaped() -> None:
    nasty = "</pre><script>alert('&amp;')</script>"
    steps = [(name, replace(module, mask=nasty)) for name, module in lowered("causal_mqa").items()]
    text = page(spec("causal_mqa"), f"# {nasty}\n", steps, render(target("causal_mqa")), Problem())
    assert "<script" not in text
    assert words(ET.fromstring(text)).count(nasty) == 2 + len(steps)


# ---------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("name", ["window_gqa", "causal_padding_gqa"])
def test_tiles_drawn_are_tiles_counted(name: str) -> None:
    module = target(name)
    found = dict(tile_maps(module, Problem()))
    assert found.keys() == {k.name for k in module.kernels} - {"delta", "packed"}
    for kernel, drawn in found.items():
        assert isinstance(drawn, TileMap)
        sizes = (drawn.n, drawn.n, drawn.block_q, drawn.block_kv)
        tile = PLOT * PLOT * drawn.block_q * drawn.block_kv / drawn.n**2
        for cls in ("full", "partial"):
            wanted = count_tiles(module.kernel(kernel), *sizes, cls)
            area = (s.attributes for s in drawn.drawing.shapes if s.attributes["class"] == cls)
            assert drawn.count(cls) == wanted > 0
            assert sum(float(a["width"]) * float(a["height"]) for a in area) / tile == pytest.approx(wanted, rel=0.05)
        assert sum(int(row[-1]) for row in drawn.programs()) == count_tiles(module.kernel(kernel), *sizes)


def test_ranges_are_listed_and_the_last_tile_is_cut() -> None:
    drawn = draw_tiles(target("window_gqa"), target("window_gqa").kernel("fwd"), Problem(n_q=300, n_kv=300))
    assert list(drawn.programs())[3:] == [["3", "192 .. 256", "0 .. 3", "3 .. 4", "4"], ["4", "256 .. 300", "0 .. 4", "4 .. 5", "5"]]
    last = drawn.drawing.shapes[-2]
    assert (last.hint, last.attributes["width"]) == ("program 4: partial 4 .. 5", "44")


def test_a_pattern_of_blocks_is_drawn() -> None:
    for kernel, drawn in tile_maps(target("local_global_dropout_mha"), Problem()):
        assert isinstance(drawn, TileMap), kernel
        side = drawn.n // 64
        listed = sum(abs(i - j) <= 2 or i < 1 or j < 1 for i in range(side) for j in range(side))
        assert drawn.count("full") == listed * 64 * 64 // (drawn.block_q * drawn.block_kv)


def test_what_only_a_call_knows_is_said() -> None:
    given = replace(target("local_global_dropout_mha"), blocks=Blocks(64))
    assert {why for _, why in tile_maps(given, Problem())} == {"Which blocks of scores count is known at the call: block_mask= says it."}
    (_, drawn), *_ = tile_maps(target("causal_padding_gqa"), Problem())
    assert isinstance(drawn, TileMap)
    assert "Drawn for a call that hides nothing by kv_lengths; others visit fewer tiles." in drawn.remarks


@pytest.mark.parametrize(
    "end, why",
    [("secret", "Its tiles depend on secret, which only a call knows."), ("2*Nk", "Its loop over full tiles runs 0 .. 2048 unless")],
)
def test_a_bound_that_cannot_be_told_leaves_the_map_out(end: str, why: str) -> None:
    def longer(module: Module) -> Module:
        ranges = ((sympy.Integer(0), parse(end)),)
        return module.map_kernels(lambda k: k.rewrite(lambda _, op: [replace(op, ranges=ranges) if isinstance(op, Loop) else op]))

    for _, drawn in tile_maps(longer(target("causal_mqa")), Problem()):
        assert not isinstance(drawn, TileMap) and drawn.startswith(why)


# ---------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "text, shown",
    [
        ("cdiv(Nk - Nq + 1, BLOCK_KV)", "⌈(Nk+1−Nq)/Bc⌉"),
        ("q_start // BLOCK_KV", "⌊q0/Bc⌋"),
        ("max(0, min(Nk, kv_lengths))", "max(0,min(Nk,kv_lengths))"),
        ("Nk - Nq + q_idx >= kv_idx and not key_padding", "k≤Nk+q−Nq∧¬key_padding"),
        ("select(q_idx < 1, select(kv_idx < 1, Nq, 0), 0)", "Nqifk<1∧q<10else"),
        ("-2*Nq*(stages - 1)/group", "−2Nq(stages−1)group"),
        ("exp2(s)*LOG2E - log2(s)", "(log2e)2s−log2(s)"),
        ("D_QK**2", "dqk2"),
    ],
)
def test_formulas_are_typeset(text: str, shown: str) -> None:
    assert words(ET.fromstring(f"<p>{MathML().math(parse(text))}</p>")).replace(" ", "") == shown


def test_an_unknown_function_is_its_name_and_arguments() -> None:
    x, y = symbol("Nq"), symbol("a<b>")
    text = MathML().math(sympy.Function("erf2")(x, y) + sympy.Sum(x, (x, 0, 1)))
    assert "a<b>" not in text
    assert "erf2(Nq,a<b>)" in words(ET.fromstring(f"<p>{text}</p>"))


# ---------------------------------------------------------------------------------------------- the command line


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["explain", str(ROOT / "specs" / "causal_mqa.yaml"), *args])
    return int(caught.value.code or 0), *capsys.readouterr()


def test_the_command_writes_the_page_that_every_process_makes(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    sizes = ("--seq", "4096", "--batch", "2", "--heads", "8")
    command = [sys.executable, "-m", "attngen", "explain", "specs/causal_mqa.yaml", *sizes, "--html", str(path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, capture_output=True, text=True)
    assert done.stdout == f"{path}\n"
    expected = html("causal_mqa", Problem(2, 8, 1, 4096, 4096))
    assert path.read_text() == expected and "B = 2, Hq = 8, Hkv = 1, Nq = 4096, Nk = 4096" in expected
    assert os.listdir(tmp_path) == ["out.html"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--html", "out.txt"], "--html out.txt: expected a name that ends in .html"),
        (["--html", "no/out.html"], "--html no/out.html: there is no folder no; make it, or give another name"),
        (["--html", "folder.html"], "--html folder.html: is a folder; expected the name of a file"),
        (["--html", "out.html", "--theory"], "--html is a page of what `explain` shows without --theory; expected one of them"),
    ],
)
def test_a_wrong_path_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *args) == (1, "", f"error: {message}\n")
    assert os.listdir(tmp_path) == ["folder.html"]
