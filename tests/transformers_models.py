"""Small transformers models with random weights, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from attngen.integrations.transformers import register
from tests.conftest import CUDA


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty module cache, so that modules are built from this source, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        register()
        yield


Tensor = torch.Tensor
DEVICE = "cuda" if CUDA else "cpu"
WORDS = 67
N = 21  # tokens of a sequence
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def lm(config: type, **more: Any) -> Callable[..., Any]:
    """Return a constructor of a language model, whose sizes may be overridden."""
    return lambda **sizes: tf.AutoModelForCausalLM.from_config(config(**{**SIZES, **HEADS, **TOKENS, **more, **sizes}))


DECODERS: dict[str, Callable[..., Any]] = {
    "llama": lm(tf.LlamaConfig),
    "mistral": lm(tf.MistralConfig, sliding_window=8),
    "qwen3": lm(tf.Qwen3Config),
    "gemma2": lm(tf.Gemma2Config, **KINDS, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gemma3": lm(tf.Gemma3TextConfig, **KINDS, query_pre_attn_scalar=16),
    "gpt_oss": lm(tf.GptOssConfig, **KINDS, num_local_experts=2, num_experts_per_tok=2),
    "llama4": lm(
        tf.Llama4TextConfig,
        attention_chunk_size=8,
        intermediate_size_mlp=32,
        num_local_experts=2,
        num_experts_per_tok=2,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
}
ENCODERS: dict[str, Callable[..., Any]] = {
    "bert": lambda **sizes: tf.BertModel(tf.BertConfig(**{**SIZES, **HEADS, **NO_DROPOUT, **sizes})),
    "modernbert": lambda **sizes: tf.ModernBertModel(
        tf.ModernBertConfig(**{**SIZES, **HEADS, **TOKENS, **BERT, **sizes})
    ),
    "vit": lambda **sizes: tf.ViTModel(
        tf.ViTConfig(**{**SIZES, **HEADS, **NO_DROPOUT, "image_size": 32, "patch_size": 8, **sizes})
    ),
}


def t5(**sizes: Any) -> Any:
    width, heads = sizes.get("head_dim", 16), sizes.get("num_attention_heads", 2)
    data = {
        "vocab_size": WORDS,
        "d_model": 32,
        "d_kv": width,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": heads,
        "dropout_rate": 0.0,
    }
    return tf.T5ForConditionalGeneration(tf.T5Config(**data, decoder_start_token_id=0))


MODELS = {**DECODERS, **ENCODERS, "t5": t5}


def made(name: str, **sizes: Any) -> Any:
    """Return a model with random weights, none of which is zero or one."""
    torch.manual_seed(0)
    model = MODELS[name](**sizes).to(DEVICE).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)
    return model


def lengths(n: int) -> Tensor:
    """Return the padding mask of two sequences, one padded on the left and one on the right."""
    mask = torch.ones(2, n, dtype=torch.long, device=DEVICE)
    mask[0, : n // 4] = 0
    mask[1, -(n // 5) :] = 0
    return mask


def calls(name: str, n: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield calls of a model, each with the positions whose outputs count."""
    g = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 32, 32, generator=g).to(DEVICE)
        yield {"pixel_values": pixels}, torch.ones(2, 17, dtype=torch.bool, device=DEVICE)
        return
    ids = torch.randint(3, WORDS, (2, n), generator=g).to(DEVICE)
    whole, padding = torch.ones_like(ids, dtype=torch.bool), lengths(n).to(DEVICE)
    more = {"decoder_input_ids": ids[:, : n // 2]} if name == "t5" else {} if name in ENCODERS else {"use_cache": False}
    of_decoder = whole[:, : n // 2] if name == "t5" else None
    yield {"input_ids": ids, **more}, whole if of_decoder is None else of_decoder
    yield {"input_ids": ids, "attention_mask": padding, **more}, padding.bool() if of_decoder is None else of_decoder
    if name in DECODERS:
        cuts = torch.cat([torch.arange(n // 3), torch.arange(n - n // 3)])[None].expand(2, -1).to(DEVICE)
        yield {"input_ids": ids, "position_ids": cuts, **more}, whole


def run(model: Any, how: str, call: dict[str, Any], counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs that count, and all gradients in one vector."""
    model.set_attn_implementation(how)
    model.zero_grad()
    out = model(**call)
    out = (out.logits if "logits" in out else out.last_hidden_state)[counted]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out.float() * weights.float()).mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
