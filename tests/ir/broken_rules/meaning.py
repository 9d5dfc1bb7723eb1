"""Edits of target IR that break rules about masks, scores and results.

Each rule has cases of (spec, old text, new text, piece of the reason). An edit is made in the kernels if the old text
occurs there, and otherwise in the header.
"""

from __future__ import annotations

EDITS = {
    "mask": [
        (
            "dilated_mha",
            "% 4) == (kv_idx",
            "% 2) == (kv_idx",
            "kernel @fwd: %soft hides more than the header's mask: `((Nk - Nq + q",
        ),
        (
            "padding_mha",
            "mask key_padding where(key_padding)",
            "mask key_padding where(true)",
            "kernel @fwd: %soft hides more than the header's mask: `KEY_PADDING[b, kv_idx]`",
        ),
        (
            "padding_mha",
            "enough key_padding_first <= kv_idx and",
            "enough",
            "assumes more about `key_padding` than the header states",
        ),
    ],
    "scores": [
        (
            "causal_gqa",
            "masked*qk_scale)",
            "2*masked*qk_scale)",
            "%p computes weights by exp2(2*LOG2E*s*scale - select(",
        ),
        (
            "causal_gqa",
            "exp2(-lse2 + masked*qk_scale)",
            "exp2(-lse2)*exp2(masked*qk_scale)",
            "computes no weights of its scores",
        ),
        (
            "causal_outputs_gqa",
            "select(p > 0, -m_next*qk_scale",
            "select(p > 0, m_next*qk_scale",
            "%log2_p reads the masked",
        ),
        (
            "causal_outputs_gqa",
            "select(p > 0, -lse2 + masked*qk_scale, 0)",
            "-lse2 + masked*qk_scale",
            "kernel @dq: %log2_p reads the masked",
        ),
    ],
    "outputs": [
        (
            "causal_gqa",
            "  dropout no\n",
            "  dropout no\n  outputs lse max_score\n",
            "kernel @fwd: it stores no MAX_SCORE; expected it to",
        ),
        (
            "qk_clip_gqa",
            "expr(LN2*m*qk_scale)",
            "expr(2*LN2*m*qk_scale)",
            "%max_score is `2*%keys_partial.m*LN2*LOG2E*scale`",
        ),
        (
            "qk_clip_gqa",
            "expr(LN2*m*qk_scale) uses(m=%keys_partial.m",
            "expr(LN2*m*qk_scale) uses(m=%keys_partial.l",
            "expected `%keys_partial.m*LN2*LOG2E*scale`",
        ),
        (
            "causal_outputs_gqa",
            "expr(alpha*(e - grown*l) + e_tile)",
            "expr(alpha*(e - l) + 0*grown + e_tile)",
            "kernel @fwd: %e_next is `",
        ),
        (
            "causal_outputs_gqa",
            "select(alpha > 0, -m*qk_scale + m_next",
            "select(alpha > 0, m*qk_scale + m_next",
            "%e_next is `",
        ),
        ("causal_outputs_gqa", "%terms = map expr(log2_p*p)", "%terms = map expr(log2_p + 0*p)", " + sum_of_terms`"),
        (
            "causal_outputs_gqa",
            "%mass_init = init 0",
            "%mass_init = init 1",
            "%queries_partial.mass is stored in KEY_MASS",
        ),
        (
            "causal_outputs_gqa",
            "%mass_next = map expr(mass + p_sum)",
            "%mass_next = map expr(mass - p_sum)",
            "%mass_next is `",
        ),
        ("causal_outputs_gqa", "LN2*(-e/l + log2(l))", "LN2*(e/l + log2(l))", "%entropy is `"),
    ],
    "dropout": [
        (
            "causal_dropout_mqa",
            "dropout yes",
            "dropout no",
            "1 dropout masks and 1 dropouts; expected 0 of each (dropout no)",
        ),
        ("causal_mqa", "dropout no", "dropout yes", "0 dropout masks and 0 dropouts; expected 1 of each (dropout yes)"),
    ],
    "extremes": [
        (
            "packed_document_gqa",
            "%document_end_least = load %DOCUMENT_END[q_start]",
            "%document_end_least = load %DOCUMENT_END[min(Nq, BLOCK_Q + q_start) - 1]",
            "%document_end_least is not proven to be the min of %document_end over the rows of the program tile",
        ),
        (
            "packed_document_gqa",
            "document_first[Nq] rising",
            "document_first[Nq]",
            "%document_first_least is not proven to be the min of",
        ),
    ],
    "latents": [
        (
            "decode_mla",
            "dot %p_cast %v over(BLOCK_KV)",
            "dot %p_cast %k over(BLOCK_KV)",
            "multiplies weights by %k; expected a tile of %V",
        ),
    ],
    "combine": [
        ("decode_gqa", "expr(acc*alpha + o_sum)", "expr(acc + o_sum)", "%acc_next is"),
    ],
    "quantised": [
        ("decode_paged_fp8_gqa", "expr(acc*v_scale)", "expr(acc)", "expected the factor V_SCALE[hkv] in it, once"),
        ("decode_paged_fp8_gqa", "expr(v/v_scale)", "expr(v/k_scale)", "expected an element of V_NEW / V_SCALE[hkv]"),
    ],
}
