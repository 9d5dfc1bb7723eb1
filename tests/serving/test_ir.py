"""The IR of calls with a KV cache: how keys are split, what passes produce, and what kernels and host programs compute
on NumPy."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attngen.codegen.render import render
from attngen.conformance.kv_cache import CacheCase, attend_sequence, make_call
from attngen.errors import IRError
from attngen.heuristics import WAVES
from attngen.interp.host import execute_host
from attngen.interp.numeric import value
from attngen.interp.values import DOUBLE
from attngen.ir import Module, parse, portion, to_text
from attngen.ir.names import OF_CACHE
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.ir.split_kv import kv_split, split_size
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.targets.printing.printer import to_triton
from attngen.tiles.launches import launch_options
from attngen.transforms.simplify import simplify_condition
from attngen.transforms.split_kv import SplitKV
from tests.helpers import SPECS, changes, edit, lowered, spec, target

CACHED = [name for name in SPECS if spec(name).cache]


# A busy machine takes long to generate lists.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 3000), max_size=300), st.integers(1, 70), st.sampled_from([0, 0, 1, 16]))
def test_splits_fit_the_room_and_are_at_most_the_split_size(work: list[int], busy: int, each: int) -> None:
    """All sequences together have at most as many splits as there is room for."""
    items = max(WAVES * busy, 2 * len(work)) if not each else sum(-(-units // each) for units in work)
    splits, unit = kv_split(work, items, each), split_size(work, items, each)
    assert all(units <= count * unit and (count - 1) * unit < max(1, units) for units, count in zip(work, splits))
    assert sum(splits) <= items


def test_splits_are_as_few_as_keep_a_device_busy() -> None:
    """132 SMs with two programs each and 8 K/V heads run 33 splits at a time."""
    items = WAVES * 33
    assert kv_split([1024], items, 0) == [32]  # 64k keys: each program has one split
    assert kv_split([2048], items, 0) == [33]
    assert kv_split([128] * 32, items, 0) == [2] * 32  # 64 splits: programs have one or two
    assert max(kv_split([1024, *[8] * 7], items, 0)) == 27
    assert kv_split([1024] * 8, items, 0) == [16] * 8  # as many waves as with LEAST_UNITS
    assert kv_split([8], items, 0) == [8]
    assert max(kv_split([1024, *[8] * 63], items, 0)) == 45  # the long one does not wait for a single program
    assert kv_split([40, 5, 0], items, 16) == [3, 1, 0]


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_portions_partition_a_range(n: int, parts: int) -> None:
    ends = [value(parse("portion(n, i, parts)"), {"n": n, "i": i, "parts": parts}) for i in range(parts + 1)]
    sizes = np.diff(ends)
    assert (ends[0], ends[-1]) == (0, n) and sizes.max() - sizes.min() <= 1


def test_portions_are_simplified_at_the_ends() -> None:
    n, i, parts = (parse(name) for name in ("n", "i", "parts"))
    assert portion(n, 0 * i, parts) == 0 and portion(n, parts, parts) == n and portion(0 * n, i, parts) == 0


# ---------------------------------------------------------------------------------------------- passes


def test_split_kv_counts_the_tiles_of_a_window() -> None:
    made = changes(SplitKV(), lowered("decode_window_paged_gqa")["split-loops"])
    work = "cdiv(Nk, 64) - min(cdiv(Nk, 64), (max(0, Nk - queries - 1023) // 64))"
    headers = [line for line in made if "kernel @" in line]
    assert [line[0] for line in headers] == ["-", "+", "-", "+"]
    assert all(f"split_kv({work})" in line for line in headers[1::2]), headers
    assert (
        "+ %kv_full_from = map expr(kv_full_first + portion(kv_full_end - kv_full_first, KV_split, num_KV_splits))"
        in " ".join(made)
    )
    assert any(line.startswith("+ %keys_full = loop kv ranges(kv_full_from .. kv_full_to)") for line in made)


def _split(mask: Any) -> set[str]:
    """Return `split_kv` of the kernels under a mask, as text."""
    made = make_spec(
        {
            "name": "cached",
            "heads": {"sharing": "gqa"},
            "head_dim": 16,
            "mask": mask,
            "cache": "contiguous",
            "backward": False,
        }
    )
    kernels = [kernel for kernel in lower(made, "split-kv").kernels if kernel.kv_split]
    return {print_kernel(kernel).splitlines()[0].partition(" split_kv")[2] for kernel in kernels}


def test_split_kv_counts_from_the_first_key_of_a_sequence_to_its_last() -> None:
    end = "cdiv(max(0, min(Nk, key_padding_end)), 64)"
    of = "of(key_padding_first=%KEY_PADDING_FIRST[b], key_padding_end=%KEY_PADDING_END[b])"
    assert _split("key_padding") == {f"({end} - min({end}, (max(0, key_padding_first) // 64))) {of}"}


def test_split_kv_counts_from_the_document_of_the_first_query_to_that_of_the_last() -> None:
    end = "cdiv(max(0, min(Nk, document_end_greatest)), 64)"
    of = "of(document_end_greatest=%DOCUMENT_END[b, queries - 1], document_first_least=%DOCUMENT_FIRST[b, 0])"
    for ids in ({"document": {"sorted": True}}, "document"):
        assert _split(ids) == {f"({end} - min({end}, (max(0, document_first_least) // 64))) {of}"}


def test_split_kv_counts_all_keys_where_heads_visit_different_tiles() -> None:
    assert _split({"expr": "kv_idx >= 100 * hkv"}) == {"(cdiv(Nk, 64))"}


def test_split_kv_does_not_change_modules_without_a_cache() -> None:
    before = lowered("causal_gqa")["split-loops"]
    assert SplitKV().run(before) is before


@pytest.mark.share(4)
@pytest.mark.parametrize("name", CACHED)
def test_text_is_parsed_and_printed_unchanged(name: str) -> None:
    for step in ("build", "split-kv", "dce"):
        text = print_module(lowered(name)[step])
        assert print_module(parse_module(text)) == text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("  cache paged 64", "  cache paged", "`cache paged`; expected contiguous, `paged any` or `paged 64`"),
        (
            "split_kv(cdiv(Nk, 64)) ",
            "split_kv(cdiv(Nk, 64), many) ",
            "expected units of work, as in `split_kv(cdiv(Nk, 64))`",
        ),
        ("ctas_per_sm(1) waves(4)", "ctas_per_sm(1)", "is not an expression"),
        ("  latent rope=64", "  latent 64", "`latent 64`; expected `latent rope=64`"),
    ],
)
def test_wrong_text_of_a_cache_is_refused(old: str, new: str, reason: str) -> None:
    text = print_module(target("decode_mla"))
    with pytest.raises(IRError) as error:
        parse_module(edit(text, (old, new)))
    assert reason in str(error.value)


def test_a_remainder_bounds_the_last_key() -> None:
    """With pack-GQA rows a causal mask implies that a key is within the sequence, so the bounds check is dropped."""
    where = parse("Nk - queries + q_idx % queries >= kv_idx and kv_idx < Nk")
    assert to_text(simplify_condition(where, "q", "kv")) == "Nk - queries + (q_idx % queries) >= kv_idx"
    before = parse("q_idx % queries <= kv_idx and kv_idx < Nk")
    assert len(simplify_condition(before, "q", "kv").args) == 2


def test_bounds_of_splits_have_32_bits() -> None:
    """A portion lies within its range, so no bound needs 64 bits."""
    lo, hi, other, i, parts = sympy.symbols("lo hi other i parts", integer=True)
    assert to_triton(lo + portion(hi - lo, i, parts), lambda name: (name, ())) == "lo + _portion(hi - lo, i, parts)"
    assert "int64" in to_triton(other + portion(hi - lo, i, parts), lambda name: (name, ()))


@pytest.mark.share(16)
@pytest.mark.parametrize("name", CACHED)
def test_names_of_functions_that_split_kv_are_reserved(name: str) -> None:
    """Inputs in a mask's bounds are arguments of these functions and of `combine`, and would shadow their variables."""
    kernels = render(target(name))["kernels.py"]
    names = {kernel.name for kernel in target(name).kernels} - {"combine"} | {"floor_div", "floor_mod"}
    # Values of kernels, whose names no input has
    values = {name for kernel in target(name).kernels if kernel.kv_split for name, _ in kernel.kv_split.reads}
    values |= {i.name for i in target(name).inputs}
    for function in ast.walk(ast.parse(kernels)):
        if isinstance(function, ast.FunctionDef) and function.name not in names:
            stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            found = stored | {arg.arg for arg in function.args.args} - {"x", "a", "b"}
            assert not [n for n in found - values if not name_problem(n) and n not in OF_CACHE], function.name


def test_register_limits_fit_an_sm() -> None:
    """With 16 warps a thread has 128 registers: 65,536 for 512 threads."""
    module = target("decode_gqa")
    (config,) = (r for r in module.configs("decode") if r.device == "sm90" and r.max_rows is None)
    given = {
        warps: launch_options(module.kernel("decode"), replace(config, num_warps=warps))["maxnreg"]
        for warps in (4, 8, 16, 32)
    }
    assert given == {4: 255, 8: 255, 16: 128, 32: 64}


def test_registers_of_kernels_that_split_kv() -> None:
    """NVIDIA GPUs allow the maximum of 255. Warp-specialized kernels have no limit, as their warp groups reallocate
    registers."""
    module = target("decode_mla")
    of = {r.device: launch_options(module.kernel("combine"), r).get("maxnreg") for r in module.configs("combine")}
    assert of == {"sm80": 255, "sm90": 255, "sm100": 255, "any": 255, "gfx942": None}
    ((warp_specialized, config),) = module.stand_ins("decode")
    assert launch_options(warp_specialized, config) == {"num_warps": 4}


def test_a_warp_specialized_kernel_launches_dependents_after_its_last_load() -> None:
    (producer,) = re.findall(r"def decode_producer\((?s:.*?)\n\n\n", render(target("decode_mla"))["hopper.py"])
    before, after = producer.split("    _launch_dependents()")
    assert "_tma_load(" in before and "_tma_load(" not in after and after.splitlines()[1] == "    _reset(COUNTER)"
    assert "_launch_dependents()" not in render(target("causal_gqa"))["hopper.py"]


# ---------------------------------------------------------------------------------------------- on NumPy


def _run(module: Module, made: Spec, case: CacheCase, tiles: dict[str, int]) -> None:
    """Append and decode in fp64, and compare with naive attention."""
    call = make_call(made, case, torch.float64, "cpu")
    given = {"Q": call.q.numpy(), "CACHE_SEQLENS": call.arguments["cache_seqlens"].numpy()}
    caches = [x.view(torch.int16) if x.dtype.itemsize == 1 else x for x in call.caches]  # pairs of 8-bit numbers
    near = 1e-12
    if made.factors == "columns":  # rows of bytes; naive attention has fp32 scales
        numbers, scales, rope = call.caches[0].split([512, 16, 8 * made.rope], -1)
        given |= {"K_SCALE": scales.view(torch.float32).double().transpose(1, 2).numpy()}
        given |= {"K_ROPE_CACHE": rope.view(torch.float64).transpose(1, 2).numpy()}
        caches, near = [numbers.view(torch.int16)], 1e-6
    given |= {name: x.transpose(1, 2).numpy() for name, x in zip(("K_CACHE", "V_CACHE"), caches)}
    given |= {name.upper(): call.arguments[name].numpy() for name in ("k_scale", "v_scale") if name in call.arguments}
    given |= {"PAGE_TABLE": call.arguments["page_table"].numpy()} if case.page else {}
    given |= {"DOCUMENT_IDS": call.arguments["document_ids"].numpy()} if "document_ids" in call.arguments else {}
    given |= {"SINK": call.arguments["sink"].double().numpy()} if "sink" in call.arguments else {}
    if case.new:
        new = {f"{name.upper()}_NEW": call.arguments[name].numpy() for name in ("k", "v") if name in call.arguments}
        execute_host(module, module.host("append"), {**given, **new}, tiles, DOUBLE)
    found = execute_host(module, module.host("decode"), {**given, "scale": 0.1, "Nn": case.new}, tiles, DOUBLE)
    for b in range(len(call.sequences)):
        out, lse = attend_sequence(made, call, b, torch.float64, scale=0.1)
        np.testing.assert_allclose(found["O"][b : b + 1], out.numpy(), atol=near)
        np.testing.assert_allclose(found["LSE"][b : b + 1], lse.numpy(), atol=near)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("step", ["build", "split-kv", "target"])
def test_programs_compute_attention_in_every_phase(name: str, step: str) -> None:
    module = target(name) if step == "target" else lowered(name)[step]
    cache = spec(name).cache
    assert cache is not None
    page = {"": 0, "page_rows": 24}.get(cache.page)
    page = int(cache.page) if page is None else page
    room = 192 if page != 64 else 256
    for n_q, lengths, new in ((1, (0, 1, 63, 64, 150), 1), (2, (40, 0, 130), 0), (40, (3, 100), 40)):
        heads = (8, 1) if spec(name).rope else (4, 2)
        n_q = 65 if spec(name).rope and n_q == 40 else n_q  # more rows than the split-KV kernel takes
        lengths = tuple(min(n, room - new) for n in lengths)
        _run(module, spec(name), CacheCase(*heads, n_q, lengths, new, room, page), {"BLOCK_Q": 16, "BLOCK_KV": 16})


def test_page_table_entries_past_the_last_key_are_not_read() -> None:
    """These entries are invalid pages, and reading one raises."""
    _run(
        target("decode_paged_gqa"),
        spec("decode_paged_gqa"),
        CacheCase(4, 2, 1, (64, 65, 0), 0, 512, 64),
        {"BLOCK_Q": 16, "BLOCK_KV": 64},
    )


@pytest.mark.share(4)
def test_splits_are_combined_in_several_iterations() -> None:
    """700 keys are eleven splits of 64, and an iteration combines eight or four. 65 keys are two splits. Missing splits
    are empty."""
    made = make_spec(
        {
            "name": "num_splits",
            "head_dim": 16,
            "mask": "causal",
            "cache": "contiguous",
            "backward": False,
            "schedule": {"split": {"keys": 64}},
        }
    )
    for splits in (8, 4):
        _run(lower(made), made, CacheCase(2, 2, 2, (700, 65, 64, 0), 0, 700), {"BLOCK_Q": 16, "BLOCK_KV": splits})


@pytest.mark.share(4)
def test_there_is_room_for_all_splits_of_a_fixed_length() -> None:
    """Sequences fill the cache, and splits have one unit. A write outside of a tensor raises."""
    made = make_spec(
        {
            "name": "cached",
            "heads": {"sharing": "gqa"},
            "head_dim": 16,
            "mask": {
                "any_of": [{"sliding_window": {"left": 99, "right": 0}}, {"all_of": ["causal", {"expr": "kv_idx < 4"}]}]
            },
            "cache": "contiguous",
            "schedule": {"split": {"keys": 64}},
            "backward": False,
        }
    )
    _run(lower(made), made, CacheCase(4, 2, 1, (700, 700, 63, 0, 1), 0, 700), {"BLOCK_Q": 16, "BLOCK_KV": 16})
