"""The spec as a pydantic model, its canonical form and its JSON schema."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import (
    model_validator,
)

from attngen.ir.dtypes import ELEMENTS
from attngen.ir.names import OUTPUTS
from attngen.lang.limits import WIDEST_HEAD
from attngen.lang.part import unique
from attngen.masks import union_note
from attngen.spec import document
from attngen.spec.fields import SpecFields
from attngen.spec.forms import mask_schema, score_schema
from attngen.spec.rules import RULES
from attngen.spec.sections import Schedule
from attngen.tiles.ranges import is_too_complex

TOO_LONG = (
    "has more cases than are solved for the tiles that it leaves; the others are computed for each pair, "
    "which is right but may be slower; a shorter condition is solved in full"
)


class Spec(SpecFields):
    """An attention variant."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Spec:
        for rule in RULES:
            rule(self)
        return self

    def notes(self) -> tuple[tuple[document.Path, str], ...]:
        """Warnings about parts that the author may not have meant: the path of the key, and the sentence that follows
        its name."""
        found = [(path, note) for path, part in self.parts() for note in part.notes()]
        numbers = frozenset(i.name for i in self.mask.inputs() if not i.shape and i.dtype == "i32")
        found += [(("mask",), TOO_LONG)] if is_too_complex(self.mask.expression(), numbers) else []
        of_union = union_note(self.mask)
        return unique(iter(found + ([(("mask",), of_union)] if of_union else [])))

    def canonical(self) -> dict[str, Any]:
        """The spec as plain data with every default filled in.

        `score`, `backward`, `outputs`, the backend and the loop order occur only if they differ from their defaults.
        """
        defaults = [name for name in ("backward", "outputs") if getattr(self, name) == Spec.model_fields[name].default]
        plain = self.model_dump(mode="json", exclude={"mask", "score", *defaults})
        del plain["cache"], plain["kv"], plain["positions"]
        if self.cache is not None:
            plain["cache"] = self.cache.model_dump(mode="json", exclude_none=True) or "contiguous"
        plain |= {"positions": self.positions.model_dump(mode="json")} if self.positions else {}
        plain |= {"kv": self.kv.model_dump(mode="json")} if self.kv else {}
        for key in ("order", "backend", "split"):
            if plain["schedule"][key] == Schedule.model_fields[key].default:
                del plain["schedule"][key]
        plain |= {"score": [s.data() for s in self.score]} if self.score else {}
        plain |= {} if self.trains else {"backward": False}
        return {**plain, "mask": self.mask.data()}

    def hash(self) -> str:
        """A digest of the canonical form: equal specs have equal hashes."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    schema["properties"]["mask"] = {**mask_schema(), "default": "none"}
    schema["properties"]["score"] = score_schema()
    schema["properties"]["head_dim"] = {
        "description": "width of a head: one number, or one for q and k and one for v",
        "anyOf": [
            {"type": "integer", "minimum": 16, "maximum": WIDEST_HEAD, "multipleOf": 8},
            {"$ref": "#/$defs/HeadDim"},
        ],
    }
    schema["properties"]["backward"]["anyOf"] = [{"const": False}, {"$ref": "#/$defs/Backward"}]
    schema["properties"]["cache"] = {
        "description": "where `attention.with_kvcache` reads keys and values",
        "anyOf": [{"enum": ["contiguous", "paged"]}, {"$ref": "#/$defs/Cache"}],
    }
    types = {"enum": list(ELEMENTS)}
    schema["properties"]["dtype"] = {
        "description": "element types the module accepts",
        "default": ["bf16", "fp16"],
        "anyOf": [types, {"type": "array", "minItems": 1, "uniqueItems": True, "items": types}],
    }
    outputs = {"enum": list(OUTPUTS)}
    schema["properties"]["outputs"] = {
        "description": "further results of calls next to the output; `lse` is always among them",
        "default": ["lse"],
        "anyOf": [outputs, {"type": "array", "minItems": 1, "uniqueItems": True, "items": outputs}],
    }
    return schema
