"""Generated modules beside compiled FlexAttention, variant by variant, in one run on one GPU.

    python benchmarks/flex.py [--only causal documents] [--n 8192] [--rounds 5] [--quick] [--no-first] [--no-memory] [--out DIR]

bf16, B = 2, 16 query heads over 4 K/V heads, D = 128. Each variant has two processes with empty caches of compiled kernels, one after
the other. In each the clock of the first result starts when torch and Triton are imported, the GPU has a context and the inputs lie on
it; it covers the import of the module (written before; Flex: of flex_attention, and create_block_mask as it is), all compilation, one
forward and one backward. The second process goes on: results of both beside each other, then their times, the two in turn in every
round. A round is a median of CUDA-event times with the L2 flushed (triton.testing.do_bench); shown are medians of rounds and their
spread, (largest - smallest) / median. TFLOP/s count 4 D for each visible pair of query and key forward and 2.5 times that backward, for
both.

Flex is torch.compile(flex_attention, dynamic=False) with default options and default blocks of 128. Its forward is timed with the block
mask at hand, ours with the plan at hand where there is one (a call with ids, which makes one: below the table). What a mask for a new
batch takes is wall time between synchronisations, with create_block_mask compiled and as it is. Flex's backward is
compiled with torch._functorch.config.donated_buffer off, without which no backward can run twice on one graph.

Biases are learned: backward times are those of q, k, v and the bias. Ours sum its gradient in a fixed order unless the title says
atomics; Flex's add to it atomically, and run with two stages, because its three need more shared memory than an H200 has.

Memory: the peak of mask, forward and backward at --memory-n rows, B = 1, documents of 1000, after everything was compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import triton

from attngen.bench.run import build
from attngen.bench.timing import roofs
from attngen.spec import parse_spec
from attngen.testing import load_module

Mod = Callable[..., Any]  # a mask_mod or score_mod
BATCH, HEADS, KV_HEADS, DIM = 2, 16, 4, 128
DEVICE = "cuda"
DOCUMENT = 1000  # rows of a document
LIMIT_S = 150  # of one process
MOST = 2e-2  # relative difference of results at which a run fails
RESULTS = ("out", "dq", "dk", "dv", "dbias")
DISTANCE = 128  # of the relative bias


@dataclass(frozen=True)
class Variant:
    """One attention: as a spec says it, and as Flex's functions do.

    `sees` makes the mask_mod from document ids, `score_mod` a score_mod from the learned bias, None where there is none.
    """

    name: str
    title: str
    mask: Any
    sees: Callable[[torch.Tensor], Mod]
    score: tuple[Any, ...] = ()
    score_mod: Callable[[Any], Mod] | None = None
    bias: str = ""  # what our call names the learned one
    more: tuple[tuple[str, Any], ...] = ()  # keys of the spec

    @property
    def by_batch(self) -> bool:
        return self.name in ("documents", "unsorted", "data")

    def spec(self) -> str:
        """The spec's text: JSON is YAML."""
        spec = {"name": f"flex_{self.name}", "heads": {"sharing": "gqa"}, "head_dim": DIM, "dtype": "bf16", "mask": self.mask}
        return json.dumps({**spec, **({"score": list(self.score)} if self.score else {}), **dict(self.more)})

    def inputs(self, ids: torch.Tensor, bias: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Arguments of our call beside q, k and v."""
        given = {"documents": "document_ids", "unsorted": "document_ids", "data": "ids"}
        return dict(zip((given.get(self.name, self.bias),), (ids,) if self.by_batch else bias))

    def planned(self, module: Any, leaves: list[torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
        """The same with the mask at hand."""
        if self.name == "data":
            return {"ids": ids, "plan": module.attention.plan(*leaves[:2], ids=ids)}
        return {"plan": module.attention.plan(ids, ids.shape[1])} if self.by_batch else self.inputs(ids, leaves[3:])


def variants(window: int = 1024, prefix: int = 1024, sinks: int = 4, cap: float = 30.0, heads: int = HEADS) -> dict[str, Variant]:
    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    def documents(ids: torch.Tensor) -> Mod:
        def same(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (ids[b, q] == ids[b, kv]) & (q >= kv)

        return same

    def prefixed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < prefix) | (q >= kv)

    def streaming(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((q - kv < window) | (kv < sinks))

    def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= 2048) & ((q - kv) % 4 == 0)

    def softcap(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def alibi(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - torch.exp2(-8.0 * (h + 1) / heads) * (q - kv).abs()

    def relative(bias: torch.Tensor) -> Mod:
        return lambda score, b, h, q, kv: score + bias[h, (q - kv).clamp(-DISTANCE, DISTANCE) + DISTANCE]

    left = {"sliding_window": {"left": window - 1}}
    same = {"expr": "ids[b, q_idx] == ids[b, kv_idx]", "params": {"ids": {"tensor": ["B", "Nk"], "dtype": "int32"}}}
    table = ({"relative_bias": {"max_distance": DISTANCE}},)
    unordered = (("backward", {"deterministic": False}),)
    stream = {"all_of": ["causal", {"any_of": [left, {"sink_tokens": {"count": sinks}}]}]}
    found = (
        Variant("causal", "GQA causal", "causal", lambda ids: causal),
        Variant("window", f"window {window}", {"sliding_window": {"left": window - 1, "right": 0}}, lambda ids: near),
        Variant("documents", f"documents of {DOCUMENT}", {"all_of": ["causal", {"document": {"sorted": True}}]}, documents),
        Variant("unsorted", f"documents of {DOCUMENT}, in any order", {"all_of": ["causal", "document"]}, documents),
        Variant("data", f"documents of {DOCUMENT}, as an expression", {"all_of": ["causal", same]}, documents),
        Variant("softcap", f"softcap {cap:g}", "causal", lambda ids: causal, ({"softcap": cap},), lambda bias: softcap),
        Variant("alibi", "ALiBi", "causal", lambda ids: causal, ("alibi",), lambda bias: alibi),
        Variant("prefix", f"prefix-LM {prefix}", {"prefix_lm": {"length": prefix}}, lambda ids: prefixed),
        Variant("streaming", f"streaming {sinks} + {window}", stream, lambda ids: streaming),
        Variant("dilated", "dilated 4, 2048 away at most", {"dilated": {"step": 4, "reach": 2048}}, lambda ids: dilated),
        Variant("relative", f"relative bias {DISTANCE}", "causal", lambda ids: causal, table, relative, "relative_bias"),
        Variant("atomic", f"relative bias {DISTANCE}, atomics", "causal", lambda ids: causal, table, relative, "relative_bias", unordered),
    )
    return {v.name: v for v in found}


def visible_pairs(mask_mod: Mod, n: int, device: str, rows: int = 1024) -> int:
    """Pairs of query and key that the mask lets see each other, of one head of the first sequence."""
    zero, kv = torch.zeros((), device=device, dtype=torch.long), torch.arange(n, device=device)[None]
    chunks = (torch.arange(i, min(n, i + rows), device=device)[:, None] for i in range(0, n, rows))
    return sum(int(mask_mod(zero, zero, q, kv).expand(len(q), n).sum()) for q in chunks)


def document_ids(batch: int, n: int, device: str, size: int = DOCUMENT) -> torch.Tensor:
    return (torch.arange(n, device=device, dtype=torch.int32) // size).repeat(batch, 1)


def draw(variant: Variant, batch: int, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """([q, k, v] and the learned bias if there is one, dO)."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, grad = (torch.randn(batch, h, n, DIM, device=DEVICE, dtype=torch.bfloat16, generator=generator) for h in heads)
    bias = torch.randn(HEADS, 2 * DISTANCE + 1, device=DEVICE, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, *([bias] if variant.bias else []))], grad


def flex_call(variant: Variant, leaves: list[torch.Tensor], block_mask: Any) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    score_mod = variant.score_mod and variant.score_mod(leaves[-1])
    options = {"bwd_num_stages": 2} if variant.bias else None
    return lambda: compiled(*leaves[:3], score_mod=score_mod, block_mask=block_mask, enable_gqa=True, kernel_options=options)


def make_block_mask(variant: Variant, ids: torch.Tensor, make: Callable[..., Any] | None = None) -> Any:
    """Flex's block mask, by create_block_mask or a compiled one."""
    from torch.nn.attention.flex_attention import create_block_mask

    n = ids.shape[1]
    return (make or create_block_mask)(variant.sees(ids), ids.shape[0] if variant.by_batch else None, None, n, n, device=ids.device.type)


def compiled_maker() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)  # what create_block_mask(_compile=True) does


def wall(function: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of a call between synchronisations."""
    found = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found[3:])


# ------------------------------------------------------------------------------------------------- in a process of its own


def first_result(make_call: Callable[[], Callable[[], torch.Tensor]], leaves: list[torch.Tensor], grad: torch.Tensor) -> float:
    """Seconds to the end of the first forward and backward; gradients are thrown away."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.autograd.backward(make_call()(), grad)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    for x in leaves:
        x.grad = None
    return seconds


def median(call: Callable[[], object], calls: int = 15) -> float:
    """Milliseconds on the device."""
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    spans = []
    for _ in range(calls + 3):
        flush.zero_()
        torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host gets ahead
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans[3:])


def host(call: Callable[[], object], calls: int = 30) -> float:
    """Microseconds that the host takes to launch a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / calls * 1e6


def compare(
    variant: Variant, module: Any, leaves: list[torch.Tensor], grad: torch.Tensor, ids: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Differences of results, and milliseconds of every round."""
    inputs = variant.planned(module, leaves, ids)
    forward = {"ours": lambda: module.attention(*leaves[:3], **inputs), "flex": flex_call(variant, leaves, make_block_mask(variant, ids))}
    outs = {who: call() for who, call in forward.items()}

    def gradients(who: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outs[who], leaves, grad, retain_graph=True)

    pairs = zip((outs["ours"], *gradients("ours")), (outs["flex"], *gradients("flex")))
    differences = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    found: dict[str, Any] = {"differences": dict(zip(RESULTS, differences))}
    times: dict[str, list[float]] = {}
    for i in range(rounds):
        for direction in ("fwd", "bwd"):
            for who in ("ours", "flex")[:: 1 - i % 2 * 2]:
                call = forward[who] if direction == "fwd" else lambda who=who: gradients(who)
                times.setdefault(f"{who}_{direction}", []).append(median(call))
    if variant.by_batch:
        times["ids_fwd"] = [median(lambda: module.attention(*leaves[:3], **variant.inputs(ids, []))) for _ in range(rounds)]
    return {**found, "ms": times, "host_us": {who: host(call) for who, call in forward.items()}}


def peak(who: str, variant: Variant, folder: Path, n: int) -> dict[str, Any]:
    """Bytes at the peak of mask, forward and backward, and of the mask alone."""
    leaves, grad = draw(variant, 1, n)
    ids = document_ids(1, n, DEVICE)
    module = load_module(folder) if who == "ours" else None
    maker = None if module else compiled_maker()

    def prepare() -> Any:
        return variant.planned(module, leaves, ids) if module else make_block_mask(variant, ids, maker)

    def whole() -> None:
        out = module.attention(*leaves[:3], **variant.inputs(ids, leaves[3:])) if module else flex_call(variant, leaves, prepare())()
        torch.autograd.backward(out, grad)
        for x in leaves:
            x.grad = None

    def most(function: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    whole()
    gc.collect()
    held = torch.cuda.memory_allocated()
    inputs = sum(x.numel() * x.element_size() for x in (*leaves, grad))
    found = {"inputs": inputs, "held": held, "mask": most(prepare) - held, "peak": most(whole)}
    return {**found, "above": found["peak"] - inputs, "mask_ms": wall(prepare, 5)}


def child(args: argparse.Namespace) -> None:
    """One process: waits for a line, measures, writes result.json after every step."""
    warnings.filterwarnings("ignore")
    variant, here = variants()[args.only[0]], args.folder
    who, part = args.child.split("-")
    found: dict[str, Any] = {}

    def save(**more: Any) -> None:
        found.update(more)
        (here / "result.json").write_text(json.dumps(found))

    torch._functorch.config.donated_buffer = part == "memory"
    torch.zeros(1, device=DEVICE).add_(1).item()
    if part == "first":
        leaves, grad = draw(variant, BATCH, args.n)
        ids = document_ids(BATCH, args.n, DEVICE)
    (here / "ready").touch()
    if not sys.stdin.readline():
        return
    try:
        if part == "memory":
            save(**peak(who, variant, args.module, args.memory_n))
            return
        if who == "ours":
            save(
                first=first_result(
                    lambda: lambda: load_module(args.module).attention(*leaves[:3], **variant.inputs(ids, leaves[3:])), leaves, grad
                )
            )
            return
        save(first=first_result(lambda: flex_call(variant, leaves, make_block_mask(variant, ids)), leaves, grad))
        if args.caches:
            os.environ["TRITON_CACHE_DIR"] = str(args.caches)  # where our kernels are compiled already
        module = load_module(args.module)
        save(pairs=visible_pairs(variant.sees(ids), args.n, DEVICE) * BATCH * HEADS)
        save(**compare(variant, module, leaves, grad, ids, args.rounds))
        save(ours_mask=wall(lambda: variant.planned(module, leaves, ids)) if variant.by_batch else 0.0)
        save(flex_eager_mask=wall(lambda: make_block_mask(variant, ids)))
        maker = compiled_maker()
        save(flex_mask=wall(lambda: make_block_mask(variant, ids, maker)))
    except torch.OutOfMemoryError as error:
        save(error=f"out of memory: {str(error).splitlines()[0]}")


# ------------------------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Child:
    folder: Path
    process: subprocess.Popen[bytes]

    def finish(self) -> dict[str, Any]:
        """Let it measure; what it found, with `error` where it did not get to the end."""
        try:
            assert self.process.stdin
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()
            code = self.process.wait(LIMIT_S)
            error = f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"no end within {LIMIT_S} s"
        except OSError as problem:
            error = f"died before it was asked ({problem})"
        self.stop()
        path = self.folder / "result.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if not error:
            return found
        log = (self.folder / "log").read_text(errors="replace").strip()
        last = next((x for x in reversed(log.splitlines()) if "Error" in x), log[-200:])
        return {**found, "error": f"{error}: {last}" if last else error, "log": log[-4000:]}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(kind: str, variant: Variant, args: argparse.Namespace, work: Path, ours: Child | None = None) -> Child:
    """A process that imports torch and waits; its caches are empty."""
    folder = work / f"{kind}-{variant.name}"
    folder.mkdir()
    command = [sys.executable, __file__, "--child", kind, "--only", variant.name, "--folder", str(folder)]
    command += ["--module", str(work / f"flex_{variant.name}")] + (["--caches", str(ours.folder / "triton")] if ours else [])
    command += [f"--{key.replace('_', '-')}={getattr(args, key)}" for key in ("n", "memory_n", "rounds")]
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **caches})
    return Child(folder, process)


def await_ready(children: list[Child]) -> None:
    """Until all have imported torch, or died."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(c.process.poll() is None and not (c.folder / "ready").exists() for c in children):
        time.sleep(0.1)


def summary(title: str, n: int, ours: dict[str, Any], flex: dict[str, Any], built: float) -> dict[str, Any]:
    """One variant: medians, spreads, rates."""
    line: dict[str, Any] = {"variant": title, "n": n, "build_s": built, "errors": [r["error"] for r in (ours, flex) if "error" in r]}
    line["logs"] = [r["log"] for r in (ours, flex) if "log" in r]
    line["first_s"] = {"ours": ours.get("first"), "flex": flex.get("first")}
    line["mask_ms"] = {"ours": flex.get("ours_mask"), "flex": flex.get("flex_mask"), "flex_eager": flex.get("flex_eager_mask")}
    line["pairs"], line["differences"] = flex.get("pairs"), flex.get("differences", {})
    line["rounds_ms"] = flex.get("ms", {})
    line["ms"] = {key: statistics.median(x) for key, x in line["rounds_ms"].items()}
    line["host_us"] = flex.get("host_us", {})
    line["spread"] = {key: (max(x) - min(x)) / line["ms"][key] for key, x in line["rounds_ms"].items()}
    line["tflops"] = {key: 4 * DIM * line["pairs"] * (2.5 if key.endswith("bwd") else 1) / ms / 1e9 for key, ms in line["ms"].items()}
    line["errors"] += [f"{key} differs by {d:.1e}" for key, d in line["differences"].items() if not d <= MOST]
    return line


def shown(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(found: dict[str, Any]) -> str:
    """Markdown of everything found so far."""
    lines, notes = found["variants"], []
    sides = [cell for d in ("fwd", "bwd") for cell in (f"ours {d} ms (TFLOP/s)", f"Flex {d}", "ours / Flex")]
    speed = [["variant", "visible", *sides, "spread"]]
    rest = [
        [
            "variant",
            "ours first result s",
            "Flex",
            "ours mask ms",
            "Flex compiled",
            "Flex eager",
            "ours host us",
            "Flex",
            *(f"{r} differs" for r in RESULTS),
        ]
    ]
    for line in lines:
        ms, rate, cells = line["ms"], line["tflops"], []
        for direction in ("fwd", "bwd"):
            ours, flex = (f"{who}_{direction}" for who in ("ours", "flex"))
            cells += [f"{ms[key]:.3f} ({rate[key]:.0f})" if key in ms else "-" for key in (ours, flex)]
            cells.append(f"{rate[ours] / rate[flex]:.2f}" if ours in ms and flex in ms else "-")
        share = line["pairs"] and f"{line['pairs'] / (BATCH * HEADS * line['n'] ** 2):.1%}"
        speed.append([line["variant"], share or "-", *cells, f"{max(line['spread'].values()):.1%}" if ms else "-"])
        masks = [shown(line["mask_ms"][who], ".3f") for who in ("ours", "flex", "flex_eager")]
        host_us = [shown(line["host_us"].get(who), ".0f") for who in ("ours", "flex")]
        differences = [shown(line["differences"].get(r), ".1e") for r in RESULTS]
        rest.append([line["variant"], *(shown(line["first_s"][who], ".1f") for who in ("ours", "flex")), *masks, *host_us, *differences])
        if "ids_fwd" in ms:
            notes.append(f"{line['variant']}: ours fwd from ids, without a plan: {ms['ids_fwd']:.3f} ms")
        notes += [f"{line['variant']}: FAILED: {error}" for error in line["errors"]]
    text = [*found["heading"], "", table(speed), "", table(rest)]
    if found["memory"]:
        memory = [["memory", "rows", "peak GiB", "above q, k, v, dO", "mask alone", "mask ms"]]
        for who, m in found["memory"].items():
            gib = [shown(m[key] / 2**30 if key in m else None, ".3f") for key in ("peak", "above", "mask")]
            memory.append([who, str(found["memory_n"]), *gib, shown(m.get("mask_ms"))])
            notes += [f"memory, {who}: FAILED: {m['error']}"] if "error" in m else []
        text += ["", table(memory)]
    return "\n".join([*text, *([""] if notes else []), *(f"- {note}" for note in notes)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = variants()
    parser.add_argument("--only", nargs="+", default=list(known), choices=list(known), metavar="NAME", help=", ".join(known))
    parser.add_argument("--n", type=int, default=8192, help="rows of q and k")
    parser.add_argument("--memory-n", type=int, default=131072, help="the same where memory is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2048 rows, 2 rounds, memory at 16384 rows")
    parser.add_argument("--no-first", action="store_true", help="without the process that times our first result; Flex's is left out too")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for flex.json and flex.md; $OUT if that is set")
    for name in ("--child", "--folder", "--module", "--caches"):
        parser.add_argument(name, type=str if name == "--child" else Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    if args.quick:
        args.n, args.rounds, args.memory_n = 2048, 2, 16384
    return compare_all([known[name] for name in dict.fromkeys(args.only)], known["documents"], args)


def compare_all(chosen: list[Variant], documents: Variant, args: argparse.Namespace) -> None:
    began = time.monotonic()
    found: dict[str, Any] = {"heading": [], "variants": [], "memory": {}, "memory_n": args.memory_n}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {text}", flush=True)

    def save() -> None:
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            (Path(args.out) / "flex.json").write_text(json.dumps(found, indent=1))
            (Path(args.out) / "flex.md").write_text(report(found))

    children: list[Child] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        try:
            firsts, pairs, memory, built = {}, {}, {}, {}
            for v in chosen:  # all start at once, and then wait for their turn
                firsts[v.name] = None if args.no_first else start("ours-first", v, args, work)
                pairs[v.name] = start("flex-first", v, args, work, firsts[v.name])
            for who in () if args.no_memory else ("ours", "flex"):
                memory[who] = start(f"{who}-memory", documents, args, work)
            children += [c for c in (*firsts.values(), *pairs.values(), *memory.values()) if c]
            for v in {v.name: v for v in (*chosen, *([documents] if memory else []))}.values():
                started = time.perf_counter()
                build([parse_spec(v.spec())], work)
                built[v.name] = time.perf_counter() - started
            say(f"wrote {len(built)} modules in {sum(built.values()):.1f} s")
            await_ready(children)
            say("all processes are ready")
            found_roofs = roofs()
            product, copy = found_roofs.matmul_tflops, found_roofs.copy_tb_s
            torch.cuda.empty_cache()
            found |= {"matmul_tflops": product, "copy_tb_s": copy, "torch": torch.__version__, "triton": triton.__version__}
            found["heading"] = [
                f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
                f"roofs: {product:.0f} TFLOP/s bf16 product, {copy:.2f} TB/s copy",
                f"B = {BATCH}, {HEADS} query heads, {KV_HEADS} K/V heads, N = {args.n}, D = {DIM}, bf16",
            ]
            for v in chosen:
                first = firsts[v.name]
                ours = first.finish() if first else {}
                if first:
                    say(f"{v.title}: ours, first result {shown(ours.get('first'), '.1f')} s {ours.get('error', '')}")
                flex = pairs[v.name].finish()
                if not first:
                    flex.pop("first", None)
                line = summary(v.title, args.n, ours, flex, built[v.name])
                found["variants"].append(line)
                save()
                ms = ", ".join(f"{key} {x:.3f} ms" for key, x in line["ms"].items())
                differ = ", ".join(f"{key} {x:.1e}" for key, x in line["differences"].items())
                say(f"{v.title}: Flex, first result {shown(line['first_s']['flex'], '.1f')} s; {ms}; differences {differ or 'unknown'}")
                for error in line["errors"]:
                    say(f"{v.title}: FAILED: {error}")
            for who, c in memory.items():
                found["memory"][who] = c.finish()
                save()
                say(f"memory, {who}: { {key: x for key, x in found['memory'][who].items() if key != 'log'} }")
        finally:
            for c in children:
                c.stop()
    save()
    print(f"\n{report(found)}", flush=True)
    if any(line["errors"] for line in found["variants"]) or any("error" in m for m in found["memory"].values()):
        sys.exit("failed: see above")


if __name__ == "__main__":
    main()
