"""Each rule of the verifier: a small edit of real IR that breaks that rule, and what the error says."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from attngen.errors import VerifyError
from attngen.ir.expr import symbol, to_text
from attngen.ir.graph import PHASES, GridAxis
from attngen.ir.split_axes import part
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.verify import rules, verify
from tests.helpers import WALKS, edit, lowered, portable, target, unverified

RULES = rules("triton")
OF_TILES = " .. ".join(
    map(to_text, part(symbol("q_full_first"), symbol("q_full_end"), GridAxis("split", symbol("splits"))))
)
BROKEN = {  # rule: edits of a spec's target IR, each with what the reason says
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
            "`read relative_bias from relative_bias` has no",
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
            "%Q is of [B, D_QK, Nq, Hq]; expected B, Hkv, Hq, Nc, Nd, Nentropy, Nk, Nlse",
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
    "order": [
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
    "loops": [
        (
            "decode_gqa",
            "body(@join) cls(all)",
            "body(@join) cls(all) listed(%O_head)",
            "%parts_of_keys runs over a list, and has class `all`",
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
            "%keys_full runs over q, of which the grid",
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
            "comes to each tile for all heads, and takes no heads in turn",
        ),
        (
            "causal_gqa",
            "heads(g_first .. g_end)",
            "heads(g_first .. g_end + 1)",
            "%total_full takes heads in turn that are not the",
        ),
        (
            "causal_gqa",
            "body(@step) cls(full)",
            "body(@step) cls(full) heads(0 .. group)",
            "%keys_full takes heads in turn that are not the program's",
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
    "shares": [
        (
            "decode_gqa",
            "portion(kv_full_end, part + 1, parts)",
            "portion(kv_end, part + 1, parts)",
            "part in parts share loops over @step",
        ),
        (
            "causal_gqa",
            "(group*split) // splits .. (group*split + group) // splits",
            "0 .. group",
            "split in splits share loops over no body",
        ),
        (
            "causal_gqa",
            "ranges(q_full_first .. q_full_end)",
            f"ranges({OF_TILES})",
            "@group, @step; expected parts of all ranges over one",
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
    "joins": [
        ("decode_gqa", "expr(acc*alpha + o_sum)", "expr(acc + o_sum)", "%acc_next is"),
    ],
    "quantised": [
        ("decode_paged_fp8_gqa", "expr(acc*v_scale)", "expr(acc)", "expected the factor V_SCALE[hkv] in it, once"),
        ("decode_paged_fp8_gqa", "expr(v/v_scale)", "expr(v/k_scale)", "expected an element of V_NEW / V_SCALE[hkv]"),
    ],
    "deals": [
        (
            "decode_gqa",
            " split_kv(cdiv(Nk, 64))",
            "",
            "nothing says how keys are dealt; expected that of kernels with parts of them",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(cdiv(queries, 64))",
            "keys are dealt in another way than in @combine",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(cdiv(Nk, 64), 16)",
            "keys are dealt in another way than in @combine",
        ),
        (
            "decode_gqa",
            "split_kv(cdiv(Nk, 64))",
            "split_kv(Nk*kv_end)",
            "names `kv_end`; expected Nk and whole numbers of the call",
        ),
        ("decode_gqa", "part in parts, hkv in Hkv, b in B)", "part in parts, hkv in Hkv)", "it lacks the axis b"),
    ],
    "types": [
        (
            "decode_paged_gqa",
            "where(kv_idx < Nk) : i32[BLOCK_KV]",
            "where(kv_idx < Nk and kv_idx < 10) : i32[BLOCK_KV]",
            "takes %page for",
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
            "takes %rows for the pages of its rows",
        ),
        (
            "decode_gqa",
            "%rows = map expr(before + kv_idx)",
            "%rows = map expr(before + 2*kv_idx)",
            "stores rows elsewhere than behind",
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
        ("causal_gqa", "%kv_end = map expr(cdiv(", "%kv_end = map expr(cdiv(scale + ", "divides what is no integer"),
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
            "is made of a pointer to ranks, and is one i32",
        ),
        ("block_sparse_mha", "listed(%KV_LIST_row)", "listed(%Nk)", "visits what %Nk lists, which is no pointer"),
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
        ("causal_gqa", "expr(acc*alpha)", "expr(cdiv(acc, alpha))", "`cdiv(acc, alpha)` divides what is no integer"),
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
            "base %O_PARTS[hkv, first_item + part]",
            "base %O_PARTS[hkv, part]",
            "indexes items of %O_PARTS by `part`",
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
            "%keep draws for head `b`; expected that",
        ),
        ("block_sparse_mha", "blocks 128", "blocks no", "indexes Tq of %KV_RANK by `q_start // 128`; expected ``"),
        (
            "block_sparse_mha",
            "%KV_RANK[b, h, q_start // 128]",
            "%KV_RANK[b, h, q_start // 64]",
            "indexes Tq of %KV_RANK by `q_start // 64`; expected",
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
            "a scalar has one name in all expressions",
        ),
        (
            "causal_gqa",
            "uses(l=%keys_partial.l) : f32",
            "uses(l=%keys_partial.l, Nk=%Nq) : f32",
            "takes `Nk` for %Nq; a scalar has one name",
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
            "by what is not known to be positive",
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
    "columns": [
        (
            "causal_d512_gqa",
            "own_v in cdiv(D_V, OWN_V)",
            "own_v in 2",
            "one such axis, behind tiles, in cdiv(D_V, OWN_V)",
        ),
        (
            "causal_d512_gqa",
            "check(kv if partial) columns_of(%k)",
            "check(kv) columns_of(%k)",
            "%k_own is no part of %k; expected its columns",
        ),
        ("causal_d512_gqa", "COLUMNS=512", "COLUMNS=96", "COLUMNS=96; expected a power of two from 128 to 512"),
        (
            "causal_gqa",
            "BLOCK_KV=64 num_warps",
            "BLOCK_KV=64 COLUMNS=64 num_warps",
            "COLUMNS=64, and its programs do not share columns",
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
    "merges": [
        (
            "causal_gqa",
            "order(split % 2)",
            "order(split)",
            "has the turn `split`; expected `split % 2`, the number in its pair",
        ),
        (
            "causal_gqa",
            "order(split % 2) ends(yes)",
            "order(split % 2)",
            "a program merges one tile of each tensor in its turn",
        ),
        ("causal_gqa", "order(split % 2)\n", "order(split % 2) ends(yes)\n", "and the last merge ends that"),
        (
            "causal_gqa",
            "semaphore(%DKDV_SEMAPHORE[b, hkv, split // 2, kv_start])",
            "semaphore(%DKDV_SEMAPHORE[b, hkv, 0, kv_start])",
            "has not the place of its pair, [b, hkv, split // 2, kv_start], in one tensor of turns",
        ),
    ],
    "rewrites": [
        (
            "causal_fa1",
            "    %s = dot",
            "    %again = load %ROW_SUM_head[q] check(q if partial) : f32[BLOCK_Q] @reg\n    %s = dot",
            "%ROW_SUM has 3 loads and stores; expected one load, and then one store",
        ),
    ],
    "classified": [
        ("causal_gqa", " cls(full)", "", "%keys_full has class unknown; classify-tiles and split-loops come first"),
    ],
    "covers": [
        (
            "decode_gqa",
            "portion(kv_full_end, part + 1, parts)",
            "portion(kv_full_end, part, parts)",
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
            "runs up to kv_end and then from kv_first, which is not proven to be further on",
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
    "cuts": [
        (
            "causal_gqa",
            "where(kv_idx <= Nk - Nq + q_idx)",
            "where(kv_idx <= Nk - Nq + q_idx) unswitch(kv_start > q_start)",
            "%masked is passed over in some tiles; expected that of copies of a role",
        ),
    ],
    "ends-hidden": [
        (
            "full_mha",
            "where(kv_idx < Nk)",
            "where(kv_idx < Nk + 5)",
            "no mask in @step hides the keys from Nk on; expected a condition",
        ),
        ("padding_mha", "key_padding and kv_idx < Nk", "key_padding", "no mask in @step hides the keys from Nk on"),
    ],
    "needed": [
        (
            "padding_mha",
            "%kv_needed_end = map expr(min(Nk, key_padding_end)) uses(key_padding_end=%key_padding_end)",
            "%kv_needed_end = map expr(min(Nk, key_padding_run)) uses(key_padding_run=%key_padding_run)",
            "%k reads rows key_padding_first .. kv_needed_end, which are not proven to be all of visible pairs",
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
    "turns": [
        (
            "full_mha",
            "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)",
            "order(kv_start // BLOCK_KV)",
            " has the turn `kv_start // BLOCK_KV`; expected `cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1`",
        ),
        (
            "full_mha",
            "reversed swizzle_rows(32768)",
            "swizzle_rows(32768)",
            "expected the grid to start with these, descending",
        ),
    ],
    "placed": [
        (
            "causal_gqa",
            "%rescaled = map expr(acc*alpha) uses(acc=%acc, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg",
            "%rescaled = map expr(acc*alpha) uses(acc=%acc, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @?",
            "%rescaled has no memory space",
        ),
    ],
    "described": [
        ("causal_gqa", "via(descriptor)", "via(pigeon)", "%q is read via(pigeon); expected `descriptor`"),
        (
            "causal_gqa",
            "check(q) via(",
            "check(q) other(1) via(",
            "of a tile %T[b, h, rows, columns] in sram whose outside is 0",
        ),
        (
            "causal_gqa",
            "num_warps=4 num_stages=1",
            "num_warps=4 num_stages=1 TMA=1",
            "sm80: TMA=1, but no load of @delta is via(descriptor)",
        ),
        (
            "causal_gqa",
            "schedule @fwd\n",
            "schedule @fwd\n  gfx942 bytes=2 rows<=8 : BLOCK_Q=16 BLOCK_KV=16 num_warps=4 num_stages=1 TMA=1\n",
            "gfx942: TMA=1, but gfx942 has no engine that reads them",
        ),
    ],
    "fits": [
        (
            "causal_gqa",
            "schedule @fwd\n",
            "schedule @fwd\n  sm90 bytes=2 rows<=inf : BLOCK_Q=512 BLOCK_KV=512 num_warps=8 num_stages=5\n",
            "on sm90 the kernel @fwd needs",
        ),
        (
            "causal_padding_dropout_mha",
            "schedule @fwd\n",
            "schedule @fwd\n  sm90 bytes=2 rows<=inf : BLOCK_Q=16 BLOCK_KV=16 num_warps=4 num_stages=1\n",
            "on sm90 the kernel @fwd is wrong with BLOCK_KV=16: where dropout meets booleans of a mask, Triton counts scores twice",
        ),
        (
            "causal_gqa",
            "schedule @fwd\n  sm80",
            "schedule @fwd\n  sm70",
            "`sm70` is not a device class; expected one of sm80, sm90",
        ),
    ],
    "lists": [
        (
            "block_sparse_mha",
            " cls(full) listed(%KV_LIST_row)",
            " cls(full)",
            "visits tiles of blocks that do not count; expected `listed`",
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
            "`kv_full_end`; expected 0 or a position among %KV_RANK",
        ),
        (
            "block_sparse_mha",
            "list_position %KV_RANK_row tile(kv_full",
            "list_position %KV_LIST_row tile(kv_full",
            "expected 0 or a position among %KV_RANK",
        ),
    ],
    "drops": [
        (
            "causal_dropout_mqa",
            "dropout yes",
            "dropout no",
            "1 draws and 1 values dropped; expected 0 of each (dropout no)",
        ),
        ("causal_mqa", "dropout no", "dropout yes", "0 draws and 0 values dropped; expected 1 of each (dropout yes)"),
    ],
    "ordered": [
        ("causal_fa1", "    barrier\n    %queries_full", "    %queries_full", "%queries_full loads tiles that others"),
        (
            "causal_fa1",
            "    barrier\n    %total_partial",
            "    %total_partial",
            "%total_partial loads tiles that others have stored",
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
            "%keys_partial shares @step with %keys_full and does not go on from what that one carries",
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
            "gives %soft.m to a field that is not its own",
        ),
        (
            "causal_gqa",
            "yield values(m=%soft.m, l=%l_next",
            "yield values(m=%l, l=%l_next",
            "gives %l to a field that is not its own",
        ),
    ],
    "scheduled-everywhere": [
        (
            "causal_gqa",
            "schedule @delta\n  sm80 bytes=2 rows<=inf",
            "schedule @delta\n  sm80 bytes=2 rows<=99",
            "the rows for sm80 at 2 bytes do not rise to rows<=inf",
        ),
        ("causal_gqa", "schedule @dq", "schedule @dq2", "no device class has a schedule at 2 bytes"),
        (
            "causal_gqa",
            "schedule @delta\n",
            "schedule @delta\n  sm80 bytes=2 none : nothing fits\n",
            "there is a line `none` for sm80 at 2 bytes, and another line",
        ),
    ],
    "waits": [
        (
            "decode_gqa",
            "    grid_dependency_wait\n",
            "    grid_dependency_wait\n    grid_dependency_wait\n",
            "it waits for the launch before 2 times",
        ),
        (
            "causal_gqa",
            "kernel @fwd program_axis(q)",
            "kernel @fwd program_axis(q) launch_dependents",
            "lets the next launch start early, and no kernel waits",
        ),
    ],
    "powers-of-two": [
        (
            "decode_gqa",
            "BLOCK_KV=16 num_warps=1 num_stages=1",
            "BLOCK_KV=16 num_warps=1 num_stages=2",
            "BLOCK_Q=1 and num_stages=2; expected 1",
        ),
        (
            "decode_gqa",
            "BLOCK_Q=1 BLOCK_KV=16 ",
            "BLOCK_Q=1 BLOCK_KV=64 ",
            "a turn joins 64 parts, 256 numbers of a thread, which has 255",
        ),
        (
            "decode_gqa",
            "BLOCK_Q=1 BLOCK_KV=16 ",
            "BLOCK_Q=2 BLOCK_KV=16 ",
            "BLOCK_Q=2 and num_stages=1; expected 1, as a program joins",
        ),
        (
            "decode_gqa",
            "BLOCK_KV=16 num_warps=1 ",
            "BLOCK_KV=16 num_warps=2 ",
            "num_warps=2; expected 1 at most, with which each has all parts",
        ),
        (
            "causal_gqa",
            "num_warps=4 num_stages=1",
            "num_warps=3 num_stages=1",
            "sm80: num_warps=3; Triton needs a power of two, 1 at least",
        ),
        (
            "causal_gqa",
            "BLOCK_KV=64 num_warps=4 num_stages=1",
            "BLOCK_KV=8 num_warps=4 num_stages=1",
            "BLOCK_KV=8; Triton needs a power of two, 16 at least",
        ),
        ("causal_gqa", "num_warps=4 num_stages=1", "num_warps=4 num_stages=0", "num_stages=0; expected 1 to 8"),
        (
            "causal_gqa",
            "num_warps=4 num_stages=1",
            "num_warps=64 num_stages=1",
            "num_warps=64; expected at most 32, which are 1024 threads",
        ),
        ("causal_gqa", "rows<=64", "rows<=0", "rows<=0; expected 1 or more"),
        ("mla_dims", "qk=192", "qk=128", "is of D_QK_PAD; a head dimension of 128 is not padded on chip"),
        ("causal_gqa", "qk=128", "qk=120", "is of D_QK; a head dimension of 120 is padded on chip"),
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
    "padding-checked": [
        ("mla_dims", "check(q, d_qk)", "check(q)", "%q is padded to D_QK_PAD but does not check d_qk"),
        ("mla_dims", "check(q, d_qk)", "check(q, d_qk if partial)", "%q is padded to D_QK_PAD but does not check d_qk"),
    ],
    "extremes": [
        (
            "packed_document_gqa",
            "%document_end_least = load %DOCUMENT_END[q_start]",
            "%document_end_least = load %DOCUMENT_END[min(Nq, BLOCK_Q + q_start) - 1]",
            "%document_end_least is not proven to be the min of %document_end over the rows of the program's own tile",
        ),
        (
            "packed_document_gqa",
            "document_first[Nq] rising",
            "document_first[Nq]",
            "%document_first_least is not proven to be the min of",
        ),
    ],
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
            "takes more as known of `key_padding` than the header says",
        ),
    ],
    "scores": [
        ("causal_gqa", "masked*qk_scale)", "2*masked*qk_scale)", "%p weighs scores by exp2(2*LOG2E*s*scale - select("),
        (
            "causal_gqa",
            "exp2(-lse2 + masked*qk_scale)",
            "exp2(-lse2)*exp2(masked*qk_scale)",
            "makes no weights of its scores",
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
    "live": [
        ("causal_gqa", " acc(%dq)", "", "%dq is read by nothing"),
        ("causal_gqa", " acc(%rescaled)", "", "%rescaled is read by nothing"),
        ("causal_gqa", " acc(%dv_step)", "", "%dv_step is read by nothing"),
    ],
}


def refused(text):
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text, "edited.ir"))
    return error.value


@pytest.mark.parametrize(
    "rule, spec, old, new, reason",
    [pytest.param(rule, *case, id=f"{rule}-{n}") for rule, cases in BROKEN.items() for n, case in enumerate(cases)],
)
def test_a_rule_is_broken_by_its_edit(rule, spec, old, new, reason):
    head, kernels = re.split(r"(?=\nkernel @)", print_module(target(spec)), maxsplit=1)
    text = (
        head + edit(kernels, (old, new)) if old in kernels else edit(head, (old, new)) + kernels
    )  # in a kernel, if it is there
    error = refused(text)
    assert (error.rule, reason in error.reason) == (rule, True), error
    assert str(error).startswith(f"the IR breaks rule `{rule}`: kernel @")
    assert error.ir_text == print_module(parse_module(text))


@cache
def scattering() -> str:
    """The target IR of a module that adds gradients of a table atomically."""
    params = {"table": {"tensor": ["H", 40], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    return print_module(
        lower(make_spec({"name": "free", "head_dim": 16, "score": score, "backward": {"deterministic": False}}))
    )


SCATTER = "scatter %dTABLE[h, select(bucket < 0, bucket + 40, bucket)] %ds uses(bucket=%bucket) where("


@pytest.mark.parametrize(
    "rule, old, new, reason",
    [
        (
            "types",
            SCATTER,
            SCATTER.replace("%ds", "%bucket"),
            "writes i32 to %dTABLE by `add`; expected f32, and an output of that",
        ),
        ("types", SCATTER, SCATTER.replace("h, ", ""), "%dTABLE has 2 dimensions, the access 1"),
        ("types", SCATTER, SCATTER.replace("[h,", "[delta,"), "is indexed by what is no integer"),
        (
            "types",
            SCATTER,
            SCATTER.replace("%ds", "%delta"),
            "%bucket of [BLOCK_Q, BLOCK_KV] does not broadcast to [BLOCK_Q]",
        ),
        ("indexing", ">= 0 and ", ">= 1 and ", "may write %dTABLE before its start"),
        ("indexing", "< 40)", "< 41)", "may write %dTABLE past its end"),
        ("signature", SCATTER, "", "nothing is stored to %dTABLE"),
    ],
)
def test_what_is_scattered_stays_inside(rule, old, new, reason):
    text = scattering()
    assert print_module(verify(parse_module(text))) == text
    (line,) = (line for line in text.splitlines() if "scatter" in line)
    error = refused(text.replace(line, edit(line, (old, new)) if new else ""))
    assert (error.rule, reason in error.reason) == (rule, True), error


@cache
def summed_by_entry() -> str:
    """The target IR of a module that sums the gradient of each of a table's few entries."""
    params = {"table": {"tensor": ["H", 3], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    return print_module(lower(make_spec({"name": "few", "head_dim": 16, "score": score})))


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, 3]",
            "indexes 3 of %dTABLE by `3`; expected a number from 0 to 2",
        ),
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, h]",
            "indexes 3 of %dTABLE by `h`; expected a number from 0 to 2",
        ),
        (
            "base %dTABLE[b, h, 2]",
            "base %dTABLE[b, h, 1]",
            "%dTABLE is stored at 0, 1, 1 of 3 entries; expected each of them once",
        ),
        (
            "    store %dTABLE_head_2[q] %dtable_at_2_out check(q)\n",
            "",
            "%dTABLE is stored at 0, 1 of 3 entries; expected each of them once",
        ),
    ],
)
def test_each_entry_is_stored_once(old, new, reason):
    text = summed_by_entry()
    assert print_module(verify(parse_module(text))) == text and "learn table[h, entry] from dTABLE" in text
    error = refused(edit(text, (old, new)))
    assert (error.rule, reason in error.reason) == ("indexing", True), error


def test_a_dimension_of_two_is_of_entries_in_parts_of_gradients_alone():
    params = {"table": {"tensor": ["H", 2], "grad": True}, "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"}}
    score = {"expr": "s + table[h, bucket[q_idx, kv_idx]]", "params": params}
    text = print_module(lower(make_spec({"name": "two", "head_dim": 16, "score": score})))
    assert print_module(verify(parse_module(text))) == text and "base %dTABLE[b, h, 1]" in text
    error = refused(edit(print_module(target("document_gqa")), ("base %LEFT[b, side]", "base %LEFT[b, 0]")))
    assert error.rule == "indexing" and "indexes 2 of %LEFT by `0`; expected `side`" in error.reason


@cache
def limited() -> str:
    """The target IR of a mask by a number of each query, in no order."""
    mask = {"expr": "kv_idx < limit[q_idx]", "params": {"limit": {"tensor": ["Nq"], "dtype": "int32"}}}
    return print_module(lower(make_spec({"name": "limited", "head_dim": 16, "mask": mask})))


@pytest.mark.parametrize(
    "old, new", [("reduce max", "reduce min"), ("select(q_idx < Nq, limit, -", "select(q_idx < Nk, limit, -")]
)
def test_extremes_of_rows_in_no_order_are_reduced(old, new):
    error = refused(edit(limited(), (old, new)))
    assert (error.rule, error.reason) == (
        "extremes",
        "kernel @blocks: %limit_greatest is not proven to be the max of %limit over the rows of the program's own tile",
    )


def test_keys_past_the_end_are_hidden_where_programs_sum_over_their_own():
    made = unverified(edit(WALKS, ("where(kv_idx < Nk)", "where(kv_idx < Nk + 5)")))
    (said,) = RULES["target"]["ends-hidden"](made, made.kernels[0])
    assert said.startswith("no mask in @step hides the keys from Nk on")


def test_what_holds_for_a_kernel_is_tried_once(monkeypatch):
    """And again where something is another that rules read besides it: its module, its schedule."""
    tried = []
    live = RULES["target"]["live"]
    monkeypatch.setitem(
        RULES["target"], "live", lambda module, kernel: tried.append(kernel.name) or live(module, kernel)
    )
    made = verify(parse_module(print_module(target("causal_gqa"))))
    first = len(tried)
    assert first == len(made.kernels)
    verify(made)
    assert len(tried) == first
    for other, rule in (
        (replace(made, meaning=target("window_gqa").meaning), "mask"),
        (replace(made, sharing="mha"), "indexing"),
        (replace(made, schedules=()), "scheduled-everywhere"),
    ):
        with pytest.raises(VerifyError) as error:
            verify(other)
        assert error.value.rule == rule, error.value
    verify(replace(made, version="another"))
    assert len(tried) > first


def test_every_rule_of_every_phase_is_broken_above():
    assert set(BROKEN) == {name for rules in RULES.values() for name in rules}
    assert tuple(RULES) == PHASES


@pytest.mark.parametrize("phase, stage", [("logical", "build"), ("scheduled", "dce")])
def test_rules_of_a_phase_hold_from_there_on(phase, stage):
    """Each phase keeps the rules of the one before, and they apply to IR of that phase."""
    following = PHASES[PHASES.index(phase) + 1]
    assert RULES[phase].items() <= RULES[following].items()
    text = print_module(lowered("causal_mha")[stage])
    assert f"phase {phase}" in text
    assert (
        refused(
            edit(
                text,
                ("kv_idx <= ", "window <= ")
                if phase == "scheduled"
                else ("q_idx >= kv_idx and", "q_idx >= window and"),
            )
        ).rule
        == "names"
    )


@pytest.mark.parametrize("stage", ["split-loops", "assign-memory-space"])
def test_a_partial_loop_that_claims_to_be_full_is_refused_at_once(stage):
    text = print_module(lowered("causal_mha")[stage])
    assert refused(edit(text, ("cls(partial)", "cls(full)"))).rule == "full-is-proven"


def test_a_full_loop_may_always_be_taken_as_partial():
    text = print_module(portable("causal_gqa"))
    verify(parse_module(edit(text, ("cls(full)", "cls(partial)"))))


@pytest.mark.parametrize(
    "rule, edits, reason",
    [
        (
            "phase",
            ("phase target", "phase final"),
            "`final` is not a phase; expected one of logical, scheduled, target",
        ),
        ("defined", ("acc(%rescaled)", "acc(%scaled)"), "%acc_next in @fwd reads %scaled, which nothing defines"),
        ("defined-once", ("%l_init = init 0", "%m_init = init 0"), "%m_init is defined twice in @fwd"),
    ],
)
def test_what_comes_before_the_rules(rule, edits, reason):
    error = refused(edit(print_module(target("causal_gqa")), edits))
    assert (error.rule, error.reason) == (rule, reason)
