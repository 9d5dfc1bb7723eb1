"""Scratch memory that calls allocate in addition to their results: its formulas, and its lines in `attngen explain`."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from attngen.cost.memory import scratch
from attngen.cost.roofline import Problem
from attngen.ir import to_text
from attngen.report.explain import explain
from tests.helpers import target


def test_the_fused_backward_accumulates_dq_in_fp32() -> None:
    found = {(part.block, part.tensors): to_text(part.bytes) for part in scratch(target("full_mha"))}
    assert found == {
        ("entry", ("DELTA", "LSE2")): "8*B*Hq*Nq",
        ("fused", ("dQ_SEMAPHORE", "DQ_ACC")): "4*B*D_QK*Hq*Nq + 4*B*Hq*Nq",
    }


def test_grouped_heads_have_partial_gradients_for_each_pair_of_programs() -> None:
    parts = {(part.block, str(part.where)): part for part in scratch(target("causal_gqa"))}
    sums, more = parts["fused", "True"], parts["fused", "split_pairs > 1"]
    assert to_text(sums.bytes) == "4*B*D_QK*Hq*Nq + 4*B*Hkv*Nk*split_pairs + 4*B*Hq*Nq"
    assert sums.tensors == ("dQ_SEMAPHORE", "dKdV_SEMAPHORE", "DQ_ACC") and more.tensors == ("dK_heads", "dV_heads")
    assert to_text(more.bytes) == "B*D_QK*Hkv*Nk*elem*split_pairs + B*D_V*Hkv*Nk*elem*split_pairs"
    assert ("keys", "splits > 1") in parts


def test_explain_prints_the_scratch_bytes() -> None:
    console = Console(width=300, record=True, file=StringIO())
    problem = Problem(1, 4, 4, 1024, 1024)
    for part in explain(target("full_mha"), problem, {"kernels": {}}, parts=("formulas",)):
        console.print(part)
    assert (
        "@backward in @fused: scratch bytes = 4*B*D_QK*Hq*Nq + 4*B*Hq*Nq, of dQ_SEMAPHORE, DQ_ACC\n"
        in console.export_text()
    )
