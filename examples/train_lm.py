"""Train a language model with naive attention, SDPA and generated modules, from the same seeds, and compare them.

    python examples/train_lm.py --attention naive sdpa causal_mqa        # five epochs of each
    python examples/train_lm.py --attention naive my/module --dropout 0 0.1 --seeds 0 1 --speed 16x512 8x4096 --out DIR
    torchrun --nproc-per-node 2 examples/train_lm.py --attention naive causal_mqa --context-parallel 2
    python examples/train_lm.py --report docs/lm-training.md --from DIR  # the page and its plot, from what --out wrote

Every tenth file of the text is held out for validation, or the end of a single file. Tokens are the most frequent
words of the training text; other words are spelt in bytes. A seed fixes the initial weights and the batches, the same
for all attentions, and the dropout of each. Without a GPU the kernels run in Triton's interpreter, which is slow, so
sizes are tiny there. With --context-parallel, modules train with the rows of each sequence on several ranks; naive
attention and SDPA train as on one, on each rank.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_page
import lm_ranks
import torch
from decoder import DTYPES, PLAIN, Variant, stop, variant
from lm_text import Text, read_text
from lm_training import measure, train

SIZES: dict[str, tuple[int, int, str]] = {  # the default of an option on a GPU and on a CPU, and its help
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


def choose(args: argparse.Namespace) -> list[Variant]:
    """The attentions, all with the head counts and head dimensions of the modules, so that all train the same model."""
    found = [variant(name, args.heads) for name in dict.fromkeys(args.attention)]
    modules = [v for v in found if v.name not in PLAIN] or found
    shape = modules[0]
    for other in modules[1:]:
        if other.shape != shape.shape:
            stop(
                f"--attention {other.name}: its heads, head dimensions or window are not {shape.name}'s; a study "
                f"has one model"
            )
    for module in modules:
        if any(args.dropout) and not module.dropout:
            stop(
                f"--dropout {max(args.dropout)}: {module.name} was built without dropout; its spec needs "
                f"`dropout: true`"
            )
    if args.heads % shape.kv_heads:
        stop(f"--heads {args.heads}: expected a multiple of the {shape.kv_heads} K/V heads of {shape.name}")
    args.dtype = next((n for n in ("bf16", "fp32") if all(DTYPES[n] in v.dtypes for v in found)), None)
    if args.dtype is None:
        stop(f"--attention {' '.join(args.attention)}: they share neither bf16 nor fp32")
    return [dataclasses.replace(shape, name=v.name, attend=v.attend) for v in found]


def prepare_text(args: argparse.Namespace) -> Text:
    """The text on the device; epochs and validations become as long as the text allows, in whole steps."""
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
                    f"--data {args.data}: {len(tokens)} tokens for {name}; expected {needs[option]} or more, "
                    f"for {option}"
                )
    print(
        f"{text.about['name']}: {text.about['files']} files, {len(text.train):,} tokens to train on, "
        f"{len(text.held):,} to validate",
        flush=True,
    )
    per_step = args.seq * args.batch
    args.epoch_tokens = max(1, min(args.epoch_tokens, len(text.train) - 1) // per_step) * per_step
    args.val_tokens = max(1, min(args.val_tokens, len(text.held) - 1) // args.seq) * args.seq
    return dataclasses.replace(text, train=text.train.to(args.device), held=text.held.to(args.device))


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Make all measurements and runs that fit the budget, and write the results after each."""
    started = time.perf_counter()
    chosen = choose(args)
    text = prepare_text(args)
    shape = {"kv_heads": chosen[0].kv_heads, "qk": chosen[0].qk, "v": chosen[0].v, "window": chosen[0].window}
    results: dict[str, Any] = {
        "settings": {
            **{name: getattr(args, name) for name in SIZES},
            **shape,
            "lr": args.lr,
            "dtype": args.dtype,
            "checkpoint": args.checkpoint,
            "graph": args.graph,
            **({"context_parallel": args.context_parallel} if args.mesh else {}),
        },
        "data": text.about,
        "environment": environment(args.device),
        "speed": [],
        "runs": [],
    }
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("speed", functools.partial(measure, args, text, v, dropout, size, mode))
        for size, dropout, mode, v in itertools.product(args.speed, args.dropout, lm_page.MODES, chosen)
        if mode != "graph" or (args.device == "cuda" and args.mesh is None)
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
                f"{len(work) - done} of {len(work)} runs and measurements left out: --budget {args.budget:g} has "
                f"no room for another"
            )
            break
        results[kind].append(run())
        longest[kind] = max(longest[kind], time.perf_counter() - now)
        if args.out and (args.mesh is None or args.mesh.get_local_rank() == 0):
            write(results, args.out)
    return results


def environment(device: str) -> dict[str, str]:
    """The device and the versions that the page names."""
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, Triton's interpreter"
    return {"device": where, "torch": torch.__version__, "triton": metadata.version("triton")}


def write(results: dict[str, Any], folder: Path) -> None:
    """Write results.json, atomically, and curves.csv."""
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
    """(sequences, their length) from an argument such as 16x512."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: expected sequences and their length, as in 16x512")
    return int(found[1]), int(found[2])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except those of SIZES."""
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
        help=(
            "first measure speed and memory of steps of B sequences of N tokens: as they are, checkpointed, in a "
            "CUDA graph"
        ),
    )
    option(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="train modules with each sequence on N ranks, which torchrun starts [1]",
    )
    option("--out", type=Path, metavar="DIR", help="write results.json and curves.csv to this folder, after every run")
    add_report_options(parser)
    option("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    option(
        "--lr",
        type=float,
        default=1e-3,
        metavar="X",
        help="at its highest; a short warm-up, then a cosine to a tenth [0.001]",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "--budget",
        type=float,
        metavar="S",
        help="start nothing that would end later than in S seconds, judged by the longest run yet",
    )
    option(
        "--report",
        type=Path,
        metavar="PAGE",
        help="train nothing; write this page, and its plot in the same folder, from --from",
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


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    for name, (cuda, cpu, meaning) in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"{meaning} [{cuda}; on a CPU {cpu}]")
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
    if args.context_parallel < 1 or args.context_parallel > 1 and (args.graph or args.budget):
        parser.error(
            f"--context-parallel {args.context_parallel}: expected 1 or more, and with more no --graph and no --budget"
        )
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
    args.mesh = lm_ranks.start(args.context_parallel, args.device) if args.context_parallel > 1 else None
    results = study(args)
    verdicts = lm_page.verdicts(results["runs"])
    for verdict in verdicts:
        print(verdict.sentence())
    if not all(v.agrees for v in verdicts if v.attention not in PLAIN):
        stop("a module did not learn as naive attention does")


if __name__ == "__main__":
    main()
