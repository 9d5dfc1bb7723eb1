"""Edits of target IR that break rules about loops over tiles and their ranges.

Each rule has cases of (spec, old text, new text, piece of the reason). An edit is made in the kernels if the old text
occurs there, and otherwise in the header.
"""

from __future__ import annotations

from attngen.ir import GridAxis, symbol, to_text
from attngen.ir.split_axes import part

PART_OF_TILES = " .. ".join(
    map(to_text, part(symbol("q_full_first"), symbol("q_full_end"), GridAxis("split", symbol("splits"))))
)
EDITS = {
    "loops": [
        (
            "decode_gqa",
            "body(@combine) cls(all)",
            "body(@combine) cls(all) listed(%O_head)",
            "%over_KV_splits runs over a list, and has class `all`",
        ),
        (
            "causal_gqa",
            "%keys_full = loop kv ranges(0 .. kv_full_end)",
            "%keys_full = loop kv ranges()",
            "%keys_full has no range; expected one",
        ),
        ("causal_gqa", "body(@step) cls(full)", "body(@stop) cls(full)", "%keys_full runs @stop, which is not a block"),
        (
            "causal_gqa",
            "cls(full)",
            "cls(most)",
            "class `most`; expected unknown, full or partial, as it runs over tiles",
        ),
        (
            "causal_gqa",
            "cls(full)",
            "cls(all)",
            "class `all`; expected unknown, full or partial, as it runs over tiles",
        ),
        ("causal_gqa", "cls(all)", "cls(full)", "class `full`; expected all, as it does not run over tiles"),
        (
            "causal_gqa",
            "    yield values(m=%soft.m, l=%l_next, acc=%acc_next)\n",
            "",
            "@step does not end with its one yield",
        ),
        (
            "causal_gqa",
            "loop kv ranges(0 .. kv_full_end)",
            "loop q ranges(0 .. kv_full_end)",
            "%keys_full runs over q, which is an axis of the grid",
        ),
        (
            "causal_gqa",
            "ranges((group*split) // splits .. ",
            "ranges(0 .. ",
            "%total does not run over 0 .. group, or over the",
        ),
        (
            "causal_gqa",
            " heads(g_first .. g_end)",
            " by_tile(yes)",
            "runs each tile for all heads, and has no heads",
        ),
        (
            "causal_gqa",
            "body(@step) cls(full)",
            "body(@step) cls(full) reversed(yes)",
            "%keys_full is reversed; expected this only in a warp group that loads",
        ),
        (
            "causal_gqa",
            "heads(g_first .. g_end)",
            "heads(g_first .. g_end + 1)",
            "%total_full runs for several heads; expected those of the",
        ),
        (
            "causal_gqa",
            "body(@step) cls(full)",
            "body(@step) cls(full) heads(0 .. group)",
            "%keys_full runs for several heads; expected those of the program's",
        ),
        (
            "causal_fa1",
            "ranges(0 .. cdiv(Nk, BLOCK_KV))",
            "ranges(1 .. cdiv(Nk, BLOCK_KV))",
            "%keys does not run over all tiles of kv",
        ),
        (
            "causal_gqa",
            "m=%soft.m, l=%l_next, acc=%acc_next",
            "m=%soft.m, l=%l_next",
            "carries m: f32[BLOCK_Q], l: f32[BLOCK_Q], acc",
        ),
    ],
    "split-axis": [
        (
            "decode_gqa",
            "portion(kv_full_end, KV_split + 1, num_KV_splits)",
            "portion(kv_end, KV_split + 1, num_KV_splits)",
            "KV_split in num_KV_splits split loops over @step",
        ),
        (
            "causal_gqa",
            "(group*split) // splits .. (group*split + group) // splits",
            "0 .. group",
            "split in splits split loops over no body",
        ),
        (
            "causal_gqa",
            "ranges(q_full_first .. q_full_end)",
            f"ranges({PART_OF_TILES})",
            "@group, @step; expected all ranges over one",
        ),
    ],
    "split-kv": [
        (
            "decode_gqa",
            " split_kv(cdiv(Nk, 64))",
            "",
            "it does not say how keys are split; expected that in kernels with splits",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(cdiv(queries, 64))",
            "keys are split in another way than in @combine",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(cdiv(Nk, 64), 16)",
            "keys are split in another way than in @combine",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(Nk*kv_end)",
            "names `kv_end`; expected Nk and integers of the call",
        ),
        (
            "decode_gqa",
            "KV_split in num_KV_splits, hkv in Hkv, b in B)",
            "KV_split in num_KV_splits, hkv in Hkv)",
            "it lacks the axis b",
        ),
    ],
    "split-d": [
        (
            "causal_d512_gqa",
            "split_V in cdiv(D_V, D_V_split)",
            "split_V in 2",
            "one such axis, after tiles, in cdiv(D_V, D_V_split)",
        ),
        (
            "causal_d512_gqa",
            "check(kv if partial) columns_of(%k)",
            "check(kv) columns_of(%k)",
            "%k_own is no part of %k; expected its columns",
        ),
        ("causal_d512_gqa", "BLOCK_D=512", "BLOCK_D=96", "BLOCK_D=96; expected a power of two from 128 to 512"),
        (
            "causal_gqa",
            "BLOCK_KV=64 num_warps",
            "BLOCK_KV=64 BLOCK_D=64 num_warps",
            "BLOCK_D=64, and its programs do not split columns",
        ),
    ],
    "classified": [
        ("causal_gqa", " cls(full)", "", "%keys_full has class unknown; classify-tiles and split-loops come first"),
    ],
    "covers": [
        (
            "decode_gqa",
            "portion(kv_full_end, KV_split + 1, num_KV_splits)",
            "portion(kv_full_end, KV_split, num_KV_splits)",
            "which is not proven to be all of",
        ),
        (
            "causal_gqa",
            "ranges(kv_full_end .. kv_end)",
            "ranges(kv_full_end .. kv_full_end)",
            "the loops over @step run 0 .. ",
        ),
        (
            "causal_gqa",
            "ranges(0 .. kv_full_end)",
            "ranges(1 .. kv_full_end)",
            "1 .. kv_full_end, which is not proven to rise from 0",
        ),
        (
            "full_mha",
            "ranges(kv_full_end .. kv_end)",
            "ranges(0 - 2 .. 0, kv_full_end .. kv_end)",
            "-2 .. 0, which is not proven to rise",
        ),
        (
            "full_mha",
            "ranges(kv_full_end .. kv_end)",
            "ranges(kv_full_end .. kv_end, kv_end .. 0)",
            "kv_end .. 0, which is not proven",
        ),
        (
            "window_gqa",
            "ranges(kv_first .. kv_full_first, kv_full_end .. kv_end)",
            "ranges(kv_full_end .. kv_end, kv_first .. kv_full_first)",
            "runs up to kv_end and then from kv_first, which is not proven to come later",
        ),
        ("causal_gqa", "ranges(kv_full_end .. kv_end)", "ranges(0 .. kv_end)", "once each"),
    ],
    "full-is-proven": [
        ("causal_gqa", "cls(partial)", "cls(full)", "as class full, but only 0 .. "),
        (
            "causal_fa1",
            "select(BLOCK_KV + kv_start <= Nk, (Nq // BLOCK_Q), 0)",
            "(Nq // BLOCK_Q)",
            "proven to hold nothing masked or out",
        ),
        ("window_gqa", "q_idx - 1023", "q_idx - 511", "proven to hold nothing masked or out of bounds"),
    ],
    "unswitch": [
        (
            "causal_gqa",
            "where(kv_idx <= Nk - Nq + q_idx)",
            "where(kv_idx <= Nk - Nq + q_idx) unswitch(kv_start > q_start)",
            "%masked has an unswitch condition; expected none in a portable kernel",
        ),
    ],
    "out-of-bounds-keys": [
        (
            "full_mha",
            "where(kv_idx < Nk)",
            "where(kv_idx < Nk + 5)",
            "no mask in @step hides the keys from Nk on; expected a condition",
        ),
        ("padding_mha", "key_padding and kv_idx < Nk", "key_padding", "no mask in @step hides the keys from Nk on"),
    ],
    "load-rows": [
        (
            "padding_mha",
            "%kv_needed_end = map expr(min(Nk, key_padding_end)) uses(key_padding_end=%key_padding_end)",
            "%kv_needed_end = map expr(min(Nk, key_padding_run)) uses(key_padding_run=%key_padding_run)",
            "%k reads rows key_padding_first .. kv_needed_end, which are not proven to be all rows in visible pairs",
        ),
        (
            "padding_mha",
            "%kv_needed_end = map expr(min(Nk, key_padding_end))",
            "%kv_needed_end = map expr(key_padding_end)",
            "`kv_needed_end`, which is not proven to be at most Nk",
        ),
        (
            "padding_mha",
            "needed(key_padding_first ..",
            "needed(key_padding_first + 1 ..",
            "%k reads rows key_padding_first + 1 .. kv_",
        ),
        (
            "padding_mha",
            ".. kv_needed_end)",
            ".. kv_needed_end, 0 .. 1)",
            "%k is limited to rows; expected one range, in a loop",
        ),
        (
            "padding_mha",
            "%q = load %Q_head[q, d_qk] check(q)",
            "%q = load %Q_head[q, d_qk] check(q) needed(0 .. Nk)",
            "%q is limited",
        ),
    ],
    "block-lists": [
        (
            "block_sparse_mha",
            " cls(full) listed(%KV_LIST_row)",
            " cls(full)",
            "also visits tiles of masked blocks; expected `listed`",
        ),
        (
            "block_sparse_mha",
            "listed(%KV_LIST_row)",
            "listed(%KV_RANK_row)",
            "expected `listed` with a row of %KV_LIST",
        ),
        (
            "block_sparse_mha",
            "ranges(0 .. kv_full_end_at)",
            "ranges(0 .. kv_full_end)",
            "`kv_full_end`; expected 0 or a position in %KV_RANK",
        ),
        (
            "block_sparse_mha",
            "list_position %KV_RANK_row tile(kv_full",
            "list_position %KV_LIST_row tile(kv_full",
            "expected 0 or a position in %KV_RANK",
        ),
    ],
}
