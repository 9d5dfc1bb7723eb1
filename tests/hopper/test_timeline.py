"""Timelines of warp groups: they are rendered for every warp-specialized spec, keep the protocol, and change with edits
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
from attngen.ir import Module
from attngen.ir.printer import print_module
from attngen.report.graphviz import to_dot
from attngen.report.lanes import MEANING, STYLE, lanes, style, svg
from attngen.report.page import page
from attngen.report.products import MATMULS, Products
from attngen.report.timeline import STORED, TURN, Span, Timeline
from tests.helpers import ROOT, target
from tests.hopper.common import WARP_SPECIALIZED, after_passes, edited, forward_kernel, hopper_spec, lowered


def rendered(module: Module) -> str:
    return svg(lanes(module, module.warp_specialized[0]))


def of_lane(line: Timeline, lane: str, cls: str) -> list[Span]:
    return [span for span in line.spans if (span.lane, span.cls) == (lane, cls) and span.end > span.start]


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_every_warp_specialized_kernel_is_rendered(name: str) -> None:
    root = ET.fromstring(rendered(lowered(name)))
    labels = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"producer warp", "K, stage 0", "S = QKᵀ", "O += P V", "softmax"} <= labels
    assert {"wgmma of consumer", "wgmma of consumer 1"} & labels
    right, bottom = float(root.get("width", "")), float(root.get("height", ""))
    for e in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(e.get(key, "")) for key in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + width <= right and y + height <= bottom


def test_a_timeline_is_rendered_after_each_pass() -> None:
    steps = [module for module in after_passes("causal_gqa").values() if module.warp_specialized]
    assert len(steps) >= 6 and all(
        not Timeline(module.warp_specialized[0], 2).stuck and rendered(module) == rendered(module) for module in steps
    )


@pytest.mark.parametrize("name", ["causal_gqa", "causal_d256", "butterfly_gqa", "full_mha", "dilated_mha"])
def test_a_timeline_keeps_the_protocol(name: str) -> None:
    line = Timeline(forward_kernel(name), lowered(name).configs("fwd", "hopper")[0].num_stages)
    assert line.stuck == []
    for pipeline, stages in line.stages.items():
        for stage in range(stages):
            uses = line.uses[pipeline][stage::stages]
            assert all(use.start <= use.full <= min(use.waits, default=line.end) for use in uses)
            assert all(
                len(use.releases) == line.consumers[pipeline] and max(use.releases) <= following.start
                for use, following in pairwise(uses)
            )
    products = sorted((s.start, s.end) for s in line.spans if s.lane.startswith("products") and s.cls != "leader")
    assert products and all(end <= start for (_, end), (start, _) in pairwise(products))
    sums = [
        s.label for s in line.spans if s.lane in ("products of consumer", "products of consumer 0") and s.cls == "bar"
    ]
    assert sums == [f"P V {n}" for n in range(len(line.uses["V_pipeline"]))]


def test_the_softmax_of_a_tile_overlaps_the_product_of_the_tile_before() -> None:
    def overlaps(name: str) -> list[bool]:
        line = Timeline(after_passes("causal_gqa")[name].warp_specialized[0], 2)
        sums = of_lane(line, "products of consumer 0", "bar")
        return [any(p.start < s.end and s.start < p.end for p in sums) for s in of_lane(line, "consumer 0", "partial")]

    assert overlaps("async-mma") == [False] * 3
    assert overlaps("software-pipeline-softmax") == [False, True, True]
    lengths = [
        Timeline(after_passes("causal_gqa")[name].warp_specialized[0], 2).end
        for name in ("async-mma", "software-pipeline-softmax")
    ]
    assert lengths[1] < lengths[0]


def test_the_timeline_of_a_persistent_program_has_two_work_tiles() -> None:
    line = Timeline(forward_kernel("causal_gqa"), 2)
    assert [use.label for use in line.uses["Work_pipeline"]] == ["0", "1", "end"] and len(line.uses["Q_pipeline"]) == 2
    assert len(line.uses["K_pipeline"]) == 2 * len(Timeline(forward_kernel("causal_d256"), 2).uses["K_pipeline"])
    last = of_lane(line, "products of consumer 0", "bar")[2]
    assert line.uses["Q_pipeline"][1].full < last.end  # the next tile's queries are loaded before this one ends


EDITS = {
    "fewer stages": ("num_stages=2 TMA=1 backend=hopper", "num_stages=1 TMA=1 backend=hopper"),
    "queries in one stage": ("%Q_pipeline = pipeline stages(2)", "%Q_pipeline = pipeline stages(1)"),
    "K released late": (
        "    consumer_release %k\n"
        "    %masked = mask %s where(kv_idx <= Nk - Nq + q_idx) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
        "    %soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg\n"
        "    %soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg\n"
        "    %soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, "
        "HALF_KV] @reg\n",
        "    %masked = mask %s where(kv_idx <= Nk - Nq + q_idx) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
        "    %soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg\n"
        "    %soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg\n"
        "    %soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] "
        "@reg\n"
        "    consumer_release %k\n",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_ir_changes_the_timeline(edit: str, tmp_path: Path) -> None:
    (tmp_path / "edited.ir").write_text(print_module(edited("causal_gqa", EDITS[edit])))
    with pytest.raises(SystemExit) as ended:
        main(["dump", str(tmp_path / "edited.ir"), "--lanes", str(tmp_path / "out.svg")])
    assert not ended.value.code and (tmp_path / "out.svg").read_text() not in ("", rendered(lowered("causal_gqa")))
    light, dark = ((tmp_path / f"out{end}.svg").read_text() for end in ("", "-dark"))
    assert light.replace(style("light"), style("dark")) == dark != light


def test_warp_groups_that_wait_for_ever_are_named() -> None:
    assert "producer warp and consumer warp group 1 and consumer warp group 2 wait for ever" in rendered(
        edited("causal_gqa", ("    consumer_release %k\n", ""))
    )


def test_every_class_has_a_colour_in_the_svg_and_in_the_page() -> None:
    styles = "".join((ROOT / f"templates/html/{name}.css.jinja").read_text() for name in ("style", "shapes", "colours"))
    for cls in [*MEANING, "leader", "axis", "faint", "strong"]:
        selector = rf"\.{cls.replace(' ', '.')}\b"
        assert re.search(selector, STYLE) and re.search(selector, styles)
    assert "svg { background: #ffffff;" in style("light") and "svg { background: #0f1317;" in style("dark")


PRODUCTS = {
    "fwd": {"S = QKᵀ", "O += P V"},
    "fwd_long": {"S = QKᵀ", "O += P V"},
    "dq": {"S = QKᵀ", "dP = dO Vᵀ", "dQ += dS K"},
    "dk": {"S = QKᵀ", "dP = dO Vᵀ", "dK += dSᵀ Q"},
    "dv": {"S = QKᵀ", "dV += Pᵀ dO"},
    "dkdv": {"S = QKᵀ", "dP = dO Vᵀ", "dV += Pᵀ dO", "dK += dSᵀ Q"},
    "bwd": {"S = QKᵀ", "dP = dO Vᵀ", "dV += Pᵀ dO", "dK += dSᵀ Q", "dQ = dS K"},
    "jvp": {"S = QKᵀ", "tS = tQ Kᵀ", "tS += Q tKᵀ", "tO += P tV", "tO += tP V"},
    "packed": {"S = QKᵀ", "O += P V"},
    "decode": {"S = QᵣKᵣᵀ", "S += QKᵀ", "O += P V"},
}


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["causal_gqa", "causal_mqa", "causal_d256", "decode_mla"])
def test_products_have_the_names_of_flash_attention(name: str) -> None:
    """They follow from the operands, so they are the same before and after warp-specialize."""
    module = target(name)
    kernels = [k for k in (*module.kernels, *module.warp_specialized) if k.traits.dots or k.backend]
    for kernel in (k for k in kernels if name != "decode_mla" or k.name == "decode"):
        products = Products(kernel)
        found = {products.of(op).name for op in kernel.ops() if isinstance(op, MATMULS)}
        assert found == PRODUCTS[kernel.name], kernel.name


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["causal_gqa", "block_sparse_mha", "causal_d256", "decode_mla"])
def test_no_kernel_waits_for_ever(name: str) -> None:
    """dS and dQ, which all consumers store a part of, the ping-pong barrier, and warps that split the tiles of dQ."""
    module = target(name)
    for kernel in module.warp_specialized:
        line = Timeline(kernel, module.configs(kernel.name, kernel.backend)[0].num_stages)
        assert line.stuck == [], kernel.name


def test_the_fused_backward_takes_turns_and_adds_each_tile_of_dq_once() -> None:
    module = lowered("causal_gqa")
    (bwd,) = (k for k in module.warp_specialized if k.name == "bwd")
    line = Timeline(bwd, 2)
    added = [of_lane(line, f"dq_reducer {n}", STORED) for n in (0, 1)]
    assert sorted(span.label for spans in added for span in spans) == ["0", "1", "2"] and len(added[0]) == 2
    turns = sorted((s.start, s.lane) for s in line.spans if s.cls == TURN)
    assert [lane for _, lane in turns] == ["consumer 0", "consumer 1"] * (len(turns) // 2) and len(turns) == 12


@pytest.mark.share(4)
def test_the_page_and_the_graph_have_warp_specialized_kernels() -> None:
    module = lowered("causal_gqa")
    text = page(
        hopper_spec("causal_gqa"), "name: x\n", list(after_passes("causal_gqa").items()), render(module), Problem()
    )
    root = ET.fromstring(text)
    (section,) = (e for e in root.iter("section") if e.get("id") == "warp-groups")
    assert any(e.text == "consumer warp group 1" for e in section.iter("text")) and any(
        e.get("href") == "#warp-groups" for e in root.iter("a")
    )
    assert "from triton.experimental import gluon" in "".join(root.itertext())
    dot = to_dot(module)
    assert (
        dot.count('label="@fwd"') == dot.count('label="@fwd hopper"') == 1
        and '"fwd hopper.keys" -> "fwd hopper.m"' in dot
    )


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["specs/causal_fa1.yaml", "--lanes", "x.svg"],
            "--lanes x.svg: no kernel of causal_fa1 is warp-specialized here; ",
        ),
        (["specs/causal_fa1.yaml", "--lanes", "x.png"], "--lanes x.png: expected a name that ends in .svg"),
        (
            ["generated/causal_fa1/schedule.ir", "--after", "dce"],
            "generated/causal_fa1/schedule.ir is IR, on which no pass runs",
        ),
    ],
)
def test_a_timeline_that_cannot_be_rendered_gives_one_sentence(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["dump", *args])
    assert ended.value.code == 1 and capsys.readouterr().err.startswith(f"error: {message}")
