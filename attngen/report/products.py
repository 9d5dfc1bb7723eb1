"""Names of the matrix products of a kernel, as in the FlashAttention papers, such as S = QKᵀ and dV += Pᵀ dO.

They follow from the tensors from which the operands of a matrix product are computed, not from the names of values: a
product of two loaded tiles gives scores or their gradients, and a product of scores and a loaded tile gives a result.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from attngen.ir import Kernel, Op, pipe, tile

MATMULS = (tile.Dot, pipe.Wgmma)
# (what the scores are, the kind of dimension over which they are multiplied) -> (result, product)
RESULTS = {
    ("P", "kv"): ("O", "P V"),
    ("P", "q"): ("dV", "Pᵀ dO"),
    ("dS", "kv"): ("dQ", "dS K"),
    ("dS", "q"): ("dK", "dSᵀ Q"),
    ("tP", "kv"): ("tO", "tP V"),
}


class Product(NamedTuple):
    """A matrix product: its result, its operands as text, and whether it is added to an earlier result."""

    result: str
    product: str
    adds: bool

    @property
    def name(self) -> str:
        return f"{self.result} {'+=' if self.adds else '='} {self.product}"

    @property
    def gives_scores(self) -> bool:
        return self.result not in {result for result, _ in RESULTS.values()}


class Products:
    """The matrix products of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._found: dict[str, frozenset[str]] = {}

    @cached_property
    def _filled(self) -> dict[str, list[str]]:
        """The values or tensors with which each pipeline is filled."""
        found: dict[str, list[str]] = {}
        for op in self.kernel.ops():
            if isinstance(op, (pipe.ProducerLoad, pipe.ProducerStore)):
                found.setdefault(op.pipeline, []).extend(ref for ref in op.operands() if ref != op.pipeline)
        return found

    @cached_property
    def _carried(self) -> dict[str, list[str]]:
        """The values that loops pass on, by the name of the field."""
        found: dict[str, list[str]] = {}
        for op in self.kernel.ops():
            for field, ref in (*getattr(op, "carry", ()), *(op.values if isinstance(op, tile.Yield) else ())):
                found.setdefault(field, []).append(ref)
        return found

    def _sources(self, op: Op) -> list[str]:
        """Return the values from which an op computes its results."""
        if isinstance(op, pipe.ConsumerWait):
            return self._filled.get(op.pipeline, [])
        if isinstance(op, tile.Arg) and op.role == "carry":
            return next((refs for name, refs in self._carried.items() if op.name.startswith(name)), [])
        return list(op.operands())

    def tensors(self, ref: str) -> frozenset[str]:
        """Return the names of the tensors from which a value is computed; and `*` if a matrix product is in between."""
        found: set[str] = set()
        seen: set[str] = set()
        todo = [ref]
        while todo:
            op = self.kernel.op(todo.pop())
            if op.name in seen:
                continue
            seen.add(op.name)
            if isinstance(op, MATMULS):
                found.add("*")
            if isinstance(op, tile.Arg) and op.role != "carry":
                found |= {op.name} if op.type.dims else set()
            else:
                todo += self._sources(op)
        return frozenset(found)

    def scores(self, ref: str) -> str:
        """Return what a value computed from scores is: P, its tangent tP, or dS."""
        tensors = self.tensors(ref)
        if any(name.startswith("dO") for name in tensors):
            return "dS"
        return "tP" if any(name.startswith("t") for name in tensors) else "P"

    def of(self, op: tile.Dot | pipe.Wgmma) -> Product:
        """Return what a matrix product computes."""
        a, b = (self.tensors(ref) for ref in (op.a, op.b))
        if "*" not in a | b:
            return self._of_tiles({_main(a), _main(b)}, bool(op.acc))
        scores, factor = (op.a, b) if "*" in a else (op.b, a)
        side = "kv" if op.over in _KV else "q"
        result, product = RESULTS[self.scores(scores), side]
        if _main(factor).startswith("t"):
            result, product = f"t{result}", product.replace("V", "tV")
        return Product(result, product, bool(op.acc))

    @staticmethod
    def _of_tiles(tiles: set[str], adds: bool) -> Product:
        if any(name.startswith("dO") for name in tiles):
            return Product("dP", "dO Vᵀ", adds)
        keys = next((name for name in sorted(tiles) if name.lstrip("t").startswith("K")), "K")
        queries = next((name for name in sorted(tiles) if name.lstrip("t").startswith("Q")), "Q")
        tangent = "t" * (queries.startswith("t") or keys.startswith("t"))
        part = "ᵣ" * queries.endswith("_ROPE")  # of the rotated columns of MLA
        first, second = (f"{name.partition('_')[0]}{part}" for name in (queries, keys))
        return Product(f"{tangent}S", f"{first}{' ' * bool(tangent)}{second}ᵀ", adds)


_KV = {"BLOCK_KV", "TILE_KV", "HALF_KV"}


def _main(tensors: frozenset[str]) -> str:
    """Return the tensor that a loaded tile is of; scales and tables of pages are others."""
    return min(tensors - {"*"}, key=lambda name: (name.lstrip("t")[:1] not in "QKVd", name), default="")
