"""examples/tiny_lm.py trains with a generated module, with naive attention, and with both from one seed."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

SMALL = (
    "--device",
    "cpu",
    "--steps",
    "2",
    "--layers",
    "1",
    "--d-model",
    "32",
    "--heads",
    "4",
    "--seq",
    "24",
    "--batch",
    "1",
)


def train(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tiny_lm.py"), *SMALL, *args], capture_output=True, text=True
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["causal_mqa", "causal_gqa", "mla_dims"])
def test_a_module_trains_as_naive_attention_does(tmp_path: Path, name: str) -> None:
    path = tmp_path / "loss.csv"
    done = train("--attention", name, "--compare", "--csv", str(path))
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout and "over 2 steps" in done.stdout
    rows = list(csv.reader(path.open()))
    assert rows[0] == ["step", "naive", name] and [row[0] for row in rows[1:]] == ["0", "1"]
    for _, ours, naive in rows[1:]:
        assert abs(float(ours) - float(naive)) < 5e-3
        assert 4 < float(ours) < 7  # an untrained model has ln(256) = 5.5


@pytest.mark.share(8)
def test_naive_attention_trains_on_a_file(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("attention " * 100)
    done = train("--attention", "naive", "--data", str(data), "--steps", "30", "--every", "10", "--lr", "0.01")
    losses = [float(line.split("loss")[1].split()[0]) for line in done.stdout.splitlines()]
    assert len(losses) == 4 and losses[-1] < 3 < losses[0], done.stderr


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "args, error",
    [
        (
            ["--attention", "nosuch"],
            "--attention nosuch: expected `naive`, `sdpa`, a module's folder, or one in generated/: ",
        ),
        (
            ["--attention", "padding_mha"],
            "--attention padding_mha: it takes inputs (key_padding), which a language model on packed text",
        ),
        (
            ["--attention", "full_mha"],
            "--attention full_mha: its mask is none; a language model needs `causal` or a window",
        ),
        (["--attention", "causal_fp32", "--dtype", "bf16"], "--dtype bf16: causal_fp32 has fp32"),
        (["--attention", "naive", "--data", "/nosuch"], "--data /nosuch: cannot be read (No such file or directory)"),
    ],
)
def test_wrong_options_get_one_sentence(args: list[str], error: str) -> None:
    done = train(*args)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tiny_lm: {error}") and done.stderr.count("\n") == 1
