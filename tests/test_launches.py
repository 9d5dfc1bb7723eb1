"""What a call launches, as the page of `explain --html` says: it is what the generated module chooses."""

from __future__ import annotations

import ast
import inspect
import json

import pytest

from attngen.codegen.signature import signatures
from attngen.cost.roofline import Problem
from attngen.devices import CLASSES
from attngen.report.launches import launches
from attngen.report.page import example
from attngen.report.panels import fit
from tests.helpers import ROOT, built, target
from tests.test_page import html, tree, words


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["causal_mqa", "decode_mla", "causal_fp32", "causal_d512_gqa"])
def test_what_a_call_launches_is_what_the_module_chooses(name: str) -> None:
    """For each kernel, device class and number of rows it is the config that `launch_configs` of the runtime takes from
    the module's SCHEDULES."""
    module, schedules = target(name), built(name).kernels.SCHEDULES
    size = 4 if name == "causal_fp32" else 2
    for cls in CLASSES:
        found = launches(module, cls)
        assert found and {one.kernel.stands_for for one in found} <= schedules.keys()
        for rows in (1, 16, 17, 64, 65, 512, 513, 3072, 3073, 100_000):
            for one in found:
                if not one.above < rows <= (one.most or rows):
                    continue
                table = schedules[one.kernel.stands_for]
                special = next((table[key] for key in table if key[:2] == (cls, size) and len(key) == 3), ())
                ways = [(most, config) for most, config in special if most is None or rows <= most][:1]
                expected = ways[0][1] if ways and ways[0][1] else None
                assert bool(expected) == bool(one.kernel.backend)
                if expected is None:
                    expected = next(c for most, c in table[cls, size] if most is None or rows <= most)
                tile = (expected["BLOCK_Q"], expected["BLOCK_KV"], expected.get("num_stages", expected.get("STAGES")))
                assert tile == (one.config.block_q, one.config.block_kv, one.config.num_stages)
                assert expected.get("KERNEL", one.kernel.stands_for) == one.kernel.name


@pytest.mark.share(4)
def test_the_page_says_when_each_kernel_is_launched() -> None:
    (section,) = (e for e in tree("causal_mqa").iter("section") if e.get("id") == "runs")
    tables = [[[words(cell) for cell in row] for row in t.iter("tr")] for t in section.iter("table")]
    assert len(tables) == len(CLASSES)
    (sm90,) = (t for t in tables if any("warp-specialized, Hopper" in row for row in t))
    shown = {(row[0], row[1], row[2], row[3]) for row in sm90}
    assert ("Forward of few queries", "Hkv < Hq and Nq < 64; Nq·Hq/Hkv ≤ 16", "@packed", "portable, Triton") in shown
    assert ("Forward", "otherwise; Nq ≤ 64", "@fwd", "portable, Triton") in shown
    assert ("Forward", "otherwise; 64 < Nq ≤ 3072", "@fwd", "warp-specialized, Hopper") in shown
    (fused,) = (row for row in sm90 if row[0] == "Fused backward")
    assert fused[1].startswith("(Nk ≥ 512 and") and fused[7] == "1 producer + 2 × 4 consumer + 1 dQ reduction"
    assert "no config for hopper" in html("causal_fp32").partition('<section id="sram">')[0]


@pytest.mark.share(4)
def test_portable_and_warp_specialized_kernels_have_rooflines_of_their_own() -> None:
    (section,) = (e for e in tree("causal_mqa").iter("section") if e.get("id") == "devices")
    titles = [words(e) for e in section.iter("figcaption")]
    assert [t for t in titles if "H100" in t] == [
        "Roofline of H100: portable, Triton",
        "Roofline of H100: warp-specialized, Hopper",
        "Bytes moved on H100",
    ]
    assert not any("Hopper" in title for title in titles if "A100" in title)


@pytest.mark.parametrize("name", ["causal_gqa", "document_gqa", "block_sparse_mha", "decode_mla"])
def test_the_example_of_a_call_is_accepted(name: str) -> None:
    """It gives every argument that the function requires, and those of the mask."""
    module, code = target(name), (ROOT / "generated" / name / "__init__.py").read_text(encoding="utf-8")
    tree_of_call = ast.parse(example(module, list(signatures(code))))
    (call,) = (node.value for node in tree_of_call.body[2:3] if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call) and len(tree_of_call.body) == 3 + ("backward" in module.directions)
    function = eval(ast.unparse(call.func), {"attention": built(name).attention})
    given = inspect.signature(function).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    assert {i.name for i in module.inputs if not i.is_size} <= given.arguments.keys() or module.cache


def test_fits_name_each_backend_and_no_kernel_that_fits_elsewhere() -> None:
    """window_gqa has its fused backward only on sm90, and both a portable and a warp-specialized forward there."""
    module = target("window_gqa")
    report = json.loads((ROOT / "generated" / "window_gqa" / "report.json").read_text(encoding="utf-8"))
    panels = {cls: fit(module, cls, Problem(q_heads=16, kv_heads=4), report) for cls in ("sm80", "sm90")}
    rows = {cls: {row[0]: row[1] for row in panel.table.rows} for cls, panel in panels.items()}
    expected = {"@fwd": "64 × 64", "@fwd, hopper": "128 × 128", "@bwd, hopper": "64 × 128"}
    assert expected.items() <= rows["sm90"].items()
    assert rows["sm80"]["@bwd"] == "none" and "@bwd: runs only on sm90" in panels["sm80"].charts[0].says
    assert not any("no tile fits" in panel.charts[0].says for panel in panels.values())
