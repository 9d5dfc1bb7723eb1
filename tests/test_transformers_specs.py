"""Specs for transformers models ahead of time: `attngen specs-for`, and folders of built modules that `register`
gets."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import yaml

from attngen.cli import main
from attngen.errors import AttngenError
from attngen.integrations.transformers import fallback, register
from attngen.integrations.transformers import layer as layers
from attngen.integrations.transformers.ahead import specs_for
from attngen.integrations.transformers.formula import Formula
from attngen.spec import parse_spec
from tests import transformers_models
from tests.transformers_models import (
    DEVICE,
    HEADS,
    SIZES,
    WORDS,
    N,
    calls,
    made,
    run,
)

cache = transformers_models.cache  # a fixture


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0


@pytest.mark.share(8)
def test_specs_for_a_configuration_are_those_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs only modules that were built from the specs of `attngen specs-for`."""
    model = made("gpt_oss")
    config = tmp_path / "config.json"
    model.config.to_json_file(config)
    command("specs-for", str(config), "--out", str(tmp_path / "specs"), "--dtype", "fp32")
    names = {path.stem for path in (tmp_path / "specs").iterdir()}
    variants = ["", "_packed", "_padded"]
    expected = {f"layer_{kind}{variant}_sink_fp32_mqa_d16" for kind in ("causal", "window_8") for variant in variants}
    expected |= {
        f"layer_decode_{kind}{variant}_sink_fp32_mqa_d16"
        for kind in ("causal", "window_8")
        for variant in ("", "_spans")
    }
    assert names == expected
    command("build", *map(str, sorted((tmp_path / "specs").iterdir())), "--out", str(tmp_path / "built"))
    monkeypatch.setattr(layers, "FOUND", {})
    monkeypatch.setattr(layers, "_MODULES", {})
    register(tmp_path / "built")
    monkeypatch.setattr("attngen.api.build", lambda data: pytest.fail(f"builds {data['name']}"))
    for call, counted in calls("gpt_oss", N):
        run(model, "attngen", call, counted)
    ids = torch.randint(3, WORDS, (1, 9), device=DEVICE)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


CONFIGS: dict[str, tuple[Any, set[str]]] = {
    "gemma3": (
        tf.Gemma3Config,
        {"layer_causal_gqa_d256", "layer_window_4096_padded_gqa_d256", "layer_mha_d64", "layer_decode_causal_gqa_d256"},
    ),
    "t5": (
        tf.T5Config,
        {
            "layer_bias_dropout_mha_d64",
            "layer_bias_mha_d64",
            "layer_causal_bias_mha_d64",
            "layer_decode_causal_bias_mha_d64",
        },
    ),
    "bert": (
        tf.BertConfig,
        {"layer_dropout_mha_d64", "layer_padded_dropout_mha_d64", "layer_mha_d64", "layer_padded_mha_d64"},
    ),
    "deepseek": (tf.DeepseekV3Config, {"layer_causal_mha_d192_128", "layer_decode_causal_mha_d192_128"}),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_specs_for_full_models(name: str, tmp_path: Path) -> None:
    """Models of full size are created without weights, and each spec is valid."""
    kind, some = CONFIGS[name]
    kind().to_json_file(tmp_path / "config.json", use_diff=False)
    specs = specs_for(tmp_path / "config.json")
    assert some <= set(specs)
    for title, text in specs.items():
        assert parse_spec(text).name == title == yaml.safe_load(text)["name"]


@pytest.mark.parametrize("name", ["gpt2", "wav2vec2"])
def test_specs_for_models_that_inspect_tokens_or_take_audio(name: str, tmp_path: Path) -> None:
    of_heads = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = (
        tf.Wav2Vec2Config(**of_heads)
        if name == "wav2vec2"
        else tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, pad_token_id=0)
    )
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    whole = {"wav2vec2": "layer_dropout_mha_d16", "gpt2": "layer_causal_dropout_mha_d16"}[name]
    assert whole in specs_for(tmp_path / "config.json")


def test_invalid_configurations_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(AttngenError, match="cannot be read"):
        specs_for(path)
    of_llama = {"model_type": "llama", **SIZES, **HEADS}
    wrong = {
        "{": "is not JSON",
        "[]": "has no `model_type`",
        "{}": "has no `model_type`",
        json.dumps({"model_type": "no_such_model"}): "transformers knows no model `no_such_model`$",
        json.dumps(
            {"model_type": "mine", "auto_map": {}}
        ): "no model `mine`; it comes with code of its own, which attngen does not run",
        json.dumps(
            {**of_llama, "hidden_size": "big"}
        ): "is not a configuration of a llama .*'hidden_size' expected int, got str",
        json.dumps({"model_type": "bloom", **SIZES}): "a bloom does not run with attngen .*, which has no elements",
        json.dumps(
            {"model_type": "falcon", **SIZES}
        ): "no layer of a falcon takes its attention from transformers' interface$",
        json.dumps({**of_llama, "head_dim": 12}): "no layer of the llama runs with attngen: the head_dim is 12",
    }
    for text, why in wrong.items():
        path.write_text(text)
        with pytest.raises(AttngenError, match=why) as found:
            specs_for(path)
        assert "\n" not in str(found.value)


def test_different_layers_have_specs_with_different_names() -> None:
    plain = layers.Layer("gqa", (192, 128), True, False, 50.0, True, True, True, False)
    others = [
        {"softcap": 30.0},
        {"softcap": 0.5},
        {"softcap": None},
        {"tf32": True},
        {"wide": False},
        {"decodes": True, "dropout": False},
    ]
    packed = Formula(({"sliding_window": {"left": 4095, "right": 0}}, {"document": {"sorted": True}}), packed=True)
    names = [layer.spec(packed, "padded")["name"] for layer in (plain, *(replace(plain, **other) for other in others))]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z][a-z0-9_]{0,63}", name) for name in names)
    assert names[0].startswith("layer_window_4096_packed_padded_softcap_50_bias_sink_")


@pytest.mark.share(8)
def test_a_folder_that_is_registered_later_is_used_and_a_missing_module_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "FOUND", {})
    monkeypatch.setattr(layers, "_MODULES", {})
    monkeypatch.setattr(fallback, "WARNED", set())
    model, ids = made("llama"), torch.randint(3, WORDS, (1, 9), device=DEVICE)
    model.set_attn_implementation("attngen")
    register()
    model(ids)
    (first,) = layers._MODULES.values()
    layer, formula, padded = next(iter(layers._MODULES))
    for name, data in {"mine": layer.spec(formula, padded), "other": layer.spec(formula, "padded")}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        command("build", str(tmp_path / f"{name}.yaml"), "--out", str(tmp_path / name))
    register(tmp_path / "other")
    with pytest.warns(
        UserWarning,
        match="no module that `register` was given is of `layer_causal_fp32_mqa_d16`; it was built now, or is",
    ):
        model(ids)
    assert list(layers._MODULES.values()) == [first]
    register(tmp_path / "mine")
    fallback.WARNED.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
    assert list(layers._MODULES.values()) == [layers.FOUND[first.SPEC_HASH]]
