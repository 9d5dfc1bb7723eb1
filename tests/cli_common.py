"""What the tests of the command line share: a project with a spec, calls of commands, wrong specs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from attngen.cli import main
from tests.helpers import ROOT

GOOD = (
    "name: good\nhead_dim: 64\ndtype: bf16\nmask: causal\nschedule: {block_q: 64, block_kv: 64, stages: 2, warps: 4}\n"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has one spec."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "good.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Cli:
    """Run commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *args: str, code: int = 0) -> str:
        """The standard output of a command that exits with `code`; if it is not 0, the error output."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(args)
        self.output, self.errors = self.capsys.readouterr()
        assert (caught.value.code or 0) == code, self.errors
        assert "Traceback" not in self.errors
        return self.errors if code else self.output


@pytest.fixture
def attngen(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call it with the arguments of a command."""
    return Cli(capsys)


def files(folder: Path) -> set[str]:
    """The files below a folder, relative to it."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


WRONG = {  # by name, a file and its error
    "typo": (
        "name: typo\nhead_dim: 64\nmask: windw\n",
        "line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?",
    ),
    "grad": (
        (
            "name: grad\nhead_dim: 64\nscore:\n- softcap: 5.0\n- expr: s + t[kv_idx]\n"
            "  params: {t: {tensor: [Nk], grad: true}}\n"
        ),
        "line 5: `score[1]` has `grad: true` for `t`, which is read at `kv_idx`; sums in a fixed order need b, h, hkv, "
        "q_idx, q_idx and kv_idx, numbers, a distance q_pos - kv_idx, or one of at most 16 entries; "
        "`backward: {deterministic: false}` adds anywhere, in no fixed order",
    ),
    "outside": (
        "name: outside\nhead_dim: 64\nscore: {expr: 's + t[7]', params: {t: {tensor: [4]}}}\n",
        "line 3: `score` reads `t` at `7`, which is outside of it; expected places inside",
    ),
    "large": (
        "name: large\nhead_dim: 64\nmask: {block_sparse: {block: 32}}\nschedule:\n  stages: 2\n  block_q: 64\n",
        "line 6: `schedule.block_q` is 64, and the mask lists blocks of 32 x 32 scores (`block_sparse` says which "
        "count), which tiles divide; expected 32 or less",
    ),
    "listed": (
        "name: listed\nhead_dim: 64\nmask: {expr: 'seen[b, kv_idx]', params: {seen: {tensor: [B, Nk], dtype: bool}}}\n"
        "schedule: {block_kv: 256}\n",
        "line 4: `schedule.block_kv` is 256, and the mask lists blocks of 128 x 128 scores (its data says which "
        "count), which tiles divide; expected 128 or less",
    ),
}


def in_terminal(*args: str, folder: Path, columns: int = 80, stdout: int | None = None) -> str:
    """What a command writes to a terminal of so many columns, without colours. stdout: a file for its standard output,
    so that only errors and progress go to the terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "attngen", *args]
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=its, stdout=stdout or its, stderr=its)
    os.close(its)
    read = b""
    while True:
        try:
            found = os.read(ours, 65536)
        except OSError:  # the command has closed it
            break
        if not found:
            break
        read += found
    os.close(ours)
    assert process.wait() == 0, read.decode()
    return re.sub("\x1b\\[[0-9;]*m", "", read.decode()).replace("\r\n", "\n")
