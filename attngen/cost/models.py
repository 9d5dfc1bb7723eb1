"""Sizes of known models, each with its source, for the numbers of `attngen explain --theory`."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.errors import AttngenError, suggest


@dataclass(frozen=True)
class Model:
    """A transformer model. The traffic of attention is assumed to be the same in all layers."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    hidden: int
    source: str

    @property
    def sharing(self) -> str:
        """How query heads share K/V heads, in the words of a spec."""
        return "mha" if self.kv_heads == self.q_heads else "mqa" if self.kv_heads == 1 else "gqa"


_LLAMA = "The Llama 3 Herd of Models (2024), table 3"
MODELS = {
    m.name: m
    for m in (
        Model("llama-8b", 32, 32, 8, 128, 128, 4096, _LLAMA),
        Model("llama-70b", 80, 64, 8, 128, 128, 8192, _LLAMA),
        Model("llama-405b", 126, 128, 8, 128, 128, 16384, _LLAMA),
        Model("mistral-7b", 32, 32, 8, 128, 128, 4096, "Mistral 7B (2023), table 1"),
        Model("gpt2-small", 12, 12, 12, 64, 64, 768, "GPT-2 (2019), table 2, and the heads of the released model"),
        Model("bert-base", 12, 12, 12, 64, 64, 768, "BERT (2018), section 3"),
        Model("deepseek-v3", 61, 128, 128, 192, 128, 7168, "DeepSeek-V3 Technical Report (2024), section 4.2"),
    )
}


def find_model(name: str) -> Model:
    """Return the model of a name; raise AttngenError with a hint if there is none."""
    if name not in MODELS:
        raise AttngenError(f"--model `{name}` is not a model that attngen knows; {suggest(name, MODELS)}")
    return MODELS[name]
