"""Training steps of a model of Hugging Face's transformers, with attngen and with what transformers has.

    pip install 'transformers>=5'
    python examples/train_transformers.py                                  # a Llama of 1B parameters, 4 sequences of 4,096 tokens
    python examples/train_transformers.py --model gemma2 --batch 1 --length 8192 --with eager flex_attention
    python examples/train_transformers.py --padded                         # sequences of half the length to all of it

Weights are random. It needs a GPU. Steps (forward, backward, AdamW) of all implementations run in turn; it prints the
median of each, and how far the loss of the first step is from that of the first implementation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

import attngen.integrations.transformers as hf


def llama(transformers: Any, layers: int) -> Any:
    """The sizes of Llama 3.2 1B, with fewer words."""
    return transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers or 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
    )


def gemma2(transformers: Any, layers: int) -> Any:
    """The sizes of Gemma 2 2B, with fewer words: a soft cap, and a window of 4,096 in every second layer."""
    return transformers.Gemma2Config(vocab_size=32000, num_hidden_layers=layers or 26, max_position_embeddings=131072)


def gpt_oss(transformers: Any, layers: int) -> Any:
    """Attention as in gpt-oss 20B, with few experts: sinks, and a window of 128 in every second layer."""
    return transformers.GptOssConfig(
        vocab_size=32000,
        num_hidden_layers=layers or 8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=131072,
    )


MODELS = {"llama": llama, "gemma2": gemma2, "gpt_oss": gpt_oss}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama", help="[llama]")
    for name, size, what in (
        ("layers", 0, "layers; 0 means the model's own number"),
        ("batch", 4, "sequences"),
        ("length", 4096, "tokens of a sequence"),
        ("steps", 8, "steps that are timed, of each implementation"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{what} [{size}]")
    parser.add_argument(
        "--with", dest="others", nargs="*", default=["sdpa"], help="implementations beside attngen [sdpa]"
    )
    parser.add_argument(
        "--padded", action="store_true", help="sequences of half the length to all of it, padded on the right"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        import transformers
    except ImportError:
        sys.exit("train_transformers: transformers is not installed; expected `pip install 'transformers>=5'` before")
    if not torch.cuda.is_available():
        sys.exit("train_transformers: no GPU; expected one")
    hf.register()
    config = MODELS[args.model](transformers, args.layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    count = sum(p.numel() for p in model.parameters())
    steps = torch.optim.AdamW(
        model.parameters(), lr=0.0, fused=True
    )  # weights stay, so that all implementations do the same
    run: Any = torch.compile(model) if args.compile else model
    ids = torch.randint(config.vocab_size, (args.batch, args.length), device="cuda")
    labels, more = ids, {}
    if args.padded:
        ends = torch.linspace(args.length // 2, args.length, args.batch, device="cuda").long()
        mask = torch.arange(args.length, device="cuda") < ends[:, None]
        labels, more = ids.masked_fill(~mask, -100), {"attention_mask": mask.long()}
    names = ["attngen", *args.others]
    print(
        f"{args.model}, {count / 1e9:.2f}B parameters, {args.batch} x {args.length} tokens, {torch.cuda.get_device_name()}"
    )

    def step(name: str) -> tuple[float, float]:
        """(seconds, loss) of a step."""
        model.set_attn_implementation(name)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = run(ids, labels=labels, use_cache=False, **more).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - started, loss.item()

    losses, peaks = {}, {}
    for name in list(names):
        try:
            for _ in range(2):  # kernels are compiled the first time
                torch.cuda.reset_peak_memory_stats()
                _, losses[name] = step(name)
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        except torch.OutOfMemoryError:
            names.remove(name)
            steps.zero_grad()
            torch.cuda.empty_cache()
            print(f"{name:<16} out of memory")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.steps):
        for name in names:
            seconds[name].append(step(name)[0])
    ours = statistics.median(seconds["attngen"])
    for name in names:
        median = statistics.median(seconds[name])
        off = losses[name] - losses[names[0]]
        print(
            f"{name:<16} {1000 * median:8.1f} ms a step, {args.batch * args.length / median:9,.0f} tokens/s, "
            f"{median / ours:5.2f} x attngen's time, {peaks[name]:5.1f} GiB, loss {off:+.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
