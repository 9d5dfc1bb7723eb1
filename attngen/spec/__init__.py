"""The spec that a user writes in YAML, as pydantic models, and its errors.

`load_spec` reads one file and raises SpecError with one sentence per mistake: file, line, key, what was expected, a
hint.
"""

from __future__ import annotations

from attngen.spec.model import Spec, json_schema
from attngen.spec.reader import MAX_BYTES, decode_spec, load_spec, make_spec, naming, parse_spec, place
from attngen.spec.sections import Schedule
from attngen.spec.starter import starter

__all__ = [
    "MAX_BYTES",
    "Schedule",
    "Spec",
    "decode_spec",
    "json_schema",
    "load_spec",
    "make_spec",
    "naming",
    "parse_spec",
    "place",
    "starter",
]
