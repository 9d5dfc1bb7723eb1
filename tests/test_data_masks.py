"""Masks of arbitrary data: the kernel that writes block lists, the kernels that read them, and plans that calls
may share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.harness import load_module, run_case
from attngen.conformance.oracle import reference_mask
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.helpers import CUDA

pytestmark = pytest.mark.numerics

BLOCK = 128
PAIRS = {"expr": "allowed[b, q_idx, kv_idx]", "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}}}
FIRST = {"expr": "first[h, kv_idx] <= q_idx", "params": {"first": {"tensor": ["H", "Nk"], "dtype": "int32"}}}
SHOWN = {
    "expr": "shown[kv_idx] and kv_idx < q_idx + reach",
    "params": {"shown": {"tensor": ["Nk"], "dtype": "bool"}, "reach": {"scalar": "int"}},
}
GROUPS = {"expr": "start[hkv, kv_idx] <= q_idx", "params": {"start": {"tensor": ["Hkv", "Nk"], "dtype": "int32"}}}
WINDOW = {"sliding_window": {"left": 30, "right": 0}}


def pairs(n_q: int, n_kv: int) -> dict[str, Any]:
    """A mask whose blocks cycle through some, all and no visible pairs."""
    allowed = torch.rand((2, n_q, n_kv), generator=torch.Generator().manual_seed(0)) < 0.5
    for i in range(0, n_q, BLOCK):
        for j in range(0, n_kv, BLOCK):
            if kind := (i // BLOCK + 2 * (j // BLOCK)) % 3:
                allowed[:, i : i + BLOCK, j : j + BLOCK] = kind == 1
    return {"allowed": allowed}


def first(n_q: int, n_kv: int) -> dict[str, Any]:
    start = torch.arange(n_kv, dtype=torch.int32) - torch.tensor([[0], [120]], dtype=torch.int32)
    return {"first": start.contiguous()}


def shown(n_q: int, n_kv: int) -> dict[str, Any]:
    return {"shown": torch.arange(n_kv) % 290 < 140, "reach": 20}


SPECS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Any]]]] = {
    "pairs": ({"heads": {"sharing": "gqa"}, "mask": PAIRS}, pairs),
    "first": ({"heads": {"sharing": "mqa"}, "mask": FIRST}, first),
    "shown": ({"heads": {"sharing": "gqa"}, "dropout": True, "score": [{"softcap": 3}], "mask": SHOWN}, shown),
    "causal": ({"mask": {"all_of": ["causal", PAIRS]}}, pairs),
    "window": ({"mask": {"any_of": [WINDOW, PAIRS]}}, pairs),
    "documents": ({"mask": {"all_of": ["document", PAIRS]}}, pairs),
    "groups": (
        {"heads": {"sharing": "gqa"}, "mask": GROUPS},
        lambda n_q, n_kv: {"start": first(n_q, n_kv)["first"][:1]},
    ),
    "runs": (
        {
            "mask": {
                "any_of": [
                    {"sliding_window": {"left": 30, "right": 0}},
                    {"sink_tokens": {"count": 9}},
                    {"all_of": ["causal", PAIRS]},
                ]
            }
        },
        pairs,
    ),
}
SIZES = [(150, 260), (256, 140), (1, 200)]
Built = Callable[[str], ModuleType]


def spec(name: str) -> Spec:
    tiles = {"block_q": 32, "block_kv": 64} if list(SPECS).index(name) % 2 else {"block_q": 64, "block_kv": 32}
    return make_spec({"name": name, "head_dim": 16, "dtype": "fp16", "schedule": tiles, **SPECS[name][0]})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A function that returns the module of a spec, which it builds once."""
    folder = tmp_path_factory.mktemp("data")
    known: dict[str, ModuleType] = {}

    def of(name: str) -> ModuleType:
        if name not in known:
            module = lower(spec(name))
            assert module.blocks is not None and module.blocks.data
            write_module(render(module), folder / name)
            known[name] = load_module(folder / name)
        return known[name]

    return of


def case(name: str, n_q: int, n_kv: int) -> Case:
    return Case(2, *heads_for(spec(name), 2), n_q, n_kv)


def on(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "size"),
    [(n, s) for n in SPECS for s in (SIZES if CUDA or n == "pairs" else SIZES[:1])],
    ids=lambda x: str(x),
)
def test_against_the_oracle(name: str, size: tuple[int, int], built: Built, device: str) -> None:
    given = on(SPECS[name][1](*size), device)
    result = run_case(built(name), spec(name), case(name, *size), "fp16", device, inputs=given)
    assert result.ok, str(result)


def problem(name: str, n_q: int, n_kv: int, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    q, k, v, inputs = make_inputs(spec(name), case(name, n_q, n_kv), torch.float16, device)
    return [q, k, v], {**inputs, **on(SPECS[name][1](n_q, n_kv), device)}


@pytest.mark.share(16)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_lists_are_what_the_mask_says(name: str, size: tuple[int, int], built: Built, device: str) -> None:
    """The list of each row and column of blocks has its full blocks in order, then its partial ones; a block that
    extends past the end is not full."""
    n_q, n_kv = size
    (q, k, _), inputs = problem(name, n_q, n_kv, device)
    plan = built(name).attention.plan(q, k, **inputs)
    mask = reference_mask(spec(name).mask, q, k, inputs).expand(2, 2, n_q, n_kv)
    heads, batch = (2, 1) if name in ("first", "groups") else (1, 1 if name == "shown" else 2)
    assert plan.kv_list.shape == (batch, heads, -(-n_q // BLOCK), -(-n_kv // BLOCK))
    for lists, blocks in (
        ((plan.kv_full_rank, plan.kv_rank, plan.kv_list), mask),
        ((plan.q_full_rank, plan.q_rank, plan.q_list), mask.transpose(2, 3)),
    ):
        for t, row in enumerate(blocks[:batch, :heads].flatten(0, 1).split(BLOCK, 1)):
            cut = row.split(BLOCK, 2)
            for at in range(batch * heads):
                seen = [bool(x[at].any()) for x in cut]
                full = [bool(x[at].all()) and x.shape[1:] == (BLOCK, BLOCK) for x in cut]
                full_rank, rank, listed = (x.flatten(0, 1)[at, t].tolist() for x in lists)
                wanted = [j for j, f in enumerate(full) if f] + [j for j, s in enumerate(seen) if s and not full[j]]
                assert listed[: rank[-1]] == wanted and rank[0] == full_rank[-1] == sum(full)
                assert full_rank == [sum(full[:j]) for j in range(len(full) + 1)]
                assert rank == [
                    sum(full) + sum(s and not f for s, f in zip(seen[:j], full)) for j in range(len(full) + 1)
                ]


@pytest.mark.share(4)
def test_a_plan_gives_the_same_bits(built: Built, device: str) -> None:
    """A plan also has the tensors that a mask derives: the call needs no ids of documents."""
    leaves, inputs = problem("documents", 40, 140, device)
    plan = built("documents").attention.plan(*leaves[:2], **inputs)
    leaves = [x.requires_grad_() for x in leaves]
    found = []
    for given in (inputs, {"allowed": inputs["allowed"], "plan": plan}):
        out = built("documents").attention(*leaves, **given)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(a.equal(b) for a, b in zip(*found))


def test_full_blocks_are_not_masked_and_empty_ones_not_visited(built: Built, device: str) -> None:
    """The plan decides, even one of another mask: its full blocks are not masked, and its empty blocks are not
    visited."""
    (q, k, v), _ = problem("pairs", 128, 256, device)
    some = torch.zeros(2, 128, 256, dtype=torch.bool, device=device)
    some[:, :, :128] = True
    plan = built("pairs").attention.plan(q, k, allowed=some)
    found = built("pairs").attention(q, k, v, allowed=torch.zeros_like(some), plan=plan)
    assert found.equal(built("pairs").attention(q, k, v, allowed=some))


@pytest.mark.share(4)
def test_a_plan_is_made_under_autocast(built: Built, device: str) -> None:
    """A plan made of fp32 tensors under autocast fits the call with the same tensors."""
    leaves, inputs = problem("pairs", 130, 140, device)
    wide = [x.float() for x in leaves]
    with torch.autocast(device, dtype=torch.float16):
        plan = built("pairs").attention.plan(*wide[:2], **inputs)
        found = built("pairs").attention(*wide, **inputs, plan=plan)
    assert found.equal(built("pairs").attention(*leaves, **inputs))


@pytest.mark.share(16)
def test_torch_sees_the_kernel_as_an_operator(built: Built, device: str) -> None:
    leaves, inputs = problem("pairs", 140, 150, device)
    module = built("pairs")
    torch.library.opcheck(module.COUNT, (*leaves[:2], inputs["allowed"]))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, backend="inductor" if CUDA else "aot_eager", fullgraph=True)
    assert compiled(*leaves, **inputs).equal(module.attention(*leaves, **inputs))


def test_wrong_calls_are_one_sentence(built: Built, device: str) -> None:
    (q, k, v), inputs = problem("pairs", 140, 150, device)
    attention = built("pairs").attention
    plan = attention.plan(q, k, **inputs)
    few = attention.plan(q[:, :, :130], k, allowed=inputs["allowed"][:, :130])
    one = attention.plan(q[:1], k[:1], allowed=inputs["allowed"][:1])
    turned = plan.kv_list.transpose(2, 3).contiguous().transpose(2, 3)
    for given, error, sentence in (
        (
            {"plan": few},
            ValueError,
            "plan is of 130 queries and 150 keys, the call of 140 and 150; expected what attention.plan makes of",
        ),
        (
            {"plan": one},
            ValueError,
            r"plan.kv_full_rank has shape \[1, 1, 2, 3\]; expected \[2, 1, 2, 3\]: what attention.plan makes",
        ),
        (
            {"plan": plan._replace(kv_list=turned)},
            ValueError,
            "plan.kv_list is not contiguous; expected what attention.plan makes",
        ),
        ({"plan": tuple(plan)}, TypeError, "plan is a tuple; expected what attention.plan makes"),
        (
            {"plan": plan._replace(q_list=plan.q_list.long())},
            TypeError,
            "plan.q_list is torch.int64; expected torch.int32",
        ),
        (
            {"allowed": inputs["allowed"][:1]},
            ValueError,
            r"allowed has shape \[1, 140, 150\]; expected \[2, 140, 150\]",
        ),
    ):
        with pytest.raises(error, match=sentence):
            attention(q, k, v, **{**inputs, **given})
    with pytest.raises(ValueError, match=r"q has shape \[2, 140, 16\]; expected \[B, Hq, Nq, 16\]"):
        attention.plan(q[0], k, **inputs)
    with pytest.raises(TypeError, match="allowed is torch.int32; expected torch.bool"):
        attention.plan(q, k, allowed=inputs["allowed"].int())


@pytest.mark.parametrize("sizes", [(0, 4, 65, 65), (2, 4, 0, 65), (2, 4, 65, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int], built: Built, device: str) -> None:
    batch, heads, n_q, n_kv = sizes
    q = torch.ones(batch, heads, n_q, 16, dtype=torch.float16, device=device, requires_grad=True)
    k = torch.ones(batch, heads // 2, n_kv, 16, dtype=torch.float16, device=device, requires_grad=True)
    allowed = torch.ones(batch, n_q, n_kv, dtype=torch.bool, device=device)
    out = built("pairs").attention(q, k, k, allowed=allowed)
    assert out.shape == q.shape and not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "data"),
    [
        (PAIRS, True),
        ({"all_of": ["causal", {"not": PAIRS}]}, True),
        (
            {"expr": "lengths[b] > kv_idx", "params": {"lengths": {"tensor": ["B"], "dtype": "int32"}}},
            False,
        ),  # loop bounds
        (
            {"expr": "on[b] or kv_idx < 7", "params": {"on": {"tensor": ["B"], "dtype": "bool"}}},
            False,
        ),  # the same for all tiles
        ("key_padding", False),  # its known facts bound the loops
        ("document", False),
        ({"expr": "(q_idx * kv_idx) % 7 < 3"}, False),  # no data: visited and masked
    ],
    ids=str,
)
def test_what_is_listed(mask: Any, data: bool) -> None:
    module = lower(make_spec({"name": "listed", "head_dim": 16, "mask": mask}))
    assert (module.blocks is not None and module.blocks.data) == data == ("blocks" in {k.name for k in module.kernels})


def test_blocks_that_are_given_need_no_others(tmp_path: Path) -> None:
    """A block mask that the caller gives decides which blocks are visited; data inside them is masked."""
    module = lower(
        make_spec({"name": "given", "head_dim": 16, "mask": {"all_of": [{"block_sparse": {"block": 64}}, PAIRS]}})
    )
    assert module.blocks is not None and not module.blocks.data
