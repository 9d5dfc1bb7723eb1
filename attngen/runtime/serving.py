"""Operators of calls with a KV cache, which torch.compile sees in place of their checks and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attngen.runtime.cache import without_backward
from attngen.runtime.operators import Operators, Results


class CacheOperators:
    """`attngen::NAME_served`, which reads the caches, and `attngen::NAME_stored`, which first stores new keys and
    values in them.

    Both run `with_kvcache`, and have its arguments: q; `caches`, of keys and values; `new` keys and values in the same
    order, which only the second operator has; other `tensors`; and `numbers`, declared for example as "float scale".
    """

    def __init__(
        self,
        operators: Operators,
        with_kvcache: Callable[..., Any],
        caches: Sequence[str],
        new: Sequence[str],
        tensors: Sequence[str],
        numbers: Sequence[str],
    ) -> None:
        self.with_kvcache, self.fake = with_kvcache, operators.fake_forward
        rest = [*(f"Tensor {name}" for name in tensors), *numbers]
        read = ["Tensor q", *(f"Tensor {name}" for name in caches), *rest]
        stored = [
            "Tensor q",
            *(f"Tensor({mark}!) {name}" for mark, name in zip("abc", caches)),
            *(f"Tensor? {name}" for name in new),
            *rest,
        ]
        # `served` and `stored` are the suffixes of the operators' names, which callers know.
        self.served = self._define(operators, "served", read)
        self.stored = self._define(operators, "stored", stored)

    def _define(self, operators: Operators, suffix: str, arguments: list[str]) -> Any:
        names = [argument.split()[-1] for argument in arguments]

        def run(*args: Any) -> Results:
            out, lse = self.with_kvcache(**dict(zip(names, args)), return_lse=True)
            return out, lse

        def fake(q: torch.Tensor, *args: Any) -> Results:
            return self.fake(q, q, q)

        return operators.define(suffix, f"({', '.join(arguments)}) -> (Tensor out, Tensor lse)", run, fake)

    def __call__(self, q: torch.Tensor, caches: Sequence[Any], new: Sequence[Any], *rest: Any) -> Any:
        """Return (out, lse), by the operator for these arguments. Raise NotImplementedError if a gradient is needed."""
        without_backward(q, *caches, *new, *rest)
        return self.served(q, *caches, *rest) if all(x is None for x in new) else self.stored(q, *caches, *new, *rest)
