"""Tables of the textual IR that its printer and its parser share."""

from __future__ import annotations

from attngen.ir.fields import EXPR, FACTS, Kind

HEADER = "// attngen textual IR. `attngen emit FILE --out DIR` renders the module from this file only."

IR_VERSION = 2  # of the text: 1 had other names of ops and fields


HEADER_KEYS = (
    "ir",
    "version",
    "spec",
    "phase",
    "backend",
    "heads",
    "head_dim",
    "dtype",
    "precision",
    "mask",
    "blocks",
    "dropout",
)


WARP_GROUP_WORDS = ("instances", "rows", "warps", "registers")


# Words of the header's lines `mask` and `score` -> fields of Meaning.
MASKS = {"where": "where", "by_key": "by_key", "known": "known"}
SCORES = {"expr": "score", "sink": "sink"}
MEANING: dict[str, Kind] = {**dict.fromkeys(("where", "by_key", "expr", "sink"), EXPR), "known": FACTS}
