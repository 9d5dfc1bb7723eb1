"""The page of `explain --html`: one file that loads nothing, agrees with the analysis, and is written completely or not
at all."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sympy

from attngen.certify.certificate import keep
from attngen.cli import main
from attngen.cli.build import _tiles
from attngen.codegen.render import render
from attngen.codegen.signature import signatures
from attngen.cost.calls import ranges
from attngen.cost.roofline import Problem
from attngen.devices import DEVICES
from attngen.ir import Module, parse, symbol, tile
from attngen.ir.printer import print_module
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower, stages
from attngen.report.charts import PLOT
from attngen.report.elements import SIDE, Sample
from attngen.report.launches import launches
from attngen.report.mathml import MathML
from attngen.report.page import page
from attngen.report.tilemap import TileMap, draw_tiles, tile_maps
from attngen.spec import parse_spec
from attngen.tiles.tiles import count_tiles
from tests.helpers import ROOT, built, lowered, spec, target

NAMES = ("causal_mqa", "local_global_dropout_mha", "causal_padding_gqa")


@cache
def html(name: str, problem: Problem | None = None) -> str:
    text = (ROOT / "specs" / f"{name}.yaml").read_text()
    files = keep(target(name), render(target(name)), ROOT / "generated" / name)  # with the compile reports
    return page(spec(name), text, list(lowered(name).items()), files, problem or Problem())


@cache
def tree(name: str) -> ET.Element:
    return ET.fromstring(html(name))


def words(element: ET.Element) -> str:
    return "".join(element.itertext())


# ---------------------------------------------------------------------------------------------- the file


@pytest.mark.share(16)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_loads_nothing(name: str) -> None:
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
def test_links_and_labels_have_targets(name: str) -> None:
    ids = [e.get("id") for e in tree(name).iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    named = [e.get("href", "")[1:] for e in tree(name).iter("a")]
    for chart in tree(name).iter("svg"):
        assert chart.get("role") == "img" and [e.tag for e in chart][:2] == ["title", "desc"]
        named += chart.get("aria-labelledby", "").split()
    assert set(named) == set(ids)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_spec_every_pass_and_the_code(name: str) -> None:
    listed = {e.get("aria-label", ""): words(e) for e in tree(name).iter("pre")}
    assert listed["The spec as written"] == (ROOT / "specs" / f"{name}.yaml").read_text()
    files = render(target(name))
    for file in ("__init__.py", "kernels.py"):
        assert listed[file] == files[file]
    modules = list(lowered(name).items())
    changed = [modules[0][0]] + [
        step for (_, before), (step, after) in zip(modules, modules[1:]) if print_module(before) != print_module(after)
    ]
    portable = [step for step, module in modules if not module.warp_specialized][-1]
    whole = dict.fromkeys(("build", portable, modules[-1][0]))
    assert [label for label in listed if label.startswith("The IR after ")] == [f"The IR after {s}" for s in whole]
    assert all(listed[f"The IR after {step}"] == print_module(dict(modules)[step]) for step in whole)
    assert [label for label in listed if label.startswith("Changes by ")] == [
        f"Changes by {step}" for step in changed[1:]
    ]
    assert len(changed) < len(modules)
    assert listed["The IR after legalize-triton"] == files["schedule.ir"]
    assert "-     %masked = mask %score where(" in html("causal_mqa") and "+     %masked = mask %s where(" in html(
        "causal_mqa"
    )


@pytest.mark.share(16)
def test_texts_are_escaped() -> None:
    nasty = "</pre><script>alert('&amp;')</script>"
    steps = [(name, replace(module, mask=nasty)) for name, module in lowered("causal_mqa").items()]
    text = page(spec("causal_mqa"), f"# {nasty}\n", steps, render(target("causal_mqa")), Problem())
    assert "<script" not in text
    whole = 3  # the IR before the first pass, before warp-specialize, and after the last
    assert words(ET.fromstring(text)).count(nasty) == 3 + whole


# ---------------------------------------------------------------------------------------------- tiles


SEPARATE = Problem(q_heads=4, kv_heads=1, n_q=4096, n_kv=4096)  # too little work for the fused backward on H100


@pytest.mark.parametrize(
    "problem, kernels", [(Problem(), {"fwd", "bwd", "jvp"}), (SEPARATE, {"fwd", "dq", "dkdv", "jvp"})]
)
@pytest.mark.parametrize("name", ["window_gqa", "causal_padding_gqa"])
def test_rendered_tiles_equal_counted_tiles(name: str, problem: Problem, kernels: set[str]) -> None:
    module = target(name)
    found = dict(tile_maps(Sample(spec(name)), module, problem))
    assert found.keys() == kernels
    for kernel, rendered in found.items():
        assert isinstance(rendered, TileMap)
        sizes = (rendered.n, rendered.n, rendered.block_q, rendered.block_kv)
        tile = PLOT * PLOT * rendered.block_q * rendered.block_kv / rendered.n**2
        for cls in ("full", "partial"):
            expected = count_tiles(module.kernel(kernel), *sizes, cls)
            area = (s.attributes for s in rendered.drawing.shapes if s.attributes["class"] == cls)
            assert rendered.count(cls) == expected > 0
            assert sum(float(a["width"]) * float(a["height"]) for a in area) / tile == pytest.approx(expected, rel=0.05)
        assert sum(int(row[-1]) for row in rendered.programs()) == count_tiles(module.kernel(kernel), *sizes)


SPLIT_D256 = ("@dk (Hopper, 64 × 128)", "@dv (Hopper, 64 × 128)")


@pytest.mark.parametrize(
    "name, titles",
    [
        ("causal_gqa", ["@fwd (Hopper, 128 × 128)", "@bwd (Hopper, 64 × 128)", "@jvp (Hopper, 128 × 64)"]),
        ("causal_mqa", ["@fwd_long (Hopper, 192 × 128)", "@bwd (Hopper, 128 × 128)", "@jvp (Hopper, 128 × 128)"]),
        ("causal_d256", ["@fwd (Hopper, 128 × 64)", "@dq (Hopper, 128 × 64)", *SPLIT_D256, "@jvp (portable, 64 × 32)"]),
        ("decode_mla", ["@fwd (portable, 64 × 32)", "@prefill (portable, 64 × 64)"]),
    ],
)
def test_maps_show_the_kernels_that_a_long_call_launches(name: str, titles: list[str]) -> None:
    module = target(name)
    maps = [found for _, found in tile_maps(Sample(spec(name)), module, Problem()) if isinstance(found, TileMap)]
    assert [found.title for found in maps] == titles
    launched = [one for one in launches(module, "sm90") if one.covers(Problem(), DEVICES["H100"])]
    for found in maps:
        assert (found.made.kernel, found.made.config) in [(one.kernel, one.config) for one in launched]
        assert (found.block_q, found.block_kv) == (found.made.config.block_q, found.made.config.block_kv)
        assert min(len(found.cells), len(found.cells[0])) >= 10
        only = "Only calls of more than 3,072 rows run it."
        assert (only in found.remarks) == (found.made.kernel.name == "fwd_long")


def test_ranges_are_listed_and_the_last_tile_is_partial() -> None:
    module = target("window_gqa")
    made = ranges(module, module.kernel("fwd"), "any")[-1]
    rendered = draw_tiles(Sample(spec("window_gqa")), module, module.kernel("fwd"), made, 300)
    assert list(rendered.programs())[3:] == [
        ["3", "192 .. 256", "0 .. 3", "3 .. 4", "4"],
        ["4", "256 .. 300", "0 .. 4", "4 .. 5", "5"],
    ]
    last = rendered.drawing.shapes[-2]
    assert (last.hint, last.attributes["width"]) == ("program 4: partial 4 .. 5", "44")


def test_a_pattern_of_blocks_is_rendered() -> None:
    for kernel, rendered in tile_maps(
        Sample(spec("local_global_dropout_mha")), target("local_global_dropout_mha"), Problem()
    ):
        assert isinstance(rendered, TileMap), kernel
        side = rendered.n // 64
        listed = sum(abs(i - j) <= 2 or i < 1 or j < 1 for i in range(side) for j in range(side))
        assert rendered.count("full") == listed * 64 * 64 // (rendered.block_q * rendered.block_kv)


DATA = parse_spec("""
name: data
heads: {sharing: gqa}
head_dim: 64
dtype: bf16
mask:
  all_of:
    - causal
    - expr: "ids[b, q_idx] == ids[b, kv_idx] or allowed[b, q_idx, kv_idx]"
      params: {ids: {tensor: [B, Nk], dtype: int32}, allowed: {tensor: [B, Nq, Nk], dtype: bool}}
""")


@cache
def data() -> Module:
    return lower(DATA)


def by_hand(n: int) -> np.ndarray:
    """Return the mask of DATA on the sample that the page describes."""
    q, k = np.mgrid[:n, :n]
    return (k <= q) & ((q * 5 // n == k * 5 // n) | ((q * 8 // n + k * 8 // n) % 4 != 3))


def test_masks_of_data_are_rendered_with_sample_data() -> None:
    """Tiles in static ranges are those of causal. Tiles of blocks without visible pairs are unlisted, and tiles of
    fully visible blocks are full."""
    maps = dict(tile_maps(Sample(DATA), data(), Problem()))
    assert list(maps) == ["fwd", "dq", "dkdv", "jvp", "blocks"]
    for kernel in ("fwd", "dq", "dkdv"):
        rendered = maps[kernel]
        assert isinstance(rendered, TileMap)
        blocks = by_hand(rendered.n).reshape(rendered.n // 128, 128, rendered.n // 128, 128).sum((1, 3))
        expected = {"full": 0, "partial": 0, "unlisted": 0, "empty": 0}
        for i, q in enumerate(range(0, rendered.n, rendered.block_q)):
            for j, k in enumerate(range(0, rendered.n, rendered.block_kv)):
                count = blocks[q // 128, k // 128]
                hidden = k > q + rendered.block_q - 1
                cls = "empty" if hidden else "unlisted" if not count else "full" if count == 128**2 else "partial"
                expected[cls] += 1
                assert (rendered.cells[i][j] if rendered.own == "q" else rendered.cells[j][i]) == cls
        assert {cls: rendered.count(cls) for cls in expected} == expected and min(expected.values()) > 0
        assert sum(int(row[-1]) for row in rendered.programs()) == expected["full"] + expected["partial"]
        assert any("The ranges are static" in remark for remark in rendered.remarks)
    found = maps["blocks"]
    assert isinstance(found, TileMap) and found.count("unlisted") == 0
    assert any(remark.startswith("It finds the visible blocks of scores") for remark in found.remarks)


def test_a_block_mask_argument_is_rendered_from_a_sample() -> None:
    sample = Sample(spec("block_sparse_mha"))
    for _, rendered in tile_maps(sample, target("block_sparse_mha"), Problem()):
        assert isinstance(rendered, TileMap)
        listed = sum(map(sum, sample.listed(rendered.n, 128))) * 128 * 128 // (rendered.block_q * rendered.block_kv)
        assert (
            rendered.count("full") == listed
            and rendered.count("unlisted") == rendered.n**2 // (rendered.block_q * rendered.block_kv) - listed > 0
        )


def test_bounds_that_depend_on_the_call_are_mentioned() -> None:
    (_, rendered), *_ = tile_maps(Sample(spec("causal_padding_gqa")), target("causal_padding_gqa"), Problem())
    assert isinstance(rendered, TileMap)
    assert "Drawn for a call that hides nothing by kv_lengths; others visit fewer tiles." in rendered.remarks


@pytest.mark.parametrize(
    "end, why",
    [
        ("secret", "Its tiles depend on secret, which only a call knows."),
        ("2*Nk", "Its loop over full tiles runs 0 .. 4096 unless"),
    ],
)
def test_a_bound_that_is_unknown_leaves_the_map_out(end: str, why: str) -> None:
    def longer(module: Module) -> Module:
        ranges = ((sympy.Integer(0), parse(end)),)
        return module.map_kernels(
            lambda k: k.rewrite(lambda _, op: [replace(op, ranges=ranges) if isinstance(op, tile.Loop) else op])
        )

    for _, rendered in tile_maps(Sample(spec("causal_mqa")), longer(target("causal_mqa")), Problem()):
        assert not isinstance(rendered, TileMap) and rendered.startswith(why)


# ---------------------------------------------------------------------------------------------- elements of the mask


def test_elements_equal_formulas_by_hand() -> None:
    q, k = np.mgrid[:SIDE, :SIDE]
    (causal,) = Sample(spec("causal_mqa")).pictures
    assert np.array_equal(causal.seen, k <= q) and "All heads are alike." in causal.remarks
    (found,) = Sample(DATA).pictures
    assert np.array_equal(found.seen, by_hand(SIDE))
    assert "Sample: ids[0] = 0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 4 4 4 4." in found.remarks
    assert "Sample: allowed[0][q, k] = (q * 8 // 24 + k * 8 // 24) % 4 != 3." in found.remarks
    assert Sample(spec("full_mha")).pictures == []
    (lengths,) = Sample(spec("causal_padding_gqa")).pictures
    (shown,) = (
        int(remark.rpartition(" = ")[2][:-1])
        for remark in lengths.remarks
        if remark.startswith("Sample: kv_lengths[0]")
    )
    assert np.array_equal(lengths.seen, (k <= q) & (k < shown))
    assert "The first head of the first sequence; other sequences differ." in lengths.remarks


def test_a_second_picture_shows_an_edge_beyond_the_first_elements() -> None:
    first, window = Sample(spec("window_gqa")).pictures
    q, k = np.mgrid[window.q0 : window.q0 + SIDE, window.k0 : window.k0 + SIDE]
    assert np.array_equal(window.seen, (k <= q) & (q - k <= 1023)) and 0 < np.sum(window.seen) < SIDE**2
    assert list(first.rows())[3] == ["3", "0 .. 3"] and list(window.rows())[0][0] == str(window.q0)
    (_, blocks) = Sample(spec("local_global_dropout_mha")).pictures
    q, k = np.mgrid[blocks.q0 : blocks.q0 + SIDE, blocks.k0 : blocks.k0 + SIDE] // 64
    assert np.array_equal(blocks.seen, (abs(q - k) <= 2) | (q < 1) | (k < 1)) and 0 < np.sum(blocks.seen) < SIDE**2


@pytest.mark.share(16)
def test_rendered_elements_equal_visible_ones() -> None:
    for picture in Sample(DATA).pictures:
        rendered = [s.attributes for s in picture.drawing.shapes if s.attributes["class"] == "full"]
        area = sum(float(a["width"]) * float(a["height"]) for a in rendered) * SIDE**2 / PLOT**2
        assert area == pytest.approx(np.sum(picture.seen), rel=1e-3)
    chart = next(e for e in tree("causal_mqa").iter("svg") if e.get("aria-labelledby", "").startswith("mask-1"))
    assert chart[1].text == f"{SIDE} queries from 0 by {SIDE} keys from 0: {SIDE * (SIDE + 1) // 2} elements visible"


def test_samples_of_blocks_count_what_is_visible() -> None:
    assert Sample(DATA).blocks(300, 128) == [
        [int(by_hand(300)[i : i + 128, j : j + 128].sum()) for j in range(0, 300, 128)] for i in range(0, 300, 128)
    ]
    assert Sample(DATA).mask(Sizes(2, 4, 2, 24, 24)).shape == (2, 4, 24, 24)


@pytest.mark.parametrize(
    "mask", ["{expr: kv_idx < n, params: {n: {scalar: int}}}", "{expr: 'q_idx - kv_idx < 3 * (h + 1)'}"]
)
def test_masks_of_fewer_dimensions_are_rendered(mask: str) -> None:
    sample = Sample(parse_spec(f"name: x\nhead_dim: 64\nmask: {mask}\n"))
    (picture,) = sample.pictures
    q, k = np.mgrid[:SIDE, :SIDE]
    n = next(
        (int(remark[len("Sample: n = ") : -1]) for remark in picture.remarks if remark.startswith("Sample: n = ")), None
    )
    assert np.array_equal(picture.seen, q - k < 3 if n is None else k < n)
    assert ("The first head of the first sequence; other heads differ." in picture.remarks) == (n is None)


def test_a_remark_says_which_edges_are_too_far_away_to_render() -> None:
    (picture,) = Sample(spec("chunked_gqa")).pictures
    assert "The mask has numbers up to 8192; edges so far away are not drawn." in picture.remarks
    _, dilated = Sample(spec("dilated_mha")).pictures
    q, k = np.mgrid[dilated.q0 : dilated.q0 + SIDE, dilated.k0 : dilated.k0 + SIDE]
    assert np.array_equal(dilated.seen, (k <= q) & (q - k <= 2048) & ((q - k) % 4 == 0)) and (q - k > 2048).any()


# ---------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("name", ["causal_dropout_mqa", "document_gqa", "block_sparse_mha"])
def test_signatures_equal_those_of_the_module(name: str) -> None:
    module = built(name)
    found = {s.name: s for s in signatures((ROOT / "generated" / name / "__init__.py").read_text())}
    own = [
        f"attention.{key}"
        for key, value in vars(module.attention).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    assert sorted(found) == sorted(["attention", *own])
    for shown, s in found.items():
        real = inspect.signature(
            module.attention if shown == "attention" else getattr(module.attention, shown.partition(".")[2])
        )
        # **kwargs is only there to refuse unknown arguments.
        accepted = [name for name, p in real.parameters.items() if p.kind is not p.VAR_KEYWORD]
        assert [a.split(":")[0] for a in s.code.splitlines()[1:-1] if a.strip() != "*,"] == [
            f"    {name}" for name in accepted
        ]
        assert all(meaning for *_, meaning in s.args) and [row[0] for row in s.args] in ([], accepted)
        assert s.says and s.code.startswith(f"{shown}(\n") and f") -> {real.return_annotation}" in s.code
    assert ["return_lse", "bool", "False"] in [row[:3] for row in found["attention"].args] and found[
        "attention"
    ].returns.startswith("[B, Hq, Nq, ")


@pytest.mark.share(4)
def test_the_page_has_the_arguments() -> None:
    (section,) = (e for e in tree("causal_padding_gqa").iter("section") if e.get("id") == "call")
    assert "number of keys of each sequence that count, from the first" in words(section)
    assert "    kv_lengths: torch.Tensor,\n" in words(section) and "    scale: float | None = None,\n" in words(section)


@pytest.mark.share(8)
def test_auxiliary_kernels_are_explained() -> None:
    sentence = "@packed, in place of @fwd where Hkv &lt; Hq and Nq &lt; 64. Forward of few queries:"
    assert html("causal_mqa").count(sentence) == 2 and sentence not in html("local_global_dropout_mha")
    assert html("causal_mqa").count("<li>@dq_end. After the backward:") == 2
    files = keep(data(), render(data()), ROOT / "generated" / "none")
    text = page(DATA, "name: data\n", list(stages(DATA)), files, Problem())
    assert text.count("<li>@blocks. Before the others:") == 2 and "No map." not in text
    assert "hidden only by the sample data" in text and "hidden only by the sample data" not in html("causal_mqa")


# ---------------------------------------------------------------------------------------------- formulas


@pytest.mark.share(8)
def test_formulas_and_specs_fit_the_page() -> None:
    """Lines may break between <math> elements, which are short, and lines of specs are wrapped."""
    for name in ("window_gqa", "chunked_gqa", "causal_padding_gqa"):
        text = tree(name)
        parts = [words(e).replace(" ", "") for e in text.iter("math") if e.find(".//mtable") is None]
        assert max(map(len, parts)) <= 45, max(parts, key=len)
    wrapped = {e.get("aria-label") for e in tree("window_gqa").iter("pre") if e.get("class") == "prose"}
    assert {"Example of a call", "The spec as written", "The spec with every default"} <= wrapped
    (style,) = tree("window_gqa").iter("style")
    assert "pre.prose { max-height: none; white-space: pre-wrap;" in words(style)


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


@pytest.mark.share(16)
def test_the_command_writes_the_page_that_every_process_makes(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    sizes = ("--seq", "4096", "--batch", "2", "--heads", "8")
    command = [sys.executable, "-m", "attngen", "explain", "specs/causal_mqa.yaml", *sizes, "--html", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, capture_output=True, text=True
    )
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
        (
            ["--html", "out.html", "--theory"],
            "--html is a page of what `explain` shows without --theory; expected one of them",
        ),
    ],
)
def test_a_wrong_path_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *args) == (1, "", f"error: {message}\n")
    assert os.listdir(tmp_path) == ["folder.html"]


def test_the_table_of_build_has_the_tiles_of_long_calls() -> None:
    tiles = {
        name: [_tiles(target(name), written) for written in ({"O"}, {"dK", "dV"}, {"dQ"})]
        for name in ("window_gqa", "causal_fp32")
    }
    assert tiles["window_gqa"] == ["64x64, hopper 128x128", "32x64, hopper 64x128", "64x64"]
    assert not any("hopper" in tile for tile in tiles["causal_fp32"])
