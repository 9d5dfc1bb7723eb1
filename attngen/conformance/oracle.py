"""The oracle: eager attention in PyTorch, written by hand. It shares nothing with the symbolic path."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from attngen.ir.sizes import Sizes
from attngen.masks import Mask
from attngen.scores import Score


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    weight: torch.Tensor | None = None,
    modify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sink: torch.Tensor | None = None,
    rounded: torch.dtype | None = None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * q @ k^T) @ v with the whole score matrix in memory, in the dtype of its inputs.

    q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] with Hq a multiple of Hkv.
    mask: bool, broadcastable to [B, Hq, Nq, Nk], True for visible pairs.
    weight: the factors of dropout for the probabilities (see dropout_weight).
    modify: a function of the scores, applied before the mask.
    sink [Hq]: a logit that is added to every row's softmax.
    rounded: the dtype to which weights are rounded before they are multiplied with v.
    multiply: the matrix product.

    Returns (out [B, Hq, Nq, Dv], natural-log LSE [B, Hq, Nq]). A row that sees nothing has output 0, LSE -inf and zero
    gradients.
    """
    scores = _masked_scores(q, k, mask, scale, modify, multiply)
    v = v.repeat_interleave(q.shape[1] // v.shape[1] if v.shape[1] else 1, 1)
    if sink is not None:  # a key with this score and the value 0
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        mask = torch.nn.functional.pad(mask.expand(*mask.shape[:3], scores.shape[-1] - 1), (0, 1), value=True)
        weight = None if weight is None else torch.nn.functional.pad(weight, (0, 1))
    empty = ~mask.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    probabilities = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    if weight is not None:
        probabilities = probabilities * weight.to(probabilities.dtype)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0).float() if scores.dtype.itemsize < 4 else scores, -1)
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:-1], v.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    probabilities = probabilities.to(rounded).to(v.dtype) if rounded else probabilities
    return multiply(probabilities, v), lse.masked_fill(empty[..., 0], -torch.inf) if scores.shape[-1] else lse


def naive_max_score(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    modify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """Return the largest score that each query sees, [B, Hq, Nq], -inf for one that sees nothing. Arguments as in
    naive_attention."""
    scores = _masked_scores(q, k, mask, scale, modify, multiply).detach()
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


def naive_entropy(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    modify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sink: torch.Tensor | None = None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """Return the entropy in nats of each query's weights and its sink's, -sum p ln p, [B, Hq, Nq]. Arguments as in
    naive_attention.

    It is the entropy before dropout. It is 0 for a query that sees nothing, which has zero gradients.
    """
    scores = _masked_scores(q, k, mask, scale, modify, multiply)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    hidden = scores.detach() == -torch.inf
    empty = hidden.all(-1, keepdim=True)
    logarithms = torch.log_softmax(scores.masked_fill(empty, 0.0), -1)
    terms = logarithms.exp() * logarithms.masked_fill(hidden, 0.0)  # 0 ln 0 is 0
    return -terms.masked_fill(empty, 0.0).sum(-1)


def naive_key_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    modify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sink: torch.Tensor | None = None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """Return the sum of all queries' weights per key, before dropout, [B, Hq, Nk]. Arguments as in naive_attention."""
    scores = _masked_scores(q, k, mask, scale, modify, multiply).detach()
    if sink is not None:
        scores = torch.cat(
            [scores, sink.detach().to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1
        )
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return weights[..., : k.shape[2]].sum(2)


def _masked_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    modify: Callable[[torch.Tensor], torch.Tensor] | None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the scores [B, Hq, Nq, Nk] of the softmax, -inf for hidden pairs."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1] if k.shape[1] else 1, 1)
    scores = multiply(q, k.transpose(-1, -2)) * scale
    scores = modify(scores) if modify else scores
    return scores.masked_fill(~mask, -torch.inf)


class _TruncatedProduct(torch.autograd.Function):
    """A matrix product whose operands, and those of its gradient, are truncated to TF32."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(_truncated(a), _truncated(b))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        operands = tuple(map(_truncated, inputs))
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def jvp(ctx: Any, a_along: torch.Tensor, b_along: torch.Tensor) -> torch.Tensor:
        a, b = ctx.saved_tensors
        return _truncated(a_along) @ b + a @ _truncated(b_along)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        grad = _truncated(grads[0])
        return grad @ b.transpose(-1, -2), a.transpose(-1, -2) @ grad


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """Return x [fp32] with the 13 lowest of its 23 fraction bits set to 0."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def truncated_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a [..., N, D] @ b [..., D, M] of fp32 tensors as tensor cores do in TF32, with fp32 accumulation.

    They read the sign, 8 bits of exponent and the first 10 fraction bits, and ignore the rest, unless a program has
    rounded it (PTX ISA, "Alternate floating-point data formats"). Triton's programs do not round. cuBLAS's do, for the
    sizes for which they use TF32.
    """
    product: torch.Tensor = _TruncatedProduct.apply(a, b)  # type: ignore[no-untyped-call]
    return product


def rows_matmul(a: torch.Tensor, b: torch.Tensor, rows: int = 2) -> torch.Tensor:
    """Compute a [..., N, D] @ b [..., D, M] with the order of summation of a product with at least `rows` rows.

    For one row libraries multiply a vector by a matrix, and OpenBLAS has a kernel for few rows. These sum in another
    order, in fp32 with less than half the error.
    """
    copies = -(-rows // max(1, a.shape[-2]))
    return (torch.cat([a] * copies, -2) @ b)[..., : a.shape[-2], :]


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Return the four 32-bit words of Philox4x32 with seven rounds (Salmon et al., Parallel random numbers: as easy as
    1, 2, 3, 2011), in int64."""
    words, (k0, k1) = list(counter), key
    for _ in range(7):
        products = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57  # wraps at 64 bits, which keeps the needed bits
        (high0, low0), (high1, low1) = (((p >> 32) & 0xFFFFFFFF, p & 0xFFFFFFFF) for p in products)
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(words)


def _threshold(p: float) -> int:
    """Return the dropped share in 65536ths, at most 65535, so that some weights are kept."""
    return min(round(p * 65536), 65535)


def dropout_keep(
    shape: tuple[int, int, int, int], p: float, seed: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return which weights dropout keeps, per score: bool (B, Hq, Nq, Nk).

    Score (b, h, q, kv) takes two bytes of philox(counter=(h, q without bits 0 and 3, b, kv without bits 0 and 3),
    key=the halves of the seed). Bit 0 of q selects the first or the last two words, and bit 0 of kv the second (even)
    or the first (odd) of these two. With n = 2 * (bit 3 of q) + (bit 3 of kv), the random number is 256 * byte n + byte
    n - 1 of that word, or byte 3 for n = 0. The weight is kept if the number is at least 65536 p.
    """
    batch, heads, n_q, n_kv = shape
    threshold = _threshold(p)
    if threshold == 0:
        return torch.ones(shape, dtype=torch.bool, device=device)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    kv = torch.arange(n_kv, device=device)[None, :]
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    rows = max(1, 2**26 // max(1, n_kv))  # rows per slice: the words take 32 bytes per score
    for b, h, start in product(range(batch), range(heads), range(0, n_q, rows)):
        q = torch.arange(start, min(start + rows, n_q), device=device)[:, None]
        word, byte = q % 2 * 2 + 1 - kv % 2, q // 8 % 2 * 2 + kv // 8 % 2
        words = philox((torch.full_like(q, h), q & ~9, torch.full_like(q, b), kv & ~9), key)
        chosen = torch.stack([w.expand(len(q), n_kv) for w in words]).gather(0, word[None])[0]
        high, low = (chosen >> 8 * byte) & 255, (chosen >> 8 * ((byte - 1) % 4)) & 255
        keep[b, h, start : start + rows] = 256 * high + low >= threshold
    return keep


def dropout_weight(
    shape: tuple[int, int, int, int], p: float, seed: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the factors of dropout for the probabilities, fp32: 0 for dropped ones, else 1 / (1 - p), with p rounded
    as in `dropout_keep`."""
    return dropout_keep(shape, p, seed, device) * (65536 / (65536 - _threshold(p)))


def sizes_of(q: torch.Tensor, k: torch.Tensor) -> Sizes:
    """Return the sizes of a call."""
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def reference_mask(mask: Mask, q: torch.Tensor, k: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mask of a call by the masks' hand-written oracles: bool, four dimensions, broadcastable to [B, Hq, Nq,
    Nk]."""
    found = mask.reference(sizes_of(q, k), q.device, inputs)
    return found[(None,) * (4 - found.dim())]


def reference_scores(
    parts: tuple[Score, ...], q: torch.Tensor, k: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, torch.Tensor | None]:
    """Return (the modifiers as a function of the scores, the sink's logits) by their hand-written oracles; None for
    each that the spec lacks."""
    sinks = [sink for sink in (part.reference_sink(inputs) for part in parts) if sink is not None]

    def modify(s: torch.Tensor) -> torch.Tensor:
        for part in parts:
            s = part.reference(s, sizes_of(q, k), inputs)
        return s

    return (modify if parts else None), (sinks[0] if sinks else None)


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ||x - ref|| / ||ref|| in fp64; ||x|| if ref is zero. NaN stays NaN."""
    x, ref = x.detach().double(), ref.detach().double()
    difference, size = (x - ref).norm(), ref.norm()
    return float(difference / size if size > 0 else difference)
