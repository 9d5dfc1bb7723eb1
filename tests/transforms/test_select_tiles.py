"""select-tiles chooses the cheapest tile sizes that fit, for every device class and range of rows."""

from __future__ import annotations

import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from rich.console import Console

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.harness import load_module
from attngen.cost.report import report
from attngen.cost.roofline import Problem
from attngen.devices import CLASSES
from attngen.errors import FitError, VerifyError
from attngen.ir import Config
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower, stages
from attngen.report.explain import explain
from attngen.schedule.select_tiles import SelectTiles
from attngen.spec import parse_spec
from attngen.targets.triton import cost as model
from attngen.targets.triton.cost import cost, schedule_key
from attngen.targets.triton.fit import miscounts, why_not_fit
from attngen.targets.triton.sram import sram_bytes, sram_formula
from attngen.verify import verify
from tests.helpers import ROOT, SMALL, changes, edit, lowered, module, spec, target
from tests.versions.__main__ import PAIRS
from tests.versions.compiled import TARGETS

# SMALL as select-tiles finds it: with loop classes and memory spaces.
PLACED = edit(
    re.sub(r"(= load .*)@[?]", r"\1@sram", SMALL).replace("@?", "@reg"), ("body(@step)", "body(@step) cls(partial)")
)


def test_every_device_class_gets_configs_up_to_any_number_of_rows():
    added = [line[2:] for line in changes(SelectTiles(), module(PLACED, "scheduled"))]
    assert added[0] == "schedule @fwd"
    assert [row.split()[0] for row in added[1:] if "rows<=inf" in row] == list(CLASSES)
    assert all(" bytes=2 rows<=" in row and row.endswith("num_stages=1") for row in added[1:])


def test_fp32_and_16_bits_get_separate_configs():
    added = changes(SelectTiles(), module(PLACED, "scheduled", dtype="bf16 fp32"))
    assert [sum(f"{d} bytes={size} rows<=inf" in row for row in added) for d, size in product(CLASSES, (2, 4))] == [
        1
    ] * 2 * len(CLASSES)


TO_END, TO_DIAGONAL = "cdiv(Nk, BLOCK_KV)", "cdiv(min(Nk, Nq, BLOCK_Q + q_start), BLOCK_KV)"


@pytest.mark.parametrize(
    "where, ranges, is_reversed",
    [
        ("kv_idx < Nk", f"0 .. {TO_END}", False),
        ("kv_idx <= q_idx and kv_idx < Nk", f"0 .. {TO_DIAGONAL}", True),
        ("kv_idx >= q_idx and kv_idx < Nk", f"min(q_start // BLOCK_KV, {TO_END}) .. {TO_END}", False),
    ],
)
def test_programs_with_the_most_tiles_start_first(where, ranges, is_reversed):
    text = edit(PLACED, ("where(kv_idx < Nk)", f"where({where})"), (f"ranges(0 .. {TO_END})", f"ranges({ranges})"))
    added = changes(SelectTiles(), module(text, "scheduled"))
    assert ("+ kernel @fwd grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8))" in added) == is_reversed
    # Where programs differ in their number of tiles, the grid interleaves heads.
    assert any("swizzle(8)" in line for line in added) == (ranges != f"0 .. {TO_END}")


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["causal_mqa", "window_gqa", "causal_fp32"])
def test_the_choice_is_the_cheapest_of_those_that_fit(name):
    """Brute force over tile sizes, warps and stages finds the same config, for every device class and element size."""
    made = dict(stages(spec(name), {}))  # without measured schedules
    before, after = made["use-tma"], made["pipeline-loads"]
    for kernel in ("fwd", "dkdv", "dq"):
        for config in (r for r in after.configs(kernel) if r.max_rows is None):
            tried = [
                Config(config.device, config.elem_bytes, None, q, kv, w, s, config.tma)
                for q, kv, w, s in product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3))
            ]
            costs = {
                r: cost(before, before.kernel(kernel), r)
                for r in tried
                if not why_not_fit(before, before.kernel(kernel), r)
            }
            assert costs[config] == min(costs.values()) < float("inf")


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("causal_gqa", (128, 128, 8, 3)),
        ("window_gqa", (64, 64, 4, 3)),
        ("document_gqa", (64, 64, 4, 3)),
        ("streaming_gqa", (64, 64, 4, 3)),
    ],
)
def test_forwards_with_few_or_masked_tiles_take_smaller_tiles(name, tiles):
    """Measured on an H200 (docs/perf-log.md, section 12) for tiles copied by threads, which only short calls use."""
    made = dict(stages(spec(name), {}))["pipeline-loads"]  # without measured schedules
    config = next(r for r in made.configs("fwd") if (r.device, r.max_rows) == ("sm90", 512))
    assert (config.block_q, config.block_kv, config.num_warps, config.num_stages, config.tma) == (*tiles, False)


# Configs with overrides of the spec: device class, largest number of rows, whether tiles are copied by descriptor.
OVERRIDDEN = [
    ("sm80", None, False),
    ("sm90", 512, False),
    ("sm90", None, True),
    ("sm100", 512, False),
    ("sm100", None, True),
]
OVERRIDDEN += [("gfx942", None, False), ("any", None, False)]


@pytest.mark.parametrize(
    "schedule, change",
    [
        ("{block_q: 256, block_kv: 256}", "block_q or block_kv"),
        ("{block_kv: 64, stages: 5}", "block_kv or stages"),
    ],
)
def test_an_override_that_cannot_fit_says_where_and_what_to_change(schedule, change):
    spec = parse_spec(f"name: wide\nhead_dim: 256\nmask: causal\nschedule: {schedule}\n")
    with pytest.raises(FitError) as error:
        lower(spec)
    match = re.fullmatch(
        r"`schedule` does not fit: on (\w+) the kernel @\w+ needs ([\d,]+) bytes of shared memory with "
        r"BLOCK_Q=\d+, BLOCK_KV=\d+, "
        rf"num_stages=\d at 2 bytes per element, and has ([\d,]+); a smaller {change} needs less",
        str(error.value),
    )
    device, needed, had = match[1], *(int(n.replace(",", "")) for n in match.groups()[1:])
    assert needed > had == CLASSES[device].smem_per_block


@pytest.mark.parametrize("schedule", ["{}", "{warps: 8}", "{block_q: 16, stages: 1}"])
def test_where_no_tile_fits_the_error_names_the_head_dim(schedule, monkeypatch):
    """The device classes get less shared memory than any of them has."""
    for name, device in CLASSES.items():
        monkeypatch.setitem(CLASSES, name, replace(device, smem_per_block=20 * 1024))
    spec = parse_spec(f"name: wide\nhead_dim: 256\ndtype: fp32\nschedule: {schedule}\n")
    with pytest.raises(
        FitError, match="^`head_dim` does not fit: .* at 4 bytes .*; a smaller head_dim or dtype needs less$"
    ):
        lower(spec)


def test_overrides_are_used_for_every_kernel_and_device():
    made = lower(parse_spec("name: small\nhead_dim: 64\nschedule: {block_q: 32, block_kv: 16, stages: 2, warps: 2}\n"))
    for kernel in ("fwd", "dkdv", "dq"):
        configs = made.configs(kernel)
        assert [(r.device, r.max_rows, r.tma) for r in configs] == OVERRIDDEN
        assert {(r.block_q, r.block_kv, r.num_warps, r.num_stages) for r in configs} == {(32, 16, 2, 2)}


def test_an_override_that_may_spill_is_used_with_stages_that_fit():
    made = lower(
        parse_spec("name: slow\nhead_dim: 64\nmask: causal\nschedule: {block_q: 128, block_kv: 64, warps: 1}\n")
    )
    for name in ("fwd", "dkdv", "dq"):
        assert all(
            not why_not_fit(made, made.kernel(name), config) and config.num_warps == 1 for config in made.configs(name)
        )


def test_configs_listed_as_spilling_are_left_out_for_all_masks_or_one(monkeypatch):
    made = lowered("full_mha")["assign-memory-space"]
    kernel, configs = made.kernel("fwd"), lowered("full_mha")["pipeline-loads"].configs("fwd")
    config = [r for r in configs if r.device == "sm90"][-1]
    key = schedule_key(made, kernel, config)
    assert key == "sm90 fwd 64/64 bytes=2 64x128x4x2 TMA" and cost(made, kernel, config) < float("inf")
    for line, left_out in ((key, True), (f"{key} mask=none", True), (f"{key} mask=causal", False)):
        monkeypatch.setattr(model, "_listed", lambda line=line: frozenset([line]))
        assert (cost(made, kernel, config) == float("inf")) == left_out


@pytest.mark.parametrize(
    "name, most, warps", [("decode_gqa", 512, 1), ("decode_sinks_paged_gqa", 512, 1), ("decode_mla", 128, 4)]
)
def test_calls_of_few_rows_combine_more_splits_per_iteration(name, most, warps):
    """Up to 512 warps are used, each with 128 elements of a row. In calls with more rows, a program of one warp has a
    whole row."""
    configs = [config for config in target(name).configs("combine") if config.device == "sm90"]
    assert [(r.max_rows, r.block_q, r.block_kv, r.num_warps) for r in configs] == [
        (most, 1, 16, warps),
        (None, 1, 8, 1),
    ]


def test_warps_of_64_threads_have_more_elements_of_a_row():
    made = [(r.max_rows, r.num_warps) for r in target("decode_mla").configs("combine") if r.device == "gfx942"]
    assert made == [(256, 2), (None, 1)]


def test_a_config_that_does_not_fit_is_refused():
    chosen = SelectTiles().run(module(PLACED, "scheduled"))
    ((name, configs),) = chosen.schedules
    big = replace(configs[-1], block_q=512, block_kv=512)
    needed = sram_bytes(chosen, chosen.kernels[0], big)
    with pytest.raises(
        VerifyError, match=f"rule `fits`: .*needs {needed:,} bytes of shared memory with BLOCK_Q=512, BLOCK_KV=512"
    ):
        verify(replace(chosen, schedules=((name, (*configs[:-1], big)),)))


# ---------------------------------------------------------------------------------------------- no tile fits


def shrink(monkeypatch, name="gfx942", room=6 * 1024):
    """Leave a device class so little shared memory that no tile with head_dim 64 fits."""
    monkeypatch.setitem(CLASSES, name, replace(CLASSES[name], smem_per_block=room))
    sram_formula.cache_clear()


def test_a_device_on_which_no_tile_fits_gets_a_line_with_the_reason(monkeypatch):
    shrink(monkeypatch, room=1024)
    added = changes(SelectTiles(), module(PLACED, "scheduled"))
    (line,) = [row for row in added if " none : " in row]
    assert re.fullmatch(
        r"[+] gfx942 bytes=2 none : on gfx942 the kernel @fwd needs [\d,]+ bytes of shared memory with BLOCK_Q=16, "
        r"BLOCK_KV=16, num_stages=1 at 2 bytes per element, and has 1,024; a smaller head_dim needs less",
        line,
    )
    assert not any("gfx942" in row for row in added if row != line)


def test_where_no_tile_fits_any_device_the_spec_is_refused(monkeypatch):
    for name in CLASSES:
        shrink(monkeypatch, name, 1024)
    with pytest.raises(FitError, match="^`head_dim` does not fit: on sm80 .*; a smaller head_dim needs less$"):
        SelectTiles().run(module(PLACED, "scheduled"))


def test_an_override_that_fits_some_devices_is_used_there():
    made = lower(parse_spec("name: wide\nhead_dim: 128\nschedule: {block_q: 128, block_kv: 128}\n"))
    assert [(r.device, r.max_rows, r.tma) for r in made.configs("dkdv")] == OVERRIDDEN[:-1]
    ((device, reason),) = ((u.device, u.reason) for u in made.not_fitting("dkdv"))
    assert device == "any" and reason.startswith("on any the kernel @dkdv needs ")
    assert reason.endswith("and has 101,376; a smaller block_q or block_kv needs less")


def test_the_generated_module_raises_that_sentence(tmp_path, monkeypatch):
    """It runs on devices on which a tile fits; the interpreter has the class of one of them."""
    made = lower(parse_spec("name: wide\nhead_dim: 128\nschedule: {block_q: 128, block_kv: 128}\n"))
    write_module(render(made), tmp_path / "wide")
    wide = load_module(tmp_path / "wide")
    q = torch.randn(1, 1, 16, 128, dtype=torch.float16, requires_grad=True)
    out = wide.attention(q, q, q)
    torch.autograd.grad(out.sum(), q)
    monkeypatch.setattr(wide.runtime, "device_class", lambda kernels, device: "any")
    wide.runtime.forget_launches()  # otherwise the cached launch would be used
    sentences = {u.reason for kernel in made.kernels for u in made.not_fitting(kernel.name)}
    with pytest.raises(ValueError) as error:
        torch.autograd.grad(wide.attention(q, q, q).sum(), q)
    assert str(error.value).removeprefix("attention: ") in sentences
    assert str(error.value).startswith("attention: on any the kernel @")


def test_report_and_explanation_give_the_reason_for_the_device():
    made = lower(parse_spec("name: wide\nhead_dim: 128\nschedule: {block_q: 128, block_kv: 128}\n"))
    not_fitting = next(u for u in made.not_fitting("dkdv") if u.device == "any")
    assert {"device": "any", "elem_bytes": 2, "none": not_fitting.reason} in report(made)["kernels"]["dkdv"][
        "schedules"
    ]
    console = Console(width=200, file=io.StringIO())
    for part in explain(made, Problem(), report(made), parts=("kernels",)):
        console.print(part)
    text = console.file.getvalue()
    assert re.search(r"\n *dkdv +any +2 +none", text)
    assert not_fitting.reason in " ".join(text.split())
    assert "`attngen verify --write` was not run" in text


def test_every_line_of_spills_names_supported_versions_and_no_chosen_schedule() -> None:
    """A line has a config, perhaps with a mask, and the Triton versions that spill it. Each config is listed once."""
    lines = [
        line for line in (ROOT / model.SPILLS).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    listed = dict(line.split(" @ ") for line in lines)
    assert len(listed) == len(lines) and lines == sorted(lines, key=lambda line: line.partition(" @ ")[0])
    assert {version for versions in listed.values() for version in versions.split()} <= set(PAIRS.values())
    for name in ("causal_mqa", "window_gqa", "causal_dropout_mqa"):
        module = target(name)
        configs = [(kernel, config) for kernel in module.kernels for config in module.configs(kernel.name)]
        assert len(configs) > 20 and not any(model.spills(module, kernel, config) for kernel, config in configs)


def test_kernels_compiled_by_other_triton_versions_fit() -> None:
    """With each supported version except the pinned one, for every target, all kernels compile and fit; none spills.

    Warp-specialized forwards may spill a little, as with the newest ptxas.
    """
    found = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))
    assert set(found) == {"3.6.0", "3.7.0", "3.8.0", "3.9.0"} and all(set(of) == {*TARGETS} for of in found.values())
    for of in found.values():
        for target_, kernels in of.items():
            device = "sm90" if target_ == "hopper" else target_
            assert kernels["kernels"] >= (25 if target_ == "hopper" else 128) and not (
                kernels["do_not_fit"] or kernels["failed"]
            )
            assert all(needed <= CLASSES[device].smem_per_block for _, needed in kernels["more"].values())
            assert target_ == "hopper" or not kernels["spill"]
        assert not any(of["hopper"][key] for key in ("serialised", "reused", "bare"))


DROPS = "name: small\nhead_dim: 64\ndropout: true\n"


@pytest.mark.parametrize(
    "more",
    [
        "mask: key_padding\nschedule: {block_q: 16, block_kv: 16}",
        "mask: {all_of: [key_padding, {block_sparse: {block: 16}}]}",
    ],
)
def test_tiles_in_which_triton_counts_scores_twice_are_refused_on_nvidia(more):
    """Such kernels have dropout and loaded booleans. AMD's compiler lays operands out in another way."""
    made = lower(parse_spec(f"{DROPS}{more}\n"))
    for kernel, over in (("fwd", "BLOCK_KV"), ("dq", "BLOCK_KV"), ("dkdv", "BLOCK_Q")):
        assert {config.device for config in made.configs(kernel)} == {"gfx942"}
        assert {not_fitting.device for not_fitting in made.not_fitting(kernel)} == {"sm80", "sm90", "sm100", "any"}
        assert all(
            f"is wrong with {over}=16: where dropout meets booleans of a mask" in not_fitting.reason
            for not_fitting in made.not_fitting(kernel)
        )


@pytest.mark.parametrize(
    "more",
    [
        "mask: key_padding\nschedule: {block_q: 32, block_kv: 32}",
        # exact products use no matrix instructions
        "mask: key_padding\nschedule: {block_q: 16, block_kv: 16}\ndtype: fp32",
        "mask: causal\nschedule: {block_kv: 16}",
    ],
)
def test_other_small_tiles_are_used(more):
    made = lower(parse_spec(f"{DROPS}{more}\n"))
    assert not any(made.not_fitting(kernel.name) for kernel in made.kernels)


def test_large_matrix_instructions_take_small_tiles_of_keys():
    """They need four warps and at least 64 rows. Instructions of fewer warps do not take them, nor do those of sm80."""
    text = f"{DROPS}mask: key_padding\nschedule: {{block_q: 128, block_kv: 16, warps: %d}}\n"
    assert {not_fitting.device for not_fitting in lower(parse_spec(text % 4)).not_fitting("fwd")} == {"sm80", "any"}
    assert {not_fitting.device for not_fitting in lower(parse_spec(text % 2)).not_fitting("fwd")} == {
        "sm80",
        "sm90",
        "sm100",
        "any",
    }


def test_where_no_tile_of_32_fits_the_reason_is_shared_memory():
    made = lower(parse_spec(f"{DROPS}mask: key_padding\ndtype: fp32\nfp32_precision: tf32\n".replace("64", "256")))
    assert all(
        "bytes of shared memory" in not_fitting.reason
        for kernel in made.kernels
        for not_fitting in made.not_fitting(kernel.name)
    )


def test_the_error_names_the_mask_where_its_blocks_are_compiled_wrongly(monkeypatch):
    """This is so on NVIDIA GPUs; AMD GPUs get too little shared memory."""
    for name in [name for name, device in CLASSES.items() if device.backend == "hip"]:
        shrink(monkeypatch, name, 1024)
    text = f"{DROPS}mask: {{all_of: [key_padding, {{block_sparse: {{block: 16}}}}]}}\n"
    with pytest.raises(
        FitError, match=r"^`mask` does not fit: .* is wrong .* tiles, and so blocks of the mask, of 32 or more$"
    ):
        lower(parse_spec(text))


def test_no_such_tile_is_chosen():
    made = lower(parse_spec(f"{DROPS}mask: key_padding\n"))
    assert (
        {config.device for config in made.configs("dkdv")}
        == {config.device for config in made.configs("fwd")}
        == {*CLASSES}
    )
    for kernel in made.kernels:
        assert not any(miscounts(made, kernel, config) for config in made.configs(kernel.name))


NARROW = "name: small\nhead_dim: {qk: 40, v: 24}\nmask: causal\ndtype: fp16\n"


def test_tiles_that_ptxas_compiles_wrongly_are_loaded_by_descriptor():
    """On sm90 short calls do so, too; on other devices they do not."""
    made = lower(parse_spec(NARROW))
    for kernel in ("fwd", "jvp"):
        assert all(config.tma and config.num_stages > 1 for config in made.configs(kernel) if config.device == "sm90")
        assert not any(config.tma for config in made.configs(kernel) if config.device == "sm100" and config.max_rows)


def test_tiles_that_ptxas_compiles_wrongly_are_refused():
    """Such tiles are loaded by pointers or have one buffer. Tiles with fewer rows use another kind of product."""
    text = print_module(lower(parse_spec(NARROW)))
    at = text.index("schedule @fwd\n") + len("schedule @fwd\n")
    why = (
        "@fwd is wrong with BLOCK_Q=64: tiles of 32 columns stay at one place in shared memory, and ptxas has "
        "products read a register"
    )
    tiles = (
        ("64", "num_stages=3", True),
        ("64", "num_stages=1 TMA=1", True),
        ("64", "num_stages=2 TMA=1", False),
        ("32", "num_stages=1", False),
    )
    for block_q, copied, wrong in tiles:
        line = f"  sm90 bytes=2 rows<=8 : BLOCK_Q={block_q} BLOCK_KV=32 num_warps=4 {copied}\n"
        found = parse_module(text[:at] + line + text[at:])
        with pytest.raises(VerifyError, match=re.escape(why)) if wrong else nullcontext():
            verify(found)


def test_with_one_buffer_such_tiles_have_few_rows():
    made = lower(parse_spec(f"{NARROW}schedule: {{stages: 1}}\n"))
    configs = [
        config
        for kernel in ("fwd", "jvp")
        for config in made.configs(kernel)
        if config.device == "sm90" and config.backend == "triton"
    ]
    assert configs and all(config.block_q <= 32 for config in configs)


@pytest.mark.share(16)
@pytest.mark.parametrize("head_dim", ["32", "{qk: 64, v: 40}", "{qk: 32, v: 64}"])
def test_tiles_as_wide_as_those_of_scores_or_with_more_than_64_bytes_per_row_are_used(head_dim):
    made = lower(parse_spec(f"name: small\nhead_dim: {head_dim}\nmask: causal\n"))
    assert not next(config for config in made.configs("fwd") if config.device == "sm90").tma


def test_halves_of_8_bit_elements_are_never_copied_ahead():
    """Each iteration writes V's 32 even and 32 odd columns to one buffer, whether V is loaded by descriptor or not."""
    text = (
        "name: small\nhead_dim: {qk: 128, v: 64}\nmask: causal\n"
        "cache: {paged: {page_size: 64}, dtype: fp8_e4m3, scale: head}\n"
    )
    made = lower(parse_spec(text))
    for kernel in ("decode", "prefill"):
        configs = [config for config in made.configs(kernel) if config.device == "sm90" and config.backend == "triton"]
        assert configs and all(config.block_q <= 32 for config in configs)
        wide = replace(configs[-1], block_q=64, block_kv=64, num_warps=4, num_stages=3, tma=True)
        assert str(why_not_fit(made, made.kernel(kernel), wide)).endswith(
            "read a register that nothing has written; expected BLOCK_Q below 64"
        )
