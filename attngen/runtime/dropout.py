"""Dropout of a call: checks of its arguments, and the dropout mask of a seed."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import torch
import triton

from attngen.runtime.launch import interpreting, is_interpreted
from attngen.runtime.memory import on_its_device


def check_dropout(
    q: torch.Tensor, dropout_p: float, seed: int | torch.Tensor | None
) -> tuple[torch.Tensor | None, int, float]:
    """Return (seed on q's device, or None if nothing is dropped; the dropped share in 65536ths; 1 / the kept share).

    Raises:
        ValueError or TypeError: one sentence that names the argument, what it is and what was expected.
    """
    # `float` comes first because isinstance with an abstract class is slow.
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (float, numbers.Real)):
        raise TypeError(f"attention: dropout_p is a {type(dropout_p).__name__}; expected a number, 0 <= dropout_p < 1")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"attention: dropout_p is {dropout_p}; expected 0 <= dropout_p < 1")
    threshold = min(round(float(dropout_p) * 65536), 65535)
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            raise ValueError(
                f"attention: seed is {seed.dtype} {list(seed.shape)} on {seed.device}; expected torch.int64, "
                f"one element, on {q.device}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                f"attention: seed is a {type(seed).__name__}; expected an int, an int64 tensor of one element, or None"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"attention: seed is {seed}; expected an int of 64 bits")
    if threshold == 0:
        return None, 0, 1.0
    if seed is None:
        seed = torch.randint(2**63 - 1, (), device=q.device)
    elif not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)
    return seed, threshold, 65536 / (65536 - threshold)


def dropout_mask_by(keep_mask: Any) -> Callable[..., torch.Tensor]:
    """Make `attention.dropout_mask` from the module's kernel that generates the dropout mask."""

    def dropout_mask(
        shape: tuple[int, int, int, int],
        dropout_p: float,
        seed: int | torch.Tensor,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return which weights a call with this dropout_p and seed keeps: torch.bool of shape (B, Hq, Nq, Nk). For
        tests and debugging.

        The default device is that of the seed if it is a tensor, otherwise the current CUDA device, or the CPU if
        Triton's interpreter runs kernels.

        Raises:
            ValueError or TypeError: one sentence that names the argument, what it is and what was expected.
        """
        interpreted = is_interpreted(keep_mask)
        if device is None:
            device = seed.device if isinstance(seed, torch.Tensor) else "cpu" if interpreted else "cuda"
        if not (
            torch.cuda.is_available()
            if (kind_ := torch.device(device).type) == "cuda"
            else interpreted and kind_ == "cpu"
        ):
            raise ValueError(
                f"attention.dropout_mask: device is {device}; expected a CUDA device that this machine has, or "
                "TRITON_INTERPRET=1 in the environment before Triton is imported, to run on the CPU"
            )
        keep = torch.ones(shape, dtype=torch.bool, device=device)
        key, threshold, _ = check_dropout(keep, dropout_p, seed)
        if key is not None and keep.numel():
            batch, heads, n_q, n_kv = shape
            tiles = triton.cdiv(n_q, 32) * triton.cdiv(n_kv, 32)
            launch = functools.partial(keep_mask[tiles * batch * heads,], BLOCK_Q=32, BLOCK_KV=32)
            with interpreting(keep_mask):
                on_its_device(launch)(key, keep, threshold, heads, n_q, n_kv)
        return keep

    return dropout_mask
