"""A language model trained with naive attention, with SDPA and with generated modules, from the same seeds: do they
learn the same?

    python examples/train_lm.py --attention naive sdpa causal_mqa        # five epochs of each
    python examples/train_lm.py --attention naive my/module --dropout 0 0.1 --seeds 0 1 2 --speed 16x512 8x4096 --out DIR
    python examples/train_lm.py --report docs/lm-training.md --from DIR  # the page and its plot, from what --out wrote

The text is split into training and validation by file (every tenth is held out), one file by its end. Tokens are the
most frequent words of the training text; others are spelt in bytes. A seed fixes the initial weights and the batches,
for every attention alike, and the dropout of each. Without a GPU the kernels run in Triton's interpreter, which is
slow: sizes are tiny there.
"""

from __future__ import annotations

import argparse
import array
import collections
import csv
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_page
import torch
from decoder import DTYPES, PLAIN, Attend, Decoder, Variant, stop, variant
from torch.nn import functional as F

SIZES: dict[str, tuple[int, int, str]] = {  # a flag's default on a GPU, on a CPU, and what it is
    "layers": (12, 2, "blocks"),
    "d_model": (512, 64, "width"),
    "heads": (8, 4, "query heads"),
    "seq": (512, 32, "tokens of a sequence"),
    "batch": (16, 2, "sequences of a step"),
    "epochs": (5, 2, "each with a validation at its end"),
    "epoch_tokens": (1_000_000, 256, "tokens of an epoch, drawn from the training text without replacement"),
    "val_tokens": (200_000, 128, "tokens of a validation, the same every time"),
    "vocabulary": (8192, 1024, "tokens, 256 of them bytes"),
    "speed_steps": (10, 1, "steps that --speed times, after as many that it does not"),
}
SUFFIXES = {".txt", ".md", ".rst", ".py"}  # of a --data folder
# Folders of the standard library that are left out: tests, tables, what others installed.
SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
PIECE = re.compile(rb" ?\w+|\n *|\s|[^\w\s]")


# ---------------------------------------------------------------------------------------------- text


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids to train on and to validate with, int64 [n], and what the page says of them."""

    train: torch.Tensor
    held: torch.Tensor
    about: dict[str, Any]


def documents(path: Path | None) -> list[bytes]:
    """The file, the text files below the folder, or the sources of the standard library; in an order that is always
    the same."""
    root = path or Path(os.__file__).parent
    try:
        if root.is_file():
            return [root.read_bytes()]
        root.stat()
        files = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if path is None:
            files = [p for p in files if p.suffix == ".py" and not SKIPPED.intersection(p.relative_to(root).parts)]
        return [p.read_bytes() for p in files] or stop(
            f"--data {path}: no file with one of {', '.join(sorted(SUFFIXES))} below it"
        )
    except OSError as error:
        return stop(f"--data {path}: cannot be read ({error.strerror})")


def read_text(path: Path | None, vocabulary: int) -> Text:
    """Split the text, take the vocabulary from the training part, encode both."""
    files = documents(path)
    if len(files) < 10:
        whole = b"".join(files)
        train, held = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    else:
        train = b"".join(f for i, f in enumerate(files) if i % 10 != 9)
        held = b"".join(files[9::10])
    counts = collections.Counter(p for p in PIECE.findall(train) if len(p) > 1)
    frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - 256]
    known = {piece: (i,) for i, piece in enumerate(frequent, 256)}

    def encode(text: bytes) -> torch.Tensor:
        ids = array.array(
            "q", itertools.chain.from_iterable(known.get(piece) or piece for piece in PIECE.findall(text))
        )
        return torch.tensor(ids)

    about = {
        "name": path.resolve().name if path else f"the standard library of Python {platform.python_version()}",
        "files": len(files),
        "bytes": sum(map(len, files)),
        "sha256": hashlib.sha256(b"".join(files)).hexdigest()[:16],
    }
    text = Text(encode(train), encode(held), about)
    about |= {"train_tokens": len(text.train), "held_tokens": len(text.held)}
    return text


def windows(tokens: torch.Tensor, starts: torch.Tensor, seq: int) -> torch.Tensor:
    """Sequences of seq + 1 tokens, [len(starts), seq + 1]."""
    return tokens[starts[:, None] + torch.arange(seq + 1, device=tokens.device)]


# ---------------------------------------------------------------------------------------------- training


class Replayed:
    """A function of a tensor that a GPU computes, in a CUDA graph: it is recorded once and replayed, so that the host
    has next to no work.

    The first calls run as they are, for what libraries set up and an optimizer allocates in its first steps. Inputs
    have one shape.
    """

    PLAIN_CALLS = 3

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self.function, self.calls = function, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, x: torch.Tensor) -> None:
        self.calls += 1
        if self.calls <= self.PLAIN_CALLS:  # beside the usual stream, as the recording is
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function(x)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.calls == self.PLAIN_CALLS + 1:
            self.x = x.clone()
            with torch.cuda.graph(self.graph):  # computes nothing yet
                self.function(self.x)
        self.x.copy_(x)
        self.graph.replay()


class Trainer:
    """One model, its optimizer and its two attentions: with dropout to train, without to validate.

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
        self.exact: Attend = plain
        self.attend: Attend = functools.partial(plain, dropout_p=dropout) if dropout else plain

    def loss(self, batch: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The mean loss of the next token, of sequences [B, seq + 1]."""
        with torch.autocast(self.device, DTYPES[self.dtype], enabled=self.dtype != "fp32"):
            logits = self.model(batch[:, :-1], attend)
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def update(self, batch: torch.Tensor) -> None:
        """One step of the optimizer."""
        loss = self.loss(batch, self.attend)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def perplexity(self, batches: list[torch.Tensor]) -> float:
        """exp of the mean loss of a token over validation batches."""
        losses = torch.stack([self.loss(batch, self.exact) for batch in batches])
        sizes = torch.tensor([len(batch) for batch in batches], device=losses.device)
        return math.exp(min(((losses * sizes).sum() / sizes.sum()).item(), 700))


def train(args: argparse.Namespace, text: Text, chosen: Variant, dropout: float, seed: int) -> dict[str, Any]:
    """Train from the seed and print a line per epoch; the record of the run."""
    fresh(args.device)
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
        print(f"{title}   epoch {epoch}   perplexity {perplexities[-1]:9.2f}   {told(measured)}", flush=True)
    measured["tokens_per_s"] = statistics.median(rates)
    return {"attention": chosen.name, "dropout": dropout, "seed": seed, "perplexity": perplexities, **measured}


def measure(
    args: argparse.Namespace, text: Text, chosen: Variant, dropout: float, size: tuple[int, int], way: str
) -> dict[str, Any]:
    """Tokens per second and peak memory of a few steps of `size` (sequences, their length), in one of WAYS."""
    fresh(args.device)
    batch, seq = size
    measured: dict[str, Any] = {"tokens_per_s": None, "peak_gib": None}
    try:
        trainer = Trainer(args, chosen, dropout, 0, seq, way == "checkpointed", way == "graph")
        before = max(args.speed_steps, Replayed.PLAIN_CALLS + 1) if way == "graph" else args.speed_steps
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
        pass  # stays None, and the page says so
    print(
        f"{chosen.name:<20} dropout {dropout:<4} {batch} x {seq:<6} {lm_page.WAYS[way]:<16} {told(measured)}",
        flush=True,
    )
    return {"attention": chosen.name, "dropout": dropout, "seq": seq, "batch": batch, "way": way, **measured}


def told(measured: dict[str, Any]) -> str:
    """Tokens per second and peak memory, for people."""
    rate = "out of memory" if measured["tokens_per_s"] is None else f"{measured['tokens_per_s']:9,.0f} tokens/s"
    return rate if measured["peak_gib"] is None else f"{rate}   peak {measured['peak_gib']:.1f} GiB"


def fresh(device: str) -> None:
    """Forget the last run's memory and its peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def clock(device: str) -> float:
    """Seconds, once the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: str) -> float | None:
    """The most memory that tensors held since `fresh`, GiB; None where nothing counts it."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


# ---------------------------------------------------------------------------------------------- the study


def choose(args: argparse.Namespace) -> list[Variant]:
    """The attentions, all with the modules' own head counts and dimensions, so that the model is the same."""
    found = [variant(name, args.heads) for name in dict.fromkeys(args.attention)]
    modules = [v for v in found if v.name not in PLAIN] or found
    shape = modules[0]
    for other in modules[1:]:
        if other.shape != shape.shape:
            stop(
                f"--attention {other.name}: its heads, head dimensions or window are not {shape.name}'s; a study has one model"
            )
    for module in modules:
        if any(args.dropout) and not module.dropout:
            stop(
                f"--dropout {max(args.dropout)}: {module.name} was built without dropout; its spec needs `dropout: true`"
            )
    if args.heads % shape.kv_heads:
        stop(f"--heads {args.heads}: expected a multiple of the {shape.kv_heads} K/V heads of {shape.name}")
    args.dtype = next((n for n in ("bf16", "fp32") if all(DTYPES[n] in v.dtypes for v in found)), None)
    if args.dtype is None:
        stop(f"--attention {' '.join(args.attention)}: they share neither bf16 nor fp32")
    return [dataclasses.replace(shape, name=v.name, attend=v.attend) for v in found]


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Every measurement and every run that the budget has room for; what is done is written after each."""
    started = time.perf_counter()
    chosen = choose(args)
    text = read_text(args.data, args.vocabulary)
    needs = {
        "--seq": args.seq + 1,
        "--seq and --batch": args.seq * args.batch + 1,
        "--speed": max((seq for _, seq in args.speed), default=0) + 1,
    }
    for tokens, name, options in ((text.train, "training", needs), (text.held, "validation", ["--seq"])):
        for option in options:
            if len(tokens) < needs[option]:
                stop(
                    f"--data {args.data}: {len(tokens)} tokens for {name}; expected {needs[option]} or more, for {option}"
                )
    print(
        f"{text.about['name']}: {text.about['files']} files, {len(text.train):,} tokens to train on, {len(text.held):,} to validate",
        flush=True,
    )
    per_step = args.seq * args.batch
    args.epoch_tokens = max(1, min(args.epoch_tokens, len(text.train) - 1) // per_step) * per_step
    args.val_tokens = max(1, min(args.val_tokens, len(text.held) - 1) // args.seq) * args.seq
    text = dataclasses.replace(text, train=text.train.to(args.device), held=text.held.to(args.device))
    shape = {"kv_heads": chosen[0].kv_heads, "qk": chosen[0].qk, "v": chosen[0].v, "window": chosen[0].window}
    results: dict[str, Any] = {
        "settings": {
            **{name: getattr(args, name) for name in SIZES},
            **shape,
            "lr": args.lr,
            "dtype": args.dtype,
            "checkpoint": args.checkpoint,
            "graph": args.graph,
        },
        "data": text.about,
        "environment": environment(args.device),
        "speed": [],
        "runs": [],
    }
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("speed", functools.partial(measure, args, text, v, dropout, size, way))
        for size, dropout, way, v in itertools.product(args.speed, args.dropout, lm_page.WAYS, chosen)
        if way != "graph" or args.device == "cuda"
    ]
    work += [
        ("runs", functools.partial(train, args, text, v, dropout, seed))
        for seed, dropout, v in itertools.product(args.seeds, args.dropout, chosen)
    ]
    longest = dict.fromkeys(("speed", "runs"), 0.0)
    for done, (kind, run) in enumerate(work):
        now = time.perf_counter()
        if args.budget and now - started + longest[kind] > args.budget:
            print(
                f"{len(work) - done} of {len(work)} runs and measurements left out: --budget {args.budget:g} has no room for another"
            )
            break
        results[kind].append(run())
        longest[kind] = max(longest[kind], time.perf_counter() - now)
        if args.out:
            write(results, args.out)
    return results


def environment(device: str) -> dict[str, str]:
    """The machine and the versions that the page names."""
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, Triton's interpreter"
    return {"device": where, "torch": torch.__version__, "triton": metadata.version("triton")}


def write(results: dict[str, Any], folder: Path) -> None:
    """results.json, whole or not at all, and curves.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json.new").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.json.new").replace(folder / "results.json")
    with (folder / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("attention", "dropout", "seed", "epoch", "perplexity"))
        for run in results["runs"]:
            rows.writerows(
                (run["attention"], run["dropout"], run["seed"], epoch, value)
                for epoch, value in enumerate(run["perplexity"])
            )


def size(text: str) -> tuple[int, int]:
    """(sequences, their length) of a word such as 16x512."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: expected sequences and their length, as in 16x512")
    return int(found[1]), int(found[2])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    start = ["naive", "sdpa", "causal_mqa"]
    option(
        "--attention",
        nargs="+",
        default=start,
        metavar="NAME",
        help=f"from naive, sdpa, generated/, folders of modules {start}",
    )
    option(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file, or a folder of text files [the sources of Python's standard library]",
    )
    option("--seeds", nargs="+", type=int, default=[0], metavar="N", help="a run of each attention for each [0]")
    option(
        "--dropout",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="P",
        help="of the attention's probabilities; a run for each [0]",
    )
    option("--checkpoint", action="store_true", help="train with activation checkpointing, block by block")
    option(
        "--graph",
        action="store_true",
        help="train with steps that are replayed from a CUDA graph: the host has next to no work",
    )
    option(
        "--speed",
        nargs="+",
        type=size,
        default=[],
        metavar="BxN",
        help="first measure speed and memory of steps of B sequences of N tokens: as they are, checkpointed, in a CUDA graph",
    )
    option(
        "--budget",
        type=float,
        metavar="S",
        help="start nothing that would end later than in S seconds, judged by the longest run yet",
    )
    option("--out", type=Path, metavar="DIR", help="write results.json and curves.csv to this folder, after every run")
    option(
        "--report",
        type=Path,
        metavar="PAGE",
        help="train nothing; write this page, and its plot beside it, from --from",
    )
    option(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="folders that --out wrote, of the same settings",
    )
    option("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    option(
        "--lr",
        type=float,
        default=1e-3,
        metavar="X",
        help="at its highest; a short warm-up, then a cosine to a tenth [0.001]",
    )
    for name, (cuda, cpu, what) in SIZES.items():
        option(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{what} [{cuda}; on a CPU {cpu}]")
    args = parser.parse_args(argv)
    for name, defaults in SIZES.items():
        value = getattr(args, name)
        least = 257 if name == "vocabulary" else 1
        if value is None:
            setattr(args, name, defaults[args.device == "cpu"])
        elif value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    for p in args.dropout:
        if not 0 <= p < 1:
            parser.error(f"--dropout {p:g}: expected a probability from 0 up to, not including, 1")
    if args.graph and (args.device == "cpu" or args.checkpoint):
        parser.error(f"--graph: expected a GPU, and no --checkpoint; the device is {args.device}")
    if bool(args.report) != bool(args.sources):
        parser.error(
            "--report and --from: expected both or neither; the page is written from the results of earlier runs"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        lm_page.write(lm_page.load(args.sources), args.report)
        return
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before a generated module imports Triton
    results = study(args)
    verdicts = lm_page.verdicts(results["runs"])
    for verdict in verdicts:
        print(verdict.sentence())
    if not all(v.agrees for v in verdicts if v.attention not in PLAIN):
        stop("a module did not learn as naive attention does")


if __name__ == "__main__":
    main()
