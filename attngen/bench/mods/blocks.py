"""Masks of blocks and trees: block diffusion, speculative drafts, video tiles selected per tile of queries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attngen.bench.mods.mod import Made, case, mask
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor


def _diffusion(sizes: Sizes, device: torch.device, generator: torch.Generator, block: int) -> Made:
    """Training of block diffusion: half the positions are noised tokens, the other half the same tokens clean.

    A noised token sees the noised tokens of its block and the clean tokens of earlier blocks; a clean token sees the
    clean tokens of its block and of earlier ones. (Arriola et al. 2025, Block Diffusion, section 3.1.)
    """
    half = sizes.n_q // 2

    def of_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        noised, kv_noised = q_idx < half, kv_idx < half
        number, kv_number = q_idx % half // block, kv_idx % half // block
        own = (number == kv_number) & (noised == kv_noised)
        before = (number > kv_number) & noised & ~kv_noised
        clean = (number >= kv_number) & ~noised & ~kv_noised
        return own | before | clean

    return Made(None, of_block, device, data={"block": block})


def _diffusion_reference(made: Made, sizes: Sizes) -> Tensor:
    block, half = made.data["block"], sizes.n_q // 2
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for start in range(0, half, block):
        end = min(start + block, half)
        visible[start:end, start:end] = True
        visible[start:end, half : half + start] = True
        visible[half + start : half + end, half : half + end] = True
    return visible


def _draft_tree(sizes: Sizes, device: torch.device, generator: torch.Generator, prefix: int, branches: int) -> Made:
    """Verification of a tree of drafted tokens after a prefix: a node sees the prefix, its ancestors and itself
    (JetSpec, arXiv:2606.18394).

    The parent of each node is a random one of the `branches` nodes before it.
    """
    nodes = sizes.n_q
    random = torch.rand(nodes, generator=generator, device=generator.device).tolist()
    parents = [-1] + [i - 1 - int(random[i] * min(i, branches)) for i in range(1, nodes)]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
    ancestors = ancestors.to(device)

    def in_tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = (kv_idx - prefix).clamp(min=0, max=nodes - 1)
        drafted = (kv_idx >= prefix) & (kv_idx < prefix + nodes)
        return (kv_idx < prefix) | (drafted & ancestors[q_idx, node])

    return Made(None, in_tree, device, data={"prefix": prefix, "parents": parents})


def _draft_tree_reference(made: Made, sizes: Sizes) -> Tensor:
    prefix, parents = made.data["prefix"], made.data["parents"]
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool)
    visible[:, :prefix] = True
    for row in range(sizes.n_q):
        node = row
        while node >= 0:
            visible[row, prefix + node] = True
            node = parents[node]
    return visible.to(made.device)


def _draft_blocks(sizes: Sizes, device: torch.device, generator: torch.Generator, prefix: int, block: int) -> Made:
    """Training of a drafting head: each block of queries sees the whole prefix and is causal within itself (JetSpec,
    arXiv:2606.18394)."""

    def in_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        drafted = kv_idx - prefix
        own = (kv_idx >= prefix) & (q_idx // block == drafted // block) & (drafted % block <= q_idx % block)
        return own | (kv_idx < prefix)

    return Made(None, in_block, device, data={"prefix": prefix, "block": block})


def _draft_blocks_reference(made: Made, sizes: Sizes) -> Tensor:
    prefix, block = made.data["prefix"], made.data["block"]
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for row in range(sizes.n_q):
        visible[row, :prefix] = True
        visible[row, prefix + row - row % block : prefix + row + 1] = True
    return visible


def _tokens_in_tiles(grid: Sequence[int], tile: Sequence[int]) -> list[int]:
    """Return the number of tokens in each tile of a grid of frames, rows and columns; the last tiles along an axis may
    have fewer."""
    along = [[min(step, n - start) for start in range(0, n, step)] for n, step in zip(grid, tile)]
    return [math.prod((t, h, w)) for t in along[0] for h in along[1] for w in along[2]]


def _chosen(
    sizes: Sizes, device: torch.device, generator: torch.Generator, grid: Sequence[int], tile: Sequence[int], top: int
) -> tuple[Tensor, Tensor, int]:
    """Return (the `top` tiles with the highest random scores, int32 [B, H, tiles, top]; tokens in each tile, int64
    [tiles]; capacity of a tile)."""
    counts = torch.tensor(_tokens_in_tiles(grid, tile), device=device)
    scores = torch.rand(
        sizes.batch, sizes.q_heads, len(counts), len(counts), generator=generator, device=generator.device
    )
    return scores.topk(top).indices.int().to(device), counts, math.prod(tile)


def _video_tiles(
    sizes: Sizes, device: torch.device, generator: torch.Generator, grid: Sequence[int], tile: Sequence[int], top: int
) -> Made:
    """A tile of queries sees the tokens of its selected tiles; some tiles have fewer tokens than their capacity.

    grid, tile: frames, rows and columns. (Zhang et al. 2025, VSA: Faster Video Diffusion with Trainable Sparse
    Attention.)
    """
    chosen, counts, room = _chosen(sizes, device, generator, grid, tile, top)

    def in_chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kv_tile = kv_idx // room
        found = (chosen[b, h, q_idx // room] == kv_tile.unsqueeze(-1)).any(dim=-1)
        return found & (kv_idx % room < counts[kv_tile])

    return Made(None, in_chosen, device, data={"chosen": chosen, "counts": counts, "room": room})


def _video_tile_map(
    sizes: Sizes, device: torch.device, generator: torch.Generator, grid: Sequence[int], tile: Sequence[int], top: int
) -> Made:
    """The same mask with the selected tiles as a map, bool [B, H, tiles, tiles], instead of a list."""
    chosen, counts, room = _chosen(sizes, device, generator, grid, tile, top)
    pairs = torch.zeros(*chosen.shape[:3], len(counts), dtype=torch.bool, device=device).scatter(
        -1, chosen.long(), True
    )

    def in_chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kv_tile = kv_idx // room
        return pairs[b, h, q_idx // room, kv_tile] & (kv_idx % room < counts[kv_tile])

    return Made(None, in_chosen, device, data={"chosen": chosen, "counts": counts, "room": room})


def _video_tiles_reference(made: Made, sizes: Sizes) -> Tensor:
    room, counts = made.data["room"], made.data["counts"].tolist()
    visible = torch.zeros(sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv, dtype=torch.bool)
    for b, heads in enumerate(made.data["chosen"].tolist()):
        for h, rows in enumerate(heads):
            for q_tile, tiles in enumerate(rows):
                for tile in tiles:
                    start = tile * room
                    visible[b, h, q_tile * room : (q_tile + 1) * room, start : start + counts[tile]] = True
    return visible.to(made.device)


_TILES = (
    case(48, grid=(4, 5, 3), tile=(2, 2, 2), top=1, batch=2, q_heads=4, kv_heads=2),
    case(216, grid=(5, 6, 9), tile=(2, 3, 3), top=4),
)
_TILES_BENCH = case(8192, q_heads=16, grid=(15, 30, 16), tile=(4, 4, 4), top=20)

MODS = (
    mask(
        "block_diffusion",
        _diffusion,
        _diffusion_reference,
        (case(2, block=1), case(34, batch=2, block=5), case(128, block=16)),
        case(8192, q_heads=16, block=16),
    ),
    mask(
        "jetspec_tree",
        _draft_tree,
        _draft_tree_reference,
        (
            case(1, 20, prefix=19, branches=1),
            case(17, 17, prefix=0, branches=4),
            case(30, 131, batch=2, prefix=101, branches=8),
        ),
        case(128, 8192, q_heads=16, prefix=8064, branches=8),
    ),
    mask(
        "jetspec_training",
        _draft_blocks,
        _draft_blocks_reference,
        (case(12, 12, prefix=0, block=4), case(70, 133, batch=2, prefix=63, block=7)),
        case(4096, 8192, q_heads=16, prefix=4096, block=16),
    ),
    mask("vsa", _video_tiles, _video_tiles_reference, _TILES, _TILES_BENCH),
    mask("vsa_block_map", _video_tile_map, _video_tiles_reference, _TILES, _TILES_BENCH),
)
