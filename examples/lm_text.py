"""The text that train_lm.py trains on: its files, its split and its tokens."""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import itertools
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
from decoder import stop

SUFFIXES = {".txt", ".md", ".rst", ".py"}  # of a --data folder
# Folders of the standard library that are left out: tests, tables, installed packages.
SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
PIECE = re.compile(rb" ?\w+|\n *|\s|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids for training and for validation, int64 [n], and the description that the page prints."""

    train: torch.Tensor
    held: torch.Tensor
    about: dict[str, Any]


def documents(path: Path | None) -> list[bytes]:
    """The file, the text files below the folder, or the sources of the standard library, in a fixed order."""
    root = path or Path(os.__file__).parent
    try:
        if root.is_file():
            return [root.read_bytes()]
        root.stat()
        files = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if path is None:
            files = [p for p in files if p.suffix == ".py" and not SKIPPED.intersection(p.relative_to(root).parts)]
        return [p.read_bytes() for p in files] or stop(
            f"--data {path}: no file with one of {', '.join(sorted(SUFFIXES))} below it"
        )
    except OSError as error:
        return stop(f"--data {path}: cannot be read ({error.strerror})")


def read_text(path: Path | None, vocabulary: int) -> Text:
    """Split the text, take the vocabulary from the training part, and encode both parts."""
    files = documents(path)
    if len(files) < 10:
        whole = b"".join(files)
        train, held = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    else:
        train = b"".join(f for i, f in enumerate(files) if i % 10 != 9)
        held = b"".join(files[9::10])
    counts = collections.Counter(p for p in PIECE.findall(train) if len(p) > 1)
    frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - 256]
    known = {piece: (i,) for i, piece in enumerate(frequent, 256)}

    def encode(text: bytes) -> torch.Tensor:
        ids = array.array(
            "q", itertools.chain.from_iterable(known.get(piece) or piece for piece in PIECE.findall(text))
        )
        return torch.tensor(ids)

    about = {
        "name": path.resolve().name if path else f"the standard library of Python {platform.python_version()}",
        "files": len(files),
        "bytes": sum(map(len, files)),
        "sha256": hashlib.sha256(b"".join(files)).hexdigest()[:16],
    }
    text = Text(encode(train), encode(held), about)
    about |= {"train_tokens": len(text.train), "held_tokens": len(text.held)}
    return text


def windows(tokens: torch.Tensor, starts: torch.Tensor, seq: int) -> torch.Tensor:
    """Sequences of seq + 1 tokens, [len(starts), seq + 1]."""
    return tokens[starts[:, None] + torch.arange(seq + 1, device=tokens.device)]
