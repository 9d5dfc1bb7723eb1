"""Mistakes in specs and the sentence that each gets."""

from __future__ import annotations

BASE = "name: x\nhead_dim: 64\n"  # two valid lines, so that the text of a case starts on line 3
WIDTH = "expected a whole number from 16 to 512 that is a multiple of 8"
HEAD_DIM = f"{WIDTH}, or {{qk: ..., v: ...}}"
WIDTH_V = WIDTH.replace("from 16 to 512", "of 16 or more")  # a latent may be wider
MASKS = "expected a list of at least one mask, as in [causal, key_padding]"
ONCE = "expected each mask once: a repeat hides nothing more"
DTYPE = "expected `bf16`, `fp16` or `fp32`"
MASK = (
    "expected a mask: its name as in `causal`, {name: {parameter: value}}, {expr: text}, {all_of: [masks]}, "
    "{any_of: [masks]} or {not: mask}"
)
NAME = "expected an identifier of lower-case letters, digits and _, 64 at most, as in causal_mqa"
CAP = "expected a number from 0.001 to 1000000"
CHUNK = "expected a whole number from 64 to 4096 that is a multiple of 64"
CACHES = "expected `contiguous`, {paged: {page_size: 64}}, {dtype: fp8_e4m3}, or both of these keys"
KEYS = (
    "known: backward, cache, dropout, dtype, fp32_precision, head_dim, heads, kv, mask, name, outputs, positions, "
    "schedule, score"
)
# (text of a spec, its sentence)
CASES: list[tuple[str, str]] = [
    # positions
    (BASE + "positions: 384", "line 3: `positions` is the number 384; expected {chunk: ...}"),
    (BASE + "positions: {chunk: 100}", f"line 3: `positions.chunk` is the number 100; {CHUNK}"),
    (BASE + "positions: {chunk: 32}", f"line 3: `positions.chunk` is the number 32; {CHUNK}"),
    (BASE + "positions: {chunk: 8192}", f"line 3: `positions.chunk` is the number 8192; {CHUNK}"),
    (BASE + "positions: {chunks: 64}", "line 3: `positions.chunks` is no known key; did you mean `chunk`?"),
    (
        BASE + "cache: contiguous\npositions: {}",
        "line 3: `cache` does not go with `positions`: calls with a cache have all keys; expected no `cache`",
    ),
    (
        BASE + "schedule: {order: kv_outer}\npositions: {}",
        "line 3: `schedule.order` does not go with `positions`: its order visits all rows; expected `q_outer`",
    ),
    (
        BASE + "outputs: [lse, key_mass]\npositions: {}",
        "line 3: `outputs` does not go with `positions`: `key_mass` is a sum over all queries; expected it left out",
    ),
    (
        BASE + "mask: {block_sparse: {block: 128}}\npositions: {chunk: 192}",
        "line 4: `positions.chunk` is 192; expected a multiple of 128, the blocks of the mask",
    ),
    *(
        (
            BASE + f"{key}: {{expr: '{e}', params: {{{name}: {kind}}}}}\npositions: {{}}",
            f"line 3: `{key}` declares `{name}`, which is a name of modules with `positions`; expected another one",
        )
        for key, name, e, kind in (
            ("mask", "q_chunks", "kv_idx < q_chunks", "{scalar: int}"),
            ("mask", "kv_start_rank", "kv_idx < kv_start_rank", "{scalar: int}"),
            ("score", "kv_starts", "s + kv_starts[h]", "{tensor: [H]}"),
        )
    ),
    # values
    ("name: x\nhead_dim: 63", f"line 2: `head_dim` is the number 63; {HEAD_DIM}"),
    ("name: x\nhead_dim: 520", "line 2: `head_dim` is 520; expected at most 512, or `kv: {latent: ...}` as well"),
    ("name: x\nhead_dim: 64.0", f"line 2: `head_dim` is the number 64.0; {HEAD_DIM}"),
    ("name: x\nhead_dim: true", f"line 2: `head_dim` is the boolean `true`; {HEAD_DIM}"),
    ('name: x\nhead_dim: "64"', f"line 2: `head_dim` is the text `64`; {HEAD_DIM}"),
    ("name: x\nhead_dim: abc", f"line 2: `head_dim` is the text `abc`; {HEAD_DIM}"),
    ("name: x\nhead_dim: [64]", f"line 2: `head_dim` is a list; {HEAD_DIM}"),
    ("name: x\nhead_dim:", f"line 2: `head_dim` is empty; {HEAD_DIM}"),
    ("name: x\nhead_dim: {qk: 64}", f"line 2: `head_dim.v` is missing; {WIDTH_V}"),
    ("name: x\nhead_dim:\n  qk: 64\n  v: 8", f"line 4: `head_dim.v` is the number 8; {WIDTH_V}"),
    ("head_dim: 64", f"`name` is missing; {NAME}"),
    ("name: x", f"`head_dim` is missing; {HEAD_DIM}"),
    ("name: yes\nhead_dim: 64", f"line 1: `name` is the boolean `true`; {NAME}"),
    ("name: 123\nhead_dim: 64", f"line 1: `name` is the number 123; {NAME}"),
    ("name: ../x\nhead_dim: 64", f"line 1: `name` is the text `../x`; {NAME}"),
    (
        "name: class\nhead_dim: 64",
        "line 1: `name` is `class`, a keyword of Python, so nothing could import it; expected another name",
    ),
    ('name: "a\\n\\e[31m"\nhead_dim: 64', f"line 1: `name` is the text `a\\n\\x1b[31m`; {NAME}"),
    (BASE + "heads: mqa", "line 3: `heads` is the text `mqa`; expected {sharing: mha|mqa|gqa}"),
    (BASE + "heads:", "line 3: `heads` is empty; expected {sharing: mha|mqa|gqa}"),
    (
        BASE + "heads: {sharing: mqq}",
        "line 3: `heads.sharing` is the text `mqq`; expected `mha`, `mqa` or `gqa`; did you mean `mqa`?",
    ),
    (BASE + "dtype: [bf17]", f"line 3: `dtype[0]` is the text `bf17`; {DTYPE}; did you mean `bf16`?"),
    (BASE + "dtype:\n- fp16\n- true", f"line 5: `dtype[1]` is the boolean `true`; {DTYPE}"),
    (
        BASE + "dtype: bf17",
        f"line 3: `dtype` is the text `bf17`; {DTYPE}, or a list of these; did you mean `bf16`?",
    ),
    (BASE + "dtype: 16", f"line 3: `dtype` is the number 16; {DTYPE}, or a list of these"),
    (BASE + "dtype: []", "line 3: `dtype` is an empty list; expected at least one of `bf16`, `fp16`, `fp32`"),
    (BASE + "dtype: [bf16, bf16]", "line 3: `dtype` names an element type twice; expected each once"),
    (
        BASE + "fp32_precision: tf33",
        "line 3: `fp32_precision` is the text `tf33`; expected `ieee` or `tf32`; did you mean `tf32`?",
    ),
    (
        BASE + "fp32_precision: tf32",
        "line 3: `fp32_precision` is `tf32`, but `dtype` has no `fp32`; add it there, or leave this key out",
    ),
    (
        BASE + "schedule: 3",
        (
            "line 3: `schedule` is the number 3; "
            "expected {order: q_outer|kv_outer, block_q: ..., block_kv: ..., stages: ..., warps: ..., split: ..., "
            "backend: auto|triton|hopper}"
        ),
    ),
    (
        BASE + "schedule: {block_q: 48}",
        "line 3: `schedule.block_q` is the number 48; expected `16`, `32`, `64`, `128` or `256`",
    ),
    (
        BASE + "schedule: {warps: true}",
        "line 3: `schedule.warps` is the boolean `true`; expected `1`, `2`, `4`, `8` or `16`",
    ),
    (
        BASE + "schedule: {warps: 4.0}",
        "line 3: `schedule.warps` is the number 4.0; expected `1`, `2`, `4`, `8` or `16`",
    ),
    (
        BASE + "backward: true",
        (
            "line 3: `backward` is the boolean `true`; expected `false`, for a module without gradients, "
            "or {deterministic: ...}"
        ),
    ),
    (
        BASE + "backward:",
        "line 3: `backward` is empty; expected `false`, for a module without gradients, or {deterministic: ...}",
    ),
    (BASE + "backward: none", "line 3: `backward` is the text `none`; expected `false`, or {deterministic: ...}"),
    (
        BASE + "backward: {deterministic: 0}",
        "line 3: `backward.deterministic` is the number 0; expected `true` or `false`",
    ),
    (
        BASE + "backward: {determinstic: true}",
        "line 3: `backward.determinstic` is no known key; did you mean `deterministic`?",
    ),
    (BASE + "cache: 3", f"line 3: `cache` is `3`; {CACHES}"),
    (BASE + "cache:", f"line 3: `cache` is empty; {CACHES}"),
    (BASE + "cache: {dtype: fp8}", "line 3: `cache.dtype` is the text `fp8`; expected `fp8_e4m3`"),
    (
        BASE + "cache: {dtype: fp8_e4m3, scale: token}",
        "line 3: `cache.scale` is the text `token`; expected `head` or `page`",
    ),
    (
        BASE + "cache: {scale: head}",
        "line 3: `cache.scale` is for an 8-bit cache; expected `dtype: fp8_e4m3` as well",
    ),
    (
        BASE + "cache: {dtype: fp8_e4m3, scale: page}",
        "line 3: `cache.scale` is `page`, but there are no pages; expected `head`, or `paged`",
    ),
    (
        BASE + "dtype: fp32\ncache: {dtype: fp8_e4m3}",
        "line 3: `dtype` names `fp32`, but the cache has 8 bits; expected `bf16`, `fp16` or both",
    ),
    (
        "name: x\nhead_dim: 72\ncache: {dtype: fp8_e4m3}",
        "line 2: `head_dim` is 72, but the cache has 8 bits; expected a multiple of 16, 32 at least",
    ),
    (
        BASE + "cache: {paged: {page_size: 0}}",
        "line 3: `cache.paged.page_size` is the number 0; expected `any`, or a whole number from 2 to 65536",
    ),
    (BASE + "cache: {pagd: 1}", "line 3: `cache.pagd` is no known key; did you mean `paged`?"),
    (
        BASE + "cache: paged\nschedule: {split: even}",
        "line 4: `schedule.split` is the text `even`; expected `balanced`, or {keys: ...}",
    ),
    (
        BASE + "schedule: {split: {keys: 1024}}",
        "line 3: `schedule.split` splits the keys of a cache, but there is none; expected `cache` as well",
    ),
    # keys
    (BASE + "hed_dim: 64", "line 3: `hed_dim` is no known key; did you mean `head_dim`?"),
    (BASE + "zzz: 64", f"line 3: `zzz` is no known key; {KEYS}"),
    (BASE + "yes: 64", f"line 3: `yes` is no known key; {KEYS}"),
    (BASE + "<<: {name: y}", f"line 3: `<<` is no known key; {KEYS}"),
    (BASE + "heads: {shring: mqa}", "line 3: `heads.shring` is no known key; did you mean `sharing`?"),
    (
        BASE + "schedule: {order: k_outer}",
        ("line 3: `schedule.order` is the text `k_outer`; expected `q_outer` or `kv_outer`; did you mean `kv_outer`?"),
    ),
    (BASE + "schedule:\n  stage: 2", "line 4: `schedule.stage` is no known key; did you mean `stages`?"),
    (BASE + "schedule: {num_stages: 2}", "line 3: `schedule.num_stages` is no known key; did you mean `stages`?"),
    (BASE + "schedule: {num_warps: 4}", "line 3: `schedule.num_warps` is no known key; did you mean `warps`?"),
    # masks
    (BASE + "mask:", f"line 3: `mask` is empty; {MASK}; for no mask write `none`"),
    (BASE + "mask: no", f"line 3: `mask` is the boolean `false`; {MASK}; for no mask write `none`"),
    (BASE + "mask: []", f"line 3: `mask` is an empty list; {MASK}"),
    (BASE + "mask: {}", f"line 3: `mask` is an empty mapping; {MASK}"),
    (BASE + "mask: 3", f"line 3: `mask` is the number 3; {MASK}"),
    (BASE + "mask: Causal", "line 3: `mask` is `Causal`, which is not a mask; did you mean `causal`?"),
    (BASE + "mask: windw", "line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?"),
    (
        BASE + "mask: [causal, none]",
        "line 3: `mask` is a list of 2; expected one mask; for several at once write {all_of: [masks]}",
    ),
    (
        BASE + "mask: {causal: , none: }",
        "line 3: `mask` is a mapping of 2; expected one mask; for several at once write {all_of: [masks]}",
    ),
    (
        BASE + "mask: {causal: 3}",
        "line 3: `mask.causal` is the number 3; expected its parameters, {align: bottom_right|top_left}",
    ),
    (BASE + "mask: {none: {left: 1}}", "line 3: `mask.none.left` is no known key; there are none"),
    (
        BASE + "mask: sliding_window",
        "line 3: `mask.sliding_window` needs `left`, `right` or both; for no bound at all use the mask `none`",
    ),
    (
        BASE + "mask:\n  sliding_window:\n    lft: 1",
        "line 5: `mask.sliding_window.lft` is no known key; did you mean `left`?",
    ),
    (
        BASE + "mask: {sliding_window: {left: -1}}",
        "line 3: `mask.sliding_window.left` is the number -1; expected a whole number from 0 to 1073741823",
    ),
    (
        BASE + "mask: {sliding_window: {left: 1073741824}}",
        ("line 3: `mask.sliding_window.left` is the number 1073741824; expected a whole number from 0 to 1073741823"),
    ),
    (
        BASE + "mask: {sliding_window: {right: on}}",
        "line 3: `mask.sliding_window.right` is the boolean `true`; expected a whole number from 0 to 1073741823",
    ),
    (
        BASE + "mask: {key_padding: {lengths: 1}}",
        "line 3: `mask.key_padding.lengths` is the number 1; expected `true` or `false`",
    ),
    (BASE + "mask: {all_of: causal}", f"line 3: `mask.all_of` is the text `causal`; {MASKS}"),
    (BASE + "mask: {all_of: []}", f"line 3: `mask.all_of` is an empty list; {MASKS}"),
    (
        BASE + "mask:\n  all_of:\n  - none\n  - causl",
        "line 6: `mask.all_of[1]` is `causl`, which is not a mask; did you mean `causal`?",
    ),
    (BASE + "mask: {all_of: [causal, causal]}", f"line 3: `mask.all_of[1]` is `causal` again; {ONCE}"),
    (BASE + "mask: {all_of: [none, none]}", f"line 3: `mask.all_of[1]` is `none` again; {ONCE}"),
    (
        BASE + "mask: {all_of: [causal, {causal: {align: bottom_right}}]}",
        f"line 3: `mask.all_of[1]` is `causal` again; {ONCE}",
    ),
    # scores
    (BASE + "score: {softcap: 0}", f"line 3: `score.softcap.cap` is the number 0; {CAP}"),
    (BASE + "score: {softcap: .nan}", f"line 3: `score.softcap.cap` is the number nan; {CAP}"),
    (BASE + "score:\n- softcap: {cap: -3.0}", f"line 4: `score[0].softcap.cap` is the number -3.0; {CAP}"),
    (BASE + "score: softcap", f"line 3: `score.softcap.cap` is missing; {CAP}"),
    (
        BASE + "score: {softcap: thirty}",
        f"line 3: `score.softcap` is the text `thirty`; {CAP}, or its parameters, {{cap: ...}}",
    ),
    # YAML
    (
        "",
        ("the file is empty; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start"),
    ),
    (
        "# nothing",
        ("the file is empty; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start"),
    ),
    (
        "- name: x",
        (
            "the file holds a list; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` "
            "writes a start"
        ),
    ),
    (
        "name",
        (
            "the file holds the text `name`; expected keys and values, as in `name: causal_mqa`: `attngen new "
            "NAME` writes a start"
        ),
    ),
    (BASE + "name: y", "line 3: key `name` is given twice, first on line 1; expected each key once"),
    (BASE + "---\nname: y", "line 3: a second document starts here; expected one spec per file"),
    (
        BASE + "mask: &m causal",
        "line 3: anchors and aliases (& and *) are not part of a spec; expected the value itself",
    ),
    (BASE + "mask: *m", "line 3: anchors and aliases (& and *) are not part of a spec; expected the value itself"),
    (BASE + "mask: !!python/name:os.system", "line 3: tags (!) are not part of a spec; expected a plain value"),
    (BASE + "? [a]\n: 3", "line 3: a list or a mapping is used as a key; expected a word, as in `mask: causal`"),
    (BASE + "heads:\n\tsharing: mqa", "line 4: not valid YAML: a tab; expected spaces for indentation"),
    (BASE + "mask: \x00", "line 3: not valid YAML: the character 0x0 is not text"),
    (BASE + "mask: " + "[" * 21, "line 3: nested more than 20 deep; expected a spec, which is flat"),
    ("[" * 5000, "line 1: nested more than 20 deep; expected a spec, which is flat"),
]
MISTAKES = dict(CASES)
