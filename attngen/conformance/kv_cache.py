"""Run calls with a KV cache and compare them with naive attention, for `attngen test` and the test suite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attngen.conformance.cases import Case, heads_for, make_mask_inputs, torch_dtype
from attngen.conformance.harness import fp32_products, run_case, whole_products
from attngen.conformance.oracle import naive_attention, reference_mask, reference_scores
from attngen.conformance.result import Result, errors, rounding_of
from attngen.ir.dtypes import LATENT_GROUP
from attngen.ir.sizes import Sizes
from attngen.spec import Spec

POISON = 2**30  # page index out of range
LARGEST = 448  # largest number of float8_e4m3fn


@dataclass(frozen=True)
class CacheCase:
    """One call with a KV cache: the keys of each sequence before it, the number of keys it appends, and its queries.

    room: capacity of the cache in keys per sequence.
    page: keys per page, 0 without pages. Pages are in random order, rows without a key hold NaN, and entries of the
    page table past a sequence's last key are out of range.
    heads_first: heads are the outer dimension of rows in memory.
    shared: the first two sequences share the pages that both have filled before the call.
    """

    q_heads: int
    kv_heads: int
    n_q: int
    lengths: tuple[int, ...]
    new: int
    room: int
    page: int = 0
    heads_first: bool = False
    shared: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        """Number of keys of each sequence after the call."""
        return tuple(min(self.room, n + self.new) for n in self.lengths)

    @property
    def pages(self) -> int:
        """Number of pages per sequence."""
        return self.room // self.page if self.page else 0

    def __str__(self) -> str:
        few = ",".join(map(str, self.lengths[:4])) + (",..." if len(self.lengths) > 4 else "")
        more = (
            f"{f' pages {self.page}' if self.page else ''}{' heads first' * self.heads_first}{' shared' * self.shared}"
        )
        return f"B{len(self.lengths)} Nq{self.n_q} cache {few}+{self.new}{more}"


@dataclass(frozen=True)
class Call:
    """The arguments of a call, and for naive attention each sequence's k and v [1, Hkv, keys, D] after it, with the
    mask inputs of all sequences for its number of keys."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, ...]
    arguments: dict[str, Any]
    sequences: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]


def make_call(spec: Spec, case: CacheCase, dtype: torch.dtype, device: str, seed: int = 0) -> Call:
    """Return a call with normal values."""
    generator = torch.Generator().manual_seed(seed)
    batch, widths = len(case.lengths), (spec.head_dim.qk, *(() if spec.rope else (spec.head_dim.v,)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = normal(batch, case.q_heads, case.n_q, widths[0]).to(device)
    whole = [normal(batch, case.room, case.kv_heads, width) for width in widths]
    together = min(case.lengths[:2]) // case.page if case.shared else 0  # pages
    for x in whole:
        x[1:2, : together * case.page] = x[:1, : together * case.page]
    table = (
        torch.randperm(batch * max(1, case.pages) + 3, generator=generator)[: batch * case.pages]
        .view(batch, case.pages)
        .int()
    )
    table[1:2, :together] = table[:1, :together]
    caches, new, scales, held = [], [], {}, []
    for name, x in zip(("k", "v"), whole):
        kept = x
        if spec.factors == "columns":
            kept, rounded = latent_rows(x, spec.head_dim.v)
            held.append(rounded)
        elif spec.factors:
            scales[f"{name}_scale"], factors = _factors(spec, case, table, generator)
            kept = (x / factors).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            held.append(kept.double() * factors.double())
        caches.append(_stored(case, kept, table))
        added = torch.zeros(batch, case.kv_heads, case.new, x.shape[-1], dtype=dtype)
        for b, (before, after) in enumerate(zip(case.lengths, case.keys)):
            added[b, :, : after - before] = x[b, before:after].transpose(0, 1)
        new.append(added.to(device))
    sizes = Sizes(batch, case.q_heads, case.kv_heads, case.n_q, case.room)
    inputs = make_mask_inputs(spec, sizes, dtype, device, generator)
    _spread_ids(spec, case, inputs)
    arguments: dict[str, Any] = {
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        **inputs,
    }
    arguments |= {name: scale.to(device) for name, scale in scales.items()}
    arguments |= dict(zip(("k", "v"), new)) if case.new else {}
    if case.page:
        for b, keys in enumerate(case.keys):
            table[b, -(-keys // case.page) :] = POISON
        arguments["page_table"] = table.to(device)
    sequences = []
    for b, keys in enumerate(case.keys):
        k, *v = (x[b : b + 1, :keys].transpose(1, 2).to(device) for x in held or whole)
        values = v[0] if v else k[..., : spec.head_dim.v]
        sequences.append((k, values, {name: _of_keys(spec, name, x, keys) for name, x in inputs.items()}))
    return Call(q, tuple(x.to(device) for x in caches), arguments, sequences)


def _stored(case: CacheCase, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return a KV cache with the keys before the call, from x [B, room, Hkv, D], and NaN everywhere else."""
    rows, nan = (x.view(torch.uint8).clone(), 0xFF) if x.dtype.itemsize == 1 else (x.clone(), math.nan)
    for b, keys in enumerate(case.lengths):
        rows[b, keys:] = nan
    if case.page:
        pages = torch.full((table.numel() + 3, case.page, *x.shape[2:]), nan, dtype=rows.dtype)
        for b in reversed(range(len(rows))):  # shared pages get the rows of the first sequence
            pages[table[b].long()] = rows[b].view(case.pages, case.page, *x.shape[2:])
        rows = pages
    rows = rows.view(x.dtype)
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if case.heads_first else rows


def latent_rows(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a cache of 8-bit latents, as bytes, and the keys that they represent, in fp64. x: keys [B,
    room, 1, D], whose first `width` elements are the latent."""
    latents, rotated = x[..., :width], x[..., width:]
    groups = latents.float().unflatten(-1, (-1, LATENT_GROUP))
    factors = groups.abs().amax(-1, keepdim=True) * (1 / LARGEST)
    numbers = (groups / factors).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    rounded = (numbers.double() * factors.double()).flatten(-2)
    parts = (numbers.flatten(-2), factors.flatten(-2), rotated.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1), torch.cat([rounded, rotated.double()], -1)


def latents_of(rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the keys in rows of a cache of 8-bit latents, [..., D] in `dtype`."""
    end = width + 4 * (width // LATENT_GROUP)
    numbers = rows[..., :width].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, LATENT_GROUP))
    latents = (numbers * rows[..., width:end].view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat([latents.to(dtype), rows[..., end:].view(dtype)], -1)


def _factors(
    spec: Spec, case: CacheCase, table: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale factors of an 8-bit cache, and those per row and head, [B, room, Hkv, 1]; NaN for pages of no
    sequence."""
    assert spec.cache is not None
    batch = len(case.lengths)
    if spec.factors != "page":
        scale = torch.exp(torch.randn(case.kv_heads, generator=generator)) / 100
        return scale, scale.view(1, 1, -1, 1).expand(batch, case.room, -1, -1)
    scale = torch.full((table.numel() + 3, case.kv_heads), math.nan)
    of_table = torch.exp(torch.randn(table.numel(), case.kv_heads, generator=generator)) / 100
    scale[table.flatten().long()] = of_table
    return scale, scale[table.long()].repeat_interleave(case.page, 1).unsqueeze(-1)


def _spread_ids(spec: Spec, case: CacheCase, inputs: dict[str, Any]) -> None:
    """Spread the ids of documents over the keys of each sequence. The ids past these are unordered, and must not be
    read."""
    for ids in (inputs[i.name] for i in spec.inputs() if (i.dtype, i.shape) == ("i32", ("B", "Nk"))):
        for b, keys in enumerate(case.keys):
            ids[b, :keys] = ids[b, torch.arange(keys) * case.room // max(1, keys)]
            ids[b, keys:] = torch.arange(case.room - keys) % 5 - 1


def _of_keys(spec: Spec, name: str, x: Any, keys: int) -> Any:
    """Return an input narrowed to a number of keys."""
    shape = next(i.shape for i in spec.inputs() if i.name == name)
    for at, dim in enumerate(shape):
        x = x.narrow(at, 0, keys) if dim == "Nk" else x
    return x


def attend_sequence(
    spec: Spec, call: Call, b: int, dtype: torch.dtype, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return naive attention of one sequence of a call, [1, Hq, Nq, Dv], and its LSE. Mask and scores are computed for
    all sequences, and those of sequence `b` are used."""
    k, v, inputs = call.sequences[b]
    every = k.expand(len(call.sequences), *k.shape[1:])
    mask = reference_mask(spec.mask, call.q, every, inputs)
    change, sink = reference_scores(spec.score, call.q, every, inputs)

    def modify(s: torch.Tensor) -> torch.Tensor:
        assert change is not None
        return change(s.expand(len(call.sequences), *s.shape[1:]))[b : b + 1]

    mine = mask if len(mask) == 1 else mask[b : b + 1]
    q, k, v = (x.to(dtype) for x in (call.q[b : b + 1], k, v))
    multiply = fp32_products(spec, "fp32", q.device.type, q.shape[2])[0] if dtype == torch.float32 else torch.matmul
    return naive_attention(
        q, k, v, mine, scale or spec.head_dim.qk**-0.5, None, modify if change else None, sink, None, multiply
    )


def run_cache_case(
    module: ModuleType, spec: Spec, case: CacheCase, dtype: str, device: str, seed: int = 0, check: bool | None = None
) -> Result:
    """Compare output and LSE of a call with a KV cache with naive attention in the same dtype, both against naive in
    fp64. `check` is passed to the call."""
    of_dtype = torch_dtype(dtype)
    call = make_call(spec, case, of_dtype, device, seed)
    out, lse = module.attention.with_kvcache(call.q, *call.caches, **call.arguments, return_lse=True, check=check)

    def naive(wide: torch.dtype) -> dict[str, torch.Tensor]:
        found = [attend_sequence(spec, call, b, wide) for b in range(len(call.sequences))]
        return {"out": torch.cat([out for out, _ in found]), "lse": torch.cat([lse for _, lse in found])}

    truth = naive(torch.float64)
    stored = {"out": truth["out"].to(of_dtype), "lse": truth["lse"].float()}
    shape = Case(len(case.lengths), case.q_heads, case.kv_heads, case.n_q, case.room)
    rounding = rounding_of(truth, stored, [], fp32_products(spec, dtype, device, case.n_q)[1])
    with whole_products():
        found = errors(naive(of_dtype), truth)
    return Result(shape, dtype, errors({"out": out, "lse": lse}, truth), found, rounding)


def result_of(module: ModuleType, spec: Spec, case: Case | CacheCase, dtype: str, device: str, seed: int) -> Result:
    """Return the errors of a case with or without a KV cache; without one, also of tangents if the spec has a
    backward."""
    if isinstance(case, CacheCase):
        return run_cache_case(module, spec, case, dtype, device, seed)
    return run_case(module, spec, case, dtype, device, seed, tangents=spec.trains and not spec.chunk)


def cache_cases(spec: Spec, cuda: bool) -> list[CacheCase]:
    """Return the cases of `attngen test` for a spec with a KV cache: edges of pages and tiles, one long sequence among
    short ones, chunked prefill."""
    heads = heads_for(spec)
    assert spec.cache is not None
    sizes = {"": [0], "page_rows": [16, 48]}.get(spec.cache.page) or [int(spec.cache.page)]
    page = sizes[0]
    room = -(-600 // page) * page if page else 600
    cases = [
        CacheCase(*heads, 1, (0, 1, 15, 16, 17, 63, 64, 127, 128, 129), 1, room, page),
        CacheCase(*heads, 1, (3, 500, 0, 7), 0, room, page, heads_first=True),
        CacheCase(*heads, 4, (5, 260, 0), 4, room, page, shared=bool(page)),
        CacheCase(*heads, 100, (0, 300), 100, room, page),
    ]
    if spec.rope:  # several tiles of rows, and more rows than split-KV takes
        cases += [CacheCase(48, 1, 2, (0, 1, 190), 2, room, page), CacheCase(129, 1, 4, (3, 66), 4, room, page)]
    if len(sizes) > 1:
        cases.append(CacheCase(*heads, 2, (47, 48, 95), 1, sizes[1] * 3, sizes[1]))
    if cuda:
        long = -(-70000 // page) * page if page else 70000
        heads = (128, 1) if spec.rope else heads
        cases += [
            CacheCase(*heads, 1, (65536, 100, 0, 4097), 1, long, page),
            CacheCase(*heads, 16, (65536, 100, 20), 16, long, page),
        ]
    return cases
