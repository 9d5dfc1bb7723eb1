"""The specs of a model, made from only its configuration: for `attngen build`, ahead of the first call.

The model is made without weights, on torch's meta device, and runs once. Its layers record the calls that they would
run, and run nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from attngen.errors import AttngenError
from attngen.integrations.transformers import register
from attngen.integrations.transformers.attend import recording
from attngen.integrations.transformers.formula import Formula, in_documents
from attngen.integrations.transformers.layer import Layer

LENGTH = 64  # length of the sequence that runs; a mask's formula does not depend on it
SAMPLES = 16000  # length of the sound that runs
NAME = "attngen"
# Settings that drop frames or layers at random.
RANDOM_DROPS = ("apply_spec_augment", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
USES = ("training", "serving")


def specs_for(
    config: Path,
    uses: tuple[str, ...] = USES,
    dtype: torch.dtype | None = None,
    watch: Callable[[int, int, str], None] = lambda done, total, item: None,
) -> dict[str, str]:
    """Return the specs of a model's attention layers.

    Args:
        config: a config.json of transformers, with `model_type`.
        uses: `training`, which is forward and backward, padded, packed and neither; `serving`, which is decoding with a
            KV cache.
        dtype: the model's dtype; None means that of the configuration, or bfloat16 if it has none.
        watch: gets how much is done of how much, and what comes next.

    Returns:
        YAML by the name of the spec.

    Raises:
        AttngenError: the file is not a configuration, transformers does not know its model, or the model cannot run
            without weights; one sentence.
    """
    register(name=NAME)
    read = _read(config)
    layers: dict[tuple[Layer, Formula], None] = {}
    failed = []
    parts = list(_parts(read))
    for i, part in enumerate(parts):
        watch(i, len(parts), f"a {part.model_type} without weights")
        try:
            layers |= dict.fromkeys(_layers(config, part, dtype))
        except AttngenError as error:
            failed.append(str(error))
    if not layers:
        none = f"{config}: no layer of the model takes its attention from transformers' interface"
        raise AttngenError(failed[0] if failed else none)
    for why in failed:
        warnings.warn(f"{why}; its specs are not among these", stacklevel=2)
    specs = {}
    for i, (layer, formula) in enumerate(layers):
        watch(len(parts) + i, len(parts) + len(layers), f"layer {i + 1} of {len(layers)}")
        for data in _specs(layer, formula, uses):
            body = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None)
            specs[data["name"]] = f"# Of {read.model_type}, for transformers: attn_implementation={NAME!r}.\n{body}"
    return dict(sorted(specs.items()))


def _read(path: Path) -> Any:
    """Read a configuration of transformers. Raise AttngenError if the file is not one."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise AttngenError(f"{path}: cannot be read ({error.__class__.__name__})") from None
    except ValueError as error:
        raise AttngenError(f"{path}: is not JSON ({error}); expected a config.json of transformers") from None
    if not isinstance(data, dict) or not isinstance(kind := data.get("model_type"), str):
        raise AttngenError(f"{path}: has no `model_type`; expected a config.json of transformers")
    if kind not in CONFIG_MAPPING:
        hint = "; it comes with code of its own, which attngen does not run" if "auto_map" in data else ""
        raise AttngenError(f"{path}: transformers knows no model `{kind}`{hint}")
    try:
        return AutoConfig.for_model(**data)
    except Exception as error:  # each model raises its own kinds
        raise AttngenError(f"{path}: is not a configuration of a {kind} ({' '.join(str(error).split())})") from None


def _parts(config: Any) -> Iterator[Any]:
    """Yield the configuration, or those of its models if there are several, such as for text and for images."""
    inner = [
        getattr(config, name) for name in ("text_config", "vision_config") if getattr(config, name, None) is not None
    ]
    yield from inner or [config]


def _layers(path: Path, config: Any, dtype: torch.dtype | None) -> list[tuple[Layer, Formula]]:
    """Run one model, and return the calls that its layers would run."""
    from transformers import AutoModel

    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    for name in RANDOM_DROPS:
        if getattr(config, name, None):
            setattr(config, name, type(getattr(config, name))())
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=NAME, dtype=dtype).train()
            for module in model.modules():
                if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it looks at the values of tokens
                    module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None
                if type(module).__name__.endswith("Experts"):  # which tokens an expert gets depends on weights
                    module.forward = lambda x, *_, **__: torch.zeros_like(x)
                settings = getattr(module, "config", None)
                if hasattr(module, "layers") and any(hasattr(settings, name) for name in RANDOM_DROPS):
                    # Only the module, not its layers: in training it would read a random number for each layer.
                    module.training = False
            with recording() as (layers, left):
                model(**_inputs(config, dtype, model.main_input_name))
    except AttngenError as error:
        raise AttngenError(f"{path}: a {config.model_type} does not run with attngen ({error})") from None
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # a model's own table of attention functions
            raise AttngenError(
                f"{path}: no layer of a {config.model_type} takes its attention from transformers' interface"
            ) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AttngenError(
            f"{path}: a {config.model_type} cannot run without weights ({reason}), and runs with them"
        ) from None
    if left and not layers:
        raise AttngenError(f"{path}: no layer of the {config.model_type} runs with attngen: {left[0]}")
    for why in dict.fromkeys(left):
        warnings.warn(f"{path}: layers of the {config.model_type} have no specs: {why}", stacklevel=3)
    return layers


def _inputs(config: Any, dtype: torch.dtype, main: str) -> dict[str, torch.Tensor]:
    """Return inputs without values. main: the name of the model's first input."""
    if getattr(config, "image_size", None) and not getattr(config, "vocab_size", None):
        size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        return {"pixel_values": torch.empty(1, getattr(config, "num_channels", 3), *size, dtype=dtype)}
    if bins := getattr(config, "num_mel_bins", None):
        features = torch.empty(1, bins, 2 * config.max_source_positions, dtype=dtype)
        return {"input_features": features, "decoder_input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    if main == "input_values":
        return {main: torch.empty(1, SAMPLES, dtype=dtype)}
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    return (
        {"input_ids": ids, "decoder_input_ids": ids}
        if getattr(config, "is_encoder_decoder", False)
        else {"input_ids": ids}
    )


def _specs(layer: Layer, formula: Formula, uses: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the specs of a kind of layers: for sequences of one length, padded and packed ones; and with a KV cache."""
    packed = in_documents(formula)
    for kind in {layer: None, replace(layer, dropout=False): None} if "training" in uses else ():
        yield kind.spec(formula, "")
        yield kind.spec(formula, "padded")
        if formula.causal and not packed.why:
            yield kind.spec(packed, "")
    if "serving" in uses and formula.causal:
        decoding = replace(layer, decodes=True, dropout=False)
        yield decoding.spec(formula, "")
        yield decoding.spec(formula, "spans")
