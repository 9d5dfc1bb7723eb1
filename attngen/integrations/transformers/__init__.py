"""attngen as an attention implementation of Hugging Face's transformers (5 and later).

import attngen.integrations.transformers as hf
hf.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attngen")

With `register(mesh=...)` the rows of each sequence lie on the ranks of the mesh: each calls the model with its part of
a batch, by `shard_batch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.errors import AttngenError

__all__ = ["register", "shard_batch", "sum_gradients"]
_HOMES = {
    "shard_batch": "attngen.integrations.transformers.batch",
    "sum_gradients": "attngen.distributed.gradients",
}

if TYPE_CHECKING:
    from attngen.distributed.gradients import sum_gradients as sum_gradients
    from attngen.integrations.transformers.batch import shard_batch as shard_batch
else:

    def __getattr__(name: str) -> Any:
        """Import a function on first access, so that registering is cheap."""
        if name not in _HOMES:
            raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
        import importlib

        globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return globals()[name]


def register(
    modules: str | os.PathLike[str] | None = None,
    *,
    name: str = "attngen",
    mesh: Any = None,
    chunk: int = 384,
    method: str = "auto",
    balance: str = "auto",
) -> None:
    """Make attngen an `attn_implementation` of transformers: its attention function, and its mask function.

    A model's specs are found while it runs: the mask function of each kind of layers is traced once, and its module is
    built at the first call, or taken from the cache (see `attngen.build`).

    Args:
        modules: a folder of modules that were built ahead of time from the specs that `attngen specs-for` writes; they
            are used in place of those of the cache. A layer for which it has none uses the cache, with one warning
            that names the spec.
        name: the name for `attn_implementation`. Names that contain `flash`, and transformers' own names, have other
            meanings.
        mesh: the ranks that share each sequence: a process group, or a DeviceMesh of one dimension, such as
            `mesh["cp"]`; or of two, of which the second is exchanged for heads. Models then take only batches of
            `shard_batch`.
        chunk: with a mesh, the rows that ranks get at a time: a multiple of 64, at most 4096. Sequences have any length
            of at least one chunk for each rank.
        method, balance: with a mesh, how keys get to queries and how rows are chosen: see `attngen.distributed.plan`.

    Raises:
        AttngenError: transformers is missing or too old; the folder has no module; the name, the chunk or the method is
            not allowed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise AttngenError(
            "attngen.integrations.transformers: needs transformers 5 or later; pip install 'transformers>=5'"
        ) from None
    from attngen.integrations.transformers.attend import attend
    from attngen.integrations.transformers.layer import prefer
    from attngen.integrations.transformers.mask import mask_of

    found = {AttentionInterface().get(name), AttentionMaskInterface().get(name)} - {None}
    if not all(getattr(x, "__module__", "").startswith(__name__) for x in found):
        raise AttngenError(
            f"register: transformers has an implementation `{name}` already; expected a name of its own for attngen"
        )
    if "flash" in name or "|" in name or "/" in name:
        other = "means something else to transformers; expected one without `flash`, `|` and `/`"
        raise AttngenError(f"register: the name `{name}` {other}")
    if modules is not None:
        prefer(_modules_in(Path(modules)))
    functions: tuple[Any, Any] = attend, mask_of
    if mesh is not None:
        from attngen.integrations.transformers.ranks import OverRanks

        over_ranks = OverRanks(mesh, chunk, method, balance)
        functions = over_ranks.attend, over_ranks.mask_of
    AttentionInterface.register(name, functions[0])
    AttentionMaskInterface.register(name, functions[1])


def _modules_in(folder: Path) -> list[Any]:
    """Load the generated modules of a folder. Raise AttngenError if it has none."""
    from attngen.api import load

    found = sorted(path.parent for path in folder.glob("*/schedule.ir"))
    if not found:
        raise AttngenError(f"register: {folder} has no generated module; expected what `attngen build --out` writes")
    return [load(module) for module in found]
