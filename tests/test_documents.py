"""Documents by ids: the tensors that a kernel computes before attention, compared with their definition for each
pair of query and key."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.conformance.derive import executed
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower
from attngen.masks.document import OF_KEY, OF_QUERY, PACKED, Document
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import CUDA, built, edit, module_of, target

pytestmark = pytest.mark.numerics

Plan = dict[str, torch.Tensor]
SIZES = [(1, 1), (5, 0), (0, 7), (17, 17), (9, 40), (48, 40), (1, 64), (64, 1)]  # queries and keys
# Ids near the limits of int32: documents share entries of the tables.
FAR = [-(2**31) + 1, -(2**31) + 9, 2**31 - 1, 2**30 + 5, 0]


def ids_of(kind: str, n: int, seed: int) -> torch.Tensor:
    """Ids of two sequences, [2, n] int32."""
    chance = torch.Generator().manual_seed(seed)
    some = torch.randint(0, 5, (2, n), generator=chance)
    rising = some.sort(1).values
    kinds = {
        "sorted": rising,
        "in runs": torch.tensor([9, 3, -7, 4, 0])[rising],
        "any order": some - 2,
        "one bucket": some * n,  # the same number modulo n
        "far": torch.tensor(FAR)[some],
    }
    return kinds[kind].int()


def same(ids: torch.Tensor, n_q: int) -> torch.Tensor:
    """[2, n_q, n]: whether a query is in the document of a key; queries are the last n_q positions."""
    found = torch.zeros(*ids.shape[:1], n_q, ids.shape[1], dtype=torch.bool)
    for q in range(n_q):
        if (position := q + ids.shape[1] - n_q) >= 0:
            found[:, q] = ids == ids[:, position, None]
    return found


def inside(plan: Plan, names: tuple[str, ...], others: int) -> torch.Tensor:
    """[2, rows, others]: whether a position of the other axis lies between the two bounds of a row."""
    first, end = (plan[name].cpu()[..., None] for name in names)
    return (first <= torch.arange(others)) & (end > torch.arange(others))


def check(plan: Plan, ids: torch.Tensor, n_q: int) -> None:
    """Check the facts of the mask: every visible pair lies inside the outer bounds, every pair inside the inner
    bounds is visible, and bounds never decrease."""
    n, visible = ids.shape[1], same(ids, n_q)
    assert torch.equal(plan["document_q"].cpu()[:, :, None] == plan["document_kv"].cpu()[:, None], visible)
    assert not (visible & ~inside(plan, OF_QUERY[:2], n)).any()
    assert not (visible & ~inside(plan, OF_KEY[:2], n_q).transpose(1, 2)).any()
    assert not (inside(plan, OF_QUERY[2:], n) & ~visible).any()
    assert not (inside(plan, OF_KEY[2:], n_q).transpose(1, 2) & ~visible).any()
    for name in (*OF_QUERY, *OF_KEY):
        assert (plan[name].diff(dim=1) >= 0).all(), name


def by_executor(mask: Document, ids: torch.Tensor, n_q: int, tile: int) -> Plan:
    (derived,) = mask.derived()
    return executed(derived, Sizes(2, 1, 1, n_q, ids.shape[1]), {"document_ids": ids}, tile)


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", ["sorted", "in runs", "any order", "one bucket", "far"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bounds_are_right(size: tuple[int, int], kind: str) -> None:
    n_q, n = size
    for seed, tile in enumerate((4, 16, 64, 16, 4, 64)):
        ids = ids_of(kind, n, seed)
        check(by_executor(Document(), ids, n_q, tile), ids, n_q)


@pytest.mark.parametrize("size", [(17, 17), (9, 40), (48, 40)], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "in runs", "any order", "one bucket"])
def test_bounds_are_as_close_as_rising_bounds_can_be(size: tuple[int, int], kind: str) -> None:
    """Bounds extend from the first key of the documents of this position and later ones to the last key of the
    documents of this position and earlier ones."""
    n_q, n = size
    ids = ids_of(kind, n, 1)
    plan, pairs = by_executor(Document(), ids, n_q, 16), same(ids, n)
    of_queries, of_keys = inside(plan, OF_QUERY[:2], n), inside(plan, OF_KEY[:2], n_q)
    for position in range(n):
        later, earlier = pairs[:, position:].any(1), pairs[:, : position + 1].any(1)
        first, last = later.int().argmax(1, keepdim=True), n - 1 - earlier.flip(1).int().argmax(1, keepdim=True)
        keys, queries = torch.arange(n), torch.arange(n_q) + n - n_q
        assert torch.equal(of_keys[:, position], (first <= queries) & (queries <= last))
        if position + n_q - n >= 0:
            assert torch.equal(of_queries[:, position + n_q - n], (first <= keys) & (keys <= last))


def test_inner_bounds_are_the_run_that_a_query_is_in() -> None:
    ids = torch.tensor([[4, 4, 7, 7, 7, 4, 2]], dtype=torch.int32)
    plan = by_executor(Document(), ids, 7, 4)
    assert plan["document_full_first"].tolist() == [[0, 0, 2, 2, 2, 5, 6]]
    assert plan["document_full_end"].tolist() == [[2, 2, 5, 5, 5, 6, 7]]
    assert plan["document_first"].tolist() == [[0, 0, 0, 0, 0, 0, 6]]
    assert plan["document_end"].tolist() == [[6, 6, 6, 6, 6, 6, 7]]
    for name in ("first", "end"):
        assert torch.equal(plan[f"document_q_full_{name}"], plan[f"document_full_{name}"])
    fewer = by_executor(Document(), ids, 4, 4)  # queries are the last four positions
    assert fewer["document_q_full_first"].tolist() == [[0, 0, 0, 0, 0, 2, 3]]
    assert fewer["document_q_full_end"].tolist() == [[0, 0, 2, 2, 2, 3, 4]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bounds_of_sorted_ids_are_their_documents(size: tuple[int, int]) -> None:
    n_q, n = size
    for seed, tile in enumerate((4, 16, 64)):
        ids = ids_of("sorted", n, seed)
        plan = by_executor(Document(sorted=True), ids, n_q, tile)
        assert torch.equal(inside(plan, PACKED[:2], n), same(ids, n_q))
        assert torch.equal(inside(plan, PACKED[2:], n_q), same(ids, n_q).transpose(1, 2))


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    made = make_spec({"name": "in_order", "head_dim": 16, "dtype": "fp16", "mask": {"document": {"sorted": True}}})
    return module_of(made, tmp_path_factory.mktemp("documents") / "in_order")


LONG = [(1000, 1000), (1, 8192), (8200, 8200), (70_000, 70_000)] if CUDA else [(600, 600)]


@pytest.mark.share(16)
@pytest.mark.parametrize("size", [*SIZES, (130, 129), *LONG], ids=str)
def test_the_kernel_gives_what_the_executor_gives(size: tuple[int, int], device: str, in_order: ModuleType) -> None:
    """Results are equal to the bit, in whatever order threads run; ids are a slice of a wider tensor."""
    n_q, n = size
    of = built("document_gqa"), Document()
    for module, mask, kind in (
        (*of, "any order"),
        (*of, "far"),
        (*of, "one bucket"),
        (in_order, Document(sorted=True), "sorted"),
    ):
        ids = ids_of(kind, n, 3)
        wide = torch.full((2, n + 3), 99, dtype=torch.int32)
        wide[:, 1 : n + 1] = ids
        plan = module.attention.plan(wide.to(device)[:, 1 : n + 1], n_q)._asdict()
        expected = by_executor(mask, ids, n_q, 4096)
        assert plan.keys() == expected.keys()
        for name, x in plan.items():
            assert x.dtype == torch.int32 and torch.equal(x.cpu(), expected[name]), name


@pytest.mark.parametrize("kind", ["far", "one bucket"])
def test_the_kernel_is_right_where_ids_share_a_bucket(kind: str, device: str) -> None:
    ids = ids_of(kind, 100, 2)
    for n_q in (100, 90, 110):
        check(built("document_gqa").attention.plan(ids.to(device), n_q)._asdict(), ids, n_q)


@pytest.mark.gpu
def test_the_kernel_gives_the_same_bits_each_time(device: str) -> None:
    """Also where thousands of threads write to the table entry of one document at once."""
    attention = built("document_gqa").attention
    for ids in (
        torch.zeros(8, 30_000),
        torch.arange(30_000).repeat(8, 1) % 2,
        torch.randint(-(2**29), 2**29, (8, 30_000)),
    ):
        plans = [torch.stack(attention.plan(ids.int().to(device), 30_000)) for _ in range(20)]
        assert all(torch.equal(plan, plans[0]) for plan in plans)


def test_a_plan_takes_ids_in_int64(device: str) -> None:
    attention = built("document_gqa").attention
    ids = ids_of("in runs", 20, 0).to(device)
    for a, b in zip(attention.plan(ids, 20), attention.plan(ids.long(), 20)):
        assert torch.equal(a, b)


def test_int64_beyond_32_bits_counts_as_the_nearest_that_fits(device: str) -> None:
    """Documents stay distinct, and a length greater than the number of keys still means all keys."""
    ids = ids_of("sorted", 20, 0).to(device).clamp(max=1)
    plan = built("document_gqa").attention.plan
    assert all(
        torch.equal(a, b) for a, b in zip(plan(ids, 20)[2:], plan(ids.long() * 2**32, 20)[2:])
    )  # all tensors except the ids
    q, k = torch.randn(1, 4, 20, 128, device=device), torch.randn(1, 2, 20, 128, device=device)
    padded = built("causal_padding_gqa").attention
    for given, like in ((2**31, 20), (2**32 + 5, 20), (-(2**32) + 5, 0)):
        lengths = [torch.tensor([n], device=device) for n in (given, like)]
        assert torch.equal(*(padded(q.half(), k.half(), k.half(), kv_lengths=n, check=False) for n in lengths))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (
            torch.zeros(2, 8),
            TypeError,
            r"document_ids is torch.float32; expected torch.int32 or torch.int64 \[any, any\]",
        ),
        (torch.zeros(8, dtype=torch.int32), ValueError, r"document_ids has shape \[8\]; expected \[any, any\]"),
        ([[0, 1]], TypeError, "document_ids is a list; expected a dense torch.int32 tensor"),
    ],
)
def test_a_plan_of_something_else_is_refused(ids: Any, error: type[Exception], message: str, device: str) -> None:
    given = ids.to(device) if isinstance(ids, torch.Tensor) else ids
    with pytest.raises(error, match=message):
        built("document_gqa").attention.plan(given, 8)


def test_plans_are_traced(device: str) -> None:
    """The host program is an operator, whose fake has the shapes and dtypes of the results."""
    module = built("document_gqa")
    ids = ids_of("any order", 12, 0).to(device)
    torch.library.opcheck(module.DOCUMENTS, (ids, 9))


# ---------------------------------------------------------------------------------------------- the IR

# (rule, old text, new text, the reason)
BROKEN = [
    (
        "types",
        "scan max %start over(BLOCK_KV)",
        "scan sum %start over(BLOCK_KV)",
        "`sum` of i32 is not a scan; expected max of f32 or i32",
    ),
    (
        "types",
        "%end_here = scan max %end over(BLOCK_KV) : i32",
        "%end_here = scan max %end over(BLOCK_KV) : b1",
        "keeps the type of its",
    ),
    (
        "types",
        "scan max %start over(BLOCK_KV)",
        "scan max %start over(BLOCK_Q)",
        "keeps the type of its value, which has",
    ),
    ("types", "op(min)", "op(least)", "`least` is no operation of a scatter; expected add, min, max, put"),
    ("types", "op(min)", "op(max)", "writes i32 to %KEYS_LEFT by `max`; expected i32, and an output of that"),
    (
        "host-written",
        "scatter %KEYS_LEFT[b, side, last_bucket]",
        "scatter %DOCUMENT_KV[b, last_bucket]",
        "@document_spans reads %DOCUMENT_KV, which is not written on every path to it",
    ),
    (
        "types",
        "%start_init = init 0 : i32[]",
        "%start_init = init 0.5 : i32[]",
        "starts at `0.5` as i32; expected a number",
    ),
    (
        "types",
        "%start_init = init 0 : i32[]",
        "%start_init = init 2147483648 : i32[]",
        "or an integer of 32 bits as i32",
    ),
    (
        "signature",
        "%KEYS_LEFT = arg scratch",
        "%KEYS_LEFT = arg in",
        "writes %KEYS_LEFT, which is no tensor of role `out`",
    ),
    (
        "loops",
        "loop q ranges(0 .. cdiv(Nq, BLOCK_Q))",
        "loop q ranges(1 .. cdiv(Nq, BLOCK_Q))",
        "does not run over all tiles of q",
    ),
    # indices
    (
        "indexing",
        "where(ends and last_bucket >= 0 and last_bucket < Nk)",
        "where(ends and last_bucket >= 0)",
        "may write %KEYS_LEFT past its end",
    ),
    ("indexing", "%DOCUMENT_FIRST[b, Nq - kv_idx - 1]", "%DOCUMENT_FIRST[b, max(0, Nq - kv_idx - 1)]", "may put two"),
    (
        "indexing",
        "[b, Nq - kv_idx - 1] %document_edge where(",
        "[b, Nq - 2*kv_idx] %document_edge where(Nq - 2*kv_idx < Nq and ",
        "may put two",
    ),
    (
        "indexing",
        "[b, Nq - kv_idx - 1] %document_edge where(Nq - kv_idx - 1",
        "[b, Nq - kv_idx - kv_start] %document_edge where(Nq - kv_idx - kv_start",
        "may put two",
    ),
    (
        "indexing",
        "gather %KEYS_LEFT[b, side, bucket]",
        "gather %KEYS_LEFT[0, side, bucket]",
        "%KEYS_LEFT of other programs; expected [side, b",
    ),
    (
        "indexing",
        "gather %KEYS_LEFT[b, side, bucket]",
        "gather %KEYS_LEFT[b, 1, bucket]",
        "%KEYS_LEFT of other programs; expected [side, b",
    ),
    (
        "indexing",
        "scatter %KEYS_LEFT[b, side, last",
        "scatter %KEYS_LEFT[0, side, last",
        "%KEYS_LEFT of other programs; expected [side, b",
    ),
    (
        "indexing",
        "scatter %DOCUMENT_Q[b, -Nk",
        "scatter %DOCUMENT_Q[0, -Nk",
        "accesses elements of %DOCUMENT_Q of other programs",
    ),
    (
        "indexing",
        "%document where(kv_idx < Nk and side < 1)",
        "%document where(kv_idx < Nk)",
        "%DOCUMENT_KV of other programs",
    ),
    (
        "indexing",
        "%zero where(side > 0 and q_idx < Nq and q_idx < -Nk + Nq) op(put)\n    yield",
        "%zero where(side < 1 and q_idx < Nq and q_idx < -Nk + Nq) op(put)\n    yield",
        "accesses elements of %DOCUMENT_FIRST of other programs",
    ),
    (
        "indexing",
        "scatter %DOCUMENT_KV[b, kv_idx] %document where(kv_idx < Nk and side < 1) op(put)",
        "store %DOCUMENT_KV[b, kv] %document check(kv)",
        "writes rows of %DOCUMENT_KV that the other programs along side write, too",
    ),
    (
        "indexing",
        "scatter %DOCUMENT_Q[b, q_idx] %no_document where(q_idx < Nq and q_idx < -Nk + Nq and side < 1) op(put)",
        "store %DOCUMENT_Q[b, q] %no_document check(q)",
        "writes rows of %DOCUMENT_Q that the other programs along side write, too",
    ),
    (
        "signature",
        "grid(side in 2, b in B)",
        "grid(side in 2, side in 2, b in B)",
        "an axis is twice in the grid, side, side, b",
    ),
    (
        "loops",
        "= loop q ranges(0 .. cdiv(Nq, BLOCK_Q))",
        "= loop other ranges(0 .. group)",
        "does not run over 0 .. the extent of its variable",
    ),
    # the order in which threads access tensors
    (
        "barriers",
        "    %last_key = map",
        (
            "    %unset_again = init 2147483647 : i32[BLOCK_KV] @reg\n"
            "    store %KEYS_LEFT_head[kv] %unset_again check(kv)\n"
            "    %last_key = map"
        ),
        "@insert writes elements of %KEYS_LEFT twice, in no fixed order",
    ),
    (
        "barriers",
        "    barrier\n    %start_init",
        "    %start_init",
        "in @scan_keys accesses %KEYS_LEFT, which @insert writes; expected a barrier",
    ),
    (
        "barriers",
        "    barrier\n    %inserted",
        "    %inserted",
        "in @insert accesses %KEYS_LEFT, which @clear_tables writes; expected a barrier",
    ),
    (
        "barriers",
        "    %ends = map",
        "    %seen = gather %KEYS_LEFT[b, side, last_key] uses(last_key=%last_key) "
        "where(last_key >= 0 and last_key < Nk) : i32[BLOCK_KV] @reg\n"
        "    %ends = map",
        "in @insert reads %KEYS_LEFT, which other iterations of the loop write",
    ),
    (
        "barriers",
        "    scatter %DOCUMENT_END[b, -Nk",
        "    scatter %DOCUMENT_Q[b, -Nk + Nq + kv_idx] %run_edge "
        "where(-Nk + Nq + kv_idx >= 0 and side < 1 and -Nk + Nq + kv_idx < Nq) op(put)\n"
        "    scatter %DOCUMENT_END[b, -Nk",
        "@scan_keys writes elements of %DOCUMENT_Q twice, in no fixed order",
    ),
    (
        "barriers",
        "store %KEYS_LEFT_2_head[kv] %unset check(kv)",
        "scatter %KEYS_LEFT_2[b, side, kv_idx] %unset where(kv_idx < Nk) op(put)",
        "%keys_left_2 reads %KEYS_LEFT_2, which nothing has filled",
    ),
]


@pytest.mark.parametrize(("rule", "old", "new", "reason"), BROKEN)
def test_a_rule_is_broken_by_its_edit(rule: str, old: str, new: str, reason: str) -> None:
    head, kernel = print_module(target("document_gqa")).split("\nkernel @document_spans")
    with pytest.raises(VerifyError) as error:
        verify(parse_module(f"{head}\nkernel @document_spans{edit(kernel, (old, new))}"))
    assert (error.value.rule, reason in error.value.reason) == (rule, True), error.value


def test_a_program_gives_what_derive_says() -> None:
    text = print_module(target("document_gqa"))
    with pytest.raises(
        VerifyError, match="host-structure.*it returns DOCUMENT_KV, .*; expected DOCUMENT_Q, DOCUMENT_KV, "
    ):
        verify(parse_module(edit(text, ("values(DOCUMENT_Q=%DOCUMENT_Q, DOCUMENT_KV", "values(DOCUMENT_KV"))))
    with pytest.raises(
        VerifyError,
        match=r"host-arguments.*its result DOCUMENT_Q is i32\[B, Nk\]; expected i32\[B, Nq\], as `derive` says",
    ):
        verify(parse_module(edit(text, ("values(DOCUMENT_Q=%DOCUMENT_Q,", "values(DOCUMENT_Q=%DOCUMENT_KV,"))))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "= @documents(document_ids, Nq)",
            "= @documents(Nq, document_ids)",
            "gives @documents Nq, document_ids; expected",
        ),
        (
            "= @documents(document_ids, Nq)",
            "= @documents(document_ids, Nk)",
            "gives @documents document_ids, Nk; expected",
        ),
        (
            "launch @document_spans",
            "launch @document_spans args(KEYS_LEFT_2=%KEYS_LEFT)",
            "%KEYS_LEFT is passed as %KEYS_LEFT, which is written",
        ),
        ("grid(side in 2, b in B)", "grid(side in 2, b in Nq)", "its grid has b in Nq; expected some of"),
    ],
)
def test_what_a_program_is_given_is_what_it_takes(old: str, new: str, reason: str) -> None:
    from attngen.codegen.render import render

    with pytest.raises(VerifyError) as error:
        render(verify(parse_module(edit(print_module(target("document_gqa")), (old, new)))))
    assert reason in error.value.reason


def test_a_parameter_may_have_the_name_of_a_programs_value() -> None:
    mask = {"all_of": ["document", {"expr": "kv_idx >= first", "params": {"first": {"scalar": "int"}}}]}
    lower(make_spec({"name": "named", "head_dim": 16, "mask": mask}))


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from attngen.codegen.render import render

    made = parse_module(edit(print_module(target("document_gqa")), ("= @documents(", "= @document(")))
    refused = "is of @document, which is no host program; the host programs are forward, backward, jvp, documents"
    with pytest.raises(VerifyError, match=refused):
        render(made)
