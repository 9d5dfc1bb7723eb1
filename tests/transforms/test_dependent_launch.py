"""dependent-launch: programs that join parts of keys start beside those that compute the parts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from attngen.devices import CLASSES
from attngen.errors import VerifyError
from attngen.ir.text import parse_module, print_module
from attngen.tiles.launches import constants, launch_options
from attngen.transforms.dependent_launch import DependentLaunch
from attngen.verify import verify
from attngen.verify.dependent_launch import overlaps as verify_launches
from tests.helpers import SPECS, changes, edit, lowered, spec, target

CACHED = [name for name in SPECS if spec(name).cache]


@pytest.mark.parametrize("name", CACHED)
def test_decode_launches_dependents_and_combine_waits(name: str) -> None:
    before = lowered(name)["insert-cta-barriers"]
    (old, new), wait = (
        sorted(c for c in changes(DependentLaunch(), before) if ("kernel" in c) == of_kernel)
        for of_kernel in (True, False)
    )
    old, new = (old, new) if old[0] == "-" else (new, old)
    assert wait == ["+ grid_dependency_wait"]
    assert old.startswith("- kernel @decode program_axis(q) pack_gqa grid(")
    assert new == old.replace("- kernel", "+ kernel").replace(" pack_gqa ", " pack_gqa launch_dependents ")
    text = print_module(DependentLaunch().run(before))
    assert re.search(r"    grid_dependency_wait\n    %parts_of_keys = loop joined ", text)
    assert print_module(parse_module(text)) == text


def test_other_modules_stay() -> None:
    assert changes(DependentLaunch(), lowered("causal_gqa")["insert-cta-barriers"]) == []


def test_launches_overlap_on_devices_that_can() -> None:
    made = target("decode_gqa")
    for name in ("decode", "combine", "prefill"):
        for row in made.configs(name):
            can = CLASSES[row.device].overlaps and name != "prefill"
            assert constants(made.kernel(name), row).get("OVERLAPS", False) == can
            assert ("launch_pdl" in launch_options(made.kernel(name), row)) == (can and name == "combine")
    assert {name for name, device in CLASSES.items() if device.overlaps} == {"sm90", "sm100"}


WAIT = "    grid_dependency_wait\n"
JOIN = re.compile(r"    %parts_of_keys = loop joined .*\n")
COMBINE = "    launch @combine args("


def _late(text: str) -> str:
    """The wait comes after the loop that reads what others store."""
    return JOIN.sub(lambda loop: loop[0] + WAIT, text.replace(WAIT, ""))


@pytest.mark.parametrize(
    "rule, change, reason",
    [
        ("waits", _late, "%parts_of_keys may run before the launch before has ended; expected loops and stores after"),
        (
            "waits",
            lambda text: edit(
                text, ("@combine program_axis(q) pack_gqa", "@combine program_axis(q) pack_gqa launch_dependents")
            ),
            "both waits for the launch before",
        ),
        (
            "host-overlaps",
            lambda text: edit(text, (" pack_gqa launch_dependents", " pack_gqa")),
            "start early, and it follows @decode; expected a kernel",
        ),
        (
            "host-overlaps",
            lambda text: edit(text, (COMBINE, f"    copy %O_rows into(%O)\n{COMBINE}")),
            "start early, and no launch is right before it; expected a kernel that releases",
        ),
    ],
)
def test_what_is_not_safe_is_refused(rule: str, change: Callable[[str], str], reason: str) -> None:
    with pytest.raises(VerifyError, match=f"rule `{rule}`") as error:
        verify(parse_module(change(print_module(target("decode_gqa")))))
    assert reason in error.value.reason


def test_nothing_that_the_launch_before_stores_is_read_early() -> None:
    """Neither by an op before the wait, nor to find out how many parts a sequence has."""
    early = "    %early = load %LSE2_PARTS_head[first_item, q] check(q) : f32[BLOCK_Q] @reg\n"
    lengths = "    launch @decode args(CACHE_SEQLENS=%O_PARTS, O_PARTS=%CACHE_SEQLENS, "
    for old, new, reason in (
        (WAIT, early + WAIT, "it reads %LSE2_PARTS before it waits for @decode, which stores it as %LSE2_PARTS"),
        (
            "    launch @decode args(",
            lengths,
            "it reads %CACHE_SEQLENS before it waits for @decode, which stores it as %O_PARTS",
        ),
    ):
        made = parse_module(edit(print_module(target("decode_gqa")), (old, new)))
        assert [*verify_launches(made, made.host("decode"))] == [f"launch @combine: {reason}"]


def test_what_an_if_gives_is_of_its_branches() -> None:
    given = "    %Either = if then(@same) of(%CACHE_SEQLENS)\n    launch @decode args(CACHE_SEQLENS=%O_PARTS, O_PARTS=%Either.lengths, "
    branch = "  block @same\n    yield values(lengths=%CACHE_SEQLENS)\n  block @many_queries"
    before, host = print_module(target("decode_gqa")).split("host @decode")
    made = parse_module(
        f"{before}host @decode{edit(host, ('    launch @decode args(', given), ('  block @many_queries', branch))}"
    )
    reason = "it reads %CACHE_SEQLENS before it waits for @decode, which stores it as %O_PARTS"
    assert [*verify_launches(made, made.host("decode"))] == [f"launch @combine: {reason}"]
