"""Head_dims of 264 to 512: all results and gradients, with one program for all columns of an accumulator, and with
several programs (split-D)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import load_module, run_case
from attngen.conformance.kv_cache import cache_cases, run_cache_case
from attngen.cost.flops import executed_flops, useful_flops
from attngen.cost.io import hbm_bytes
from attngen.cost.roofline import Problem, config_for, values
from attngen.cost.split_d import split_d_costs
from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError
from attngen.heuristics import LEAST_SHARED
from attngen.ir import Config, Kernel, Module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.tiles.sizes import block_d_choices, tile_width
from attngen.tiles.tiles import evaluate
from tests.helpers import target

pytestmark = pytest.mark.numerics

WIDTHS: list[Any] = [264, 320, 384, 512, {"qk": 512, "v": 64}, {"qk": 320, "v": 512}]
# Specs whose kernels have more outputs, reductions or dropout bits in addition to the columns of their accumulators.
MORE: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "window, softcap": {
        "mask": {"sliding_window": {"left": 40, "right": 0}},
        "score": {"softcap": 20.0},
        "heads": {"sharing": "gqa"},
    },
    "dropout, outputs": {
        "mask": "none",
        "dropout": True,
        "outputs": ["lse", "max_score", "key_mass"],
        "heads": {"sharing": "mqa"},
    },
    "entropy, sink": {"mask": "causal", "score": "sink", "outputs": ["lse", "entropy"]},
    "learned": {
        "mask": {"key_padding": {"lengths": True}},
        "score": {
            "expr": "s * t[h, q_idx] + table[h, clamp(q_idx - kv_idx, -8, 8) + 8] + pairs[b, h, q_idx, kv_idx]",
            "params": {
                "t": {"tensor": ["H", "Nq"], "grad": True},
                "table": {"tensor": ["H", 17], "grad": True},
                "pairs": {"tensor": ["B", "H", "Nq", "Nk"], "grad": True},
            },
        },
    },
    "lists": {"mask": {"all_of": ["causal", {"block_sparse": {"block": 16}}]}, "heads": {"sharing": "gqa"}},
}


def wide(head_dim: Any, more: str, **others: Any) -> Spec:
    return make_spec({"name": "wide", "head_dim": head_dim, "dtype": ["fp16"], **MORE[more], **others})


def in_parts(module: Module, columns: int) -> Module:
    """Return the module with a number of accumulator columns per program, limited to the head_dim, in tiles that fit
    all devices.
    """

    def change(kernel: Kernel, config: Any) -> Any:
        most = block_d_choices(module, kernel)[0]
        if not isinstance(config, Config):
            return config
        return replace(
            config,
            columns=min(columns, most),
            block_q=min(config.block_q, 32),
            block_kv=min(config.block_kv, 32),
            num_stages=1,
        )

    schedules = (
        (name, tuple(change(module.kernel(name), config) for config in rows)) for name, rows in module.schedules
    )
    return replace(module, schedules=tuple(schedules))


def written(module: Module, folder: Path) -> ModuleType:
    write_module(render(module), folder)
    return load_module(folder)


CASES = [(dim, "causal", (65, 65)) for dim in WIDTHS]
CASES += [(264, more, (17, 40)) for more in MORE if more != "causal"] + [
    (512, "causal", (1, 70)),
    (512, "window, softcap", (70, 40)),
]


@pytest.mark.share(64)
@pytest.mark.parametrize("columns", [512, 128])
@pytest.mark.parametrize(("head_dim", "more", "sizes"), CASES, ids=str)
def test_results_and_gradients(
    head_dim: Any, more: str, sizes: tuple[int, int], columns: int, tmp_path: Path, device: str
) -> None:
    """Results and gradients are right for ragged lengths, fewer and more keys than queries, and rows that see nothing,
    with one to four programs for all columns."""
    spec = wide(head_dim, more)
    module = written(in_parts(lower(spec), columns), tmp_path / "wide")
    result = run_case(module, spec, Case(1, *heads_for(spec), *sizes), "fp16", device)
    assert result.ok, str(result)


@pytest.mark.share(8)
@pytest.mark.parametrize("columns", [512, 256])
def test_element_types_of_32_bits(columns: int, tmp_path: Path, device: str) -> None:
    spec = wide(320, "causal", dtype=["fp32"])
    module = written(in_parts(lower(spec), columns), tmp_path / "wide")
    result = run_case(module, spec, Case(1, *heads_for(spec), 40, 50), "fp32", device)
    assert result.ok, str(result)


@pytest.mark.share(64)
def test_parts_give_the_same_bits(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program computes the same weights, so results do not depend on how many programs split the columns.

    The interpreter multiplies with BLAS, whose order of sums depends on the CPU and on the number of columns, so the
    test replaces it.
    """
    import torch

    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype)))
    spec, found = wide(512, "causal"), []
    for columns in (512, 256, 128):
        module = written(in_parts(lower(spec), columns), tmp_path / f"of_{columns}")
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, h, 70, 512, dtype=torch.float16, device=device, requires_grad=True) for h in (4, 2, 2)
        )
        out, lse = module.attention(q, k, v, return_lse=True)
        found.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "cache", ["contiguous", {"paged": {"page_size": 16}}, {"paged": {"page_size": 64}, "dtype": "fp8_e4m3"}], ids=str
)
def test_calls_with_a_cache(cache: Any, tmp_path: Path, device: str) -> None:
    """Programs with few queries have all columns."""
    spec = wide(512, "causal", cache=cache, backward=False)
    module = written(lower(spec), tmp_path / "wide")
    for case in cache_cases(spec, False)[:2]:
        result = run_cache_case(module, spec, case, "fp16", device)
        assert result.ok, str(result)


def test_every_device_has_rows() -> None:
    """All device classes have configs for 16-bit kernels, forward and backward. Columns are split only if all of them
    do not fit or are slower."""
    made = target("causal_d512_gqa")
    for kernel in made.kernels:
        rows = {config.device: config for config in made.configs(kernel.name)}
        assert rows.keys() == CLASSES.keys() and not made.not_fitting(kernel.name)
        assert {config.columns for config in rows.values()} <= set(block_d_choices(made, kernel))
    assert {config.columns for config in made.configs("fwd")} == {512, 256}


def test_what_is_computed_again_counts() -> None:
    made, problem = target("causal_d512_gqa"), Problem(q_heads=8, kv_heads=2, n_q=4096, n_kv=4096)
    kernel = made.kernel("fwd")
    row = config_for(made, kernel, DEVICES["H200"], problem.n_q)
    assert row is not None
    whole, half = ({**values(made, kernel, replace(row, columns=n), problem)} for n in (512, 256))
    flops, moved = (
        [float(evaluate(formula(kernel), numbers)) for numbers in (whole, half)]
        for formula in (executed_flops, hbm_bytes)
    )
    assert flops[1] == 1.5 * flops[0]  # two products of 512 columns become two of 512 and two of 256
    assert 1.4 < moved[1] / moved[0] < 1.6
    assert float(evaluate(useful_flops(made, "forward"), half)) == flops[0]


def test_explain_says_what_parts_cost() -> None:
    said = list(split_d_costs(target("causal_d512_gqa"), Problem(q_heads=8, kv_heads=2, n_q=4096, n_kv=4096)))
    assert "@fwd on A100, MI300X: a program holds all 512 columns of its sum." in said
    costs = "1.50 times the FLOPs and 1.50 times the bytes loaded and stored of one program with all columns."
    shared = "2 programs split the 512 columns of a sum, and each computes all scores: they take"
    assert f"@fwd on H100, H200, B200: {shared} {costs}" in said
    assert not list(split_d_costs(target("causal_d256"), Problem()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 520}, "is 520; expected at most 512, or `kv: {latent: ...}` as well"),
        ({"schedule": {"order": "kv_outer"}}, "holds dK and dV whose head_dims are at most 256 together"),
        (
            {"schedule": {"backend": "hopper"}},
            "its head_dim is 512, and an accumulator of more than 256 columns takes all registers of a consumer",
        ),
    ],
)
def test_what_wide_heads_cannot_is_one_sentence(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(AttngenError) as error:
        lower(make_spec({"name": "wide", "head_dim": 512, "mask": "causal", **changes}))
    assert reason in str(error.value)


def test_parts_are_no_narrower_than_they_are_worth() -> None:
    made = target("causal_d512_gqa")
    for kernel in made.kernels:
        assert all(n == 0 or LEAST_SHARED <= n <= tile_width(512) for n in block_d_choices(made, kernel))
