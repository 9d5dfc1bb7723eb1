"""Documents with a KV cache: the bounds that programs find, calls by the kernels, pages that nothing reads, and the
rules of the verifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from attngen.builders.programs import program_module
from attngen.conformance.kv_cache import POISON, CacheCase, Call, make_call, run_cache_case
from attngen.errors import BuildError, VerifyError
from attngen.interp.host import execute_host
from attngen.interp.tile import _split_places
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.masks.document import OF_QUERY
from attngen.spec import Spec, make_spec
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.verify import verify
from tests.helpers import CUDA, built, changes, edit, lowered, module_of, spec, target
from tests.serving.test_cache import _grown

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if CUDA else "cpu"
KINDS = {
    f"{order}, {'pages' if page else 'contiguous'}": (order, page)
    for order in ("sorted", "any order")
    for page in (0, 16)
}


def _spec(order: str, page: int, **more: Any) -> Spec:
    made = {"name": "with_cache", "heads": {"sharing": "gqa"}, "head_dim": 16, "backward": False}
    made |= {"mask": {"all_of": ["causal", {"document": {"sorted": order == "sorted"}}]}}
    return make_spec({**made, "cache": {"paged": {"page_size": page}} if page else "contiguous", **more})


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Spec, ModuleType, int]]:
    """Return (spec, module, keys per page) of one of KINDS, made once."""
    made: dict[str, tuple[Spec, ModuleType, int]] = {}

    def find(kind: str) -> tuple[Spec, ModuleType, int]:
        if kind not in made:
            of = _spec(*KINDS[kind])
            made[kind] = of, module_of(of, tmp_path_factory.mktemp("documents") / "with_cache"), KINDS[kind][1]
        return made[kind]

    return find


# ---------------------------------------------------------------------------------------------- document bounds


def _ids(kind: str, n: int, seed: int) -> torch.Tensor:
    """Return ids of the keys of four sequences, [4, n]."""
    some = torch.randint(0, 5, (4, n), generator=torch.Generator().manual_seed(seed))
    rising = some.sort(1).values
    far = torch.tensor([-(2**31) + 1, -(2**30), 0, 2**30, 2**31 - 1])
    runs = torch.tensor([9, 3, -7, 4, 0])[rising]
    return {"sorted": rising, "far and sorted": far[rising], "in runs": runs, "any order": some, "far": far[some]}[
        kind
    ].int()


def _found(
    program: str, ids: torch.Tensor, lengths: list[int], n_q: int, new: int, tile: int
) -> dict[str, torch.Tensor]:
    """Return the results of a program, by name, computed on NumPy."""
    module = program_module(program)
    given = {"DOCUMENT_IDS": ids.numpy(), "CACHE_SEQLENS": torch.tensor(lengths).int().numpy(), "Nq": n_q, "Nn": new}
    results = execute_host(module, module.hosts[0], given, {"BLOCK_Q": tile, "BLOCK_KV": tile})
    return {name.lower(): torch.from_numpy(x) for name, x in results.items()}


SIZES = [(1, 1, 0), (1, 40, 1), (5, 40, 5), (48, 40, 0), (17, 64, 3), (3, 0, 1)]  # queries, rows of the cache, new keys


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", ["sorted", "far and sorted", "in runs", "any order", "far"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_programs_find_the_documents_of_queries(size: tuple[int, int, int], kind: str) -> None:
    """Ids past the end of a sequence are not read. Bounds never fall, and are as tight as that allows."""
    n_q, room, new = size
    for seed, tile in enumerate((4, 16, 64)):
        lengths = [0, room // 2, max(0, room - new), room]
        ids = _ids(kind, room, seed)
        for b, n in enumerate(lengths):
            ids[b, min(room, n + new) :] = _ids("any order", room, 99)[b, min(room, n + new) :]
        finds = ["sorted_documents_in_cache"] * ("sorted" in kind) + ["documents_in_cache"]
        for program in finds:
            found = _found(program, ids, lengths, n_q, new, tile)
            for b, n in enumerate(lengths):
                keys = min(room, n + new)
                _check(
                    {name: x[b] for name, x in found.items()}, ids[b, :keys], n_q, exact=program.startswith("sorted")
                )


def _check(found: dict[str, torch.Tensor], ids: torch.Tensor, n_q: int, exact: bool) -> None:
    n = len(ids)
    positions = torch.arange(n - n_q, n)
    own = torch.where(positions >= 0, ids[positions.clamp(min=0)] if n else 0, -(2**31)).int()
    visible, keys = own[:, None] == ids, torch.arange(n)
    within = [
        (found[first][:, None] <= keys) & (keys < found[end][:, None])
        for first, end in zip(OF_QUERY[::2], OF_QUERY[1::2])
        if first in found
    ]
    assert all((found[name].diff() >= 0).all() for name in OF_QUERY if name in found)
    if exact:
        assert torch.equal(within[0], visible)
        return
    assert torch.equal(found["document_q"], own)
    for q, position in enumerate(positions.tolist()):
        later, earlier = visible[q:].any(0), visible[: q + 1].any(0)
        if position < 0:
            assert not within[0][q].any() and not within[1][q].any()
            continue
        assert torch.equal(within[0][q], (keys >= later.int().argmax()) & (keys < n - earlier.flip(0).int().argmax()))
        run = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]).cumsum(0)
        of_run = torch.cat([torch.tensor([0]), run[:-1]])
        assert torch.equal(within[1][q], of_run == of_run[position])


# ---------------------------------------------------------------------------------------------- calls

CASES = [
    lambda page: CacheCase(4, 2, 1, (0, 1, 15, 16, 17, 63, 64, 127, 128, 129), 1, 144, page),
    lambda page: CacheCase(4, 2, 1, (3, 500, 0, 7), 0, 512, page, heads_first=True),
    lambda page: CacheCase(4, 2, 5, (5, 260, 0, 2), 5, 272, page, shared=bool(page)),
    lambda page: CacheCase(8, 2, 16, (127, 128, 300), 16, 320, page),
    lambda page: CacheCase(4, 2, 100, (0, 300), 100, 400, page),
    lambda page: CacheCase(4, 2, 40, (10, 90), 0, 96, page),  # some queries come before the first key
]


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(len(CASES)))
def test_calls_agree_with_naive_attention(at: int, kind: str, modules: Any) -> None:
    made, module, page = modules(kind)
    result = run_cache_case(module, made, CASES[at](page), "fp16", DEVICE, seed=at)
    assert result.ok, f"{kind}: {result}"


OTHERS: list[dict[str, Any]] = [
    {"mask": {"document": {"sorted": True}}},
    {
        "mask": {"all_of": [{"sliding_window": {"left": 20, "right": 0}}, "document"]},
        "score": "sink",
        "schedule": {"split": {"keys": 64}},
    },
    {
        "mask": {"any_of": [{"all_of": ["causal", "document"]}, {"sink_tokens": {"count": 4}}]},
        "heads": {"sharing": "mha"},
    },
    {"heads": {"sharing": "mqa"}, "head_dim": {"qk": 48, "v": 32}, "kv": {"latent": {"rope": 16}}},
]


@pytest.mark.share(16)
@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_documents_go_with_the_rest_of_a_spec(more: dict[str, Any], tmp_path: Path) -> None:
    made = _spec("sorted", 16, **more)
    module, heads = (
        module_of(made, tmp_path / "with_cache"),
        {"mha": (2, 2), "mqa": (4, 1), "gqa": (4, 2)}[made.heads.sharing],
    )
    for case in (CacheCase(*heads, 1, (0, 1, 63, 129), 1, 144, 16), CacheCase(*heads, 40, (3, 90), 40, 144, 16)):
        result = run_cache_case(module, made, case, "fp16", DEVICE)
        assert result.ok, f"{more}: {result}"


def _of_last(made: Spec, page: int, n_q: int, order: str) -> tuple[Call, Call]:
    """Return a call whose queries are in the last document, which starts at key 384, and the same call with NaN in
    earlier keys and invalid page numbers for them."""
    calls = []
    for hidden in (False, True):
        call = make_call(made, CacheCase(4, 2, n_q, (450, 384 + n_q), 0, 464, page), torch.float16, DEVICE)
        ids = call.arguments["document_ids"]
        ids[:] = (
            torch.tensor([0, 1] if order == "sorted" else [1, 0])
            .int()
            .repeat_interleave(192)[torch.arange(464).clamp(max=383)]
        )
        ids[:, 384:] = 7 if order == "sorted" else -5
        for b in range(2 * hidden):
            if page:
                table = call.arguments["page_table"]
                for cache in call.caches:
                    cache[table[b, : 384 // page].long()] = math.nan
                table[b, : 384 // page] = POISON
            else:
                for cache in call.caches:
                    cache[b, :384] = math.nan
        calls.append(call)
    return calls[0], calls[1]


@pytest.mark.share(16)
@pytest.mark.parametrize("n_q", [1, 4, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_other_documents_are_not_read(kind: str, n_q: int, modules: Any) -> None:
    """Neither are their entries in the page table: the bits are those of a call with valid earlier keys."""
    made, module, page = modules(kind)
    shown, hidden = _of_last(made, page, n_q, KINDS[kind][0])
    results = [
        module.attention.with_kvcache(call.q, *call.caches, **call.arguments, return_lse=True)
        for call in (shown, hidden)
    ]
    for x, y in zip(*results):
        assert x.isfinite().all() and torch.equal(x, y)


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_past_the_end_do_not_matter(kind: str, modules: Any) -> None:
    made, module, page = modules(kind)
    call = make_call(made, CacheCase(4, 2, 3, (5, 100), 2, 112, page), torch.float16, DEVICE)
    outs = []
    for poison in (-(2**31), 0, 3, 2**31 - 1):
        for b, keys in enumerate((7, 102)):
            call.arguments["document_ids"][b, keys:] = poison
        outs.append(module.attention.with_kvcache(call.q, *call.caches, **call.arguments))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_grows_gives_the_bits_of_one_that_is_whole(kind: str, modules: Any) -> None:
    made, module, page = modules(kind)
    _grown(module, made, 12, page)


def test_parts_are_of_the_keys_of_documents() -> None:
    """A long sequence whose last document is short has as many splits as a short sequence."""
    kernel = target("decode_document_gqa").kernel("decode")
    start = {
        "CACHE_SEQLENS": np.array([40_000, 100, 40_000]),
        "Nc": 65_536,
        "Nn": 0,
        "items": 600,
        "B": 3,
        "Hkv": 1,
        "queries": 2,
    }
    start |= {"DOCUMENT_FIRST": np.array([[39_900, 39_950], [0, 0], [100, 100]]), "Nq": 4, "BLOCK_Q": 16}
    start |= {"DOCUMENT_END": np.array([[39_950, 40_000], [100, 100], [40_000, 40_000]])}
    splits = {place["b"]: place["num_KV_splits"] for place in _split_places(kernel, start)}
    assert (splits[0], splits[1]) == (1, 1) and splits[2] > 30


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda ids: ids[:, :100], ValueError, r"document_ids has shape \[2, 100\]; expected \[2, 128\]"),
        (lambda ids: ids.float(), TypeError, r"document_ids is torch.float32; expected torch.int32"),
    ],
)
def test_wrong_ids_are_refused(change: Any, error: type[Exception], message: str) -> None:
    call = make_call(spec("decode_document_gqa"), CacheCase(4, 2, 1, (5, 9), 0, 128, 64), torch.float16, DEVICE)
    call.arguments["document_ids"] = change(call.arguments["document_ids"])
    with pytest.raises(error, match=message):
        built("decode_document_gqa").attention.with_kvcache(call.q, *call.caches, **call.arguments)


def test_packed_documents_are_refused() -> None:
    with pytest.raises(BuildError) as error:
        lower(_spec("sorted", 16, mask={"document": {"packed": True}}))
    assert "`cache_seqlens`" in str(error.value) and "{document: {sorted: true}}" in str(error.value)


# ---------------------------------------------------------------------------------------------- passes and rules


def test_classify_tiles_takes_the_first_and_the_last_query_of_packed_rows() -> None:
    made = [
        line
        for line in changes(ClassifyTiles(), lowered("decode_document_gqa")["hoist-scalars"])
        if "_least = " in line or "_greatest = " in line
    ]
    assert [line for line in made if "gather" in line] == [
        "+ %document_end_least = gather %DOCUMENT_END[b, 0] : i32[] @?",
        "+ %document_end_greatest = gather %DOCUMENT_END[b, queries - 1] uses(queries=%queries) : i32[] @?",
        "+ %document_first_least = gather %DOCUMENT_FIRST[b, 0] : i32[] @?",
        "+ %document_first_greatest = gather %DOCUMENT_FIRST[b, queries - 1] uses(queries=%queries) : i32[] @?",
    ]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the target modules for sorted ids and for ids in any order, as text."""
    return {order: print_module(lower(_spec(order, 16))) for order in ("sorted", "any order")}


def _of(text: str, kernel: str, *edits: tuple[str, str]) -> Module:
    """Return a module with edits in one kernel or host program."""
    at = text.index(f"{kernel} ") if kernel.startswith("kernel") else text.index(f"{kernel}\n")
    end = text.index("\n\n", at)
    return parse_module(text[:at] + edit(text[at:end], *edits) + text[end:])


FIRST, LAST = (
    "%document_first_least = gather %DOCUMENT_FIRST[b, 0]",
    "%document_end_greatest = gather %DOCUMENT_END[b, queries - 1]",
)
READ = "of(document_end_greatest=%DOCUMENT_END[b, queries - 1]"
# (order of ids, rule, kernel or host program, old text, new text, the reason)
BROKEN = [
    (
        "sorted",
        "extremes",
        "kernel @decode",
        FIRST,
        f"{FIRST[:-2]}queries - 1] uses(queries=%queries)",
        "to be the min of %document_first",
    ),
    (
        "sorted",
        "extremes",
        "kernel @decode",
        FIRST,
        FIRST.replace("FIRST", "END"),
        "%document_first_least is not proven to be the min",
    ),
    ("sorted", "extremes", "kernel @decode", LAST, LAST.replace("queries - 1", "0"), "to be the max of %document_end"),
    (
        "sorted",
        "extremes",
        "kernel @decode",
        f"{FIRST} ",
        f"{FIRST} where(Nk > 5) uses(Nk=%Nk) ",
        "to be the min of %document_first",
    ),
    (
        "sorted",
        "extremes",
        "kernel @decode",
        "[b, q_idx % queries] uses(Nq=%Nq, queries=%queries) where(",
        "[b, q_idx % queries] uses(Nk=%Nk, Nq=%Nq, queries=%queries) where(Nk > 5 and ",
        "to be the",
    ),
    (
        "sorted",
        "split-kv",
        "kernel @decode",
        READ,
        READ.replace("queries - 1", "queries"),
        "expected an i32 of sequence b, in bounds of that argument",
    ),
    (
        "sorted",
        "split-kv",
        "kernel @decode",
        READ,
        READ.replace("[b, ", "[0, "),
        "expected an i32 of sequence b, in bounds of that argument",
    ),
    (
        "sorted",
        "split-kv",
        "kernel @decode",
        READ,
        READ.replace("%DOCUMENT_END", "%PAGE_TABLE"),
        "reads `document_end_greatest` of %PAGE_TABLE",
    ),
    (
        "sorted",
        "split-kv",
        "kernel @decode",
        READ,
        READ.replace("document_end_greatest=", "other="),
        "which names `document_end_greatest`",
    ),
    (
        "sorted",
        "split-kv",
        "kernel @combine",
        READ,
        READ.replace("queries - 1", "0"),
        "keys are split in another way than in @",
    ),
    (
        "sorted",
        "host-arguments",
        "host @decode",
        "%DOCUMENT_FIRST = alloc : i32[B, Nq]",
        "%DOCUMENT_FIRST = alloc : i32[B, Nc]",
        "expected i32[B, Nq], as `derive` says",
    ),
    (
        "sorted",
        "host-launches",
        "host @decode",
        "LSE=%LSE_rows) sizes(Nq=Gq, queries=Nq)\n    copy",
        "LSE=%LSE_rows, DOCUMENT_END=%DOCUMENT_FIRST) sizes(Nq=Gq, queries=Nq)\n    copy",
        "it gives @decode and @combine other sizes or tensors",
    ),
    (
        "sorted",
        "loops",
        "kernel @sorted_documents_in_cache",
        "ranges(0 .. 29)",
        "ranges(0 .. 28)",
        "does not run over 0 .. 29",
    ),
    (
        "any order",
        "host-launches",
        "kernel @document_keys",
        "kv in cdiv(Nc, BLOCK_KV)",
        "kv in cdiv(Nn, BLOCK_KV)",
        "its grid has kv in cdiv(Nn, BLOCK_KV); expected some of kv in cdiv(Nc, BLOCK_KV)",
    ),
    (
        "any order",
        "host-written",
        "host @decode",
        "    launch @document_keys\n",
        "    %OTHER = alloc : i32[B, Nq] @hbm\n    launch @document_keys args(DOCUMENT_END=%OTHER)\n",
        "@document_keys reads %OTHER, which is not written on every path to it",
    ),
    (
        "any order",
        "indexing",
        "kernel @document_keys",
        "where(full_end < Nk and q_idx < Nq)",
        "where(full_end < Nk)",
        "may write %DOCUMENT_FULL_END past its end",
    ),
]


@pytest.mark.parametrize(("order", "rule", "kernel", "old", "new", "reason"), BROKEN)
def test_a_rule_is_broken_by_its_edit(
    order: str, rule: str, kernel: str, old: str, new: str, reason: str, texts: dict[str, str]
) -> None:
    with pytest.raises(VerifyError) as error:
        verify(_of(texts[order], kernel, (old, new)))
    assert (error.value.rule, reason in error.value.reason) == (rule, True), error.value
