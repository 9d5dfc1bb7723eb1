"""The elements that the ranks of a plan send to each other, counted from its transfers: what formulas are compared
with."""

from __future__ import annotations

import numpy as np

from attngen.distributed.transfers import Plan


def sent_rows(made: Plan) -> np.ndarray:
    """Return the rows of keys and values that rank s sends to rank r in all steps: int64 [s, r]."""
    found = np.zeros((made.layout.ranks,) * 2, np.int64)
    for send in made.sends:
        found[send.sender, send.receiver] += sum(len(made.layout.rows_of(chunk)) for chunk in send.chunks)
    return found


def elements(made: Plan, d_qk: int, d_v: int, batch: int = 1, backward: bool = False) -> dict[str, np.ndarray]:
    """Return the elements that rank s sends to rank r in a call, by tensor: int64 [s, r].

    backward: those of the backward. Steps send keys and values again, and their gradients the other way; the exchange
        of heads brings dO in, and dQ, dK and dV out.
    """
    size, ranks = made.ulysses, made.layout.ranks
    q_heads, kv_heads = batch * made.q_heads // size, batch * made.kv_heads // size
    steps = sent_rows(made)
    held = np.array([made.layout.rows(rank) for rank in range(ranks)], np.int64)
    group = np.arange(ranks) // size
    others = (group[:, None] == group[None]) & ~np.eye(ranks, dtype=bool)
    into, out = others * held[:, None], others * held[None]  # a rank sends its rows of others' heads, and back
    k, v = kv_heads * d_qk, kv_heads * d_v
    if backward:
        return {
            "k": steps * k,
            "v": steps * v,
            "dk": steps.T * k + out * k,
            "dv": steps.T * v + out * v,
            "dout": into * q_heads * d_v,
            "dq": out * q_heads * d_qk,
        }
    return {
        "q": into * q_heads * d_qk,
        "k": steps * k + into * k,
        "v": steps * v + into * v,
        "out": out * q_heads * d_v,
        "lse": out * q_heads,
    }
