"""Tuning of warp-specialized kernels: competing configs, winners, certificates, and measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.heuristics import RANGES, SHORT_ROWS
from attngen.schedule.table import Table, schedule_of
from attngen.spec import load_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.forward import config as usual_config
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.targets.registry import SPECIALIZERS
from attngen.tune import measure, run, summary
from attngen.tune.measure import Bench
from attngen.tune.tuner import Cell, Outcome, Plan, compete, folder_name, plan
from attngen.tune.workers import Lost
from tests.helpers import spec
from tests.tune.fakes import Gpu, tile

LARGE = [rows for limit, rows in RANGES if limit != SHORT_ROWS]
USUAL = "128x128x4x2 TMA hopper"  # of causal_mqa, whose head_dim is 64


@cache
def planned(name: str = "causal_mqa", device: str = "sm90") -> Plan:
    return plan(spec(name), device)


def warp_specialized(name: str = "causal_mqa") -> list[str]:
    return [tile(config) for config in planned(name).searches["fwd", "bf16", False].warp_specialized]


# ---------------------------------------------------------------------------------------------- candidates


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "causal_mqa",
            (
                "64x64x2 64x64x3 64x128x2 64x128x3 128x64x2 128x64x3 128x128x2 128x128x3 192x64x2 192x64x3 192x128x2 "
                "192x128x3"
            ),
        ),
        ("causal_gqa", "64x64x2 64x64x3 64x128x2 64x128x3 128x64x2 128x64x3 128x128x2 128x128x3 192x64x2 192x64x3"),
        ("causal_d256", "64x64x2 64x64x3 128x64x2"),
        (
            "dense_bias_dropout_mha",
            "64x64x2 64x64x3 128x64x2 128x64x3 192x64x2 192x64x3",
        ),  # each score reads an element of the bias
        ("butterfly_gqa", "64x64x2 64x64x3"),  # no larger than a block
        ("mla_dims", "64x64x2 64x64x3 64x128x2 128x64x2 128x64x3 128x128x2 192x64x2 192x64x3"),
        ("causal_fp32", ""),
        ("decode_mla", "64x64x2 64x64x2"),  # for few and for more rows that share a latent
    ],
)
def test_configs_that_compete(name: str, expected: str) -> None:
    found = [
        f"{config.block_q}x{config.block_kv}x{config.num_stages}"
        for s in planned(name).searches.values()
        for config in s.warp_specialized
    ]
    assert found == expected.split()


@pytest.mark.share(16)
def test_configs_compete_for_the_forward_of_many_rows_on_the_device_of_the_backend() -> None:
    assert [of for of, found in planned().searches.items() if found.warp_specialized] == [("fwd", "bf16", False)]
    assert not any(found.warp_specialized for found in planned(device="sm80").searches.values())
    found = planned().searches["fwd", "bf16", False]
    assert found.configs[0] == found.kept[0] and set(found.configs) == {*found.kept, *found.warp_specialized}


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "name", ["causal_mqa", "causal_gqa", "causal_d256", "document_gqa", "block_sparse_mha", "dense_bias_dropout_mha"]
)
def test_competing_configs_are_verified_and_fit_and_include_the_usual_one(name: str) -> None:
    for config, module in planned(name).warp_specialized.items():  # each is verified
        assert module.configs("fwd", "hopper") == (config,) and config.min_rows == 0
        assert sram_bytes(module, module.warp_specialized[0], config) <= CLASSES["sm90"].smem_per_block
    assert usual_config(planned(name).whole) in planned(name).warp_specialized
    assert f"  and warp-specialized: {warp_specialized(name)[0]}, " in "\n".join(summary.candidates(planned(name)))


# ---------------------------------------------------------------------------------------------- winners


def competed(
    times: Mapping[str, float | str | Lost], rows: int = 4096, name: str = "causal_mqa", **others: Any
) -> Outcome:
    """Return the outcome for the forward on a fake GPU that takes one millisecond for every config not in `times`."""
    found = planned(name).searches["fwd", "bf16", rows <= SHORT_ROWS]
    return compete(Cell(name, "fwd", rows, "bf16"), planned(name), found.configs, Gpu(dict(times)), **others)


def portable(at: int = 2) -> str:
    return tile(planned().searches["fwd", "bf16", False].kept[at])


@pytest.mark.share(4)
def test_an_entry_has_the_fastest_portable_config_and_the_warp_specialized_ones_that_beat_it() -> None:
    found = competed({USUAL: 0.5, warp_specialized()[0]: 0.4, warp_specialized()[1]: 0.79, portable(): 0.8})
    entry = found.entry(planned(), "3.6.0")
    assert entry is not None and entry.warp_specialized is not None and entry.ms == 0.8
    assert [(one.backend, one.schedule["block_q"], one.ms) for one in entry.warp_specialized] == [
        ("hopper", 64, 0.4),
        ("hopper", 128, 0.5),
    ]
    (line, *_) = summary.measured(planned(), found)
    assert f"{warp_specialized()[0]} 0.4000" in line and "150.0%" in line
    assert "faster than the model's choice in 1 of 1, by 150.0%" in "\n".join(summary.totals([(planned(), found)]))


def test_a_portable_winner_is_kept_where_no_warp_specialized_kernel_is_faster() -> None:
    found = competed({portable(): 0.5, USUAL: 0.495})
    entry = found.entry(planned(), "3.6.0")
    assert entry is not None and (entry.ms, entry.warp_specialized) == (0.5, ())
    few = competed({}, rows=SHORT_ROWS).entry(planned(), "3.6.0")
    assert few is not None and few.warp_specialized is None


def test_a_config_without_a_certificate_is_left_out_and_the_summary_says_why() -> None:
    configs = planned().searches["fwd", "bf16", False].warp_specialized
    gpu = Gpu({tile(configs[0]): 0.1, tile(configs[1]): 0.5})
    cell, kept = Cell("causal_mqa", "fwd", 4096, "bf16"), planned().searches["fwd", "bf16", False].configs
    found = compete(cell, planned(), kept, gpu, faults={configs[0]: "spills 980 bytes; expected none"})
    assert (tile(configs[0]),) not in gpu.asked and (tile(configs[1]),) in gpu.asked
    assert [tile(t.config) for t in found.warp_specialized(planned())] == [tile(configs[1])]
    assert f"    {tile(configs[0])} gets no certificate: it spills 980 bytes; expected none" in list(
        summary.measured(planned(), found)
    )


def test_only_missing_certificates_count_as_a_result_if_all_configs_fail() -> None:
    """If Triton or the driver cannot run the configs, the table is as if nothing had been measured."""
    configs = planned().searches["fwd", "bf16", False].warp_specialized
    fails = dict.fromkeys(warp_specialized(), "RuntimeError: Triton 3.5.0 does not run kernels for hopper")
    for outcome, expected in (
        (competed(fails), None),
        (competed({}, faults=dict.fromkeys(configs, "spills 980 bytes")), ()),
        (competed(fails, faults=dict.fromkeys(configs[1:], "spills 980 bytes")), None),
        (competed({**fails, USUAL: 2.0}), ()),
    ):
        entry = outcome.entry(planned(), "3.6.0")
        assert entry is not None and entry.warp_specialized == expected


def test_portable_configs_are_measured_if_warp_specialized_ones_hang() -> None:
    found = competed({name: Lost("gave no answer within 30 s") for name in warp_specialized()} | {portable(): 0.5})
    entry = found.entry(planned(), "3.6.0")
    assert (
        entry is not None
        and (entry.ms, entry.warp_specialized) == (0.5, None)
        and found.left_out == len(warp_specialized()) - 3
    )


@pytest.mark.share(8)
def test_a_run_measures_only_configs_with_a_certificate(tmp_path: Path) -> None:
    first, second = planned().searches["fwd", "bf16", False].warp_specialized[:2]
    gpu, path = (
        Gpu({tile(first): 0.1, tile(second): 0.5}, faults={("causal_mqa", first): "spills 980 bytes"}),
        tmp_path / "r.jsonl",
    )
    results = run.read_results(path, "H200", [planned()])
    assert len(list(run.tune([planned()], gpu, results, float("inf")))) == len(list(planned().cells()))
    assert first not in [config for _, config in gpu.compiled] and second in [config for _, config in gpu.compiled]
    table = run.tabled(Table("H200"), [planned()], run.read_results(path, "H200", [planned()]))
    faster = {k.max_rows: [tuple(schedule_of(second).values())] for k, e in table.entries.items() if e.warp_specialized}
    assert list(faster) == [2048, 8192, None]
    assert all(
        [tuple(d.schedule.values()) for d in e.warp_specialized] == faster[k.max_rows]
        for k, e in table.entries.items()
        if e.warp_specialized
    )


@pytest.mark.share(8)
def test_certificates_are_for_the_modules_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compile_all(jobs: list[Any], workers: int | None) -> Any:
        for job in jobs:
            seen.append((job.file.parent.name, job.file.name, dict(job.tiles)["BLOCK_Q"]))
            module, config = next(
                (m, r)
                for r, m in planned("causal_d256").warp_specialized.items()
                if folder_name("causal_d256", r) == job.file.parent.name
            )
            need = sram_bytes(module, module.warp_specialized[0], config)
            yield (
                "no such instruction"
                if config.num_stages == 3
                else CompileReport(need, 168, 8 * (config.block_q == 64), 1, "3.6.0", 0.0)
            )

    hopper = SPECIALIZERS["hopper"]
    monkeypatch.setitem(
        SPECIALIZERS, "hopper", replace(hopper, compiler=replace(hopper.compiler, compile_all=compile_all))
    )
    with run.machine([planned("causal_d256")], {}, 1) as gpu:
        faults = gpu.faults([planned("causal_d256")])
        assert gpu.faults([planned("causal_fp32")]) == {}
    assert seen == [
        (f"causal_d256-hopper-{name}", "hopper.py", int(name.split("x")[0]))
        for name in ("64x64x4x2", "64x64x4x3", "128x64x4x2")
    ]
    assert {tile(config): why for (_, config), why in faults.items()} == {
        "64x64x4x2 TMA hopper": "spills 8 bytes; expected none",
        "64x64x4x3 TMA hopper": "does not compile: no such instruction",
    }


# ---------------------------------------------------------------------------------------------- measurement


class Fast:
    """Fake of a warp-specialized kernel: launches the portable one, with a schedule that the interpreter runs
    quickly."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.params, self.launched = kernels, (), 0

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: object, STAGES: int, num_warps: int, **options: Any) -> Any:
            self.launched += 1
            return self.kernels.fwd[grid](*args, **options, num_warps=4, num_stages=1, TMA=False)

        return launch


@pytest.mark.share(4)
def test_a_warp_specialized_kernel_is_launched_in_the_module_of_its_config(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: small\nhead_dim: 64\nmask: causal\nbackward: false\n")
    made = plan(load_spec(path), "sm90")
    config = next(iter(made.warp_specialized))
    write_module(render(made.module), tmp_path / "small")
    write_module(render(made.warp_specialized[config]), tmp_path / folder_name("small", config))
    monkeypatch.setattr(measure, "TOKENS", 64)
    monkeypatch.setattr(measure, "HIDDEN", 64)
    bench = Bench(
        tmp_path,
        {"small": path},
        device,
        lambda calls, rounds: {name: SimpleNamespace(rounds=(call(0) and 1.0 or 1.0,)) for name, call in calls.items()},
    )
    mine = bench._module(folder_name("small", config))
    file = SimpleNamespace(fwd=Fast(mine.kernels), DESCRIBED={"fwd": ()}, PERSISTENT={})
    monkeypatch.setattr(mine.runtime, "warp_specialized", lambda kernels, backend: file)
    monkeypatch.setattr(
        mine.runtime,
        "launch_configs",
        lambda *_: [(file, None, {"BLOCK_Q": 64, "BLOCK_KV": 64, "STAGES": 2, "num_warps": 4})],
    )
    cell = Cell("small", "fwd", 64, "bf16")
    assert bench.measure(cell, [made.searches["fwd", "bf16", False].kept[0], config], 1) == [(1.0,), (1.0,)]
    assert file.fwd.launched == 2 and isinstance(file.fwd, Fast)
    monkeypatch.setattr(mine.runtime, "warp_specialized", lambda kernels, backend: None)
    with pytest.raises(RuntimeError, match="does not run kernels for hopper"):
        bench.measure(cell, [config], 1)
