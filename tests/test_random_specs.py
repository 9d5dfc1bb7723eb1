"""A random cross product of the spec language: each drawn spec builds, through every pass with the verifier, or gets one sentence.

`python -m tests.test_random_specs --specs 5000 --seed 7` draws more than CI does.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from attngen.cli.common import lower
from attngen.emit.render import render
from attngen.errors import SpecError, VerifyError
from attngen.spec import load_spec
from tests.spec_strategies import Data, drawn, spec_data

CI_SEED, CI_SPECS = 2, 48


def as_yaml(data: Data) -> str:
    """A spec with a line for each key; JSON is YAML."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in data.items())


def outcome(data: Data, path: Path) -> str:
    """`built`, or the sentence that the spec gets; raised is all else, and a sentence that names no line or blames attngen."""
    path.write_text(as_yaml(data))
    try:
        files = render(lower(path, load_spec(path)))
    except SpecError as error:
        if isinstance(error.__cause__, VerifyError):
            raise
        for line in str(error).splitlines():
            assert re.match(rf"{re.escape(str(path))}, line [0-9]+: `[\w.\[\]]+` ", line) and line.isprintable(), line
        return str(error).splitlines()[0].partition(": ")[2]
    for name in ("__init__.py", "kernels.py"):
        compile(files[name], name, "exec")
    assert max(len(line) for name, text in files.items() if name.endswith(".py") for line in text.splitlines()) <= 140
    return "built"


def outcomes(number: int, count: int) -> Iterator[tuple[Data, str | Exception]]:
    """Drawn specs, each with its outcome or the exception that it should not have raised."""
    with TemporaryDirectory() as folder:
        for data in drawn(spec_data(), count, number):
            try:
                yield data, outcome(data, Path(folder) / "drawn.yaml")
            except Exception as error:
                yield data, error


def test_each_spec_builds_or_gets_one_sentence() -> None:
    found = list(outcomes(CI_SEED, CI_SPECS))
    assert [(data, error) for data, error in found if isinstance(error, Exception)] == []
    built = [data for data, what in found if what == "built"]
    assert len(built) >= CI_SPECS // 3
    for key, values in {
        "sharing": ("mha", "mqa", "gqa"),
        "order": ("kv_outer",),
        "dropout": ("true",),
        "deterministic": ("false",),
        "backward": ("false",),
    }.items():
        assert [v for v in values if not any(f'"{key}": {v}' in json.dumps(d).replace(f'"{v}"', v) for d in built)] == []


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IR that breaks a rule is no sentence, and neither is one that names no key."""
    data = {"name": "drawn", "head_dim": 16, "mask": "causal"}
    assert outcome(data, tmp_path / "x.yaml") == "built"

    def broken(*_: object) -> None:
        raise VerifyError("covers", "@fwd", "")

    monkeypatch.setattr("attngen.passes.pipeline.verify", broken)
    with pytest.raises(SpecError, match="breaks rule `covers`: @fwd; this is a mistake of attngen, not of the spec"):
        outcome(data, tmp_path / "x.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description="draws specs, and says which neither build nor get one sentence")
    parser.add_argument("--specs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    start, failures = time.time(), 0
    counts: Counter[str] = Counter()
    for i, (data, what) in enumerate(outcomes(given.seed, given.specs), 1):
        if i % 100 == 0:
            print(f"{i} of {given.specs}, {failures} failures; {time.time() - start:.0f} s", flush=True)
        if isinstance(what, Exception):
            failures += 1
            print(f"{type(what).__name__}: {str(what)[:600]}\n{as_yaml(data)}\n", flush=True)
            continue
        counts[re.sub(r"`.*?`|[0-9,]+", "..", what)[:90]] += 1
    for sentence, n in counts.most_common():
        print(f"{n:6} {sentence}")
    print(f"{given.specs} specs, {failures} failures; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
