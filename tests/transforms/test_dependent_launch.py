"""dependent-launch lets programs that combine splits of the keys start while the programs of the splits still run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from attngen.devices import CLASSES
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.tiles.launches import constants, launch_options
from attngen.transforms.dependent_launch import DependentLaunch
from attngen.verify import verify
from attngen.verify.dependent_launch import host_dependent_launch as verify_launches
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
    assert re.search(r"    grid_dependency_wait\n    %over_KV_splits = loop KV_splits ", text)
    assert print_module(parse_module(text)) == text


def test_other_modules_stay() -> None:
    assert changes(DependentLaunch(), lowered("causal_gqa")["insert-cta-barriers"]) == []


def test_launches_overlap_on_devices_that_support_it() -> None:
    made = target("decode_gqa")
    for name in ("decode", "combine", "prefill"):
        for config in made.configs(name):
            overlaps = CLASSES[config.device].overlaps and name != "prefill"
            assert constants(made.kernel(name), config).get("OVERLAPS", False) == overlaps
            assert ("launch_pdl" in launch_options(made.kernel(name), config)) == (overlaps and name == "combine")
    assert {name for name, device in CLASSES.items() if device.overlaps} == {"sm90", "sm100"}


WAIT = "    grid_dependency_wait\n"
COMBINE_LOOP = re.compile(r"    %over_KV_splits = loop KV_splits .*\n")
COMBINE_LAUNCH = "    launch @combine args("


def _late(text: str) -> str:
    """Move the wait after the loop that reads the other kernel's results."""
    return COMBINE_LOOP.sub(lambda loop: loop[0] + WAIT, text.replace(WAIT, ""))


@pytest.mark.parametrize(
    "rule, change, reason",
    [
        ("dependent-launch", _late, "%over_KV_splits may run before the previous launch has ended; expected it after"),
        (
            "dependent-launch",
            lambda text: edit(
                text, ("@combine program_axis(q) pack_gqa", "@combine program_axis(q) pack_gqa launch_dependents")
            ),
            "both waits for the previous launch",
        ),
        (
            "host-dependent-launch",
            lambda text: edit(text, (" pack_gqa launch_dependents", " pack_gqa")),
            "start early, and it follows @decode; expected a kernel",
        ),
        (
            "host-dependent-launch",
            lambda text: edit(text, (COMBINE_LAUNCH, f"    copy %O_rows into(%O)\n{COMBINE_LAUNCH}")),
            "start early, and no launch is right before it; expected a kernel that launches dependents",
        ),
    ],
)
def test_unsafe_dependent_launches_are_refused(rule: str, change: Callable[[str], str], reason: str) -> None:
    with pytest.raises(VerifyError, match=f"rule `{rule}`") as error:
        verify(parse_module(change(print_module(target("decode_gqa")))))
    assert reason in error.value.reason


def test_reading_results_of_the_previous_launch_before_the_wait_is_refused() -> None:
    """Neither an op before the wait nor the search for a sequence's number of splits may read them."""
    early = "    %early = load %LSE2_PARTIAL_head[first_item, q] check(q) : f32[BLOCK_Q] @reg\n"
    lengths = "    launch @decode args(CACHE_SEQLENS=%O_PARTIAL, O_PARTIAL=%CACHE_SEQLENS, "
    for old, new, reason in (
        (WAIT, early + WAIT, "it reads %LSE2_PARTIAL before it waits for @decode, which stores it as %LSE2_PARTIAL"),
        (
            "    launch @decode args(",
            lengths,
            "it reads %CACHE_SEQLENS before it waits for @decode, which stores it as %O_PARTIAL",
        ),
    ):
        made = parse_module(edit(print_module(target("decode_gqa")), (old, new)))
        assert [*verify_launches(made, made.host("decode"))] == [f"launch @combine: {reason}"]


def test_the_result_of_an_if_may_be_a_tensor_of_its_branches() -> None:
    given = (
        "    %Either = if then(@same) of(%CACHE_SEQLENS)\n"
        "    launch @decode args(CACHE_SEQLENS=%O_PARTIAL, O_PARTIAL=%Either.lengths, "
    )
    branch = "  block @same\n    yield values(lengths=%CACHE_SEQLENS)\n  block @many_queries"
    before, host = print_module(target("decode_gqa")).split("host @decode")
    made = parse_module(
        f"{before}host @decode{edit(host, ('    launch @decode args(', given), ('  block @many_queries', branch))}"
    )
    reason = "it reads %CACHE_SEQLENS before it waits for @decode, which stores it as %O_PARTIAL"
    assert [*verify_launches(made, made.host("decode"))] == [f"launch @combine: {reason}"]
