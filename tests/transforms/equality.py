"""Calls of a module in float64 by the IR's executor (attngen/interp/tile.py): their results are compared with those of
naive attention and of the module before a pass."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sympy
import torch

from attngen.conformance.derive import derive, function
from attngen.conformance.oracle import (
    dropout_keep,
    naive_attention,
    naive_entropy,
    naive_key_mass,
    naive_max_score,
    reference_mask,
    reference_scores,
)
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.ir import Module, Op, launch, symbol
from attngen.ir.sizes import Sizes
from attngen.spec import Spec
from attngen.transforms.base import Pass
from attngen.verify import verify
from tests.helpers import use_fused
from tests.transforms.random_masks import arguments

TOLERANCE = 1e-9  # relative to the largest element of a result
Results = dict[str, np.ndarray]


class Unequal(AssertionError):
    """A module whose results differ from those of the module before it, or from naive attention's."""


def random_inputs(chance: random.Random, spec: Spec, sizes: Sizes) -> dict[str, Any]:
    """Return the tensors and scalars of a call, with gradients of its results and tangents of its arguments."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = arguments(chance, spec, sizes)
    # Elements of score inputs are all different, so that no value is at a kink.
    for i in (i for part in spec.score for i in part.inputs() if i.shape):
        given[i.name] = torch.rand(given[i.name].shape, generator=generator, dtype=torch.float64) * 2 - 1
        given[i.name] = given[i.name].abs() + 0.5 if i.name == "temperature" else given[i.name]
    qk, v = spec.head_dim.qk, spec.head_dim.v
    batch, q_heads, kv_heads, n_q, n_kv = sizes
    given |= {
        "q": normal(batch, q_heads, n_q, qk),
        "k": normal(batch, kv_heads, n_kv, qk),
        "v": normal(batch, kv_heads, n_kv, v),
    }
    given |= {
        "grad_out": normal(batch, q_heads, n_q, v),
        "grad_lse": normal(batch, q_heads, n_q if chance.random() < 0.8 else 0),
    }
    if "entropy" in spec.outputs:
        given["grad_entropy"] = normal(batch, q_heads, n_q if given["grad_lse"].shape[2] else 0)
    with_grad = [i.name for i in spec.inputs() if i.grad]
    given |= {f"t{name}": normal(*given[name].shape) for name in ("q", "k", "v", *with_grad)}
    blocks = spec.mask.blocks()
    if blocks and not blocks.pattern:
        shape = [batch, q_heads, -(-n_q // blocks.size), -(-n_kv // blocks.size)]
        given["block_mask"] = torch.rand(shape, generator=generator) < 0.6
    return given


@dataclass(frozen=True)
class Call:
    """Sizes and arguments of a call, and tile sizes."""

    sizes: Sizes
    tiles: dict[str, int]
    inputs: dict[str, Any] = field(repr=False)  # tensors of torch
    dropout_p: float
    seed: int
    splits: int
    bshd: bool  # whether q and the results have the layout [B, N, H, D] in memory
    second: str  # the gradients that a second call needs: `dq`, or `dk dv`

    @classmethod
    def random(cls, chance: random.Random, spec: Spec, module: Module, lengths: tuple[int, int] | None = None) -> Call:
        # Blocks listed from data have 128 rows; some calls have several of them.
        data = module.blocks is not None and module.blocks.data and chance.random() < 0.4
        long = (
            [chance.randint(129, 200), chance.randint(20, 200)]
            if data
            else [chance.randint(1, 20), chance.randint(1, 20)]
        )
        if module.blocks and not data:
            long = [chance.randint(1, 60) for _ in long]
        n_q, n_kv = lengths or chance.choice(
            [long, long[::-1], [long[0]] * 2, long if chance.random() < 0.8 else [0, long[1]]]
        )
        kv_heads = 1 if data or spec.heads.sharing == "mqa" else chance.randint(1, 2)
        group = 1 if spec.heads.sharing == "mha" else chance.randint(1, 3)
        sizes = Sizes(
            1 if data or kv_heads * group > 2 else chance.randint(1, 2), kv_heads * group, kv_heads, n_q, n_kv
        )
        sides = [(64, 64), (64, 128), (128, 64), (32, 128)] if data else [(8, 8), (8, 16), (16, 8), (16, 16)]
        sides = sides if module.blocks else [*sides, (4, 8), (8, 4)]
        tiles = dict(zip(("BLOCK_Q", "BLOCK_KV"), chance.choice(sides)))
        inputs = random_inputs(chance, spec, sizes)
        dropout_p = chance.choice([0.0, 0.1, 0.5, 0.9]) if spec.dropout else 0.0
        return cls(
            sizes,
            tiles,
            inputs,
            dropout_p,
            chance.randrange(-(2**63), 2**63),
            chance.randint(1, group),
            chance.random() < 0.5,
            chance.choice(["dq", "dk dv", "dk dv"]),
        )

    @property
    def threshold(self) -> int:
        """The dropout probability in 65536ths."""
        return round(self.dropout_p * 65536)

    def of_module(self, spec: Spec) -> dict[str, Any]:
        """Return the executor's inputs: arrays, including those that the wrapper derives, and scalars."""
        found = {**self.inputs, **derive(spec, self.sizes, self.inputs, "cpu", programs=False)}
        blocks = spec.mask.blocks()
        if blocks and blocks.pattern:
            rows, columns = (-(-n // blocks.size) for n in (self.sizes.n_q, self.sizes.n_kv))
            found["block_mask"] = function(blocks.pattern)(rows, columns, torch.device("cpu"), **dict(blocks.params))
        if "block_mask" in found:
            found["block_mask"] = found["block_mask"][(None,) * (4 - found["block_mask"].dim())]
        if self.bshd:
            found["q"] = found["q"].transpose(1, 2).contiguous().transpose(1, 2)
        arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in found.items()}
        return {
            **arrays,
            "scale": spec.head_dim.qk**-0.5,
            "seed": self.seed,
            "threshold": self.threshold,
            "splits": self.splits,
        }


def naive(spec: Spec, call: Call) -> Results:
    """Return the results of naive attention in PyTorch for the call, by hand-written oracles, in float64."""
    learned = {i.name: call.inputs[i.name].double().clone().requires_grad_() for i in spec.inputs() if i.grad}
    q, k, v = (call.inputs[name].clone().requires_grad_() for name in ("q", "k", "v"))
    shape = (*call.sizes[:2], *call.sizes[3:])
    weight = dropout_keep(shape, call.dropout_p, call.seed).double() * (65536 / (65536 - call.threshold))

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """Return the results that have gradients and tangents, and those that have none."""
        inputs = {**call.inputs, **dict(zip(learned, given))}
        modify, sink = reference_scores(spec.score, q, k, inputs)
        mask = reference_mask(spec.mask, q, k, inputs)
        out, lse = naive_attention(q, k, v, mask, spec.head_dim.qk**-0.5, weight, modify, sink)
        smooth = {"out": out, "lse": lse, "entropy": naive_entropy(q, k, mask, spec.head_dim.qk**-0.5, modify, sink)}
        flat = {"max_score": naive_max_score(q, k, mask, spec.head_dim.qk**-0.5, modify)}
        flat |= {"key_mass": naive_key_mass(q, k, mask, spec.head_dim.qk**-0.5, modify, sink)}
        return {name: x for name, x in smooth.items() if name in ("out", *spec.outputs)}, flat

    results, flat = attention(q, k, v, *learned.values())
    more = {name: x.detach().numpy() for name, x in flat.items() if name in spec.outputs}
    points = [x.detach() for x in (q, k, v, *learned.values())]
    along = tuple(call.inputs[f"t{name}"] for name in ("q", "k", "v", *learned))
    _, tangents, _ = torch.func.jvp(attention, tuple(points), along, has_aux=True)
    leaves = {"dq": q, "dk": k, "dv": v, **{f"d_{name}": x for name, x in learned.items()}}
    out, *_ = smooth = tuple(results.values())
    flowing = [call.inputs[name] for name in ("grad_out", "grad_lse", "grad_entropy")[: len(smooth)]]
    flowing = [grad if grad.shape == x.shape else torch.zeros_like(x) for grad, x in zip(flowing, smooth)]
    found = [torch.zeros_like(x) for x in leaves.values()]
    if out.requires_grad:
        grads = torch.autograd.grad(smooth, list(leaves.values()), flowing, allow_unused=True)
        found = [zero if x is None else x for zero, x in zip(found, grads)]
    given = {name: x.detach().numpy() for name, x in results.items()} | more
    given |= {f"tangent_{name}": x.numpy() for name, x in tangents.items()}
    return {**given, **{name: x.numpy() for name, x in zip(leaves, found)}}


def computed(module: Module, call: Call, inputs: dict[str, Any]) -> Results:
    """Return the results of two calls: one with all gradients, and one with only dQ, or with only dK and dV, in which
    @delta does the work that @dq does otherwise.

    The first call packs few queries of grouped heads; the second is launched like a call with many queries. Half of the
    first calls use the fused backward, if the module has one.
    """
    needs = {"need_q": "dq" in call.second, "need_kv": "dk" in call.second, "need_inputs": False}
    others = execute(with_many_queries(module), {**inputs, **needs}, call.tiles, DOUBLE)
    first = execute(use_fused(module), {**inputs, "fused": call.seed % 2}, call.tiles, DOUBLE)
    return {**first, **{f"{name} of the second call": x for name, x in others.items()}}


def with_many_queries(module: Module) -> Module:
    """Return the module that treats no number of queries as few."""

    def change(op: Op) -> list[Op]:
        by_size = isinstance(op, launch.If) and symbol("Nq") in op.where.free_symbols
        return [replace(op, where=sympy.false)] if by_size else [op]

    return replace(module, hosts=tuple(host.rewrite(change) for host in module.hosts))


def expected_of(call: Call, results: Results) -> Results:
    """Return the expected results of both calls from those of naive attention. Gradients that a call does not need are
    empty."""
    gradients = {name for name in results if name.startswith("d")} - {*call.second.split()}
    others = {name: np.zeros(0) if name in gradients else x for name, x in results.items()}
    return {**results, **{f"{name} of the second call": x for name, x in others.items()}}


def must_be_equal(found: Results, expected: Results, of: str) -> None:
    """Raise Unequal for the first result that has a NaN or differs from the expected one by more than rounding."""
    for name, right in expected.items():
        x = found[name]
        if x.size != right.size or (x.size and x.shape != right.shape):
            raise Unequal(f"{of}: {name} has shape {x.shape}; expected {right.shape}")
        x, right = x.reshape(-1), right.reshape(-1)
        finite = np.isfinite(right)
        size = 1 + np.abs(right[finite]).max(initial=0.0)
        if not np.array_equal(x[~finite], right[~finite]):
            raise Unequal(f"{of}: {name} is infinite in other places, or NaN")
        error = np.abs(x[finite] - right[finite]).max(initial=0.0)
        if not error <= TOLERANCE * size:
            raise Unequal(f"{of}: {name} is off by {error:.1e}, of elements of {size:.1e} at most")


def is_same(a: Module, b: Module) -> bool:
    """Return whether two modules have the same kernels and host programs. Their results do not depend on schedules."""
    kernels = ([(k.name, k.grid, k.blocks) for k in module.kernels] for module in (a, b))
    hosts = ([(host.name, host.blocks) for host in module.hosts] for module in (a, b))
    return operator.eq(*kernels) and operator.eq(*hosts) and a.blocks == b.blocks


def check_steps(spec: Spec, module: Module, call: Call, steps: tuple[Pass, ...]) -> int:
    """Compare each pass's module with the one before it; return the number of modules compared. Raises Unequal, or an
    error of the executor."""
    inputs = call.of_module(spec)
    before = computed(module, call, inputs)
    expected = naive(spec, call)
    if not all(np.isfinite(x[x != -np.inf]).all() for x in expected.values()):
        return 0  # scores too large for softmax in float64
    must_be_equal(before, expected_of(call, expected), "naive attention")
    done = 1
    for step in steps:
        after = verify(step.run(module))
        if not is_same(after, module):
            results = computed(after, call, inputs)
            must_be_equal(results, before, step.name)
            before, done = results, done + 1
        module = after
    return done
