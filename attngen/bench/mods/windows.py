"""Masks by distance: causal, windows, a prefix, groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from attngen.bench.mods.mod import Made, case, mask
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees itself and earlier keys."""
    return q_idx >= kv_idx


def _causal(sizes: Sizes, device: torch.device, generator: torch.Generator) -> Made:
    return Made(None, causal, device)


def _causal_reference(made: Made, sizes: Sizes) -> Tensor:
    return torch.ones(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device).tril()


def _groups(sizes: Sizes, device: torch.device, generator: torch.Generator, group: int, inner: str) -> Made:
    """Positions form consecutive groups of one size; an inner mask applies within each group, to positions in it."""
    within = {"causal": causal, "all": noop_mask}[inner]

    def in_groups(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        together = q_idx // group == kv_idx // group
        return together & within(b, h, q_idx % group, kv_idx % group)

    return Made(None, in_groups, device, data={"group": group, "inner": inner})


def _groups_reference(made: Made, sizes: Sizes) -> Tensor:
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for start in range(0, sizes.n_q, made.data["group"]):
        square = slice(start, start + made.data["group"])
        visible[square, square] = True
    return visible.tril() if made.data["inner"] == "causal" else visible


def _sliding(sizes: Sizes, device: torch.device, generator: torch.Generator, back: int) -> Made:
    """Causal, and at most `back` positions back."""

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx <= back

    return Made(None, and_masks(near, causal), device, data={"back": back})


def _sliding_reference(made: Made, sizes: Sizes) -> Tensor:
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for row in range(sizes.n_q):
        visible[row, max(0, row - made.data["back"]) : row + 1] = True
    return visible


def _dilated(sizes: Sizes, device: torch.device, generator: torch.Generator, radius: int, step: int) -> Made:
    """Within a radius on both sides, every `step` positions (Beltagy et al. 2020, Longformer, section 3.1)."""

    def in_steps(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= radius) & (distance % step == 0)

    return Made(None, in_steps, device, data={"radius": radius, "step": step})


def _dilated_reference(made: Made, sizes: Sizes) -> Tensor:
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    step = made.data["step"]
    for away in range(0, made.data["radius"] + 1, step):
        visible.diagonal(away).fill_(True)
        visible.diagonal(-away).fill_(True)
    return visible


def _global(sizes: Sizes, device: torch.device, generator: torch.Generator, radius: int, tokens: int) -> Made:
    """Within a radius on both sides; some tokens see all and are seen by all (Longformer, section 3.1)."""
    order = torch.randperm(sizes.n_q, generator=generator, device=generator.device).to(device)
    marked = torch.zeros(sizes.n_q, dtype=torch.bool, device=device)
    marked[order[:tokens]] = True

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() <= radius

    def of_marked(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return marked[q_idx] | marked[kv_idx]

    return Made(None, or_masks(near, of_marked), device, data={"radius": radius, "marked": marked})


def _global_reference(made: Made, sizes: Sizes) -> Tensor:
    radius = made.data["radius"]
    visible = torch.ones(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device).tril(radius).triu(-radius)
    for token in made.data["marked"].nonzero().flatten().tolist():
        visible[token] = True
        visible[:, token] = True
    return visible


def _prefix(sizes: Sizes, device: torch.device, generator: torch.Generator, prefix: int) -> Made:
    """Causal, with the first positions visible to all (Raffel et al. 2020, T5, section 3.2.1)."""

    def of_prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < prefix

    return Made(None, or_masks(of_prefix, causal), device, data={"prefix": prefix})


def _prefix_reference(made: Made, sizes: Sizes) -> Tensor:
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for row in range(sizes.n_q):
        visible[row, : max(made.data["prefix"], row + 1)] = True
    return visible


def _grouped(name: str, inner: str) -> Any:
    tests = (
        case(1, group=4, inner=inner),
        case(50, batch=2, group=16, inner=inner),
        case(129, q_heads=4, kv_heads=2, group=128, inner=inner),
    )
    return mask(name, _groups, _groups_reference, tests, case(8192, q_heads=16, group=1024, inner=inner))


MODS = (
    mask(
        "causal",
        _causal,
        _causal_reference,
        (case(1), case(129, batch=2, q_heads=4, kv_heads=2), case(40, 150)),
        case(8192, q_heads=16),
    ),
    _grouped("batchify_causal", "causal"),
    _grouped("batchify_all", "all"),
    mask(
        "sliding_window",
        _sliding,
        _sliding_reference,
        (case(1, back=3), case(50, batch=2, back=0), case(150, back=37), case(130, 70, back=20)),
        case(8192, q_heads=16, back=1024),
    ),
    mask(
        "dilated_sliding_window",
        _dilated,
        _dilated_reference,
        (case(17, radius=1, step=3), case(129, batch=2, radius=41, step=4), case(150, 140, radius=30, step=1)),
        case(8192, q_heads=16, radius=1024, step=4),
    ),
    mask(
        "global_sliding_window",
        _global,
        _global_reference,
        (case(17, radius=1, tokens=1), case(140, batch=2, radius=20, tokens=5)),
        case(8192, q_heads=16, radius=512, tokens=64),
    ),
    mask(
        "prefix_lm",
        _prefix,
        _prefix_reference,
        (case(17, prefix=0), case(129, batch=2, prefix=50), case(60, 100, prefix=70)),
        case(8192, q_heads=16, prefix=2048),
    ),
)
