"""The sizes of a call, and the lengths of dimensions in it."""

from __future__ import annotations

import re
from typing import NamedTuple

from attngen.ir.names import BLOCKS


class Sizes(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    n_q: int
    n_kv: int

    def of(self, dim: str) -> int:
        """The length of a dimension by its name in the IR or as a number; a dimension of any length has as many
        elements as there are keys."""
        names = {"B": self.batch, "Hq": self.q_heads, "Hkv": self.kv_heads, "Nq": self.n_q, "Nk": self.n_kv}
        if blocks := re.fullmatch(BLOCKS, dim):
            return -(-names[blocks[1]] // int(blocks[2]))
        return names[dim] if dim in names else int(dim) if dim.isdigit() else max(1, self.n_kv)
