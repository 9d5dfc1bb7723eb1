"""The errors a user can meet. Each is one sentence: where, what is wrong, what was expected, and a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AttngenError(Exception):
    """Base of every error that attngen raises on purpose; the CLI prints it without a traceback."""


class SpecError(AttngenError):
    """A spec that is not valid: names the file, the key or line, what was expected, and a hint."""


class IRError(AttngenError):
    """Textual IR that does not parse: names the line and what was expected."""


class VerifyError(AttngenError):
    """IR that breaks a rule of its phase: carries the rule, the reason, and the IR's text."""

    def __init__(self, rule: str, reason: str, ir_text: str) -> None:
        self.rule, self.reason, self.ir_text = rule, reason, ir_text
        super().__init__(f"the IR breaks rule `{rule}`: {reason}")

    def __reduce__(self) -> tuple[type[VerifyError], tuple[str, str, str]]:
        return VerifyError, (self.rule, self.reason, self.ir_text)  # to another process


class BuildError(SpecError):
    """A spec that can be read and not built: the path of the spec's key, and the reason as a sentence that follows the
    key's name.

    It names no file; whoever read the spec from one adds it, and the line of the key.
    """

    def __init__(self, path: tuple[str | int, ...], reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(path, reason)

    def __str__(self) -> str:
        return f"`{dotted(self.path)}` {self.reason}"


class FitError(BuildError):
    """A kernel that no tile makes fit on a device: names the spec's key, the device, the bytes needed and had, and
    what to change."""

    def __str__(self) -> str:
        return f"`{dotted(self.path)}` does not fit: {self.reason}"


def dotted(path: tuple[str | int, ...]) -> str:
    """A path in a document as one word: `mask.all_of[1].key_padding`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def shown(text: Any) -> str:
    """Text of a user as it can be printed within a sentence: short, on one line, without control characters."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:64])
    return clean if len(clean) <= 60 else clean[:57] + "..."


def last_line(error: Exception) -> str:
    """An error of another library in one line: its kind, and the last line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is meant, if one is near: in whole, or in one of its parts (`windw` and `sliding_window`)."""
    options = sorted(known)
    whole = difflib.get_close_matches(word[:64].lower(), options, n=1, cutoff=0.6)
    parts = {part: option for option in reversed(options) for part in option.split("_")}
    part = difflib.get_close_matches(word[:64].lower(), parts, n=1, cutoff=0.75)
    return whole[0] if whole else parts[part[0]] if part else None


def suggest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or the list of all."""
    options = sorted(known)
    if not options:
        return "there are none"
    near = nearest(word, options)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(options)}"
