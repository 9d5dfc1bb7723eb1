"""The page and the plot of train_lm.py: whether each attention learns as naive attention does."""

from __future__ import annotations

import json
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoder import PLAIN, stop

from attngen.bench import figures

Run = dict[str, Any]
# How the steps run whose speed is measured.
MODES = {"kept": "as they are", "checkpointed": "checkpointed", "graph": "in a CUDA graph"}
COLOURS = ("bar", "deep", "name", "partial")  # names of the colours of modules
TITLE = {"fontsize": 10, "fontweight": "bold"}


@dataclass(frozen=True)
class Verdict:
    """The last perplexities of an attention and of naive attention, paired by seed, at one dropout."""

    attention: str
    dropout: float
    ours: tuple[float, ...]
    naive: tuple[float, ...]

    @property
    def difference(self) -> float:
        """The difference of the means."""
        return statistics.fmean(self.ours) - statistics.fmean(self.naive)

    @property
    def spread(self) -> float:
        """The largest perplexity of naive attention less the smallest."""
        return max(self.naive) - min(self.naive)

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.spread

    def sentence(self) -> str:
        return (
            f"{self.attention}, dropout {self.dropout:g}: perplexity {statistics.fmean(self.ours):.2f}, naive's "
            f"{statistics.fmean(self.naive):.2f}, {self.difference:+.2f}; naive's {len(self.naive)} seeds spread over "
            f"{self.spread:.2f}: {'agrees' if self.agrees else 'DIFFERS'}"
        )


def verdicts(runs: list[Run]) -> list[Verdict]:
    """A verdict for each attention and dropout with at least two seeds in common with naive attention."""
    found = []
    for dropout in unique(runs, "dropout"):
        last = {
            name: {r["seed"]: r["perplexity"][-1] for r in select(runs, name, dropout)}
            for name in unique(runs, "attention")
        }
        naive = last.pop("naive", {})
        for name, ours in last.items():
            seeds = [seed for seed in naive if seed in ours]
            if len(seeds) > 1:
                found.append(Verdict(name, dropout, tuple(ours[s] for s in seeds), tuple(naive[s] for s in seeds)))
    return found


def false_alarm(seeds: int) -> float:
    """The probability that two equal attentions are found to differ, if the perplexity of each run were only chance."""
    ours, naive = torch.randn(2, 200_000, seeds, generator=torch.Generator().manual_seed(0))
    return ((ours.mean(1) - naive.mean(1)).abs() > naive.amax(1) - naive.amin(1)).double().mean().item()


def unique(records: list[Run], key: str) -> list[Any]:
    """The distinct values of a key, in the order of their first record."""
    return list(dict.fromkeys(record[key] for record in records))


def select(runs: list[Run], attention: str, dropout: float) -> list[Run]:
    return [r for r in runs if (r["attention"], r["dropout"]) == (attention, dropout)]


def load(folders: list[Path]) -> dict[str, Any]:
    """The merged results of several folders, which must have the same settings, text and machine."""
    merged: dict[str, Any] = {}
    for folder in folders:
        try:
            results = json.loads((folder / "results.json").read_text())
        except (OSError, ValueError) as error:
            stop(f"--from {folder}: no results.json that can be read ({error})")
        if "graph" not in results["settings"]:
            stop(
                f"--from {folder}: its results are of an earlier train_lm.py, which did not say how steps ran; "
                f"measure them again"
            )
        for key in ("settings", "data", "environment"):
            if merged and results[key] != merged[key]:
                stop(f"--from {folder}: its {key} are not those of {folders[0]}, so their runs cannot be compared")
        if merged:
            results["speed"], results["runs"] = merged["speed"] + results["speed"], merged["runs"] + results["runs"]
        merged = results
    if not merged["runs"]:
        stop(f"--from {folders[0]}: no run has ended in it")
    return merged


def write(results: dict[str, Any], page: Path) -> None:
    """Write the page, and in the same folder the plots in both forms and the curves, under the same name."""
    drawn = plots(results, page.stem)
    for name, picture in drawn.items():
        page.with_name(name).write_text(picture)
    page.with_suffix(".json").write_text(curves(results))
    page.write_text(text(results, page.with_suffix(".svg").name))


def text(results: dict[str, Any], picture: str) -> str:
    """The page: the setting, the verdicts, the perplexities, speed and memory."""
    machine, runs = results["environment"], results["runs"]
    parts = [
        "# A language model trained with each attention",
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}. Written by "
        "`examples/train_lm.py --report`.",
        setting(results["settings"], results["data"]),
        f"![Validation perplexity by epoch, and its difference from naive attention's]({picture})",
        "## Does it learn as naive attention does?",
        *verdict_parts(runs),
        "## Perplexity by epoch",
        "Means over the seeds; epoch 0 is before training.",
        epoch_table(runs),
    ]
    if results["speed"]:
        parts += speed_parts(results["speed"])
    return "\n\n".join(parts) + "\n"


def setting(settings: dict[str, Any], data: dict[str, Any]) -> str:
    """The paragraph on the model, the text and the training."""
    heads = f"{settings['heads']} heads" + (
        "" if settings["kv_heads"] == settings["heads"] else f" ({settings['kv_heads']} of K and V)"
    )
    dims = str(settings["qk"]) if settings["qk"] == settings["v"] else f"{settings['qk']} and {settings['v']}"
    seen = "" if settings["window"] is None else f" that sees {settings['window']} tokens back"
    numbers = "bf16 autocast over fp32 weights" if settings["dtype"] == "bf16" else "fp32"
    checkpointing = "on" if settings["checkpoint"] else "off"
    graph = "; steps replayed from a CUDA graph" if settings["graph"] else ""
    return paragraph(
        f"A decoder of {settings['layers']} layers, {heads} of dimension {dims}, width",
        f"{settings['d_model']}{seen}, predicts the next token of {data['name']} ({data['files']} files,",
        f"{data['bytes'] / 1e6:.1f} MB, sha256 {data['sha256']}). A vocabulary of {settings['vocabulary']} makes that",
        f"{data['train_tokens']:,} tokens to train on and {data['held_tokens']:,} held out, of which every validation",
        f"reads the same {settings['val_tokens']:,}. {settings['epochs']} epochs of {settings['epoch_tokens']:,}",
        f"tokens in batches of {settings['batch']} sequences of {settings['seq']}; AdamW at {settings['lr']:g} after a",
        f"short warm-up, then a cosine to a tenth of it; gradients clipped to 1; {numbers}; activation checkpointing",
        f"{checkpointing}{graph}. Dropout is only on the attention's probabilities, and off in validation. A seed",
        "fixes the initial weights and the batches, for every attention alike; what dropout drops is each",
        "attention's own.",
    )


def verdict_parts(runs: list[Run]) -> list[str]:
    """The rule by which attentions agree, the verdicts, and the effect of dropout."""
    found = verdicts(runs)
    if not found:
        return ["No verdict: it takes naive attention and another, with two seeds or more in common."]
    chance = " and ".join(
        f"{false_alarm(n):.1%} of studies with {n} seeds" for n in sorted({len(v.naive) for v in found})
    )
    rule = paragraph(
        "Two attentions agree where the means over the seeds of their last validation perplexities differ by no more",
        "than naive attention's seeds do among themselves, largest less smallest. If seeds had nothing in common,",
        f"chance alone would have an attention differ from itself in {chance}; weights and batches in common make it",
        "rarer. SDPA is held to the rule as a control.",
    )
    effect = dropout_effect(runs)
    return [rule, verdict_table(found), *([effect] if effect else [])]


def speed_parts(records: list[Run]) -> list[str]:
    """The section on speed and memory."""
    return [
        "## Speed and memory",
        paragraph(
            "Whole training steps: forward, backward, clipping and optimizer. Peak memory is the most that tensors",
            "held, weights and optimizer included. Checkpointed, a block keeps nothing but its input, and is computed",
            "again in the backward pass. In a CUDA graph, a step is recorded once and replayed: where the host needs",
            "longer than the device, as in short steps of eager PyTorch, only these rates compare kernels.",
        ),
        speed_table(records),
    ]


def paragraph(*pieces: str) -> str:
    return textwrap.fill(" ".join(pieces), 120, break_long_words=False, break_on_hyphens=False)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def verdict_table(found: list[Verdict]) -> str:
    head = [
        "dropout",
        "attention",
        "perplexity",
        "naive's",
        "difference",
        "naive's spread",
        "agrees",
        "difference by seed",
    ]
    rows = []
    for v in found:
        mean = statistics.fmean(v.naive)
        pairs = ", ".join(f"{(a / b - 1):+.2%}" for a, b in zip(v.ours, v.naive))
        change = f"{v.difference:+.2f} ({v.difference / mean:+.2%})"
        name = f"**{v.attention}**" if v.attention not in PLAIN else v.attention
        numbers = [f"{statistics.fmean(v.ours):.2f}", f"{mean:.2f}", change, f"{v.spread:.2f} ({v.spread / mean:.2%})"]
        rows.append([f"{v.dropout:g}", name, *numbers, "yes" if v.agrees else "**no**", pairs])
    return table(head, rows)


def dropout_effect(runs: list[Run]) -> str:
    """The effect of dropout on each attention with runs with and without it; empty if there are none."""
    off, *rates = sorted(unique(runs, "dropout"))
    moved = []
    for name in unique(runs, "attention") if off == 0 else []:
        plain = {r["seed"]: r["perplexity"][-1] for r in select(runs, name, off)}
        for p in rates:
            changes = [r["perplexity"][-1] / plain[r["seed"]] - 1 for r in select(runs, name, p) if r["seed"] in plain]
            moved += [f"{name} {statistics.fmean(changes):+.2%} at {p:g}"] if changes else []
    return f"What dropout does to the perplexity: {', '.join(moved)}." if moved else ""


def epoch_table(runs: list[Run]) -> str:
    epochs = len(runs[0]["perplexity"])
    rows = []
    for dropout in unique(runs, "dropout"):
        for name in unique(runs, "attention"):
            if group := select(runs, name, dropout):
                means = [f"{statistics.fmean(r['perplexity'][i] for r in group):.2f}" for i in range(epochs)]
                rows.append([f"{dropout:g}", name, str(len(group)), *means, *speed(group)])
    return table(["dropout", "attention", "seeds", *map(str, range(epochs)), "tokens/s", "peak GiB"], rows)


def speed(group: list[Run]) -> list[str]:
    """The median of tokens/s and the largest peak memory of records, as two cells."""
    rates = [r["tokens_per_s"] for r in group if r["tokens_per_s"] is not None]
    peaks = [r["peak_gib"] for r in group if r["peak_gib"] is not None]
    return [f"{statistics.median(rates):,.0f}" if rates else "out of memory", f"{max(peaks):.1f}" if peaks else "-"]


def speed_table(records: list[Run]) -> str:
    """A row per size, dropout and attention, with the rate and the memory of each measured one of MODES."""
    groups: dict[tuple[Any, ...], dict[str, Run]] = {}
    for r in records:
        groups.setdefault((f"{r['batch']} x {r['seq']}", f"{r['dropout']:g}", r["attention"]), {})[r["way"]] = r
    modes = [mode for mode in MODES if mode in unique(records, "way")]
    head = ["batch x length", "dropout", "attention"]
    for mode in modes:
        head += [name if mode == "kept" else f"{name}, {MODES[mode]}" for name in ("tokens/s", "peak GiB")]
    return table(
        head,
        [
            [*key, *(cell for mode in modes for cell in speed([found[mode]] if mode in found else []))]
            for key, found in groups.items()
        ],
    )


def curves(results: dict[str, Any]) -> str:
    """The perplexities of all runs as JSON, from which `plots` draws."""
    keys = ("attention", "dropout", "seed", "perplexity")
    lines = [json.dumps({key: run[key] for key in keys}) for run in results["runs"]]
    return '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"


def plots(results: dict[str, Any], name: str) -> dict[str, str]:
    """Plots of perplexity by epoch, and below it the difference from naive's mean; a column per dropout. Returns the
    SVG of a light and of a dark form by file name; equal results give equal bytes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        stop('--report: the plot needs matplotlib; `pip install matplotlib`, or `pip install -e ".[plot]"`')
    rates, names = sorted(unique(results["runs"], "dropout")), unique(results["runs"], "attention")
    width = max(6.9, 0.7 + 3.1 * len(rates))

    def paint(figure: Any, look: figures.Theme) -> None:
        others = [n for n in names if n != "naive"]
        modules = [n for n in others if n not in PLAIN]
        colours = {"naive": "faint", "sdpa": "tight", **dict(zip(modules, COLOURS * len(modules)))}
        styles = {n: {"color": look[colours[n]], "linestyle": "--" if n == "sdpa" else "-"} for n in names}
        grid = figures.panels(figure, (2, len(rates)), (0.6, 0.1, 0.85, 0.5), (0.5, 0.6))
        figures.heading(figure, "Validation perplexity by epoch, one line per seed", 0.08, 0.2, **TITLE)
        for below in grid[1][1:]:
            below.sharey(grid[1][0])
        for dropout, above, below in zip(rates, *grid):
            _draw(results["runs"], dropout, above, below, styles)
        grid[0][0].set_title(f"perplexity, dropout {rates[0]:g}", fontweight="bold")
        grid[1][0].set_title("% from the mean of naive attention", fontweight="bold")
        figures.legend(figure, grid[0][0], names, 0.3)

    return figures.both(name, (width, 4.9), "Validation perplexity by epoch", paint)


def _draw(runs: list[Run], dropout: float, above: Any, below: Any, styles: dict[str, dict[str, Any]]) -> None:
    """Draw the runs at one dropout: perplexity above, the difference from naive's mean below."""
    epochs = range(len(runs[0]["perplexity"]))
    naive = select(runs, "naive", dropout)
    means = [statistics.fmean(r["perplexity"][i] for r in naive) for i in epochs] if naive else None
    for name, style in styles.items():
        for i, run in enumerate(select(runs, name, dropout)):
            above.plot(epochs, run["perplexity"], label=name if i == 0 else None, linewidth=1.3, **style)
            if means:
                shares = [100 * (a / b - 1) for a, b in zip(run["perplexity"], means)]
                below.plot(epochs, shares, linewidth=1.3, **style)
    above.set_title(f"dropout {dropout:g}", fontweight="bold")
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:,g}")
    above.set_xticks(list(epochs))
    below.set_xticks(list(epochs))
    below.set_xlabel("epoch")
