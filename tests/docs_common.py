"""What tests of the docs share: pages, their blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import yaml

from tests.helpers import ROOT

PAGES = [str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATHS = re.compile(r"(?:specs|examples|generated|attngen|tests|docs)/[\w/-]+\.\w+")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return [content for found, content in BLOCK.findall(text(page)) if found == language]


@dataclass(frozen=True)
class Command:
    """A command of a page: its text, and its words without assignments to variables and redirections."""

    text: str
    words: tuple[str, ...]

    def names(self, *programs: str) -> bool:
        return self.words[0] in programs

    @property
    def arguments(self) -> list[str] | None:
        """The arguments of a call of attngen."""
        if self.names("attngen"):
            return list(self.words[1:])
        return list(self.words[3:]) if self.words[:3] == ("python", "-m", "attngen") else None


@dataclass(frozen=True)
class Written:
    """A file that a page shows, which its commands read."""

    path: str
    text: str


def steps(page: str) -> list[Command | Written]:
    """The commands of a page, and the files that it shows: specs, and Python files that the sentence before names and
    that are not there. In their order."""
    body = text(page)
    found: list[Command | Written] = []
    for match in BLOCK.finditer(body):
        language, content = match.groups()
        if language == "sh":
            found += commands(content)
        elif language == "yaml" and isinstance(data := yaml.safe_load(content), dict) and "name" in data:
            found.append(Written(f"specs/{data['name']}.yaml", content))
        elif language == "python":
            before = body[: match.start()].rstrip().rpartition("\n\n")[2]
            found += [Written(path, content) for path in PATHS.findall(before) if not (ROOT / path).exists()]
    return found


def commands(block: str) -> list[Command]:
    """The commands of a block of shell text, of which one may have several lines."""
    found: list[Command] = []
    pending = ""
    for line in block.splitlines():
        pending += f"{line}\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
        except ValueError:  # a quote is open
            continue
        parts = re.split(r" && | ; ", pending) if '"' not in pending else [pending]
        found += [Command(part.strip(), plain(part)) for part in parts if words]
        pending = ""
    assert not pending.strip(), f"not a complete command: {pending}"
    return found


def plain(part: str) -> tuple[str, ...]:
    """The words of a command, without assignments before it, a pipe behind it, and redirections."""
    words = shlex.split(part.replace("\\\n", " "), comments=True)
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    end = next((at for at, word in enumerate(words) if word in ("|", ">", ">>", "<", "2>")), len(words))
    return tuple(words[:end])
