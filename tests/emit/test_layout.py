"""Lines of generated kernels: none is too long, and breaking them changes nothing but where they end."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from itertools import islice

import pytest

from attngen.emit import layout
from attngen.emit.breaking import statement
from attngen.emit.render import render
from attngen.errors import SpecError
from attngen.ir.graph import Module
from attngen.passes.pipeline import lower
from attngen.spec import make_spec
from tests.lang_strategies import scores
from tests.passes.test_random_masks import random_masks
from tests.spec_strategies import drawn
from tests.test_random_scores import modifier

LONGEST = 140
HARD = (
    {"mask": {"any_of": [{"expr": "where(h % 3 == 1, kv_idx * 5 // 3 + window, kv_len - q_idx) * 7 // 4 <= where(b > 9, 3, q_len) - h",
                          "params": {"window": {"scalar": "int"}}}, {"dilated": {"step": 3, "reach": 50}}, {"chunked": {"size": 24}}]}},
    {"score": {"expr": "(s + tanh(s * t) / (2 + s * s)) / (1 + (abs(s) + max(s, 0.25 * s * t, q_pos - kv_idx)) ** 2) * sigmoid(s - t) ** 3",
               "params": {"t": {"scalar": "float"}}}},
)  # fmt: skip


def modules() -> Iterator[Module]:
    """Two that are known to be hard, and random ones: masks with reads, scores with learned tensors."""
    chance = random.Random(5)
    specs = [dict(parts) for parts in HARD] + [{"mask": mask} for mask in islice(random_masks(8), 3)]
    samples = [sample for sample in drawn(scores(), 40, 8) if re.search(r"\bs\b", sample.text)][-4:]
    specs += [{"score": modifier(chance, sample, 1), "backward": {"deterministic": False}} for sample in samples]
    for parts in specs:
        try:
            yield lower(make_spec({"name": "lines", "head_dim": 64, "heads": {"sharing": "gqa"}, **parts}))
        except SpecError:  # random expressions may come to nothing
            continue


def test_no_line_of_a_kernel_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is broken at operators says what it would say in longer lines."""
    count = broken = 0
    for module in modules():
        text = render(module)["kernels.py"]
        assert max(map(len, text.splitlines())) <= LONGEST
        with monkeypatch.context() as patch:
            patch.setattr(layout, "MOST", 10**6)
            before = render(module)["kernels.py"]
        assert ast.dump(ast.parse(before)) == ast.dump(ast.parse(text))
        count, broken = count + 1, broken + (before != text)
    assert count >= 5 and broken >= 2


@pytest.mark.parametrize(
    "text",
    [
        "x = alpha * (beta + gamma) - tl.where(delta[:, None] < 3, -epsilon, tl.exp2(-(zeta + 1.5) * eta)) / theta",
        'store(PTR + at, value, mask=(first < 3) & ~((second >= 4) | (third == 5)) & (fourth[None, :] != 6), sem="a, (b")',
        "for tile in tl.range(tl.minimum(first * 128 // 64, second), tl.maximum(third - 1, fourth // 64 + fifth)):\n    pass",
        "x = a_name_that_cannot_be_broken_and_is_longer_than_any_line_may_be_here",
    ],
)
@pytest.mark.parametrize("most", [20, 40, 70])
def test_a_broken_statement_is_the_same_statement(text: str, most: int) -> None:
    line, _, rest = text.partition("\n")
    made = statement(line, most) + (f"\n{rest}" if rest else "")
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text))
    assert made == text or max(map(len, made.splitlines())) < len(line)
