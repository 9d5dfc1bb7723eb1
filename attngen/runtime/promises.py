"""Checks of data that kernels rely on (promises): lengths, starts, ids, page tables, block lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attngen.runtime.blocks import list_blocks, list_partial_blocks, transposed
from attngen.runtime.checks import is_watched

CHECK = "ATTNGEN_CHECK"  # environment variable: 1 checks all calls, 0 none of them
# For each promise: a bool tensor that is True where it is broken, and a function that makes the error text of an index.
Promise = tuple[torch.Tensor, Callable[..., str]]
Promises = Sequence[Promise]
_BY_PLAN = "what attention.plan makes"


def checks_data(interpreted: bool) -> bool:
    """True if calls without `check` check their data: as set by ATTNGEN_CHECK, by default only in Triton's interpreter.

    Raise ValueError, in one sentence, if the variable is neither 0 nor 1.
    """
    asked = os.environ.get(CHECK, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"attention: {CHECK} is `{asked}` in the environment; expected 1, 0, or nothing")
    return asked == "1" if asked else interpreted


def can_wait(x: torch.Tensor) -> bool:
    """True if the host may wait for the device of x: no CUDA graph is being captured, and no tracer or transform sees
    the call."""
    return not is_watched() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_data(call: str, *promises: Promises) -> None:
    """Raise ValueError, in one sentence, for the first broken promise. If none is broken, the host waits for the device
    once."""
    found = [(broken, say) for several in promises for broken, say in several if broken.numel()]
    if not found or not bool(torch.stack([broken.any() for broken, _ in found]).any()):
        return
    broken, say = next((broken, say) for broken, say in found if bool(broken.any()))
    raise ValueError(f"{call}: {say(*broken.nonzero()[0].tolist())}")


def promised(
    name: str,
    x: torch.Tensor,
    meaning: str,
    least: int | None = None,
    most: int | torch.Tensor | None = None,
    first: int | None = None,
    rising: bool = False,
    multiple: int = 1,
    rows: torch.Tensor | None = None,
) -> Promises:
    """Return the promises of an integer input `x`.

    least, most: bounds of each number; `most` may be a tensor that broadcasts to x. first: the first number of each
    row. rising: numbers never fall along a row. multiple: each number is a multiple of it. rows: int [B], how many
    numbers of each row of x [B, n] are checked; None: all.
    """
    found: list[Promise] = []
    counts = (
        torch.ones_like(x, dtype=torch.bool)
        if rows is None
        else torch.arange(x.shape[-1], device=x.device) < rows[:, None]
    )

    def given(*at: int) -> str:
        return f"{name}[{', '.join(map(str, at))}] is {int(x[at])}"

    if first is not None:
        wrong = (x[..., :1] != first) & counts[..., :1]
        found.append((wrong, lambda *at: f"{given(*at)}; expected {first}: {meaning}"))
    if rising:

        def falls(*at: int) -> str:
            *row, last = at
            return f"{given(*row, last + 1)}, after {int(x[at])}; expected numbers that never fall: {meaning}"

        found.append(((x[..., 1:] < x[..., :-1]) & counts[..., 1:], falls))
    if least is not None or most is not None:

        def bounds(*at: int) -> str:
            largest = int(most.expand(x.shape)[at]) if isinstance(most, torch.Tensor) else most
            both = least is not None and largest is not None
            text = (
                f"a number from {least} to {largest}"
                if both
                else f"at least {least}"
                if largest is None
                else f"at most {largest}"
            )
            return f"{given(*at)}; expected {text}: {meaning}"

        outside = torch.zeros_like(counts)
        outside = outside if least is None else outside | (x < least)
        outside = outside if most is None else outside | (x > most)
        found.append((outside & counts, bounds))
    if multiple > 1:
        rest = (x % multiple != 0) & counts
        found.append((rest, lambda *at: f"{given(*at)}; expected a multiple of {multiple}: {meaning}"))
    return found


def promised_of_plan(plan: Any, *names: str) -> Promises:
    """Return the promises of a plan's tensors whose numbers never fall: the semaphore order of some kernels relies on
    them."""
    return [
        promise for name in names for promise in promised(f"plan.{name}", getattr(plan, name), _BY_PLAN, rising=True)
    ]


def listed(blocks: Any) -> Promises:
    """Return the promises of block lists, a BlockPlan or a plan of data: all of them follow from one mask, as
    attention.plan makes them."""
    expected: dict[str, tuple[torch.Tensor, ...]]
    names: tuple[str, ...]
    first = getattr(blocks, "kv_full_rank", None)
    if first is None:
        seen = blocks.kv_rank.diff(dim=-1) > 0
        expected = {"kv": list_blocks(seen), "q": list_blocks(transposed(seen))}
        names = ("rank", "list")
    else:
        full = first.diff(dim=-1) > 0
        seen = full | (blocks.kv_rank.diff(dim=-1) > 0)
        by_q = list_partial_blocks(transposed(seen), transposed(full))
        expected = {"kv": list_partial_blocks(seen, full), "q": by_q}
        names = ("full_rank", "rank", "list")
    return [_as_made(blocks, f"{side}_{name}", made) for side in expected for name, made in zip(names, expected[side])]


def _as_made(blocks: Any, name: str, made: torch.Tensor) -> Promise:
    """Return the promise that a list of a plan is equal to `made`, which follows from the other lists."""
    x = getattr(blocks, name)

    def say(*at: int) -> str:
        expected = f"{int(made[at])}, which follows from its other lists: {_BY_PLAN}"
        return f"{name}{list(at)} of the plan is {int(x[at])}; expected {expected}"

    return x != made, say


def new_keys(new: Sequence[torch.Tensor]) -> int:
    """Number of new keys of each sequence in a call with a KV cache."""
    return new[0].shape[2] if new else 0


def promised_of_cache(
    caches: Sequence[torch.Tensor],
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    new: Sequence[torch.Tensor],
    first: int | torch.Tensor = 0,
    **scales: torch.Tensor,
) -> Promises:
    """Return the promises of a call with a KV cache.

    Lengths are not negative, and the cache has room for all keys, including the new ones. The pages that hold a
    sequence's keys exist, and no new key is stored in a row that holds another key. Factors are positive and finite.

    caches: [B or pages, Hkv, rows, columns]; cache_seqlens: [B]; page_table: [B, max_pages]; new: [B, Hkv, new,
    columns]; first: the first key of each sequence that is read, [B] or 0: pages before it may have been freed;
    scales: [Hkv], or [pages, Hkv].
    """
    rows, more = caches[0].shape[2], new_keys(new)
    room = rows if page_table is None else page_table.shape[1] * rows
    given = f" and the call {more} new ones" if more else ""

    def seqlens(b: int) -> str:
        expected = f"a number from 0 to {room - more}: the cache has room for {room} keys of a sequence{given}"
        return f"cache_seqlens[{b}] is {int(cache_seqlens[b])}; expected {expected}"

    found: list[Promise] = [((cache_seqlens < 0) | (cache_seqlens > room - more), seqlens)]
    used = None  # which pages hold keys
    if page_table is not None:
        of_pages, used = _promised_of_pages(caches[0].shape[0], rows, cache_seqlens, page_table, more, bool(new), first)
        found += of_pages
    for name, x in scales.items():

        def factor(*at: int, name: str = name, x: torch.Tensor = x) -> str:
            return f"{name}{list(at)} is {float(x[at])}; expected a positive, finite number"

        of_used = True if used is None or x.dim() < 2 else used[:, None]
        found.append((~((x > 0) & (x < torch.inf)) & of_used, factor))
    return found


def _promised_of_pages(
    pages: int,
    rows: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    more: int,
    stores: bool,
    first: int | torch.Tensor,
) -> tuple[list[Promise], torch.Tensor | None]:
    """Return the promises of a page table, and which pages hold keys, bool [pages]; None if there are no pages.

    rows: keys of a page. more: number of new keys of each sequence. stores: whether the call stores new keys. first: as
    in `promised_of_cache`.
    """
    room, keys = page_table.shape[1] * rows, (cache_seqlens + more)[:, None]
    stored_from = cache_seqlens[:, None] if stores else keys
    read_from = torch.minimum(stored_from, torch.as_tensor(first, device=keys.device).expand(len(keys))[:, None])
    start = torch.arange(0, room, rows, device=keys.device)
    held = (start < keys) & (start + rows > read_from)

    def table(b: int, page: int) -> str:
        expected = f"a number from 0 to {pages - 1}: the cache has {pages} pages, and sequence {b} keys in this one"
        return f"page_table[{b}, {page}] is {int(page_table[b, page])}; expected {expected}"

    found: list[Promise] = [(held & ((page_table < 0) | (page_table >= pages)), table)]
    if not pages:
        return found, None
    page = page_table.clamp(0, pages - 1).long()
    used = torch.zeros(pages, dtype=torch.int32, device=keys.device)
    used = used.scatter_add_(0, page.flatten(), held.int().flatten()) > 0
    if stores:
        position = torch.arange(room, device=keys.device)
        row = page.repeat_interleave(rows, 1) * rows + position % rows
        counted = held.repeat_interleave(rows, 1) & (position < keys)
        keys_of_row = torch.zeros(pages * rows, dtype=torch.int32, device=keys.device)
        keys_of_row.scatter_add_(0, row.flatten(), counted.int().flatten())

        def shared(b: int, key: int) -> str:
            given = f"page_table[{b}, {key // rows}] is {int(page_table[b, key // rows])}"
            expected = "a page of its own: each new key needs a row of the cache that no other key has"
            return f"{given}, where another sequence has keys, too; expected {expected}"

        found.append((counted & (position >= stored_from) & (keys_of_row[row] > 1), shared))
    return found, used
