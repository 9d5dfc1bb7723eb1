"""Parameters that expressions of the language's tests declare."""

from __future__ import annotations

import re

from attngen.lang.params import Param
from tests.lang_table import DOC, INT, SEEN

PARAMS = {
    "x": Param(scalar="float"),
    "w": INT,
    "step": Param(scalar="int", min=1),
    "slope": Param(tensor=("H",)),
    "doc": DOC,
    "seen": SEEN,
    "zero": Param(value=0),
    "half": Param(value=0.5),
}


def declared(text: str) -> dict[str, Param]:
    return {name: param for name, param in PARAMS.items() if re.search(rf"\b{name}\b", text)}
