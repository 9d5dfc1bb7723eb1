"""What train_lm.py runs: training from a seed, and measurements of speed and memory."""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import lm_page
import torch
from decoder import DTYPES, PLAIN, Attend, Decoder, Variant
from lm_ranks import Part
from lm_text import Text, windows
from torch.nn import functional as F


class Replayed:
    """A function of a tensor as a CUDA graph that is captured once and replayed, so that the host has next to no work.

    The first calls are not captured, because libraries and optimizers allocate memory in their first steps. All inputs
    have one shape.
    """

    PLAIN_CALLS = 3

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self.function, self.calls = function, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, x: torch.Tensor) -> None:
        self.calls += 1
        if self.calls <= self.PLAIN_CALLS:  # on another stream, as the capture is
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function(x)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.calls == self.PLAIN_CALLS + 1:
            self.x = x.clone()
            with torch.cuda.graph(self.graph):  # captures, and computes nothing yet
                self.function(self.x)
        self.x.copy_(x)
        self.graph.replay()


class Trainer:
    """A model, its optimizer and its two attentions: with dropout for training, without for validation.

    With `graph`, steps are replayed from a CUDA graph, which reads the learning rate from a tensor.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        chosen: Variant,
        dropout: float,
        seed: int,
        seq: int,
        checkpointed: bool,
        graph: bool,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.dtype = args.device, args.dtype
        sizes = (args.layers, args.d_model, args.heads, seq, chosen, args.vocabulary, checkpointed)
        with torch.device(args.device):
            self.model = Decoder(*sizes)
        lr = torch.tensor(args.lr, device=args.device) if graph else args.lr
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=args.device == "cuda", capturable=graph
        )
        self.step = Replayed(self.update) if graph else self.update
        plain = functools.partial(chosen.attend, window=chosen.window) if chosen.name in PLAIN else chosen.attend
        self.part = Part(chosen, args.mesh, args.device, seq, plain)
        self.exact: Attend = self.part.attend
        self.attend: Attend = functools.partial(self.exact, dropout_p=dropout) if dropout else self.exact

    def loss(self, batch: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The mean loss of the next token over sequences [B, seq + 1]; on several ranks, this one's part of the sum."""
        rows, following = self.part.rows(batch[:, :-1]), self.part.rows(batch[:, 1:])
        with torch.autocast(self.device, DTYPES[self.dtype], enabled=self.dtype != "fp32"):
            logits = self.model(rows, attend, self.part.positions)
        total = F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum")
        return total / batch[:, 1:].numel()

    def update(self, batch: torch.Tensor) -> None:
        """One step of the optimizer."""
        loss = self.loss(batch, self.attend)
        self.optimizer.zero_grad()
        loss.backward()
        self.part.sum_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def perplexity(self, batches: list[torch.Tensor]) -> float:
        """exp of the mean loss per token over validation batches."""
        losses = self.part.total(torch.stack([self.loss(batch, self.exact) for batch in batches]))
        sizes = torch.tensor([len(batch) for batch in batches], device=losses.device)
        return math.exp(min(((losses * sizes).sum() / sizes.sum()).item(), 700))


def train(args: argparse.Namespace, text: Text, chosen: Variant, dropout: float, seed: int) -> dict[str, Any]:
    """Train from the seed, print a line per epoch, and return the results of the run."""
    free_memory(args.device)
    trainer = Trainer(args, chosen, dropout, seed, args.seq, args.checkpoint, args.graph)
    generator = torch.Generator().manual_seed(seed)
    count, held = (len(text.train) - 1) // args.seq, (len(text.held) - 1) // args.seq
    steps, shown = args.epoch_tokens // args.seq // args.batch, args.val_tokens // args.seq
    spread = torch.arange(shown, device=args.device) * held // shown * args.seq
    batches = [windows(text.held, starts, args.seq) for starts in spread.split(args.batch)]
    total, warmup = steps * args.epochs, max(1, steps * args.epochs // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda i: min(1, (i + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * i / total))
    )
    title = f"{chosen.name:<20} dropout {dropout:<4} seed {seed}"
    perplexities, rates = [trainer.perplexity(batches)], []
    print(f"{title}   epoch 0   perplexity {perplexities[0]:9.2f}", flush=True)
    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(count, generator=generator)[: steps * args.batch].view(steps, args.batch).to(args.device)
        started = clock(args.device)
        for starts in order * args.seq:
            trainer.step(windows(text.train, starts, args.seq))
            schedule.step()
        rates.append(steps * args.batch * args.seq / (clock(args.device) - started))
        perplexities.append(trainer.perplexity(batches))
        measured = {"tokens_per_s": rates[-1], "peak_gib": peak(args.device)}
        print(f"{title}   epoch {epoch}   perplexity {perplexities[-1]:9.2f}   {formatted(measured)}", flush=True)
    measured["tokens_per_s"] = statistics.median(rates)
    return {"attention": chosen.name, "dropout": dropout, "seed": seed, "perplexity": perplexities, **measured}


def measure(
    args: argparse.Namespace, text: Text, chosen: Variant, dropout: float, size: tuple[int, int], mode: str
) -> dict[str, Any]:
    """Tokens per second and peak memory of a few steps of `size` (sequences, their length) that run in one of MODES."""
    free_memory(args.device)
    batch, seq = size
    measured: dict[str, Any] = {"tokens_per_s": None, "peak_gib": None}
    try:
        trainer = Trainer(args, chosen, dropout, 0, seq, mode == "checkpointed", mode == "graph")
        before = max(args.speed_steps, Replayed.PLAIN_CALLS + 1) if mode == "graph" else args.speed_steps
        starts = torch.randint(
            len(text.train) - seq, (before + args.speed_steps, batch), generator=torch.Generator().manual_seed(0)
        )
        for i, row in enumerate(starts.to(args.device)):
            if i == before:
                started = clock(args.device)
            trainer.step(windows(text.train, row, seq))
        measured = {
            "tokens_per_s": args.speed_steps * batch * seq / (clock(args.device) - started),
            "peak_gib": peak(args.device),
        }
    except torch.OutOfMemoryError:
        pass  # the results stay None, and the page says so
    print(
        f"{chosen.name:<20} dropout {dropout:<4} {batch} x {seq:<6} {lm_page.MODES[mode]:<16} {formatted(measured)}",
        flush=True,
    )
    return {"attention": chosen.name, "dropout": dropout, "seq": seq, "batch": batch, "way": mode, **measured}


def formatted(measured: dict[str, Any]) -> str:
    """Tokens per second and peak memory as text."""
    rate = "out of memory" if measured["tokens_per_s"] is None else f"{measured['tokens_per_s']:9,.0f} tokens/s"
    return rate if measured["peak_gib"] is None else f"{rate}   peak {measured['peak_gib']:.1f} GiB"


def free_memory(device: str) -> None:
    """Free the memory of the last run and reset the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def clock(device: str) -> float:
    """The time in seconds after the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: str) -> float | None:
    """Peak memory of tensors since `free_memory` in GiB; None on a CPU, where it is not counted."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
