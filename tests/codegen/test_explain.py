"""`attngen explain` describes every spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from attngen.cost.calls import call, ranges
from attngen.cost.report import report
from attngen.cost.roofline import Problem, counts, rows_of_call
from attngen.devices import CLASSES, DEVICES
from attngen.ir.heads import SHARINGS
from attngen.report.explain import explain
from tests.helpers import SPECS, target


@pytest.mark.share(32)
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_is_explained(name: str) -> None:
    made, console = target(name), Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    problem = Problem(2, 16, SHARINGS[made.sharing].kv_heads(16, 4), 4096, 4096)
    for part in explain(made, problem, report(made), parts=("kernels", "formulas", "loops")):
        console.print(part)
    text = console.export_text()
    for device in DEVICES:
        assert text.count(f"\n{device} ") >= 2  # of the call, and of its kernels
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


def test_a_call_launches_the_kernels_that_run_on_the_device() -> None:
    """On Hopper they are warp-specialized, and the backward is fused; short calls run the portable kernels."""
    module, problem = target("causal_gqa"), Problem(1, 16, 4)

    def run(name: str, device: str, problem: Problem) -> list[tuple[str, str]]:
        found = call(module, name, DEVICES[device], problem)
        assert found is not None and found.seconds == sum(r.estimate.seconds for r in found.runs)
        return [(r.made.name, r.config.backend) for r in found.runs if r.kernel.traits.dots]

    assert run("forward", "H100", problem) == [("fwd", "hopper")] and run("forward", "A100", problem) == [
        ("fwd", "triton")
    ]
    assert run("backward", "H100", problem) == [("bwd", "hopper")]
    assert run("backward", "A100", problem) == [("dq", "triton"), ("dkdv", "triton")]
    assert run("forward", "H100", replace(problem, n_q=1)) == [("packed", "triton")]
    assert run("backward", "H100", replace(problem, n_q=128, n_kv=128)) == [("dq", "triton"), ("dkdv", "triton")]
    fused, separate = (call(module, "backward", DEVICES[d], problem) for d in ("H100", "A100"))
    assert fused and separate and fused.flops < 0.75 * separate.flops  # 5 products, and 7
    assert fused.extra_bytes > 4 * 16 * 16384 * 128 > separate.extra_bytes  # sums of dQ in fp32


def test_ranges_of_rows_meet_and_end_with_any_number() -> None:
    for name in ("causal_gqa", "causal_mqa", "decode_mla"):
        for kernel in target(name).kernels:
            for cls in CLASSES:
                found = ranges(target(name), kernel, cls)
                assert all(a.most == b.least for a, b in zip(found, found[1:]))
                assert not found or (found[-1].most is None and (found[0].least == 0 or kernel.traits.adds_in_order))


def test_configs_are_chosen_by_the_kernels_number_of_rows() -> None:
    problem = Problem(3, 16, 4, 5, 700)
    module = target("decode_gqa")
    assert [rows_of_call(module.kernel(name), problem) for name in ("decode", "combine", "append")] == [
        4 * 5,
        3 * 16 * 5,
        700,
    ]
