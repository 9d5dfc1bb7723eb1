"""Dropout: kernels keep the weights that the oracle keeps, which have the right distribution and do not depend on
tiles."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.harness import load_module, run_case
from attngen.conformance.oracle import dropout_keep, dropout_weight, philox, relative_error
from attngen.conformance.result import KEYS
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.runtime.dropout import dropout_mask_by
from attngen.verify import verify
from tests.helpers import CUDA, SMALLER, SPECS, built, target
from tests.helpers import spec as spec_of
from tests.test_numerics import dtypes, problem, run, small

pytestmark = pytest.mark.numerics

DROPPING = [name for name in SPECS if spec_of(name).dropout and (CUDA or name not in SMALLER)]
P = [0.0, 1e-6, 0.01, 0.1, 0.2501, 0.5, 0.9, 0.999, 1 - 1e-9]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123_4567_89AB_CDEF]

# Known answers of Philox4x32 with seven rounds, from Random123's kat_vectors: counter, key, result.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), ANSWERS)
def test_the_oracle_has_the_known_answers_of_philox(counter, key, result):
    assert tuple(int(word) for word in philox(tuple(map(torch.tensor, counter)), key)) == result


# ------------------------------------------------------------------------------------------------- the oracle's mask


def zscore(kept: torch.Tensor, p: float) -> float:
    """The distance of the number of kept weights from its mean, in standard deviations."""
    n = kept.numel()
    return float((kept.double().sum() - n * (1 - p)) / math.sqrt(n * p * (1 - p)))


@pytest.mark.share(4)
@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.77, 0.995])
def test_the_rate_is_p(p):
    """The rate holds over all weights, in each head of each sequence, for each query and key, and where queries and
    keys have given last bits."""
    keep = dropout_keep((3, 4, 256, 512), p, 42)
    assert abs(zscore(keep, p)) < 5
    for part in (*keep.flatten(0, 1), *keep.transpose(0, 2), *keep.transpose(0, 3)):
        assert abs(zscore(part, p)) < 5.5
    for q, kv in itertools.product(range(16), range(16)):
        assert abs(zscore(keep[:, :, q::16, kv::16], p)) < 5


@pytest.mark.share(16)
@pytest.mark.parametrize("dropped", [1, 100, 125, 256 * 26 + 3, 65536 - 40])
def test_the_rate_is_met_to_a_65536th(dropped):
    """Thresholds between the 256 of a byte are met by all weights, and by every group of 16 queries."""
    keep, p = dropout_keep((1, 16, 1024, 1024), dropped / 65536, 7), dropped / 65536
    assert abs(zscore(keep, p)) < 5
    for group in keep.unflatten(2, (-1, 16)).transpose(0, 2):
        assert abs(zscore(group, p)) < 5.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_and_columns_are_binomial(p):
    """The number of kept weights of a query, and of a key, has the variance of independent samples."""
    keep = dropout_keep((2, 4, 512, 512), p, 5).double()
    for sums in (keep.sum(3).flatten(), keep.sum(2).flatten()):
        spread = float(sums.var() / (512 * p * (1 - p)))
        assert abs(spread - 1) < 5 * math.sqrt(2 / len(sums))


@pytest.mark.share(16)
def test_scores_of_a_word_share_a_byte():
    """(q, kv) and (q, kv ^ 8), or (q ^ 8, kv ^ 8), are correlated by 1 / 257 at this rate; other pairs of a call of
    Philox are not."""
    dropped, n = 257 * 26, 2048  # with the same number of 256ths in both bytes
    p = dropped / 65536
    drop = dropout_keep((1, 1, n, n), p, 21)[0, 0].logical_not().double() - p
    index, deviations = torch.arange(n), 5 / math.sqrt(n * n / 2)  # a pair is counted twice
    for dq, dkv in itertools.product((0, 1, 8, 9), (0, 1, 8, 9)):
        if (dq, dkv) != (0, 0):
            correlation = float((drop * drop[index ^ dq][:, index ^ dkv]).mean() / (p * (1 - p)))
            expected = 1 / 257 if (dq, dkv) in ((0, 8), (8, 8)) else 0.0
            assert abs(correlation - expected) < deviations, (dq, dkv)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """Weights at small distances in q, kv, h or b are independent, also within one call of Philox, and so are those
    of neighbouring seeds.

    At a distance of 8 keys, or of 8 queries and 8 keys, some weights share a byte: they may be correlated, by 1 / 256
    at most.
    """
    keep = dropout_keep((2, 3, 256, 512), p, 11).double() - (1 - p)
    others = [dropout_keep((2, 3, 256, 512), p, seed).double() - (1 - p) for seed in (12, 11 + 2**32, -11)]
    pairs = [(keep, other, 0.0, 0.0) for other in others]  # (one mask, another, their least and greatest correlation)
    for dim, step in itertools.product(range(4), (1, 2, 7, 8, 9, 16, 64)):
        if step < keep.shape[dim]:
            n = keep.shape[dim] - step
            pairs.append(
                (keep.narrow(dim, 0, n), keep.narrow(dim, step, n), 0.0, 1 / 256 if (dim, step) == (3, 8) else 0.0)
            )
    for dq, dkv in ((1, 1), (8, 8), (1, 8), (8, 1), (9, 9), (3, 5)):
        most = 1 / 256 if (dq, dkv) == (8, 8) else 0.0
        pairs.append((keep[:, :, :-dq, :-dkv], keep[:, :, dq:, dkv:], 0.0, most))
        pairs.append((keep[:, :, :-dq, dkv:], keep[:, :, dq:, :-dkv], 0.0, most))
    pairs.append((keep[..., :256], keep[..., :256].transpose(2, 3), 1 / 256, 1 / 256))  # the diagonal is itself
    for a, b, least, most in pairs:
        correlation, noise = float((a * b).mean() / (p * (1 - p))), 5 / math.sqrt(a.numel())
        assert least - noise < correlation < most + noise


# ------------------------------------------------------------------------------------------------- the kernels' mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", P)
def test_what_kernels_keep_is_what_the_oracle_says(p, seed, device):
    shape = (2, 3, 50, 70)
    keep = built(DROPPING[0]).attention.dropout_mask(shape, p, seed, device)
    assert keep.equal(dropout_keep(shape, p, seed, device))


def test_the_mask_is_where_kernels_run_unless_a_call_says_where(device):
    dropout_mask = built(DROPPING[0]).attention.dropout_mask
    on_seed = torch.tensor(3, device=device)
    assert (
        dropout_mask((1, 1, 2, 3), 0.5, 3).device.type
        == dropout_mask((1, 1, 2, 3), 0.5, on_seed).device.type
        == torch.device(device).type
    )
    other = "meta" if CUDA else "cuda"
    with pytest.raises(
        ValueError,
        match=rf"^attention.dropout_mask: device is {other}; expected a CUDA device that this machine has, or TRITON",
    ):
        dropout_mask((1, 1, 2, 3), 0.5, 3, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 40_000, 1, 1), (70_000, 1, 3, 2), (1, 1, 2_200_000, 1), (1, 1, 1, 2_200_000)])
def test_a_mask_of_more_tiles_than_the_smaller_axes_of_a_grid_have(shape, device):
    assert built(DROPPING[0]).attention.dropout_mask(shape, 0.5, 7, device).equal(dropout_keep(shape, 0.5, 7, device))


def test_the_mask_is_drawn_by_a_grid_of_one_axis():
    """CUDA has 65,535 programs at most along the second and third axis of a grid, and 2**31 - 1 along the first."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    dropout_mask_by(Kernel())((70_000, 3, 33, 100), 0.5, 1, "cpu")
    assert grids == [(70_000 * 3 * 2 * 4,)]


@pytest.mark.parametrize("name", DROPPING)
def test_the_mask_of_the_weights_themselves(name, device):
    """With v the identity, the output is the weights after dropout."""
    spec, attention = spec_of(name), built(name).attention
    n = spec.head_dim.v
    q, k, _, inputs = make_inputs(spec, Case(1, *heads_for(spec), n, n), torch.float16, device)
    inputs = {i: torch.ones_like(x) for i, x in inputs.items()}
    v = torch.eye(n, dtype=q.dtype, device=device).expand(1, k.shape[1], n, n)
    weights = attention(q, k, v, **inputs, scale=1e-6)
    dropped = attention(q, k, v, **inputs, scale=1e-6, dropout_p=0.3, seed=5)
    assert (weights > 0).any()
    kept = dropout_keep((*q.shape[:3], n), 0.3, 5, device)
    assert ((dropped > 0) == ((weights > 0) & kept)).all()
    torch.testing.assert_close(dropped, weights * kept / (1 - round(0.3 * 65536) / 65536), atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 0.97])
@pytest.mark.parametrize("name", DROPPING)
def test_gradients_at_any_rate(name, p, device):
    result = run_case(built(name), spec_of(name), small(name, 100, 130), dtypes(name)[0], device, dropout_p=p)
    assert result.ok, str(result)


@pytest.mark.share(16)
def test_the_mask_does_not_depend_on_tiles(device, tmp_path):
    """A schedule with other tiles drops the same weights."""
    text = print_module(target(DROPPING[0]))
    mine = f"  {built(DROPPING[0]).runtime.device_class(built(DROPPING[0]).kernels, torch.device(device))} bytes=2"
    lines = [line for line in text.splitlines() if not line.startswith(mine) or "backend=" in line]
    tiles = {"fwd": (32, 16), "delta": (64, 64), "dkdv": (16, 64), "dq": (64, 16), "dq_end": (32, 32), "jvp": (64, 32)}
    tiles |= {"dkdv_end": (16, 16)} if "schedule @dkdv_end" in lines else {}
    for kernel, (q, kv) in tiles.items():
        at = lines.index(f"schedule @{kernel}")
        lines.insert(at + 1, f"{mine} rows<=inf : BLOCK_Q={q} BLOCK_KV={kv} num_warps=4 num_stages=1")
    module = verify(parse_module("\n".join(lines), "edited.ir"))
    write_module(render(module), Path(tmp_path) / "other")
    name = DROPPING[0]
    leaves, inputs, grads = problem(name, small(name, 90, 120), device)
    first = run(name, leaves, inputs, grads, dropout_p=0.4, seed=9)
    out, lse = load_module(tmp_path / "other").attention(*leaves, **inputs, dropout_p=0.4, seed=9, return_lse=True)
    second = dict(zip(KEYS, (out, lse, *torch.autograd.grad((out, lse), leaves, grads))))
    for key in KEYS:
        assert relative_error(first[key], second[key]) < 4 * torch.finfo(first["out"].dtype).eps, key


# ------------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("name", DROPPING)
def test_seeds(name, device):
    """A seed comes from torch's generator unless it is given, as an int or a tensor alike; a rate of 0 takes none."""
    (q, k, v), inputs, _ = problem(name, small(name), device)
    attention = built(name).attention

    def call(**options):
        return attention(q, k, v, **inputs, dropout_p=0.5, **options)

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert call().equal(first) and not second.equal(first)
    assert call(seed=3).equal(call(seed=torch.tensor([3], device=device)))
    assert not call(seed=3).equal(call(seed=4)) and not call(seed=3).equal(call(seed=3 + 2**32))
    torch.manual_seed(1)
    attention(q, k, v, **inputs, dropout_p=0.0)
    assert call().equal(first)
    assert attention(q, k, v, **inputs, dropout_p=0.0).equal(attention(q, k, v, **inputs))


@pytest.mark.parametrize("name", DROPPING)
def test_the_module_drops_in_training_alone(name, device):
    (q, k, v), inputs, _ = problem(name, small(name), device)
    module = built(name).Attention(dropout_p=0.5)
    assert "dropout_p=0.5" in repr(module)
    assert module(q, k, v, **inputs, seed=3).equal(built(name).attention(q, k, v, **inputs, dropout_p=0.5, seed=3))
    assert module.eval()(q, k, v, **inputs).equal(built(name).attention(q, k, v, **inputs))


def test_the_mean_over_seeds_is_attention_without_dropout(device):
    name = DROPPING[0]
    (q, k, v), inputs, _ = problem(name, small(name, 33, 33, batch=1), device)
    outs = [built(name).attention(q, k, v, **inputs, dropout_p=0.3, seed=seed).double() for seed in range(100)]
    mean, spread = torch.stack(outs).mean(0), torch.stack(outs).std(0) / math.sqrt(100)
    exact = built(name).attention(q, k, v, **inputs).double()
    assert ((mean - exact).abs() < 6 * spread + 2e-3).all()


WRONG = [
    ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; expected 0 <= dropout_p < 1"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1; expected"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p is nan; expected"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p is a str; expected a number"),
    ({"dropout_p": True}, TypeError, "dropout_p is a bool; expected a number"),
    ({"seed": 1.5}, TypeError, "seed is a float; expected an int, an int64 tensor of one element, or None"),
    ({"seed": 2**63}, ValueError, "seed is 9223372036854775808; expected an int of 64 bits"),
    (
        {"seed": torch.tensor([1, 2])},
        ValueError,
        r"seed is torch.int64 \[2\] on cpu; expected torch.int64, one element",
    ),
    ({"seed": torch.tensor(1.0)}, ValueError, r"seed is torch.float32 \[\] on cpu; expected torch.int64"),
]


@pytest.mark.parametrize(("options", "kind", "sentence"), WRONG, ids=[str(w[2])[:30] for w in WRONG])
def test_wrong_calls(options, kind, sentence, device):
    (q, k, v), inputs, _ = problem(DROPPING[0], small(DROPPING[0]), device)
    with pytest.raises(kind, match=f"^attention: {sentence}"):
        built(DROPPING[0]).attention(q, k, v, **inputs, **options)


def test_dropout_weight_is_unbiased():
    for p in (0.1, 0.37):
        weight = dropout_weight((1, 4, 512, 512), p, 3)
        assert abs(float(weight.mean()) - 1) < 0.01
