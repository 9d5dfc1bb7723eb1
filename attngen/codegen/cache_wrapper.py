"""The template's view of `with_kvcache`: the part of a wrapper for calls with a KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import sympy

from attngen.codegen.wrapper import Wrapper
from attngen.codegen.wrapper_text import (
    PYTHON_TYPES,
    SCHEMA_TYPES,
    call_text,
    promise_text,
)
from attngen.ir import Input, floordiv, only, symbol, tile
from attngen.ir.dtypes import QUANTISED_TORCH, latent_bytes
from attngen.ir.names import SCALES
from attngen.targets.printing.layout import tuple_text


@dataclass(frozen=True)
class CacheWrapper(Wrapper):
    """The strings of the wrapper of a module with a KV cache."""

    @property
    def first_read(self) -> str:
        """Source of the first key of each sequence that a call with a KV cache reads; empty if the mask hides no key
        from all queries.

        If it depends on data, the source is the first query's own position.
        """
        starts = [op for op in only(self.module.kernel("decode").ops(), tile.Map) if op.name == "kv_first"]
        if not starts:
            return ""
        keys = next((e.args[0] for e in starts[0].expr.atoms(floordiv) if e.args[1] == symbol("BLOCK_KV")), sympy.Max())
        back = next(
            (
                symbol("Nk") - symbol("queries") - e
                for e in keys.args
                if (symbol("Nk") - symbol("queries") - e).is_Integer
            ),
            0,
        )
        return f"(keys - q.shape[2] - {back}).clamp(min=0)" if back else "(keys - q.shape[2]).clamp(min=0)"

    @property
    def promises_in_cache(self) -> list[str]:
        """The promises of a call with a KV cache: of the cache, and of inputs. If an input has a number for each key,
        only the numbers up to the last key are checked."""
        table = ["page_table", *([self.first_read] if self.first_read else [])] if self.page is not None else ["None"]
        args = ["caches", "cache_seqlens", table[0], "new", *(f"first={first}" for first in table[1:])]
        of_cache = f"runtime.promised_of_cache({', '.join([*args, *(f'{name}={name}' for name in self.scales)])})"
        rows = {i.name: "keys" for i in self.module.inputs if i.shape[-1:] == ("Nk",)}
        return [
            of_cache,
            *(promise_text(i, {"Nk": "Nc"}, rows.get(i.name, "")) for i in self.module.inputs if i.promises),
        ]

    @property
    def counts_keys(self) -> bool:
        """True if `promises_in_cache` uses the variable `keys`, the number of keys of each sequence."""
        return bool(re.search(r"\bkeys\b", re.sub(r'"[^"]*"', "", " ".join(self.promises_in_cache))))

    @property
    def page(self) -> int | None:
        """Keys of a page of the cache: 0 if the call decides it, None if there are no pages."""
        cache = self.module.cache
        return None if cache is None or not cache.page else int(cache.page) if cache.page.isdigit() else 0

    def _in_cache(self, i: Input) -> Input:
        """Return an input as a call with a KV cache has it: with a number for each key that a sequence may have."""
        return replace(i, shape=tuple("Nc" if d == "Nk" else d for d in i.shape))

    def help_in_cache(self, i: Input) -> str:
        text = self.help(replace(self._in_cache(i), options=tuple(o for o in i.options if o != "grad"))).replace(
            "Nc", "S"
        )
        return text + "; what is past a sequence's last key does not matter" * ("Nk" in i.shape)

    @property
    def taken_in_cache(self) -> list[str]:
        """Statements that check and convert the inputs of a call with a KV cache."""
        return [self.take(self._in_cache(i)) for i in self.module.inputs]

    @property
    def keywords_in_cache(self) -> list[str]:
        """The keyword arguments of a call with a KV cache for inputs of mask and modifiers."""
        return [f"{i.name}: {'torch.Tensor' if i.shape else PYTHON_TYPES[i.dtype]}" for i in self.module.inputs]

    @property
    def tensors_in_cache(self) -> list[str]:
        """The inputs that may require a gradient."""
        return [i.name for i in self.module.inputs if i.shape and i.dtype in ("f32", "T")]

    @property
    def cached(self) -> list[str]:
        """Prefixes of the caches and of new keys and values that a call passes: for latents only keys."""
        return ["k"] if self.module.rope else ["k", "v"]

    @property
    def scales(self) -> list[str]:
        """The factors of an 8-bit cache that a call passes: factors of latents are in the cache."""
        cache = self.module.cache
        return [name.lower() for name in SCALES.values()] if cache and cache.dtype and not self.row_bytes else []

    @property
    def row_bytes(self) -> int:
        """Bytes per row of an 8-bit latent cache; 0 for other caches."""
        cache = self.module.cache
        return latent_bytes(self.module.head_dim_v, self.module.rope) if cache and cache.scale == "columns" else 0

    @property
    def scales_and_inputs(self) -> list[str]:
        """The last arguments of the function that checks calls with a KV cache."""
        inputs = tuple_text(self.tensors_in_cache)
        return ([tuple_text(self.scales)] if self.scales else []) + (
            [inputs if self.scales else f"inputs={inputs}"] if inputs else []
        )

    @property
    def of_cache(self) -> str:
        """Arguments of host programs after the caches: lengths, the page table, factors."""
        return tuple_text(["cache_seqlens", *(["page_table"] if self.page is not None else []), *self.scales])

    @property
    def cache_tensors(self) -> list[str]:
        """The tensors of a call with a KV cache other than q, keys and values."""
        table = ["page_table"] if self.page is not None else []
        return ["cache_seqlens", *table, *self.scales, *(i.name for i in self.module.inputs if i.shape)]

    @property
    def cache_scalars(self) -> list[str]:
        """The numbers of a call with a KV cache, as operators declare them."""
        return [f"{SCHEMA_TYPES[i.dtype]} {i.name}" for i in self.module.inputs if not i.shape] + ["float scale"]

    @property
    def cache_scalar_values(self) -> list[str]:
        """The value that a call passes for each of `cache_scalars`."""
        return [number.split()[-1] for number in self.cache_scalars[:-1]] + ["SCALE if scale is None else scale"]

    @property
    def of_cached(self) -> str:
        """The dtype and device of a cache, in words."""
        return f"{self.cached_dtype} on the device of q" if self.cached_dtype else "same dtype and device"

    @property
    def cached_dtype(self) -> str:
        """The dtype of a cache; empty if it is that of q. Rows of 8-bit latents have several dtypes, and are bytes."""
        cache = self.module.cache
        if self.row_bytes:
            return "torch.uint8"
        return f"torch.{QUANTISED_TORCH[cache.dtype]}" if cache and cache.dtype else ""

    def tuple_of(self, suffix: str) -> str:
        """Return the source of a tuple of `cached`, each with the suffix."""
        return tuple_text([f"{name}{suffix}" for name in self.cached])

    @property
    def derived_in_cache(self) -> list[tuple[list[str], str]]:
        """(names, call) of functions that derive tensors for kernels from the inputs. Derivations by host programs are
        part of the host program `decode`."""
        return [(list(d.names), call_text(d, {"device": "q.device"})) for d in self.module.derived if not d.program]

    @property
    def sizes_in_cache(self) -> list[str]:
        """Statements that define the sizes which these statements use."""
        text = " ".join([*self.taken_in_cache, *self.promises_in_cache, *(call for _, call in self.derived_in_cache)])
        used = set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", text)))  # without the words of help texts
        rows = "caches[0].shape[2]"
        room = rows if self.page is None else f"page_table.shape[1] * {self.page or rows}"
        sources = {"B": "q.shape[0]", "Hq": "q.shape[1]", "Hkv": "caches[0].shape[1]", "Nq": "q.shape[2]", "Nc": room}
        return [f"{name} = {source}" for name, source in sources.items() if name in used]

    @property
    def passed_in_cache(self) -> list[str]:
        """The value that a call with a KV cache passes for each argument of the host program `decode` after those of
        the cache."""
        cached = ("Q", "K_CACHE", "K_ROPE_CACHE", "V_CACHE", "CACHE_SEQLENS", "PAGE_TABLE", "Nn", *SCALES.values())
        return [a.name.lower() for a in self.module.host("decode").args if a.name not in cached]
