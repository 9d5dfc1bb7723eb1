"""Score modifiers of graphs, whose nodes are the positions (Ying et al. 2021, Graphormer)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attngen.bench.mods.mod import Made, case, normal, score, whole
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor


def ring_distances(sizes: Sizes, device: torch.device, generator: torch.Generator, reach: int, farthest: int) -> Tensor:
    """Return the number of edges on the shortest path between any two nodes of a graph, int32 [B, n, n], limited to
    `farthest + 1`.

    The graph is a ring lattice in which each node has edges to the next `reach` nodes on either side; its nodes are
    numbered at random.
    """
    random = torch.rand(sizes.batch, sizes.n_q, generator=generator, device=generator.device)
    place = random.argsort(1).to(device, torch.int32)
    distance = (place[:, :, None] - place[:, None, :]).abs()
    steps = torch.minimum(distance, sizes.n_q - distance)
    return ((steps + reach - 1) // reach).clamp(max=farthest + 1)


def _spatial(sizes: Sizes, device: torch.device, generator: torch.Generator, reach: int, farthest: int) -> Made:
    """A learned bias by head and by the distance of two nodes (section 3.1.2)."""
    distances = ring_distances(sizes, device, generator, reach, farthest)
    table = normal(generator, device, sizes.q_heads, farthest + 2).requires_grad_()

    def by_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, distances[b, q_idx, kv_idx]]

    return Made(by_distance, None, device, (table,), {"table": table, "distances": distances})


def _spatial_reference(made: Made, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    table, distances = made.data["table"], made.data["distances"]

    def by_distance(scores: Tensor) -> Tensor:
        for bucket in range(table.shape[1]):
            scores = scores + table[:, bucket].view(1, -1, 1, 1) * (distances == bucket)[:, None]
        return scores

    return by_distance


def _edges(
    sizes: Sizes, device: torch.device, generator: torch.Generator, reach: int, longest: int, kinds: int
) -> Made:
    """The mean of learned biases, by head, place on the path and kind of edge, over the first edges of a shortest path
    (section 3.1.3).

    The table is read through one view per place, because FlexAttention supports gradients of only one read of a tensor.
    Nodes whose distance is above `longest` count as not connected.
    """
    distances = ring_distances(sizes, device, generator, reach, longest)
    lengths = torch.where(distances > longest, 0, distances)
    random = whole(generator, device, 0, kinds - 1, *distances.shape, longest)
    along = torch.where(torch.arange(longest, device=device) < lengths[..., None], random, 0)
    table = normal(generator, device, sizes.q_heads, longest, kinds).requires_grad_()
    places = [table[:, i] for i in range(longest)]

    def along_path(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        length = lengths[b, q_idx, kv_idx]
        terms = (torch.where(length > i, place[h, along[b, q_idx, kv_idx, i]], 0.0) for i, place in enumerate(places))
        return score + sum(terms) / torch.clamp(length, min=1)

    return Made(along_path, None, device, (table,), {"table": table, "along": along, "lengths": lengths})


def _edges_reference(made: Made, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    table, along, lengths = made.data["table"], made.data["along"].long(), made.data["lengths"]

    def along_path(scores: Tensor) -> Tensor:
        means = []
        for head in table:
            mean = torch.zeros(lengths.shape, device=made.device)
            for length in range(1, len(head) + 1):  # paths of this many edges, weighted equally
                biases = [torch.take(head[i], along[..., i]) for i in range(length)]
                mean = mean + torch.stack(biases).mean(0) * (lengths == length)
            means.append(mean)
        return scores + torch.stack(means, dim=1)

    return along_path


MODS = (
    score(
        "graphormer_spatial",
        _spatial,
        _spatial_reference,
        (case(17, reach=1, farthest=5), case(45, batch=2, q_heads=4, kv_heads=2, reach=4, farthest=3)),
        case(8192, q_heads=16, reach=512, farthest=6),
    ),
    score(
        "graphormer_edge",
        _edges,
        _edges_reference,
        (case(17, reach=2, longest=2, kinds=3), case(45, batch=2, q_heads=4, kv_heads=2, reach=4, longest=4, kinds=5)),
        case(8192, q_heads=16, reach=1024, longest=3, kinds=16),
    ),
)
