"""What dropout costs, and what block sparsity saves: generated modules beside SDPA's FLASH backend, in one run on one GPU.

    python benchmarks/variants.py [--out results.json]

Dropout: forward and backward at p = 0.1 over p = 0 of the same module, over a module without dropout, and FLASH's own ratio beside
them. D = 128, N = 4k, B * N = 16k tokens, H * D = 2048, bf16. Block sparsity: N = 16k, D = 128, 16 heads, blocks of 128, a share s
of the blocks of every row and column, beside the bytes that the loads and stores of the IR come to (attngen/analysis/io.py) and
s N^2 d^2 / M. Times are medians of CUDA-event times with the L2 flushed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from attngen.analysis.numbers import emitted_bytes
from attngen.analysis.roofline import Problem
from attngen.emit.files import write_module
from attngen.emit.render import render
from attngen.ir.graph import Module
from attngen.ir.interface import DIRECTIONS
from attngen.passes.pipeline import lower
from attngen.spec import parse_spec
from attngen.testing import load_module

SHARES = (1, 2, 4, 8, 16)  # one block in so many


def build(text: str, folder: Path) -> tuple[Module, ModuleType]:
    """The module of a spec, lowered and imported."""
    spec = parse_spec(text)
    module = lower(spec)
    write_module(render(module), folder / spec.name)
    return module, load_module(folder / spec.name)


def median(function: object) -> float:
    """Milliseconds."""
    return float(triton.testing.do_bench(function, warmup=25, rep=120, return_mode="median"))


def times(call: object, qkv: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward of call(q, k, v)."""
    forward = median(lambda: call(*qkv))
    out = call(*qkv)
    return forward, median(lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True))


def draw(batch: int, heads: int, rows: int, dim: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(batch, heads, rows, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


def dropout(folder: Path, dims: tuple[int, ...] = (128, 64), rows: int = 4096) -> list[dict[str, Any]]:
    """One line per head dimension and mask."""
    found = []
    for dim in dims:
        for mask in ("causal", "none"):
            plain = build(f"name: plain_{mask}_{dim}\nhead_dim: {dim}\nmask: {mask}\ndtype: bf16\n", folder)[1]
            drops = build(f"name: drops_{mask}_{dim}\nhead_dim: {dim}\nmask: {mask}\ndtype: bf16\ndropout: true\n", folder)[1]
            qkv, grad = draw(16384 // rows, 2048 // dim, rows, dim)

            def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, mask: str = mask) -> torch.Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", dropout_p=p)

            line: dict[str, Any] = {"dim": dim, "mask": mask, "rows": rows}
            line["plain"] = times(plain.attention, qkv, grad)
            for p in (0.0, 0.1):
                line[f"ours {p}"] = times(lambda *x, p=p, drops=drops: drops.attention(*x, dropout_p=p), qkv, grad)
                line[f"flash {p}"] = times(lambda *x, p=p, flash=flash: flash(*x, p), qkv, grad)
            found.append(line)
            parts = (slice(0, 1), slice(1, 2), slice(0, 2))  # forward, backward, both
            cells = [f"{dim}", mask, f"{sum(line['ours 0.0']) / sum(line['plain']):.2f}"]
            cells += [f"{sum(line[f'{who} 0.1'][i]) / sum(line[f'{who} 0.0'][i]):.2f}" for who in ("ours", "flash") for i in parts]
            print(f"| {' | '.join(cells)} |", flush=True)
    return found


def blocks(folder: Path, rows: int = 16384, heads: int = 16, dim: int = 128, block: int = 128) -> list[dict[str, Any]]:
    """One line per share."""
    module, sparse = build(f"name: sparse_{dim}\nhead_dim: {dim}\nmask: {{block_sparse: {{block: {block}}}}}\ndtype: bf16\n", folder)
    plain = build(f"name: dense_{dim}\nhead_dim: {dim}\nmask: none\ndtype: bf16\n", folder)[1]
    qkv, grad = draw(1, heads, rows, dim)
    base = times(plain.attention, qkv, grad)
    print(f"module without blocks: {base[0]:.2f} ms forward, {base[1]:.2f} ms backward")
    tiles = torch.arange(-(-rows // block), device="cuda")
    found = []
    for share in SHARES:
        mask = (tiles[:, None] + tiles) % share == 0
        plan = sparse.attention.plan(mask)
        forward, backward = times(lambda *x, plan=plan: sparse.attention(*x, block_mask=plan), qkv, grad)
        planning = median(lambda mask=mask: sparse.attention.plan(mask))
        problem = Problem(1, heads, heads, rows, rows)
        moved = [emitted_bytes(module, direction, "sm90", problem, 1 / share) for direction in DIRECTIONS]
        law = heads * rows**2 * dim**2 / share / (227 * 1024 / 2) * 2
        found.append({"share": share, "forward": forward, "backward": backward, "plan": planning, "bytes": moved, "law": law})
        faster = forward, found[0]["forward"] / forward, backward, found[0]["backward"] / backward
        cells = [f"1/{share}", *(f"{x:.2f}" for x in faster), f"{planning * 1e3:.0f}", *(f"{x / 1e9:.2f}" for x in (*moved, law))]
        print(f"| {' | '.join(cells)} |", flush=True)
    return found


def heading(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n")
    with tempfile.TemporaryDirectory() as folder:
        print(
            "| D | mask | p = 0 over no dropout | ours fwd | bwd | both | FLASH fwd | bwd | both |\n|---|---|---|---|---|---|---|---|---|"
        )
        found = {"dropout": dropout(Path(folder))}
        print()
        heading(
            "s", "forward ms", "times faster", "backward ms", "times faster", "plan us", "forward GB", "backward GB", "s N^2 d^2 / M GB"
        )
        found["blocks"] = blocks(Path(folder))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
