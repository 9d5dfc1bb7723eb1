"""Any text, data or name is read as a spec or gets a sentence."""

from __future__ import annotations

import re
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attngen.errors import SpecError
from attngen.spec import Spec, make_spec, parse_spec
from tests.spec_mistakes import BASE

# fmt: off
WORDS = [
    "name", "heads", "sharing", "mha", "mqa", "gqa", "head_dim", "qk", "v", "dtype", "bf16", "fp16", "fp32",
    "fp32_precision", "ieee", "tf32", "mask", "none", "causal", "align", "top_left", "sliding_window", "left", "right",
    "key_padding", "lengths", "all_of", "schedule", "block_q", "stages", "warps", "x", "../x", "<<", "=",
]
# fmt: on


SCALARS = st.one_of(
    st.sampled_from(WORDS),
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
NESTED = st.recursive(
    SCALARS, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from(WORDS), s, max_size=4), max_leaves=12
)
LIKELY = st.fixed_dictionaries(
    {"name": st.just("x"), "head_dim": st.sampled_from([64, 128, {"qk": 192, "v": 128}]) | NESTED},
    optional={"heads": NESTED, "dtype": NESTED, "mask": NESTED, "schedule": NESTED, "fp32_precision": SCALARS},
)


def only_a_spec_or_a_sentence(text: str) -> None:
    try:
        spec = parse_spec(text, "x.yaml")
    except SpecError as error:
        for line in str(error).splitlines():
            assert line.startswith("x.yaml") and line.isprintable()
            assert "Input should" not in line and "validat" not in line
    else:
        assert isinstance(spec, Spec)
        assert re.fullmatch("[a-z][a-z0-9_]*", spec.name)
        assert make_spec(spec.canonical()) == spec


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from([*WORDS, ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "64", "&", "*", "!", "|"])
    ).map("".join)
)
@example("a: !!int ''")
@example("a: 0x_")
@example("a: 1:99999999999999999999")
@example("\ufeff")
@example("a: 2024-99-99")
@example("? a")
def test_any_text_is_a_spec_or_a_sentence(text: str) -> None:
    only_a_spec_or_a_sentence(text)
    only_a_spec_or_a_sentence(BASE + text)


@settings(max_examples=150, deadline=None)
@given(LIKELY | NESTED)
def test_any_data_is_a_spec_or_a_sentence(data: Any) -> None:
    only_a_spec_or_a_sentence(yaml.safe_dump(data, allow_unicode=True))


@settings(max_examples=50, deadline=None)
@given(
    st.text(min_size=1, max_size=20)
    | st.sampled_from(["../x", "/abs", "a/b", "..", ".", "~", "con", "NUL", "a\\b", "import", "naïve", "a\n"])
)
def test_a_name_is_an_identifier_or_refused(name: str) -> None:
    try:
        spec = make_spec({"name": name, "head_dim": 64})
    except SpecError:
        return
    assert re.fullmatch("[a-z][a-z0-9_]{0,63}", spec.name)
