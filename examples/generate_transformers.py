"""Generate with a Llama of Hugging Face's transformers, with attngen and with SDPA.

    pip install 'transformers>=5'
    python examples/generate_transformers.py              # random weights; compares its tokens with those of SDPA
    python examples/generate_transformers.py --layers 16 --d-model 4096 --heads 32 --new 512 --room 16384 --cache static
    python examples/generate_transformers.py --padded     # prompts of half the length to all of it, padded on the left

It needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import attngen.integrations.transformers as hf

NAME = "attngen"
CLOSE = 0.1  # how far rounding may put the logit of a token below the largest one


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "d_model": 2048, "heads": 16, "batch": 4, "prompt": 1000, "new": 128, "room": 4096}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}".replace("_", "-"), type=int, default=size, help=f"[{size}]")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="[dynamic]")
    parser.add_argument("--padded", action="store_true", help="prompts of several lengths")
    args = parser.parse_args(argv)
    if args.heads % 4 or args.prompt + args.new > args.room:
        parser.error(
            "expected --heads to be a multiple of 4, which share a K/V head, and --prompt and --new to be at "
            "most --room together"
        )
    return args


def transformers_on_gpu() -> Any:
    """The module `transformers`; ends the script without it, or without a GPU."""
    try:
        import transformers
    except ImportError:
        sys.exit(
            "generate_transformers: transformers is not installed; expected `pip install 'transformers>=5'` before"
        )
    if int(transformers.__version__.split(".")[0]) < 5:
        sys.exit(f"generate_transformers: transformers is {transformers.__version__}; expected 5 or later")
    if not torch.cuda.is_available():
        sys.exit("generate_transformers: no GPU; expected one")
    return transformers


def llama(transformers: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """The configuration of a Llama, and the model with random weights."""
    config = transformers.LlamaConfig(
        hidden_size=args.d_model,
        intermediate_size=3 * args.d_model,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 4,
        head_dim=128,
        vocab_size=32000,
        max_position_embeddings=args.room,
    )
    torch.manual_seed(0)
    return config, transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def prompts(args: argparse.Namespace, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of a vocabulary of `words`, and their attention mask, both [batch, prompt]."""
    prompt = torch.randint(words, (args.batch, args.prompt), device="cuda")
    starts = (
        torch.linspace(args.prompt // 2, 0, args.batch, device="cuda").long()
        if args.padded
        else torch.zeros(args.batch, device="cuda")
    )
    return prompt, (torch.arange(args.prompt, device="cuda") >= starts[:, None]).long()


def generate(
    model: Any, new_cache: Callable[[], Any], prompt: torch.Tensor, mask: torch.Tensor, new: int
) -> tuple[torch.Tensor, float]:
    """The tokens of the prompts and their answers, and the seconds of the second call, which compiles no kernels."""
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    for _ in range(2):
        cache = new_cache()
        torch.cuda.synchronize()
        started = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        torch.cuda.synchronize()
    return tokens, time.perf_counter() - started


def compare_with_sdpa(model: Any, tokens: torch.Tensor, mask: torch.Tensor, args: argparse.Namespace) -> None:
    """Compare generated tokens with the logits that the model gives with SDPA for the whole sequences."""
    model.set_attn_implementation("sdpa")
    seen = torch.cat((mask, torch.ones(args.batch, args.new - 1, dtype=torch.long, device="cuda")), 1)
    logits = model(tokens[:, :-1], attention_mask=seen).logits[:, args.prompt - 1 :].float()
    gap = logits.max(-1).values - logits.gather(2, tokens[:, args.prompt :, None])[..., 0]
    same, total = int((gap == 0).sum()), gap.numel()
    print(
        f"{same:,} of {total:,} tokens are those of the whole sequence with SDPA, the others at most "
        f"{gap.max():.3f} below in their logit"
    )
    if not gap.max() <= CLOSE:
        sys.exit(f"generate_transformers: a token is {gap.max():.3f} below the best one; expected at most {CLOSE}")


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    transformers = transformers_on_gpu()
    hf.register(name=NAME)
    config, model = llama(transformers, args)
    prompt, mask = prompts(args, config.vocab_size)
    static = args.cache == "static"

    def new_cache() -> Any:
        if static:
            return transformers.StaticCache(config, max_cache_len=args.room)
        return transformers.DynamicCache(config=config)

    answers = {}
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name)
        answers[name], seconds = generate(model, new_cache, prompt, mask, args.new)
        print(
            f"{name:<10} {args.batch * args.new / seconds:8,.0f} tokens/s, {args.new} after {args.prompt}, "
            f"a {args.cache} cache{f' of {args.room}' * static}",
            flush=True,
        )
    compare_with_sdpa(model, answers[NAME], mask, args)


if __name__ == "__main__":
    main()
