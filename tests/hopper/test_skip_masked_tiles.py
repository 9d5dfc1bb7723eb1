"""skip-masked-tiles, which skips tiles of keys that the rows of an instance do not see: the pass, IR that is refused,
results, and generated code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Module, only, pipe
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import specialize
from attngen.targets.hopper.configs.forward import candidates, config
from attngen.targets.hopper.configs.forward_schedule import can_skip_masked_tiles
from attngen.targets.hopper.configs.sm90 import JVP
from attngen.targets.hopper.passes.skip_masked_tiles import SkipMaskedTiles
from attngen.verify import verify
from attngen.verify.automata import Step
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.hopper.common import WARP_SPECIALIZED, after_passes, edited_module, forward_kernel, lines, lowered
from tests.hopper.test_numerics import compare_with_naive
from tests.transforms.equality import Unequal

WIDE, TWO_CTAS = "causal_d256", "causal_mqa"  # two instances each, with one CTA per SM and with two
SPLIT_DIM = (
    "max(0, min(Nk, Nk - Nq + q_start + 1)) // BLOCK_KV .. cdiv(max(0, min(Nk, Nk - Nq + min(Nq, BLOCK_Q + "
    "q_start))), BLOCK_KV)"
)


@cache
def three_instances() -> Module:
    """A causal kernel of three instances in ping-pong order."""
    made = after_passes(TWO_CTAS)["dce"]
    return specialize(made, "fwd", config(made, 192, 64, 2))


def module_of(name: str) -> Module:
    return three_instances() if name == "three instances" else lowered(name)


# ---------------------------------------------------------------------------------------------- the pass


def test_a_pipelined_loop_skips_tiles_and_is_reversed() -> None:
    before, made = (
        {block: lines(name, block, WIDE) for block in ("consumer", "producer")}
        for name in ("defer-row-reduction", "skip-masked-tiles")
    )
    at = next(i for i, line in enumerate(before["consumer"]) if line.startswith("%keys = pipelined_loop kv"))
    assert made["consumer"][at] == f"{before['consumer'][at]} reversed(yes) skip(@skip) instance_partial({SPLIT_DIM})"
    assert made["consumer"][:at] + made["consumer"][at + 1 :] == before["consumer"][:at] + before["consumer"][at + 1 :]
    assert made["producer"] == [
        before["producer"][0],
        (
            "%copy_keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) step(@copy) "
            "reversed(yes)"
        ),
        *before["producer"][-2:],
    ]
    assert lines("skip-masked-tiles", "skip", WIDE) == [
        "%k_in_skip = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram",
        "consumer_release %k_in_skip",
        "%v_in_skip = consumer_wait %V_pipeline : T[BLOCK_KV, D_V] @sram",
        "consumer_release %v_in_skip",
    ]
    for block in ("entry", "first", "step", "last", "copy"):
        assert lines("skip-masked-tiles", block, WIDE) == lines("defer-row-reduction", block, WIDE)


def test_loops_over_full_and_partial_tiles_become_one_pipelined_loop_of_step() -> None:
    before, made = (lines(name, "consumer", TWO_CTAS) for name in ("defer-row-reduction", "skip-masked-tiles"))
    loops = [line for line in before if "= loop kv" in line]
    assert [line.split(" = ")[0] for line in loops] == ["%keys_full", "%keys_partial"]
    at = before.index(loops[0])
    assert made[at] == (
        "%keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) carry(m=%m_init, l=%l_init, "
        "acc=%acc_init) "
        f"step(@step) reversed(yes) skip(@skip) instance_partial({SPLIT_DIM})"
    )
    assert made[:at] == before[:at] and made[at + 1 :] == [
        line.replace("%keys_partial.", "%keys.") for line in before[at + 2 :]
    ]


def test_three_instances_keep_ping_pong_order_while_they_skip_tiles() -> None:
    ops = (
        re.split("block @skip\n", print_kernel(three_instances().warp_specialized[0]))[1]
        .split("\n  block")[0]
        .splitlines()
    )
    assert [op.strip() for op in ops[1:4]] == [
        "scheduler_barrier sync",
        "scheduler_barrier arrive",
        "%k_in_skip = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram",
    ]


@pytest.mark.parametrize("name", [WIDE, TWO_CTAS, "three instances"])
def test_the_text_prints_as_it_parses(name: str) -> None:
    text = print_module(module_of(name))
    assert (
        text.count(" reversed(yes)") == 2 * len(module_of(name).stand_ins("fwd"))
        and print_module(verify(parse_module(text))) == text
    )


def test_tiles_are_skipped_where_some_rows_do_not_see_them() -> None:
    hiding = [
        name for name in WARP_SPECIALIZED if any(op.skip for op in only(forward_kernel(name).ops(), pipe.PipelinedLoop))
    ]
    assert hiding == ["causal_d256", "causal_mqa", "temperature_mha"]
    assert hiding == [
        name
        for name in WARP_SPECIALIZED
        if can_skip_masked_tiles(lowered(name), lowered(name).configs("fwd", "hopper")[0])
    ]
    for name in set(WARP_SPECIALIZED) - set(hiding):
        made = after_passes(name)["defer-row-reduction"]
        found = zip(SkipMaskedTiles().run(made).warp_specialized, made.warp_specialized, strict=True)
        assert all(new == old for new, old in found if old.name != JVP), name
    tiles = {
        (r.block_q, r.block_kv) for r in candidates(lowered(TWO_CTAS)) if can_skip_masked_tiles(lowered(TWO_CTAS), r)
    }
    assert tiles == {
        (128, 64),
        (192, 64),
        (192, 128),
    }  # all instances except one have as many rows in total as a tile has keys


# ---------------------------------------------------------------------------------------------- IR that is refused

REFUSED = {
    "other bounds": (
        f"instance_partial({SPLIT_DIM})",
        f"instance_partial({SPLIT_DIM.replace('q_start + 1)', 'q_start + 2)')})",
        (
            r"`loop-bodies`: .* %keys: for the rows of an instance, the bounds of the loop are "
            r"instance_partial\(max\(0, min\(Nk, Nk - Nq \+ q_start \+ 1\)\)"
        ),
    ),
    "the program's bounds": (
        f"instance_partial({SPLIT_DIM})",
        "instance_partial(kv_full_end .. kv_end)",
        "`loop-bodies`: .* %keys: for the rows of an instance",
    ),
    "not reversed": (
        " reversed(yes) skip",
        " skip",
        "`loop-bodies`: .* %keys skips tiles; expected all of reversed, skip and instance_partial",
    ),
    "no bounds": (
        f" instance_partial({SPLIT_DIM})",
        "",
        "`loop-bodies`: .* %keys skips tiles; expected all of reversed, skip and instance_partial",
    ),
    "a producer that is not reversed": (
        "step(@copy) reversed(yes)",
        "step(@copy)",
        "`same-tiles`: .* run over tiles in different orders",
    ),
    "a missing body": ("skip(@skip)", "skip(@hidden)", "`defined`: .* %keys runs @hidden, which is no body"),
}


@pytest.mark.parametrize("mistake", REFUSED)
@pytest.mark.parametrize("name", [WIDE, TWO_CTAS])
def test_wrong_ir_is_refused_with_a_reason(name: str, mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited_module(lowered(name), (old, new)))


def test_tiles_in_several_ranges_are_not_reversed() -> None:
    """The printer cannot generate that."""
    made = edited_module(
        lowered("window_gqa"),
        (" first(@first) step(@step) last(@last)", " first(@first) step(@step) last(@last) reversed(yes)"),
    )
    with pytest.raises(
        VerifyError,
        match="`loop-bodies`: .* %keys reverses or skips partial tiles; expected one range",
    ):
        verify(made)


def test_a_consumer_with_reversed_tiles_skips_some() -> None:
    """The printed loop starts after the hidden tiles."""
    made = edited_module(
        lowered("causal_gqa"),
        (" first(@first) step(@step) last(@last)", " first(@first) step(@step) last(@last) reversed(yes)"),
    )
    with pytest.raises(
        VerifyError, match="`loop-bodies`: .* %keys skips tiles; expected all of reversed, skip and instance_partial"
    ):
        verify(made)


MISTAKES = {
    "K is not released": ("    consumer_release %k_in_skip\n", "", "can wait for ever"),
    "V is not released": ("    consumer_release %v_in_skip\n", "", "can wait for ever"),
    "no K": (
        "    %k_in_skip = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram\n    consumer_release %k_in_skip\n",
        "",
        "can wait for ever|at the end|%K_pipeline",
    ),
    "no V": (
        "    %v_in_skip = consumer_wait %V_pipeline : T[BLOCK_KV, D_V] @sram\n    consumer_release %v_in_skip\n",
        "",
        "can wait for ever|at the end|%V_pipeline",
    ),
    "two tiles per iteration": (
        "    consumer_release %k_in_skip\n",
        (
            "    consumer_release %k_in_skip\n    %k_again = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram\n"
            "    consumer_release %k_again\n"
        ),
        "can wait for ever|at the end",
    ),
    "K released twice": (
        "    consumer_release %k_in_skip\n",
        "    consumer_release %k_in_skip\n    consumer_release %k_in_skip\n",
        "releases a tile of %K_pipeline that it has not",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", [WIDE, TWO_CTAS, "three instances"])
def test_a_mistake_in_skipped_tiles_is_found(name: str, mistake: str) -> None:
    old, new, reason = MISTAKES[mistake]
    made = edited_module(module_of(name), (old, new)).warp_specialized[0]
    assert re.search(reason, violation(protocol_of(made, {"num_stages": 2})))


@pytest.mark.parametrize("name", [WIDE, TWO_CTAS, "three instances"])
def test_a_tile_that_the_producer_does_not_load_is_not_skipped(name: str) -> None:
    """The consumer is changed to skip one tile before its loop, which the producer does not load."""
    made = protocol_of(module_of(name).warp_specialized[0], {"num_stages": 2})
    assert violation(made) == ""
    programs = (replace(p, before=(*p.before, *p.loop.skip)) if p.name == "consumer" else p for p in made.warp_groups)
    assert "can wait for ever" in violation(replace(made, warp_groups=tuple(programs)))


PING_PONG_MISTAKES = {
    "no sync and no arrive": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    %k_in_skip",
        "can wait for ever",
    ),
    "no sync": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    scheduler_barrier arrive\n    %k_in_skip",
        "arrives at the scheduler barrier of .* not synced since",
    ),
    "no arrive": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    scheduler_barrier sync\n    %k_in_skip",
        "can wait for ever",
    ),
}


@pytest.mark.parametrize("mistake", PING_PONG_MISTAKES)
def test_a_mistake_in_ping_pong_order_is_found(mistake: str) -> None:
    old, new, reason = PING_PONG_MISTAKES[mistake]
    with pytest.raises(VerifyError, match=f"rule `protocol`: .*{reason}"):
        verify(edited_module(three_instances(), (old, new)))


@pytest.mark.share(4)
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_all_orders_give_the_same_verdict(mistake: str | None) -> None:
    """Each instance decides by itself, at any time, how many tiles it skips."""
    module = edited_module(lowered(WIDE), MISTAKES[mistake][:2]) if mistake else lowered(WIDE)
    made = protocol_of(module.warp_specialized[0], {"num_stages": 2})
    assert any(program.loop.skip for program in made.warp_groups)
    found, shown = violation(made), violation(made, all_orders=True)
    assert bool(found) == bool(shown) == bool(mistake)


def test_a_protocol_without_the_steps_of_hidden_tiles_does_not_show_their_mistakes() -> None:
    """The proof follows instances that skip tiles; without those steps it would find nothing."""
    made = protocol_of(
        edited_module(lowered(WIDE), MISTAKES["K is not released"][:2]).warp_specialized[0], {"num_stages": 2}
    )
    assert Step("consumer_wait", "K_pipeline") in next(p.loop.skip for p in made.warp_groups if p.name == "consumer")
    programs = tuple(replace(p, loop=replace(p.loop, skip=())) for p in made.warp_groups)
    assert violation(made) and not violation(replace(made, warp_groups=programs))


# ---------------------------------------------------------------------------------------------- results


@pytest.fixture()
def skipping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The instances that skipped a tile, once per tile."""
    instances: list[int] = []
    block = WarpSpecializedLaunch.block

    def counted(self: WarpSpecializedLaunch, name: str, values: dict[str, Any], cls: str) -> Iterator[Any]:
        instances.extend([values["instance"]] if name == "skip" else [])
        return block(self, name, values, cls)  # type: ignore[no-any-return]

    monkeypatch.setattr(WarpSpecializedLaunch, "block", counted)
    return instances


@pytest.mark.share(4)
@pytest.mark.parametrize("name", [WIDE, TWO_CTAS, "three instances"])
def test_results_are_those_of_naive_attention(name: str, skipping: list[int]) -> None:
    spec = TWO_CTAS if name == "three instances" else name
    for seed in range(8):
        compare_with_naive(module_of(name), spec, seed)
    instances = max(
        block.warp_group.instances for block in module_of(name).warp_specialized[0].warp_groups if block.warp_group
    )
    assert set(range(instances - 1)) <= set(skipping)  # all except the last instance, whose rows see the most


@pytest.mark.share(16)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (1, 17), (33, 65), (65, 33), (40, 40), (0, 5), (5, 0), (70, 3)])
@pytest.mark.parametrize("name", [WIDE, TWO_CTAS, "three instances"])
def test_ragged_sizes_and_empty_rows(name: str, lengths: tuple[int, int]) -> None:
    """With fewer keys than queries the first rows see nothing, so an instance may skip all tiles."""
    for seed in range(3):
        compare_with_naive(module_of(name), TWO_CTAS if name == "three instances" else name, seed, lengths)


def test_an_instance_may_skip_all_tiles(skipping: list[int]) -> None:
    """With 24 queries and 4 keys the first 20 queries see nothing. With 8 queries per program and 4 per instance, the
    last program has an instance that sees nothing and one that sees keys."""
    for seed in range(6):
        compare_with_naive(lowered(WIDE), WIDE, seed, (24, 4))
    assert 0 in skipping


def test_a_wrong_range_of_skipped_tiles_shows() -> None:
    """One edit makes an instance skip one tile more; the other makes it mask one tile less."""
    more = (f"instance_partial({SPLIT_DIM})", f"instance_partial({SPLIT_DIM} - 1)")
    less = (f"instance_partial({SPLIT_DIM})", f"instance_partial(1 + {SPLIT_DIM})")
    for change in (more, less):
        with pytest.raises((Unequal, IndexError)):
            for seed in range(12):
                compare_with_naive(edited_module(lowered(TWO_CTAS), change), TWO_CTAS, seed, (40, 40))


# ---------------------------------------------------------------------------------------------- generated code


def consumer_of(name: str) -> str:
    return render(module_of(name))["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]


def test_an_instance_computes_bounds_from_its_own_rows() -> None:
    for name in (WIDE, TWO_CTAS, "three instances"):
        text = consumer_of(name)
        own = text.partition("own_end = ")[2].partition("    first =")[0]
        assert "q_start + ROWS" in own and "BLOCK_Q" not in own
        assert "hidden_tiles = kv_end - own_end\n" in text and "masked_tiles = kv_end - own_full_end\n" in text
        start = "hidden_tiles" if name == TWO_CTAS else "hidden_tiles + 1"  # @first computes the first remaining tile
        assert f"for at in range({start}, partial_tiles + full_tiles):" in text


@pytest.mark.share(4)
@pytest.mark.parametrize("name", [WIDE, TWO_CTAS])
def test_hidden_tiles_are_waited_for_and_released_in_a_loop(name: str) -> None:
    text = consumer_of(name)
    skip = text.partition("# tiles whose keys are all hidden from this warp group's rows\n")[2].splitlines()
    indent = len(skip[0]) - len(skip[0].lstrip())
    body = [skip[0].strip()]
    body += [
        line.strip()
        for line in skip[1 : next(i for i, s in enumerate(skip) if i and len(s) - len(s.lstrip()) <= indent)]
    ]
    kinds = [line for line in body if line.startswith(("for ", "mbarrier.wait", "_barrier_arrive"))]
    assert kinds[0] == "for _ in range(hidden_tiles):" and "warpgroup_mma" not in "".join(body)
    ping_pong = ["_barrier_arrive"] if name == WIDE else []  # lets the other instance issue its products
    assert [line.split("(")[0] for line in kinds[1:]] == [*ping_pong, *("mbarrier.wait", "_barrier_arrive") * 2]
    if name == WIDE:
        assert "if hidden_tiles < partial_tiles + full_tiles:" in text


def test_the_producer_loads_partial_tiles_in_reversed_order() -> None:
    text = render(lowered(TWO_CTAS))["hopper.py"].partition("def fwd_producer(")[2].partition("@gluon.jit")[0]
    assert "for at in range(partial_tiles + full_tiles):" in text
    assert "kv_tile = gl.where(at < partial_tiles, kv_end - 1 - at, at - partial_tiles)\n" in text


@pytest.mark.share(4)
def test_tiles_that_a_product_reads_are_released_without_a_branch() -> None:
    """ptxas moves arithmetic past such a release. Queries, work tiles, and skipped tiles are released with a branch."""
    for name in ("causal_gqa", WIDE, TWO_CTAS):
        text = consumer_of(name)
        skipped, _, rest = text.rpartition("for _ in range(hidden_tiles):")[2].partition("warpgroup_mma(")
        early = re.findall(r"_barrier_arrive_early\((.*), THREADS\)", rest)
        assert (
            len([pipeline for pipeline in early if pipeline.endswith("STAGES + V_stage")])
            == len([r for r in early if r.endswith("K_stage")])
            > 0
        )
        assert {pipeline.split()[-1] for pipeline in early} == {"K_stage", "V_stage"}
        assert "_barrier_arrive_early" not in skipped
        assert not re.search(r" _barrier_arrive\(.*\b[KV]_stage", rest)
    kernel_text = render(lowered(TWO_CTAS))["hopper.py"]
    assert "@p barrier.arrive $1, $2; mov.u32 $0, 0; }" in kernel_text.partition("def _barrier_arrive_early(")[2]
