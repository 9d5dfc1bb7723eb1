"""Tiles of keys that a copy's own rows do not see: the pass, what is refused, what is computed, and what is printed."""

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
from attngen.ir.graph import Module
from attngen.ir.pipe import PipelinedLoop
from attngen.ir.text import parse_module, print_kernel, print_module
from attngen.lowering.pipeline import specialize
from attngen.targets.hopper.configs.common import candidates, config, may_hide
from attngen.targets.hopper.configs.sm90 import TANGENTS
from attngen.targets.hopper.passes.skip_masked_tiles import SkipMaskedTiles
from attngen.verify import verify
from attngen.verify.machine import Step, broken
from attngen.verify.protocol import protocol_of
from tests.hopper.common import WARP_SPECIALIZED, after, edited_module, kernel, whole
from tests.hopper.test_numerics import hold
from tests.hopper.test_passes import lines
from tests.transforms.test_equality import Unequal

WIDE, TWICE = "causal_d256", "causal_mqa"  # two copies: of one program on a multiprocessor, and of two
OWN = "max(0, min(Nk, Nk - Nq + q_start + 1)) // BLOCK_KV .. cdiv(max(0, min(Nk, Nk - Nq + min(Nq, BLOCK_Q + q_start))), BLOCK_KV)"


@cache
def three() -> Module:
    """A causal kernel of three copies, which take turns."""
    made = after(TWICE)["dce"]
    return specialize(made, "fwd", config(made, 192, 64, 2))


def module_of(name: str) -> Module:
    return three() if name == "three copies" else whole(name)


# ---------------------------------------------------------------------------------------------- the pass


def test_a_pipeline_passes_over_tiles_and_comes_backwards() -> None:
    before, made = (
        {block: lines(name, block, WIDE) for block in ("consumer", "producer")}
        for name in ("defer-row-reduction", "skip-masked-tiles")
    )
    at = next(i for i, line in enumerate(before["consumer"]) if line.startswith("%keys = pipelined_loop kv"))
    assert made["consumer"][at] == f"{before['consumer'][at]} reversed(yes) skip(@skip) instance_partial({OWN})"
    assert made["consumer"][:at] + made["consumer"][at + 1 :] == before["consumer"][:at] + before["consumer"][at + 1 :]
    assert made["producer"] == [
        before["producer"][0],
        "%copy_keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) step(@copy) reversed(yes)",
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


def test_loops_of_both_classes_become_one_pipeline_of_step_alone() -> None:
    before, made = (lines(name, "consumer", TWICE) for name in ("defer-row-reduction", "skip-masked-tiles"))
    loops = [line for line in before if "= loop kv" in line]
    assert [line.split(" = ")[0] for line in loops] == ["%keys_full", "%keys_partial"]
    at = before.index(loops[0])
    assert made[at] == (
        "%keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) carry(m=%m_init, l=%l_init, acc=%acc_init) "
        f"step(@step) reversed(yes) skip(@skip) instance_partial({OWN})"
    )
    assert made[:at] == before[:at] and made[at + 1 :] == [
        line.replace("%keys_partial.", "%keys.") for line in before[at + 2 :]
    ]


def test_three_instances_take_their_turns_while_they_pass_over_tiles() -> None:
    ops = re.split("block @skip\n", print_kernel(three().warp_specialized[0]))[1].split("\n  block")[0].splitlines()
    assert [op.strip() for op in ops[1:4]] == [
        "scheduler_barrier sync",
        "scheduler_barrier arrive",
        "%k_in_skip = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram",
    ]


@pytest.mark.parametrize("name", [WIDE, TWICE, "three copies"])
def test_the_text_prints_as_it_parses(name: str) -> None:
    text = print_module(module_of(name))
    assert (
        text.count(" reversed(yes)") == 2 * len(module_of(name).stand_ins("fwd"))
        and print_module(verify(parse_module(text))) == text
    )


def test_tiles_are_passed_over_where_some_rows_do_not_see_them() -> None:
    hiding = [
        name for name in WARP_SPECIALIZED if any(isinstance(op, PipelinedLoop) and op.skip for op in kernel(name).ops())
    ]
    assert hiding == ["causal_d256", "causal_mqa", "temperature_mha"]
    assert hiding == [
        name for name in WARP_SPECIALIZED if may_hide(whole(name), whole(name).configs("fwd", "hopper")[0])
    ]
    for name in set(WARP_SPECIALIZED) - set(hiding):
        made = after(name)["defer-row-reduction"]
        found = zip(SkipMaskedTiles().run(made).warp_specialized, made.warp_specialized, strict=True)
        assert all(new == old for new, old in found if old.name != TANGENTS), name
    tiles = {(r.block_q, r.block_kv) for r in candidates(whole(TWICE)) if may_hide(whole(TWICE), r)}
    assert tiles == {
        (128, 64),
        (192, 64),
        (192, 128),
    }  # the rows of all copies but one are as many as the keys of a tile


# ---------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "other bounds": (
        f"instance_partial({OWN})",
        f"instance_partial({OWN.replace('q_start + 1)', 'q_start + 2)')})",
        (
            r"`bodies`: .* %keys: for a copy's own rows, the bounds of the loop are instance_partial\(max\(0, min\(Nk, Nk - Nq \+ q_start "
            r"\+ 1\)\)"
        ),
    ),
    "the program's bounds": (
        f"instance_partial({OWN})",
        "instance_partial(kv_full_end .. kv_end)",
        "`bodies`: .* %keys: for a copy's own rows",
    ),
    "forwards": (
        " reversed(yes) skip",
        " skip",
        "`bodies`: .* %keys passes over tiles; expected backwards, skip and own_partial",
    ),
    "no bounds": (
        f" instance_partial({OWN})",
        "",
        "`bodies`: .* %keys passes over tiles; expected backwards, skip and own_partial",
    ),
    "a producer that goes forwards": (
        "step(@copy) reversed(yes)",
        "step(@copy)",
        "`walks`: .* run over tiles in different orders",
    ),
    "a body that is missing": ("skip(@skip)", "skip(@hidden)", "`scopes`: .* %keys runs @hidden, which is no body"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", [WIDE, TWICE])
def test_a_wrong_text_is_refused_with_a_reason(name: str, what: str) -> None:
    old, new, reason = REFUSED[what]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited_module(whole(name), (old, new)))


def test_tiles_in_several_ranges_do_not_come_backwards() -> None:
    """The printer has no code for that."""
    made = edited_module(
        whole("window_gqa"),
        (" first(@first) step(@step) last(@last)", " first(@first) step(@step) last(@last) reversed(yes)"),
    )
    with pytest.raises(
        VerifyError,
        match="`bodies`: .* %keys has partial tiles that come backwards or are passed over; expected one range",
    ):
        verify(made)


def test_a_consumer_whose_tiles_come_backwards_passes_over_some() -> None:
    """The printer counts from the tiles that are hidden."""
    made = edited_module(
        whole("causal_gqa"),
        (" first(@first) step(@step) last(@last)", " first(@first) step(@step) last(@last) reversed(yes)"),
    )
    with pytest.raises(
        VerifyError, match="`bodies`: .* %keys passes over tiles; expected backwards, skip and own_partial"
    ):
        verify(made)


MISTAKES = {
    "K is kept": ("    consumer_release %k_in_skip\n", "", "can wait for ever"),
    "V is kept": ("    consumer_release %v_in_skip\n", "", "can wait for ever"),
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
    "two tiles in a turn": (
        "    consumer_release %k_in_skip\n",
        (
            "    consumer_release %k_in_skip\n    %k_again = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram\n"
            "    consumer_release %k_again\n"
        ),
        "can wait for ever|at the end",
    ),
    "K twice given": (
        "    consumer_release %k_in_skip\n",
        "    consumer_release %k_in_skip\n    consumer_release %k_in_skip\n",
        "gives back a tile of %K_pipeline that it has not",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", [WIDE, TWICE, "three copies"])
def test_a_mistake_in_what_is_passed_over_is_found(name: str, mistake: str) -> None:
    old, new, reason = MISTAKES[mistake]
    made = edited_module(module_of(name), (old, new)).warp_specialized[0]
    assert re.search(reason, broken(protocol_of(made, {"num_stages": 2})))


@pytest.mark.parametrize("name", [WIDE, TWICE, "three copies"])
def test_a_tile_that_the_producer_does_not_copy_is_not_passed_over(name: str) -> None:
    """A consumer passes over a tile before its loop, which is none of the loop's."""
    made = protocol_of(module_of(name).warp_specialized[0], {"num_stages": 2})
    assert broken(made) == ""
    programs = (replace(p, before=(*p.before, *p.walk.skip)) if p.name == "consumer" else p for p in made.programs)
    assert "can wait for ever" in broken(replace(made, programs=tuple(programs)))


TURNS = {
    "no turn": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    %k_in_skip",
        "can wait for ever",
    ),
    "no take": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    scheduler_barrier arrive\n    %k_in_skip",
        "passes its turn before .* has taken",
    ),
    "no pass": (
        "    scheduler_barrier sync\n    scheduler_barrier arrive\n    %k_in_skip",
        "    scheduler_barrier sync\n    %k_in_skip",
        "can wait for ever",
    ),
}


@pytest.mark.parametrize("mistake", TURNS)
def test_a_mistake_in_turns_is_found(mistake: str) -> None:
    old, new, reason = TURNS[mistake]
    with pytest.raises(VerifyError, match=f"rule `protocol`: .*{reason}"):
        verify(edited_module(three(), (old, new)))


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_all_orders_give_the_same_verdict(mistake: str | None) -> None:
    """Each copy decides by itself, at any time, how many tiles it passes over."""
    module = edited_module(whole(WIDE), MISTAKES[mistake][:2]) if mistake else whole(WIDE)
    made = protocol_of(module.warp_specialized[0], {"num_stages": 2})
    assert any(program.walk.skip for program in made.programs)
    found, shown = broken(made), broken(made, all_orders=True)
    assert bool(found) == bool(shown) == bool(mistake)


def test_a_protocol_without_the_steps_of_hidden_tiles_does_not_show_their_mistakes() -> None:
    """The proof follows copies that pass over tiles; without these it would find nothing."""
    made = protocol_of(edited_module(whole(WIDE), MISTAKES["K is kept"][:2]).warp_specialized[0], {"num_stages": 2})
    assert Step("consumer_wait", "K_pipeline") in next(p.walk.skip for p in made.programs if p.name == "consumer")
    programs = tuple(replace(p, walk=replace(p.walk, skip=())) for p in made.programs)
    assert broken(made) and not broken(replace(made, programs=programs))


# ---------------------------------------------------------------------------------------------- what it computes


@pytest.fixture()
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The copies that passed over a tile."""
    instances: list[int] = []
    block = WarpSpecializedLaunch.block

    def counted(self: WarpSpecializedLaunch, name: str, values: dict[str, Any], cls: str) -> Iterator[Any]:
        instances.extend([values["copy"]] if name == "skip" else [])
        return block(self, name, values, cls)  # type: ignore[no-any-return]

    monkeypatch.setattr(WarpSpecializedLaunch, "block", counted)
    return instances


@pytest.mark.parametrize("name", [WIDE, TWICE, "three copies"])
def test_results_are_those_of_naive_attention(name: str, passed: list[int]) -> None:
    spec = TWICE if name == "three copies" else name
    for seed in range(8):
        hold(module_of(name), spec, seed)
    instances = max(
        block.warp_group.instances for block in module_of(name).warp_specialized[0].warp_groups if block.warp_group
    )
    assert set(range(instances - 1)) <= set(passed)  # all but the last copy, whose rows see the most


@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (1, 17), (33, 65), (65, 33), (40, 40), (0, 5), (5, 0), (70, 3)])
@pytest.mark.parametrize("name", [WIDE, TWICE, "three copies"])
def test_ragged_sizes_and_empty_rows(name: str, lengths: tuple[int, int]) -> None:
    """With fewer keys than queries the first rows see nothing: whole copies may pass over all tiles."""
    for seed in range(3):
        hold(module_of(name), TWICE if name == "three copies" else name, seed, lengths)


def test_a_copy_may_pass_over_all_tiles(passed: list[int]) -> None:
    """Of 24 queries over 4 keys, the first 20 see nothing. Where a program has 8 of them, and a copy 4, the last
    program has both kinds."""
    for seed in range(6):
        hold(whole(WIDE), WIDE, seed, (24, 4))
    assert 0 in passed


def test_tiles_that_are_passed_over_wrongly_show() -> None:
    """A copy that passes over one tile more; and one that masks one tile less."""
    more = (f"instance_partial({OWN})", f"instance_partial({OWN} - 1)")
    less = (f"instance_partial({OWN})", f"instance_partial(1 + {OWN})")
    for change in (more, less):
        with pytest.raises((Unequal, IndexError)):
            for seed in range(12):
                hold(edited_module(whole(TWICE), change), TWICE, seed, (40, 40))


# ---------------------------------------------------------------------------------------------- what is printed


def consumer_of(name: str) -> str:
    return render(module_of(name))["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]


def test_a_copy_counts_in_its_own_rows() -> None:
    for name in (WIDE, TWICE, "three copies"):
        text = consumer_of(name)
        own = text.partition("own_end = ")[2].partition("    first =")[0]
        assert "q_start + ROWS" in own and "BLOCK_Q" not in own
        assert "hidden_tiles = kv_end - own_end\n" in text and "masked_tiles = kv_end - own_full_end\n" in text
        start = "hidden_tiles" if name == TWICE else "hidden_tiles + 1"  # @first has the first tile that is left
        assert f"for at in range({start}, partial_tiles + full_tiles):" in text


@pytest.mark.parametrize("name", [WIDE, TWICE])
def test_hidden_tiles_are_taken_and_given_back_in_a_loop(name: str) -> None:
    text = consumer_of(name)
    skip = text.partition("# tiles that hide all keys from the copy's rows\n")[2].splitlines()
    indent = len(skip[0]) - len(skip[0].lstrip())
    body = [skip[0].strip()]
    body += [
        line.strip()
        for line in skip[1 : next(i for i, s in enumerate(skip) if i and len(s) - len(s.lstrip()) <= indent)]
    ]
    kinds = [line for line in body if line.startswith(("for ", "mbarrier.wait", "barrier_arrive"))]
    assert kinds[0] == "for _ in range(hidden_tiles):" and "warpgroup_mma" not in "".join(body)
    turn = ["barrier_arrive"] if name == WIDE else []  # which the copy passes on
    assert [line.split("(")[0] for line in kinds[1:]] == [*turn, *("mbarrier.wait", "barrier_arrive") * 2]
    if name == WIDE:
        assert "if hidden_tiles < partial_tiles + full_tiles:" in text


def test_the_producer_instances_partial_tiles_from_the_last_on() -> None:
    text = render(whole(TWICE))["hopper.py"].partition("def fwd_producer(")[2].partition("@gluon.jit")[0]
    assert "for at in range(partial_tiles + full_tiles):" in text
    assert "kv_tile = gl.where(at < partial_tiles, kv_end - 1 - at, at - partial_tiles)\n" in text


def test_tiles_that_a_product_reads_are_given_back_without_a_branch() -> None:
    """ptxas moves arithmetic past that. Queries, places of tiles, and tiles that are passed over are given back with
    one."""
    for name in ("causal_gqa", WIDE, TWICE):
        text = consumer_of(name)
        skipped, _, rest = text.rpartition("for _ in range(hidden_tiles):")[2].partition("warpgroup_mma(")
        soon = re.findall(r"barrier_arrive_early\((.*), THREADS\)", rest)
        assert (
            len([pipeline for pipeline in soon if pipeline.endswith("STAGES + v_stage")])
            == len([r for r in soon if r.endswith("k_stage")])
            > 0
        )
        assert {pipeline.split()[-1] for pipeline in soon} == {"k_stage", "v_stage"}
        assert "barrier_arrive_early" not in skipped
        assert not re.search(r" barrier_arrive\(.*\b[kv]_stage", rest)
    kernel_text = render(whole(TWICE))["hopper.py"]
    assert "@p barrier.arrive $1, $2; mov.u32 $0, 0; }" in kernel_text.partition("def barrier_arrive_early(")[2]
