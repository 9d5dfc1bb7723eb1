"""The grids that come with attngen, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attngen.bench.cases.grids import Cell, Grid, cell, read_grid
from attngen.errors import AttngenError, shown, suggest
from attngen.spec import Spec, make_spec

ROWS = (512, 1024, 2048, 4096, 8192, 16384)


def _spec(mask: str, sharing: str, dim: int, **more: Any) -> Spec:
    name = f"{'full' if mask == 'none' else mask}{'_dropout' if more.get('dropout') else ''}_{sharing}_d{dim}"
    return make_spec({"name": name, "heads": {"sharing": sharing}, "head_dim": dim, "mask": mask, **more})


def paper() -> Grid:
    """Return the seed study's grid: 4 sequences, 16 heads, D = 64, fp16, causal and not, MHA and MQA, with naive."""
    specs = [_spec(mask, sharing, 64) for mask in ("causal", "none") for sharing in ("mha", "mqa")]
    cells = tuple(cell("paper", s, n, n, batch=4, dtype="fp16") for s in specs for n in ROWS)
    return Grid("paper", cells, ("ours", "flash", "naive"))


def fa3() -> Grid:
    """Return FlashAttention-3's grid: 16k tokens, hidden size 2048, D in {64, 128, 256}, bf16, causal and not."""
    specs = [_spec(mask, "mha", dim) for dim in (64, 128, 256) for mask in ("causal", "none")]
    cells = tuple(cell("fa3", s, n, n, heads=2048 // s.head_dim.qk, dtype="bf16") for s in specs for n in ROWS)
    return Grid("fa3", cells, ("ours", "flash", "cudnn", "flex", "fa4"))


# ---------------------------------------------------------------------------------------------- flex

DOCUMENT = 1000  # rows of a document
MEMORY_ROWS = 131072  # rows of the cell whose memory is shown
DISTANCE = 128  # largest distance of the relative bias


@dataclass(frozen=True)
class Variant:
    """One attention of the grid `flex`: its title in the table, and the fields of its spec."""

    title: str
    mask: Any
    score: tuple[Any, ...] = ()
    deterministic: bool = True

    def spec(self, name: str) -> Spec:
        data = {
            "name": f"flex_{name}",
            "heads": {"sharing": "gqa"},
            "head_dim": 128,
            "dtype": "bf16",
            "mask": self.mask,
        }
        unordered = {} if self.deterministic else {"backward": {"deterministic": False}}
        return make_spec({**data, "score": list(self.score), **unordered} if self.score else data)


_SAME = {"expr": "ids[b, q_idx] == ids[b, kv_idx]", "params": {"ids": {"tensor": ["B", "Nk"], "dtype": "int32"}}}
_STREAM = {"any_of": [{"sliding_window": {"left": 1023}}, {"sink_tokens": {"count": 4}}]}
_TABLE = ({"relative_bias": {"max_distance": DISTANCE}},)
FLEX = {
    "causal": Variant("GQA causal", "causal"),
    "window": Variant("window 1024", {"sliding_window": {"left": 1023, "right": 0}}),
    "documents": Variant(f"documents of {DOCUMENT}", {"all_of": ["causal", {"document": {"sorted": True}}]}),
    "unsorted": Variant(f"documents of {DOCUMENT}, in any order", {"all_of": ["causal", "document"]}),
    "data": Variant(f"documents of {DOCUMENT}, as an expression", {"all_of": ["causal", _SAME]}),
    "softcap": Variant("softcap 30", "causal", ({"softcap": 30.0},)),
    "alibi": Variant("ALiBi", "causal", ("alibi",)),
    "temperature": Variant("learned temperature", "causal", ({"temperature": {"learnable": True}},)),
    "prefix": Variant("prefix-LM 1024", {"prefix_lm": {"length": 1024}}),
    "streaming": Variant("streaming 4 + 1024", {"all_of": ["causal", _STREAM]}),
    "dilated": Variant("dilated 4, 2048 away at most", {"dilated": {"step": 4, "reach": 2048}}),
    "relative": Variant(f"relative bias {DISTANCE}", "causal", _TABLE),
    "atomic": Variant(f"relative bias {DISTANCE}, atomics", "causal", _TABLE, deterministic=False),
}


def flex() -> Grid:
    """Return the grid of FlexAttention's variants: B = 2, 16 query heads over 4, N = 8192, D = 128, bf16; documents of
    131,072 rows for their memory."""
    cells = [_variant(name, 8192, 2) for name in FLEX]
    return Grid("flex", (*cells, _variant("documents", MEMORY_ROWS, 1)), ("ours", "flex"))


def _variant(name: str, rows: int, batch: int) -> Cell:
    spec = FLEX[name].spec(name)
    call = {"document": DOCUMENT} if any(i.dtype == "i32" for i in spec.inputs()) else {}
    return cell("flex", spec, rows, rows, batch=batch, call=call)


# ---------------------------------------------------------------------------------------------- variants

DROPOUT_ROWS, DROPOUT_P = 4096, 0.1
BLOCK_ROWS, BLOCK, SHARES = 16384, 128, (1, 2, 4, 8, 16)  # one of this many blocks is visible


def variants() -> Grid:
    """Return the grid for the cost of dropout (N = 4k, hidden size 2048, D in {128, 64}) and the saving by block
    sparsity (N = 16k, D = 128, 16 heads)."""
    cells = []
    for dim in (128, 64):
        for mask in ("causal", "none"):
            plain, drops = _spec(mask, "mha", dim), _spec(mask, "mha", dim, dropout=True)
            for spec, p in ((plain, 0.0), (drops, 0.0), (drops, DROPOUT_P)):
                call = {"dropout_p": p} if p else {}
                cells.append(
                    cell("variants", spec, DROPOUT_ROWS, DROPOUT_ROWS, heads=2048 // dim, dtype="bf16", call=call)
                )
    sparse = make_spec({"name": "block_sparse_d128", "head_dim": 128, "mask": {"block_sparse": {"block": BLOCK}}})
    cells.append(cell("variants", _spec("none", "mha", 128), BLOCK_ROWS, BLOCK_ROWS, batch=1, dtype="bf16"))
    cells += [
        cell("variants", sparse, BLOCK_ROWS, BLOCK_ROWS, batch=1, dtype="bf16", call={"share": share})
        for share in SHARES
    ]
    return Grid("variants", tuple(cells), ("ours", "flash"))


# ---------------------------------------------------------------------------------------------- decode

K = 1024
CONTEXTS = {  # keys of each sequence, by the number of sequences: up to 16 GiB of K and V
    1: (K, 4 * K, 16 * K, 64 * K, 128 * K),
    8: (K, 4 * K, 8 * K, 16 * K, 64 * K, 128 * K),
    64: (K, 4 * K, 8 * K, 16 * K, 64 * K),
    128: (K, 4 * K, 16 * K),
}
LONG = ((64, 8 * K), (8, 64 * K))  # sequences and keys of cells that are compared with contiguous rows, one query
LEAST_RAGGED = 512


def _cached(name: str, page: int | str = "", stored: Any = MappingProxyType({}), **more: Any) -> Spec:
    """Return a spec with a KV cache, in pages of `page` keys if given; `stored` has the cache's dtype and scale."""
    cache = {"paged": {"page_size": page}, **stored} if page else "contiguous"
    shape = {"heads": {"sharing": "gqa"}, "head_dim": 128, "dtype": "bf16", "mask": "causal"}
    return make_spec({"name": f"decode_{name}", **shape, "cache": cache, "backward": False, **more})


def _documents(order: str) -> dict[str, Any]:
    """Return a mask of documents, whose numbers rise if they are sorted."""
    return {"all_of": ["causal", {"document": {"sorted": order == "sorted"}}]}


def _step(spec: Spec, batch: int, keys: int, queries: int = 1, heads: int = 32, **call: float) -> Cell:
    kv_heads = 8 if spec.heads.sharing == "gqa" else None
    return cell("decode", spec, queries, keys, batch=batch, heads=heads, kv_heads=kv_heads, call=call)


def decode() -> Grid:
    """Return the grid of decoding with a KV cache: 32 query heads over 8, D = 128, bf16; 1k to 128k keys by 1 to 128
    sequences; then drafts, pages, sequences of 512 to 64k keys, 8-bit keys, Mistral's window of 1024 keys, gpt-oss's
    sinks, documents of 1024 keys, MLA with 16 and 128 heads and in 8 bits."""
    rows, pages = _cached("rows"), {size: _cached(f"page{size}", size) for size in (16, 64, 256)}
    quantised = {of: _cached(f"fp8_{of}", 64, {"dtype": "fp8_e4m3", "scale": of}) for of in ("head", "page")}
    window = _cached("window", 16, mask={"sliding_window": {"left": 1023, "right": 0}})
    fixed = {"mask": {"sliding_window": {"left": 127, "right": 0}}, "schedule": {"split": {"keys": 1024}}}
    sinks = _cached("sinks", "any", head_dim=64, score="sink", **fixed)
    latents = {"heads": {"sharing": "mqa"}, "head_dim": {"qk": 576, "v": 512}, "kv": {"latent": {"rope": 64}}}
    mla, mla_fp8 = _cached("mla", 64, **latents), _cached("fp8_mla", 64, {"dtype": "fp8_e4m3"}, **latents)
    documents = [_cached(f"documents_{order}", 64, mask=_documents(order)) for order in ("sorted", "unsorted")]
    cells = [_step(rows, batch, keys) for batch, contexts in CONTEXTS.items() for keys in contexts]
    cells += [_step(rows, *size, queries) for size in LONG for queries in (4, 16)]
    cells += [_step(spec, *size) for size in LONG for spec in pages.values()]
    cells += [_step(_cached("page_any", "any"), *LONG[0], page=size) for size in (16, 64)]
    cells += [_step(spec, 64, 64 * K, ragged=LEAST_RAGGED) for spec in (rows, pages[64], pages[16])]
    cells += [_step(quantised["head"], *size) for size in ((8, 8 * K), *LONG)]
    cells += [_step(quantised["page"], *LONG[0]), _step(quantised["head"], 64, 64 * K, ragged=LEAST_RAGGED)]
    cells += [_step(window, 8, keys) for keys in (K, 128 * K)]
    cells += [_step(sinks, *LONG[0], heads=64)]
    cells += [_step(spec, 8, 128 * K, document=K) for spec in documents]
    cells += [
        _step(spec, 8, keys, heads=heads) for spec in (mla, mla_fp8) for keys in (8 * K, 64 * K) for heads in (16, 128)
    ]
    cells += [_step(mla, *size, heads=128) for size in ((1, 64 * K), (32, 4 * K))]
    return Grid("decode", tuple(cells), ("ours", "flash", "cudnn", "flex", "flashinfer", "naive"))


def mods() -> Grid:
    """Return the grid of masks and modifiers that people write for FlexAttention (mods/), each at a suitable length of
    about 8k, 16 heads, D = 128, bf16."""
    from attngen.bench.cases.functions import cell_of
    from attngen.bench.mods import MODS

    return Grid("mods", tuple(cell_of("mods", mod, mod.bench) for mod in MODS.values()), ("ours", "flex"))


GRIDS = {"paper": paper, "fa3": fa3, "flex": flex, "variants": variants, "decode": decode, "mods": mods}
TABLED = ("flex", "variants", "mods")  # grids with separate tables (reports.py) and without plots


def find_grid(name: str) -> Grid:
    """Return a grid by its name, or from its file."""
    if name in GRIDS:
        return GRIDS[name]()
    if not Path(name).is_file():
        hint = suggest(name, GRIDS)
        raise AttngenError(f"--grid {shown(name)} is no grid of attngen and no file; {hint}")
    return read_grid(Path(name))
