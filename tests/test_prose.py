"""Formulas in the prose of Markdown files stay as they are written: no `*` begins emphasis inside a word.

`B*N = 16k, H*D` outside of code becomes `B<em>N = 16k, H</em>D`, on GitHub and on the site. Formulas belong in code
spans, or have spaces around the `*`. The parser is the one that rich comes with; it reads Markdown as GitHub does.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest
from markdown_it import MarkdownIt

from tests.helpers import ROOT

# Without `text_join`, escaped characters are tokens of their own.
PARSER = MarkdownIt("commonmark").enable("table").disable("text_join")


def emphasis_in_words(text: str) -> Iterator[str]:
    """Yield the text around each `*` that touches a word: one that begins or ends emphasis inside a word, as GitHub
    reads it, or one that is left over, from which the site's parser may make emphasis."""
    for block in PARSER.parse(text):
        parts = [("text", ""), *((t.type, t.content) for t in block.children or ()), ("text", "")]
        for (_, before), (kind, content), (_, after) in zip(parts, parts[1:], parts[2:]):
            opens = kind in ("em_open", "strong_open") and re.search(r"\w$", before)
            closes = kind in ("em_close", "strong_close") and re.match(r"\w", after)
            left = kind == "text" and re.search(r"[^\s*]\*|\*[^\s*]", content)
            if opens or closes or left:
                yield f"{before}{content}*{after}"


def committed() -> list[str]:
    command = ["git", "ls-files", "*.md"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("page", committed())
def test_no_emphasis_begins_inside_a_word(page: str) -> None:
    assert list(emphasis_in_words((ROOT / page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text", ["B*N = 16k, H*D", "at N**2*d, and", "of 2**30", "| a*b |\n|---|\n| *x*y |", "4*(2) foo* bar"]
)
def test_emphasis_inside_a_word_is_found(text: str) -> None:
    assert list(emphasis_in_words(text))


@pytest.mark.parametrize(
    "text", ["`B*N`, H * D, 2 ** 30", r"2\*\*30", "*word*, (**words here**).", "* a list", "```\na*b*c\n```", "a_b_c"]
)
def test_other_asterisks_are_allowed(text: str) -> None:
    assert list(emphasis_in_words(text)) == []
