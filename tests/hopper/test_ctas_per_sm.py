"""Kernels with two CTAs per SM: passes, the choice of configs, IR that is refused, results, launches and
certificates."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.codegen.render import render
from attngen.errors import IRError, VerifyError
from attngen.interp.warp_groups import Deadlock
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.report.timeline import Timeline
from attngen.runtime import launch
from attngen.spec import make_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.forward import candidates, config, not_preferred
from attngen.targets.hopper.configs.forward_schedule import allows_two_ctas, ctas_per_sm, persistent_q_stages
from attngen.targets.hopper.passes.defer_row_reduction import DeferRowReduction
from attngen.targets.hopper.passes.ping_pong import PingPong
from attngen.targets.hopper.passes.software_pipeline_softmax import SoftwarePipelineSoftmax
from attngen.targets.hopper.passes.split_softmax import SplitSoftmax
from attngen.targets.hopper.toolchain.certificate import faults, overlapped_share
from attngen.targets.hopper.toolchain.compiler import job
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.tiles.launches import launch_options, launch_registers
from attngen.verify import verify
from tests.hopper.common import WARP_SPECIALIZED, after_passes, edited, forward_kernel, lines, lowered
from tests.hopper.test_numerics import compare_with_naive
from tests.transforms.equality import Unequal

NAME = "causal_mqa"  # head_dim 64


def lowered_narrow(**data: Any) -> Module:
    """The module of a causal spec with head_dim 64, or with other fields, after the last pass."""
    return lower(make_spec({"name": "narrow", "head_dim": 64, "mask": "causal", "backward": False, **data}))


# ---------------------------------------------------------------------------------------------- passes


def test_warp_specialize_writes_ctas_per_sm() -> None:
    text = print_kernel(after_passes(NAME)["warp-specialize"].warp_specialized[0])
    assert text.startswith("kernel @fwd backend(hopper) ctas_per_sm(2) program_axis(q) grid(q in cdiv(Nq, BLOCK_Q)")
    assert (
        "  warp_group @producer instances(1) warps(1) registers(24)\n"
        "  warp_group @consumer instances(2) rows(64) warps(4) registers(104)\n"
    ) in text
    module_text = print_module(lowered(NAME))
    assert print_module(verify(parse_module(module_text))) == module_text
    assert (
        "  sm90 bytes=2 rows<=3072 : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=3 TMA=1 backend=hopper\n"
        in module_text
    )


def test_async_mma_moves_ops_that_need_no_product_before_the_wait_for_v() -> None:
    before, made = (lines(name, "step", NAME) for name in ("insert-pipelines", "async-mma"))
    assert [line.split(" = ")[0] for line in before[-6:]] == [
        "%v",
        "%acc_next",
        "consumer_release %v",
        "%p_sum",
        "%l_next",
        before[-1],
    ]
    assert [line.split(" = ")[0] for line in made[-8:]] == [
        *("%p_sum", "%l_next", "%v", "%p_cast", "%acc_flight", "%acc_next", "consumer_release %v"),
        "yield values(m=%soft.m, l=%l_next, acc=%acc_next)",
    ]
    overlapped = lines(
        "async-mma", "step", "causal_gqa"
    )  # a consumer that overlaps its own products keeps its waits in place
    assert [line.split(" = ")[0] for line in overlapped[-6:-1]] == [
        "%acc_flight",
        "%acc_next",
        "consumer_release %v",
        "%p_sum",
        "%l_next",
    ]


def test_passes_that_overlap_a_consumer_with_itself_do_not_change_the_kernel() -> None:
    made = after_passes(NAME)["async-mma"]
    made = replace(made, warp_specialized=made.warp_specialized[:1])
    for one in (SoftwarePipelineSoftmax(), SplitSoftmax(), DeferRowReduction(), PingPong()):
        assert one.run(made).warp_specialized[0] is made.warp_specialized[0]
    text = print_kernel(forward_kernel(NAME))
    assert not re.search(
        r"= (split_halves|partial_reduce|pin_after_wait|pin_before_wait) | first\(|  scheduler_barrier ", text
    )
    assert (
        text.index("%l_next = map expr(")
        < text.index("%v = consumer_wait")
        < text.index("%acc_next = wgmma_wait %acc_flight keep_alive(%p_cast_operand)")
    )


def test_persistent_scheduler_releases_queries_after_the_last_loop() -> None:
    # Its tiles are in several ranges: no instance skips any, and each class has a loop.
    two_loops = "sinks_window_gqa"
    consume = lines("persistent-scheduler", "consume", two_loops)
    at = [line.split(" = ")[0] for line in consume].index("%keys_partial")
    assert consume[at + 1 : at + 3] == ["consumer_release %q", "reload_tile %Work_pipeline"] and consume[
        at - 1
    ].startswith("%keys_full = loop kv")
    produce = lines("persistent-scheduler", "produce", two_loops)
    assert [line.split(" = ")[0] for line in produce[1:]] == [
        "%copy_keys_full",
        "%copy_keys_partial",
    ]  # in the order of the consumers


def test_a_consumer_never_overlaps_its_products_with_its_own_softmax() -> None:
    line = Timeline(forward_kernel(NAME), 3)
    assert line.stuck == []
    sums = [s for s in line.spans if (s.lane, s.cls) == ("products of consumer 0", "bar")]
    softmax = [s for s in line.spans if (s.lane, s.cls) == ("consumer 0", "partial")]
    assert len(sums) == len(softmax) > 0 and not any(s.start < p.end and p.start < s.end for p in sums for s in softmax)


# ---------------------------------------------------------------------------------------------- the choice


@pytest.mark.share(32)
def test_narrow_heads_have_two_ctas_per_sm_where_registers_suffice() -> None:
    shared = [
        "causal_mqa",
        "decode_sinks_paged_gqa",
        "dilated_mha",
        "padding_mha",
        "sinks_window_gqa",
        "temperature_mha",
    ]
    assert [name for name in WARP_SPECIALIZED if forward_kernel(name).ctas_per_sm > 1] == shared
    for name in shared:
        module = lowered(name)
        (made,) = module.configs("fwd", "hopper")
        assert not not_preferred(module) and (made.block_q, made.block_kv, made.num_stages) == (128, 64, 3)
        assert ctas_per_sm(module, made) == 2
        assert 2 * (sram_bytes(module, forward_kernel(name), made) + 1024) <= 228 * 1024


def test_queries_have_one_stage_where_full_and_partial_tiles_have_separate_loops() -> None:
    """ptxas computes the address of a stage in only one of the loops, since no product of queries comes before both."""
    stages = {"causal_mqa": 2, "dilated_mha": 2, "padding_mha": 1, "sinks_window_gqa": 1, "temperature_mha": 2}
    for name, expected in stages.items():
        module = lowered(name)
        assert persistent_q_stages(module, module.configs("fwd", "hopper")[0]) == expected
        loops = [
            line
            for line in lines("persistent-scheduler", "consume", name)
            if re.search("= (loop|pipelined_loop) kv", line)
        ]
        assert len(loops) == 1 or expected == 1, name


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "data",
    [
        {"dropout": True},
        {
            "score": {"relative_bias": {"max_distance": 128}}
        },  # a value per score; it comes from a lookup, so the kernel is warp-specialized nevertheless
        {
            "mask": {"all_of": ["causal", "document"]},
            "score": {"softcap": 30.0},
        },  # row vectors of queries and of keys, and more work
        {"mask": {"block_sparse": {"block": 64}}},  # tiles of 64 queries
        {"head_dim": 128},
    ],
)
def test_other_specs_have_one_cta_per_sm(data: dict[str, Any]) -> None:
    made = lowered_narrow(**{"schedule": {"backend": "hopper"}, **data})
    assert (
        not allows_two_ctas(made)
        and made.warp_specialized[0].ctas_per_sm == 1
        and "maxnreg" not in render(made)["kernels.py"]
    )
    assert bool(not_preferred(made)) == ("head_dim" not in data and "relative_bias" not in data.get("score", ()))


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "mask", ["document", {"all_of": ["causal", "document"]}, {"all_of": ["causal", {"document": {"sorted": True}}]}]
)
def test_documents_have_two_ctas_per_sm(mask: Any) -> None:
    made = lowered_narrow(mask=mask)
    assert allows_two_ctas(made) and made.warp_specialized[0].ctas_per_sm == 2


def test_scalars_that_only_tile_bounds_derive_from_facts_are_not_passed_to_warp_groups() -> None:
    """Such a scalar is not loaded: the bounds of tiles already contain the fact about it."""
    text = render(lowered_narrow(mask={"all_of": ["causal", {"not": {"key_padding": {"lengths": False}}}]}))[
        "hopper.py"
    ]
    assert "_write_index(kv_end_at" in text and "key_padding_first" not in text.partition("def fwd(")[0]


def test_tile_sizes_decide_ctas_per_sm() -> None:
    module = lowered(NAME)
    tiles = {
        (q, kv, stages): ctas_per_sm(module, config(module, q, kv, stages))
        for q in (64, 128, 192)
        for kv in (64, 128)
        for stages in (2, 3, 7)
    }
    assert [key for key, ctas in tiles.items() if ctas == 2] == [(128, 64, 2), (128, 64, 3)]
    tried = [(r.block_q, r.block_kv, r.num_stages) for r in candidates(module) if ctas_per_sm(module, r) == 2]
    assert tried == [(128, 64, 2), (128, 64, 3)]
    assert (
        lowered_narrow(schedule={"backend": "hopper", "block_q": 128, "block_kv": 128, "stages": 2})
        .warp_specialized[0]
        .ctas_per_sm
        == 1
    )


# ---------------------------------------------------------------------------------------------- IR that is refused

REFUSED = {
    "three CTAs": (
        "ctas_per_sm(2)",
        "ctas_per_sm(3)",
        "`warp-groups`: .* 232 registers for each lane of a warp; each of 3 programs .* has 168 at its launch",
    ),
    "registers": (
        "registers(104)",
        "registers(112)",
        "`warp-groups`: .* 248 registers for each lane of a warp; each of 2 programs .* has 240 at its launch",
    ),
    "memory": (
        "num_stages=3 TMA=1 backend",
        "num_stages=5 TMA=1 backend",
        "`fits`: .* each of 2 programs on an SM .* has 115,712",
    ),
    "an order of tiles": (
        " step(@copy) reversed(yes)",
        " step(@copy)",
        "`same-tiles`: .* run over tiles in different orders",
    ),
    "K released before S is complete": (
        "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
        "    consumer_release %k\n    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        "`protocol`: .* releases a tile of %K_pipeline while %s_flight reads it",
    ),
    "V released before its product is complete": (
        (
            "    %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast_operand) : f32[BLOCK_Q, D_V] @reg\n"
            "    consumer_release %v\n"
        ),
        (
            "    consumer_release %v\n    %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast_operand) : "
            "f32[BLOCK_Q, D_V] @reg\n"
        ),
        "`protocol`: .* releases a tile of %V_pipeline while %acc_flight reads it",
    ),
    "a missing release": ("    consumer_release %v\n", "", "`protocol`: .* wait for ever"),
    "queries released too early": (
        "    %m_init = init -inf",
        "    consumer_release %q\n    %m_init = init -inf",
        "`protocol`: .*%Q_pipeline",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited(NAME, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"), [("ctas_per_sm(2)", "ctas_per_sm(0)"), ("backend(hopper) ctas_per_sm(2)", "ctas_per_sm(2)")]
)
def test_an_invalid_kernel_header_does_not_parse(old: str, new: str) -> None:
    with pytest.raises(IRError, match="not a kernel header"):
        parse_module(print_module(lowered(NAME)).replace(old, new))


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.share(16)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (1, 17), (33, 65), (65, 33), (0, 5), (5, 0)])
def test_ragged_sizes_and_empty_rows(lengths: tuple[int, int]) -> None:
    for name in (NAME, "sinks_window_gqa"):
        for seed in range(3):
            compare_with_naive(lowered(name), name, seed, lengths)


def test_mistakes_show_in_results() -> None:
    early = REFUSED["K released before S is complete"]
    rescaled = ("%rescaled = map expr(acc*alpha)", "%rescaled = map expr(acc + 0*alpha)")
    for old, new in (early[:2], rescaled):
        with pytest.raises(Unequal):
            for seed in range(20):
                compare_with_naive(edited(NAME, (old, new)), NAME, seed, (20, 40))


def test_a_missing_release_stops_all_warp_groups() -> None:
    with pytest.raises(Deadlock, match="@fwd: consumer 0, consumer 1, producer 0 wait for ever"):
        compare_with_naive(edited(NAME, ("    consumer_release %k\n", "")), NAME, 3, (20, 90))


# ---------------------------------------------------------------------------------------------- launches


def test_a_launch_leaves_registers_for_the_other_cta() -> None:
    module = lowered(NAME)
    (made,), warp_specialized = module.configs("fwd", "hopper"), forward_kernel(NAME)
    assert launch_registers(warp_specialized, made) == 80 and launch_options(warp_specialized, made) == {
        "num_warps": 4,
        "maxnreg": 80,
    }
    assert 2 * 80 * 12 * 32 <= 65536 < 2 * 88 * 12 * 32  # two CTAs of twelve warps
    one_cta = replace(warp_specialized, ctas_per_sm=1)
    assert launch_registers(one_cta, made) == 168 and launch_options(one_cta, made) == {"num_warps": 4}


def test_the_generated_module_launches_two_ctas_per_sm(tmp_path: Any) -> None:
    module = lowered(NAME)
    files = render(module)
    assert (
        '(3072, {"BLOCK_Q": 128, "BLOCK_KV": 64, "STAGES": 3, "num_warps": 4, "maxnreg": 80}),' in files["kernels.py"]
    )
    assert (
        'PERSISTENT = {"fwd": 2, "fwd_long": 1, "jvp": 1}\n' in files["hopper.py"]
        and "        [4, 1],\n        [104, 24],\n" in files["hopper.py"]
    )
    (tmp_path / "hopper.py").write_text(files["hopper.py"])
    compile_job = job(module, forward_kernel(NAME), module.configs("fwd", "hopper")[0], tmp_path / "hopper.py")
    assert compile_job.options == (
        ("num_warps", 4),
        ("maxnreg", 80),
    )  # the certificate is for the options of the launch


def test_a_persistent_launch_has_two_programs_per_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    file: Any = SimpleNamespace(DESCRIBED={"fwd": ()}, PERSISTENT={"fwd": 2})
    made = launch.Launch(
        launch.Kernel(SimpleNamespace(), "fwd", "BLOCK_Q"), file, None, {"BLOCK_Q": 128}, torch.device("cpu")
    )  # type: ignore[arg-type]
    assert made.most_programs == 264


def test_a_certificate_checks_registers_at_launch_and_not_overlap() -> None:
    module, warp_specialized = lowered(NAME), forward_kernel(NAME)
    (made,) = module.configs("fwd", "hopper")
    warp_groups = {
        "producer": {"registers": [24], "used": [21]},
        "consumer": {"registers": [104, 112], "used": [102, 110]},
    }
    code = {
        "roles": warp_groups,
        "HGMMA": 32,
        "HMMA": 0,
        "UTMALDG": 6,
        "UTMASTG": 2,
        "serialised": [],
        "reused": [],
        "unset": [],
        "exponentials": 136,
        "under": 0,
        "reloads": 0,
    }
    report = CompileReport(sram_bytes(module, warp_specialized, made), 80, 0, 4096, "0", 1.0, machine=code)

    def faults_of(**changes: Any) -> list[str]:
        return list(faults(module, warp_specialized, made, replace(report, **changes)))

    assert faults_of() == [] and overlapped_share(warp_specialized, made) == (0, 1)
    assert faults_of(registers=88) == [
        "starts with 88 registers for each thread; expected 80 at most, because 2 programs share an SM"
    ]
    assert faults_of(spilled_bytes=8) == ["spills 8 bytes; expected none"]
    (waits,) = faults_of(machine={**code, "serialised": ["C7510"]})
    assert waits.startswith("has products that wait for each other")
    large = faults_of(shared_bytes=120000)
    assert (
        large[1] == f"needs 120,000 bytes of shared memory, and has {smem_limit(2):,}" and smem_limit(1) == 227 * 1024
    )
    wrong_registers = faults_of(
        machine={**code, "roles": {**warp_groups, "consumer": {"registers": [240, 240], "used": [102, 110]}}}
    )
    assert wrong_registers == ["gives its instances of @consumer 240 and 240 registers; expected 104 and 112"]
