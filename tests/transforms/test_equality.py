"""Random small specs: the module after every pass computes what the module before it did, and the first one what naive
attention does.

All outputs and all gradients, in float64, by the executor of the IR (attngen/interp/tile.py). Masks and scores are
drawn from the grammar of tests/lang_strategies.py, as tests/transforms/test_random_masks.py and
tests/test_random_scores.py draw them.

    python -m tests.transforms.test_equality --checks 5000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import sympy
import torch

from attngen.builders import build_module
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
from attngen.errors import AttngenError, SpecError
from attngen.interp.host import execute
from attngen.interp.tile import DOUBLE
from attngen.ir.expr import symbol
from attngen.ir.graph import Module
from attngen.ir.host import Alloc, Copy, If, Launch, ListBlocks, Place, SumDistances, View
from attngen.ir.names import OUTPUTS
from attngen.ir.ops import ListPosition, Load, Loop, Map, Mask, Op, SoftmaxStep, Store, Yield
from attngen.ir.sizes import Sizes
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower, passes
from attngen.spec import Spec, make_spec
from attngen.transforms.base import Pass
from attngen.transforms.classify_tiles import ClassifyTiles
from attngen.verify import verify
from attngen.verify.host import reasons
from tests import lang_strategies
from tests.helpers import in_one_pass, module_of
from tests.spec_strategies import drawn
from tests.test_random_scores import NAMED, READS, modifier
from tests.transforms.test_random_masks import arguments, named, random_mask

CI_SPECS, CI_SEEDS = 50, (2, 3, 4, 11)
TOLERANCE = 1e-9  # of the largest element of a result
HEAD_DIMS: list[Any] = [16] * 8 + [24, 40, {"qk": 24, "v": 16}, {"qk": 16, "v": 40}, {"qk": 200, "v": 72}]
BLOCK_SPARSE = [
    {"block": 16},
    {"block": 16, "pattern": "butterfly"},
    {"block": 16, "pattern": "local_global", "local": 0, "globals": 1},
]
KINDS = {
    "mha",
    "mqa",
    "gqa",
    "modified",
    "dropout",
    "kv_outer",
    "packed",
    "padded",
    "blocks",
    "blocks by data",
    "one pass",
    *OUTPUTS,
}
KINDS |= {f"gradient by {by}" for by in ("query", "score", "distance", "element", "row")}
Results = dict[str, np.ndarray]


class Unequal(AssertionError):
    """A module that does not compute what the one before it, or naive attention, does."""


# ---------------------------------------------------------------------------------------------- specs


def strategies(number: int, strategy: Any, batch: int = 150) -> Iterator[lang_strategies.Sample]:
    """Examples of a strategy without end."""
    for more in count():
        yield from drawn(strategy, batch, number * 1000 + more)


def learned_read(chance: random.Random) -> dict[str, Any]:
    """A modifier that adds elements of a tensor with a gradient, read at a place of one kind."""
    read, dims = chance.choice(list(READS.items()))
    name = read.partition("[")[0]
    return {"expr": read.replace(name, f"s + 0.5 * {name}2"), "params": {f"{name}2": {"tensor": dims, "grad": True}}}


def random_specs(number: int) -> Iterator[dict[str, Any]]:
    """Specs without end, as users write them; some of them ask for what does not go together."""
    chance, aside = random.Random(number), random.Random(f"{number} outputs")
    of_masks = strategies(number, lang_strategies.masks(2))
    of_scores = strategies(number, lang_strategies.scores(2).filter(lambda x: re.search(r"\bs\b", x.text)))
    for _ in count():
        by_key = chance.random() < 0.1
        plain = chance.random() < 0.4
        mask = (
            chance.choice(["none", "causal", "causal", named(chance)])
            if plain
            else random_mask(chance, of_masks, depth=1)
        )
        if not by_key and chance.random() < 0.12:
            blocks = {"block_sparse": chance.choice(BLOCK_SPARSE)}
            mask = blocks if chance.random() < 0.4 else {"all_of": [mask, blocks]}
        score = [] if chance.random() < 0.5 else [modifier(chance, next(of_scores), 1)]
        if chance.random() < 0.3:
            score.insert(
                chance.randrange(len(score) + 1), chance.choice([*NAMED, "sink", *([] if by_key else ["alibi"])])
            )
        if not by_key and chance.random() < 0.2:
            score.append(learned_read(chance))
        more = {} if by_key else {"outputs": aside.sample([*OUTPUTS], aside.randint(1, len(OUTPUTS)))}
        yield {
            **more,
            "name": "drawn",
            "heads": {"sharing": "mha" if by_key else chance.choice(["mha", "mqa", "gqa"])},
            "head_dim": chance.choice(HEAD_DIMS),
            "dtype": chance.choice(["fp16", "fp16", "fp32"]),
            "mask": mask,
            "score": score,
            "dropout": not by_key and chance.random() < 0.25,
            "backward": {"deterministic": chance.random() < 0.5},
            "schedule": {
                "order": "kv_outer" if by_key else "q_outer",
                "block_q": 16,
                "block_kv": 16,
                "warps": 4,
                "stages": 1,
            },
        }


# ---------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """Sizes and arguments of a call, and the sizes of tiles."""

    sizes: Sizes
    tiles: dict[str, int]
    inputs: dict[str, Any] = field(repr=False)  # tensors of torch
    dropout_p: float
    seed: int
    splits: int
    by_query: bool  # q lies in memory as [B, N, H, D], and so do results
    second: str  # the gradients of a second call: `dq`, or `dk dv`

    @classmethod
    def random(cls, chance: random.Random, spec: Spec, module: Module, lengths: tuple[int, int] | None = None) -> Call:
        data = module.blocks is not None and module.blocks.data and chance.random() < 0.4  # several blocks of 128 rows
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
        of = Sizes(1 if data or kv_heads * group > 2 else chance.randint(1, 2), kv_heads * group, kv_heads, n_q, n_kv)
        sides = [(64, 64), (64, 128), (128, 64), (32, 128)] if data else [(8, 8), (8, 16), (16, 8), (16, 16)]
        sides = sides if module.blocks else [*sides, (4, 8), (8, 4)]
        tiles = dict(zip(("BLOCK_Q", "BLOCK_KV"), chance.choice(sides)))
        generator = torch.Generator().manual_seed(chance.randrange(2**31))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        given = arguments(chance, spec, of)
        for i in (i for part in spec.score for i in part.inputs() if i.shape):  # no two alike: nothing is at a kink
            given[i.name] = torch.rand(given[i.name].shape, generator=generator, dtype=torch.float64) * 2 - 1
            given[i.name] = given[i.name].abs() + 0.5 if i.name == "temperature" else given[i.name]
        qk, v = spec.head_dim.qk, spec.head_dim.v
        given |= {
            "q": normal(*of[:2], n_q, qk),
            "k": normal(of[0], of[2], n_kv, qk),
            "v": normal(of[0], of[2], n_kv, v),
        }
        given |= {"grad_out": normal(*of[:2], n_q, v), "grad_lse": normal(*of[:2], n_q if chance.random() < 0.8 else 0)}
        if "entropy" in spec.outputs:
            given["grad_entropy"] = normal(*of[:2], n_q if given["grad_lse"].shape[2] else 0)
        learned = [i.name for i in spec.inputs() if i.grad]
        given |= {f"t{name}": normal(*given[name].shape) for name in ("q", "k", "v", *learned)}
        blocks = spec.mask.blocks()
        if blocks and not blocks.pattern:
            shape = [*of[:2], -(-n_q // blocks.size), -(-n_kv // blocks.size)]
            given["block_mask"] = torch.rand(shape, generator=generator) < 0.6
        dropout_p = chance.choice([0.0, 0.1, 0.5, 0.9]) if spec.dropout else 0.0
        return cls(
            of,
            tiles,
            given,
            dropout_p,
            chance.randrange(-(2**63), 2**63),
            chance.randint(1, group),
            chance.random() < 0.5,
            chance.choice(["dq", "dk dv", "dk dv"]),
        )

    @property
    def threshold(self) -> int:
        """The share to drop, in 65536ths."""
        return round(self.dropout_p * 65536)

    def of_module(self, spec: Spec) -> dict[str, Any]:
        """What the executor takes: arrays, with what the wrapper derives from the arguments, and numbers."""
        found = {**self.inputs, **derive(spec, self.sizes, self.inputs, "cpu", programs=False)}
        blocks = spec.mask.blocks()
        if blocks and blocks.pattern:
            rows, columns = (-(-n // blocks.size) for n in (self.sizes.n_q, self.sizes.n_kv))
            found["block_mask"] = function(blocks.pattern)(rows, columns, torch.device("cpu"), **dict(blocks.params))
        if "block_mask" in found:
            found["block_mask"] = found["block_mask"][(None,) * (4 - found["block_mask"].dim())]
        if self.by_query:
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
    """What naive attention in PyTorch, by hand-written oracles, gives for the call, in float64."""
    learned = {i.name: call.inputs[i.name].double().clone().requires_grad_() for i in spec.inputs() if i.grad}
    q, k, v = (call.inputs[name].clone().requires_grad_() for name in ("q", "k", "v"))
    shape = (*call.sizes[:2], *call.sizes[3:])
    weight = dropout_keep(shape, call.dropout_p, call.seed).double() * (65536 / (65536 - call.threshold))

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """(what has gradients and tangents, what has none)."""
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
    """What two calls give: one of all gradients, and one of those of q alone or of k and v, for which @delta does what
    @dq does.

    Few queries of grouped heads are packed in the first call; the second is launched as calls of many are. Half of the
    first calls compute gradients in one pass, where a module has a kernel for that.
    """
    needs = {"need_q": "dq" in call.second, "need_kv": "dk" in call.second, "need_inputs": False}
    others = execute(with_many_queries(module), {**inputs, **needs}, call.tiles, DOUBLE)
    first = execute(in_one_pass(module), {**inputs, "fused": call.seed % 2}, call.tiles, DOUBLE)
    return {**first, **{f"{name} of the second call": x for name, x in others.items()}}


def with_many_queries(module: Module) -> Module:
    """The module that takes no number of queries for few."""

    def change(op: Op) -> list[Op]:
        by_size = isinstance(op, If) and symbol("Nq") in op.where.free_symbols
        return [replace(op, where=sympy.false)] if by_size else [op]

    return replace(module, hosts=tuple(host.rewrite(change) for host in module.hosts))


def expected_of(call: Call, results: Results) -> Results:
    """What both calls give, by what naive attention does: gradients that a call does not need have no elements."""
    gradients = {name for name in results if name.startswith("d")} - {*call.second.split()}
    others = {name: np.zeros(0) if name in gradients else x for name, x in results.items()}
    return {**results, **{f"{name} of the second call": x for name, x in others.items()}}


# ---------------------------------------------------------------------------------------------- the check


def must_be_equal(found: Results, expected: Results, of: str) -> None:
    """Raise Unequal for the first of the expected results that is found to differ by more than rounding, or to hold
    a NaN."""
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
    """Whether two modules have the same kernels and host programs; a table of schedules says nothing of what these
    compute."""
    kernels = ([(k.name, k.grid, k.blocks) for k in module.kernels] for module in (a, b))
    hosts = ([(host.name, host.blocks) for host in module.hosts] for module in (a, b))
    return operator.eq(*kernels) and operator.eq(*hosts) and a.blocks == b.blocks


def check_steps(spec: Spec, module: Module, call: Call, steps: tuple[Pass, ...]) -> int:
    """Hold each step's module against the one before it; how many there were. Raises Unequal, or what the executor
    raises."""
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


@dataclass
class Tally:
    """How much was checked."""

    specs: int = 0
    refused: int = 0
    modules: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        return f"{self.modules:,} modules of {self.specs:,} specs ({self.refused:,} refused): {kinds}"


def kinds_of(spec: Spec, module: Module) -> list[str]:
    """What a spec has that others lack."""
    found = [spec.heads.sharing, *spec.outputs, *(f"gradient by {x.by}" for x in module.learned)]
    found += ["modified"] if spec.score else []
    found += ["dropout"] if spec.dropout else []
    found += ["kv_outer"] if spec.schedule.order == "kv_outer" else []
    found += ["one pass"] if any(k.adds for k in module.kernels) else []
    found += ["packed"] if any(k.pack_gqa for k in module.kernels) else []
    found += ["blocks by data" if module.blocks.data else "blocks"] if module.blocks else []
    found += ["padded"] if any(d & (d - 1) for d in (spec.head_dim.qk, spec.head_dim.v)) else []
    return list(dict.fromkeys(found))


def drive(
    number: int, specs: int, calls: int = 1, only: int | None = None, report: Callable[[str], None] | None = None
) -> Tally:
    """Check so many random specs, or one alone, by its place among them; a failure is raised, or told to `report`."""
    tally = Tally()
    for place, data in enumerate(random_specs(number)):
        if tally.specs >= specs or (only is not None and place > only):
            break
        if only not in (None, place):
            continue
        try:
            spec = make_spec(data)
            module = build_module(spec)
        except SpecError:
            tally.refused += 1
            assert tally.refused < 100 + 10 * tally.specs, f"nearly all specs are refused: {data}"
            continue
        chance = random.Random(f"{number} {place}")
        try:
            for _ in range(calls):
                call = Call.random(chance, spec, module)
                tally.modules += check_steps(spec, module, call, passes(spec, module))
        except Exception as error:
            reason = f"--seed {number} --only {place}: {error!r}; {json.dumps(data)} at {call}"
            if report is None:
                raise Unequal(reason) from error
            report(reason)
        tally.specs += 1
        for kind in kinds_of(spec, module):
            tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
    return tally


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_every_pass_keeps_what_random_modules_compute(seed: int) -> None:
    """Under each seed specs of all kinds are drawn."""
    tally = drive(seed, CI_SPECS)
    assert tally.specs == CI_SPECS and tally.modules >= 5 * CI_SPECS
    assert tally.kinds.keys() >= KINDS


def test_a_mask_that_is_proven_to_hide_every_key_is_lowered() -> None:
    """Loops have no range then; one stays, for the body."""
    mask = {
        "expr": "2 * min(clamp(kv_len, 1, window), min(kv_len, q_idx, 2), 4) >= 7",
        "params": {"window": {"scalar": "int"}},
    }
    spec = make_spec({"name": "hidden", "head_dim": 16, "mask": mask})
    module = build_module(spec)
    assert lower(spec).phase == "target"
    assert check_steps(spec, module, Call.random(random.Random(1), spec, module), passes(spec, module)) > 5


@pytest.mark.parametrize("expr", ["kv_idx != 3 and 0.5 * q_len <= 0", "0.5 * q_len <= 0 and seen[b, kv_idx]"])
def test_a_mask_that_is_false_for_packed_queries_is_lowered(expr: str, tmp_path: Path, device: str) -> None:
    """There are some queries where these are packed, so that the condition of @packed is `false`. Specs are read
    without that."""
    seen = {"seen": torch.ones(1, 9, dtype=torch.bool, device=device)} if "seen" in expr else {}
    mask = {"expr": expr, "params": {name: {"tensor": ["B", "Nk"], "dtype": "bool"} for name in seen}}
    spec = make_spec({"name": "hidden", "head_dim": 16, "heads": {"sharing": "gqa"}, "mask": mask})
    module = build_module(spec)
    call = Call.random(random.Random(1), spec, module, (5, 9))
    assert check_steps(spec, module, call, passes(spec, module)) > 5
    q = torch.ones(1, 4, 5, 16, device=device, dtype=torch.float16)
    k = torch.ones(1, 2, 9, 16, device=device, dtype=torch.float16)
    out, lse = module_of(spec, tmp_path).attention(q, k, k, return_lse=True, **seen)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_bounds_of_tiles_print_as_they_parse() -> None:
    """Sympy leaves a max right inside a max there, which the parser does not."""
    module = build_module(
        make_spec({"name": "nested", "head_dim": 16, "mask": {"not": {"chunked": {"size": 16, "align": "top_left"}}}})
    )
    text = print_module(ClassifyTiles().run(module))
    assert print_module(parse_module(text)) == text


def range_too_short(op: Op) -> Op:
    """The last tile of the last range is left out."""
    return (
        replace(op, ranges=(*op.ranges[:-1], (op.ranges[-1][0], op.ranges[-1][1] - 1)))
        if isinstance(op, Loop) and op.var != "g"
        else op
    )


def mask_dropped(op: Op) -> Op:
    return replace(op, where=sympy.true, uses=()) if isinstance(op, Mask) else op


def scale_applied_twice(op: Op) -> Op:
    """To a gradient, or to the LSE's exponents."""
    scale = {symbol(name): symbol(name) ** 2 for name in ("scale", "qk_scale")}
    return (
        replace(op, expr=op.expr.xreplace(scale))
        if isinstance(op, Map) and op.name in ("lse", "dq_out", "dk_out")
        else op
    )


def carry_exchanged(op: Op) -> Op:
    """Fields of one type take each other's values; of a single field, its old value stays."""
    if not isinstance(op, Yield) or op.name.endswith("group"):
        return op
    (first, x), *others = op.values
    if not others:
        return replace(op, values=((first, first),))
    (second, y), *rest = others
    return replace(op, values=((first, y), (second, x), *rest))


def check_removed(op: Op) -> Op:
    return replace(op, check=()) if isinstance(op, (Load, Store)) else op


def list_position_off(op: Op) -> Op:
    return replace(op, tile=op.tile - 1) if isinstance(op, ListPosition) else op


def guard_removed(op: Op) -> Op:
    return replace(op, guard="never") if isinstance(op, SoftmaxStep) else op


IN_ALL = (range_too_short, mask_dropped, scale_applied_twice, carry_exchanged, check_removed)
WRONG = [
    *((wrong, kernel) for wrong in IN_ALL for kernel in ("fwd", "dq", "dkdv", "bwd")),
    *((list_position_off, kernel) for kernel in ("fwd", "dq", "dkdv")),
    *((guard_removed, kernel) for kernel in ("fwd", "packed")),
]
WINDOW = make_spec(
    {"name": "window", "head_dim": 16, "heads": {"sharing": "gqa"}, "mask": {"sliding_window": {"left": 5, "right": 0}}}
)
LISTED = make_spec(
    {"name": "listed", "head_dim": 16, "mask": {"all_of": ["causal", {"block_sparse": BLOCK_SPARSE[1]}]}}
)


@dataclass(frozen=True)
class Seeded(Pass):
    """A pass that changes the ops of one kernel."""

    name: ClassVar[str] = "seeded"
    phase: ClassVar[str] = "target"
    change: Callable[[Op], Op]
    kernel: str

    def run(self, module: Module) -> Module:
        return module.map_kernels(lambda k: k.rewrite(lambda _, op: [self.change(op)]) if k.name == self.kernel else k)


lowered = cache(lower)


@pytest.mark.parametrize(("wrong", "kernel"), WRONG, ids=[f"{wrong.__name__} in {kernel}" for wrong, kernel in WRONG])
def test_a_wrong_pass_is_caught(wrong: Callable[[Op], Op], kernel: str) -> None:
    """At every one of three calls; of @dq and @dkdv, or of @bwd, which runs in their place."""
    spec = LISTED if wrong is list_position_off else WINDOW
    module = lowered(spec)
    step = Seeded(wrong, kernel)
    assert not is_same(step.run(module), module)
    for number in range(3):
        call = Call.random(random.Random(number), spec, module, (37, 33) if module.blocks else (21, 17))
        call = replace(call, seed=call.seed // 2 * 2 + (kernel == "bwd"))
        with pytest.raises((Unequal, AttngenError)):
            check_steps(spec, module, call, (step,))


# ---------------------------------------------------------------------------------------------- wrong host programs

HostChange = Callable[[Op], list[Op]]


def sum_of_splits_left_out(op: Op) -> list[Op]:
    return [] if isinstance(op, Launch) and op.kernel == "dkdv_end" else [op]


def copy_left_out(op: Op) -> list[Op]:
    return [] if isinstance(op, Copy) else [op]


def delta_not_launched(op: Op) -> list[Op]:
    return [] if isinstance(op, Launch) and op.kernel == "delta" else [op]


def maximum_from_zero(op: Op) -> list[Op]:
    return [replace(op, fill=sympy.Integer(0)) if isinstance(op, Alloc) and op.name == "ROW_MAX" else op]


def parts_not_filled(op: Op) -> list[Op]:
    return [replace(op, fill=None) if isinstance(op, Alloc) else op]


def heads_in_wrong_order(op: Op) -> list[Op]:
    """Query heads as if those of one K/V head were `Hkv` apart."""
    if not isinstance(op, View) or op.by != "heads":
        return [op]
    batch, kv_heads, group, *rest = op.type.dims
    return [replace(op, type=replace(op.type, dims=(batch, group, kv_heads, *rest)))]


def heads_not_told_apart(op: Op) -> list[Op]:
    """Packed rows as if they were the queries of one head."""
    packed = isinstance(op, Launch) and op.kernel == "packed"
    return [replace(op, sizes=tuple((name, symbol("Gq")) for name, _ in op.sizes)) if packed else op]


def distances_off(op: Op) -> list[Op]:
    return [
        replace(op, at=tuple(f"{e} + 1" if "distance" in e else e for e in op.at))
        if isinstance(op, SumDistances)
        else op
    ]


def placed_elsewhere(op: Op) -> list[Op]:
    return [replace(op, at=tuple("0" if e.isdigit() else e for e in op.at)) if isinstance(op, Place) else op]


def blocks_not_cut(op: Op) -> list[Op]:
    """Every block in which something is seen as if nothing in it were hidden."""
    return [replace(op, full=op.src) if isinstance(op, ListBlocks) and op.full else op]


def lists_of_the_other_axis(op: Op) -> list[Op]:
    return [replace(op, own={"q": "kv", "kv": "q"}[op.own]) if isinstance(op, ListBlocks) else op]


BY_KEY = make_spec({"name": "by_key", "head_dim": 16, "mask": "causal", "schedule": {"order": "kv_outer"}})
PARAMS = {
    "bias": {"tensor": [17], "grad": True},
    "gain": {"tensor": ["Hkv"], "grad": True},
    "shift": {"tensor": ["H", 3], "grad": True},
}
TEXT = "s * (1 + 0.1 * gain[hkv] + 0.1 * shift[h, 2]) + bias[clamp(kv_idx - q_pos + 8, 0, 16)]"
TABLES = make_spec(
    {
        "name": "tables",
        "head_dim": 16,
        "heads": {"sharing": "gqa"},
        "mask": "causal",
        "score": {"expr": TEXT, "params": PARAMS},
    }
)
BLOCKS = make_spec({"name": "blocks", "head_dim": 16, "mask": {"block_sparse": {"block": 16}}})
PAIRS = {"expr": "pairs[q_idx, kv_idx]", "params": {"pairs": {"tensor": ["Nq", "Nk"], "dtype": "bool"}}}
BY_DATA = make_spec({"name": "by_data", "head_dim": 16, "mask": PAIRS})
# (the change, the spec, the rule that refuses it, if one does): the executor finds the others
WRONG_HOSTS: list[tuple[HostChange, Spec, str]] = [
    (sum_of_splits_left_out, WINDOW, "host-written"),
    (copy_left_out, WINDOW, "host-written"),
    (delta_not_launched, WINDOW, "host-written"),
    (heads_in_wrong_order, TABLES, "host-types"),
    (heads_not_told_apart, WINDOW, ""),
    (maximum_from_zero, BY_KEY, ""),
    (parts_not_filled, TABLES, "host-written"),
    (distances_off, TABLES, ""),
    (placed_elsewhere, TABLES, ""),
    (lists_of_the_other_axis, BLOCKS, ""),
    (blocks_not_cut, BY_DATA, ""),
]


@dataclass(frozen=True)
class SeededHost(Pass):
    """A pass that changes the ops of host programs."""

    name: ClassVar[str] = "seeded"
    phase: ClassVar[str] = "target"
    change: HostChange

    def run(self, module: Module) -> Module:
        return replace(module, hosts=tuple(host.rewrite(self.change) for host in module.hosts))


def call_with_low_scores(module: Module, spec: Spec) -> Call:
    """Grouped heads in two splits, results by query in memory, and scores far below zero: their exponentials are 0."""
    number, lengths = 0, (137, 133) if spec is BY_DATA else (37, 33) if module.blocks else (21, 17)
    while True:
        call = Call.random(random.Random(number), spec, module, lengths)
        group = call.sizes.q_heads // call.sizes.kv_heads
        enough = spec.heads.sharing == "mha" or (call.sizes.kv_heads == 2 and group == 2)
        if enough and call.sizes.batch * call.sizes.q_heads > 1 and (spec is BY_DATA or call.tiles["BLOCK_Q"] < 16):
            inputs = (
                call.inputs | {"q": call.inputs["q"].abs() * 60, "k": -call.inputs["k"].abs() * 60}
                if spec is BY_KEY
                else call.inputs
            )
            return replace(call, splits=group, by_query=True, second="dk dv", inputs=inputs)
        number += 1


@pytest.mark.parametrize(("change", "spec", "rule"), WRONG_HOSTS, ids=[change.__name__ for change, *_ in WRONG_HOSTS])
def test_a_wrong_host_program_is_caught(change: HostChange, spec: Spec, rule: str) -> None:
    """By a rule or by its results, and by these even where a rule refuses it."""
    module = lower(spec) if spec is BY_DATA else build_module(spec)  # for lists of full blocks passes make loops
    step = SeededHost(change)
    wrong = step.run(module)
    assert not is_same(wrong, module)
    broken = [name for name, _ in reasons(wrong)]
    assert rule in broken if rule else not broken
    call = call_with_low_scores(module, spec)
    assert check_steps(spec, module, call, ()) == 1
    with pytest.raises((Unequal, AttngenError)):
        check_steps(spec, module, call, (step,))


def main() -> None:
    parser = argparse.ArgumentParser(description="checks that passes keep what random modules compute")
    parser.add_argument("--checks", type=int, default=5000, help="specs to check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1, help="calls of each spec")
    parser.add_argument("--only", type=int, help="the place of the one spec to check")
    given = parser.parse_args()
    failures: list[str] = []

    def failed(reason: str) -> None:
        failures.append(reason)
        print(reason, flush=True)

    start = time.time()
    tally = drive(given.seed, given.checks, given.calls, given.only, failed)
    print(f"{tally}; {len(failures)} failures; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
