"""What the tests share: specs and the modules they lower to, small IR written as text, edits of text."""

from __future__ import annotations

import difflib
import hashlib
import os
import pickle
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sympy
import torch

from attngen.cache import fingerprint
from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.ir import Config, Meaning, Module, Op, launch, only, select, symbol, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering import pipeline
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, load_spec
from attngen.transforms.base import Pass
from attngen.transforms.drop_unspecialized import without
from attngen.verify import verify
from docs.site.committed import spec_files
from tests import record

ROOT = Path(__file__).parent.parent
SPECS = [path.stem for path in spec_files()]
# Specs whose masks and modifiers tests/test_masks.py cuts through at small sizes, every gradient with them. On a GPU
# they take all tests; in the interpreter one size; the tests of wrappers run there for the others.
SMALLER = (
    "alibi_mha",
    "chunked_gqa",
    "dense_bias_dropout_mha",
    "dilated_mha",
    "document_gqa",
    "packed_document_gqa",
    "prefix_lm_gqa",
    "relative_bias_mha",
    "sinks_window_gqa",
    "softcap_window_gqa",
    "streaming_gqa",
    "temperature_mha",
)
CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


@cache
def spec(name: str) -> Spec:
    """A spec of specs/ by name."""
    return load_spec(ROOT / "specs" / f"{name}.yaml")


# Specs whose modules have a backward; tests of calls with a KV cache (tests/serving) are for the others.
WRAPPERS = [n for n in SPECS if spec(n).trains and (CUDA or n not in SMALLER)]


def _kind(name: str) -> tuple[object, ...]:
    """What the code of a wrapper depends on, except numbers."""
    s = spec(name)
    return s.heads, s.schedule.order, s.dtype, s.dropout, s.inputs(), s.derived(), s.mask.blocks() is not None


# In the interpreter one spec for each kind of wrapper, that with the smallest heads; on a GPU all of them.
KINDS = (
    WRAPPERS if CUDA else sorted({_kind(n): n for n in sorted(WRAPPERS, key=lambda n: -spec(n).head_dim.qk)}.values())
)
# Of what wrappers do alike for all kinds, in the interpreter: groups of heads and blocks; one K/V head and dropout; an
# input.
FEW = KINDS if CUDA else ["butterfly_gqa", "causal_dropout_mqa", "padding_mha"]
# Cases that repeat in the interpreter what others hold: `make nightly` runs them, and a GPU does.
NIGHTLY = () if CUDA else pytest.mark.nightly


@cache
def built(name: str) -> ModuleType:
    """The committed module of a spec, imported."""
    from attngen.conformance.harness import load_module

    return load_module(ROOT / "generated" / name)


def module_of(made: Spec, folder: Path) -> ModuleType:
    """The module of a spec, built in a folder and imported."""
    from attngen.conformance.harness import load_module

    write_module(render(lower(made)), folder)
    record.built_again(folder)
    return load_module(folder)


def cached_module(made: Spec | dict[str, Any]) -> ModuleType:
    """The module of a spec from `attngen.build`, which keeps it in the user's cache."""
    import attngen

    module = attngen.build(made)
    record.built_again(Path(str(module.__file__)).parent)
    return module


def stages_of(made: Spec) -> dict[str, Module]:
    """The module of a spec after every pass, by the pass's name; the logical one is `build`, the last one is verified.

    All workers of a run share it on disk: to lower a spec takes twenty times as long as to read it.
    """
    what = f"{fingerprint.digest()} {pipeline.VERIFY_EACH} {made.hash()} {made!r}"
    path = ROOT / ".pytest_cache" / "lowered" / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.pickle"
    if path.is_file():
        found: dict[str, Module] = pickle.loads(path.read_bytes())
        return found
    found = dict(pipeline.stages(made))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(pickle.dumps(found))
    os.replace(file.name, path)
    return found


@cache
def lowered(name: str) -> dict[str, Module]:
    """`stages_of` a spec of specs/ by name."""
    return stages_of(spec(name))


@cache
def target(name: str) -> Module:
    """A spec's module after the last pass, from the committed text, which tests/codegen/test_emit.py holds against
    the spec."""
    path = ROOT / "generated" / name / "schedule.ir"
    return parse_module(path.read_text(encoding="utf-8"), str(path))


def portable(name: str) -> Module:
    """The same without warp-specialized kernels, which would have to be edited with those that they stand in for, and
    without kernels that exist only warp-specialized."""
    whole = target(name)
    module = without(
        replace(whole, warp_specialized=()), {kernel.name for kernel in whole.kernels if kernel.traits.adds_in_order}
    )
    rows = tuple(
        (k, tuple(r for r in rows if not isinstance(r, Config) or r.backend == module.backend))
        for k, rows in module.schedules
    )
    return replace(module, warp_specialized=(), schedules=rows)


def use_fused(module: Module) -> Module:
    """The module whose calls compute gradients in one pass, where it has a kernel for that, however short sequences
    are."""

    def asked(where: Any) -> Any:
        known = {*map(symbol, ("need_q", "need_kv", "fused"))}
        return sympy.And(*(condition for condition in where.args if condition.free_symbols <= known))

    def change(op: Op) -> list[Op]:
        if isinstance(op, tile.Map) and op.name == "_use_fused":
            return [replace(op, expr=select(asked(op.expr.args[0]), *op.expr.args[1:]))]
        if isinstance(op, launch.If) and op.then == "fused" and op.where.args[0] != symbol("_use_fused"):
            return [replace(op, where=asked(op.where))]
        return [op]

    return replace(module, hosts=tuple(host.rewrite(change) for host in module.hosts))


def edit(text: str, *changes: tuple[str, str]) -> str:
    """The text with the first occurrence of each old string replaced; every one must occur."""
    for old, new in changes:
        assert old in text, f"`{old}` is not in the text"
        text = text.replace(old, new, 1)
    return text


def module(kernels: str, phase: str = "logical", head_dim: int = 64, dtype: str = "bf16") -> Module:
    """A verified module of kernels, and schedules, written as text; its header has the first one's mask."""
    return verify(unverified(kernels, phase, head_dim, dtype))


def unverified(kernels: str, phase: str = "logical", head_dim: int = 64, dtype: str = "bf16") -> Module:
    header = f"""\
module @small
  ir 2
  version 0
  spec sha256:0
  phase {phase}
  backend triton
  heads mha
  head_dim qk={head_dim} v={head_dim}
  dtype {dtype}
  precision ieee
  mask small
  blocks no
  dropout no
"""
    made = parse_module(header + kernels, "small.ir")
    masks = list(only(made.kernels[0].ops(), tile.Mask))
    return replace(
        made, meaning=Meaning(sympy.And(*(op.where for op in masks)), known=tuple(f for op in masks for f in op.known))
    )


# Sums of scores, in place of attention: one load before the loop, one in it, a mask and two products.
SMALL = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))
  block @entry
    %Q = arg in : T[Nq, D_QK] @?
    %K = arg in : T[Nk, D_QK] @?
    %O = arg out : T[Nq, D_QK] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %q = load %Q[q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %zero = init 0 : f32[BLOCK_Q, D_QK] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step)
    %o = map expr(x) uses(x=%keys.sum) : T[BLOCK_Q, D_QK] @?
    store %O[q, d_qk] %o check(q)
  block @step
    %sum = arg carry : f32[BLOCK_Q, D_QK] @?
    %k = load %K[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    %next = dot %masked %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @?
    yield values(sum=%next)
"""

# The same in FlashAttention-1's loop order (kv_outer): programs loop over keys, and for each tile of them over queries,
# whose sums they load and store.
KV_OUTER = """
kernel @fwd grid(h in Hq)
  block @entry
    %Q = arg in : T[Hq, Nq, D_QK] @?
    %K = arg in : T[Hkv, Nk, D_QK] @?
    %O_ACC = arg inout : f32[Hq, Nq, D_QK] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) body(@tile) cls(all)
  block @tile
    %k = load %K[h, kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @?
    %queries = loop q ranges(0 .. cdiv(Nq, BLOCK_Q)) body(@step)
    yield
  block @step
    %q = load %Q[h, q, d_qk] check(q if partial) : T[BLOCK_Q, D_QK] @?
    %sum = load %O_ACC[h, q, d_qk] check(q if partial) : f32[BLOCK_Q, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    %next = dot %masked %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @?
    store %O_ACC[h, q, d_qk] %next check(q if partial)
    yield
"""


def changes(step: Pass, before: Module) -> list[str]:
    """What a pass makes of a module that stays verified: lines taken away with `-`, lines put in with `+`."""
    old, new = (print_module(m).splitlines() for m in (before, verify(step.run(before))))
    found = (" ".join(line.split()) for line in difflib.ndiff(old, new) if line[:2] in ("- ", "+ "))
    return [line for line in found if line not in ("-", "+") and line[2:7] != "phase"]
