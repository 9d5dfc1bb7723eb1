"""Edits of target IR that break rules about headers, signatures, names and values of kernels.

Each rule has cases of (spec, old text, new text, piece of the reason). An edit is made in the kernels if the old text
occurs there, and otherwise in the header.
"""

from __future__ import annotations

EDITS = {
    "header": [
        ("causal_gqa", "heads gqa", "heads some", "`heads some`; expected one of mha, mqa, gqa"),
        ("causal_gqa", "dtype bf16 fp16", "dtype int8", "`dtype int8`; expected one of bf16, fp16, fp32"),
        ("causal_gqa", "v=128", "v=20", "`head_dim v 20`; expected one of 16, 24, 32"),
        ("causal_gqa", "backend triton", "backend cuda", "`backend cuda`; expected one of triton"),
        ("causal_gqa", "precision ieee", "precision low", "`precision low`; expected one of ieee, tf32"),
        ("causal_gqa", "dtype bf16 fp16", "dtype", "dtype ``; expected one or more, each once"),
        ("causal_gqa", "dtype bf16 fp16", "dtype fp16 fp16", "dtype `fp16 fp16`; expected one or more, each once"),
        ("block_sparse_mha", "blocks 128", "blocks 96", "`blocks 96`; expected a power of two from 16 to 4096"),
        ("causal_gqa", "mask causal", "mask {causal}", "has a quote, a backslash or a brace"),
        ("padding_mha", "may be attended to", "may be {attended} to", "has a quote, a backslash or a brace"),
        ("alibi_mha", "score alibi", "score {alibi}", "has a quote, a backslash or a brace"),
        (
            "qk_clip_gqa",
            "outputs lse max_score",
            "outputs max_score lse",
            "`outputs max_score lse`; expected lse, and some of lse",
        ),
        (
            "causal_gqa",
            "where(Nk - Nq + q_idx >=",
            "where(window >=",
            "`mask` names `window`, which is no position, size or input",
        ),
        (
            "padding_mha",
            "key_padding_first[B] key_padding_run[B]",
            "key_padding_first[B]",
            "`mask` names `key_padding_run`, which is no",
        ),
        (
            "alibi_mha",
            "expr(-alibi_slopes*",
            "expr(-slopes*",
            "`score` names `slopes`, which is no position, size or input",
        ),
        (
            "relative_bias_mha",
            "from relative_bias[h, ",
            "from relative_bias[",
            "`read relative_bias from relative_bias` is no element",
        ),
        (
            "relative_bias_mha",
            "from relative_bias[h, ",
            "from relative_bias[head, ",
            "`read relative_bias` names `head`, which is",
        ),
    ],
    "signature": [
        (
            "causal_gqa",
            "grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8), h in Hq",
            "grid(h in Hq",
            "grid does not start with q or kv, and",
        ),
        (
            "causal_gqa",
            "h in Hq, b in B",
            "h in Hq swizzle(8), b in B",
            "swizzle(8) of the grid axis h; expected 1 or more heads, on an",
        ),
        (
            "causal_gqa",
            "swizzle(8)",
            "swizzle(0)",
            "swizzle(0) of the grid axis q; expected 1 or more heads, on an axis of tiles",
        ),
        ("causal_gqa", "%V = arg in", "%V = arg inout", "nothing is stored to %V"),
        ("causal_gqa", "%V = arg in", "%V = arg out", "reads %V, which is no tensor of role `in`"),
        (
            "causal_fa1",
            "body(@tile) cls(all)",
            "body(@tile) cls(partial)",
            "grid does not start with q or kv, and no loop of class all",
        ),
        ("causal_gqa", "%O = arg out", "%O = arg in", "writes %O, which is no tensor of role `out`"),
        (
            "causal_gqa",
            "%scale = arg scalar",
            "%scale = arg number",
            "argument `number` of @entry; expected in or out or",
        ),
        (
            "causal_gqa",
            "    %m_init",
            "  block @entry\n    %m_init",
            "@entry is not the body of loops of one other block",
        ),
        ("causal_gqa", "%m = arg carry", "%m = arg in", "argument `in` of @step; expected carry"),
        (
            "causal_gqa",
            "T[B, Hq, Nq, D_QK]",
            "T[B, D_QK, Nq, Hq]",
            "%Q is of [B, D_QK, Nq, Hq]; expected B, Ck, Cq, Hkv, Hq, Nc, Nd, Nentropy, Nk, Nlse",
        ),
        (
            "causal_gqa",
            "%m_init = init -inf : f32",
            "%m_init = init -inf : f64",
            "%m_init is of `f64`; expected one of T, f32",
        ),
        ("causal_gqa", "block @entry", "block @main", "no block @entry"),
        ("causal_gqa", "    store %LSE_head[q] %lse check(q)\n", "", "nothing is stored to %LSE"),
        (
            "causal_gqa",
            "body(@step) cls(full)",
            "body(@entry) cls(full)",
            "@entry is not the body of loops of one other block",
        ),
        (
            "causal_gqa",
            "  block @step\n",
            "  block @unused\n  block @step\n",
            "@unused is not the body of loops of one other block",
        ),
        (
            "causal_gqa",
            "    %lse2 = load",
            "    %again = loop q ranges(0 .. 0) carry(dk_step=%dk_step) body(@step) cls(partial)\n    %lse2 = load",
            "@step is not the body of loops of one other block",
        ),
    ],
    "references": [
        ("causal_gqa", "m=%soft.m", "m=%soft.max", "reads %soft.max; %soft has .p, .alpha, .m"),
        ("causal_gqa", "acc=%keys_partial.acc", "acc=%keys_partial", "%keys_partial has .m, .l, .acc"),
    ],
    "defined": [
        (
            "causal_gqa",
            "    %q = load %Q_head[q, d_qk] check(q)",
            "    %copy = map expr(x) uses(x=%q) : T[BLOCK_Q, D_QK] @sram\n    %q = load %Q_head[q, d_qk] check(q)",
            "%copy reads %q where",
        ),
        (
            "causal_gqa",
            "acc=%keys_partial.acc, inv_l",
            "acc=%acc_next, inv_l",
            "%o reads %acc_next where it is not defined",
        ),
        ("causal_gqa", "expr(acc*alpha) uses(acc=%acc,", "expr(acc*alpha) uses(acc=%acc_next,", "depends on itself"),
        (
            "causal_gqa",
            "expr(max(0, min(Nk, Nk - Nq",
            "expr(kv_full_end + max(0, min(Nk, Nk - Nq",
            "%kv_full_end reads %kv_full_end where",
        ),
    ],
    "names": [
        (
            "causal_gqa",
            "expr(acc*inv_l)",
            "expr(acc*inv_l + kv_start)",
            "`kv_start`, which is no operand, scalar or position",
        ),
        ("causal_gqa", "expr(acc*alpha)", "expr(acc*alpha + kv)", "`kv`, which is no operand, scalar or position"),
        (
            "padding_mha",
            "key_padding_run=%key_padding_run",
            "key_padding_run=%key_padding_end",
            "expected the same name of a scalar in all expressions",
        ),
        (
            "causal_gqa",
            "uses(l=%keys_partial.l) : f32",
            "uses(l=%keys_partial.l, Nk=%Nq) : f32",
            "names %Nq `Nk`; expected the same name",
        ),
        (
            "causal_gqa",
            "%Hq = arg scalar",
            "%heads = arg scalar",
            "the grid axis h: `Hq` has `Hq`, which is no operand, scalar or position",
        ),
        (
            "causal_gqa",
            "BLOCK_Q + q_start)",
            "BLOCK_Q + q_start, q_start // (0 - BLOCK_Q))",
            "by a number that is not known to be positive",
        ),
        (
            "causal_gqa",
            "    %inv_l = map",
            "    %lambda = map expr(1) : f32[] @reg\n    %inv_l = map",
            "%lambda is a name that the printed kernel needs for itself",
        ),
        (
            "causal_gqa",
            "    %inv_l = map",
            "    %_in_group = map expr(1) : i32[] @reg\n    %inv_l = map",
            "%_in_group is a name that the printed kernel needs for itself",
        ),
        (
            "causal_gqa",
            "    %inv_l = map",
            "    %_swizzle_heads = map expr(1) : i32[] @reg\n    %inv_l = map",
            "%_swizzle_heads is a name that the printed kernel needs for itself",
        ),
        (
            "causal_gqa",
            "    %inv_l = map",
            "    %m_seen = map expr(1) : f32[] @reg\n    %inv_l = map",
            "%m_seen is a name that the printed kernel needs for itself",
        ),
        (
            "causal_gqa",
            "    %inv_l = map",
            "    %stride_q_b = map expr(1) : f32[] @reg\n    %inv_l = map",
            "%stride_q_b is a name that the printed kernel needs for itself",
        ),
        (
            "causal_gqa",
            "    yield values(m=%soft.m",
            "    %more = softmax_step %s m(%m) : f32[BLOCK_Q, BLOCK_KV] @reg\n    yield values(m=%soft.m",
            "2 softmax steps; expected one",
        ),
        (
            "causal_gqa",
            "kv_idx <= Nk - Nq + q_idx",
            "kv_idx <= window + q_idx",
            "`window`, which is no operand, scalar or position",
        ),
        (
            "causal_gqa",
            "kernel @fwd program_axis(q) grid(q in cdiv(Nq, BLOCK_Q)",
            "kernel @fwd program_axis(q) grid(q in cdiv(N, BLOCK_Q)",
            "the grid axis q: `cdiv(N, BLOCK_Q)`",
        ),
    ],
    "live": [
        ("causal_gqa", " acc(%dq)", "", "%dq is read by nothing"),
        ("causal_gqa", " acc(%rescaled)", "", "%rescaled is read by nothing"),
        ("causal_gqa", " acc(%dv_step)", "", "%dv_step is read by nothing"),
    ],
    "rewrites": [
        (
            "causal_fa1",
            "    %s = dot",
            "    %again = load %ROW_SUM_head[q] check(q if partial) : f32[BLOCK_Q] @reg\n    %s = dot",
            "%ROW_SUM has 3 loads and stores; expected one load, and then one store",
        ),
    ],
    "memory-space": [
        (
            "causal_gqa",
            "%rescaled = map expr(acc*alpha) uses(acc=%acc, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg",
            "%rescaled = map expr(acc*alpha) uses(acc=%acc, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @?",
            "%rescaled has no memory space",
        ),
    ],
    "in-place": [
        ("causal_gqa", "softmax_step %masked", "softmax_step %s", "%masked updates %s in place, which %soft reads too"),
        (
            "causal_gqa",
            "acc=%keys_partial.acc, inv_l",
            "acc=%keys_full.acc, inv_l",
            "%keys_partial updates %keys_full.acc in place, which %o",
        ),
        (
            "causal_gqa",
            "carry(m=%keys_full.m, l=%keys_full.l, acc=%keys_full.acc)",
            "carry(m=%keys_full.l, l=%keys_full.m, acc=%keys_full.acc)",
            "%keys_partial runs @step after %keys_full and does not start from what that one carries",
        ),
        (
            "causal_gqa",
            "carry(m=%m_init, l=%l_init",
            "carry(m=%m_init, l=%m_init",
            "%keys_full starts two carried values from one",
        ),
        (
            "causal_gqa",
            "yield values(m=%soft.m, l=%l_next",
            "yield values(m=%soft.m, l=%soft.m",
            "passes %soft.m to a field of another value",
        ),
        (
            "causal_gqa",
            "yield values(m=%soft.m, l=%l_next",
            "yield values(m=%l, l=%l_next",
            "passes %l to a field of another value",
        ),
    ],
}
