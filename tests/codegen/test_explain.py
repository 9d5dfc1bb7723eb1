"""`attngen explain` describes every spec."""

from __future__ import annotations

import pytest
from rich.console import Console

from attngen.cost.report import report
from attngen.cost.roofline import Problem, counts, rows_of_call
from attngen.devices import DEVICES
from attngen.report.explain import explain
from tests.helpers import SPECS, spec, target


@pytest.mark.share(32)
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_is_explained(name: str) -> None:
    made, console = target(name), Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in explain(made, Problem(2, 16, 1 if spec(name).heads.sharing == "mqa" else 4, 4096, 4096), report(made)):
        console.print(part)
    text = console.export_text()
    for device in DEVICES:
        assert f"\n{device} " in text
    for kernel in made.kernels:
        assert f"@{kernel.name} bytes loaded and stored = " in text


def test_gradients_of_keys_are_split_as_a_call_splits_them() -> None:
    """A program of the fused backward, which only Hopper has, sums two of the group's four heads. Elsewhere a program
    sums all four, because there are many heads."""
    found = {
        name: counts(target("causal_gqa"), {"B": 8, "Hq": 32, "Hkv": 8, "group": 4, "Nq": 4096, "Nk": 4096}, d)
        for name, d in DEVICES.items()
    }
    assert {name: (n["_use_fused"], n["splits"]) for name, n in found.items()} == {
        name: (1, 2) if name in ("H100", "H200") else (0, 1) for name in DEVICES
    }


def test_configs_are_chosen_by_the_kernels_number_of_rows() -> None:
    problem = Problem(3, 16, 4, 5, 700)
    module = target("decode_gqa")
    assert [rows_of_call(module.kernel(name), problem) for name in ("decode", "combine", "append")] == [
        4 * 5,
        3 * 16 * 5,
        700,
    ]
