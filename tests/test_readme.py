"""The README is short, and what it says of features, versions and speed is what code and measurements say."""

from __future__ import annotations

import re

import pytest

from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.lowering.pipeline import lower
from attngen.spec import parse_spec
from attngen.versions import PAIRS
from docs.site.readme import speed
from tests.helpers import ROOT, SPECS

README = (ROOT / "README.md").read_text(encoding="utf-8")
MATRIX = "| feature | example | forward | backward | Hopper kernels | `torch.compile` |"
KINDS = {"fwd": "forward", "bwd": "backward", "jvp": "jvp", "decode": "decode"}  # kernels, as the matrix names them


def table(head: str) -> list[list[str]]:
    """Return the cells of each row of the table below a heading line."""
    body = README.partition(f"\n{head}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[1:]]


def module(name: str) -> Module:
    path = ROOT / "generated" / name / "schedule.ir"
    return parse_module(path.read_text(encoding="utf-8"), str(path))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200 and len(README.split()) <= 2200


def test_it_has_the_words_that_people_search_for() -> None:
    text = README.lower()
    words = ("kv cache", "varlen", "warp specialization", "speculative decoding", "mla", "sliding window")
    assert [word for word in words if word not in text] == []


def test_pictures_have_a_dark_and_a_light_form() -> None:
    pictures = re.findall(r"<picture>(.*?)</picture>", README, re.DOTALL)
    assert len(pictures) == 1 and "![" not in README
    dark, light = re.findall(r'src(?:set)?="([^"]+)"', pictures[0])
    assert dark == light.replace(".svg", "-dark.svg") and "prefers-color-scheme: dark" in pictures[0]
    assert (ROOT / dark).is_file() and (ROOT / light).is_file()


@pytest.mark.parametrize("row", table(MATRIX)[:-1], ids=lambda row: row[1].strip("`"))
def test_the_matrix_says_which_kernels_the_example_has(row: list[str]) -> None:
    _, example, forward, backward, hopper, compiled = row
    built = module(example.strip("`"))
    kernels = {kernel.name for kernel in built.kernels}
    words = KINDS | ({"fwd": "prefill"} if built.cache else {})
    special = [words[name] for name in words if name in {kernel.name for kernel in built.warp_specialized}]
    assert (forward, compiled) == ("yes", "yes") and "fwd" in kernels
    assert backward.startswith("yes" if "dq" in kernels else "no")
    assert hopper == ", ".join(special)


def test_the_variant_has_the_hopper_kernels_that_it_promises() -> None:
    (variant,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    built = lower(parse_spec(variant))
    assert {"fwd", "bwd"} <= {kernel.name for kernel in built.warp_specialized}
    assert "its forward and backward are warp-specialized" in " ".join(README.split())


def test_the_last_row_of_the_matrix_is_forward_mode() -> None:
    feature, example, forward, backward, hopper, _ = table(MATRIX)[-1]
    assert feature.startswith("forward mode (jvp)") and (forward, hopper) == ("yes", "jvp")
    assert "second derivatives" in backward
    assert "jvp" in {kernel.name for kernel in module(example.strip("`")).warp_specialized}


def test_the_matrix_has_every_feature() -> None:
    features = " ".join(row[0] for row in table(MATRIX)).lower()
    words = ("mask", "modifier", "gqa", "dropout", "packed", "kv cache", "mla", "fp8", "jvp")
    assert [word for word in words if word not in features] == []


def test_supported_pairs_are_those_of_the_code() -> None:
    def short(version: str) -> str:
        return version.removesuffix(".0")

    pairs = ", ".join(f"{short(torch)} with {short(triton)}" for torch, triton in PAIRS.items())
    assert f"| torch with Triton | {pairs} |" in README


def test_the_performance_page_has_its_figures() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = [re.findall(r"\d[\d,.]*\d", line) for line in page.splitlines()]
    for row in speed().workloads:
        times = (row.ours, *row.peers.values())
        if "backward" in row.ours:
            figures = {f"{ms:,.3f}" for found in times for ms in found.values()}
        else:  # a step of decoding, in microseconds
            figures = {f"{1000 * ms:.0f}" for found in times for ms in found.values()}
        assert any(figures <= set(found) for found in rows), row.name


def test_it_names_the_number_of_shipped_specs() -> None:
    assert f"one of the {len(SPECS)} specs" in README


def test_the_diagram_has_six_boxes() -> None:
    diagram = README.partition("## How it works")[2].partition("```text\n")[2].partition("```")[0]
    assert re.findall(r"[│] (\d) ", diagram) == ["1", "2", "3", "4", "5", "6"]
