"""What the backward reads and writes for each score: the pass stage-score-bias, what is refused, and what calls take
it."""

from __future__ import annotations

import re

import pytest

from attngen.conformance.sweep import crowded
from attngen.errors import VerifyError
from attngen.heuristics import ALIGNED_KEYS
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower, unspecialized
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import edit, spec, target
from tests.hopper.test_fused_backward import backward, changed, edited, lines, steps, whole


def test_a_bias_comes_and_its_gradient_leaves_by_the_copy_engine() -> None:
    gone, come = changed("biased", "software-pipeline-gradients", "stage-score-bias", "step")
    assert gone == [
        "%bias = load %BIAS[b, h, q, kv] check(q if partial, kv) : T[BLOCK_KV, BLOCK_Q] @reg",
        "store %dBIAS[b, h, q, kv] %dbias check(q if partial, kv)",
    ]
    assert come == [
        "%bias_tile = consumer_wait %BIAS_pipeline : T[BLOCK_Q, BLOCK_KV] @sram",
        "%bias = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg",
        "tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)",
        "tma_store_wait %BIAS_pipeline",
        "consumer_release %bias_tile",
    ]
    pipeline = "%BIAS_pipeline = pipeline stages(num_stages) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, BLOCK_KV] @sram"
    assert changed("biased", "software-pipeline-gradients", "stage-score-bias", "entry") == ([], [pipeline])
    assert changed("biased", "software-pipeline-gradients", "stage-score-bias", "producer") == (
        [],
        ["producer_tail %BIAS_pipeline"],
    )
    fills = [
        line.split()[1] for line in lines("stage-score-bias", "copy", "biased") if line.startswith("producer_load")
    ]
    assert fills == ["%LSE2_pipeline", "%DELTA_pipeline", "%Q_pipeline", "%BIAS_pipeline", "%dO_pipeline"]


def test_a_bias_without_a_gradient_is_given_back_at_the_end_too() -> None:
    _, come = changed("biased_alone", "software-pipeline-gradients", "stage-score-bias", "step")
    assert [line.split()[0] for line in come] == ["%bias_tile", "%bias", "consumer_release"]


def test_others_are_left_as_they_are() -> None:
    assert (
        steps("wide")["stage-score-bias"].warp_specialized
        == steps("wide")["software-pipeline-tangents"].warp_specialized
    )


def test_sums_of_dq_have_one_stage_beside_a_bias_in_wide_heads() -> None:
    found = [
        next(line for line in lines("stage-score-bias", "entry", name) if "dQ_pipeline" in line)
        for name in ("biased", "biased_wide")
    ]
    assert [re.findall(r"stages\((\d)\)", line) for line in found] == [["2"], ["1"]]


REFUSED = {
    "a gradient that is never written": (
        (
            "    %dbias = map expr(ds) uses(ds=%ds) : T[BLOCK_KV, BLOCK_Q] @reg\n"
            "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n"
        ),
        "",
        "`walks`: .*it stores 0 times at %dBIAS.b, h, q, kv.; @bwd as it is portable stores 1 times there",
    ),
    "a gradient that is written twice": (
        "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n",
        (
            "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n"
            "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n"
        ),
        "`walks`: .*it stores 2 times at %dBIAS",
    ),
    "a slot given back while it is stored": (
        "    tma_store_wait %BIAS_pipeline\n",
        "",
        "`types`: .*is not flushed before the tile of %BIAS_pipeline is given back",
    ),
    "a flush that comes late": (
        "    tma_store_wait %BIAS_pipeline\n    consumer_release %bias_tile\n",
        "    consumer_release %bias_tile\n    tma_store_wait %BIAS_pipeline\n",
        "`types`: .*is not flushed before the tile of %BIAS_pipeline is given back",
    ),
    "no give": (
        "    consumer_release %bias_tile\n",
        "",
        "`types`: .*is not flushed before the tile of %BIAS_pipeline is given back",
    ),
    "numbers read from the slot of their gradient": (
        "    tma_store_wait %BIAS_pipeline\n",
        "    %again = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg\n    tma_store_wait %BIAS_pipeline\n",
        "`types`: .*a tile of %BIAS_pipeline that has not been lifted, or is lifted later",
    ),
    "a lift to another type": (
        "%bias = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg",
        "%bias = local_load %bias_tile : f32[BLOCK_KV, BLOCK_Q] @reg",
        "`types`: .*expected a taken tile or its transpose, in registers",
    ),
    "a lift of a value": (
        "local_load %bias_tile",
        "local_load %k_all_near",
        "`types`: .*expected a taken tile or its transpose, in registers",
    ),
    "a ring that copies share": (
        "stages(num_stages) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, BLOCK_KV]",
        "stages(num_stages) mbarrier_release(yes) : T[BLOCK_Q, BLOCK_KV]",
        "`types`: .*goes through a ring that each copy has of its own, of the same element type",
    ),
    "another bias": (
        "producer_load %BIAS_pipeline %BIAS[b, h, q, kv]",
        "producer_load %BIAS_pipeline %BIAS[b, 0, q, kv]",
        "`walks`: .*copies from where @bwd loads nothing",
    ),
    "a gradient of another head": (
        "tma_store %dBIAS[b, h, q, kv]",
        "tma_store %dBIAS[b, 0, q, kv]",
        "`walks`: .*it stores . times at %dBIAS",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_pipelines_are_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("biased", (old, new)))


def test_calls_whose_rows_the_copy_engine_cannot_read_take_the_portable_kernels() -> None:
    text = print_module(whole("biased"))
    (line,) = re.findall(r"%In_one_pass = if .*", text)
    assert f"(Nk % {ALIGNED_KEYS}) == 0" in line
    assert "Nk %" not in next(line for line in print_module(whole("narrow")).splitlines() if "%In_one_pass" in line)
    assert (
        crowded(spec("dense_bias_dropout_mha"), 132).n_kv % ALIGNED_KEYS
        == 0
        != crowded(spec("full_mha"), 132).n_kv % ALIGNED_KEYS
    )


HOSTS_REFUSED = {
    "any number of keys": (
        "biased",
        "(Nk % 8) == 0",
        "Nk >= 0",
        "`.*`: .*it reads a number for each score; expected `.Nk % 8. == 0` around it",
    ),
    "no zeros in what a mask hides": (
        "biased_wide",
        "%dBIAS = alloc fill(0) where(need_inputs)",
        "%dBIAS = alloc where(need_inputs)",
        "`.*`: .*dBIAS, which is not written on every path to it",
    ),
    "no zeros in blocks that are not listed": (
        "biased_blocks",
        "%dBIAS = alloc fill(0) where(need_inputs)",
        "%dBIAS = alloc where(need_inputs)",
        "`.*`: .*dBIAS, which is not written on every path to it",
    ),
}


@pytest.mark.parametrize("mistake", HOSTS_REFUSED)
def test_wrong_host_programs_are_refused(mistake: str) -> None:
    name, old, new, reason = HOSTS_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(edit(print_module(whole(name)), (old, new))))


def test_a_modifier_that_bends_scores_beside_a_bias_has_none_in_wide_heads() -> None:
    made = make_spec({"name": "bent", "head_dim": 128, "score": ["dense_bias", {"softcap": 5.0}]})
    assert "a number for each score and a modifier that bends scores registers spill" in " ".join(
        unspecialized(made, lower(made, "dce"))
    )


def test_a_gradient_that_all_tiles_write_is_not_filled_before() -> None:
    """Under a mask no program writes the tiles that it hides."""
    made = {
        name: next(line for line in print_module(whole(name)).splitlines() if "%dBIAS = alloc" in line)
        for name in ("biased", "biased_wide")
    }
    assert ["fill(" in line for line in made.values()] == [False, True]


def test_the_module_has_it() -> None:
    assert [block.name for block in backward(target("dense_bias_dropout_mha")).warp_groups] == [
        "producer",
        "consumer",
        "writer",
    ]
