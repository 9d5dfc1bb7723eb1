"""Train a small language model on bytes of real text, with the attention of a generated module chosen by name.

    python examples/tiny_lm.py --attention causal_mqa                 # a few hundred steps on a GPU, a few on a CPU
    python examples/tiny_lm.py --attention causal_gqa --compare       # also the same run with naive attention
    python examples/tiny_lm.py --attention naive --data my.txt --csv loss.csv

Without a GPU the kernels run in Triton's interpreter, which checks the mathematics but is slow: sizes are tiny there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import time
from pathlib import Path

import torch
from decoder import DTYPES, Attend, Decoder, naive, stop, variant
from torch.nn import functional as F

SIZES = {  # the defaults of options, by device
    "cuda": {"layers": 4, "d_model": 256, "heads": 8, "seq": 512, "batch": 16, "steps": 300, "every": 25},
    "cpu": {"layers": 2, "d_model": 128, "heads": 4, "seq": 64, "batch": 2, "steps": 10, "every": 1},
}
AGREE = 0.02  # greatest mean difference of two loss curves that rounding may cause


def read_text(path: Path | None) -> torch.Tensor:
    """Bytes to train on: those of a file, or of the sources of the standard library."""
    try:
        sources = [path] if path else sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(p.read_bytes() for p in sources)
    except OSError as error:
        stop(f"--data {path}: cannot be read ({error.strerror})")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(model: Decoder, attend: Attend, text: torch.Tensor, args: argparse.Namespace, title: str) -> list[float]:
    """Train and return the loss of every step; the batches depend only on the seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(args.device, enabled=args.dtype == "fp16")
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(0, len(text) - args.seq, (args.batch,), generator=generator)
        batch = torch.stack([text[i : i + args.seq + 1] for i in starts]).to(args.device).long()
        with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != "fp32"):
            logits = model(batch[:, :-1], attend)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % args.every == 0 or step == args.steps - 1:
            print(
                f"{title:<20} step {step:>4}   loss {losses[-1]:.4f}   {time.perf_counter() - started:6.1f} s",
                flush=True,
            )
    return losses


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention",
        default="causal_mqa",
        help="`naive`, `sdpa`, or a module in generated/ or its folder [causal_mqa]",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train with naive attention too, from the same seed, and compare the losses",
    )
    parser.add_argument(
        "--data", type=Path, help="file to train on, as bytes [the sources of Python's standard library]"
    )
    parser.add_argument("--csv", type=Path, help="write the loss of every step to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of the matrix products [bf16 if the module has it]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    for name, cuda in SIZES["cuda"].items():
        shown = f"[{cuda}; on a CPU {SIZES['cpu'][name]}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help=f"steps between two lines {shown}" if name == "every" else shown,
        )
    args = parser.parse_args(argv)
    for name, default in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the generated module imports Triton
    chosen = variant(args.attention, args.heads)
    if args.heads % chosen.kv_heads:
        stop(f"--heads {args.heads}: expected a multiple of the {chosen.kv_heads} K/V heads of {chosen.name}")
    args.dtype = args.dtype or next(name for name, dtype in DTYPES.items() if dtype in chosen.dtypes)
    if DTYPES[args.dtype] not in chosen.dtypes:
        stop(f"--dtype {args.dtype}: {chosen.name} has {', '.join(n for n, d in DTYPES.items() if d in chosen.dtypes)}")
    text = read_text(args.data)
    if len(text) <= args.seq:
        stop(f"--data {args.data}: {len(text)} bytes; expected more than --seq {args.seq}")

    runs: dict[str, Attend] = {chosen.name: chosen.attend}
    if args.compare:
        runs = {"naive": lambda q, k, v: naive(q, k, v, chosen.window), **runs}
    curves: dict[str, list[float]] = {}
    for title, attend in runs.items():
        torch.manual_seed(args.seed)
        model = Decoder(args.layers, args.d_model, args.heads, args.seq, chosen).to(args.device)
        curves[title] = train(model, attend, text, args, title)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("step", *curves), *zip(itertools.count(), *curves.values())])
    if args.compare and len(curves) == 2:
        differences = [abs(a - b) for a, b in zip(*curves.values())]
        mean = sum(differences) / len(differences)
        print(f"largest difference {max(differences):.2e}, mean {mean:.2e} over {args.steps} steps")
        if not mean <= AGREE:
            stop(f"the losses of {' and '.join(curves)} differ by {mean:.2e} in the mean; expected at most {AGREE}")


if __name__ == "__main__":
    main()
