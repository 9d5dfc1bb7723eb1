"""Unknown arguments and keys: the sentence names attngen's equivalent."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import yaml

from attngen.errors import SpecError
from attngen.runtime.unknown import HINTS
from attngen.spec import make_spec, parse_spec
from attngen.spec.sentences import _ELSEWHERE
from tests.helpers import SPECS, built, spec

X = torch.zeros(1, 2, 4, 128, dtype=torch.float16)


@pytest.mark.parametrize("name", sorted(HINTS))
def test_arguments_of_other_libraries_name_the_key_of_a_spec(name: str) -> None:
    """The YAML in each hint is a valid spec whose module has the argument, unless the hint says why there is none."""
    with pytest.raises(
        TypeError, match=rf"^attention: {name} is no argument; expected q, k, v, scale, return_lse; [^\n]*$"
    ) as error:
        built("causal_mha").attention(X, X, X, **{name: True})
    assert HINTS[name] in str(error.value)
    for text in re.findall(r"`((?:mask|score|dropout|heads|cache|outputs|backward|schedule): [^`]*)`", HINTS[name]):
        data: dict[str, Any] = yaml.safe_load(text)
        made = make_spec(
            {"name": "x", "head_dim": 64, **data, **({"backward": False} if "cache" in HINTS[name] else {})}
        )
        arguments = {i.name for i in made.inputs()} | ({"dropout_p", "seed"} if made.dropout else set())
        own = {name} & {
            "bias",
            "alibi_slopes",
            "sink",
            "relative_bias",
            "temperature",
            "dropout_p",
            "seed",
            "key_padding",
            "kv_lengths",
        }
        assert own <= arguments


def test_other_names_get_the_nearest_one_or_all() -> None:
    with pytest.raises(
        TypeError, match="return_les is no argument; expected q, k, v, scale, return_lse; did you mean return_lse\\?$"
    ):
        built("causal_mha").attention(X, X, X, return_les=True)
    with pytest.raises(
        TypeError,
        match="unheard_of is no argument; expected q, k, v, scale, return_lse; an argument for each input comes",
    ):
        built("causal_mha").attention(X, X, X, unheard_of=True)
    with pytest.raises(
        TypeError,
        match=r"^attention.with_kvcache: causal is no argument; expected q, k_cache, v_cache, .*`mask: causal`$",
    ):
        built("decode_gqa").attention.with_kvcache(X, X, X, cache_seqlens=X, causal=True)
    with pytest.raises(
        TypeError, match="^Attention: is_causal is no argument; expected scale, dropout_p; .*`mask: causal`$"
    ):
        built("causal_mha").Attention(is_causal=True)


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
def test_arguments_of_the_constructor_are_refused_in_a_call(name: str) -> None:
    with pytest.raises(
        TypeError,
        match=(
            rf"^Attention: {name} is given to a call; expected it where the module is made, as in "
            rf"Attention\({name}=0.1\)$"
        ),
    ):
        built("causal_dropout_mqa").Attention()(X, X, X, **{name: 0.3})


def test_every_call_accepts_check() -> None:
    """It is accepted also if no input has promises, so that callers need not know which modules have some."""
    assert "check" not in inspect.signature(built("causal_mha").attention).parameters
    assert built("causal_mha").attention(X, X, X, check=True).shape == X.shape


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SPECS)
def test_every_module_names_the_unknown_argument(name: str) -> None:
    attention = built(name).attention
    calls = [
        ("attention", attention),
        *([("attention.with_kvcache", attention.with_kvcache)] if spec(name).cache else []),
    ]
    for function, call in calls:
        given = [
            p.name
            for p in inspect.signature(call).parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        with pytest.raises(TypeError, match=f"^{function}: enable_gqa is no argument; expected q, "):
            call(**dict.fromkeys(given), enable_gqa=True)


@pytest.mark.share(4)
@pytest.mark.parametrize("key", sorted(_ELSEWHERE))
def test_keys_of_other_libraries_name_the_key_of_a_spec(key: str) -> None:
    with pytest.raises(SpecError, match=f"line 3: `{key}` is no known key; ") as error:
        parse_spec(f"name: x\nhead_dim: 64\n{key}: 8\n")
    assert _ELSEWHERE[key] in str(error.value)
    for text in re.findall(r"`((?:mask|score|heads|cache|dropout): [^`]*)`", _ELSEWHERE[key]):
        make_spec({"name": "x", "head_dim": 64, "backward": False, **yaml.safe_load(text)})
