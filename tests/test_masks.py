"""Every mask and modifier in small modules, built here, end to end: forward and all gradients against the oracle.

Parameters are small enough to cut through small tiles, in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.conformance.harness import Case, heads_for, make_inputs, run_case
from attngen.conformance.oracle import reference_mask
from attngen.errors import SpecError
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.helpers import module_of

INT, HEAD = {"scalar": "int"}, {"tensor": ["H"], "grad": True}
KEYS, FREE = {"tensor": ["H", "Nk"], "grad": True}, {"backward": {"deterministic": False}}
UNEQUAL = [(40, 97), (97, 40)]
GQA = {"heads": {"sharing": "gqa"}}
WRITTEN_MASK = {
    "expr": "abs(q_idx - kv_idx) <= reach[h] or kv_idx % step == 0 and kv_idx <= q_idx",
    "params": {"reach": {"tensor": ["H"], "dtype": "int32"}, "step": {"scalar": "int", "min": 1}},
}
WRITTEN_BOUNDS = {  # several bounds a side, of data and of positions
    "expr": "kv_idx < limit[b, q_idx] and kv_idx <= q_idx + 9 and kv_idx > first[b, q_idx] and kv_idx >= q_idx - 20",
    "params": {name: {"tensor": ["B", "Nq"], "dtype": "int32"} for name in ("limit", "first")},
}
WRITTEN_ROWS = {
    "expr": "first[b, q_idx] <= kv_idx and not hidden[kv_idx]",
    "params": {"first": {"tensor": ["B", "Nq"], "dtype": "int32"}, "hidden": {"tensor": ["Nk"], "dtype": "bool"}},
}

# name: what a spec has besides its name, sizes to run. The schedules of two in three cut tiles of queries and keys
# unevenly.
SPECS: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "chunked": (
        {**GQA, "mask": {"chunked": {"size": 40}}, "schedule": {"block_q": 16, "block_kv": 16}},
        [(1, 1), (65, 65), (97, 40)],
    ),
    "chunked_top_left": ({"mask": {"chunked": {"size": 24, "align": "top_left"}}}, [(97, 40)]),
    "dilated": ({"mask": {"dilated": {"step": 3, "reach": 50}}}, UNEQUAL),
    "prefix": ({**GQA, "mask": {"prefix_lm": {"length": 30}}}, [(40, 97)]),
    "tree": ({**GQA, "mask": "tree"}, [(33, 70), (20, 9)]),
    "prefix_argument": ({"mask": "prefix_lm"}, [(40, 33)]),
    "prefix_per_batch": ({"mask": {"prefix_lm": {"per": "batch"}}}, [(33, 65)]),
    "streaming": (
        {
            **GQA,
            "mask": {
                "all_of": ["causal", {"any_of": [{"sliding_window": {"left": 20}}, {"sink_tokens": {"count": 4}}]}]
            },
        },
        [(40, 97)],
    ),
    "not_causal": ({"mask": {"not": "causal"}}, [(1, 1), (97, 40)]),
    "documents": ({**GQA, "mask": {"all_of": ["causal", "document"]}}, [(1, 1), (40, 65)]),
    "packed": ({**GQA, "mask": {"document": {"packed": True}}}, [(40, 65)]),
    "packed_causal": ({"mask": {"document": {"packed": True, "causal": True}}}, [(1, 1), (97, 40)]),
    "sinks": ({**GQA, "mask": {"sliding_window": {"left": 20, "right": 0}}, "score": "sink"}, [(1, 1), (40, 65)]),
    "softcap": ({"mask": {"sliding_window": {"left": 20, "right": 0}}, "score": [{"softcap": 2}]}, [(65, 65)]),
    "alibi": ({**GQA, "mask": "causal", "score": {"alibi": {"slopes": "given", "learnable": True}}}, [(40, 65)]),
    "relative": ({"score": {"relative_bias": {"max_distance": 10}}}, UNEQUAL),
    "dense": ({**GQA, "mask": "causal", "score": "dense_bias"}, [(1, 1), (65, 40)]),
    "temperature": ({"mask": "causal", "score": "temperature"}, [(40, 40)]),
    "written_mask": ({**GQA, "mask": WRITTEN_MASK}, [(65, 40)]),
    "written_rows": ({"mask": WRITTEN_ROWS}, [(40, 65)]),
    "written_bounds": ({"mask": WRITTEN_BOUNDS}, [(40, 65)]),
    "beyond_32_bits": (
        {
            "mask": {
                "any_of": [
                    {"expr": "(q_idx + 99000) * (kv_idx + 99000) % 7 < 3"},
                    {"expr": "kv_idx * 100000000 + 7 <= q_idx * 100000000"},
                ]
            },
            "score": {"expr": "s + ((q_idx + 99000) * (99000 - kv_idx) // 1000000) / 9000"},
        },
        [(40, 65)],
    ),
    "written_score": (
        {**GQA, "mask": "causal", "score": {"expr": "s - slope[h] * abs(q_idx - kv_idx)", "params": {"slope": HEAD}}},
        [(40, 65)],
    ),
    "written_number": (
        {
            "score": {
                "expr": "where(kv_idx <= q_idx, s * sharp, s - far)",
                "params": {"sharp": {"scalar": "float"}, "far": {"value": 0.5}},
            }
        },
        [(33, 65)],
    ),
    "bucketed": (
        {
            **FREE,
            "score": {
                "expr": "s + table[h, bucket[b, q_idx, kv_idx]]",
                "params": {
                    "table": {"tensor": ["H", 40], "grad": True},
                    "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
                },
            },
        },
        [(40, 65)],
    ),
    "few_buckets": (
        {
            **GQA,
            "mask": "causal",
            "dropout": True,
            "score": {
                "expr": "s * (1 + table[h, bucket[b, q_idx, kv_idx] % 7])",
                "params": {
                    "table": {"tensor": ["H", 6], "grad": True},
                    "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
                },
            },
        },
        [(40, 65)],
    ),
    "key_bias": (
        {
            **FREE,
            **GQA,
            "mask": "causal",
            "dropout": True,
            "score": {"expr": "s * (1 + w[h, kv_idx] / 4)", "params": {"w": KEYS}},
        },
        [(40, 65)],
    ),
    "pieces": (
        {
            **FREE,
            "score": {
                "expr": "s * across[q_idx // 16, h] + pairs[h // 2] * kv_idx / 32 + near[q_idx // 8, kv_idx // 8]",
                "params": {
                    "across": {"tensor": [3, "H"], "grad": True},
                    "pairs": {"tensor": [3], "grad": True},
                    "near": {"tensor": [5, 9], "grad": True},
                },
            },
        },
        [(40, 65)],
    ),
    "softcap_alibi": ({"score": [{"softcap": 2}, {"alibi": {"slopes": "given", "learnable": True}}]}, [(40, 40)]),
    "alibi_softcap": ({"score": [{"alibi": {"slopes": "given", "learnable": True}}, {"softcap": 2}]}, [(40, 40)]),
}
SCHEDULES = [{"block_q": 16, "block_kv": 32}, {"block_q": 32, "block_kv": 16}, {"block_q": 32, "block_kv": 32}]
CASES = [(name, size) for name, (_, sizes) in SPECS.items() for size in sizes]


def spec(name: str) -> Spec:
    place = list(SPECS).index(name)
    fixed = {"head_dim": 32 if place < 3 else 16, "dtype": "fp16", "schedule": SCHEDULES[place % 3]}
    return make_spec({"name": name, **fixed, **SPECS[name][0]})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """The module of a spec, made once."""
    folder = tmp_path_factory.mktemp("masks")
    known: dict[str, ModuleType] = {}

    def of(name: str) -> ModuleType:
        if name not in known:
            known[name] = module_of(spec(name), folder / name)
        return known[name]

    return of


def case(name: str, n_q: int, n_kv: int, batch: int = 2) -> Case:
    return Case(batch, *heads_for(spec(name), 2 if spec(name).heads.sharing == "mha" else 4), n_q, n_kv)


Built = Callable[[str], ModuleType]


# ---------------------------------------------------------------------------------------------- against the oracle


@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name}-{n}x{m}" for name, (n, m) in CASES])
def test_against_the_oracle(name: str, size: tuple[int, int], built: Built, device: str) -> None:
    """out, lse, dq, dk, dv, and the gradient of everything that is learned."""
    result = run_case(
        built(name), spec(name), case(name, *size, batch=1 if SPECS[name][0].get("heads") else 2), "fp16", device
    )
    assert result.ok, str(result)
    assert {f"d{i.name}" for i in spec(name).inputs() if i.grad} <= result.ours.keys()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Arguments that are odd but right: (spec, sizes, arguments).
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
    "integers beside reals": scored("s - 0.1 * abs(q_idx - kv_idx + n - q_len)", n=INT),
    "rows before sequences": scored(
        "s * w[q_idx, b] + u[kv_idx, b]", w=tensor("Nq", "B", grad=True), u=tensor("Nk", "B")
    ),
    "places from the end alone": masked("t[-1 - kv_idx] > 0 or t[kv_idx - kv_len] > 5", t=tensor("Nk", **WHOLE)),
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
            "`score` has `grad: true` for `w`, and the score changes with it in steps alone; expected no",
        ),
        (scored("where(s > 0, 1, -1)"), "`score` changes with `s` in steps alone"),
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
            "`mask` reads a tensor as `doc_q`, a parameter's name too; expected another name for the parameter",
        ),
        (
            {"mask": "document"} | scored("s * document_first", document_first={"scalar": "float"}),
            "`document_first`, which is a parameter's",
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
    """A first tile of -inf, and a row of it: zeros and LSE -inf there, as under a mask."""
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


@pytest.mark.parametrize("what", ODD)
def test_odd_arguments(what: str, built: Built, device: str) -> None:
    name, size, given = ODD[what]
    inputs = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    result = run_case(built(name), spec(name), case(name, *size), "fp16", device, inputs=inputs)
    assert result.ok, str(result)


def test_queries_before_the_first_key_see_nothing(built: Built, device: str) -> None:
    """With more queries than keys: of documents, of chunks, of dilated masks; exact zeros, LSE -inf, and zero
    gradients."""
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


@pytest.mark.parametrize("name", ["alibi", "dense", "relative", "sinks", "temperature"])
def test_only_what_is_learned_gets_a_gradient(name: str, built: Built, device: str) -> None:
    """The gradients of q, k and v are the same whether the input gets one or not, and the input's without them;
    memory is not fresh."""
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
    """Where torch is told to be deterministic; but for a module that has no use for atomics, or a call that needs no
    such gradient."""
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


# ---------------------------------------------------------------------------------------------- wrong calls

Arguments = dict[str, Any]

# (spec, what is wrong, class of the error, its sentence)
WRONG: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], str]] = [
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"].short()},
        TypeError,
        "document_ids is torch.int16; expected torch.int32 or torch.int64 [2, 50]: ",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"][:, :40]},
        ValueError,
        "document_ids has shape [2, 40]; expected [2, 50]: the",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"][0]},
        ValueError,
        "document_ids has shape [50]; expected [2, 50]: the document",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"].to("meta")},
        ValueError,
        "document_ids is on meta and q on ",
    ),
    (
        "documents",
        lambda a: {"document_ids": [0] * 50},
        TypeError,
        "document_ids is a list; expected a dense torch.int32 tensor [2, 50]",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].short()},
        TypeError,
        "cu_seqlens_q is torch.int16; expected torch.int32 or torch.int64 [any]: ",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_kv": a["cu_seqlens_kv"][None]},
        ValueError,
        "cu_seqlens_kv has shape [1, 5]; expected [",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_kv": [0, 50]},
        TypeError,
        "cu_seqlens_kv is a list; expected a dense torch.int32 tensor [any]: where",
    ),
    (
        "prefix_per_batch",
        lambda a: {"prefix_length": 7},
        TypeError,
        "prefix_length is a int; expected a dense torch.int32 tensor [2]: ",
    ),
    (
        "prefix_per_batch",
        lambda a: {"prefix_length": ints(7)},
        ValueError,
        "prefix_length has shape [1]; expected [2]: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": -1},
        ValueError,
        "prefix_length is -1; expected it to be at least 0: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": True},
        TypeError,
        "prefix_length is a bool; expected an int: number of keys, from",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": 7.0},
        TypeError,
        "prefix_length is a float; expected an int: number of keys, from",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": None},
        TypeError,
        "prefix_length is a NoneType; expected an int: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": ints(7)},
        TypeError,
        "prefix_length is a torch.strided tensor; expected an int: ",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": 2**30},
        ValueError,
        "prefix_length is 1073741824; expected it to be between -2**30 and",
    ),
    (
        "sinks",
        lambda a: {"sink": a["sink"].int()},
        TypeError,
        "sink is torch.int32; expected torch.float32 or torch.float16 or torch.bfloat16 [4]: a logit of each head",
    ),
    ("sinks", lambda a: {"sink": a["sink"][:2]}, ValueError, "sink has shape [2]; expected [4]: a logit of each head"),
    (
        "alibi",
        lambda a: {"alibi_slopes": 0.5},
        TypeError,
        "alibi_slopes is a float; expected a dense torch.float32 tensor [4]: by",
    ),
    (
        "alibi",
        lambda a: {"alibi_slopes": a["alibi_slopes"].double()},
        TypeError,
        "alibi_slopes is torch.float64; expected torch.float32 or torch.float16 or torch.bfloat16 [4]: ",
    ),
    (
        "alibi",
        lambda a: {"alibi_slopes": a["alibi_slopes"].to("meta")},
        ValueError,
        "alibi_slopes is on meta and q on ",
    ),
    (
        "temperature",
        lambda a: {"temperature": a["temperature"][:, None]},
        ValueError,
        "temperature has shape [2, 1]; expected [2]: what ",
    ),
    (
        "relative",
        lambda a: {"relative_bias": a["relative_bias"][:, 1:]},
        ValueError,
        "relative_bias has shape [2, 20]; expected [2, 21]: ",
    ),
    (
        "relative",
        lambda a: {"relative_bias": None},
        TypeError,
        "relative_bias is a NoneType; expected a dense torch.float32 tensor [2, 21]",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"].int()},
        TypeError,
        "bias is torch.int32; expected torch.float16 or torch.float32 or torch.bfloat16 [1 or 2",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"][:, :3]},
        ValueError,
        "bias has shape [1, 3, 40, 50]; expected [1 or 2, 1 or 4, 40, 50]: what is added",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"].expand(3, 4, 40, 50)},
        ValueError,
        "bias has shape [3, 4, 40, 50]; expected [1 or 2, 1 or 4, 40, 50]: ",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"][:, :, :1]},
        ValueError,
        "bias has shape [1, 4, 1, 50]; expected [1 or 2, 1 or 4, 40, 50]: what is",
    ),
    ("dense", lambda a: {"bias": a["bias"][0]}, ValueError, "bias has shape [4, 40, 50]; expected ["),
    (
        "written_mask",
        lambda a: {"step": 0},
        ValueError,
        "step is 0; expected it to be at least 1: a parameter of the spec",
    ),
    ("written_mask", lambda a: {"step": False}, TypeError, "step is a bool; expected an int: a parameter of the spec"),
    (
        "written_mask",
        lambda a: {"reach": a["reach"].float()},
        TypeError,
        "reach is torch.float32; expected torch.int32 or torch.int64 [4]: a parameter",
    ),
    (
        "written_rows",
        lambda a: {"first": a["first"][:, 1:]},
        ValueError,
        "first has shape [2, 39]; expected [2, 40]: a parameter",
    ),
    (
        "written_rows",
        lambda a: {"hidden": a["hidden"].int()},
        TypeError,
        "hidden is torch.int32; expected torch.bool [50]: a parameter",
    ),
    (
        "written_number",
        lambda a: {"sharp": True},
        TypeError,
        "sharp is a bool; expected a number: a parameter of the spec",
    ),
    (
        "written_number",
        lambda a: {"sharp": "2"},
        TypeError,
        "sharp is a str; expected a number: a parameter of the spec",
    ),
    (
        "written_number",
        lambda a: {"sharp": float("nan")},
        ValueError,
        "sharp is nan; expected it to be between -2**30 and 2**30",
    ),
    (
        "written_number",
        lambda a: {"sharp": float("inf")},
        ValueError,
        "sharp is inf; expected it to be between -2**30 and 2**30",
    ),
]


@pytest.mark.parametrize(("name", "change", "kind", "sentence"), WRONG, ids=[f"{n}: {s[:36]}" for n, _, _, s in WRONG])
def test_a_wrong_argument_is_one_sentence(
    name: str, change: Callable[[Arguments], Arguments], kind: type[Exception], sentence: str, built: Built, device: str
) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    with pytest.raises(kind) as caught:
        built(name).attention(q, k, v, **{**inputs, **change(inputs)})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"attention: {sentence}"), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("prefix_argument", "prefix_length"), ("sinks", "sink"), ("dense", "bias"), ("written_mask", "step")],
)
def test_every_argument_is_needed(name: str, missing: str, built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 8, 8), torch.float16, device)
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        built(name).attention(q, k, v, **{key: x for key, x in inputs.items() if key != missing})


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("documents", {"document_ids": torch.int64}),
        ("packed", {"cu_seqlens_q": torch.int64, "cu_seqlens_kv": torch.int64}),
    ],
)
def test_integers_may_have_64_bits(name: str, other: dict[str, torch.dtype], built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    wide = {key: inputs[key].to(dtype) for key, dtype in other.items()}
    assert built(name).attention(q, k, v, **{**inputs, **wide}).equal(built(name).attention(q, k, v, **inputs))


@pytest.mark.parametrize(
    ("name", "learned", "dtype"), [("sinks", "sink", torch.float16), ("dense", "bias", torch.float32)]
)
def test_learned_inputs_may_have_another_dtype(
    name: str, learned: str, dtype: torch.dtype, built: Built, device: str
) -> None:
    """Those of the model, say: they are converted once, and have gradients in their own."""
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    given = inputs[learned].detach().to(dtype).requires_grad_()
    same = given.detach().to(inputs[learned].dtype).requires_grad_()
    outs = [built(name).attention(q, k, v, **{**inputs, learned: x}) for x in (given, same)]
    assert outs[0].equal(outs[1])
    found, expected = (torch.autograd.grad(out.float().square().sum(), x)[0] for out, x in zip(outs, (given, same)))
    assert found.dtype == dtype and found.equal(expected.to(dtype))


def test_numbers_may_be_ints_and_zero(built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec("written_number"), case("written_number", 8, 8), torch.float16, device)
    one, same = (built("written_number").attention(q, k, v, **{**inputs, "sharp": x}) for x in (1, 1.0))
    assert one.equal(same)
    assert built("written_number").attention(q, k, v, sharp=0).isfinite().all()
    q, k, v, _ = make_inputs(spec("prefix_argument"), case("prefix_argument", 8, 8), torch.float16, device)
    assert built("prefix_argument").attention(q, k, v, prefix_length=0).isfinite().all()
