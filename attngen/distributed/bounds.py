"""Lower bounds of what a rank, or a node, has to receive, to move in HBM and to compute.

Queries stay. If the queries of a rank stay where they are, it has to receive each key that they see and that it does
not hold. all_gather and ring receive exactly these.

Any method. A rank that computes W scores of a K/V head needs a rows of queries (of all query heads that share it) and b
rows of keys with a * b >= W (Loomis and Whitney 1949; Irony, Toledo and Tiskin 2004 for matrix products), so at least 2
sqrt(W) rows of D_QK + D_V elements: of queries also the output leaves. The sum over heads is least if a rank computes
whole heads, because the root is concave. What it holds at the beginning and the output that stays are not transferred.
The bound for a node is the same with the nodes as ranks.

HBM. Each tensor moves once, or attention with W visible scores moves W d**2 / M elements for M elements on chip
(FlashAttention, proposition 3; FLASH in attngen/cost/theory.py), whichever is more; the latter is an order, taken with
the constant 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sympy

from attngen.cost.theory import FLASH, D, M, N
from attngen.devices import CLASSES, DEVICES, LINKS
from attngen.distributed.formulas import FORMULAS
from attngen.distributed.layout import Layout
from attngen.distributed.model import Cluster, Heads
from attngen.distributed.transfers import rows_between
from attngen.distributed.visible import Visible
from attngen.interp.numeric import value


@dataclass(frozen=True)
class Bound:
    """Lower bounds for a GPU in the forward: bytes received of other GPUs by any method, and if queries stay; bytes
    received by its node over its share of the network; bytes of HBM; FLOPs; seconds at the peak rates."""

    received_bytes: float
    queries_stay_bytes: float
    network_bytes: float
    hbm_bytes: float
    flops: float
    seconds: float


def bound(visible: Visible, cluster: Cluster, heads: Heads, layout: Layout) -> Bound:
    """Return the lower bounds of a sequence on a cluster.

    layout: over all ranks, for the bound if queries stay, which is the mean over ranks.
    """
    device, links, ranks = DEVICES[cluster.device], LINKS[cluster.device], cluster.ranks
    rows = visible.seq_len / ranks
    total = visible.total
    known: dict[str, float] = {
        "B": heads.batch,
        "Hq": heads.q_heads,
        "Hkv": heads.kv_heads,
        "D_QK": heads.d_qk,
        "D_V": heads.d_v,
    }
    known |= {"elem": heads.elem, "U": 1, "own": rows, "held": rows, "scores": total / ranks}
    missing = rows_between(visible, layout) * ~np.eye(layout.ranks, dtype=bool)
    stay = float(value(FORMULAS["bytes of k, v received"], {**known, "received": missing.sum() / layout.ranks}))
    flops = float(value(FORMULAS["forward FLOPs"], known))
    on_chip = device.sms * CLASSES[device.cls].smem_per_sm / heads.elem
    # FLASH is for all N**2 scores of a head.
    flash = sympy.lambdify((N, D, M), FLASH)(1, max(heads.d_qk, heads.d_v), on_chip) * total / ranks
    once = float(value(FORMULAS["forward HBM bytes at least"], {**known, "received": 0}))
    hbm = max(once, float(flash) * heads.batch * heads.q_heads * heads.elem)
    received = received_at_least(visible, heads, ranks)
    network = received_at_least(visible, heads, cluster.nodes) / cluster.gpus
    rate = device.flops["bf16" if heads.elem < 4 else "tf32"]
    seconds = max(
        flops / rate,
        hbm / device.hbm_bytes_per_s,
        received / (links.nvlink_bytes_per_s + links.network_bytes_per_s),
        network / links.network_bytes_per_s,
    )
    return Bound(received, stay, network, hbm, flops, seconds)


def received_at_least(visible: Visible, heads: Heads, parts: int) -> float:
    """Return the bytes that one of `parts` equal parts of a cluster has to receive in the forward, by any method."""
    if parts == 1:
        return 0.0
    group = heads.q_heads / heads.kv_heads
    rows = visible.seq_len / parts
    whole, part = divmod(heads.batch * heads.kv_heads / parts, 1)  # K/V heads that a part can compute, by work
    scores = group * visible.total  # of one K/V head
    needed = 2 * (whole * scores**0.5 + (part * scores) ** 0.5)
    width = heads.d_qk + heads.d_v
    here = heads.batch * rows * (heads.q_heads * width + heads.kv_heads * width)
    return float(max(0.0, needed * width - here) * heads.elem)
