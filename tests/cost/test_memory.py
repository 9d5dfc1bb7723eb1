"""What calls allocate beside their results, as formulas and as `attngen explain` prints them."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from attngen.cost.memory import scratch
from attngen.cost.roofline import Problem
from attngen.ir.expr import to_text
from attngen.report.explain import explain
from tests.helpers import target


def test_a_backward_in_one_pass_has_sums_in_fp32() -> None:
    found = {(part.block, part.tensors): to_text(part.bytes) for part in scratch(target("full_mha"))}
    assert found == {
        ("entry", ("DELTA", "LSE2")): "8*B*Hq*Nq",
        ("one_pass", ("DQ_SEMAPHORE", "DQ_ACC")): "4*B*D_QK*Hq*Nq + 4*B*Hq*Nq",
    }


def test_heads_that_share_keys_have_gradients_of_each_pair_of_programs() -> None:
    parts = {(part.block, str(part.where)): part for part in scratch(target("causal_gqa"))}
    sums, more = parts["one_pass", "True"], parts["one_pass", "split_pairs > 1"]
    assert to_text(sums.bytes) == "4*B*D_QK*Hq*Nq + 4*B*Hkv*Nk*split_pairs + 4*B*Hq*Nq"
    assert sums.tensors == ("DQ_SEMAPHORE", "DKDV_SEMAPHORE", "DQ_ACC") and more.tensors == ("dK_heads", "dV_heads")
    assert to_text(more.bytes) == "B*D_QK*Hkv*Nk*elem*split_pairs + B*D_V*Hkv*Nk*elem*split_pairs"
    assert ("keys", "splits > 1") in parts


def test_explain_prints_them() -> None:
    console = Console(width=300, record=True, file=StringIO())
    problem = Problem(1, 4, 4, 1024, 1024)
    for part in explain(target("full_mha"), problem, {"kernels": {}}):
        console.print(part)
    assert (
        "@backward in @one_pass: bytes beside results = 4*B*D_QK*Hq*Nq + 4*B*Hq*Nq, of DQ_SEMAPHORE, DQ_ACC\n"
        in console.export_text()
    )
