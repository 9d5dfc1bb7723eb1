"""Pictures of roles over time: drawn for every spec that can be divided, within the protocol, and changed by an edit
of the IR."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from attngen.cli import main
from attngen.codegen.render import render
from attngen.cost.roofline import Problem
from attngen.ir.graph import Module
from attngen.ir.text import print_module
from attngen.report.graphviz import to_dot
from attngen.report.page import page
from attngen.report.timeline import MEANING, STYLE, Span, Timeline, lanes, svg
from tests.helpers import ROOT
from tests.hopper.common import WARP_SPECIALIZED, after, asking, edited, kernel, whole


def drawn(module: Module) -> str:
    return svg(lanes(module, module.warp_specialized[0]))


def of_lane(line: Timeline, lane: str, cls: str) -> list[Span]:
    return [span for span in line.spans if (span.lane, span.cls) == (lane, cls) and span.end > span.start]


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_every_warp_specialized_kernel_is_drawn(name: str) -> None:
    root = ET.fromstring(drawn(whole(name)))
    labels = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert (
        "producer" in labels
        and "K, slot 0" in labels
        and {"products of consumer", "products of consumer 0"} & {*labels}
    )
    right, bottom = float(root.get("width", "")), float(root.get("height", ""))
    for e in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(e.get(key, "")) for key in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + width <= right and y + height <= bottom


def test_it_is_drawn_after_each_pass() -> None:
    steps = [module for module in after("causal_gqa").values() if module.warp_specialized]
    assert len(steps) >= 6 and all(
        not Timeline(module.warp_specialized[0], 2).stuck and drawn(module) == drawn(module) for module in steps
    )


@pytest.mark.parametrize("name", ["causal_gqa", "causal_d256", "butterfly_gqa", "full_mha", "dilated_mha"])
def test_what_is_drawn_keeps_to_the_protocol(name: str) -> None:
    line = Timeline(kernel(name), whole(name).configs("fwd", "hopper")[0].num_stages)
    assert line.stuck == []
    for pipeline, stages in line.stages.items():
        for stage in range(stages):
            uses = line.uses[pipeline][stage::stages]
            assert all(use.start <= use.there <= min(use.takes, default=line.end) for use in uses)
            assert all(
                len(use.gives) == line.takers[pipeline] and max(use.gives) <= following.start
                for use, following in pairwise(uses)
            )
    products = sorted((s.start, s.end) for s in line.spans if s.lane.startswith("products") and s.cls != "leader")
    assert products and all(end <= start for (_, end), (start, _) in pairwise(products))
    sums = [
        s.label for s in line.spans if s.lane in ("products of consumer", "products of consumer 0") and s.cls == "bar"
    ]
    assert sums == [f"acc {n}" for n in range(len(line.uses["V_pipeline"]))]


def test_the_softmax_of_a_tile_stands_under_the_product_of_the_tile_before() -> None:
    def under(name: str) -> list[bool]:
        line = Timeline(after("causal_gqa")[name].warp_specialized[0], 2)
        sums = of_lane(line, "products of consumer 0", "bar")
        return [any(p.start < s.end and s.start < p.end for p in sums) for s in of_lane(line, "consumer 0", "partial")]

    assert under("async-mma") == [False] * 3
    assert under("software-pipeline-softmax") == [False, True, True]
    lengths = [
        Timeline(after("causal_gqa")[name].warp_specialized[0], 2).end
        for name in ("async-mma", "software-pipeline-softmax")
    ]
    assert lengths[1] < lengths[0]


def test_a_program_that_stays_has_two_tiles() -> None:
    line = Timeline(kernel("causal_gqa"), 2)
    assert [use.label for use in line.uses["Work_pipeline"]] == ["0", "1", "end"] and len(line.uses["Q_pipeline"]) == 2
    assert len(line.uses["K_pipeline"]) == 2 * len(Timeline(kernel("causal_d256"), 2).uses["K_pipeline"])
    last = of_lane(line, "products of consumer 0", "bar")[2]
    assert line.uses["Q_pipeline"][1].there < last.end  # the next tile's queries are there before this one ends


EDITS = {
    "fewer slots": ("num_stages=2 TMA=1 backend=hopper", "num_stages=1 TMA=1 backend=hopper"),
    "queries in one slot": ("%Q_pipeline = pipeline stages(2)", "%Q_pipeline = pipeline stages(1)"),
    "K given back late": (
        "    consumer_release %k\n"
        "    %masked = mask %s where(kv_idx <= Nk - Nq + q_idx) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
        "    %soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg\n"
        "    %soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg\n"
        "    %soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg\n",
        "    %masked = mask %s where(kv_idx <= Nk - Nq + q_idx) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
        "    %soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg\n"
        "    %soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg\n"
        "    %soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg\n"
        "    consumer_release %k\n",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_text_changes_the_picture(edit: str, tmp_path: Path) -> None:
    (tmp_path / "edited.ir").write_text(print_module(edited("causal_gqa", EDITS[edit])))
    with pytest.raises(SystemExit) as ended:
        main(["dump", str(tmp_path / "edited.ir"), "--lanes", str(tmp_path / "out.svg")])
    assert not ended.value.code and (tmp_path / "out.svg").read_text() not in ("", drawn(whole("causal_gqa")))


def test_warp_groups_that_wait_for_ever_are_named() -> None:
    assert "producer and consumer 0 and consumer 1 wait for ever" in drawn(
        edited("causal_gqa", ("    consumer_release %k\n", ""))
    )


def test_colours_have_a_style_and_the_page_has_them() -> None:
    styles = "".join((ROOT / f"templates/html/{name}.css.jinja").read_text() for name in ("style", "shapes", "colours"))
    for cls in [*MEANING, "leader", "axis", "faint", "strong"]:
        selector = rf"\.{cls.replace(' ', '.')}\b"
        assert re.search(selector, STYLE) and re.search(selector, styles)


def test_the_page_and_the_graph_have_warp_specialized_kernels() -> None:
    module = whole("causal_gqa")
    text = page(asking("causal_gqa"), "name: x\n", list(after("causal_gqa").items()), render(module), Problem())
    root = ET.fromstring(text)
    (section,) = (e for e in root.iter("section") if e.get("id") == "roles")
    assert any(e.text == "consumer 1" for e in section.iter("text")) and any(
        e.get("href") == "#roles" for e in root.iter("a")
    )
    assert "from triton.experimental import gluon" in "".join(root.itertext())
    dot = to_dot(module)
    assert (
        dot.count('label="@fwd"') == dot.count('label="@fwd hopper"') == 1
        and '"fwd hopper.keys" -> "fwd hopper.m"' in dot
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["specs/causal_fa1.yaml", "--lanes", "x.svg"],
            "--lanes x.svg: no kernel of causal_fa1 is divided into roles here; ",
        ),
        (["specs/causal_fa1.yaml", "--lanes", "x.png"], "--lanes x.png: expected a name that ends in .svg"),
        (
            ["generated/causal_fa1/schedule.ir", "--after", "dce"],
            "generated/causal_fa1/schedule.ir is IR, which no pass changes any more",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["dump", *args])
    assert ended.value.code == 1 and capsys.readouterr().err.startswith(f"error: {message}")
