"""Small transformers models with random weights, and calls of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from attngen.integrations.transformers import register
from docs.site.models import families
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
IMAGE = 66  # the token in place of which an image stands
N = 21  # tokens of a sequence
FAMILIES = {family.name: family for family in families()}
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
# Families with more calls than others: packed sequences, static caches, bf16 on a GPU.
DECODERS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "llama4")
ENCODERS = ("bert", "modernbert", "vit")
MODELS = (*DECODERS, *ENCODERS, "t5")


def made(name: str, how: str | None = None, **sizes: Any) -> Any:
    """Return a model with random weights, none of which is zero or one. how: its attention implementation."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(family.type, **{**family.sizes, **sizes})
    chosen = {} if how is None else {"attn_implementation": how}
    model = getattr(tf, family.model).from_config(config, **chosen).to(DEVICE).eval()
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


def calls(name: str, n: int) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """Yield calls of a model, each with the positions whose outputs count; None means all."""
    family, g = FAMILIES[name], torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS if family.images is None else 62, (2, n), generator=g).to(DEVICE)
    call = {key: given(x, g).to(DEVICE) for key, x in family.inputs.items()}
    decoder = {"decoder_input_ids": ids[:, : n // 2]} if "Seq2Seq" in family.model else {}
    if family.images is not None:
        yield with_images(family.images, ids, call), None
        return
    if call:
        yield {**call, **decoder}, None
        return
    more = {"use_cache": False} if family.model == "AutoModelForCausalLM" else decoder
    padding = lengths(n)
    if name in MODELS:
        yield {"input_ids": ids, **more}, None
    yield {"input_ids": ids, "attention_mask": padding, **more}, None if decoder else padding.bool()
    if name in DECODERS:
        cuts = torch.cat([torch.arange(n // 3), torch.arange(n - n // 3)])[None].expand(2, -1).to(DEVICE)
        yield {"input_ids": ids, "position_ids": cuts, **more}, None


def given(data: list[Any], g: torch.Generator) -> Tensor:
    """Return an input of a model: of this shape, or with these values if it is a nested list."""
    return torch.tensor(data) if isinstance(data[0], list) else torch.randn(data, generator=g)


def with_images(count: int, ids: Tensor, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a call of text, in which `count` tokens are those of an image."""
    if count:
        ids[:, 1], ids[:, 2 : 2 + count], ids[:, 2 + count] = 62, IMAGE, 63
    call |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "image_grid_thw" in call:
        call["mm_token_type_ids"] = (ids == IMAGE).int()
    if "aspect_ratio_ids" in call:
        call["cross_attention_mask"] = torch.ones_like(ids)[:, :, None, None]
    return call


def run(model: Any, how: str, call: dict[str, Any], counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs that count, and all gradients in one vector."""
    model.set_attn_implementation(how)
    model.zero_grad()
    torch.manual_seed(3)
    found = model(**call)
    out = next(found[key] for key in ("logits", "last_hidden_state", "logits_per_image") if key in found)
    out = out if counted is None else out[counted]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out.float() * weights.float()).mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
