"""Predict the time, bytes and memory of a method of context parallelism on a cluster.

Everything is counted from a layout: what ranks receive, and what they compute with it (see formulas.py). Times are
those of the slowest rank. all_gather: the transfer, then the launch. ring: in each step the longer of the launch and
the next transfer. ulysses: exchange, launch, exchange. Links run both ways at once, and NVLink and network at the same
time. In a backward, keys and values are sent again, and their gradients back, in fp32.

A launch takes the time of its scores, or of its bytes of HBM if these take longer. A score takes its FLOPs in products,
and the rest that is done for it, as if that were FLOPs, too. Scores include those of partial tiles at the edges of the
mask, half of each, and the idle part at the end of a launch, when its last programs run. Each tile of queries, in the
backward of keys, takes the time of its program's start and end. Constants are fitted to measurements (heuristics.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from attngen.devices import DEVICES, LINKS
from attngen.distributed.balance import balance
from attngen.distributed.formulas import FORMULAS
from attngen.distributed.layout import Layout
from attngen.distributed.transfers import Method, check_method, held_by_rank, queries_between, rows_between
from attngen.distributed.visible import Visible
from attngen.errors import AttngenError
from attngen.heuristics import (
    LAST_PROGRAMS,
    LAUNCH_SECONDS,
    LINK_LATENCY,
    NETWORK_LATENCY,
    PLANNED_TILE,
    REACHED,
    REACHED_GATHER,
    REACHED_NETWORK,
    REACHED_SEND,
    SCORE_FLOPS,
    STREAMED,
    SWIZZLE,
    SWIZZLE_GROUP_BYTES,
    TILE_SECONDS,
)
from attngen.interp.numeric import value

Array = np.ndarray


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. device: a key of LINKS."""

    device: str = "H200"
    gpus: int = 8
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Heads:
    """The sizes of a call besides the sequence: sequences, heads, columns of a head, bytes of an element."""

    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    d_qk: int = 128
    d_v: int = 128
    elem: int = 2


@dataclass(frozen=True)
class Costs:
    """What the rank with the most of it moves and computes in one direction, and the time of the slowest rank.

    compute_s: the time of its launches alone, without transfers.
    """

    nvlink_bytes: float
    network_bytes: float
    hbm_bytes: float
    flops: float
    compute_s: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """A method on a cluster. memory: bytes that a rank needs for a call and its backward, with its results.

    ideal: the seconds of forward and of backward of one GPU that computes the whole call, over the number of GPUs.
    """

    method: Method
    ulysses: int
    layout: Layout
    forward: Costs
    backward: Costs
    memory: float
    ideal: tuple[float, float]

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.seconds + self.backward.seconds

    @property
    def efficiency(self) -> float:
        """The time of one GPU that computes the whole call, over the sum of all GPUs' times. It can exceed 1: what a
        rank's backward streams may fit in the L2 where that of the whole call does not."""
        return sum(self.ideal) / self.seconds

    @property
    def forward_efficiency(self) -> float:
        return self.ideal[0] / self.forward.seconds


@lru_cache(maxsize=32)  # layouts of a few sequences, which hold large arrays
def _layout(visible: Visible, groups: int) -> Layout:
    return balance(visible, groups).layout


@lru_cache(maxsize=32)  # layouts of a few sequences, which hold large arrays
def _flow(visible: Visible, layout: Layout) -> tuple[Array, Array, Array, Array, Array]:
    """Return, for groups r and s: rows of s that r needs, queries of r that see keys of s, scores of r's queries with
    s's keys, of one head; and for each group the rows of its longest query, and the scores of partial tiles."""
    by_group = np.stack([visible.scores[list(own)].sum(0, dtype=np.float64) for own in layout.owned]) / visible.planes
    full = visible.planes * visible.weights[:, None] * visible.weights[None]
    partial = ((visible.scores > 0) & (visible.scores < full)).sum(1)
    row = visible.work / visible.weights / visible.planes
    longest = np.array([row[list(own)].max(initial=0.0) for own in layout.owned])
    tile = min(PLANNED_TILE, visible.chunk)
    edges = np.array([partial[list(own)].sum() for own in layout.owned]) * visible.chunk * tile / 2.0
    scores = by_group @ held_by_rank(layout)
    return rows_between(visible, layout), queries_between(visible, layout), scores, longest, edges


def predict(
    visible: Visible, cluster: Cluster, heads: Heads, method: Method, ulysses: int | None = None, layout: Any = None
) -> Prediction:
    """Predict a method.

    ulysses: for `ulysses_ring`, the ranks of a group.
    layout: over groups; by default that of `balance`.
    Raises AttngenError if heads or ranks cannot be divided so, or the links of the device are not known.
    """
    if cluster.device not in LINKS:
        raise AttngenError(f"the links of {cluster.device} are not known; expected {', '.join(LINKS)}")
    size = check_method(method, cluster.ranks, heads.q_heads, heads.kv_heads, ulysses)
    layout = layout or _layout(visible, cluster.ranks // size)
    rank = _Ranks(visible, cluster, heads, method, size, layout)
    alone = _Ranks(visible, Cluster(cluster.device, 1, 1), heads, "all_gather", 1, _layout(visible, 1))
    ideal = alone.costs(False).seconds / cluster.ranks, alone.costs(True).seconds / cluster.ranks
    return Prediction(method, size, layout, rank.costs(False), rank.costs(True), rank.memory(), ideal)


class _Ranks:
    """The ranks of a method: one of each group, as all ranks of a group do the same."""

    def __init__(
        self, visible: Visible, cluster: Cluster, heads: Heads, method: Method, size: int, layout: Layout
    ) -> None:
        self.cluster, self.method, self.size = cluster, method, size
        self.device, self.links = DEVICES[cluster.device], LINKS[cluster.device]
        self.rows, self.queries, self.scores, self.longest, self.edges = _flow(visible, layout)
        self.groups = layout.ranks
        node = np.arange(self.groups) * size // cluster.gpus
        others = ~np.eye(self.groups, dtype=bool)
        self.inside, self.outside = others & (node[:, None] == node), others & (node[:, None] != node)
        self.held = np.array([layout.rows(group) for group in range(self.groups)])
        self.known = {
            "B": heads.batch,
            "Hq": heads.q_heads,
            "Hkv": heads.kv_heads,
            "D_QK": heads.d_qk,
            "D_V": heads.d_v,
            "elem": heads.elem,
            "U": size,
            "own": self.held / size,
            "held": self.held,
            "scores": self.scores.sum(1),
            "received": (self.rows * others).sum(1),
            "sent": (self.rows * others).sum(0),
        }
        most = 2 * self._by_step(self.rows)[1:].max(initial=0) if "ring" in method else self.known["received"]
        self.known["buffered"] = np.minimum(most, self.known["received"])

    def of(self, name: str, **more: Any) -> Array:
        """Evaluate a formula for all groups; with arrays [steps, groups] in `more` also for all steps."""
        return np.asarray(value(FORMULAS[name], {**self.known, **more}), float) + np.zeros(self.groups)

    def _by_step(self, pairs: Array, ahead: int = 0) -> Array:
        """Return the elements [r, r - step - ahead] of an array over pairs of groups, as [step, r]; zeros for steps
        that are not made."""
        at = np.arange(self.groups)
        step = at[:, None] + ahead
        found: Array = np.where((step >= 0) & (step < self.groups), pairs[at, (at - step) % self.groups], 0)
        return found

    def _seconds(self, nvlink: Array, network: Array, reached: float) -> Array:
        """Return the time of a transfer of these bytes of each rank over both links."""
        by_link = nvlink / (self.links.nvlink_bytes_per_s * reached) + LINK_LATENCY * (nvlink > 0)
        by_network = network / (self.links.network_bytes_per_s * REACHED_NETWORK) + NETWORK_LATENCY * (network > 0)
        return np.maximum(by_link, by_network)

    def _exchange(self, *names: str) -> tuple[Array, Array]:
        """Return the bytes that a rank sends to the ranks of its group, over NVLink and over the network."""
        total = sum((self.of(name) for name in names), np.zeros(self.groups))
        near = (min(self.size, self.cluster.gpus) - 1) / max(1, self.size - 1)
        return total * near, total * (1 - near)

    def _steps(self, where: Array, backward: bool) -> Array:
        """Return the bytes that a rank sends to other groups over some links, or receives, if that is more."""
        rows = self.rows * where
        counts = {"received": rows.sum(1), "sent": rows.sum(0)}
        names = ["bytes of k, v", "bytes of dK, dV"][: 1 + backward]
        received, sent = (
            sum((self.of(f"{name} {way}", **counts) for name in names), np.zeros(self.groups))
            for way in ("received", "sent")
        )
        found: Array = np.maximum(received, sent)
        return found

    def _launch(self, scores: Array, queries: Array, keys: Array, backward: bool) -> tuple[Array, Array, Array]:
        """Return FLOPs, HBM bytes and seconds of a launch of each rank, with some scores, queries and keys."""
        which = "backward" if backward else "forward"
        share = scores / np.maximum(1.0, self.known["scores"])
        programs = self.known["B"] * self.known["Hq"] / self.size  # of one tile of queries
        longest = np.minimum(self.longest, keys)
        last = LAST_PROGRAMS * self.device.sms * PLANNED_TILE * longest / programs
        flops = self.of(f"{which} FLOPs", scores=scores)
        run = scores + share * self.edges + last * (scores > 0)
        # Tiles of keys stream through the L2 once for all programs of a head in flight.
        loads = flops / PLANNED_TILE * self.known["elem"] / 2
        hbm = self.of(f"{which} HBM bytes at least") * share + loads / max(1, self.device.sms // SWIZZLE)
        products = run * (1 + STREAMED * self._missing(np.minimum(longest, self.held))) if backward else run
        tiles = self.of("tiles", rows=keys if backward else queries)
        computing = self._scores_seconds(which, run, products) + tiles * TILE_SECONDS[which] / self.device.sms
        seconds = np.maximum(computing, hbm / self.device.hbm_bytes_per_s) + LAUNCH_SECONDS
        return flops, hbm, seconds * (scores > 0)

    def _missing(self, queries: Array) -> Array:
        """Return the share of a head's queries that a backward does not find in the L2."""
        streamed = self.of("bytes of a head's queries that a backward streams", rows=queries)
        missing: Array = 1 - np.minimum(1.0, SWIZZLE_GROUP_BYTES / np.maximum(1.0, streamed))
        return missing

    def _scores_seconds(self, which: str, scores: Array, products: Array) -> Array:
        """Return the time of scores of one head, if products take that of `products` scores."""
        heads = self.known["B"] * self.known["Hq"] / self.size
        work = self.of(f"{which} FLOPs", scores=products) + heads * SCORE_FLOPS[which] * scores
        peak = self.device.flops["bf16" if self.known["elem"] < 4 else "tf32"]
        return work / (peak * REACHED[which])

    def costs(self, backward: bool) -> Costs:
        """Return the costs of one direction."""
        into, out = (
            (("bytes of dO to them",), ("bytes of dQ, dK, dV back from them",))
            if backward
            else (("bytes of q, k, v to the ranks of other heads",), ("bytes of out, LSE back from them",))
        )
        exchanges = [self._exchange(*names) for names in (into, out)]
        flops, hbm, whole = self._launch(self.known["scores"], self.held, self.held + self.known["received"], backward)
        steps = self._steps(self.inside, backward), self._steps(self.outside, backward)
        seconds = sum((self._seconds(*bytes_, REACHED_GATHER) for bytes_ in exchanges), np.zeros(self.groups))
        if "ring" in self.method:
            seconds = seconds + self._ring_seconds(backward)
        else:
            seconds = seconds + whole + self._seconds(*steps, REACHED_GATHER)
        nvlink, network = (s + sum(e[i] for e in exchanges) for i, s in enumerate(steps))
        return Costs(*(float(np.max(x)) for x in (nvlink, network, hbm, flops, whole, seconds)))

    def _ring_seconds(self, backward: bool) -> Array:
        """Return the time of the steps of a ring: of each, the launch or the transfer for the next, whichever is
        longer; in a backward this transfer also has the gradients of the step before. Those of the last step follow."""
        scores, queries, keys = (self._by_step(pairs) for pairs in (self.scores, self.queries, self.rows))
        launches = self._launch(scores, queries, keys, backward)[2]

        # A step's gradients are sent in the next one; those of step 0 are the rank's own.
        nvlink, network = (
            self.of("bytes of k, v received", received=self._by_step(self.rows * where, 1))
            + self.of("bytes of dK, dV sent", received=self._by_step(self.rows * where, -1)) * backward
            for where in (self.inside, self.outside)
        )
        # The gradients of the last step are sent after it.
        after = [
            self.of("bytes of dK, dV sent", received=self._by_step(self.rows * where)[-1]) * backward
            for where in (self.inside, self.outside)
        ]
        total: Array = np.maximum(launches, self._seconds(nvlink, network, REACHED_SEND)).sum(0)
        return total + self._seconds(after[0], after[1], REACHED_SEND)

    def memory(self) -> float:
        found = self.of("forward memory") + self.of("backward memory")
        found = found + self.of("memory of the exchange") * (2 if self.size > 1 else 0)
        found = found + self.of("memory of partial outputs") * ("ring" in self.method)
        return float(found.max())
