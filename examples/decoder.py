"""What the language-model examples share: attention chosen by name, and a decoder that calls it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Attend = Callable[..., torch.Tensor]  # arguments are q, k, v [B, H, N, D], and `dropout_p` if there is dropout


def stop(message: str) -> Any:
    """End the script with one sentence."""
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")


def visible(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys each query sees, bool [Nq, Nk]: none after it, and with a window at most `window` before it."""
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance <= window)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, dropout_p: float = 0.0
) -> torch.Tensor:
    """Causal attention in eager PyTorch, with the whole score matrix in memory."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    probabilities = torch.softmax(scores.masked_fill(~visible(q, k, window), -torch.inf), -1).to(v.dtype)
    return F.dropout(probabilities, dropout_p) @ v


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, dropout_p: float = 0.0
) -> torch.Tensor:
    """PyTorch's `scaled_dot_product_attention`, by the backend that PyTorch picks."""
    mask = None if window is None else visible(q, k, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None, enable_gqa=grouped)


PLAIN: dict[str, Attend] = {"naive": naive, "sdpa": sdpa}


@dataclass(frozen=True)
class Variant:
    """An attention variant as the model needs it: its function, head counts and head dimensions."""

    name: str
    attend: Attend
    kv_heads: int
    qk: int = 64
    v: int = 64
    window: int | None = None  # keys before a query that it sees; None for all
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())
    dropout: bool = True  # whether `attend` takes dropout_p

    @property
    def shape(self) -> tuple[int, int, int, int | None]:
        """What two variants must share for a model to be the same with either."""
        return self.kv_heads, self.qk, self.v, self.window


def variant(name: str, heads: int) -> Variant:
    """The variant of that name: `naive`, `sdpa`, a module in generated/, or the folder of a module elsewhere."""
    if name in PLAIN:
        return Variant(name, PLAIN[name], heads)
    folder = ROOT / "generated" / name if Path(name).name == name else Path(name).resolve()
    if not (folder / "__init__.py").is_file():
        known = sorted(p.parent.name for p in (ROOT / "generated").glob("*/__init__.py"))
        stop(
            f"--attention {name}: expected `naive`, `sdpa`, a module's folder, or one in generated/: {', '.join(known)}"
        )
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(folder.name)
    parameters = inspect.signature(module.attention).parameters.keys()
    inputs = parameters - {"q", "k", "v", "plan", "scale", "return_lse", "check", "unknown", "dropout_p", "seed"}
    if inputs:
        stop(
            f"--attention {name}: it takes inputs ({', '.join(sorted(inputs))}), which a language model on "
            f"packed text has none of"
        )
    mask = re.fullmatch(r"causal(?:\(.*\))?|sliding_window\(left=(\d+), right=0\)", module.MASK)
    if not mask:
        stop(
            f"--attention {name}: its mask is {module.MASK}; a language model needs `causal` or a window with "
            f"`right: 0`"
        )
    kv_heads = {"mha": heads, "mqa": 1, "gqa": max(1, heads // 4)}[module.SHARING]
    window = int(mask[1]) if mask[1] else None
    sizes = (kv_heads, module.HEAD_DIM_QK, module.HEAD_DIM_V, window)
    return Variant(folder.name, module.attention, *sizes, module.DTYPES, "dropout_p" in parameters)


class Block(nn.Module):
    """Attention and a two-layer network, each applied to normalised input and added to the input."""

    def __init__(self, d_model: int, heads: int, variant: Variant) -> None:
        super().__init__()
        self.heads, self.variant = heads, variant
        self.widths = [heads * variant.qk, variant.kv_heads * variant.qk, variant.kv_heads * variant.v]
        self.norm_attention, self.norm_mlp = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.out = nn.Linear(heads * variant.v, d_model, bias=False)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        counts = (self.heads, self.variant.kv_heads, self.variant.kv_heads)
        parts = self.qkv(self.norm_attention(x)).split(self.widths, -1)
        # Views [B, H, N, D]: no copies.
        q, k, v = (part.unflatten(-1, (n, -1)).transpose(1, 2) for part, n in zip(parts, counts))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    """Logits of the next token at each position; with `checkpointed`, the backward pass computes blocks again."""

    def __init__(
        self,
        layers: int,
        d_model: int,
        heads: int,
        seq: int,
        variant: Variant,
        vocabulary: int = 256,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.position = nn.Embedding(vocabulary, d_model), nn.Embedding(seq, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads, variant) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, attend: Attend, positions: torch.Tensor | None = None) -> torch.Tensor:
        """positions: those of the tokens in their sequence, int64 [N]; by default 0, 1, ..."""
        x = self.embed(tokens) + (
            self.position.weight[: tokens.shape[1]] if positions is None else self.position(positions)
        )
        for block in self.blocks:
            x = checkpoint(block, x, attend, use_reentrant=False) if self.checkpointed else block(x, attend)
        return self.head(self.norm(x))
