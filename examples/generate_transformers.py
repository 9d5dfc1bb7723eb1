"""A Llama of Hugging Face's transformers generates with attngen, and with what transformers has.

    pip install 'transformers>=5'
    python examples/generate_transformers.py              # random weights; its tokens beside those of SDPA
    python examples/generate_transformers.py --layers 16 --d-model 4096 --heads 32 --new 512 --room 16384 --cache static
    python examples/generate_transformers.py --padded     # prompts of half the length to all of it, padded on the left

It needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import attngen.integrations.transformers as hf

NAME = "attngen"
CLOSE = 0.1  # how far a logit may be below the largest one where both are rounded in another order


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
            "expected --heads to be a multiple of 4, which share a K/V head, and --prompt and --new to be at most --room together"
        )
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
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
    hf.register(name=NAME)
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
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    prompt = torch.randint(config.vocab_size, (args.batch, args.prompt), device="cuda")
    starts = (
        torch.linspace(args.prompt // 2, 0, args.batch, device="cuda").long()
        if args.padded
        else torch.zeros(args.batch, device="cuda")
    )
    mask = (torch.arange(args.prompt, device="cuda") >= starts[:, None]).long()
    asked = {
        "max_new_tokens": args.new,
        "min_new_tokens": args.new,
        "do_sample": False,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    answers = {}
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name)
        for _ in range(2):  # kernels are compiled the first time
            static = args.cache == "static"
            cache = (
                transformers.StaticCache(config, max_cache_len=args.room)
                if static
                else transformers.DynamicCache(config=config)
            )
            torch.cuda.synchronize()
            started = time.perf_counter()
            answers[name] = model.generate(prompt, attention_mask=mask, past_key_values=cache, **asked)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        print(
            f"{name:<10} {args.batch * args.new / seconds:8,.0f} tokens/s, {args.new} after {args.prompt}, a {args.cache} cache"
            f"{f' of {args.room}' * static}",
            flush=True,
        )
    model.set_attn_implementation("sdpa")
    seen = torch.cat((mask, torch.ones(args.batch, args.new - 1, dtype=torch.long, device="cuda")), 1)
    logits = model(answers[NAME][:, :-1], attention_mask=seen).logits[:, args.prompt - 1 :].float()
    gap = logits.max(-1).values - logits.gather(2, answers[NAME][:, args.prompt :, None])[..., 0]
    same, total = int((gap == 0).sum()), gap.numel()
    print(
        f"{same:,} of {total:,} tokens are those of the whole sequence with SDPA, the others at most {gap.max():.3f} below in their logit"
    )
    if not gap.max() <= CLOSE:
        sys.exit(f"generate_transformers: a token is {gap.max():.3f} below the best one; expected at most {CLOSE}")


if __name__ == "__main__":
    main()
