"""Error sentences for specs: pydantic's errors in words, with the expected values taken from a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from attngen.errors import nearest, shown, suggest
from attngen.spec import document


class Mistakes(ValueError):
    """Mistakes below a value: the path of each one from there, and the sentence that follows the key's name."""

    def __init__(self, *found: tuple[document.Path, str]) -> None:
        super().__init__(*found)
        self.found = found


_COUNTS = "sizes come from the tensors of a call; `heads: {sharing: gqa}` says how heads share keys"
# Keys that users may expect, with the spec's way to say the same, if there is one.
_ELSEWHERE = {
    **dict.fromkeys(
        ("num_heads", "num_kv_heads", "n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads"), _COUNTS
    ),
    **dict.fromkeys(("batch", "batch_size", "seq_len", "seqlen", "max_seq_len", "max_position_embeddings"), _COUNTS),
    **dict.fromkeys(("causal", "is_causal"), "write `mask: causal`"),
    **dict.fromkeys(
        ("window", "window_size", "sliding_window"), "write `mask: {sliding_window: {left: 1023, right: 0}}`"
    ),
    **dict.fromkeys(
        ("softcap", "alibi", "sink", "bias", "scores"), "score modifiers are a list: `score: [{softcap: 30.0}, alibi]`"
    ),
    **dict.fromkeys(
        ("dropout_p", "scale", "softmax_scale", "seed"),
        "it is an argument of the call; `dropout: true` gives calls a dropout_p",
    ),
    **dict.fromkeys(("block_q", "block_kv", "stages", "warps", "backend", "order"), "write it under `schedule`"),
    **dict.fromkeys(("page_size", "paged"), "write `cache: {paged: {page_size: 64}}`"),
}


def mistakes(error: ValidationError, schema: dict[str, Any], data: Any) -> Iterator[tuple[document.Path, str]]:
    """Yield pydantic's errors on `data` in the words of a spec: the path of each, and the sentence that follows its
    name."""
    for e in error.errors():
        path, kind = e["loc"], e["type"]
        cause = e.get("ctx", {}).get("error")
        if isinstance(cause, Mistakes):
            yield from (((*path, *below), text) for below, text in cause.found)
        elif isinstance(cause, ValueError):
            yield path, str(cause)
        elif kind == "missing":
            yield path, f"is missing; expected {_expected(schema, path)}"
        elif kind == "extra_forbidden":
            known = {key for node in _nodes(schema, path[:-1]) for key in node.get("properties", {})}
            word = str(path[-1])
            yield path, f"is no known key; {_ELSEWHERE.get(word) or suggest(word, known)}"
        else:
            path, value = _given(data, path)
            words = [str(w) for node in _nodes(schema, path) for w in node.get("enum", ())]
            near = nearest(value, words) if isinstance(value, str) else None
            yield (
                path,
                f"is {said(value)}; expected {_expected(schema, path)}" + (f"; did you mean `{near}`?" if near else ""),
            )


def _given(data: Any, path: document.Path) -> tuple[document.Path, Any]:
    """The part of a path that exists in the data (a shorthand has no parts), and the value there."""
    for n, key in enumerate(path):
        keys = data if isinstance(data, dict) else dict(enumerate(data)) if isinstance(data, list) else {}
        if key not in keys:
            return path[:n], data
        data = keys[key]
    return path, data


def _nodes(schema: dict[str, Any], path: document.Path) -> list[dict[str, Any]]:
    """The alternatives in a JSON schema at a path, with references resolved and without null."""

    def resolve(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if "anyOf" in node:
            return [found for option in node["anyOf"] for found in resolve(option)]
        return [] if node.get("type") == "null" else [node]

    nodes = resolve(schema)
    for key in path:
        below = (
            node["items"] if isinstance(key, int) else node["properties"][key] for node in nodes if _has(node, key)
        )
        nodes = [found for node in below for found in resolve(node)]
    return nodes


def _has(node: dict[str, Any], key: str | int) -> bool:
    return "items" in node if isinstance(key, int) else key in node.get("properties", {})


def _expected(schema: dict[str, Any], path: document.Path) -> str:
    return ", or ".join(said_by(node) for node in _nodes(schema, path))


def said_by(node: dict[str, Any]) -> str:
    """The value that a node of a JSON schema expects, in words."""
    if "enum" in node:
        words = [f"`{w}`" for w in node["enum"]]
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if "const" in node:
        return f"`{str(node['const']).lower()}`"
    match node.get("type"):
        case "integer":
            least, most = node.get("minimum"), node.get("maximum")
            size = "" if least is None else f" of {least} or more" if most is None else f" from {least} to {most}"
            return f"a whole number{size}" + (
                f" that is a multiple of {node['multipleOf']}" if "multipleOf" in node else ""
            )
        case "number":
            return f"a number from {_plain(node['minimum'])} to {_plain(node['maximum'])}"
        case "boolean":
            return "`true` or `false`"
        case "array":
            return "a list of these"
        case "object":
            parts = (
                f"{key}: {'|'.join(map(str, below.get('enum', ['...'])))}"
                for key, below in node.get("properties", {}).items()
            )
            return f"{{{', '.join(parts)}}}"
    return str(node.get("description", "text"))


def _plain(number: float) -> str:
    """A number without an exponent, and without a decimal point if it is whole: 0.001, 1000000."""
    return str(int(number)) if number == int(number) else str(number)


def said(value: Any) -> str:
    """A value of YAML in words."""
    match value:
        case None:
            return "empty"
        case bool():
            return f"the boolean `{str(value).lower()}`"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text `{shown(value)}`"
    return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
