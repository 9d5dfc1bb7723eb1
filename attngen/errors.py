"""The errors a user can meet. Each is one sentence: where, what is wrong, what was expected, and a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AttngenError(Exception):
    """Base of the errors that attngen raises on purpose; the CLI prints them without a traceback."""


class SpecError(AttngenError):
    """A spec is not valid. The message names the file, the key or line, what was expected, and a hint."""


class IRError(AttngenError):
    """Textual IR does not parse. The message names the line and what was expected."""


class VerifyError(AttngenError):
    """IR breaks a rule of its phase. The error has the rule, the reason, and the IR's text."""

    def __init__(self, rule: str, reason: str, ir_text: str) -> None:
        self.rule, self.reason, self.ir_text = rule, reason, ir_text
        super().__init__(f"the IR breaks rule `{rule}`: {reason}")

    def __reduce__(self) -> tuple[type[VerifyError], tuple[str, str, str]]:
        return VerifyError, (self.rule, self.reason, self.ir_text)  # for pickling to another process


class BuildError(SpecError):
    """A valid spec cannot be built. The error has the path of the spec's key, and the reason as the rest of a sentence
    after the key's name.

    It does not name the file; the caller that read the spec from a file adds it, and the line of the key.
    """

    def __init__(self, path: tuple[str | int, ...], reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(path, reason)

    def __str__(self) -> str:
        return f"`{dotted(self.path)}` {self.reason}"


class FitError(BuildError):
    """No tile of a kernel fits on a device. The message names the spec's key, the device, the bytes needed and
    available, and what to change."""

    def __str__(self) -> str:
        return f"`{dotted(self.path)}` does not fit: {self.reason}"


def dotted(path: tuple[str | int, ...]) -> str:
    """Return a path in a document as one word: `mask.all_of[1].key_padding`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def shown(text: Any) -> str:
    """Return a user's text in a form for a sentence: short, on one line, without control characters."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:64])
    return clean if len(clean) <= 60 else clean[:57] + "..."


def last_line(error: Exception) -> str:
    """Return an error of another library in one line: its class, and the last line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is probably meant: one similar to the word, or with a similar part (`windw` and
    `sliding_window`); None if there is none."""
    options = sorted(known)
    whole = difflib.get_close_matches(word[:64].lower(), options, n=1, cutoff=0.6)
    parts = {part: option for option in reversed(options) for part in option.split("_")}
    part = difflib.get_close_matches(word[:64].lower(), parts, n=1, cutoff=0.75)
    return whole[0] if whole else parts[part[0]] if part else None


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt word: the nearest known one, or the list of all."""
    options = sorted(known)
    if not options:
        return "there are none"
    near = nearest(word, options)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(options)}"
