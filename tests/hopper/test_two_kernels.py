"""A forward with two warp-specialized kernels: @fwd up to a number of rows, and @fwd_long for more."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.certify.certificate import chosen, keep, record
from attngen.codegen.render import render
from attngen.cost.report import report
from attngen.errors import IRError, VerifyError
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.report.explain import fit_table
from attngen.report.tables import Rows
from attngen.runtime import launch
from attngen.spec import make_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.common import FEW_ROWS
from attngen.targets.hopper.configs.forward import LONG_ROWS, long_config
from attngen.verify import _violations, verify
from attngen.verify.inputs import verify_interface
from tests.helpers import SPECS, edit, target
from tests.hopper.common import WARP_SPECIALIZED, lowered
from tests.hopper.test_numerics import compare_with_naive

WITH_TWO_KERNELS = ["causal_mqa", "temperature_mha"]
NAME = WITH_TWO_KERNELS[0]
CODE = {
    "roles": {},
    "HGMMA": 1,
    "HMMA": 0,
    "UTMALDG": 1,
    "UTMASTG": 1,
    "serialised": [],
    "reused": [],
    "unset": [],
    "exponentials": 0,
    "under": 0,
    "reloads": 0,
}


def only(module: Module, name: str) -> Module:
    """The module with only one of its warp-specialized kernels."""
    (one,) = (kernel for kernel in module.warp_specialized if kernel.name == name)
    return replace(module, warp_specialized=(replace(one, name="fwd", of=""),))


def test_long_sequences_have_a_kernel_where_keys_grow_with_queries() -> None:
    assert [name for name in WARP_SPECIALIZED if len(lowered(name).stand_ins("fwd")) > 1] == WITH_TWO_KERNELS
    assert [name for name in SPECS if len(target(name).stand_ins("fwd")) > 1] == WITH_TWO_KERNELS
    for name in WITH_TWO_KERNELS:
        (few, usual), (long, row) = target(name).stand_ins("fwd")
        assert (few.name, usual.block_q, few.ctas_per_sm, usual.min_rows, usual.max_rows) == (
            "fwd",
            128,
            2,
            FEW_ROWS,
            LONG_ROWS,
        )
        assert (long.name, row.block_q, long.ctas_per_sm, row.min_rows, row.max_rows) == (
            "fwd_long",
            192,
            1,
            LONG_ROWS,
            None,
        )
        assert "  scheduler_barrier " in print_kernel(long) and "  scheduler_barrier " not in print_kernel(few)
        assert [(r.min_rows, r.max_rows) for _, r in lowered(name).stand_ins("fwd")] == [
            (0, LONG_ROWS),
            (LONG_ROWS, None),
        ]  # a spec that selects the backend


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "data",
    [
        {"head_dim": 128},  # one CTA per SM
        {"mask": "none"},  # three consumers for any number of rows
        {
            "mask": {"sliding_window": {"left": 1023, "right": 0}}
        },  # the number of keys per query does not grow with the sequence
        {"mask": {"all_of": ["causal", "document"]}},  # row vectors of keys: registers do not suffice
        {"score": ["alibi"]},  # a modifier of positions
    ],
)
def test_other_specs_have_one_kernel(data: dict[str, Any]) -> None:
    made = make_spec(
        {"name": "one", "head_dim": 64, "mask": "causal", "backward": False, "schedule": {"backend": "hopper"}, **data}
    )
    module = lower(made)
    assert long_config(module) is None and [kernel.name for kernel in module.warp_specialized] == ["fwd"]


def test_tiles_of_a_spec_are_for_any_number_of_rows() -> None:
    schedule = {"backend": "hopper", "block_q": 128, "block_kv": 64}
    module = lower(
        make_spec({"name": "one", "head_dim": 64, "mask": "causal", "backward": False, "schedule": schedule})
    )
    assert [(r.block_q, r.max_rows) for _, r in module.stand_ins("fwd")] == [(128, None)]


@pytest.mark.parametrize("name", WITH_TWO_KERNELS)
def test_results_of_both_kernels_are_those_of_naive_attention(name: str) -> None:
    for kernel in ("fwd", "fwd_long"):
        for seed in range(3):
            compare_with_naive(only(lowered(name), kernel), name, seed)


# ---------------------------------------------------------------------------------------------- IR and rules


def test_the_ir_names_the_kernel_that_another_replaces() -> None:
    text = print_module(lowered(NAME))
    assert (
        "kernel @fwd_long variant_of(@fwd) backend(hopper) program_axis(q) grid(" in text
        and "kernel @fwd backend(hopper) ctas_per_sm(2) program_axis(q)" in text
    )
    assert "\nschedule @fwd_long\n  sm90 bytes=2 rows>3072 : BLOCK_Q=192" in text
    assert print_module(verify(parse_module(text))) == text
    both = text.replace("rows<=3072", "rows>64 rows<=3072")
    assert "rows>64 rows<=3072 : BLOCK_Q=128" in both and print_module(parse_module(both)) == both


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "@fwd_long variant_of(@fwd)",
            "@fwd_long variant_of(@nothing)",
            "it stands in for @nothing, which is no kernel of the module",
        ),
        ("@fwd_long variant_of(@fwd)", "@dq variant_of(@fwd)", "expected one or more, each once"),
        (
            "@fwd_long variant_of(@fwd)",
            "@fwd_long variant_of(@dq)",
            "it has other arguments than @dq, for which it stands in",
        ),
    ],
)
def test_a_kernel_that_replaces_no_kernel_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(parse_module(edit(print_module(lowered(NAME)), (old, new))))
    assert reason in str(caught.value)


def test_a_kernel_of_its_own_name_has_a_schedule() -> None:
    text = print_module(lowered(NAME)).partition("\nschedule @fwd_long")[0]
    with pytest.raises(VerifyError, match="there are schedules for .*; expected one for each kernel, in order"):
        verify_interface(parse_module(text))


@pytest.mark.parametrize("rows", ["rows>3072 ", "rows", "rows>3072rows<=4096", "rows<=4096 rows>3072"])
def test_a_config_whose_range_of_rows_is_written_otherwise_is_refused(rows: str) -> None:
    with pytest.raises(IRError, match="not a config"):
        parse_module(edit(print_module(lowered(NAME)), ("rows>3072", rows)))


# ---------------------------------------------------------------------------------------------- launches and reports


def test_a_launch_uses_the_kernel_that_the_config_names() -> None:
    config = {"BLOCK_Q": 192, "BLOCK_KV": 128, "STAGES": 2, "num_warps": 4}
    file: Any = SimpleNamespace(DESCRIBED={"fwd": (), "fwd_long": ((0, 64),)}, PERSISTENT={"fwd": 2, "fwd_long": 1})
    handle = launch.Kernel(SimpleNamespace(), "fwd", "BLOCK_Q")  # type: ignore[arg-type]
    made = launch.Launch(handle, file, None, {**config, "KERNEL": "fwd_long"}, torch.device("cpu"))
    assert (made.name, made.config, made.most_programs) == ("fwd_long", config, 1)
    assert made.described and made.described.places == [(0, 64, 0)]
    assert launch.Launch(handle, file, 3072, config, torch.device("cpu")).name == "fwd"


def test_two_blank_lines_separate_the_functions_of_both_kernels() -> None:
    """One kernel has partial row sums and the other has not, so both sum functions are printed."""
    lines = render(target(NAME))["hopper.py"].splitlines()
    for name in ("def _row_sum(", "def _partial_sums(", "def fwd(", "def fwd_long("):
        (at,) = (i for i, line in enumerate(lines) if line.startswith(name))
        assert lines[at - 1].startswith("@gluon.jit") and lines[at - 3 : at - 1] == ["", ""], name


def test_the_table_of_resources_gives_the_rows_of_each_kernel() -> None:
    table = next(fit_table(report(target(NAME))))
    assert isinstance(table, Rows)
    shown = {row[table.headings.index("rows")] for row in table.rows}
    assert {">64 <=3072", ">3072", "<=64", "any"} <= shown


def test_each_kernel_has_its_compile_report(tmp_path: Any) -> None:
    module = target(NAME)
    pairs = [
        (kernel, row)
        for kernel, row in chosen(module, ["sm90"], False)
        if kernel.stands_for == "fwd" and kernel.backend
    ]
    assert [kernel.name for kernel, _ in pairs] == ["fwd", "fwd_long"]
    reports = {
        (k.name, row): CompileReport(1000 + i, 128, 0, 1, "3.6.0", 0.0, machine=CODE)
        for i, (k, row) in enumerate(pairs)
    }
    bare = render(module)
    files = record(module, bare, reports)
    found = [
        row for row in json.loads(files["report.json"])["kernels"]["fwd"]["schedules"] if row.get("backend") == "hopper"
    ]
    assert [(row.get("kernel"), row["reading"]["shared_bytes"]) for row in found] == [(None, 1000), ("fwd_long", 1001)]
    (tmp_path / "report.json").write_text(files["report.json"])
    assert keep(module, bare, tmp_path) == files


def test_a_warp_specialized_kernel_is_verified_again_when_the_kernel_that_it_replaces_changes() -> None:
    """Verdicts are cached, with everything that the rules read as the key."""
    module = verify(lowered("causal_mqa"))
    assert all(list(_violations(module, kernel)) == [] for kernel in module.warp_specialized)
    other = tuple(replace(module.kernel("dq"), name="fwd") if k.name == "fwd" else k for k in module.kernels)
    wrong = ("warp-groups", "it has other arguments than @fwd, for which it stands in")
    for kernel in (kernel for kernel in module.warp_specialized if kernel.stands_for == "fwd"):
        assert wrong in list(_violations(replace(module, kernels=other), kernel))
