"""Generated modules beside SDPA's FLASH backend (FlashAttention-2), forward and backward, in one run on one GPU.

    python benchmarks/sdpa_flash.py [--out results.json] [--dims 64 128] [--rows 1024 4096 16384]

bf16, B*N = 16k tokens, H*D = 2048. Times are medians of CUDA-event times with the L2 flushed (triton.testing.do_bench), the
two interleaved cell by cell. TFLOP/s count 4 B H N^2 D forward and 2.5 times that backward, halved for causal. The roofs of
the same run (a large bf16 matrix product, a large copy) stand above the table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from attngen.emit.files import write_module
from attngen.emit.render import render
from attngen.ir.graph import Module
from attngen.passes.pipeline import lower
from attngen.spec import parse_spec
from attngen.testing import load_module


def build(text: str, folder: Path) -> tuple[Module, ModuleType]:
    """The module of a spec, lowered and imported."""
    spec = parse_spec(text)
    module = lower(spec)
    write_module(render(module), folder / spec.name)
    return module, load_module(folder / spec.name)


def median(function: object) -> float:
    """Milliseconds."""
    return float(triton.testing.do_bench(function, warmup=25, rep=120, return_mode="median"))


def cell(module: ModuleType, mask: str, dim: int, rows: int, tokens: int = 16384, width: int = 2048) -> dict[str, object]:
    """One line of the table."""
    batch, heads = tokens // rows, width // dim
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, g = (
        torch.randn(batch, heads, rows, dim, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(4)
    )

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")

    def ours() -> torch.Tensor:
        return module.attention(q, k, v)

    outputs = {"ours": ours(), "flash": flash()}
    torch.testing.assert_close(outputs["ours"], outputs["flash"], atol=2e-2, rtol=2e-2)
    grads = {name: torch.autograd.grad(o, (q, k, v), g, retain_graph=True) for name, o in outputs.items()}
    for a, b in zip(grads["ours"], grads["flash"]):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm(), "gradients differ"
    del grads
    flops = 4 * batch * heads * rows**2 * dim / (2 if mask == "causal" else 1)
    times: dict[str, float] = {}
    for name, forward in (("ours", ours), ("flash", flash)):
        times[f"{name}_fwd"] = median(forward)
    for name, out in outputs.items():
        times[f"{name}_bwd"] = median(lambda out=out: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))
    rates = {key: flops * (2.5 if key.endswith("bwd") else 1) / ms / 1e9 for key, ms in times.items()}
    return {"dim": dim, "mask": mask, "rows": rows, "ms": times, "tflops": rates}


def roofs() -> tuple[float, float]:
    """(bf16 matrix product in TFLOP/s, device copy in TB/s) of this GPU now."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.empty(2**30, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    product, copy = median(lambda: a @ b), median(lambda: y.copy_(x))
    return 2 * 8192**3 / product / 1e9, 2 * x.numel() * 4 / copy / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--masks", nargs="+", default=["causal", "none"], choices=["causal", "none"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    product, copy = roofs()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"roofs: {product:.0f} TFLOP/s bf16 product, {copy:.2f} TB/s copy\n")
    print("| D | mask | N | ours fwd | FLASH fwd | ratio | ours bwd | FLASH bwd | ratio |\n|---|---|---|---|---|---|---|---|---|")
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for dim in args.dims:
            for mask in args.masks:
                module = build(f"name: bench_{mask}_{dim}\nhead_dim: {dim}\nmask: {mask}\ndtype: bf16\n", Path(folder))[1]
                for rows in args.rows:
                    c = cell(module, mask, dim, rows)
                    cells.append(c)
                    t = c["tflops"]
                    line = [
                        f"{t[f'ours_{d}']:.0f} | {t[f'flash_{d}']:.0f} | {t[f'ours_{d}'] / t[f'flash_{d}']:.2f}" for d in ("fwd", "bwd")
                    ]
                    print(f"| {dim} | {mask} | {rows} | {line[0]} | {line[1]} |", flush=True)
                    torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"matmul_tflops": product, "copy_tb_s": copy, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
