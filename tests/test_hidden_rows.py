"""Rows that are in no visible pair may hold anything, also NaN and infinity: they change no other row's result.

Each call is compared with the same call where these rows hold zeros. The oracles of masks say which rows they are.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case, heads_for, make_all_gradients, make_inputs, torch_dtype
from attngen.conformance.harness import DROPOUT_P, SEED, asked, result_names
from attngen.conformance.kv_cache import CacheCase, make_call
from attngen.conformance.oracle import reference_mask
from attngen.spec import Spec, make_spec
from tests.helpers import CUDA, NIGHTLY, SPECS, built, module_of
from tests.helpers import spec as spec_of

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if CUDA else "cpu"
ENDS = {"key_padding", "kv_lengths", "cu_seqlens_kv"}  # inputs that say where keys end
PADDED = [name for name in SPECS if spec_of(name).trains and {i.name for i in spec_of(name).mask.inputs()} & ENDS]
SIZES = (50, 50) if CUDA else (70, 70)  # on a GPU, numbers of queries that are not read by descriptors
BY_POSITIONS: Any = {"expr": "(kv_idx + q_idx) % 3 != 0"}


def ends(spec: Spec, n_q: int, n_kv: int) -> dict[str, torch.Tensor]:
    """Inputs of masks that hide rows at the ends of two sequences, or behind packed sequences."""
    at = torch.arange(n_kv)
    made = {
        "key_padding": torch.stack([(at >= 5) & (at < n_kv - 13), at < 20]),
        "kv_lengths": torch.tensor([n_kv - 13, 20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 20, n_q - 21], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 23, n_kv - 17], dtype=torch.int32),
    }
    return {i.name: made[i.name].to(DEVICE) for i in spec.mask.inputs() if i.name in made}


def hidden(
    mask: Any, case: Case, q: torch.Tensor, k: torch.Tensor, inputs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries [B, Hq, Nq] and keys [B, Hkv, Nk] are in no visible pair, by the oracle of the mask."""
    sees = reference_mask(mask, q, k, inputs).expand(*q.shape[:3], k.shape[2])
    return ~sees.any(-1), ~sees.any(-2).unflatten(1, (case.kv_heads, -1)).any(2)


def results(
    module: ModuleType, spec: Spec, leaves: list[torch.Tensor], inputs: dict[str, Any], grads: Any, tangents: Any
) -> dict[str, Any]:
    """All results of a call by name: outputs, gradients and tangents."""
    learned = [i.name for i in spec.inputs() if i.grad]
    more: dict[str, Any] = {"dropout_p": DROPOUT_P, "seed": SEED} if spec.dropout else {}

    def call(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = module.attention(
            *x[:3], **{**inputs, **dict(zip(learned, x[3:]))}, **more, **asked(spec)
        )
        return found

    given = [x.detach().requires_grad_() for x in (*leaves, *(inputs[name] for name in learned))]
    found = call(*given)
    gradients = torch.autograd.grad(found[: len(grads)], given, [g.to(r.dtype) for g, r in zip(grads, found)])
    made = dict(zip(result_names(spec), (*(x.detach() for x in found), *gradients)))
    along = (*tangents, *(torch.ones_like(inputs[name]) for name in learned))
    changes = torch.func.jvp(lambda *x: call(*x)[: len(grads)], tuple(x.detach() for x in given), along)[1]
    return made | {f"t{name}": x for name, x in zip(made, changes)}


def check_ends(module: ModuleType, spec: Spec, hiding: Any, sizes: tuple[int, int] = SIZES, seed: int = 0) -> None:
    """Keys that the mask `hiding` hides, and queries and gradients behind packed sequences, change no other row."""
    case = Case(2, *heads_for(spec, 4 if spec.heads.sharing == "gqa" else 2), *sizes)
    dtype = torch_dtype(next((d for d in spec.dtype if CUDA or d != "bf16"), spec.dtype[0]))
    q, k, v, inputs = make_inputs(spec, case, dtype, DEVICE, seed)
    inputs |= ends(spec, *sizes)
    grads = make_all_gradients(spec, case, dtype, DEVICE, seed)
    tangents = make_inputs(spec, case, dtype, DEVICE, seed + 1)[:3]
    no_query, no_key = hidden(hiding, case, q, k, inputs)
    assert no_key.any()
    by_query = "cu_seqlens_q" in inputs and not spec.learned()  # gradients of learned inputs sum over all queries
    assert no_query.any() or not by_query

    def filled(value: float) -> dict[str, Any]:
        def fill(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(rows.reshape(*rows.shape, *[1] * (x.dim() - rows.dim())), value)

        leaves, along = (
            [fill(x[0], no_query) if by_query else x[0], *(fill(y, no_key) for y in x[1:])]
            for x in ((q, k, v), tangents)
        )
        back = [fill(g, no_query) if by_query else g for g in grads]
        return results(module, spec, leaves, inputs, back, along)

    wanted = filled(0.0)
    own = {"dq": no_query, "dk": no_key, "dv": no_key, "tout": no_query, "tlse": no_query, "tentropy": no_query}
    for value in (math.nan, math.inf):
        found = filled(value)
        for name, x in wanted.items():
            rows = ~own[name] if name in own else ...
            assert torch.equal(found[name][rows], x[rows]), f"{name} with {value} in hidden rows"


@pytest.mark.parametrize("name", PADDED)
def test_what_lies_behind_sequences_reaches_no_other_row(name: str) -> None:
    check_ends(built(name), spec_of(name), spec_of(name).mask)


def test_one_query_before_what_is_not_a_number() -> None:
    """`cu_seqlens = [0, 1]` of two rows, where the second holds NaN."""
    x = torch.ones(1, 2, 2, 128, dtype=torch.float16, device=DEVICE)
    x[:, :, 1] = math.nan
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    out = built("packed_document_gqa").attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), x)
    assert torch.equal(out[:, :, 0], x[:, :, 0]) and not out[:, :, 1].any()
    assert torch.equal(dv[:, :, 0], x[:, :, 0]) and not dq[:, :, 0].any() and not dk[:, :, 0].any()


def drawn(seed: int) -> dict[str, Any]:
    """A random spec whose mask says at run time where keys end."""
    choose = random.Random(seed).choice
    if choose([True, False]):
        parts = [{"document": {"packed": True, "causal": choose([True, False])}}, *choose([[], [BY_POSITIONS]])]
    else:
        more = choose([[], ["causal"], [{"sliding_window": {"left": 9, "right": 4}}], [BY_POSITIONS]])
        parts = [choose([{"key_padding": {"lengths": True}}, "key_padding"]), *more]
    score = choose([[], [{"softcap": 5.0}], ["alibi"], ["temperature"], ["dense_bias"], ["sink"]])
    sharing = choose(["mha", "gqa", "mqa"])
    extra = choose([{}, {"dropout": True}, {"outputs": ["entropy"]}, {"outputs": ["max_score", "key_mass"]}])
    if CUDA:  # kernels for 16 bits read such narrow heads by descriptors
        extra |= {"dtype": "fp32"}
    return {
        "name": f"drawn{seed}",
        "head_dim": 16,
        "heads": {"sharing": sharing},
        "mask": {"all_of": parts},
        "score": score,
        **extra,
    }


@pytest.mark.share(16)
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=NIGHTLY) for n in range(5, 60))])
def test_what_lies_behind_sequences_of_random_masks_reaches_no_other_row(seed: int, tmp_path: Path) -> None:
    spec = make_spec(drawn(seed))
    parts = [
        part for part in drawn(seed)["mask"]["all_of"] if part is not BY_POSITIONS
    ]  # which may hide rows between visible ones
    hiding = make_spec({"name": "hiding", "head_dim": 16, "mask": {"all_of": parts}}).mask
    sizes = SIZES if CUDA else random.Random(seed).choice([(50, 50), (70, 70)])
    check_ends(module_of(spec, tmp_path / spec.name), spec, hiding, sizes, seed)


CACHED: dict[str, Any] = {
    "window": {"sliding_window": {"left": 40, "right": 0}},
    "lengths": {"all_of": ["causal", {"key_padding": {"lengths": True}}]},
    "padding": {"all_of": ["causal", "key_padding"]},
    "documents": {"all_of": ["causal", {"document": {"sorted": True}}]},
}
EIGHT_BITS = {"paged": {"page_size": 64}, "dtype": "fp8_e4m3"}


def spec_with_cache(mask: Any, cache: Any) -> Spec:
    return make_spec(
        {"name": "cached", "head_dim": 32, "heads": {"sharing": "gqa"}, "mask": mask, "cache": cache, "backward": False}
    )


def cache_cases() -> list[Any]:
    """Masks, kinds of caches and numbers of queries; each push has all masks, all kinds and both kernels."""
    kinds = {"rows": "contiguous", "pages": {"paged": {"page_size": 16}}, "8 bits": EIGHT_BITS}
    often = {
        ("window", "pages", 1),
        ("window", "8 bits", 1),
        ("window", "rows", 33),
        ("documents", "rows", 1),
        ("padding", "rows", 1),
    }
    often |= {("lengths", "pages", 33)}
    every = [(what, kind, n_q) for what in CACHED for kind in kinds for n_q in (1, 33)]
    return [
        pytest.param(x[0], kinds[x[1]], x[2], id="-".join(map(str, x)), marks=() if x in often else NIGHTLY)
        for x in every
    ]


@pytest.mark.share(16)
@pytest.mark.parametrize(("what", "cache", "n_q"), cache_cases())
def test_keys_of_a_cache_that_no_query_sees_reach_nothing(what: str, cache: Any, n_q: int, tmp_path: Path) -> None:
    """Keys that a window has passed are among them: a server may have given their pages to another sequence."""
    spec = spec_with_cache(CACHED[what], cache)
    page = 0 if cache == "contiguous" else cache["paged"]["page_size"]
    module = module_of(spec, tmp_path / "cached")
    call = make_call(spec, CacheCase(4, 2, n_q, (150, 70), 0, 192, page), torch.float16, DEVICE)
    at = torch.arange(192, device=DEVICE)
    given = {
        "kv_lengths": torch.tensor([140, 50], dtype=torch.int32, device=DEVICE),
        "key_padding": torch.stack([(at >= 21) & (at < 170), (at >= 5) & (at < 60)]),
    }
    arguments = {name: given.get(name, x) for name, x in call.arguments.items()}
    hidden_keys = 0

    def filled(value: float) -> tuple[torch.Tensor, ...]:
        nonlocal hidden_keys
        caches = [x.clone() for x in call.caches]
        for b, (k, _, of_call) in enumerate(call.sequences):
            mine = {name: x[b : b + 1] for name, x in given.items() if name in of_call}
            mine = {name: x[:, : k.shape[2]] if x.dim() > 1 else x for name, x in mine.items()}
            others = {
                name: x[b : b + 1] if isinstance(x, torch.Tensor) and len(x) == len(call.sequences) else x
                for name, x in of_call.items()
            }
            inputs = others | mine
            sees = reference_mask(spec.mask, call.q[b : b + 1], k, inputs).expand(1, 4, n_q, -1)
            rows = (~sees.any(2).any(1)[0]).nonzero()[:, 0]
            hidden_keys += len(rows)
            for cache in caches:
                if page:
                    cache[arguments["page_table"][b, rows // page].long(), rows % page] = value
                else:
                    cache[b, rows] = value
        found: tuple[torch.Tensor, ...] = module.attention.with_kvcache(call.q, *caches, **arguments, return_lse=True)
        return found

    wanted = filled(0.0)
    assert hidden_keys
    for value in (math.nan, math.inf):
        assert all(torch.equal(*x) for x in zip(filled(value), wanted)), f"{value} in hidden keys"
