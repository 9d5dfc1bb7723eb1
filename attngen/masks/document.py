"""Document: a query sees the keys of its own document."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field, model_validator

from attngen.ir import Bool, Derived, Fact, Input, symbol
from attngen.masks import KV, Mask, Q, Sizes

if TYPE_CHECKING:
    import torch


def packed_spans(
    cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, n_q: int, n_kv: int, causal: int
) -> tuple[torch.Tensor, ...]:
    """Four int32 tensors: the first and the end of the keys that each query sees [n_q]; the same, in queries, for each
    key [n_kv].

    Document d has the queries cu_seqlens_q[d] .. cu_seqlens_q[d + 1] and the keys cu_seqlens_kv[d] .. cu_seqlens_kv[d +
    1]; with `causal` its last query meets its last key.
    """
    if cu_seqlens_q.shape != cu_seqlens_kv.shape or not cu_seqlens_q.numel():
        shapes = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_kv.shape)}"
        raise ValueError(
            f"attention: cu_seqlens_q and cu_seqlens_kv have shapes {shapes}; expected one number more than documents "
            "in both"
        )
    cu_seqlens_q, cu_seqlens_kv = (
        x.cummax(0).values for x in (cu_seqlens_q, cu_seqlens_kv)
    )  # kernels wait for one another in an order that needs bounds that never fall
    spans = []
    for own, other, n, side in ((cu_seqlens_q, cu_seqlens_kv, n_q, 1), (cu_seqlens_kv, cu_seqlens_q, n_kv, -1)):
        position = torch.arange(n, device=own.device, dtype=torch.int32)
        document = torch.searchsorted(own, position, right=True) - 1
        inside, before = (document >= 0) & (document < own.shape[0] - 1), document < 0
        document = document.clamp(0, max(0, own.shape[0] - 2))
        last = (document + 1).clamp(max=own.shape[0] - 1)
        first, end = other[document], other[last]
        meets = position + end - own[last]  # the other side's position that is level with this one
        if causal and side > 0:
            end = torch.minimum(end, meets + 1)
        elif causal:
            first = torch.maximum(first, meets)
        none = torch.where(
            before, other[0], other[-1]
        )  # positions in no document see nothing, and no row outside of all documents
        spans += [torch.where(inside, x, none).int() for x in (first, torch.maximum(first, end))]
    return tuple(spans)


# Host programs in documents.ir and sorted_documents.ir; with a KV cache, those in the files that end in _in_cache.ir.
SPANS, SORTED_SPANS = "@documents", "@sorted_documents"
# Numbers per query, which rise along the queries; and the same per key, as positions of queries:
# 1. This query and all later ones see no key before the first number.
# 2. This query and all earlier ones see no key from the second one on.
# 3. and 4. Keys from the third number of query j up to the fourth of query i are in the documents of all queries from i
# to j.
OF_QUERY = ("document_first", "document_end", "document_full_first", "document_full_end")
OF_KEY = ("document_q_first", "document_q_end", "document_q_full_first", "document_q_full_end")
IDS = ("document_q", "document_kv", *OF_QUERY, *OF_KEY)
PACKED = ("document_first", "document_end", "document_q_first", "document_q_end")


class Document(Mask):
    """Queries see the keys of their own document: `document_ids` is int32 [B, Nk], in any order.

    Queries are the last Nq positions. Ids must be above `-2**31`; with ids of `2**30` or more, in absolute value, calls
    are right but may be slower. With `sorted`, ids never fall along a sequence: bounds are two searches, and kernels
    load no ids of keys. With a KV cache, ids are those of the keys that a sequence has; those past its last key do not
    matter.

    With `packed`, sequences lie one after the other: `cu_seqlens_q` and `cu_seqlens_kv` (int32 [documents + 1]) say
    where each starts, and `causal` applies inside each, with its last query aligned with its last key. Make ids causal
    with `all_of: [causal, document]`.
    """

    name: ClassVar[str] = "document"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (packed_spans,)
    sorted: bool = Field(
        default=False,
        description="ids never fall along a sequence, which is faster; calls check it if ATTNGEN_CHECK=1 is set",
    )
    packed: bool = False
    causal: bool = Field(default=False, description="a query sees no later key of its own packed document")

    @model_validator(mode="after")
    def _causal_is_packed(self) -> Document:
        if self.causal and not self.packed:
            raise ValueError("has `causal` without `packed`; for ids write {all_of: [causal, document]}")
        if self.sorted and self.packed:
            raise ValueError("has `sorted` and `packed`; packed documents have no ids, and are in order")
        return self

    def inputs(self) -> tuple[Input, ...]:
        if self.packed:
            help = "where each document starts, and the end of the last, among the"
            promises = {n: ("first=0", f"most={n}", "rising") for n in ("Nq", "Nk")}
            sides = (("q", "queries", "Nq"), ("kv", "keys", "Nk"))
            return tuple(Input(f"cu_seqlens_{x}", "i32", ("*",), f"{help} {what}", promises[n]) for x, what, n in sides)
        help = "the document of each key, above -2**31; queries are the last Nq positions"
        return (Input("document_ids", "i32", ("B", "Nk"), help, ("rising",) * self.sorted),)

    def derived(self) -> tuple[Derived, ...]:
        q, kv = ("B", "Nq"), ("B", "Nk")
        if self.packed:
            shapes = (q[1:], q[1:], kv[1:], kv[1:])
            sources = ("cu_seqlens_q", "cu_seqlens_kv", "Nq", "Nk", str(int(self.causal)))
            return (Derived(PACKED, shapes, packed_spans.__name__, sources, rising=PACKED),)
        if self.sorted:
            return (Derived(PACKED, (q, q, kv, kv), SORTED_SPANS, ("document_ids", "Nq"), rising=PACKED),)
        return (Derived(IDS, (q, kv, *(q,) * 4, *(kv,) * 4), SPANS, ("document_ids", "Nq"), rising=IDS[2:]),)

    def expression(self) -> Bool:
        if self.packed or self.sorted:
            first, end = map(symbol, PACKED[:2])
            return sympy.And(first <= KV, end > KV)
        return sympy.Eq(symbol("document_q"), symbol("document_kv"))

    def by_key(self) -> Bool:
        if self.packed or self.sorted:
            first, end = map(symbol, PACKED[2:])
            return sympy.And(first <= Q, end > Q)
        return self.expression()

    def facts(self) -> tuple[Fact, ...]:
        if self.packed or self.sorted:
            return ()
        first, end, full_first, full_end, q_first, q_end, q_full_first, q_full_end = map(symbol, IDS[2:])
        needs = sympy.And(first <= KV, end > KV, q_first <= Q, q_end > Q)
        enough = sympy.Or(sympy.And(full_first <= KV, full_end > KV), sympy.And(q_full_first <= Q, q_full_end > Q))
        return (Fact(self.expression(), needs, enough),)

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        import torch

        if not self.packed:  # ids rise in the first sequence, and are in any order in the others
            ids = torch.randint(0, 4, (sizes.batch, sizes.n_kv), generator=generator, dtype=torch.int32)
            rows = sizes.batch if self.sorted else 1
            ids[:rows] = ids[:rows].sort(1).values
            return {"document_ids": ids}
        cuts = (torch.randint(0, n + 1, (3,), generator=generator).sort().values for n in (sizes.n_q, sizes.n_kv))
        return {
            f"cu_seqlens_{x}": torch.tensor([0, *cut.tolist(), n], dtype=torch.int32)
            for x, cut, n in zip(("q", "kv"), cuts, (sizes.n_q, sizes.n_kv))
        }

    def workload(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        """Documents of about 1,000 keys, in order."""
        import torch

        count = -(-sizes.n_kv // 1000)
        if not self.packed:
            ids = torch.arange(sizes.n_kv) * count // max(1, sizes.n_kv)
            return {"document_ids": ids.int().repeat(sizes.batch, 1)}
        return {
            f"cu_seqlens_{x}": (torch.arange(count + 1) * n // max(1, count)).int()
            for x, n in (("q", sizes.n_q), ("kv", sizes.n_kv))
        }

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        if not self.packed:
            ids = inputs["document_ids"]
            mask = torch.zeros(sizes.batch, 1, sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
            for q in range(sizes.n_q):
                if q + sizes.n_kv - sizes.n_q >= 0:
                    mask[:, 0, q] = ids == ids[:, q + sizes.n_kv - sizes.n_q, None]
            return mask
        mask = torch.zeros(1, 1, sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        q_ends, kv_ends = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_kv"].tolist()
        for q_start, q_end, kv_start, kv_end in zip(q_ends, q_ends[1:], kv_ends, kv_ends[1:]):
            n_q, n_kv = q_end - q_start, kv_end - kv_start
            inside = torch.ones(n_q, n_kv, dtype=torch.bool, device=device)
            mask[0, 0, q_start:q_end, kv_start:kv_end] = inside.tril(n_kv - n_q) if self.causal else inside
        return mask
