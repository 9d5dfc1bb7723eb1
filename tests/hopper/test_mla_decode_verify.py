"""Wrong IR of the MLA decode kernel, which the verifier refuses, and small protocols with an exchange of P."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.automata import Protocol, Step, TileLoop, WarpGroupSteps
from attngen.verify.machine import violation
from tests.hopper.common import edited_mla_decode

EXCHANGE_STORE = (
    "    producer_store %P_pipeline %weights_in_own metadata(M_pipeline=%soft_in_own.m, "
    "ALPHA_pipeline=%soft_in_own.alpha)\n"
)

# Edits of the IR text: (old, new), the rule, the reason.
REFUSED: dict[str, tuple[tuple[str, str], str, str]] = {
    "weights that are not stored": (
        (EXCHANGE_STORE, ""),
        "warp-groups",
        "%P_pipeline is an exchange; expected two warp groups",
    ),
    "weights stored twice": (
        (EXCHANGE_STORE, EXCHANGE_STORE * 2),
        "protocol",
        "overwrites a tile of %P_pipeline, which right 0 has not released",
    ),
    "weights of the other warp group that are not released": (
        ("    consumer_release %p_RECEIVED_in_received\n", ""),
        "protocol",
        "overwrites a tile of %P_pipeline, which left 0 has not released",
    ),
    "weights released while a product reads them": (
        (
            (
                "    %acc_next_RECEIVED_in_both = wgmma_wait %acc_next_RECEIVED_in_both_flight : "
                "f32[BLOCK_Q, RIGHT_V] @reg\n"
                "    consumer_release %p_RECEIVED_in_both\n"
            ),
            (
                "    consumer_release %p_RECEIVED_in_both\n"
                "    %acc_next_RECEIVED_in_both = wgmma_wait %acc_next_RECEIVED_in_both_flight : "
                "f32[BLOCK_Q, RIGHT_V] @reg\n"
            ),
        ),
        "protocol",
        "right 0 releases a tile of %P_pipeline while %acc_next_RECEIVED_in_both_flight reads it",
    ),
    "sums that are not exchanged": (
        (
            "    %l_taken_left = consumer_wait",
            "    producer_store %L_left_pipeline %keys_left_l\n    %l_taken_left = consumer_wait",
        ),
        "protocol",
        "can wait for ever|not all parts of a tile of %L_left_pipeline",
    ),
    "values read before their rows are zeroed": (
        (
            "    %p_RECEIVED_in_received = consumer_wait %P_pipeline : T[BLOCK_Q, BLOCK_KV] @sram\n",
            "    %v_early = consumer_wait %K_left_odd_pipeline : T[BLOCK_KV, LEFT_V] @sram\n"
            "    consumer_release %v_early\n"
            "    %p_RECEIVED_in_received = consumer_wait %P_pipeline : T[BLOCK_Q, BLOCK_KV] @sram\n",
        ),
        "protocol",
        "zeroes rows of a tile of %K_left_odd_pipeline that left 0 reads|can wait for ever",
    ),
    "rows zeroed after the tile is released": (
        (
            "    zero_out_of_bounds %k_other_in_own\n    consumer_release %k_other_in_own\n",
            "    consumer_release %k_other_in_own\n    zero_out_of_bounds %k_other_in_own\n",
        ),
        "protocol",
        "left 0 zeroes rows of a tile of %K_right_even_pipeline that it has released or never waited for",
    ),
    "rows zeroed while scores are multiplied": (
        (
            "    %s_in_own = wgmma_wait %s_in_own_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
            (
                "    zero_out_of_bounds %k_in_own\n    %s_in_own = wgmma_wait %s_in_own_flight : f32[BLOCK_Q, "
                "BLOCK_KV] @reg\n"
            ),
        ),
        "protocol",
        "left 0 zeroes rows of a tile of %K_left_even_pipeline while %s_own_in_own_flight reads it",
    ),
    "a part of the keys that is not released": (
        ("    consumer_release %k_rope_in_both\n", ""),
        "protocol",
        "can wait for ever|is loaded again, and nothing releases its tiles",
    ),
    "rows that nothing zeroes": (
        ("    zero_out_of_bounds %k_other_in_both\n", ""),
        "zero-out-of-bounds",
        "%K_left_odd_pipeline, and nothing zeroes its rows",
    ),
    "a last tile whose rows nothing zeroes": (
        (
            "    %v_RECEIVED_in_single = consumer_wait %K_right_even_pipeline : T[BLOCK_KV, RIGHT_V] @sram\n",
            (
                "    %v_RECEIVED_in_single = consumer_wait %K_right_even_pipeline : T[BLOCK_KV, RIGHT_V] @sram\n"
                "    zero_out_of_bounds %v_RECEIVED_in_single\n"
            ),
        ),
        "zero-out-of-bounds",
        "@right zeroes rows of tiles of %K_right_even_pipeline, and not those of %v_RECEIVED_in_both",
    ),
    "row sums loaded after they are released": (
        (
            "    %l_other_left = local_load %l_taken_left : f32[BLOCK_Q] @reg\n    consumer_release %l_taken_left\n",
            "    consumer_release %l_taken_left\n    %l_other_left = local_load %l_taken_left : f32[BLOCK_Q] @reg\n",
        ),
        "types",
        "loads %l_taken_left, which has been released before",
    ),
    "rows zeroed too late": (
        ("    zero_out_of_bounds %k_in_own\n", ""),
        "zero-out-of-bounds",
        "%acc_next_in_own_flight multiplies weights by a tile of %K_left_even_pipeline, and nothing zeroes",
    ),
    "the left columns by the right ones": (
        ("wgmma %q_ADDR_in_own %k_in_own over(LEFT_V)", "wgmma %q_other_left %k_in_own over(LEFT_V)"),
        "types",
        "the product is f32",
    ),
    "a product that is left in flight": (
        (
            "%k_other_in_own over(RIGHT_V) acc(%s_own_in_own_flight)",
            "%k_other_in_own over(RIGHT_V) acc(%s_rope_in_own_flight)",
        ),
        "wgmma-wait",
        "in flight; expected one wgmma_wait",
    ),
    "row statistics that are not stored with the weights": (
        (
            "metadata(M_pipeline=%soft_in_own.m, ALPHA_pipeline=%soft_in_own.alpha)",
            "metadata(M_pipeline=%soft_in_own.m)",
        ),
        "types",
        "writes metadata of its tile to M_pipeline; expected M_pipeline, ALPHA_pipeline",
    ),
    "an exchange of two stages": (
        ("pipeline stages(1) exchange(yes)", "pipeline stages(2) exchange(yes)"),
        "types",
        "is an exchange; expected one stage",
    ),
    "an exchange that only one warp group writes": (
        (EXCHANGE_STORE, "    producer_store %L_left_pipeline %soft_in_own.m\n"),
        "warp-groups",
        "%P_pipeline is an exchange; expected two warp groups of one instance each that write tiles to it",
    ),
    "a page of another tile": (
        ("%PAGE_TABLE[b, kv_start // 64]", "%PAGE_TABLE[b, kv_start // 32]"),
        "same-tiles",
        "loads from where the portable @decode loads nothing",
    ),
    "a tile that lies in no page": (
        (" page(%page_even)\n    producer_load %K_left_even", "\n    producer_load %K_left_even"),
        "same-tiles",
        "loads from where the portable @decode loads",
    ),
    "one half that is not stored": (
        ("store %O_PARTIAL_head_right[q, right_v] %o_partial_right check(q)\n", ""),
        "same-tiles",
        "it stores 0 times at %O_PARTIAL",
    ),
    "iterations of two tiles that also recompute": (
        ("step(@own) odd(@received)", "step(@own) odd(@received) recompute(yes)"),
        "loop-bodies",
        "has other options than @step",
    ),
    "an odd iteration that yields other values": (
        ("yield values(m=%m_RECEIVED_in_received, l", "yield values(l"),
        "loop-bodies",
        "take and yield does not fit",
    ),
    "zeroed rows of another tile": (
        (
            "    zero_out_of_bounds %k_in_own\n",
            "    zero_out_of_bounds %k_in_own\n    zero_out_of_bounds %k_rope_in_both\n",
        ),
        "defined",
        "where it is not defined",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused(mistake: str) -> None:
    change, rule, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule `{rule}`: kernel @decode: .*({reason})"):
        verify(edited_mla_decode(change))


def exchange(store: tuple[Step, ...], read: tuple[Step, ...], both: tuple[Step, ...]) -> Protocol:
    """Two warp groups that exchange tiles: @left does `store` and `read` in alternation, @right `both` for two tiles,
    or `read` for a last tile."""
    programs = (
        WarpGroupSteps("left", (), TileLoop(store, store, odd=read), (), 1),
        WarpGroupSteps("right", (), TileLoop(read, read, pair=both), (), 1),
    )
    return Protocol(
        programs, (("P", 1), ("L", 1), ("R", 1)), (("P", ""), ("L", ""), ("R", "")), exchanges=frozenset({"P"})
    )


STORE, READ = (Step("producer_store", "P"),), (Step("consumer_wait", "P"), Step("consumer_release", "P"))


def test_the_warp_group_that_reads_a_tile_stores_the_next_one() -> None:
    """All tiles are released after an even number of tiles, and after an odd number."""
    made = exchange(STORE, READ, (*READ, *STORE))
    assert violation(made) == violation(made, all_orders=True) == ""


@pytest.mark.parametrize("both", [(*STORE, *READ), (*READ, *STORE, *STORE), READ, STORE, (READ[0], *STORE, READ[1])])
def test_all_orders_of_an_exchange_give_the_same_verdict(both: tuple[Step, ...]) -> None:
    made = exchange(STORE, READ, both)
    assert violation(made) and violation(made, all_orders=True)


def test_a_zeroed_tile_that_another_warp_group_may_read_is_found() -> None:
    """It is found in some order of steps if the other warp group may read the tile before it waits for the weights."""

    def of(*right: Step) -> Protocol:
        load, tail = (Step("producer_load", "K"),), (Step("producer_tail", "K"),)
        left = (Step("consumer_wait", "K"), Step("zero_out_of_bounds", "K"), *STORE, Step("consumer_release", "K"))
        programs = (
            WarpGroupSteps("producer", (), TileLoop(load, load), tail, 1),
            WarpGroupSteps("left", (), TileLoop(left, left), (), 1),
            WarpGroupSteps("right", (), TileLoop(right, right), (), 1),
        )
        return Protocol(programs, (("K", 1), ("P", 1)), (("K", ""), ("P", "")))

    after = of(*READ, Step("consumer_wait", "K"), Step("consumer_release", "K"))
    assert violation(after) == violation(after, all_orders=True) == ""
    before = of(Step("consumer_wait", "K"), *READ, Step("consumer_release", "K"))
    assert "zeroes rows of a tile of %K that right 0 reads" in violation(before)
    assert "zeroes rows of a tile of %K that right 0 reads" in violation(before, all_orders=True)


def test_warp_groups_that_count_iterations_differently_are_found() -> None:
    """@left visits tiles in pairs, and waits for a tile only in the second iteration of each pair."""
    load, wait = (Step("producer_load", "K"),), (Step("consumer_wait", "K"), Step("consumer_release", "K"))
    loop = TileLoop((), (), odd=wait)
    programs = (
        WarpGroupSteps("producer", (), TileLoop(load, load), (Step("producer_tail", "K"),), 1),
        WarpGroupSteps("left", (), loop, (), 1),
    )
    made = Protocol(programs, (("K", 1),), (("K", ""),))
    assert "wait for ever" in violation(made)
    every = replace(made, warp_groups=(programs[0], replace(programs[1], loop=TileLoop(wait, wait, odd=wait))))
    assert violation(every) == violation(every, all_orders=True) == ""
