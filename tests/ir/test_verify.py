"""Each rule of the verifier refuses small edits of real IR that break it, with the expected reason."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from attngen.errors import VerifyError
from attngen.ir import PHASES
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.verify import rules, verify
from tests import chunks
from tests.helpers import KV_OUTER, edit, lowered, portable, target, unverified
from tests.ir.broken_rules import access, launches, loops, meaning, positions, structure

RULES = rules("triton")
BROKEN = {**structure.EDITS, **access.EDITS, **meaning.EDITS, **loops.EDITS, **launches.EDITS, **positions.EDITS}


def refused(text):
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text, "edited.ir"))
    return error.value


@pytest.mark.parametrize(
    "rule, spec, old, new, reason",
    [pytest.param(rule, *case, id=f"{rule}-{n}") for rule, cases in BROKEN.items() for n, case in enumerate(cases)],
)
def test_each_rule_refuses_its_edits(rule, spec, old, new, reason):
    module = chunks.lowered(spec.partition(" in ")[0]) if spec.endswith(" in chunks") else target(spec)
    head, kernels = re.split(r"(?=\nkernel @)", print_module(module), maxsplit=1)
    text = head + edit(kernels, (old, new)) if old in kernels else edit(head, (old, new)) + kernels
    error = refused(text)
    assert (error.rule, reason in error.reason) == (rule, True), error
    assert str(error).startswith(f"the IR breaks rule `{rule}`: kernel @")
    assert error.ir_text == print_module(parse_module(text))


@cache
def scattering() -> str:
    """Return the target IR of a module that accumulates the gradient of a table atomically."""
    params = {"table": {"tensor": ["H", 40], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    return print_module(
        lower(make_spec({"name": "free", "head_dim": 16, "score": score, "backward": {"deterministic": False}}))
    )


SCATTER = "scatter %dTABLE[h, select(bucket < 0, bucket + 40, bucket)] %ds uses(bucket=%bucket) where("


@pytest.mark.parametrize(("offset", "reason"), [(129, "past its end"), (127, "before its start")])
def test_an_index_one_past_an_end_is_refused(offset: int, reason: str) -> None:
    """The table has 257 entries for distances from -128 to 128."""
    text = print_module(target("relative_bias_mha")).replace("-128, 128) + 128]", f"-128, 128) + {offset}]")
    with pytest.raises(VerifyError, match=f"rule `indexing`: .*%relative_bias may read %RELATIVE_BIAS {reason}"):
        verify(parse_module(text))


@pytest.mark.parametrize(
    "rule, old, new, reason",
    [
        (
            "types",
            SCATTER,
            SCATTER.replace("%ds", "%bucket"),
            "writes i32 to %dTABLE by `add`; expected f32, and an output of that",
        ),
        ("types", SCATTER, SCATTER.replace("h, ", ""), "%dTABLE has 2 dimensions, the access 1"),
        ("types", SCATTER, SCATTER.replace("[h,", "[delta,"), "has an index that is no integer"),
        (
            "types",
            SCATTER,
            SCATTER.replace("%ds", "%delta"),
            "%bucket of [BLOCK_Q, BLOCK_KV] does not broadcast to [BLOCK_Q]",
        ),
        ("indexing", ">= 0 and ", ">= 1 and ", "may write %dTABLE before its start"),
        ("indexing", "< 40)", "< 41)", "may write %dTABLE past its end"),
        ("signature", SCATTER, "", "nothing is stored to %dTABLE"),
    ],
)
def test_a_wrong_scatter_is_refused(rule, old, new, reason):
    text = scattering()
    assert print_module(verify(parse_module(text))) == text
    (line,) = (line for line in text.splitlines() if "scatter" in line)
    error = refused(text.replace(line, edit(line, (old, new)) if new else ""))
    assert (error.rule, reason in error.reason) == (rule, True), error


@cache
def summed_by_entry() -> str:
    """Return the target IR of a module that sums the gradient of each entry of a small table."""
    params = {"table": {"tensor": ["H", 3], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    return print_module(lower(make_spec({"name": "few", "head_dim": 16, "score": score})))


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "old, new, reason",
    [
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, 3]",
            "indexes 3 of %dTABLE by `3`; expected a number from 0 to 2",
        ),
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, h]",
            "indexes 3 of %dTABLE by `h`; expected a number from 0 to 2",
        ),
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, 1]",
            "%dTABLE is stored at 0, 1, 1 of 3 entries; expected each of them once",
        ),
        (
            "    store %dTABLE_head_2[q] %dtable_at_2_out check(q)\n",
            "",
            "%dTABLE is stored at 0, 1 of 3 entries; expected each of them once",
        ),
    ],
)
def test_each_entry_is_stored_once(old, new, reason):
    text = summed_by_entry()
    assert print_module(verify(parse_module(text))) == text and "gradient table[h, entry] from dTABLE" in text
    error = refused(edit(text, (old, new)))
    assert (error.rule, reason in error.reason) == ("indexing", True), error


@pytest.mark.share(4)
def test_literal_indices_are_allowed_only_in_partial_gradients():
    params = {"table": {"tensor": ["H", 2], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    text = print_module(lower(make_spec({"name": "two", "head_dim": 16, "score": score})))
    assert print_module(verify(parse_module(text))) == text and "base %dTABLE[b, h, 1]" in text
    error = refused(edit(print_module(target("document_gqa")), ("base %KEYS_LEFT[b, side]", "base %KEYS_LEFT[b, 0]")))
    assert error.rule == "indexing" and "indexes 2 of %KEYS_LEFT by `0`; expected `side`" in error.reason


@cache
def limited() -> str:
    """Return the target IR of a mask that limits keys by an unsorted number for each query."""
    mask = {"expr": "kv_idx < limit[q_idx]", "params": {"limit": {"tensor": ["Nq"], "dtype": "int32"}}}
    return print_module(lower(make_spec({"name": "limited", "head_dim": 16, "mask": mask})))


@pytest.mark.parametrize(
    "old, new", [("reduce max", "reduce min"), ("select(q_idx < Nq, limit, -", "select(q_idx < Nk, limit, -")]
)
def test_wrong_extremes_of_unsorted_rows_are_refused(old, new):
    error = refused(edit(limited(), (old, new)))
    assert (error.rule, error.reason) == (
        "extremes",
        "kernel @blocks: %limit_greatest is not proven to be the max of %limit over the rows of the program tile",
    )


def test_a_kv_outer_kernel_that_does_not_mask_keys_past_the_end_is_refused():
    made = unverified(edit(KV_OUTER, ("where(kv_idx < Nk)", "where(kv_idx < Nk + 5)")))
    (reason,) = RULES["target"]["out-of-bounds-keys"](made, made.kernels[0])
    assert reason.startswith("no mask in @step hides the keys from Nk on")


def test_a_kernel_is_checked_again_only_if_its_module_changes(monkeypatch):
    """Rules also read the module's header and its schedules, so a change of these checks the kernel again."""
    tried = []
    live = RULES["target"]["live"]
    monkeypatch.setitem(
        RULES["target"], "live", lambda module, kernel: tried.append(kernel.name) or live(module, kernel)
    )
    made = verify(parse_module(print_module(target("causal_gqa"))))
    first = len(tried)
    assert first == len(made.kernels)
    verify(made)
    assert len(tried) == first
    for other, rule in (
        (replace(made, meaning=target("window_gqa").meaning), "mask"),
        (replace(made, sharing="mha"), "indexing"),
        (replace(made, schedules=()), "scheduled-everywhere"),
    ):
        with pytest.raises(VerifyError) as error:
            verify(other)
        assert error.value.rule == rule, error.value
    verify(replace(made, version="another"))
    assert len(tried) > first


def test_every_rule_of_every_phase_has_an_edit_that_breaks_it():
    assert set(BROKEN) == {name for rules in RULES.values() for name in rules}
    assert tuple(RULES) == PHASES


@pytest.mark.parametrize("phase, stage", [("logical", "build"), ("scheduled", "dce")])
def test_rules_of_a_phase_hold_from_there_on(phase, stage):
    """Each phase keeps the rules of the phase before it, and they apply to IR of that phase."""
    following = PHASES[PHASES.index(phase) + 1]
    assert RULES[phase].items() <= RULES[following].items()
    text = print_module(lowered("causal_mha")[stage])
    assert f"phase {phase}" in text
    assert (
        refused(
            edit(
                text,
                ("kv_idx <= ", "window <= ")
                if phase == "scheduled"
                else ("q_idx >= kv_idx and", "q_idx >= window and"),
            )
        ).rule
        == "names"
    )


@pytest.mark.parametrize("stage", ["split-loops", "assign-memory-space"])
def test_a_partial_loop_relabelled_full_is_refused_in_every_phase(stage):
    text = print_module(lowered("causal_mha")[stage])
    assert refused(edit(text, ("cls(partial)", "cls(full)"))).rule == "full-is-proven"


def test_a_full_loop_may_be_relabelled_partial():
    text = print_module(portable("causal_gqa"))
    verify(parse_module(edit(text, ("cls(full)", "cls(partial)"))))


@pytest.mark.parametrize(
    "rule, edits, reason",
    [
        (
            "phase",
            ("phase target", "phase final"),
            "`final` is not a phase; expected one of logical, scheduled, target",
        ),
        ("defined", ("acc(%rescaled)", "acc(%scaled)"), "%acc_next in @fwd reads %scaled, which nothing defines"),
        ("defined-once", ("%l_init = init 0", "%m_init = init 0"), "%m_init is defined twice in @fwd"),
    ],
)
def test_checks_that_come_before_the_rules(rule, edits, reason):
    error = refused(edit(print_module(target("causal_gqa")), edits))
    assert (error.rule, error.reason) == (rule, reason)
