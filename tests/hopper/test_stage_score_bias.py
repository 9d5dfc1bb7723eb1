"""A bias per score, and its gradient, in the fused backward: the pass stage-score-bias, IR that is refused, and the
calls that use it."""

from __future__ import annotations

import re

import pytest

from attngen.conformance.sweep import crowded
from attngen.errors import VerifyError
from attngen.heuristics import ALIGNED_KEYS
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower, unspecialized
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import edit, spec, target
from tests.hopper.fused_backward import after_passes, backward, changed, edited, lines, lowered


def test_tma_loads_a_bias_and_stores_its_gradient() -> None:
    removed, added = changed("biased", "software-pipeline-gradients", "stage-score-bias", "step")
    assert removed == [
        "%bias = load %BIAS[b, h, q, kv] check(q if partial, kv) : T[BLOCK_KV, BLOCK_Q] @reg",
        "store %dBIAS[b, h, q, kv] %dbias check(q if partial, kv)",
    ]
    assert added == [
        "%bias_tile = consumer_wait %BIAS_pipeline : T[BLOCK_Q, BLOCK_KV] @sram",
        "%bias = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg",
        "tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)",
        "tma_store_wait %BIAS_pipeline",
        "consumer_release %bias_tile",
    ]
    pipeline = (
        "%BIAS_pipeline = pipeline stages(num_stages) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, "
        "BLOCK_KV] @sram"
    )
    assert changed("biased", "software-pipeline-gradients", "stage-score-bias", "entry") == ([], [pipeline])
    assert changed("biased", "software-pipeline-gradients", "stage-score-bias", "producer") == (
        [],
        ["producer_tail %BIAS_pipeline"],
    )
    loads = [
        line.split()[1] for line in lines("stage-score-bias", "copy", "biased") if line.startswith("producer_load")
    ]
    assert loads == ["%LSE2_pipeline", "%DELTA_pipeline", "%Q_pipeline", "%BIAS_pipeline", "%dO_pipeline"]


def test_a_bias_without_a_gradient_is_also_released() -> None:
    _, added = changed("biased_alone", "software-pipeline-gradients", "stage-score-bias", "step")
    assert [line.split()[0] for line in added] == ["%bias_tile", "%bias", "consumer_release"]


def test_kernels_without_a_bias_do_not_change() -> None:
    assert (
        after_passes("wide")["stage-score-bias"].warp_specialized
        == after_passes("wide")["software-pipeline-tangents"].warp_specialized
    )


def test_dq_has_one_stage_next_to_a_bias_in_wide_heads() -> None:
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
        "`same-tiles`: .*it stores 0 times at %dBIAS.b, h, q, kv.; the portable @bwd stores 1 times there",
    ),
    "a gradient that is written twice": (
        "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n",
        (
            "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n"
            "    tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)\n"
        ),
        "`same-tiles`: .*it stores 2 times at %dBIAS",
    ),
    "a stage released while it is stored": (
        "    tma_store_wait %BIAS_pipeline\n",
        "",
        "`types`: .*has no tma_store_wait before the tile of %BIAS_pipeline is released",
    ),
    "a late tma_store_wait": (
        "    tma_store_wait %BIAS_pipeline\n    consumer_release %bias_tile\n",
        "    consumer_release %bias_tile\n    tma_store_wait %BIAS_pipeline\n",
        "`types`: .*has no tma_store_wait before the tile of %BIAS_pipeline is released",
    ),
    "no release": (
        "    consumer_release %bias_tile\n",
        "",
        "`types`: .*has no tma_store_wait before the tile of %BIAS_pipeline is released",
    ),
    "a bias read from the stage of its gradient": (
        "    tma_store_wait %BIAS_pipeline\n",
        "    %again = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg\n    tma_store_wait %BIAS_pipeline\n",
        "`types`: .*a tile of %BIAS_pipeline that has not been loaded to registers, or is loaded later",
    ),
    "a local_load to another type": (
        "%bias = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q] @reg",
        "%bias = local_load %bias_tile : f32[BLOCK_KV, BLOCK_Q] @reg",
        "`types`: .*expected a tile of a stage or its transpose, in registers",
    ),
    "a local_load of another value": (
        "local_load %bias_tile",
        "local_load %k_all_ADDR",
        "`types`: .*expected a tile of a stage or its transpose, in registers",
    ),
    "a pipeline that instances share": (
        "stages(num_stages) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, BLOCK_KV]",
        "stages(num_stages) mbarrier_release(yes) : T[BLOCK_Q, BLOCK_KV]",
        "`types`: .*has another staging than a pipeline per instance, of the same element type",
    ),
    "another bias": (
        "producer_load %BIAS_pipeline %BIAS[b, h, q, kv]",
        "producer_load %BIAS_pipeline %BIAS[b, 0, q, kv]",
        "`same-tiles`: .*loads from where the portable @bwd loads nothing",
    ),
    "a gradient of another head": (
        "tma_store %dBIAS[b, h, q, kv]",
        "tma_store %dBIAS[b, 0, q, kv]",
        "`same-tiles`: .*it stores . times at %dBIAS",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_pipelines_are_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("biased", (old, new)))


def test_calls_whose_rows_tma_cannot_read_use_the_portable_kernels() -> None:
    text = print_module(lowered("biased"))
    (line,) = re.findall(r"%Use_fused = if .*", text)
    assert f"(Nk % {ALIGNED_KEYS}) == 0" in line
    assert "Nk %" not in next(line for line in print_module(lowered("narrow")).splitlines() if "%Use_fused" in line)
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
    "no zeros in tiles that a mask hides": (
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
        verify(parse_module(edit(print_module(lowered(name)), (old, new))))


def test_a_nonlinear_modifier_with_a_bias_has_no_kernel_in_wide_heads() -> None:
    made = make_spec({"name": "bent", "head_dim": 128, "score": ["dense_bias", {"softcap": 5.0}]})
    assert "a number for each score and a modifier that bends scores registers spill" in " ".join(
        unspecialized(made, lower(made, "dce"))
    )


def test_a_gradient_that_all_tiles_write_is_not_zeroed_before() -> None:
    """Under a mask no program writes the hidden tiles, so they are zeroed before."""
    made = {
        name: next(line for line in print_module(lowered(name)).splitlines() if "%dBIAS = alloc" in line)
        for name in ("biased", "biased_wide")
    }
    assert ["fill(" in line for line in made.values()] == [False, True]


def test_the_module_of_dense_bias_dropout_mha_has_the_kernel() -> None:
    assert [block.name for block in backward(target("dense_bias_dropout_mha")).warp_groups] == [
        "producer",
        "consumer",
        "dq_reducer",
    ]
