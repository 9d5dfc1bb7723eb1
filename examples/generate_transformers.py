"""A Llama of Hugging Face's transformers generates with its static cache, and a generated module attends over that.

    pip install 'transformers>=5'
    python examples/generate_transformers.py              # random weights; its tokens beside those of SDPA
    python examples/generate_transformers.py --layers 16 --d-model 4096 --heads 32 --new 512 --room 16384

It needs a GPU. transformers calls a mask function once for all layers, which here says how many keys each sequence has, and an attention
function in each layer, which gets the whole cache and passes it on as it is: nothing is copied, and rows that are not used are not read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

NAME, DIM = "attngen", 128  # how configurations name it; columns of a head, as in specs/decode_gqa.yaml
CLOSE = 0.1  # how far a logit may be below the largest one where both are rounded in another order


def lengths(batch_size: int, q_length: int, q_offset: Any = 0, attention_mask: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """In place of a mask: the keys that each sequence has with the new ones, int32 [B, 1, 1, 1], which transformers passes on as it is.

    ValueError: a sequence is padded, for which this example has no module.
    """
    if attention_mask is not None and q_length > 1 and not bool(attention_mask.all()):
        raise ValueError("a sequence is padded; expected sequences of one length, without padding")
    there = torch.as_tensor(q_offset, dtype=torch.int32, device=device) + q_length
    return there.expand(batch_size).contiguous()[:, None, None, None]


def attend(
    layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, there: torch.Tensor, scaling: float, **_: Any
) -> tuple[Any, None]:
    """Attention of one layer: q [B, Hq, new, D] over the whole cache, k and v [B, Hkv, room, D]. The output is [B, new, Hq, D]."""
    served = importlib.import_module("generated.decode_gqa").attention.with_kvcache
    out = served(q, k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=there.flatten(), scale=scaling)
    return out.transpose(1, 2), None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "d_model": 2048, "heads": 16, "batch": 4, "prompt": 1000, "new": 128, "room": 4096}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}".replace("_", "-"), type=int, default=size, help=f"[{size}]")
    args = parser.parse_args(argv)
    if args.heads % 4 or args.prompt + args.new > args.room:
        parser.error("expected --heads to be a multiple of 4, which share a K/V head, and --prompt and --new to be at most --room together")
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        import transformers
    except ImportError:
        sys.exit("generate_transformers: transformers is not installed; expected `pip install 'transformers>=5'` before")
    if int(transformers.__version__.split(".")[0]) < 5:
        sys.exit(f"generate_transformers: transformers is {transformers.__version__}; expected 5 or later")
    if not torch.cuda.is_available():
        sys.exit("generate_transformers: no GPU; expected one")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, lengths)
    config = transformers.LlamaConfig(
        hidden_size=args.d_model,
        intermediate_size=3 * args.d_model,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 4,
        head_dim=DIM,
        vocab_size=32000,
        max_position_embeddings=args.room,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    prompt = torch.randint(config.vocab_size, (args.batch, args.prompt), device="cuda")
    asked = {
        "attention_mask": torch.ones_like(prompt),
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
            cache = transformers.StaticCache(config, max_cache_len=args.room)
            torch.cuda.synchronize()
            started = time.perf_counter()
            answers[name] = model.generate(prompt, past_key_values=cache, **asked)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        print(
            f"{name:<10} {args.batch * args.new / seconds:8,.0f} tokens/s, {args.new} after {args.prompt}, a cache of {args.room}",
            flush=True,
        )
    model.set_attn_implementation("sdpa")
    logits = model(answers[NAME][:, :-1]).logits[:, args.prompt - 1 :].float()
    gap = logits.max(-1).values - logits.gather(2, answers[NAME][:, args.prompt :, None])[..., 0]
    same, total = int((gap == 0).sum()), gap.numel()
    print(
        f"{same:,} of {total:,} tokens are those of the whole sequence with SDPA, the others at most {gap.max():.3f} below in their logit"
    )
    if not gap.max() <= CLOSE:
        sys.exit(f"generate_transformers: a token is {gap.max():.3f} below the best one; expected at most {CLOSE}")


if __name__ == "__main__":
    main()
