"""Choose the method of context parallelism that is predicted to be fastest, and simulate clusters of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from attngen.devices import LINKS
from attngen.distributed.model import Cluster, Heads, Prediction, predict
from attngen.distributed.transfers import METHODS
from attngen.distributed.visible import Visible

SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # numbers of GPUs


def predictions(visible: Visible, cluster: Cluster, heads: Heads, divides: bool = True) -> Iterator[Prediction]:
    """Yield the predictions of all methods that divide the heads and ranks; of `ulysses_ring` the fastest groups.

    divides: whether ranks may compute a part of the heads.
    """
    common = math.gcd(cluster.ranks, heads.q_heads, heads.kv_heads) if divides else 1
    groups = [
        size
        for size in range(2, min(common, cluster.ranks - 1) + 1)
        if common % size == 0 and not max(size, cluster.gpus) % min(size, cluster.gpus)
    ]
    sizes = {"ulysses": [cluster.ranks] if divides and common == cluster.ranks else [], "ulysses_ring": groups}
    for method in METHODS:
        found = [predict(visible, cluster, heads, method, size) for size in sizes.get(method, [1])]
        if found:
            yield min(found, key=lambda p: p.seconds)


def choose(visible: Visible, cluster: Cluster, heads: Heads, backward: bool = True, divides: bool = True) -> Prediction:
    """Return the method that is predicted to be fastest among those that fit in memory; if none fits, the one that
    takes the least memory.

    backward: compare forward and backward together, not the forward alone. divides: as in `predictions`.
    """
    found = list(predictions(visible, cluster, heads, divides))
    fitting = [p for p in found if p.memory <= LINKS[cluster.device].memory_bytes]
    if not fitting:
        return min(found, key=lambda p: p.memory)
    return min(fitting, key=lambda p: p.seconds if backward else p.forward.seconds)


def simulate(
    visible: Visible, cluster: Cluster, heads: Heads, ranks: Iterable[int] = SIMULATED, divides: bool = True
) -> dict[int, Prediction]:
    """Return the chosen method for each number of GPUs, a power of two, in nodes of the cluster's size.

    divides: as in `predictions`.
    """
    found = {}
    for count in ranks:
        gpus = math.gcd(count, cluster.gpus)
        found[count] = choose(visible, Cluster(cluster.device, gpus, count // gpus), heads, divides=divides)
    return found
