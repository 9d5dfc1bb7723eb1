"""Edits of target IR that break rules about types, indices and checks of loads, stores and products.

Each rule has cases of (spec, old text, new text, piece of the reason). An edit is made in the kernels if the old text
occurs there, and otherwise in the header.
"""

from __future__ import annotations

EDITS = {
    "types": [
        (
            "decode_paged_gqa",
            "where(kv_idx < Nk) : i32[BLOCK_KV]",
            "where(kv_idx < Nk and kv_idx < 10) : i32[BLOCK_KV]",
            "has %page as pages",
        ),
        (
            "decode_paged_gqa",
            "kv_idx // 64] uses(Nk=%Nk)",
            "(kv_idx + 64) // 64] uses(Nk=%Nk)",
            "expected those of %PAGE_TABLE[b, kv_idx // 64]",
        ),
        (
            "decode_paged_gqa",
            "rows(%rows) pages(%page)",
            "rows(%rows) pages(%rows)",
            "has %rows as pages of its rows",
        ),
        (
            "decode_gqa",
            "%rows = map expr(before + kv_idx)",
            "%rows = map expr(before + 2*kv_idx)",
            "appends rows elsewhere than after",
        ),
        (
            "causal_gqa",
            "%p_cast = map expr(p) uses(p=%p) : T[BLOCK_KV, BLOCK_Q]",
            "%p_cast = map expr(p) uses(p=%p) : T[BLOCK_Q, BLOCK_KV]",
            "%p of [BLOCK_KV, BLOCK_Q] does not broadcast to [BLOCK_Q, BLOCK_KV]",
        ),
        (
            "causal_gqa",
            "uses(scale=%scale) : f32[]",
            "uses(scale=%scale) : T[]",
            "a value of no dimensions is of T; expected f32 or i32",
        ),
        ("causal_gqa", "%delta check(q)", "%delta check(q, q)", "checks an axis twice"),
        (
            "causal_gqa",
            "uses(scale=%scale) : f32[]",
            "uses(scale=%scale) : i32[]",
            "`LOG2E*scale` is no integer, the value i32",
        ),
        ("causal_gqa", "%kv_end = map expr(cdiv(", "%kv_end = map expr(cdiv(scale + ", "needs integer operands"),
        ("causal_gqa", "uses(acc=%acc, alpha", "uses(acc=%K_head, alpha", "%K_head is a pointer"),
        (
            "causal_gqa",
            "%l_init = init 0 :",
            "%l_init = init q_idx :",
            "starts at `q_idx` as f32; expected a number as f32",
        ),
        (
            "causal_gqa",
            "ranges(0 .. kv_full_end)",
            "ranges(true .. kv_full_end)",
            "runs to or from `true`, which is no integer",
        ),
        ("causal_gqa", "where(kv_idx <= Nk - Nq + q_idx)", "where(kv_idx + 1)", "`kv_idx + 1` is no condition"),
        (
            "causal_gqa",
            "exp2(-lse2 + masked*qk_scale)",
            "exp2(qk_scale <= masked)",
            "`exp2(qk_scale <= masked)` computes with a condition",
        ),
        ("causal_gqa", "scale(%qk_scale)", "scale(%l)", "needs s and m in f32, and one number as scale"),
        (
            "causal_gqa",
            "dot %q %k over(D_QK)",
            "dot %q %k over(D_V)",
            "cannot contract [BLOCK_Q, D_QK] with [BLOCK_KV, D_QK] over D_V",
        ),
        (
            "causal_gqa",
            "over(D_QK) : f32[BLOCK_Q, BLOCK_KV]",
            "over(D_QK) : f32[BLOCK_KV, BLOCK_Q]",
            "the product is f32[BLOCK_Q, BLOCK_KV]",
        ),
        (
            "causal_gqa",
            "over(BLOCK_KV) acc(%rescaled)",
            "over(BLOCK_KV) acc(%s)",
            "the accumulator is [BLOCK_Q, BLOCK_KV], the product [BLOCK_Q, D_V]",
        ),
        (
            "causal_gqa",
            "uses(acc=%acc, alpha",
            "uses(acc=%k, alpha",
            "the expression is of [BLOCK_KV, BLOCK_Q, D_QK], the value of [BLOCK_Q, D_V]",
        ),
        ("causal_gqa", "<= Nk - Nq + q_idx) : f32", "<= Nk - Nq + q_idx) : T", "a masked value keeps its type"),
        (
            "causal_gqa",
            "<= Nk - Nq + q_idx)",
            "<= Nk - Nq + q_idx) when(never)",
            "applies `never`; expected always or partial",
        ),
        (
            "causal_dropout_mqa",
            "dropout_mask %seed threshold(%dropout_threshold)",
            "dropout_mask %seed threshold(%scale)",
            "needs a seed (i64) and a threshold",
        ),
        ("causal_dropout_mqa", "seed %SEED : i64[]", "seed %SEED : i32[]", "is one i64, read from a tensor of one i64"),
        (
            "causal_dropout_mqa",
            "dropout %soft.p keep(%keep)",
            "dropout %acc keep(%keep)",
            "keeps the type of an f32 value",
        ),
        (
            "block_sparse_mha",
            "list_position %KV_RANK_row tile",
            "list_position %Nk tile",
            "needs a pointer to ranks, and is one i32",
        ),
        (
            "block_sparse_mha",
            "listed(%KV_LIST_row)",
            "listed(%Nk)",
            "visits tiles of the list %Nk, which is no pointer",
        ),
        (
            "causal_gqa",
            "scale(%qk_scale)",
            "scale(%qk_scale) guard(never)",
            "guards `never`; expected always or partial",
        ),
        ("causal_gqa", "softmax_step %masked m(%m)", "softmax_step %masked m(%acc)", "m of its rows"),
        (
            "causal_gqa",
            "reduce sum %product over(D_V)",
            "reduce sum %product over(D_QK)",
            "cannot reduce [BLOCK_Q, D_V] over D_QK",
        ),
        (
            "causal_gqa",
            "%lse = load %LSE_head[q] check(q) other(-inf) : f32",
            "%lse = load %LSE_head[q] check(q) other(-inf) : T",
            "%LSE_head holds f32, the value is T",
        ),
        ("causal_gqa", "expr(acc*alpha)", "expr(acc < alpha)", "`acc < alpha` is a condition, the value f32"),
        ("causal_gqa", "expr(acc*alpha)", "expr(cdiv(acc, alpha))", "`cdiv(acc, alpha)` needs integer operands"),
        ("causal_gqa", "reduce sum", "reduce mean", "`mean` is not a reduction; expected sum, min or max"),
        (
            "causal_gqa",
            "load %Q_head[q, d_qk]",
            "load %Q_head[q, d_v]",
            "the access is of [BLOCK_Q, D_V], the value of [BLOCK_Q, D_QK]",
        ),
        ("causal_gqa", "load %Q_head[q, d_qk]", "load %Q[q, d_qk]", "%Q has 4 dimensions, the access 2"),
        ("causal_gqa", "base %Q[b, h]", "base %Q[b]", "%Q_head has 4 dimensions, the access 3"),
        (
            "causal_gqa",
            "%q = load %Q_head[q, d_qk] check(q)",
            "%q = load %Q_head[q, d_qk] check(q, kv)",
            "cannot check `kv if always`; expected one of q, d_qk, always or partial",
        ),
    ],
    "indexing": [
        (
            "decode_gqa",
            "base %O_PARTIAL[hkv, KV_split + first_item]",
            "base %O_PARTIAL[hkv, part]",
            "indexes items of %O_PARTIAL by `part`",
        ),
        (
            "causal_gqa",
            "base %dK[b, hkv, split]",
            "base %dK[b, hkv, hkv]",
            "indexes splits of %dK by `hkv`; expected `split`",
        ),
        ("causal_mqa", "base %K[b, 0]", "base %K[b, h]", "%K_head indexes Hkv of %K by `h`; expected `0` (heads mqa)"),
        (
            "causal_mha",
            "base %K[b, h]",
            "base %K[b, h + 1]",
            "%K_head indexes Hkv of %K by `h + 1`; expected `h` (heads mha)",
        ),
        (
            "causal_gqa",
            "base %dK[b, hkv, split]",
            "base %dK[b, 0, split]",
            "Hkv of %dK by `0`; expected `h // group or hkv` (heads gqa)",
        ),
        ("causal_gqa", "base %O[b, h]", "base %O[h, b]", "%O_head indexes B of %O by `h`; expected `b`"),
        (
            "padding_mha",
            "base %KEY_PADDING[b]",
            "base %KEY_PADDING[0]",
            "indexes B of %KEY_PADDING by `0`; expected `b`",
        ),
        (
            "causal_dropout_mqa",
            "threshold(%dropout_threshold) head(h)",
            "threshold(%dropout_threshold) head(b)",
            "%keep has the dropout of head `b`; expected that",
        ),
        ("block_sparse_mha", "blocks 128", "blocks no", "indexes Tq of %KV_RANK by `q_start // 128`; expected ``"),
        (
            "block_sparse_mha",
            "%KV_RANK[b, h, q_start // 128]",
            "%KV_RANK[b, h, q_start // 64]",
            "indexes Tq of %KV_RANK by `q_start // 64`; expected",
        ),
    ],
    "bounds-checked": [
        (
            "causal_gqa",
            "%q = load %Q_head[q, d_qk] check(q)",
            "%q = load %Q_head[q, d_qk]",
            "%q in @entry does not check q",
        ),
        ("causal_gqa", "%o check(q)", "%o", "in @entry does not check q"),
        (
            "causal_fa1",
            "[kv, d_qk] check(kv)",
            "[kv, d_qk] check(kv if partial)",
            "%k in @tile does not check kv in full tiles too",
        ),
        ("causal_gqa", "[kv, d_qk] check(kv if partial)", "[kv, d_qk]", "%k in @step does not check kv"),
        (
            "causal_gqa",
            "%q = load %Q_head[q, d_qk] check(q)",
            "%q = load %Q_head[q, d_qk] check(q if partial)",
            "%q in @entry does not check q in full tiles too",
        ),
    ],
    "padding-checked": [
        ("mla_dims", "check(q, d_qk)", "check(q)", "%q is padded to D_QK_PAD but does not check d_qk"),
        ("mla_dims", "check(q, d_qk)", "check(q, d_qk if partial)", "%q is padded to D_QK_PAD but does not check d_qk"),
    ],
    "dot-operands": [
        ("causal_gqa", "dot %p_cast %v", "dot %soft.p %v", "%acc_next multiplies %soft.p of f32; cast it to T first"),
        (
            "causal_fp32",
            " precision(ieee)",
            "",
            "%s has precision ``; expected `ieee`, by the module's dtype and precision",
        ),
    ],
}
