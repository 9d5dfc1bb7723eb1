"""Reads one YAML document as plain data: mappings, lists, text, numbers and booleans, with the line of each.

YAML's other features (several documents, anchors, tags, repeated keys) are errors, because a spec that uses one means
something else.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from attngen.errors import SpecError, dotted, shown

Path: TypeAlias = "tuple[str | int, ...]"  # keys and list positions from the root
DEPTH = 20
_PLAIN = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
# Numbers are decimal. YAML 1.1, which the parser reads, also has others (1:04 and 0100 are 64), but not 5e1, which YAML
# 1.2 has.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_document(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """The document's data, and the line of every key and list item.

    Raises SpecError, with `source` and the line, if the text is not such a document.
    """
    lines: dict[Path, int] = {}
    try:
        _check_events(text, source)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return (_plain(root, (), lines, source) if root else None), lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(
            f"{source}, line {line}: not valid YAML: the character {error.character:#x} is not text"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"{error.problem or 'it does not parse'}; check quotes, brackets and indentation"
        if "'\\t'" in problem:
            problem = "a tab; expected spaces for indentation"
        raise SpecError(f"{source}, line {getattr(mark, 'line', 0) + 1}: not valid YAML: {problem}") from None


def _check_events(text: str, source: str) -> None:
    depth = documents = 0
    events: Any = yaml.parse(text, Loader=yaml.SafeLoader)
    for event in events:
        where = f"{source}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(f"{where}: anchors and aliases (& and *) are not part of a spec; expected the value itself")
        if getattr(event, "tag", None):
            raise SpecError(f"{where}: tags (!) are not part of a spec; expected a plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise SpecError(f"{where}: a second document starts here; expected one spec per file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise SpecError(f"{where}: nested more than {DEPTH} deep; expected a spec, which is flat")


def _plain(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, value in enumerate(node.value):
            place = (*path, i)
            lines[place] = value.start_mark.line + 1
            items.append(_plain(value, place, lines, source))
        return items
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            where = f"{source}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise SpecError(f"{where}: a list or a mapping is used as a key; expected a word, as in `mask: causal`")
            place = (*path, key.value)
            if place in lines:
                raise SpecError(
                    f"{where}: key `{shown(key.value)}` is given twice, first on line {lines[place]}; "
                    "expected each key once"
                )
            lines[place] = key.start_mark.line + 1
            found[key.value] = _plain(value, place, lines, source)
        return found
    return _scalar(node, path, source)


def _scalar(node: Any, path: Path, source: str) -> Any:
    """The value of a word; a word in quotes is text."""
    if node.style is None and _REAL.fullmatch(node.value) and not node.tag.endswith((":int", ":float")):
        return float(node.value)
    if node.tag not in _PLAIN:
        return node.value
    try:
        value = SafeConstructor().construct_object(node)
    except ValueError:  # looks like a number but is not: `0x_`, or thousands of digits
        return node.value
    if isinstance(value, int) and value.bit_length() > 64:
        return node.value
    decimal = any(pattern.fullmatch(node.value) for pattern in (_INTEGER, _REAL, _NO_NUMBER))
    if type(value) is int and not _INTEGER.fullmatch(node.value) or type(value) is float and not decimal:
        where = f"{source}, line {node.start_mark.line + 1}"
        found = f"`{key_name(path)}` is `{shown(node.value)}`, which YAML reads as {shown(value)}"
        raise SpecError(f"{where}: {found}; expected a decimal number, or quotes around text")
    return value


def key_name(path: Path) -> str:
    """The name of a key by its path, as a user writes it: `mask.all_of[1].key_padding`."""
    return dotted(tuple(key if isinstance(key, int) else shown(key) for key in path))
