"""insert-cta-barriers: a program waits at a barrier before it loads tiles that it has stored."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.transforms.insert_cta_barriers import InsertCtaBarriers
from attngen.verify import verify
from attngen.verify.updates import rewrites
from tests.helpers import KV_OUTER, SMALL, changes, edit, lowered, module, target, unverified

SPLIT = edit(KV_OUTER, ("body(@step)", "body(@step) cls(partial)"))


def test_a_loop_that_rewrites_tiles_follows_a_barrier():
    assert changes(InsertCtaBarriers(), module(SPLIT, "scheduled")) == ["+ barrier"]
    text = print_module(InsertCtaBarriers().run(module(SPLIT, "scheduled")))
    assert "    barrier\n    %queries = loop q" in text
    assert print_module(parse_module(text)) == text


def test_each_of_two_such_loops_follows_a_barrier():
    before, after = (print_module(lowered("causal_fa1")[step]) for step in ("use-block-lists", "insert-cta-barriers"))
    # The four loops are the full and the partial one of fwd and of bwd.
    assert (before.count("barrier"), after.count("barrier")) == (0, 4)
    for name in ("queries_full", "queries_partial", "total_full", "total_partial"):
        assert f"    barrier\n    %{name} = loop q" in after


def test_kernels_that_rewrite_nothing_are_unchanged():
    assert changes(InsertCtaBarriers(), module(SMALL)) == []
    assert "    barrier\n" not in print_module(target("causal_gqa"))


def test_without_a_barrier_a_kernel_is_refused():
    text = print_module(target("causal_fa1"))
    assert print_module(verify(parse_module(text))) == text
    with pytest.raises(
        VerifyError, match="rule `barriers`: kernel @fwd: %queries_partial loads tiles that other threads have stored"
    ):
        verify(parse_module(edit(text, ("    barrier\n    %queries_partial", "    %queries_partial"))))


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (
            "    store %O_ACC[h, q, d_qk] %next check(q if partial)\n",
            "",
            "%O_ACC has 1 loads and stores; expected one load, and then one",
        ),
        ("store %O_ACC[h, q", "store %O_ACC[0, q", "%O_ACC is loaded at one index and stored at another"),
        ("body(@step)", "body(@step) cls(all)", "%O_ACC is rewritten outside of a loop over its tiles"),
    ],
)
def test_a_tensor_is_rewritten_at_one_index_in_one_loop(old, new, reason):
    made = unverified(edit(KV_OUTER, (old, new)))
    (found,) = rewrites(made, made.kernels[0])
    assert found.startswith(reason)
