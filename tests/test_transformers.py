"""attngen as an attention implementation of transformers: models with random weights compared with eager attention, and
calls that fall back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import masking_utils as masks

from attngen.conformance.oracle import relative_error
from attngen.errors import AttngenError
from attngen.integrations.transformers import attend as attends
from attngen.integrations.transformers import fallback, register
from attngen.integrations.transformers.mask import mask_of
from tests import transformers_models
from tests.conftest import CUDA
from tests.helpers import ROOT
from tests.transformers_models import (
    DEVICE,
    ENCODERS,
    HEADS,
    MODELS,
    SIZES,
    WORDS,
    N,
    Tensor,
    calls,
    lengths,
    made,
    run,
)

cache = transformers_models.cache  # a fixture


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_errors_in_bf16_are_at_most_twice_those_of_eager(name: str) -> None:
    """With 1,000 tokens and head_dim 64, outputs and gradients have at most twice the error of eager attention in
    bf16."""
    if not CUDA:
        pytest.skip("needs a CUDA device")
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 8 if name in ENCODERS else 2,
    }
    sizes |= {"hidden_size": 512} if name in ENCODERS else {}
    model = made(name, **sizes)
    for call, counted in calls(name, 1000):
        truth = run(model.float(), "eager", call, counted)
        model.bfloat16()
        call = {
            k: x.bfloat16() if x is not None and isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in call.items()
        }
        naive, ours = (run(model, how, call, counted) for how in ("eager", "attngen"))
        for x, y, right in zip(ours, naive, truth):
            assert relative_error(x, right) <= 2 * relative_error(y, right)


@pytest.mark.share(8)
def test_training_curves_agree_with_eager() -> None:
    """Losses of four steps of a Gemma 2 agree, with padded batches and gradient checkpointing."""
    losses: dict[str, list[float]] = {}
    for how in ("eager", "attngen"):
        model = made("gemma2").train()
        model.set_attn_implementation(how)
        model.gradient_checkpointing_enable()
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        # A padded position sees no key, so it predicts no token.
        labels = ids.masked_fill(lengths(N).roll(1, 1) * lengths(N) == 0, -100)
        losses[how] = []
        for _ in range(4):
            loss = model(ids, attention_mask=lengths(N), labels=labels, use_cache=False).loss
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses[how].append(loss.item())
    assert losses["attngen"] == pytest.approx(losses["eager"], rel=1e-4) and losses["eager"][-1] < losses["eager"][0]


@pytest.mark.share(4)
def test_kernels_apply_the_dropout_of_the_configuration() -> None:
    """In training, each forward drops other weights, with the probability of the configuration."""
    model = made("llama").train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation("attngen")
    ids = torch.full((1, N), 5, device=DEVICE)
    torch.manual_seed(0)
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    torch.manual_seed(0)
    again = model(ids, use_cache=False).logits
    model.eval()
    assert (
        torch.equal(first, again)
        and not torch.equal(first, second)
        and not torch.equal(first, model(ids, use_cache=False).logits)
    )


@pytest.mark.share(8)
def test_starts_of_packed_sequences_are_used() -> None:
    """cu_seq_lens_q gives the starts of sequences. Other implementations read it only for FlashAttention's kernels."""
    model = made("mistral")
    ids = torch.randint(3, WORDS, (1, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    starts = torch.tensor([0, 5, 13, N], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(n) for n in starts.diff()])[None].to(DEVICE)
    model.set_attn_implementation("eager")
    expected = model(ids, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("attngen")
    of_starts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    for more in ({}, {"attention_mask": torch.ones_like(ids)}):
        found = model(ids, position_ids=positions, use_cache=False, **of_starts, **more).logits
        assert relative_error(found, expected) < 1e-5
    with pytest.raises(
        AttngenError, match="cu_seq_lens_q comes with 2 sequences of 21 queries and 21 keys; expected one row"
    ):
        model(ids.repeat(2, 1), use_cache=False, **of_starts)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast_computes_in_its_type(name: str) -> None:
    """With fp32 weights and bf16 products, errors are at most twice those of eager attention under autocast."""
    model = made(name)
    call, counted = next(calls(name, N))
    truth = run(model, "eager", call, counted)
    with torch.autocast(DEVICE, torch.bfloat16):
        naive, ours = (run(model, how, call, counted) for how in ("eager", "attngen"))
    for x, y, right in zip(ours, naive, truth):
        assert relative_error(x, right) <= 2 * relative_error(y, right)


@pytest.mark.share(16)
def test_torch_compile_runs_around_layers() -> None:
    model = made("mistral")
    call, counted = next(calls("mistral", N))
    expected = run(model, "attngen", call, counted)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = run(compiled, "attngen", call, counted)
    assert relative_error(found[0], expected[0]) < 1e-5 and relative_error(found[1], expected[1]) < 1e-5


@pytest.mark.share(16)
def test_image_spans_of_a_mask_are_traced() -> None:
    """For Gemma 3's images a user's mask function is combined with the causal one."""
    model = made("gemma3")
    spans = torch.full((2, N), -1, device=DEVICE)
    spans[0, 3:9], spans[1, 10:15] = 0, 1
    ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    outputs = []
    for how in ("eager", "attngen"):
        model.set_attn_implementation(how)
        given = {
            "config": model.config,
            "inputs_embeds": torch.zeros(2, N, 32, device=DEVICE),
            "attention_mask": None,
            "past_key_values": None,
        }
        kinds = {
            "full_attention": masks.create_causal_mask,
            "sliding_attention": masks.create_sliding_window_causal_mask,
        }
        made_masks = {
            kind: make(**given, or_mask_function=masks.blockwise_overlay(spans)) for kind, make in kinds.items()
        }
        outputs.append(
            model.model(
                inputs_embeds=model.model.embed_tokens(ids), attention_mask=made_masks, use_cache=False
            ).last_hidden_state
        )
    assert relative_error(*reversed(outputs)) < 1e-5


# ------------------------------------------------------------------------------------------------ fallbacks


def with_fallback(model: Any, **call: Any) -> tuple[Any, str]:
    """Return the output of a call, and the warning that says why it falls back."""
    fallback.WARNED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model(**call)
    messages = [str(w.message) for w in caught if "attngen" in str(w.message)]
    assert len(messages) == 1
    return out, messages[0]


def test_unsupported_calls_fall_back_with_one_warning() -> None:
    model = made("llama")
    ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True, use_cache=False)
    own = torch.ones(N, N, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, N, N).clone()
    own[:, :, :, 2] = False
    own[:, :, 2, 2] = True
    floats = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    masked = model(ids, attention_mask=floats, use_cache=False).logits
    model.set_attn_implementation("attngen")
    out, why = with_fallback(model, input_ids=ids, output_attentions=True, use_cache=False)
    assert "`output_attentions` asks for weights, which kernels do not keep" in why
    assert all(torch.equal(x, y) for x, y in zip(out.attentions, expected.attentions)) and len(out.attentions) == 2
    for mask in (own, floats):
        out, why = with_fallback(model, input_ids=ids, attention_mask=mask, use_cache=False)
        assert f"the model was given a mask [2, 1, {N}, {N}] of its own" in why and torch.equal(out.logits, masked)
    out, why = with_fallback(model, input_ids=ids, use_cache=False, unheard_of=3)
    assert "gives its attention `unheard_of`, which attngen does not know" in why and torch.equal(
        out.logits, expected.logits
    )
    mask = mask_of(1, N, N, attention_mask=lengths(N)[1:] > 0, device=DEVICE)
    out, why = with_fallback(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert "the mask is of 1 sequences, and the layer has 2" in why and out.logits.shape[:2] == ids.shape
    out, why = with_fallback(model.double(), input_ids=ids, use_cache=False)
    assert "the layer computes in torch.float64" in why
    narrow = made("llama", head_dim=12)
    narrow.set_attn_implementation("attngen")
    out, why = with_fallback(narrow, input_ids=ids, use_cache=False)
    assert "the head_dim is 12, and attngen's are multiples of 8" in why


def test_each_reason_and_class_of_layers_has_one_warning() -> None:
    """Reasons contain sizes of the first call. Longer sequences and other batches give no new warning."""
    fallback.WARNED.clear()
    models = [made("llama"), made("llama"), made("gemma2")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in models:
            model.set_attn_implementation("attngen")
            for batch, n in ((2, 5), (2, 6), (3, 7), (4, 12)):
                ids = torch.ones(batch, n, dtype=torch.long, device=DEVICE)
                own = torch.ones(batch, 1, n, n, dtype=torch.bool, device=DEVICE).tril()
                model(ids, attention_mask=own, use_cache=False)
                model(ids, attention_mask=mask_of(1, n, n, attention_mask=ids[:1] > 0, device=DEVICE), use_cache=False)
    messages = [str(w.message) for w in caught if "attngen" in str(w.message)]
    assert len(messages) == 4 and sum("a mask [2, 1, 5, 5] of its own" in text for text in messages) == 2
    assert sum("the mask is of 1 sequences, and the layer has 2" in text for text in messages) == 2


def test_keys_that_a_layer_chose_are_refused() -> None:
    """DeepSeek 3.2 puts them into the mask only for eager attention. For others it passes an argument that eager
    attention does not read."""
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(
        AttngenError, match="Linear gives its attention `indices`, the keys that it chose, in place of a mask"
    ):
        attends.attend(torch.nn.Linear(1, 1), x, x, x, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32))


def small(kind: str, **sizes: Any) -> Any:
    """Return a model of one layer that was made with attngen."""
    config = tf.AutoConfig.for_model(kind, **{**SIZES, **HEADS, "num_hidden_layers": 1, **sizes})
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="attngen").to(DEVICE)


def test_layers_that_drop_or_outgrow_the_mask_are_refused() -> None:
    """Doge adds its mask to one of its own only if it has elements. DeepSeek 4 appends compressed keys, and extends a
    mask only if it is a tensor."""
    ids = torch.full((1, N), 5, device=DEVICE)
    with pytest.raises(AttngenError, match="DogeAttention drops the model's mask, which has no elements; attngen"):
        small("doge")(ids, use_cache=False)
    kind = "heavily_compressed_attention"
    with pytest.raises(AttngenError, match="DeepseekV4Attention has a mask of 21 keys and attends to 23; attngen"):
        small("deepseek_v4", layer_types=[kind], compress_rates={kind: 8})(ids, use_cache=False)


def test_a_mask_that_cannot_be_traced_falls_back() -> None:
    model = made("llama")
    ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (torch.sinh(k.float()) >= 0) & (k <= q)

    mask = mask_of(2, N, N, mask_function=odd, use_vmap=True, device=DEVICE)
    model.set_attn_implementation("attngen")
    out, why = with_fallback(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert "`aten::sinh` has no expression" in why
    assert relative_error(out.logits, model(ids, use_cache=False).logits) < 1e-5


def test_a_model_that_computes_with_its_mask_is_an_error() -> None:
    mask = mask_of(1, 4, 4)
    assert (
        mask.shape == (1, 1, 4, 4)
        and mask.dim() == mask.ndim == 4
        and mask.contiguous() is mask.clone() is mask.detach() is mask
    )
    assert torch.equal(mask[0, 0], torch.ones(4, 4, dtype=torch.bool).tril()) and mask.to("cpu").shape == mask.shape
    with pytest.raises(AttngenError, match="the model asks for `masked_fill` of its mask, which has no elements"):
        mask.masked_fill(mask, 0.0)
    scores = torch.zeros(1, 2, 4, 4)
    for compute in (lambda: scores + mask, lambda: mask + scores, lambda: torch.where(mask, scores, 0.0)):
        with pytest.raises(AttngenError, match="the model asks for `r?(add|where)` of its mask, which has no elements"):
            compute()
    bloom = tf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(AttngenError, match="the model asks for `add` of its mask"):
        tf.AutoModelForCausalLM.from_config(bloom, attn_implementation="attngen")(torch.zeros(1, 4, dtype=torch.long))


def test_padding_is_a_span_where_that_is_known() -> None:
    """Without gradients a mask inspects its padding: there is none, one span per sequence, or any set of keys."""
    some = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    with torch.no_grad():
        left, whole, holes = (
            mask_of(2, 1, 4, 3, attention_mask=x) for x in (some, some | True, torch.tensor([[1, 0, 1, 1]] * 2) > 0)
        )
        filled, none = mask_of(2, 1, 9, 3, attention_mask=some | True), mask_of(2, 1, 4, 3, attention_mask=some & False)
    assert left.span is not None and [x.tolist() for x in left.span] == [[2, 0], [4, 3]]
    assert whole.padding is None and filled.padding is None and none.span is not None
    assert holes.span is None and holes.padding is not None and mask_of(2, 1, 4, 3, attention_mask=some).span is None


def test_registration_is_checked(tmp_path: Path) -> None:
    with pytest.raises(AttngenError, match="the name `my_flash` means something else to transformers"):
        register(name="my_flash")
    for existing in ("sdpa", "eager"):
        with pytest.raises(AttngenError, match=f"transformers has an implementation `{existing}` already"):
            register(name=existing)
    register()  # again
    with pytest.raises(AttngenError, match="has no generated module; expected what `attngen build --out` writes"):
        register(tmp_path)


# ------------------------------------------------------------------------------------------------ specs ahead of time


def test_the_cookbook_shows_the_registration() -> None:
    page = (ROOT / "docs" / "cookbook" / "huggingface.md").read_text(encoding="utf-8")
    assert 'attn_implementation="attngen"' in page and "register()" in page
