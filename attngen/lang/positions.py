"""A note on a common mistake with positions: `q_idx` and `kv_idx` both count from 0, even if there are fewer
queries."""

from __future__ import annotations

import ast

NOTE = (
    "{} `q_idx` with `kv_idx`, which both count from 0; with fewer queries than keys, the last query is aligned "
    "with the last key, and `q_pos` is the query's position among the keys: write `q_pos` if that is meant"
)


def position_note(tree: ast.Expression) -> str | None:
    """A sentence if the expression compares or subtracts `q_idx` and `kv_idx` without using a length there; None
    otherwise."""
    verb = _mixing(tree.body, False)
    return NOTE.format(verb) if verb else None


def _mixing(node: ast.AST, aligned: bool) -> str | None:
    """How a part mixes the two. `aligned`: an arithmetic expression that contains it uses a length."""
    arithmetic = isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)) and not isinstance(
        getattr(node, "op", None), ast.Not
    )
    aligned = aligned or (arithmetic and bool(_names(node) & {"q_len", "kv_len"}))
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        sides = [node.left, node.right]
    for one, other in zip(sides, sides[1:]):
        pair = [_names(one), _names(other)]
        mixed = any("q_idx" in x - y and "kv_idx" in y - x for x, y in (pair, pair[::-1]))
        if mixed and not aligned:
            return "compares" if isinstance(node, ast.Compare) else "subtracts"
    below = (_mixing(child, aligned and arithmetic) for child in ast.iter_child_nodes(node))
    return next((found for found in below if found), None)


def _names(node: ast.AST) -> set[str]:
    """The names in a part, except those in the indices of tensors."""
    if isinstance(node, ast.Subscript):
        return set()
    name = {node.id} if isinstance(node, ast.Name) else set()
    return name.union(*(_names(child) for child in ast.iter_child_nodes(node)))
