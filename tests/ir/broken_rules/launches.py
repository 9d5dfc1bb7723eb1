"""Edits of target IR that break rules about schedules, launches and the order of programs.

Each rule has cases of (spec, old text, new text, piece of the reason). An edit is made in the kernels if the old text
occurs there, and otherwise in the header.
"""

from __future__ import annotations

EDITS = {
    "scheduled-everywhere": [
        (
            "causal_gqa",
            "schedule @delta\n  sm80 bytes=2 rows<=inf",
            "schedule @delta\n  sm80 bytes=2 rows<=99",
            "the row limits of sm80 at 2 bytes do not rise to rows<=inf",
        ),
        ("causal_gqa", "schedule @dq", "schedule @dq2", "no device class has a config at 2 bytes"),
        (
            "causal_gqa",
            "schedule @delta\n",
            "schedule @delta\n  sm80 bytes=2 none : nothing fits\n",
            "there is a line `none` for sm80 at 2 bytes, and another line",
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
            "an iteration combines 64 splits, 256 values per thread, and a thread has 255",
        ),
        (
            "decode_gqa",
            "BLOCK_Q=1 BLOCK_KV=16 ",
            "BLOCK_Q=2 BLOCK_KV=16 ",
            "BLOCK_Q=2 and num_stages=1; expected 1, because a program combines",
        ),
        (
            "decode_gqa",
            "BLOCK_KV=16 num_warps=1 ",
            "BLOCK_KV=16 num_warps=2 ",
            "num_warps=2; expected at most 1, with which each warp holds all splits",
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
            (
                "on sm90 the kernel @fwd is wrong with BLOCK_KV=16: where dropout meets booleans of a mask, Triton "
                "counts scores twice"
            ),
        ),
        (
            "causal_gqa",
            "schedule @fwd\n  sm80",
            "schedule @fwd\n  sm70",
            "`sm70` is not a device class; expected one of sm80, sm90",
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
            "gfx942: TMA=1, but gfx942 has no TMA",
        ),
    ],
    "barriers": [
        (
            "causal_fa1",
            "    barrier\n    %queries_full",
            "    %queries_full",
            "%queries_full loads tiles that other threads",
        ),
        (
            "causal_fa1",
            "    barrier\n    %total_partial",
            "    %total_partial",
            "%total_partial loads tiles that other threads have stored",
        ),
    ],
    "dependent-launch": [
        (
            "decode_gqa",
            "    grid_dependency_wait\n",
            "    grid_dependency_wait\n    grid_dependency_wait\n",
            "it waits for the previous launch 2 times",
        ),
        (
            "causal_gqa",
            "kernel @fwd program_axis(q)",
            "kernel @fwd program_axis(q) launch_dependents",
            "it launches dependents, and no kernel waits",
        ),
    ],
    "semaphore-order": [
        (
            "full_mha",
            "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)",
            "order(kv_start // BLOCK_KV)",
            " has the order `kv_start // BLOCK_KV`; expected `cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1`",
        ),
        (
            "full_mha",
            "reversed swizzle_rows(32768)",
            "swizzle_rows(32768)",
            "expected a grid that starts with kv, reversed",
        ),
    ],
    "ordered-accumulate": [
        (
            "causal_gqa",
            "order(split % 2)",
            "order(split)",
            "has the order `split`; expected `split % 2`, the program's number in its pair",
        ),
        (
            "causal_gqa",
            "order(split % 2) ends(yes)",
            "order(split % 2)",
            "a program accumulates to one tile of each tensor",
        ),
        (
            "causal_gqa",
            "order(split % 2)\n",
            "order(split % 2) ends(yes)\n",
            "and the last ordered_accumulate has `ends`",
        ),
        (
            "causal_gqa",
            "semaphore(%dKdV_SEMAPHORE[b, hkv, split // 2, kv_start])",
            "semaphore(%dKdV_SEMAPHORE[b, hkv, 0, kv_start])",
            "has another semaphore than that of its pair, at [b, hkv, split // 2, kv_start] in one tensor",
        ),
    ],
}
