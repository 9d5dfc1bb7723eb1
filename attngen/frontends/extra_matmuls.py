"""Converts extra dot products in a score, such as the positional part of multi-head latent attention, to columns of q
and k.

`s + 0.5 * sum(i, 64, a[b, h, q_idx, i] * c[b, 0, kv_idx, i])` is the dot product of longer rows of q and k. Written out
it would be 64 scalar products per score; as columns it is part of the QK matmul, in the element type of q and k.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

import torch

from attngen.frontends.trace import Table, Traced
from attngen.ir.sizes import Sizes


@dataclass(frozen=True)
class Product:
    """A dot product: factor * sum over i of queries[..., q_idx, i] * keys[..., kv_idx, i].

    at_queries and at_keys are the indices before the last, as text over `b`, `h` and a position.
    """

    queries: Table
    at_queries: tuple[str, ...]
    keys: Table
    at_keys: tuple[str, ...]
    factor: float

    @property
    def width(self) -> int:
        return self.queries.shape[-1]


def split_products(traced: Traced) -> tuple[Traced, tuple[Product, ...]]:
    """Split the dot products that a score adds to `s` from the traced pair of functions."""
    if traced.score is None:
        return traced, ()
    tables = {t.name: t for t in traced.tables}
    terms = _terms(ast.parse(traced.score, mode="eval").body)
    found = [_product(term, tables) for term in terms]
    products = tuple(p for p in found if p is not None)
    rest = [term for term, p in zip(terms, found) if p is None]
    if not products or not any(isinstance(term, ast.Name) and term.id == "s" for term in rest):
        return traced, ()
    text = " + ".join(map(ast.unparse, rest))
    left = replace(traced, score=None if text == "s" else text)
    return replace(left, tables=tuple(t for t in left.tables if left.reads(t))), products


def _terms(e: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum."""
    return [*_terms(e.left), *_terms(e.right)] if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add) else [e]


def _product(e: ast.expr, tables: dict[str, Table]) -> Product | None:
    """Return a term as a dot product of rows; None if it is something else."""
    factor = 1.0
    while isinstance(e, ast.BinOp) and isinstance(e.op, (ast.Mult, ast.Div)):
        number, rest = (e.right, e.left) if isinstance(e.right, ast.Constant) else (e.left, e.right)
        if not isinstance(number, ast.Constant) or isinstance(e.op, ast.Div) and number is not e.right:
            return None
        value = float(number.value)  # type: ignore[arg-type]
        factor, e = factor * value if isinstance(e.op, ast.Mult) else factor / value, rest
    match e:
        case ast.Call(
            func=ast.Name(id="sum"),
            args=[
                ast.Name(id=i),
                ast.Constant(value=count),
                ast.BinOp(left=ast.Subscript() as a, op=ast.Mult(), right=ast.Subscript() as c),
            ],
        ):
            rows = [_row(x, i, tables) for x in (a, c)]
        case _:
            return None
    if any(row is None or row[0].shape[-1] != count or row[0].dtype != "fp32" for row in rows):
        return None
    (first, at), (second, other) = rows  # type: ignore[misc]
    if other[-1] == "q_idx":
        first, at, second, other = second, other, first, at
    if (at[-1], other[-1]) != ("q_idx", "kv_idx") or _lead(at) is None or _lead(other) is None:
        return None
    return Product(first, at, second, other, factor)


def _lead(at: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the sequence index and head index before a row's position, `0` where one is absent; None if they have
    another form."""
    if len(at) > 3:
        return None
    first, second = {3: at[:2], 2: (at[0], "0") if at[0] == "b" else ("0", at[0]), 1: ("0", "0")}[len(at)]
    of_head = second in ("h", "0") or second.startswith("h // ") and second[5:].isdigit()
    return (first, second) if first in ("b", "0") and of_head else None


def _row(e: ast.Subscript, column: str, tables: dict[str, Table]) -> tuple[Table, tuple[str, ...]] | None:
    """Return the table and the indices before the last one, `column`; None if the read has another form."""
    index = tuple(map(ast.unparse, e.slice.elts)) if isinstance(e.slice, ast.Tuple) else ()
    known = (
        isinstance(e.value, ast.Name)
        and e.value.id in tables
        and index[-1:] == (column,)
        and column not in index[:-1]
        and len(index) > 1
    )
    return (tables[e.value.id], index[:-1]) if known else None  # type: ignore[attr-defined]


def append_columns(
    query: torch.Tensor, key: torch.Tensor, products: tuple[Product, ...], scale: float, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the products' columns to q [B, Hq, Nq, D] and k [B, Hkv, Nk, D], for a call with this scale.
    Differentiable."""
    group = sizes.q_heads // sizes.kv_heads
    queries, keys = [query], [key]
    for p in products:
        pad = -p.width % 8
        a = _rows(p.queries.tensor, p.at_queries, sizes.batch, torch.arange(sizes.q_heads), sizes.n_q) * (
            p.factor / scale
        )
        c = _rows(p.keys.tensor, p.at_keys, sizes.batch, torch.arange(0, sizes.q_heads, group), sizes.n_kv)
        queries.append(torch.nn.functional.pad(a, (0, pad)).to(query.dtype))
        keys.append(torch.nn.functional.pad(c, (0, pad)).to(key.dtype))
    return torch.cat(queries, 3), torch.cat(keys, 3)


def fits(products: tuple[Product, ...], width: int, sizes: Sizes, most: int) -> bool:
    """True if rows of q and k with the products' columns have at most `most` columns, and all query heads of a K/V head
    read the same key columns."""
    group = sizes.q_heads // sizes.kv_heads
    heads = [i[5:] or "1" for p in products for i in p.at_keys if i.startswith("h")]
    return all(int(by) % group == 0 for by in heads) and width + sum(p.width + -p.width % 8 for p in products) <= most


def _rows(x: torch.Tensor, at: tuple[str, ...], batch: int, heads: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements that these indices read from a captured tensor, as [batch, heads, n, width]."""
    of_b, of_h = _lead(at) or ("0", "0")
    x = x if len(at) == 3 else x.unsqueeze(1) if at[0] == "b" else x.unsqueeze(0) if len(at) == 2 else x[None, None]
    x = x if of_b == "b" else x[:1]
    by = int(of_h[5:]) if of_h.startswith("h // ") else 1
    x = x[:, :1] if of_h == "0" else x.index_select(1, (heads // by).to(x.device))
    return x[:, :, :n].expand(batch, len(heads), n, x.shape[3])
