"""What calls allocate beside their results, as formulas and as `attngen explain` prints them."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from attngen.analysis.memory import scratch
from attngen.analysis.roofline import Problem
from attngen.emit.explain import explain
from attngen.ir.expr import to_text
from tests.helpers import target


def test_a_backward_in_one_pass_has_sums_in_fp32() -> None:
    found = {(part.block, part.tensors): to_text(part.bytes) for part in scratch(target("full_mha"))}
    assert found == {
        ("entry", ("DELTA", "LSE2")): "8*B*Hq*Nq",
        ("one_pass", ("DQ_TURNS", "DQ_ACC")): "4*B*D_QK*Hq*Nq + 4*B*Hq*Nq",
    }


def test_heads_that_share_keys_have_gradients_of_each_query_head() -> None:
    parts = {part.block: part for part in scratch(target("causal_gqa"))}
    more = "B*D_QK*Hq*Nk*elem + 4*B*D_QK*Hq*Nq + B*D_V*Hq*Nk*elem + 4*B*Hq*Nq"
    assert to_text(parts["one_pass"].bytes) == more and parts["one_pass"].tensors == ("DQ_TURNS", "DQ_ACC", "DK_HEADS", "DV_HEADS")
    assert to_text(parts["keys"].where) == "splits > 1"


def test_explain_prints_them() -> None:
    console = Console(width=300, record=True, file=StringIO())
    problem = Problem(1, 4, 4, 1024, 1024)
    for part in explain(target("full_mha"), problem, {"kernels": {}}):
        console.print(part)
    assert "@backward in @one_pass: bytes beside results = 4*B*D_QK*Hq*Nq + 4*B*Hq*Nq, of DQ_TURNS, DQ_ACC\n" in console.export_text()
