"""attngen as an attention implementation of transformers: models of random weights beside their eager attention."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import yaml
from transformers import masking_utils as masks

from attngen.cli import main
from attngen.conformance.oracle import relative_error
from attngen.errors import AttngenError
from attngen.integrations.transformers import attend as attends
from attngen.integrations.transformers import register
from attngen.integrations.transformers.ahead import specs_for
from attngen.integrations.transformers.formula import Formula, formula
from attngen.integrations.transformers.mask import mask_of
from attngen.spec import parse_spec
from tests.conftest import CUDA
from tests.helpers import ROOT

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
    """A language model; sizes may be given anew."""
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


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, so that what is built here is built from this source, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        register()
        yield


def made(name: str, **sizes: Any) -> Any:
    """A model of random weights, with all of them at work."""
    torch.manual_seed(0)
    model = MODELS[name](**sizes).to(DEVICE).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)
    return model


def lengths(n: int) -> Tensor:
    """A mask of two sequences: one is padded on the left, one on the right."""
    mask = torch.ones(2, n, dtype=torch.long, device=DEVICE)
    mask[0, : n // 4] = 0
    mask[1, -(n // 5) :] = 0
    return mask


def calls(name: str, n: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Calls of a model, each with the positions whose outputs count."""
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
    """The outputs that count, and all gradients in one row."""
    model.set_attn_implementation(how)
    model.zero_grad()
    out = model(**call)
    out = (out.logits if "logits" in out else out.last_hidden_state)[counted]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out.float() * weights.float()).mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_their_eager_attention_does(name: str) -> None:
    """Logits and all gradients in fp32: sequences of one length, padded on both sides, and packed; without a
    warning."""
    if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        pytest.fail("fp32 is not fp32 here")
    model = made(name)
    for call, counted in calls(name, N):
        expected = run(model, "eager", call, counted)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = run(model, "attngen", call, counted)
        for x, y in zip(found, expected):
            assert relative_error(x, y) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_errors_in_bf16_are_those_of_eager(name: str) -> None:
    """At 1,000 tokens and heads of 64 columns: against fp32, at most twice the error of eager attention in bf16,
    outputs and gradients."""
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


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_models_generate_the_same_tokens(name: str) -> None:
    """With dynamic and static caches, and padding on the left; windows and chunks are shorter than what is
    generated."""
    model = made(name)
    ids = torch.randint(3, WORDS, (2, 11), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": WORDS - 1,
        "disable_compile": True,
    }
    for kind in ("dynamic", "static"):
        answers = []
        for how in ("eager", "attngen"):
            model.set_attn_implementation(how)
            answers.append(model.generate(ids, attention_mask=mask, cache_implementation=kind, **asked))
        assert torch.equal(*answers)


def test_training_curves_are_those_of_eager() -> None:
    """Four steps of a Gemma 2 with padded batches, and checkpoints."""
    losses: dict[str, list[float]] = {}
    for how in ("eager", "attngen"):
        model = made("gemma2").train()
        model.set_attn_implementation(how)
        model.gradient_checkpointing_enable()
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        labels = ids.masked_fill(
            lengths(N).roll(1, 1) * lengths(N) == 0, -100
        )  # no padded position predicts one: it sees no key
        losses[how] = []
        for _ in range(4):
            loss = model(ids, attention_mask=lengths(N), labels=labels, use_cache=False).loss
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses[how].append(loss.item())
    assert losses["attngen"] == pytest.approx(losses["eager"], rel=1e-4) and losses["eager"][-1] < losses["eager"][0]


def test_dropout_is_the_kernels() -> None:
    """In training, weights are dropped with the probability of the configuration; each forward drops others."""
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


def test_starts_of_packed_sequences_count() -> None:
    """cu_seq_lens_q, which other implementations read only for kernels of FlashAttention, says where sequences
    start."""
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


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast_computes_in_its_type(name: str) -> None:
    """Weights in fp32, products in bf16: errors are at most twice those of eager attention under autocast."""
    model = made(name)
    call, counted = next(calls(name, N))
    truth = run(model, "eager", call, counted)
    with torch.autocast(DEVICE, torch.bfloat16):
        naive, ours = (run(model, how, call, counted) for how in ("eager", "attngen"))
    for x, y, right in zip(ours, naive, truth):
        assert relative_error(x, right) <= 2 * relative_error(y, right)


def test_torch_compile_runs_around_layers() -> None:
    model = made("mistral")
    call, counted = next(calls("mistral", N))
    expected = run(model, "attngen", call, counted)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = run(compiled, "attngen", call, counted)
    assert relative_error(found[0], expected[0]) < 1e-5 and relative_error(found[1], expected[1]) < 1e-5


def test_image_spans_of_a_mask_are_traced() -> None:
    """Gemma 3's images: a function of the user's joins the causal one."""
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


# ------------------------------------------------------------------------------------------------ what is refused, or falls back


def fallen(model: Any, **call: Any) -> tuple[Any, str]:
    """What a call gives, and the warning that says why it falls back."""
    attends._WARNED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model(**call)
    said = [str(w.message) for w in caught if "attngen" in str(w.message)]
    assert len(said) == 1
    return out, said[0]


def test_what_is_not_supported_falls_back_with_one_warning() -> None:
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
    out, why = fallen(model, input_ids=ids, output_attentions=True, use_cache=False)
    assert "`output_attentions` asks for weights, which kernels do not keep" in why
    assert all(torch.equal(x, y) for x, y in zip(out.attentions, expected.attentions)) and len(out.attentions) == 2
    for mask in (own, floats):
        out, why = fallen(model, input_ids=ids, attention_mask=mask, use_cache=False)
        assert f"the model was given a mask [2, 1, {N}, {N}] of its own" in why and torch.equal(out.logits, masked)
    out, why = fallen(model, input_ids=ids, use_cache=False, unheard_of=3)
    assert "gives its attention `unheard_of`, which attngen does not know" in why and torch.equal(
        out.logits, expected.logits
    )
    mask = mask_of(1, N, N, attention_mask=lengths(N)[1:] > 0, device=DEVICE)
    out, why = fallen(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert "the mask is of 1 sequences, and the layer has 2" in why and out.logits.shape[:2] == ids.shape
    out, why = fallen(model.double(), input_ids=ids, use_cache=False)
    assert "the layer computes in torch.float64" in why
    narrow = made("llama", head_dim=12)
    narrow.set_attn_implementation("attngen")
    out, why = fallen(narrow, input_ids=ids, use_cache=False)
    assert "a head has 12 columns, and attngen's have a multiple of 8" in why


def test_each_reason_and_class_of_layers_has_one_warning() -> None:
    """Sizes in a reason are those of a call: sequences that grow by a token, and other batches, say nothing new."""
    attends._WARNED.clear()
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
    said = [str(w.message) for w in caught if "attngen" in str(w.message)]
    assert len(said) == 4 and sum("a mask [2, 1, 5, 5] of its own" in text for text in said) == 2
    assert sum("the mask is of 1 sequences, and the layer has 2" in text for text in said) == 2


def test_keys_that_a_layer_chose_are_not_forgotten() -> None:
    """DeepSeek 3.2 puts them into the mask for eager attention alone, and else into an argument that eager attention
    does not read."""
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(
        AttngenError, match="Linear gives its attention `indices`, the keys that it chose, in place of a mask"
    ):
        attends.attend(torch.nn.Linear(1, 1), x, x, x, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32))


def test_a_mask_that_cannot_be_traced_falls_back() -> None:
    model = made("llama")
    ids = torch.randint(3, WORDS, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (torch.sinh(k.float()) >= 0) & (k <= q)

    mask = mask_of(2, N, N, mask_function=odd, use_vmap=True, device=DEVICE)
    model.set_attn_implementation("attngen")
    out, why = fallen(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert "`aten::sinh` has no expression" in why
    assert relative_error(out.logits, model(ids, use_cache=False).logits) < 1e-5


def test_a_model_that_computes_with_its_mask_is_told() -> None:
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


def test_keys_that_count_are_a_run_where_that_is_known() -> None:
    """Without gradients a mask looks at its padding: none, a run in each sequence, or any keys."""
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
    for taken in ("sdpa", "eager"):
        with pytest.raises(AttngenError, match=f"transformers has an implementation `{taken}` already"):
            register(name=taken)
    register()  # again
    with pytest.raises(AttngenError, match="has no generated module; expected what `attngen build --out` writes"):
        register(tmp_path)


# ------------------------------------------------------------------------------------------------ formulas


def remap_positions_for_packed_sequence(mask_function: Any, position_ids: torch.Tensor) -> Any:
    """What transformers has by this name from some version after 5.17 on; attngen knows it by the name."""
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, position_ids[b, q_idx], position_ids[b, kv_idx])


def packed(mask: Any, position_ids: torch.Tensor) -> Any:
    """A mask inside packed sequences, as those versions make it."""
    return masks.and_masks(
        masks.packed_sequence_mask_function(IDS), remap_positions_for_packed_sequence(mask, position_ids)
    )


IDS = torch.zeros(2, 64, dtype=torch.long)
CHUNKS = masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long))
WINDOW = masks.sliding_window_causal_mask_function(8)
NAMED = {"sliding_window": {"left": 7, "right": 0}}
DOCUMENTS = {"document": {"sorted": True}}
FORMULAS: dict[str, tuple[Callable[[], Any], int, tuple[Any, ...]]] = {
    "causal": (lambda: masks.causal_mask_function, 0, ("causal",)),
    "none": (lambda: masks.bidirectional_mask_function, 0, ()),
    "in a window": (lambda: WINDOW, 5, (NAMED,)),
    "both sides": (
        lambda: masks.sliding_window_bidirectional_mask_function(8),
        0,
        ({"sliding_window": {"left": 8, "right": 8}},),
    ),
    "packed": (lambda: packed(WINDOW, IDS), 0, (NAMED, DOCUMENTS)),
    "packed, as in 5.17": (
        lambda: masks.and_masks(WINDOW, masks.packed_sequence_mask_function(IDS)),
        0,
        (NAMED, DOCUMENTS),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_have_names(name: str) -> None:
    function, offset, parts = FORMULAS[name]
    assert formula(function(), offset)[0].parts == parts


def test_formulas_are_kept_by_form() -> None:
    """A function that is made anew of the same pieces has the same formula; another number, or another piece, has
    another."""
    first, tensors = formula(masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)), 0)
    again, others = formula(masks.chunked_causal_mask_function(8, torch.ones(2, dtype=torch.long)), 0)
    assert first is again and tensors[0] is not others[0]
    assert first is not formula(masks.chunked_causal_mask_function(9, torch.zeros(2, dtype=torch.long)), 0)[0]
    assert first is not formula(masks.and_masks(CHUNKS, masks.blockwise_overlay(IDS)), 0)[0]
    apart, same = (
        masks.or_masks(masks.blockwise_overlay(x), masks.blockwise_overlay(y)) for x, y in ((IDS, IDS + 1), (IDS, IDS))
    )
    assert formula(apart, 0)[0] is not formula(same, 0)[0] and len(formula(apart, 0)[1]) == 2


LIMITS = {"window": 4}


class Settings:
    """An object of a user's, which a mask function reads."""

    def __init__(self, window: int) -> None:
        self.window = window

    def read(self) -> int:
        return self.window


def in_window(window: Callable[[], Any]) -> Any:
    return lambda b, h, q, k: (k <= q) & (k > q - window())


def of_settings(window: int) -> Any:
    settings = Settings(window)
    return lambda b, h, q, k: (k <= q) & (k > q - settings.window)


def of_a_module(window: int) -> Any:
    LIMITS["window"] = window
    return lambda b, h, q, k: (k <= q) & (k > q - LIMITS["window"])


def of_a_size(window: int) -> Any:
    x = torch.zeros(2, window)
    return lambda b, h, q, k: (k <= q) & (k > q - x.shape[1])


PIECES: dict[str, Callable[[int], Any]] = {
    "number": lambda window: in_window(lambda: window),
    "object": of_settings,
    "method": lambda window: in_window(Settings(window).read),
    "dictionary": lambda window: (lambda limits: lambda b, h, q, k: (k <= q) & (k > q - limits["window"]))(
        {"window": window}
    ),
    "of the module": of_a_module,
    "size": of_a_size,
}


@pytest.mark.parametrize("name", PIECES)
def test_functions_that_differ_have_other_formulas(name: str) -> None:
    """Functions of one code, with another number in what they read: none gets the formula of the one before."""
    for window in (4, 9, 4):
        assert formula(PIECES[name](window), 0)[0].parts == ({"sliding_window": {"left": window - 1, "right": 0}},)


def test_values_of_tensors_are_not_written_out() -> None:
    x = torch.tensor([4])
    for function in (lambda b, h, q, k: k > q - x.item(), lambda b, h, q, k: k > q - (4 if x[0] < 5 else 9)):
        assert "a number is taken out of a tensor" in formula(function, 0)[0].why


def test_masks_of_transformers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda: masks.causal_mask_function, lambda: masks.chunked_causal_mask_function(8, IDS[0])):
        first = formula(make(), 0)[0]
        with monkeypatch.context() as patch:
            patch.setattr("attngen.integrations.transformers.formula.trace", lambda *_: pytest.fail("traces again"))
            assert formula(make(), 0)[0] is first


def test_sequences_in_any_order_and_other_unions() -> None:
    """Only an intersection hides other sequences; numbers that fall along a row, as -1 for padding, are not sorted."""
    ids = torch.tensor([[0, 0, 1, 1, -1, -1]])
    both = masks.and_masks(masks.bidirectional_mask_function, masks.packed_sequence_mask_function(ids))
    assert formula(both, 0)[0].parts == ("document",)
    either = formula(masks.or_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(IDS)), 0)[0]
    assert not either.packed and not either.causal and " or " in either.parts[0]["expr"]


def test_a_tensor_without_dimensions_is_an_input_of_one() -> None:
    last = torch.tensor(4)
    mask = mask_of(2, N, N, mask_function=lambda b, h, q, k: (k <= q) & (k > q - last))
    assert [x.tolist() for x in mask.inputs.values()] == [[4]]


def test_elements_of_a_mask_are_those_of_when_it_was_made() -> None:
    """A static cache counts on in its tensor of positions before a layer attends."""
    first = torch.tensor(5)
    mask = mask_of(1, 3, 12, first, mask_function=masks.causal_mask_function)
    first += 3
    assert mask.dense().sum(-1).flatten().tolist() == [6, 7, 8] and int(mask.start) == 5


def test_masks_that_list_blocks_are_not_served() -> None:
    """Queries over a cache run by the kernels that a call of theirs has."""
    spans = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])))
    for function, served in (
        (masks.causal_mask_function, True),
        (masks.bidirectional_mask_function, True),
        (spans, False),
    ):
        assert attends._has_cache(formula(function, 0)[0]) == served


def test_positions_are_told_where_a_cache_begins() -> None:
    moved = formula(CHUNKS, 5)[0]
    assert moved.offset and "kv_idx + kv_offset - left_padding[b]" in moved.parts[0]["expr"]
    assert not formula(CHUNKS, 0)[0].offset and moved.causal


def test_packed_chunks_read_positions() -> None:
    """Chunks depend on more than distances: inside packed sequences the mask reads the positions themselves."""
    made = formula(packed(CHUNKS, IDS + 1), 0)[0]
    assert "position_ids[b, q_pos]" in made.parts[0]["expr"] and not made.packed


# ------------------------------------------------------------------------------------------------ specs ahead of time


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0


def test_specs_of_a_configuration_are_those_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built ahead of time from `attngen specs-for` is what the model runs: nothing else is built."""
    model = made("gpt_oss")
    config = tmp_path / "config.json"
    model.config.to_json_file(config)
    command("specs-for", str(config), "--out", str(tmp_path / "specs"), "--dtype", "fp32")
    names = {path.stem for path in (tmp_path / "specs").iterdir()}
    ways = ["", "_packed", "_padded"]
    expected = {f"layer_{kind}{way}_sink_fp32_mqa_d16" for kind in ("causal", "window_8") for way in ways}
    expected |= {
        f"layer_decode_{kind}{way}_sink_fp32_mqa_d16" for kind in ("causal", "window_8") for way in ("", "_spans")
    }
    assert names == expected
    command("build", *map(str, sorted((tmp_path / "specs").iterdir())), "--out", str(tmp_path / "built"))
    monkeypatch.setattr(attends, "FOUND", {})
    monkeypatch.setattr(attends, "_MODULES", {})
    register(tmp_path / "built")
    monkeypatch.setattr("attngen.api.build", lambda data: pytest.fail(f"builds {data['name']}"))
    for call, counted in calls("gpt_oss", N):
        run(model, "attngen", call, counted)
    ids = torch.randint(3, WORDS, (1, 9), device=DEVICE)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


CONFIGS: dict[str, tuple[Any, set[str]]] = {
    "gemma3": (
        tf.Gemma3Config,
        {"layer_causal_gqa_d256", "layer_window_4096_padded_gqa_d256", "layer_mha_d64", "layer_decode_causal_gqa_d256"},
    ),
    "t5": (
        tf.T5Config,
        {
            "layer_bias_dropout_mha_d64",
            "layer_bias_mha_d64",
            "layer_causal_bias_mha_d64",
            "layer_decode_causal_bias_mha_d64",
        },
    ),
    "bert": (
        tf.BertConfig,
        {"layer_dropout_mha_d64", "layer_padded_dropout_mha_d64", "layer_mha_d64", "layer_padded_mha_d64"},
    ),
    "deepseek": (tf.DeepseekV3Config, {"layer_causal_mha_d192_128", "layer_decode_causal_mha_d192_128"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_specs_of_whole_models(name: str, tmp_path: Path) -> None:
    """Models of full size are made without weights. Each spec can be read."""
    kind, some = CONFIGS[name]
    kind().to_json_file(tmp_path / "config.json", use_diff=False)
    specs = specs_for(tmp_path / "config.json")
    assert some <= set(specs)
    for title, text in specs.items():
        assert parse_spec(text).name == title == yaml.safe_load(text)["name"]


@pytest.mark.parametrize("name", ["gpt2", "wav2vec2"])
def test_specs_of_models_that_look_at_tokens_or_hear(name: str, tmp_path: Path) -> None:
    of_heads = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = (
        tf.Wav2Vec2Config(**of_heads)
        if name == "wav2vec2"
        else tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, pad_token_id=0)
    )
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    whole = {"wav2vec2": "layer_dropout_mha_d16", "gpt2": "layer_causal_dropout_mha_d16"}[name]
    assert whole in specs_for(tmp_path / "config.json")


def test_configurations_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(AttngenError, match="cannot be read"):
        specs_for(path)
    of_llama = {"model_type": "llama", **SIZES, **HEADS}
    wrong = {
        "{": "is not JSON",
        "[]": "has no `model_type`",
        "{}": "has no `model_type`",
        json.dumps({"model_type": "no_such_model"}): "transformers knows no model `no_such_model`$",
        json.dumps(
            {"model_type": "mine", "auto_map": {}}
        ): "no model `mine`; it comes with code of its own, which attngen does not run",
        json.dumps(
            {**of_llama, "hidden_size": "big"}
        ): "is no configuration of a llama .*'hidden_size' expected int, got str",
        json.dumps({"model_type": "bloom", **SIZES}): "a bloom does not run with attngen .*, which has no elements",
        json.dumps(
            {"model_type": "falcon", **SIZES}
        ): "no layer of a falcon takes its attention from transformers' interface$",
        json.dumps({**of_llama, "head_dim": 12}): "no layer of the llama runs with attngen: a head has 12 columns",
    }
    for text, why in wrong.items():
        path.write_text(text)
        with pytest.raises(AttngenError, match=why) as found:
            specs_for(path)
        assert "\n" not in str(found.value)


def test_layers_that_differ_have_specs_of_other_names() -> None:
    plain = attends.Layer("gqa", (192, 128), True, False, 50.0, True, True, True, False)
    others = [
        {"softcap": 30.0},
        {"softcap": 0.5},
        {"softcap": None},
        {"tf32": True},
        {"wide": False},
        {"served": True, "dropout": False},
    ]
    packed = Formula(({"sliding_window": {"left": 4095, "right": 0}}, {"document": {"sorted": True}}), packed=True)
    names = [layer.spec(packed, "padded")["name"] for layer in (plain, *(replace(plain, **other) for other in others))]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z][a-z0-9_]{0,63}", name) for name in names)
    assert names[0].startswith("layer_window_4096_packed_padded_softcap_50_bias_sink_")


def test_a_folder_given_later_is_used_and_what_it_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attends, "FOUND", {})
    monkeypatch.setattr(attends, "_MODULES", {})
    monkeypatch.setattr(attends, "_WARNED", set())
    model, ids = made("llama"), torch.randint(3, WORDS, (1, 9), device=DEVICE)
    model.set_attn_implementation("attngen")
    register()
    model(ids)
    (first,) = attends._MODULES.values()
    layer, formula, padded = next(iter(attends._MODULES))
    for name, data in {"mine": layer.spec(formula, padded), "other": layer.spec(formula, "padded")}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        command("build", str(tmp_path / f"{name}.yaml"), "--out", str(tmp_path / name))
    register(tmp_path / "other")
    with pytest.warns(
        UserWarning,
        match="no module that `register` was given is of `layer_causal_fp32_mqa_d16`; it was built now, or is",
    ):
        model(ids)
    assert list(attends._MODULES.values()) == [first]
    register(tmp_path / "mine")
    attends._WARNED.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
    assert list(attends._MODULES.values()) == [attends.FOUND[first.SPEC_HASH]]


def test_the_cookbook_shows_the_registration() -> None:
    page = (ROOT / "docs" / "cookbook" / "huggingface.md").read_text(encoding="utf-8")
    assert 'attn_implementation="attngen"' in page and "register()" in page
