"""The implementations that are measured: ours and its peers. Each states what it cannot do, and prepares a call for a
problem.

A new peer is one file here and one line in PEERS. Nothing heavy is imported until a peer prepares, so lists of cells
need no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from attngen.bench.cases.flex import cannot
from attngen.bench.peers.base import Call, Forward, Peer, uncached, undropped, unquantised
from attngen.bench.peers.fa4 import fa4, fa4_cannot
from attngen.bench.peers.flashinfer import flashinfer, flashinfer_cannot
from attngen.bench.peers.flex import flex, flex_flash_cannot
from attngen.bench.peers.naive import naive
from attngen.bench.peers.ours import ours
from attngen.bench.peers.sdpa import sdpa, sdpa_cannot

__all__ = ["PEERS", "Call", "Forward", "Peer"]

_PEERS = {  # ours first: the others' results are compared with the first one's
    "ours": Peer("attngen", lambda cell: "", ours, compiles=True),
    "flash": Peer("SDPA FLASH", partial(sdpa_cannot, masked=False), partial(sdpa, "flash")),
    "cudnn": Peer("SDPA CUDNN", sdpa_cannot, partial(sdpa, "cudnn")),
    "efficient": Peer("SDPA EFFICIENT", partial(sdpa_cannot, single=True), partial(sdpa, "efficient")),
    "math": Peer("SDPA MATH", partial(sdpa_cannot, single=True), partial(sdpa, "math")),
    "flex": Peer("FlexAttention", partial(undropped, lambda cell: cannot(cell.spec)), flex, compiles=True),
    "flex_flash": Peer(
        "FlexAttention by FlashAttention-4",
        partial(undropped, partial(uncached, flex_flash_cannot)),
        partial(flex, backend="FLASH"),
        True,
    ),
    "fa4": Peer("FlashAttention-4", partial(undropped, partial(uncached, fa4_cannot)), fa4, compiles=True),
    "flashinfer": Peer("FlashInfer", flashinfer_cannot, flashinfer, compiles=True),
    "naive": Peer("naive", partial(undropped, lambda cell: ""), naive),
}
PEERS = {
    name: peer if name in ("ours", "naive") else replace(peer, cannot=partial(unquantised, peer.cannot))
    for name, peer in _PEERS.items()
}
