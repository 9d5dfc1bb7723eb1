"""Generated modules with positions: ranks with random chunks of a sequence compute naive attention, in Triton's
interpreter or on a GPU.

Tensors of a call are views with NaN around them, in two memory layouts. Sequences end inside a chunk, have other
numbers of queries than of keys, and rows that see no key.
"""

from __future__ import annotations

import math
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from attngen.builders import build_module
from attngen.ir.dtypes import ELEMENTS
from attngen.spec import Spec, make_spec
from tests.chunks import CASES, assigned, call_of, merged, rows_of, spec_of
from tests.helpers import SPECS, cached_module, spec
from tests.transforms.equality import Call, Results, naive

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # relative, of all elements of a result
PUSHED = ("causal", "packed", "sink", "blocks", "data", "temperature")
CHUNKED = [
    name
    for name in SPECS
    if spec(name).cache is None and spec(name).schedule.order == "q_outer" and "key_mass" not in spec(name).outputs
]


def surrounded(x: torch.Tensor, heads_inside: bool) -> torch.Tensor:
    """A view of the same values in a buffer with NaN before and after the rows, and in further columns."""
    batch, heads, rows, width = x.shape
    shape = (batch, rows + 6, heads, width + 16) if heads_inside else (batch, heads, rows + 6, width + 16)
    buffer = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = (buffer.transpose(1, 2) if heads_inside else buffer)[:, :, 3 : rows + 3, 8 : width + 8]
    view.copy_(x)
    return view


class Ranks:
    """Calls of a generated module for one problem, whose rows are assigned to ranks in chunks."""

    def __init__(self, module: ModuleType, of: Spec, call: Call, dtype: torch.dtype, device: str) -> None:
        self.module, self.spec, self.call, self.dtype, self.device = module, of, call, dtype, device
        self.learned = [i.name for i in of.inputs() if i.grad]
        lengths = {i.name for i in of.inputs() if i.is_size}
        known = {i.name for i in of.inputs()} - lengths
        self.inputs = {n: self._placed(x) for n, x in call.inputs.items() if n in known or n == "block_mask"}
        self.inputs |= {"dropout_p": call.dropout_p, "seed": call.seed} if of.dropout else {}

    def _placed(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(self.device, torch.float32 if x.dtype == torch.float64 else x.dtype)

    def part(self, chance: Random, queries: list[int], keys: list[int], backward: bool) -> Results:
        """The results of a rank that has these chunks."""
        chunk, sizes, given = self.module.CHUNK, self.call.sizes, self.call.inputs
        rows = {"q": rows_of(queries, chunk, sizes.n_q), "kv": rows_of(keys, chunk, sizes.n_kv)}
        of_axis = {"q": "q", "k": "kv", "v": "kv", "grad_out": "q"}
        q, k, v, grad_out = (
            surrounded(given[name][:, :, rows[axis]].to(self.device, self.dtype), chance.random() < 0.5)
            for name, axis in of_axis.items()
        )
        grad_lse = given["grad_lse"][:, :, rows["q"]].to(self.device, torch.float32)
        starts = [torch.tensor(c, dtype=torch.int32, device=self.device) * chunk for c in (queries, keys)]
        more = dict(zip(("q_chunks", "kv_chunks"), starts)) | {"q_len": sizes.n_q, "kv_len": sizes.n_kv}
        inputs = {n: x.requires_grad_() if n in self.learned else x for n, x in self.inputs.items()}
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *(inputs[n] for n in self.learned)]
        scale = self.spec.head_dim.qk**-0.5
        results = self.module.attention(q, k, v, **inputs, **more, scale=scale, return_lse=True)
        found = dict(zip(("out", "lse"), results))
        if backward:
            grads = torch.autograd.grad(results, leaves, (grad_out, grad_lse))
            found |= dict(zip(("dq", "dk", "dv", *(f"d_{n}" for n in self.learned)), grads))
        return {name: x.detach().double().cpu().numpy() for name, x in found.items()}

    def whole(self, chance: Random, ranks: int) -> Results:
        """The results of the whole sequence; `merged_out` and `merged_lse` are those of ranks with a part of the keys
        each, if results are merged so."""
        chunk, sizes = self.module.CHUNK, self.call.sizes
        n_q, n_kv = (math.ceil(n / chunk) for n in (sizes.n_q, sizes.n_kv))
        found: Results = {}

        def put(name: str, rows: np.ndarray, x: np.ndarray) -> None:
            found.setdefault(name, np.zeros((*x.shape[:2], sizes.n_q, *x.shape[3:])))[:, :, rows] = x

        shares = [keys for keys in assigned(chance, n_kv, ranks) if keys]
        merges = not any(part.sink() is not None for part in self.spec.score)
        for queries in filter(None, assigned(chance, n_q, ranks)):
            rows = rows_of(queries, chunk, sizes.n_q)
            part = self.part(chance, queries, [*range(n_kv)], self.spec.trains)
            for name, x in part.items():
                if name in ("out", "lse", "dq"):
                    put(name, rows, x)
                else:
                    found[name] = found.get(name, 0) + x
            if merges:
                some = merged([self.part(chance, queries, keys, False) for keys in shares])
                put("merged_out", rows, some[0])
                put("merged_lse", rows, some[1])
        return found


def check(of: Spec, plain: Spec, seed: int, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Compare the results of ranks with those of naive attention."""
    chance = Random(seed)
    call = call_of(chance, plain, lengths)
    for name in ("q", "k", "v", "grad_out"):
        call.inputs[name] = call.inputs[name].to(dtype).double()
    for i in (i for i in plain.inputs() if i.dtype in ("f32", "T") and isinstance(call.inputs[i.name], torch.Tensor)):
        call.inputs[i.name] = call.inputs[i.name].to(dtype if i.dtype == "T" else torch.float32).double()
    if call.inputs["grad_lse"].shape[2] == 0:
        call.inputs["grad_lse"] = torch.zeros(*call.sizes[:2], lengths[0], dtype=torch.float64)
    found = Ranks(cached_module(of), plain, call, dtype, device).whole(chance, 3)
    expected = naive(plain, call)
    expected |= {f"merged_{name}": expected[name] for name in ("out", "lse")}
    for name, x in found.items():
        right = expected[name].reshape(x.shape)
        finite = np.isfinite(right)
        assert np.array_equal(x[~finite], right[~finite]), f"{name} is infinite in other places, or NaN"
        error = np.linalg.norm(x[finite] - right[finite]) / (1e-2 + np.linalg.norm(right[finite]))
        assert error < TOLERANCE[dtype], f"{name} is off by {error:.1e}"


def check_case(name: str, seed: int, device: str) -> None:
    chunk = 128 if name == "data" else 64
    plain, of = (spec_of(name, n, dtype="fp32", fp32_precision="ieee") for n in (0, chunk))
    check(of, plain, seed, ((150, 220), (250, 130), (70, 190))[seed], torch.float32, device)


@pytest.mark.numerics
@pytest.mark.parametrize("name", PUSHED)
def test_ranks_compute_naive_attention(name: str, device: str) -> None:
    check_case(name, 0, device)


@pytest.mark.nightly
@pytest.mark.numerics
@pytest.mark.parametrize("name", [name for name in CASES if name != "entropy"])
def test_more_masks_and_sizes(name: str, device: str) -> None:
    for seed in (1, 2):
        check_case(name, seed, device)


@pytest.mark.nightly
@pytest.mark.numerics
@pytest.mark.parametrize("name", CHUNKED)
def test_committed_specs(name: str, device: str) -> None:
    """The specs of specs/, with positions added."""
    plain = spec(name)
    blocks = build_module(plain).blocks
    chunk = max(128, blocks.size) if blocks else 128
    dtypes = [d for d in plain.dtype if ELEMENTS[d].is_interpreted] or ["fp32"]
    more = {"dtype": dtypes, "positions": {"chunk": chunk}}
    of = make_spec({**plain.canonical(), **more})
    without = make_spec({**plain.canonical(), "dtype": dtypes})
    dtype = getattr(torch, ELEMENTS[dtypes[0]].torch)
    check(of, without, 0, (2 * chunk + 44, 3 * chunk - 20), dtype, device)


@pytest.mark.parametrize(
    "starts, reason",
    [
        ([0, 100], r"q_chunks\[1\] is 100; expected a multiple of 64"),
        ([64, 0], r"q_chunks\[1\] is 0, after 64; expected numbers that never fall"),
        ([0, 192], r"q_chunks\[1\] is 192; expected a number from 0 to 128"),
    ],
)
def test_wrong_starts_of_chunks_are_refused(starts: list[int], reason: str, device: str) -> None:
    module = cached_module(spec_of("causal", 64, dtype="fp32", fp32_precision="ieee"))
    q, k, v = (torch.zeros(1, heads, 128, 16, device=device) for heads in (2, 1, 1))
    given, right = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, [0, 64]))
    with pytest.raises(ValueError, match=f"^attention: {reason}: rows of the whole sequence"):
        module.attention(q, k, v, q_chunks=given, kv_chunks=right, q_len=128, kv_len=128, check=True)
