"""Closed forms of what a rank sends, computes and holds. Numbers of the cost model are these, evaluated.

Names: B sequences, Hq and Hkv heads, D_QK and D_V columns, `elem` bytes of an element, and of a rank:

    U          ranks of its group, among which heads are divided
    own        rows that it holds before and after the call
    held       rows of its group
    received   rows of keys that it receives of other groups
    sent       rows of keys that it sends to other groups
    buffered   rows of keys of other groups that it holds at the same time
    scores     visible scores of the queries of its group, of one head
    rows       queries of its group, or keys that a launch has
"""

from __future__ import annotations

from attngen.heuristics import PLANNED_TILE
from attngen.ir import Expr, symbol

STATISTIC = 4  # bytes of an LSE
PART = 4  # bytes of an element of sums

B, HQ, HKV, D_QK, D_V, ELEM = map(symbol, ("B", "Hq", "Hkv", "D_QK", "D_V", "elem"))
U, OWN, HELD, RECEIVED, SENT, BUFFERED, SCORES, ROWS = map(
    symbol, ("U", "own", "held", "received", "sent", "buffered", "scores", "rows")
)

_KV_ROW = B * HKV / U * (D_QK + D_V)  # elements of a row of keys and values, of the heads that a rank has
_OTHERS = B * (U - 1) / U * OWN  # rows times the share of the heads that other ranks of the group have

FORMULAS: dict[str, Expr] = {
    "forward FLOPs": 2 * B * HQ / U * (D_QK + D_V) * SCORES,
    "backward FLOPs": 2 * B * HQ / U * (3 * D_QK + 2 * D_V) * SCORES,
    "tiles": B * HQ / U * ROWS / PLANNED_TILE,
    "bytes of a head's queries that a backward streams": ROWS * (ELEM * (D_QK + D_V) + PART * D_QK),
    "bytes of q, k, v to the ranks of other heads": _OTHERS * ELEM * (HQ * D_QK + HKV * (D_QK + D_V)),
    "bytes of out, LSE back from them": _OTHERS * HQ * (ELEM * D_V + STATISTIC),
    "bytes of dO to them": _OTHERS * ELEM * HQ * D_V,
    "bytes of dQ, dK, dV back from them": _OTHERS * ELEM * (HQ * D_QK + HKV * (D_QK + D_V)),
    "bytes of k, v received": _KV_ROW * ELEM * RECEIVED,
    "bytes of k, v sent": _KV_ROW * ELEM * SENT,
    "bytes of dK, dV received": _KV_ROW * ELEM * SENT,
    "bytes of dK, dV sent": _KV_ROW * ELEM * RECEIVED,
    "forward HBM bytes at least": B * HELD * HQ / U * (ELEM * (D_QK + D_V) + STATISTIC)
    + _KV_ROW * ELEM * (HELD + 2 * RECEIVED),
    "backward HBM bytes at least": B * HELD * HQ / U * (ELEM * (2 * D_QK + 2 * D_V) + 2 * STATISTIC + 2 * PART * D_QK)
    + _KV_ROW * (ELEM * (2 * HELD + 3 * RECEIVED) + 2 * PART * HELD),
    "forward memory": B * OWN * (ELEM * (HQ + HKV) * (D_QK + D_V) + STATISTIC * HQ) + _KV_ROW * ELEM * BUFFERED,
    "memory of the exchange": B * HELD / U * (ELEM * (HQ + HKV) * (D_QK + D_V) + STATISTIC * HQ),
    "memory of partial outputs": B * HELD * HQ / U * PART * D_V,
    "backward memory": B * OWN * ELEM * (HQ + HKV) * (D_QK + D_V)
    + B * HELD * HQ / U * PART * D_QK
    + _KV_ROW * (ELEM * BUFFERED + PART * HELD),
}
