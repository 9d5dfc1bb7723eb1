"""Time training steps of a model of Hugging Face's transformers, with attngen and with other implementations.

    pip install 'transformers>=5'
    python examples/train_transformers.py               # a Llama of 1B parameters, 4 sequences of 4,096 tokens
    python examples/train_transformers.py --model gemma2 --batch 1 --length 8192 --with eager flex_attention
    python examples/train_transformers.py --padded      # sequences of half the length to all of it

Weights are random. It needs a GPU. Steps (forward, backward, AdamW) of all implementations alternate; it prints the
median of each, and the difference of the first step's loss from that of the first implementation.
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
    """The sizes of Llama 3.2 1B, with a smaller vocabulary."""
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
    """The sizes of Gemma 2 2B, with a smaller vocabulary: a soft cap, and a window of 4,096 in every second layer."""
    return transformers.Gemma2Config(vocab_size=32000, num_hidden_layers=layers or 26, max_position_embeddings=131072)


def gpt_oss(transformers: Any, layers: int) -> Any:
    """Attention as in gpt-oss 20B, with fewer experts: sinks, and a window of 128 in every second layer."""
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
        "--with", dest="others", nargs="*", default=["sdpa"], help="implementations to compare attngen with [sdpa]"
    )
    parser.add_argument(
        "--padded", action="store_true", help="sequences of half the length to all of it, padded on the right"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    return parser.parse_args(argv)


def transformers_on_gpu() -> Any:
    """The module `transformers`; ends the script without it, or without a GPU."""
    try:
        import transformers
    except ImportError:
        sys.exit("train_transformers: transformers is not installed; expected `pip install 'transformers>=5'` before")
    if not torch.cuda.is_available():
        sys.exit("train_transformers: no GPU; expected one")
    return transformers


class Steps:
    """Training steps of one model on one batch, with the attention of any implementation."""

    def __init__(self, model: Any, args: argparse.Namespace, words: int) -> None:
        self.model = model
        # Weights stay the same, so that all implementations compute the same.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        self.run: Any = torch.compile(model) if args.compile else model
        self.ids = torch.randint(words, (args.batch, args.length), device="cuda")
        self.labels, self.more = self.ids, {}
        if args.padded:
            ends = torch.linspace(args.length // 2, args.length, args.batch, device="cuda").long()
            mask = torch.arange(args.length, device="cuda") < ends[:, None]
            self.labels, self.more = self.ids.masked_fill(~mask, -100), {"attention_mask": mask.long()}

    def step(self, name: str) -> tuple[float, float]:
        """(seconds, loss) of a step with an implementation."""
        self.model.set_attn_implementation(name)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = self.run(self.ids, labels=self.labels, use_cache=False, **self.more).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - started, loss.item()

    def first(self, name: str) -> tuple[float, float] | None:
        """(loss, peak memory in GiB) of the second step, because the first one compiles kernels; None if memory runs
        out."""
        try:
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                _, loss = self.step(name)
            return loss, torch.cuda.max_memory_allocated() / 2**30
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            torch.cuda.empty_cache()
            return None


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    transformers = transformers_on_gpu()
    hf.register()
    config = MODELS[args.model](transformers, args.layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    count = sum(p.numel() for p in model.parameters())
    steps = Steps(model, args, config.vocab_size)
    print(
        f"{args.model}, {count / 1e9:.2f}B parameters, {args.batch} x {args.length} tokens, "
        f"{torch.cuda.get_device_name()}"
    )
    losses, peaks = {}, {}
    for name in ("attngen", *args.others):
        if found := steps.first(name):
            losses[name], peaks[name] = found
        else:
            print(f"{name:<16} out of memory")
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(args.steps):
        for name in losses:
            seconds[name].append(steps.step(name)[0])
    ours = statistics.median(seconds["attngen"])
    for name, loss in losses.items():
        median = statistics.median(seconds[name])
        off = loss - next(iter(losses.values()))
        print(
            f"{name:<16} {1000 * median:8.1f} ms a step, {args.batch * args.length / median:9,.0f} tokens/s, "
            f"{median / ours:5.2f} x attngen's time, {peaks[name]:5.1f} GiB, loss {off:+.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
