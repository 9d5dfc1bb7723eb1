"""assign-memory-space puts tensors in HBM, operands of products in SRAM, and other values in registers."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.transforms.assign_memory_space import AssignMemorySpace
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module


def test_every_value_gets_a_memory_space():
    added = [line[2:] for line in changes(AssignMemorySpace(), module(SMALL)) if line[0] == "+"]
    assert {line.split(" ")[0]: line.rpartition("@")[2] for line in added} == {
        **dict.fromkeys(("%Q", "%K", "%O"), "hbm"),
        **dict.fromkeys(("%q", "%k"), "sram"),
        **dict.fromkeys(("%Nq", "%Nk", "%zero", "%o", "%sum", "%s", "%masked", "%next"), "reg"),
    }


def test_only_the_space_changes():
    for minus, plus in zip(*[iter(changes(AssignMemorySpace(), module(SMALL)))] * 2):
        assert minus[2:].rpartition("@")[0] == plus[2:].rpartition("@")[0]


def test_a_tile_that_no_product_reads_stays_in_registers():
    text = edit(SMALL, ("    %s = dot", "    %bias = load %K[kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @?\n    %s = dot"))
    assert "+ %bias = load %K[kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @reg" in changes(
        AssignMemorySpace(), module(text)
    )


def test_a_value_without_a_memory_space_is_refused():
    text = print_module(AssignMemorySpace().run(module(SMALL))).replace("phase logical", "phase scheduled")
    left_out = "uses(x=%keys.sum) : T[BLOCK_Q, D_QK]"
    text = edit(text, ("body(@step)", "body(@step) cls(partial)"), (f"{left_out} @reg", f"{left_out} @?"))
    with pytest.raises(VerifyError, match="rule `memory-space`: .*%o has no memory space"):
        verify(parse_module(text))
