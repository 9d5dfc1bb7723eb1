"""The commented spec that `attngen new` writes."""

from __future__ import annotations

from attngen.masks import registry
from attngen.scores import score_registry


def starter(name: str) -> str:
    """A commented spec to start from."""
    masks, modifiers = ", ".join(registry()), ", ".join(score_registry())
    return f"""\
# {name}: an attention variant. `attngen build specs/{name}.yaml` compiles it, `attngen schema` describes every key.
name: {name}

# How query heads share K/V heads: mha (one each), mqa (one for all), gqa (one per group). Counts come from the tensors.
heads: {{sharing: mha}}

# Width of a head, a multiple of 8 from 16 to 512; or {{qk: 192, v: 128}}.
head_dim: 64

# Element types the module accepts: bf16, fp16, fp32.
dtype: [bf16, fp16]

# Which keys a query sees. Masks: {masks}. `attngen list` says what each does.
# With parameters: {{sliding_window: {{left: 1023, right: 0}}}}. Several at once: {{all_of: [causal, key_padding]}},
# any_of, not. Or an expression: {{expr: "kv_idx <= q_pos + extra", params: {{extra: {{scalar: int}}}}}}.
mask: causal

# What is done to scores, in order, before the mask: {modifiers}, or an expression.
# score: [{{softcap: 30.0}}, {{expr: "s - 0.1 * abs(q_pos - kv_idx)"}}]

# Dropout on the attention weights: calls take dropout_p and seed. Without it, leave this out.
# dropout: true

# Tiles are chosen per device. To fix them: schedule: {{block_q: 128, block_kv: 64, stages: 3, warps: 8}}
"""
