"""Promises about the data of a call: for each promise that the IR of a module declares, a call that breaks it gets one
sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.conformance.harness import load_module
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.sizes import Sizes
from attngen.masks import registry
from attngen.verify.inputs import verify_interface
from tests.helpers import CUDA, ROOT, SPECS, built, spec, target

pytestmark = pytest.mark.numerics

N = 150  # two pages of 64 and part of a third, or one block of 128 and part of a second
PROMISING = [name for name in SPECS if target(name).cache is None and any(i.promises for i in target(name).inputs)]
CACHES = [name for name in SPECS if target(name).cache is not None]
BLOCKS = [name for name in SPECS if target(name).blocks is not None]
RISING = [name for name in SPECS if any(d.rising for d in target(name).derived)]


def test_specs_make_every_kind_of_promise() -> None:
    options = {
        option.partition("=")[0] for name in SPECS for i in target(name).inputs if i.shape for option in i.options
    }
    assert {"least", "most", "first", "rising"} <= options
    assert len(PROMISING) >= 2 and len(CACHES) >= 8 and len(BLOCKS) >= 3 and len(RISING) >= 3


def broken(name: str, x: torch.Tensor, most: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (regular expression of the error, input with a broken promise) for each promise of an input of a committed
    spec."""
    promises = next(i for s in SPECS for i in target(s).inputs if i.name == name and i.promises).promises

    def changed(at: int, value: int) -> torch.Tensor:
        found = x.clone()
        found[..., at] = value
        return found

    if "first" in promises:
        yield rf"{name}\[0\] is 1; expected 0: ", changed(0, 1)
    if "least" in promises:
        yield rf"{name}\[0\] is -1; expected a number from 0 to {most}: ", changed(0, -1)
    if "most" in promises:
        yield rf"{name}\[\d+\] is {most + 1}; expected .*{most}: ", changed(-1, most + 1)
    if "rising" in promises:
        yield rf"{name}\[(0, )?1\] is -1, after 0; expected numbers that never fall: ", changed(1, -1)


@cache
def arguments(name: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    s, device = spec(name), "cuda" if CUDA else "cpu"
    g = torch.Generator().manual_seed(0)
    given = s.mask.sample(Sizes(1, 2, 2, N, N), g)
    heads = {"mha": 2, "mqa": 1, "gqa": 1}[s.heads.sharing]
    q, k = (torch.randn(1, h, N, s.head_dim.qk, generator=g).half().to(device) for h in (2, heads))
    v = torch.randn(1, heads, N, s.head_dim.v, generator=g).half().to(device)
    return (q, k, v), {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def refused(match: str) -> AbstractContextManager[Any]:
    return pytest.raises(ValueError, match=match)


@pytest.mark.parametrize("name", PROMISING)
def test_broken_promises_of_inputs_are_refused(name: str) -> None:
    attention = built(name).attention
    tensors, given = arguments(name)
    attention(*tensors, **given, check=True)
    tried = 0
    for i in target(name).inputs:
        for match, x in broken(i.name, given[i.name], N) if i.promises else ():
            with refused(f"^attention: {match}{re.escape(i.help)}$"):
                attention(*tensors, **{**given, i.name: x}, check=True)
            attention(*tensors, **{**given, i.name: x}, check=False)  # some defined result, and never a crash
            tried += 1
    assert tried


@pytest.mark.parametrize("name", [n for n in PROMISING if "cu_seqlens_q" in arguments(n)[1]])
def test_plans_check_what_they_are_made_of(name: str) -> None:
    _, given = arguments(name)
    plan = built(name).attention.plan
    plan(*given.values(), N, N)
    for input_, x in given.items():
        for match, wrong in broken(input_, x, N):
            with refused(match):
                plan(*{**given, input_: wrong}.values(), N, N, check=True)


@pytest.mark.parametrize("name", [n for n in RISING if target(n).cache is None])
def test_plans_whose_numbers_fall_are_refused(name: str) -> None:
    attention = built(name).attention
    tensors, given = arguments(name)
    sizes = (N, N) if "cu_seqlens_q" in given else (N,)
    plan = attention.plan(*given.values(), *sizes)
    attention(*tensors, plan=plan, check=True)
    for d in target(name).derived:
        for field in d.rising:
            x = getattr(plan, field).clone()
            x[..., -1] = -1
            with refused(
                rf"^attention: plan.{field}\[.*is -1, after \d+; expected numbers that never fall: what "
                rf"attention.plan makes$"
            ):
                attention(*tensors, plan=plan._replace(**{field: x}), check=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_lists_of_blocks_that_differ_from_one_another_are_refused(name: str) -> None:
    attention = built(name).attention
    tensors, _ = arguments(name)
    size = target(name).blocks.size  # type: ignore[union-attr]
    tiles = -(-N // size)
    mask = torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(1)) < 0.6
    plan = attention.plan(mask.to(tensors[0].device))
    attention(*tensors, block_mask=plan, check=True)
    for field in plan._fields:
        for edit in (lambda x: x + 1, lambda x: x - 1, lambda x: x.flip(-1).contiguous()):
            with refused(
                r"^attention: (kv|q)_(rank|list)\[.*of the plan is -?\d+; expected \d+, which follows from its "
                r"other lists"
            ):
                attention(*tensors, block_mask=plan._replace(**{field: edit(getattr(plan, field))}), check=True)


def cache_cases(
    page: int | None, full: torch.Tensor, numbers: Callable[..., torch.Tensor]
) -> list[tuple[str | None, dict[str, Any]]]:
    """Return (expression that the error matches, or None for a valid call; changed arguments) of calls with a cache of
    48 rows, with pages of `page` rows if it is not None. `full` are lengths that leave no room for new keys."""
    falls = numbers([0] * 6 + [-1] * 42, [0] * 48)
    cases: list[tuple[str | None, dict[str, Any]]] = [
        (None, {}),
        (
            (
                r"cache_seqlens\[0\] is 47; expected a number from 0 to 46: the cache has room for 48 keys .* and "
                r"the call 2 new"
            ),
            {"cache_seqlens": full},
        ),
        (r"cache_seqlens\[1\] is -1; expected a number from 0 to 46", {"cache_seqlens": numbers(0, -1)}),
        (r"kv_lengths\[1\] is 49; expected a number from 0 to 48: ", {"kv_lengths": numbers(7, 49)}),
        (r"document_ids\[0, 6\] is -1, after 0; expected numbers that never fall: ", {"document_ids": falls}),
        # past the last key
        (None, {"document_ids": falls, "cache_seqlens": numbers(4, 20), "kv_lengths": numbers(6, 3)}),
    ]
    if page is not None:
        cases += [
            (
                r"page_table\[0, 0\] is -1; expected a number from 0 to 5: .*6 pages, and sequence 0",
                {"page_table": numbers([-1, 1, 2], [3, 4, 5])},
            ),
            (r"page_table\[1, 1\] is 6; expected a number from 0 to 5", {"page_table": numbers([0, 1, 2], [3, 6, 5])}),
            (None, {"page_table": numbers([0, 2_000_000_000, -7], [3, 4, 99])}),  # past the last keys
            (
                r"page_table\[0, 0\] is 4, where another sequence has keys",
                {"page_table": numbers([4, 1, 2], [3, 4, 5])},
            ),
            # before the first key of the last query's document
            (None, {"page_table": numbers([0, 1, 2], [-1, 4, 5])}),
            # the call only reads
            (None, {"page_table": numbers([0, 1, 2], [0, 4, 5]), "k": None, "v": None, "kv_lengths": numbers(5, 3)}),
        ]
    return cases


@pytest.mark.share(16)
@pytest.mark.parametrize("page", [None, 16])
def test_caches_are_checked(page: int | None, tmp_path: Path) -> None:
    """Calls check every promise about a cache, with and without pages. With `check=False`, new keys without room are
    dropped."""
    from attngen.spec import make_spec
    from tests.helpers import module_of

    cache_ = "contiguous" if page is None else {"paged": {"page_size": page}}
    mask: Any = {"all_of": ["causal", {"key_padding": {"lengths": True}}, {"document": {"sorted": True}}]}
    made = make_spec(
        {"name": "checked", "head_dim": 16, "mask": mask, "dtype": "fp16", "cache": cache_, "backward": False}
    )
    attention = module_of(made, tmp_path / "checked").attention
    device = "cuda" if CUDA else "cpu"
    shape = (2, 48, 2, 16) if page is None else (6, 16, 2, 16)
    q, new = torch.randn(2, 2, 1, 16).half().to(device), torch.randn(2, 2, 2, 16).half().to(device)
    caches = [torch.randn(shape).half().to(device) for _ in "kv"]

    def numbers(*x: Any) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    def call(**changed: Any) -> None:
        table = {} if page is None else {"page_table": numbers([0, 1, 2], [3, 4, 5])}
        given = {
            "cache_seqlens": numbers(5, 20),
            "kv_lengths": numbers(7, 3),
            "document_ids": numbers([0] * 48, [0] * 16 + [1] * 32),
        }
        attention.with_kvcache(q, *caches, **{"k": new, "v": new, "check": True, **table, **given, **changed})

    full = numbers(47, 5)
    for match, changed in cache_cases(page, full, numbers):
        with nullcontext() if match is None else refused(f"^attention.with_kvcache: {match}"):
            call(**changed)
    call(cache_seqlens=full, check=False)


def test_factors_of_caches_are_checked() -> None:
    device = "cuda" if CUDA else "cpu"
    caches = [torch.zeros(2, 64, 2, 128, device=device).to(torch.float8_e4m3fn) for _ in "kv"]
    q = torch.randn(1, 2, 1, 128, device=device).half()
    numbers = {
        "cache_seqlens": torch.tensor([3], dtype=torch.int32),
        "page_table": torch.tensor([[1]], dtype=torch.int32),
    }
    given = {n: x.to(device) for n, x in numbers.items()} | {
        n: torch.ones(2, device=device) for n in ("k_scale", "v_scale")
    }
    for scale in ("k_scale", "v_scale"):
        for wrong, text in ((0.0, "0.0"), (-1.0, "-1.0"), (float("inf"), "inf"), (float("nan"), "nan")):
            with refused(rf"^attention.with_kvcache: {scale}\[1\] is {text}; expected a positive, finite number$"):
                built("decode_paged_fp8_gqa").attention.with_kvcache(
                    q, *caches, **{**given, scale: torch.tensor([1.0, wrong], device=device)}, check=True
                )


def test_the_environment_says_whether_calls_check(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "generated" / "causal_padding_gqa"
    for asked, checks in (("1", True), ("0", False), ("", not CUDA)):
        monkeypatch.setenv("ATTNGEN_CHECK", asked)
        assert checks is load_module(folder).CHECKS
    monkeypatch.setenv("ATTNGEN_CHECK", "yes")
    with refused("^attention: ATTNGEN_CHECK is `yes` in the environment; expected 1, 0, or nothing$"):
        load_module(folder)


class PassOn(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_that_are_traced_are_not_checked() -> None:
    tensors, given = arguments("causal_padding_gqa")
    attention = built("causal_padding_gqa").attention
    with PassOn():
        attention(*tensors, kv_lengths=given["kv_lengths"] + N, check=True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("i32[B] most=B | number", r"has the option `most=B`; expected grad, .* most=Nq, most=Nk"),
        ("i32[B] first=x | number", r"has the option `first=x`"),
        ("i32[B] falling | number", r"has the option `falling`"),
        ("f32[B] least=0 | number", r"is f32 and has the option `least`; expected i32"),
    ],
)
def test_the_verifier_refuses_other_promises(line: str, why: str) -> None:
    text = (ROOT / "generated" / "causal_padding_gqa" / "schedule.ir").read_text(encoding="utf-8")
    text = re.sub(r"input kv_lengths : .*? \| number", f"input kv_lengths : {line}", text)
    with pytest.raises(VerifyError, match=why):
        verify_interface(parse_module(text, "text"))


def test_masks_with_integers_say_what_these_promise() -> None:
    """Every mask of the library that reads an integer tensor declares promises, except for `document_ids`."""
    silent = set()
    for mask in registry().values():
        for fields in ({}, {"lengths": True}, {"packed": True}, {"sorted": True}, {"per": "batch"}):
            with suppress(ValidationError):  # the mask has no such field, or needs others
                silent |= {i.name for i in mask(**fields).inputs() if i.dtype == "i32" and i.shape and not i.promises}
    assert silent == {"document_ids"}  # any ids are valid
