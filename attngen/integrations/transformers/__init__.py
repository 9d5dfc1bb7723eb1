"""attngen as an attention implementation of Hugging Face's transformers (5 and later).

import attngen.integrations.transformers as hf
hf.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attngen")
"""

from __future__ import annotations

import os
from pathlib import Path

from attngen.errors import AttngenError

__all__ = ["register"]


def register(modules: str | os.PathLike[str] | None = None, *, name: str = "attngen") -> None:
    """Make attngen an `attn_implementation` of transformers: its attention function, and its mask function.

    A model's specs are found while it runs: the mask function of each kind of layers is traced once, and its module is
    built at the first call, or taken from the cache (see `attngen.build`).

    Args:
        modules: a folder of modules that were built ahead of time from the specs that `attngen specs-for` writes; they
            are used in place of those of the cache. A layer for which it has none uses the cache, with one warning
            that names the spec.
        name: the name for `attn_implementation`. Names that contain `flash`, and transformers' own names, have other
            meanings.

    Raises:
        AttngenError: transformers is missing or too old; the folder has no module; the name is not allowed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise AttngenError(
            "attngen.integrations.transformers: needs transformers 5 or later; pip install 'transformers>=5'"
        ) from None
    from attngen.integrations.transformers.attend import attend, prefer
    from attngen.integrations.transformers.mask import mask_of

    if {AttentionInterface().get(name), AttentionMaskInterface().get(name)} - {None, attend, mask_of}:
        raise AttngenError(
            f"register: transformers has an implementation `{name}` already; expected a name of its own for attngen"
        )
    if "flash" in name or "|" in name or "/" in name:
        raise AttngenError(
            f"register: the name `{name}` means something else to transformers; expected one without `flash`, `|` "
            "and `/`"
        )
    if modules is not None:
        from attngen.api import load

        folders = sorted(path.parent for path in Path(modules).glob("*/schedule.ir"))
        if not folders:
            raise AttngenError(
                f"register: {modules} has no generated module; expected what `attngen build --out` writes"
            )
        prefer(map(load, folders))
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_of)
