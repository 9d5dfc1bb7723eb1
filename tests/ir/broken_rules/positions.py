"""Edits of target IR that break the rule about positions in a sequence, of which calls have chunks.

A case is (case of tests/chunks.py + " in chunks", old text, new text, piece of the reason). An edit is made in the
kernels if the old text occurs there, and otherwise in the header.
"""

from __future__ import annotations

STARTS = "    %Q_STARTS = arg in : i32[Uq] @hbm\n    %KV_STARTS = arg in : i32[Uk] @hbm\n"
WHO = "expected them in kernels that evaluate the mask, in modules with `chunk`"
WHOLE = "a tile of the whole sequence; expected 0 or a position in"
EDITS = {
    "positions": [
        ("causal in chunks", STARTS, "", f"it has no starts of chunks; {WHO}"),
        ("causal in chunks", "  chunk 384\n", "", f"it has the starts of chunks; {WHO}"),
        (
            "causal in chunks",
            "%Q = arg in : T[B, Hq, Rq, D_QK]",
            "%Q = arg in : T[B, Hq, Nq, D_QK]",
            "%Q has Nq rows; expected those of the call, Rq or Rk",
        ),
        (
            "causal in chunks",
            "%LSE = arg out : f32[B, Hq, Rq]",
            "%LSE = arg out : f32[B, Hq, Nq]",
            "%LSE has Nq rows; expected those of the call, Rq or Rk",
        ),
        (
            "documents in chunks",
            "%DOCUMENT_Q = arg in : i32[B, Nq]",
            "%DOCUMENT_Q = arg in : i32[B, Rq]",
            "%DOCUMENT_Q has Rq rows; expected those of the whole sequence",
        ),
        (
            "causal in chunks",
            "ranges(0 .. kv_full_end_at)",
            "ranges(0 .. kv_full_end)",
            f"%keys_full runs to or from `kv_full_end`, {WHOLE} %KV_START_RANK",
        ),
        (
            "blocks in chunks",
            "%KV_RANK_row tile(kv_full_end_at)",
            "%KV_RANK_row tile(kv_full_end)",
            f"%keys_full runs to or from `kv_full_end_at_at`, {WHOLE} %KV_START_RANK",
        ),
        ("causal in chunks", "%Q_STARTS = arg in : i32[Uq]", "%Q_STARTS = arg in : i64[Uq]", "expected i32[Uq]"),
        ("causal in chunks", "%KV_STARTS = arg in : i32[Uk]", "%KV_STARTS = arg in : i32[Uq]", "expected i32[Uk]"),
        (
            "causal in chunks",
            "%KV_START_RANK = arg in : i32[Wk1]",
            "%KV_START_RANK = arg in : i32[Uk]",
            "%KV_START_RANK is i32[Uk]; expected i32[Wk1]",
        ),
        ("causal in chunks", "  chunk 384\n", "  chunk 192\n", "tiles of 64x128 do not divide chunks of 192 rows"),
    ],
}
