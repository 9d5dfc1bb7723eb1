"""A wrong call of a generated module gets one sentence, with the argument, its type or value, and what was expected."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.harness import load_module
from tests.helpers import FEW, ROOT, built, spec

pytestmark = pytest.mark.numerics

Arguments = dict[str, Any]


def arguments(name: str, device: str) -> Arguments:
    """The arguments of a correct call of the module: 4 query heads, 40 queries, 50 keys."""
    case = Case(2, *heads_for(spec(name)), 40, 50)
    q, k, v, inputs = make_inputs(spec(name), case, built(name).DTYPES[-1], device)
    return {"q": q, "k": k, "v": v, **inputs}


def rows_apart(x: torch.Tensor, step: int) -> torch.Tensor:
    """A tensor of the shape of x whose rows have the stride `step`."""
    reach = (x.shape[2] - 1) * step + x.shape[3]
    return torch.zeros(reach, dtype=x.dtype, device=x.device).as_strided(x.shape, (0, 0, step, 1))


# (module, the change that makes the call wrong, class of the error, its sentence)
WRONG: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], str]] = [
    ("causal_mqa", lambda a: {"q": [1.0]}, TypeError, r"q is a list; expected a dense tensor \[B, Hq, Nq, 64\]"),
    ("causal_mqa", lambda a: {"k": None}, TypeError, r"k is a NoneType; expected a dense tensor \[B, 1, Nk, 64\]"),
    (
        "causal_mha",
        lambda a: {"v": a["v"].cpu().numpy()},
        TypeError,
        r"v is a ndarray; expected a dense tensor \[B, Hq, Nk, 128\]",
    ),
    (
        "causal_mqa",
        lambda a: {"k": a["k"].to_sparse()},
        TypeError,
        r"k is a torch.sparse_coo tensor; expected a dense tensor",
    ),
    ("causal_mqa", lambda a: {"q": a["q"][0]}, ValueError, r"q has shape \[4, 40, 64\]; expected \[B, Hq, Nq, 64\]"),
    (
        "causal_mqa",
        lambda a: {"q": a["q"][..., :32]},
        ValueError,
        r"q has shape \[2, 4, 40, 32\]; expected \[B, Hq, Nq, 64\]",
    ),
    ("mla_dims", lambda a: {"v": a["k"]}, ValueError, r"v has shape \[2, 4, 50, 192\]; expected \[B, Hq, Nk, 128\]"),
    (
        "causal_gqa",
        lambda a: {"v": a["v"].mT},
        ValueError,
        r"v has shape \[2, 2, 128, 50\]; expected \[B, Hkv, Nk, 128\]",
    ),
    (
        "causal_mqa",
        lambda a: {"q": a["q"].float()},
        TypeError,
        r"q is torch.float32; expected torch.bfloat16 or torch.float16, which",
    ),
    (
        "causal_fp32",
        lambda a: {"v": a["v"].half()},
        TypeError,
        r"v is torch.float16; expected torch.float32, which this module was",
    ),
    (
        "causal_mqa",
        lambda a: {"v": a["v"].bfloat16()},
        TypeError,
        r"v is torch.bfloat16 and q torch.float16; expected one dtype",
    ),
    (
        "causal_mqa",
        lambda a: {"k": a["k"].to("meta")},
        ValueError,
        r"k is on meta and q on \w+(:0)?; expected one device",
    ),
    (
        "causal_mqa",
        lambda a: {x: a[x].to("meta") for x in "qkv"},
        ValueError,
        r"q is on meta; expected a CUDA device, or TRITON_INTERPRET=1 in the environment",
    ),
    (
        "causal_mqa",
        lambda a: {"q": a["q"][..., None].expand(*a["q"].shape, 2)[..., 0].repeat_interleave(2, 3)[..., ::2]},
        ValueError,
        r"the last dimension of q has stride 2; expected 1: call .contiguous\(\)",
    ),
    (
        "causal_mqa",
        lambda a: {"k": a["k"][:, :, :1].expand(-1, -1, 2**29, -1)},
        ValueError,
        r"k has 536870912 rows; expected at most 2\*\*29 - 1",
    ),
    (
        "causal_mqa",
        lambda a: {"k": a["k"][:1], "v": a["v"][:1]},
        ValueError,
        (
            r"q, k and v have shapes \[2, 4, 40, 64\], \[1, 1, 50, 64\] and \[1, 1, 50, 64\]; expected one batch size, "
            r"and one number of"
        ),
    ),
    (
        "causal_mqa",
        lambda a: {"v": a["v"][:, :, :49]},
        ValueError,
        r".* and \[2, 1, 49, 64\]; expected one batch size, and one number of",
    ),
    (
        "causal_mha",
        lambda a: {"k": a["k"][:, :2], "v": a["v"][:, :2]},
        ValueError,
        r"q has 4 heads and k 2; expected as many \(the spec says mha\)",
    ),
    (
        "causal_mqa",
        lambda a: {"k": a["k"].expand(2, 2, 50, 64), "v": a["v"].expand(2, 2, 50, 64)},
        ValueError,
        r"q has 4 heads and k 2; expected one K/V head \(the spec says mqa\)",
    ),
    (
        "causal_gqa",
        lambda a: {"q": a["q"][:, :3]},
        ValueError,
        r"q has 3 heads and k 2; expected a multiple of the K/V heads \(the spec says gqa\)",
    ),
    (
        "causal_gqa",
        lambda a: {"k": a["k"][:, :0], "v": a["v"][:, :0]},
        ValueError,
        r"q has 4 heads and k 0; expected a multiple",
    ),
    (
        "padding_mha",
        lambda a: {"key_padding": [True] * 50},
        TypeError,
        r"key_padding is a list; expected a dense torch.bool tensor \[2, 50\]: True where a key may be attended to",
    ),
    (
        "padding_mha",
        lambda a: {"key_padding": None},
        TypeError,
        r"key_padding is a NoneType; expected a dense torch.bool tensor \[2, 50\]",
    ),
    (
        "padding_mha",
        lambda a: {"key_padding": a["key_padding"].float()},
        TypeError,
        r"key_padding is torch.float32; expected torch.bool",
    ),
    (
        "padding_mha",
        lambda a: {"key_padding": a["key_padding"][:, :40]},
        ValueError,
        r"key_padding has shape \[2, 40\]; expected \[2, 50\]",
    ),
    (
        "padding_mha",
        lambda a: {"key_padding": a["key_padding"].to("meta")},
        ValueError,
        r"key_padding is on meta and q on",
    ),
    (
        "causal_padding_gqa",
        lambda a: {"kv_lengths": a["kv_lengths"].short()},
        TypeError,
        r"kv_lengths is torch.int16; expected torch.int32 or torch.int64 \[2\]: number of keys",
    ),
    (
        "causal_padding_gqa",
        lambda a: {"kv_lengths": a["kv_lengths"][:1]},
        ValueError,
        r"kv_lengths has shape \[1\]; expected \[2\]",
    ),
    (
        "causal_mqa",
        lambda a: {"scale": "0.1"},
        TypeError,
        r"scale is a str; expected a number, or None for 1/sqrt\(64\)",
    ),
    ("causal_mqa", lambda a: {"scale": torch.tensor(0.1)}, TypeError, r"scale is a Tensor; expected a number, or None"),
    ("causal_mqa", lambda a: {"scale": True}, TypeError, r"scale is a bool; expected a number, or None"),
    (
        "causal_mqa",
        lambda a: {"scale": 0},
        ValueError,
        r"scale is 0; expected a number from 1e-30 to 1e6, or None for 1/sqrt\(64\)",
    ),
    ("causal_mqa", lambda a: {"scale": -0.1}, ValueError, r"scale is -0.1; expected a number from"),
    ("causal_mqa", lambda a: {"scale": 1e-40}, ValueError, r"scale is 1e-40; expected a number from"),
    ("causal_mqa", lambda a: {"scale": float("nan")}, ValueError, r"scale is nan; expected a number from"),
    ("causal_mqa", lambda a: {"scale": float("inf")}, ValueError, r"scale is inf; expected a number from"),
]


@pytest.mark.parametrize(("name", "change", "kind", "sentence"), WRONG, ids=[f"{n}: {s[:40]}" for n, _, _, s in WRONG])
def test_a_wrong_call_is_one_sentence(
    name: str, change: Callable[[Arguments], Arguments], kind: type[Exception], sentence: str, device: str
) -> None:
    right = arguments(name, device)
    built(name).attention(**right)
    with pytest.raises(kind) as caught:
        built(name).attention(**{**right, **change(right)})
    assert type(caught.value) is kind
    assert re.match(f"attention: {sentence}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("causal_padding_gqa", {}, "missing 1 required keyword-only argument: 'kv_lengths'"),
        ("padding_mha", {}, "attention: key_padding is a NoneType; expected a dense torch.bool tensor"),
        ("causal_mqa", {"key_padding": None}, "key_padding is no argument; expected q, k, v, .*`mask: key_padding`"),
    ],
)
def test_python_names_arguments_that_are_missing_or_unknown(
    name: str, change: Arguments, sentence: str, device: str
) -> None:
    right = arguments(name, device)
    qkv = {x: right[x] for x in "qkv"}
    for call in (built(name).attention, built(name).Attention()):
        with pytest.raises(TypeError, match=sentence):
            call(**qkv, **change)


@pytest.mark.share(16)
def test_without_the_interpreter_a_cpu_tensor_is_refused() -> None:
    """The calls run in a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    code = """
import torch
from generated import causal_mqa, document_gqa
q, k = torch.zeros(1, 2, 8, 64, dtype=torch.float16), torch.zeros(1, 1, 8, 64, dtype=torch.float16)
ids = torch.zeros(1, 8, dtype=torch.int32)
for call in (lambda: causal_mqa.attention(q, k, k), lambda: document_gqa.attention.plan(ids, 8)):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    refusal = (
        "attention: {} is on cpu; expected a CUDA device, or TRITON_INTERPRET=1 in the environment before Triton is "
        "imported, to run on the CPU in Triton's interpreter\n"
    )
    assert done.stdout == refusal.format("q") + refusal.format("document_ids"), done.stderr


def test_what_is_odd_but_right_is_accepted(device: str) -> None:
    """Strides of dimensions of size 1 do not matter; rows may have any stride; scales may be tiny or huge."""
    right = arguments("padding_mha", device)
    one = {**right, "q": rows_apart(right["q"][:, :, :1], 2**24)}
    assert built("padding_mha").attention(**one).shape == (2, 4, 1, 64)
    single = {
        "q": right["q"],
        "k": right["k"][:, :, :1],
        "v": right["v"][:, :, :1],
        "key_padding": right["key_padding"][:, 3:4],
    }
    assert built("padding_mha").attention(**single).shape == (2, 4, 40, 64)
    apart = {x: rows_apart(right[x][:, :, :2], 2**23 + 8).requires_grad_() for x in "qkv"}
    out = built("padding_mha").attention(**apart, key_padding=right["key_padding"][:, :2])
    assert [x.shape for x in torch.autograd.grad(out.sum(), tuple(apart.values()))] == [(2, 4, 2, 64)] * 3
    negative = {**right, "q": torch._neg_view(right["q"])}  # a lazily negated view, as `z.conj().imag` is
    assert (
        built("padding_mha").attention(**negative).equal(built("padding_mha").attention(**{**right, "q": -right["q"]}))
    )
    for scale in (1e-30, 1e6, np.float32(0.1), np.int64(1)):
        assert built("padding_mha").attention(**right, scale=scale).isfinite().all()
    q = right["q"].detach().requires_grad_()
    _, lse = built("padding_mha").attention(**{**right, "q": q}, return_lse=True)
    ones = torch.ones_like(lse)
    lazy, plain = (torch.autograd.grad(lse, q, grad, retain_graph=True)[0] for grad in (torch._neg_view(ones), -ones))
    assert lazy.equal(plain)


def results(module: Any, made: Arguments, options: Arguments) -> list[torch.Tensor]:
    """The results of a call, and the gradients of q, k and v."""
    leaves = {x: made[x].detach().requires_grad_() for x in "qkv"}
    out, lse = module.attention(**{**made, **leaves}, **options, return_lse=True)
    return [out, lse, *torch.autograd.grad(out.float().square().sum(), tuple(leaves.values()))]


@pytest.mark.parametrize("name", FEW)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    first=st.integers(1, 40),
    steps=st.lists(st.integers(1, 33), min_size=1, max_size=3),
    queries=st.integers(1, 20),
    cached=st.booleans(),
)
def test_calls_with_ever_more_keys_are_as_those_of_a_fresh_module(
    name: str, device: str, first: int, steps: list[int], queries: int, cached: bool
) -> None:
    """Each call of a loop that decodes gives the results of a freshly imported module.

    One module takes all calls, including those of other examples. The keys of a call are a new tensor, or the first
    rows of a cache, whose strides stay the same.
    """
    lengths = [first + sum(steps[:at]) for at in range(len(steps) + 1)]
    options = {"dropout_p": 0.3, "seed": 5} if spec(name).dropout else {}
    q, k, v, _ = make_inputs(
        spec(name), Case(1, *heads_for(spec(name), 2), queries, lengths[-1]), built(name).DTYPES[-1], device
    )
    for n in lengths:
        *_, inputs = make_inputs(
            spec(name), Case(1, *heads_for(spec(name), 2), queries, n), built(name).DTYPES[-1], device
        )
        keys = {"k": k[:, :, :n], "v": v[:, :, :n]}
        made = {
            "q": q,
            **(keys if cached else {x: y.clone(memory_format=torch.contiguous_format) for x, y in keys.items()}),
            **inputs,
        }
        fresh = load_module(ROOT / "generated" / name)
        assert all(
            a.equal(b) for a, b in zip(results(built(name), made, options), results(fresh, made, options), strict=True)
        ), n
