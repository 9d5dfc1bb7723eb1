"""Every mask and score modifier in small modules, built here, end to end: forward and all gradients against the oracle.

Parameters are small enough to cut through small tiles, in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import reference_mask
from attngen.errors import SpecError
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from tests.helpers import module_of
from tests.mask_specs import FREE, GQA, HEAD, INT, SPECS, Built, builder, case, ints, spec

pytestmark = pytest.mark.numerics


CASES = [(name, size) for name, (_, sizes) in SPECS.items() for size in sizes]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Modules of the specs, each built once."""
    return builder(tmp_path_factory.mktemp("masks"))


# ---------------------------------------------------------------------------------------------- against the oracle


@pytest.mark.share(4)
@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name}-{n}x{m}" for name, (n, m) in CASES])
def test_against_the_oracle(name: str, size: tuple[int, int], built: Built, device: str) -> None:
    """out, lse, dq, dk, dv, and the gradients of all gradient inputs are right."""
    result = run_case(
        built(name), spec(name), case(name, *size, batch=1 if SPECS[name][0].get("heads") else 2), "fp16", device
    )
    assert result.ok, str(result)
    assert {f"d{i.name}" for i in spec(name).inputs() if i.grad} <= result.ours.keys()


# Unusual but valid arguments: (spec, sizes, arguments).
ODD: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "ids in any order": (
        "documents",
        (40, 50),
        {"document_ids": torch.arange(50, dtype=torch.int32).mul(7).remainder(5)[None].repeat(2, 1)},
    ),
    "every key its own": (
        "documents",
        (20, 20),
        {"document_ids": torch.arange(20, dtype=torch.int32).flip(0)[None].repeat(2, 1)},
    ),
    "large ids": ("documents", (20, 20), {"document_ids": ints([2**31 - 1] * 12 + [-(2**31)] * 8, [0] * 20)}),
    "more queries than keys": ("documents", (50, 20), {"document_ids": ints([3] * 20, [1] * 9 + [2] * 11)}),
    "one document": ("packed_causal", (33, 50), {"cu_seqlens_q": ints(0, 33), "cu_seqlens_kv": ints(0, 50)}),
    "documents without rows": (
        "packed_causal",
        (33, 50),
        {"cu_seqlens_q": ints(0, 0, 17, 17, 33), "cu_seqlens_kv": ints(0, 9, 9, 30, 50)},
    ),
    "rows after the last document": (
        "packed",
        (33, 50),
        {"cu_seqlens_q": ints(0, 7, 20), "cu_seqlens_kv": ints(0, 20, 33)},
    ),
    "more queries than keys in one": (
        "packed_causal",
        (33, 50),
        {"cu_seqlens_q": ints(0, 24, 33), "cu_seqlens_kv": ints(0, 4, 50)},
    ),
    "no prefix, and one beyond the end": ("prefix_per_batch", (20, 33), {"prefix_length": ints(0, 1000)}),
    "a prefix beyond the end": ("prefix_argument", (20, 33), {"prefix_length": 2**30 - 1}),
    "no reach": ("written_mask", (20, 33), {"reach": ints(-1, 0, 1000, 7), "step": 2**20}),
    "a first key beyond the end": (
        "written_rows",
        (40, 50),
        {"first": torch.arange(80, dtype=torch.int32).view(2, 40) - 3},
    ),
    "bounds that are the least and greatest integers": (
        "written_bounds",
        (40, 50),
        {
            name: ints(-(2**31), 2**31 - 1, far, 30, 0).repeat(16).view(2, 40)
            for name, far in (("limit", 100), ("first", -100))
        },
    ),
    "one bias for all": ("dense", (20, 33), {"bias": torch.linspace(-2, 2, 660).half().view(1, 1, 20, 33)}),
    "a bias for each sequence": ("dense", (20, 33), {"bias": torch.linspace(-2, 2, 1320).half().view(2, 1, 20, 33)}),
    "buckets from the end, and outside": (
        "bucketed",
        (20, 33),
        {"bucket": torch.arange(1320, dtype=torch.int32).view(2, 20, 33) % 150 - 60},
    ),
    "a sink above all scores": ("sinks", (20, 33), {"sink": torch.tensor([30.0, -30.0, 0.0, 100.0])}),
}


def tensor(*dims: str | int, **options: Any) -> dict[str, Any]:
    return {"tensor": list(dims), **options}


def scored(expr: str, **params: Any) -> dict[str, Any]:
    return {"score": {"expr": expr, "params": params}}


def masked(expr: str, **params: Any) -> dict[str, Any]:
    return {"mask": {"expr": expr, "params": params}}


WHOLE = {"dtype": "int32"}
TRICKY: dict[str, dict[str, Any]] = {
    "distances with dropout": {"score": {"relative_bias": {"max_distance": 8}}, "dropout": True},
    "a division by what is past the queries": scored("s / t[b, q_idx] + w[h]", t=tensor("B", "Nq"), w=HEAD),
    "a division by what is past the keys": scored("s / (kv_len - kv_idx)"),
    "a derivative that is infinite": scored("abs(s) ** 0.5"),
    "products of parameters": masked("kv_idx * n >= 5 and (q_idx - kv_idx + n) % 4 != 0", n=INT),
    "places with parameters": scored(
        "s + t[h, clamp(q_idx - kv_idx + off[b], 0, 80)]", t=tensor("H", 81), off=tensor("B", **WHOLE)
    ),
    "roots of integers": scored("s * sqrt(q_len - q_idx) + log(kv_idx + 2)"),
    "equalities of data": masked(
        "ids[b, kv_idx] == 1 or ids[b, kv_idx] != far[b, q_idx]",
        ids=tensor("B", "Nk", **WHOLE),
        far=tensor("B", "Nq", **WHOLE),
    ),
    "a real number in a mask": masked("kv_idx < q_idx + far", far={"scalar": "float"}),
    "a function in a mask": masked("tanh(w[b, kv_idx]) > 0.0 or kv_idx <= sqrt(q_len)", w=tensor("B", "Nk")),
    "integers and reals": scored("s - 0.1 * abs(q_idx - kv_idx + n - q_len)", n=INT),
    "rows before sequences": scored(
        "s * w[q_idx, b] + u[kv_idx, b]", w=tensor("Nq", "B", grad=True), u=tensor("Nk", "B")
    ),
    "only places from the end": masked("t[-1 - kv_idx] > 0 or t[kv_idx - kv_len] > 5", t=tensor("Nk", **WHOLE)),
    "names of the wrapper's loops": masked(
        "x[kv_idx] > 0 and name <= width[b] and seen[h, q_idx] <= shape[kv_idx] + rows",
        x=tensor("Nk", **WHOLE),
        name=INT,
        width=tensor("B", **WHOLE),
        seen=tensor("H", "Nq", **WHOLE),
        shape=tensor("Nk", **WHOLE),
        rows=INT,
    ),
    "another sequence": {**GQA, **scored("s * t[h // 2] + u[b + 1] * kv_idx / 32", t=tensor("Hkv"), u=tensor("B"))},
    "a table from its end": scored("s * w[-1] + t[clamp(kv_idx - q_idx, -4, 4)]", w=tensor(4, grad=True), t=tensor(5)),
    "a table of key heads by distance": {
        **FREE,
        **GQA,
        **scored("s + t[hkv, kv_idx - q_idx + 40]", t=tensor("Hkv", 81, grad=True)),
    },
}


@pytest.mark.share(4)
@pytest.mark.parametrize("what", TRICKY)
def test_what_is_easily_wrong(what: str, device: str, tmp_path: Path) -> None:
    made = make_spec(
        {"name": "tricky", "head_dim": 16, "dtype": "fp16", "schedule": {"block_q": 16, "block_kv": 16}, **TRICKY[what]}
    )
    result = run_case(module_of(made, tmp_path / "tricky"), made, Case(2, *heads_for(made, 4), 20, 33), "fp16", device)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            scored("where(w[h] > 0, s, -s)", w=HEAD),
            "`score` has `grad: true` for `w`, but the score changes with it only in steps; expected no",
        ),
        (scored("where(s > 0, 1, -1)"), "`score` changes with `s` only in steps"),
        (scored("s * w[7]", w=tensor(4)), "`score` reads `w` at `7`, which is outside of it; expected places inside"),
        (
            scored("s + t[where(s > 0, 1, 0)]", t=tensor(2)),
            "the index `where(s > 0, 1, 0)` of `t` depends on the score; expected positions",
        ),
        (
            scored("s + t[hkv, kv_idx - q_idx]", t=tensor("Hkv", 9, grad=True)),
            "sums in a fixed order need b, h, hkv, q_idx, q_idx and kv_",
        ),
        (
            masked("doc[b, q_idx] == doc[b, kv_idx]", doc=tensor("B", "Nk", **WHOLE))
            | scored("s * doc_q", doc_q={"scalar": "float"}),
            "`mask` reads a tensor as `doc_q`, which is also a parameter; expected another name for the parameter",
        ),
        (
            {"mask": "document"} | scored("s * document_first", document_first={"scalar": "float"}),
            "`mask` computes `document_first`, which is also a parameter; expected another name",
        ),
        (scored("s * len[h]", len=HEAD), "is a word of Python; expected another name"),
        (
            scored("s * masked", masked={"scalar": "float"}),
            "is reserved: a value of kernels has that name; expected another name, as in `my_masked`",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        lower(make_spec({"name": "wrong", "head_dim": 16, **changed}))
    assert sentence in str(caught.value)


def test_a_bias_may_hide_keys(built: Built, device: str) -> None:
    """With -inf in a whole first tile and in a whole row, that row has zeros and an LSE of -inf, as under a mask."""
    q, k, v, _ = make_inputs(spec("dense"), case("dense", 20, 50, 1), torch.float16, device)
    bias = torch.zeros(1, 1, 20, 50, dtype=torch.float16, device=device)
    bias[..., :32], bias[:, :, 19] = -torch.inf, -torch.inf
    out, lse = built("dense").attention(*(x.requires_grad_() for x in (q, k, v)), bias=bias, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (
        all(x.isfinite().all() for x in (out, *grads))
        and (lse[:, :, 19] == -torch.inf).all()
        and (out[:, :, 19] == 0).all()
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("what", ODD)
def test_odd_arguments(what: str, built: Built, device: str) -> None:
    name, size, given = ODD[what]
    inputs = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    result = run_case(built(name), spec(name), case(name, *size), "fp16", device, inputs=inputs)
    assert result.ok, str(result)


@pytest.mark.share(4)
def test_queries_before_the_first_key_see_nothing(built: Built, device: str) -> None:
    """With more queries than keys such queries have exact zeros, an LSE of -inf and zero gradients, for documents,
    chunks and dilated masks."""
    for name in ("documents", "chunked", "dilated"):
        q, k, v, inputs = make_inputs(spec(name), case(name, 40, 20), torch.float16, device)
        q.requires_grad_()
        out, lse = built(name).attention(q, k, v, **inputs, return_lse=True)
        empty = ~reference_mask(spec(name).mask, q, k, inputs).expand(*q.shape[:3], 20).any(-1)
        assert empty[:, :, :20].all()
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert (out[empty] == 0).all() and (lse[empty] == -torch.inf).all() and (grad[empty] == 0).all()


@pytest.mark.parametrize(("batch", "n_q", "n_kv"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize("name", ["relative", "dilated"])
def test_nothing_is_computed_of_nothing(name: str, batch: int, n_q: int, n_kv: int, built: Built, device: str) -> None:
    result = run_case(built(name), spec(name), Case(batch, *heads_for(spec(name)), n_q, n_kv), "fp16", device)
    assert result.ok, str(result)


def test_modifiers_are_applied_in_the_specs_order(built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec("softcap_alibi"), case("softcap_alibi", 65, 65), torch.float16, device)
    first, second = (built(name).attention(q, k, v, **inputs) for name in ("softcap_alibi", "alibi_softcap"))
    assert (first - second).abs().max() > 0.1


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["alibi", "dense", "relative", "sinks", "temperature"])
def test_only_what_is_learned_gets_a_gradient(name: str, built: Built, device: str) -> None:
    """Gradients of q, k and v do not depend on whether the input gets one, and the input's does not depend on theirs.
    New buffers have NaN."""
    (learned,) = (i.name for i in spec(name).inputs() if i.grad)
    q, k, v, inputs = make_inputs(spec(name), case(name, 20, 17, 1), torch.float16, device)
    leaves, x = [t.requires_grad_() for t in (q, k, v)], inputs[learned].requires_grad_()
    attention = built(name).attention
    *every, dx = torch.autograd.grad(attention(*leaves, **inputs).sum(), (*leaves, x))
    assert dx.shape == x.shape and dx.dtype == x.dtype and dx.abs().max() > 0
    filled = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch,
            "empty_like",
            lambda t, **kw: filled(t.shape, dtype=kw.get("dtype", t.dtype), device=t.device).fill_(torch.nan),
        )
        alone = torch.autograd.grad(attention(q.detach(), k.detach(), v.detach(), **inputs).sum(), x)[0]
        frozen = torch.autograd.grad(attention(*leaves, **{**inputs, learned: x.detach()}).sum(), leaves)
    assert alone.equal(dx)
    for found, expected in zip(frozen, every):
        assert found.equal(expected)


def test_what_is_added_atomically_says_so(built: Built, device: str) -> None:
    """Under torch's deterministic algorithms an atomic gradient is an error, except in a call that does not need it and
    in a module without atomics."""
    attention = built("bucketed").attention
    q, k, v, inputs = make_inputs(spec("bucketed"), case("bucketed", 20, 17, 1), torch.float16, device)
    q.requires_grad_(), inputs["table"].requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(
            RuntimeError, match="^attention: the gradient of table is added atomically, in no fixed order; expected "
        ):
            attention(q, k, v, **inputs).sum().backward()
        attention(q, k, v, **{**inputs, "table": inputs["table"].detach()}).sum().backward()
        torch.use_deterministic_algorithms(True, warn_only=True)
        attention(q, k, v, **inputs).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "in no fixed order" in attention.__doc__ and "in no fixed order" not in built("alibi").attention.__doc__
