"""No line of a generated module is too long, and breaking lines changes only where they end."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from attngen.codegen import lines
from attngen.codegen.render import render
from attngen.errors import SpecError
from attngen.ir import Module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.printing import layout
from attngen.targets.printing.breaking import statement
from tests.helpers import ROOT
from tests.lang_strategies import scores
from tests.spec_strategies import drawn
from tests.test_random_scores import modifier
from tests.transforms.random_masks import random_masks

LONGEST = 120
GRADIENT_INPUTS = [f"what_the_heads_have_learned_{i}" for i in range(5)]
HARD = (
    {"mask": {"any_of": [{"expr": "where(h % 3 == 1, kv_idx * 5 // 3 + window, kv_len - q_idx) * 7 // 4 <= "
                                  "where(b > 9, 3, q_len) - h",
                          "params": {"window": {"scalar": "int"}}},
                         {"dilated": {"step": 3, "reach": 50}}, {"chunked": {"size": 24}}]}},
    {"score": {"expr": (
            "(s + tanh(s * t) / (2 + s * s)) / (1 + (abs(s) + max(s, 0.25 * s * t, q_pos - kv_idx)) ** 2) * "
            "sigmoid(s - t) ** 3"
        ),
               "params": {"t": {"scalar": "float"}}}},
    # Sentences about tiles that do not fit; a long data-dependent mask and the code of its plan; gradient inputs with
    # the longest names allowed.
    {"head_dim": 128, "mask": "causal", "dtype": "fp32", "schedule": {"block_q": 128}},
    {"mask": {"all_of": [{"document": {"packed": True}},
                         {"expr": "given_by_the_caller[b, h, q_idx, kv_idx] and kv_idx <= q_pos + reach",
                          "params": {"given_by_the_caller": {"tensor": ["B", "H", "Nq", "Nk"], "dtype": "bool"},
                                     "reach": {"scalar": "int"}}}]}},
    {"score": {"expr": f"s * ({' + '.join(f'{name}[h]' for name in GRADIENT_INPUTS)})",
               "params": {name: {"tensor": ["H"], "grad": True} for name in GRADIENT_INPUTS}}},
)  # fmt: skip


def modules() -> Iterator[Module]:
    """Yield modules with known long lines, then random ones with masks that read tensors and with gradient inputs."""
    chance = random.Random(5)
    specs = [dict(parts) for parts in HARD] + [{"mask": mask} for mask in islice(random_masks(8), 3)]
    samples = [sample for sample in drawn(scores(), 40, 8) if re.search(r"\bs\b", sample.text)][-4:]
    specs += [{"score": modifier(chance, sample, 1), "backward": {"deterministic": False}} for sample in samples]
    for parts in specs:
        try:
            yield lower(make_spec({"name": "lines", "head_dim": 64, "heads": {"sharing": "gqa"}, **parts}))
        except SpecError:  # a random mask may hide every key
            continue


def program(source: str) -> str:
    """Return the syntax tree of a source, without the line breaks of its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = " ".join(node.value.value.split())
    return ast.dump(tree)


@pytest.mark.share(8)
def test_no_line_of_a_module_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken lines have the same syntax tree as the unbroken ones."""
    count, changed = 0, Counter[str]()
    for module in modules():
        files = {name: text for name, text in render(module).items() if name.endswith(".py")}
        assert (
            len(files) == 3 + bool(module.warp_specialized)
            and max(len(line) for text in files.values() for line in text.splitlines()) <= LONGEST
        )
        with monkeypatch.context() as patch:
            patch.setattr(layout, "MOST", 10**6)
            patch.setattr(lines, "LIMIT", 10**6)
            before = render(module)
        assert all(program(before[name]) == program(text) for name, text in files.items())
        count, changed = count + 1, changed + Counter(name for name, text in files.items() if before[name] != text)
    assert count >= 8 and changed["kernels.py"] >= 3 and changed["__init__.py"] >= 2


LONG = "the kernel needs more than there is; " * 4
LONG_TEXTS = [
    (f'MASK = "{LONG}"', 4),
    (f'TABLE = {{\n    ("any", 4): "{LONG}",\n}}', 6),
    (f'COUNT = OPERATORS.define("count", "{LONG}", _count, _fake_count)', 9),
    (f'"""{LONG}"""', 3),
    (f'def f():\n    """{LONG}\n\n    Args:\n        q: {LONG}\n    """', 8),
    (f"def f():\n    # {LONG}\n    return 0  # {LONG}", 6),
    (", ".join(f"a_long_name_{i}" for i in range(12)) + " = f(\n    x,\n)", 6),
    (f"{', '.join('xyz')} = " + ", ".join(f"a_long_name_{i}" for i in range(12)), 6),
    (f"f(\n    a=1, names=({', '.join(f'a_long_name_{i}' for i in range(12))}),\n)", 16),
]


@pytest.mark.parametrize(("text", "count"), LONG_TEXTS)
def test_long_text_from_a_spec_is_broken(text: str, count: int) -> None:
    """Sentences in tables, constants, calls, docstrings and comments are broken, and so are lists of names."""
    made = lines.within(text + "\n")
    assert len(made.splitlines()) == count and max(map(len, made.splitlines())) <= LONGEST
    assert program(made) == program(text) and lines.within(made) == made
    assert re.findall(r"^ *(?=# )", made, flags=re.MULTILINE) == ["    "] * made.count("# ")


@pytest.mark.parametrize("limit", [70, 100])
def test_lines_broken_at_a_narrow_limit_mean_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow limit breaks kinds of lines that are seldom too long, in modules of many kinds."""
    monkeypatch.setattr(lines, "LIMIT", limit)
    for module in ("packed_document_gqa", "causal_padding_dropout_mha", "relative_bias_mha"):
        for name in ("__init__.py", "kernels.py"):
            text = (ROOT / "generated" / module / name).read_text()
            made = lines.within(text)
            assert program(made) == program(text)
            before, after = (sum(len(line) > limit for line in source.splitlines()) for source in (text, made))
            assert after < before / 4


@pytest.mark.parametrize(
    "text",
    [
        "x = alpha * (beta + gamma) - tl.where(delta[:, None] < 3, -epsilon, tl.exp2(-(zeta + 1.5) * eta)) / theta",
        (
            "store(PTR + at, value, mask=(first < 3) & ~((second >= 4) | (third == 5)) & (fourth[None, :] != 6), "
            'sem="a, (b")'
        ),
        (
            "for tile in tl.range(tl.minimum(first * 128 // 64, second), tl.maximum(third - 1, fourth // 64 + "
            "fifth)):\n    pass"
        ),
        (
            "if (first_start + BLOCK > lengths) | (first_start + BLOCK > 1 + Nk + q_start - Nq) | (second < 3):\n"
            "    pass"
        ),
        "while first_start + BLOCK * (third - 3) > 1 + Nk + q_start - Nq:\n    pass",
        "x = a_name_that_cannot_be_broken_and_is_longer_than_any_line_may_be_here",
    ],
)
@pytest.mark.parametrize("most", [20, 40, 70])
def test_a_broken_statement_is_the_same_statement(text: str, most: int) -> None:
    line, _, rest = text.partition("\n")
    made = statement(line, most) + (f"\n{rest}" if rest else "")
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text))
    assert made == text or max(map(len, made.splitlines())) < len(line)
